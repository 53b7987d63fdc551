"""Figures of how runs ended. Losses are validation losses in nats per character.

``arms`` names the arms of the whole comparison, in its order, where a figure shows only some of
them: an arm keeps its colour.
"""

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
    nothing,
    panels,
    plain,
)
from gpt.lab.figures.looks import FAINT, INK, Curve, Ended, labels, looks_of
from gpt.lab.outcomes import State

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATES: dict[State, tuple[str, str]] = {
    "learned": ("#009e73", "o"), "plateau": ("#e69f00", "s"),
    "diverged": ("#d55e00", "X"), "undecided": (FAINT, "P"),
}  # fmt: skip
"""Colour and symbol of each end."""


@Drawn
def loss_bands(
    runs: Ended,
    unigram: float | None = None,
    bigram: float | None = None,
    *,
    arms: Collection[str] = (),
    title: str = "Validation loss while training",
) -> "Figure":
    """The mean over an arm's seeds, the band from its lowest to its highest seed, and each seed.

    Mean and band are of the runs that did not fail. Those that failed are drawn up to their first
    number that is not finite, marked, and counted in the legend. Where all of an arm's runs failed,
    mean and band are of these, but for runs that stopped before the figure's last step.
    ``unigram``, ``bigram``: cross-entropies of the validation text, drawn dashed.
    """
    figure, (axes,) = canvas(title)
    looks = looks_of([*arms, *runs])
    handles, names, marks = [], [], []
    last = max((step for of in runs.values() for curve, _ in of for step, _ in curve), default=0)
    for arm, of_arm in runs.items():
        look = looks[arm]
        kept: dict[bool, list[Curve]] = {False: [], True: []}
        for curve, failed in of_arm:
            good = _until_failure(curve)
            axes.plot(*_columns(good), color=look.colour, linewidth=0.6, alpha=0.55)
            if failed and good:
                marks.append((good[-1], look.colour))
            if not failed or (good and good[-1][0] == last):
                kept[failed].append(good)
        steps, columns = _common(kept[False] or kept[True])
        means = [statistics.fmean(column) for column in columns]
        axes.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns],
            color=look.colour, alpha=0.18, linewidth=0,
        )  # fmt: skip
        handles += axes.plot(steps, means, **look.line())
        names.append(f"{look.label} ({_count([failed for _, failed in of_arm])})")
    parts = ["line: mean", "band: lowest to highest", "thin: each seed"]
    explain(axes, parts + ["✕: failed; averaged only if all did"] * bool(marks))
    _yardsticks(axes, unigram, bigram)
    curves = [curve for of_arm in runs.values() for curve, _ in of_arm if curve]
    _frame_without_explosions(axes, curves, unigram, bigram)
    top = axes.get_ylim()[1]
    for (step, loss), colour in marks:  # on the upper edge where the loss is above it
        at = (step, min(loss, top))
        axes.plot(*at, "x", color=colour, markersize=8, markeredgewidth=2, clip_on=False)
    axes.set(xlabel="updates", ylabel="validation loss (nats per character)")
    legend(figure, handles, names)
    return figure


@Drawn
def loss_against_rate(
    points: Mapping[str, Mapping[float, Sequence[float | None]]],
    unigram: float | None = None,
    bigram: float | None = None,
    *,
    arms: Collection[str] = (),
    title: str = "Final loss against the learning rate",
) -> "Figure":
    """Every seed's final loss at every rate; a line through the medians.

    A failure (None, NaN or infinity) is a cross at the top edge, with how many of how many, and
    breaks the line: a median over what survived would be too good.
    """
    figure, (axes,) = canvas(title)
    parts = ["point: one seed", "line: median where no seed failed", "✕: failed, in no median"]
    explain(axes, parts)
    looks = looks_of([*arms, *points])
    handles, names = [], []
    over = axes.get_xaxis_transform()
    for row, (arm, by_rate) in enumerate(points.items()):
        look = looks[arm]
        rates = sorted(by_rate)
        medians = []
        for rate in rates:
            losses = by_rate[rate]
            ended = [v for v in losses if v is not None and math.isfinite(v)]
            failed = len(losses) - len(ended)
            medians.append(statistics.median(ended) if ended and not failed else math.nan)
            axes.plot([rate] * len(ended), ended, look.marker, color=look.colour, alpha=0.7)
            if failed:
                height = 0.97 - 0.05 * (row % 8)
                axes.plot(rate, height, "X", color=look.colour, transform=over, markersize=7)
                axes.annotate(
                    f"{failed}/{len(losses)}", (rate, height), (6, 0), xycoords=over,
                    textcoords="offset points", va="center", fontsize=7.5, color=look.colour,
                )  # fmt: skip
        handles += axes.plot(rates, medians, **look.line(marker=look.marker))
        names.append(look.label)
    _yardsticks(axes, unigram, bigram)
    _rate_axis(axes, {rate for by_rate in points.values() for rate in by_rate})
    if any(points.values()):  # room for a row of crosses an arm
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + (top - bottom) * 0.06 * min(8, len(points)))
    else:
        nothing(axes)
    axes.set(xlabel="learning rate", ylabel="final validation loss (nats per character)")
    legend(figure, handles, names)
    return figure


