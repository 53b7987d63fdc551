"""Learning rates from low to high: which to try, what to repeat, and what the outcomes say.

A cell holds the outcomes of one arm at one learning rate, one a seed. It learned when every seed
did, failed when a seed ended on the plateau or diverged, and is undecided otherwise (a run too
short to tell). Failures are counted and never averaged: only a cell that learned has a mean loss.

Successive halving goes over seeds, not over steps. Every run is trained to its last step, because a
run that is stopped early is judged by how fast it starts, and a warm-up or a low rate starts
slowly and may still end best; up to 150 steps, or one and a half warm-ups, even a healthy run may
know no more than the unigram. What is halved is how many rates get another seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from gpt.lab.outcomes import Outcome

Cells = Mapping[float, Sequence[Outcome]]
"""The outcomes of one arm by learning rate."""
Side = Literal["low", "high"]
"""An end of a grid of rates."""

FACTOR = 2
"""Between the only rate of a grid and the next, where no distance is given."""


def extended(rates: Sequence[float], side: Side) -> tuple[float, ...]:
    """The rising rates with one more at the side, as far away as the last two are apart."""
    end, before = (rates[0], rates[1:2]) if side == "low" else (rates[-1], rates[-2:-1])
    ratio = end / before[0] if before else (1 / FACTOR if side == "low" else FACTOR)
    more = (_rounded(end * ratio, abs(end * ratio - end) / 10),)
    return (*more, *rates) if side == "low" else (*rates, *more)


def rate_name(rate: float) -> str:
    """``3.2e-2``, with all its digits: two rates never share a name."""
    return format(Decimal(repr(rate)).normalize(), "e").replace("e+", "e")


def state_of_cell(outcomes: Sequence[Outcome]) -> Literal["learned", "failed", "undecided"]:
    """What all seeds of a cell together say; see the head of this file."""
    if any(outcome.failed for outcome in outcomes):
        return "failed"
    return "learned" if {outcome.state for outcome in outcomes} == {"learned"} else "undecided"


def losses_of(outcomes: Sequence[Outcome]) -> list[float | None]:
    """The final loss of each, in nats per character; None for a failure."""
    return [None if o.failed else o.final for o in outcomes]


def mean_loss(outcomes: Sequence[Outcome]) -> float | None:
    """Of the final losses, in nats per character; None where not every seed learned."""
    if state_of_cell(outcomes) != "learned":
        return None
    losses = [outcome.final for outcome in outcomes if outcome.final is not None]
    return math.fsum(losses) / len(losses)


@dataclass(frozen=True)
class Best:
    """The rate with the lowest mean loss, in nats per character.

    ``edges`` are the ends of the grid at which it lies: there it is not tuned, for a better rate
    may lie outside.
    """

    rate: float
    loss: float
    n_seeds: int
    edges: tuple[Side, ...]

    def __str__(self) -> str:
        return rate_name(self.rate) + (" (edge)" if self.edges else "")


def edges_at(rate: float, rates: Sequence[float]) -> tuple[Side, ...]:
    """The ends of a grid of rates at which one of them lies: none, one, or both."""
    low: tuple[Side, ...] = ("low",) if rate == min(rates) else ()
    return (*low, "high") if rate == max(rates) else low


def best_rate(cells: Cells) -> Best | None:
    """The best of the rates that learned; of equal ones the lowest. None where no rate did."""
    losses = _losses(cells)
    if not losses:
        return None
    rate = min(losses, key=lambda rate: (losses[rate], rate))
    return Best(rate, losses[rate], len(cells[rate]), edges_at(rate, list(cells)))


@dataclass(frozen=True)
class Critical:
    """Where an arm stops learning: between the rate ``learned`` and the rate ``failed``.

    ``learned`` is the largest rate that learned, ``failed`` the smallest above it that failed.
    ``failed_below`` are rates under ``learned`` that failed all the same: too slow for the number
    of steps, or a curve that is not monotone; the bracket is then to be read with care.
    """

    learned: float | None
    failed: float | None
    failed_below: tuple[float, ...] = ()

    @property
    def estimate(self) -> float | None:
        """The geometric mean of the bracket; None where it is open."""
        if self.learned is None or self.failed is None:
            return None
        return math.sqrt(self.learned * self.failed)

    def __str__(self) -> str:
        low = "" if self.learned is None else rate_name(self.learned)
        high = "" if self.failed is None else rate_name(self.failed)
        if self.estimate is not None:
            return f"{rate_name(_rounded(self.estimate))} ({low}..{high})"
        if low:
            return f"above {low}"
        return f"below {high}" if high else "undecided"


def critical_rate(cells: Cells) -> Critical:
    """The bracket of the rate at which the arm stops learning."""
    learned = [rate for rate in cells if state_of_cell(cells[rate]) == "learned"]
    failed = sorted(rate for rate in cells if state_of_cell(cells[rate]) == "failed")
    last = max(learned, default=None)
    above = [rate for rate in failed if last is None or rate > last]
    below = tuple(rate for rate in failed if last is not None and rate < last)
    return Critical(last, min(above, default=None), below)


def sensitivity(outcomes: Mapping[float, Outcome], rates: Sequence[float]) -> float:
    """How much the choice of the rate matters, in nats per character (Wortsman et al. 2023).

    ``mean over rates of min(loss, loss_0) - min over rates of min(loss, loss_0)``, where ``loss_0``
    is the loss before the first update and takes the place of a loss that is not finite. An arm
    that learns nowhere scores near 0, so the number means nothing without the count of states;
    and it belongs to its grid: ValueError where outcomes and rates are not of the same grid.
    """
    if sorted(outcomes) != sorted(rates):
        raise ValueError("the sensitivity to the rate needs one outcome at every rate of the grid")
    losses = [o.first if o.final is None else min(o.final, o.first) for o in outcomes.values()]
    return math.fsum(losses) / len(losses) - min(losses)


def steps_to(curve: Sequence[tuple[int, float]], level: float) -> int | None:
    """The first step at which a loss curve, smoothed, is below the level; None where it never is.

    Smoothed: each point is averaged with the smoothed one before it, so one lucky evaluation does
    not count.
    """
    smooth = math.inf
    for step, loss in curve:
        smooth = loss if math.isinf(smooth) else (smooth + loss) / 2
        if smooth < level:
            return step
    return None


def next_runs(
    cells: Cells, rates: Sequence[float], seeds: Sequence[int]
) -> list[tuple[float, int]]:
    """The (rate, seed) pairs to train next; none when the arm is done.

    The first seed trains every rate, the next the better half of those that learned, the next the
    better quarter, and so on. The last one trains the best rate, its two neighbours and both ends
    of the critical bracket, with all seeds. A rate that is chosen late makes up for what it missed.
    """
    for rung in range(len(seeds)):
        chosen = list(rates) if rung == 0 else _promoted(cells, rung, last=rung == len(seeds) - 1)
        missing = [
            (rate, seed)
            for rate in chosen
            for seed in seeds[: rung + 1]
            if seed not in {outcome.seed for outcome in cells.get(rate, ())}
        ]
        if missing:
            return missing
    return []


def _promoted(cells: Cells, rung: int, *, last: bool) -> list[float]:
    """The rates that get another seed, from low to high."""
    losses = _losses(cells)
    ranked = sorted(losses, key=lambda rate: (losses[rate], rate))
    if not last:
        return sorted(ranked[: math.ceil(len(cells) / 2**rung)])
    rates = sorted(cells)
    critical = critical_rate(cells)
    chosen = {rate for rate in (critical.learned, critical.failed) if rate is not None}
    if ranked:
        at = rates.index(ranked[0])
        chosen |= set(rates[max(at - 1, 0) : at + 2])
    return sorted(chosen)


def _losses(cells: Cells) -> dict[float, float]:
    means = {rate: mean_loss(outcomes) for rate, outcomes in cells.items()}
    return {rate: loss for rate, loss in means.items() if loss is not None}


def _rounded(rate: float, most: float = math.inf) -> float:
    """To three digits, or to as many as change it by no more than ``most``."""
    digits = 3
    while abs(float(f"{rate:.{digits}g}") - rate) > most:
        digits += 1
    return float(f"{rate:.{digits}g}")
