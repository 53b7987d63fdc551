"""R1 to R5 and R11: what the papers say about models before their first update."""

from collections.abc import Callable
from statistics import fmean

from gpt.config import RunConfig
from gpt.lab.at_start import (
    RATE,
    amplification,
    begin_at_rms_1,
    expected_gradients,
    first_batches,
    fresh,
    position_gradient,
    slope,
    theory,
    update,
)
from gpt.lab.checks import Bench, Check, listed
from gpt.lab.probes import measure
from gpt.model.gpt import GPT

SEEDS = 5
DEPTHS = (2, 6, 12, 24)
WIDTH = 256
"""Of the models in the setting of the proofs, which are about wide ones."""


def lemma_2_post(bench: Bench) -> tuple[bool, str]:
    """Mean square of what each block's second norm reads, over blocks and seeds."""
    means = [
        fmean(fmean(theory("post", depth, WIDTH, seed)) for seed in bench.seeds(SEEDS))
        for depth in DEPTHS
    ]
    worst = max(abs(mean / 1.5 - 1) for mean in means)
    return worst <= 0.03, f"{listed(means, '.3f')} at L = {_depths()}: within {worst:.1%}"


def lemma_2_pre(bench: Bench) -> tuple[bool, str]:
    means = [
        fmean(theory("pre", depth, WIDTH, seed)[0] for seed in bench.seeds(SEEDS))
        for depth in DEPTHS
    ]
    inside = all(
        1 + depth / 2 <= mean <= 1 + 3 * depth / 2
        for depth, mean in zip(DEPTHS, means, strict=True)
    )
    return inside, f"{listed(means)} at L = {_depths()}"


def sandwich_growth(bench: Bench) -> tuple[bool, str]:
    """Every branch ends in a norm, so it adds rms 1 that is independent of the stream."""
    inputs, targets = first_batches(bench.base, bench.corpus)[0]
    seen = []
    for depth in DEPTHS[1:]:
        for seed in bench.seeds(SEEDS):
            model = _model(bench, "sandwich", depth, seed)
            stream = [one.skip for one in measure(model, inputs, targets).additions]
            k = len(stream) - 1
            seen.append((depth, stream[-1] / (stream[0] ** 2 + k) ** 0.5 - 1))
    means = [fmean(off for depth, off in seen if depth == which) for which in DEPTHS[1:]]
    off = ", ".join(f"{mean:+.1%}" for mean in means)
    return max(map(abs, means)) <= 0.05, f"{off} at L = 6, 12, 24"


def gradient_by_depth(bench: Bench) -> tuple[bool, str]:
    """Slopes of the last block's gradient, as the theorem has it: position by position.

    The gradient of the mean loss, which is smaller, rises against it with depth in every
    placement: attention makes positions alike, and like ones pull in one direction.
    """
    depths = (4, 6, 8, 10, 12, 14)
    batches = first_batches(bench.base, bench.corpus)
    seen: dict[str, tuple[float, float]] = {}
    for placement in ("pre", "post"):
        single: dict[int, float] = {}
        summed: dict[int, float] = {}
        for depth in depths:
            models = [
                begin_at_rms_1(_model(bench, placement, depth, seed, "relu"), batches[0][0])
                for seed in bench.seeds(SEEDS)
            ]
            single[depth] = fmean(position_gradient(model, *batches[0]) for model in models)
            summed[depth] = fmean(expected_gradients(model, batches)[-1] for model in models)
        seen[placement] = slope(single), slope(summed)
    pre, post = seen["pre"][0], seen["post"][0]
    return (
        -0.62 <= pre <= -0.38 and -0.12 <= post <= 0.12,
        f"Pre {pre:+.2f}, Post {post:+.2f} (of the gradient summed over positions "
        f"{seen['pre'][1]:+.2f}, {seen['post'][1]:+.2f})",
    )


def noise(bench: Bench) -> tuple[bool, str]:
    inputs, targets = first_batches(bench.base, bench.corpus)[0]

    def amplified(placement: str, depth: int) -> float:
        def one(model: GPT, seed: int) -> float:
            logits = measure(model, inputs, targets).logits
            return amplification(model, inputs, logits, seed)

        return _mean(bench, placement, depth, one)

    post, pre = (amplified(p, 24) / amplified(p, 2) for p in ("post", "pre"))
    passes = post >= 12 and pre <= 9 and post / pre >= 3
    return passes, f"Post x{post:.0f}, Pre x{pre:.1f}"