@Drawn
def phase_map(
    states: Mapping[str, Mapping[tuple[float, int], Sequence[State]]],
    *,
    title: str = "Where training works: learning rate and depth",
) -> "Figure":
    """One panel an arm: learning rate across, number of blocks up, a symbol for each seed's end.

    A field is tinted where all its seeds ended alike. What was not run stays empty.
    """
    from matplotlib.lines import Line2D

    cells = [key for of_arm in states.values() for key in of_arm]
    rates, depths = sorted({r for r, _ in cells}), sorted({d for _, d in cells})
    names = list(labels(states).values())
    figure, axes_of = panels(title, names, "learning rate", height=1.1 + 0.42 * len(depths))
    explain(axes_of[0], ["symbol: one seed", "tint: all seeds alike", "empty: not run"], above=True)
    for axes, of_arm in zip(axes_of, states.values(), strict=False):
        for (rate, depth), ends in of_arm.items():
            _field(axes, rates.index(rate), depths.index(depth), ends)
        axes.set_xticks(range(len(rates)), [plain(r) for r in rates], rotation=45)
        axes.set_yticks(range(len(depths)), [str(d) for d in depths])
        axes.set(xlim=(-0.5, max(0.5, len(rates) - 0.5)), ylim=(-0.5, max(0.5, len(depths) - 0.5)))
    if not cells:
        nothing(axes_of[0])
    figure.supylabel("number of blocks", fontsize=10)
    ends_drawn = [
        Line2D([], [], linestyle="", marker=mark, color=colour) for colour, mark in STATES.values()
    ]
    legend(figure, ends_drawn, list(STATES))
    return figure


def _field(axes: "Axes", x: int, y: int, ends: Sequence[State]) -> None:
    """One field of the phase map; more than six seeds are counted instead of drawn."""
    from matplotlib.patches import Rectangle

    kinds = [state for state in STATES if state in ends]
    if len(kinds) == 1:
        tint = STATES[kinds[0]][0]
        axes.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, facecolor=tint, alpha=0.3))
    shown: list[tuple[State, str]] = [(state, "") for state in ends]
    if len(ends) > 6:
        shown = [(state, str(ends.count(state))) for state in kinds]
    for i, (state, number) in enumerate(shown):
        colour, mark = STATES[state]
        at = x + (i - (len(shown) - 1) / 2) * 0.84 / max(len(shown), 2)
        axes.plot(at, y, mark, color=colour, markersize=5, markeredgecolor=INK, markeredgewidth=0.4)
        axes.text(at, y - 0.14, number, ha="center", va="top", fontsize=7)


def _count(failed: Sequence[bool]) -> str:
    """Of an arm's runs: how many of how many are in the mean, and how many failed."""
    n, of = sum(failed), len(failed)
    if n and n == of:
        return f"{n} of {of} failed"
    seeds = f"{of} seed" + "s" * (of != 1)
    return f"{of - n} of {seeds}, {n} failed" if n else seeds


def _until_failure(run: Curve) -> list[tuple[int, float]]:
    good = []
    for step, value in run:
        if not math.isfinite(value):
            break
        good.append((step, value))
    return good


def _common(runs: Sequence[Curve]) -> tuple[list[int], list[list[float]]]:
    """The steps that all runs have, and the runs' values at each."""
    tables: list[dict[int, float]] = [dict(run) for run in runs]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    return steps, [[table[step] for table in tables] for step in steps]


def _columns(run: Curve) -> tuple[list[int], list[float]]:
    return [step for step, _ in run], [value for _, value in run]


def _frame_without_explosions(
    axes: "Axes", runs: Sequence[Curve], unigram: float | None, bigram: float | None
) -> None:
    """The frame ends a little above all first losses; what is above it is said in words."""
    values = [v for run in runs for _, v in run if math.isfinite(v)]
    if not values:
        nothing(axes)
        return
    known = [v for v in (unigram, bigram) if v is not None and math.isfinite(v)]
    firsts = [run[0][1] for run in runs if math.isfinite(run[0][1])]
    top, bottom = max([*known, *firsts], default=max(values)), min([*known, *values])
    room = 0.08 * (top - bottom) or 0.1
    if max(values) > top + room:
        axes.set_ylim(bottom - room, top + room)
        axes.annotate(
            f"↑ up to {max(values):.3g}", (0.99, 0.97), xycoords="axes fraction", ha="right",
            va="top", fontsize=8.5,
        )  # fmt: skip


def _yardsticks(axes: "Axes", unigram: float | None, bigram: float | None) -> None:
    if unigram is not None and math.isfinite(unigram):
        level_line(axes, f"unigram {unigram:.3f}", unigram)
    if bigram is not None and math.isfinite(bigram):
        level_line(axes, f"bigram {bigram:.3f}", bigram, left=True)
        axes.margins(y=0.08)


def _rate_axis(axes: "Axes", rates: set[float]) -> None:
    """A log axis with a tick at every rate, or at some of many."""
    from matplotlib.ticker import NullLocator

    if not rates or min(rates) <= 0:
        return
    axes.set_xscale("log")
    ticks = sorted(rates)
    ticks = ticks[:: math.ceil(len(ticks) / 10)]
    axes.set_xticks(ticks, [plain(rate) for rate in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
