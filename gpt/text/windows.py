"""Which characters step s sees, as a pure function; and the windows of an evaluation.

Nothing is drawn from a generator with a memory, so there is nothing to save, a resumed run sees
what the unbroken one would have seen, and several processes can share one batch.
"""

from collections.abc import Iterator

import numpy as np

# The second half of the Philox key; streams with other constants are independent of this one.
BATCH_STREAM = int.from_bytes(b"batches", "big")


def window_starts(
    seed: int, step: int, n_windows: int, n_chars: int, context_length: int
) -> np.ndarray:
    """First characters of the windows of one step, int64 ``(n_windows,)``.

    Uniform over ``0 .. n_chars - context_length - 1`` inclusive: a window is context_length inputs
    and one more target. Philox4x64 with key ``(seed, BATCH_STREAM)`` and counter
    ``(0, step, 0, 0)`` gives 64-bit words; a start is a word modulo the number of legal starts.
    (Raw words, because the stream of ``Generator.integers`` may change with numpy's version;
    the bias of the modulus is below n_chars / 2^64.) Source: Salmon et al. 2011, "Parallel random
    numbers: as easy as 1, 2, 3".
    """
    n_starts = n_chars - context_length
    assert n_starts >= 1, f"{n_chars} characters hold no window of {context_length} + 1"
    bits = np.random.Philox(key=_words(seed, BATCH_STREAM), counter=_words(0, step, 0, 0))
    return (bits.random_raw(n_windows) % np.uint64(n_starts)).astype(np.int64)


def take(ids: np.ndarray, starts: np.ndarray, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, both int64 ``(len(starts), context_length)``.

    ``inputs[b, t] = ids[starts[b] + t]`` and ``targets[b, t] = ids[starts[b] + t + 1]``.
    """
    assert starts.size == 0 or starts.min() >= 0, "a negative start would wrap around"
    windows = ids[starts[:, None] + np.arange(context_length + 1)]  # (B, context_length + 1)
    return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)


def evaluation_batches(
    ids: np.ndarray, context_length: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All of ``ids`` in order: every character but the first is a target exactly once.

    Yields int64 inputs and targets ``(B, context_length)`` with B up to batch_size, windows one
    context_length apart; a shorter last window comes as a batch ``(1, rest)`` of its own. Fewer
    than two characters hold nothing to predict and give no batch.
    """
    n_whole = max(len(ids) - 1, 0) // context_length * context_length
    stride = batch_size * context_length
    for start in range(0, n_whole, stride):
        yield _in_rows(ids[start : min(start + stride, n_whole) + 1], context_length)
    if n_whole < len(ids) - 1:
        yield _in_rows(ids[n_whole:], len(ids) - 1 - n_whole)


def _in_rows(piece: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    wide = piece.astype(np.int64)
    return wide[:-1].reshape(-1, width), wide[1:].reshape(-1, width)


def _words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)
