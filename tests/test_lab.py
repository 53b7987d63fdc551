from pathlib import Path

import pytest

from gpt.config import RunConfig
from gpt.corpus import read_text
from gpt.errors import UsageError
from gpt.lab.arms import Arm, parse_arms
from gpt.lab.runs import Outcome, run_arms
from gpt.lab.table import table
from gpt.training.curves import read_metrics

SMALL = {
    "d_model": 12, "n_heads": 3, "n_layers": 2, "context_length": 9, "steps": 4,
    "batch_size": 5, "eval_every": 2, "sample_chars": 0,
}  # fmt: skip


@pytest.fixture
def base(tmp_path) -> RunConfig:
    path = tmp_path / "text.txt"
    path.write_text("she sells sea shells on the sea shore\n" * 30, encoding="utf-8")
    return RunConfig().with_changes(SMALL | {"text": str(path)})


def test_arms_are_placements_or_files_of_changes(base, tmp_path):
    (tmp_path / "wide.toml").write_text("d_model = 24", encoding="utf-8")
    arms = parse_arms(("post", str(tmp_path / "wide.toml")), base)
    assert arms == [Arm("post", {"norm_position": "post"}), Arm("wide", {"d_model": 24})]
    config = arms[1].config(base, seed=9)
    assert (config.model.d_model, config.training.seed, config.training.steps) == (24, 9, 4)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (("pre", "middle"), r"'middle' is neither a norm placement \(pre, post\)"),
        (("pre", "pre"), "two arms are called 'pre'"),
        (("text.toml",), "changes the text"),
        (("seed.toml",), "sets the seed"),
        (("broken.toml",), "not divisible"),
        (("absent.toml",), "absent.toml"),
    ],
)
def test_unusable_arms_are_refused_before_anything_runs(base, tmp_path, monkeypatch, words, needle):
    monkeypatch.chdir(tmp_path)
    Path("text.toml").write_text("val_fraction = 0.3", encoding="utf-8")
    Path("seed.toml").write_text("seed = 3", encoding="utf-8")
    Path("broken.toml").write_text("n_heads = 5", encoding="utf-8")
    with pytest.raises(UsageError, match=needle):
        parse_arms(words, base)


def test_every_arm_is_trained_with_every_seed_on_equal_terms(base, tmp_path):
    arms = parse_arms(("pre", "post"), base)
    outcomes = list(run_arms(arms, [5, 6], base, read_text(base), tmp_path))
    assert [(o.arm, o.seed) for o in outcomes] == [
        ("pre", 5), ("post", 5), ("pre", 6), ("post", 6),
    ]  # fmt: skip
    curves = {o: read_metrics(tmp_path / f"{o.arm}-s{o.seed}") for o in outcomes}
    for outcome, curve in curves.items():
        assert curve["loss/val"][-1] == (4, outcome.final)
        assert outcome.best == min(loss for _, loss in curve["loss/val"])
    assert len({o.final for o in outcomes}) == 4


def test_the_table_shows_every_seed_and_the_paired_difference():
    outcomes = [
        Outcome("pre", 5, 2.0, 1.75), Outcome("post", 5, 2.5, 2.25),
        Outcome("pre", 6, 3.0, 2.75), Outcome("post", 6, 3.75, 3.5),
    ]  # fmt: skip
    lines = table(outcomes)
    assert lines[2].split() == ["5", "2.0000", "/", "1.7500", "2.5000", "/", "2.2500"]
    assert lines[4] == "post - pre: mean +0.6250, standard deviation 0.1768, 2 of 2 seeds"


def test_a_failed_run_is_counted_and_never_averaged():
    outcomes = [
        Outcome("pre", 5, 2.0, 1.75), Outcome("post", 5, failure="step 3: loss = nan"),
        Outcome("pre", 6, 3.0, 2.75), Outcome("post", 6, 3.5, 3.25),
    ]  # fmt: skip
    lines = table(outcomes)
    assert lines[2].split()[-1] == "failed"
    assert lines[4].startswith("post - pre: mean +0.5000, 1 of 2 seeds")
    assert "one seed shows nothing" in lines[4]
