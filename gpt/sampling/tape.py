"""A GPT's equations as a tape of operations, and its matrices packed, for gpt/native/generate.c.

Recorded from what a model is made of: what is not known here has no tape, and torch computes it.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model import feedforward, norms, positions
from gpt.model.attention import MultiHeadAttention
from gpt.model.block import Block, PostLNBlock, PreLNBlock
from gpt.model.feedforward import FeedForward, SwiGLU
from gpt.model.gpt import GPT

KINDS = (
    "embed", "layer_norm", "rms_norm", "linear", "head_norm", "rotate", "attend",
    "relu", "relu2", "gelu", "gelu_tanh", "silu_times",
)  # fmt: skip
STREAM, NORMED, WIDE, LOGITS = range(4)
"""The buffers: the residual stream, its norm (or what attention gathered), the widened, logits."""

ACTIVATIONS: dict[Callable[[Tensor], Tensor], str] = {
    F.relu: "relu",
    F.gelu: "gelu",
    feedforward.gelu_tanh: "gelu_tanh",
    feedforward.relu2: "relu2",
}


class Unknown(Exception):  # noqa: N818 - not an error: the model is for torch
    """A part of the model that has no operation."""


class Operation(ctypes.Structure):
    """``operation`` of generate.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "source", "target", "n_in", "n_out")),
        *((name, ctypes.c_int64) for name in ("width", "add", "halved")),
        ("number", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("weights", "vector", "keys", "values")),
    ]


class Tape:
    """The operations of one model for n_streams texts at once; it owns weights and caches.

    ``panel`` and ``lanes`` are those of the library, ``halved`` stores matrices in bfloat16.
    Raises Unknown.
    """

    def __init__(self, model: GPT, n_streams: int, *, panel: int, lanes: int, halved: bool) -> None:
        self.n_streams = n_streams
        self.context, self.vocab_size = model.config.context_length, model.vocab_size
        self.dtype, self.panel, self.lanes, self.halved = (
            model.token_embedding.weight.dtype, panel, lanes, halved,
        )  # fmt: skip
        self.operations: list[Operation] = []
        self.widest = 0
        self._kept: list[Any] = []  # what the operations point to
        with torch.no_grad():
            self._model(model)

    def _model(self, model: GPT) -> None:
        rotation = self._embed(model)
        for block in model.blocks:
            record = _PLACEMENTS.get(type(block))
            if record is None:
                raise Unknown(type(block))
            record(self, block, rotation)
        head = model.token_embedding if model.head is None else model.head
        if isinstance(model.final_norm, nn.Identity):
            self.linear(STREAM, LOGITS, [head.weight], [None])
        else:
            self.norm(model.final_norm, STREAM, NORMED)
            self.linear(NORMED, LOGITS, [head.weight], [None])

    def _embed(self, model: GPT) -> positions.RotaryPositions | None:
        place, scale = model.positions, 1.0
        table: Tensor | None = None
        if type(place) is positions.LearnedPositions:
            table = place.weight
        elif type(place) is positions.SinusoidalPositions:
            scale, table = place.scale, place.table
        elif type(place) is not positions.RotaryPositions:
            raise Unknown(type(place))
        weight = model.token_embedding.weight
        self._add(
            "embed", STREAM, STREAM, n_out=weight.shape[1], number=scale,
            weights=self._copy(weight), vector=self._copy(table),
        )  # fmt: skip
        return place if isinstance(place, positions.RotaryPositions) else None

    def norm(self, norm: nn.Module, source: int, target: int) -> None:
        """``target = norm(source)``."""
        if type(norm) is norms.LayerNorm:
            kind, beta = "layer_norm", norm.beta
        elif type(norm) is norms.RMSNorm:
            kind, beta = "rms_norm", None
        else:
            raise Unknown(type(norm))
        self._add(
            kind, source, target, n_in=len(norm.gamma), number=norm.eps,
            weights=self._copy(norm.gamma), vector=self._copy(beta),
        )  # fmt: skip

    def attention(
        self, attention: MultiHeadAttention, rotation: positions.RotaryPositions | None, source: int
    ) -> None:
        """``stream += attention(source)``."""
        parts = [attention.W_Q, attention.W_K, attention.W_V]
        n_heads, n_kv_heads, d_k = attention.n_heads, attention.n_kv_heads, attention.d_k
        self.linear(source, WIDE, [p.weight for p in parts], [p.bias for p in parts])
        heads = {"n_in": n_heads + n_kv_heads, "width": d_k}
        if attention.qk_norm:
            self._add("head_norm", WIDE, WIDE, number=attention.eps, **heads)
        if rotation is not None:
            cos, sin = rotation.table  # (context_length, d_k / 2) each
            self._add(
                "rotate", WIDE, WIDE, weights=self._copy(cos), vector=self._copy(sin), **heads
            )
        # Keys are panels of positions, values rows filled up to whole vectors.
        keys = (self.n_streams, n_kv_heads, _up(self.context, self.lanes), d_k)
        values = (self.n_streams, n_kv_heads, self.context, _up(d_k, self.lanes))
        self._add(
            "attend", WIDE, NORMED, n_in=n_heads, n_out=n_kv_heads, width=d_k,
            keys=self._room(keys), values=self._room(values),
        )  # fmt: skip
        W_O = attention.W_O
        self.linear(NORMED, STREAM, [W_O.weight], [W_O.bias], add=True)

    def feedforward(self, feedforward: nn.Module, source: int) -> None:
        """``stream += feedforward(source)``."""
        if type(feedforward) is SwiGLU:
            parts, activation = [feedforward.W_gate, feedforward.W_in], "silu_times"
        elif type(feedforward) is FeedForward and feedforward.activation in ACTIVATIONS:
            parts, activation = [feedforward.W_in], ACTIVATIONS[feedforward.activation]
        else:
            raise Unknown(type(feedforward))
        self.linear(source, WIDE, [p.weight for p in parts], [p.bias for p in parts])
        self._add(activation, WIDE, WIDE, n_in=len(parts[0].weight))
        W_out = feedforward.W_out
        self.linear(WIDE, STREAM, [W_out.weight], [W_out.bias], add=True)

    def linear(
        self,
        source: int,
        target: int,
        weights: list[Tensor],
        biases: list[Tensor | None],
        *,
        add: bool = False,
    ) -> None:
        """``target (+)= source W^T + b``, the outputs of several matrices side by side."""
        weight = torch.cat(weights)  # -> (n_out, n_in)
        n_out, n_in = weight.shape
        given = [bias for bias in biases if bias is not None]
        bias = F.pad(torch.cat(given), (0, -n_out % self.panel)) if given else None
        packed = pack(weight, self.panel, halved=self.halved)
        self._add(
            "linear", source, target, n_in=n_in, n_out=n_out, add=add, halved=self.halved,
            weights=self._pointer(packed), vector=self._pointer(bias),
        )  # fmt: skip

    def _add(self, kind: str, source: int, target: int, **fields: Any) -> None:
        self.operations.append(Operation(KINDS.index(kind), source, target, **fields))
        if target != LOGITS:
            width = fields.get("width", 1)
            self.widest = max(self.widest, width * max(fields.get(n, 0) for n in ("n_in", "n_out")))

    def _copy(self, tensor: Tensor | None) -> int | None:
        """Of the model's own tensors: it may be trained on before the text ends."""
        return self._pointer(None if tensor is None else tensor.detach().clone())

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        if tensor.device.type != "cpu" or tensor.dtype not in (self.dtype, torch.int32):
            raise Unknown(tensor.dtype, tensor.device)
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()

    def _room(self, shape: tuple[int, ...]) -> int:
        self._kept.append(np.empty(shape, str(self.dtype).removeprefix("torch.")))
        return self._kept[-1].ctypes.data


