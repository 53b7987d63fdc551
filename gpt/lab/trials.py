"""A trial: one training of one arm with one seed, in a folder of its own, done once.

    trial.json      its key, from the beginning       config.toml    everything resolved
    metrics.jsonl   the curves; events.* the same     outcome.json   at the end: key and outcome

A folder without outcome.json holds nothing finished. Nothing here imports torch until it trains.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpt.config import RunConfig, to_flat
from gpt.errors import UsageError
from gpt.lab.outcomes import Outcome
from gpt.text.reading import Corpus
from gpt.training.atomic import write_atomically

PART = 8192
"""Characters of the validation split that the curve of a trial is of; its end is of all."""
NO_DIFFERENCE = ("text", "device", "threads")
"""Settings that do not enter the key: the text does by its sha256, threads are always one."""
PACKAGE = Path(__file__).parents[1]
DECISIVE = ("model", "text", "training", "native", "config.py", "streams.py", "run.py", "corpus.py",
            "lab/trials.py", "lab/light.py", "lab/probes.py", "lab/fairness.py", "lab/outcomes.py",
            "lab/yardsticks.py")  # fmt: skip
"""Sources that determine what comes out of a trial."""


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal ended the work; what was finished is kept in ``out``."""

    def __init__(self, signal: int, out: Path | None = None) -> None:
        super().__init__(signal, out)
        self.signal, self.out = signal, out


@dataclass(frozen=True)
class Trial:
    """``config`` is resolved and holds the seed. ``probe_steps``: updates done when probed."""

    arm: str
    config: RunConfig
    probe_steps: tuple[int, ...] = ()
    keeps_checkpoints: bool = False

    @property
    def seed(self) -> int:
        return self.config.training.seed

    @property
    def name(self) -> str:
        """Of its folder, and so of its run in TensorBoard."""
        return f"{self.arm}-s{self.seed}"

    @property
    def characters(self) -> int:
        """Trained on in all, those of the warm-up included."""
        training = self.config.training
        windows = training.steps * training.batch_size * training.grad_accumulation
        return windows * self.config.model.context_length

    def key(self, corpus: Corpus) -> str:
        """sha256 of all that determines the outcome: settings, text, probes, source, torch."""
        settings = to_flat(self.config.resolved())
        parts = {
            "settings": {k: v for k, v in settings.items() if k not in NO_DIFFERENCE},
            "text": corpus.source.sha256,
            "probe_steps": self.probe_steps,
            "keeps_checkpoints": self.keeps_checkpoints,
            "source": source_digest(),
            "torch": importlib.metadata.version("torch"),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def run_trial(
    trial: Trial, corpus: Corpus, folder: Path, stop: Callable[[], int] = lambda: 0
) -> Outcome:
    """Train, or hand back what was finished before. The caller owns the folder, which is there.

    With ``keeps_checkpoints`` a whole ``gpt.run.Run``, gone on with where it was stopped; otherwise
    only curves, from the beginning. A non-finite number ends in an outcome with a ``failure``.
    ``stop`` is the number of a signal that asks to stop, or 0; then Stopped is raised.
    Raises UsageError for a folder of another trial, and DiskError.
    """
    done = finished(trial, corpus, folder)
    if done:
        return done
    key = trial.key(corpus)
    _write(folder / "trial.json", {"key": key, "name": trial.name})
    from gpt.lab import light

    train = light.train_kept if trial.keeps_checkpoints else light.train_light
    outcome = train(trial, corpus, folder, stop)
    _write(folder / "outcome.json", {"key": key, "outcome": json.loads(outcome.to_json())})
    return outcome


def finished(trial: Trial, corpus: Corpus, folder: Path) -> Outcome | None:
    """The outcome in a folder; None where there is none yet.

    Raises UsageError for a folder of another trial (other settings, text or version), unless
    nothing in it would be lost.
    """
    key = trial.key(corpus)
    record = _read(folder / "outcome.json")
    if record is not None:
        _refuse_other(record, key, trial, folder)
        try:
            outcome = Outcome.from_json(json.dumps(record["outcome"]))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise _damaged(folder / "outcome.json") from error
        if (outcome.arm, outcome.seed) != (trial.arm, trial.seed):
            raise _damaged(folder / "outcome.json")
        return outcome
    begun = _read(folder / "trial.json")
    if begun is None:
        if folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
            raise UsageError(
                f"{str(folder)!r} holds something that is no trial of a comparison; choose another "
                "--out, or move that folder away"
            )
    elif any(folder.glob("checkpoints/*.pt")):
        _refuse_other(begun, key, trial, folder)
    return None


def _refuse_other(record: dict[str, Any], key: str, trial: Trial, folder: Path) -> None:
    if record.get("key") != key:
        raise UsageError(
            f"{str(folder)!r} holds {trial.name} of other settings, another text or another "
            "version of this program; choose another --out, or delete that folder"
        )


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is no file."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise _damaged(path)
    return record


def _damaged(path: Path) -> UsageError:
    return UsageError(f"{str(path)!r} is damaged; delete its folder to train anew")


def _write(path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


@cache
def source_digest() -> str:
    """sha256 of the source files that determine a training."""
    digest = hashlib.sha256()
    for name in DECISIVE:
        place = PACKAGE / name
        paths = sorted([*place.glob("*.py"), *place.glob("*.c")]) if place.is_dir() else [place]
        for path in paths:
            if path.exists():
                digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
