"""Normalisation of each position's features, alone: nothing crosses positions or the batch."""

import torch.nn.functional as F
from torch import Tensor, float64, nn, ones, zeros

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


NORMS = {"layer": LayerNorm, "rms": RMSNorm}
