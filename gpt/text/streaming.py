"""Ids of a text that streams by, before its vocabulary is known."""

from collections.abc import Iterator

import numpy as np

from gpt.text.tokenizer import CharTokenizer, code_points, id_dtype

_SLICE = 1 << 20


class StreamedIds:
    """Characters numbered by first appearance, as narrow as possible, and counted.

    The final ids are known only at the end, when the vocabulary can be sorted. Numbers are kept in
    one part a width; a text of up to 256 different characters is one part, renumbered in place.
    """

    def __init__(self) -> None:
        self._number = np.full(0x110000, -1, np.int32)
        self._found: list[str] = []
        self._counts = np.zeros(0, np.int64)
        self._parts: list[tuple[np.dtype, bytearray]] = []

    def __len__(self) -> int:
        return sum(len(part) // dtype.itemsize for dtype, part in self._parts)

    @property
    def counts(self) -> dict[str, int]:
        """How often each character appeared."""
        return dict(zip(self._found, self._counts.tolist(), strict=True))

    def add(self, text: str) -> None:
        """The next piece of the text."""
        if not text:
            return
        codes = code_points(text)
        numbers = self._number[codes]
        if numbers.min() < 0:
            new = np.unique(codes[numbers < 0])
            self._number[new] = np.arange(len(self._found), len(self._found) + len(new))
            self._found += map(chr, new.tolist())
            numbers = self._number[codes]
        counts = np.bincount(numbers, minlength=len(self._found))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        dtype = id_dtype(len(self._found))
        if not self._parts or self._parts[-1][0] != dtype:
            self._parts.append((dtype, bytearray()))
        self._parts[-1][1].extend(memoryview(numbers.astype(dtype)).cast("B"))

    def encoded(self, tokenizer: CharTokenizer) -> np.ndarray:
        """The final ids, in the tokenizer's dtype. Call once: it may reuse the storage."""
        final = tokenizer.encode("".join(self._found))
        parts = [np.frombuffer(part, dtype) for dtype, part in self._parts]
        in_place = [part.dtype for part in parts] == [final.dtype]
        ids = parts[0] if in_place else np.empty(len(self), final.dtype)
        done = 0
        for part in parts:
            for piece in _slices(part):
                ids[done : done + len(piece)] = final[piece]
                done += len(piece)
        return ids


def _slices(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces small enough to be widened."""
    return (ids[start : start + _SLICE] for start in range(0, len(ids), _SLICE))
