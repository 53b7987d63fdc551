"""From a file that anyone may have made to plain data, or a refusal; nothing in it is run.

Torch writes a checksum for each entry of its zip files and does not look at it when reading: most
flipped bits load as wrong numbers. So a file is checked here before torch sees it.
"""

import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from gpt.errors import CheckpointError

_DEEPEST = 8
_TENSOR_PARTS = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}


def read_plain(path: Path) -> dict[str, Any]:
    """The dict in a file of torch.save: str or int keys, lists, plain values, CPU tensors.

    Nothing that the file says can run code, and nothing larger than the file comes out of it.
    Raises CheckpointError (the reason alone, without the path) and OSError.
    """
    if not path.is_file():  # opening a pipe would wait for ever
        raise CheckpointError("it is not a file")
    with path.open("rb") as file:
        n_bytes = check_archive(file)
        file.seek(0)
        if file.read(4) != b"PK\x03\x04":  # torch would take it for one of its old formats
            raise CheckpointError("it does not begin as a file of torch.save")
        file.seek(0)
        try:
            data = torch.load(file, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(f"torch cannot read it: {_reason(error)}") from error
    _check_plain(data, n_bytes)
    return data


def check_archive(file: IO[bytes]) -> int:
    """Check every byte of a torch.save file against its checksums; return its size.

    No entry may be compressed, repeated or larger than the file, so that reading it cannot take
    more memory than its size says, and its pickle may name nothing but tensors.
    Raises CheckpointError and OSError.
    """
    n_bytes = file.seek(0, 2)
    if n_bytes == 0:
        raise CheckpointError("it is empty")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = {entry.filename.lower(): entry for entry in entries}  # torch ignores case
            total = sum(entry.file_size for entry in entries)
            stored = all(
                entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
                for entry in entries
            )
            if not stored or total > n_bytes or len(names) < len(entries):
                raise CheckpointError(
                    "its entries are compressed, repeated or larger than the file, which "
                    "torch.save never writes"
                )
            broken = archive.testzip()
            if broken is not None:
                raise CheckpointError(f"it is damaged: entry {broken!r} fails its checksum")
            pickles = [archive.read(names[n]) for n in names if n.endswith("data.pkl")]
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"it is damaged, or not a file of torch.save: {_reason(error)}"
        ) from error
    for pickle in pickles:
        _check_names(pickle)
    return n_bytes


def verify_archive(path: Path) -> None:
    """``check_archive`` of the file at ``path``."""
    with path.open("rb") as file:
        check_archive(file)


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


def _check_names(pickle: bytes) -> None:
    try:
        codes = [(code, value) for code, value, _ in pickletools.genops(pickle)]
    except Exception as error:
        raise CheckpointError(f"its contents cannot be parsed: {_reason(error)}") from error
    for code, value in codes:
        if code.proto > 2:
            raise CheckpointError(f"it uses {code.name}, which torch.save does not write")
        if code.name != "GLOBAL" or value in _TENSOR_PARTS:
            continue
        module, _, name = str(value).partition(" ")
        if module != "torch" or not name.endswith("Storage"):
            raise CheckpointError(
                f"it asks for {f'{module}.{name}'!r}, which is neither a tensor nor plain data "
                "and could run code; nothing was run"
            )


def _check_plain(data: Any, n_bytes: int) -> None:
    """Plain types only, in no more values and tensor bytes than the file has bytes.

    Values and storages may be shared in a pickle: a small file can describe a huge structure.
    """
    left = {"values": n_bytes, "tensor bytes": n_bytes}

    def spend(kind: str, amount: int) -> None:
        left[kind] -= amount
        if left[kind] < 0:
            raise CheckpointError(f"it describes more {kind} than it can hold")

    def visit(value: Any, depth: int) -> None:
        spend("values", 1)
        if depth > _DEEPEST:
            raise CheckpointError(f"it is nested deeper than {_DEEPEST} levels")
        if type(value) is dict:
            for key, item in value.items():
                if type(key) not in (str, int):
                    raise CheckpointError(f"it has a key of type {type(key).__name__}")
                visit(item, depth + 1)
        elif type(value) is list:
            for item in value:
                visit(item, depth + 1)
        elif type(value) is Tensor:
            dense = value.layout is torch.strided and value.device.type == "cpu"
            if not dense or not value.is_contiguous():
                raise CheckpointError("it has a tensor that is not a plain array")
            spend("tensor bytes", value.nbytes)
        elif value is not None and type(value) not in (str, int, float, bool):
            raise CheckpointError(f"it has a value of type {type(value).__name__}")

    if type(data) is not dict:
        raise CheckpointError(f"it holds a {type(data).__name__}, not a checkpoint")
    visit(data, 0)


def _reason(error: Exception) -> str:
    """The first line that says something.

    Torch first advises to load again without protection, and gives its reason after that.
    """
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return text.splitlines()[0] if text else type(error).__name__
