"""What TensorBoard shows beside the runs: the run ``_aggregate``, and each run's hyperparameters.

TensorBoard does not average runs, so their means and ranges are curves of ``_aggregate``:

    agg/ARM/val/mean, lo, hi      over the arm's seeds that did not fail (all, where all failed), at
                                  the steps that all arms have
    sweep/ARM/median, failed      of the final losses; the step is the place of the learning rate
                                  among all, from 0 for the lowest; the text ``rates`` has them

Its layout puts all arms' bands on one chart of the tab Custom Scalars. Everything can be written
again and is there once: a new file declares the older ones void before they go.
"""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import hparams

from gpt.config import RunConfig
from gpt.lab.curves import curves_of
from gpt.lab.folders import AGGREGATE
from gpt.lab.grid import rate_name
from gpt.lab.layout import layout
from gpt.lab.outcomes import Outcome
from gpt.runfolder import refuse_link
from gpt.text.printable import printable
from gpt.training.atomic import disk_errors, make_folder, write_atomically
from gpt.training.board import Board

BESIDE = ".aggregate"
"""Ends the names of the files of ``_aggregate``: others that are in that folder are left alone."""
HPARAMS = ".hparams"
"""Ends the name of the file that is added to a run's folder, after a digest of what it holds."""

Curves = Mapping[str, Sequence[tuple[int, float]]]
Rates = Mapping[str, Mapping[float, Sequence[float | None]]]
"""Arm -> learning rate -> final losses; None for a failure."""


def write_board(
    out: Path,
    arms: Sequence[str],
    outcomes: Sequence[Outcome],
    statement: Sequence[str],
    figures: Mapping[str, bytes],
    differences: Sequence[str],
    *,
    configs: Mapping[str, RunConfig] = MappingProxyType({}),
    rates: Rates = MappingProxyType({}),
) -> None:
    """Write ``out/_aggregate`` anew, and the hyperparameters of the runs.

    ``arms``: whose bands are drawn. ``figures``: name -> PNG. ``differences``: lines that say in
    which settings the arms differ. ``configs``: of the arms, for hyperparameters.
    Raises DiskError, and UsageError for a run whose curves cannot be read and a folder that is a
    link.
    """
    for name in (AGGREGATE, *(outcome.name for outcome in outcomes)):
        refuse_link(out / name)
    curves = {outcome.name: curves_of(out, outcome) for outcome in outcomes}
    bands = _bands(arms, outcomes, curves)
    folder = out / AGGREGATE
    make_folder(folder)
    with disk_errors(folder, 0):
        board = Board(folder, first_step=0, kind=BESIDE)
        try:
            points = [*_by_step(bands), *_sweep(rates)]
            tags = {tag for of_run in curves.values() for tag in of_run}
            tags |= {tag for _, values in points for tag in values}
            board.summary(layout([_tags(arm) for arm in bands], tags), 0)
            for step, values in points:
                board.scalars(values, step)
            for name, png in figures.items():
                board.image(f"figures/{name}", png, 0)
            texts = {
                "statement": statement,
                "differences": differences,
                "hashes": hashes(outcomes),
                "rates": [f"step {i}: {rate_name(rate)}" for i, rate in enumerate(_grid(rates))],
            }
            for name, lines in texts.items():
                if lines:  # indented by four, it is code: no markup in it is obeyed
                    board.text(name, "\n".join("    " + printable(line) for line in lines), 0)
            known = [outcome for outcome in outcomes if outcome.arm in configs]
            if known:
                board.summary(_experiment([_settings(o, configs[o.arm]) for o in known]), 0)
        finally:
            board.close()
        _void(board, BESIDE)
    for outcome in known:
        _write_hparams(out / outcome.name, outcome, configs[outcome.arm])


