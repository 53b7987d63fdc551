"""What one training of one arm with one seed came to."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_type_hints

from gpt.checks import check_type

State = Literal["learned", "plateau", "diverged", "undecided"]
"""How a run ended; ``state_of`` has the rule."""

PLATEAU = 0.05
"""Nats per character below the unigram cross-entropy that still count as knowing no more."""
FEWEST_STEPS = 150
"""Healthy runs also sit at the unigram entropy for up to a hundred steps."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Losses are validation losses in nats per character.

    A run that ended in a non-finite number has a ``failure``, is ``diverged`` and has no ``final``:
    it is counted, never averaged.
    """

    arm: str
    seed: int
    state: State
    first: float
    """Before the first update."""
    final: float | None
    """After the last one, over the whole validation split."""
    best: float | None
    """The lowest of the run's curve, which may be of a part of the split."""
    steps: int
    characters: int
    """Trained on, those of the warm-up included."""
    n_parameters: int
    seconds: float
    failure: str = ""
    hashes: dict[str, str] = field(default_factory=dict)
    """What must be equal between arms: see gpt/lab/fairness.py."""

    @property
    def name(self) -> str:
        """Of its folder, and so of its run in TensorBoard."""
        return f"{self.arm}-s{self.seed}"

    @property
    def failed(self) -> bool:
        """Whether it learned nothing: a run too short to tell has not failed."""
        return self.state in ("plateau", "diverged")

    def to_json(self) -> str:
        """The inverse of ``from_json``."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Outcome":
        """Raises ValueError, TypeError or AttributeError for what is no outcome."""
        values: dict[str, Any] = json.loads(text)
        hints = get_type_hints(cls)
        for name, value in values.items():
            if name != "hashes":
                check_type(name, value, hints[name])
        if not all(type(part) is str for pair in values["hashes"].items() for part in pair):
            raise TypeError("hashes are no strings")
        return cls(**values)


def state_of(
    final: float | None, first: float, unigram: float, steps: int, warmup_steps: int
) -> State:
    """How a run ended.

    diverged   its last loss is not finite, or above the first one
    plateau    it ended at the unigram cross-entropy: it knows how often characters come
    undecided  the same, in a run too short to tell (FEWEST_STEPS, one and a half warm-ups)
    learned    it ended below
    """
    if final is None or not math.isfinite(final) or final > first:
        return "diverged"
    if final < unigram - PLATEAU:
        return "learned"
    short = steps < max(FEWEST_STEPS, 1.5 * warmup_steps)
    return "undecided" if short else "plateau"
