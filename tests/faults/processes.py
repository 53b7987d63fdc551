"""Processes to be hurt: the scripts, each in a process of its own, without torch's start-up time.

A launcher, which is this file run as a script, imports everything once. ``start`` makes it fork,
and the fork runs a script as ``python script.py`` would, from its words to its exit code; with
``cold`` it becomes a new Python first. ``do`` runs a function of this file in a fork.
"""

import atexit
import fcntl
import functools
import gc
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--d_model", "12", "--n_heads", "3", "--n_layers", "1", "--context_length", "9",
    "--batch_size", "4", "--sample_chars", "10", "--threads", "1", "--dropout", "0.1",
)  # fmt: skip
CLOSED = -1

MOMENTS = {
    "reading the text": "gpt.corpus:read_text",
    "building the model": "gpt.model.gpt:GPT.__init__",
    "opening the curves": "gpt.training.metrics:Metrics.__init__",
    "describing the run": "gpt.run:describe",
    "a step": "gpt.training.loop:clip_gradient",
    "an evaluation": "gpt.training.loop:evaluate",
    "a sample": "gpt.sampling.generate:_Window.append",
    "a save": "torch:save",
    "the name of the best": "gpt.training.checkpoint:link_atomically",
    "the last words": "gpt.commandline:shell_line",
    "a read": "gpt.training.checkpoint:_read",
    "a rename": "os:replace",
}
"""Where a process can be told to send itself a signal: in the n-th call of a function."""


class Process:
    """A started process. What it writes goes to files, unless it was given descriptors."""

    def __init__(self, pid: int, files: Sequence[Any]) -> None:
        self.pid, self._files = pid, files
        self.returncode: int | None = None

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> int:
        self.signal(signal.SIGKILL)
        return self.wait()

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask({"wait": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        until(lambda: self.poll() is not None, f"process {self.pid} to end", timeout)
        assert self.returncode is not None
        return self.returncode

    @property
    def out(self) -> str:
        return self._text(0)

    @property
    def err(self) -> str:
        return self._text(1)

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Wait until ``text`` is on standard output, or the process has ended."""
        until(lambda: text in self.out or self.poll() is not None, repr(text), timeout)

    def _text(self, number: int) -> str:
        file = self._files[number]
        return Path(file.name).read_bytes().decode("utf-8", "surrogateescape") if file else ""


def until(true: Callable[[], bool], what: str, timeout: float = 60) -> None:
    """Wait for something. The timeout only keeps a test from waiting for ever."""
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.002)


def start(
    script: str,
    *words: object,
    cold: bool = False,
    python: Sequence[str] = (),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    ignored: Sequence[int] = (),
    at: Sequence[tuple[str, int, int]] = (),
) -> Process:
    """Start ``script`` of this repository; a stream is a descriptor, CLOSED, or None: a file.

    ``at`` has (moment, n, signal): what the process sends itself in the n-th such moment. It leads
    a session of its own, whose terminal is its standard input if that is one.
    """
    return _start(
        {
            "script": str(ROOT / script), "words": [str(word) for word in words], "cold": cold,
            "python": list(python), "environment": dict(environment or {}),
            "folder": str(folder or ROOT), "ignored": [int(number) for number in ignored],
            "at": [(moment, n, int(number)) for moment, n, number in at],
        },
        stdin, stdout, stderr,
    )  # fmt: skip


def do(function: Callable[..., object], *arguments: object, stdout: int | None = None) -> Process:
    """Call a function of this file, with arguments that JSON can carry, in a fork."""
    request = {"function": function.__name__, "arguments": arguments, "folder": str(ROOT)}
    return _start(request, None, stdout, None)


def run(script: str, *words: object, **options: Any) -> Process:
    """``start`` and wait for the end."""
    process = start(script, *words, **options)
    process.wait(120)
    return process


# What forks do


def save_for_ever(folder: str, first: int, n_saves: int = 10**9) -> None:
    """Save one step after another, every second the best; print each step that is safe."""
    from states import LARGE, state_at

    from gpt.training.atomic import sweep
    from gpt.training.checkpoint import save_checkpoint

    sweep(Path(folder))
    print("ready", flush=True)
    for step in range(first, first + n_saves):
        save_checkpoint(Path(folder), state_at(step, LARGE), is_best=step % 2 == 0)
        print(step, flush=True)


# The launcher


def _start(request: dict[str, Any], *streams: int | None) -> Process:
    with open(os.devnull, "rb") as nothing:
        files = [None if stream is not None else _temporary_file() for stream in streams[1:]]
        given = [
            (file or nothing).fileno() if stream is None else stream
            for stream, file in zip(streams, [None, *files], strict=True)
        ]
        request["closed"] = [stream == CLOSED for stream in given]
        return Process(_ask(request, [stream for stream in given if stream != CLOSED]), files)


def _temporary_file() -> Any:
    file = tempfile.NamedTemporaryFile(prefix="output-")  # noqa: SIM115 - lives as its process
    atexit.register(file.close)
    return file


def _ask(request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
    connection = _launcher()
    socket.send_fds(connection, [json.dumps(request).encode()], list(descriptors))
    return json.loads(connection.recv(1 << 16))


@functools.cache
def _launcher() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait(60)

    atexit.register(end)
    return ours


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; return in the fork. When the tests have gone, end the rest."""
    living: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        if not message:
            for pid in living:
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        request = json.loads(message)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            living.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return request, descriptors
            living.add(answer)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(answer).encode())


def _take_streams(closed: Sequence[bool], descriptors: list[int]) -> None:
    """The descriptors 0, 1 and 2, and what Python makes of them when it starts."""
    left = iter(descriptors)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None
        if closed[number]:
            os.close(number)
        else:
            os.dup2(next(left), number)
            stream = open(  # noqa: SIM115
                number, "w" if number else "r", closefd=False, encoding="utf-8",
                buffering=1 if number == 2 or os.isatty(number) else -1,
                errors="strict" if number == 1 else "backslashreplace",
            )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for descriptor in descriptors:
        os.close(descriptor)


def _send_at(moment: str, n: int, number: int) -> None:
    module, _, path = MOMENTS[moment].partition(":")
    *owners, name = path.split(".")
    place = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(place, name)
    calls = itertools.count(1)

    def sending(*arguments: Any, **options: Any) -> Any:
        if next(calls) == n:
            os.kill(os.getpid(), number)
        return original(*arguments, **options)

    setattr(place, name, sending)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if not request.get("cold"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    _take_streams(request["closed"], descriptors)
    if sys.stdin and sys.stdin.isatty():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["folder"])
    if "function" in request:
        globals()[request["function"]](*request["arguments"])
        return
    script, words = request["script"], request["words"]
    os.environ.update(request["environment"])
    if request["cold"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, *request["python"], script, *words])
    for moment in request["at"]:
        _send_at(*moment)
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def _leave(work: Callable[[], None]) -> None:
    """Work, and end as Python would, but without taking every imported module apart."""
    code: Any = None
    try:
        work()
    except SystemExit as end:
        code = end.code
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        finish()
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.flush()
    os._exit(code or 0)


def _warm_up() -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    for module in ("run", "corpus", "resuming", "runfolder", "writing"):
        importlib.import_module(f"gpt.{module}")
    importlib.import_module("torch._dynamo")  # which building an optimiser imports
    states = importlib.import_module("states")
    states.state_at(0, states.LARGE)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _warm_up()
        gc.collect()
        gc.freeze()
        order = _serve(connection)
    _leave(lambda: _become(*order))
