"""The C kernels of a training step as autograd nodes, and where in a model they go.

Small models on a CPU spend more time between the large matrix products than in them. These nodes
compute what lies between in one pass each; the plain forms in ``gpt.model`` say what they compute,
and tests hold the two together, value and gradient. Sums and exponentials are in float32. In
bfloat16, attention rounds what it multiplies (queries, keys, values, weights, and their gradients)
to bfloat16 where the processor has products of it; elsewhere it only rounds what it returns.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt.model.attention import MultiHeadAttention
from gpt.model.feedforward import FeedForward, SwiGLU, gelu_tanh, relu2
from gpt.model.gpt import GPT
from gpt.model.kernels import ActivationKernel, AttentionKernel, DropoutKernel, NormKernel
from gpt.model.norms import LayerNorm, RMSNorm
from gpt.native.library import library

LONGEST = 1024
"""Context length up to which a thread keeps the attention of a head in its cache."""


def version() -> str:
    """What decides every bit that the kernels compute: a digest of source, flags, compiler and
    processor. Nothing where there are no kernels; the first time they are compiled."""
    native = _library()
    return "" if native is None else Path(native._name).stem.removeprefix("train-")[:12]


def install(model: GPT) -> None:
    """Let a float32 model on the CPU compute by these kernels, if there are any.

    It has to stay there, in float32, and cannot be pickled any more (its state dict can).
    """
    native = _library()
    if native is None:
        return
    drop = dropout_kernel(native)
    feeds_products = model.config.norm_position == "pre"  # every norm, the final one too
    for module in model.modules():
        if isinstance(module, GPT | MultiHeadAttention | FeedForward | SwiGLU):
            module.drop = drop
        if isinstance(module, MultiHeadAttention) and model.config.context_length <= LONGEST:
            module.kernel = attention_kernel(native, module)
        elif isinstance(module, FeedForward) and module.activation in _ACTIVATIONS:
            module.activation_kernel = activation_kernel(native, _ACTIVATIONS[module.activation])
        elif isinstance(module, LayerNorm | RMSNorm):
            module.kernel = norm_kernel(native, module.eps, feeds_products)


_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "attention_forward": [_POINTER] * 3,
    "attention_backward": [_POINTER] * 4,
    "relu2_forward": [_POINTER, _POINTER, _LONG, ctypes.c_int],
    "relu2_backward": [_POINTER, _POINTER, _POINTER, _LONG, ctypes.c_int],
    "gelu_tanh_forward": [_POINTER, _POINTER, _LONG, ctypes.c_int],
    "gelu_tanh_backward": [_POINTER, _POINTER, _POINTER, _LONG, ctypes.c_int],
    "dropout": [_POINTER, _POINTER, _LONG, _FLOAT, ctypes.c_uint32, ctypes.c_int],
    "norm_forward": [*[_POINTER] * 4, _LONG, _LONG, _FLOAT, ctypes.c_int],
    "norm_backward": [*[_POINTER] * 5, ctypes.c_int, _LONG, _LONG, _FLOAT, ctypes.c_int],
}


def _library() -> ctypes.CDLL | None:
    native = library("train", functions=tuple(_ARGUMENTS))
    if native is not None:
        for name, arguments in _ARGUMENTS.items():
            getattr(native, name).argtypes = arguments
    return native


class _Shape(ctypes.Structure):
    """``Shape`` of train.c."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("B", "T", "n_heads", "n_kv_heads", "d_k")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int) for name in ("qk_norm", "half")),
        *((name, ctypes.c_float) for name in ("eps", "dropout")),
        ("seed", ctypes.c_uint32),
    )


def attention_kernel(native: ctypes.CDLL, module: MultiHeadAttention) -> AttentionKernel:
    """From the joined projections to the joined heads; see ``MultiHeadAttention.kernel``."""

    def kernel(joined: Tensor, rotate: Any, dropout: float) -> Tensor:
        tables = None if rotate is None else rotate.table  # (2, context_length, d_k / 2)
        return _Attention.apply(joined, native, module, tables, dropout)

    return kernel


