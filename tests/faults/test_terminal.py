"""Hostile models, texts, files and words do nothing to a terminal or to TensorBoard's page."""

import contextlib
import dataclasses
import fcntl
import html.parser
import os
import pty
import random
import re
import select
import struct
import subprocess
import sys
import termios
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ROOT, python
from states import state_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt.config import RunConfig
from gpt.model.gpt import GPT
from gpt.run import Run
from gpt.sampling.generate import generate
from gpt.text.printable import printable
from gpt.text.reading import read_corpus
from gpt.text.tokenizer import CharTokenizer
from gpt.training.checkpoint import save_checkpoint
from gpt.training.metrics import Metrics

# Two ways to set the clipboard, colours, a bell, erasing, bidi, zero width, tags, marks alone.
HOSTILE = (
    "\x07\x08\t\n\r\x1b\x7f\x85\x9b\x9d[]52;cA=m\\a\u0301\u061c\u180e\u200b\u200d\u200f\u2028\u2029"
    "\u202e\u2066\u3164\ufe0f\ufeff\ue000\U000e0041\U000e0100"
)
# As few words as can be: named apart from the product's own list.
DRIVING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ue000-\uf8ff\U000e0000-\U000e0fff]"
)
WORD = "a\x1b]52;c;eA==\x07\x9b31m\x08\r\u202eb\u200b\U000e0041"
SHOWN = "a\\x1b]52;c;eA==\\x07\\x9b31m\\x08\\x0d\\u202eb\\u200b\\U000e0041"
TINY = {"d_model": 12, "n_heads": 3, "n_layers": 1, "context_length": 9}


def save_model(folder: Path, characters: str) -> Path:
    """A run folder whose model has random weights."""
    vocabulary = "".join(sorted(characters))
    config = RunConfig().with_changes(TINY)
    model = GPT(config.model, len(vocabulary)).state_dict()
    best = {"step": 3, "loss": 0.5}
    state = state_of(config, model, 3, vocabulary=vocabulary, best=best)
    save_checkpoint(folder / "checkpoints", state, is_best=True)
    return folder


@dataclasses.dataclass
class Ended:
    """How a process ended, and what its two terminals received, line ends of terminals undone."""

    code: int
    out: str
    err: str


def on_terminals(*words: object, stdin: bytes = b"") -> Ended:
    """Run a command whose stdout and stderr are each a terminal of its own."""
    ends = [pty.openpty() for _ in range(2)]
    for _, slave in ends:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=subprocess.PIPE, stdout=ends[0][1], stderr=ends[1][1], start_new_session=True,
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "PYTHONUTF8": "1"},
    )  # fmt: skip
    try:
        for _, slave in ends:
            os.close(slave)
        process.stdin.write(stdin)
        process.stdin.close()
        seen: dict[int, bytes] = {master: b"" for master, _ in ends}
        open_ends = set(seen)
        while open_ends:
            ready, _, _ = select.select(list(open_ends), [], [], 120)
            assert ready, f"nothing more came after {seen!r}"
            for master in ready:
                data = b""
                with contextlib.suppress(OSError):  # Linux's way to say that the end is closed
                    data = os.read(master, 65536)
                seen[master] += data
                if not data:
                    open_ends.remove(master)
        code = process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
        for master, _ in ends:
            os.close(master)
    out, err = (data.decode("utf-8").replace("\r\n", "\n") for data in seen.values())
    return Ended(code, out, err)


def assert_harmless(text: str, but: str = "") -> None:
    found = set(DRIVING.findall(text)) - set(but)
    assert not found, f"{found!a} in {text!a}"


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("runs") / "hostile", HOSTILE)


# Samples


@pytest.mark.slow
def test_a_sample_of_control_characters_is_written_out_on_a_terminal(hostile_run, faults):
    prompt = HOSTILE.replace("\x00", "")
    words = ["sample.py", hostile_run, "--temperature", "1e3", "--n_chars", "400"]
    with faults("a model that writes control characters"):
        ended = on_terminals(*words, "--prompt", prompt, "--n_samples", "2", "--stop", WORD)
        assert ended.code == 0, ended.err
        assert_harmless(ended.out + ended.err)
        first = ended.out.removeprefix("--- sample 1 of 2 ---\n")
        assert first.startswith(printable(prompt))
        for char in set(HOSTILE) - set("\n\t"):
            assert printable(char) in first.removeprefix(printable(prompt))
        assert "cannot come, unknown: 'e' U+0065" in ended.err


