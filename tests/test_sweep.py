import dataclasses
import math
import re

import pytest

from gpt.commandline import run_config
from gpt.errors import UsageError
from gpt.lab import sweep
from gpt.lab.arms import Arm
from gpt.lab.commandline import parse_compare
from gpt.lab.grid import (
    best_rate,
    critical_rate,
    extended,
    mean_loss,
    next_runs,
    rate_name,
    sensitivity,
    state_of_cell,
    steps_to,
)
from gpt.lab.outcomes import Outcome
from gpt.lab.sweep_report import table

FIRST = 4.25
"""The loss before the first update, of every outcome here."""


def outcome(state="learned", final: float | None = 2.5, seed=0, arm="post") -> Outcome:
    return Outcome(
        arm=arm, seed=seed, state=state, first=FIRST, final=final, best=final, steps=200,
        characters=102_400, n_parameters=300, seconds=5.0,
    )  # fmt: skip


def cell(word: str) -> list[Outcome]:
    """``"2.5 2.75 p"``: a loss a seed that learned; p plateau, d diverged, n not finite, u open."""
    states = {"p": ("plateau", 3.34), "d": ("diverged", 5.0), "n": ("diverged", None),
              "u": ("undecided", 3.34)}  # fmt: skip
    ended = [states[w] if w in states else ("learned", float(w)) for w in word.split()]
    return [outcome(state, final, seed) for seed, (state, final) in enumerate(ended)]


def cells(**words: str) -> dict[float, list[Outcome]]:
    """``cells(r1="2.5", r4="p")``: rates 1e-3 and 4e-3."""
    return {int(name[1:]) / 1000: cell(word) for name, word in words.items()}


def test_a_grid_grows_by_the_distance_of_its_last_two_rates():
    assert extended((0.001, 0.003, 0.03), "low") == (0.000333, 0.001, 0.003, 0.03)
    assert extended((0.001, 0.003, 0.03), "high") == (0.001, 0.003, 0.03, 0.3)
    assert extended((0.004,), "low") == (0.002, 0.004)
    assert extended((0.004,), "high") == (0.004, 0.008)


def test_a_new_rate_lies_beyond_rates_that_are_near():
    near = (0.0010010, 0.0010014)
    assert extended(near, "high") == (*near, 0.0010018)
    assert extended(near, "low") == (0.0010006, *near)
    for side, edge in (("low", 0), ("high", -1)):
        rates = extended(extended((0.0010044, 0.0010045), side), side)
        assert rates == tuple(sorted(set(rates)))
        assert rates[edge] == pytest.approx((0.0010042, 0.0010047)[edge], abs=2e-8)


def test_names_of_rates_keep_every_digit_and_fit_in_a_folder_name():
    assert rate_name(0.032) == "3.2e-2"
    assert rate_name(3e-3) == "3e-3"
    assert rate_name(0.00333) == "3.33e-3"
    assert rate_name(1.0) == "1e0"
    assert rate_name(20.0) == "2e1"
    assert rate_name(0.0010001) == "1.0001e-3"


@pytest.mark.parametrize(
    ("word", "state", "mean"),
    [
        ("2.5", "learned", 2.5),
        ("2.5 3.0", "learned", 2.75),
        ("2.5 p", "failed", None),
        ("n 2.5 2.5", "failed", None),
        ("d", "failed", None),
        ("2.5 u", "undecided", None),
        ("u p", "failed", None),
    ],
)
def test_a_cell_learned_only_when_every_seed_did(word, state, mean):
    assert state_of_cell(cell(word)) == state
    assert mean_loss(cell(word)) == mean


def test_the_best_rate_is_the_lowest_mean_of_those_that_never_failed():
    best = best_rate(cells(r1="2.75 2.75", r2="2.5 2.625", r4="2.25 p", r8="2.6 2.6"))
    assert (best.rate, best.loss, best.n_seeds, best.edges) == (0.002, 2.5625, 2, ())
    assert str(best) == "2e-3"


def test_of_equal_rates_the_lowest_is_best():
    assert best_rate(cells(r8="2.5", r2="2.5", r4="2.5", r1="3")).rate == 0.002