def hashes(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each seed, thing that must be equal, and value of it: which arms have it.

    The weights' many hashes are shown as one.
    """
    lines = []
    for seed in sorted({outcome.seed for outcome in outcomes}):
        groups: dict[tuple[str, str], list[str]] = {}
        for outcome in outcomes:
            if outcome.seed == seed:
                for what, value in _digests(outcome.hashes).items():
                    groups.setdefault((what, value), []).append(outcome.arm)
        lines += [f"seed {seed}  {w:<10}  {v}  {' '.join(a)}" for (w, v), a in groups.items()]
    return lines


def _digests(values: Mapping[str, str]) -> dict[str, str]:
    """Kind of thing -> twelve digits of sha256 over all of the kind."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(values):
        kinds.setdefault(name.split("/")[0], []).append(f"{name} {values[name]}")
    return {
        kind: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        for kind, lines in kinds.items()
    }


Bands = dict[str, list[tuple[int, tuple[float, float, float]]]]
"""Arm -> (step, (mean, lowest, highest)) of its runs."""


def _bands(arms: Sequence[str], outcomes: Sequence[Outcome], curves: Mapping[str, Curves]) -> Bands:
    """Of the runs that did not fail, or of those that did where all of the arm did.

    At the steps that all of them have. A run that ended in a number that is not finite is in no
    band, and an arm that has only such runs has none.
    """
    tables: dict[str, list[dict[int, float]]] = {}
    for arm in arms:
        of_arm = [outcome for outcome in outcomes if outcome.arm == arm]
        kept = [outcome for outcome in of_arm if not outcome.failed] or of_arm
        for outcome in kept:
            curve = dict(curves[outcome.name].get("loss/val", ()))
            if outcome.final is not None and all(map(math.isfinite, curve.values())):
                tables.setdefault(arm, []).append(curve)
    every = [set(table) for of_arm in tables.values() for table in of_arm]
    steps = sorted(set.intersection(*every)) if every else []
    return {
        arm: [(step, _band([table[step] for table in tables[arm]])) for step in steps]
        for arm in arms
        if arm in tables and steps
    }


def _band(values: list[float]) -> tuple[float, float, float]:
    return statistics.fmean(values), min(values), max(values)


def _tags(arm: str) -> tuple[str, str, str]:
    tag = f"agg/{printable(arm, keep='')}/val"
    return f"{tag}/mean", f"{tag}/lo", f"{tag}/hi"


def _by_step(bands: Bands) -> list[tuple[int, dict[str, float]]]:
    points: dict[int, dict[str, float]] = {}
    for arm, band in bands.items():
        for step, values in band:
            points.setdefault(step, {}).update(zip(_tags(arm), values, strict=True))
    return sorted(points.items())


def _grid(rates: Rates) -> list[float]:
    return sorted({rate for by_rate in rates.values() for rate in by_rate})


def _sweep(rates: Rates) -> list[tuple[int, dict[str, float]]]:
    points: dict[int, dict[str, float]] = {}
    grid = _grid(rates)
    for arm, by_rate in rates.items():
        for rate, losses in by_rate.items():
            ended = [loss for loss in losses if loss is not None and math.isfinite(loss)]
            tag = f"sweep/{printable(arm, keep='')}"
            here = points.setdefault(grid.index(rate), {})
            here[f"{tag}/failed"] = len(losses) - len(ended)
            if ended and len(ended) == len(losses):
                here[f"{tag}/median"] = statistics.median(ended)
    return sorted(points.items())


def _settings(outcome: Outcome, config: RunConfig) -> dict[str, Any]:
    config = config.resolved()
    return {
        "placement": config.model.norm_position,
        "norm": config.model.norm,
        "init": config.model.init,
        "warmup_steps": config.training.warmup_steps,
        "learning_rate": config.training.learning_rate,
        "n_layers": config.model.n_layers,
        "d_model": config.model.d_model,
        "seed": outcome.seed,
        "state": outcome.state,
    }


def _results(outcome: Outcome) -> dict[str, float]:
    results = {"hp/final": outcome.final, "hp/best": outcome.best}
    return {tag: value for tag, value in results.items() if value is not None}


def _experiment(settings: Sequence[Mapping[str, Any]]) -> Summary:
    """What the tab HParams offers as columns and, for words, as choices."""
    choices = {
        key: sorted({of_run[key] for of_run in settings})
        for key, value in settings[0].items()
        if isinstance(value, str)
    }
    metrics = {"hp/final": 0.0, "hp/best": 0.0}
    return hparams(dict(settings[0]), metrics, choices)[0]


def _write_hparams(folder: Path, outcome: Outcome, config: RunConfig) -> None:
    """The run's entry in the tab HParams, and the same numbers as curves of one point.

    Nothing is written where it is there already.
    """
    settings, results = _settings(outcome, config), _results(outcome)
    _, begin, end = hparams(settings, {})
    numbers = {f"hp/{k}": v for k, v in settings.items() if isinstance(v, int | float)}
    digest = hashlib.sha256(repr((settings, results)).encode()).hexdigest()[:8]
    kind = f".{digest}{HPARAMS}"
    with disk_errors(folder, 0):
        if any(path.stat().st_size for path in folder.glob(f"events.*{kind}")):
            return
        board = Board(folder, kind=kind)
        try:
            board.summary(begin, 0)
            board.scalars(numbers | results, 0)
            board.summary(end, 0)
        finally:
            board.close()
        _void(board, HPARAMS)


def _void(board: Board, kind: str) -> None:
    """Remove the older files of the kind, but for the newest: that one is emptied.

    A server that is running has it open, and would wait for it for ever if it were gone.
    """
    older = sorted(set(board.path.parent.glob(f"events.out.tfevents.*{kind}")) - {board.path})
    for path in older[:-1]:
        path.unlink()
    for path in older[-1:]:
        write_atomically(path, lambda file: None)
