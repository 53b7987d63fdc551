"""What a comparison showed, in sentences: every seed first, then counts, intervals and a verdict.

The rules of the verdict are in gpt/lab/comparison.py; here they only get words. A statement names
what it does not say, and ranks nothing without the learning rate at which it was seen.
"""

import re
from collections.abc import Sequence
from statistics import median
from textwrap import wrap

from gpt.lab.comparison import ALPHA, MARGIN, PairwiseComparison, Tally, Test, compare_pairs
from gpt.lab.outcomes import Outcome
from gpt.lab.setting import ranges
from gpt.lab.statistics import Interval

WIDTH = 100
"""Of a line."""
_TIE = "\N{NO-BREAK SPACE}"


def statement(
    setting: str,
    arms: Sequence[str],
    outcomes: Sequence[Outcome],
    margin: float = MARGIN,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    tuned: bool = False,
) -> list[str]:
    """The lines, at most 100 columns. ``margin``: nats per character that count as a difference.

    ``pairs`` are compared, by default each other arm with the first; they are corrected together
    (Holm), so the fewer are asked about the more is resolved. ``tuned``: every arm ran at a
    learning rate of its own that was found best on other seeds.
    """
    of = {arm: [o for o in outcomes if o.arm == arm] for arm in arms}
    asked = [(arms[0], arm) for arm in arms[1:]] if pairs is None else pairs
    ready = [(of[first], of[second]) for first, second in asked if of[first] and of[second]]
    comparisons = compare_pairs(ready, margin)
    lines = [*wrapped(setting), "", *table(arms, outcomes), ""]
    for arm in arms:
        lines += wrapped(_runs(of[arm]) if of[arm] else f"{arm}: no run ended")
    expected = len(arms) * len({o.seed for o in outcomes})
    if len(outcomes) < expected:
        missing = expected - len(outcomes)
        lines += wrapped(f"unfinished: {missing} of {expected} runs are missing")
    for comparison in comparisons:
        lines += ["", *_pair(comparison, tuned)]
    if len(comparisons) > 1:
        lines += ["", *wrapped(_correction(comparisons))]
    return [*lines, "", *wrapped(_not_said(tuned))]


