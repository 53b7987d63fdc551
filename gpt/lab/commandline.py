"""The subcommands of compare.py and what each can be told. Nothing here imports torch."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro

from gpt.checks import at_least, at_most, nearest
from gpt.commandline import Files, not_empty, parse, take
from gpt.config import NormPosition, RunConfig, from_flat
from gpt.config_files import read_toml
from gpt.errors import UsageError

PLACEMENTS: tuple[str, ...] = get_args(NormPosition)
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Peak learning rates, each twice the one before."""
NEEDS_WARMUP = Path(__file__).parents[2] / "configs" / "needs_warmup.toml"
"""The setting in which Post-LN fails without warm-up: a run is some seconds."""

Arms = Annotated[tuple[str, ...], tyro.conf.arg(metavar="ARM ...")]
Numbers = Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")]
Rates = Annotated[tuple[float, ...], tyro.conf.arg(metavar="RATE ...")]
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="WORD ...")]


@dataclass(frozen=True, kw_only=True)
class LabCommand(RunConfig):
    """What every subcommand takes: the settings of a run, and where and how many at once."""

    config: Files = ()
    """TOML files of settings for all arms, stacked left to right under the flags."""
    out: str = ""
    """Folder of the runs (default: a new one under runs/); one that is there is gone on with."""
    workers: int = 2
    """Runs at once, each on one thread; the results do not depend on it."""


@dataclass(frozen=True, kw_only=True)
class RunCommand(LabCommand):
    """Train arms that differ in one thing, from the same weights on the same batches.

    Without --config: the block of the teaching texts, with the defaults below.
    """

    arms: Arms = ("pre", "post")
    """What is compared: norm placements, norm kinds, or TOML files of changes."""
    seeds: int = 5
    """Runs an arm, from seed upwards; one run shows nothing."""
    margin: float = 0.02
    """Difference in nats per character below which two arms count as equal."""


@dataclass(frozen=True, kw_only=True)
class DemoCommand(LabCommand):
    """Post-LN and Pre-LN, without warm-up and with it, in the setting that needs it.

    Without --config: configs/needs_warmup.toml, about two minutes on two cores.
    """

    seeds: int = 5
    """Runs an arm, from seed upwards."""
    margin: float = 0.02
    """Difference in nats per character below which two arms count as equal."""


@dataclass(frozen=True, kw_only=True)
class WhyCommand(LabCommand):
    """What happens inside in the first steps: update, branches, gradients, predictions.

    Post-LN without warm-up, with warm-up and with small weights, and Pre-LN; 80 steps, unless
    --steps is given. Without --config: configs/needs_warmup.toml, half a minute on two cores.
    """


@dataclass(frozen=True, kw_only=True)
class SweepCommand(LabCommand):
    """Learning rate by arm, weights, warm-up and depth: where each stops to learn.

    Every run is trained to its last step. The first seed trains every rate, the others go to the
    better half, then to the best rate with its neighbours and to both sides of the rate at which
    the arm fails. Without --config: configs/needs_warmup.toml, which takes half an hour and more;
    --quick takes some minutes.
    """

    arms: Arms = ("post", "pre")
    """Norm placements, norm kinds, or TOML files of changes."""
    rates: Rates = RATES
    """Peak learning rates."""
    warmups: Numbers = (0, 100)
    """Values of warmup_steps."""
    inits: Words = ("xavier", "gpt2")
    """Values of init; native is what the paper of each placement prescribes."""
    depths: Numbers = (2, 4, 6, 12)
    """Values of n_layers."""
    seeds: int = 3
    """Most runs of one rate, from seed upwards."""
    quick: bool = False
    """Only init xavier and depths 2 and 6, unless they are given."""


@dataclass(frozen=True, kw_only=True)
class DuelCommand(LabCommand):
    """duel A B: each arm tuned alone over the same grid, then the winners on fresh seeds.

    Tuning is on seeds from seed upwards; a setting in which one of them failed cannot win. Where
    an arm's best rate lies at the edge, the grid grows for both, by at most two rates a side. The
    winners meet on seeds from seed + 10 upwards. Without --config: configs/needs_warmup.toml.
    """

    arms: Annotated[tuple[str, str], tyro.conf.arg(metavar="A B")] = ("post", "pre")
    """The two arms; the words after ``duel`` name them too."""
    rates: Rates = RATES
    """Peak learning rates that each arm is tuned over."""
    warmups: Numbers = (0, 100)
    """Values of warmup_steps that each arm is tuned over."""
    tuning_seeds: int = 3
    """Runs of each setting of the grid."""
    seeds: int = 5
    """Fresh seeds for the winners."""
    margin: float = 0.02
    """Difference in nats per character below which two arms count as equal."""


@dataclass(frozen=True, kw_only=True)
class VerifyCommand(LabCommand):
    """The published findings R1 to R14, each PASS or FAIL with what was seen.

    The exit code is 0 when all pass and 7 when one fails. Without --config:
    configs/needs_warmup.toml, some minutes on two cores.
    """

    only: Words = ()
    """Checks to run: R1 R4 ... (default: all)."""


