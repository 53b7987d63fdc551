"""Two losses on tiny Shakespeare: after a minute, and nanoGPT's published 1.4697 in ten.

Whole processes on the whole validation split, in nats per character. nanoGPT beside the first:
its CPU recipe with as many steps as fit into the minute, found from two short runs.
"""

import functools
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import peers
from benchmarks.measure import (
    ROOT,
    Options,
    Row,
    Section,
    Words,
    interleaved,
    spread,
    table,
    timed,
    verdict,
)
from benchmarks.nanogpt import whole_nanogpt, whole_run

TITLE = "Losses within a minute and within ten"
MINUTE, MINUTE_LOSS = 60, 1.55
BEST, BEST_LOSS = 600, 1.4697
AFTER, UNTIL = f"validation loss after {MINUTE} s, whole process", f"seconds to loss {BEST_LOSS}"
GOALS = {AFTER: f"{MINUTE_LOSS} or less", UNTIL: f"under {BEST}"}


@functools.cache
def fitting_steps(copy: Path) -> int:
    """Steps of nanoGPT's CPU recipe whose whole process takes a minute here."""
    few, many = 200, 500  # more than the 100 steps of its warm-up
    short, longer = (timed(peers.nanogpt_train(peers.SMALL, n), copy) for n in (few, many))
    return many + int((MINUTE - longer) / (longer - short) * (many - few))


def measure(options: Options) -> Section:
    """One row a run; both presets are files of configs/, and are passed over where they are not."""
    if not options.is_tiny_shakespeare() and not options.quick:
        return Section(["Skipped: these losses are of tiny Shakespeare (--text)."], options.text)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        copy = peers.nanogpt_copy(options, folder)

        def theirs(_: int) -> dict[str, float]:
            steps = 3 if options.quick else fitting_steps(copy)
            return whole_nanogpt(copy, peers.SMALL, steps)

        def preset(name: str):
            path = ROOT / "configs" / f"{name}.toml"
            if not path.is_file():
                return f"there is no configs/{name}.toml"
            default = ROOT / "configs" / "default.toml"
            words: Words = [options.text, "--config", default, path, *options.short()]
            return lambda number: whole_run(
                [*words, "--seed", str(1337 + number)], folder / f"{name}-{number}"
            )

        contestants = {
            "nanoGPT": peers.without_nanogpt(options) or theirs,
            "`minute`": preset("minute"),
        }
        found, absent = interleaved(contestants, options.rounds)
        last, missing = interleaved({"`best`": preset("best")}, 1)
    found, absent = found | last, absent | missing
    rows = [
        [name, *(spread([run[key] for run in found[name]], style) for key, style in COLUMNS)]
        if name in found
        else [name, absent[name], ""]
        for name in ("nanoGPT", "`minute`", "`best`")
    ]
    lines = table(["run", "seconds", "last validation loss"], rows)
    return Section(lines, options.text, _reached(found, absent))


COLUMNS = (("seconds", ".1f"), ("loss", ".4f"))


def _reached(found: dict[str, list[dict[str, float]]], absent: dict[str, str]) -> dict[str, Row]:
    middle = {
        name: {key: median(run[key] for run in runs) for key, _ in COLUMNS}
        for name, runs in found.items()
    }
    theirs = f"{middle['nanoGPT']['loss']:.3f}" if "nanoGPT" in middle else absent["nanoGPT"]
    rows = {
        AFTER: Row(theirs, "", absent.get("`minute`", "")),
        UNTIL: Row("", "", absent.get("`best`", "")),
    }
    if "`minute`" in middle:
        ours = middle["`minute`"]
        reached = verdict(ours["loss"] <= MINUTE_LOSS and ours["seconds"] <= MINUTE)
        rows[AFTER] = Row(theirs, f"{ours['loss']:.3f} in {ours['seconds']:.0f} s", reached)
    if "`best`" in middle:
        ours = middle["`best`"]
        reached = verdict(ours["loss"] <= BEST_LOSS and ours["seconds"] < BEST)
        rows[UNTIL] = Row("", f"{ours['seconds']:.0f}, loss {ours['loss']:.4f}", reached)
    return rows
