import dataclasses
import json
import math
from pathlib import Path

import pytest

from gpt.config import RunConfig
from gpt.config_files import read_toml
from gpt.corpus import read_text
from gpt.errors import UsageError
from gpt.lab import checks_at_start, checks_of_runs, light, verify
from gpt.lab.checks import Bench, Check
from gpt.lab.checks_of_runs import RATES, RATES_BY_DEPTH
from gpt.lab.commandline import NEEDS_WARMUP, parse_compare
from gpt.lab.outcomes import Outcome
from gpt.lab.trials import Trial
from gpt.training.curves import line_of

EVERY = {check.name: check for check in (*checks_at_start.CHECKS, *checks_of_runs.CHECKS)}


@pytest.fixture
def bench(tmp_path) -> Bench:
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells on the sea shore\n" * 400, encoding="utf-8")
    settings = read_toml([NEEDS_WARMUP]) | {"text": str(text), "seed": 5}
    base = RunConfig().with_changes(settings)
    return Bench(base, read_text(base), tmp_path)


def outcome(trial: Trial, final: float | None) -> Outcome:
    state = "diverged" if final is None else "plateau" if final > 3.3 else "learned"
    return Outcome(
        arm=trial.arm, seed=trial.seed, state=state, first=4.2, final=final, best=final,
        steps=200, characters=1, n_parameters=1, seconds=1.0,
    )  # fmt: skip


def ended(bench: Bench, name: str, losses) -> Bench:
    """All trials of a check, ended at ``losses(trial)``."""
    trials = EVERY[name].trials(bench.base)
    return dataclasses.replace(bench, outcomes={t.name: outcome(t, losses(t)) for t in trials})


def passes(bench: Bench, name: str, losses) -> bool:
    return EVERY[name].judge(ended(bench, name, losses))[0]


def test_there_is_a_check_for_every_name_and_three_controls():
    assert {*EVERY} == {*verify.NAMES}
    assert [name for name, check in EVERY.items() if not check.source] == ["R12", "R13", "R14"]


def test_post_needs_warm_up_and_pre_does_not(bench):
    def as_published(trial: Trial) -> float:
        return 3.34 if trial.arm == "post-w0" else 2.5

    assert passes(bench, "R6", as_published)
    assert passes(bench, "R6", lambda t: 2.5 if t.seed == 7 else as_published(t))
    assert not passes(bench, "R6", lambda t: 2.5 if t.seed > 7 else as_published(t))
    late = {"post-w100", "pre-w0", "pre-w100"}
    for arm in late:
        slow = {arm: 2.71}
        assert not passes(bench, "R6", lambda t, slow=slow: slow.get(t.arm, as_published(t)))
        failed = {arm: None}
        assert not passes(bench, "R6", lambda t, f=failed: f.get(t.arm, as_published(t)))


def curves(folder: Path, first: float, last: float, branches: float, norm: float) -> None:
    folder.mkdir()
    start = {"probe/grad_W_out_00": 1.0, "probe/grad_W_out_05": 1.0, "probe/branch_over_skip": 0.5}
    later = {"probe/grad_W_out_00": 1 / first, "probe/grad_W_out_05": 1 / last}
    lines = [line_of(0, start), line_of(1, {"grad_norm/total": 4.0})]
    lines.append(line_of(20, later | {"probe/branch_over_skip": branches}))
    lines.append(line_of(90, {"grad_norm/total": norm, "loss/val": 3.34}))
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("first", "last", "branches", "norm", "passed"),
    [(500, 5, 1.9, 6, True), (90, 5, 1.9, 6, False), (500, 25, 1.9, 6, False),
     (500, 5, 1.4, 6, False), (500, 5, 1.9, 9, False)],
)  # fmt: skip
def test_vanishing_is_told_from_exploding(bench, first, last, branches, norm, passed):
    bench = ended(bench, "R7", lambda t: 3.34 if t.arm == "post-w0" else 2.5)
    for one in bench.of("post-w0"):
        curves(bench.out / one.name, first, last, branches, norm)
    assert EVERY["R7"].judge(bench)[0] is passed


