import math

import numpy as np
import pytest

from gpt.config import RunConfig
from gpt.lab.comparison import PairwiseComparison, Tally, compare, compare_pairs
from gpt.lab.outcomes import Outcome
from gpt.lab.setting import setting_of
from gpt.lab.statement import statement, table

MARGIN = 0.02
PRE = [2.504, 2.545, 2.527, 2.530, 2.504]
PRE_WARM = [2.533, 2.544, 2.558, 2.544, 2.528]
POST_WARM = [2.511, 2.515, 2.509, 2.539, 2.491]
POST = [3.339, 3.347, 3.340, 3.337, 3.335]
LETTERS = {"L": "learned", "P": "plateau", "D": "diverged", "U": "undecided"}


def outcomes(arm: str, finals, states: str = "", seed: int = 10) -> list[Outcome]:
    """One a seed; ``states`` by their first letters, all learned by default."""
    return [
        Outcome(
            arm=arm, seed=seed + i, state=LETTERS[state], first=4.2,
            final=None if state == "D" else float(final), best=None, steps=200,
            characters=102_400, n_parameters=301_184, seconds=5.0,
        )
        for i, (final, state) in enumerate(zip(finals, states or "L" * len(finals), strict=True))
    ]  # fmt: skip


def judged(states_a: str, states_b: str, difference: float = 0.0) -> PairwiseComparison:
    """Two arms whose losses differ by a little noise and ``difference``, B minus A."""
    noise = np.random.default_rng(3).normal(0, 0.002, 40)
    a = outcomes("a", 2.5 + noise[: len(states_a)], states_a)
    b = outcomes("b", 2.5 + difference - noise[: len(states_b)], states_b)
    return compare(a, b, MARGIN)


def frequencies(n: int, mean: float, sd: float, times: int = 1500) -> dict[str, float]:
    """How often each verdict comes of n pairs whose differences have this mean and deviation."""
    random = np.random.default_rng(11)
    verdicts = [
        compare(outcomes("a", [2.5] * n), outcomes("b", 2.5 + differences), MARGIN).verdict
        for differences in random.normal(mean, sd, (times, n))
    ]
    return {verdict: verdicts.count(verdict) / times for verdict in set(verdicts)}


def at_most(share: float, limit: float, times: int) -> bool:
    return share <= limit + 4 * math.sqrt(limit * (1 - limit) / times)


def test_no_difference_and_little_noise_is_equivalent():
    seen = frequencies(8, 0.0, 0.008)
    assert seen["EQUIVALENT"] > 0.99


def test_a_large_difference_names_the_arm_with_the_lower_loss():
    assert frequencies(5, 0.1, 0.02)["A BETTER"] > 0.99
    assert frequencies(5, -0.1, 0.02)["B BETTER"] > 0.99


def test_few_seeds_and_noise_resolve_nothing():
    assert frequencies(3, 0.01, 0.05)["NOT RESOLVED"] > 0.9


@pytest.mark.parametrize("sd", [0.01, 0.05, 0.3])
def test_equal_arms_are_called_better_in_no_more_than_one_of_twenty(sd):
    seen = frequencies(5, 0.0, sd)
    assert at_most(seen.get("A BETTER", 0) + seen.get("B BETTER", 0), 0.05, 1500)


def test_arms_that_differ_by_the_margin_are_called_equivalent_in_no_more_than_one_of_twenty():
    assert at_most(frequencies(6, MARGIN, 0.01)["EQUIVALENT"], 0.05, 1500)


def test_among_three_equal_arms_one_is_called_better_in_no_more_than_one_of_twenty():
    """Without the correction it would be one in eleven."""
    random = np.random.default_rng(12)
    corrected = alone = 0
    for a, b, c in random.normal(2.5, 0.1, (2000, 3, 6)):
        arms = [outcomes(name, losses) for name, losses in (("a", a), ("b", b), ("c", c))]
        pairs = [(arms[0], arms[1]), (arms[0], arms[2])]
        corrected += any(found.winner for found in compare_pairs(pairs, 0.001))
        alone += any(compare(first, second, 0.001).winner for first, second in pairs)
    assert at_most(corrected / 2000, 0.05, 2000)
    assert alone / 2000 > 0.07


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_arms_that_fail_alike_are_called_better_in_no_more_than_one_of_twenty(share):
    """Though both their failures and their losses are tested."""
    random = np.random.default_rng(13)
    better = 0
    for _ in range(1500):
        a, b = (
            outcomes(name, losses, "".join("LP"[int(f)] for f in failed))
            for name, losses, failed in zip(
                "ab", random.normal(2.5, 0.1, (2, 9)), random.random((2, 9)) < share, strict=True
            )
        )
        better += bool(compare(a, b, 0.001).winner)
    assert at_most(better / 1500, 0.05, 1500)


