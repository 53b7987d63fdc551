"""R6 to R10 and R12 to R14: what the papers say about training, and three negative controls.

Every run is of the setting that needs warm-up, with what its name says changed.
"""

import itertools
import math
from collections.abc import Callable
from statistics import median
from typing import Any

from gpt.config import RunConfig
from gpt.lab.checks import Bench, Check, listed, seeds_of
from gpt.lab.grid import rate_name
from gpt.lab.outcomes import Outcome
from gpt.lab.trials import Trial

SEEDS = 5
FEWER = 3
PROBED = (0, 20)
WELL, FAIRLY = 2.60, 2.70
"""Nats per character; a table of pairs has 2.51, and Post-LN with warm-up comes to 2.53."""

RATES: dict[str, tuple[float, ...]] = {
    "post-w0": (1e-3, 2e-3, 3e-3),
    "post-w100": (3e-3, 6e-3, 1e-2),
    "pre-w0": (1e-2, 2e-2, 4e-2),
}
"""Learning rates at which an arm is trained to find its critical one, with 6 blocks."""
RATES_BY_DEPTH: dict[int, tuple[float, ...]] = {
    2: (3e-3, 1e-2),
    4: (3e-3, 6e-3),
    6: RATES["post-w0"],
    12: (1e-3,),
}


def demo_trials(base: RunConfig) -> list[Trial]:
    """Four arms, five seeds; Post-LN without warm-up is looked into."""
    return [
        *_trials(base, "post-w0", SEEDS, probed=True, log_every=1),
        *_trials(base, "post-w100", SEEDS),
        *_trials(base, "pre-w0", SEEDS),
        *_trials(base, "pre-w100", SEEDS),
    ]


def needs_warmup(bench: Bench) -> tuple[bool, str]:
    learned = {
        arm: sum(o.state == "learned" for o in bench.of(arm))
        for arm in ("post-w0", "post-w100", "pre-w0", "pre-w100")
    }
    low = [
        o.final is not None and o.final < FAIRLY
        for arm in ("post-w100", "pre-w0", "pre-w100")
        for o in bench.of(arm)
    ]
    counts = ", ".join(f"{arm} {n}/{SEEDS}" for arm, n in learned.items())
    return learned["post-w0"] <= 1 and all(low), f"learned: {counts}"


def vanishing(bench: Bench) -> tuple[bool, str]:
    """Medians over the seeds of what happened from step 0 to step 20."""
    first, last, branches, totals = [], [], [], []
    for outcome in bench.of("post-w0"):
        if outcome.steps < PROBED[-1]:
            return False, f"{outcome.name} ended at step {outcome.steps}"
        curves = bench.curves(outcome)
        blocks = sorted(tag for tag in curves if tag.startswith("probe/grad_W_out_"))
        start, later = (
            {tag: dict(curves[tag])[step] for tag in (*blocks, "probe/branch_over_skip")}
            for step in PROBED
        )
        first.append(start[blocks[0]] / later[blocks[0]])
        last.append(start[blocks[-1]] / later[blocks[-1]])
        branches.append(later["probe/branch_over_skip"])
        norms = [norm for _, norm in curves["grad_norm/total"]]
        totals.append(max(norms) / norms[0])
    passes = (
        median(first) >= 100
        and median(last) < 20
        and median(branches) >= 1.5
        and median(totals) <= 2
    )
    return passes, (
        f"first block /{median(first):,.0f} (seeds {min(first):,.0f} to {max(first):,.0f}), last "
        f"/{median(last):.1f}, branch/skip {median(branches):.2f}, largest total norm "
        f"{median(totals):.2f} x that of step 1"
    )


def rate_trials(base: RunConfig) -> list[Trial]:
    return [
        trial for arm, rates in RATES.items() for rate in rates
        for trial in _trials(base, arm, 1, depth=6, rate=rate)
    ]  # fmt: skip


def critical_rates(bench: Bench) -> tuple[bool, str]:
    """Nothing is shown where Post-LN never failed, or with warm-up never learned."""
    brackets = {arm: _bracket(bench, arm, 6, rates) for arm, rates in RATES.items()}
    post, warm, pre = (brackets[arm] for arm in ("post-w0", "post-w100", "pre-w0"))
    passes = (
        math.isfinite(post[1])
        and warm[0] > 0
        and pre[0] >= 4 * _middle(post)
        and _middle(warm) >= 1.8 * _middle(post)
    )
    return passes, ", ".join(f"{arm} {_words(bracket)}" for arm, bracket in brackets.items())


def depth_trials(base: RunConfig) -> list[Trial]:
    return [
        trial for depth, rates in RATES_BY_DEPTH.items() for rate in rates
        for trial in _trials(base, "post-w0", 1, depth=depth, rate=rate)
    ]  # fmt: skip


def critical_by_depth(bench: Bench) -> tuple[bool, str]:
    """Falling: each depth learned at the rate at which the next one failed, or above."""
    brackets = {d: _bracket(bench, "post-w0", d, rates) for d, rates in RATES_BY_DEPTH.items()}
    pairs = itertools.pairwise(brackets.values())
    falling = all(learned >= failed for (learned, _), (_, failed) in pairs)
    return falling, ", ".join(f"L={d} {_words(bracket)}" for d, bracket in brackets.items())


def deepnorm_trials(base: RunConfig) -> list[Trial]:
    return _trials(base, "deepnorm-w0", FEWER, init="native")


