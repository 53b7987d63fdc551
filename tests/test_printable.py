"""No text can drive a terminal, and readable text is left alone."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.text.printable import printable

ANY = st.text(st.characters(exclude_categories=()))


@pytest.mark.parametrize(
    ("char", "shown"),
    [
        ("\x1b", "\\x1b"),
        ("\0", "\\x00"),
        ("\a", "\\x07"),
        ("\r", "\\x0d"),
        ("\x7f", "\\x7f"),
        ("\x9b", "\\x9b"),
        ("\u202e", "\\u202e"),
        ("\u2066", "\\u2066"),
        ("\u200b", "\\u200b"),
        ("\u200d", "\\u200d"),
        ("\ufeff", "\\ufeff"),
        ("\u2028", "\\u2028"),
        ("\u3164", "\\u3164"),
        ("\udc92", "\\udc92"),
        ("\ue000", "\\ue000"),
        ("\U000e0001", "\\U000e0001"),
        ("\U0010ffff", "\\U0010ffff"),
    ],
)
def test_a_hidden_character_is_written_out(char, shown):
    assert printable(f"a{char}b") == f"a{shown}b"


@pytest.mark.parametrize(
    "text", ["plain", "a\tb\nc", "é中\u0438\u0306😀", "שלום", "\u00a0\u3000", "back\\slash"]
)
def test_readable_text_is_unchanged(text):
    assert printable(text) == text


def test_only_what_is_listed_is_kept():
    assert printable("a\n\tb\r", keep="") == "a\\x0a\\x09b\\x0d"
    assert printable("a\r\n", keep="\r") == "a\r\\x0a"


@settings(deadline=None)
@given(ANY)
def test_nothing_is_left_that_could_act_or_hide(text):
    shown = printable(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") for c in shown if c not in "\n\t")
    shown.encode("utf-8")


@settings(deadline=None)
@given(ANY)
def test_showing_twice_changes_nothing_more(text):
    assert printable(printable(text)) == printable(text)
