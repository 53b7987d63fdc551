"""How a command begins and ends: streams and signals, one message for an error, an exit code.

Imported before anything that takes time, so that Ctrl-C is answered from the start.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TextIO

from gpt.errors import DiskError, UsageError
from gpt.text.printable import printable, shortened

LONGEST_MESSAGE = 3000
"""Characters."""


def exit_code(main: Callable[[], int | None]) -> int:
    """Call a command; turn what a user can cause into one message and an exit code."""
    # Idle OpenMP threads spin for milliseconds by default. Where anything else runs on the machine,
    # that makes two threads slower than one. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    _open_streams()
    hear_interrupts()
    if hasattr(signal, "SIGUSR1"):  # it asks a run to save, and must not end what is none
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        return main() or 0
    except UsageError as error:
        print("error:", shortened(printable(str(error)), LONGEST_MESSAGE), file=sys.stderr)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "t allocate memory" not in str(error):
            raise
        print("error: out of memory; try smaller settings, or fewer at once", file=sys.stderr)
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
        print(f"error: cannot write: {error.strerror}; make room", file=sys.stderr)
        discard(sys.stdout)
        return DiskError.exit_code
    finally:
        # Python only ends from here on; a Ctrl-C that it met there would be a traceback.
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def hear_interrupts() -> None:
    """Let the next Ctrl-C be a KeyboardInterrupt, and the one after it end the process at once.

    Where Ctrl-C is ignored (a background job of a script), it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


def discard(stream: TextIO) -> None:
    """Let what is written to the stream, and what is still in its buffer, go nowhere."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # the answer to the first must not meet a second
    raise KeyboardInterrupt


def _open_streams() -> None:
    """Three streams, in UTF-8 whatever the locale says; the null device for those closed."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
