"""A text file -> ids in two splits, with everything that is worth knowing before training on it.

Needs numpy only, not torch, so that a text that will not do is answered at once.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gpt.errors import UsageError
from gpt.text.decoding import TextFile
from gpt.text.entropy import entropies
from gpt.text.streaming import StreamedIds
from gpt.text.tokenizer import CharTokenizer, counted

_MANY_CONTROLS = 0.001
_MANY_NULS = 0.4
_MANY_CHARACTERS = 10_000
_LAYOUT = frozenset("\n\t\r\f")


@dataclass(frozen=True)
class Source:
    """Which bytes were read: the path as given, how many, and their sha256 in hexadecimal."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, encoded and split.

    ``train`` and ``val`` are ids of the tokenizer's dtype, ``val`` the last part and empty when
    val_fraction is 0. Entropies are of the whole text, in nats per character.
    """

    tokenizer: CharTokenizer
    train: np.ndarray
    val: np.ndarray
    notices: tuple[str, ...]
    source: Source
    unigram_entropy: float
    bigram_entropy: float

    @property
    def n_chars(self) -> int:
        return len(self.train) + len(self.val)


def read_corpus(
    path: str,
    *,
    context_length: int,
    val_fraction: float = 0.1,
    encoding: str = "utf-8",
    keep_newlines: bool = False,
    vocabulary: str | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> Corpus:
    """Reads a text file (``-``: standard input) and checks that it can be learned from.

    ``vocabulary`` is that of a checkpoint; without it the text's own is used. ``progress`` may
    wrap the pieces of the file as they come. Both splits hold at
    least one window of context_length + 1 characters (``val`` also none, for val_fraction 0).
    One pass in pieces of 4 MB. Peak memory: 1 byte a character with up to 256 distinct ones, 2
    with up to 65,536 (3 when the 257th comes late), and less than 150 MB (measured: 313 MB for a
    file of 200 MB, numpy included).

    Raises UsageError: cannot be read or decoded, empty, one character only, too short, or
    characters outside ``vocabulary``.
    """
    assert 0 <= val_fraction < 1
    assert context_length >= 1
    file = TextFile(path, encoding=encoding, keep_newlines=keep_newlines)
    streamed = StreamedIds()
    for text in progress(file):
        streamed.add(text)
    notices = list(file.notices)

    n_chars = len(streamed)
    if n_chars == 0:
        raise UsageError(
            f"{file.name} is empty ({counted(file.bytes, 'byte')}, 0 characters) and must hold at "
            f"least {context_length + 1}; pass a text file with something to learn"
        )
    found = "".join(sorted(streamed.counts))
    tokenizer = _tokenizer_for(file.name, found, vocabulary, notices)
    if len(found) == 1:
        raise UsageError(
            f"{file.name} holds one distinct character only, {n_chars:,} times U+"
            f"{ord(found):04X}, and there is nothing to learn; pass a text with at least two"
        )
    n_val = int(n_chars * val_fraction)
    _check_splits(file.name, n_chars, n_val, val_fraction, context_length)
    notices += _oddities(streamed.counts)
    if val_fraction == 0:
        notices.append("validation is off (--val_fraction 0)")

    ids = streamed.encoded(tokenizer)
    unigram, bigram = entropies(ids, tokenizer.vocab_size)
    return Corpus(
        tokenizer=tokenizer,
        train=ids[: n_chars - n_val],
        val=ids[n_chars - n_val :],
        notices=tuple(notices),
        source=Source(path, file.bytes, file.sha256),
        unigram_entropy=unigram,
        bigram_entropy=bigram,
    )


def _tokenizer_for(
    name: str, found: str, vocabulary: str | None, notices: list[str]
) -> CharTokenizer:
    surrogates = [char for char in found if unicodedata.category(char) == "Cs"]
    if surrogates:
        raise UsageError(
            f"{name} decodes to lone surrogates such as U+{ord(surrogates[0]):04X}, which are "
            "half characters; pass the --encoding that the file was written in"
        )
    if vocabulary is None:
        return CharTokenizer(found)
    tokenizer = CharTokenizer(vocabulary)
    unknown = tokenizer.unknown(found)
    if unknown:
        raise UsageError(
            f"{name} has {counted(len(unknown), 'character')} outside the vocabulary of the "
            f"checkpoint ({tokenizer.vocab_size}): {tokenizer.describe(unknown)}. Continue with a "
            "text of known characters, or start a new run"
        )
    if len(found) < tokenizer.vocab_size:
        notices.append(
            f"the text uses {len(found)} of the {tokenizer.vocab_size} characters of the vocabulary"
        )
    return tokenizer


def _check_splits(
    name: str, n_chars: int, n_val: int, val_fraction: float, context_length: int
) -> None:
    """Both splits hold a window, or a UsageError with what was found, what is needed, remedies."""
    needed = context_length + 1
    splits = [("training", n_chars - n_val)] + [("validation", n_val)] * (val_fraction > 0)
    for split, found in splits:
        if found >= needed:
            continue
        remedies = ["pass a longer text"]
        if min(n for _, n in splits) >= 2:
            remedies.append(f"--context_length {min(n for _, n in splits) - 1} or less")
        if n_chars >= 2 * needed:
            remedies.append(f"--val_fraction {-(-needed * 1000 // n_chars) / 1000:g} or so")
        if val_fraction > 0 and n_chars >= needed:
            remedies.append("--val_fraction 0 to train without validation")
        raise UsageError(
            f"{name} is too short: its {split} part has {counted(found, 'character')} of "
            f"{n_chars:,} (--val_fraction {val_fraction:g}) and needs {needed:,}, one more than "
            f"--context_length {context_length}. Remedies: {'; '.join(remedies)}"
        )


def _oddities(counts: dict[str, int]) -> Iterator[str]:
    """What a text rarely has and another file often."""
    n_chars = sum(counts.values())
    controls = {
        char: count
        for char, count in counts.items()
        if unicodedata.category(char) == "Cc" and char not in _LAYOUT
    }
    n_controls = sum(controls.values())
    if "\0" in controls or n_controls > _MANY_CONTROLS * n_chars:
        most = max(controls, key=lambda char: controls[char])
        utf16 = controls.get("\0", 0) > _MANY_NULS * n_chars
        yield (
            f"{n_controls:,} of {n_chars:,} characters are control characters (mostly "
            f"U+{ord(most):04X}): is this a text file?"
            + (" UTF-16 without a mark looks so: --encoding utf-16-le" if utf16 else "")
        )
    if len(counts) > _MANY_CHARACTERS:
        yield f"{len(counts):,} different characters are very many: is --encoding right?"