def test_the_number_of_seeds_that_is_named_resolves_about_as_often_as_it_says():
    first = outcomes("a", [2.5] * 5)
    found = compare(first, outcomes("b", 2.5 + np.array([0.03, -0.03, 0.04, -0.02, 0.01])), MARGIN)
    assert (found.verdict, found.ground) == ("NOT RESOLVED", "losses")
    n = found.seeds_to_resolve
    assert n > 5
    seen = frequencies(n, found.mean, found.sd)
    assert 1 - seen["NOT RESOLVED"] == pytest.approx(0.8, abs=0.05)


def test_the_measured_example():
    """Xavier, six blocks, rate 3e-3, 200 steps, five seeds: a difference at equal warm-up is none
    against the better warm-up."""
    equal = compare(outcomes("pre", PRE_WARM), outcomes("post", POST_WARM))
    assert equal.interval == pytest.approx((-0.0489, -0.0079), abs=5e-5)
    assert (equal.verdict, equal.words) == ("B BETTER", "post BETTER")
    tuned = compare(outcomes("pre", PRE), outcomes("post", POST_WARM))
    assert tuned.interval == pytest.approx((-0.0298, 0.0118), abs=5e-5)
    assert tuned.verdict == "NOT RESOLVED"
    failing = compare(outcomes("post", POST, "PPPPP"), outcomes("pre", PRE))
    assert (failing.words, failing.ground) == ("pre BETTER", "failures")
    assert failing.fisher_p == pytest.approx(0.0079, abs=5e-5)
    assert (failing.mean, failing.interval, failing.differences) == (None, None, ())


@pytest.mark.parametrize(
    ("a", "b", "difference", "verdict", "ground"),
    [
        ("LLLLL", "PPDPP", 0.0, "A BETTER", "failures"),
        ("DDDDD", "LLLLL", 0.0, "B BETTER", "failures"),
        ("LLLLL", "LPPPP", -0.9, "A BETTER", "failures"),  # the survivor is no evidence
        ("LLLLL", "LLPPP", -0.9, "NOT RESOLVED", "failures"),
        ("LLLLL", "LLLLP", 0.0, "NOT RESOLVED", "some failed"),  # never equivalent
        ("LLLLL", "LLLLP", 0.9, "A BETTER", "losses"),
        ("LLLLL", "LLLLP", -0.9, "NOT RESOLVED", "opposed"),
        ("PLLLL", "LLLLP", -0.9, "B BETTER", "losses"),
        ("L" * 20, "L" * 12 + "P" * 8, 0.9, "A BETTER", "failures"),
        ("L" * 20, "L" * 12 + "P" * 8, -0.9, "NOT RESOLVED", "opposed"),
        ("PPPPP", "PPDPP", 0.0, "NOT RESOLVED", "none learned"),
        ("LLPLL", "LLLPL", 0.0, "NOT RESOLVED", "some failed"),
        ("LPLP", "PLPL", 0.0, "NOT RESOLVED", "one pair"),
        ("LLLLL", "LLLLU", 0.9, "NOT RESOLVED", "too short"),
        ("UUUUU", "UUUUU", 0.0, "NOT RESOLVED", "too short"),
        ("L", "L", 0.9, "NOT RESOLVED", "one seed"),
        ("L", "P", 0.9, "NOT RESOLVED", "one seed"),
        ("LLLLL", "LLLLL", 0.0, "EQUIVALENT", "losses"),
    ],
)
def test_failures_are_counted_and_never_averaged(a, b, difference, verdict, ground):
    found = judged(a, b, difference)
    assert (found.verdict, found.ground) == (verdict, ground)
    both = sum(x == y == "L" for x, y in zip(a, b, strict=True))
    assert len(found.differences) == len(found.seeds) == both


def test_a_failed_loss_never_enters_a_mean():
    a, b = outcomes("a", PRE), outcomes("b", [9.0, *PRE[1:-1], 99.0], "PLLLP")
    found = compare(a, b)
    assert found.differences == (0.0, 0.0, 0.0)
    assert found.seeds == (11, 12, 13)


def test_pairs_are_made_by_seed_and_not_by_order():
    a, b = outcomes("a", PRE), outcomes("b", [loss + 0.1 for loss in PRE])
    found = compare(a[::-1], [b[2], b[0], b[4]], MARGIN)
    assert found.seeds == (10, 12, 14)
    assert found.differences == pytest.approx([0.1] * 3)


