"""Characters <-> ids: a character is a Unicode code point, its id the rank of that code point.

The vocabulary is the sorted set of the text's code points, so it does not depend on hash seeds,
locales or the order of the text. It travels in the checkpoint and is never rebuilt from data.
"""

import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np

from gpt.errors import UsageError
from gpt.text.printable import printable

_LISTED = 20
_NEAR = 3
# What keyboards and word processors put in the place of plain ASCII.
_PLAIN = str.maketrans("‘’‚“”„–—−\u00a0", "'''\"\"\"--- ")


class CharTokenizer:
    """``encode`` and ``decode`` between text and ids in ``[0, vocab_size)``, an exact round trip.

    ``vocabulary`` holds each known character once, by code point. Raises UsageError when it does
    not, when it is empty, and for lone surrogates, which no text file can hold.
    """

    def __init__(self, vocabulary: str) -> None:
        if not vocabulary:
            raise UsageError("the vocabulary is empty and needs at least one character")
        self._codes = code_points(vocabulary)
        unsorted = np.flatnonzero(self._codes[1:] <= self._codes[:-1])
        if unsorted.size:
            pair = vocabulary[unsorted[0] : unsorted[0] + 2]
            raise UsageError(
                f"vocabulary has {_named(pair[0])} before {_named(pair[1])}, but holds each "
                "character once, by code point; make it with CharTokenizer.from_text"
            )
        surrogates = [char for char in vocabulary if unicodedata.category(char) == "Cs"]
        if surrogates:
            raise UsageError(
                f"vocabulary has the lone surrogate {_named(surrogates[0])}, which is half a "
                "character and cannot be written to a file; remove it from the text"
            )
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.dtype = id_dtype(self.vocab_size)

    @classmethod
    def from_text(cls, text: str) -> "CharTokenizer":
        """The tokenizer that knows exactly the characters of the text."""
        return cls("".join(sorted(set(text))))

    def unknown(self, text: str) -> list[str]:
        """The text's characters outside the vocabulary, once each, in order of appearance."""
        known = set(self.vocabulary)
        return [char for char in dict.fromkeys(text) if char not in known]

    def encode(self, text: str) -> np.ndarray:
        """Ids, shape ``(len(text),)``, in the smallest of uint8, uint16 and uint32 that fits.

        Raises UsageError with every unknown character, its code point and near known ones.
        """
        codes = code_points(text)
        ids = np.searchsorted(self._codes, codes)
        ids[ids == self.vocab_size] = 0
        if not np.array_equal(self._codes[ids], codes):
            unknown = self.unknown(text)
            raise UsageError(
                f"{counted(len(unknown), 'character')} not among the {self.vocab_size} of the "
                f"vocabulary: {self.describe(unknown)}. Write the text without, or pass "
                "--unknown skip to drop such characters"
            )
        return ids.astype(self.dtype)

    def decode(self, ids: Iterable[int] | Any) -> str:
        """The text of a flat sequence of ids: any iterable of whole numbers, or an array.

        Raises UsageError for an id outside ``[0, vocab_size)``.
        """
        numbers = np.asarray(ids if hasattr(ids, "__array__") else list(ids))
        if numbers.size == 0:
            return ""
        assert numbers.ndim == 1, f"ids have shape {numbers.shape}, not (n,)"
        assert numbers.dtype.kind in "iu", f"ids are {numbers.dtype}, not whole numbers"
        outside = np.flatnonzero((numbers < 0) | (numbers >= self.vocab_size))
        if outside.size:
            raise UsageError(
                f"id {numbers[outside[0]]} at position {outside[0]} is not in "
                f"[0, {self.vocab_size}); decode only what this vocabulary encoded"
            )
        return self._codes[numbers].tobytes().decode("utf-32-le")

    def describe(self, unknown: list[str]) -> str:
        """Unknown characters for an error message: ``'É' U+00C9 (near: 'E', 'é')``."""
        listed = [
            f"{_named(char)} (near: {', '.join(map(_quoted, self._near(char)))})"
            for char in unknown[:_LISTED]
        ]
        if len(unknown) > _LISTED:
            listed.append(f"and {len(unknown) - _LISTED} more")
        return "; ".join(listed)

    def _near(self, char: str) -> list[str]:
        """Known characters one may have meant: same letter first, then close code points."""
        base = unicodedata.normalize("NFKD", char)[:1]
        related = [char.translate(_PLAIN), char.swapcase(), base, base.swapcase()]
        near = [other for other in related if len(other) == 1 and other in self.vocabulary]
        distance = np.abs(self._codes.astype(np.int64) - ord(char))
        near += [self.vocabulary[i] for i in np.argsort(distance, kind="stable")[:_NEAR]]
        return list(dict.fromkeys(near))[:_NEAR]


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id below ``vocab_size``."""
    return np.min_scalar_type(vocab_size - 1)


def code_points(text: str) -> np.ndarray:
    """Code points as uint32, shape ``(len(text),)``; lone surrogates pass through."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


def counted(n: int, noun: str) -> str:
    """``1 character``, ``1,234 characters``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _quoted(char: str) -> str:
    return f"'{printable(char, keep='')}'"


def _named(char: str) -> str:
    return f"{_quoted(char)} U+{ord(char):04X}"
