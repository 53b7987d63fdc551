"""``compare.py run``: every arm with every seed, the statement, the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.commandline import run_config, run_name, shell_line
from gpt.config import RunConfig, changed
from gpt.lab.arms import Arm, parse_arms
from gpt.lab.commandline import LabCommand, RunCommand
from gpt.lab.cost import announce
from gpt.lab.fairness import refuse_unequal_plans, refuse_unfair
from gpt.lab.folders import begin
from gpt.lab.outcomes import Outcome
from gpt.lab.progress import tell
from gpt.lab.statement import setting_of, statement, table
from gpt.lab.trials import Stopped, Trial, source_digest
from gpt.lab.workers import run_trials
from gpt.lab.yardsticks import yardsticks
from gpt.text.reading import Corpus
from gpt.training.curves import read_metrics
from gpt.training.progress import say, warn


@dataclass(frozen=True)
class Comparison:
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
    experiment = Comparison(
        title=f"{' and '.join(command.arms)} on {run_name(command)}",
        arms=parse_arms(command.arms, base),
        base=base,
        seeds=range(base.training.seed, base.training.seed + command.seeds),
        margin=command.margin,
        keeps_checkpoints=True,
    )
    for line in refuse_unequal_plans(experiment.configs):
        warn(line)
    return conduct(experiment, command, "compare")


def conduct(experiment: Comparison, command: LabCommand, prefix: str) -> int:
    """Train what is not there yet, say what was found, write the report; return the exit code."""
    longest = max(experiment.configs.values(), key=lambda config: config.model.context_length)
    corpus, out = begin(command, longest, prefix)
    if announce(experiment.trials, corpus, out, command.workers) and experiment.cautions:
        _caution(experiment)
    outcomes = train(experiment, corpus, out, command.workers)
    for line in refuse_unfair(outcomes):
        warn(line)
    lines = state(experiment, corpus, outcomes)
    say("\n".join(lines))
    say()
    write(experiment, corpus, out, outcomes, lines)
    say("curves: " + shell_line("-m", "tensorboard.main", "--logdir", out))
    return 0


def train(experiment: Comparison, corpus: Corpus, out: Path, workers: int) -> list[Outcome]:
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


def state(experiment: Comparison, corpus: Corpus, outcomes: list[Outcome]) -> list[str]:
    """The statement's lines."""
    return statement(
        experiment.setting(corpus),
        [arm.name for arm in experiment.arms],
        outcomes,
        experiment.margin,
        pairs=experiment.pairs,
    )


def write(
    experiment: Comparison, corpus: Corpus, out: Path, outcomes: list[Outcome], lines: list[str]
) -> None:
    """``out/report.html`` and what TensorBoard shows beside the runs."""
    from gpt.lab.board import write_board
    from gpt.lab.figures import loss_bands
    from gpt.lab.report import Section, write_report

    names = [arm.name for arm in experiment.arms]
    curves = {
        name: [read_metrics(out / o.name).get("loss/val", []) for o in outcomes if o.arm == name]
        for name in names
    }
    figure = (curves, *yardsticks(corpus, of_curve=not experiment.keeps_checkpoints))
    differences = config_difference(experiment.configs)
    sections = [
        Section("What was found", lines, [(
            "Validation loss while training. The dashed lines are what the validation text costs "
            "whoever only counted characters (unigram) or pairs of characters (bigram) of the "
            "training text.",
            loss_bands(*figure),
        )]),
        Section("What differs", differences, []),
    ]  # fmt: skip
    made = {
        "settings": experiment.setting(corpus),
        "curves": "metrics.jsonl and config.toml in the folder of each run",
    }
    say("report: " + str(write_report(out, experiment.title, sections, made=made)))
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


def _caution(experiment: Comparison) -> None:
    from gpt.training.machine import find_device
    from gpt.training.plan import caution

    for name, config in experiment.configs.items():
        find_device(config.machine.device)
        for line in caution(config):
            tell(f"{name}: {line}")
