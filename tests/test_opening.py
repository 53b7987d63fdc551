"""What is no text file is refused at once, and nothing hangs."""

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpt.errors import UsageError
from gpt.text.opening import open_text, stamp

ROOT = Path(__file__).parents[1]


def refusal(path) -> str:
    with pytest.raises(UsageError) as caught:
        open_text(str(path))
    return str(caught.value)


def test_a_regular_file_is_opened(tmp_path):
    file = tmp_path / "my text é.txt"
    file.write_bytes(b"abc")
    with open_text(str(file)) as stream:
        assert stream.read() == b"abc"


def test_a_missing_file_brings_near_names(tmp_path):
    for name in ("hamlet.txt", "macbeth.txt", "zzz"):
        (tmp_path / name).touch()
    message = refusal(tmp_path / "hamlte.txt")
    assert f"there is no file '{tmp_path / 'hamlte.txt'}'" in message
    assert f"did you mean '{tmp_path / 'hamlet.txt'}'" in message
    assert "zzz" not in message


def test_a_missing_file_in_this_folder_brings_near_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.txt").touch()
    assert refusal("inptu.txt") == "there is no file 'inptu.txt'; did you mean 'input.txt'?"
    assert refusal("qqq") == "there is no file 'qqq'; check the name"


def test_a_missing_folder_is_named(tmp_path):
    message = refusal(tmp_path / "nowhere" / "a.txt")
    assert f"nor a folder '{tmp_path / 'nowhere'}'" in message
    assert "check the path" in message


def test_a_file_in_the_place_of_a_folder_is_no_folder(tmp_path):
    (tmp_path / "a.txt").touch()
    assert f"nor a folder '{tmp_path / 'a.txt'}'" in refusal(tmp_path / "a.txt" / "b.txt")


def test_a_folder_is_refused_with_the_way_to_join_files(tmp_path):
    message = refusal(tmp_path)
    assert f"'{tmp_path}' is a folder" in message
    assert "cat FOLDER/*.txt | python train.py -" in message


def test_a_pipe_without_a_writer_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    message = refusal(tmp_path / "pipe")
    assert f"'{tmp_path / 'pipe'}' is a pipe" in message
    assert "python train.py - < PIPE" in message


def test_an_endless_device_does_not_fill_memory():
    message = refusal("/dev/zero")
    assert "'/dev/zero' is a device" in message
    assert "may never end; pass a text file" in message


def test_a_socket_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        assert "'s' is a device or a socket" in refusal("s")


def test_an_endless_device_as_standard_input_is_refused():
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(
            [sys.executable, "-c", "from gpt.text.opening import open_text; open_text('-')"],
            cwd=ROOT,
            stdin=zeros,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    assert "UsageError: standard input is a device" in done.stderr


def test_names_in_messages_cannot_drive_a_terminal(tmp_path):
    (tmp_path / "tex\x1b]0;t\n").touch()
    message = refusal(tmp_path / "tex\x1b]0;\n")
    assert message.isprintable()
    assert "tex\\x1b]0;\\x0a'" in message
    assert "did you mean" in message
    assert "tex\\x1b]0;t\\x0a'" in message


def test_an_impossible_name_is_refused():
    message = refusal("a\0b")
    assert "no file is called 'a\\x00b'" in message
    assert "check it" in message


def test_standard_input_is_left_open(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc")))
    with open_text("-") as stream:
        assert stream.read() == b"abc"
    assert not sys.stdin.buffer.closed


def test_a_closed_standard_input_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    message = refusal("-")
    assert "standard input is closed" in message
    assert "pass the name of a text file" in message


def test_the_stamp_tells_that_a_file_was_written_to(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc")
    with open_text(str(file)) as stream:
        before = stamp(stream)
        assert stamp(stream) == before
        with file.open("ab") as other:
            other.write(b"d")
        assert stamp(stream) != before
    with open_text(str(file)) as stream:
        before = stamp(stream)
        os.utime(file, ns=(1, 1))
        assert stamp(stream) != before
    assert stamp(io.BytesIO(b"abc")) is None
