"""``compare.py verify``: the published findings, run again here, PASS or FAIL."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.checks import nearest
from gpt.commandline import run_config, run_name
from gpt.corpus import read_text
from gpt.errors import UsageError
from gpt.lab.commandline import VerifyCommand
from gpt.lab.cost import announce
from gpt.lab.folders import lab_folder, refuse_other_use
from gpt.lab.progress import tell
from gpt.lab.trials import Trial
from gpt.lab.workers import run_trials
from gpt.training.progress import say

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

    name: str
    passed: bool
    seen: str
    wanted: str
    claim: str
    source: str

    def __str__(self) -> str:
        word = "PASS" if self.passed else "FAIL"
        lines = (
            f"{word}  {self.name:<4} {self.claim} ({self.source or 'negative control'})",
            f"wanted {self.wanted}",
            f"seen   {self.seen}",
        )
        return "\n      ".join(lines)


def main(command: VerifyCommand) -> int:
    """The subcommand; returns the exit code."""
    wanted = chosen(command.only)
    base = run_config(command)
    if command.out:
        refuse_other_use(command.out)
    corpus = read_text(base)
    for line in corpus.notices:
        tell(line)
    out = lab_folder(command.out, f"verify-{run_name(command)}")

    import torch

    from gpt.lab import checks_at_start, checks_of_runs
    from gpt.lab.checks import Bench

    torch.set_num_threads(1)  # as in a run: what is seen does not depend on the machine's cores
    checks = [c for c in (*checks_at_start.CHECKS, *checks_of_runs.CHECKS) if c.name in wanted]
    untrained = [check.name for check in checks if not check.trials(base)]
    if untrained:
        tell(f"{', '.join(untrained)}: models without training, about a minute in all")
    trials = all_trials([check.trials(base) for check in checks])
    if trials:
        announce(trials, corpus, out, command.workers)
    bench = Bench(base, corpus, out)
    results = []
    trained = False
    for check in sorted(checks, key=lambda c: bool(c.trials(base))):
        if check.trials(base) and not trained:
            for outcome in run_trials(trials, corpus, out, command.workers):
                bench.outcomes[outcome.name] = outcome
            trained = True
        passed, seen = check.judge(bench)
        result = Result(check.name, passed, seen, check.wanted, check.claim, check.source)
        results.append(result)
        say(str(result))
    results.sort(key=lambda result: NAMES.index(result.name))
    lines = summary(results)
    say("\n".join(["", *lines, ""]))
    write(results, lines, out, f"Published findings, run again on {run_name(command)}")
    return 0 if all(result.passed for result in results) else NOT_REPRODUCED


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
    failed = [result.name for result in results if not result.passed]
    count = f"{len(results) - len(failed)} of {len(results)} checks PASS"
    return [
        count + (f"; FAIL: {', '.join(failed)}" if failed else ""),
        "not reproducible at this size, and not tried:",
        *(f"  - {line}" for line in OUT_OF_REACH),
    ]


def write(results: Sequence[Result], lines: Sequence[str], out: Path, title: str) -> None:
    """``out/report.html``."""
    from gpt.lab.report import Section, Table, write_report

    header = ("", "result", "claim", "source", "wanted", "seen")
    rows = [
        (r.name, "PASS" if r.passed else "FAIL", r.claim, r.source or "negative control",
         r.wanted, r.seen)
        for r in results
    ]  # fmt: skip
    sections = [Section("What was found", lines, tables=[Table(header, rows)])]
    say("report: " + str(write_report(out, title, sections)))
