"""What every benchmark shares: whole commands timed, contestants by turns, medians, tables, origin.

A section is a module with a ``TITLE``, its ``GOALS`` (work -> what is wanted) and a function
``measure(options) -> Section``.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, str(ROOT / "train.py")]
TINY_SHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass(frozen=True)
class Options:
    """What the user asked for; both texts are the default corpus where none was given."""

    text: Path
    corpus: Path
    """What the presets learn, which is no text to compare published losses on."""
    nanogpt: Path | None = None
    llama2c: tuple[Path, ...] = ()
    rounds: int = 3
    quick: bool = False
    """Everything runs, as shortly as it can; the figures mean nothing."""
    presets: tuple[str, ...] = ("tiny", "default")
    seeds: int = 1

    @property
    def seconds(self) -> float:
        """How long one measurement of a rate goes on, at least."""
        return 0.0 if self.quick else 2.0

    def steps(self, wanted: int) -> int:
        """The steps of a measurement."""
        return 3 if self.quick else wanted

    def short(self) -> list[str]:
        """Flags of train.py that cut a run short where only its working is of interest."""
        return ["--steps", "2", "--eval_every", "2", "--sample_chars", "1"] if self.quick else []

    def is_tiny_shakespeare(self) -> bool:
        """Whether losses can be compared with the published ones."""
        return hashlib.sha256(self.text.read_bytes()).hexdigest() == TINY_SHAKESPEARE


@dataclass(frozen=True)
class Row:
    """One line of the table of goals; ``reached`` is yes, no, or why it cannot be said."""

    theirs: str
    ours: str
    reached: str


@dataclass
class Section:
    """Markdown lines, the text they are of, and rows of the table of goals: work -> row."""

    lines: list[str]
    text: Path
    reached: dict[str, Row] = field(default_factory=dict)


Words = list[str | Path]
Contestants = dict[str, Callable[[int], Any] | str]
"""Name -> what to measure, given the number of the round; or why it is absent."""


def interleaved(
    contestants: Contestants, rounds: int
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Each contestant once a round, by turns: name -> its results, and name -> why it has none.

    One that fails is absent from then on, with the last line that it said. "ours", and what begins
    with "ours:", must not fail.
    """
    results: dict[str, list[Any]] = {}
    absent = {name: f"skipped: {why}" for name, why in contestants.items() if isinstance(why, str)}
    for number in range(rounds):
        for name, run in contestants.items():
            if isinstance(run, str) or name in absent:
                continue
            print(f"    round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                results.setdefault(name, []).append(run(number))
            except (subprocess.CalledProcessError, RuntimeError) as error:
                if name.split(":")[0] == "ours":
                    raise
                results.pop(name, None)
                absent[name] = f"failed: {reason(error)}"
    return results, absent


def reason(error: BaseException) -> str:
    """The last line of what a process said on stderr, or of the message."""
    said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return said[-1].replace("|", "/") if said else type(error).__name__


def finished(command: Sequence[str | Path], folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a command to its end. Raises CalledProcessError, with what it said in ``stderr``."""
    return subprocess.run(
        [*map(str, command)], cwd=folder, check=True, stdin=subprocess.DEVNULL,
        capture_output=True, encoding="utf-8", errors="replace",
    )  # fmt: skip


def timed(command: Sequence[str | Path], folder: Path = ROOT) -> float:
    """Seconds of a whole process, from its start to its end."""
    start = time.perf_counter()
    finished(command, folder)
    return time.perf_counter() - start


def seconds_to_line(command: Sequence[str | Path], pattern: str, folder: Path = ROOT) -> float:
    """Seconds from the start of a process to the first line that begins so; it is then ended.

    Raises RuntimeError with its last line when it ends without one.
    """
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    start = time.perf_counter()
    with subprocess.Popen(
        [*map(str, command)], cwd=folder, env=unbuffered, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = ""
        try:
            for line in process.stdout:
                if re.match(pattern, line):
                    return time.perf_counter() - start
        finally:
            process.terminate()
            process.stdout.read()  # what it says while it ends must not block it
    raise RuntimeError(f"no line {pattern!r}; the last was: {line.strip()}")


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module here returns, computed by a process of its own.

    Arguments and result are JSON. A new process has no caches, threads or compiled code of others.
    """
    code = (
        f"import json, sys\nfrom {function.__module__} import {function.__name__} as f\n"
        "print(json.dumps(f(*json.loads(sys.argv[1]))))"
    )
    ended = finished([sys.executable, "-c", code, json.dumps(arguments)])
    return json.loads(ended.stdout.splitlines()[-1])


def repeated(work: Callable[[], object], seconds: float) -> float:
    """Median seconds of a piece of work, done once or until ``seconds`` have passed."""
    times: list[float] = []
    while not times or sum(times) < seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; all columns but the first are numbers, and stand right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], f"|---|{'---:|' * (len(header) - 1)}", *lines[1:]]


def spread(values: Sequence[float], style: str) -> str:
    """The median; with several values also the least and the greatest."""
    middle = format(statistics.median(values), style)
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{style}} to {max(values):{style}})"


def verdict(reached: bool | None) -> str:
    """A cell of the table of goals; None where there was nothing to compare with."""
    return {True: "yes", False: "**no**", None: "not measured"}[reached]


def origin(options: Options, text: Path) -> str:
    """When, on what, with what and how the numbers were made."""
    import torch  # not above: a process that measures a start must not wait for it

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions += f", transformers {importlib.metadata.version('transformers')}"
    if options.nanogpt and (options.nanogpt / ".git").exists():
        versions += f", nanoGPT {commit(options.nanogpt)}"
    machine = f"{processor()}, {os.cpu_count()} cores, threads {torch.get_num_threads()}"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    day = datetime.datetime.now(datetime.UTC).date()
    quick = " --quick: these figures mean nothing." if options.quick else ""
    return f"{day}; {text.name}; {machine}; {versions}; commit {commit()}.{quick}"


def processor() -> str:
    """The name of the processor, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit(folder: Path = ROOT) -> str:
    """The short hash, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    except OSError:
        return "unknown"
    return ended.stdout.strip() or "unknown"