def pack(weight: Tensor, panel: int, *, halved: bool) -> Tensor:
    """``(n_out, n_in)`` -> ``(panels, n_in, panel)``, the last panel filled up with zeros.

    ``halved``: ``(panels, n_in, panel / 2)`` of 32 bits, each the bfloat16 roundings of an output
    of the panel's first half (low) and of its second half (high).
    """
    weight = F.pad(weight, (0, 0, 0, -weight.shape[0] % panel))
    panels = weight.unflatten(0, (-1, panel)).transpose(1, 2)  # -> (panels, n_in, panel)
    if not halved:
        return panels.contiguous()
    low, high = panels.to(torch.bfloat16).contiguous().view(torch.int16).int().chunk(2, dim=-1)
    return (low & 0xFFFF) | (high << 16)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _pre(tape: Tape, block: Block, rotation: positions.RotaryPositions | None) -> None:
    """``x + f(norm(x))``, twice."""
    tape.norm(block.norm_1, STREAM, NORMED)
    tape.attention(block.attention, rotation, NORMED)
    tape.norm(block.norm_2, STREAM, NORMED)
    tape.feedforward(block.feedforward, NORMED)


def _post(tape: Tape, block: Block, rotation: positions.RotaryPositions | None) -> None:
    """``norm(x + f(x))``, twice."""
    tape.attention(block.attention, rotation, STREAM)
    tape.norm(block.norm_1, STREAM, STREAM)
    tape.feedforward(block.feedforward, STREAM)
    tape.norm(block.norm_2, STREAM, STREAM)


_PLACEMENTS: dict[type, Callable[[Tape, Any, positions.RotaryPositions | None], None]] = {
    PreLNBlock: _pre,
    PostLNBlock: _post,
}
