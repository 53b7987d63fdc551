"""Bytes to text: marks, line ends, encodings, and where exactly a file is not what it should be."""

import codecs
import hashlib
import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import UsageError
from gpt.text import decoding
from gpt.text.decoding import TextFile

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde"


@pytest.fixture
def write(tmp_path):
    def write(content: bytes) -> str:
        path = tmp_path / "text.txt"
        path.write_bytes(content)
        return str(path)

    return write


def read(path: str, **options) -> tuple[str, TextFile]:
    file = TextFile(path, **options)
    return "".join(file), file


def refusal(path: str, **options) -> str:
    with pytest.raises(UsageError) as caught:
        read(path, **options)
    return str(caught.value)


def through_stdin(monkeypatch, content: bytes, chunk_bytes: int) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    monkeypatch.setattr(decoding, "CHUNK_BYTES", chunk_bytes)


@settings(deadline=None)
@given(
    st.text(st.one_of(st.sampled_from("a\r\n\ufeff"), st.characters(exclude_categories=("Cs",)))),
    st.integers(1, 7),
    st.sampled_from(
        ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le", "gb18030"]
    ),
    st.booleans(),
)
def test_no_border_between_chunks_changes_the_text(text, chunk_bytes, encoding, keep_newlines):
    content = text.encode(encoding)
    with pytest.MonkeyPatch.context() as patch:
        through_stdin(patch, content, chunk_bytes)
        got, file = read("-", encoding=encoding, keep_newlines=keep_newlines)
    # What a mark-writing codec put in front is taken off again; otherwise the first of the text.
    marked = encoding in ("utf-8-sig", "utf-16", "utf-32")
    expected = text if marked else text.removeprefix("\ufeff")
    if not keep_newlines:
        expected = expected.replace("\r\n", "\n").replace("\r", "\n")
    assert got == expected
    assert file.bytes == len(content)
    assert file.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("chunk_bytes", range(1, 8))
def test_a_character_of_four_bytes_may_lie_across_any_border(monkeypatch, write, chunk_bytes):
    monkeypatch.setattr(decoding, "CHUNK_BYTES", chunk_bytes)
    text = "1234567😀é中\r\n😀\r" * 5
    assert read(write(text.encode()))[0] == "1234567😀é中\n😀\n" * 5


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "UTF8"])
def test_one_byte_order_mark_is_dropped_and_said(write, encoding):
    text, file = read(write(codecs.BOM_UTF8 * 2 + "a\ufeffb".encode()), encoding=encoding)
    assert text == "\ufeffa\ufeffb"
    assert file.notices == ["dropped the byte-order mark at the start"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("order", ["le", "be"])
def test_marked_text_is_read_in_either_byte_order(write, encoding, order):
    content = "\ufeffaé😀".encode(f"{encoding}-{order}")
    text, file = read(write(content), encoding=encoding)
    assert text == "aé😀"
    assert file.notices == ["dropped the byte-order mark at the start"]


@pytest.mark.parametrize(
    ("encoding", "codec", "mark"),
    [
        ("utf-16", "utf-16-le", "FF FE"),
        ("utf-16", "utf-16-be", "FE FF"),
        ("utf-32", "utf-32-le", "FF FE 00 00"),
        ("utf-32", "utf-32-be", "00 00 FE FF"),
    ],
)
def test_another_mark_names_the_encoding_to_pass(write, encoding, codec, mark):
    path = write("\ufeffabc".encode(codec))
    message = refusal(path)
    assert f"'{path}' begins with the byte-order mark {mark} of {encoding.upper()}" in message
    assert f"pass --encoding {encoding}" in message
    assert read(path, encoding=encoding)[0] == "abc"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_unmarked_wide_text_asks_for_the_byte_order(write, encoding):
    message = refusal(write("abc".encode(f"{encoding}-le")), encoding=encoding)
    assert "has no byte-order mark" in message
    assert f"--encoding {encoding}-le (usual) or {encoding}-be" in message


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        (b"a\r\nb\r\n", "CR LF"),
        (b"a\rb\r", "CR"),
        (b"a\r\nb\rc\n", "CR and CR LF"),
    ],
)
def test_line_ends_become_lf_and_it_is_said(write, content, kinds):
    text, file = read(write(content))
    assert text == content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").decode()
    assert file.notices == [f"turned line ends {kinds} into LF (--keep_newlines keeps them)"]

    text, file = read(write(content), keep_newlines=True)
    assert text == content.decode()
    assert file.notices == [f"kept the line ends as they are, {kinds} among them"]


