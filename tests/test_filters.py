"""The filters against twins on plain lists, and the properties that a distribution must have."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpt.sampling import filters

B, V, R = 3, 11, 5
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def random_logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (B, V))


def random_recent(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (B, R))


def softmax(row):
    exps = [math.exp(x - max(row)) for x in row]
    return [e / sum(exps) for e in exps]


def plain_distribution(
    logits, recent, *, temperature, top_k, top_p, min_p, repetition_penalty
) -> np.ndarray:
    """The same composition, a row and a character at a time, on plain lists."""
    rows = []
    for row, seen in zip(logits, recent, strict=True):
        scores = [
            float(x)
            if i not in seen
            else x / repetition_penalty
            if x > 0
            else x * repetition_penalty
            for i, x in enumerate(row)
        ]
        if temperature == 0:
            rows.append([float(i == scores.index(max(scores))) for i in range(len(scores))])
            continue
        probabilities = softmax([x / temperature for x in scores])
        ranking = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        if top_k:
            ranking = ranking[:top_k]
        total = sum(probabilities[i] for i in ranking)
        nucleus, mass = [], 0.0
        for i in ranking:
            if top_p < 1 and mass >= top_p:
                break
            nucleus.append(i)
            mass += probabilities[i] / total
        kept = [i for i in nucleus if probabilities[i] >= min_p * probabilities[ranking[0]]]
        total = sum(probabilities[i] for i in kept)
        rows.append([probabilities[i] / total if i in kept else 0.0 for i in range(len(scores))])
    return np.array(rows)


def distribution(logits, recent, **changes) -> np.ndarray:
    return filters.distribution(logits, recent, **(OFF | changes))


kept = np.isfinite


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 4},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "temperature": 0.0},
        {"temperature": 1.9, "top_k": 7, "top_p": 0.8, "min_p": 0.3, "repetition_penalty": 1.3},
        {"temperature": 0.4, "top_k": 9, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(5))
def test_distribution_equals_its_plain_twin(changes, seed):
    logits, recent = random_logits(seed), random_recent(seed)
    expected = plain_distribution(logits, recent, **(OFF | changes))
    actual = distribution(logits, recent, **changes)
    assert np.abs(actual - expected).max() < 1e-12


def test_the_filters_compose_in_the_stated_order():
    # Two likely characters and three unlikely ones: each filter's verdict hangs on the earlier.
    logits = np.log([[0.40, 0.30, 0.12, 0.10, 0.08]])
    recent = np.array([[4]])
    # top_k before top_p: of 2 characters the first alone has 0.57 of the mass, of 5 only 0.40.
    assert (distribution(logits, recent, top_k=2, top_p=0.5) > 0).sum() == 1
    assert (distribution(logits, recent, top_p=0.5) > 0).sum() == 2
    # temperature before top_p and min_p: at 3 the mass is spread, and more are needed.
    assert (distribution(logits, recent, temperature=3.0, top_p=0.6) > 0).sum() == 3
    assert (distribution(logits, recent, top_p=0.6) > 0).sum() == 2
    assert (distribution(logits, recent, temperature=3.0, min_p=0.5) > 0).sum() == 5
    # top_p before min_p: after min_p the first alone would have 0.57 of the mass.
    assert (distribution(logits, recent, min_p=0.5, top_p=0.5) > 0).sum() == 2
    # the penalty before all: a seen favourite falls out of top_k.
    favourite = np.array([[0]])
    penalised = distribution(logits, favourite, repetition_penalty=3.0, top_k=2)
    assert penalised[0, 0] == 0
    assert penalised[0, 1] > 0


finite_logits = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(-1e4, 1e4)
)
settings = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.just(0.0), st.floats(5e-324, 1e300)),
        "top_k": st.integers(0, 12),
        "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(1e-3, 1e3),
    }
)


@given(finite_logits, settings, st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
def test_every_setting_gives_a_distribution_and_ids_in_range(logits, changes, seed, uniform):
    n_rows, n_ids = logits.shape
    recent = np.random.default_rng(seed).integers(0, n_ids, (n_rows, 3))
    probabilities = distribution(logits, recent, **changes)
    assert np.isfinite(probabilities).all()
    assert (probabilities >= 0).all()
    assert np.abs(probabilities.sum(axis=1) - 1).max() < 1e-12
    ids = filters.draw(probabilities, np.full(n_rows, uniform))
    assert ids.shape == (n_rows,)
    for row, i in enumerate(ids.tolist()):
        assert 0 <= i < n_ids
        assert probabilities[row, i] > 0


@given(finite_logits, st.integers(1, 12))
def test_top_k_keeps_exactly_k_and_no_smaller_one(logits, k):
    stays = kept(filters.keep_top_k(logits, k))
    assert (stays.sum(axis=1) == min(k, logits.shape[1])).all()
    for row, mask in zip(logits, stays, strict=True):
        if not mask.all():
            assert row[mask].min() >= row[~mask].max()


@given(finite_logits, st.floats(1e-6, 1, exclude_max=True))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p):
    stays = kept(filters.keep_top_p(logits, p))
    for row, mask in zip(logits, stays, strict=True):
        probabilities = np.array(softmax(row.tolist()))
        assert mask.any()
        if not mask.all():
            assert probabilities[mask].min() >= probabilities[~mask].max()
            assert probabilities[mask].sum() >= p - 1e-12
        assert probabilities[mask].sum() - probabilities[mask].min() < p + 1e-12


@given(finite_logits, st.floats(0, 1))
def test_min_p_keeps_the_most_probable(logits, p):
    stays = kept(filters.keep_min_p(logits, p))
    assert stays[np.arange(len(logits)), logits.argmax(axis=1)].all()


def test_ties_go_to_the_lower_id():
    flat = np.zeros((2, V))
    first = np.arange(V) < 3
    assert (kept(filters.keep_top_k(flat, 3)) == first).all()
    assert (kept(filters.keep_top_p(flat, 2.5 / V)) == first).all()
    assert (kept(filters.divide_by_temperature(flat, 0)) == (np.arange(V) < 1)).all()


def test_top_p_keeps_one_even_when_p_is_tiny():
    assert (kept(filters.keep_top_p(np.zeros((B, V)), 1e-300)).sum(axis=1) == 1).all()


@pytest.mark.parametrize("tiny", [1e-39, 1e-320, 5e-324])
def test_a_tiny_temperature_is_greedy(tiny):
    logits = random_logits()
    greedy = distribution(logits, random_recent(), temperature=0.0)
    assert (distribution(logits, random_recent(), temperature=tiny) == greedy).all()
    assert (greedy.argmax(1) == logits.argmax(1)).all()


def test_the_penalty_makes_seen_characters_less_probable_whatever_their_sign():
    logits = np.array([[2.0, -2.0, 1.0, -1.0]])
    penalised = filters.penalise_repetition(logits, np.array([[0, 1, 1]]), 2.0)
    assert penalised.tolist() == [[1.0, -4.0, 1.0, -1.0]]


@pytest.mark.parametrize("penalty", [1e-308, 1e308])
def test_an_extreme_penalty_leaves_finite_logits_finite(penalty):
    logits = np.array([[20.0, -20.0, 0.0, -math.inf]])
    penalised = filters.penalise_repetition(logits, np.array([[0, 1, 2, 3]]), penalty)
    assert np.isfinite(penalised[0, :3]).all()
    assert penalised[0, 3] == -math.inf


def test_no_filter_changes_what_it_is_given():
    logits, recent = random_logits(), random_recent()
    before = logits.copy()
    settings = {"top_k": 5, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.5}
    for temperature in (0.0, 0.6, 1.0):
        distribution(logits, recent, temperature=temperature, **settings)
    assert (logits == before).all()


def test_off_settings_leave_the_softmax():
    logits = random_logits()
    actual = distribution(logits, random_recent())
    assert np.allclose(actual, [softmax(row) for row in logits], rtol=1e-14)


def test_draw_follows_the_cumulated_probabilities():
    probabilities = np.array([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).repeat(6, axis=0)
    uniforms = np.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53])
    assert filters.draw(probabilities, uniforms).tolist() == [1, 1, 3, 3, 4, 4]


def test_draw_follows_the_probabilities_in_the_long_run():
    probabilities = np.array([[0.5, 0.0, 0.3, 0.2]]).repeat(10_000, axis=0)
    uniforms = (np.arange(10_000) + 0.5) / 10_000
    counts = np.bincount(filters.draw(probabilities, uniforms), minlength=4)
    assert counts.tolist() == [5000, 0, 3000, 2000]
