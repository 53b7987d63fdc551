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
    chars, _, pairs = _counts(ids, vocab_size)
    previous = chars.copy()
    if len(ids):
        previous[ids[-1]] -= 1
    return _entropy(chars), max(_entropy(pairs) - _entropy(previous), 0.0)


def cross_entropies(train: np.ndarray, val: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """What the validation split costs whoever only counted the training split, nats per character.

    Unigram: ``p(c) = (n(c) + 1) / (N + V)``. Bigram: ``p(b | a) = (n(ab) + 1) / (n(a) + V)``, n(a)
    of all that have a next one. Means over the characters that a model is asked for: all but the
    first. N is the length of ``train``, V the vocab_size. ``val`` holds two characters or more.
    """
    chars, seen, pairs = _counts(train, vocab_size)
    asked, val_seen, val_pairs = _counts(val, vocab_size)
    asked[val[0]] -= 1
    unigram = -asked @ np.log((chars + 1) / (len(train) + vocab_size)) / asked.sum()
    previous = chars.copy()
    if len(train):
        previous[train[-1]] -= 1
    there = np.searchsorted(seen, val_seen)
    found = np.append(seen, -1)[there] == val_seen
    n = np.where(found, np.append(pairs, 0)[there], 0)
    p = (n + 1) / (previous[val_seen // vocab_size] + vocab_size)
    return float(unigram), float(-val_pairs @ np.log(p) / val_pairs.sum())


def _counts(ids: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How often each id comes; which pairs come, as ``first * vocab_size + second``, and how often.

    The pairs are sorted.
    """
    chars = np.zeros(vocab_size, np.int64)
    dense = vocab_size**2 <= _DENSE_PAIRS
    pairs = np.zeros(vocab_size**2 if dense else 0, np.int64)
    seen = np.zeros(0, np.int64)
    for start in range(0, len(ids), _SLICE):
        piece = ids[start : start + _SLICE + 1].astype(np.int64)  # one more, to end the last pair
        chars += np.bincount(piece[:_SLICE], minlength=vocab_size)
        codes = piece[:-1] * vocab_size + piece[1:]
        if dense:
            pairs += np.bincount(codes, minlength=len(pairs))
        else:
            seen, pairs = _merged(seen, pairs, *np.unique(codes, return_counts=True))
    if dense:
        seen = np.flatnonzero(pairs)
        pairs = pairs[seen]
    return chars, seen, pairs


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
