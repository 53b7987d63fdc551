"""How predictable a text is from letter frequencies alone: what a loss is measured against."""

import numpy as np

_SLICE = 1 << 20
# Above this many possible pairs they are counted by sorting, not in a table.
_DENSE_PAIRS = 1 << 22


def entropies(ids: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """Unigram and bigram entropy of the ids, in nats per character.

    Unigram: ``H(c) = -sum p(c) ln p(c)``, the loss of knowing how often each character occurs.
    Bigram: ``H(next | previous) = H(pairs) - H(previous)``, the loss of also seeing the previous
    one. Works in slices; besides two tables of at most 2^22 pairs it holds 16 bytes a distinct
    pair when vocab_size is above 2048, and some times that while merging.
    """
    chars = np.zeros(vocab_size, np.int64)
    pairs = np.zeros(vocab_size**2 if vocab_size**2 <= _DENSE_PAIRS else 0, np.int64)
    seen = np.zeros(0, np.int64)
    for start in range(0, len(ids), _SLICE):
        piece = ids[start : start + _SLICE + 1].astype(np.int64)  # one more, to end the last pair
        chars += np.bincount(piece[:_SLICE], minlength=vocab_size)
        codes = piece[:-1] * vocab_size + piece[1:]
        if vocab_size**2 <= _DENSE_PAIRS:
            pairs += np.bincount(codes, minlength=len(pairs))
        else:
            seen, pairs = _merged(seen, pairs, *np.unique(codes, return_counts=True))
    previous = chars.copy()
    if len(ids):
        previous[ids[-1]] -= 1
    return _entropy(chars), max(_entropy(pairs) - _entropy(previous), 0.0)


def _merged(
    seen: np.ndarray, counts: np.ndarray, more_seen: np.ndarray, more_counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Two sparse counts added; both, and the result, are sorted."""
    both = np.concatenate([seen, more_seen])
    order = np.argsort(both, kind="stable")  # two sorted runs: a merge, not a sort
    both = both[order]
    first = np.flatnonzero(np.diff(both, prepend=-1))
    return both[first], np.add.reduceat(np.concatenate([counts, more_counts])[order], first)


def _entropy(counts: np.ndarray) -> float:
    """``-sum p ln p`` of ``p = counts / total``, in nats; 0 when nothing was counted."""
    p = counts[counts > 0] / max(counts.sum(), 1)
    return float((p * np.log(1 / p)).sum())