def first_update(bench: Bench) -> tuple[bool, str]:
    inputs, targets = first_batches(bench.base, bench.corpus)[0]

    def moved(placement: str, depth: int) -> float:
        def one(model: GPT, _seed: int) -> float:
            return update(model, inputs, measure(model, inputs, targets), RATE)

        return _mean(bench, placement, depth, one)

    post, pre = moved("post", 24), moved("pre", 24)
    over = post / moved("deepnorm", 24)
    growth = post / moved("post", 2), pre / moved("pre", 2)
    passes = over >= 10 and growth[0] >= 3 * growth[1]
    return (
        passes,
        f"Post/DeepNorm {over:.0f}; from L = 2: Post x{growth[0]:.0f}, Pre x{growth[1]:.0f}",
    )


def early_gradients(bench: Bench) -> tuple[bool, str]:
    batches = first_batches(bench.base, bench.corpus)
    ratios = []
    for depth in DEPTHS[1:]:
        of_seeds = []
        for seed in bench.seeds(SEEDS):
            gradients = expected_gradients(_model(bench, "pre", depth, seed), batches)
            of_seeds.append(gradients[-1] / gradients[0])
        ratios.append(fmean(of_seeds))
    passes = max(ratios) < 0.7 and ratios == sorted(ratios, reverse=True)
    return passes, f"{listed(ratios)} at L = 6, 12, 24"


def _mean(bench: Bench, placement: str, depth: int, measured: Callable[[GPT, int], float]) -> float:
    """Over seeds, of models whose stream begins with rms 1."""
    inputs, _ = first_batches(bench.base, bench.corpus)[0]
    return fmean(
        measured(begin_at_rms_1(_model(bench, placement, depth, seed), inputs), seed)
        for seed in bench.seeds(SEEDS)
    )


def _model(bench: Bench, placement: str, depth: int, seed: int, activation: str = "") -> GPT:
    changes = {"norm_position": placement, "n_layers": depth}
    changes["init"] = "native" if placement == "deepnorm" else "xavier"
    if activation:
        changes["activation"] = activation
    config: RunConfig = bench.base.with_changes(changes)
    return fresh(config, bench.corpus, seed)


def _depths() -> str:
    return ", ".join(map(str, DEPTHS))


XIONG, LIU = "Xiong et al. 2020", "Liu et al. 2020 (Admin)"
CHECKS = [
    Check("R1", "what Post-LN's norms read has mean square 1.5 at every depth",
          f"{XIONG}, Lemma 2", "within 3 % of 1.5", lemma_2_post),
    Check("R2", "the mean square of Pre-LN's stream grows in line with depth",
          f"{XIONG}, Lemma 2", "in [1 + L/2, 1 + 3L/2]", lemma_2_pre),
    Check("R3", "the sandwich's stream has rms sqrt(x0^2 + k) after k sublayers",
          "Kim et al. 2025 (Peri-LN)", "within 5 %", sandwich_growth),
    Check("R4", "the last block's gradient falls as 1/sqrt(L) in Pre-LN, stays in Post-LN",
          f"{XIONG}, Theorem 1", "Pre in [-0.62, -0.38], Post in [-0.12, 0.12]",
          gradient_by_depth),
    Check("R5a", "depth amplifies a change of the weights in Post-LN far more than in Pre-LN",
          f"{LIU}, Theorem 2", "Post >= x12, Pre <= x9, ratio >= 3", noise),
    Check("R5b", "so it does with the first update, and DeepNorm prevents it",
          "Wang et al. 2022 (DeepNet), figure 5",
          "Post/DeepNorm >= 10, growth of Post >= 3 x that of Pre", first_update),
    Check("R11", "in Pre-LN early blocks have the larger gradients",
          "Shleifer et al. 2021 (NormFormer)", "last/first < 0.7, falling with L",
          early_gradients),
]  # fmt: skip
