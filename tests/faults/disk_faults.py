"""Faults at the seam of the file operations, and a file system that forgets what was not synced."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpt.training import disk

OPERATIONS = sorted(
    name
    for name, value in vars(disk).items()
    if inspect.isfunction(value) and value.__module__ == disk.__name__
)


@contextlib.contextmanager
def each_operation(act: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Calls ``act(name, arguments)`` before every file operation of the body."""

    def heard(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            try:
                act(name, arguments)
            except BaseException:
                if name == "close":  # it fails, but the descriptor is gone
                    original(*arguments)
                raise
            return original(*arguments)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(disk, name, heard(name, getattr(disk, name)))
        yield


def at(n: int, act: Callable[[str], None]) -> Callable[[str, tuple[Any, ...]], None]:
    """Does ``act`` at the n-th operation only, counted from 1 (0: at none)."""
    seen = 0

    def count(name: str, _arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        seen += 1
        if seen == n:
            act(name)

    return count


@dataclass
class Inode:
    """The bytes of a file, and how many of them were forced to the disk."""

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0


class ForgetfulDisk:
    """A file system in memory that follows the operations of a real one and can lose its power.

    What was written is safe up to the last sync of the file, and the names of a folder are safe as
    they were at the last sync of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Inode] = {}
        self.safe_names: dict[str, Inode] = {}

    def follow(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Learn that an operation is about to be done (it will succeed)."""
        match name, arguments:
            case "create", (path,):
                self.names[path.name] = Inode()
            case "write", (file, data):
                self._of(file).data += bytes(data)
            case "sync", (file,):
                self._of(file).synced = len(self._of(file).data)
            case "replace", (source, target):
                moved = self.names.pop(source.name)
                self.names[target.name] = moved
            case "link", (source, target):
                self.names[target.name] = self.names[source.name]
            case "remove", (path,):
                self.names.pop(path.name, None)
            case "sync_folder", (folder,):
                assert folder == self.folder
                self.safe_names = dict(self.names)

    def after_power_loss(self, *, names: bool, kept: float) -> dict[str, bytes]:
        """What is found again: ``names`` that were not synced or not, ``kept`` of such data."""
        found = {}
        for name, inode in (self.names if names else self.safe_names).items():
            unsafe = len(inode.data) - inode.synced
            found[name] = bytes(inode.data[: inode.synced + int(kept * unsafe)])
        return found

    def _of(self, file: Any) -> Inode:
        return self.names[os.path.basename(file.name)]
