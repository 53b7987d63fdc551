"""Tuning an arm alone: the best of a grid of learning rates and warm-ups, and what it may hold."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpt.config import RunConfig
from gpt.errors import UsageError
from gpt.lab.arms import Arm
from gpt.lab.grid import Side, edges_at, mean_loss, rate_name, state_of_cell
from gpt.lab.outcomes import Outcome

MOST_EXTENSIONS = 2
"""Rates added at either side of a grid whose best rate lies at that edge."""


class Setting(NamedTuple):
    """What is tuned: the peak learning rate, and steps of linear warm-up."""

    learning_rate: float
    warmup_steps: int

    def __str__(self) -> str:
        return f"learning rate {rate_name(self.learning_rate)}, warm-up {self.warmup_steps} steps"


@dataclass(frozen=True)
class Tuned:
    """The setting with the lowest mean final loss, in nats per character.

    ``edges`` are the ends of the grid of rates at which it lies: there it is not tuned.
    """

    setting: Setting
    loss: float
    edges: tuple[Side, ...]


def tune(cells: Mapping[Setting, Sequence[Outcome]]) -> Tuned | None:
    """The best setting in which every seed learned; None where there is none.

    A setting in which one seed failed is not eligible, however low the others ended: who uses it
    does not know his seed. Of equal settings the one with the shorter warm-up, then the lower rate.
    """
    losses = {setting: mean_loss(outcomes) for setting, outcomes in cells.items()}
    ranked = sorted(
        (loss, setting.warmup_steps, setting.learning_rate, setting)
        for setting, loss in losses.items()
        if loss is not None
    )
    if not ranked:
        return None
    loss, *_, setting = ranked[0]
    rates = [setting.learning_rate for setting in cells]
    return Tuned(setting, loss, edges_at(setting.learning_rate, rates))


def sides_to_extend(
    arms: Iterable[Mapping[Setting, Sequence[Outcome]]], added: Mapping[Side, int]
) -> list[Side]:
    """Where the grid, which all arms share, has to grow before each arm is tuned.

    A side at which some arm's best rate lies; the lower one for an arm that failed everywhere, for
    it may need smaller rates. No side grows more than MOST_EXTENSIONS times.
    """
    wanted: set[Side] = set()
    for cells in arms:
        tuned = tune(cells)
        if tuned:
            wanted |= set(tuned.edges)
        elif all(state_of_cell(outcomes) == "failed" for outcomes in cells.values()):
            wanted.add("low")
    sides: tuple[Side, ...] = ("low", "high")
    return [side for side in sides if side in wanted and added.get(side, 0) < MOST_EXTENSIONS]


def refuse_varied(arms: Iterable[Arm], varied: Mapping[str, str]) -> None:
    """Raise UsageError for an arm that sets what is varied; ``varied``: setting -> its flag."""
    for arm in arms:
        for name in sorted(varied.keys() & arm.changes.keys()):
            raise UsageError(
                f"arm {arm.name!r} sets {name}, which is varied for every arm; drop it there and "
                f"use --{varied[name]}"
            )


def checked_rates(rates: Sequence[float], base: RunConfig) -> tuple[float, ...]:
    """From low to high, none twice. Raises UsageError for what is no learning rate."""
    for rate in rates:
        base.with_changes({"learning_rate": rate})
    return tuple(sorted(set(rates)))


def checked_warmups(warmups: Sequence[int], base: RunConfig) -> tuple[int, ...]:
    """From short to long, none twice. Raises UsageError for one that the run does not outlast."""
    steps = base.training.steps
    for warmup in warmups:
        if not 0 <= warmup < steps:
            raise UsageError(
                f"a warm-up of {warmup} steps does not end within --steps {steps}; choose "
                f"--warmups from 0 to {steps - 1}"
            )
    return tuple(sorted(set(warmups)))
