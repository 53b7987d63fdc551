"""What a duel found: what was tuned to what, the statement, the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.lab.columns import columns
from gpt.lab.grid import losses_of, mean_loss, rate_name
from gpt.lab.outcomes import Outcome
from gpt.lab.progress import say
from gpt.lab.run import IN_NO_MEAN, Experiment, config_difference, loss_curves
from gpt.lab.setting import ranges, setting_of
from gpt.lab.statement import statement, wrapped
from gpt.lab.trials import source_digest
from gpt.lab.tuning import Setting, Tuned, tune
from gpt.lab.yardsticks import yardsticks
from gpt.text.reading import Corpus

if TYPE_CHECKING:
    from gpt.lab.duel import Cells, Tuning


def account(tuning: "Tuning") -> list[str]:
    """What was tuned to what, and at which cost: a table an arm, then the winners."""
    cells = next(iter(tuning.cells.values()))
    outcomes = [outcome for of_setting in cells.values() for outcome in of_setting]
    characters = sum(outcome.characters for outcome in outcomes)
    seeds = "seed" if len(tuning.seeds) == 1 else "seeds"
    grown = " and ".join(f"{n} {side}" for side, n in tuning.added.items() if n)
    lines = wrapped(
        f"Tuning: {len(cells)} settings x {len(tuning.seeds)} {seeds} ({ranges(tuning.seeds)}) = "
        f"{len(outcomes)} runs of {tuning.base.training.steps} steps, {characters:,} characters "
        "for each arm, the same for both"
        + (f"; the grid grew for both at its edges ({grown})" if grown else "")
    )
    lines += wrapped(
        "Mean final loss (nats per character). A setting in which a seed failed cannot win. Of "
        "warm-ups only the given ones are tried."
    )
    for arm in tuning.arms:
        lines += ["", arm.name, *_grid(tuning.cells[arm.name])]
    return lines


def _grid(cells: "Cells") -> list[str]:
    """Rates down, warm-ups across, and the winner."""
    rates = sorted({setting.learning_rate for setting in cells})
    warmups = sorted({setting.warmup_steps for setting in cells})
    rows = [["rate", *(f"w{warmup}" for warmup in warmups)]]
    for rate in rates:
        row = [_cell(cells[Setting(rate, warmup)]) for warmup in warmups]
        rows.append([rate_name(rate), *row])
    lines = [f"  {line}" for line in columns(rows)]
    return [*lines, *wrapped(_winner(tune(cells), len(cells)), "  ")]


def _cell(outcomes: Sequence[Outcome]) -> str:
    mean = mean_loss(outcomes)
    if mean is not None:
        return f"{mean:.4f}"
    failed = losses_of(outcomes).count(None)
    return f"{failed} of {len(outcomes)} failed" if failed else "too short"


def _winner(tuned: Tuned | None, n_settings: int) -> str:
    if not tuned:
        return (
            f"not tuned: in none of the {n_settings} settings did every seed learn, so there is "
            "nothing to compare; try other --rates, --warmups or more --steps"
        )
    words = f"best: {tuned.setting} ({tuned.loss:.4f})"
    if tuned.edges:
        sides = " and ".join({"low": "lower", "high": "upper"}[side] for side in tuned.edges)
        words += f"; NOT TUNED: it lies at the {sides} edge of the grid, try more --rates there"
    return words


def stated(
    tuning: "Tuning", final: Experiment, corpus: Corpus, outcomes: list[Outcome]
) -> list[str]:
    """Of the winners. An arm that is not tuned is named before anything else."""
    best = {arm.name: tune(tuning.cells[arm.name]) for arm in tuning.arms}
    untuned = [name for name, tuned in best.items() if tuned and tuned.edges]
    setting = setting_of(
        list(final.configs.values()), list(final.seeds), source_digest(), corpus.source.sha256
    )
    names = [arm.name for arm in final.arms]
    lines = statement(setting, names, outcomes, final.margin, tuned=not untuned)
    if untuned:
        lines = [
            *wrapped(
                f"NOT TUNED: the best rate of {' and '.join(untuned)} lies at the edge of the "
                "grid, so what follows is no comparison of tuned with tuned."
            ),
            *lines,
        ]
    return lines


def write(
    tuning: "Tuning",
    final: Experiment | None,
    corpus: Corpus,
    out: Path,
    outcomes: list[Outcome],
    found: list[str],
    made: Mapping[str, str],
) -> None:
    """``out/report.html``, and figures, statement and table for TensorBoard.

    ``found``: the statement; empty where an arm has no winner.
    """
    from gpt.lab.board import write_board
    from gpt.lab.figures import loss_against_rate, loss_bands
    from gpt.lab.report import Figure, Section, write_report

    of_ends, of_curves = yardsticks(corpus), yardsticks(corpus, of_curve=True)
    points: dict[str, dict[float, list[float | None]]] = {}
    for arm in tuning.arms:
        for setting, of_setting in sorted(tuning.cells[arm.name].items()):
            line = points.setdefault(f"{arm.name}-w{setting.warmup_steps}", {})
            line[setting.learning_rate] = losses_of(of_setting)
    title = "Tuning: final loss against the learning rate"
    caption = "Final loss of every tuning run. Dashed: the whole validation text's cross-entropies."
    account_of = account(tuning)
    tuned = Section(
        "Tuning",
        account_of,
        [Figure("tuning", caption, loss_against_rate(points, *of_ends, title=title))],
    )
    sections = [tuned]
    images = {"tuning": loss_against_rate.png(points, *of_ends, title=title)}
    names: list[str] = []
    differences: list[str] = []
    if final:
        names = [arm.name for arm in final.arms]
        differences = config_difference(final.configs)
        runs = {
            f"{arm.name}-w{won.changes['warmup_steps']}": loss_curves(out, outcomes, won.name)
            for arm, won in zip(tuning.arms, final.arms, strict=True)
        }
        caption = (
            f"Validation loss of {' and '.join(names)} while training, on fresh seeds. "
            f"{IN_NO_MEAN} Curves and dashed lines are of the first part of the validation text, "
            "final losses of the whole."
        )
        bands = loss_bands(runs, *of_curves, arms=points)
        sections = [
            Section("What was found", found, [Figure("loss_bands", caption, bands)]),
            tuned,
            Section("What differs", differences),
        ]
        images["loss_bands"] = loss_bands.png(runs, *of_curves, arms=points)
    write_report(out, " against ".join(arm.name for arm in tuning.arms), sections, made=made)
    write_board(
        out, names, outcomes, [*found, "", *account_of], images, differences,
        configs=final.configs if final else {}, rates=points,
    )  # fmt: skip
    say("report: " + str(out / "report.html"))
