"""Run folders: a new one for every run, one owner at a time, and the newest to write with."""

import contextlib
import errno
import itertools
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from gpt.checks import nearest
from gpt.errors import CheckpointError, DiskError, FolderInUseError, UsageError

RUNS = Path("runs")
"""Where runs are, unless --out says otherwise."""


def new_folder(name: str, root: Path = RUNS) -> Path:
    """Make ``root/name-1``, or -2, -3, ...: the first that nobody has."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_") or "run"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = root / f"{safe[:48]}-{number}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise _refusal(
            error, f"cannot make a run folder in {root}: {error.strerror}; choose one: --out DIR"
        ) from error
    raise AssertionError("counting does not end")


def refuse_used(folder: Path) -> None:
    """Raise UsageError when a new run would write over something in the folder."""
    try:
        found = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise UsageError(
            f"cannot use --out {folder}: {error.strerror}; choose another folder"
        ) from error
    if any(name != ".lock" for name in found):
        if any(folder.glob("checkpoints/*.pt")):
            other = f"go on with it: --resume {folder}"
        elif any(folder.glob("**/*.pt")):
            other = "move it away (it holds the checkpoints of other runs)"
        else:
            other = "delete it (it has no checkpoint)"
        raise UsageError(
            f"--out {folder} is not empty, and a run never writes over another; choose a new "
            f"folder, or {other}"
        )


def refuse_link(folder: Path) -> None:
    """Raise UsageError for a link: what is written into it would change another folder."""
    if folder.is_symlink():
        raise UsageError(
            f"{str(folder)!r} is a link, and links are not written through; delete the link, or "
            "choose another --out"
        )


def given_folder(folder: Path) -> Path:
    """The folder of a new run, made where it is not there. Raises as ``refuse_used`` does."""
    refuse_used(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(
            error, f"cannot make --out {folder}: {error.strerror}; choose another folder"
        ) from error
    return folder


@contextlib.contextmanager
def owner(folder: Path) -> Iterator[Path]:
    """Own the folder inside the context; freed when the process ends, however it ends.

    The lock file names the owner. Raises FolderInUseError while another run owns the folder.
    """
    path = folder / ".lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FolderInUseError(
            f"{folder} is in use by another training run{_owner_of(path)}; wait for it, or choose "
            "another --out"
        ) from error
    except OSError as error:
        raise _refusal(
            error,
            f"cannot write in {folder}: {error.strerror}; make it writable, or choose another",
        ) from error
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield folder
    finally:
        lock.release()


def find_run(run: str, runs: Path = RUNS) -> Path:
    """The run folder or checkpoint file that ``run`` names, or the newest run when it is empty.

    The newest run is the folder, anywhere under ``runs``, whose checkpoints were written last.
    Raises CheckpointError when there is none, or ``run`` is not there.
    """
    if not run:
        written = {}
        for path in runs.glob("**/checkpoints/*.pt"):
            with contextlib.suppress(FileNotFoundError):  # a training run replaces its older ones
                written[path] = path.stat().st_mtime_ns
        if not written:
            raise CheckpointError(
                f"there is no checkpoint under {runs}/; `python train.py` makes one, "
                "or name a run folder"
            )
        return max(written, key=lambda path: (written[path], path)).parent.parent
    if not os.path.exists(run):
        known = [str(folder.parent) for folder in runs.glob("**/checkpoints")]
        raise CheckpointError(
            f"{run!r} is neither a run folder nor a checkpoint file.{nearest(run, known)} "
            "`python train.py` makes a run"
        )
    return Path(run)


def _owner_of(lock: Path) -> str:
    """Who holds a lock, as its file says: `` (process 123 on host)``, or nothing."""
    try:
        with lock.open("rb") as file:
            written = file.read(300).decode("utf-8", "replace")
    except OSError:
        return ""
    return f" ({written})" if re.fullmatch(r"process \d+ on .+", written) else ""


def _refusal(error: OSError, message: str) -> UsageError:
    """The disk refuses (exit 6), or the path is wrong (exit 2)."""
    disk = error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO)
    return (DiskError if disk else UsageError)(message)
