"""What logging costs at its default interval, TensorBoard included, as a share of the step time.

Two measures of whole runs of the default preset. Inside one run: the time that a logged step takes
more than the median of the others, divided by the interval. Across runs, by turns: the mean step of
a run that logs as usual over that of a run that logs its first and last step only; it has the noise
of the machine in it.
"""

import itertools
import tempfile
from pathlib import Path
from statistics import mean, median

from benchmarks.measure import (
    ROOT,
    Options,
    Row,
    Section,
    in_new_process,
    interleaved,
    table,
    verdict,
)

TITLE = "Logging"
MOST = 0.03
WORK = "logging at its default interval, TensorBoard included, share of the step time"
GOALS = {WORK: f"under {MOST:.0%}"}
STEPS = 120


def run(text: str, steps: int, log_every: int) -> dict[str, float]:
    """Mean seconds of a step, and the share of logging in it; 0 for ``log_every`` is the default.

    The first step and the last are in neither.
    """
    import time

    import gpt.run
    from gpt.config import RunConfig
    from gpt.config_files import read_toml
    from gpt.corpus import read_text

    times: list[float] = []
    logged: set[int] = set()  # updates done when it was logged

    class Timed(gpt.run.Keeper):
        def before_step(self, step: int) -> bool:
            times.append(time.perf_counter())
            return super().before_step(step)

        def logged(self, step: int, values: dict[str, float]) -> None:
            logged.add(step)
            super().logged(step, values)

    gpt.run.Keeper = Timed  # type: ignore[misc]
    changes = {"text": text, "steps": steps, "eval_every": steps, "sample_chars": 0}
    changes |= {"log_every": log_every} if log_every else {}
    preset = read_toml([ROOT / "configs" / "default.toml"])
    config = RunConfig().with_changes(preset | changes)
    with tempfile.TemporaryDirectory() as folder:
        gpt.run.Run(config, read_text(config)).go(Path(folder), quiet=True)
    took = {done: b - a for done, (a, b) in enumerate(itertools.pairwise(times), start=1)}
    del took[1]
    plain = median(seconds for done, seconds in took.items() if done not in logged)
    extra = [took[done] - plain for done in logged if done in took]
    share = median(extra) / config.training.log_every / plain if extra else 0.0
    return {"seconds": mean(took.values()), "share": share}


def measure(options: Options) -> Section:
    """Both measures."""
    steps = 12 if options.quick else STEPS
    text = str(options.text)
    found, _ = interleaved(
        {
            "ours": lambda _: in_new_process(run, text, steps, 0),
            "ours: hardly logging": lambda _: in_new_process(run, text, steps, 10**6),
        },
        options.rounds,
    )
    share = median(one["share"] for one in found["ours"])
    pairs = zip(found["ours"], found["ours: hardly logging"], strict=True)
    across = median(usual["seconds"] / hardly["seconds"] for usual, hardly in pairs) - 1
    rows = [
        ["logged steps over the others, in one run", f"{share:.2%}"],
        ["runs that log over runs that hardly do", f"{across:.2%}"],
    ]
    lines = table(["share of the step time", ""], rows)
    return Section(lines, options.text, {WORK: Row("", f"{share:.1%}", verdict(share < MOST))})
