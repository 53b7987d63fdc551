"""Characters a second of training the same architecture: nanoGPT, transformers' GPT-2, ours.

Learned positions, Pre-LN, GELU, AdamW, clipping; each in a process of its own, the median step.
nanoGPT is timed by its own training script, ours by our training loop, as a run would set it up.
"""

import re
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import peers
from benchmarks.measure import (
    Options,
    Row,
    Section,
    finished,
    in_new_process,
    interleaved,
    table,
    verdict,
)

TITLE = "Training steps of the same architecture"
SHAPES = {peers.SMALL: (1.7, None, 200), peers.LARGE: (2.0, 0.5, 12)}
"""Shape -> times nanoGPT's speed, share of the peak, steps."""


def work_of(shape: peers.Shape) -> str:
    """The row in the table of goals."""
    return f"training, characters a second ({shape.name})"


GOALS = {
    work_of(shape): f"{times}x nanoGPT" + (f", {share:.0%} of the matmul peak" if share else "")
    for shape, (times, share, _) in SHAPES.items()
}


def nanogpt_step(shape: peers.Shape, copy: Path, steps: int) -> dict[str, float]:
    """Median seconds of a step, as its training script prints them; without the first."""
    command = peers.nanogpt_train(
        shape, steps, log_interval=1, eval_interval=10**9, eval_iters=1, lr_decay_iters=steps + 1
    )
    said = finished(command, copy).stdout
    return {"seconds": median(map(float, re.findall(r"time ([\d.]+)ms", said)[1:])) / 1000}


def gpt2_step(shape: dict[str, int], steps: int) -> dict[str, float]:
    """Median seconds of a step of transformers' GPT-2, trained the same way; without the first."""
    import torch

    model = peers.gpt2(shape)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    times = []
    for _ in range(steps + 1):
        ids = torch.randint(peers.VOCAB_SIZE, (shape["batch_size"], shape["context_length"]))
        start = time.perf_counter()
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        times.append(time.perf_counter() - start)
    return {"seconds": median(times[1:])}


class Clock:
    """Notes when each step begins (``loop.Observer``)."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def before_step(self, step: int) -> bool:
        self.times.append(time.perf_counter())
        return True

    def logged(self, step: int, values: dict[str, float]) -> None:
        pass

    def evaluated(self, step: int, loss: float | None) -> None:
        pass

    def failed(self, step: int, values: dict[str, float]) -> None:
        pass

    def stopped(self, step: int) -> None:
        pass


def our_step(shape: dict[str, int], text: str, steps: int, compiled: bool) -> dict[str, float]:
    """Median seconds of a step without the first and last, which are logged; the matmul peak.

    Raises RuntimeError where compiling does not work.
    """
    import torch

    from gpt.config import RunConfig
    from gpt.corpus import read_text
    from gpt.run import Run
    from gpt.training import loop
    from gpt.training.machine import compile_model
    from gpt.training.plan import peak_flops, training_flops

    changes: dict[str, Any] = {
        "feedforward_bias": False, "steps": steps + 2, "eval_every": steps + 2,
        "log_every": steps + 2, "val_fraction": 0.0, "text": text, "compile": compiled,
    }  # fmt: skip
    config = RunConfig().with_changes(shape | changes)
    run = Run(config, read_text(config))
    if compiled and (why := compile_model(run.model)):
        raise RuntimeError(why)
    clock = Clock()
    ids, settings = run.corpus.train, run.config.training
    loop.train(
        run.model, run.optimisers, ids, run.corpus.val, settings, run.machine.autocast, clock
    )
    gaps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "seconds": median(gaps[1:]),
        "flops": training_flops(config, run.corpus.tokenizer.vocab_size),
        "peak": peak_flops(run.machine.device, torch.bfloat16),
    }


def measure(options: Options) -> Section:
    """One row a shape and contestant; the peak is that of bfloat16, measured in the same rounds."""
    rows, reached = [], {}
    with tempfile.TemporaryDirectory() as work:
        copy = peers.nanogpt_copy(options, Path(work))
        for shape, (times, share, wanted) in SHAPES.items():
            found, absent = _contest(options, shape, copy, options.steps(wanted))
            n_chars = shape.batch_size * shape.context_length
            flops = found["ours"][0]["flops"] / n_chars
            peak = median(run["peak"] for run in found["ours"])
            speed = {
                name: n_chars / median(run["seconds"] for run in runs)
                for name, runs in found.items()
            }
            theirs = speed.get("nanoGPT")
            for name in ("nanoGPT", "transformers GPT-2", "ours", "ours, --compile"):
                if name in absent:
                    rows.append([shape.name, name, absent[name], "", ""])
                    continue
                ratio = f"{speed[name] / theirs:.2f}" if theirs else ""
                part = f"{speed[name] * flops / peak:.0%}"
                rows.append([shape.name, name, f"{speed[name]:,.0f}", ratio, part])
            best = max(value for name, value in speed.items() if name.startswith("ours"))
            used = best * flops / peak
            ours = f"{best:,.0f}" + (f" ({best / theirs:.2f}x)" if theirs else "")
            ours += f", {used:.0%} of the peak" if share else ""
            reached[work_of(shape)] = Row(
                f"{theirs:,.0f}" if theirs else absent["nanoGPT"],
                ours,
                verdict(best >= times * theirs and used >= (share or 0) if theirs else None),
            )
    header = ["step", "", "characters/s", "times nanoGPT", "share of the bfloat16 peak"]
    return Section(table(header, rows), options.text, reached)


def _contest(options: Options, shape: peers.Shape, copy: Path, steps: int):
    def ours(compiled: bool):
        return lambda _: in_new_process(
            our_step, shape.fields(), str(options.text), steps, compiled
        )

    return interleaved(
        {
            "nanoGPT": peers.without_nanogpt(options)
            or (lambda _: nanogpt_step(shape, copy, steps)),
            "transformers GPT-2": peers.without_transformers()
            or (lambda _: in_new_process(gpt2_step, shape.fields(), steps)),
            "ours": ours(False),
            "ours, --compile": "--quick" if options.quick else ours(True),
        },
        options.rounds,
    )
