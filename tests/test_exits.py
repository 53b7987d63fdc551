import subprocess
import sys
from pathlib import Path

import pytest

from gpt.errors import CheckpointError
from gpt.exits import exit_code

ROOT = Path(__file__).parents[1]


def test_errors_become_exit_codes_and_one_safe_line(capsys):
    def failing():
        raise CheckpointError("checkpoint 'a\x1b[2Jb' is damaged; restore it")

    assert exit_code(failing) == 4
    assert capsys.readouterr().err == "error: checkpoint 'a\\x1b[2Jb' is damaged; restore it\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)


def test_ctrl_c_is_exit_130_without_a_word(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_code(interrupted) == 130
    assert capsys.readouterr().err == ""


def test_a_full_standard_error_changes_no_exit_code():
    for words in (["--steps", "x"], ["--bogus"], ["nowhere.txt"]):
        with open("/dev/full", "wb") as full:
            ended = subprocess.run(
                [sys.executable, "train.py", *words], stderr=full, stdout=subprocess.PIPE,
                check=False, cwd=ROOT,
            )  # fmt: skip
        assert (ended.returncode, ended.stdout) == (2, b"")


def test_a_full_disk_behind_standard_output_is_one_message():
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "train.py", "--help"], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False, cwd=ROOT,
        )  # fmt: skip
    assert ended.returncode == 6
    assert ended.stderr == "error: cannot write: No space left on device; make room\n"
