"""What is told before a run: true numbers, readable lines, cautions only where they are due."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import VARIANTS, variant_name

from gpt.config import ModelConfig, RunConfig, TrainingConfig
from gpt.model.block import BLOCKS
from gpt.model.count import flops_per_character
from gpt.model.gpt import GPT
from gpt.text.reading import Corpus, Source
from gpt.text.tokenizer import CharTokenizer
from gpt.training import plan
from gpt.training.optimisers import build_optimisers

MACHINE = {"torch": "2.13.0", "threads": 3, "device": "cpu", "dtype": "float32", "native": ""}


def corpus(n_train: int = 90_000, n_val: int = 10_000) -> Corpus:
    return Corpus(
        tokenizer=CharTokenizer("\nabcdefghij"),
        train=np.zeros(n_train, np.uint8),
        val=np.zeros(n_val, np.uint8),
        notices=(),
        source=Source("some.txt", 100_000, "0" * 64),
        unigram_entropy=2.2469,
        bigram_entropy=1.7582,
    )


def described(changes: dict, text: Corpus | None = None) -> str:
    """The lines with their wrapping undone."""
    lines = plan.describe(RunConfig().with_changes(changes), text or corpus(), MACHINE)
    return "\n".join(lines).replace("\n" + " " * plan.LABEL, " ")


def test_the_lines_hold_the_facts_of_the_text_and_how_to_read_a_loss():
    text = described({})
    assert "100,000 characters, 11 distinct; 90,000 to train on, 10,000 to validate on" in text
    assert f"ln 11 = {math.log(11):.3f}" in text
    assert "unigram entropy 2.247" in text
    assert "bigram entropy 1.758" in text


def test_a_run_without_validation_says_so():
    assert "validation is off" in described({}, corpus(n_val=0))


def test_steps_are_told_in_characters_and_in_passes_over_the_training_text():
    settings = {"batch_size": 5, "context_length": 40, "grad_accumulation": 3, "steps": 1500}
    text = described(settings)
    assert "1,500, each of 600 characters (3 x 5 windows of 40)" in text
    assert "10.0 passes over the training text" in text


def test_parameters_are_told_whole_and_by_component():
    settings = {"d_model": 24, "n_heads": 3, "n_layers": 2, "context_length": 7, "norm": "rms"}
    real = GPT(ModelConfig(**settings), 11)
    text = described(settings)
    assert f"{sum(p.numel() for p in real.parameters()):,} parameters" in text
    assert "token_embedding 264, positions 168, attention 4.61k, feedforward 9.46k, norms 120" in (
        text
    )
    assert "head" not in text


def test_what_decays_and_what_muon_moves_is_told():
    settings = {"d_model": 24, "n_heads": 3, "n_layers": 2, "context_length": 7, "norm": "rms"}
    assert "0.1 on 14.3k parameters (matrices, tables), none on 360 " in described(settings)
    assert "muon moves 13.8k" in described(settings | {"optimizer": "muon"})
    assert "muon" not in described(settings)


def test_flops_are_three_forward_passes_of_every_character():
    config = RunConfig().with_changes({"batch_size": 5, "grad_accumulation": 3, "steps": 70})
    per_step = 3 * flops_per_character(config.model, 11) * 5 * 64 * 3
    assert plan.training_flops(config, 11) == per_step
    text = described({"batch_size": 5, "grad_accumulation": 3, "steps": 70})
    assert f"{per_step / 1e9:.3g} GFLOP a step, {70 * per_step / 1e9:.3g} GFLOP in all" in text


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimisers_memory_is_that_of_its_state(optimizer):
    config = RunConfig().with_changes({"optimizer": optimizer, "tie_embeddings": False})
    model = GPT(config.model, 11)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    kept = 0
    for optimiser in build_optimisers(model, config.training, torch.device("cpu")):
        optimiser.step()
        kept += sum(
            value.nbytes
            for state in optimiser.state.values()
            for name, value in state.items()
            if name != "step"
        )
    assert plan.memory(config, 11)["optimiser"] == kept
    assert plan.memory(config, 11)["weights"] == sum(p.nbytes for p in model.parameters())
    assert plan.memory(config, 11)["gradients"] == sum(p.grad.nbytes for p in model.parameters())


PLACEMENTS = [{"norm_position": name} for name in BLOCKS]


@pytest.mark.parametrize("changes", [*VARIANTS, *PLACEMENTS, {"norm": "dyt"}], ids=variant_name)
def test_activations_are_within_a_third_of_what_autograd_keeps(changes):
    config = RunConfig(
        model=ModelConfig(d_model=96, n_heads=6, n_layers=3, context_length=40, **changes),
        training=TrainingConfig(batch_size=5),
    )
    model = GPT(config.model, 33)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(5, 40, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert plan.memory(config, 33)["activations"] == pytest.approx(real, rel=1 / 3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "muon", "grad_accumulation": 64, "tie_embeddings": False},
        {"d_model": 12288, "n_heads": 96, "n_layers": 96, "context_length": 2048, "steps": 10**9},
        {"d_model": 1, "n_heads": 1, "n_layers": 1, "context_length": 1, "batch_size": 1},
    ],
)
def test_lines_are_labelled_once_and_fit_in_100_columns(changes):
    lines = plan.describe(RunConfig().with_changes(changes), corpus(), MACHINE)
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 11
    assert all(line.isprintable() and line.isascii() for line in lines)
    labels = [line[: plan.LABEL].strip() for line in lines]
    assert [label for label in labels if label] == [
        *("text", "loss", "model", "decay", "steps", "memory", "machine")
    ]
    assert all(line[plan.LABEL - 1] == " " and line[plan.LABEL] != " " for line in lines)


POST = {"norm_position": "post", "steps": 400}


@pytest.mark.parametrize(
    ("changes", "cautioned"),
    [
        ({"steps": 400, "n_layers": 12, "init": "xavier", "warmup_steps": 0}, False),  # Pre-LN
        (POST | {"n_layers": 6, "init": "xavier", "warmup_steps": 0}, True),
        (POST | {"n_layers": 6, "init": "xavier", "warmup_steps": 99}, True),
        (POST | {"n_layers": 6, "init": "xavier", "warmup_steps": 100}, False),
        (POST | {"n_layers": 6, "init": "xavier"}, True),  # the default warm-up: 40 steps
        (POST | {"n_layers": 6, "init": "gpt2", "warmup_steps": 0}, False),
        (POST | {"n_layers": 5, "init": "xavier", "warmup_steps": 0}, False),
        (POST | {"n_layers": 12, "init": "gpt2", "warmup_steps": 0}, True),
        (POST | {"n_layers": 12, "init": "gpt2", "warmup_steps": 1}, False),
        (POST | {"n_layers": 6, "learning_rate": 0.01, "warmup_steps": 100}, True),
        (POST | {"n_layers": 6, "learning_rate": 0.009, "warmup_steps": 100}, False),
        ({}, False),
    ],
)
def test_a_caution_is_printed_only_where_post_ln_was_seen_to_stall(changes, cautioned):
    lines = plan.caution(RunConfig().with_changes(changes))
    assert bool(lines) == cautioned
    assert all(len(line) <= 100 for line in lines)
    if cautioned:
        assert "Post-LN" in lines[0]
        assert " try" in "".join(lines)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"norm_position": "deepnorm"}, {"init": "native"}),
        ({"norm_position": "deepnorm", "init": "xavier"}, {"init": "native"}),
        ({"norm_position": "lns", "init": "gpt2"}, {"init": "native"}),
        ({"norm_position": "reordered", "init": "native"}, {"qk_norm": True}),
    ],
)
def test_a_placement_without_what_its_paper_asks_for_is_said_in_one_line(changes, remedy):
    (line,) = plan.caution(RunConfig().with_changes(changes))
    assert line.startswith("caution")
    assert len(line) <= 100
    assert line.endswith("--qk_norm" if "qk_norm" in remedy else "--init native")
    assert plan.caution(RunConfig().with_changes(changes | remedy)) == []


@pytest.mark.parametrize(
    "changes",
    [
        *({"norm_position": name, "init": "native", "qk_norm": True} for name in BLOCKS),
        {"norm_position": "lns", "init": "xavier"},
        {"norm_position": "sandwich", "init": "gpt2"},
    ],
    ids=lambda changes: changes["norm_position"],
)
def test_a_placement_with_what_it_needs_is_not_cautioned(changes):
    assert plan.caution(RunConfig().with_changes(changes)) == []


def test_a_placement_and_its_warm_up_are_both_cautioned():
    changes = {"norm_position": "deepnorm", "steps": 50, "warmup_steps": 51}
    text = " ".join(plan.caution(RunConfig().with_changes(changes)))
    assert "--init native" in text
    assert "longer than the run" in text


@pytest.mark.parametrize("steps", [2, 20, 200, 5000])
def test_following_a_caution_ends_it(steps):
    changes = {"norm_position": "post", "n_layers": 12, "init": "xavier", "steps": steps}
    text = " ".join(plan.caution(RunConfig().with_changes(changes | {"warmup_steps": 0})))
    advised = int(text.split("--warmup_steps ")[1].split()[0])
    assert plan.caution(RunConfig().with_changes(changes | {"warmup_steps": advised})) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_measured_without_touching_random_numbers(dtype):
    before = torch.random.get_rng_state()
    peak = plan.peak_flops(torch.device("cpu"), dtype)
    assert math.isfinite(peak)
    assert peak > 0
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_peak_is_two_operations_a_multiply_add_in_the_median_time(monkeypatch):
    durations = iter([9.0, 0.02, 7.0, 0.03, 0.04, 0.01])  # the first is not counted
    now = [0.0]

    def clock() -> float:
        if clock.running:
            now[0] += next(durations)
        clock.running = not clock.running
        return now[0]

    clock.running = False
    monkeypatch.setattr(plan.time, "perf_counter", clock)
    assert plan.peak_flops(torch.device("cpu"), torch.float32) == pytest.approx(2 * 256**3 / 0.03)


def test_matrices_grow_until_a_product_can_be_timed(monkeypatch):
    sizes = []

    def seconds(matrix: torch.Tensor) -> float:
        sizes.append(len(matrix))
        return len(matrix) * 2e-6

    monkeypatch.setattr(plan, "_seconds", seconds)
    peak = plan.peak_flops(torch.device("cpu"), torch.float32)
    assert sorted(set(sizes)) == [256, 512, 1024]
    assert peak == pytest.approx(2 * 1024**3 / 2.048e-3)


def test_a_warm_up_longer_than_the_run_is_said():
    lines = plan.caution(RunConfig().with_changes({"steps": 50, "warmup_steps": 51}))
    assert " ".join(lines[0].split()).startswith(
        "caution the warm-up (51 steps) is longer than the"
    )
    assert plan.caution(RunConfig().with_changes({"steps": 50, "warmup_steps": 50})) == []
