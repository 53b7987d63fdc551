"""Runs whose disk is full, refuses or is read-only: what was saved stays, and training goes on."""

import contextlib
import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import python
from disk_faults import each_operation
from small_runs import config_for, resumed, some_text, started

from gpt.errors import DiskError
from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics


@pytest.fixture
def text(tmp_path) -> Path:
    return some_text(tmp_path)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A real file system of 400 kB."""
    if os.name == "nt" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "small disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this root may not mount")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(folder: Path) -> Path:
    """A file that leaves no room."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def refusing(steps: set[int]):
    """Between two steps: from these steps on until the next, nothing can be written to a file."""
    state = {"refuses": False}

    def between(run) -> None:
        state["refuses"] = run.step in steps

    def act(name: str, _arguments: tuple) -> None:
        if name == "write" and state["refuses"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return between, each_operation(act)


def test_after_a_save_that_failed_the_next_one_is_made(text, tmp_path, capsys, faults):
    with faults("saves fail for a while in a run"):
        between, refusals = refusing({1, 3})  # the saves at 2 and at 4, evaluated every 2 steps
        run = started(config_for(text), tmp_path / "run", between)
        with refusals:
            result = run.go()
        assert result.steps == 7
        assert load_checkpoint(tmp_path / "run", prefer="newest").step == 7
        assert len(read_metrics(tmp_path / "run")["lr"]) == 7
        warnings = capsys.readouterr().err.splitlines()
        assert len(warnings) == 2
        for line in warnings:
            assert re.search(r"step-0000000[24].pt.*No space left.*MB are free and it takes", line)
            assert "next save tries again" in line


def test_a_best_that_was_not_saved_is_not_the_best(text, tmp_path, faults):
    with faults("the save of the best fails"):
        between, refusals = refusing({1, 3})
        run = started(config_for(text, learning_rate=1e-2), tmp_path / "run", between)
        with refusals:
            result = run.go()
        losses = dict(read_metrics(tmp_path / "run")["loss/val"])
        assert losses[4] < losses[2] < losses[0]  # each was the best when it could not be saved
        kept = load_checkpoint(tmp_path / "run", prefer="best")
        assert result.best == kept.best
        assert kept.step in (6, 7)


def test_three_failures_in_a_row_end_the_run_and_lose_nothing(text, tmp_path, capsys, faults):
    with faults("saves fail for ever in a run"):
        between, refusals = refusing(set(range(3, 99)))
        run = started(config_for(text, steps=15), tmp_path / "run", between)
        with refusals, pytest.raises(DiskError, match=r"step-00000008\.pt.*No space left") as ended:
            run.go()
        assert ended.value.exit_code == 6
        assert capsys.readouterr().err.count("warning") == 2
        assert load_checkpoint(tmp_path / "run", prefer="newest").step == 2
        resumed(config_for(text, steps=15), tmp_path / "run").go()
        assert load_checkpoint(tmp_path / "run", prefer="newest").step == 15
        assert [step for step, _ in read_metrics(tmp_path / "run")["lr"]] == list(range(1, 16))


def test_a_last_save_that_fails_is_an_error_and_not_a_warning(text, tmp_path, faults):
    with faults("the last save of a run fails"):
        between, refusals = refusing({6})
        run = started(config_for(text), tmp_path / "run", between)
        with refusals, pytest.raises(DiskError, match=r"step-00000007\.pt"):
            run.go()
        assert load_checkpoint(tmp_path / "run", prefer="newest").step == 6


def test_a_run_without_room_for_its_checkpoints_does_not_begin(text, tmp_path, small_disk, faults):
    with faults("too little room for a run"):
        run = started(config_for(text, d_model=48), small_disk / "run")
        with pytest.raises(DiskError, match=r"checkpoints of the run take .* MB, and .* MB are fr"):
            run.go()
        assert not (small_disk / "run" / "checkpoints").exists()


def test_a_disk_that_fills_up_and_has_room_again(text, tmp_path, small_disk, capsys, faults):
    """Logging ends with one warning, saving goes on when it can."""
    ballast = small_disk / "ballast"

    def between(run) -> None:
        if run.step == 3:
            fill(small_disk)
        if run.step == 19:
            ballast.unlink()

    config = config_for(text, steps=27, eval_every=10)
    with faults("a full disk for a while"):
        result = started(config, small_disk / "run", between).go()
        assert "No space left" in result.unlogged
        assert load_checkpoint(small_disk / "run", prefer="newest").step == 27
        warned = capsys.readouterr().err.splitlines()
        assert len([line for line in warned if "curves are not written" in line]) == 1
        assert len([line for line in warned if "step-00000010.pt" in line]) == 1
        assert len(warned) == 2
        losses = read_metrics(small_disk / "run")["loss/train"]
        assert [step for step, _ in losses] == list(range(1, len(losses) + 1))


def test_a_disk_that_stays_full_leaves_what_was_saved(text, tmp_path, small_disk, faults):
    def between(run) -> None:
        if run.step == 3:
            fill(small_disk)

    with faults("a full disk for ever"):
        with pytest.raises(DiskError, match="No space left"):
            started(config_for(text), small_disk / "run", between).go()
        checkpoint = load_checkpoint(small_disk / "run", prefer="newest")
        assert checkpoint.step == 2
        assert not checkpoint.notices
        assert not [p for p in (small_disk / "run").rglob("*") if ".tmp." in p.name]
        (small_disk / "ballast").unlink()
        resumed(config_for(text), small_disk / "run").go()
        assert load_checkpoint(small_disk / "run", prefer="newest").step == 7


def train(text: Path, out: Path) -> subprocess.CompletedProcess:
    words = ["--d_model", 12, "--n_heads", 3, "--steps", 5, "--context_length", 9]
    return python("train.py", text, *words, "--out", out)


@pytest.mark.slow
def test_a_read_only_disk_is_refused_before_the_first_step(text, small_disk, faults):
    with faults("a read-only disk"):
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        ended = train(text, small_disk / "run")
        assert ended.returncode == 6
        assert re.fullmatch(r"error: .*Read-only file system.*\n", ended.stderr)
        assert "step" not in ended.stdout


@pytest.mark.slow
def test_exit_6_and_one_message_when_the_disk_is_full(text, small_disk, faults):
    with faults("a full disk from the start"):
        fill(small_disk)
        ended = train(text, small_disk / "run")
        assert ended.returncode == 6
        assert re.fullmatch(r"error: [^\n]*\n", ended.stderr)
