"""``compare.py sweep``: at which learning rate each arm fails, by weights, warm-up and depth.

A row of the result is an arm with one init, one warm-up and one depth, such as
``post-xavier-w0-L6``. All rows are trained over the same learning rates; ``gpt.lab.grid`` says
which rates get more than one seed, and why no run is judged before its last step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from gpt.commandline import run_config, shell_line
from gpt.config import RunConfig
from gpt.lab.arms import Arm, parse_arms
from gpt.lab.commandline import SUBCOMMANDS, SweepCommand
from gpt.lab.cost import announce
from gpt.lab.fairness import refuse_unequal_plans, refuse_unfair
from gpt.lab.folders import begin
from gpt.lab.grid import next_runs, rate_name
from gpt.lab.made import made
from gpt.lab.outcomes import Outcome
from gpt.lab.progress import say, tell
from gpt.lab.sweep_report import legend, soon_of, table, write
from gpt.lab.trials import Stopped, Trial
from gpt.lab.tuning import checked_rates, checked_warmups, refuse_varied
from gpt.lab.workers import run_trials
from gpt.text.reading import Corpus
from gpt.training.progress import warn


@dataclass(frozen=True)
class Row:
    """An arm with its init, warm-up and depth, and its outcomes by learning rate."""

    family: str
    """Everything but the depth: ``post-xavier-w0``."""
    depth: int
    config: RunConfig
    cells: dict[float, list[Outcome]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``post-xavier-w0-L6``."""
        return f"{self.family}-L{self.depth}"

    def trial(self, rate: float, seed: int) -> Trial:
        """Called ``post-xavier-w0-lr3e-3-L6-s0``."""
        config = self.config.with_changes({"learning_rate": rate, "seed": seed}).resolved()
        return Trial(f"{self.family}-lr{rate_name(rate)}-L{self.depth}", config)

    def of_seed(self, seed: int) -> dict[float, Outcome]:
        """One outcome a rate."""
        return {r: o for r, outcomes in self.cells.items() for o in outcomes if o.seed == seed}


def main(command: SweepCommand) -> int:
    """The subcommand; returns the exit code."""
    base = run_config(command)
    arms = parse_arms(command.arms, base)
    rows = rows_of(command, base, arms)
    rates = checked_rates(command.rates, base)
    seeds = range(base.training.seed, base.training.seed + command.seeds)
    with begin(command, rows[0].config, "sweep") as (corpus, out):
        _introduce(rows, rates, seeds)
        try:
            train(rows, rates, seeds, corpus, out, command.workers)
        except Stopped:
            begun = [row for row in rows if set(row.of_seed(seeds[0])) == set(rates)]
            if begun:
                say("\n".join(table(begun, rates, seeds[0])))
            raise
        lines = [
            *table(rows, rates, seeds[0], soon_of(rows, corpus, out)),
            "",
            *legend(rows, rates, seeds, corpus),
        ]
        say("\n".join(lines))
        say()
        write(rows, corpus, out, lines, made("sweep", command, corpus))
        say("curves: " + shell_line("-m", "tensorboard.main", "--logdir", out))
        return 0


def rows_of(command: SweepCommand, base: RunConfig, arms: Sequence[Arm]) -> list[Row]:
    """Every combination of depth, arm, init and warm-up, none twice. Raises UsageError."""
    refuse_varied(arms, SUBCOMMANDS["sweep"].varies)
    seed = base.training.seed
    for line in refuse_unequal_plans({arm.name: arm.config(base, seed) for arm in arms}):
        warn(line)
    rows = []
    for depth, arm, init, warmup in product(
        sorted(set(command.depths)),
        arms,
        dict.fromkeys(command.inits),
        checked_warmups(command.warmups, base),
    ):
        changes = {"init": init, "warmup_steps": warmup, "n_layers": depth}
        config = arm.config(base, seed).with_changes(changes)
        rows.append(Row(f"{arm.name}-{init}-w{warmup}", depth, config))
    return rows


def train(
    rows: Sequence[Row],
    rates: Sequence[float],
    seeds: Sequence[int],
    corpus: Corpus,
    out: Path,
    workers: int,
) -> None:
    """Fill the rows' cells, one rung of the halving after the other.

    Raises Stopped, and UsageError where arms were not treated alike.
    """
    warned: set[str] = set()
    while True:
        at = {}
        for row in rows:
            for rate, seed in next_runs(row.cells, rates, seeds):
                trial = row.trial(rate, seed)
                at[trial.name] = (row, rate, trial)
        if not at:
            return
        trials = [trial for _, _, trial in at.values()]
        announce(trials, corpus, out, workers)
        for outcome in run_trials(trials, corpus, out, workers):
            row, rate, _ = at[outcome.name]
            row.cells.setdefault(rate, []).append(outcome)
        for row in rows:
            for outcomes in row.cells.values():
                outcomes.sort(key=lambda outcome: outcome.seed)
        for depth in {row.depth for row in rows}:
            alike = [
                outcome
                for row in rows
                if row.depth == depth
                for outcomes in row.cells.values()
                for outcome in outcomes
            ]
            unequal = set(refuse_unfair(alike))
            for line in sorted(unequal - warned):
                warn(line)
            warned |= unequal


def _introduce(rows: Sequence[Row], rates: Sequence[float], seeds: Sequence[int]) -> None:
    from gpt.training.machine import find_device
    from gpt.training.plan import caution

    least = len(rows) * len(rates)
    more = least * (len(seeds) - 1)
    tell(
        f"{len(rows)} arms over {len(rates)} learning rates: {least} runs with the first seed"
        + (f", then at most {more} around the best rates and the failures" if more else "")
    )
    told: dict[str, None] = {}
    for row in rows:
        find_device(row.config.machine.device)
        # Rate and warm-up are varied, so what they may do is no reason to be careful.
        steps = row.config.training.steps
        calm = row.config.with_changes({"learning_rate": 1e-9, "warmup_steps": steps})
        told |= dict.fromkeys(caution(calm))
    for line in told:
        tell(line)
