"""The file operations that saving is made of, one function each and nothing more.

Whatever is saved, swept or read back goes through these, called as ``disk.replace(...)``, so that
a test can make every single one of them fail, stop the process there, or forget what was not yet
forced to the disk.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import IO


def make_folder(folder: Path) -> None:
    """Make the folder and those above it, where they are not there."""
    folder.mkdir(parents=True, exist_ok=True)


def entries(folder: Path) -> list[Path]:
    """What is in the folder, in no order."""
    return list(folder.iterdir())


def free_bytes(folder: Path) -> int:
    """What an ordinary user can still write there."""
    return shutil.disk_usage(folder).free


def create(path: Path) -> IO[bytes]:
    """Open a file that is not there yet: a link or pipe at this name is never followed."""
    return open(path, "xb")


def read(path: Path) -> IO[bytes]:
    """Open a file to read it."""
    return open(path, "rb")


def write(file: IO[bytes], data: bytes | memoryview) -> int:
    """Append to a file; return how many bytes."""
    return file.write(data)


def sync(file: IO[bytes]) -> None:
    """Force what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


def close(file: IO[bytes]) -> None:
    """Close a file that was written."""
    file.close()


def replace(source: Path, target: Path) -> None:
    """Give the file ``source`` the name ``target``, in one step, over what had that name."""
    os.replace(source, target)


def link(source: Path, target: Path) -> None:
    """Give the file ``source`` the second name ``target``, which nothing has yet."""
    os.link(source, target)


def remove(path: Path) -> None:
    """Take away a name, if it is there."""
    path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where the system can do that."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
