"""Text that is safe to show: no character may drive a terminal or hide in it."""

import functools
import unicodedata

# Controls, formats (bidi, zero width), surrogates, private use, unassigned, line separators.
_HIDDEN_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
# Letters and marks by category, but nothing is drawn for them.
_HIDDEN_LETTERS = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"
    # Selectors of glyphs, but the two of emoji, which readable text is full of.
    + "".join(map(chr, [*range(0xFE00, 0xFE0E), *range(0xE0100, 0xE01F0)]))
)


def printable(text: str, keep: str = "\n\t") -> str:
    r"""The text with every non-printing character written out, as ``\x1b`` or ``\u202e``.

    Everything that reaches a terminal passes through here: samples, prompts, file names and
    errors. ``keep`` lists the exceptions; use ``keep=""`` for what must stay on one line. The
    result is for eyes: a backslash stays as it is, so the original cannot be read back from it.
    """
    return "".join(char if char in keep else _shown(char) for char in text)


def shortened(text: str, most: int) -> str:
    """At most so many characters of the text: a name in a stranger's file may have a million."""
    return text if len(text) <= most else f"{text[:most]}..."


@functools.lru_cache(maxsize=4096)
def _shown(char: str) -> str:
    if unicodedata.category(char) not in _HIDDEN_CATEGORIES and char not in _HIDDEN_LETTERS:
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
