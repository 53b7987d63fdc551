"""What the presets reach: each trained as a whole process, the way a user does.

A time is that of the whole process, start of Python to last line: reading, evaluations, samples
and checkpoints included.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import (
    ROOT,
    TRAIN,
    Contestants,
    Options,
    Section,
    Words,
    interleaved,
    spread,
    table,
    timed,
)

TITLE = "What the presets reach"
GOALS: dict[str, str] = {}
FIRST_SEED = 1337  # the default of train.py


def train(options: Options, preset: str, seed: int, folder: Path) -> dict[str, float]:
    """Train one preset in a process of its own; losses in nats per character, times in seconds.

    Raises CalledProcessError when the process fails.
    """
    from gpt.training.checkpoint import load_checkpoint
    from gpt.training.curves import read_metrics

    config = ROOT / "configs" / f"{preset}.toml"
    command: Words = [*TRAIN, options.corpus, "--config", config, "--out", folder]
    seconds = timed([*command, "--seed", str(seed), *options.short()])
    losses = read_metrics(folder)["loss/val"]
    return {
        "parameters": sum(tensor.numel() for tensor in load_checkpoint(folder).model.values()),
        "steps": losses[-1][0],  # every run ends with an evaluation
        "loss": min(loss for _, loss in losses),
        "seconds": seconds,
    }


def measure(options: Options) -> Section:
    """One row a preset; with several seeds the median, and the least and greatest."""
    with tempfile.TemporaryDirectory() as work:

        def trained(preset: str) -> Callable[[int], dict[str, float]]:
            folder = Path(work) / preset
            return lambda n: train(options, preset, FIRST_SEED + n, folder.with_suffix(f".{n}"))

        contestants: Contestants = {f"ours: {name}": trained(name) for name in options.presets}
        results, _ = interleaved(contestants, options.seeds)
    rows = []
    for name, runs in results.items():
        sizes = [f"{runs[0]['parameters']:,}", f"{runs[0]['steps']:,}"]
        loss = spread([run["loss"] for run in runs], ".3f")
        seconds = spread([run["seconds"] for run in runs], ".0f")
        rows.append([f"`{name.removeprefix('ours: ')}`", *sizes, loss, seconds])
    header = ["preset", "parameters", "steps", "best validation loss (nats per character)"]
    return Section(table([*header, "seconds"], rows), options.corpus)
