"""Which characters a step sees: reproducible, uniform, complete."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.text.windows import evaluation_batches, take, window_starts, window_starts_in_epochs


def test_starts_are_a_pure_function_of_seed_and_step():
    first = window_starts(3, 7, 11, 1000, 13)
    np.random.default_rng(0).random(5)
    window_starts(3, 8, 11, 1000, 13)
    assert first.dtype == np.int64
    assert first.shape == (11,)
    np.testing.assert_array_equal(first, window_starts(3, 7, 11, 1000, 13))


def test_starts_are_these_numbers_for_ever():
    """A checkpoint resumed with a later version must see the same text."""
    assert window_starts(1337, 0, 4, 1_000_000, 64).tolist() == [521720, 588791, 921855, 544173]
    assert window_starts(2**63 - 1, 10**12, 3, 1_000_000, 64).tolist() == [913185, 224950, 425164]


def test_seeds_and_steps_do_not_share_windows():
    draws = [window_starts(s, k, 8, 10**9, 16).tolist() for s in range(5) for k in range(5)]
    assert len({tuple(d) for d in draws}) == 25
    assert len({start for d in draws for start in d}) == 200


def test_a_larger_batch_begins_with_the_smaller_one():
    """So accumulation and several processes cut one and the same global batch."""
    np.testing.assert_array_equal(
        window_starts(1, 2, 12, 500, 9)[:5], window_starts(1, 2, 5, 500, 9)
    )


def test_every_legal_start_is_drawn_equally_often_and_no_other():
    n_chars, context_length, n = 17, 6, 110_000
    counts = np.bincount(window_starts(5, 0, n, n_chars, context_length))
    legal = n_chars - context_length  # 0 .. 10
    assert len(counts) == legal
    # chi squared with 10 degrees of freedom: above 35 once in ten thousand seeds
    assert ((counts - n / legal) ** 2 / (n / legal)).sum() < 35


def test_the_shortest_legal_text_has_one_window():
    assert window_starts(0, 0, 3, 10, 9).tolist() == [0, 0, 0]


def test_a_text_without_a_window_is_an_impossible_state():
    with pytest.raises(AssertionError, match=r"9 characters hold no window of 9 \+ 1"):
        window_starts(0, 0, 3, 9, 9)


def in_epochs(n, n_chars, context_length, seed=5):
    """The first n windows."""
    return window_starts_in_epochs(seed, 0, n, n_chars, context_length)


@pytest.mark.parametrize(("n_chars", "context_length"), [(1000, 13), (51, 13), (20, 13), (977, 1)])
def test_an_epoch_reads_no_character_twice_and_all_epochs_read_all(n_chars, context_length):
    n_epochs, legal = 4000 // context_length, n_chars - context_length
    n = max(1, legal // context_length)
    epochs = np.sort(in_epochs(n_epochs * n, n_chars, context_length).reshape(n_epochs, n))
    assert set(np.diff(epochs).flat) <= {context_length}
    ends = epochs[:, 0], legal - 1 - epochs[:, -1]  # starts passed over before and after
    assert np.stack(ends).min() == 0
    assert np.stack(ends).max() < 2 * context_length
    assert set(epochs.flat) == set(range(legal))


def test_every_epoch_has_its_own_order_and_its_own_cuts():
    n, n_chars, context_length = 98, 1290, 13
    assert n == (n_chars - context_length) // context_length
    epochs = in_epochs(40 * n, n_chars, context_length).reshape(40, n)
    assert len({epoch.min() for epoch in epochs}) > 6  # of 13
    orders = (epochs // context_length).argsort(axis=1)
    ranks = np.corrcoef(np.vstack([np.arange(n), orders]))
    assert np.abs(ranks - np.eye(41)).max() < 0.5  # 0.1 is usual; the largest of 820


def test_steps_follow_each_other_through_the_epochs():
    whole = in_epochs(60, 300, 13)  # 22 windows an epoch
    for n_windows in (4, 12, 30):
        steps = [window_starts_in_epochs(5, s, n_windows, 300, 13) for s in range(60 // n_windows)]
        np.testing.assert_array_equal(np.concatenate(steps), whole)
    assert not np.array_equal(whole, in_epochs(60, 300, 13, seed=6))


def test_starts_in_epochs_are_these_numbers_for_ever():
    starts = window_starts_in_epochs(1337, 5000, 4, 1_000_000, 64)
    assert (starts.dtype, starts.tolist()) == (np.int64, [854802, 466322, 659602, 609170])
    starts = window_starts_in_epochs(2**63 - 1, 10**9, 3, 1000, 64)
    assert starts.tolist() == [136, 712, 520]
    assert len(window_starts_in_epochs(1, 10**20, 5, 20, 9)) == 5  # more epochs than a word counts


def test_a_text_of_one_window_has_it_in_every_epoch():
    assert in_epochs(3, 10, 9).tolist() == [0, 0, 0]
    with pytest.raises(AssertionError, match=r"9 characters hold no window of 9 \+ 1"):
        in_epochs(3, 9, 9)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_targets_are_the_inputs_one_later(dtype):
    ids = np.arange(100, 130).astype(dtype)
    inputs, targets = take(ids, np.array([0, 24, 7]), 5)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.tolist() == [[*range(100, 105)], [*range(124, 129)], [*range(107, 112)]]
    assert targets.tolist() == [[*range(101, 106)], [*range(125, 130)], [*range(108, 113)]]
    assert inputs.flags.c_contiguous
    assert targets.flags.c_contiguous


def test_a_negative_start_does_not_wrap_around():
    with pytest.raises(AssertionError, match="negative"):
        take(np.arange(9), np.array([2, -1]), 3)


@settings(deadline=None)
@given(st.integers(0, 90), st.integers(1, 12), st.integers(1, 7))
def test_evaluation_predicts_every_character_but_the_first_once(n, context_length, batch_size):
    ids = np.arange(n, dtype=np.uint8)
    batches = list(evaluation_batches(ids, context_length, batch_size))
    inputs = [row for x, _ in batches for row in x.tolist()]
    targets = [row for _, y in batches for row in y.tolist()]
    assert [i for row in targets for i in row] == list(range(1, n))
    assert [i for row in inputs for i in row] == list(range(max(n - 1, 0)))
    assert all(len(row) == context_length for row in inputs[:-1])
    for x, y in batches:
        assert x.dtype == y.dtype == np.int64
        assert x.shape == y.shape
        assert 1 <= x.shape[0] <= batch_size


def test_a_shorter_last_window_is_a_batch_of_its_own():
    shapes = [x.shape for x, _ in evaluation_batches(np.zeros(32, np.uint8), 5, 4)]
    assert shapes == [(4, 5), (2, 5), (1, 1)]
