"""SIGKILL at any moment: of saves without a pause between them, and of whole trainings."""

import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from processes import TINY, Process, do, run, save_for_ever, start
from states import LARGE, assert_same_training, is_whole

from gpt.training.atomic import sweep
from gpt.training.checkpoint import KEPT, load_checkpoint
from gpt.training.curves import read_metrics

pytestmark = pytest.mark.slow

N_SAVES_KILLED, N_RUNS_KILLED, N_COLD_RUNS_KILLED = 200, 30, 3
SETTINGS = (*TINY, "--steps", 240, "--eval_every", 4, "--sample_chars", 2)


def test_a_killed_save_leaves_its_checkpoint_or_the_one_before(tmp_path, faults):
    longest = 3 * _seconds_a_save(tmp_path)
    chance = random.Random(1)
    newest = n_steps = best = n_strays = n_unreported = 0
    for _ in range(N_SAVES_KILLED):
        with faults("a kill in a save"):
            first = newest + 1
            safe = _killed_save(tmp_path, first, chance.uniform(0, longest))
            steps = _steps(tmp_path)
            newest = max(steps, default=0)
            assert newest in (safe, safe + 1)
            assert len(steps) <= 1 + (KEPT if safe >= first else n_steps)
            n_steps = len(steps)
            for step in steps:
                assert _step_as_saved(tmp_path / f"step-{step:08d}.pt") == step
            if newest:
                assert load_checkpoint(tmp_path, prefer="newest").step == newest
            # Every even step is the best, and gets that name before its save is over.
            even = safe // 2 * 2
            earliest, path = even if even >= first else best, tmp_path / "best.pt"
            best = _step_as_saved(path) if path.exists() else 0
            assert best in (earliest, newest // 2 * 2)
            strays = sweep(tmp_path)
            assert len(strays) <= 1
            assert len(list(tmp_path.iterdir())) == len(steps) + (best > 0)
            n_strays += len(strays)
            n_unreported += newest > safe
    assert n_strays > N_SAVES_KILLED // 8, "too few kills met a save"
    assert n_unreported > 0, "no kill met the end of a save"


@pytest.mark.parametrize(
    ("n_kills", "cold", "longest"), [(N_RUNS_KILLED, False, 0.6), (N_COLD_RUNS_KILLED, True, 5.0)]
)
def test_a_training_killed_again_and_again_becomes_the_unbroken_one(
    source, whole, tmp_path, faults, n_kills, cold, longest
):
    chance = random.Random(2)
    out = tmp_path / "0"
    for n in range(n_kills):
        with faults("a kill of a training"):
            process = _begun(source, out, cold)
            time.sleep(chance.uniform(0, longest))
            process.kill()
            assert process.returncode in (0, -9), process.err
            assert process.err == ""
            _assert_every_checkpoint_is_whole(out)
            if process.returncode == 0:
                assert_same_training(out, whole)
                out = tmp_path / str(n + 1)
    process = _begun(source, out, cold)
    assert process.wait(120) == 0, process.err
    assert_same_training(out, whole)
    assert load_checkpoint(out).step == load_checkpoint(whole).step
    assert not [p.name for p in out.rglob("*") if ".tmp." in p.name]


def test_a_kill_before_the_best_gets_its_name_does_not_lose_the_best(
    source, whole, tmp_path, faults
):
    best = load_checkpoint(whole).step
    n_bests = len(_bests(whole))
    moment = ("the name of the best", n_bests, signal.SIGKILL)
    with faults("a kill between the two names of a best checkpoint"):
        killed = run("train.py", source, *SETTINGS, "--out", tmp_path / "out", at=[moment])
        assert killed.returncode == -9
        assert load_checkpoint(tmp_path / "out").step < best
        assert load_checkpoint(tmp_path / "out", prefer="newest").step == best
        resumed = run("train.py", "--resume", tmp_path / "out")
        assert resumed.returncode == 0, resumed.err
        assert load_checkpoint(tmp_path / "out").step == best


def _bests(folder: Path) -> list[int]:
    """The steps whose validation loss was lower than any before."""
    lowest, found = math.inf, []
    for step, loss in read_metrics(folder)["loss/val"]:
        if step and loss < lowest:
            lowest = loss
            found.append(step)
    return found


def _seconds_a_save(folder: Path) -> float:
    """Of saves one after another, in a folder beside the one that will be used."""
    apart, n = folder.parent / "apart", 20
    apart.mkdir()
    reader, writer = os.pipe()
    process = do(save_for_ever, str(apart), 1, n, stdout=writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:
        assert lines.readline() == "ready\n"
        begun = time.perf_counter()
        assert len(lines.readlines()) == n
        seconds = (time.perf_counter() - begun) / n
    assert process.wait() == 0
    return seconds


def _killed_save(folder: Path, first: int, seconds: float) -> int:
    """Kill endless saving after some time; return the last step that was told to be safe."""
    reader, writer = os.pipe()
    process = do(save_for_ever, str(folder), first, stdout=writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:
        assert lines.readline() == "ready\n"
        time.sleep(seconds)
        assert process.kill() == -9, process.err
        told = lines.readlines()
    return int(told[-1]) if told else first - 1


def _steps(folder: Path) -> list[int]:
    found = (re.fullmatch(r"step-(\d+)\.pt", path.name) for path in folder.iterdir())
    return [int(match[1]) for match in found if match]


def _step_as_saved(path: Path) -> int:
    """The step of a checkpoint, after a look whether everything in it belongs to that step."""
    checkpoint = load_checkpoint(path)
    assert is_whole(checkpoint, LARGE), path
    return checkpoint.step


def _assert_every_checkpoint_is_whole(out: Path) -> None:
    for path in out.glob("checkpoints/*.pt"):
        load_checkpoint(path)


def _begun(source: Path, out: Path, cold: bool) -> Process:
    """Resume the run if it has begun, and if not, begin it."""
    if any(out.glob("checkpoints/*.pt")):
        return start("train.py", "--resume", out, cold=cold)
    if (out / "checkpoints").exists() or (out / "config.toml").exists():
        # Killed before the first checkpoint was there: nothing was trained, nothing is lost.
        shutil.rmtree(out)
    return start("train.py", source, *SETTINGS, "--out", out, cold=cold)