def test_a_run_too_short_to_have_vanished_is_no_pass(bench):
    bench = ended(bench, "R7", lambda t: 3.34)
    short = {n: dataclasses.replace(o, steps=19) for n, o in bench.outcomes.items()}
    bench = dataclasses.replace(bench, outcomes=short)
    assert EVERY["R7"].judge(bench) == (False, "post-w0-s5 ended at step 19")


def fails_from(limits: dict) -> object:
    """Losses of runs that fail from their arm's limit on."""

    def losses(trial: Trial) -> float:
        arm = trial.arm.split("-L")[0]
        depth = trial.config.model.n_layers
        limit = limits.get(arm, limits.get(depth, math.inf))
        return 3.34 if trial.config.training.learning_rate >= limit else 2.5

    return losses


def test_critical_rates_are_compared_by_their_brackets(bench):
    published = {"post-w0": 3e-3, "post-w100": 1e-2, "pre-w0": 1.0}
    assert passes(bench, "R8", fails_from(published))
    assert not passes(bench, "R8", fails_from(published | {"post-w100": 4e-3}))
    assert not passes(bench, "R8", fails_from(published | {"pre-w0": 1e-2}))
    never_failed, never_learned = {"post-w0": 1.0}, {"post-w100": 1e-9}
    assert not passes(bench, "R8", fails_from(published | never_failed))
    assert not passes(bench, "R8", fails_from(published | never_learned | {"post-w0": 2e-3}))
    _, seen = EVERY["R8"].judge(ended(bench, "R8", fails_from(published)))
    assert "post-w0 0.002 to 0.003" in seen
    assert f"pre-w0 above {max(RATES['pre-w0']):g}" in seen


def test_the_critical_rate_has_to_fall_with_every_depth(bench):
    published = {2: 1.0, 4: 6e-3, 6: 3e-3, 12: 1e-3}
    assert passes(bench, "R9", fails_from(published))
    for depth in (4, 6, 12):
        assert not passes(bench, "R9", fails_from(published | {depth: 1.0}))
    lowest = min(RATES_BY_DEPTH[12])
    assert passes(bench, "R9", fails_from(published | {12: lowest}))


@pytest.mark.parametrize("name", ["R10", "R12"])
def test_every_seed_has_to_learn(bench, name):
    assert passes(bench, name, lambda t: 2.4)
    assert not passes(bench, name, lambda t: 2.61 if t.seed == 6 else 2.4)
    assert not passes(bench, name, lambda t: None if t.seed == 6 else 2.4)


def test_controls_fail_when_clipping_rescues_or_shallow_models_fail(bench):
    assert passes(bench, "R13", lambda t: 3.34)
    assert not passes(bench, "R13", lambda t: 2.5 if t.config.training.grad_clip == 0.1 else 3.34)
    assert passes(bench, "R14", lambda t: 2.5)
    assert not passes(bench, "R14", lambda t: 3.34 if t.config.model.n_layers == 4 else 2.5)


def test_the_same_trial_is_trained_once(bench):
    groups = [check.trials(bench.base) for check in EVERY.values()]
    trials = verify.all_trials(groups)
    assert len(trials) < sum(map(len, groups))
    assert len({trial.name for trial in trials}) == len(trials)
    other = dataclasses.replace(trials[0], probe_steps=(3,))
    with pytest.raises(AssertionError):
        verify.all_trials([trials, [other]])


