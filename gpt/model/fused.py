"""The same mathematics in fewer passes over memory, with the backward pass written by hand.

Training small models on a CPU is half small kernels: composed of torch's operations, each of these
functions costs twice as many. The plain forms stand where they are used; tests hold the two
together, value and gradient. A compiler fuses the plain forms better than these.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def has_backward() -> bool:
    """Whether a backward pass may follow, and no compiler will write it: where these pay off."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class RMSNormalise(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps)`` over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        dtype = x.dtype
        if dtype in (torch.bfloat16, torch.float16):
            x = x.float()
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()  # (..., 1)
        y = x * scale
        ctx.save_for_backward(y, scale)
        ctx.dtype = dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        along = (g * y).mean(dim=-1, keepdim=True)
        return torch.addcmul(g, y, along, value=-1).mul_(scale).to(ctx.dtype), None


class ReluSquared(torch.autograd.Function):
    """``max(0, x)^2``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        h = x.relu()
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return (g * h).mul_(2)


class Turn(torch.autograd.Function):
    """Pairs (first half, second half) of the last axis turned by angles, given cosine and sine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(g, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.empty_like(x)
    a, b = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=a).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=b).addcmul_(first, sin)
    return turned
