"""``compare.py init``: every placement, initialisation and depth before any training."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import TYPE_CHECKING

from gpt.commandline import run_config, run_name
from gpt.config import RunConfig
from gpt.lab.arms import parse_arms
from gpt.lab.columns import columns
from gpt.lab.commandline import InitCommand
from gpt.lab.folders import begin
from gpt.lab.made import made
from gpt.lab.progress import duration, say, tell
from gpt.lab.report import Figure, Section, Table, write_report
from gpt.text.reading import Corpus

if TYPE_CHECKING:
    from gpt.lab.at_start import Start

CAPTIONS = {
    "last": "gradient of the last block's W_out: mean over positions of its norm",
    "ratio": "gradient of the last block's W_out over the first's (expected gradient)",
    "total": "norm of the whole gradient",
    "branches": "rms of what a sublayer adds over rms of what it is added to, median of sublayers",
    "stream": "rms of the stream before the last sublayer",
    "noise": "3 % noise on the weights of the blocks: squared relative change of the logits",
    "update": "one step of gradient descent at 1e-3: rms change of the logits",
}
"""What is measured, a table each."""
SHOWN = 8
"""Lines of progress."""
SLOPE_FROM = 4
"""Blocks; shallower models are not on the line yet."""


@dataclass(frozen=True)
class Cell:
    """One arm with one init and one depth: a model a seed."""

    arm: str
    init: str
    depth: int
    config: RunConfig


Found = dict[Cell, "list[Start]"]


def main(command: InitCommand) -> int:
    """The subcommand; returns the exit code."""
    base = run_config(command)
    arms = parse_arms(command.arms, base)
    depths = sorted(set(command.depths))
    seeds = range(base.training.seed, base.training.seed + command.seeds)
    cells = [
        Cell(
            arm.name,
            init,
            depth,
            arm.config(base, seeds[0]).with_changes({"init": init, "n_layers": depth}),
        )
        for init in dict.fromkeys(command.inits)
        for arm in arms
        for depth in depths
    ]
    longest = max((cell.config for cell in cells), key=lambda config: config.model.context_length)
    with begin(command, longest, "init") as (corpus, out):
        found = measure_all(cells, corpus, seeds, command.workers)
        for init in dict.fromkeys(command.inits):
            say("\n".join([f"init {init}", *summary(found, init), ""]))
        title = f"Before training: {run_name(command)}"
        write(found, out, title, made("init", command, corpus))
        return 0


def measure_all(cells: Sequence[Cell], corpus: Corpus, seeds: Sequence[int], workers: int) -> Found:
    """Every cell with every seed, ``workers`` models at once; the cost is told first."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from gpt.lab.at_start import Start, first_batches, fresh, look

    def one(task: tuple[Cell, int]) -> Start:
        cell, seed = task
        model = fresh(cell.config, corpus, seed)
        return look(model, first_batches(cell.config, corpus), seed)

    def one_thread() -> None:
        torch.set_num_threads(1)

    one_thread()
    tasks = [(cell, seed) for cell in cells for seed in seeds]
    shallow = min(cells, key=lambda cell: cell.depth)
    one((shallow, seeds[0]))
    started = time.perf_counter()
    one((shallow, seeds[0]))
    a_block = (time.perf_counter() - started) / shallow.depth
    blocks = sum(cell.depth for cell, _ in tasks)
    tell(
        f"{len(tasks)} models of {cells[0].depth} to {cells[-1].depth} blocks, no training: about "
        f"{duration(blocks * a_block / workers)} with {workers} at once"
    )
    with ThreadPoolExecutor(workers, initializer=one_thread) as pool:
        try:
            starts = []
            for start in pool.map(one, tasks):
                starts.append(start)
                if len(starts) % (len(tasks) // SHOWN or 1) == 0:
                    tell(f"{len(starts):>5} of {len(tasks)}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    found: Found = {cell: [] for cell in cells}
    for (cell, _), start in zip(tasks, starts, strict=True):
        found[cell].append(start)
    return found


def values(found: Found, init: str, what: str) -> dict[str, dict[int, float]]:
    """Arm -> depth -> one of the quantities of CAPTIONS, a mean over seeds."""
    by_arm: dict[str, dict[int, float]] = {}
    for cell, starts in found.items():
        if cell.init == init:
            mean = fmean if what == "stream" else _geometric_mean
            numbers = [_value(start, what) for start in starts]
            by_arm.setdefault(cell.arm, {})[cell.depth] = mean(numbers)
    return by_arm


def _geometric_mean(numbers: Sequence[float]) -> float:
    """0 where one is: blocks that begin as the identity add nothing, and amplify nothing."""
    return geometric_mean(numbers) if all(numbers) else 0.0


def _value(start: "Start", what: str) -> float:
    return {
        "last": start.last,
        "ratio": start.gradients[-1] / start.gradients[0],
        "total": start.total,
        "branches": median(start.branch_over_skip),
        "stream": start.stream[-2],
        "noise": start.amplification,
        "update": start.update,
    }[what]


def tables(found: Found, init: str) -> list[Table]:
    """One a quantity: a row an arm, a column a depth."""
    made = []
    for what, caption in CAPTIONS.items():
        by_arm = values(found, init, what)
        depths = list(next(iter(by_arm.values())))
        header = ["blocks", *map(str, depths)]
        rows = [[arm, *(f"{of[d]:.3g}" for d in depths)] for arm, of in by_arm.items()]
        made.append(Table(header, rows, caption))
    return made


def summary(found: Found, init: str) -> list[str]:
    """A line an arm: the deepest model, and how it got there from the shallowest."""
    from gpt.lab.at_start import slope

    measured = {what: values(found, init, what) for what in CAPTIONS}
    depths = list(next(iter(measured["last"].values())))
    first, last = depths[0], depths[-1]
    rows = [[
        "", "last block's", "slope over", "last / first", "branch /", "stream", "3 % noise:",
        "update:",
    ], [
        "arm", "gradient", "depth", "gradient", "skip", "rms", "times", "times",
    ]]  # fmt: skip
    for arm, gradients in measured["last"].items():
        deep = [d for d in depths if d >= SLOPE_FROM]
        steep = f"{slope({d: gradients[d] for d in deep}):+.2f}" if len(deep) > 1 else "-"
        at = {what: of[arm][last] for what, of in measured.items()}
        before = {what: of[arm][first] for what, of in measured.items()}
        noise, update = (
            f"x{at[what] / before[what]:.3g}" if before[what] else "-"
            for what in ("noise", "update")
        )
        numbers = (at["ratio"], at["branches"], at["stream"])
        rows.append(
            [arm, f"{at['last']:.3g}", steep, *(f"{v:.3g}" for v in numbers), noise, update]
        )
    return [
        f"with {last} blocks; slope of log gradient over log depth from {SLOPE_FROM} blocks on; "
        f"times: {last} blocks over {first}",
        *columns(rows),
    ]


def write(found: Found, out: Path, title: str, how: Mapping[str, str]) -> None:
    """``out/report.html``: every table, and figures of the gradients and the stream."""
    sections = []
    arms = list(dict.fromkeys(cell.arm for cell in found))
    for init in dict.fromkeys(cell.init for cell in found):
        cells = {cell: starts for cell, starts in found.items() if cell.init == init}
        lines, drawn = summary(found, init), figures(cells, arms, init)
        sections.append(Section(f"init {init}", lines, drawn, tables(found, init)))
    say("report: " + str(write_report(out, title, sections, made=how)))


def figures(found: Found, arms: Sequence[str], init: str) -> list[Figure]:
    """Of the cells of one init."""
    from gpt.lab.figures import gradient_by_block, gradient_by_depth, stream_growth

    by_depth: dict[str, dict[int, list[float]]] = {}
    for cell, starts in found.items():
        by_depth.setdefault(cell.arm, {})[cell.depth] = [start.last for start in starts]
    deepest = max(cell.depth for cell in found)
    deep = {cell.arm: starts for cell, starts in found.items() if cell.depth == deepest}
    by_block = {
        arm: [_geometric_mean(of) for of in zip(*(s.gradients for s in starts), strict=True)]
        for arm, starts in deep.items()
    }
    growth = {
        arm: [fmean(of) for of in zip(*(s.stream for s in starts), strict=True)]
        for arm, starts in deep.items()
    }
    return [
        Figure(
            f"gradient_by_depth_{init}", CAPTIONS["last"], gradient_by_depth(by_depth, arms=arms)
        ),
        Figure(
            f"gradient_by_block_{init}",
            f"Expected gradient (mean over batches, then norm) of {deepest} blocks.",
            gradient_by_block(by_block, arms=arms),
        ),
        Figure(
            f"stream_growth_{init}",
            f"Along {deepest} blocks: rms of what each sublayer is added to, and of what leaves "
            "the last.",
            stream_growth(growth, arms=arms),
        ),
    ]
