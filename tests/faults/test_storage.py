"""A save that is stopped, refused or forgotten by the disk at any of its operations."""

import errno
import os
import re
from pathlib import Path

import pytest
from commands import HERE, ROOT, python
from disk_faults import ForgetfulDisk, at, each_operation
from states import is_whole, state_at

from gpt.errors import DiskError
from gpt.training.atomic import sweep
from gpt.training.checkpoint import load_checkpoint, save_checkpoint

CHANGING = re.compile(
    r"\bos\.(open|replace|re\w*name|link|unlink|remove|mkdir|makedirs|fsync)\("
    r"|\bshutil\.(copy2?|copyfile|copytree|move|rmtree)\("
    r"|\.(unlink|rename|write_text|write_bytes|mkdir|touch|rmdir|symlink_to|hardlink_to|open)\("
    r"|(?<![.\w])open\("
)


def save(folder: Path, step: int) -> None:
    save_checkpoint(folder, state_at(step), is_best=step % 2 == 1)


def strays(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".tmp." in path.name]


@pytest.mark.parametrize("module", ["atomic", "checkpoint", "integrity", "schema", "curves"])
def test_whatever_is_saved_goes_through_the_seam(module):
    source = (ROOT / "gpt" / "training" / f"{module}.py").read_text(encoding="utf-8")
    assert not CHANGING.search(source)
    assert CHANGING.search((ROOT / "gpt" / "training" / "disk.py").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_process_that_ends_at_any_operation_of_a_save_loses_nothing(tmp_path, faults):
    ended = python(HERE / "crash_points.py", tmp_path)
    *lost, summary = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    n_operations = int(summary.split()[0])
    assert n_operations > 30
    with faults("a process ends at an operation of a save", n_operations):
        assert not lost


@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, *(pytest.param(getattr(errno, name), marks=pytest.mark.slow)
                     for name in ("EIO", "EDQUOT", "EACCES"))],
)  # fmt: skip
def test_an_operation_that_fails_is_one_message_and_loses_nothing(tmp_path, faults, code):
    for step in (3, 4):
        save(tmp_path, step)
    n, step, failed = 0, 4, True
    n_told = 0
    while failed:
        n += 1
        step += 1
        failed = False

        def fail(name: str) -> None:
            nonlocal failed
            failed = True
            raise OSError(code, os.strerror(code))

        with faults("an operation of a save fails"):
            told = ""
            with each_operation(at(n, fail)):
                try:
                    save(tmp_path, step)
                except DiskError as error:
                    told = str(error)
            n_told += bool(told)
            newest = load_checkpoint(tmp_path, prefer="newest")
            best = load_checkpoint(tmp_path, prefer="best")
            assert newest.step in ({step - 1, step} if told else {step})
            assert best.step % 2 == 1
            assert not newest.notices + best.notices
            assert is_whole(newest)
            assert is_whole(best)
            if told:
                assert os.strerror(code) in told
                assert str(tmp_path) in told
            # Only the removal itself may have left its file; the next run sweeps it.
            sweep(tmp_path)
            assert not strays(tmp_path)
            save(tmp_path, step)
    assert n_told > 20


def test_a_power_cut_at_any_moment_finds_the_last_save_that_had_ended(tmp_path, faults):
    real = tmp_path / "real"
    real.mkdir()
    forgetful = ForgetfulDisk(real)
    done = 0
    moments: list[tuple[int, dict[str, bytes]]] = []
    n_writes = 0

    def follow(name: str, arguments: tuple) -> None:
        nonlocal n_writes
        forgetful.follow(name, arguments)
        n_writes += name == "write"
        if name == "write" and n_writes % 13:  # one write is much like the next
            return
        for names in (False, True):
            for kept in (0.0, 0.5, 1.0):
                moments.append((done, forgetful.after_power_loss(names=names, kept=kept)))

    with each_operation(follow):
        for step in (3, 4, 5):
            save(real, step)
            done = step
    assert {path.name: path.read_bytes() for path in real.iterdir()} == {
        name: bytes(inode.data) for name, inode in forgetful.names.items()
    }
    for number, (done, files) in enumerate(moments):
        if not done:
            continue
        with faults("power is lost in a save"):
            folder = tmp_path / str(number)
            folder.mkdir()
            for name, data in files.items():
                (folder / name).write_bytes(data)
            newest = load_checkpoint(folder, prefer="newest")
            assert newest.step >= done
            assert is_whole(newest)
            assert not newest.notices
            assert is_whole(load_checkpoint(folder, prefer="best"))


def test_a_save_without_its_syncs_would_not_survive_a_power_cut(tmp_path):
    """The test above can fail."""
    real = tmp_path / "real"
    real.mkdir()
    forgetful = ForgetfulDisk(real)
    with each_operation(lambda name, a: name == "sync" or forgetful.follow(name, a)):
        save(real, 3)
    files = forgetful.after_power_loss(names=True, kept=0.0)
    assert files["step-00000003.pt"] == b""


@pytest.mark.parametrize("plant", ["link", "dangling link", "pipe", "folder"])
def test_what_is_planted_at_the_temporary_name_is_not_followed(tmp_path, faults, plant):
    folder = tmp_path / "checkpoints"
    save(folder, 3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    temporary = folder / f".step-00000005.pt.tmp.{os.getpid()}"
    with faults("something planted at a temporary name"):
        if plant == "pipe":
            os.mkfifo(temporary)
        elif plant == "folder":
            temporary.mkdir()
        else:
            temporary.symlink_to(elsewhere if plant == "link" else tmp_path / "nothing")
        with pytest.raises(DiskError, match="is in the way; delete it"):
            save(folder, 5)
        assert elsewhere.read_bytes() == b"precious"
        assert not (tmp_path / "nothing").exists()
        assert load_checkpoint(folder, prefer="newest").step == 3