def small_trials(base: RunConfig) -> list[Trial]:
    return _trials(base, "post-gpt2", FEWER, norm_position="post", warmup_steps=0, init="gpt2")


def all_below(arm: str) -> Callable[[Bench], tuple[bool, str]]:
    """A judge: every seed of the arm ended below WELL."""

    def judge(bench: Bench) -> tuple[bool, str]:
        losses = [math.inf if o.final is None else o.final for o in bench.of(arm)]
        return max(losses) < WELL, listed(losses, ".3f")

    return judge


CLIPS = (1.0, 0.1)


def clip_trials(base: RunConfig) -> list[Trial]:
    return [
        trial for clip in CLIPS
        for trial in _trials(base, f"post-w0-clip{clip:g}", 1, norm_position="post",
                             warmup_steps=0, grad_clip=clip)
    ]  # fmt: skip


def clipping(bench: Bench) -> tuple[bool, str]:
    ended = [outcome for clip in CLIPS for outcome in bench.of(f"post-w0-clip{clip:g}")]
    return all(o.state == "plateau" for o in ended), _ends(ended)


SHALLOW = (2, 4)


def shallow_trials(base: RunConfig) -> list[Trial]:
    return [
        trial for depth in SHALLOW
        for trial in _trials(base, "post-w0", 1, depth=depth, rate=3e-3)
    ]  # fmt: skip


def shallow(bench: Bench) -> tuple[bool, str]:
    ended = [outcome for depth in SHALLOW for outcome in bench.of(_arm("post-w0", depth, 3e-3))]
    return all(o.state == "learned" for o in ended), _ends(ended)


def _arm(arm: str, depth: int, rate: float) -> str:
    return f"{arm}-L{depth}-lr{rate_name(rate)}"


def _trials(
    base: RunConfig,
    arm: str,
    n_seeds: int,
    *,
    depth: int = 0,
    rate: float = 0.0,
    probed: bool = False,
    **changes: Any,
) -> list[Trial]:
    """A trial a seed. ``placement-wN`` names a placement and a warm-up."""
    if "norm_position" not in changes:
        placement, warmup = arm.split("-w")
        changes |= {"norm_position": placement, "warmup_steps": int(warmup)}
    if depth:
        changes |= {"n_layers": depth, "learning_rate": rate}
        arm = _arm(arm, depth, rate)
    steps = PROBED if probed else ()
    return [
        Trial(arm, base.with_changes({**changes, "seed": seed}).resolved(), steps)
        for seed in seeds_of(base, n_seeds)
    ]


Bracket = tuple[float, float]
"""Largest rate up to which all were learned (0: none), smallest that was not (infinity: none)."""


def _bracket(bench: Bench, arm: str, depth: int, rates: tuple[float, ...]) -> Bracket:
    learned = {
        rate: all(o.state == "learned" for o in bench.of(_arm(arm, depth, rate))) for rate in rates
    }
    failed = min((rate for rate, good in learned.items() if not good), default=math.inf)
    return max((rate for rate in rates if rate < failed), default=0.0), failed


def _middle(bracket: Bracket) -> float:
    """Geometric mean; where one end is open, the other."""
    low, high = bracket
    if low and math.isfinite(high):
        return math.sqrt(low * high)
    return low or high


def _words(bracket: Bracket) -> str:
    low, high = bracket
    if not low:
        return f"below {high:g}"
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"above {low:g}"


def _ends(outcomes: list[Outcome]) -> str:
    return ", ".join(
        f"{o.arm} {o.state} {'' if o.final is None else format(o.final, '.3f')}".rstrip()
        for o in outcomes
    )


XIONG, DEEPNET = "Xiong et al. 2020", "Wang et al. 2022 (DeepNet)"
CHECKS = [
    Check("R6", "Post-LN needs warm-up and Pre-LN does not",
          f"{XIONG}, figures 2 and 4",
          f"Post w0 at most 1/5, the others 5/5 below {FAIRLY:.2f}", needs_warmup, demo_trials),
    Check("R7", "it fails because the gradient vanishes, not because it explodes",
          f"{DEEPNET}, figure 4",
          "first block >= /100, last < /20, branch/skip >= 1.5, total <= 2 x step 1",
          vanishing, demo_trials),
    Check("R8", "warm-up raises the learning rate Post-LN bears, and Pre-LN bears more",
          f"{XIONG}; Liu et al. 2020 (Admin)", "Pre >= 4 x Post w0, Post w100 >= 1.8 x Post w0",
          critical_rates, rate_trials),
    Check("R9", "the deeper Post-LN, the smaller the learning rate at which it fails",
          f"{XIONG}; {DEEPNET}", "falling with depth", critical_by_depth, depth_trials),
    Check("R10", "DeepNorm trains without warm-up where Post-LN fails",
          DEEPNET, f"every seed below {WELL:.2f}", all_below("deepnorm-w0"), deepnorm_trials),
    Check("R12", "small weights hide all of it: Post-LN learns without warm-up",
          "", f"every seed below {WELL:.2f}", all_below("post-gpt2"), small_trials),
    Check("R13", "clipping the gradient does not rescue Post-LN",
          "", "both on the plateau", clipping, clip_trials),
    Check("R14", "with two or four blocks Post-LN learns without warm-up",
          "", "both learn", shallow, shallow_trials),
]  # fmt: skip
