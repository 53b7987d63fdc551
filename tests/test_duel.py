import dataclasses
import math

import pytest

from gpt.commandline import run_config
from gpt.errors import UsageError
from gpt.lab import duel, run
from gpt.lab.commandline import parse_compare
from gpt.lab.duel_report import account
from gpt.lab.outcomes import Outcome
from gpt.lab.tuning import Setting, sides_to_extend, tune


def outcome(state="learned", final: float | None = 2.5, seed=0, arm="post") -> Outcome:
    return Outcome(
        arm=arm, seed=seed, state=state, first=4.25, final=final, best=final, steps=200,
        characters=102_400, n_parameters=300, seconds=5.0,
    )  # fmt: skip


def cells(table: dict[tuple[float, int], str]) -> dict[Setting, list[Outcome]]:
    """(rate, warm-up) -> a loss a seed that learned; p plateau, d not finite, u undecided."""
    ends = {"p": ("plateau", 3.34), "d": ("diverged", None), "u": ("undecided", 3.34)}
    return {
        Setting(*key): [
            outcome(*(ends[w] if w in ends else ("learned", float(w))), seed)
            for seed, w in enumerate(words.split())
        ]
        for key, words in table.items()
    }


def test_the_winner_has_the_lowest_mean_over_the_tuning_seeds():
    tuned = tune(
        cells({(1e-3, 0): "2.5 2.75", (2e-3, 0): "2.25 2.75", (4e-3, 0): "2.75 3.0",
               (1e-3, 50): "2.75 3.0", (2e-3, 50): "2.5 2.625", (4e-3, 50): "2.5 2.875"})
    )  # fmt: skip
    assert (tuned.setting, tuned.loss, tuned.edges) == ((2e-3, 0), 2.5, ())


@pytest.mark.parametrize("failure", ["p", "d", "u"])
def test_a_setting_in_which_one_seed_failed_cannot_win(failure):
    tuned = tune(cells({(1e-3, 0): f"2.0 2.0 {failure}", (2e-3, 0): "2.5 2.5 2.5"}))
    assert tuned.setting == (2e-3, 0)


def test_of_equal_settings_the_shorter_warm_up_wins_and_then_the_lower_rate():
    table = {(4e-3, 0): "2.5", (2e-3, 0): "2.5", (1e-3, 50): "2.5", (8e-3, 50): "2.5"}
    assert tune(cells(table)).setting == (2e-3, 0)
    assert tune(cells(dict(reversed(table.items())))).setting == (2e-3, 0)


def test_where_every_setting_failed_there_is_no_winner():
    assert tune(cells({(1e-3, 0): "p p", (2e-3, 50): "2.5 d"})) is None
    assert tune({}) is None


def test_the_edge_is_that_of_the_whole_grid_though_its_neighbour_failed():
    rows = {(1e-3, 0): "p", (2e-3, 0): "2.5", (4e-3, 0): "p", (1e-3, 9): "p", (4e-3, 9): "p"}
    assert tune(cells(rows)).edges == ()
    assert tune(cells(rows | {(4e-3, 9): "2.25"})).edges == ("high",)
    assert tune(cells(rows | {(1e-3, 9): "2.25"})).edges == ("low",)


INSIDE = {(1e-3, 0): "2.75", (2e-3, 0): "2.5", (4e-3, 0): "2.75"}
LOW = {(1e-3, 0): "2.5", (2e-3, 0): "2.75", (4e-3, 0): "2.75"}
HIGH = {(1e-3, 0): "2.75", (2e-3, 0): "2.75", (4e-3, 0): "2.5"}
FAILED = dict.fromkeys(INSIDE, "p")
OPEN = {(1e-3, 0): "u", (2e-3, 0): "p", (4e-3, 0): "p"}


