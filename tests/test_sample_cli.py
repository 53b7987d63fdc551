"""sample.py from its words to its bytes: prompts, runs, streams, terminals, exit codes."""

import contextlib
import importlib.util
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt.config import RunConfig, to_flat
from gpt.errors import CheckpointError, DiskError, UsageError
from gpt.exits import exit_code
from gpt.model.gpt import GPT
from gpt.runfolder import find_run
from gpt.sampling.options import OutputConfig
from gpt.sampling.prompts import prepare, read_prompt
from gpt.text.tokenizer import CharTokenizer
from gpt.training.checkpoint import save_checkpoint
from gpt.writing import Output

SCRIPT = Path(__file__).parents[1] / "sample.py"
ABC = CharTokenizer("\nabc")
CONTEXT = 8


def save_alphabet(folder: Path, vocabulary: str = "\nabcd", step: int = 3, best=True, **changes):
    """A run folder whose model is certain: after each character of the vocabulary, the next one.

    Its blocks add nothing, and its head scores the successor of the embedding it is given.
    """
    n = len(vocabulary)
    settings = {"d_model": n, "n_heads": 1, "n_layers": 1, "context_length": CONTEXT}
    config = RunConfig().with_changes(settings | {"tie_embeddings": False} | changes)
    model = GPT(config.model, n)
    with torch.no_grad():
        model.token_embedding.weight.copy_(9 * torch.eye(n))
        model.head.weight.copy_(9 * torch.eye(n).roll(1, 0))
        for weight in (
            model.positions.weight,
            model.blocks[0].attention.W_O.weight,
            model.blocks[0].feedforward.W_out.weight,
        ):
            weight.zero_()
    state = {
        "config": to_flat(config),
        "vocabulary": vocabulary,
        "model": model.state_dict(),
        "optimisers": [],
        "step": step,
        "best": {"step": step, "loss": 0.125} if best else None,
        "source": {"path": "a.txt", "bytes": 1, "sha256": "00" * 32},
        "environment": {"torch": torch.__version__, "threads": 1, "device": "cpu", "dtype": "x"},
    }
    save_checkpoint(folder / "checkpoints", state, is_best=best)
    return folder


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory) -> str:
    return str(save_alphabet(tmp_path_factory.mktemp("runs") / "alphabet"))