def test_better_takes_more_than_the_margin():
    b = outcomes("b", [loss + 0.019 for loss in PRE])
    assert compare(outcomes("a", PRE), b, 0.02).verdict == "EQUIVALENT"
    more = np.array([0.010, 0.026, 0.012, 0.027, 0.019])
    noisy = outcomes("b", PRE + more)
    found = compare(outcomes("a", PRE), noisy, 0.02)
    assert found.interval[0] > 0
    assert found.verdict == "NOT RESOLVED"
    assert compare(outcomes("a", PRE), noisy, 0.015).verdict == "A BETTER"


def test_the_correction_counts_only_tests_that_could_have_come_out():
    pre, post, other = (
        outcomes("pre", PRE),
        outcomes("post", POST, "PPPPP"),
        outcomes("o", PRE_WARM),
    )
    together = compare_pairs([(pre, post), (pre, other)])
    assert [c.tests for c in together] == [2, 2]  # one of failures, one of losses
    assert together[0].holm["failures"] == pytest.approx(2 * together[0].fisher_p)
    assert compare(pre, post).tests == 1
    assert compare(pre, outcomes("b", PRE, "LLLLP")).p.keys() == {"difference"}


def test_identical_arms_are_equivalent():
    found = compare(outcomes("a", PRE), outcomes("b", PRE))
    assert (found.verdict, found.sd, found.interval) == ("EQUIVALENT", 0, (0, 0))


def test_tallies():
    tally = Tally.of(outcomes("a", [2.0] * 6, "LPPDUU"))
    assert (tally.learned, tally.failed, tally.decided, tally.runs) == (1, 3, 4, 6)
    assert tally.failure_interval == pytest.approx((0.1941, 0.9937), abs=5e-5)
    with pytest.raises(AssertionError):
        Tally.of([*outcomes("a", [2.0]), *outcomes("a", [2.1])])  # one seed twice


def everything(arms: dict[str, list[Outcome]]) -> list[Outcome]:
    return [outcome for of_one in arms.values() for outcome in of_one]


def said(arms: dict[str, list[Outcome]], **options) -> tuple[list[str], str]:
    lines = statement("Setting: x.", list(arms), everything(arms), **options)
    assert all(len(line) <= 100 for line in lines)
    return lines, " ".join(line.strip() for line in lines)


def test_every_seed_comes_before_any_statistic():
    lines, text = said({"pre": outcomes("pre", PRE), "post": outcomes("post", POST, "PPPPP")})
    assert lines[0] == "Setting: x."
    assert lines[3].split() == ["seed", "pre", "post"]
    assert lines[4].split() == ["10", "2.5040", "learned", "3.3390", "plateau"]
    assert "post: failed in 5 of 5 seeds (95 % Clopper-Pearson interval 48..100 %)" in text
    assert "pre: failed in 0 of 5 seeds (95 % Clopper-Pearson interval 0..52 %)" in text
    assert "Fisher exact p = 0.0079" in text
    assert "pre BETTER at the learning rate set, untuned: it failed in fewer seeds" in text
    assert "minus" not in text
    assert "diverged" not in text


def test_losses_are_said_with_all_that_belongs_to_them():
    _, text = said({"pre": outcomes("pre", PRE_WARM), "post": outcomes("post", POST_WARM)})
    assert "post minus pre where both learned (seeds 10-14): -0.0284 nats per character" in text
    assert "95 % paired-t interval [-0.0489, -0.0079], n = 5, sd of differences 0.0165" in text
    assert "sign-flip test p = 0.062 (5 seeds cannot give less than 0.062)" in text
    assert "verdict (margin 0.02 nats): post BETTER at the learning rate set, untuned: " in text
    assert "Holm" not in text


def test_arms_that_differ_by_less_than_the_margin_are_equivalent_and_said_to_differ():
    arms = {"a": outcomes("a", PRE), "b": outcomes("b", np.array(PRE) + 0.01)}
    _, text = said(arms)
    assert "EQUIVALENT at the learning rate set, untuned: both one-sided tests pass at 5 %" in text
    assert "lies within the margin, though a difference is shown" in text
    _, text = said({"a": outcomes("a", PRE), "b": outcomes("b", PRE)})
    assert "though a difference is shown" not in text


