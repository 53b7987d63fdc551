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
from gpt.text.entropy import entropies
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
