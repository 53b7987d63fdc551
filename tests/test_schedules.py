"""The learning rate of every update, exhaustively over small grids."""

import itertools
import math
from typing import get_args

import pytest

from gpt.config import Schedule, TrainingConfig
from gpt.training.schedules import learning_rate

PEAK = 3e-3


def rates(**settings) -> list[float]:
    config = TrainingConfig(learning_rate=PEAK, **settings)
    return [learning_rate(step, config) for step in range(config.steps)]


def grid():
    for steps, schedule, final, decay in itertools.product(
        (1, 2, 3, 7, 10), get_args(Schedule), (0.0, 0.1, 0.37, 1.0), (0.0, 0.1, 0.5, 1.0)
    ):
        for warmup in {0, 1, 2, steps // 2, steps - 1, steps} & set(range(steps + 1)):
            yield {
                "steps": steps,
                "warmup_steps": warmup,
                "schedule": schedule,
                "final_lr_fraction": final,
                "decay_fraction": decay,
            }


def test_the_first_update_learns_and_the_peak_is_the_largest_rate_everywhere():
    for settings in grid():
        found = rates(**settings)
        assert len(found) == settings["steps"], settings
        assert found[0] > 0, settings
        assert max(found) == PEAK, settings


def test_rates_rise_strictly_to_the_peak_at_the_last_warmup_step_and_never_rise_again():
    for settings in grid():
        found = rates(**settings)
        top = max(settings["warmup_steps"] - 1, 0)
        assert found.index(PEAK) == top, settings
        assert all(a < b for a, b in itertools.pairwise(found[: top + 1])), settings
        assert all(a >= b for a, b in itertools.pairwise(found[top:])), settings


def test_the_last_update_has_exactly_the_final_rate():
    for settings in grid():
        last = rates(**settings)[-1]
        only_warmup = settings["steps"] <= max(settings["warmup_steps"], 1)
        no_decay = settings["schedule"] == "wsd" and settings["decay_fraction"] == 0
        if settings["schedule"] == "constant" or only_warmup or no_decay:
            assert last == PEAK, settings
        else:
            assert last == PEAK * settings["final_lr_fraction"], settings


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_both_ends_are_exact_whatever_the_numbers(schedule):
    for peak, final in itertools.product((7e-4, 1e-3, 1 / 3), (0.1, 0.03, 1 / 7, 0.6)):
        config = TrainingConfig(
            steps=997,
            warmup_steps=111,
            schedule=schedule,
            learning_rate=peak,
            final_lr_fraction=final,
        )
        found = [learning_rate(step, config) for step in range(997)]
        assert (max(found), found[110], found[111] <= peak) == (peak, peak, True)
        assert (min(found[110:]), found[-1]) == (peak * final, peak * final)


def test_warmup_rises_in_equal_parts_of_the_peak():
    found = rates(steps=10, warmup_steps=4)
    assert found[:4] == [PEAK * 0.25, PEAK * 0.5, PEAK * 0.75, PEAK]


def test_cosine_and_linear_are_halfway_in_the_middle_and_cosine_is_flat_at_both_ends():
    halfway = PEAK * (0.1 + 0.9 / 2)
    cosine = rates(steps=101, warmup_steps=0, schedule="cosine")
    linear = rates(steps=101, warmup_steps=0, schedule="linear")
    assert cosine[50] == pytest.approx(halfway, rel=1e-12)
    assert linear[50] == pytest.approx(halfway, rel=1e-12)
    assert cosine[25] == pytest.approx(PEAK * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), rel=1e-12)
    assert linear[25] == pytest.approx(PEAK * (0.1 + 0.9 * 0.75), rel=1e-12)


def test_wsd_stays_at_the_peak_then_falls_in_equal_parts_over_the_last_updates():
    found = rates(
        steps=20, warmup_steps=3, schedule="wsd", decay_fraction=0.2, final_lr_fraction=0.0
    )
    assert found[2:16] == [PEAK] * 14
    assert found[16:] == pytest.approx([PEAK * 0.75, PEAK * 0.5, PEAK * 0.25, 0.0], rel=1e-12)


def test_a_small_wsd_decay_still_takes_one_update():
    assert rates(steps=4, warmup_steps=0, schedule="wsd", decay_fraction=0.01) == [
        *[PEAK] * 3,
        PEAK * 0.1,
    ]


def test_a_wsd_decay_does_not_cut_the_warmup():
    found = rates(steps=8, warmup_steps=6, schedule="wsd", decay_fraction=0.9)
    assert found[5] == PEAK
    assert found[7] == PEAK * 0.1


def test_the_default_warmup_is_the_resolved_one():
    config = TrainingConfig(steps=70)
    resolved = config.resolved()
    assert resolved.warmup_steps == 7
    assert [learning_rate(s, config) for s in range(70)] == [
        learning_rate(s, resolved) for s in range(70)
    ]


def test_an_update_outside_the_run_is_refused():
    config = TrainingConfig(steps=5, warmup_steps=0)
    for step in (-1, 5):
        with pytest.raises(AssertionError, match="of 5"):
            learning_rate(step, config)
