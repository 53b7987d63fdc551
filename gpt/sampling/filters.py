"""From logits to a next character: pure functions, one a filter.

A filter takes logits ``(B, vocab_size)``, float64, finite or minus infinity, and returns as many;
what it removes becomes minus infinity. ``distribution`` composes them in one stated order,
``draw`` turns the result and a uniform number into an id.

In NumPy, since for a row of a few dozen numbers its calls cost a fraction of torch's, and a filter
that is off costs nothing.
"""

import math

import numpy as np


def distribution(
    logits: np.ndarray,
    recent: np.ndarray,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> np.ndarray:
    """Probabilities ``(B, vocab_size)`` of the next character; each row is finite and sums to 1.

    The order: repetition penalty, temperature, top-k, top-p, min-p, softmax. Each filter sees what
    the earlier ones left, so top_p and min_p speak of probabilities after temperature and top_k.
    ``recent`` ``(B, R)`` holds the ids that the repetition penalty counts as seen.
    """
    logits = penalise_repetition(logits, recent, repetition_penalty)
    logits = divide_by_temperature(logits, temperature)  # so the largest is 0
    logits = keep_top_k(logits, top_k)
    logits = keep_top_p(logits, top_p)
    logits = keep_min_p(logits, min_p)
    return _normalised(np.exp(logits))


def penalise_repetition(logits: np.ndarray, recent: np.ndarray, penalty: float) -> np.ndarray:
    """A seen character's logit is divided by the penalty if positive, multiplied if negative.

    ``recent`` is ``(B, R)`` ids. 1 is off, above 1 discourages, below 1 encourages. A finite logit
    stays finite, however extreme the penalty.
    Source: Keskar et al. 2019, arXiv 1909.05858, 4.1 (the sign rule is the usual correction).
    """
    if penalty == 1:
        return logits
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, recent, True, axis=-1)
    largest = np.finfo(logits.dtype).max
    with np.errstate(over="ignore"):
        penalised = np.where(logits > 0, logits / penalty, logits * penalty)
    return np.where(seen & np.isfinite(logits), penalised.clip(-largest, largest), logits)


def divide_by_temperature(logits: np.ndarray, temperature: float) -> np.ndarray:
    """``(logits - max) / temperature``; 0 is the limit: only the largest stays (first on ties)."""
    if temperature == 0:
        greedy = np.full_like(logits, -math.inf)
        np.put_along_axis(greedy, logits.argmax(axis=-1, keepdims=True), 0.0, axis=-1)
        return greedy
    # A division: 1 / temperature may overflow. Difference and quotient may, and are then the limit.
    with np.errstate(over="ignore"):
        below = logits - logits.max(axis=-1, keepdims=True)
        return below if temperature == 1 else below / temperature


def keep_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Exactly the k largest stay, the lower id on ties; 0 is off.

    Source: Fan et al. 2018, arXiv 1805.04833, 5.4.
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    left = logits.copy()
    np.put_along_axis(left, _descending(logits)[:, k:], -math.inf, axis=-1)
    return left


def keep_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """The most probable stay, as few as reach probability p together (the nucleus); 1 is off.

    At least one stays, and the lower id on ties. Source: Holtzman et al. 2019, arXiv 1904.09751.
    """
    if p == 1:
        return logits
    order = _descending(logits)
    ordered = np.take_along_axis(logits, order, axis=-1)
    mass = _normalised(np.exp(ordered - ordered[:, :1])).cumsum(axis=-1)
    unneeded = np.zeros(mass.shape, bool)
    unneeded[:, 1:] = mass[:, :-1] >= p  # one more is needed while those before it fall short of p
    ordered[unneeded] = -math.inf
    left = np.empty_like(logits)
    np.put_along_axis(left, order, ordered, axis=-1)
    return left


def keep_min_p(logits: np.ndarray, p: float) -> np.ndarray:
    """Those at least p times as probable as the most probable stay; 0 is off.

    Source: Nguyen et al. 2024, arXiv 2407.01082.
    """
    if p == 0:
        return logits
    least = logits.max(axis=-1, keepdims=True) + math.log(p)
    return np.where(logits < least, -math.inf, logits)


def draw(probabilities: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Ids ``(B,)`` by inverse CDF: the first whose cumulated probability exceeds the uniform.

    Shapes: probabilities ``(B, vocab_size)``; uniform ``(B,)``, float64, in [0, 1). What has
    probability 0 never comes.
    """
    cumulated = probabilities.cumsum(axis=-1)
    # Scaling by the total instead of trusting it to be 1 keeps every id in range.
    point = uniform[:, None] * cumulated[:, -1:]
    return (cumulated <= point).sum(axis=-1)


def _descending(logits: np.ndarray) -> np.ndarray:
    """The order of each row from the largest, the lower id first on ties."""
    return np.argsort(-logits, axis=-1, kind="stable")


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=-1, keepdims=True)
