"""What a sweep found: its table, its figures, its report."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_high
from textwrap import wrap
from typing import TYPE_CHECKING, get_args

from gpt.lab.columns import columns
from gpt.lab.curves import curves_of
from gpt.lab.grid import best_rate, critical_rate, losses_of, rate_name, sensitivity, steps_to
from gpt.lab.outcomes import State
from gpt.lab.progress import say
from gpt.lab.setting import ranges
from gpt.lab.trials import source_digest
from gpt.lab.yardsticks import yardsticks
from gpt.text.reading import Corpus
from gpt.training.plan import characters_per_step

if TYPE_CHECKING:
    from gpt.lab.sweep import Row


def table(
    rows: "Sequence[Row]", rates: Sequence[float], seed: int, soon: dict[str, str] | None = None
) -> list[str]:
    """A line a row, and one for each whose failures are not all above its critical rate.

    ``seed`` trained every rate; ``soon``: row -> when it knew more than pairs.
    """
    lines = [(
        "arm", "best rate", "loss (n)", *(["bigram at"] if soon else []), "critical rate", "sens.",
        "L/P/D/U",
    )]  # fmt: skip
    notes = []
    for row in rows:
        best = best_rate(row.cells)
        critical = critical_rate(row.cells)
        one = row.of_seed(seed)
        states = [outcome.state for outcome in one.values()]
        lines.append((
            row.name,
            str(best) if best else "none",
            f"{best.loss:.3f} ({best.n_seeds})" if best else "-",
            *([soon[row.name]] if soon else []),
            str(critical),
            f"{sensitivity(one, rates):.3f}",
            "/".join(str(states.count(state)) for state in get_args(State)),
        ))  # fmt: skip
        if critical.failed_below:
            below = ", ".join(map(rate_name, critical.failed_below))
            notes.append(f"{row.name} failed below its critical rate too, at {below}")
    return [*columns(lines, left=len(lines[0])), *notes]


def legend(
    rows: "Sequence[Row]", rates: Sequence[float], seeds: Sequence[int], corpus: Corpus
) -> list[str]:
    """The setting that all rows share, and what the columns of the table mean."""
    model, training = rows[0].config.model, rows[0].config.training
    words = {
        "setting": f"d_model {model.d_model}, {model.n_heads} heads, context "
        f"{model.context_length}, {training.optimizer}({training.beta1:g}, {training.beta2:g}), "
        f"{training.schedule} schedule, clip {training.grad_clip:g}, {training.steps} steps of "
        f"{characters_per_step(rows[0].config):,} characters, seeds {ranges(seeds)}; code "
        f"{source_digest()[:12]}, data {corpus.source.sha256[:12]} (sha256); everything else is in "
        "config.toml of each run",
        "rates": f"{len(rates)} from {rate_name(rates[0])} to {rate_name(rates[-1])}, the same for "
        "every arm; what is said here is of this grid and this number of steps only",
        "best rate": "with the lowest mean final loss (nats per character) of its n seeds, all of "
        "which learned; at an edge of the grid it is not tuned. The lowest of several is too low "
        "by chance, so these losses rank no arms: compare.py duel does",
        "bigram at": "step at which the smoothed loss at the best rate went below the bigram "
        "cross-entropy, in the median of the seeds",
        "critical rate": "geometric mean of (the largest rate at which every seed learned .. the "
        f"smallest above it at which one failed); at most {len(seeds)} seeds a rate",
        "sens.": "sensitivity to the rate: mean minus lowest final loss over the grid, each at "
        f"most the loss before the first step; seed {seeds[0]} alone. An arm that learns nowhere "
        "is not sensitive either",
        "L/P/D/U": f"runs of seed {seeds[0]} that learned / ended on the unigram plateau / "
        "diverged / were too short to tell",
    }
    return [
        line
        for name, text in words.items()
        for line in wrap(
            text, 100, initial_indent=f"{name:<15}", subsequent_indent=" " * 15,
            break_on_hyphens=False,
        )
    ]  # fmt: skip


def soon_of(rows: "Sequence[Row]", corpus: Corpus, out: Path) -> dict[str, str]:
    """Row -> when its best rate got below the bigram cross-entropy, in the median of its seeds."""
    _, bigram = yardsticks(corpus, of_curve=True)
    found = {}
    for row in rows:
        best = best_rate(row.cells)
        outcomes = row.cells[best.rate] if best else []
        steps = [steps_to(curves_of(out, outcome)["loss/val"], bigram) for outcome in outcomes]
        middle = median_high([math.inf if step is None else step for step in steps] or [math.inf])
        words = "never" if math.isinf(middle) else f"{middle}"
        n = len(steps) - steps.count(None)
        found[row.name] = f"{words} ({n}/{len(steps)})" if 0 < n < len(steps) else words
    return found


def write(
    rows: "Sequence[Row]", corpus: Corpus, out: Path, lines: list[str], made: Mapping[str, str]
) -> None:
    """``out/report.html``, and the figures and the table for TensorBoard."""
    from gpt.lab.board import write_board
    from gpt.lab.figures import loss_against_rate, phase_map
    from gpt.lab.report import Figure, Section, write_report

    families = list(dict.fromkeys(row.family for row in rows))
    lines_at = yardsticks(corpus)
    states: dict[str, dict[tuple[float, int], list[State]]] = {name: {} for name in families}
    for row in rows:
        for rate, outcomes in row.cells.items():
            states[row.family][rate, row.depth] = [outcome.state for outcome in outcomes]
    figures = [Figure(
        "phase_map",
        "How every run ended, by learning rate and depth. A plateau is the unigram cross-entropy.",
        phase_map(states),
    )]  # fmt: skip
    images = {"phase_map": phase_map.png(states)}
    for depth in sorted({row.depth for row in rows}):
        points = {row.family: _losses(row) for row in rows if row.depth == depth}
        blocks = f"{depth} block" + "s" * (depth > 1)
        title = f"Final loss against the learning rate, {blocks}"
        drawn = loss_against_rate(points, *lines_at, arms=families, title=title)
        name = f"loss_against_rate_L{depth}"
        caption = f"{title}. Dashed: what unigrams and bigrams cost."
        figures.append(Figure(name, caption, drawn))
        images[name] = loss_against_rate.png(points, *lines_at, arms=families, title=title)
    title = "Learning rates: where each arm fails"
    write_report(out, title, [Section("What was found", lines, figures)], made=made)
    trials = [(row.trial(r, o.seed), o) for row in rows for r, of in row.cells.items() for o in of]
    write_board(
        out, [], [outcome for _, outcome in trials], lines, images, [],
        configs={trial.arm: trial.config for trial, _ in trials},
        rates={row.name: _losses(row) for row in rows},
    )  # fmt: skip
    say("report: " + str(out / "report.html"))


def _losses(row: "Row") -> dict[float, list[float | None]]:
    """By rate, a final loss a seed; None for a failure."""
    return {rate: losses_of(outcomes) for rate, outcomes in sorted(row.cells.items())}
