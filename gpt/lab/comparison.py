"""Two arms' outcomes -> every number of their comparison, and one of four verdicts.

Failures (a plateau, a divergence) are counted and tested by Fisher's exact test. Losses are
compared over the seeds in which both arms learned, second minus first. A failed run enters no mean,
and a mean of survivors overrules no count.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal, get_args

from gpt.lab import statistics
from gpt.lab.outcomes import Outcome, State
from gpt.lab.statistics import Interval

Verdict = Literal["EQUIVALENT", "A BETTER", "B BETTER", "NOT RESOLVED"]
"""A is the first arm, B the second."""
Ground = Literal[
    "losses", "failures", "one seed", "too short", "none learned", "one pair", "some failed",
    "opposed",
]  # fmt: skip
"""What the verdict rests on, or why there is none."""
Test = Literal["failures", "difference", "equivalence"]

ALPHA = 0.05
MARGIN = 0.02
"""Nats per character that are called a difference: what five seeds of a small run resolve."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How one arm's runs ended. A run too short to tell is neither learned nor failed."""

    arm: str
    learned: int
    plateau: int
    diverged: int
    undecided: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Tally":
        """Of one arm's outcomes, each of another seed; at least one."""
        assert len({o.arm for o in outcomes}) == 1
        assert len({o.seed for o in outcomes}) == len(outcomes)
        states = [o.state for o in outcomes]
        counts = {state: states.count(state) for state in get_args(State)}
        return cls(arm=outcomes[0].arm, **counts)

    @property
    def failed(self) -> int:
        return self.plateau + self.diverged

    @property
    def decided(self) -> int:
        return self.learned + self.failed

    @property
    def runs(self) -> int:
        return self.decided + self.undecided

    @property
    def failure_interval(self) -> Interval:
        """95 % Clopper-Pearson interval of the share of decided runs that fail."""
        return statistics.clopper_pearson(self.failed, self.decided)

    @property
    def mostly_failed(self) -> bool:
        return 2 * self.failed > self.decided


@dataclass(frozen=True, kw_only=True)
class PairwiseComparison:
    """Two arms. ``differences`` are second minus first, final validation losses in nats per
    character.

    ``p`` has the tests that could have come out, ``holm`` the same after Holm's correction over
    all pairs that are judged together: once over the ``tests`` that can find an arm better
    (failures, difference), once over those that can find two arms equivalent.
    """

    first: Tally
    second: Tally
    margin: float
    seeds: tuple[int, ...]
    """In which both learned."""
    differences: tuple[float, ...]
    p: dict[Test, float]
    holm: dict[Test, float] = field(default_factory=dict)
    tests: int = 1

    @property
    def fisher_p(self) -> float:
        """Of the failures; 1 where neither arm failed."""
        a, b = self.first, self.second
        return statistics.fisher_exact(a.failed, a.decided, b.failed, b.decided)

    @property
    def mean(self) -> float | None:
        return fmean(self.differences) if self.differences else None

    @property
    def sd(self) -> float | None:
        """Standard deviation of the differences, with n - 1."""
        return stdev(self.differences) if len(self.differences) > 1 else None

    @property
    def interval(self) -> Interval | None:
        """95 % paired t interval of the mean, uncorrected."""
        return statistics.paired_t(self.differences) if len(self.differences) > 1 else None

    @property
    def equivalence_interval(self) -> Interval | None:
        """The 90 % interval, which lies within the margin when two one-sided tests pass at 5 %."""
        return statistics.paired_t(self.differences, 0.9) if len(self.differences) > 1 else None

    @property
    def sign_flip_p(self) -> float | None:
        """Without the assumption that differences are normal; None for more than 16."""
        few = 1 < len(self.differences) <= 16
        return statistics.sign_flip_p(self.differences) if few else None

    @property
    def verdict(self) -> Verdict:
        return self._decided[0]

    @property
    def ground(self) -> Ground:
        return self._decided[1]

    @property
    def winner(self) -> str | None:
        """The arm that is better."""
        names = {"A BETTER": self.first.arm, "B BETTER": self.second.arm}
        return names.get(self.verdict)

    @property
    def words(self) -> str:
        """The verdict with the winner's name."""
        return f"{self.winner} BETTER" if self.winner else self.verdict

    @property
    def by_losses(self) -> Verdict:
        """From the seeds in which both learned alone."""
        mean = self.mean
        if mean is None:
            return "NOT RESOLVED"
        if self.holm.get("difference", 1) <= ALPHA and abs(mean) > self.margin:
            return "A BETTER" if mean > 0 else "B BETTER"
        passes = self.holm.get("equivalence", 1) <= ALPHA
        return "EQUIVALENT" if passes else "NOT RESOLVED"

    @property
    def by_failures(self) -> Verdict:
        """From the counts alone; that two arms fail alike often is never shown by few seeds."""
        if self.holm.get("failures", 1) > ALPHA:
            return "NOT RESOLVED"
        a, b = self.first, self.second
        return "A BETTER" if a.failed * b.decided < b.failed * a.decided else "B BETTER"

    @property
    def _decided(self) -> tuple[Verdict, Ground]:
        a, b = self.first, self.second
        fewer, lower = self.by_failures, self.by_losses
        if a.undecided or b.undecided:
            return "NOT RESOLVED", "too short"
        if min(a.runs, b.runs) == 1:
            return "NOT RESOLVED", "one seed"
        if not a.learned and not b.learned:
            return "NOT RESOLVED", "none learned"
        if a.mostly_failed or b.mostly_failed:
            return fewer, "failures"
        if not a.failed and not b.failed:
            return (lower, "losses") if len(self.seeds) > 1 else ("NOT RESOLVED", "one pair")
        won = lower in ("A BETTER", "B BETTER")
        if fewer != "NOT RESOLVED":
            return ("NOT RESOLVED", "opposed") if won and lower != fewer else (fewer, "failures")
        if not won:
            return "NOT RESOLVED", "some failed" if len(self.seeds) > 1 else "one pair"
        lead = b.failed * a.decided - a.failed * b.decided  # above 0: A failed less often
        opposed = lead < 0 if lower == "A BETTER" else lead > 0
        return ("NOT RESOLVED", "opposed") if opposed else (lower, "losses")

    @property
    def seeds_to_resolve(self) -> int | None:
        """Fewest seeds that come to a verdict with 80 % power, if what was observed is true."""
        alpha = ALPHA / self.tests
        if self.mean is not None and self.sd is not None and self.ground == "losses":
            return statistics.seeds_to_resolve(self.mean, self.sd, self.margin, alpha)
        if self.ground in ("failures", "some failed"):
            shares = [tally.failed / tally.decided for tally in (self.first, self.second)]
            return statistics.seeds_for_fisher(shares[0], shares[1], alpha)
        return None


