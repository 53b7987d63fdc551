"""Characters a second of writing: nanoGPT, transformers' GPT-2, llama2.c, ours; random weights.

Every text fills a context of 256 from one character, so nobody's window has to move, at
temperature 1 without filters. Each contestant is a process of its own that writes a few characters
first (which compiles what is to be compiled) and is then timed: whole calls of all; llama2.c counts
from its first character on. One row of ours goes on for several windows.
"""

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean, median

from benchmarks import peers
from benchmarks.measure import (
    Contestants,
    Options,
    Row,
    Section,
    Words,
    finished,
    in_new_process,
    interleaved,
    repeated,
    table,
    verdict,
)

TITLE = "Writing"
CONTEXT = 256
SMALL, LARGE = (replace(shape, context_length=CONTEXT) for shape in (peers.SMALL, peers.LARGE))
LONG = 2000
CASES = {
    f"one stream, {SMALL.size}": (SMALL, 1, 8000),
    f"one stream, {LARGE.size}": (LARGE, 1, 600),
    f"64 streams at once, {SMALL.size}": (SMALL, 64, 60_000),
}
"""Name -> shape, streams, wanted characters a second in all."""


def work_of(case: str) -> str:
    """The row in the table of goals."""
    return f"characters a second, {case}, context {CONTEXT}"


GOALS = {work_of(case): f"{wanted:,}" for case, (_, _, wanted) in CASES.items()}


def speed(write: Callable[[int], object], streams: int, n_chars: int, seconds: float) -> float:
    """Characters a second in all. ``write(n)`` makes n characters a stream."""
    write(min(n_chars, 8))
    return streams * n_chars / repeated(lambda: write(n_chars), seconds)


def ours(shape: dict[str, int], streams: int, n_chars: int, seconds: float) -> float:
    """Of ``generate``, set up as sample.py does."""
    import torch

    from gpt.config import RunConfig
    from gpt.model.gpt import GPT
    from gpt.sampling.generate import generate
    from gpt.sampling.options import OutputConfig, SampleCommand
    from gpt.training.machine import set_up
    from gpt.writing import compute_of

    machine = set_up(compute_of(SampleCommand(output=OutputConfig(n_samples=streams))))
    model = GPT(RunConfig().with_changes(shape).model, peers.VOCAB_SIZE).to(machine.device)
    prompt = torch.zeros(streams, 1, dtype=torch.long)

    def write(n: int) -> None:
        for _ in generate(model, prompt, n, temperature=1.0):
            pass

    return speed(write, streams, n_chars, seconds)


def nanogpt(
    checkout: str, shape: dict[str, int], streams: int, n_chars: int, seconds: float
) -> float:
    """Of its ``generate``."""
    import torch

    model = peers.nanogpt_model(checkout, shape).eval()
    prompt = torch.zeros(streams, 1, dtype=torch.long)
    return speed(lambda n: model.generate(prompt, n), streams, n_chars, seconds)


def gpt2(shape: dict[str, int], streams: int, n_chars: int, seconds: float) -> float:
    """Of ``generate`` in transformers, with its cache."""
    import torch

    model = peers.gpt2(shape).eval()
    prompt = torch.zeros(streams, 1, dtype=torch.long)

    def write(n: int) -> None:
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=True,
            top_k=0, use_cache=True, pad_token_id=0,
        )  # fmt: skip

    return speed(write, streams, n_chars, seconds)


def llama2c(binary: Path, shape: peers.Shape, folder: Path, times: int) -> float:
    """As it prints it, of some texts that fill the context: it counts whole milliseconds.

    Raises RuntimeError when it does not print it.
    """
    model, vocabulary = peers.llama2c_files(shape, folder)
    command: Words = [binary, model, "-z", vocabulary, "-n", str(CONTEXT), "-t", "1.0", "-p", "1.0"]
    speeds = []
    for seed in range(1, times + 1):
        ended = finished([*command, "-s", str(seed)])
        found = re.search(r"tok/s: ([\d.]+)", ended.stderr)
        if not found or len(ended.stdout.strip("\n")) != CONTEXT:
            raise RuntimeError(f"{binary.name} did not write {CONTEXT} characters and its speed")
        speeds.append(float(found[1]))
    return harmonic_mean(speeds)


def measure(options: Options) -> Section:
    """One row a case and contestant."""
    rows, reached = [], {}
    n_chars = 8 if options.quick else CONTEXT - 1
    with tempfile.TemporaryDirectory() as work:
        for case, (shape, streams, wanted) in CASES.items():
            contestants = _contestants(options, shape, streams, n_chars, Path(work))
            found, absent = interleaved(contestants, options.rounds)
            rates = {name: median(values) for name, values in found.items()}
            theirs = rates.get("nanoGPT")
            for name in contestants:
                ratio = f"{rates['ours'] / rates[name]:.2f}" if name in rates else ""
                rate = f"{rates[name]:,.0f}" if name in rates else absent[name]
                rows.append([case, name, rate, ratio])
            reached[work_of(case)] = Row(
                f"{theirs:,.0f}" if theirs else absent["nanoGPT"],
                f"{rates['ours']:,.0f}",
                verdict(rates["ours"] >= wanted),
            )
    lines = table(["case", "", "characters/s in all", "ours / this"], rows)
    return Section(lines, options.text, reached)


def _contestants(options: Options, shape: peers.Shape, streams: int, n_chars: int, work: Path):
    """A name for each binary of llama2.c, which writes one stream."""
    of = (shape.fields(), streams)

    def of_llama2c(binary: Path) -> Callable[[int], float]:
        return lambda _: llama2c(binary, shape, work, 1 if options.quick else 9)

    contestants: Contestants = {
        "nanoGPT": peers.without_nanogpt(options)
        or (lambda _: in_new_process(nanogpt, str(options.nanogpt), *of, n_chars, options.seconds)),
        "transformers GPT-2": peers.without_transformers()
        or (lambda _: in_new_process(gpt2, *of, n_chars, options.seconds)),
    }
    if streams == 1:
        for binary in options.llama2c:
            contestants[f"llama2.c, {binary.name}"] = of_llama2c(binary)
        if not options.llama2c:
            contestants["llama2.c"] = "no binary given (--llama2c BINARY)"
    contestants["ours"] = lambda _: in_new_process(ours, *of, n_chars, options.seconds)
    if streams == 1 and not options.quick:
        contestants[f"ours, {LONG:,} characters"] = lambda _: in_new_process(
            ours, *of, LONG, options.seconds
        )
    return contestants
