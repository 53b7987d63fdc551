"""Files that are there whole or not at all, whatever happens while they are written.

A file is written under a temporary name beside its target, forced to the disk, read back, and only
then given its name. Every change that this package makes to a saved file goes through here.
"""

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from gpt.errors import DiskError
from gpt.training import disk

_TEMPORARY = re.compile(r"\..+\.tmp\.\d+")


class Sink:
    """A file to write to. It keeps its first error, because torch.save reports another one."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.error:
            raise self.error
        try:
            return disk.write(self.file, data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Does nothing: the whole file is flushed and forced to the disk once, at its end."""


Write = Callable[[Sink], object]


def write_atomically(
    target: Path, write: Write, *, needed: int = 0, check: Callable[[Path], None] | None = None
) -> None:
    """Let ``write`` fill an open file and give it the name ``target``, over what had that name.

    ``needed`` is the expected size in bytes, compared with the free space first. ``check`` gets
    the finished temporary file and raises to refuse it. On any exception the temporary file is
    gone, and ``target`` is as it was unless only the last sync failed. Raises DiskError for what
    the disk refuses.
    """
    temporary = _temporary(target)
    with disk_errors(target, needed):
        free = free_bytes(target.parent)
        if free is not None and needed > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = disk.create(temporary)
        try:  # from here on the file is ours to clean up
            try:
                _write_through(file, write)
                disk.sync(file)
            finally:
                disk.close(file)
            if check:
                check(temporary)
            _replace(temporary, target)
        except BaseException:
            _discard(temporary)
            raise
        disk.sync_folder(target.parent)


def link_atomically(source: Path, target: Path) -> None:
    """Make ``target`` a second name of the file ``source``; a copy where links do not work.

    Raises DiskError for what the disk refuses.
    """
    temporary = _temporary(target)
    with disk_errors(target, 0):
        try:
            disk.link(source, temporary)
        except OSError:
            with disk.read(source) as original:
                size = os.fstat(original.fileno()).st_size
                write_atomically(
                    target, lambda copy: shutil.copyfileobj(original, copy), needed=size
                )
            return
        try:
            _replace(temporary, target)
        finally:
            # Replacing one name of a file by another name of the same file leaves both.
            _discard(temporary)
        disk.sync_folder(target.parent)


def make_folder(folder: Path) -> None:
    """Make the folder and those above it. Raises DiskError for what the disk refuses."""
    with disk_errors(folder, 0):
        if not folder.is_dir():
            disk.make_folder(folder)
            disk.sync_folder(folder.parent)


def sync_name(path: Path) -> None:
    """Force the name of a file or folder to the disk. Raises DiskError."""
    with disk_errors(path, 0):
        disk.sync_folder(path.parent)


def sweep(folder: Path) -> list[str]:
    """Remove the temporary files that killed processes left in ``folder``; return their names.

    The caller holds the lock of the run, so no living process is writing here.
    """
    with disk_errors(folder, 0):
        there = disk.entries(folder) if folder.is_dir() else []
        stray = [p for p in there if _TEMPORARY.fullmatch(p.name) and not p.is_dir()]
        for path in stray:
            disk.remove(path)
    return [path.name for path in stray]


@contextlib.contextmanager
def disk_errors(target: Path, needed: int) -> Iterator[None]:
    """Turn an OSError of the body into a DiskError about ``target``."""
    try:
        yield
    except (FileExistsError, IsADirectoryError) as error:
        raise DiskError(
            f"cannot write {str(target)!r}: {str(error.filename2 or error.filename)!r} is in the "
            "way; delete it"
        ) from error
    except OSError as error:
        free = free_bytes(target.parent)
        space = f"; {megabytes(free)} are free" if free is not None else ""
        if needed:
            space += f" and it takes {megabytes(needed)}"
        raise DiskError(
            f"cannot write {str(target)!r}: {error.strerror or error}{space}. What was saved "
            "before is intact; make room, or make the folder writable"
        ) from error


def free_bytes(folder: Path) -> int | None:
    """The free space where the folder is, or None where the system does not say."""
    try:
        return disk.free_bytes(folder)
    except OSError:
        return None


def megabytes(n_bytes: int) -> str:
    """A number of bytes for people: ``12.3 MB``."""
    return f"{n_bytes / 1e6:,.1f} MB"


def _write_through(file: IO[bytes], write: Write) -> None:
    sink = Sink(file)
    try:
        write(sink)
    except Exception as error:
        if sink.error:
            raise sink.error from error
        raise


def _replace(source: Path, target: Path) -> None:
    """``disk.replace``, again while a Windows virus scanner or indexer holds the target."""
    for pause in (0.01, 0.03, 0.1, 0.3, 1.0):
        try:
            return disk.replace(source, target)
        except PermissionError as error:
            if getattr(error, "winerror", None) not in (5, 32):
                raise
            time.sleep(pause)
    return disk.replace(source, target)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp.{os.getpid()}")


def _discard(path: Path) -> None:
    # What made us give up is the news; a leftover is swept by the next run.
    with contextlib.suppress(OSError):
        disk.remove(path)
