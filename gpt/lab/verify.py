"""``compare.py verify``: the published findings, run again here, PASS or FAIL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.checks import nearest
from gpt.commandline import run_config, run_name
from gpt.errors import UsageError
from gpt.lab.checks import Bench, Check
from gpt.lab.commandline import VerifyCommand
from gpt.lab.cost import announce
from gpt.lab.fairness import refuse_unfair
from gpt.lab.folders import begin
from gpt.lab.made import made
from gpt.lab.outcomes import State
from gpt.lab.progress import say, tell
from gpt.lab.trials import Trial
from gpt.lab.workers import run_trials
from gpt.training.progress import warn

NAMES = ("R1", "R2", "R3", "R4", "R5a", "R5b", "R6", "R7", "R8", "R9", "R10", "R11", "R12", "R13",
         "R14")  # fmt: skip
NOT_REPRODUCED = 7
"""Exit code when a check fails; 1 is kept for bugs."""

OUT_OF_REACH = (
    "Post-LN's gradient growing with the layer index (Xiong et al. 2020, figure 3a): in a "
    "decoder-only model at the start the branch's own gain makes up for the norm's",
    "Pre-LN's stream growing exponentially, and Peri-LN's cure: it grows in line with depth here",
    "OLMo 2's fewer loss spikes: there are none to be fewer of",
    "gains of 1 to 3 % in perplexity (LNS, Mix-LN, HybridNorm): below what 5 seeds resolve, and at "
    "200 steps whoever starts with small branches leads",
    "DyT equal to LayerNorm: a million characters are the regime that flatters it",
    "divergence without qk_norm: it takes learning rates and sizes at which logits reach 10,000",
)
"""What papers found and a run of seconds cannot show."""


@dataclass(frozen=True)
class Result:
    """How one check came out."""

    check: Check
    passed: bool
    seen: str

    @property
    def word(self) -> str:
        return "PASS" if self.passed else "FAIL"

    def __str__(self) -> str:
        check = self.check
        lines = (
            f"{self.word}  {check.name:<4} {check.claim} ({check.source or 'negative control'})",
            f"wanted {check.wanted}",
            f"seen   {self.seen}",
        )
        return "\n      ".join(lines)


def main(command: VerifyCommand) -> int:
    """The subcommand; returns the exit code."""
    wanted = chosen(command.only)
    base = run_config(command)
    with begin(command, base, "verify") as (corpus, out):
        import torch

        from gpt.lab import checks_at_start, checks_of_runs

        torch.set_num_threads(1)  # as in a run: what is seen does not depend on the machine's cores
        checks = [c for c in (*checks_at_start.CHECKS, *checks_of_runs.CHECKS) if c.name in wanted]
        trials = {check.name: check.trials(base) for check in checks}
        untrained = [check for check in checks if not trials[check.name]]
        trained = [check for check in checks if trials[check.name]]
        if untrained:
            names = ", ".join(check.name for check in untrained)
            tell(f"{names}: models without training, about a minute in all")
        every = all_trials(list(trials.values()))
        announce(every, corpus, out, command.workers)
        bench = Bench(base, corpus, out)
        results = [_judged(check, bench) for check in untrained]
        for outcome in run_trials(every, corpus, out, command.workers):
            bench.outcomes[outcome.name] = outcome
        for line in refuse_unfair(list(bench.outcomes.values())):
            warn(line)
        results += [_judged(check, bench) for check in trained]
        results.sort(key=lambda result: NAMES.index(result.check.name))
        lines = summary(results)
        say("\n".join(["", *lines, ""]))
        title = f"Published findings, run again on {run_name(command)}"
        states = states_of(every, bench)
        write(results, lines, states, out, title, made("verify", command, corpus))
        return 0 if all(result.passed for result in results) else NOT_REPRODUCED


def _judged(check: Check, bench: Bench) -> Result:
    result = Result(check, *check.judge(bench))
    say(str(result))
    return result


def chosen(words: Sequence[str]) -> list[str]:
    """Names of checks; R5 means both of its parts, and nothing means all. Raises UsageError."""
    if not words:
        return list(NAMES)
    known = {name.lower(): [name] for name in NAMES} | {"r5": ["R5a", "R5b"]}
    for word in words:
        if word.lower() not in known:
            raise UsageError(
                f"--only {word}: there is no such check; they are {', '.join(NAMES)}."
                f"{nearest(word, NAMES)}"
            )
    return [name for word in words for name in known[word.lower()]]


def all_trials(groups: Sequence[Sequence[Trial]]) -> list[Trial]:
    """Every trial once. Two of one name must be the same."""
    found: dict[str, Trial] = {}
    for trial in (trial for group in groups for trial in group):
        assert found.setdefault(trial.name, trial) == trial, trial.name
    return list(found.values())


def summary(results: Sequence[Result]) -> list[str]:
    """How many passed, which did not, and what was not tried."""
    failed = [result.check.name for result in results if not result.passed]
    count = f"{len(results) - len(failed)} of {len(results)} checks PASS"
    return [
        count + (f"; FAIL: {', '.join(failed)}" if failed else ""),
        "not reproducible at this size, and not tried:",
        *(f"  - {line}" for line in OUT_OF_REACH),
    ]


States = dict[str, dict[tuple[float, int], list[State]]]


def states_of(trials: Sequence[Trial], bench: Bench) -> States:
    """How the runs ended that look for where an arm fails: by arm, then learning rate and depth."""
    found: States = {}
    for trial in trials:
        arm, _, where = trial.arm.partition("-L")
        if where:
            cell = (trial.config.training.learning_rate, trial.config.model.n_layers)
            ends = found.setdefault(arm, {}).setdefault(cell, [])
            ends.append(bench.outcomes[trial.name].state)
    return found


def write(
    results: Sequence[Result],
    lines: Sequence[str],
    states: States,
    out: Path,
    title: str,
    how: Mapping[str, str],
) -> None:
    """``out/report.html``."""
    from gpt.lab.figures import phase_map
    from gpt.lab.report import Figure, Section, Table, write_report

    header = ("", "result", "claim", "source", "wanted", "seen")
    rows = [
        (r.check.name, r.word, r.check.claim, r.check.source or "negative control",
         r.check.wanted, r.seen)
        for r in results
    ]  # fmt: skip
    caption = "How the runs of R8, R9 and R14 ended. A plateau is the unigram cross-entropy."
    figures = [Figure("phase_map", caption, phase_map(states))] if states else []
    sections = [Section("What was found", lines, figures, [Table(header, rows)])]
    say("report: " + str(write_report(out, title, sections, made=how)))
