"""compare.py where the disk is full or read-only: one message, and what was finished stays."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT
from small_runs import some_text

from gpt.runfolder import owner

pytestmark = pytest.mark.slow

TINY = (
    "--d_model", "12", "--n_heads", "3", "--n_layers", "1", "--context_length", "9",
    "--batch_size", "4", "--steps", "300", "--seeds", "9",
)  # fmt: skip


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A real file system of 2 MB."""
    if os.name == "nt" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this root may not mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def start(*words: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, ROOT / "compare.py", *map(str, words)], encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_disk_that_fills_up_ends_a_comparison_and_what_was_finished_stays(tmp_path, disk, faults):
    out = disk / "out"
    words = ["demo", some_text(tmp_path), *TINY, "--out", out]
    with faults("a disk that fills up under a comparison"), start(*words) as process:
        end = time.monotonic() + 120
        while not list(out.glob("*/outcome.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        _, err = process.communicate(timeout=120)
    assert process.returncode == 6, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "No space left on device" in line
    assert "-w" in line
    assert "Traceback" not in err
    done = {path: path.read_bytes() for path in out.glob("*/outcome.json")}
    assert done
    (disk / "ballast").unlink()
    with start(*words[:-2], "--seeds", "1", "--out", out) as again:
        _, err = again.communicate(timeout=120)
    assert "runs are there already" in err
    assert {path: path.read_bytes() for path in done} == done


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
def test_a_read_only_folder_is_refused(tmp_path, disk, faults, begun):
    out = disk / "out"
    if begun:
        out.mkdir()
        (out / "comparison.json").write_text("{}", encoding="utf-8")
        with owner(out):
            pass
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    words = ["demo", some_text(tmp_path), *TINY, "--out", out]
    with faults("a comparison on a read-only disk"), start(*words) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 6, err
    assert "Read-only file system" in err.splitlines()[-1]
    assert "Traceback" not in err
