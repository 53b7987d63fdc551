"""The feed-forward network: each position thinks alone about what attention gathered."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model.kernels import ActivationKernel, DropoutKernel


def gelu_tanh(x: Tensor) -> Tensor:
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``: GPT-2's GELU, within 4.8e-4 of erf's."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """``max(0, x)^2``. Source: So et al. 2021, arXiv 2109.08668."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """``W_out activation(W_in x + b_in) + b_out``: widen, bend, narrow.

    Shapes: x and the result ``(B, T, d_model)``; inside ``(B, T, d_ff)``.
    Sources: Vaswani et al. 2017, 3.3; GELU from Hendrycks & Gimpel 2016, arXiv 1606.08415.
    """

    def __init__(
        self, d_model: int, d_ff: int, activation: str, *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.W_in = nn.Linear(d_model, d_ff, bias=bias)
        self.W_out = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.activation_kernel: ActivationKernel | None = None
        self.dropout = dropout
        self.drop: DropoutKernel = F.dropout

    def forward(self, x: Tensor) -> Tensor:
        activation = self.activation_kernel or self.activation
        hidden = activation(self.W_in(x))  # (B, T, d_model) -> (B, T, d_ff)
        return self.drop(self.W_out(hidden), self.dropout, self.training)


class SwiGLU(nn.Module):
    """``W_out(swish(W_gate x) * W_in x)``: one branch decides how much of the other passes.

    Shapes: x and the result ``(B, T, d_model)``; inside ``(B, T, d_ff)``. No biases.
    Source: Shazeer 2020, arXiv 2002.05202.
    """

    def __init__(self, d_model: int, d_ff: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.W_gate = nn.Linear(d_model, d_ff, bias=False)
        self.W_in = nn.Linear(d_model, d_ff, bias=False)
        self.W_out = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = dropout
        self.drop: DropoutKernel = F.dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.W_gate(x)) * self.W_in(x)  # (B, T, d_model) -> (B, T, d_ff)
        return self.drop(self.W_out(hidden), self.dropout, self.training)