def test_lf_alone_needs_no_notice(write):
    assert read(write(b"a\nb\n"))[1].notices == []


def test_an_undecodable_byte_is_named_with_offset_line_and_remedy(write):
    path = write(b"\x69\x74\x92\x73")
    message = refusal(path)
    assert f"'{path}' is not utf-8: byte 0x92 at offset 2 (line 1)" in message
    assert "--encoding cp1252" in message
    assert read(path, encoding="cp1252")[0] == "it’s"


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 7, 4096])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_offset_and_line_are_right_wherever_the_chunks_end(
    monkeypatch, write, chunk_bytes, line_end
):
    monkeypatch.setattr(decoding, "CHUNK_BYTES", chunk_bytes)
    before = line_end.join(["Grüße".encode(), b"two", b"three", "vier €".encode()]) + line_end
    path = write(before + b"\xfcber" + line_end + b"more text" * 9)
    assert f"byte 0xFC at offset {len(before)} (line 5)" in refusal(path)


def test_an_unfinished_character_at_its_start_is_where_the_error_is(monkeypatch, write):
    monkeypatch.setattr(decoding, "CHUNK_BYTES", 1)
    message = refusal(write(b"1234567\n\xf0\x9f\x98abcdef and so on"))
    assert "byte 0xF0 at offset 8 (line 2)" in message


def test_a_character_cut_off_by_the_end_is_told_from_a_wrong_one(write):
    message = refusal(write("schön 😀".encode()[:-1]))
    assert "byte 0xF0 at offset 7 (line 1) begins a character that the end of the file" in message
    assert "Complete the file, or pass its --encoding" in message


@pytest.mark.parametrize(
    "content",
    [
        "Привет, мир\n".encode("cp1251") * 9,
        "日本語の文章\n".encode("shift-jis") * 9,
        b"mostly plain \x81",
    ],
)
def test_cp1252_is_not_suggested_where_it_is_implausible(write, content):
    message = refusal(write(content))
    assert "Pass the encoding of the file: --encoding NAME" in message
    assert "--encoding cp1252" not in message


def test_a_wrong_encoding_is_answered_with_utf8(write):
    path = write("naïve".encode())
    message = refusal(path, encoding="ascii")
    assert f"'{path}' is not ascii: byte 0xC3 at offset 2 (line 1)" in message
    assert "or none for utf-8" in message


def test_the_encoding_is_called_as_it_was_given(write):
    message = refusal(write(b"caf\xe9 \x81"), encoding="cp1252")
    assert "is not cp1252: byte 0x81 at offset 5 (line 1)" in message


def test_a_picture_is_refused_readably(write):
    message = refusal(write(PNG))
    assert "byte 0x89 at offset 0 (line 1)" in message
    assert "a picture, an archive or another binary file?" in message
    assert "Pass plain text" in message
    assert message.isprintable()


@pytest.mark.parametrize("encoding", ["nonsense", "hex", "rot13", "undefined", "a\0b\x1b"])
def test_an_unknown_encoding_is_refused(write, encoding):
    message = refusal(write(b"abc"), encoding=encoding)
    assert "is unknown to Python" in message
    assert "try utf-8, cp1252 or utf-16" in message
    assert message.isprintable()


def test_a_codec_that_fails_without_a_place_is_still_answered(write):
    message = refusal(write(b"abc-!!"), encoding="punycode")
    assert "is not punycode" in message
    assert "--encoding" in message


def test_a_file_that_changes_while_it_is_read_is_refused(monkeypatch, write):
    monkeypatch.setattr(decoding, "CHUNK_BYTES", 10)
    path = write(b"abcdefghij" * 9)
    pieces = iter(TextFile(path))
    next(pieces)
    with open(path, "ab") as other:
        other.write(b"more")
    with pytest.raises(UsageError) as caught:
        list(pieces)
    assert f"'{path}' changed while it was read" in str(caught.value)
    assert "train on a copy" in str(caught.value)


def test_an_error_of_the_system_is_one_readable_line(monkeypatch, write):
    path = write(b"abc")

    def refuse(*args):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refuse)  # root may read everything
    message = refusal(path)
    assert message == (
        f"cannot read '{path}': Permission denied; pass a text file that you may read"
    )
