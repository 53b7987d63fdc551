"""The curves of a finished trial. Its outcome keeps it from being trained again, so it has them."""

from pathlib import Path

from gpt.errors import UsageError
from gpt.lab.outcomes import Outcome
from gpt.training.curves import read_metrics

LAST = 2**63
"""Steps end below it, for numpy and TensorBoard."""


def curves_of(out: Path, outcome: Outcome) -> dict[str, list[tuple[int, float]]]:
    """Tag -> ``[(step, value), ...]``. Raises UsageError where curves are missing or damaged."""
    folder = out / outcome.name
    try:
        curves = read_metrics(folder)
    except UsageError:
        curves = {}
    steps = [step for points in curves.values() for step, _ in points]
    usual = outcome.final is None or "loss/val" in curves
    if not (steps and usual and min(steps) >= 0 and max(steps) < LAST):
        raise UsageError(
            f"{str(folder)!r} is of a finished run, but its curves (metrics.jsonl) are missing or "
            "damaged; delete that folder to train it anew"
        )
    return curves