@pytest.mark.parametrize(
    ("grid", "edges"),
    [
        ({"r1": "2.5", "r2": "2.6", "r4": "p"}, ("low",)),
        ({"r1": "2.7", "r2": "2.6", "r4": "2.5"}, ("high",)),
        ({"r1": "2.7", "r2": "2.5", "r4": "d"}, ()),
        ({"r2": "2.5"}, ("low", "high")),
    ],
)
def test_a_best_rate_at_an_edge_of_the_grid_is_not_tuned(grid, edges):
    best = best_rate(cells(**grid))
    assert best.edges == edges == best_rate(dict(reversed(cells(**grid).items()))).edges
    assert ("edge" in str(best)) == bool(edges)


def test_where_nothing_learned_there_is_no_best_rate():
    assert best_rate(cells(r1="p", r2="d", r4="u")) is None
    assert best_rate({}) is None


@pytest.mark.parametrize(
    ("grid", "learned", "failed", "below", "text"),
    [
        ({"r1": "2.5", "r2": "2.6", "r8": "p"}, 2, 8, (), "4e-3 (2e-3..8e-3)"),
        ({"r1": "2.5", "r2": "2.6"}, 2, None, (), "above 2e-3"),
        ({"r1": "p", "r2": "d", "r4": "n"}, None, 1, (), "below 1e-3"),
        ({"r1": "u", "r2": "u"}, None, None, (), "undecided"),
        ({"r1": "2.5", "r2": "u", "r4": "p"}, 1, 4, (), "2e-3 (1e-3..4e-3)"),
        ({"r1": "2.5", "r2": "2.5 p", "r4": "p"}, 1, 2, (), "1.41e-3 (1e-3..2e-3)"),
        (
            {"r1": "p", "r2": "2.5", "r4": "d", "r8": "2.7", "r16": "p"},
            8,
            16,
            (1, 4),
            "1.13e-2 (8e-3..1.6e-2)",
        ),
        ({"r1": "p", "r2": "2.5"}, 2, None, (1,), "above 2e-3"),
    ],
)
def test_the_critical_rate_is_a_bracket_that_says_when_it_is_open_or_not_monotone(
    grid, learned, failed, below, text
):
    critical = critical_rate(cells(**grid))
    thousandths = [
        None if rate is None else round(rate * 1000)
        for rate in (critical.learned, critical.failed, *critical.failed_below)
    ]
    assert thousandths == [learned, failed, *below]
    assert str(critical) == text


def test_the_critical_rate_is_the_geometric_mean_of_its_bracket():
    assert critical_rate(cells(r2="2.5", r8="p")).estimate == pytest.approx(4e-3, rel=1e-12)
    assert critical_rate(cells(r2="2.5")).estimate is None
    assert critical_rate(cells(r2="p")).estimate is None


def test_the_sensitivity_clips_failures_at_the_first_loss():
    one = {
        rate: outcomes[0] for rate, outcomes in cells(r1="2.5", r2="2.75", r4="n", r8="d").items()
    }
    mean = (2.5 + 2.75 + FIRST + FIRST) / 4
    assert sensitivity(one, [0.001, 0.002, 0.004, 0.008]) == pytest.approx(mean - 2.5)
    stuck = {rate: outcomes[0] for rate, outcomes in cells(r1="p", r2="p").items()}
    assert sensitivity(stuck, [0.001, 0.002]) == 0


@pytest.mark.parametrize("rates", [[0.001], [0.001, 0.002, 0.004], [0.001, 0.003]])
def test_the_sensitivity_belongs_to_its_grid(rates):
    one = {0.001: outcome(), 0.002: outcome()}
    with pytest.raises(ValueError, match="every rate of the grid"):
        sensitivity(one, rates)


def test_steps_to_a_loss_are_counted_on_the_smoothed_curve():
    curve = [(0, 4.0), (10, 3.0), (20, 2.0), (30, 2.0), (40, 2.0)]  # 4, 3.5, 2.75, 2.375, 2.1875
    assert steps_to(curve, 2.5) == 30
    assert steps_to(curve, 2.1) is None
    assert steps_to(curve, 4.5) == 0
    assert steps_to([], 2.5) is None
    assert steps_to([(0, 4.0), (5, math.nan), (10, 2.0)], 2.5) is None


def replay(losses: dict[float, str], seeds=(7, 8, 9)) -> dict[float, list[int]]:
    """Train as ``next_runs`` asks; the seeds that each rate got."""
    done: dict[float, list[Outcome]] = {rate: [] for rate in losses}
    for _ in range(50):
        runs = next_runs(done, list(losses), seeds)
        if not runs:
            return {rate: [o.seed for o in outcomes] for rate, outcomes in done.items()}
        assert len(set(runs)) == len(runs)
        for rate, seed in runs:
            at = seeds.index(seed)
            one = cell(losses[rate])[at]
            done[rate].append(outcome(one.state, one.final, seed))
    raise AssertionError("halving does not end")