@dataclass(frozen=True, kw_only=True)
class InitCommand(LabCommand):
    """Gradients, stream and branches at initialisation, without training.

    Without --config: configs/needs_warmup.toml, about a minute on two cores.
    """

    arms: Arms = PLACEMENTS
    """Norm placements, norm kinds, or TOML files of changes."""
    inits: Words = ("gpt2", "xavier", "native")
    """Values of init; native is what the paper of each placement prescribes."""
    depths: Numbers = (2, 4, 6, 8, 12, 16, 24)
    """Values of n_layers."""
    seeds: int = 2
    """Models of each kind, from seed upwards."""


@dataclass(frozen=True)
class Subcommand:
    """``module`` has ``main(command) -> int``; it is imported after the words are understood."""

    module: str
    help: str
    command: type[LabCommand]
    preset: tuple[Path, ...] = (NEEDS_WARMUP,)
    """Settings where no --config is given."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings over the preset and the files, under the flags."""
    varies: dict[str, str] = field(default_factory=dict)
    """Settings that it gives values itself, and the flag with the values, if there is one."""
    quick: dict[str, Any] = field(default_factory=dict)
    """Defaults of its own flags with --quick."""


VARIED = {"learning_rate": "rates", "warmup_steps": "warmups"}
FIXED = {"norm_position": "", "warmup_steps": ""}
SUBCOMMANDS = {
    "run": Subcommand("gpt.lab.run", "train arms that differ in one thing, several seeds each",
                      RunCommand, preset=()),
    "demo": Subcommand("gpt.lab.demo", "Post-LN needs warm-up, Pre-LN does not: two minutes",
                       DemoCommand, settings={"eval_every": 10}, varies=FIXED),
    "why": Subcommand("gpt.lab.why", "what happens inside in the first steps",
                      WhyCommand, settings={"steps": 80, "eval_every": 80}, varies=FIXED),
    "sweep": Subcommand("gpt.lab.sweep", "at which learning rate and depth an arm fails",
                        SweepCommand, settings={"eval_every": 25}, varies=VARIED | {
                            "init": "inits", "n_layers": "depths"},
                        quick={"inits": ("xavier",), "depths": (2, 6)}),
    "duel": Subcommand("gpt.lab.duel", "A against B, each tuned alone",
                       DuelCommand, settings={"eval_every": 25}, varies=VARIED),
    "verify": Subcommand("gpt.lab.verify", "the published findings, PASS or FAIL",
                         VerifyCommand, varies=FIXED),
    "init": Subcommand("gpt.lab.initial", "gradients and stream before any training",
                       InitCommand, varies={"init": "inits", "n_layers": "depths"}),
}  # fmt: skip


def usage() -> str:
    """What ``compare.py --help`` prints."""
    lines = [f"  {name:<8} {sub.help}" for name, sub in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: compare.py SUBCOMMAND [TEXT] [--out DIR] [--workers N] [settings]",
            "",
            *lines,
            "",
            "all settings of one: compare.py SUBCOMMAND --help",
            "",
            "exit code 6, or 141 where its reader has gone: standard output could not be written;",
            "what was found is in report.html in the folder",
        ]
    )


def find(name: str) -> Subcommand:
    """The subcommand. Raises UsageError with the nearest known one."""
    if name not in SUBCOMMANDS:
        raise UsageError(f"unknown subcommand {name!r}.{nearest(name, SUBCOMMANDS)}\n{usage()}")
    return SUBCOMMANDS[name]


def parse_compare(name: str, argv: Sequence[str]) -> LabCommand:
    """The words after ``compare.py NAME``.

    Raises SystemExit (0 for --help, 2 for wrong usage) and UsageError for unusable values.
    """
    subcommand = find(name)
    words, given = take(not_empty(argv), "--config", ".toml")
    if name == "duel" and words and not words[0].startswith("-"):
        if len(words) < 2 or words[1].startswith("-"):
            raise UsageError(f"duel names one arm, {words[0]!r}; name two: duel pre post")
        words = [*words[2:], "--arms", *words[:2]]
    for word in words:
        flag = word.split("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and flag in subcommand.varies:
            values = subcommand.varies[flag]
            raise UsageError(
                f"--{flag} has no effect here: {name} varies it; "
                + (f"use --{values}" if values else "drop it")
            )
    files: list[str | Path] = [*given] if given else [*subcommand.preset]
    settings = from_flat(read_toml(files) | subcommand.settings, checked=False)
    quick = subcommand.quick if "--quick" in words else {}
    default = subcommand.command(**vars(settings), config=tuple(given), **quick)
    command = parse(subcommand.command, words, default, prog=f"compare.py {name}")
    _check(command)
    return command


def _check(command: LabCommand) -> None:
    at_least("workers", command.workers, 1)
    at_most("workers", command.workers, 256)
    for name in ("seeds", "tuning_seeds"):
        at_least(name, getattr(command, name, 1), 1)
        at_most(name, getattr(command, name, 1), 1000)
    margin = getattr(command, "margin", 1.0)
    if not 0 < margin < math.inf:
        raise UsageError(f"margin = {margin} is no difference above 0; try 0.02")
    for f in dataclasses.fields(command):
        several = f.name in ("arms", "rates", "depths", "warmups", "inits")
        if several and not getattr(command, f.name):
            raise UsageError(f"--{f.name} names nothing; drop it, or give a value")
    if not command.text.val_fraction:
        raise UsageError("arms are compared by validation loss; val_fraction must be above 0")
    if command.machine.threads > 1:
        raise UsageError(
            f"threads = {command.machine.threads}, but each run has one thread, so that results "
            "do not depend on how many run at once; use --workers"
        )
