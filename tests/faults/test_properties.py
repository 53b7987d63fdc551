"""Properties that hold for any input: words, config files, texts, logits. Same examples each time.

Each property runs on a few examples here and on many in the slow tests.
"""

import contextlib
import io
import math
import sys
import tomllib
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.commandline import TrainCommand, parse, parse_train, run_config, run_name
from gpt.config import RunConfig, from_flat, to_flat
from gpt.config_files import read_toml, write_toml
from gpt.errors import NonFiniteError, UsageError
from gpt.exits import exit_code
from gpt.lab.commandline import RunCommand, parse_compare
from gpt.sampling.filters import distribution, draw
from gpt.sampling.generate import generate
from gpt.sampling.options import SampleCommand
from gpt.sampling.prompts import prepare
from gpt.text import decoding
from gpt.text.decoding import TextFile
from gpt.text.printable import printable
from gpt.text.reading import read_corpus
from gpt.text.tokenizer import CharTokenizer


def on_examples(few: int, many: int):
    """A test that runs on few examples, and on many in a slow one."""
    return pytest.mark.parametrize(
        "n_examples", [few, pytest.param(many, marks=pytest.mark.slow)], ids=["few", "many"]
    )


def check(n_examples: int, *strategies):
    """Call the decorated function with that many examples, always the same."""

    def run(body) -> None:
        settings(
            max_examples=n_examples,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(given(*strategies)(body))()

    return run


def texts(often: str, others, max_size: int):
    """Texts of any characters, every second of which is one of those that often matter."""
    # st.text would merge the two, and what is named here would be as rare as any other.
    return st.lists(st.sampled_from(often) | others, max_size=max_size).map("".join)


ANY_TEXT = texts("a\ud800\udcff\x1b\u202e", st.characters(exclude_categories=()), 9)
FILE_TEXT = texts("ab \r\n\ufeffé中😀\x1b\0", st.characters(exclude_categories=("Cs",)), 40)


# The command line


def flags_of(command) -> list[str]:
    names = []
    for name, value in vars(command).items():
        names += flags_of(value) if hasattr(value, "__dict__") else [f"--{name}"]
    return names


def train(words, preset):
    return parse_train(words, preset)


def compare(words, preset):
    return parse_compare("run", words)


def sample(words, preset):
    return parse(SampleCommand, words, SampleCommand())


COMMANDS = [(train, TrainCommand()), (compare, RunCommand()), (sample, SampleCommand())]
WORDS = st.sampled_from([
    "", "-", "--", "---", "=", "--=", "-h", "--help", "-x", "1", "-1", "0", "-0", "1e3", "1.5",
    "nan", "inf", "-inf", "1e400", "9" * 400, "9" * 5000, "0x10", "1_000", "٣", " 1", "1\x85",
    "None", "true", "maybe", "pre", "cpu", "auto", "a.toml", "a.txt", "..", "~", "[1]", "{", "'",
    "@/etc/passwd", "%s", "$(x)", "{0}", "\0", "\x1b]52;c;eA==\a", "\x9b2J", "\u202e", "\udcff",
    "\ud800", "a" * 300, "/" + "a" * 300, "--tyro-print-completion", "bash", "a\nb", "😀",
])  # fmt: skip
VALUES = st.one_of(WORDS, ANY_TEXT, st.integers().map(str), st.floats().map(str))


def lines_of(flags: list[str]):
    """Words in any order: flags with and without values, = forms, repetitions, anything."""
    flag = st.sampled_from(flags + [flag.replace("_", "-") for flag in flags])
    pair = st.tuples(flag, VALUES)
    part = st.one_of(
        pair, pair, pair.map("=".join).map(lambda word: (word,)), VALUES.map(lambda w: (w,))
    )
    return st.lists(part, max_size=4).map(lambda parts: [word for part in parts for word in part])


class Console:
    """What a command writes, as bytes through streams like those of a process."""

    def __enter__(self) -> "Console":
        self.files = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(contextlib.redirect_stdout(self.files[0]))
        self.stack.enter_context(contextlib.redirect_stderr(self.files[1]))
        return self

    def __exit__(self, *exception) -> None:
        self.stack.close()
        for file in self.files:
            file.flush()
        self.out, self.err = (file.buffer.getvalue().decode("utf-8") for file in self.files)


def assert_harmless(text: str) -> None:
    hidden = {char for char in text if printable(char) != char}
    assert not hidden, f"{hidden!a} in {text!a}"


@on_examples(20, 80)
@pytest.mark.parametrize(
    ("parser", "default"), COMMANDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_any_command_line_is_understood_or_refused_in_one_message(
    tmp_path, monkeypatch, faults, n_examples, parser, default
):
    monkeypatch.chdir(tmp_path)
    preset = tmp_path / "preset.toml"
    preset.write_text("steps = 7", encoding="utf-8")

    @check(n_examples, lines_of(flags_of(default)))
    def _(words):
        def main():
            command = parser(words, preset)
            if isinstance(command, RunConfig):
                run_config(command), run_name(command)

        with faults("an arbitrary command line"):
            with Console() as console:
                try:
                    code = exit_code(main)
                except SystemExit as leaving:
                    code = leaving.code
            assert code in (0, 2)
            assert "Traceback" not in console.err
            assert (code == 2) == (console.err != "")
            assert_harmless(console.out + console.err)


def test_help_shows_no_control_characters_of_a_config_file(tmp_path, faults):
    file = tmp_path / "a.toml"
    file.write_text('text = "a\\u001b]52;c;eA==\\u0007\\u202eb.txt"', encoding="utf-8")
    with faults("a config file with control characters"):
        with Console() as console, pytest.raises(SystemExit) as leaving:
            parse_compare("run", ["--config", str(file), "--help"])
        assert leaving.value.code == 0
        assert "--n_layers" in console.out
        assert "\\x1b]52" in console.out
        assert_harmless(console.out)


# Config files

NAMES = sorted(to_flat(RunConfig()))
LITERALS = st.sampled_from([
    "1", "-1", "+1", "-0", "1_0", "3.0", "1e3", "1e400", "nan", "-inf", "9" * 25, "9" * 5000,
    "true", "0x" + "f" * 4000, f"[0x{'f' * 4000}]", "0b1", "9223372036854775807", "[1]", "[[]]",
    "9223372036854775808", '"pre"', '"auto"', '"x"', '"\\u0000"', '"\\uD800"', "'\x1b'", '"""',
    f'"{"a" * 3000}"', "{a=1}", "[" * 3000, "{a=" * 900 + "1" + "}" * 900, "", "=",
    "1979-05-27T07:32:00Z",
])  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(["x", "\x1b", "a.b", "[s]", "[[s]]", '""', "[model]", "a" * 2000, "\ufeff"]),
    st.just(".".join("ab" * 2000)),
)
FILES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(str.encode),
    st.tuples(
        st.lists(st.tuples(KEYS, LITERALS).map(" = ".join), max_size=4), st.sampled_from("\n\r\0")
    ).map(lambda pair: pair[1].join(pair[0]).encode("utf-8", "replace")),
)


