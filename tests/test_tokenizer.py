"""Text and ids, there and back, and what is said about characters that are not known."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import UsageError
from gpt.text.tokenizer import CharTokenizer, id_dtype

ROOT = Path(__file__).parents[1]


def refusal(call, *args) -> str:
    with pytest.raises(UsageError) as caught:
        call(*args)
    return str(caught.value)


@settings(deadline=None)
@given(st.text(min_size=1))
def test_decode_undoes_encode(text):
    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode(text)
    assert ids.shape == (len(text),)
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.text(min_size=1), st.randoms())
def test_the_vocabulary_depends_on_the_characters_only(text, random):
    shuffled = list(text * 2)
    random.shuffle(shuffled)
    vocabulary = CharTokenizer.from_text("".join(shuffled)).vocabulary
    assert vocabulary == CharTokenizer.from_text(text).vocabulary
    assert list(vocabulary) == sorted(set(text))


def test_ids_are_ranks_by_code_point():
    tokenizer = CharTokenizer.from_text("b😀aé\n")
    assert tokenizer.vocabulary == "\nabé😀"
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("a😀\n").tolist() == [1, 4, 0]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_ids_take_the_smallest_type(vocab_size, dtype):
    assert id_dtype(vocab_size) == np.dtype(dtype)
    first = 0x10000  # beyond the surrogates
    tokenizer = CharTokenizer("".join(map(chr, range(first, first + vocab_size))))
    last = tokenizer.encode(chr(first + vocab_size - 1))
    assert last.dtype == np.dtype(dtype)
    assert last.tolist() == [vocab_size - 1]


@pytest.mark.parametrize(
    "ids",
    [
        [2, 0, 1],
        (2, 0, 1),
        iter([2, 0, 1]),
        np.array([2, 0, 1], np.uint8),
        np.array([2, 0, 1], np.int64)[::1],
        np.array([2, 9, 0, 9, 1])[::2],
    ],
)
def test_any_sequence_of_ids_decodes(ids):
    assert CharTokenizer("abc").decode(ids) == "cab"


def test_no_ids_are_no_text():
    tokenizer = CharTokenizer("abc")
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode("").shape == (0,)


@pytest.mark.parametrize("bad", [-1, 3, -9223372036854775808])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(bad):
    message = refusal(CharTokenizer("abc").decode, [0, 1, bad])
    assert f"id {bad} at position 2" in message
    assert "[0, 3)" in message


def test_an_unknown_character_is_named_with_code_point_neighbours_and_remedy():
    message = refusal(CharTokenizer("\nabc").encode, "a?b")
    assert "1 character not among the 4 of the vocabulary: '?' U+003F (near: 'a'" in message
    assert "--unknown skip" in message


def test_every_unknown_character_is_listed_once_in_order():
    tokenizer = CharTokenizer("abc")
    assert tokenizer.unknown("zaybz") == ["z", "y"]
    message = refusal(tokenizer.encode, "zaybz")
    assert message.startswith("2 characters")
    assert message.index("'z' U+007A") < message.index("'y' U+0079")


def test_a_long_list_is_cut_and_counted():
    message = refusal(CharTokenizer("a").encode, "".join(map(chr, range(0x4E00, 0x4E00 + 23))))
    assert "U+4E13" in message
    assert "U+4E14" not in message
    assert "and 3 more" in message


@pytest.mark.parametrize(
    ("unknown", "known", "near"),
    [
        ("É", "Eexyz", "(near: 'E', 'e', "),
        ("A", "!@axyz", "(near: 'a', '@', "),
        ("Й", "АБВГй", "(near: 'й', 'Г', 'В')"),
        ("ﬁ", "Ffxyz", "(near: 'f', 'F', "),
        ("’", "'xyz", "(near: ''', "),
        ("“", '"xyz', "(near: '\"', "),
        ("—", "-xyz", "(near: '-', "),
        ("m", "alnz", "(near: 'l', 'n', 'a')"),
    ],
)
def test_near_characters_are_what_one_may_have_meant(unknown, known, near):
    assert near in CharTokenizer.from_text(known).describe([unknown])


def test_unknown_characters_cannot_drive_a_terminal():
    message = refusal(CharTokenizer("\x1b").encode, "\u202e\x07\udc92")
    assert "'\\u202e' U+202E" in message
    assert "'\\x07' U+0007" in message
    assert "'\\udc92' U+DC92" in message
    assert "(near: '\\x1b')" in message
    assert message.isprintable()


@pytest.mark.parametrize(
    ("vocabulary", "rule", "remedy"),
    [
        ("", "is empty", "at least one character"),
        ("ba", "'b' U+0062 before 'a' U+0061", "CharTokenizer.from_text"),
        ("aab", "'a' U+0061 before 'a' U+0061", "CharTokenizer.from_text"),
        ("a\ud800", "'\\ud800' U+D800", "remove it"),
    ],
)
def test_a_broken_vocabulary_is_refused(vocabulary, rule, remedy):
    message = refusal(CharTokenizer, vocabulary)
    assert rule in message
    assert remedy in message


def test_the_vocabulary_does_not_depend_on_the_hash_seed():
    program = (
        "from gpt.text.tokenizer import CharTokenizer;"
        "t = CharTokenizer.from_text('the quick brown fox é中');"
        "print(ascii(t.vocabulary), t.encode('fox').tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert outputs == {"' bcefhiknoqrtuwx\\xe9\\u4e2d' [4, 9, 15]\n"}
