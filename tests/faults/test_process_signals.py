"""Signals to trainings and to sample.py, at moments that are chosen and at moments that are not."""

import itertools
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from processes import TINY, Process, run, start, until
from states import assert_same_training

from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics

pytestmark = pytest.mark.slow

INT, TERM, HUP, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
KILL = signal.SIGKILL
STOPS = (INT, TERM, HUP)
SETTINGS = (*TINY, "--steps", 240, "--eval_every", 20)
EARLY = ("reading the text", "building the model")


def _words(source: Path, folder: Path) -> list[object]:
    """How to go on with the run, or to begin it."""
    if any(folder.glob("checkpoints/*.pt")):
        return ["--resume", folder]
    shutil.rmtree(folder, ignore_errors=True)  # it ended before it had a first checkpoint
    return [source, *SETTINGS, "--out", folder]


def _newest(folder: Path) -> int:
    return load_checkpoint(folder, prefer="newest").step


def _assert_saved_at_the_border(process: Process, folder: Path, number: int) -> None:
    assert process.returncode == 128 + number, process.err
    assert process.err == ""
    told = re.search(r"stopping after step (\d+); saving", process.out)
    assert told, process.out
    assert _newest(folder) == int(told[1])
    assert f"{told[1]} of 240 steps done" in process.out
    assert "go on:" in process.out


def _assert_ends_like(whole: Path, folder: Path) -> None:
    ended = run("train.py", "--resume", folder)
    assert ended.returncode == 0, ended.err
    assert_same_training(folder, whole)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_at_a_chosen_moment_saves_at_the_border_of_its_step(
    source, whole, tmp_path, faults, number
):
    out = tmp_path / "out"
    moments = [
        ("opening the curves", 1), ("describing the run", 1), ("an evaluation", 1),
        ("a step", 7), ("a save", 2),
        ("a sample", 3), ("an evaluation", 1), ("a rename", 4), ("a step", 1),
    ]  # fmt: skip
    for moment, n in moments:
        words = _words(source, out)
        before = _newest(out) if out.exists() else 0
        with faults(f"{number.name} in {moment}".lower()):
            process = run("train.py", *words, at=[(moment, n, number)])
            if process.returncode == -number or "stopping" not in process.out:
                # Before the run listens, a signal has its usual effect, and nothing is lost.
                assert moment in ("opening the curves", "a rename")
                assert process.returncode in (-number, 128 + number), process.err
                assert "Traceback" not in process.err
                continue
            _assert_saved_at_the_border(process, out, number)
            if moment == "a step":
                assert _newest(out) == before + n
            if moment == "an evaluation":
                assert _newest(out) in dict(read_metrics(out)["loss/val"])
    _assert_ends_like(whole, out)


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("moment", EARLY)
def test_a_signal_before_the_run_has_begun_leaves_nothing_broken(
    source, tmp_path, faults, number, moment
):
    out = tmp_path / "out"
    with faults("a signal before the run"):
        process = run("train.py", *_words(source, out), at=[(moment, 1, number)])
        assert process.returncode == (130 if number == INT else -number)
        assert process.err == ""
        assert not list(out.glob("**/*.tmp.*"))
        again = run("train.py", source, *TINY, "--steps", 2, "--out", out)
        assert again.returncode == 0, again.err


def test_signals_at_random_moments_never_cost_a_step(source, whole, tmp_path, faults):
    chance = random.Random(3)
    out = tmp_path / "0"
    for n, number in enumerate(STOPS * 5):
        with faults("a signal at a random moment"):
            process = start("train.py", *_words(source, out))
            process.wait_for("\nstep " if n % 2 else "memory ")
            time.sleep(chance.uniform(0, 0.12))
            process.signal(number)
            if process.wait(30):
                _assert_saved_at_the_border(process, out, number)
            else:
                assert_same_training(out, whole)
                out = tmp_path / str(n + 1)
    if out.exists():
        _assert_ends_like(whole, out)


def test_sigusr1_saves_after_the_step_and_the_run_goes_on(source, whole, tmp_path, faults):
    out = tmp_path / "out"
    moments = [
        ("an evaluation", 1), ("a step", 7), ("a step", 33), ("a save", 3), ("a sample", 21),
        ("an evaluation", 5), ("a rename", 14), ("a step", 240),
    ]  # fmt: skip
    at = [(moment, n, USR1) for moment, n in moments]
    process = run("train.py", source, *SETTINGS, "--out", out, at=at)
    assert process.returncode == 0, process.err
    assert process.err == ""
    told = [int(step) for step in re.findall(r"saved at step (\d+)", process.out)]
    assert {0, 7, 8, 33, 40, 80} <= set(told)
    assert 240 not in told
    with faults("sigusr1 in a training", len(moments)):
        assert_same_training(out, whole)


