"""What a comparison says on stdout, and tells on stderr: how far it is, and how long it takes."""

import contextlib
import sys
import time

from tqdm import tqdm

from gpt.exits import discard
from gpt.lab.outcomes import Outcome
from gpt.text.printable import printable


def say(text: str = "") -> None:
    """Of what was found, a line on stdout, above a bar if there is one.

    From the first that cannot be written they are dropped, and ``gpt.exits.lost`` knows.
    """
    try:
        tqdm.write(printable(text), file=sys.stdout)
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)


def tell(text: str) -> None:
    """A line on stderr, above a bar if there is one; results go to stdout."""
    with contextlib.suppress(OSError):
        tqdm.write(printable(text), file=sys.stderr)
        sys.stderr.flush()


class Progress:
    """A bar on a terminal, and a line for every trial that ended."""

    def __init__(self, n: int) -> None:
        self.n, self.done = n, 0
        self.started = time.monotonic()
        self.bar: tqdm | None = None

    def __enter__(self) -> "Progress":
        with contextlib.suppress(OSError):
            if sys.stderr.isatty():
                self.bar = tqdm(total=self.n, unit="run", dynamic_ncols=True)
                self.bar.refresh()
        return self

    def ended(self, outcome: Outcome) -> None:
        """One more, and what it came to."""
        self.done += 1
        took = time.monotonic() - self.started
        left = took / self.done * (self.n - self.done)
        loss = outcome.failure if outcome.final is None else f"validation {outcome.final:.4f}"
        line = f"{self.done:>4} of {self.n}  {outcome.name:<20} {outcome.state:<9} {loss}"
        if self.done < self.n and not self.bar:
            line += f"  (about {duration(left)} left)"
        tell(line)
        if self.bar:
            with contextlib.suppress(OSError):
                self.bar.update()

    def __exit__(self, *_: object) -> None:
        if self.bar:
            with contextlib.suppress(OSError):
                self.bar.close()


def duration(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2.5 h``: for people."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
