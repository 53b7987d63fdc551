"""Attention: every position gathers what it needs from the positions before it.

The mathematics is two pure functions over heads that are already split, ``causal_attention`` (the
fused kernel) and ``explicit_attention`` (the same thing, readable); the module around them holds
the four projections.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model.kernels import AttentionKernel, DropoutKernel
from gpt.model.norms import rms_normalise

Rotate = Callable[[Tensor, int], Tensor]
"""Turns heads ``(B, n_heads, T, d_k)`` whose first position is ``start``."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """``softmax(q k^T / sqrt(d_k) + mask) v``, where no query sees a later key.

    Shapes: q ``(B, n_heads, T, d_k)``; k and v ``(B, n_heads, S, d_k)`` with S >= T, the queries
    being the last T of the S positions; the result is shaped like q.
    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 1.
    """
    T, S = q.shape[2], k.shape[2]
    if T == S:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    # is_causal would align the mask with the first key; queries continue a cache at the last one.
    mask = None if T == 1 else visible(T, S, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(d_k) + mask)``: how much each query takes from each key.

    Shapes: q ``(B, n_heads, T, d_k)``, k ``(B, n_heads, S, d_k)`` -> ``(B, n_heads, T, S)``; each
    row sums to 1.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, n_heads, T, S)
    hidden = ~visible(q.shape[2], k.shape[2], q.device)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """The same as ``causal_attention``, step by step."""
    return F.dropout(attention_weights(q, k), dropout) @ v  # (B, n_heads, T, d_k)


def visible(T: int, S: int, device: torch.device) -> Tensor:
    """``(T, S)``, True where the query (one of the last T positions) may see the key."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(diagonal=S - T)


class KVCache:
    """The keys and values of the positions read so far, of one block.

    Shapes: ``(B, n_kv_heads, context_length, d_k)`` each, of which the first ``length`` are filled.
    """

    def __init__(self, empty: Tensor) -> None:
        self.keys, self.values = empty, torch.empty_like(empty)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add T positions; return all of them: ``(B, n_kv_heads, length, d_k)`` each."""
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class MultiHeadAttention(nn.Module):
    """``concat(head_1, ..., head_h) W_O``, ``head_i = attention(x W_Q_i, x W_K_i, x W_V_i)``.

    The heads share one matrix product a projection, then are split: d_k = d_model / n_heads. With
    ``n_kv_heads < n_heads`` several query heads share a key and value head (Ainslie et al. 2023,
    arXiv 2305.13245). ``qk_norm`` divides each head's query and key by its root mean square (Henry
    et al. 2020, arXiv 2010.04245), before any rotation. ``attention_dropout`` drops attention
    weights, ``dropout`` parts of the result.
    Shapes: x and the result ``(B, T, d_model)``. Source: Vaswani et al. 2017, 3.2.2.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        *,
        bias: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_k = n_heads, n_kv_heads, d_model // n_heads
        self.qk_norm, self.eps = qk_norm, eps
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.W_Q = nn.Linear(d_model, d_model, bias=bias)
        self.W_K = nn.Linear(d_model, n_kv_heads * self.d_k, bias=bias)
        self.W_V = nn.Linear(d_model, n_kv_heads * self.d_k, bias=bias)
        self.W_O = nn.Linear(d_model, d_model, bias=bias)
        self.drop: DropoutKernel = F.dropout
        self.attend = causal_attention  # or explicit_attention: the two agree
        self.kernel: AttentionKernel | None = None
        """The same from the joined projections to the joined heads, where the machine has one."""

    def forward(
        self, x: Tensor, rotate: Rotate | None = None, cache: KVCache | None = None
    ) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        joined = self.project(x)  # (B, T, d_model) -> (B, T, (n_heads + 2 n_kv_heads) d_k)
        if self.kernel and cache is None:
            heads = self.kernel(joined, rotate, dropout)  # -> (B, T, d_model)
        else:
            heads = self.heads(joined, rotate, cache, dropout)
        return self.drop(self.W_O(heads), self.dropout, self.training)

    def heads(
        self, joined: Tensor, rotate: Rotate | None, cache: KVCache | None, dropout: float
    ) -> Tensor:
        """Split, attend and join: to ``(B, T, d_model)``."""
        start = cache.length if cache else 0
        q, k, v = self.split(joined, rotate, start)
        if cache:
            k, v = cache.append(k, v)  # (B, n_kv_heads, T, d_k) -> (B, n_kv_heads, start + T, d_k)
        shared_by = self.n_heads // self.n_kv_heads
        if shared_by > 1:
            k = k.repeat_interleave(shared_by, dim=1)  # (B, n_kv_heads, ...) -> (B, n_heads, ...)
            v = v.repeat_interleave(shared_by, dim=1)
        heads = self.attend(q, k, v, dropout)
        return heads.transpose(1, 2).flatten(2)  # (B, n_heads, T, d_k) -> (B, T, d_model)

    def project(self, x: Tensor) -> Tensor:
        """``x W_Q, x W_K, x W_V`` side by side, in one product, which is faster than three."""
        parts = (self.W_Q, self.W_K, self.W_V)
        weight = torch.cat([part.weight for part in parts])
        bias = None if self.W_Q.bias is None else torch.cat([part.bias for part in parts])
        return F.linear(x, weight, bias)

    def split(
        self, joined: Tensor, rotate: Rotate | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(B, n_heads, T, d_k)``, keys and values ``(B, n_kv_heads, T, d_k)``."""
        heads = joined.unflatten(-1, (-1, self.d_k)).transpose(1, 2)  # -> (B, heads, T, d_k)
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=1)
        if self.qk_norm:
            q, k = rms_normalise(q, self.eps), rms_normalise(k, self.eps)
        if rotate:
            q, k = rotate(q, start), rotate(k, start)
        return q, k, v
