"""Normalisation of each position's features, alone: nothing crosses positions or the batch."""

import torch.nn.functional as F
from torch import Tensor, float64, full, nn, ones, zeros

from gpt.model.kernels import NormKernel


class LayerNorm(nn.Module):
    """``gamma * (x - mean) / sqrt(var + eps) + beta`` over the last axis, var biased (1/d).

    Shapes: x and the result ``(..., d_model)``. Source: Ba et al. 2016, arXiv 1607.06450.
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(ones(d_model))
        self.beta = nn.Parameter(zeros(d_model))
        self.eps = eps
        self.kernel: NormKernel | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel:
            return self.kernel(x, self.gamma, self.beta)
        return F.layer_norm(x, self.gamma.shape, self.gamma, self.beta, self.eps)


class RMSNorm(nn.Module):
    """``gamma * x / sqrt(mean(x^2) + eps)`` over the last axis: no centring, no shift.

    Shapes: x and the result ``(..., d_model)``. Source: Zhang & Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(ones(d_model))
        self.eps = eps
        self.kernel: NormKernel | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel:
            return self.kernel(x, self.gamma, None)
        return rms_normalise(x, self.eps) * self.gamma


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, in float32 or better."""
    return F.rms_norm(x if x.dtype == float64 else x.float(), x.shape[-1:], eps=eps)


class DyT(nn.Module):
    """``gamma * tanh(alpha x) + beta``: no statistics, a bend that one learned number places.

    alpha, one for all features, starts at 0.5.
    Shapes: x and the result ``(..., d_model)``. Source: Zhu et al. 2025, arXiv 2503.10622.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(full((1,), 0.5))
        self.gamma = nn.Parameter(ones(d_model))
        self.beta = nn.Parameter(zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * (self.alpha * x).tanh() + self.beta


class NoNorm(nn.Identity):
    """``x``: no norm at all, and no parameters."""


NORMS: dict[str, type[nn.Module]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "dyt": DyT,
    "none": NoNorm,
}
