"""Signals while a run trains: stop after this step, or save and go on; a second stop kills."""

import signal
from types import FrameType


class Signals:
    """While entered, the first SIGINT, SIGTERM or SIGHUP is only remembered, and so is SIGUSR1.

    ``stop`` is the number of the first, or 0; the exit code of a run that it stopped is 128 plus
    that. A second one has its usual effect at once, which is safe: checkpoints are replaced whole.
    ``save`` says that a checkpoint is wanted (SIGUSR1).
    """

    def __init__(self) -> None:
        self.stop = 0
        self.save = False

    def __enter__(self) -> "Signals":
        self._before = {}
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has not all of them
            # What was ignored (nohup, a background job of a script) stays ignored.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._stop)
        if hasattr(signal, "SIGUSR1"):
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self.stop:
            # Not at the first one: the second may be on its way already, and Python would drop it.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.stop = number

    def _save(self, _number: int, _frame: FrameType | None) -> None:
        self.save = True