def test_every_sigusr1_makes_a_checkpoint_that_was_not_there(source, tmp_path, faults):
    out = tmp_path / "out"
    words = [source, *TINY, "--steps", 200000, "--eval_every", 200000, "--out", out]
    process = start("train.py", *words)
    process.wait_for("step      1")
    newest = _newest(out)
    for _ in range(10):
        with faults("sigusr1 in a training"):
            process.signal(USR1)
            until(lambda before=newest: _newest(out) > before, "a checkpoint")
            newest = _newest(out)
    process.signal(TERM)
    assert process.wait() == 143, process.err
    assert process.err == ""
    assert _newest(out) > newest


@pytest.mark.parametrize("chosen", ["together", "apart"])
def test_a_second_signal_leaves_at_once_and_costs_no_checkpoint(
    source, whole, tmp_path, faults, chosen
):
    chance = random.Random(chosen)
    out = tmp_path / "0"
    pairs = [*itertools.product(STOPS, STOPS), (USR1, INT), (TERM, USR1), (USR1, USR1)]
    for n, (first, second) in enumerate(pairs):
        with faults("two signals"):
            process = start("train.py", *_words(source, out))
            process.wait_for("\nstep ")
            time.sleep(chance.uniform(0, 0.15))
            before = _newest(out)
            process.signal(first)
            time.sleep(chance.uniform(0, 0.05) if chosen == "apart" else 0)
            process.signal(second)
            if (first, second) == (USR1, USR1):
                process.signal(KILL)
            code = process.wait(10)
            stopped_by = {n for n in (first, second) if n != USR1} or {KILL}
            ends = {0} | {-n for n in stopped_by} | {128 + n for n in stopped_by}
            assert code in ends
            assert process.err == ""
            assert _newest(out) >= before
            for path in out.glob("checkpoints/*.pt"):
                load_checkpoint(path)
            if code == 0:
                assert_same_training(out, whole)
                out = tmp_path / str(n + 1)
    if out.exists():
        _assert_ends_like(whole, out)


@pytest.mark.parametrize("number", STOPS)
def test_a_second_signal_during_the_last_words_is_no_traceback(source, tmp_path, faults, number):
    at = [("a step", 7, TERM), ("the last words", 1, number)]
    with faults("two signals"):
        process = run("train.py", source, *SETTINGS, "--out", tmp_path / "out", at=at)
        assert process.returncode in (128 + number, -number)
        assert process.err == ""
        assert _newest(tmp_path / "out") == 7


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_while_sample_writes_is_no_traceback(whole, faults, number):
    chance = random.Random(int(number))
    full = run("sample.py", whole, "--n_chars", 400).out
    for _ in range(4):
        with faults("a signal to sample.py"):
            process = start("sample.py", whole, "--n_chars", 100000)
            until(lambda p=process: p.out or p.poll() is not None, "text")
            time.sleep(chance.uniform(0, 0.1))
            process.signal(number)
            assert process.wait(10) in (128 + number, -number)
            assert "Traceback" not in process.err
            n = min(len(full), len(process.out))
            assert process.out[:n] == full[:n]


def test_two_interrupts_while_sample_writes_are_no_traceback(whole, faults):
    chance = random.Random(5)
    for _ in range(10):
        with faults("two signals to sample.py"):
            process = start("sample.py", whole, "--n_chars", 100000)
            until(lambda p=process: p.out or p.poll() is not None, "text")
            process.signal(INT)
            time.sleep(chance.uniform(0, 0.01))
            process.signal(INT)
            assert process.wait(10) in (130, -INT)
            assert "Traceback" not in process.err


@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_an_interrupt_while_python_imports_is_no_traceback(source, whole, tmp_path, faults, script):
    chance = random.Random(script)
    words = [source, *SETTINGS, "--out", tmp_path / "out"] if script == "train.py" else [whole]
    for n in range(6):
        with faults("an interrupt while importing"):
            # The times of the imports tell when the script has got its first word.
            process = start(script, *words, cold=True, python=["-X", "importtime"])
            until(lambda p=process: re.search(r"\| +gpt\.errors", p.err), "the first imports")
            time.sleep(chance.uniform(0, 0.6 if n < 4 else 2.0))
            process.signal(INT)
            assert process.wait(30) == 130
            assert "Traceback" not in process.err
            assert "Error" not in process.err
