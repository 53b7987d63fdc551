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
_ORDERED_DICT = "collections OrderedDict"
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


class _Global(NamedTuple):
    """A name that a pickle asks for. It is compared, never looked up."""

    name: str


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
            return _read(archive, _entry_names(archive, n_bytes))
    except (OSError, MemoryError, CheckpointError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"it is damaged, or not a file of torch.save: {reason}") from error


def _read(archive: zipfile.ZipFile, names: list[str]) -> Any:
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("data.pkl")]
    if len(roots) != 1:
        raise CheckpointError("it has no data.pkl or several; it is not a file of torch.save")
    (root,) = roots
    unread = set(names)

    def read(name: str) -> bytes:
        if name not in unread:
            raise CheckpointError(f"the entry {name!r} is not there, or used twice")
        unread.remove(name)
        return archive.read(name)  # and compare its checksum

    def tensor(storage: _Storage, *shape: Any) -> Tensor:
        return _tensor(read(f"{root}data/{storage.key}"), storage, *shape)

    if f"{root}byteorder" in unread and read(f"{root}byteorder") != b"little":
        raise CheckpointError("it is from a machine with another order of bytes")
    whole = _interpret(read(f"{root}data.pkl"), tensor)
    for name in sorted(unread):  # nobody asked for them, but damage is damage
        read(name)
    return whole


def _interpret(pickle: bytes, tensor: Callable[..., Tensor]) -> Any:
    """The data that a pickle of torch.save describes; ``tensor`` makes one from its parts.

    Raises CheckpointError for what torch.save does not write, and any other exception for what
    makes no sense.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def pop(n: int) -> list[Any]:
        if not 0 <= n <= len(stack):
            raise CheckpointError("its pickle takes what is not there")
        taken = stack[len(stack) - n :]
        del stack[len(stack) - n :]
        return taken

    def pop_mark() -> list[Any]:
        return pop(len(stack) - marks.pop())

    for n_opcodes, (code, value, _) in enumerate(pickletools.genops(pickle)):
        if n_opcodes == MOST_OPCODES:
            raise CheckpointError(f"it describes more than {MOST_OPCODES:,} values")
        match code.name:
            case "PROTO":
                pass
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(code.name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(value)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(pop(int(code.name[-1]))))
            case "APPEND" | "APPENDS":
                items = pop(1) if code.name == "APPEND" else pop_mark()
                _require(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop(2) if code.name == "SETITEM" else pop_mark()
                for key, item in zip(items[::2], items[1::2], strict=True):
                    if type(key) not in (str, int):
                        raise CheckpointError(f"it has a key of type {type(key).__name__}")
                    _require(dict, stack[-1])[key] = item
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                if type(memo[value]) not in (str, _Global):
                    raise CheckpointError("it uses a part of itself twice")
                stack.append(memo[value])
            case "GLOBAL":
                if value not in (_TENSOR, _ORDERED_DICT, *_DTYPES):
                    raise CheckpointError(
                        f"it asks for {str(value).replace(' ', '.')!r}, which is neither a tensor "
                        "nor plain data and could run code; nothing was run"
                    )
                stack.append(_Global(value))
            case "BINPERSID":
                _, kind, key, _, n = stack.pop()
                stack.append(_Storage(_DTYPES[kind.name], _require(str, key), _require(int, n)))
            case "REDUCE":
                function, arguments = pop(2)
                if function.name == _TENSOR:
                    stack.append(tensor(*arguments[:4]))
                elif function.name == _ORDERED_DICT and arguments == ():
                    stack.append(())  # backward hooks of a tensor: always none
                else:
                    raise CheckpointError(
                        f"it calls {function.name!r}, which torch.save does not write"
                    )
            case "STOP":
                (whole,) = stack
                return whole
            case other:
                raise CheckpointError(f"it uses {other}, which torch.save does not write")
    raise CheckpointError("its pickle does not end")


def _bytes_at(file: IO[bytes], position: int, n: int) -> bytes:
    file.seek(max(position, 0))
    return file.read(n)


def _entry_names(archive: zipfile.ZipFile, n_bytes: int) -> list[str]:
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
    wrong = [i for i, size in enumerate(shape) if size != 1 and stride[i] != strides[i]]
    if offset != 0 or len(stride) != len(shape) or wrong:
        raise CheckpointError("it has a tensor that is not a plain array")
    n = math.prod(shape)
    if n != storage.n or n * storage.dtype.itemsize != len(data):
        raise CheckpointError(f"it has a tensor of shape {shape} in {len(data)} bytes")
    if not data:  # which frombuffer does not take
        return torch.empty(shape, dtype=storage.dtype)
    return torch.frombuffer(bytearray(data), dtype=storage.dtype).reshape(shape)


def _require(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"it has a {type(value).__name__} where a {kind.__name__} belongs")
    return value
