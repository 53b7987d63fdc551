"""From a C file of this package to functions that Python can call, or to nothing.

The C compiler of the system makes a shared library the first time (about a second), for exactly
this processor; later processes find it in the user's cache. Where anything is missing or fails
there is no library, nothing is said, and the same mathematics is computed by torch.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fopenmp",
    # Sums may be reordered, but NaN and infinity keep their meaning (so not -ffast-math, which
    # would also change how the whole process treats denormals when the library is loaded).
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
WITHOUT: tuple[tuple[str, ...], ...] = ((), ("-fopenmp",), ("-fopenmp", "-march=native"))
"""Flags that a compiler may lack, left out in this order; without OpenMP kernels use one thread."""
MOST_SECONDS = 60
"""Of a compilation; what a compiler says of itself takes no time."""
MOST_SECONDS_ASKED = 5


_reasons: dict[str, str] = {}


def why_not(name: str) -> str:
    """Why ``library(name)`` gave None, in a few words; nothing where it did not."""
    return _reasons.get(name, "")


@functools.cache
def library(name: str, *definitions: str, functions: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The library of ``gpt/native/<name>.c``, compiled with ``-D`` definitions; None without one,
    or where it lacks one of the functions.

    Never raises and never prints. Only this user can change the folder of the cache, and a file in
    it counts only if its digest is right: one that is cut or flipped is made anew.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        _reasons[name] = "there is no C compiler (cc, gcc or clang)"
        return None
    source = Path(__file__).with_name(f"{name}.c")
    flags = [*FLAGS, *(f"-D{definition}" for definition in definitions)]
    try:
        folder = _cache_folder()
        key = _digest(source.read_bytes(), repr(flags).encode(), _machine(compiler))
        target = folder / f"{name}-{key[:32]}.so"
        if not _intact(target):
            _compile(compiler, flags, source, target)
        found = ctypes.CDLL(str(target)) if _intact(target) else None
        if not all(hasattr(found, function) for function in functions):
            raise OSError(f"{target} is not what was compiled")
        return found
    except (OSError, subprocess.SubprocessError, ValueError, RuntimeError, AttributeError) as error:
        _reasons[name] = str(error)  # the last two: no home, and a system without user ids
        return None


def _cache_folder() -> Path:
    """A folder that only this user can write to. Raises OSError where there is none."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the XDG specification has it
        base = Path.home() / ".cache"
    folder = base / "mini-gpt"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve(strict=True)  # a link could be turned elsewhere after the check
    for place in (folder, *folder.parents):
        found = place.lstat()
        sticky = place != folder and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.getuid(), 0) or (found.st_mode & stat.S_IWOTH and not sticky):
            raise PermissionError(f"others can change {place}")
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & stat.S_IWGRP:
        raise PermissionError(f"{folder} is not ours alone")
    return folder


def _machine(compiler: str) -> bytes:
    """What decides the code that a compiler makes: its version and the processor."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=MOST_SECONDS_ASKED, check=True
    ).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = [platform.processor()]
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    processor = sorted({line for line in lines if line.startswith(names)})
    return version + repr([platform.machine(), processor]).encode()


def _compile(compiler: str, flags: list[str], source: Path, target: Path) -> None:
    """Put library and digest in place, each at once. Raises OSError and SubprocessError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / target.name
        for missing in WITHOUT:
            known = [flag for flag in flags if flag not in missing]
            if _run([compiler, *known, "-x", "c", os.devnull, "-o", f"{made}.probe"]) == 0:
                break
        if _run([compiler, *known, str(source), "-lm", "-o", str(made)]) != 0:
            raise OSError(f"{source} does not compile")
        digest = Path(work) / "digest"
        digest.write_text(_digest(made.read_bytes()), encoding="ascii")
        made.replace(target)
        digest.replace(target.with_suffix(".sha256"))


def _run(command: list[str]) -> int:
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=MOST_SECONDS
    )
    return ended.returncode


def _intact(path: Path) -> bool:
    """Whether the library is there, whole."""
    try:
        wanted = path.with_suffix(".sha256").read_text(encoding="ascii", errors="replace")
        return _digest(path.read_bytes()) == wanted
    except OSError:
        return False


def _digest(*parts: bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()