def test_what_is_not_resolved_says_how_many_seeds_would_do():
    _, text = said({"pre": outcomes("pre", PRE), "post": outcomes("post", POST_WARM)})
    assert "NOT RESOLVED: neither a difference nor equivalence is shown; about n = 16 " in text


def test_every_ground_has_its_words():
    grounds = {
        "one seed": ("L", "L"), "too short": ("LU", "LL"), "none learned": ("PP", "DD"),
        "one pair": ("LPLP", "PLPL"), "opposed": ("LLLLL", "LLLLP"), "failures": ("LLL", "LPP"),
        "some failed": ("LLPLL", "LLLPL"),
    }  # fmt: skip
    seen = set()
    for ground, (a, b) in grounds.items():
        arms = {
            "a": outcomes("a", np.linspace(2.5, 2.6, len(a)), a),
            "b": outcomes("b", np.linspace(2.2, 2.3, len(b)), b),
        }
        if ground == "some failed":
            arms["b"] = outcomes("b", np.linspace(2.5, 2.6, len(b)), b)
        assert compare(arms["a"], arms["b"]).ground == ground
        _, text = said(arms)
        assert "BETTER" not in text
        assert "EQUIVALENT" not in text
        assert "learning rate set" not in text
        seen.add(text.split("NOT RESOLVED: ")[1].split(" This says")[0])
    assert len(seen) == len(grounds)


def test_one_seed_shows_nothing_and_no_run_is_called_stable():
    _, text = said({"pre": outcomes("pre", PRE[:1]), "post": outcomes("post", POST[:1], "P")})
    assert "one seed shows nothing" in text
    assert "stable" not in text
    assert "BETTER" not in text


def test_more_than_two_arms_are_each_compared_with_the_first_and_corrected():
    arms = {
        "pre": outcomes("pre", PRE), "warm": outcomes("warm", PRE_WARM),
        "post": outcomes("post", POST_WARM),
    }  # fmt: skip
    lines, text = said(arms)
    assert [line for line in lines if " against " in line] == [
        "warm against pre",
        "post against pre",
    ]
    assert "p = 0.03 (Holm 0.06)" in text
    assert "2 pairs were compared, and no others." in text
    lines, text = said(arms, pairs=[("warm", "post")])
    assert [line for line in lines if " against " in line] == ["post against warm"]
    assert "Holm" not in text


def test_a_tuned_comparison_says_so_and_the_last_sentence_says_what_is_not_said():
    arms = {"pre": outcomes("pre", PRE_WARM), "post": outcomes("post", POST_WARM)}
    lines, text = said(arms, tuned=True)
    assert "post BETTER each at its own tuned learning rate" in text
    assert "warm-ups or learning rates than those tried" in text
    assert "learning rate set" not in text
    assert lines[-2].startswith("This says nothing about other depths, widths, initialisations")


def test_an_unfinished_comparison_says_so():
    _, text = said({"pre": outcomes("pre", PRE), "post": outcomes("post", POST_WARM[:3])})
    assert "unfinished: 2 of 10 runs are missing" in text
    _, text = said({"pre": outcomes("pre", PRE), "post": []})
    assert "post: no run ended" in text
    assert "against" not in text


def test_many_arms_and_long_names_keep_to_the_width():
    names = [f"arm-{i}-{'x' * (20 * i)}" for i in range(7)]
    arms = {name: outcomes(name, PRE) for name in names}
    lines, _ = said(arms)
    rows = table(names, everything(arms))
    assert sum(row.startswith("seed") for row in rows) > 1
    assert rows == lines[2 : 2 + len(rows)]


def test_the_setting_says_once_what_is_shared_and_twice_what_differs():
    base = RunConfig().with_changes({"n_layers": 6, "d_model": 48, "init": "xavier", "steps": 210})
    other = base.with_changes({"norm_position": "post", "tie_embeddings": False, "seed": 4})
    sentence = setting_of([base, other], [10, 11, 12, 20], "c0de" * 16, "da7a" * 16)
    for part in (
        "6 blocks, d_model 48, 4 heads, context 64, norm_position pre / post, norm layer, ",
        "init xavier, AdamW(0.9, 0.99), learning rate 0.001, cosine schedule, warm-up 21 steps",
        "210 steps, 768 characters a step, tie_embeddings True / False; seeds 10-12, 20; ",
        "code c0dec0dec0de, data da7ada7ada7a (sha256).",
    ):
        assert part in sentence
    assert "/" not in setting_of([base], [5], "", "")
    muon = base.with_changes({"optimizer": "muon"})
    assert "Muon(0.95) with AdamW(0.9, 0.99)" in setting_of([muon], [5], "", "")
