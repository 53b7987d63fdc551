"""Figures of what happened inside the models on the way, against the number of updates."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from gpt.lab.figures.drawing import (
    Drawn,
    canvas,
    explain,
    legend,
    level_line,
    log_axis,
    nothing,
    panels,
)
from gpt.lab.figures.edges import can_be_drawn, edge_marks, edges
from gpt.lab.figures.looks import Curve, Seeds, labels, looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@Drawn
def against_step(
    curves: Seeds,
    title: str,
    label: str,
    *,
    log: bool = True,
    level: tuple[str, float] | None = None,
    arms: Collection[str] = (),
) -> "Figure":
    """Any probe against the step: the median of an arm's seeds, and their range as a band.

    On a log axis a value of 0 is a triangle on the bottom edge; one that is not finite is a cross
    on the top edge. ``level``: the words and height of a line to compare with.
    """
    return _against_step(curves, title, label, log=log, level=level, arms=arms)


@Drawn
def branch_over_skip(
    curves: Seeds,
    *,
    title: str = "How much each sublayer adds to the stream",
    arms: Collection[str] = (),
) -> "Figure":
    """rms of a sublayer's branch over rms of what it is added to (median over sublayers), by step.

    Above 1 the branches drown the skip path, and a norm after the sum divides it away.
    """
    level = ("branch as large as skip", 1.0)
    return _against_step(curves, title, "rms of branch / rms of skip", level=level, arms=arms)


@Drawn
def spread(
    curves: Seeds,
    *,
    title: str = "How much predictions depend on the text",
    arms: Collection[str] = (),
) -> "Figure":
    """Standard deviation over positions of the predicted probabilities, by step.

    0 is a model that predicts the same distribution everywhere, whatever it reads.
    """
    return _against_step(curves, title, "sd of predicted probabilities", arms=arms)


@Drawn
def gradient_heat(
    gradients: Mapping[str, Sequence[Curve]],
    *,
    title: str = "Gradient of each block over the first updates",
) -> "Figure":
    """One panel an arm; ``gradients``: arm -> one curve a block, the block by the embedding first.

    The colour is log10 of the Frobenius norm of the loss gradient of the block's W_out. A gradient
    of exactly 0 is a field with a 0, one that is not finite a field with a cross.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    curves = [curve for blocks in gradients.values() for curve in blocks]
    steps = sorted({step for curve in curves for step, _ in curve})
    logs = [math.log10(v) for c in curves for _, v in c if can_be_drawn(v, log=True)]
    n_blocks = max((len(blocks) for blocks in gradients.values()), default=1)
    names = list(labels(gradients).values())
    figure, axes_of = panels(title, names, "updates", height=max(1.9, 0.8 + 0.2 * n_blocks))
    bounds = _bounds(logs)
    colour_map = colormaps["cividis"].resampled(len(bounds) - 1)
    norm = BoundaryNorm(bounds, len(bounds) - 1)
    for axes, blocks in zip(axes_of, gradients.values(), strict=False):
        fields = [[math.nan] * len(steps) for _ in range(n_blocks)]
        for block, curve in enumerate(blocks):
            for step, value in curve:
                x = steps.index(step)
                if can_be_drawn(value, log=True):
                    fields[block][x] = math.log10(value)
                else:
                    axes.text(x, block, "0" if value == 0 else "✕", ha="center", va="center")
        if steps:
            axes.pcolormesh(
                range(len(steps)), range(n_blocks), fields, cmap=colour_map, norm=norm,
                shading="nearest", edgecolors="face", linewidth=0.2,
            )  # fmt: skip
        axes.set_xticks(range(len(steps)), [str(step) for step in steps])
        axes.set_yticks(range(n_blocks), [str(block) for block in range(n_blocks)])
    figure.supylabel("block (0: by the embedding)", fontsize=10)
    if logs:
        bar = figure.colorbar(
            ScalarMappable(norm, colour_map), ax=axes_of, location="right", aspect=30, pad=0.02,
            ticks=bounds,
        )  # fmt: skip
        bar.set_label("log10 of the gradient of W_out", fontsize=9)
    else:
        nothing(axes_of[0], "no gradient above 0")
    return figure


def _against_step(
    curves: Seeds,
    title: str,
    label: str,
    *,
    log: bool = True,
    level: tuple[str, float] | None = None,
    arms: Collection[str] = (),
) -> "Figure":
    figure, (axes,) = canvas(title)
    looks = looks_of([*arms, *curves])
    handles = []
    for arm, runs in curves.items():
        look = looks[arm]
        found: dict[int, list[float]] = {}
        for step, value in sorted(point for run in runs for point in run):
            found.setdefault(step, []).append(value)
        usable = [[v for v in values if can_be_drawn(v, log)] for values in found.values()]
        low, middle, high = (
            [f(values) if values else math.nan for values in usable]
            for f in (min, statistics.median, max)
        )
        axes.fill_between(list(found), low, high, color=look.colour, alpha=0.18, linewidth=0)
        handles += axes.plot(list(found), middle, **look.line(marker=look.marker, markersize=4))
        edge_marks(axes, [(s, v) for s in found for v in found[s]], look.colour, log)
    points = [point for runs in curves.values() for run in runs for point in run]
    values = [value for _, value in points]
    parts = ["line: median of the seeds", "band: lowest to highest seed", *edges(values, log)]
    explain(axes, parts)
    if log:
        log_axis(axes, "y", values)
    if level:
        level_line(axes, *level)
    _step_axis(axes, sorted({step for step, _ in points}))
    if not points:
        nothing(axes)
    axes.set(xlabel="updates", ylabel=label)
    legend(figure, handles, [looks[arm].label for arm in curves])
    return figure


def _bounds(logs: Sequence[float]) -> list[float]:
    """Ends of at most ten equal steps, in round numbers, that hold all the values."""
    low, high = min(logs, default=0.0), max(logs, default=1.0)
    step = next(s for s in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 100.0) if (high - low) / s <= 9)
    first = math.floor(low / step)
    n = max(2, math.floor(high / step) + 1 - first)
    return [round((first + i) * step, 2) for i in range(n + 1)]


def _step_axis(axes: "Axes", steps: Sequence[int]) -> None:
    """A log axis that has a place for step 0, with ticks at measured steps that leave room."""
    from matplotlib.ticker import NullLocator

    if not steps:
        return
    axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    axes.set_xlim(steps[0] - 0.2, steps[-1] * 1.2 + 0.2)
    room = (_place(steps[-1]) - _place(steps[0])) / 14
    ticks = [steps[0]]
    for step in steps:
        if _place(step) - _place(ticks[-1]) > room:
            ticks.append(step)
    axes.set_xticks(ticks, [f"{step:,}" for step in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _place(step: int) -> float:
    return float(step) if step < 1 else 1 + math.log10(step)
