"""The intervals and tests that a handful of seeds needs: pure functions of plain numbers.

``differences`` are one number a seed, arm minus arm, independent and roughly normal where a
function says t. Nothing here knows what a loss is.
"""

import functools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, stdev

Interval = tuple[float, float]

POWER = 0.8
"""Probability with which a number of seeds that is called enough comes to a verdict."""
MOST_SEEDS = 1000
"""More are not proposed."""


def clopper_pearson(k: int, n: int, confidence: float = 0.95) -> Interval:
    """Exact interval of a share that came up k times in n <= 1000 (Clopper and Pearson 1934).

    Its high end p solves ``P(X <= k | n, p) = (1 - confidence) / 2``, its low end
    ``P(X >= k | n, p)`` likewise. It covers at least as often as it says.
    """
    assert 0 <= k <= n <= MOST_SEEDS
    tail = (1 - confidence) / 2

    def high_end(k: int) -> float:
        return 1.0 if k == n else _crossing(lambda p: tail - _binomial_cdf(k, n, p), 0.0, 1.0)

    return 1 - high_end(n - k), high_end(k)


def fisher_exact(a: int, n_a: int, b: int, n_b: int) -> float:
    """Two-sided p-value of a in n_a against b in n_b (Fisher 1935).

    If the shares are equal, a given a + b is hypergeometric; p sums the counts that are no
    likelier than the one seen. Integers: ties are ties.
    """
    total = a + b
    possible = range(max(0, total - n_b), min(n_a, total) + 1)
    ways = [math.comb(n_a, x) * math.comb(n_b, total - x) for x in possible]
    seen = ways[a - possible.start]
    return sum(way for way in ways if way <= seen) / sum(ways)


def t_cdf(t: float, df: int) -> float:
    """``P(T <= t)`` of Student's t with df degrees of freedom, a whole number.

    With ``theta = atan(t / sqrt(df))`` a finite sum: Abramowitz and Stegun 26.7.3 (odd df:
    ``2/pi (theta + sin (cos + 2/3 cos^3 + ...))``), 26.7.4 (even: ``sin (1 + 1/2 cos^2 + ...)``).
    """
    theta = math.atan(t / math.sqrt(df))
    odd = df % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for j in range(2 + odd, df + 1, 2):
        total += term
        term *= (j - 1) / j * math.cos(theta) ** 2
    inside = math.sin(theta) * total
    if odd:
        inside = 2 / math.pi * (theta + inside)
    return (1 + inside) / 2


@functools.cache
def t_quantile(p: float, df: int) -> float:
    """The t with ``t_cdf(t, df) = p``, by bisection."""
    assert 1e-12 < p < 1 - 1e-12
    if p < 0.5:
        return -t_quantile(1 - p, df)
    high = 1.0
    while t_cdf(high, df) < p:
        high *= 2
    return _crossing(lambda t: t_cdf(t, df) - p, 0.0, high)


def paired_t(differences: Sequence[float], confidence: float = 0.95) -> Interval:
    """``mean +- t(n - 1) sd / sqrt(n)`` (Student 1908); at least two differences."""
    mean, se = fmean(differences), _standard_error(differences)
    half = t_quantile((1 + confidence) / 2, len(differences) - 1) * se
    return mean - half, mean + half


def paired_t_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean of 0; at most 0.05 just when the 95 % interval excludes 0."""
    return min(1.0, 2 * _p_above(abs(fmean(differences)), differences))


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """The larger p-value of two one-sided t tests, of means beyond +margin and -margin.

    At most 0.05 just when the 90 % interval lies within +-margin (TOST, Schuirmann 1987).
    """
    return _p_above(margin - abs(fmean(differences)), differences)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Share of the 2^n patterns of signs that give a mean as far from 0 (Fisher 1935).

    Exact for differences whose distribution is symmetric about 0, normal or not; never below
    ``2 / 2^n``. For up to 16 differences.
    """
    assert 1 <= len(differences) <= 16
    sums = [0.0]
    for difference in differences:
        sums = [s + difference for s in sums] + [s - difference for s in sums]
    seen = abs(sums[0]) * (1 - 1e-12)  # the same sum in another order differs by rounding
    return sum(abs(s) >= seen for s in sums) / len(sums)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: rejecting those up to 0.05 errs anywhere in at most 5 % (Holm 1979).

    The i-th smallest of m becomes the largest ``(m - j + 1) p_j`` of j = 1..i, at most 1.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def chance_to_resolve(n: int, mean: float, sd: float, margin: float, alpha: float = 0.05) -> float:
    """Probability that n differences show either equivalence or a difference beyond the margin.

    They show neither when their mean is, in size, between ``margin - t(1 - alpha) se`` and the
    larger of ``margin`` and ``t(1 - alpha / 2) se``, with ``se = sd / sqrt(n)`` taken as known.
    """
    se = sd / math.sqrt(n)
    low = max(0.0, margin - t_quantile(1 - alpha, n - 1) * se)
    high = max(margin, t_quantile(1 - alpha / 2, n - 1) * se)
    if se == 0:
        return float(not low <= abs(mean) <= high)
    means = NormalDist(mean, se)
    upper = means.cdf(high) - means.cdf(low)
    lower = means.cdf(-low) - means.cdf(-high)
    return 1 - upper - lower


def seeds_to_resolve(mean: float, sd: float, margin: float, alpha: float = 0.05) -> int | None:
    """Fewest seeds that resolve with probability POWER, were mean and sd the true ones.

    None when that takes more than MOST_SEEDS: a mean that is about the margin never resolves.
    """
    return _fewest(lambda n: chance_to_resolve(n, mean, sd, margin, alpha) >= POWER)


def chance_of_fisher(n: int, share_a: float, share_b: float, alpha: float = 0.05) -> float:
    """Probability that Fisher's test of n against n rejects, were the shares the true ones."""
    p_a, p_b = ([_binomial(k, n, share) for k in range(n + 1)] for share in (share_a, share_b))
    return math.fsum(
        p_a[a] * p_b[b]
        for a in range(n + 1)
        for b in range(n + 1)
        if p_a[a] * p_b[b] > 1e-9 and fisher_exact(a, n, b, n) <= alpha
    )


def seeds_for_fisher(share_a: float, share_b: float, alpha: float = 0.05) -> int | None:
    """Fewest seeds an arm that tell the shares apart with probability POWER; None: over 60."""
    enough = (n for n in range(2, 61) if chance_of_fisher(n, share_a, share_b, alpha) >= POWER)
    return next(enough, None)


def _standard_error(differences: Sequence[float]) -> float:
    """Of their mean; StatisticsError for fewer than two."""
    return stdev(differences) / math.sqrt(len(differences))


def _p_above(distance: float, differences: Sequence[float]) -> float:
    """``P(T >= distance / standard error)``; without spread, of an infinite T."""
    se = _standard_error(differences)
    t = distance / se if se else math.copysign(math.inf, distance) if distance else 0.0
    return max(0.0, 1 - t_cdf(t, len(differences) - 1))


def _binomial(k: int, n: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def _binomial_cdf(k: int, n: int, p: float) -> float:
    return math.fsum(_binomial(i, n, p) for i in range(k + 1))


def _crossing(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function passes 0 between low and high, to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return middle


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The least n >= 2 that is enough, where every larger one is too; None above MOST_SEEDS."""
    low, high = 1, 2
    while not enough(high):
        if high == MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