class _Attention(torch.autograd.Function):
    """qk_norm, rotation and causal attention of all heads, ``(B, T, ...)`` before and after.

    The backward pass computes the attention weights again instead of keeping them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        joined: Tensor,
        native: ctypes.CDLL,
        module: MultiHeadAttention,
        tables: Tensor | None,
        dropout: float,
    ) -> Tensor:
        joined = joined.contiguous()
        B, T, _ = joined.shape
        fits = tables is None or (tables.dtype == torch.float32 and tables.shape[1] >= T)
        assert fits, "the model was moved, or reads more than context_length"
        cos, sin = (0, 0) if tables is None else (part.data_ptr() for part in tables)
        ctx.shape = _Shape(
            B, T, module.n_heads, module.n_kv_heads, module.d_k, cos, sin,
            module.qk_norm, _is_half(joined), module.eps, dropout, _seed() if dropout else 0,
        )  # fmt: skip
        ctx.native, ctx.tables = native, tables
        ctx.save_for_backward(joined)
        out = joined.new_empty(B, T, module.n_heads * module.d_k)
        _check(native.attention_forward(_at(joined), _at(out), ctypes.byref(ctx.shape)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        (joined,) = ctx.saved_tensors
        g, g_joined = g.contiguous(), torch.empty_like(joined)
        shape = ctypes.byref(ctx.shape)
        _check(ctx.native.attention_backward(_at(joined), _at(g), _at(g_joined), shape))
        return g_joined, None, None, None, None


_ACTIVATIONS = {relu2: "relu2", gelu_tanh: "gelu_tanh"}


def activation_kernel(native: ctypes.CDLL, name: str) -> ActivationKernel:
    """The activation of this name in one pass, and its gradient in another."""
    forward = getattr(native, f"{name}_forward")
    backward = getattr(native, f"{name}_backward")
    return lambda x: _Activation.apply(x, forward, backward)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        x = x.contiguous()
        ctx.kernel = backward
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        forward(_at(x), _at(y), x.numel(), _is_half(x))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        g, g_x = g.contiguous(), torch.empty_like(x)
        ctx.kernel(_at(x), _at(g), _at(g_x), x.numel(), _is_half(x))
        return g_x, None, None


def dropout_kernel(native: ctypes.CDLL) -> DropoutKernel:
    """``F.dropout``: the numbers kept are drawn by a hash of their place and a seed."""

    def kernel(x: Tensor, p: float, training: bool) -> Tensor:
        return _Dropout.apply(x, native, p, _seed()) if training and p else x

    return kernel


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, native: ctypes.CDLL, p: float, seed: int) -> Tensor:
        ctx.native, ctx.p, ctx.seed = native, p, seed
        return _dropped(x, native, p, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return _dropped(g, ctx.native, ctx.p, ctx.seed), None, None, None


def _dropped(x: Tensor, native: ctypes.CDLL, p: float, seed: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    n, half = x.numel(), _is_half(x)
    native.dropout(_at(x), _at(y), n, p, seed, half)
    return y


def norm_kernel(native: ctypes.CDLL, eps: float, feeds_products: bool) -> NormKernel:
    """LayerNorm, or without beta RMSNorm, of float32.

    Where the result goes into matrix products only (``feeds_products``: Pre-LN), it is of the
    dtype in which autocast computes those, which would round it next.
    """

    def kernel(x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        half = feeds_products and torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if half else torch.float32
        # What a sublayer made (the norms behind them) is of autocast's dtype.
        return _Norm.apply(x.float(), gamma, beta, native, eps, dtype)

    return kernel


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        native: ctypes.CDLL,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.contiguous()
        assert x.dtype == gamma.dtype == torch.float32, f"no kernel for {x.dtype}"
        y = torch.empty_like(x, dtype=dtype)
        d = x.shape[-1]
        ctx.native, ctx.eps, ctx.centred = native, eps, beta is not None
        ctx.save_for_backward(x, gamma)
        native.norm_forward(
            _at(x), _at(gamma), None if beta is None else _at(beta), _at(y),
            x.numel() // d, d, eps, _is_half(y),
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma = ctx.saved_tensors
        g, g_x, d = g.contiguous(), torch.empty_like(x), x.shape[-1]
        g_vectors = x.new_empty(1 + ctx.centred, d)
        _check(ctx.native.norm_backward(
            _at(x), _at(gamma), _at(g), _at(g_x), _at(g_vectors), ctx.centred,
            x.numel() // d, d, ctx.eps, _is_half(g),
        ))  # fmt: skip
        return g_x, g_vectors[0], g_vectors[1] if ctx.centred else None, None, None, None


def _seed() -> int:
    """A number of torch's own stream, which the loop seeds for every step."""
    return int(torch.randint(2**32, ()))


def _is_half(x: Tensor) -> bool:
    assert x.dtype in (torch.float32, torch.bfloat16), f"no kernel for {x.dtype}"
    return x.dtype == torch.bfloat16


def _at(x: Tensor) -> int:
    assert x.device.type == "cpu", f"no kernel for {x.device}"
    return x.data_ptr()


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for what a kernel keeps")
