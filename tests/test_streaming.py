"""Ids of a text in pieces are the ids of the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.text import streaming
from gpt.text.streaming import StreamedIds
from gpt.text.tokenizer import CharTokenizer


def streamed(pieces: list[str]) -> StreamedIds:
    ids = StreamedIds()
    for piece in pieces:
        ids.add(piece)
    return ids


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=9), max_size=7))
def test_pieces_encode_like_the_whole(pieces):
    text = "".join(pieces) + "x"
    tokenizer = CharTokenizer.from_text(text)
    ids = streamed([*pieces, "x"])
    assert len(ids) == len(text)
    assert ids.counts == {char: text.count(char) for char in text}
    np.testing.assert_array_equal(ids.encoded(tokenizer), tokenizer.encode(text))


@pytest.mark.parametrize("n_distinct", [256, 257, 65_536, 65_537])
def test_storage_widens_on_the_way(monkeypatch, n_distinct):
    monkeypatch.setattr(streaming, "_SLICE", 10_007)
    rare = "".join(map(chr, range(0x10000, 0x10000 + n_distinct - 2)))
    text = "ba" * 500 + rare + "ab" * 300
    tokenizer = CharTokenizer.from_text(text)
    pieces = [text[start : start + 211] for start in range(0, len(text), 211)]
    ids = streamed(pieces).encoded(tokenizer)
    assert ids.dtype == tokenizer.dtype
    np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_a_wider_given_vocabulary_decides_the_type():
    tokenizer = CharTokenizer("".join(map(chr, range(300))))
    ids = streamed(["ca", "b"]).encoded(tokenizer)
    assert ids.dtype == np.uint16
    assert ids.tolist() == [99, 97, 98]
