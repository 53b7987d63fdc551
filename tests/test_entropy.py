"""Entropies against their definitions and against printed values."""

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import skips
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.text import entropy
from gpt.text.entropy import cross_entropies, entropies
from gpt.text.tokenizer import CharTokenizer

TINY_SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"


def by_definition(ids: list[int]) -> tuple[float, float]:
    unigram = -sum(n / len(ids) * math.log(n / len(ids)) for n in Counter(ids).values())
    n_pairs = len(ids) - 1
    previous = Counter(ids[:-1])
    pairs = Counter(itertools.pairwise(ids))
    bigram = -sum(n / n_pairs * math.log(n / previous[a]) for (a, _), n in pairs.items())
    return unigram, bigram


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=60),
    st.integers(2, 7),
    st.sampled_from([0, 99]),
)
def test_slices_and_both_ways_to_count_give_the_definition(ids, slice_length, dense_pairs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "_SLICE", slice_length)
        patch.setattr(entropy, "_DENSE_PAIRS", dense_pairs)
        result = entropies(np.array(ids, np.uint8), 5)
    assert result == pytest.approx(by_definition(ids), abs=1e-12)


def cost_by_definition(train: list[int], val: list[int], vocab_size: int) -> tuple[float, float]:
    """Add-one counts of the first list, asked about the second: all but its first."""
    chars, pairs = Counter(train), Counter(itertools.pairwise(train))
    previous = Counter(train[:-1])
    unigram = [(chars[b] + 1) / (len(train) + vocab_size) for b in val[1:]]
    bigram = [
        (pairs[a, b] + 1) / (previous[a] + vocab_size) for a, b in itertools.pairwise(val)
    ]  # fmt: skip
    return tuple(-sum(map(math.log, p)) / len(p) for p in (unigram, bigram))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.lists(st.integers(0, 6), min_size=2, max_size=30),
    st.sampled_from([0, 99]),
)
def test_what_counting_one_text_says_of_another_is_the_definition(train, val, dense_pairs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "_SLICE", 5)
        patch.setattr(entropy, "_DENSE_PAIRS", dense_pairs)
        found = cross_entropies(np.array(train, np.uint8), np.array(val, np.uint8), 7)
    assert found == pytest.approx(cost_by_definition(train, val, 7), abs=1e-12)


def test_a_large_vocabulary_is_counted_without_a_square_table():
    n = 70_000  # a table of pairs would take 39 GB
    ids = np.arange(n, dtype=np.uint32)
    assert entropies(ids, n) == pytest.approx((math.log(n), 0.0), abs=1e-9)


def test_unused_ids_do_not_count():
    assert entropies(np.array([7, 3, 7, 3], np.uint8), 90) == pytest.approx((math.log(2), 0.0))


def test_a_text_without_pairs_has_no_bigram_entropy():
    assert entropies(np.zeros(1, np.uint8), 1) == (0.0, 0.0)
    assert entropies(np.zeros(1, np.uint16), 3000) == (0.0, 0.0)


def test_tiny_shakespeare_has_its_printed_entropies():
    if not TINY_SHAKESPEARE.exists():
        pytest.skip(skips.NO_TINY_SHAKESPEARE)
    text = TINY_SHAKESPEARE.read_text(encoding="utf-8")
    tokenizer = CharTokenizer.from_text(text)
    assert len(text) == 1_115_394
    assert tokenizer.vocab_size == 65
    assert math.log(tokenizer.vocab_size) == pytest.approx(4.174, abs=5e-4)
    assert entropies(tokenizer.encode(text), 65) == pytest.approx((3.313, 2.453), abs=5e-4)


def test_tiny_shakespeare_has_its_printed_yardsticks():
    if not TINY_SHAKESPEARE.exists():
        pytest.skip(skips.NO_TINY_SHAKESPEARE)
    text = TINY_SHAKESPEARE.read_text(encoding="utf-8")
    ids = CharTokenizer.from_text(text).encode(text)
    split = len(ids) - len(ids) // 10
    found = cross_entropies(ids[:split], ids[split:], 65)
    assert found == pytest.approx((3.347, 2.482), abs=5e-4)