@pytest.mark.slow
def test_a_sample_in_a_pipe_is_the_text_itself(hostile_run, faults):
    vocabulary = CharTokenizer.from_text(HOSTILE)
    model = GPT(RunConfig().with_changes(TINY).model, vocabulary.vocab_size)
    ids = generate(model, torch.tensor([[vocabulary.encode("a")[0]]]), 400, temperature=1e3)
    text = vocabulary.decode(np.array([int(one) for one in ids]))
    assert set(text) == set(HOSTILE)
    with faults("a model that writes control characters"):
        words = ["--temperature", "1e3", "--n_chars", "400", "--prompt", "a"]
        ended = python("sample.py", hostile_run, *words, encoding=None)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == ("a" + text).encode("utf-8")
        assert_harmless(ended.stderr.decode("utf-8"))


@pytest.mark.slow
def test_a_conversation_writes_out_what_it_is_given(hostile_run, faults):
    lines = [WORD, "a\x1b]52;c\x9b", "é\x1b\udcff", "\x08\u202e\u2066"]
    stdin = "\n".join(lines).encode("utf-8", "surrogateescape")
    with faults("control characters in a conversation"):
        words = ["--interactive", "--n_chars", "30", "--temperature", "1e3"]
        ended = on_terminals("sample.py", hostile_run, *words, stdin=stdin)
        assert ended.code == 0, ended.err
        assert_harmless(ended.out + ended.err)
        assert "a\\x1b]52;c\\x9b" in ended.out
        assert "\\x08\\u202e\\u2066" in ended.out
        assert ended.err.count("error: ") == 2
        assert "'\\udcff' U+DCFF" in ended.err


