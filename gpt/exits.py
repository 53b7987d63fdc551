"""How a command begins and ends: streams and signals, one message for an error, an exit code.

Imported before anything that takes time, so that Ctrl-C is answered from the start.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from gpt.errors import DiskError, UsageError
from gpt.text.printable import printable, shortened

LONGEST_MESSAGE = 3000
"""Characters."""


def exit_code(main: Callable[[], int | None]) -> int:
    """Call a command; turn what a user can cause into one message and an exit code."""
    _open_streams()
    hear_interrupts()
    if hasattr(signal, "SIGUSR1"):  # it asks a run to save, and must not end what is none
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        if "OMP_WAIT_POLICY" not in os.environ and _others_run():
            # OpenMP threads that wait spin for milliseconds: a tenth faster alone, several times
            # slower beside others that do the same. Read when torch is imported.
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        return main() or 0
    except UsageError as error:
        to_stderr(f"error: {shortened(printable(str(error)), LONGEST_MESSAGE)}")
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "t allocate memory" not in str(error):
            raise
        to_stderr("error: out of memory; try smaller settings, or fewer at once")
        return UsageError.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (| head); keep Python's last flush from complaining.
        discard(sys.stdout)
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        to_stderr(f"error: cannot write: {error.strerror}; make room")
        discard(sys.stdout)
        return DiskError.exit_code
    finally:
        # Python only ends from here on; a Ctrl-C that it met there would be a traceback.
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def to_stderr(text: str) -> None:
    """A line on standard error. One that cannot be written is lost, and so are all later ones."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def end(code: int) -> NoReturn:
    """End the process at once: taking torch apart would be half a second of every command.

    Everything that has to be closed has been closed, and the streams are emptied here; but what is
    registered for the end of Python (a profiler's report) does not come.
    """
    if "torch" in sys.modules:
        with contextlib.suppress(OSError):  # Python's own end says so
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


def hear_interrupts() -> None:
    """Let the next Ctrl-C be a KeyboardInterrupt, and the one after it end the process at once.

    Where Ctrl-C is ignored (a background job of a script), it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


@contextlib.contextmanager
def hearing_terminations() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP are what Ctrl-C is: a KeyboardInterrupt, of the signal's number.

    Those that are ignored (nohup) stay so.
    """
    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has not all of them
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_discarded: dict[TextIO, BaseException | None] = {}


def discard(stream: TextIO) -> None:
    """Let what is written to the stream, and what is still in its buffer, go nowhere.

    For one that cannot be written: ``lost`` tells by which error, the one that is handled now.
    """
    _discarded[stream] = sys.exc_info()[1]
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def lost(stream: TextIO) -> BaseException | None:
    """Why the stream was discarded; None where everything written to it arrived."""
    return _discarded.get(stream)


def _others_run(looks: int = 3) -> bool:
    """Whether half the cores are at work, whenever one looks; False where nobody tells."""
    for _ in range(looks):
        try:
            running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3]  # "2/345"
            if int(running.split("/")[0]) <= max(1, (os.cpu_count() or 1) // 2):  # this one counts
                return False
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(0.003)
    return True


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # the answer to the first must not meet a second
    raise KeyboardInterrupt(number)


def _open_streams() -> None:
    """Three streams, in UTF-8 whatever the locale says; the null device for those closed."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
