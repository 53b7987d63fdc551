"""What the presets reach: each trained as a whole process, the way a user does.

    python benchmarks/presets.py [PRESET ...] [--text FILE] [--seeds N] [--out FILE]

Prints a Markdown table and writes it to ``benchmarks/RESULTS.md``. A time is that of the whole
process, start of Python to last line: reading, evaluations, samples and checkpoints included.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics

ROOT = Path(__file__).resolve().parents[1]
FIRST_SEED = 1337  # the default of train.py


def train(preset: str, text: list[str], seed: int, folder: Path) -> dict[str, float]:
    """Train one preset in a process of its own; losses in nats per character, times in seconds.

    Raises CalledProcessError, after its messages, when the process fails.
    """
    # The default preset is what runs without --config.
    config = [] if preset == "default" else ["--config", str(ROOT / "configs" / f"{preset}.toml")]
    command = [sys.executable, str(ROOT / "train.py"), *text, *config]
    command += ["--seed", str(seed), "--out", str(folder)]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    losses = read_metrics(folder)["loss/val"]
    return {
        "parameters": sum(tensor.numel() for tensor in load_checkpoint(folder).model.values()),
        "steps": losses[-1][0],  # every run ends with an evaluation
        "loss": min(loss for _, loss in losses),
        "seconds": seconds,
    }


def table(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """One row a preset; with several seeds the mean, and the least and greatest."""
    lines = [
        "| preset | parameters | steps | best validation loss (nats per character) | seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    for preset, runs in results.items():
        loss = spread([run["loss"] for run in runs], ".3f")
        seconds = spread([run["seconds"] for run in runs], ".0f")
        sizes = f"{runs[0]['parameters']:,} | {runs[0]['steps']:,}"
        lines.append(f"| `{preset}` | {sizes} | {loss} | {seconds} |")
    return lines


def spread(values: Sequence[float], style: str) -> str:
    mean = format(statistics.mean(values), style)
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{style}} to {max(values):{style}})"


def origin(text: str) -> str:
    """When, on what and with what the numbers were made."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    machine = f"{processor()}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    day = datetime.datetime.now(datetime.UTC).date()
    return f"{day}; {text}; {machine}; {versions}; commit {commit()}."


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The short hash, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    except OSError:
        return "unknown"
    return ended.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the presets reach.")
    parser.add_argument("presets", nargs="*", default=["tiny", "default"], metavar="PRESET")
    parser.add_argument("--text", type=Path, help="a text file (default: the default corpus)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each preset (default: 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    options = parser.parse_args()
    if options.text is None:  # made before anything is timed
        subprocess.run([sys.executable, str(ROOT / "data" / "prepare.py")], check=True)
    text = [str(options.text)] if options.text else []
    source = origin(options.text.name if options.text else "the default corpus")
    results: dict[str, list[dict[str, float]]] = {preset: [] for preset in options.presets}
    with tempfile.TemporaryDirectory() as runs:
        for preset in options.presets:
            for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
                print(f"training {preset}, seed {seed}", file=sys.stderr)
                folder = Path(runs) / f"{preset}-{seed}"
                results[preset].append(train(preset, text, seed, folder))
    lines = ["# What the presets reach", "", *table(results), "", source]
    report = "\n".join(lines) + "\n"
    print(report)
    options.out.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