@on_examples(150, 800)
def test_any_file_gives_settings_or_a_usage_error_that_names_it(tmp_path, faults, n_examples):
    path = tmp_path / "some.toml"

    @check(n_examples, FILES)
    def _(content):
        with faults("an arbitrary config file"):
            path.write_bytes(content)
            said = ""
            try:
                from_flat(read_toml([path]), checked=False)
            except UsageError as error:
                said = str(error)
            assert "some.toml" in (said or path.name)


@pytest.mark.parametrize("value", [f"0x{'f' * 4000}", f"[0x{'f' * 4000}]"], ids=["plain", "listed"])
def test_a_number_too_long_to_be_written_out_is_a_usage_error(tmp_path, faults, value):
    for name in ("text", "norm", "compile", "dropout"):
        with faults("a number of thousands of digits"):
            path = tmp_path / "some.toml"
            path.write_text(f"{name} = {value}", encoding="utf-8")
            with pytest.raises(UsageError, match=rf"some\.toml'?: {name} .*(too long|64 bits)"):
                read_toml([path])


@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "[[{}]]", "steps = {{{} = 1}}", "'='.{} = 1"])
def test_a_key_of_thousands_of_parts_is_refused_before_it_takes_memory(tmp_path, faults, line):
    path = tmp_path / "some.toml"
    path.write_text("steps = 7\n" + line.format(".".join("a" * 5000)), encoding="utf-8")
    with faults("a key of thousands of parts"), pytest.raises(UsageError, match="50 dots"):
        read_toml([path])


