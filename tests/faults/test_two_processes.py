"""Two trainings that want one folder, and a reader of a folder that is being written."""

import itertools
import random
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from processes import TINY, Process, run, start, until
from states import assert_same_training

from gpt.training.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow
ENDLESS = (*TINY, "--steps", 10**6, "--eval_every", 10**6)


def _training(process: Process) -> Process:
    process.wait_for("\nstep ")
    assert process.poll() is None, process.err
    return process


def _assert_refused(process: Process, folder: Path, owner: Process) -> None:
    assert process.wait() == 5, process.err
    assert process.err.startswith("error: ")
    assert process.err.count("\n") == 1
    numbers = [int(word) for word in re.findall(r"\d+", process.err.replace(str(folder), ""))]
    assert owner.pid in numbers
    assert socket.gethostname() in process.err


@pytest.mark.parametrize("cold", [False, True])
def test_a_second_training_is_refused_until_the_first_is_killed(source, tmp_path, faults, cold):
    out = tmp_path / "out"
    owner = _training(start("train.py", source, *ENDLESS, "--out", out))
    for _ in range(1 if cold else 5):
        with faults("a second training in a folder"):
            before = {p: p.read_bytes() for p in out.rglob("*.pt")}
            # More than once: being asked must not make the owner forget its name.
            for _ in range(2):
                _assert_refused(start("train.py", "--resume", out, cold=cold), out, owner)
            again = run("train.py", source, *ENDLESS, "--out", out, cold=cold)
            assert again.returncode == 2
            assert {p: p.read_bytes() for p in out.rglob("*.pt")} == before
        with faults("a kill of the owner of a folder"):
            owner.kill()
            owner = _training(start("train.py", "--resume", out, cold=cold))
    owner.signal(signal.SIGTERM)
    assert owner.wait() == 143


def test_of_trainings_that_start_at_once_one_gets_the_folder(source, tmp_path, faults):
    out = tmp_path / "out"
    settings = (*TINY, "--steps", 300, "--eval_every", 100)
    assert run("train.py", source, *settings, "--out", tmp_path / "whole").returncode == 0
    _training(start("train.py", source, *settings, "--out", out)).kill()
    for _ in range(5):
        with faults("several trainings at once in a folder"):
            started = [start("train.py", "--resume", out, "--steps", 10**6) for _ in range(4)]
            until(lambda all_=started: sum(p.poll() is None for p in all_) == 1, "one to be left")
            (owner,) = (process for process in started if process.poll() is None)
            _training(owner)
            for process in started:
                if process is not owner:
                    assert process.returncode == 5, process.err
                    named = re.search(r"process (\d+)", process.err)
                    assert named is None or int(named[1]) == owner.pid
            owner.kill()


def test_trainings_that_start_at_once_get_folders_of_their_own(source, tmp_path, faults):
    settings = (*TINY, "--steps", 4)
    with faults("several trainings at once"):
        started = [start("train.py", source, *settings, folder=tmp_path) for _ in range(4)]
        assert [process.wait() for process in started] == [0] * 4
        folders = sorted((tmp_path / "runs").iterdir())
        assert len(folders) == 4
        for folder in folders[1:]:
            assert_same_training(folder, folders[0])


def test_sample_takes_a_whole_checkpoint_while_every_step_is_saved(source, tmp_path, faults):
    out = tmp_path / "out"
    writer = _training(
        start("train.py", source, *TINY, "--steps", 10**6, "--eval_every", 1, "--out", out)
    )
    chance = random.Random(1)
    steps = set()
    for n in range(16):
        with faults("sample.py in a folder that is being written"):
            wanted = 10 + n
            process = run("sample.py", out, "--n_chars", wanted, cold=n == 0)
            assert process.returncode == 0, process.err
            assert len(process.out) == wanted
            told = re.fullmatch(r".*(best|step-\d+)\.pt: step (\d+)(, .*)?\n", process.err)
            assert told, process.err
            time.sleep(chance.uniform(0, 0.05))
    for n in itertools.count():
        if n >= 300 and len(steps) > 10:  # on a busy machine few are written meanwhile
            break
        with faults("a checkpoint read while others are written"):
            prefer = ("newest", "best")[n % 2]
            checkpoint = load_checkpoint(out, prefer=prefer)
            assert checkpoint.notices == ()
            if prefer == "newest":
                steps.add(checkpoint.step)
    assert writer.poll() is None, writer.err
    writer.signal(signal.SIGINT)
    assert writer.wait() == 130
    assert writer.err == ""


@pytest.mark.parametrize("val_fraction", [0.1, 0.0])
def test_a_reader_that_sleeps_between_looking_and_reading_finds_a_checkpoint(
    source, tmp_path, faults, val_fraction
):
    out = tmp_path / "out"
    settings = (*TINY, "--steps", 10**6, "--eval_every", 1, "--val_fraction", val_fraction)
    writer = _training(start("train.py", source, *settings, "--out", out))
    for _ in range(3):
        with faults("a reader that is stopped until all it saw is gone"):
            reader = start("sample.py", out, "--n_chars", 7, at=[("a read", 1, signal.SIGSTOP)])
            time.sleep(0.3)
            seen = {path.name for path in out.glob("checkpoints/step-*.pt")}
            until(lambda s=seen: not s & {p.name for p in out.glob("checkpoints/*")}, "new ones")
            while reader.poll() is None:
                reader.signal(signal.SIGCONT)
                time.sleep(0.05)
            assert reader.returncode == 0, reader.err
            assert len(reader.out) == 7
            assert "notice" not in reader.err
    assert writer.kill() == -signal.SIGKILL, writer.err
