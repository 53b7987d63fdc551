"""Time to the loss of nanoGPT's own CPU recipe, and characters a second, beside nanoGPT itself.

    python benchmarks/against_nanogpt.py --nanogpt DIR --text FILE [--rounds N]

``--nanogpt`` is a checkout of karpathy/nanoGPT. It is copied, and trained as its README advises for
a CPU: 2000 steps of 12 windows of 64 characters, 4 layers, 4 heads, 128 wide. Both see the same
text, and both losses are those of the whole validation split (the last tenth), in nats per
character. A, B, A, B in one run; times are those of whole processes, and of steps where said.
"""

import argparse
import json
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RECIPE = [
    "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1000",
    "--eval_interval=2000", "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4",
    "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0",
]  # fmt: skip
SHAPES = {
    "4/4/128, 12 x 64": {"n_layer": 4, "n_head": 4, "n_embd": 128, "batch": 12, "block": 64},
    "6/6/384, 8 x 256": {"n_layer": 6, "n_head": 6, "n_embd": 384, "batch": 8, "block": 256},
}

# Run inside the copy of nanoGPT: the loss of its checkpoint over the whole validation split.
NANOGPT_LOSS = """
import sys, numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load("out-shakespeare-char/ckpt.pt", weights_only=False)
model = GPT(GPTConfig(**saved["model_args"]))
model.load_state_dict(saved["model"])
model.eval()
data = torch.from_numpy(np.fromfile("data/shakespeare_char/val.bin", np.uint16).astype(np.int64))
total = n = 0
with torch.no_grad():
    for start in range(0, len(data) - 1, 64):
        x, y = data[start:start + 64], data[start + 1:start + 65]
        _, loss = model(x[None, :len(y)], y[None])
        total += loss.item() * len(y)
        n += len(y)
print(total / n)
"""

# Run inside the copy of nanoGPT, or here: median seconds of a training step.
NANOGPT_STEP = """
import sys, time, json, statistics, torch
from model import GPT, GPTConfig
shape = json.loads(sys.argv[1])
model = GPT(GPTConfig(block_size=shape["block"], vocab_size=65, n_layer=shape["n_layer"],
                      n_head=shape["n_head"], n_embd=shape["n_embd"], dropout=0.0, bias=False))
optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
times = []
for _ in range(shape["repeats"]):
    x = torch.randint(65, (shape["batch"], shape["block"]))
    begin = time.perf_counter()
    _, loss = model(x, x)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    times.append(time.perf_counter() - begin)
print(statistics.median(times))
"""


def copied(checkout: Path, text: str, folder: Path) -> Path:
    """A copy of nanoGPT with the text as its data, encoded as its own script does."""
    copy = folder / "nanoGPT"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    characters = sorted(set(text))
    ids = np.array([characters.index(c) for c in text], np.uint16)
    data = copy / "data" / "shakespeare_char"
    n_train = int(0.9 * len(ids))
    ids[:n_train].tofile(data / "train.bin")
    ids[n_train:].tofile(data / "val.bin")
    meta = {
        "vocab_size": len(characters),
        "itos": dict(enumerate(characters)),
        "stoi": {c: i for i, c in enumerate(characters)},
    }
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    return copy


def timed(command: list[str], folder: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def last_word(command: list[str], folder: Path) -> float:
    ended = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return float(ended.stdout.split()[-1])


def nanogpt(copy: Path) -> dict[str, float]:
    train = [sys.executable, "train.py", "config/train_shakespeare_char.py", *RECIPE]
    seconds = timed(train, copy)
    return {"seconds": seconds, "loss": last_word([sys.executable, "-c", NANOGPT_LOSS], copy)}


def ours(text: Path, folder: Path, words: list[str]) -> dict[str, float]:
    from gpt.training.curves import read_metrics

    command = [sys.executable, str(ROOT / "train.py"), str(text), *words, "--out", str(folder)]
    seconds = timed(command, ROOT)
    return {"seconds": seconds, "loss": read_metrics(folder)["loss/val"][-1][1]}


def step_seconds(shape: dict[str, int], flags: dict[str, object], repeats: int) -> float:
    """Median seconds of one of our training steps, in this process."""
    import torch

    from gpt.config import RunConfig
    from gpt.model.gpt import GPT
    from gpt.training.loop import backward, clip_gradient
    from gpt.training.machine import set_up
    from gpt.training.optimisers import build_optimisers

    sizes = {
        "n_layers": shape["n_layer"], "n_heads": shape["n_head"], "d_model": shape["n_embd"],
        "batch_size": shape["batch"], "context_length": shape["block"], "feedforward_bias": False,
    }  # fmt: skip
    config = RunConfig().with_changes(sizes | flags)
    machine = set_up(config.machine)
    model = machine.prepared(GPT(config.model, 65))
    optimisers = build_optimisers(model, config.training, machine.device)
    times = []
    for _ in range(repeats):
        x = torch.randint(65, (shape["batch"], shape["block"]))
        begin = time.perf_counter()
        backward(model, [(x, x)], machine.autocast)
        clip_gradient(model, 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def steps_table(copy: Path, rounds: int) -> list[str]:
    lines = ["| training step | nanoGPT, characters/s | ours | ratio |", "|---|---:|---:|---:|"]
    for name, shape in SHAPES.items():
        n_chars = shape["batch"] * shape["block"]
        repeats = 60 if n_chars < 1000 else 6
        theirs, mine = [], []
        for _ in range(rounds):
            words = json.dumps(shape | {"repeats": repeats})
            theirs.append(last_word([sys.executable, "-c", NANOGPT_STEP, words], copy))
            mine.append(
                last_word(
                    [sys.executable, __file__, "--step", name, "--repeats", str(repeats)], ROOT
                )
            )
        a, b = statistics.median(theirs), statistics.median(mine)
        lines.append(f"| {name} | {n_chars / a:,.0f} | {n_chars / b:,.0f} | {a / b:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", choices=SHAPES, help="one measurement of ours, for this script")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only-steps", action="store_true")
    parser.add_argument("words", nargs="*", help="after --: flags of train.py for the recipe")
    options = parser.parse_args()
    if options.step:
        print(step_seconds(SHAPES[options.step], {}, options.repeats))
        return
    with tempfile.TemporaryDirectory() as work:
        copy = copied(options.nanogpt, options.text.read_text(encoding="utf-8"), Path(work))
        print("\n".join(steps_table(copy, options.rounds)), flush=True)
        if options.only_steps:
            return
        results: dict[str, list[dict[str, float]]] = {"nanoGPT": [], "ours": []}
        for number in range(options.rounds):
            results["ours"].append(ours(options.text, Path(work) / f"run-{number}", options.words))
            results["nanoGPT"].append(nanogpt(copy))
            print(results["nanoGPT"][-1], results["ours"][-1], flush=True)
        seconds = {n: statistics.median(r["seconds"] for r in rs) for n, rs in results.items()}
        losses = {n: statistics.median(r["loss"] for r in rs) for n, rs in results.items()}
        print("\n| whole process | seconds | loss over the validation split |\n|---|---:|---:|")
        for name in results:
            print(f"| {name} | {seconds[name]:.1f} | {losses[name]:.4f} |")
        print(f"\nratio of times: {seconds['nanoGPT'] / seconds['ours']:.1f}")


if __name__ == "__main__":
    main()
