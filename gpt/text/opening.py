"""Which files are opened as a text: regular ones and standard input, nothing that could hang."""

import contextlib
import difflib
import os
import stat
import sys
from typing import BinaryIO

from gpt.errors import UsageError
from gpt.text.printable import printable


def shown_name(path: str) -> str:
    """How messages call a file: quoted on one line, or ``standard input`` for ``-``."""
    return "standard input" if path == "-" else f"'{printable(path, keep='')}'"


def open_text(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    """The bytes of a regular file, or of standard input for ``-`` (which is left open).

    Pipes, devices and sockets are refused by their kind, before they are opened: opening a pipe
    may wait for ever, and a device may never end. Raises UsageError, and OSError from the system.
    """
    if path == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed; pass the name of a text file")
        stream = sys.stdin.buffer
        if not stream.isatty():
            _refuse_endless(path, _mode(stream))
        return contextlib.nullcontext(stream)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no file {shown_name(path)}; {_advice(path)}") from None
    except ValueError as error:
        raise UsageError(f"no file is called {shown_name(path)} ({error}); check it") from None
    if stat.S_ISDIR(mode):
        raise UsageError(
            f"{shown_name(path)} is a folder, not a text file; pass one file "
            "(several: cat FOLDER/*.txt | python train.py -)"
        )
    if stat.S_ISFIFO(mode):
        raise UsageError(
            f"{shown_name(path)} is a pipe, which may never answer; connect it to standard "
            "input: python train.py - < PIPE"
        )
    _refuse_endless(path, mode)
    return open(path, "rb")


def stamp(stream: BinaryIO) -> tuple[int, int] | None:
    """What changes when a regular file is written to: its size and time. None for others."""
    mode = _mode(stream)
    if mode is None or not stat.S_ISREG(mode):
        return None
    facts = os.fstat(stream.fileno())
    return facts.st_size, facts.st_mtime_ns


def _mode(stream: BinaryIO) -> int | None:
    """The kind of file behind a stream; None without one, as in a notebook."""
    try:
        return os.fstat(stream.fileno()).st_mode
    except OSError:
        return None


def _refuse_endless(path: str, mode: int | None) -> None:
    if mode is not None and (stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode)):
        raise UsageError(
            f"{shown_name(path)} is a device or a socket, which may never end; pass a text file"
        )


def _advice(path: str) -> str:
    folder, wanted = os.path.split(path)
    try:
        near = difflib.get_close_matches(wanted, os.listdir(folder or "."), n=3)
    except OSError:
        return f"nor a folder {shown_name(folder)}: check the path"
    names = " or ".join(shown_name(os.path.join(folder, name)) for name in near)
    return f"did you mean {names}?" if near else "check the name"
