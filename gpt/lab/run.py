"""``compare.py run``: every arm with every seed, the statement, the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.commandline import run_config, run_name, shell_line
from gpt.config import RunConfig, changed
from gpt.lab.arms import Arm, parse_arms
from gpt.lab.commandline import LabCommand, RunCommand
from gpt.lab.cost import announce
from gpt.lab.curves import curves_of
from gpt.lab.fairness import refuse_unequal_plans, refuse_unfair
from gpt.lab.folders import begin
from gpt.lab.made import made
from gpt.lab.outcomes import Outcome
from gpt.lab.progress import say, tell
from gpt.lab.setting import setting_of
from gpt.lab.statement import statement, table
from gpt.lab.trials import Stopped, Trial, source_digest
from gpt.lab.workers import run_trials
from gpt.lab.yardsticks import yardsticks
from gpt.text.reading import Corpus
from gpt.training.progress import warn

if TYPE_CHECKING:
    from gpt.lab.figures import Curve

IN_NO_MEAN = (
    "Mean and band are of the runs that did not fail; a run that did (it ended on the unigram "
    "plateau, or diverged) is thin and ends in a cross. Only where all of an arm's runs failed, "
    "its mean and band are of these."
)


@dataclass(frozen=True)
class Experiment:
    """Arms by seeds in one setting, and how they are told about."""

    title: str
    arms: list[Arm]
    base: RunConfig
    seeds: Sequence[int]
    margin: float
    pairs: list[tuple[str, str]] | None = None
    """What is compared; by default every arm with the first."""
    keeps_checkpoints: bool = False
    cautions: bool = True
    """Whether to say which settings were seen to fail."""

    @property
    def configs(self) -> dict[str, RunConfig]:
        """Of each arm at the first seed, derived defaults not written out."""
        return {arm.name: arm.config(self.base, self.seeds[0]) for arm in self.arms}

    @property
    def trials(self) -> list[Trial]:
        """The arms in turn within each seed."""
        return [
            Trial(
                arm.name,
                arm.config(self.base, seed).resolved(),
                keeps_checkpoints=self.keeps_checkpoints,
            )
            for seed in self.seeds
            for arm in self.arms
        ]

    def setting(self, corpus: Corpus) -> str:
        """One sentence."""
        configs, seeds = list(self.configs.values()), list(self.seeds)
        return setting_of(configs, seeds, source_digest(), corpus.source.sha256)


def main(command: RunCommand) -> int:
    """The subcommand; returns the exit code."""
    base = run_config(command)
    experiment = Experiment(
        title=f"{' and '.join(command.arms)} on {run_name(command)}",
        arms=parse_arms(command.arms, base),
        base=base,
        seeds=range(base.training.seed, base.training.seed + command.seeds),
        margin=command.margin,
        keeps_checkpoints=True,
    )
    for line in refuse_unequal_plans(experiment.configs):
        warn(line)
    return conduct(experiment, command, "run", "compare")


def conduct(experiment: Experiment, command: LabCommand, name: str, prefix: str) -> int:
    """Train what is not there yet, say what was found, write the report; return the exit code.

    ``name``: of the subcommand. ``prefix``: of the name of a new folder.
    """
    longest = max(experiment.configs.values(), key=lambda config: config.model.context_length)
    with begin(command, longest, prefix) as (corpus, out):
        if announce(experiment.trials, corpus, out, command.workers) and experiment.cautions:
            _caution(experiment)
        outcomes = train(experiment, corpus, out, command.workers)
        for line in refuse_unfair(outcomes):
            warn(line)
        lines = state(experiment, corpus, outcomes)
        say("\n".join(lines))
        say()
        write(experiment, corpus, out, outcomes, lines, made(name, command, corpus))
        say("curves: " + shell_line("-m", "tensorboard.main", "--logdir", out))
        return 0


def train(experiment: Experiment, corpus: Corpus, out: Path, workers: int) -> list[Outcome]:
    """The outcomes, sorted by seed and arm. Raises Stopped after a table of what ended."""
    outcomes = []
    names = [arm.name for arm in experiment.arms]
    try:
        for outcome in run_trials(experiment.trials, corpus, out, workers):
            outcomes.append(outcome)
    except Stopped:
        if outcomes:
            say("\n".join(table(names, outcomes)))
        raise
    return sorted(outcomes, key=lambda o: (o.seed, names.index(o.arm)))


def state(experiment: Experiment, corpus: Corpus, outcomes: list[Outcome]) -> list[str]:
    """The statement's lines."""
    return statement(
        experiment.setting(corpus),
        [arm.name for arm in experiment.arms],
        outcomes,
        experiment.margin,
        pairs=experiment.pairs,
    )


def loss_curves(out: Path, outcomes: Sequence[Outcome], arm: str) -> "list[tuple[Curve, bool]]":
    """Of the arm's runs, for ``loss_bands``: the curve of each, and whether it failed."""
    return [(curves_of(out, o).get("loss/val", []), o.failed) for o in outcomes if o.arm == arm]


def write(
    experiment: Experiment,
    corpus: Corpus,
    out: Path,
    outcomes: list[Outcome],
    lines: list[str],
    how: Mapping[str, str],
) -> None:
    """``out/report.html`` and what TensorBoard shows beside the runs."""
    from gpt.lab.board import write_board
    from gpt.lab.figures import loss_bands
    from gpt.lab.report import Figure, Section, write_report

    names = [arm.name for arm in experiment.arms]
    runs = {name: loss_curves(out, outcomes, name) for name in names}
    figure = (runs, *yardsticks(corpus, of_curve=not experiment.keeps_checkpoints))
    differences = config_difference(experiment.configs)
    sections = [
        Section("What was found", lines, [Figure(
            "loss_bands",
            f"Validation loss while training. {IN_NO_MEAN} The dashed lines are what the "
            "validation text costs whoever only counted characters (unigram) or pairs of "
            "characters (bigram) of the training text.",
            loss_bands(*figure),
        )]),
        Section("What differs", differences, []),
    ]  # fmt: skip
    say("report: " + str(write_report(out, experiment.title, sections, made=how)))
    write_board(
        out, names, outcomes, lines, {"loss_bands": loss_bands.png(*figure)}, differences,
        configs=experiment.configs,
    )  # fmt: skip


def config_difference(configs: dict[str, RunConfig]) -> list[str]:
    """A line an arm: in which settings it differs from the first."""
    (first, base), *others = configs.items()
    lines = [f"{first}: as set"]
    for name, config in others:
        settings = changed(base, config)
        listed = ", ".join(f"{key} {new} (not {old})" for key, (old, new) in settings.items())
        lines.append(f"{name}: {listed or 'the same'}")
    return lines


def _caution(experiment: Experiment) -> None:
    from gpt.training.machine import find_device
    from gpt.training.plan import caution

    for name, config in experiment.configs.items():
        find_device(config.machine.device)
        for line in caution(config):
            tell(f"{name}: {line}")