def test_halving_gives_more_seeds_to_the_best_rates_and_to_the_failure_edge():
    seeds = replay(
        {
            0.001: "2.9 2.9 2.9", 0.002: "2.8 2.8 2.8", 0.004: "2.7 2.7 2.7", 0.008: "2.6 2.6 2.6",
            0.016: "2.75 2.75 2.75", 0.032: "2.95 2.95 2.95", 0.064: "3.0 3.0 3.0", 0.128: "p p p",
        }
    )  # fmt: skip
    assert seeds == {
        0.001: [7], 0.002: [7, 8], 0.004: [7, 8, 9], 0.008: [7, 8, 9],
        0.016: [7, 8, 9], 0.032: [7], 0.064: [7, 8, 9], 0.128: [7, 8, 9],
    }  # fmt: skip


def test_the_better_half_of_an_odd_number_of_rates_is_the_larger_half():
    one = dict(
        zip((1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), ("2.5", "2.6", "2.7", "2.8", "2.9"), strict=True)
    )
    runs = next_runs({rate: cell(word) for rate, word in one.items()}, list(one), (0, 1, 2))
    assert runs == [(0.001, 1), (0.002, 1), (0.004, 1)]


def test_halving_ends_with_all_seeds_at_the_best_rate_though_it_moves():
    losses = {
        0.001: "2.7 2.7 2.7", 0.002: "2.6 2.9 3.0", 0.004: "2.65 2.7 p", 0.008: "2.8 2.8 2.8",
        0.016: "p p p",
    }  # fmt: skip
    seeds = replay(losses)
    assert seeds[0.001] == seeds[0.002] == [7, 8, 9]
    trained = {rate: cell(losses[rate])[: len(found)] for rate, found in seeds.items()}
    assert best_rate(trained).rate == 0.001


def test_where_everything_fails_only_the_lowest_failure_is_repeated():
    assert replay({0.001: "p p p", 0.002: "d d d", 0.004: "n n n"}) == {
        0.001: [7, 8, 9], 0.002: [7], 0.004: [7],
    }  # fmt: skip


def test_a_run_too_short_to_be_judged_counts_neither_as_failed_nor_as_best():
    assert replay({0.001: "u u u", 0.002: "2.5 2.5 2.5"}) == {
        0.001: [7, 8, 9], 0.002: [7, 8, 9],
    }  # fmt: skip
    assert replay({0.001: "u u u", 0.002: "u u u"}) == {0.001: [7], 0.002: [7]}


def test_one_seed_trains_the_grid_once_and_two_go_around_the_best():
    losses = {0.001: "2.9 2.9", 0.002: "2.7 2.7", 0.004: "2.8 2.8", 0.008: "2.85 2.85"}
    assert replay(losses, seeds=(7,)) == {rate: [7] for rate in losses}
    assert replay(losses, seeds=(7, 8)) == {
        0.001: [7, 8], 0.002: [7, 8], 0.004: [7, 8], 0.008: [7, 8],
    }  # fmt: skip


ARMS = (Arm("post", {"norm_position": "post"}), Arm("pre", {}))


def rows(*words: str, arms=ARMS):
    command = parse_compare("sweep", list(words))
    return sweep.rows_of(command, run_config(command), arms)


def test_a_row_is_an_arm_with_its_init_warm_up_and_depth():
    made = rows(
        "--inits", "xavier", "gpt2", "xavier", "--warmups", "100", "0", "--depths", "6", "2"
    )
    assert [row.name for row in made[:5]] == [
        "post-xavier-w0-L2", "post-xavier-w100-L2", "post-gpt2-w0-L2", "post-gpt2-w100-L2",
        "pre-xavier-w0-L2",
    ]  # fmt: skip
    assert [len(made), made[-1].name] == [16, "pre-gpt2-w100-L6"]
    model, training = made[1].config.model, made[1].config.training
    assert (model.norm_position, model.init, model.n_layers) == ("post", "xavier", 2)
    assert training.warmup_steps == 100


