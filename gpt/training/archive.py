"""A file of torch.save, read as data: its pickle is interpreted here, and nothing in it is run.

Such a file is a zip of stored entries: a pickle, and the bytes of every tensor. Torch writes a
checksum with each entry and never reads it (2.13), so flipped bits load as wrong numbers, and its
reader trusts sizes and marks that the checksums do not cover. This one knows the few opcodes that
plain data and tensors need, takes every byte through its checksum, and refuses the rest.
"""

import math
import pickletools
import zipfile
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from gpt.errors import CheckpointError

MOST_OPCODES = 1_000_000
"""Of a pickle: a checkpoint of 10,000 tensors has a third."""

_TENSOR = "torch._utils _rebuild_tensor_v2"
_HOOKS = "collections OrderedDict"
_DTYPES = {
    "torch FloatStorage": torch.float32,
    "torch DoubleStorage": torch.float64,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}


class _Name(NamedTuple):
    """A name that a pickle asks for. It is compared, never looked up."""

    of: str


class _Storage(NamedTuple):
    """The bytes of a tensor: its dtype, the entry, and how many elements."""

    dtype: torch.dtype
    key: str
    n: int


def read_archive(file: IO[bytes]) -> Any:
    """The dicts, lists, strings, numbers and CPU tensors in a file of torch.save.

    No more memory is taken than some multiple of the size of the file: entries may not be
    compressed, repeated or overlap, and what is in the pickle may not be used twice.
    Raises CheckpointError (the reason alone) and OSError.
    """
    n_bytes = file.seek(0, 2)
    if n_bytes == 0:
        raise CheckpointError("it is empty")
    if _bytes_at(file, 0, 4) != b"PK\x03\x04" or _bytes_at(file, n_bytes - 22, 4) != b"PK\x05\x06":
        raise CheckpointError("it does not begin and end as a file of torch.save")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = _checked(archive, n_bytes)
            data = {name: archive.read(name) for name in entries}  # each against its checksum
        roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("data.pkl")]
        if len(roots) != 1:
            raise CheckpointError("it has no data.pkl or several; it is not a file of torch.save")
        (root,) = roots
        if data.get(f"{root}byteorder", b"little") != b"little":
            raise CheckpointError("it is from a machine with another order of bytes")

        def tensor(storage: _Storage, *shape: Any) -> Tensor:
            key = f"{root}data/{storage.key}"
            if key not in data:
                raise CheckpointError(f"the entry {key!r} is not there, or used twice")
            return _tensor(data.pop(key), storage, *shape)

        return interpret(data[f"{root}data.pkl"], tensor)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"it is damaged, or not a file of torch.save: {reason}") from error


def interpret(pickle: bytes, tensor: Callable[..., Tensor]) -> Any:
    """The data that a pickle of torch.save describes; ``tensor`` makes one from its parts.

    Raises CheckpointError for what torch.save does not write, and any other exception for what
    makes no sense.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def pop(n: int) -> list[Any]:
        taken = stack[len(stack) - n :]
        assert len(taken) == n
        del stack[len(stack) - n :]
        return taken

    def pop_mark() -> list[Any]:
        return pop(len(stack) - marks.pop())

    for number, (code, value, _) in enumerate(pickletools.genops(pickle)):
        if number == MOST_OPCODES:
            raise CheckpointError(f"it describes more than {MOST_OPCODES:,} values")
        match code.name:
            case "PROTO":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[code.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(value)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[code.name])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(pop(int(code.name[-1]))))
            case "APPEND" | "APPENDS":
                items = pop(1) if code.name == "APPEND" else pop_mark()
                _only(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop(2) if code.name == "SETITEM" else pop_mark()
                for key, item in zip(items[::2], items[1::2], strict=True):
                    if type(key) not in (str, int):
                        raise CheckpointError(f"it has a key of type {type(key).__name__}")
                    _only(dict, stack[-1])[key] = item
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                if type(memo[value]) in (dict, list, tuple):
                    raise CheckpointError("it uses a part of itself twice")
                stack.append(memo[value])
            case "GLOBAL":
                if value not in (_TENSOR, _HOOKS, *_DTYPES):
                    raise CheckpointError(
                        f"it asks for {str(value).replace(' ', '.')!r}, which is neither a tensor "
                        "nor plain data and could run code; nothing was run"
                    )
                stack.append(_Name(value))
            case "BINPERSID":
                _, name, key, _, n = stack.pop()
                stack.append(_Storage(_DTYPES[name.of], _only(str, key), _only(int, n)))
            case "REDUCE":
                name, arguments = pop(2)
                if name.of == _TENSOR:
                    stack.append(tensor(*arguments[:4]))
                elif name.of == _HOOKS and arguments == ():
                    stack.append(())
                else:
                    raise CheckpointError(f"it calls {name.of!r}, which torch.save does not write")
            case "STOP":
                (whole,) = stack
                return whole
            case other:
                raise CheckpointError(f"it uses {other}, which torch.save does not write")
    raise CheckpointError("its pickle does not end")


def _bytes_at(file: IO[bytes], position: int, n: int) -> bytes:
    file.seek(max(position, 0))
    return file.read(n)


def _checked(archive: zipfile.ZipFile, n_bytes: int) -> list[str]:
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    stored = all(
        entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        for entry in entries
    )
    if not stored or len(set(names)) < len(names):
        raise CheckpointError("its entries are compressed or repeated, which torch.save never does")
    if sum(entry.file_size for entry in entries) > n_bytes:
        raise CheckpointError("its entries are larger than the file")
    if min((entry.header_offset for entry in entries), default=0) != 0:
        raise CheckpointError("there is something before its entries")
    return names


def _tensor(data: bytes, storage: _Storage, offset: int, shape: Any, stride: Any) -> Tensor:
    """The whole of a storage as a contiguous tensor, and nothing else."""
    if len(shape) > 8 or any(type(size) is not int or size < 0 for size in shape):
        raise CheckpointError("it has a tensor without a shape")
    strides = [math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape))]
    if offset != 0 or list(stride) != strides:
        raise CheckpointError("it has a tensor that is not a plain array")
    n = math.prod(shape)
    if n != storage.n or n * storage.dtype.itemsize != len(data):
        raise CheckpointError(f"it has a tensor of shape {shape} in {len(data)} bytes")
    if not data:  # which frombuffer does not take
        return torch.empty(shape, dtype=storage.dtype)
    return torch.frombuffer(bytearray(data), dtype=storage.dtype).reshape(shape)


def _only(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"it has a {type(value).__name__} where a {kind.__name__} belongs")
    return value