def test_checks_are_named_in_any_case_and_r5_is_both():
    assert verify.chosen(()) == list(verify.NAMES)
    assert verify.chosen(("r4", "R5")) == ["R4", "R5a", "R5b"]
    with pytest.raises(UsageError, match="R55"):
        verify.chosen(("R55",))


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 7)])
def test_the_exit_code_says_whether_all_passed(bench, tmp_path, monkeypatch, capfd, passed, code):
    checks = [
        Check("R1", "good", "somebody", "nothing", lambda _: (True, "this")),
        Check("R12", "other", "", "something", lambda _: (passed, "that")),
    ]
    monkeypatch.setattr(checks_at_start, "CHECKS", checks)
    monkeypatch.setattr(checks_of_runs, "CHECKS", [])
    out = tmp_path / "out"
    words = [bench.base.text.text, "--out", str(out)]
    assert verify.main(parse_compare("verify", words)) == code
    said = capfd.readouterr().out
    assert "PASS  R1   good (somebody)" in said
    assert ("FAIL  R12  other (negative control)" in said) is not passed
    assert f"{1 + passed} of 2 checks PASS" in said
    assert "not reproducible at this size" in said
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "negative control" in page
    assert "python compare.py verify" in page


def tiny_trials(base: RunConfig) -> list[Trial]:
    small = {"steps": 3, "d_model": 12, "n_heads": 3, "n_layers": 2, "context_length": 9}
    return [
        Trial(arm, base.with_changes(small | {"norm_position": placement}).resolved())
        for arm, placement in (("tiny", "pre"), ("other", "post"))
    ]


def test_trained_checks_get_the_outcomes_of_their_trials(bench, tmp_path, monkeypatch, capfd):
    seen: list[str] = []

    def judge(bench: Bench) -> tuple[bool, str]:
        (one,) = bench.of("tiny")
        seen.append(json.dumps(bench.curves(one)["loss/val"]))
        return True, one.state

    monkeypatch.setattr(checks_at_start, "CHECKS", [])
    monkeypatch.setattr(checks_of_runs, "CHECKS", [Check("R6", "", "", "", judge, tiny_trials)])
    words = [bench.base.text.text, "--out", str(tmp_path / "out"), "--workers", "1"]
    assert verify.main(parse_compare("verify", words)) == 0
    assert seen[0].startswith("[[0, ")
    assert not (tmp_path / "out" / "figures").exists()  # no run of these looks for a failure
    assert "1 of 1 checks PASS" in capfd.readouterr().out


def test_the_map_is_of_the_runs_that_look_for_failures(bench):
    trials = [t for name in ("R6", "R8", "R14") for t in EVERY[name].trials(bench.base)]
    slow = {trial.name: outcome(trial, 3.34 if "L6" in trial.arm else 2.5) for trial in trials}
    found = verify.states_of(trials, dataclasses.replace(bench, outcomes=slow))
    assert {arm: len(cells) for arm, cells in found.items()} == {
        "post-w0": 5, "post-w100": 3, "pre-w0": 3
    }  # fmt: skip
    assert found["post-w0"][3e-3, 6] == ["plateau"]
    assert found["post-w0"][3e-3, 4] == ["learned"]


def test_no_check_is_made_of_runs_that_were_treated_unlike(bench, tmp_path, monkeypatch, capfd):
    honest = light.hashes

    def tampered(config, *others):
        found = honest(config, *others)
        return found | ({"batches": "0"} if config.model.norm_position == "post" else {})

    monkeypatch.setattr(light, "hashes", tampered)
    monkeypatch.setattr(checks_at_start, "CHECKS", [])
    judge = Check("R6", "", "", "", lambda _: (True, ""), tiny_trials)
    monkeypatch.setattr(checks_of_runs, "CHECKS", [judge])
    words = [bench.base.text.text, "--out", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(UsageError, match="differ in batches"):
        verify.main(parse_compare("verify", words))
    assert "PASS" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["R1", "R2", "R3", "R5a", "R5b", "R11"])
def test_what_is_found_before_training_is_what_was_published(name):
    base = RunConfig().with_changes(read_toml([NEEDS_WARMUP]))
    bench = Bench(base, read_text(base), Path())
    passed, seen = EVERY[name].judge(bench)
    assert passed, seen
