"""Training every arm with every seed: same weights by name, same batches, same evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.config import RunConfig
from gpt.errors import NonFiniteError
from gpt.lab.arms import Arm
from gpt.run import Run
from gpt.runfolder import given_folder, owner
from gpt.text.reading import Corpus


@dataclass(frozen=True)
class Outcome:
    """One run: its arm and seed, and its validation losses in nats per character.

    A run that ended in a non-finite number has a ``failure`` and no losses: it is to be counted,
    never averaged.
    """

    arm: str
    seed: int
    final: float | None = None
    best: float | None = None
    failure: str = ""

    def __str__(self) -> str:
        ended = self.failure or f"validation {self.final:.4f}, best {self.best:.4f}"
        return f"{self.arm:<12} seed {self.seed:<6} {ended}"


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal ended the comparison; the runs that were done are kept."""

    def __init__(self, signal: int) -> None:
        self.signal = signal


def run_arms(
    arms: list[Arm], seeds: Sequence[int], base: RunConfig, corpus: Corpus, out: Path
) -> Iterator[Outcome]:
    """One run folder an (arm, seed) below ``out``; the arms in turn within each seed.

    Raises Stopped when a signal stopped a run.
    """
    for seed in seeds:
        for arm in arms:
            with owner(given_folder(out / f"{arm.name}-s{seed}")) as folder:
                try:
                    result = Run(arm.config(base, seed), corpus).go(folder, quiet=True)
                except NonFiniteError as error:
                    yield Outcome(arm.name, seed, failure=f"failed: {str(error).split(',')[0]}")
                    continue
            if result.signal:
                raise Stopped(result.signal)
            assert result.best, "a comparison has a validation split"
            yield Outcome(arm.name, seed, result.val_loss, result.best["loss"])
