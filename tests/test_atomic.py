import errno
import os
import subprocess
import sys

import pytest

from gpt.errors import DiskError
from gpt.training import atomic
from gpt.training.atomic import link_atomically, make_folder, sweep, write_atomically

OLD, NEW = b"what was saved before", b"what comes now"


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "kept.pt"
    path.write_bytes(OLD)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_new(file):
    file.write(NEW)


def test_a_file_gets_its_new_contents_and_no_temporary_file_stays(target):
    write_atomically(target, write_new)
    assert target.read_bytes() == NEW
    assert names(target.parent) == ["kept.pt"]


def test_the_contents_are_forced_to_the_disk_before_the_name_and_the_name_after(
    target, monkeypatch
):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)

        def recorded(*args, name=name, original=original):
            calls.append((name, target.read_bytes() == NEW))
            return original(*args)

        monkeypatch.setattr(os, name, recorded)
    write_atomically(target, write_new)
    assert calls == [("fsync", False), ("replace", False), ("fsync", True)]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), ZeroDivisionError()])
def test_a_writer_that_raises_half_way_leaves_the_old_file(target, interruption):
    def half(file):
        file.write(NEW[:5])
        raise interruption

    with pytest.raises(type(interruption)):
        write_atomically(target, half)
    assert target.read_bytes() == OLD
    assert names(target.parent) == ["kept.pt"]


def test_a_file_that_fails_its_check_never_gets_the_name(target):
    def refuse(path):
        assert path.read_bytes() == NEW
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        write_atomically(target, write_new, check=refuse)
    assert target.read_bytes() == OLD
    assert names(target.parent) == ["kept.pt"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_an_operation_that_fails_is_a_disk_error_that_leaves_the_old_file(
    target, monkeypatch, operation, code
):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, operation, fail)
    with pytest.raises(DiskError, match=f"kept.pt.*{os.strerror(code)}.*MB are free"):
        write_atomically(target, write_new)
    assert target.read_bytes() == OLD
    assert names(target.parent) == ["kept.pt"]


def test_the_first_error_of_a_write_is_told_even_when_the_writer_hides_it(target, monkeypatch):
    def hiding(file):
        file.file = Full()
        try:
            file.write(NEW)
        except OSError:
            raise RuntimeError("unexpected position") from None

    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskError, match="No space left on device"):
        write_atomically(target, hiding)


def test_a_file_larger_than_the_free_space_is_not_begun(target):
    def never(file):
        pytest.fail("it was begun")

    with pytest.raises(DiskError, match=r"No space left on device.*it takes 1,000,000,000,000"):
        write_atomically(target, never, needed=10**18)
    assert target.read_bytes() == OLD


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of a file")
def test_a_real_limit_on_the_file_size_leaves_the_old_file(target):
    program = (
        "import resource, sys; from pathlib import Path; from gpt.errors import DiskError\n"
        "from gpt.training.atomic import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write_atomically(Path(sys.argv[1]), lambda file: file.write(bytes(100_000)))\n"
        "except DiskError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(target)], capture_output=True, text=True
    )
    assert "File too large" in done.stdout
    assert "kept.pt" in done.stdout
    assert target.read_bytes() == OLD
    assert names(target.parent) == ["kept.pt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_the_old_file(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small]).returncode:
        pytest.skip("this root may not mount")
    try:
        target = small / "kept.pt"
        target.write_bytes(OLD)
        with pytest.raises(DiskError, match="No space left on device"):
            write_atomically(target, lambda file: file.write(bytes(100_000)))
        assert target.read_bytes() == OLD
        assert names(small) == ["kept.pt"]
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("plant", [os.symlink, "pipe"])
def test_what_somebody_put_at_the_temporary_name_is_not_followed(target, tmp_path, plant):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(OLD)
    temporary = tmp_path / f".kept.pt.tmp.{os.getpid()}"
    if plant == "pipe":
        os.mkfifo(temporary)
    else:
        plant(elsewhere, temporary)
    for attempt in (
        lambda: write_atomically(target, write_new),
        lambda: link_atomically(elsewhere, target),
    ):
        with pytest.raises(DiskError, match=r"\.kept\.pt\.tmp\.\d+' is in the way; delete it"):
            attempt()
    assert elsewhere.read_bytes() == target.read_bytes() == OLD
    assert temporary.exists()


def test_a_name_that_windows_holds_for_a_moment_is_tried_again(target, monkeypatch):
    replace, refusals = os.replace, [5, 32]

    def busy(*args):
        if refusals:
            error = PermissionError(errno.EACCES, "access denied")
            error.winerror = refusals.pop()
            raise error
        return replace(*args)

    monkeypatch.setattr(os, "replace", busy)
    monkeypatch.setattr(atomic.time, "sleep", lambda seconds: None)
    write_atomically(target, write_new)
    assert target.read_bytes() == NEW


def test_a_name_that_windows_never_lets_go_is_a_disk_error(target, monkeypatch):
    tries = []

    def busy(*args):
        tries.append(args)
        error = PermissionError(errno.EACCES, "access denied")
        error.winerror = 5
        raise error

    monkeypatch.setattr(os, "replace", busy)
    monkeypatch.setattr(atomic.time, "sleep", lambda seconds: None)
    with pytest.raises(DiskError, match="access denied"):
        write_atomically(target, write_new)
    assert 2 < len(tries) < 10


def test_a_link_is_the_same_file_under_a_second_name(target, tmp_path):
    best = tmp_path / "best.pt"
    best.write_bytes(NEW)
    link_atomically(target, best)
    assert best.samefile(target)
    link_atomically(target, best)
    assert names(tmp_path) == ["best.pt", "kept.pt"]


def test_where_links_do_not_work_the_file_is_copied(target, tmp_path, monkeypatch):
    def no_links(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    best = tmp_path / "best.pt"
    link_atomically(target, best)
    assert best.read_bytes() == OLD
    assert not best.samefile(target)
    assert names(tmp_path) == ["best.pt", "kept.pt"]


def test_a_folder_that_cannot_be_made_is_a_disk_error(target):
    with pytest.raises(DiskError, match="Not a directory"):
        make_folder(target / "checkpoints")


def test_a_sweep_removes_temporary_files_and_nothing_else(target, tmp_path):
    stray = [".best.pt.tmp.77", ".kept.pt.tmp.123456"]
    for name in [*stray, ".hidden", "kept.pt.tmp.9", ".kept.pt.tmp.x", ".x.tmp.9.bak"]:
        (tmp_path / name).write_bytes(NEW)
    (tmp_path / ".folder.tmp.5").mkdir()
    assert sorted(sweep(tmp_path)) == stray
    assert names(tmp_path) == [
        ".folder.tmp.5", ".hidden", ".kept.pt.tmp.x", ".x.tmp.9.bak", "kept.pt", "kept.pt.tmp.9"
    ]  # fmt: skip
    assert sweep(tmp_path / "absent") == []
