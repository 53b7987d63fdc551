"""Trainings whose reader, terminal or folder goes away: they go on, and what they save is whole."""

import contextlib
import os
import pty
import random
import shutil
import signal
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import CLOSED, TINY, Process, run, start, until
from states import assert_same_training

from gpt.training.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow

SETTINGS = (*TINY, "--steps", 100, "--eval_every", 20)
PLAIN = {
    "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii",
}  # fmt: skip


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        for descriptor in (reader, writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@contextlib.contextmanager
def _full() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _assert_finished(process: Process, out: Path, whole: Path) -> None:
    assert process.wait(120) == 0, process.err
    assert "Traceback" not in process.err
    assert "Error" not in process.err
    assert_same_training(out, whole)


@pytest.mark.parametrize(
    ("closed", "cold"),
    [({"stdout"}, False), ({"stderr"}, False), ({"stdout", "stderr"}, True),
     ({"stdin", "stdout", "stderr"}, False)],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else "",
)  # fmt: skip
def test_closed_streams_do_not_stop_a_run(source, whole, tmp_path, faults, closed, cold):
    out = tmp_path / "out"
    with faults("closed streams"):
        streams = dict.fromkeys(closed, CLOSED)
        process = start("train.py", source, *SETTINGS, "--out", out, cold=cold, **streams)
        _assert_finished(process, out, whole)
        assert process.err == ""
        if "stdout" not in closed:
            assert "100 of 100 steps done" in process.out


@pytest.mark.parametrize("cold", [False, True])
def test_full_streams_do_not_stop_a_run(source, whole, tmp_path, faults, cold):
    with _full() as full:
        both = {"stdout": full, "stderr": full}
        for streams in [both] if cold else [{"stdout": full}, {"stderr": full}, both]:
            out = tmp_path / "-".join(streams)
            with faults("streams that lead to a full disk"):
                process = start("train.py", source, *SETTINGS, "--out", out, cold=cold, **streams)
                _assert_finished(process, out, whole)
                assert process.err.count("\n") <= 1


def test_a_full_stream_without_a_buffer_is_told_of(source, whole, tmp_path, faults):
    with faults("streams that lead to a full disk"), _full() as full:
        process = start(
            "train.py", source, *SETTINGS, "--out", tmp_path / "out",
            cold=True, stdout=full, environment={"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        _assert_finished(process, tmp_path / "out", whole)
        assert process.err.count("standard output cannot be written any more") == 1


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("n_lines", [0, 12])
def test_a_reader_that_leaves_does_not_stop_a_run(source, whole, tmp_path, faults, n_lines, both):
    out = tmp_path / "out"
    with faults("a reader that leaves"), _pipe() as (reader, writer):
        streams = {"stdout": writer} | ({"stderr": writer} if both else {})
        process = start("train.py", source, *SETTINGS, "--out", out, **streams)
        os.close(writer)
        with open(reader, "rb", buffering=0, closefd=False) as lines:
            for _ in range(n_lines):
                assert lines.readline()
        os.close(reader)
        _assert_finished(process, out, whole)
        if not both:
            assert process.err.count("\n") <= 1


def test_a_plain_locale_and_a_reader_that_leaves_do_not_stop_a_run(source, whole, tmp_path, faults):
    plain, out = tmp_path / "plain.txt", tmp_path / "out"
    shutil.copy(source, plain)
    words = [plain, *SETTINGS, "--out", out]
    with faults("a reader that leaves"), _pipe() as (reader, writer):
        process = start("train.py", *words, cold=True, stdout=writer, environment=PLAIN)
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        _assert_finished(process, out, whole)
    assert "中" in load_checkpoint(out).vocabulary


class Terminal:
    """A terminal for all three streams of a training, which can be hung up."""

    def __init__(self, *words: object, ignored: tuple[int, ...], cold: bool = False) -> None:
        self.ours, theirs = pty.openpty()
        os.set_blocking(self.ours, False)
        termios.tcsetwinsize(theirs, (24, 80))  # without a width there is no bar
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = start("train.py", *words, ignored=ignored, cold=cold, **streams)
        os.close(theirs)
        self.shown = b""

    def read_until(self, text: bytes) -> None:
        def found() -> bool:
            with contextlib.suppress(BlockingIOError):
                self.shown += os.read(self.ours, 4096)
            return text in self.shown

        until(found, repr(text))

    def hang_up(self) -> None:
        os.close(self.ours)


@pytest.mark.parametrize("cold", [False, True])
def test_a_terminal_that_is_hung_up_does_not_stop_a_run_under_nohup(
    source, whole, tmp_path, faults, cold
):
    chance = random.Random(1)
    for n in range(1 if cold else 3):
        out = tmp_path / str(n)
        with faults("a terminal hung up under nohup"):
            terminal = Terminal(
                source, *SETTINGS, "--out", out, ignored=(signal.SIGHUP,), cold=cold
            )
            terminal.read_until(b"step/s")
            time.sleep(chance.uniform(0, 0.2))
            terminal.hang_up()
            _assert_finished(terminal.process, out, whole)


def test_a_terminal_that_is_hung_up_stops_a_run_at_the_border_of_a_step(
    source, whole, tmp_path, faults
):
    chance = random.Random(2)
    for n in range(3):
        out = tmp_path / str(n)
        with faults("a terminal hung up"):
            terminal = Terminal(source, *SETTINGS, "--out", out, ignored=())
            terminal.read_until(b"validation")
            time.sleep(chance.uniform(0, 0.1))
            terminal.hang_up()
            assert terminal.process.wait() in (0, 129)
            resumed = run("train.py", "--resume", out)
            assert resumed.returncode == 0, resumed.err
            assert_same_training(out, whole)


def _gone(out: Path) -> None:
    """Delete the folder, whatever is being written into it meanwhile."""
    out.rename(out.with_name("gone"))
    shutil.rmtree(out.with_name("gone"))


def test_a_folder_that_is_deleted_comes_back_with_the_next_save(source, tmp_path, faults):
    chance = random.Random(3)
    settings = (*TINY, "--steps", 300, "--eval_every", 10)
    for n in range(3):
        out = tmp_path / str(n)
        with faults("a run folder deleted"):
            process = start("train.py", source, *settings, "--out", out)
            process.wait_for("step     60")
            time.sleep(chance.uniform(0, 0.1))
            _gone(out)
            assert process.wait() == 0, process.err
            *warnings, last = process.err.splitlines()
            assert "curves are not complete" in last
            assert sum("curves are not written from here on" in line for line in warnings) == 1
            # A save that was under way may have lost its folder.
            others = [line for line in warnings if "the next save tries again" in line]
            assert len(warnings) == 1 + len(others) <= 2
            assert load_checkpoint(out, prefer="newest").step == 300
            assert (out / "config.toml").is_file()
            sampled = run("sample.py", out, "--n_chars", 7)
            assert (sampled.returncode, len(sampled.out)) == (0, 7), sampled.err
            resumed = run("train.py", "--resume", out, "--steps", 303)
            assert resumed.returncode == 0, resumed.err