def table(arms: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    """Final validation loss and state of every run: a line a seed, a column an arm."""
    by = {(o.arm, o.seed): o for o in outcomes}
    seeds = sorted({o.seed for o in outcomes})
    margin = max([4, *(len(str(seed)) for seed in seeds)])
    heads = {arm: arm if len(arm) <= 40 else f"{arm[:37]}..." for arm in arms}
    width = max([18, *(len(head) + 2 for head in heads.values())])
    columns = max(1, (WIDTH - margin) // width)
    lines = ["final validation loss (nats per character), and how the run ended"]
    for start in range(0, len(arms), columns):
        part = arms[start : start + columns]
        lines.append("seed".ljust(margin) + "".join(heads[arm].rjust(width) for arm in part))
        for seed in seeds:
            cells = [_cell(by.get((arm, seed))) for arm in part]
            lines.append(str(seed).ljust(margin) + "".join(cell.rjust(width) for cell in cells))
    return lines


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    loss = "" if outcome.final is None else f"{outcome.final:.4f} "
    return loss + outcome.state


def _runs(outcomes: Sequence[Outcome]) -> str:
    """One arm's counts, and what its runs cost."""
    tally = Tally.of(outcomes)
    of = "seed" if tally.decided == 1 else "seeds"
    failures = f"{tally.arm}: failed in {tally.failed} of {tally.decided} {of}"
    if tally.decided:
        failures += f" (95 % Clopper-Pearson interval {_percent(tally.failure_interval)})"
    kinds = [(tally.plateau, "on the unigram plateau"), (tally.diverged, "diverged")]
    if tally.failed:
        failures += ": " + ", ".join(f"{count} {kind}" for count, kind in kinds if count)
    if tally.undecided:
        failures += f"; {tally.undecided} too short to tell"
    cost = [
        f"{' / '.join(f'{n:,}' for n in sorted({o.n_parameters for o in outcomes}))} parameters",
        f"{' / '.join(f'{n:,}' for n in sorted({o.characters for o in outcomes}))} characters",
        f"{median(o.seconds for o in outcomes):.0f} s a run",
    ]
    return f"{failures}; {', '.join(cost)}"


def _pair(c: PairwiseComparison, tuned: bool) -> list[str]:
    """The heading, then failures, losses and verdict, indented."""
    said = []
    if c.first.failed or c.second.failed:
        said.append(f"failures: Fisher exact {_p(c, c.fisher_p, 'failures')}")
    said += [_losses(c), _verdict(c, tuned)]
    heading = f"{c.second.arm} against {c.first.arm}"
    return wrapped(heading) + [line for words in said for line in wrapped(words, "  ")]


def _losses(c: PairwiseComparison) -> str:
    if c.mean is None:
        return "losses: there is no seed in which both learned, so none are compared"
    seeds = "seeds" if len(c.seeds) > 1 else "seed"
    where = f"{c.second.arm} minus {c.first.arm} where both learned ({seeds} {ranges(c.seeds)})"
    words = f"losses: {where}: {c.mean:+.4f} nats per character"
    if c.interval is None or c.sd is None:
        return f"{words}; one seed, so its spread is unknown"
    words += (
        f", 95 % paired-t interval {_interval(c.interval)}, n = {len(c.seeds)}, "
        f"sd of differences {c.sd:.4f}, {_p(c, c.p['difference'], 'difference')}"
    )
    if c.sign_flip_p is not None:
        words += (
            f"; without assuming normality: sign-flip test p = {c.sign_flip_p:.2g} ({len(c.seeds)} "
            f"seeds cannot give less than {2 / 2 ** len(c.seeds):.2g})"
        )
    return words


def _verdict(c: PairwiseComparison, tuned: bool) -> str:
    where = "each at its own tuned learning rate" if tuned else "at the learning rate set, untuned"
    claim = c.words if c.verdict == "NOT RESOLVED" else f"{c.words} {where}"
    return f"verdict (margin {c.margin:g} nats): {claim}: {_why(c)}"


def _why(c: PairwiseComparison) -> str:
    if c.ground == "losses":
        return _why_losses(c)
    if c.ground == "failures" and c.winner:
        return "it failed in fewer seeds"
    return {
        "one seed": "one seed shows nothing, for the spread between seeds is unknown; run several",
        "too short": "some runs were too short to tell a plateau from a slow start; train longer",
        "none learned": "neither arm learned, so there is nothing to compare",
        "one pair": "there are fewer than two seeds in which both learned",
        "opposed": "the arm with the lower losses failed more often; which of the two matters "
        "more is not for statistics to say",
        "failures": f"an arm failed in most seeds, so its failures count and not its survivors; "
        f"they do not differ enough; {_needed(c)}",
        "some failed": "some runs failed, so the losses of the others cannot show equivalence, and "
        f"neither failures nor losses differ enough; for the failures, {_needed(c)}",
    }[c.ground]


def _why_losses(c: PairwiseComparison) -> str:
    corrected = " after Holm's correction" if c.tests > 1 else ""
    if c.winner:
        failed = ", and it failed in no more seeds" if c.first.failed + c.second.failed else ""
        return (
            f"the difference is significant at 5 %{corrected}, the observed mean exceeds the "
            f"margin{failed}"
        )
    if c.verdict == "EQUIVALENT":
        assert c.equivalence_interval
        within = _interval(c.equivalence_interval)
        less = ", though a difference is shown" if c.holm["difference"] <= ALPHA else ""
        return (
            f"both one-sided tests pass at 5 %{corrected}; the 90 % interval {within} lies within "
            f"the margin{less}"
        )
    if c.holm["difference"] <= ALPHA:
        return f"a difference, but it is not shown on which side of the margin; {_needed(c)}"
    return f"neither a difference nor equivalence is shown{corrected}; {_needed(c)}"


def _needed(c: PairwiseComparison) -> str:
    """How many seeds would do. New ones: who adds seeds until a verdict comes will get one."""
    n = c.seeds_to_resolve
    if n is None:
        return "no practical number of seeds would resolve it if what was observed is true"
    return (
        f"about n = {n:,} new seeds, fixed beforehand, would resolve it with 80 % power if what "
        "was observed is true"
    )


def _correction(comparisons: Sequence[PairwiseComparison]) -> str:
    tests = comparisons[0].tests
    return (
        f"{len(comparisons)} pairs were compared, and no others. Holm's correction for {tests} "
        f"test{'s' * (tests != 1)} is in the verdicts, and not in the intervals."
    )


def _not_said(tuned: bool) -> str:
    rates = "warm-ups or learning rates than those tried" if tuned else "warm-ups or learning rates"
    return (
        "This says nothing about other depths, widths, initialisations, budgets, texts, "
        f"{rates}: there the arms may come out in another order."
    )


def _p(c: PairwiseComparison, p: float, test: Test) -> str:
    words = f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001"
    if c.tests > 1 and test in c.holm:
        words += f" (Holm {c.holm[test]:.2g})"
    return words


def _percent(interval: Interval) -> str:
    return f"{100 * interval[0]:.0f}..{100 * interval[1]:.0f} %"


def _interval(interval: Interval) -> str:
    return f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"


def wrapped(words: str, indent: str = "") -> list[str]:
    """Lines of at most WIDTH, of which none ends between a number and what it belongs to."""
    tied = re.sub(r" %| = ", lambda found: found[0].replace(" ", _TIE), words)
    lines = wrap(
        tied, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )
    return [line.replace(_TIE, " ") for line in lines]