@pytest.mark.parametrize(
    ("arms", "added", "sides"),
    [
        ([INSIDE, INSIDE], {}, []),
        ([INSIDE, LOW], {}, ["low"]),
        ([HIGH, INSIDE], {"high": 1}, ["high"]),
        ([HIGH, LOW], {}, ["low", "high"]),
        ([HIGH, LOW], {"high": 2, "low": 1}, ["low"]),
        ([LOW, LOW], {"low": 2}, []),
        ([FAILED, INSIDE], {}, ["low"]),
        ([FAILED, HIGH], {"low": 2}, ["high"]),
        ([OPEN, INSIDE], {}, []),
    ],
)
def test_the_grid_grows_for_both_arms_where_one_is_at_its_edge(arms, added, sides):
    assert sides_to_extend([cells(arm) for arm in arms], added) == sides


def planned(*words: str):
    """The tuning and its first rates, as the command line says."""
    command = parse_compare("duel", list(words))
    return duel._planned(command, run_config(command))


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

    for module in (duel, run):
        monkeypatch.setattr(module, "run_trials", run_trials)
    monkeypatch.setattr(duel, "announce", lambda *_: None)
    return trained


def post(trial) -> bool:
    return trial.config.model.norm_position == "post"


def distance(trial, best: float) -> float:
    """Octaves between the trial's rate and the best one."""
    return abs(math.log2(trial.config.training.learning_rate / best))


def rates(tuning, arm: str) -> list[float]:
    return sorted({setting.learning_rate for setting in tuning.cells[arm]})


def test_each_arm_is_tuned_alone_over_the_same_settings_and_seeds(monkeypatch, tmp_path):
    trained = trainer(
        monkeypatch,
        lambda t: 2.5 + distance(t, 2e-3 if post(t) else 4e-3) + 0.01 * (
            post(t) == (t.config.training.warmup_steps == 0)
        ),
    )  # fmt: skip
    tuning, first = planned("post", "pre", "--rates", "1e-3", "2e-3", "4e-3", "8e-3", "--seed", "7")
    duel.tune_both(tuning, first, None, tmp_path, 1)
    assert [tune(tuning.cells[arm]).setting for arm in ("post", "pre")] == [(2e-3, 100), (4e-3, 0)]
    assert len(trained) == 2 * 4 * 2 * 3
    assert [outcome.seed for outcome in tuning.cells["pre"][2e-3, 100]] == [7, 8, 9]
    told = "\n".join(account(tuning))
    assert "8 settings x 3 seeds (7-9) = 24 runs of 200 steps, 2,457,600 characters" in told
    assert "best: learning rate 2e-3, warm-up 100 steps (2.5000)" in told
    assert "NOT TUNED" not in told


def test_the_grid_grows_for_both_arms_by_two_rates_and_then_says_not_tuned(monkeypatch, tmp_path):
    trained = trainer(monkeypatch, lambda t: 2.5 + distance(t, 2e-3 if post(t) else 1.0))
    tuning, first = planned("post", "pre", "--rates", "1e-3", "2e-3", "4e-3", "--warmups", "0")
    duel.tune_both(tuning, first, None, tmp_path, 1)
    assert rates(tuning, "post") == rates(tuning, "pre") == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    assert len(trained) == 2 * 5 * 3
    told = "\n".join(account(tuning))
    assert "grew for both at its edges (2 high)" in told
    assert (
        "best: learning rate 1.6e-2, warm-up 0 steps (8.4658); NOT TUNED: it lies at the upper"
        in told
    )
    assert told.count("NOT TUNED") == 1