def test_a_trial_is_named_after_all_that_is_varied():
    trial = rows("--depths", "6", "--inits", "xavier", "--warmups", "0")[0].trial(3e-3, 0)
    assert trial.name == "post-xavier-w0-lr3e-3-L6-s0"
    assert (trial.config.training.learning_rate, trial.seed) == (3e-3, 0)


def test_quick_is_smaller_where_nothing_else_is_asked_for():
    assert {row.name.split("-", 1)[1] for row in rows("--quick")} == {
        "xavier-w0-L2", "xavier-w100-L2", "xavier-w0-L6", "xavier-w100-L6",
    }  # fmt: skip
    assert {row.depth for row in rows("--quick", "--depths", "3")} == {3}


@pytest.mark.parametrize(
    ("words", "arm", "needle"),
    [
        (["--steps", "150", "--warmups", "0", "150"], {}, "warm-up of 150 steps does not end"),
        (["--warmups", "-1"], {}, "from 0 to 199"),
        ([], {"init": "gpt2"}, "sets init, which is varied .* --inits"),
        ([], {"n_layers": 3}, "sets n_layers"),
        ([], {"batch_size": 3}, "batch_size"),
        (["--depths", "0"], {}, "n_layers"),
        (["--inits", "xavie"], {}, "xavie"),
        (["--n_layers", "3"], {}, "sweep varies it; use --depths"),
        (["--learning-rate=3"], {}, "use --rates"),
    ],
)
def test_what_cannot_be_swept_is_refused(words, arm, needle):
    with pytest.raises(UsageError, match=needle):
        rows(*words, arms=(Arm("pre", {}), Arm("other", arm)))


def test_rates_are_sorted_and_checked():
    base = run_config(parse_compare("sweep", []))
    assert sweep.checked_rates((4e-3, 1e-3, 0.004), base) == (0.001, 0.004)
    with pytest.raises(UsageError, match="not above 0"):
        sweep.checked_rates((1e-3, 0.0), base)


def trainer(monkeypatch, final, hashes=lambda trial: {}):
    """Instead of training: the loss that ``final(trial)`` says, None for a plateau."""
    trained = []

    def run_trials(trials, corpus, out, workers):
        for trial in reversed(trials):  # in no particular order
            trained.append(trial)
            loss = final(trial)
            made = outcome("plateau", 3.34, trial.seed, trial.arm)
            if loss is not None:
                made = outcome("learned", loss, trial.seed, trial.arm)
            yield dataclasses.replace(made, hashes=hashes(trial))

    monkeypatch.setattr(sweep, "run_trials", run_trials)
    monkeypatch.setattr(sweep, "announce", lambda *_: None)
    return trained


RATES = (0.001, 0.002, 0.004, 0.008)


def loss_at(trial) -> float | None:
    """Post-LN is best at 2e-3 and fails from 8e-3; Pre-LN is best at 4e-3 and never fails."""
    training, post = trial.config.training, trial.config.model.norm_position == "post"
    if post and training.learning_rate > 5e-3:
        return None
    return 2.5 + abs(math.log2(training.learning_rate / (2e-3 if post else 4e-3))) / 4


def test_a_sweep_fills_every_row_and_tables_it(monkeypatch, tmp_path):
    trained = trainer(monkeypatch, loss_at)
    made = rows("--depths", "6", "--inits", "xavier", "--warmups", "0")
    sweep.train(made, RATES, (5, 6, 7), None, tmp_path, 1)
    post, pre = made
    seeds = {rate: [o.seed for o in outcomes] for rate, outcomes in sorted(post.cells.items())}
    assert seeds == {0.001: [5, 6, 7], 0.002: [5, 6, 7], 0.004: [5, 6, 7], 0.008: [5, 6, 7]}
    assert sorted(o.seed for o in pre.cells[0.001]) == [5]
    assert len(trained) == 22
    assert [re.split(r"  +", line) for line in table(made, RATES, 5)] == [
        ["arm", "best rate", "loss (n)", "critical rate", "sens.", "L/P/D/U"],
        ["post-xavier-w0-L6", "2e-3", "2.500 (3)", "5.66e-3 (4e-3..8e-3)", "0.335", "3/1/0/0"],
        ["pre-xavier-w0-L6", "4e-3", "2.500 (3)", "above 8e-3", "0.250", "4/0/0/0"],
    ]  # fmt: skip