# Words, names and keys in messages


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Hostile files by what is hostile about them: names and contents."""
    contents = {
        "key": f'"{SHOWN[1:]}"'.replace("\\x1b", "\\u001b").replace("\\x", "\\u00") + " = 1",
        "value": 'norm = "a\\u001b]52;c;eA==\\u0007\\u202e"',
    }
    made = {}
    for name, content in contents.items():
        made[name] = str(tmp_path / f"{name}.toml")
        Path(made[name]).write_text(content, encoding="utf-8")
    made["name"] = str(tmp_path / f"{WORD}.toml")
    Path(made["name"]).write_text("steps = [", encoding="utf-8")
    made["text"] = str(tmp_path / f"{WORD}.txt")
    Path(made["text"]).write_bytes(b"\x1b\xff" * 99)
    made["run"] = str(tmp_path / WORD)
    (Path(made["run"]) / "checkpoints").mkdir(parents=True)
    (Path(made["run"]) / "checkpoints" / f"{WORD}.pt").write_bytes(b"\x1b]52;c\x07")
    made["checkpoint"] = str(Path(made["run"]) / "checkpoints" / f"{WORD}.pt")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train.py", WORD], 2),
        (["train.py", "{text}"], 2),
        (["train.py", "a.txt", WORD], 2),
        (["train.py", "--" + WORD, "1"], 2),
        (["train.py", "--steps", WORD], 2),
        (["train.py", "--norm", WORD], 2),
        (["train.py", "--encoding", WORD], 2),
        (["train.py", "--config", WORD], 2),
        (["train.py", "--config", WORD + ".toml"], 2),
        (["train.py", "--config", "{name}"], 2),
        (["train.py", "--config", "{key}"], 2),
        (["train.py", "--config", "{value}"], 2),
        (["train.py", "--resume", WORD], 2),
        (["train.py", "--out", "{text}"], 2),
        (["sample.py", WORD], 4),
        (["sample.py", "{run}"], 4),
        (["sample.py", "{checkpoint}"], 4),
        (["sample.py", "--unknown", WORD], 2),
        (["sample.py", "{run}", "--prompt_file", WORD], 2),
        (["compare.py", WORD], 2),
        (["compare.py", "run", "--arms", WORD], 2),
        (["compare.py", "run", "--arms", "{name}"], 2),
    ],
    ids=lambda value: " ".join(value).replace(WORD, "WORD") if isinstance(value, list) else None,
)  # fmt: skip
def test_an_error_names_what_is_hostile_and_stays_harmless(files, faults, words, code):
    with faults("control characters in what an error names"):
        ended = on_terminals(*(word.format(**files) for word in words))
        assert ended.code == code, ended.err
        assert ended.out == ""
        assert_harmless(ended.err)
        assert re.search(r"\\(x1b|u001b|u202e)", ended.err)
        assert "Traceback" not in ended.err


@pytest.mark.slow
def test_unknown_characters_of_a_prompt_are_named_and_written_out(tmp_path, faults):
    run = save_model(tmp_path / WORD, "\nab\x1b")
    with faults("control characters in a prompt"):
        ended = on_terminals("sample.py", run, "--prompt", WORD, "--unknown", "skip")
        assert ended.code == 0, ended.err
        assert ended.out.startswith("a\\x1b\nb")
        assert "left out of the prompt, unknown: ']' U+005D" in ended.err
        assert "'\\x9b' U+009B" in ended.err
        assert SHOWN in ended.err
        assert_harmless(ended.out + ended.err)


# Training


@pytest.mark.slow
def test_a_training_run_on_hostile_text_in_hostile_places_stays_harmless(tmp_path, faults):
    text, out = tmp_path / f"{WORD}.txt", tmp_path / f"out {WORD}"
    text.write_text(HOSTILE * 30, encoding="utf-8", newline="")
    config = tmp_path / f"{WORD}.toml"
    lines = [f"{name} = {value}" for name, value in TINY.items()]
    config.write_text("\n".join([*lines, "eval_every = 2", "threads = 1"]), encoding="utf-8")
    for words, steps in (
        ([text, "--config", config, "--out", out, "--keep_newlines"], 4),
        (["--resume", out, "--steps", "6"], 6),
    ):
        with faults("a training run full of control characters"):
            ended = on_terminals("train.py", *words, *([] if steps == 6 else ["--steps", "4"]))
            assert ended.code == 0, ended.err
            assert_harmless(ended.out)
            assert_harmless(ended.err, but="\r")  # the bar returns to the start of its line
            assert f"{steps}/{steps}" in ended.err
            assert f"{steps} of {steps} steps done in {tmp_path}/out {SHOWN}" in ended.out
            assert "\\x9d" in ended.out
            samples = (out / "samples.txt").read_bytes().decode("utf-8")
            assert "\x9d" in samples


@pytest.mark.slow
def test_a_comparison_with_hostile_arms_stays_harmless(tmp_path, faults):
    text = tmp_path / "a.txt"
    text.write_text(HOSTILE * 30, encoding="utf-8", newline="")
    arm = tmp_path / f"{WORD}.toml"
    arm.write_text("dropout = 0.5", encoding="utf-8")
    tiny = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    with faults("a comparison full of control characters"):
        ended = on_terminals(
            "compare.py", "run", text, "--arms", "pre", arm, "--seeds", "1", "--steps", "2", *tiny,
            "--out", tmp_path / f"out {WORD}",
        )  # fmt: skip
        assert ended.code == 0, ended.err
        assert_harmless(ended.out)
        assert_harmless(ended.err, but="\r")
        assert SHOWN in ended.out
        assert " against pre" in ended.out


# TensorBoard

PAYLOADS = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<img src='//evil/x.png'>",
    "<svg/onload=alert(1)>", "</code></pre><script>alert(1)</script>", "<iframe src=//evil>",
    "<a href='javascript:alert(1)'>x</a>", "<!-- ", "<![CDATA[x]]>", "&lt;b&gt; &amp; &#60;b>",
    "[x](javascript:alert(1))", "![x](//evil/x.png)", "![x][y]\n\n[y]: //evil/x.png", "<//evil>",
    "<http://evil>", "http://evil/x", "a | b\n--|--\n<b> | [x](y)", "# h\n\n## h", "h\n===",
    "* a\n* b\n\n    <b>", "1. a\n\n        ![x](y)", "> quote\n\n    > <b>", "```\n</pre>\n```",
    "`<b>`", "~~~html\n<b>\n~~~", "*a* **b** _c_ ~~d~~", "a  \nb", "***", "- - -", "[TOC]",
    "[^1]\n\n[^1]: note", "term\n: definition", "*[HTML]: x\n\nHTML", "\\<b\\>", "h\n--",
    "\t<b>\n \t![x](y)", "\n\n\n<b>\n\n\n", "<b>\r<i>", "\x02wzxhzdk:0\x03", "klzzwxh:0000",
    "x\u2028<b>", "x\x85<b>", "x\x0b<b>\x0c![x](y)", "\ufeff<b>", "{: onclick=alert(1)}",
    "$$x$$", "\\(x\\)", "[" * 300, "<b" + " a" * 300 + ">", ">" * 300, " ",
]  # fmt: skip
PIECES = [*PAYLOADS, *"\n\t<&`|! ", "\n\n", "    ", "- ", "> ", "[x]", "(y)"]


AROUND = ["table", "tbody", "tr", "td"]  # what TensorBoard puts around any text


class Page(html.parser.HTMLParser):
    """The tags, attributes and words of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = self.other = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        self.other += data

    handle_decl = handle_pi = unknown_decl = handle_comment