def compare(
    first: Sequence[Outcome], second: Sequence[Outcome], margin: float = MARGIN
) -> PairwiseComparison:
    """One pair, judged alone. Each arm's outcomes in any order; pairs are made by seed."""
    return compare_pairs([(first, second)], margin)[0]


def compare_pairs(
    pairs: Sequence[tuple[Sequence[Outcome], Sequence[Outcome]]], margin: float = MARGIN
) -> list[PairwiseComparison]:
    """Pairs that are judged together, so that a false verdict among them stays as rare as in one.

    Holm's correction holds the chance that any equal pair is called better at 5 %, and the chance
    that any pair which differs by the margin is called equivalent at 5 %.
    """
    found = [_measured(first, second, margin) for first, second in pairs]
    corrected: list[dict[Test, float]] = [{} for _ in found]
    kinds: tuple[tuple[Test, ...], ...] = (("failures", "difference"), ("equivalence",))
    for tests in kinds:
        made = [(i, test) for i, c in enumerate(found) for test in tests if test in c.p]
        adjusted = statistics.holm([found[i].p[test] for i, test in made])
        for (i, test), p in zip(made, adjusted, strict=True):
            corrected[i][test] = p
    n_tests = sum(test != "equivalence" for c in found for test in c.p)
    return [
        dataclasses.replace(c, holm=holm, tests=max(1, n_tests))
        for c, holm in zip(found, corrected, strict=True)
    ]


def _measured(
    first: Sequence[Outcome], second: Sequence[Outcome], margin: float
) -> PairwiseComparison:
    assert margin > 0
    a, b = Tally.of(first), Tally.of(second)
    before, after = (
        {o.seed: o.final for o in outcomes if o.state == "learned" and o.final is not None}
        for outcomes in (first, second)
    )
    seeds = tuple(sorted(before.keys() & after.keys()))
    differences = tuple(after[seed] - before[seed] for seed in seeds)
    p: dict[Test, float] = {}
    if _failures_can_differ(a, b):
        p["failures"] = statistics.fisher_exact(a.failed, a.decided, b.failed, b.decided)
    if len(seeds) > 1:
        p["difference"] = statistics.paired_t_p(differences)
        if not a.failed and not b.failed:
            p["equivalence"] = statistics.equivalence_p(differences, margin)
    return PairwiseComparison(
        first=a, second=b, margin=margin, seeds=seeds, differences=differences, p=p
    )


def _failures_can_differ(a: Tally, b: Tally) -> bool:
    """Whether so many failures could reach 5 % in Fisher's test, however they were distributed.

    A test that cannot reject costs the others no correction (Tarone 1990).
    """
    failed = a.failed + b.failed
    most_apart = (max(0, failed - b.decided), min(a.decided, failed))
    least_p = min(statistics.fisher_exact(x, a.decided, failed - x, b.decided) for x in most_apart)
    return least_p <= ALPHA