def test_a_row_that_learns_nowhere_has_no_best_rate(monkeypatch, tmp_path):
    trainer(monkeypatch, lambda trial: None)
    made = rows("--depths", "6", "--inits", "xavier", "--warmups", "0")[:1]
    sweep.train(made, RATES, (5, 6, 7), None, tmp_path, 1)
    assert re.split(r"  +", table(made, RATES, 5)[1]) == [
        "post-xavier-w0-L6", "none", "-", "below 1e-3", "0.000", "0/4/0/0",
    ]  # fmt: skip


def test_the_table_fits_in_a_line_and_names_failures_below_the_critical_rate():
    (row,) = rows("--depths", "12", "--inits", "xavier", "--warmups", "100", arms=ARMS[:1])
    ends = dict(zip((0.001, 0.004, 0.008, 0.016), ("p", "2.5", "2.25 2.25", "d"), strict=True))
    row.cells.update({rate: cell(word) for rate, word in ends.items()})
    head, line, note = table([row], list(ends), 0, {row.name: "1,000 (2/3)"})
    assert max(len(head), len(line)) <= 100
    assert "1.13e-2 (8e-3..1.6e-2)" in line
    assert line.endswith("2/1/1/0")
    assert note == "post-xavier-w100-L12 failed below its critical rate too, at 1e-3"


def test_a_sweep_warns_once_of_tensors_of_other_sizes(monkeypatch, tmp_path, capsys):
    trainer(monkeypatch, loss_at, lambda t: {"weights/a": f"{len(t.arm.split('-')[0])}x7 0"})
    made = rows("--depths", "6", "--inits", "xavier", "--warmups", "0")
    sweep.train(made, RATES[:2], (5, 6), None, tmp_path, 1)
    warned = capsys.readouterr().err.splitlines()
    assert any("have tensors of other sizes (weights/a)" in line for line in warned)
    assert len(warned) == len(set(warned))


@pytest.mark.parametrize("what", ["batches", "evaluation", "budget", "weights/head.weight"])
def test_a_sweep_refuses_arms_that_were_not_treated_alike(monkeypatch, tmp_path, what):
    def hashes(trial):
        return {what: f"12x65 {trial.arm if trial.config.training.warmup_steps else 0}"}

    trainer(monkeypatch, loss_at, hashes)
    made = rows("--depths", "6", "--inits", "xavier", "--warmups", "0", "70")
    with pytest.raises(UsageError, match=what):
        sweep.train(made, RATES, (5, 6), None, tmp_path, 1)


def test_depths_need_not_share_their_weights(monkeypatch, tmp_path):
    trainer(monkeypatch, loss_at, lambda t: {"weights/a": f"8x7 {t.config.model.n_layers}"})
    made = rows("--depths", "6", "4", "--inits", "xavier", "--warmups", "0")
    sweep.train(made, RATES, (5,), None, tmp_path, 1)
    assert all(len(row.cells) == 4 for row in made)


@pytest.mark.slow
def test_a_sweep_from_the_command_line_comes_out_the_same_from_its_folder(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells on the sea shore\n" * 90, encoding="utf-8")
    out = tmp_path / "out"
    words = [
        str(text), "--out", str(out), "--workers", "1", "--steps", "30", "--d_model", "12",
        "--n_heads", "3", "--context_length", "9", "--batch_size", "5", "--rates", "1e-2", "4e-2",
        "--depths", "1", "--inits", "xavier", "--warmups", "0", "7", "--seeds", "2",
    ]  # fmt: skip
    assert sweep.main(parse_compare("sweep", words)) == 0
    first = capsys.readouterr()
    assert "4 arms over 2 learning rates: 8 runs with the first seed" in first.err
    assert {f"{p}-xavier-w{w}-L1" for p in ("post", "pre") for w in (0, 7)} == {
        line.split()[0] for line in first.out.splitlines()[1:5]
    }
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "post-xavier-w7-L1" in report
    assert report.count("<svg") == 2
    assert "python compare.py sweep" in report
    assert len(list((out / "figures").glob("*.svg"))) == 2
    assert list((out / "_aggregate").glob("events.*"))
    written = {path: path.stat().st_mtime_ns for path in out.glob("*/outcome.json")}
    assert sweep.main(parse_compare("sweep", words)) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "are there already" in again.err
    assert written == {path: path.stat().st_mtime_ns for path in out.glob("*/outcome.json")}
    assert (out / "report.html").read_text(encoding="utf-8") == report
