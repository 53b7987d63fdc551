"""Counts the faults that tests inject, and prints them when the tests have ended."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

KEY = "faults"


class Faults:
    """``with faults("a flipped bit"):`` around each injection and the check that follows it.

    A body that raises, as a failed assertion does, is a fault that was not survived.
    """

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.injected[name] += 1
        yield
        self.survived[name] += 1

    def record(self) -> list[tuple[str, int, int]]:
        """What a test's report carries: name, injected, survived."""
        return [(name, n, self.survived[name]) for name, n in self.injected.items()]


def table(reports: Iterable[Any]) -> list[str]:
    """One line a kind of fault and one for all; none when nothing was injected."""
    injected: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    for report in reports:
        for key, record in getattr(report, "user_properties", []):
            for name, n, n_survived in record if key == KEY else []:
                injected[name] += n
                survived[name] += n_survived
    if not injected:
        return []
    rows = [(name, injected[name], survived[name]) for name in sorted(injected)]
    rows.append(("all", injected.total(), survived.total()))
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{'faults':<{width}}  injected  survived  lost"]
    return lines + [f"{name:<{width}}  {n:>8,}  {s:>8,}  {n - s:>4,}" for name, n, s in rows]
