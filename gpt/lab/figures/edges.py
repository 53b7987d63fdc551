"""Values that have no place in a frame, shown on its edge."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def can_be_drawn(value: float, log: bool) -> bool:
    """Whether a line can go through the value."""
    return math.isfinite(value) and (value > 0 or not log)


def edge_marks(axes: "Axes", points: Sequence[tuple[int, float]], colour: str, log: bool) -> None:
    """A cross at the top for what is not finite; a triangle at the bottom for 0 on a log axis."""
    over = axes.get_xaxis_transform()
    bad = [x for x, v in points if not math.isfinite(v)]
    axes.plot(bad, [0.98] * len(bad), "X", color=colour, transform=over)
    zeros = [x for x, v in points if log and v <= 0]
    axes.plot(zeros, [0.02] * len(zeros), "v", color=colour, transform=over)


def edges(values: Iterable[float], log: bool) -> list[str]:
    """What the marks mean, where there are any."""
    values = list(values)
    words = ["✕ at the top: not a finite number"] * any(not math.isfinite(v) for v in values)
    return words + ["▼ at the bottom: 0"] * any(log and v <= 0 for v in values)
