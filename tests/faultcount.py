"""Counts the faults that tests inject, and prints them when the tests have ended."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

KEY = "faults"


class Faults:
    """``with faults("a flipped bit"):`` around each injection and the check that follows it.

    A body that raises, as a failed assertion does, is a fault that was not survived. ``n`` is for
    faults that were injected together and are checked at once.
    """

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self, name: str, n: int = 1) -> Iterator[None]:
        self.injected[name] += n
        yield
        self.survived[name] += n

    def record(self) -> list[tuple[str, int, int]]:
        """What a test's report carries: name, injected, survived."""
        return [(name, n, self.survived[name]) for name, n in self.injected.items()]


def asks_for_faults(argument: str) -> bool:
    """Whether pytest was given the folder of the faults, or something of a file in it."""
    path = Path(argument.split("::")[0]).absolute()
    return (path.parent if path.suffix == ".py" else path).name == "faults"


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