def pages(folder: Path, tag: str) -> list[str]:
    """What TensorBoard's own conversion makes of the texts that event files hold."""
    with warnings.catch_warnings():  # it imports a deprecated parser
        warnings.simplefilter("ignore")
        from tensorboard.plugins.text.text_plugin import text_array_to_html

        events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
        return [
            text_array_to_html(
                np.array(event.tensor_proto.string_val, dtype=object).reshape(
                    [dim.size for dim in event.tensor_proto.tensor_shape.dim]
                ),
                True,
            )
            for event in events.Tensors(f"{tag}/text_summary")
        ]


def assert_only_code(page: str, text: str) -> None:
    """All there is, is one block of code that shows the text."""
    read = Page(page)
    shown = printable(text)
    assert read.tags in ([*AROUND, "pre", "code"], AROUND), page
    assert read.attributes == []
    assert read.other == ""
    assert "".join(read.text.split()) == "".join(shown.split())
    # What a line holds stays on that line.
    assert [line.split() for line in read.text.strip().split("\n")] == [
        line.split() for line in shown.strip().split("\n")
    ]


def test_no_text_is_more_than_code_on_the_page_of_tensorboard(tmp_path, faults):
    chance = random.Random(5)
    texts = PAYLOADS + [
        "".join(chance.choices(PIECES, k=chance.randrange(1, 9))) for _ in range(250)
    ]
    with Metrics(tmp_path) as metrics:
        for step, text in enumerate(texts):
            metrics.sample(text, step)
    made = pages(tmp_path, "sample")
    assert len(made) == len(texts)
    for text, page in zip(texts, made, strict=True):
        with faults("markup in a sample"):
            assert_only_code(page, text)


def test_a_run_on_markup_shows_its_config_and_samples_as_code(tmp_path, faults):
    text = tmp_path / "<img src=x onerror=a>![x](y) `b`.txt"
    text.write_text("".join(PAYLOADS) * 3, encoding="utf-8", newline="")
    changes = TINY | {"steps": 2, "eval_every": 1, "sample_chars": 90, "learning_rate": 1.0}
    config = RunConfig().with_changes(changes | {"text": str(text), "device": "cpu", "threads": 1})
    corpus = read_corpus(str(text), context_length=9, keep_newlines=True)
    out = tmp_path / "run"
    out.mkdir()
    Run(config, corpus).go(out, quiet=True)
    written = (out / "samples.txt").read_bytes().decode("utf-8")
    samples = re.split(r"^--- step \d+ ---\n", written, flags=re.MULTILINE)[1:]
    for sample, page in zip(samples, pages(out, "sample"), strict=True):
        with faults("markup in a sample"):
            assert_only_code(page, sample.removesuffix("\n"))
    with faults("markup in a config"):
        (page,) = pages(out, "config")
        assert "&lt;img src=x onerror=a&gt;![x](y) `b`.txt" in page
        assert_only_code(page, (out / "config.toml").read_text(encoding="utf-8"))
