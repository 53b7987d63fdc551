"""Ctrl-C and termination: the first signal asks the run to stop after its step, a second kills."""

import signal
from types import FrameType


class StopSignals:
    """While entered, the first SIGINT, SIGTERM or SIGHUP is only remembered.

    ``received`` is its number, or 0; the exit code of a run that it stopped is 128 plus that. A
    second signal has its usual effect at once, which is safe: checkpoints are replaced whole.
    """

    def __init__(self) -> None:
        names = ("SIGINT", "SIGTERM", "SIGHUP")
        self.numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        self.received = 0

    def __enter__(self) -> "StopSignals":
        # What was ignored (nohup, a background job of a script) stays ignored.
        heard = [n for n in self.numbers if signal.getsignal(n) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, self._remember) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        for other in self.before:
            signal.signal(other, signal.SIG_DFL)
