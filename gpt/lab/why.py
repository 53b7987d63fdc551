"""``compare.py why``: what happens inside in the first updates, where training fails and where not.

The story is that of Wang et al. 2022 (DeepNet, arXiv 2203.00555, section 3) and Liu et al. 2020
(Admin, arXiv 2004.08249): a large first update, branches that outgrow the skip path, norms that
then divide the skip path away, and a first block that no gradient reaches.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpt.commandline import run_config, run_name, shell_line
from gpt.config import RunConfig
from gpt.lab.arms import Arm
from gpt.lab.columns import columns
from gpt.lab.commandline import WhyCommand
from gpt.lab.cost import announce
from gpt.lab.curves import curves_of
from gpt.lab.fairness import refuse_unfair
from gpt.lab.folders import begin
from gpt.lab.made import made
from gpt.lab.outcomes import Outcome
from gpt.lab.progress import say
from gpt.lab.trials import Trial
from gpt.lab.workers import run_trials
from gpt.training.progress import warn

MEASURED = (0, 1, 2, 3, 5, 8, 12, 20, 40, 80)
"""Updates done when the inside is measured; and after the last one."""
WARMUP = 100

FALLEN = 100.0
"""Times that a gradient has fallen when it counts as vanished."""
SAME = 0.05
"""Part of its first spread below which predictions count as the same at every position."""

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""Tag -> points, of one run."""


def arms_of(base: RunConfig) -> list[Arm]:
    """The run that fails, its two rescues (warm-up, small weights), and the other placement."""
    post = {"norm_position": "post", "warmup_steps": 0}
    return [
        Arm("post-w0", post),
        Arm(f"post-w{WARMUP}", {**post, "warmup_steps": WARMUP}),
        Arm("pre-w0", {**post, "norm_position": "pre"}),
        Arm("post-gpt2", {**post, "init": "gpt2"}),
    ]


def main(command: WhyCommand) -> int:
    """The subcommand; returns the exit code."""
    base = run_config(command)
    arms = arms_of(base)
    last = base.training.steps
    steps = tuple(step for step in MEASURED if step < last)
    trials = [
        Trial(arm.name, arm.config(base, base.training.seed).resolved(), steps) for arm in arms
    ]
    with begin(command, base, "why") as (corpus, out):
        announce(trials, corpus, out, command.workers)
        ended = {o.arm: o for o in run_trials(trials, corpus, out, command.workers)}
        outcomes = [ended[arm.name] for arm in arms]
        for line in refuse_unfair(outcomes):
            warn(line)
        curves = {outcome.arm: curves_of(out, outcome) for outcome in outcomes}
        tables = {arm: table(of) for arm, of in curves.items()}
        for arm, lines in tables.items():
            say("\n".join([arm, *lines, ""]))
        told = [line for arm, of in curves.items() for line in reading(arm, of)]
        say("\n".join([*told, ""]))
        title = f"Why: the first updates on {run_name(command)}"
        write(curves, tables, told, outcomes, out, title, made("why", command, corpus))
        say("curves: " + shell_line("-m", "tensorboard.main", "--logdir", out))
        return 0


def table(curves: Curves) -> list[str]:
    """A row a measurement; see the head of gpt/lab/probes.py for what each number is."""
    first, last = ends(curves)
    tags = ("probe/dF", "probe/branch_over_skip", first, last, "probe/pred_std")
    rows = [["step", "dF", "branch/skip", "grad first", "grad last", "spread"]]
    for i, (step, _) in enumerate(curves[tags[0]]):
        rows.append([str(step), *(f"{curves[tag][i][1]:.2g}" for tag in tags)])
    return columns(rows, left=0)


def ends(curves: Curves) -> tuple[str, str]:
    """The tags of the gradients of the first block's W_out, and of the last one's."""
    blocks = sorted(tag for tag in curves if tag.startswith("probe/grad_W_out_"))
    return blocks[0], blocks[-1]


