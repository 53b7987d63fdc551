"""Which characters step s sees, as a pure function; and the windows of an evaluation.

Nothing is drawn from a generator with a memory, so there is nothing to save, a resumed run sees
what the unbroken one would have seen, and several processes can share one batch.
"""

import functools
from collections.abc import Iterator

import numpy as np

# The second half of the Philox key; streams with other constants are independent of these.
BATCH_STREAM = int.from_bytes(b"batches", "big")
EPOCH_STREAM = int.from_bytes(b"epochs", "big")


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


def window_starts_in_epochs(
    seed: int, step: int, n_windows: int, n_chars: int, context_length: int
) -> np.ndarray:
    """Windows drawn without replacement: what was read comes again in the next epoch only.

    An epoch is the text cut into windows that touch, in random order. Where the first begins is
    drawn anew, so that windows begin elsewhere in every epoch, and the characters that are left
    over at either end (less than two windows) are others. Steps follow each other through the
    epochs, each n_windows further, as long as their number stays the same.
    """
    per_epoch = max(1, (n_chars - context_length) // context_length)
    numbers = range(step * n_windows, (step + 1) * n_windows)
    return np.array([
        _epoch(seed, n // per_epoch, per_epoch, n_chars, context_length)[n % per_epoch]
        for n in numbers
    ])  # fmt: skip


@functools.lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, n_windows: int, n_chars: int, context_length: int) -> np.ndarray:
    """First characters of all windows of an epoch, int64, in their order.

    Philox as in ``window_starts``, counter ``(0, epoch, 0, 0)``: the first word says where the
    first window begins, the others sort the windows.
    """
    n_starts = n_chars - context_length
    assert n_starts >= 1, f"{n_chars} characters hold no window of {context_length} + 1"
    bits = np.random.Philox(key=_words(seed, EPOCH_STREAM), counter=_words(0, epoch, 0, 0))
    first = bits.random_raw() % (n_starts - (n_windows - 1) * context_length)
    return first + context_length * np.argsort(bits.random_raw(n_windows), kind="stable")


WINDOW_STARTS = {"random": window_starts, "epochs": window_starts_in_epochs}
"""By the names of the setting ``windows``."""


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
    return np.array([value % 2**64 for value in values], np.uint64)
