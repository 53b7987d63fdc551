"""Figures of a model along its depth."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpt.lab.figures.drawing import Drawn, canvas, explain, legend, log_axis, nothing
from gpt.lab.figures.edges import can_be_drawn, edge_marks, edges
from gpt.lab.figures.looks import INK, THIN, looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Sequence[tuple[int, float]]

GRADIENT = "gradient of W_out (Frobenius norm)"


@Drawn
def gradient_by_block(
    gradients: Mapping[str, Sequence[float]],
    *,
    title: str = "Gradient of each block at initialisation",
    arms: Collection[str] = (),
) -> "Figure":
    """Arm -> the Frobenius norm of the loss gradient of W_out, a number a block."""
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = canvas(title)
    lines = {arm: list(enumerate(values)) for arm, values in gradients.items()}
    handles = _lines(axes, lines, arms, log=True)
    log_axis(axes, "y", [v for values in gradients.values() for v in values])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="block (0: by the embedding)", ylabel=GRADIENT)
    legend(figure, *handles)
    return figure


@Drawn
def gradient_by_depth(
    gradients: Mapping[str, Mapping[int, Sequence[float]]],
    *,
    title: str = "Gradient of the last block at initialisation, by depth",
    arms: Collection[str] = (),
) -> "Figure":
    """Arm -> number of blocks -> a gradient norm of the last W_out for each seed; both axes log.

    The dashed slopes are those of Xiong et al. (2020), Theorem 1: 0 for Post-LN, -1/2 for Pre-LN.
    An arm's own slope is the least-squares one through its geometric means.
    """
    figure, (axes,) = canvas(title)
    every = [v for of in gradients.values() for values in of.values() for v in values]
    parts = ["point: geometric mean of the seeds", "bar: lowest to highest", *edges(every, True)]
    explain(axes, parts)
    usable = {
        arm: {d: [v for v in of[d] if can_be_drawn(v, log=True)] for d in sorted(of)}
        for arm, of in gradients.items()
    }
    means = {
        arm: [(d, statistics.geometric_mean(v)) for d, v in of.items() if v]
        for arm, of in usable.items()
    }
    handles, names = _lines(axes, means, arms)
    for i, arm in enumerate(gradients):
        colour = handles[i].get_color()
        edge_marks(axes, [(d, v) for d, vs in gradients[arm].items() for v in vs], colour, True)
        for depth, values in usable[arm].items():
            if values:
                axes.plot([depth] * 2, [min(values), max(values)], color=colour, linewidth=1)
        if (slope := _slope(means[arm])) is not None:
            names[i] += f" (slope {slope:+.2f})"
    log_axis(axes, "y", every)
    depths = sorted({depth for line in means.values() for depth, _ in line})
    if depths:
        log_axis(axes, "x", depths)
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.set_xlim(depths[0] / 1.05, depths[-1] * max(1.2, (depths[-1] / depths[0]) ** 0.17))
        _slopes_of_theory(axes, depths, [line[0][1] for line in means.values() if line])
    axes.set(xlabel="number of blocks", ylabel=GRADIENT)
    legend(figure, handles, names)
    return figure


@Drawn
def stream_growth(
    rms: Mapping[str, Sequence[float]],
    *,
    title: str = "Growth of the residual stream along depth",
    arms: Collection[str] = (),
) -> "Figure":
    """Arm -> the root mean square of the stream after 0, 1, 2, ... sublayers.

    Dashed: ``sqrt(x0^2 + k)``, where every sublayer adds a branch of rms 1 that is independent of
    the stream; x0 is the median of the arms' first values.
    """
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = canvas(title)
    lines = {arm: list(enumerate(values)) for arm, values in rms.items()}
    handles, names = _lines(axes, lines, arms)
    firsts = [line[0][1] for line in lines.values() if line and math.isfinite(line[0][1])]
    if firsts:
        start = statistics.median(firsts)
        law = [math.hypot(start, math.sqrt(k)) for k in range(max(map(len, rms.values())))]
        handles += axes.plot(law, color=INK, linewidth=0.9, linestyle=THIN, zorder=1)
        names.append(f"√(x₀² + k), x₀ = {start:.2g}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="sublayers passed, k", ylabel="rms of the residual stream")
    legend(figure, handles, names)
    return figure


def _lines(
    axes: "Axes", lines: Mapping[str, Line], arms: Collection[str], *, log: bool = False
) -> tuple[list[Any], list[str]]:
    """A line an arm, broken where a value cannot be drawn; handles and names for the legend."""
    looks = looks_of([*arms, *lines])
    handles: list[Any] = []
    for arm, line in lines.items():
        look = looks[arm]
        values = [v if can_be_drawn(v, log) else math.nan for _, v in line]
        handles += axes.plot([x for x, _ in line], values, **look.line(marker=look.marker))
        edge_marks(axes, line, look.colour, log)
    if words := edges((v for line in lines.values() for _, v in line), log):
        explain(axes, words)
    if not any(lines.values()):
        nothing(axes)
    return handles, [looks[arm].label for arm in lines]


def _slope(line: Line) -> float | None:
    """Of log y against log x, by least squares."""
    if len(line) < 2:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in line]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def _slopes_of_theory(axes: "Axes", depths: Sequence[int], firsts: Sequence[float]) -> None:
    start = statistics.geometric_mean(firsts)
    for words, slope in (("slope 0", 0.0), ("slope −1/2", -0.5)):
        line = [start * (depth / depths[0]) ** slope for depth in depths]
        axes.plot(depths, line, color=INK, linewidth=0.9, linestyle=THIN, zorder=1)
        axes.annotate(
            words, (depths[-1], line[-1]), (4, 0), textcoords="offset points", va="center",
            fontsize=8.5,
        )  # fmt: skip
