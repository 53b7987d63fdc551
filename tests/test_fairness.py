"""Arms are held to equal draws, batches, evaluation and budget; each tampering is caught."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt.config import RunConfig
from gpt.corpus import read_text
from gpt.errors import UsageError
from gpt.lab.fairness import draws, hashes, refuse_unequal_plans, refuse_unfair
from gpt.lab.outcomes import Outcome
from gpt.lab.trials import Trial
from gpt.lab.workers import run_trials
from gpt.model.gpt import GPT
from gpt.text import windows
from gpt.training.machine import set_up

SMALL = {
    "d_model": 12, "n_heads": 3, "n_layers": 2, "context_length": 9, "steps": 4,
    "batch_size": 5, "eval_every": 2, "sample_chars": 0, "native": False, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def base(tmp_path) -> RunConfig:
    path = tmp_path / "text.txt"
    path.write_text("she sells sea shells on the sea shore\n" * 30, encoding="utf-8")
    return RunConfig().with_changes(SMALL | {"text": str(path)})


def outcome(arm: str, found: dict[str, str], seed: int = 5) -> Outcome:
    return Outcome(
        arm=arm, seed=seed, state="learned", first=3.0, final=2.0, best=2.0, steps=4,
        characters=180, n_parameters=7, seconds=1.0, hashes=found,
    )  # fmt: skip


def hashes_of(base: RunConfig, tamper=lambda model: None, corpus=None, **changes) -> dict[str, str]:
    config = base.with_changes(changes).resolved()
    corpus = corpus or read_text(config)
    model = GPT(config.model, corpus.tokenizer.vocab_size, config.training.seed)
    with torch.no_grad():
        tamper(model)
    return hashes(config, model, corpus, set_up(config.machine).environment())


def pair(base: RunConfig, other: dict[str, str]) -> list[Outcome]:
    return [outcome("pre", hashes_of(base)), outcome("post", other)]


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_position": "post"}, {"norm": "rms"}, {"init": "xavier"}, {"qk_norm": True},
        {"learning_rate": 0.5}, {"dropout": 0.5}, {"tie_embeddings": False}, {"n_layers": 3},
        {"optimizer": "muon"}, {"init": "identity"},
        {"norm_position": "deepnorm", "init": "native"},
    ],
    ids=str,
)  # fmt: skip
def test_an_arm_that_changes_a_setting_still_has_the_draws_of_the_others(base, changes):
    assert refuse_unfair(pair(base, hashes_of(base, **changes))) == []


def test_arms_that_were_computed_differently_are_a_warning(base):
    found = hashes_of(base)
    other = found | {"machine": found["machine"].replace("float32", "bfloat16")}
    (warning,) = refuse_unfair(pair(base, other))
    assert "pre and post were computed differently" in warning
    assert "dtype float32" in warning
    assert "dtype bfloat16" in warning


def test_every_tensor_that_is_drawn_is_compared_and_no_constant_one(base):
    model = GPT(base.model, 17, 5)
    names = {name.removeprefix("weights/") for name in draws(model)}
    constant = {n for n, p in model.named_parameters() if n.endswith(("gamma", "beta", "bias"))}
    assert constant
    assert names == {n for n, _ in model.named_parameters()} - constant


def swap_two_rows(model: GPT) -> None:
    weight = model.blocks[1].attention.W_V.weight
    weight.copy_(weight.flip(0))


def negate_one(model: GPT) -> None:
    weight = model.blocks[0].feedforward.W_out.weight
    weight[3, 4] *= -1


@pytest.mark.parametrize(
    ("tamper", "name"),
    [
        (swap_two_rows, "blocks.1.attention.W_V.weight"),
        (negate_one, "blocks.0.feedforward.W_out.weight"),
    ],
)
def test_other_draws_are_refused(base, tamper, name):
    with pytest.raises(UsageError, match=rf"'pre' and 'post' \(seed 5\) differ in weights/{name}"):
        refuse_unfair(pair(base, hashes_of(base, tamper)))


def test_a_factor_on_the_same_draws_is_no_difference(base):
    def scale(model: GPT) -> None:
        model.blocks[1].attention.W_O.weight.mul_(0.37)

    assert refuse_unfair(pair(base, hashes_of(base, scale))) == []


def test_other_batches_are_refused(base, monkeypatch):
    honest = hashes_of(base)

    def later(seed, step, *sizes):
        return windows.window_starts(seed, step + (step == 3), *sizes)

    monkeypatch.setitem(windows.WINDOW_STARTS, "random", later)
    with pytest.raises(UsageError, match="differ in batches,"):
        refuse_unfair([outcome("pre", honest), outcome("post", hashes_of(base))])


def test_another_training_text_is_refused(base):
    corpus = read_text(base)
    train = corpus.train.copy()
    train[7] = (train[7] + 1) % corpus.tokenizer.vocab_size
    other = hashes_of(base, corpus=dataclasses.replace(corpus, train=train))
    with pytest.raises(UsageError, match="differ in batches,"):
        refuse_unfair(pair(base, other))


@pytest.mark.parametrize("kind", ["text", "part", "context"])
def test_another_evaluation_is_refused(base, kind):
    corpus = read_text(base)
    val = corpus.val.copy()
    val[5] = (val[5] + 1) % corpus.tokenizer.vocab_size
    changed = {"text": val, "part": corpus.val[:-1], "context": corpus.val}[kind]
    other = hashes_of(base, corpus=dataclasses.replace(corpus, val=np.array(changed)))
    if kind == "context":
        other = hashes_of(base, context_length=8)
    with pytest.raises(UsageError, match="evaluation"):
        refuse_unfair(pair(base, other))


def test_another_budget_is_refused(base):
    longer = hashes_of(base) | {"budget": "181"}
    with pytest.raises(UsageError, match="differ in budget,"):
        refuse_unfair(pair(base, longer))


def test_other_sizes_are_a_warning_and_strictly_a_refusal(base):
    wide = pair(base, hashes_of(base, d_model=24))
    (line,) = refuse_unfair(wide)
    assert line.startswith("pre and post have tensors of other sizes (weights/blocks.0.")
    assert "more" in line
    with pytest.raises(UsageError, match="differ in weights/blocks"):
        refuse_unfair(wide, strict=True)


def test_arms_are_compared_within_a_seed_only(base):
    assert hashes_of(base, seed=5) != hashes_of(base, seed=6)
    outcomes = [outcome(arm, hashes_of(base, seed=s), s) for s in (5, 6) for arm in ("pre", "post")]
    assert refuse_unfair(outcomes) == []
    outcomes[3] = outcome("post", hashes_of(base, seed=7), 6)
    with pytest.raises(UsageError, match="seed 6"):
        refuse_unfair(outcomes)


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"steps": 5}, r"steps \(4 and 5\)"),
        ({"batch_size": 6}, "batch_size"),
        ({"grad_accumulation": 2}, "grad_accumulation"),
        ({"context_length": 8}, "context_length"),
        ({"windows": "epochs"}, "windows"),
    ],
)
def test_arms_that_cannot_be_equal_are_refused_before_anything_runs(base, changes, needle):
    with pytest.raises(UsageError, match=f"'pre' and 'other' differ in {needle}"):
        refuse_unequal_plans({"pre": base, "other": base.with_changes(changes)})


def test_more_than_one_change_is_a_warning(base):
    one = base.with_changes({"norm": "rms"})
    two = base.with_changes({"norm": "rms", "learning_rate": 0.5})
    assert refuse_unequal_plans({"pre": base, "rms": one}) == []
    (line,) = refuse_unequal_plans({"pre": base, "rms": one, "both": two})
    assert line.startswith("pre and both differ in 2 settings (norm, learning_rate)")


def test_what_a_trial_says_is_what_it_was_trained_with(base, tmp_path):
    trials = [
        Trial(arm, base.with_changes({"norm_position": arm}).resolved()) for arm in ("pre", "post")
    ]
    outcomes = list(run_trials(trials, read_text(base), tmp_path, workers=1))
    assert refuse_unfair(outcomes, strict=True) == []
    assert outcomes[0].hashes == hashes_of(base)
    record = json.loads((Path(tmp_path) / "pre-s1337" / "outcome.json").read_text())
    assert record["outcome"]["hashes"] == outcomes[0].hashes
