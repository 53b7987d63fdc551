"""Run folders: a new one, one owner at a time, and where an old one goes on."""

import re
from pathlib import Path

from filelock import FileLock, Timeout

from gpt.config import RunConfig, changed, from_flat
from gpt.corpus import read_text
from gpt.errors import FolderInUseError, UsageError
from gpt.text.reading import Corpus
from gpt.training.checkpoint import Checkpoint, load_checkpoint
from gpt.training.machine import Machine


def new_folder(name: str, root: Path = Path("runs")) -> Path:
    """Make ``root/name-1``, or -2, -3, ...: the first that nobody has."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    number = 1
    while True:
        folder = root / f"{safe[:48]}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UsageError(f"cannot make the run folder {folder}: {error.strerror}") from error


def given_folder(folder: Path) -> Path:
    """The folder of a new run, made; refused when it holds anything."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"cannot use --out {folder}: {error.strerror}") from error
    if used:
        raise UsageError(
            f"--out {folder} is not empty, and a run never writes over another; choose a new "
            f"folder, or go on with it: --resume {folder}"
        )
    return folder


def owner(folder: Path) -> FileLock:
    """A lock on the folder, freed when the process ends, however it ends."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FolderInUseError(
            f"{folder} is in use by another training run; wait for it, or choose another --out"
        ) from error
    return lock


def resume_point(folder: Path, config: RunConfig, allow_data_change: bool) -> tuple[
    Checkpoint, Corpus, list[str]
]:  # fmt: skip
    """The newest usable checkpoint of a run, its text, and what is to be said about the two.

    Raises CheckpointError or UsageError when the run cannot go on as this config asks.
    """
    checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True)
    before = from_flat(checkpoint.config)
    notices = list(checkpoint.notices)
    for name, (old, new) in changed(before, config).items():
        if hasattr(config.model, name) and name != "dropout":
            raise UsageError(
                f"{name} = {new}, but the checkpoint was trained with {old}; a resumed run keeps "
                "its model, so drop the flag or start a new run"
            )
        if name in ("val_fraction", "encoding", "keep_newlines"):
            raise UsageError(
                f"{name} = {new}, but the run began with {old}; a resumed run keeps its split, so "
                "drop the flag or start a new run"
            )
        if name != "text":
            notices.append(f"changed: {name} {old} -> {new}")
    corpus = read_text(config, checkpoint.vocabulary)
    then, now = checkpoint.source["sha256"], corpus.source.sha256
    if then != now and not allow_data_change:
        raise UsageError(
            f"the text has changed since the checkpoint: sha256 was {then[:16]}..., "
            f"is {now[:16]}...; restore it, or pass --allow_data_change"
        )
    if then != now:
        notices.append("the text has changed since the checkpoint (--allow_data_change)")
    return checkpoint, corpus, notices


def inexact(checkpoint: Checkpoint, machine: Machine) -> list[str]:
    """What differs from where the checkpoint was made, so that resuming is not bit for bit."""
    here = machine.environment()
    return [
        f"{name} was {checkpoint.environment.get(name)}, is {here[name]}: "
        "the run goes on, but not bit for bit as it would have"
        for name in here
        if checkpoint.environment.get(name) != here[name]
    ]