@pytest.fixture
def sample(monkeypatch, capfdbinary):
    """Calls sample.py in this process; returns exit code, stdout and stderr."""
    spec = importlib.util.spec_from_file_location("sample", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def call(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sample.py", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "ascii"))
        try:
            code = exit_code(script.main)
        except SystemExit as end:
            code = end.code
        out, err = capfdbinary.readouterr()
        return code, out.decode("utf-8"), err.decode("utf-8")

    return call


# Prompts


def test_the_prompt_comes_first_and_then_exactly_n_chars(sample, alphabet):
    code, out, err = sample(alphabet, "--prompt", "ab", "--n_chars", "7")
    assert (code, out) == (0, "abcd\nabcd")
    assert "best.pt: step 3, validation loss 0.1250" in err


@pytest.mark.parametrize("flags", [["--no_native"], ["--dtype", "bfloat16"], ["--top_k", "1"]])
def test_however_it_is_computed_the_text_is_the_same(sample, alphabet, flags):
    assert sample(alphabet, "--prompt", "ab", "--n_chars", "20", *flags)[:2] == (
        0, "abcd\nabcd\nabcd\nabcd\nab"
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["compiler", "cache"])
def test_without_a_compiler_or_a_cache_the_text_is_the_same(start, alphabet, tmp_path, missing):
    (tmp_path / "file").write_text("no folder")
    env = {"PATH": ""} if missing == "compiler" else {"XDG_CACHE_HOME": str(tmp_path / "file")}
    process = start(alphabet, "--prompt", "ab", "--n_chars", "7", env=env)
    out, err = process.communicate()
    assert (process.returncode, out) == (0, b"abcd\nabcd")
    assert err.decode().count("\n") == 1, err.decode()


def test_without_a_prompt_the_text_starts_after_a_line_end_that_is_not_shown(sample, alphabet):
    assert sample(alphabet, "--n_chars", "3")[1] == "abc"
    assert sample(alphabet, "--n_chars", "3", "--prompt", "")[1] == "abc"


def test_without_a_line_end_in_the_vocabulary_the_first_character_starts():
    assert prepare("", CharTokenizer("xyz"), skip_unknown=False).ids.tolist() == [0]
    assert prepare("", ABC, skip_unknown=False).ids.tolist() == [0]
    assert prepare("", CharTokenizer("\t\nx"), skip_unknown=False).ids.tolist() == [1]


def test_a_prompt_longer_than_the_context_is_shown_whole_with_a_notice(sample, alphabet):
    long = "aabbccdd" * 2 + "abca"
    code, out, err = sample(alphabet, "--prompt", long, "--n_chars", "2")
    assert (code, out) == (0, long + "bc")
    assert f"notice: the prompt has 20 characters; the model reads the last {CONTEXT}" in err
    assert "notice" not in sample(alphabet, "--prompt", long[:CONTEXT], "--n_chars", "2")[2]


def test_unknown_characters_are_all_named_with_near_ones(sample, alphabet):
    code, out, err = sample(alphabet, "--prompt", "a?B\u202e")
    assert (code, out) == (2, "")
    assert "'?' U+003F" in err
    assert "'B' U+0042 (near: 'b'" in err
    assert r"'\u202e' U+202E" in err
    assert "--unknown skip" in err


def test_unknown_characters_are_skipped_with_a_notice_when_asked(sample, alphabet):
    words = ("--prompt", "a?b", "--unknown", "skip", "--n_chars", "2")
    code, out, err = sample(alphabet, *words)
    assert (code, out) == (0, "abcd")
    assert "notice: left out of the prompt, unknown: '?' U+003F" in err


def test_a_prompt_of_unknown_characters_only_becomes_an_empty_one():
    prompt = prepare("??", ABC, skip_unknown=True)
    assert (prompt.shown, prompt.ids.tolist()) == ("", [0])


def test_line_ends_are_those_of_training():
    assert prepare("a\r\nb\rc", ABC, skip_unknown=False).shown == "a\nb\nc"
    raw = CharTokenizer("\n\rabc")
    assert prepare("a\r\nb", raw, skip_unknown=False).shown == "a\r\nb"


def test_a_prompt_file_is_taken_whole_without_its_byte_order_mark(sample, alphabet, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfab\n")
    code, out, _ = sample(alphabet, "--prompt_file", str(path), "--n_chars", "2")
    assert (code, out) == (0, "ab\nab")


def test_standard_input_is_a_prompt_file(sample, alphabet):
    code, out, _ = sample(alphabet, "--prompt_file", "-", "--n_chars", "2", stdin=b"bc")
    assert (code, out) == (0, "bcd\n")


def test_an_unreadable_prompt_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"there is no file .*no\.txt"):
        read_prompt(OutputConfig(prompt_file=str(tmp_path / "no.txt")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match=r"latin\.txt.*not UTF-8: byte 0xe9 at offset 3"):
        read_prompt(OutputConfig(prompt_file=str(tmp_path / "latin.txt")))


# Runs


def test_a_checkpoint_file_and_a_run_without_a_best_one_do(sample, tmp_path):
    folder = save_alphabet(tmp_path / "run", best=False)
    file = folder / "checkpoints" / "step-00000003.pt"
    for words in (folder, file):
        code, out, err = sample(str(words), "--n_chars", "2")
        assert (code, out) == (0, "ab")
        assert "step-00000003.pt: step 3\n" in err


def test_without_a_run_the_one_written_last_is_taken(sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("runs/a", 2000), ("runs/b/deep", 3000), ("runs/c", 1000)):
        folder = save_alphabet(Path(name))
        for path in folder.glob("checkpoints/*.pt"):
            os.utime(path, (seconds, seconds))
    code, out, err = sample("--n_chars", "2")
    assert (code, out) == (0, "ab")
    assert err.startswith("runs/b/deep/checkpoints/best.pt: step 3")


def test_without_any_run_the_answer_is_how_to_make_one(sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = sample()
    assert (code, out) == (4, "")
    assert "`python train.py`" in err


def test_a_wrong_run_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "apple" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"neither .* Did you mean '.*apple'\?"):
        find_run(str(tmp_path / "aple"), runs=tmp_path)


def test_a_folder_without_checkpoints_and_a_foreign_file_exit_with_4(sample, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign.pt").write_bytes(b"hello")
    for name in ("empty", "foreign.pt"):
        code, out, err = sample(str(tmp_path / name))
        assert (code, out) == (4, "")
        assert name in err


# Settings


@pytest.mark.parametrize(
    "words",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--top_k", "-3"],
        ["--top_p", "0"],
        ["--top_p", "1.5"],
        ["--min_p", "-0.1"],
        ["--repetition_penalty", "0"],
        ["--n_chars", "-1"],
        ["--n_samples", "0"],
        ["--threads", "-1"],
        ["--stop", ""],
        ["--prompt", "a", "--prompt_file", "b"],
        ["--interactive", "--prompt", "a"],
        ["--unknown", "ignore"],
        ["--temprature", "1"],
        ["runs/a", "runs/b"],
    ],
    ids=" ".join,
)
def test_wrong_words_exit_with_2(sample, words):
    code, out, err = sample(*words)
    assert (code, out) == (2, "")
    assert words[0].strip("-") in err or "runs/b" in err
    assert "Traceback" not in err


def test_the_edges_of_the_settings_are_usable(sample, alphabet):
    edges = ["--top_k", "1000", "--min_p", "1", "--top_p", "1e-9", "--temperature", "1e-39"]
    assert sample(alphabet, "--n_chars", "4", *edges)[:2] == (0, "abcd")
    assert sample(alphabet, "--n_chars", "0", "--prompt", "ab")[:2] == (0, "ab")


def test_the_seed_decides_the_text(sample, alphabet):
    hot = (alphabet, "--temperature", "1e3", "--n_chars", "40")
    assert sample(*hot)[1] == sample(*hot, "--seed", "0")[1] != sample(*hot, "--seed", "1")[1]


def test_help_names_every_group(sample):
    code, out, _ = sample("--help")
    assert code == 0
    for name in ("RUN", "--prompt", "--n_chars", "--temperature", "--stop", "--device"):
        assert name in out


# Text out


def test_a_stop_text_ends_the_text_at_once_and_is_not_shown(sample, alphabet):
    words = (alphabet, "--prompt", "a", "--temperature", "0", "--n_chars")
    endless = "100000000"
    assert sample(*words, endless, "--stop", "cd")[:2] == (0, "ab")
    assert sample(*words, endless, "--stop", "zz", "--stop", "\n")[:2] == (0, "abcd")


def test_the_beginning_of_a_stop_text_is_shown_when_the_rest_does_not_come(sample, alphabet):
    words = (alphabet, "--prompt", "a", "--n_chars", "2", "--stop", "cd", "--n_samples")
    assert sample(*words, "1")[1] == "abc"
    assert blocks_of(sample(*words, "2")[1]) == {"sample 1": "abc", "sample 2": "abc"}


def test_a_stop_text_that_cannot_come_is_said(sample, alphabet):
    code, _, err = sample(alphabet, "--stop", "aZ", "--n_chars", "3")
    assert code == 0
    assert "notice: a stop text cannot come, unknown: 'Z' U+005A" in err


def blocks_of(text: str) -> dict[str, str]:
    """The samples under their headings, without their last line ends."""
    parts = re.split(r"^--- (sample \d) of \d ---\n", text, flags=re.MULTILINE)
    assert parts[0] == ""
    assert all(block.endswith("\n") for block in parts[2::2])
    return dict(zip(parts[1::2], (block.rstrip("\n") for block in parts[2::2]), strict=True))


def test_several_samples_come_as_blocks_each_as_if_alone(sample, alphabet):
    hot = (alphabet, "--temperature", "1e3", "--n_chars", "30", "--prompt", "b")
    three = blocks_of(sample(*hot, "--n_samples", "3")[1])
    assert list(three) == ["sample 1", "sample 2", "sample 3"]
    assert len(set(three.values())) == 3
    assert all(block.startswith("b") for block in three.values())
    two = blocks_of(sample(*hot, "--n_samples", "2")[1])
    assert two == {name: three[name] for name in two}
    assert three["sample 1"] == sample(*hot)[1].rstrip("\n")


def test_interactive_continues_each_line_and_survives_unknown_characters(sample, alphabet):
    words = (alphabet, "--interactive", "--n_chars", "2")
    code, out, err = sample(*words, stdin=b"ab\nx\xc3\xa9\nx\xff\n\nbc")
    assert (code, out) == (0, "abcd\nab\nbcd\n")
    assert err.count("error: ") == 2
    assert "U+00E9" in err
    assert "U+DCFF" in err  # a byte that is not UTF-8


@pytest.mark.slow
def test_interactive_without_a_standard_input_to_read_is_one_message(start, alphabet):
    with open(os.devnull, "wb") as unreadable:  # what nohup leaves on a terminal
        process = start(alphabet, "--interactive", stdin=unreadable)
        out, err = process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert "cannot read standard input" in err.decode()
    assert "Traceback" not in err.decode()


def test_interactive_turns_differ_and_the_first_equals_the_plain_text(sample, alphabet):
    hot = (alphabet, "--temperature", "1e3", "--n_chars", "30", "--stop", "\n", "--seed", "5")
    code, out, _ = sample(*hot, "--interactive", stdin=b"a\na\na\na\n")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 4)
    assert len(set(lines)) > 1
    assert lines[0] == sample(*hot, "--prompt", "a")[1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_control_characters_and_gets_a_last_line_end():
    hostile = "a\x1b]52;c\x07\r\x9b\u202e\u200b\n\tb"
    for raw, expected in ((False, "a\\x1b]52;c\\x07\\r\\x9b\\u202e\\u200b\n\tb\n"), (True, None)):
        terminal = Terminal()
        output = Output(terminal, raw=raw)
        output.write(hostile)
        output.end_line()
        output.end_line()
        expected = expected.replace("\\r", "\\x0d") if expected else hostile + "\n"
        assert terminal.getvalue() == expected


def test_a_stream_that_is_no_terminal_gets_the_text_as_it_is():
    stream = io.StringIO()
    Output(stream).write("a\x1b\u202eb")
    assert stream.getvalue() == "a\x1b\u202eb"


def test_each_piece_arrives_at_once():
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        Output(stream).write("a")
        assert select.select([reader], [], [], 0)[0]
        assert os.read(reader, 9) == b"a"
    os.close(reader)


def test_a_full_disk_is_one_message():
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 - closing it fails
    with pytest.raises(DiskError, match="No space left"):
        Output(full).write("a")
    with contextlib.suppress(OSError):
        full.close()


# Real processes


@pytest.fixture
def start():
    """Starts sample.py as a process of its own; whatever still runs after the test is ended."""
    with contextlib.ExitStack() as stack:

        def call(*words: str, env: dict[str, str] | None = None, **streams) -> subprocess.Popen:
            ends = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                **{"stdin": subprocess.DEVNULL, **ends, **streams},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield call


@pytest.mark.parametrize(
    "words", [["--help"], ["--temprature", "1"], ["--top_p", "0"], ["no/such/run"]], ids=" ".join
)
def test_wrong_words_are_answered_before_torch_is_imported(words):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['sample.py', *{words!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit:\n"
        "    pass\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("env", [{"PYTHONUTF8": "0"}, {"PYTHONUTF8": "1"}], ids=str)
def test_any_locale_reads_and_writes_utf8(start, tmp_path, env):
    folder = save_alphabet(tmp_path / "run", "\n\u00e9\u4e2d\U0001f600")
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}
    words = (str(folder), "--prompt", "\u00e9", "--n_chars", "9", "--stop", "\n\u00e9\u4e2d")
    out, err = start(*words, env=env | locale).communicate()
    assert out.decode("utf-8") == "\u00e9\u4e2d\U0001f600", err.decode()


@pytest.mark.slow
def test_text_streams_and_a_closed_pipe_ends_it_quietly(start, alphabet):
    process = start(alphabet, "--n_chars", "100000000")
    assert process.stdout.read(6) == b"abcd\na"  # the last character is hours away
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate()
    assert process.returncode == 141
    assert err.decode().count("\n") == 1, err.decode()


@pytest.mark.slow
def test_an_interrupt_while_sampling_exits_with_130_quietly(start, alphabet):
    process = start(alphabet, "--n_chars", "100000000")
    process.stdout.read(6)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err.decode().count("\n") == 1, err.decode()


@pytest.mark.slow
def test_a_closed_standard_output_is_no_crash(alphabet):
    shell = f"exec '{sys.executable}' '{SCRIPT}' '{alphabet}' --n_chars 3 >&-"
    done = subprocess.run(["sh", "-c", shell], capture_output=True)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_full_disk_exits_with_6(start, alphabet):
    with open("/dev/full", "wb") as full:
        process = start(alphabet, "--n_chars", "3", stdout=full)
        _, err = process.communicate()
    assert process.returncode == 6
    assert "No space left" in err.decode()
    assert "Exception ignored" not in err.decode()


@pytest.mark.slow
def test_notices_that_cannot_be_told_do_not_cost_the_text(start, alphabet):
    for words, code, length in (([alphabet], 0, 3), (["nowhere"], 4, 0)):
        with open("/dev/full", "wb") as full:
            process = start(*words, "--n_chars", "3", stderr=full)
            out, _ = process.communicate()
        assert (process.returncode, len(out)) == (code, length)


class Screen:
    """A terminal with sample.py on it, and what the terminal received."""

    def __init__(self, start, *words: str) -> None:
        self.master, slave = pty.openpty()
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = start(*words, env={"TERM": "dumb"}, start_new_session=True, **ends)
        os.close(slave)
        self.seen = b""

    def wait_for(self, text: bytes) -> None:
        while text not in self.seen and self.read():
            pass
        assert text in self.seen, self.seen

    def read(self) -> bool:
        ready, _, _ = select.select([self.master], [], [], 120)
        assert ready, f"nothing more came after {self.seen!r}"
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            return False
        self.seen += data
        return bool(data)

    def finish(self) -> int:
        while self.read():
            pass
        os.close(self.master)
        return self.process.wait()


@pytest.mark.slow
def test_no_text_drives_a_terminal(start, tmp_path):
    hostile = "\x07\n\r\x1b52;]\x7f\x9b\u200b\u202e"
    folder = save_alphabet(tmp_path / "run", "".join(sorted(hostile)))
    screen = Screen(start, str(folder), "--prompt", "\x1b", "--n_chars", "30")
    assert screen.finish() == 0
    text = screen.seen.decode("utf-8").replace("\r\n", "\n")
    assert "\\x1b" in text
    assert "\\u202e" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e]", text)
    assert re.search(r"\n30 characters in .* a second\n$", text)


@pytest.mark.slow
def test_raw_sends_control_characters_to_a_terminal(start, tmp_path):
    folder = save_alphabet(tmp_path / "run", "\x07\x1b")
    screen = Screen(start, str(folder), "--raw", "--n_chars", "4")
    assert screen.finish() == 0
    assert b"\x1b\x07\x1b\x07\r\n" in screen.seen


@pytest.mark.slow
def test_a_conversation_on_a_terminal(start, alphabet):
    screen = Screen(start, alphabet, "--interactive", "--n_chars", "100000000")
    screen.wait_for(b"> ")
    os.write(screen.master, b"?\n")
    screen.wait_for(b"U+003F")
    os.write(screen.master, b"ab\n")
    screen.wait_for(b"abcd\r\nabcd")
    os.kill(screen.process.pid, signal.SIGINT)  # Ctrl-C stops this sample, not the conversation
    screen.seen = b""
    screen.wait_for(b"> ")
    os.write(screen.master, b"\x04")
    assert screen.finish() == 0
    assert b"Traceback" not in screen.seen
