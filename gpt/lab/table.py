"""Outcomes as a table: every seed, then the difference between arms, paired by seed."""

import statistics

from gpt.lab.runs import Outcome


def table(outcomes: list[Outcome]) -> list[str]:
    """Final and best validation loss, nats per character, a line a seed; then mean differences.

    A failed run shows as ``failed`` and takes its seed out of the difference, which says so.
    """
    arms = list(dict.fromkeys(o.arm for o in outcomes))
    seeds = sorted({o.seed for o in outcomes})
    by = {(o.arm, o.seed): o for o in outcomes}
    width = max(17, *(len(arm) + 2 for arm in arms))
    lines = ["validation loss, final / best (nats per character)"]
    lines.append("seed".ljust(8) + "".join(arm.rjust(width) for arm in arms))
    for seed in seeds:
        cells = [_cell(by.get((arm, seed))) for arm in arms]
        lines.append(str(seed).ljust(8) + "".join(cell.rjust(width) for cell in cells))
    for arm in arms[1:]:
        lines.append(_difference(arms[0], arm, seeds, by))
    return lines


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    if outcome.final is None or outcome.best is None:
        return "failed"
    return f"{outcome.final:.4f} / {outcome.best:.4f}"


def _difference(
    first: str, second: str, seeds: list[int], by: dict[tuple[str, int], Outcome]
) -> str:
    """Mean over seeds of (second - first) in final loss; below 0 the second learned more."""
    ended = [
        (by[first, seed].final, by[second, seed].final)
        for seed in seeds
        if (first, seed) in by and (second, seed) in by
    ]
    differences = [b - a for a, b in ended if a is not None and b is not None]
    if not differences:
        return f"{second} - {first}: no seed in which both ended"
    line = f"{second} - {first}: mean {statistics.mean(differences):+.4f}"
    if len(differences) > 1:
        line += f", standard deviation {statistics.stdev(differences):.4f}"
    line += f", {len(differences)} of {len(seeds)} seeds"
    if len(differences) == 1:
        line += " (one seed shows nothing: the spread between seeds is unknown)"
    return line
