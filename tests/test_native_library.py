"""From a C file to a library: compiled once, checked each time, absent without a complaint."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from gpt.native import library as made

compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(not compiler, reason="no C compiler")

load = made.library.__wrapped__  # without the memory of this process


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own, empty, and a source that compiles in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(made, "__file__", str(tmp_path / "library.py"))
    (tmp_path / "sum.c").write_text("NUMBER sum(NUMBER a, NUMBER b) { return a + b; }\n")
    return tmp_path / "cache" / "mini-gpt"


def no_compiling(*arguments):
    raise AssertionError("compiled")


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("sum-*.so"))


@needs_compiler
def test_a_source_becomes_functions(cache):
    found = load("sum", "NUMBER=int")
    assert found is not None
    assert found.sum(2, 3) == 5
    floats = load("sum", "NUMBER=float")
    floats.sum.restype, floats.sum.argtypes = ctypes.c_float, [ctypes.c_float] * 2
    assert floats.sum(0.25, 0.5) == 0.75
    assert len(libraries(cache)) == 2
    assert {path.suffix for path in cache.iterdir()} == {".so", ".sha256"}


@needs_compiler
def test_a_library_without_a_function_that_is_asked_for_is_none(cache):
    assert load("sum", "NUMBER=int", functions=("sum",))
    assert load("sum", "NUMBER=int", functions=("sum", "product")) is None


@needs_compiler
def test_it_is_compiled_once(cache, monkeypatch):
    assert load("sum", "NUMBER=int")
    monkeypatch.setattr(made, "_compile", no_compiling)
    assert load("sum", "NUMBER=int")
    with pytest.raises(AssertionError, match="compiled"):
        load("sum", "NUMBER=long")


@needs_compiler
def test_another_source_or_compiler_is_another_library(cache, tmp_path, monkeypatch):
    load("sum", "NUMBER=int")
    (tmp_path / "sum.c").write_text("NUMBER sum(NUMBER a, NUMBER b) { return a + b + 1; }\n")
    assert load("sum", "NUMBER=int").sum(2, 3) == 6
    monkeypatch.setattr(made, "_machine", lambda compiler: b"another")
    load("sum", "NUMBER=int")
    assert len(libraries(cache)) == 3


@needs_compiler
@pytest.mark.parametrize("harm", ["flipped", "cut", "no digest"])
def test_a_damaged_library_is_made_anew(cache, harm):
    load("sum", "NUMBER=int")
    (path,) = libraries(cache)
    whole = path.read_bytes()
    path.unlink()  # not in place: this process has it mapped
    if harm == "no digest":
        path.with_suffix(".sha256").unlink()
        path.write_bytes(whole)
    elif harm == "cut":
        path.write_bytes(whole[:100])
    else:
        path.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    assert load("sum", "NUMBER=int").sum(2, 3) == 5
    assert made._intact(path)


@pytest.mark.parametrize("where", ["nowhere", "fails", "hangs up"])
def test_without_a_compiler_that_works_there_is_none(cache, tmp_path, monkeypatch, capfd, where):
    folder = tmp_path / "bin"
    folder.mkdir()
    if where != "nowhere":
        script = folder / "cc"
        script.write_text("#!/bin/sh\n" + ("exit 1\n" if where == "fails" else "kill -9 $$\n"))
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert load("sum", "NUMBER=int") is None
    assert ("no C compiler" if where == "nowhere" else str(folder / "cc")) in made.why_not("sum")
    assert capfd.readouterr() == ("", "")


@needs_compiler
@pytest.mark.parametrize("unknown", ["-fopenmp", "-march=native"])
def test_what_a_compiler_does_not_know_is_left_out(cache, tmp_path, monkeypatch, unknown):
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "cc"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *{unknown}*) exit 1;; esac\nPATH={os.environ["PATH"]}\n'
        f'exec {compiler} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert load("sum", "NUMBER=int").sum(2, 3) == 5


@needs_compiler
def test_a_relative_cache_is_ignored(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert load("sum", "NUMBER=int")
    assert not (tmp_path / "here").exists()
    assert (tmp_path / "home" / ".cache" / "mini-gpt").is_dir()


@needs_compiler
def test_a_source_that_does_not_compile_gives_none_and_leaves_nothing(cache, tmp_path, capfd):
    (tmp_path / "sum.c").write_text("no C\n")
    assert load("sum", "NUMBER=int") is None
    assert list(cache.iterdir()) == []
    assert load("absent") is None
    assert capfd.readouterr() == ("", "")


@needs_compiler
def test_a_cache_that_others_can_write_to_is_not_used(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert load("sum", "NUMBER=int") is None
    assert list(cache.iterdir()) == []
    cache.chmod(0o700)
    assert load("sum", "NUMBER=int")


@needs_compiler
def test_a_cache_of_another_user_is_not_used(cache, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: cache.parent.parent.stat().st_uid + 1)
    assert load("sum", "NUMBER=int") is None


@needs_compiler
def test_a_place_that_holds_no_folder_gives_none(cache):
    cache.parent.mkdir()
    cache.write_text("a file")
    assert load("sum", "NUMBER=int") is None


@needs_compiler
def test_without_a_home_there_is_none(cache, monkeypatch):
    def homeless():
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert load("sum", "NUMBER=int") is None
