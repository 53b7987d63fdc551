"""Does the default preset learn well, or only quickly? Beside AdamW, at equal steps.

The same model with the default recipe, and with AdamW, GPT-2's initial weights and a cosine at
three learning rates, the best of which counts. Three texts: the default corpus, Python's own
documentation of its language, and the source of its standard library, each cut to a megabyte.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.measure import Options, Row, Section, Words, spread, table, verdict
from benchmarks.nanogpt import whole_run

TITLE = "The default recipe beside AdamW"
WORK = "loss after equal steps, on three texts, beside AdamW's best"
GOALS = {WORK: "no worse"}
STEPS, SIZE = 300, 1_000_000
ADAMW: Words = [
    "--optimizer", "adamw", "--init", "gpt2", "--schedule", "cosine", "--final_lr_fraction", "0.1",
    "--warmup_steps", "30", "--beta1", "0.9", "--beta2", "0.99",
]  # fmt: skip
RECIPES: dict[str, Words] = {
    "default": [],
    **{f"AdamW at {rate}": [*ADAMW, "--learning_rate", rate] for rate in ("1e-3", "2e-3", "4e-3")},
}


def texts(options: Options, folder: Path) -> dict[str, Path]:
    """Name -> file, each of at most ``SIZE`` characters."""
    import pydoc_data.topics
    import tomllib

    library = sorted(Path(tomllib.__file__).parents[1].glob("*.py"))
    contents = {
        "the default corpus": options.corpus.read_text(encoding="utf-8"),
        "documentation": "\n".join(pydoc_data.topics.topics.values()),
        "source code": "\n".join(p.read_text(encoding="utf-8", errors="ignore") for p in library),
    }
    paths = {}
    for name, content in contents.items():
        paths[name] = folder / f"{name}.txt"
        paths[name].write_text(content[:SIZE], encoding="utf-8")
    return paths


def measure(options: Options) -> Section:
    """One row a text, one column a recipe."""
    steps = str(options.steps(STEPS))
    rows, no_worse = [], True
    with tempfile.TemporaryDirectory() as work:
        for name, path in texts(options, Path(work)).items():
            common: Words = [path, "--steps", steps, "--eval_every", steps, "--sample_chars", "0"]
            losses: dict[str, list[float]] = {}
            for number in range(options.seeds):
                for recipe, words in RECIPES.items():
                    print(f"    {name}: {recipe}", file=sys.stderr, flush=True)
                    folder = Path(work) / f"{name}, {recipe}, {number}"
                    run = whole_run([*common, *words, "--seed", str(1337 + number)], folder)
                    losses.setdefault(recipe, []).append(run["loss"])
            rows.append([name, *(spread(several, ".3f") for several in losses.values())])
            middle = {recipe: median(several) for recipe, several in losses.items()}
            no_worse &= middle["default"] == min(middle.values())
    lines = table(["text", *RECIPES], rows)
    lines += ["", f"Validation loss in nats per character after {steps} steps."]
    return Section(lines, options.corpus, {WORK: Row("", "", verdict(no_worse))})
