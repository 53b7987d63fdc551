"""What a run tells its user: a moving bar on a terminal, plain lines elsewhere.

Nothing here raises when a reader goes away, a terminal is closed or the disk of a log is full.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm

from gpt.exits import discard
from gpt.text.printable import printable


def say(text: str = "") -> None:
    """A line on stdout, above a bar if there is one; nothing in it can drive the terminal.

    When the reader of stdout has gone away, this and all later lines are dropped.
    """
    _write_line(sys.stdout, text)


def warn(text: str) -> None:
    """The same on stderr."""
    _write_line(sys.stderr, f"warning: {text}")


def _write_line(stream: TextIO, text: str) -> None:
    with (
        _surviving_broken(sys.stderr),  # a bar is taken away for the line, and drawn again
        tqdm.external_write_mode(file=stream),
        _surviving_broken(stream),
    ):
        stream.write(printable(text) + "\n")
        stream.flush()


class Progress:
    """Lines on stdout and, on a terminal, a bar on stderr below them."""

    def __init__(self, steps: int, first_step: int = 0, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.bar: tqdm | None = None
        if _is_terminal(sys.stderr) and not quiet:
            with _surviving_broken(sys.stderr):
                self.bar = tqdm(total=steps, initial=first_step, unit="step", dynamic_ncols=True)
                self.bar._time = time.monotonic  # tqdm's own is the time of day, which may be set
                self.bar.start_t = self.bar.last_print_t = time.monotonic()
        self.val_loss: float | None = None
        self.part = 20 * first_step // steps

    def say(self, text: str = "") -> None:
        """The function above, unless the run is quiet."""
        if not self.quiet:
            say(text)

    def logged(self, step: int, values: dict[str, float]) -> None:
        """Move the bar to the step, or print a line every 20th part of the run."""
        loss, speed = values["loss/train"], values["speed/chars_per_second"]
        if self.bar is None:
            part = 20 * step // self.steps
            if part > self.part or step == 1:
                self.say(f"step {step:>6}  train {loss:.4f}  {speed:>8,.0f} characters/s")
            self.part = part
            return
        val = "" if self.val_loss is None else f"val {self.val_loss:.3f}, "
        with _surviving_broken(sys.stderr):
            self.bar.set_postfix_str(
                f"train {loss:.3f}, {val}{speed / 1000:.1f}k characters/s", refresh=False
            )
            self.bar.update(step - self.bar.n)

    def evaluated(self, step: int, loss: float | None, best: bool) -> None:
        """One line with the validation loss."""
        if loss is not None:
            self.val_loss = loss
            self.say(f"step {step:>6}  validation {loss:.4f}{'  (best)' if best else ''}")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar where it is and give the line back."""
        if self.bar is not None:
            with _surviving_broken(sys.stderr):
                self.bar.close()


def _is_terminal(stream: TextIO) -> bool:
    """Whether a bar can be drawn: some terminals of containers have no columns."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # it does not say
        return True


@contextlib.contextmanager
def _surviving_broken(stream: TextIO) -> Iterator[None]:
    """A stream that cannot be written any more is discarded, and nothing is raised.

    Lines that nobody reads any more (``| head``) are no loss; those of a full disk are.
    """
    try:
        yield
    except OSError as error:
        discard(stream)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            warn("standard output cannot be written any more; training goes on")