def test_a_text_whose_name_is_full_of_dots_can_be_resumed(tmp_path):
    path = tmp_path / "run.toml"
    config = RunConfig().with_changes({"text": "/." * 200 + "/a\\b.txt"})
    path.write_text(write_toml(config), encoding="utf-8")
    assert from_flat(read_toml([path])) == config.resolved()


def plausible(value):
    """Values of the kind that a setting has by default."""
    kinds = {bool: st.booleans(), int: st.integers(0, 60), float: st.floats(0, 1.5), str: st.text()}
    return kinds.get(type(value), st.none() | st.integers(1, 60))


@on_examples(40, 300)
def test_any_valid_run_survives_its_config_file(tmp_path, n_examples):
    optional = {name: plausible(value) for name, value in to_flat(RunConfig()).items()}
    words = {"norm": ["layer", "rms"], "positions": ["rotary", "sinusoidal"], "device": ["cpu"]}
    words |= {"norm_position": ["pre", "post"], "activation": ["relu2", "swiglu"]}
    words |= {"init": ["xavier"], "schedule": ["wsd"], "optimizer": ["muon"], "dtype": ["bfloat16"]}
    optional |= {name: st.sampled_from(known) for name, known in words.items()}
    n_valid = 0

    @check(n_examples, st.fixed_dictionaries({}, optional=optional))
    def _(changes):
        nonlocal n_valid
        try:
            config = RunConfig().with_changes(changes)
        except UsageError:
            return
        n_valid += 1
        path = tmp_path / "run.toml"
        path.write_text(write_toml(config), encoding="utf-8", newline="\n")
        assert from_flat(read_toml([path])) == config.resolved()
        assert tomllib.loads(path.read_text("utf-8")) == to_flat(config.resolved())

    assert n_valid > n_examples // 10


# Texts