def test_a_grid_that_grew_past_the_best_rate_is_tuned(monkeypatch, tmp_path):
    trainer(monkeypatch, lambda t: 2.5 + distance(t, 2e-3 if post(t) else 5e-4))
    tuning, first = planned("post", "pre", "--rates", "1e-3", "2e-3", "4e-3", "--warmups", "0")
    duel.tune_both(tuning, first, None, tmp_path, 1)
    assert rates(tuning, "post") == rates(tuning, "pre") == [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
    assert tune(tuning.cells["pre"]).edges == ()


def test_an_arm_that_never_learns_ends_the_duel_without_a_verdict(monkeypatch, tmp_path):
    trained = trainer(monkeypatch, lambda t: None if post(t) else 2.5 + distance(t, 2e-3))
    command = parse_compare(
        "duel", ["post", "pre", "--rates", "1e-3", "2e-3", "4e-3", "--warmups", "0"]
    )
    base = run_config(command)
    tuning, first = duel._planned(command, base)
    duel.tune_both(tuning, first, None, tmp_path, 1)
    assert len(trained) == 2 * 5 * 3
    assert duel._final(command, base, tuning) is None
    told = "\n".join(account(tuning))
    assert "not tuned: in none of the 5 settings did every seed learn" in told
    assert "3 of 3 failed" in told


def test_the_winners_meet_on_fresh_seeds_each_in_its_own_setting(monkeypatch, tmp_path):
    trainer(monkeypatch, lambda t: 2.5 + distance(t, 2e-3 if post(t) else 4e-3))
    command = parse_compare("duel", ["post", "pre", "--seed", "7", "--warmups", "30"])
    base = run_config(command)
    tuning, first = duel._planned(command, base)
    duel.tune_both(tuning, first, None, tmp_path, 1)
    final = duel._final(command, base, tuning)
    assert [trial.name for trial in final.trials[:3]] == [
        "post-lr2e-3-w30-s17", "pre-lr4e-3-w30-s17", "post-lr2e-3-w30-s18",
    ]  # fmt: skip
    assert {trial.seed for trial in final.trials} == {17, 18, 19, 20, 21}
    assert {trial.config.training.warmup_steps for trial in final.trials} == {30}


@pytest.mark.parametrize("what", ["batches", "evaluation", "budget", "weights/head.weight"])
def test_a_duel_refuses_arms_that_were_not_treated_alike(monkeypatch, tmp_path, what):
    trainer(monkeypatch, lambda t: 2.5, lambda t: {what: f"12x65 {post(t)}"})
    tuning, first = planned("post", "pre")
    with pytest.raises(UsageError, match=what):
        duel.tune_both(tuning, first, None, tmp_path, 1)


def test_a_duel_refuses_weights_of_other_shapes(monkeypatch, tmp_path):
    trainer(monkeypatch, lambda t: 2.5, lambda t: {"weights/W": f"{8 + post(t)}x7 {post(t)}"})
    tuning, first = planned("post", "pre")
    with pytest.raises(UsageError, match="weights/W"):
        duel.tune_both(tuning, first, None, tmp_path, 1)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["post"], "names one arm"),
        (["post", "pre", "--tuning_seeds", "11"], "at most 10"),
        (["post", "pre", "--warmups", "200"], "warm-up of 200 steps"),
        (["post", "pre", "--rates", "0"], "not above 0"),
        (["post", "fast.toml"], "sets learning_rate, which is varied .* --rates"),
        (["post", "pre", "--warmup_steps", "3"], "use --warmups"),
        (["post", "post"], "two arms"),
    ],
)
def test_what_is_no_duel_is_refused(words, needle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fast.toml").write_text("learning_rate = 0.1", encoding="utf-8")
    with pytest.raises(UsageError, match=needle):
        planned(*words)


@pytest.mark.slow
def test_a_duel_from_the_command_line_comes_out_the_same_from_its_folder(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells on the sea shore\n" * 90, encoding="utf-8")
    out = tmp_path / "out"
    words = [
        "pre", "post", str(text), "--out", str(out), "--workers", "1", "--steps", "30",
        "--d_model", "12", "--n_heads", "3", "--n_layers", "2", "--context_length", "9",
        "--batch_size", "5", "--rates", "1e-2", "4e-2", "--warmups", "0", "--tuning_seeds", "1",
        "--seeds", "2",
    ]  # fmt: skip
    assert duel.main(parse_compare("duel", words)) == 0
    first = capsys.readouterr()
    assert "verdict (margin 0.02 nats)" in first.out
    assert "seeds 1347-1348" in first.out
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "verdict" in report
    assert report.count("<svg") == 2
    assert "python compare.py duel" in report
    assert len(list((out / "figures").glob("*.svg"))) == 2
    assert list((out / "_aggregate").glob("events.*"))
    written = {path: path.stat().st_mtime_ns for path in out.glob("*/outcome.json")}
    assert duel.main(parse_compare("duel", words)) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert written == {path: path.stat().st_mtime_ns for path in out.glob("*/outcome.json")}
    assert (out / "report.html").read_text(encoding="utf-8") == report
