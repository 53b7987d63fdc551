"""The learning rate of every update, as a pure function of its number."""

import math

from gpt.config import TrainingConfig


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Rate of update ``step``, counted from 0: ``0 <= step < steps``.

    With W = warmup_steps, last = steps - 1 and f = final_lr_fraction:

    warm-up   peak (step + 1) / W while step < W, so the first update is above zero and update
              W - 1 is the first at the peak (update 0 without warm-up)
    after it  peak (f + (1 - f) r), where r goes from 1 at the peak to 0 at the last update:
              linear    in a line
              cosine    (1 + cos(pi x)) / 2, x the part of the way that is done
              wsd       stays 1, then in a line over the last round(decay_fraction steps) updates
              constant  stays 1

    So the last rate is exactly f peak, unless the schedule is constant, decay_fraction is 0, or
    the warm-up fills every step. A wsd decay longer than what the warm-up leaves is cut to that.
    Sources: cosine Loshchilov & Hutter 2017, arXiv 1608.03983; wsd Hu et al. 2024, arXiv
    2404.06395.
    """
    assert 0 <= step < config.steps, f"update {step} of {config.steps}"
    peak, warmup = config.learning_rate, config.resolved().warmup_steps
    assert warmup is not None, "resolved() writes every default out"
    if step < warmup:
        return peak * ((step + 1) / warmup)
    final = config.final_lr_fraction
    return peak * (final + (1 - final) * _remaining(step, max(warmup - 1, 0), config))


def _remaining(step: int, first_at_peak: int, config: TrainingConfig) -> float:
    """How much of the fall is still to come: 1 at the peak, 0 at the last update."""
    start, last = first_at_peak, config.steps - 1
    if config.schedule == "wsd":
        start = max(start, last - _decay_steps(config))
    if config.schedule == "constant" or step <= start:
        return 1.0
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * (step - start) / (last - start))) / 2
    return (last - step) / (last - start)


def _decay_steps(config: TrainingConfig) -> int:
    if config.decay_fraction == 0:
        return 0
    return max(round(config.decay_fraction * config.steps), 1)  # asked for: never rounded away
