"""Small runs in folders, stopped or broken off between two steps, and compared bit for bit."""

import copy
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import assert_same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt import run as run_module
from gpt.config import RunConfig
from gpt.corpus import read_text
from gpt.resuming import resume_point
from gpt.run import Keeper, Result, Run
from gpt.runfolder import given_folder
from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics

SMALL = {
    "d_model": 12, "n_heads": 3, "n_layers": 2, "context_length": 9, "steps": 7, "batch_size": 5,
    "eval_every": 2, "log_every": 1, "sample_chars": 4, "threads": 1,
}  # fmt: skip


def some_text(folder: Path) -> Path:
    """A file of a few thousand characters."""
    path = folder / "a text é.txt"
    lines = (f"{n} green bottles, é 中, hanging on the wall\n" for n in range(80))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def config_for(text: Path, **changes: Any) -> RunConfig:
    return RunConfig().with_changes(SMALL | {"text": str(text)} | changes)


class BrokenOffError(Exception):
    """Ends a run as a crash would: nothing is saved on the way out."""


class SmallRun(Run):
    """A run in its folder. Between two steps, ``between(run)`` may do what a fault does."""

    folder: Path
    said: list[str]
    between: Callable[["SmallRun"], object]
    step = 0  # updates done

    def go(self, quiet: bool = True) -> Result:
        before_step = Keeper.before_step

        def hear(keeper: Keeper, step: int) -> bool:
            self.step = step
            self.between(self)
            return before_step(keeper, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Keeper, "before_step", hear)
            patch.setattr(run_module, "peak_flops", lambda device, dtype: 1.0)
            return super().go(self.folder, self.said, quiet=quiet)


def started(
    config: RunConfig, folder: Path, between: Callable[[SmallRun], object] = lambda run: None
) -> SmallRun:
    """A new run in a new folder."""
    return _placed(SmallRun(config, read_text(config)), given_folder(folder), [], between)


def resumed(
    config: RunConfig,
    folder: Path,
    between: Callable[[SmallRun], object] = lambda run: None,
    *,
    allow_data_change: bool = False,
) -> SmallRun:
    """The run of the folder, from its newest checkpoint."""
    checkpoint, corpus, said = resume_point(folder, config, allow_data_change)
    return _placed(SmallRun(config, corpus, checkpoint), folder, said, between)


def _placed(
    run: SmallRun, folder: Path, said: list[str], between: Callable[[SmallRun], object]
) -> SmallRun:
    run.folder, run.said, run.between = folder, said, between
    return run


def stop_after(step: int) -> Callable[[SmallRun], object]:
    """A signal once that many updates are done: the run saves and ends."""

    def between(run: SmallRun) -> None:
        if run.step == step:
            signal.raise_signal(signal.SIGTERM)

    return between


def break_off_after(step: int) -> Callable[[SmallRun], object]:
    """A crash once that many updates are done."""

    def between(run: SmallRun) -> None:
        if run.step == step:
            raise BrokenOffError

    return between


def live_state(run: Run) -> dict[str, Any]:
    """A copy of all that a run remembers from step to step."""
    return copy.deepcopy(
        {
            "model": dict(run.model.state_dict()),
            "optimisers": [optimiser.state_dict() for optimiser in run.optimisers],
            "best": run.best,
        }
    )


def newest_state(folder: Path) -> dict[str, Any]:
    """The same, of the newest checkpoint."""
    saved = load_checkpoint(folder, prefer="newest")
    return {"model": saved.model, "optimisers": saved.optimisers, "best": saved.best}


def records(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what is measured by a clock."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if "speed/" not in k} for line in lines]


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads: tag -> [(step, value), ...]."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def assert_curves_agree(folder: Path) -> None:
    """TensorBoard has exactly the points of metrics.jsonl, each step of a curve once."""
    points = board(folder)
    curves = read_metrics(folder)
    for tag, curve in curves.items():
        steps = [step for step, _ in curve]
        assert steps == sorted(set(steps)), tag
    expected = {
        tag: [(step, float(np.float32(value))) for step, value in curve]
        for tag, curve in curves.items()
    }
    assert points == expected


def assert_same_run(found: Path, expected: Path) -> None:
    """Two folders hold the same run: checkpoint, curves and samples."""
    assert_same(newest_state(found), newest_state(expected))
    assert records(found) == records(expected)
    assert (found / "samples.txt").read_bytes() == (expected / "samples.txt").read_bytes()
    assert_curves_agree(found)
