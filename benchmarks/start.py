"""How long a user waits: for ``--help``, for a wrong flag's message, for the first step.

Seconds from the start of a process to its end, or to the line that tells of the first step; whole
processes, nanoGPT with the flags that its README gives for a CPU. Both read a text and evaluate
before their first step; nanoGPT's text was encoded before, ours is not.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import peers
from benchmarks.measure import (
    TRAIN,
    Contestants,
    Options,
    Row,
    Section,
    Words,
    interleaved,
    seconds_to_line,
    table,
    timed,
    verdict,
)

TITLE = "Start"
HELP, STEP = "`--help`, seconds", "first training step of a 1 MB text after start, seconds"
GOALS = {HELP: "0.3", STEP: "4"}
WANTED = {HELP: 0.3, STEP: 4.0}


def refused(command: list[str], folder: Path) -> float:
    """Seconds of a process that must refuse its flag. Raises RuntimeError when it does not."""
    start = time.perf_counter()
    if subprocess.run(command, cwd=folder, capture_output=True).returncode == 0:
        raise RuntimeError(f"{command[-1]} was not refused")
    return time.perf_counter() - start


def measure(options: Options) -> Section:
    """One row a wait."""
    wait = peers.without_nanogpt(options)
    shape, wrong = peers.SMALL, "--d_modle=3"
    with tempfile.TemporaryDirectory() as work:
        copy = peers.nanogpt_copy(options, Path(work))
        first = peers.nanogpt_train(shape, 2000, log_interval=1)

        def our_first_step(number: int) -> float:
            command: Words = [*TRAIN, options.text, "--out", Path(work) / f"run-{number}"]
            return seconds_to_line(command, r"step +1  train")

        cases: dict[str, Contestants] = {
            HELP: {"ours": lambda _: timed([*TRAIN, "--help"])},  # nanoGPT has none
            "a wrong flag's message": {
                "nanoGPT": wait or (lambda _: refused([sys.executable, "train.py", wrong], copy)),
                "ours": lambda _: refused([*TRAIN, wrong], copy),
            },
            STEP: {
                "nanoGPT": wait or (lambda _: seconds_to_line(first, r"iter 0:", copy)),
                "ours": our_first_step,
            },
        }
        rows, reached = [], {}
        for case, contestants in cases.items():
            found, absent = interleaved(contestants, options.rounds)
            ours = median(found["ours"])
            theirs = absent.get("nanoGPT", "")
            if "nanoGPT" in found:
                theirs = f"{median(found['nanoGPT']):.2f}"
            rows.append([case.removesuffix(", seconds"), theirs, f"{ours:.2f}"])
            if case in WANTED:
                reached[case] = Row(theirs, f"{ours:.2f}", verdict(ours <= WANTED[case]))
    n_bytes = options.text.stat().st_size
    lines = table(["seconds", "nanoGPT", "ours"], rows)
    return Section([*lines, "", f"The text has {n_bytes:,} bytes."], options.text, reached)
