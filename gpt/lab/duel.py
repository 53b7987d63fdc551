"""``compare.py duel A B``: each arm tuned alone, then the winners on seeds that nobody tuned on.

Both arms get the same grid of learning rates and warm-ups, the same tuning seeds and so the same
budget, whatever each makes of it; where one needs a wider grid, both get it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt.commandline import run_config, shell_line
from gpt.config import RunConfig
from gpt.errors import UsageError
from gpt.lab.arms import Arm, parse_arms
from gpt.lab.commandline import SUBCOMMANDS, DuelCommand
from gpt.lab.cost import announce
from gpt.lab.duel_report import account, stated, write
from gpt.lab.fairness import refuse_unequal_plans, refuse_unfair
from gpt.lab.folders import begin
from gpt.lab.grid import Side, extended, rate_name
from gpt.lab.made import made
from gpt.lab.outcomes import Outcome
from gpt.lab.progress import say, tell
from gpt.lab.run import Experiment, train
from gpt.lab.trials import Trial
from gpt.lab.tuning import (
    Setting,
    checked_rates,
    checked_warmups,
    refuse_varied,
    sides_to_extend,
    tune,
)
from gpt.lab.workers import run_trials
from gpt.text.reading import Corpus
from gpt.training.progress import warn

FRESH = 10
"""The first fresh seed, after the first tuning seed; so there are at most that many of those."""

Cells = dict[Setting, list[Outcome]]


@dataclass(frozen=True)
class Tuning:
    """Two arms over one grid, and what came of it."""

    arms: Sequence[Arm]
    base: RunConfig
    warmups: Sequence[int]
    seeds: Sequence[int]
    cells: dict[str, Cells] = field(default_factory=dict)
    """Outcomes by name of arm and setting."""
    added: dict[Side, int] = field(default_factory=lambda: {"low": 0, "high": 0})
    """Rates by which the grid grew."""

    def trials(self, rates: Sequence[float]) -> dict[str, tuple[Arm, Setting, Trial]]:
        """By name of trial: every arm, setting and tuning seed."""
        found = {}
        for seed in self.seeds:
            for rate in rates:
                for warmup in self.warmups:
                    for arm in self.arms:
                        setting = Setting(rate, warmup)
                        tuned = with_setting(arm, setting)
                        trial = Trial(tuned.name, tuned.config(self.base, seed).resolved())
                        found[trial.name] = (arm, setting, trial)
        return found


def with_setting(arm: Arm, setting: Setting) -> Arm:
    """The arm at one setting, called ``post-lr3e-3-w100``."""
    rate, warmup = setting
    changes = {"learning_rate": rate, "warmup_steps": warmup}
    return Arm(f"{arm.name}-lr{rate_name(rate)}-w{warmup}", arm.changes | changes)


def main(command: DuelCommand) -> int:
    """The subcommand; returns the exit code."""
    base = run_config(command)
    tuning, rates = _planned(command, base)
    config = tuning.arms[0].config(base, base.training.seed)
    prefix = "-".join(["duel", *(arm.name for arm in tuning.arms)])
    with begin(command, config, prefix) as (corpus, out):
        tune_both(tuning, rates, corpus, out, command.workers)
        say("\n".join([*account(tuning), ""]))
        final = _final(command, base, tuning)
        outcomes: list[Outcome] = []
        found: list[str] = []
        if final:
            announce(final.trials, corpus, out, command.workers)
            outcomes = train(final, corpus, out, command.workers)
            refuse_unfair(outcomes, strict=True)
            found = stated(tuning, final, corpus, outcomes)
            say("\n".join([*found, ""]))
        write(tuning, final, corpus, out, outcomes, found, made("duel", command, corpus))
        say("curves: " + shell_line("-m", "tensorboard.main", "--logdir", out))
        return 0


def _planned(command: DuelCommand, base: RunConfig) -> tuple[Tuning, tuple[float, ...]]:
    """What is tuned, and the rates it begins with. Raises UsageError."""
    arms = parse_arms(command.arms, base)
    refuse_varied(arms, SUBCOMMANDS["duel"].varies)
    if command.tuning_seeds > FRESH:
        raise UsageError(
            f"tuning_seeds = {command.tuning_seeds}, but fresh seeds begin at seed + {FRESH}, and "
            f"must not have been tuned on; choose at most {FRESH}"
        )
    seed = base.training.seed
    for line in refuse_unequal_plans({arm.name: arm.config(base, seed) for arm in arms}):
        warn(line)
    warmups = checked_warmups(command.warmups, base)
    tuning = Tuning(arms, base, warmups, range(seed, seed + command.tuning_seeds))
    return tuning, checked_rates(command.rates, base)


def _final(command: DuelCommand, base: RunConfig, tuning: Tuning) -> Experiment | None:
    """The winners on fresh seeds; None where an arm has no winner."""
    arms = []
    for arm in tuning.arms:
        tuned = tune(tuning.cells[arm.name])
        if not tuned:
            return None
        arms.append(with_setting(arm, tuned.setting))
    first = base.training.seed + FRESH
    title = " against ".join(arm.name for arm in tuning.arms)
    return Experiment(title, arms, base, range(first, first + command.seeds), command.margin)


def tune_both(
    tuning: Tuning, rates: Sequence[float], corpus: Corpus, out: Path, workers: int
) -> None:
    """Fill the cells of both arms over the rates, and over more where an edge is best.

    Raises Stopped, and UsageError where the arms were not treated alike.
    """
    rates = tuple(rates)
    todo: Sequence[float] = rates
    while todo:
        trials = tuning.trials(todo)
        announce([trial for *_, trial in trials.values()], corpus, out, workers)
        outcomes = list(run_trials([trial for *_, trial in trials.values()], corpus, out, workers))
        refuse_unfair(outcomes, strict=True)
        for outcome in sorted(outcomes, key=lambda outcome: outcome.seed):
            arm, setting, _ = trials[outcome.name]
            tuning.cells.setdefault(arm.name, {}).setdefault(setting, []).append(outcome)
        before = rates
        for side in sides_to_extend(tuning.cells.values(), tuning.added):
            rates = extended(rates, side)
            tuning.added[side] += 1
        todo = [rate for rate in rates if rate not in before]
        if todo:
            words = ", ".join(map(rate_name, todo))
            tell(f"a best rate lies at the edge of the grid: {words} for both arms too")
