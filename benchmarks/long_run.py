"""Does a long run become slower? Steps of the first and the last tenth, as a ratio.

    python benchmarks/long_run.py [--steps N]

Two runs on one thread, one that flushes denormals, as every run does, and one that does not. Both
learn a text whose rare characters stand in its validation part only, under a strong weight decay:
nothing but the decay moves those characters' embeddings, and they shrink until they are denormal.
There they stay, because a number of a few units in the last place, times 0.98, is rounded back to
itself; and a processor takes many times as long for a denormal.
"""

import argparse
import contextlib
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.steps import Clock
from gpt.config import ModelConfig, TrainingConfig
from gpt.model.gpt import GPT
from gpt.training import loop
from gpt.training.optimisers import build_optimisers

SEEN, RARE = 29, 2000
SMALLEST = torch.finfo(torch.float32).tiny
MODEL = ModelConfig(
    d_model=40, n_heads=4, n_layers=1, context_length=16, tie_embeddings=False, activation="relu"
)


def run(steps: int, flush: bool) -> tuple[float, float, float]:
    """Median seconds a step in the first and last tenth; the part of the weights left denormal."""
    torch.set_flush_denormal(flush)
    config = TrainingConfig(
        steps=steps, batch_size=3, learning_rate=2e-3, weight_decay=10.0, schedule="constant",
        eval_every=steps, log_every=steps, warmup_steps=0,
    )  # fmt: skip
    model = GPT(MODEL, SEEN + RARE, config.seed)
    optimisers = build_optimisers(model, config, torch.device("cpu"))
    ids = np.random.default_rng(0).integers(0, SEEN, 20_000).astype(np.uint16)
    clock = Clock()
    nothing = np.empty(0, np.uint16)
    loop.train(model, optimisers, ids, nothing, config, contextlib.nullcontext, clock)
    times = np.diff(clock.times)
    tenth = len(times) // 10
    # As bits: with the flush, torch takes a denormal for 0.
    bits = [p.detach().numpy().view(np.uint32) & 0x7FFFFFFF for p in model.parameters()]
    small = np.uint32(np.float32(SMALLEST).view(np.uint32))
    denormal = sum(int(((b > 0) & (b < small)).sum()) for b in bits)
    first, last = (statistics.median(part) for part in (times[:tenth], times[-tenth:]))
    return first, last, denormal / sum(b.size for b in bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the flush holds for the thread that asks for it
    print(f"{given.steps:,} steps, torch {torch.__version__}\n")
    print("| denormals | last tenth / first tenth | denormal weights at the end |")
    print("|---|---:|---:|")
    for flush in (True, False):
        first, last, denormal = run(given.steps, flush)
        print(f"| {'flushed' if flush else 'kept'} | {last / first:.2f} | {denormal:.1%} |")


if __name__ == "__main__":
    main()
