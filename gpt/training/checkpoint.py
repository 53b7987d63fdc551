"""Checkpoints: saved whole or not at all, and read without trust.

``checkpoints/step-00001000.pt`` (the newest two) and ``checkpoints/best.pt`` are files of
torch.save; what they hold is in ``gpt.training.schema``. A file is written beside its place,
forced to the disk, read back, renamed, and only then may an older one go, so a crash at any moment
leaves a good one. Order is by the step in the name, never by a clock.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from gpt.config import from_flat
from gpt.errors import CheckpointError, NonFiniteError
from gpt.model.gpt import GPT
from gpt.text.printable import shortened
from gpt.text.tokenizer import CharTokenizer
from gpt.training import disk
from gpt.training.atomic import link_atomically, make_folder, write_atomically
from gpt.training.integrity import non_finite, read_plain, tensors, verify
from gpt.training.schema import FORMAT_VERSION, NewerFormatError, WithoutDraws, check_state
from gpt.training.updates import UpdateRule, accepted

KEPT = 2
_NAME = re.compile(r"step-([0-9]{8,18})\.pt")


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """A checkpoint that was checked from end to end; ``gpt.training.schema`` has the fields.

    ``notices`` are one-line facts for the user: which files were damaged and passed over.
    """

    path: Path
    notices: tuple[str, ...] = ()
    format_version: int
    config: dict[str, Any]
    vocabulary: str
    model: dict[str, Tensor]
    optimisers: list[dict[str, Any]]
    step: int
    best: dict[str, Any] | None
    source: dict[str, Any]
    environment: dict[str, Any]


def save_checkpoint(folder: Path, state: dict[str, Any], *, is_best: bool) -> Path:
    """Write ``folder/step-<step>.pt``, name it ``best.pt`` too if ``is_best``, keep the newest two.

    ``state`` has the fields of ``gpt.training.schema`` but format_version. Whatever fails, no
    checkpoint that was there is lost and no temporary file stays.
    Raises NonFiniteError for a NaN or an infinity, CheckpointError for a state that could not be
    loaded again, and DiskError, also for a file that cannot be read back.
    """
    plain = {"format_version": FORMAT_VERSION, **_to_plain(state)}
    wrong = non_finite(plain)
    if wrong is not None:
        raise NonFiniteError(
            f"{wrong} holds NaN or infinity at step {plain['step']} and is not saved; the earlier "
            "checkpoints hold. Try a lower --learning_rate"
        )
    check_state(plain)
    target = folder / f"step-{plain['step']:08d}.pt"
    make_folder(folder)
    needed = sum(tensor.nbytes for _, tensor in tensors(plain)) * 11 // 10 + 2**16
    write_atomically(
        target,
        lambda file: torch.save(plain, cast(IO[bytes], file)),
        needed=needed,
        check=verify,
    )
    if is_best:
        link_atomically(target, folder / "best.pt")
    with contextlib.suppress(OSError):  # the new one is safe; the next save tries again
        # Later steps are not of this run, or not yet: nobody knows what they hold.
        done = [path for step, path in _newest_first(folder) if step <= plain["step"]]
        for old in done[KEPT:]:
            disk.remove(old)
    return target


def name_best_again(checkpoint: Checkpoint) -> None:
    """Name a checkpoint ``best.pt`` if it is the best of its run, as a save does.

    A run that was killed between the two names of a save goes on with this. Raises DiskError.
    """
    if checkpoint.best and checkpoint.best["step"] == checkpoint.step:
        link_atomically(checkpoint.path, checkpoint.path.with_name("best.pt"))


def load_checkpoint(
    path: str | Path, *, prefer: Literal["newest", "best"] = "best", set_aside: bool = False
) -> Checkpoint:
    """Read a checkpoint file, or the preferred one of a run folder.

    A file is read or refused. In a folder a damaged file is passed over and named in ``notices``;
    with ``set_aside`` it is also renamed ``*.corrupt``. A file of a newer format is never passed
    over. Raises CheckpointError: which file, what is wrong with it, what to do.
    """
    path = Path(path)
    if not path.is_dir():
        return _read(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    notices: list[str] = []
    changed = True
    while changed:  # a training run replaced what it had saved: look again
        changed = False
        notices.clear()
        for candidate in _candidates(folder, prefer):
            try:
                return _read(candidate, tuple(notices))
            except NewerFormatError:
                raise
            except CheckpointError as error:
                if not os.path.lexists(candidate):
                    changed = True
                    continue
                kept = _set_aside(candidate) if set_aside and _is_damage(error) else ""
                notices.append(f"{error}{kept}")
    if not notices:
        raise CheckpointError(
            f"there is no checkpoint in {str(folder)!r}; train first, or give another run folder"
        )
    raise CheckpointError(
        f"no checkpoint in {str(folder)!r} can be used; put a good copy there, or start a new "
        "run: " + "; ".join(notices)
    )


def restore(checkpoint: Checkpoint) -> tuple[GPT, CharTokenizer]:
    """The trained model, in eval mode and float32 on the CPU, and its tokenizer."""
    config = from_flat(checkpoint.config)
    tokenizer = CharTokenizer(checkpoint.vocabulary)
    with WithoutDraws():
        model = GPT(config.model, tokenizer.vocab_size, config.training.seed)
    model.load_state_dict(checkpoint.model)
    return model.eval(), tokenizer


def restore_optimisers(checkpoint: Checkpoint, optimisers: Sequence[UpdateRule]) -> None:
    """Give freshly built optimisers the memory (moments, counts) of the saved ones.

    Rates, decays and other settings stay those of ``optimisers``: they come from the config,
    which may have changed. Raises CheckpointError, before anything is touched, when the saved
    ones belong to other parameters.
    """
    saved = checkpoint.optimisers
    if not accepted(optimisers, saved):
        raise CheckpointError(
            f"checkpoint {str(checkpoint.path)!r} has the state of other optimisers than this "
            "run; resume with the optimizer it was trained with, or start a new run"
        )
    for state, optimiser in zip(saved, optimisers, strict=True):
        optimiser.load_state_dict(state)


def _read(path: Path, notices: tuple[str, ...] = ()) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint {str(path)!r}; give a run folder, or a .pt file of one"
        )
    try:
        state = read_plain(path)
        check_state(state)
        named = _NAME.fullmatch(path.name)
        if named and int(named[1]) != state["step"]:
            raise CheckpointError(f"it holds step {state['step']}, and its name says another")
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot read checkpoint {str(path)!r}: {reason}") from error
    except CheckpointError as error:
        message = f"checkpoint {str(path)!r} cannot be used: {shortened(str(error), 600)}"
        raise type(error)(message) from error
    return Checkpoint(path=path, notices=notices, **state)


def _candidates(folder: Path, prefer: str) -> list[Path]:
    """The checkpoints of a folder, in the order in which they are tried."""
    try:
        steps = [path for _, path in _newest_first(folder)]
    except OSError as error:
        raise CheckpointError(f"cannot look into {str(folder)!r}: {error.strerror}") from error
    best = [path for path in [folder / "best.pt"] if path.exists()]
    return best + steps if prefer == "best" else steps + best


def _is_damage(error: CheckpointError) -> bool:
    """Whether the contents are at fault, and not that the file could not be opened."""
    return isinstance(error.__cause__, CheckpointError)


def _set_aside(path: Path) -> str:
    """Rename a damaged file out of the way; what to tell about it."""
    names = itertools.chain([".corrupt"], (f".corrupt-{n}" for n in itertools.count(2)))
    try:
        free = next(p for n in names if not (p := path.with_name(path.name + n)).exists())
        disk.replace(path, free)
    except OSError as error:
        return f" (it stays where it is: {error.strerror})"
    return f" (renamed {free.name!r})"


def _newest_first(folder: Path) -> list[tuple[int, Path]]:
    """The step checkpoints of a folder, each with the step in its name."""
    steps = {path: _NAME.fullmatch(path.name) for path in disk.entries(folder)}
    found = [(int(step[1]), path) for path, step in steps.items() if step]
    return sorted(found, reverse=True)


def _to_plain(value: Any) -> Any:
    """The same data in the few types that load without trust.

    Tensors come to the CPU in storages of their own; tuples become lists, NumPy scalars numbers.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if whole else tensor.clone()
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    assert value is None, f"a checkpoint cannot hold a {type(value).__name__}"
    return None
