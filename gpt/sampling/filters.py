"""From logits to a next character: pure functions, one a filter.

A filter takes logits ``(B, vocab_size)`` and returns as many; what it removes becomes minus
infinity. ``distribution`` composes them in one stated order, ``draw`` turns the result and a
uniform number into an id.
"""

import math

import torch
from torch import Tensor


def distribution(
    logits: Tensor,
    recent: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> Tensor:
    """Probabilities ``(B, vocab_size)`` of the next character; each row is finite and sums to 1.

    The order: repetition penalty, temperature, top-k, top-p, min-p, softmax. Each filter sees what
    the earlier ones left, so top_p and min_p speak of probabilities after temperature and top_k.
    ``recent`` ``(B, R)`` holds the ids that the repetition penalty counts as seen.
    """
    logits = penalise_repetition(logits, recent, repetition_penalty)
    logits = divide_by_temperature(logits, temperature)
    logits = keep_top_k(logits, top_k)
    logits = keep_top_p(logits, top_p)
    logits = keep_min_p(logits, min_p)
    return logits.softmax(dim=-1)


def penalise_repetition(logits: Tensor, recent: Tensor, penalty: float) -> Tensor:
    """A seen character's logit is divided by the penalty if positive, multiplied if negative.

    ``recent`` is ``(B, R)`` ids. 1 is off, above 1 discourages, below 1 encourages. A finite logit
    stays finite, however extreme the penalty.
    Source: Keskar et al. 2019, arXiv 1909.05858, 4.1 (the sign rule is the usual correction).
    """
    if penalty == 1:
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, recent, True)
    largest = torch.finfo(logits.dtype).max
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty).clamp(-largest, largest)
    return torch.where(seen & logits.isfinite(), penalised, logits)


def divide_by_temperature(logits: Tensor, temperature: float) -> Tensor:
    """``(logits - max) / temperature``; 0 is the limit: only the largest stays (first on ties)."""
    if temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits, -math.inf).scatter(-1, best, 0.0)
    below = logits - logits.amax(dim=-1, keepdim=True)
    # The largest stays 0 even where 1 / temperature overflows and 0 / temperature would be NaN.
    return torch.where(below == 0, 0.0, below / temperature)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Exactly the k largest stay, the lower id on ties; 0 is off.

    Source: Fan et al. 2018, arXiv 1805.04833, 5.4.
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.scatter(-1, order[:, k:], -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The most probable stay, as few as reach probability p together (the nucleus); 1 is off.

    At least one stays, and the lower id on ties. Source: Holtzman et al. 2019, arXiv 1904.09751.
    """
    if p == 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(dim=-1).cumsum(dim=-1)
    needed = torch.ones_like(mass, dtype=torch.bool)
    needed[:, 1:] = mass[:, :-1] < p  # one more is needed while those before it fall short of p
    return logits.scatter(-1, order, ordered.masked_fill(~needed, -math.inf))


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Those at least p times as probable as the most probable stay; 0 is off.

    Source: Nguyen et al. 2024, arXiv 2407.01082.
    """
    if p == 0:
        return logits
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(p), -math.inf)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Ids ``(B,)`` by inverse CDF: the first whose cumulated probability exceeds the uniform.

    Shapes: probabilities ``(B, vocab_size)``; uniform ``(B,)``, float64, in [0, 1). What has
    probability 0 never comes.
    """
    cumulated = probabilities.cumsum(dim=-1)
    # Scaling by the total instead of trusting it to be 1 keeps every id in range.
    point = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, point, right=True).squeeze(-1)