@on_examples(100, 600)
def test_any_text_without_half_characters_survives_encoding(n_examples):
    @check(n_examples, ANY_TEXT.filter(bool))
    def _(text):
        if any(unicodedata.category(char) == "Cs" for char in text):
            with pytest.raises(UsageError, match="surrogate"):
                CharTokenizer.from_text(text)
            return
        tokenizer = CharTokenizer.from_text(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(iter(tokenizer.encode(text).tolist())) == text


@on_examples(100, 600)
def test_any_prompt_is_encoded_or_refused_and_skipping_leaves_what_is_known(faults, n_examples):
    tokenizer = CharTokenizer.from_text("\nab\x1bé\u202e😀")

    @check(n_examples, ANY_TEXT | FILE_TEXT)
    def _(text):
        with faults("an arbitrary prompt"):
            with contextlib.suppress(UsageError):
                assert tokenizer.decode(prepare(text, tokenizer, skip_unknown=False).ids)
            skipped = prepare(text, tokenizer, skip_unknown=True)
            assert set(skipped.shown) <= set(tokenizer.vocabulary)
            assert skipped.ids.max() < tokenizer.vocab_size


ODD_BYTES = st.sampled_from([
    b"a", b"b\n", b"\r", b"\r\n", b"\xff", b"\xfe", b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\xd8\0",
    b"\0\xd8", b"\xf0\x9f\x98\x80", b"\xe4\xb8\xad", b"\xf0\x9f", b"\x80", b"+", b"\\u", b"~{",
    b"\x1b$B", b"xn--", b"hello world ",
])  # fmt: skip
BYTES = st.one_of(
    st.binary(max_size=40),
    FILE_TEXT.map(str.encode),
    st.lists(ODD_BYTES, max_size=20).map(b"".join),
)
ENCODINGS = [
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-be",
    "utf-32",
    "cp1252",
    "gb18030",
    "shift_jis",
]
ODD_ENCODINGS = [
    "iso2022_jp",
    "utf-7",
    "hz",
    "idna",
    "punycode",
    "rot13",
    "undefined",
    "\0",
    "x" * 300,
]


def read_in_pieces(content: bytes, n_bytes: int, read):
    """What ``read`` gives for the bytes on standard input in pieces; its message if it refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "CHUNK_BYTES", n_bytes)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        try:
            return read()
        except UsageError as error:
            # The remedy looks at the surroundings that happen to be in memory.
            return str(error).split(")")[0]


@on_examples(40, 400)
def test_any_bytes_in_pieces_are_what_they_are_at_once(faults, n_examples):
    @check(n_examples, BYTES, st.sampled_from(ENCODINGS), st.booleans())
    def _(content, encoding, keep_newlines):
        def read() -> str:
            return "".join(TextFile("-", encoding=encoding, keep_newlines=keep_newlines))

        whole = read_in_pieces(content, 1 << 22, read)
        for n_bytes in range(1, 8):
            with faults("a border within a character"):
                assert read_in_pieces(content, n_bytes, read) == whole


@on_examples(120, 1000)
def test_any_bytes_are_a_corpus_or_a_usage_error(faults, n_examples):
    @check(n_examples, BYTES, st.sampled_from(ENCODINGS + ODD_ENCODINGS), st.integers(1, 7))
    def _(content, encoding, n_bytes):
        def read():
            return read_corpus("-", context_length=2, val_fraction=0.3, encoding=encoding)

        with faults("arbitrary bytes as a text"):
            corpus = read_in_pieces(content, n_bytes, read)
            if isinstance(corpus, str):
                assert "standard input" in corpus or "--encoding" in corpus
                return
            assert corpus.source.bytes == len(content)
            assert min(len(corpus.train), len(corpus.val)) >= 3
            text = corpus.tokenizer.decode([*corpus.train, *corpus.val])
            assert set(text) == set(corpus.tokenizer.vocabulary)


@pytest.mark.parametrize("encoding", ODD_ENCODINGS)
def test_a_codec_that_is_not_for_files_is_a_usage_error(encoding, faults):
    with faults("a codec that is not for files"):
        said = read_in_pieces(b"z\xff\n\xfe" * 9, 5, lambda: list(TextFile("-", encoding=encoding)))
        assert isinstance(said, str)


# What a terminal shows

HIDDEN_BY_DEFAULT = [  # Default_Ignorable_Code_Point of Unicode, but the selectors of emoji
    *[0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810)],
    *[*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0x3164],
    *[*range(0xFE00, 0xFE0E), 0xFEFF, 0xFFA0, *range(0xFFF0, 0xFFF9), *range(0x1BCA0, 0x1BCA4)],
    *[*range(0x1D173, 0x1D17B), *range(0xE0000, 0xE1000)],
]


def test_every_character_that_is_not_drawn_is_written_out(faults):
    with faults("a character that is not drawn"):
        assert not [hex(code) for code in HIDDEN_BY_DEFAULT if chr(code) in printable(chr(code))]
    assert printable("❤️ ☺︎") == "❤️ ☺︎"


# Logits to ids

LARGEST = torch.finfo(torch.float32).max
LOGITS = st.one_of(
    st.floats(-20, 20),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, LARGEST, -LARGEST, 1e-45, -1e-45, 1.7e308, -1.7e308, 5e-324]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 5e-324, 1e-39, 0.8, 1.0, 1e30, 1e308])
        | st.floats(0, 1e308),
        "top_k": st.sampled_from([0, 1, 2, 1000, 2**63 - 1]),
        "top_p": st.sampled_from([1.0, 5e-324, 1e-9, 0.5, 1 - 2**-53])
        | st.floats(0, 1, exclude_min=True),
        "min_p": st.sampled_from([0.0, 5e-324, 0.1, 1.0]) | st.floats(0, 1),
        "repetition_penalty": st.sampled_from([1.0, 5e-324, 1e-300, 0.5, 1.1, 1e30, 1.7e308])
        | st.floats(0, 1.7e308, exclude_min=True),
    }
)
UNIFORM = st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True)


def rows_of(logit):
    rows = st.integers(1, 7).flatmap(
        lambda n: st.lists(st.lists(logit, min_size=n, max_size=n), min_size=1, max_size=3)
    )
    return rows.map(lambda values: torch.tensor(values, dtype=torch.float64))


@on_examples(150, 1000)
def test_any_finite_logits_and_settings_give_ids_of_possible_characters(faults, n_examples):
    possible = rows_of(LOGITS | st.just(-math.inf)).filter(
        lambda rows: rows.isfinite().any(1).all()
    )

    @check(n_examples, possible, SETTINGS, UNIFORM, st.data())
    def _(logits, chosen, uniform, data):
        n_rows, n_ids = logits.shape
        ids = st.lists(st.integers(0, n_ids - 1), min_size=2, max_size=2)
        recent = np.array(data.draw(st.lists(ids, min_size=n_rows, max_size=n_rows)))
        with faults("an extreme setting of sampling"):
            probabilities = distribution(logits.numpy(), recent, **chosen)
            assert np.isfinite(probabilities).all()
            assert (probabilities >= 0).all()
            assert np.abs(probabilities.sum(axis=-1) - 1).max() < 1e-12
            assert (probabilities[logits.numpy() == -math.inf] == 0).all()
            drawn = draw(probabilities, np.full(n_rows, uniform))
            assert drawn.shape == (n_rows,)
            assert probabilities[np.arange(n_rows), drawn].min() > 0


class Speaking:
    """Stands for a model whose logits are given."""

    class config:  # noqa: N801
        context_length = 4

    device, training = torch.device("cpu"), False

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def eval(self):
        return self

    def train(self, mode=True):
        return self

    def parameters(self):
        yield self.logits

    def new_cache(self, n_rows):
        return None

    def forward(self, tokens, cache):
        return self.logits[:, None].expand(-1, tokens.shape[1], -1)


@on_examples(60, 300)
def test_logits_that_are_not_finite_never_become_an_id(faults, n_examples):
    @check(
        n_examples,
        rows_of(LOGITS),
        st.sampled_from([math.nan, math.inf, -math.inf]),
        SETTINGS,
        st.integers(0, 20),
    )
    def _(logits, bad, chosen, at):
        logits.view(-1)[at % logits.numel()] = bad
        prompt = torch.zeros(len(logits), 1, dtype=torch.long)
        with faults("a logit that is not finite"), pytest.raises(NonFiniteError):
            next(generate(Speaking(logits), prompt, 3, **chosen))


@on_examples(40, 300)
def test_any_finite_logits_become_ids_of_the_vocabulary(faults, n_examples):
    @check(n_examples, rows_of(LOGITS), SETTINGS, st.integers(-(2**63), 2**63 - 1))
    def _(logits, chosen, seed):
        prompt = torch.zeros(len(logits), 1, dtype=torch.long)
        with faults("an extreme setting of sampling"):
            for ids in generate(Speaking(logits), prompt, 3, seed=seed, **chosen):
                assert ((ids >= 0) & (ids < logits.shape[1])).all()