def reading(arm: str, curves: Curves) -> list[str]:
    """What the numbers of one run say, in sentences that follow from them."""
    first, last = ends(curves)
    moved = dict(curves["probe/dF"])
    branches, spreads = curves["probe/branch_over_skip"], curves["probe/pred_std"]
    step = branches[-1][0]
    if not all(math.isfinite(curves[tag][-1][1]) for tag in (first, last, "probe/pred_std")):
        return [f"{arm}: it fails otherwise, by numbers that are not finite at step {step}"]
    lines = []
    if 1 in moved:
        lines.append(f"the first update moves log-probabilities by {moved[1]:.2g}")
    before, after = branches[0][1], branches[-1][1]
    if after > 1 > before:
        how = "and outgrow the skip path"
    elif after > 1:
        how = "larger than the skip path"
    else:
        how = "smaller than the skip path"
    lines.append(f"branches over skip go from {before:.2g} to {after:.2g}, {how}")
    lines.append(f"the first block's gradient {_course(curves[first])}")
    lines.append(f"the last block's {_course(curves[last])}")
    left = spreads[-1][1] / max(spreads[0][1], 1e-30)
    if left < SAME:
        lines.append(f"at step {step} every position is told the same (spread {left:.2g} of its "
                     "start)")  # fmt: skip
    else:
        lines.append(f"predictions differ by position (spread {left:.2g} times that at the start)")
    vanished = _fall(curves[first]) >= FALLEN and left < SAME
    verdict = "the first block's gradient vanishes" if vanished else "the gradient gets through"
    return [f"{arm}: {verdict}", *(f"    {line}" for line in lines)]


def _fall(curve: Sequence[tuple[int, float]]) -> float:
    """How many times smaller the last value is than the first."""
    return curve[0][1] / max(curve[-1][1], 1e-30)


def _course(curve: Sequence[tuple[int, float]]) -> str:
    """A fall, or a fall and a return, in words with numbers."""
    (_, start), (step, end) = curve[0], curve[-1]
    at, lowest = min(curve, key=lambda point: point[1])
    fall = start / max(end, 1e-30)
    if end > 2 * lowest and start > 2 * lowest:
        deep = _times(start / max(lowest, 1e-30))
        return f"falls {deep} by step {at} and returns: {start:.2g} -> {end:.2g}"
    now = f"falls {_times(fall)}" if fall > 1 else f"grows {_times(1 / fall)}"
    return f"{now} by step {step}: {start:.2g} -> {end:.2g}"


def _times(factor: float) -> str:
    return f"{factor:,.0f}x" if factor >= 10 else f"{factor:.1f}x"


def write(
    curves: Mapping[str, Curves],
    tables: Mapping[str, list[str]],
    told: list[str],
    outcomes: Sequence[Outcome],
    out: Path,
    title: str,
    how: Mapping[str, str],
) -> None:
    """``out/report.html``, and what TensorBoard shows beside the runs."""
    from gpt.lab.board import write_board
    from gpt.lab.figures import Drawn, against_step, branch_over_skip, gradient_heat, spread
    from gpt.lab.report import Figure, Section, write_report

    arms = list(curves)

    def seeds(tag: str) -> dict[str, list[Sequence[tuple[int, float]]]]:
        return {arm: [of[tag]] for arm, of in curves.items()}

    def blocks(of: Curves) -> list[Sequence[tuple[int, float]]]:
        return [of[tag] for tag in sorted(of) if tag.startswith("probe/grad_W_out_")]

    heat = {arm: blocks(of) for arm, of in curves.items()}
    words = ("How far predictions moved", "rms change of log-probabilities since step 0")
    drawn: list[tuple[str, str, Drawn, tuple]] = [
        ("branch_over_skip",
         "rms of what a sublayer adds over rms of what it is added to, median over the sublayers.",
         branch_over_skip, (seeds("probe/branch_over_skip"),)),
        ("gradient_heat", "Gradient of W_out, block by block.", gradient_heat, (heat,)),
        ("spread",
         "Standard deviation over positions of the predicted probabilities: 0 means that the text "
         "makes no difference.",
         spread, (seeds("probe/pred_std"),)),
        ("moved", "rms change of the predicted log-probabilities since step 0.",
         against_step, (seeds("probe/dF"), *words)),
    ]  # fmt: skip
    svg = [Figure(name, caption, figure(*data)) for name, caption, figure, data in drawn]
    png = {name: figure.png(*data) for name, _, figure, data in drawn}
    sections = [Section("What happened", told, svg)]
    sections += [Section(arm, lines) for arm, lines in tables.items()]
    say("report: " + str(write_report(out, title, sections, made=how)))
    write_board(out, arms, outcomes, told, png, [])
