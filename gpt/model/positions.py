"""Where a token sits: attention alone cannot tell, so the position is stamped on.

Learned and sinusoidal positions are added to the token embeddings, once, before the first block.
Rotary positions leave the embeddings alone and turn the queries and keys of every block.
``start`` is the position of the first token given (not 0 when earlier ones are cached).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """``x + weight[start : start + T]``, one learned vector a position (GPT-1, GPT-2).

    Shapes: x ``(B, T, d_model)``, weight ``(context_length, d_model)``.
    """

    def __init__(self, context_length: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(context_length, d_model))

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return x + self.weight[start : start + x.shape[1]]


class FixedTable(nn.Module):
    """Constants computed in float64 and rounded once, to whatever dtype the module is moved to."""

    table: Tensor

    def __init__(self, exact: Tensor) -> None:
        super().__init__()
        self.exact = exact
        self.register_buffer("table", exact.to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "FixedTable":
        super()._apply(fn, recurse)
        self.table = self.exact.to(self.table.dtype).to(self.table.device)
        return self


class SinusoidalPositions(FixedTable):
    """``sqrt(d_model) x + table``: fixed waves, from fast to slow.

    ``table[p, 2i] = sin(p / 10000^(2i / d_model))`` and ``table[p, 2i + 1]`` its cosine.
    Shapes: x ``(B, T, d_model)``. Source: Vaswani et al. 2017, arXiv 1706.03762, 3.4 and 3.5.
    """

    def __init__(self, context_length: int, d_model: int) -> None:
        angles = _angles(context_length, d_model)
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1)  # (context_length, d_model/2, 2)
        super().__init__(waves.flatten(1))  # -> (context_length, d_model)
        self.scale = math.sqrt(d_model)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return self.scale * x + self.table[start : start + x.shape[1]]


class RotaryPositions(FixedTable):
    """Turns each head's features in pairs, by angles that grow with the position.

    Feature i is paired with feature i + d_k/2 (the halves convention) and the pair is turned by
    ``+ position / 10000^(2i / d_k)``; a query-key product then depends only on their distance.
    Shapes: heads and the result ``(B, n_heads, T, d_k)``. Source: Su et al. 2021, arXiv 2104.09864.
    """

    def __init__(self, context_length: int, d_k: int) -> None:
        angles = _angles(context_length, d_k)
        super().__init__(torch.stack([angles.cos(), angles.sin()]))  # (2, context_length, d_k/2)

    def forward(self, heads: Tensor, start: int = 0) -> Tensor:
        cos, sin = self.table[:, start : start + heads.shape[2]].to(heads.dtype)
        first, second = heads.chunk(2, dim=-1)  # 2 x (B, n_heads, T, d_k/2)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _angles(context_length: int, width: int) -> Tensor:
    """``position / 10000^(2i / width)``, in float64: ``(context_length, width / 2)``."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64)
    positions = torch.arange(context_length, dtype=torch.float64)
    return positions[:, None] / 10000.0 ** (pairs / width)
