"""From a file that anyone may have made to plain data, or a refusal; nothing in it is run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.errors import CheckpointError, DiskError
from gpt.training import disk
from gpt.training.archive import read_archive

_DEEPEST = 8


def read_plain(path: Path) -> dict[str, Any]:
    """The dict in a file of torch.save: str or int keys, lists, plain values, CPU tensors.

    Every byte was checked, nothing that the file says can run code, and nothing much larger than
    the file comes out of it. Raises CheckpointError (the reason alone, without the path), OSError.
    """
    if not path.is_file():  # opening a pipe would wait for ever
        raise CheckpointError("it is not a file")
    with disk.read(path) as file:
        data = read_archive(file)
    if type(data) is not dict:
        raise CheckpointError(f"it holds a {type(data).__name__}, not a checkpoint")
    _check_plain(data, 0)
    return data


def verify(path: Path) -> None:
    """Read a file that was just written, as it will be read. Raises DiskError if it is damaged."""
    try:
        read_plain(path)
    except CheckpointError as error:
        raise DiskError(
            f"what was written as {str(path)!r} cannot be read back: {error}; check the disk"
        ) from error


def tensors(data: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in plain data, under its path: ``model.head.weight``."""
    if isinstance(data, Tensor):
        yield name, data
    elif isinstance(data, dict | list):
        pairs = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in pairs:
            yield from tensors(value, f"{name}.{key}" if name else str(key))


def non_finite(data: Any) -> str | None:
    """The path of the first tensor that holds a NaN or an infinity."""
    return next((name for name, t in tensors(data) if not bool(torch.isfinite(t).all())), None)


def _check_plain(value: Any, depth: int) -> None:
    if depth > _DEEPEST:
        raise CheckpointError(f"it is nested deeper than {_DEEPEST} levels")
    if type(value) is dict or type(value) is list:
        for item in value.values() if type(value) is dict else value:
            _check_plain(item, depth + 1)
    elif value is not None and type(value) not in (str, int, float, bool, Tensor):
        raise CheckpointError(f"it has a value of type {type(value).__name__}")
