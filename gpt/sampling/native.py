"""Reading with the kernels of gpt/native/generate.c: the same logits without torch's overhead.

One character is so little work that most of torch's time for it is spent between operations. The
kernels are used only after they have given the model's own logits for a few characters.
"""

import ctypes
import itertools

import numpy as np
import torch

from gpt.config import Dtype
from gpt.model.gpt import GPT, evaluating
from gpt.native.library import library
from gpt.sampling.tape import Operation, Tape, Unknown

FUNCTIONS = ("panel", "lanes", "forward", "write_on")
MOST_ROWS = 48
"""Rows that go through the model together, a multiple of what the kernels take at once."""
MOST_STREAMS = 6
"""Streams of one reader: so few that their keys and values stay in a processor's caches."""
CACHED_BYTES = 8 * 2**20
"""Matrices that take more in float32 leave a processor's caches, and are read faster halved."""
MOST_BYTES = 2**31
"""Packing copies the matrices; larger models are left to torch."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""How far logits may be from the model's own, as a fraction of the largest. bfloat16 rounds each
weight by up to 2^-9, which is no error; what these catch is another mathematics."""

MISFIT = "an id outside the vocabulary, or more characters than the context holds"


class _Tape(ctypes.Structure):
    """``tape`` of generate.c."""

    _fields_ = [
        ("n_operations", ctypes.c_int64),
        ("operations", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("vocab_size", "context", "most_rows", "stride")),
        ("workspace", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
    ]


class NativeReader:
    """A ``Reader`` of ``n_streams`` of a tape's streams, from ``first`` on.

    It has the weights that the model had when the tape was recorded. Readers of one tape may be
    used by threads of their own: the kernels leave Python's lock to others while they compute.
    """

    def __init__(self, kernels: ctypes.CDLL, tape: Tape, first: int, n_streams: int) -> None:
        self.tape, self.first, self.n_streams, self.length = tape, first, n_streams, 0
        self._forward, self._write_on = kernels.forward, kernels.write_on
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._forward.argtypes = (pointer, pointer, *[number] * 4)
        self._write_on.argtypes = (
            pointer, pointer, *[number] * 5, ctypes.c_double, pointer, pointer
        )  # fmt: skip
        self._forward.restype = self._write_on.restype = ctypes.c_int64
        dtype = str(tape.dtype).removeprefix("torch.")
        self.where = f"device cpu, {dtype}"
        # A stride that is no power of 2: the rows of a tile lie in different sets of the cache.
        stride = tape.widest + -tape.widest % tape.panel + tape.panel + tape.lanes
        room = tape.context + tape.lanes + stride  # for the scores of a row, and what they mix
        self._workspace = np.zeros(3 * MOST_ROWS * stride + room, dtype)
        self._logits = np.zeros((n_streams, tape.vocab_size + -tape.vocab_size % tape.panel), dtype)
        self._weights = np.zeros(tape.vocab_size)
        self._shown = self._logits[:, : tape.vocab_size]
        self._operations = (Operation * len(tape.operations))(*tape.operations)
        self._tape = _Tape(
            len(tape.operations), ctypes.addressof(self._operations), tape.vocab_size,
            tape.context, MOST_ROWS, stride, self._workspace.ctypes.data,
            self._logits.ctypes.data, self._logits.shape[1], self._weights.ctypes.data,
        )  # fmt: skip
        self._address = ctypes.addressof(self._tape)

    def restart(self) -> None:
        self.length = 0

    def read(self, ids: np.ndarray) -> np.ndarray:
        """As of ``Reader``; the result is overwritten by the next call. Raises IndexError for ids
        outside the vocabulary, and for more characters than the context holds."""
        count, T = ids.shape
        assert count <= self.n_streams, f"{count} streams, not {self.n_streams}"
        ids = np.ascontiguousarray(ids, np.int64)
        if self._forward(self._address, ids.ctypes.data, self.first, count, T, self.length):
            raise IndexError(MISFIT)
        self.length += T
        return self._shown[:count]

    def write(self, ids: np.ndarray, uniforms: np.ndarray, temperature: float) -> np.ndarray:
        """Read ids ``(n_streams, T)`` and draw what follows, ``steps`` times: ids ``(steps,
        n_streams)``, from uniforms ``(n_streams, steps)``, as the filters do when they are off.

        Fewer steps where logits are not finite. Raises IndexError as ``read`` does.
        """
        (count, T), steps = ids.shape, uniforms.shape[1]
        assert len(uniforms) == count == self.n_streams, f"{count} streams, not {self.n_streams}"
        ids = np.ascontiguousarray(ids, np.int64)
        new = np.empty((steps, count), np.int64)
        done = self._write_on(
            self._address, ids.ctypes.data, self.first, count, T, self.length,
            steps, temperature, uniforms.ctypes.data, new.ctypes.data,
        )  # fmt: skip
        if done < 0:
            raise IndexError(MISFIT)
        self.length += T + done - 1
        return new[:done]


def native_readers(model: GPT, n_streams: int, dtype: Dtype = "auto") -> list[NativeReader]:
    """Readers of all streams, at most MOST_STREAMS each, that have given the model's own logits.

    None at all where there is no compiler, and for a model that has no tape. Threads get equally
    many, if there are a few streams for each.
    """
    if type(model) is not GPT or model.device.type != "cpu":
        return []
    own = model.token_embedding.weight.dtype
    n_bytes = 4 * sum(p.numel() for p in model.parameters() if p.ndim == 2)
    if own not in (torch.float32, torch.float64) or n_bytes > MOST_BYTES:
        return []
    real = "float" if own == torch.float32 else "double"
    kernels = library("generate", f"REAL={real}", functions=FUNCTIONS)
    if kernels is None:
        return []
    cold = dtype == "auto" and n_bytes > CACHED_BYTES
    halved = own == torch.float32 and (cold or dtype == "bfloat16")
    for name in ("panel", "lanes"):
        getattr(kernels, name).restype = ctypes.c_int64
    try:
        tape = Tape(model, n_streams, panel=kernels.panel(), lanes=kernels.lanes(), halved=halved)
    except (Unknown, MemoryError, RuntimeError):  # torch says RuntimeError for no memory
        return []
    threads = min(torch.get_num_threads(), max(1, n_streams // 4))
    n_readers = -(-n_streams // (MOST_STREAMS * threads)) * threads
    bounds = [n_streams * i // n_readers for i in range(n_readers + 1)]
    readers = [
        NativeReader(kernels, tape, first, stop - first)
        for first, stop in itertools.pairwise(bounds)
    ]
    agrees = _agrees(readers[0], model, TOLERANCES[torch.bfloat16 if halved else own])
    return readers if agrees else []


def _agrees(reader: NativeReader, model: GPT, tolerance: float) -> bool:
    """Whether a few characters, read at once and one by one, get the model's own logits."""
    n = min(4, model.config.context_length)
    row = np.arange(n) * 7 % model.vocab_size
    with evaluating(model):
        expected = model.forward(torch.from_numpy(row)[None])[0, -1].numpy()
    found = reader.read(row[None, : max(1, n - 2)])
    for i in range(reader.length, n):
        found = reader.read(row[None, i : i + 1])
    reader.restart()
    difference = np.abs(found[0] - expected).max()
    return bool(difference <= tolerance * np.abs(expected).max())  # NaN is no agreement
