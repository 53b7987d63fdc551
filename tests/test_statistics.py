import itertools
import math
import statistics as standard

import numpy as np
import pytest

from gpt.lab.statistics import (
    MOST_SEEDS,
    POWER,
    chance_of_fisher,
    chance_to_resolve,
    clopper_pearson,
    equivalence_p,
    fisher_exact,
    holm,
    paired_t,
    paired_t_p,
    seeds_for_fisher,
    seeds_to_resolve,
    sign_flip_p,
    t_cdf,
    t_quantile,
)


@pytest.fixture(scope="module")
def stats():
    return pytest.importorskip("scipy.stats", reason="scipy is not installed (extra dev)")


def samples(n: int, mean: float = 0.0, sd: float = 1.0, times: int = 10_000, seed: int = 7):
    """``times`` lists of n normal numbers."""
    return np.random.default_rng(seed).normal(mean, sd, (times, n)).tolist()


def within_noise(seen: int, times: int, share: float) -> bool:
    """Whether a count is within four standard errors of what a share predicts."""
    return abs(seen / times - share) < 4 * math.sqrt(share * (1 - share) / times)


def test_student_t_is_scipys(stats):
    for df in [*range(1, 40), 99, 200]:
        for t in (-80.0, -4.5, -1.96, -0.3, 0.0, 0.01, 0.7, 2.2, 12.0, math.inf):
            assert t_cdf(t, df) == pytest.approx(stats.t.cdf(t, df), abs=1e-14)
        for p in (1e-4, 0.025, 0.05, 0.4, 0.5, 0.9, 0.975, 0.9995):
            assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9, abs=1e-12)


def test_clopper_pearson_is_scipys(stats):
    for n, confidence in itertools.product((1, 2, 5, 23), (0.9, 0.95, 0.99)):
        for k in range(n + 1):
            theirs = stats.binomtest(k, n).proportion_ci(confidence, method="exact")
            assert clopper_pearson(k, n, confidence) == pytest.approx(tuple(theirs), abs=1e-10)


def test_fisher_exact_is_scipys(stats):
    for n_a, n_b in ((1, 1), (5, 5), (4, 7), (12, 9)):
        for a, b in itertools.product(range(n_a + 1), range(n_b + 1)):
            theirs = stats.fisher_exact([[a, n_a - a], [b, n_b - b]]).pvalue
            assert fisher_exact(a, n_a, b, n_b) == pytest.approx(theirs, rel=1e-9)


def test_paired_t_and_equivalence_are_scipys(stats):
    for n, mean in itertools.product((2, 3, 5, 14), (0.0, 0.3, -1.2)):
        for differences in samples(n, mean, times=8):
            theirs = stats.ttest_1samp(differences, 0)
            assert paired_t_p(differences) == pytest.approx(theirs.pvalue, rel=1e-9)
            for confidence in (0.9, 0.95):
                interval = theirs.confidence_interval(confidence)
                assert paired_t(differences, confidence) == pytest.approx(tuple(interval))
            above = stats.ttest_1samp(differences, -0.8, alternative="greater").pvalue
            below = stats.ttest_1samp(differences, 0.8, alternative="less").pvalue
            assert equivalence_p(differences, 0.8) == pytest.approx(max(above, below), rel=1e-9)


def test_sign_flips_are_scipys(stats):
    for n in (2, 5, 9):
        for differences in samples(n, 0.5, times=5):
            theirs = stats.permutation_test(
                (differences,), np.mean, permutation_type="samples", n_resamples=np.inf,
                vectorized=True,
            )  # fmt: skip
            assert sign_flip_p(differences) == pytest.approx(theirs.pvalue, rel=1e-12)


def test_values_from_the_tables():
    assert t_quantile(0.975, 4) == pytest.approx(2.776, abs=5e-4)
    assert t_quantile(0.95, 1) == pytest.approx(6.314, abs=5e-4)
    assert clopper_pearson(5, 5) == (pytest.approx(0.4782, abs=5e-5), 1.0)
    assert clopper_pearson(0, 5) == (0.0, pytest.approx(0.5218, abs=5e-5))
    assert fisher_exact(5, 5, 0, 5) == pytest.approx(2 / 252)


def test_the_t_interval_covers_as_often_as_it_says():
    for n, confidence in ((2, 0.95), (5, 0.95), (5, 0.9)):
        intervals = [paired_t(x, confidence) for x in samples(n, 3.0, 0.2)]
        covered = sum(low <= 3.0 <= high for low, high in intervals)
        assert within_noise(covered, len(intervals), confidence)


