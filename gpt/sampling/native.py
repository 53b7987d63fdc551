"""Reading with the kernels of gpt/native/generate.c: the same logits without torch's overhead.

One character is so little work that most of torch's time for it is spent between operations. The
kernels are used only after they have given the model's own logits for a few characters.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from gpt.config import Dtype
from gpt.model.gpt import GPT, evaluating
from gpt.native.library import library
from gpt.sampling.tape import Operation, Tape, Unknown

MOST_ROWS = 48
"""Rows that go through the model together, a multiple of what the kernels take at once."""
CACHED_BYTES = 8 * 2**20
"""Matrices that take more in float32 leave a processor's caches, and are read faster halved."""
MOST_BYTES = 2**31
"""Packing copies the matrices; larger models are left to torch."""
WORTH_THREADS = 2**23
"""Multiplications, at least, for which waking another thread pays."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""How far logits may be from the model's own, as a fraction of the largest. bfloat16 rounds each
weight by up to 2^-9, which is no error; what these catch is another mathematics."""


class _Tape(ctypes.Structure):
    """``tape`` of generate.c."""

    _fields_ = [
        ("n_operations", ctypes.c_int64),
        ("operations", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("vocab_size", "context", "most_rows", "stride")),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
    ]


class NativeReader:
    """A ``Reader`` that computes a tape. It keeps the weights that the model had when it was made;
    ``halved`` stores matrices in bfloat16. Raises Unknown for a model that has no tape."""

    def __init__(
        self, model: GPT, n_streams: int, kernels: ctypes.CDLL, *, halved: bool = False
    ) -> None:
        for name in ("panel", "lanes"):
            getattr(kernels, name).restype = ctypes.c_int64
        panel, lanes = kernels.panel(), kernels.lanes()
        self.tape = Tape(model, n_streams, panel=panel, lanes=lanes, halved=halved)
        self.n_streams, self.length = n_streams, 0
        self.n_weights = sum(p.numel() for p in model.parameters())
        self.threads = min(n_streams, torch.get_num_threads())
        self._pool = ThreadPoolExecutor(max(1, self.threads - 1))  # starts threads when needed
        self._kernel = kernels.forward
        self._kernel.restype = ctypes.c_int64
        self._kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 5]
        dtype = str(self.tape.dtype).removeprefix("torch.")
        self.where = f"device cpu, {dtype}"
        # A stride that is no power of 2: the rows of a tile lie in different sets of the cache.
        stride = -(-self.tape.widest // panel) * panel + panel + lanes
        context, vocab_size = self.tape.context, model.vocab_size
        size = 3 * MOST_ROWS * stride + context + 2 * panel + stride
        size += -size % lanes + lanes
        self._workspace = np.zeros((self.threads, size), dtype)
        self._logits = np.zeros((n_streams, -(-vocab_size // panel) * panel), dtype)
        self._shown = self._logits[:, :vocab_size]
        operations = self.tape.operations
        self._operations = (Operation * len(operations))(*operations)
        self._tape = _Tape(
            len(operations), ctypes.addressof(self._operations), vocab_size, context, MOST_ROWS,
            stride, self._workspace.ctypes.data, size, self._logits.ctypes.data,
            self._logits.shape[1],
        )  # fmt: skip
        self._address = ctypes.addressof(self._tape)

    @classmethod
    def of(cls, model: GPT, n_streams: int, dtype: Dtype = "auto") -> "NativeReader | None":
        """A reader whose logits are the model's; None where there is no compiler or no tape."""
        if type(model) is not GPT or model.device.type != "cpu":
            return None
        own = model.token_embedding.weight.dtype
        n_bytes = 4 * sum(p.numel() for p in model.parameters() if p.ndim == 2)
        if own not in (torch.float32, torch.float64) or n_bytes > MOST_BYTES:
            return None
        kernels = library("generate", f"REAL={'float' if own == torch.float32 else 'double'}")
        if kernels is None:
            return None
        cold = dtype == "auto" and n_bytes > CACHED_BYTES
        halved = own == torch.float32 and (cold or dtype == "bfloat16")
        try:
            reader = cls(model, n_streams, kernels, halved=halved)
        except Unknown:
            return None
        tolerance = TOLERANCES[torch.bfloat16 if halved else own]
        return reader if reader._agrees(model, tolerance) else None

    def restart(self) -> None:
        self.length = 0

    def read(self, ids: np.ndarray) -> np.ndarray:
        """As of ``Reader``; the result is overwritten by the next call. Raises IndexError for ids
        outside the vocabulary, and for more characters than the context holds."""
        B, T = ids.shape
        assert B <= self.n_streams
        ids = np.ascontiguousarray(ids, np.int64)
        threads = min(B, self.threads) if B * T * self.n_weights >= WORTH_THREADS else 1
        size = -(-B // threads)
        # The kernels leave Python's lock to others while they compute.
        pieces = [(first, min(size, B - first)) for first in range(0, B, size)]
        waiting = [
            self._pool.submit(self._run, ids, *piece, worker)
            for worker, piece in enumerate(pieces[1:], 1)
        ]
        refused = self._run(ids, *pieces[0], 0)
        if any([refused, *(one.result() for one in waiting)]):
            raise IndexError("an id outside the vocabulary, or more than the context holds")
        self.length += T
        return self._shown[:B]

    def _run(self, ids: np.ndarray, first: int, count: int, workspace: int) -> int:
        """Streams ``first`` and after it, ``count`` in all. Not 0: nothing was read."""
        T = ids.shape[1]
        address = ids.ctypes.data + first * T * ids.itemsize
        return self._kernel(self._address, address, first, count, T, self.length, workspace)

    def _agrees(self, model: GPT, tolerance: float) -> bool:
        """Whether a few characters, read at once and one by one, get the model's own logits."""
        n = min(4, model.config.context_length)
        row = np.arange(n) * 7 % model.vocab_size
        with evaluating(model):
            expected = model.forward(torch.from_numpy(row)[None])[0, -1].numpy()
        found = self.read(row[None, : max(1, n - 2)])
        for i in range(self.length, n):
            found = self.read(row[None, i : i + 1])
        self.restart()
        difference = np.abs(found[0] - expected).max()
        return bool(difference <= tolerance * np.abs(expected).max())  # NaN is no agreement
