"""How soon the loss of nanoGPT's own CPU recipe is reached: whole processes, theirs and ours.

Theirs is the recipe that its README advises for a CPU: 2000 steps of 12 windows of 64 characters,
4 layers, 4 heads, 128 wide. Ours is ``nanogpt_recipe.toml`` over the default preset, with another
seed in each round. Both losses are those of the whole validation split, in nats per character.
"""

import tempfile
from pathlib import Path
from statistics import median

from benchmarks import peers
from benchmarks.measure import (
    ROOT,
    TRAIN,
    Options,
    Row,
    Section,
    Words,
    in_new_process,
    interleaved,
    spread,
    table,
    timed,
    verdict,
)

TITLE = "Time to the loss of nanoGPT's CPU recipe"
LOSS, TIMES = 1.886, 10
WORK = f"whole process to validation loss {LOSS} (nanoGPT's CPU recipe)"
GOALS = {WORK: f"1/{TIMES} of nanoGPT's time"}
CONFIGS = [ROOT / "configs" / "default.toml", ROOT / "benchmarks" / "nanogpt_recipe.toml"]


def whole_run(words: Words, folder: Path) -> dict[str, float]:
    """Seconds of a run of train.py with these words, and its last validation loss."""
    from gpt.training.curves import read_metrics

    seconds = timed([*TRAIN, *words, "--out", folder])
    return {"seconds": seconds, "loss": read_metrics(folder)["loss/val"][-1][1]}


def whole_nanogpt(copy: Path, shape: peers.Shape, steps: int) -> dict[str, float]:
    """The same of nanoGPT; its loss is computed after the time is taken."""
    seconds = timed(peers.nanogpt_train(shape, steps), copy)
    return {"seconds": seconds, "loss": in_new_process(peers.nanogpt_loss, str(copy))}


def measure(options: Options) -> Section:
    """One row each, and the ratio of the times."""
    with tempfile.TemporaryDirectory() as work:
        copy = peers.nanogpt_copy(options, Path(work))
        words: Words = [options.text, "--config", *CONFIGS, *options.short()]
        results, absent = interleaved(
            {
                "nanoGPT": peers.without_nanogpt(options)
                or (lambda number: whole_nanogpt(copy, peers.SMALL, options.steps(2000))),
                "ours": lambda number: whole_run(
                    [*words, "--seed", str(1337 + number)], Path(work) / f"run-{number}"
                ),
            },
            options.rounds,
        )
    seconds = {name: median(run["seconds"] for run in runs) for name, runs in results.items()}
    rows = []
    for name in ("nanoGPT", "ours"):
        if name in absent:
            rows.append([name, absent[name], "", ""])
            continue
        ratio = f"{seconds['nanoGPT'] / seconds[name]:.1f}" if "nanoGPT" in seconds else ""
        loss = spread([run["loss"] for run in results[name]], ".4f")
        rows.append([name, spread([run["seconds"] for run in results[name]], ".1f"), loss, ratio])
    ours = f"{seconds['ours']:.1f} s"
    low_enough = median(run["loss"] for run in results["ours"]) <= LOSS
    if "nanoGPT" in absent:
        reached = Row(absent["nanoGPT"], ours, verdict(None))
    elif not options.is_tiny_shakespeare():
        reached = Row(f"{seconds['nanoGPT']:.1f} s", ours, "another text")
    else:
        times = seconds["nanoGPT"] / seconds["ours"]
        if low_enough:
            ours += f" ({times:.1f} times sooner)"
        reached = Row(f"{seconds['nanoGPT']:.1f} s", ours, verdict(low_enough and times >= TIMES))
    header = ["whole process", "seconds", "loss over the validation split", "times sooner"]
    return Section(table(header, rows), options.text, {WORK: reached})
