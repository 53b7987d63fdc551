"""A clock that is set, also by years, changes nothing but the times that TensorBoard can show."""

import io
import itertools
import os
import re
import time
from pathlib import Path

import pytest
import tqdm.std
from small_runs import (
    BrokenOffError,
    assert_curves_agree,
    assert_same_run,
    break_off_after,
    config_for,
    resumed,
    some_text,
    started,
    stop_after,
)

from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics
from gpt.training.progress import Progress

DAY = 86_400.0
YEAR = 365.25 * DAY


class Clock:
    """Stands for the machine's clock, ``ahead`` of it by some seconds."""

    def __init__(self) -> None:
        self.real, self.ahead = time.time, 0.0

    def __call__(self) -> float:
        return self.real() + self.ahead

    def show(self, seconds: float) -> None:
        """Seconds since 1970: what a machine shows whose clock has lost its battery is small."""
        self.ahead = seconds - self.real()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """What everything in this process takes for the time of day."""
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(tqdm.std, "time", clock)
    return clock


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return some_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    """The folder of the run under a steady clock."""
    folder = tmp_path_factory.mktemp("whole")
    started(config_for(text), folder).go()
    return folder


@pytest.mark.parametrize(
    "ahead",
    [-10 * YEAR, 10 * YEAR, *(pytest.param(n, marks=pytest.mark.slow) for n in (-DAY, -1.0, 0.0))],
)
def test_a_run_resumed_under_another_clock_is_the_unbroken_one(
    text, whole, tmp_path, faults, clock, ahead
):
    config, folder = config_for(text), tmp_path / "run"
    with faults("a clock set between two sessions"):
        with pytest.raises(BrokenOffError):
            started(config, folder, break_off_after(5)).go()
        clock.ahead = ahead
        assert resumed(config, folder, stop_after(6)).go().steps == 6
        assert_curves_agree(folder)
        clock.ahead = -ahead
        resumed(config, folder).go()
        assert_same_run(folder, whole)


def test_a_clock_that_starts_in_1970_every_time_is_survived(text, whole, tmp_path, faults, clock):
    config, folder = config_for(text), tmp_path / "run"
    for step in (1, 4, 7):
        with faults("a clock set between two sessions"):
            clock.show(2.5)
            make = resumed if folder.exists() else started
            assert make(config, folder, stop_after(step)).go().steps == step
            assert_curves_agree(folder)
    assert_same_run(folder, whole)


def test_a_clock_set_in_a_run_changes_nothing(text, whole, tmp_path, faults, clock):
    jumps = [0.0, -10 * YEAR, 10 * YEAR, -3.0, 60.0, -60 * DAY, DAY]
    heard = []

    def between(run):
        clock.ahead = jumps[run.step]
        heard.append(run.step)

    with faults("a clock set in a run"):
        started(config_for(text), tmp_path / "run", between).go()
        assert heard == list(range(7))
        assert_same_run(tmp_path / "run", whole)
        for tag in ("speed/chars_per_second", "speed/mfu"):
            assert all(value > 0 for _, value in read_metrics(tmp_path / "run")[tag])


@pytest.mark.parametrize("jump", [-10 * YEAR, -7.0, 10 * YEAR])
def test_the_bar_moves_on_and_shows_no_negative_time(monkeypatch, faults, clock, jump):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    values = {"loss/train": 1.25, "speed/chars_per_second": 1e3}
    with faults("a clock set in a run"), Progress(steps=7) as progress:
        for step in range(1, 6):
            if step == 2:
                clock.ahead = jump
            progress.bar.mininterval = 0  # show every step, however soon it comes
            progress.logged(step, values)
            assert f" {step}/7 [" in terminal.getvalue().split("\r")[-1]
        shown = re.findall(r"\[([^<\]]*)<([^,\]]*),", terminal.getvalue())
        assert len(shown) >= 5
        assert all(re.fullmatch(r"[\d:?]+", part) for times in shown for part in times), shown
        assert {elapsed for elapsed, _ in shown} <= {"00:00", "00:01", "00:02"}


def test_retention_and_the_newest_go_by_step_whatever_the_times_of_files(text, tmp_path, faults):
    config, folder = config_for(text, eval_every=1), tmp_path / "run"
    times = itertools.cycle([4e9, 1.0, 2e9, 9e8])

    def between(run):
        for path in (folder / "checkpoints").iterdir():
            when = next(times)
            os.utime(path, (when, when))
        kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        assert kept == [f"step-{n:08}.pt" for n in (run.step - 1, run.step) if n >= 0]
        assert load_checkpoint(folder, prefer="newest").step == run.step

    for step in (2, 6):
        with faults("files with times of the past and future"):
            make = resumed if folder.exists() else started
            run = make(config, folder, between)
            stop = stop_after(step)
            run.between = lambda run, stop=stop: (between(run), stop(run))
            assert run.go().steps == step
