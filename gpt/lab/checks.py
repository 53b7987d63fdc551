"""What a reproduction check is: a published claim, the numbers that count as it, and a judge."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpt.config import RunConfig
from gpt.lab.curves import curves_of
from gpt.lab.outcomes import Outcome
from gpt.lab.trials import Trial
from gpt.text.reading import Corpus


@dataclass(frozen=True)
class Bench:
    """What a judge may use: the setting, the text, and what the trials came to."""

    base: RunConfig
    corpus: Corpus
    out: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By the name of the trial."""

    def seeds(self, n: int) -> range:
        """The first ones of the setting."""
        return seeds_of(self.base, n)

    def of(self, arm: str) -> list[Outcome]:
        """Its outcomes, by seed."""
        found = [outcome for outcome in self.outcomes.values() if outcome.arm == arm]
        return sorted(found, key=lambda outcome: outcome.seed)

    def curves(self, outcome: Outcome) -> dict[str, list[tuple[int, float]]]:
        """Tag -> points of one trial."""
        return curves_of(self.out, outcome)


@dataclass(frozen=True)
class Check:
    """``judge`` returns whether the claim was reproduced, and what was seen."""

    name: str
    claim: str
    source: str
    """Empty for a negative control, which shows that other checks could have come out otherwise."""
    wanted: str
    judge: Callable[[Bench], tuple[bool, str]]
    trials: Callable[[RunConfig], list[Trial]] = lambda _base: []
    """What has to be trained for it; checks share trials of one name."""


def seeds_of(base: RunConfig, n: int) -> range:
    """``n`` seeds from that of the setting upwards."""
    return range(base.training.seed, base.training.seed + n)


def listed(values: list[float], form: str = ".2f") -> str:
    """``1.50 1.51``."""
    return " ".join(format(value, form) for value in values)