def test_clopper_pearson_covers_at_least_as_often_as_it_says():
    random = np.random.default_rng(8)
    for n in (5, 11):
        intervals = [clopper_pearson(k, n) for k in range(n + 1)]
        for share in (0.02, 0.2, 0.5, 0.77, 1.0):
            counts = random.binomial(n, share, 10_000)
            covered = np.mean([intervals[k][0] <= share <= intervals[k][1] for k in counts])
            assert covered > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 10_000)
            chances = [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
            exactly = sum(
                chance
                for chance, (low, high) in zip(chances, intervals, strict=True)
                if low <= share <= high
            )
            assert exactly >= 0.95
            assert covered == pytest.approx(exactly, abs=0.01)


def test_equivalence_means_that_the_90_percent_interval_lies_within_the_margin():
    both = set()
    for differences in samples(4, 0.3, 0.5, times=500):
        low, high = paired_t(differences, 0.9)
        inside = low > -0.9 and high < 0.9
        assert (equivalence_p(differences, 0.9) < 0.05) == inside
        both.add(inside)
    assert both == {True, False}


def test_a_difference_of_the_margin_passes_for_none_in_one_of_twenty():
    passed = sum(equivalence_p(x, 0.7) <= 0.05 for x in samples(6, 0.7, 0.1))
    assert within_noise(passed, 10_000, 0.05)


def test_sign_flips_reject_equal_arms_no_more_often_than_they_say():
    rejected = sum(sign_flip_p(x) <= 0.05 for x in samples(8, times=2000))
    assert rejected / 2000 < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 2000)
    assert sign_flip_p([0.3, 0.1, 0.2, 0.4, 0.25]) == 2 / 32
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1  # though the sum is not exactly 0


def test_holms_correction():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.001, 0.6, 0.02]) == pytest.approx([1.0, 0.004, 1.0, 0.06])
    assert holm([0.7]) == [0.7]
    assert holm([]) == []


def test_equal_differences_have_an_interval_of_no_width():
    assert paired_t([0.25, 0.25, 0.25]) == (0.25, 0.25)
    assert paired_t_p([0.25, 0.25, 0.25]) == pytest.approx(0, abs=1e-15)
    assert paired_t_p([0.0, 0.0]) == 1
    assert equivalence_p([0.0, 0.0], 0.02) == pytest.approx(0, abs=1e-15)
    assert equivalence_p([0.25, 0.25], 0.02) == pytest.approx(1)


def test_one_difference_has_no_interval():
    for function in (paired_t, paired_t_p):
        with pytest.raises(standard.StatisticsError):
            function([0.3])
    assert sign_flip_p([0.3]) == 1


@pytest.mark.parametrize(
    ("mean", "sd"), [(0.0, 0.016), (0.005, 0.02), (-0.03, 0.03), (0.05, 0.05), (0.012, 0.016)]
)
def test_the_seeds_to_resolve_resolve_as_often_as_they_should(mean, sd):
    margin = 0.02
    n = seeds_to_resolve(mean, sd, margin)
    assert n
    resolved = sum(
        equivalence_p(x, margin) <= 0.05
        or (paired_t_p(x) <= 0.05 and abs(standard.fmean(x)) > margin)
        for x in samples(n, mean, sd, times=3000)
    )
    # The spread is taken as known, which it is not with few seeds.
    assert resolved / 3000 == pytest.approx(POWER, abs=0.05)
    assert chance_to_resolve(n, mean, sd, margin) >= POWER
    assert chance_to_resolve(n - 1, mean, sd, margin) < POWER


def test_what_lies_at_the_margin_is_never_resolved():
    assert seeds_to_resolve(0.02, 0.016, 0.02) is None
    assert seeds_to_resolve(0.0199, 0.016, 0.02) is None
    assert chance_to_resolve(MOST_SEEDS, 0.02, 0.016, 0.02) == pytest.approx(0.55, abs=0.01)
    assert seeds_to_resolve(0.5, 0.0, 0.02) == seeds_to_resolve(0.0, 0.0, 0.02) == 2


def test_the_chance_that_fishers_test_tells_shares_apart():
    assert chance_of_fisher(3, 0.0, 1.0) == 0  # p = 0.1 at best
    assert chance_of_fisher(4, 0.0, 1.0) == pytest.approx(1)
    assert seeds_for_fisher(0.0, 1.0) == 4
    assert seeds_for_fisher(0.4, 0.4) is None
    random = np.random.default_rng(9)
    n = seeds_for_fisher(0.1, 0.7)
    pairs = zip(random.binomial(n, 0.1, 3000), random.binomial(n, 0.7, 3000), strict=True)
    rejected = sum(fisher_exact(int(a), n, int(b), n) <= 0.05 for a, b in pairs)
    assert within_noise(rejected, 3000, chance_of_fisher(n, 0.1, 0.7))
    assert POWER <= chance_of_fisher(n, 0.1, 0.7) < POWER + 0.15
