"""How an arm looks in every figure: its colour, dashes and symbol, and the name it is shown by."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from gpt.text.printable import printable

Curve = Sequence[tuple[int, float]]
"""Points (step, value); a step is an optimiser update."""
Seeds = Mapping[str, Sequence[Curve]]
"""Arm -> one curve a seed."""
Ended = Mapping[str, Sequence[tuple[Curve, bool]]]
"""Arm -> one curve a seed, and whether the run failed (``Outcome.failed``)."""

INK, FAINT, PAPER = "#1b1f24", "#7a828b", "#ffffff"
"""Text and axes, what is in the background, and what is behind everything."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK, "#f0e442")
"""Okabe and Ito (2008), told apart with every kind of colour vision; ink is their black."""
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
"""Solid, dashed, dotted, dash-dotted: the second cue beside the colour."""
THIN = (0, (4, 3))
"""Dashes of the lines to compare with."""
MARKERS = "osD^vPph"
LONGEST_NAME = 32


@dataclass(frozen=True)
class Look:
    """How one arm is drawn, and the name it is shown by."""

    label: str
    colour: str
    dashes: Any
    marker: str

    def line(self, **changes: Any) -> dict[str, Any]:
        """Arguments for ``Axes.plot``."""
        return {"color": self.colour, "linestyle": self.dashes, **changes}


def colours(arms: Iterable[str]) -> dict[str, str]:
    """Arm -> ``#rrggbb``, by its place in the comparison."""
    return {arm: look.colour for arm, look in looks_of(arms).items()}


def looks_of(arms: Iterable[str]) -> dict[str, Look]:
    """Arm -> its look, by its place among the arms of the whole comparison.

    Thirty-two arms differ in colour or dashes; of more, only the names do.
    """
    n = len(PALETTE)
    return {
        arm: Look(
            label, PALETTE[i % n], DASHES[(i + i // n) % len(DASHES)], MARKERS[i % len(MARKERS)]
        )
        for i, (arm, label) in enumerate(labels(arms).items())
    }


def labels(arms: Iterable[str]) -> dict[str, str]:
    """Arm -> its name as it is shown, no two the same.

    On one line, in visible characters, and without the middle of a long name.
    """
    found: dict[str, str] = {}
    for arm in arms:
        if arm in found:
            continue
        shown = printable(arm, keep="").strip() or "(no name)"
        if len(shown) > LONGEST_NAME:
            half = LONGEST_NAME // 2
            shown = f"{shown[:half]}…{shown[1 - half :]}"
        endings = (f" ({i})" for i in count(2))
        label = shown
        while label in found.values():
            label = shown + next(endings)
        found[arm] = label
    return found
