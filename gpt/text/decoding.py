"""The bytes of a file as text, piece by piece, the same on every machine and in every locale."""

import codecs
import contextlib
import hashlib
import io
from collections.abc import Iterator
from typing import BinaryIO

from gpt.errors import UsageError
from gpt.text.opening import open_text, shown_name, stamp
from gpt.text.printable import printable

CHUNK_BYTES = 1 << 22
_HEAD_BYTES = 8
_BOMS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NEWLINE_NAMES = {"\r": "CR", "\r\n": "CR LF"}
# Bytes looked at on either side of a bad one, and what they show: text has next to no control
# bytes, and Western text is mostly ASCII.
_NEARBY = 1000
_BINARY_SHARE = 0.05
_WESTERN_SHARE = 0.3


class TextFile:
    """A text file, or standard input for ``-``; iterating over it once gives the decoded pieces.

    One byte-order mark is dropped, and CR LF and CR become LF unless ``keep_newlines``. After the
    iteration ``bytes`` and ``sha256`` describe what was read, and ``notices`` what was changed.
    Raises UsageError for what cannot be read as text: the byte, its offset and line, the remedy.
    """

    def __init__(self, path: str, *, encoding: str = "utf-8", keep_newlines: bool = False) -> None:
        self.path = path
        self.name = shown_name(path)
        self.encoding = encoding
        self.keep_newlines = keep_newlines
        self.bytes = 0
        self.notices: list[str] = []
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of the raw bytes read so far, in hexadecimal."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[str]:
        try:
            with open_text(self.path) as stream:
                before = stamp(stream)
                yield from self._pieces(stream)
                if stamp(stream) != before:
                    raise UsageError(
                        f"{self.name} changed while it was read; wait until it is complete, or "
                        "train on a copy"
                    )
        except OSError as error:
            raise UsageError(
                f"cannot read {self.name}: {error.strerror or error}; pass a text file that you "
                "may read"
            ) from error

    def _pieces(self, stream: BinaryIO) -> Iterator[str]:
        block = stream.read(_HEAD_BYTES)
        codec = self._codec(block)
        decoder = codecs.getincrementaldecoder(codec)()
        newlines = io.IncrementalNewlineDecoder(None, translate=not self.keep_newlines)
        line, at_start = 1, True
        while True:
            self._hash.update(block)
            self.bytes += len(block)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                with contextlib.suppress(UnicodeError):  # idna cannot replace
                    good = error.object[: error.start].decode(codec, "replace")
                    line += newlines.decode(good, final=True).count("\n")
                raise self._undecodable(error, codec, line, cut_off=not block) from error
            except UnicodeError as error:  # what a few rare codecs raise, without a position
                raise UsageError(
                    f"{self.name} is not {codec}: {error}. Pass its --encoding, or none for utf-8"
                ) from error
            if at_start and text:
                at_start = False
                if text[0] == "\ufeff":
                    text = text[1:]
                    self.notices.append("dropped the byte-order mark at the start")
            text = newlines.decode(text, final=not block)
            line += text.count("\n")
            yield text
            if not block:
                break
            block = stream.read(CHUNK_BYTES)
        self._note_newlines(newlines.newlines)

    def _codec(self, head: bytes) -> str:
        """The codec that leaves a byte-order mark in the text, where all kinds are dropped."""
        try:
            "".encode(self.encoding)  # also refuses codecs that are not about text
            name = codecs.lookup(self.encoding).name.removesuffix("-sig")
        except (LookupError, ValueError) as error:
            raise UsageError(
                f"--encoding '{printable(self.encoding, keep='')}' is unknown to Python; try "
                "utf-8, cp1252 or utf-16"
            ) from error
        bom, marked = next(((b, other) for b, other in _BOMS if head.startswith(b)), (b"", ""))
        if name == "utf-8" and marked:
            raise UsageError(
                f"{self.name} begins with the byte-order mark {bom.hex(' ').upper()} of "
                f"{marked.upper()} and was to be read as utf-8; pass --encoding {marked}"
            )
        if name not in ("utf-16", "utf-32"):
            return name
        if head and not marked:
            raise UsageError(
                f"{self.name} has no byte-order mark, which {name} needs; pass "
                f"--encoding {name}-le (usual) or {name}-be"
            )
        return f"{name}-be" if bom in (codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE) else f"{name}-le"

    def _undecodable(
        self, error: UnicodeDecodeError, codec: str, line: int, cut_off: bool
    ) -> UsageError:
        # The codec's view ends where the bytes read so far end, and may begin before the block.
        offset = self.bytes - len(error.object) + error.start
        where = (
            f"{self.name} is not {codec}: byte 0x{error.object[error.start]:02X} at "
            f"offset {offset} (line {line})"
        )
        if cut_off:
            return UsageError(
                f"{where} begins a character that the end of the file cuts off. Complete the "
                "file, or pass its --encoding"
            )
        near = error.object[max(error.start - _NEARBY, 0) : error.start + _NEARBY]
        controls = sum(byte < 32 and byte not in b"\t\n\f\r" for byte in near)
        if controls > _BINARY_SHARE * len(near):
            return UsageError(
                f"{where} is among control characters: is this a picture, an archive or another "
                "binary file? Pass plain text, or the --encoding of it"
            )
        if codec != "utf-8":
            remedy = "--encoding NAME, or none for utf-8"
        elif sum(byte > 127 for byte in near) < _WESTERN_SHARE * len(near) and _is_cp1252(near):
            remedy = "--encoding cp1252 if it is Western text from Windows"
        else:
            remedy = "--encoding NAME"
        return UsageError(f"{where} cannot be decoded. Pass the encoding of the file: {remedy}")

    def _note_newlines(self, seen: str | tuple[str, ...] | None) -> None:
        kinds = [seen] if isinstance(seen, str) else list(seen or ())
        names = " and ".join(_NEWLINE_NAMES[kind] for kind in kinds if kind != "\n")
        if names and self.keep_newlines:
            self.notices.append(f"kept the line ends as they are, {names} among them")
        elif names:
            self.notices.append(f"turned line ends {names} into LF (--keep_newlines keeps them)")


def _is_cp1252(sample: bytes) -> bool:
    try:
        sample.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return True
