"""The torch model equals the frozen NumPy reference: every intermediate, every variant."""

import hashlib
import json
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EVERY_VARIANT,
    VOCAB_SIZE,
    assert_equal,
    assert_parity,
    grid,
    intermediates,
    random_tokens,
    reference_pass,
    small_config,
    small_model,
    spread,
    state_of,
    variant_name,
)
from reference import forward as reference

from gpt.config import Activation, ModelConfig, Positions
from gpt.model.attention import explicit_attention
from gpt.model.block import BLOCKS
from gpt.model.gpt import GPT
from gpt.model.norms import NORMS

FOLDER = Path(__file__).parent / "reference"
GOLDEN, GOLDEN_PLACEMENTS = FOLDER / "golden.npz", FOLDER / "golden_placements.npz"


@pytest.fixture(scope="module")
def golden():
    """Variant -> {config, tokens, targets, loss, state, seen, gradient}."""
    variants: dict[str, dict] = {}
    with np.load(GOLDEN) as arrays:
        for key in arrays.files:
            variant, kind, *name = key.split("/")
            entry = variants.setdefault(variant, {"state": {}, "seen": {}, "gradient": {}})
            if name:
                entry[kind][name[0]] = arrays[key].astype(np.float64)
            else:
                entry[kind] = arrays[key]
    with np.load(GOLDEN_PLACEMENTS) as arrays:
        for key in arrays.files:
            variant, kind = key.split("/")
            entry = variants.setdefault(variant, {})
            if not kind.endswith("_shapes"):
                entry[kind] = arrays[key]
            else:  # of the group that came before, whose arrays lie end to end
                shapes = json.loads(str(arrays[key]))
                kind = kind.removesuffix("_shapes")
                entry[kind] = parted(entry[kind].astype(np.float64), shapes)
    for entry in variants.values():
        entry["config"] = json.loads(str(entry["config"]))
        entry |= {name: entry[name].astype(np.int64) for name in ("tokens", "targets")}
    return variants


def parted(joined, shapes):
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    assert ends[-1] == len(joined)
    parts = np.split(joined, ends[:-1])
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


@pytest.fixture
def golden_model(golden):
    def build(variant):
        config = golden[variant]["config"]
        state = golden[variant]["state"]
        config = ModelConfig(
            **config,
            d_ff=state["blocks.0.feedforward.W_in.weight"].shape[0],
            context_length=6,
        )
        model = GPT(config, state["token_embedding.weight"].shape[0]).double()
        model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
        return model

    return build


GOLDEN_VARIANTS = [
    *("pre", "post", "gpt1", "paper", "llama", "recent"),
    *("sandwich", "reordered", "deepnorm", "residual_dual", "lns", "mix", "dyt", "none"),
]


def test_the_golden_arrays_are_the_fourteen_variants_and_stay_small(golden):
    assert list(golden) == GOLDEN_VARIANTS
    assert GOLDEN.stat().st_size < 500_000
    assert GOLDEN_PLACEMENTS.stat().st_size < 250_000


def test_the_first_golden_file_is_never_written_again():
    digest = hashlib.sha256(GOLDEN.read_bytes()).hexdigest()
    assert digest == "dd9edd48c5c7ade046ea61718a674f0c7cb00fb10986f58415143f3c5ed7fd31"


def test_every_placement_and_kind_of_norm_has_golden_arrays(golden):
    for field, choices in (("norm_position", BLOCKS), ("norm", NORMS)):
        assert {entry["config"][field] for entry in golden.values()} == set(choices)


@pytest.mark.parametrize("variant", GOLDEN_VARIANTS)
def test_the_reference_is_frozen(golden, variant):
    frozen = golden[variant]
    seen = reference.forward(frozen["state"], frozen["tokens"], frozen["config"])
    assert_equal(seen, frozen["seen"], 1e-12)
    loss = reference.loss(seen["logits"], frozen["targets"])
    assert_equal({"loss": loss}, {"loss": frozen["loss"]}, 1e-12)


@pytest.mark.parametrize("variant", GOLDEN_VARIANTS)
def test_the_torch_model_reproduces_the_golden_arrays(golden, golden_model, variant):
    frozen = golden[variant]
    assert_parity(golden_model(variant), torch.from_numpy(frozen["tokens"]), frozen["seen"])


@pytest.mark.parametrize("variant", GOLDEN_VARIANTS)
def test_the_torch_model_reproduces_the_golden_gradient_entry_by_entry(
    golden, golden_model, variant
):
    model, frozen = golden_model(variant), golden[variant]
    logits = model(torch.from_numpy(frozen["tokens"]))
    F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(frozen["targets"]).flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_equal(gradients, frozen["gradient"])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("activation", list(get_args(Activation)))
def test_every_combination_equals_the_reference(norm_position, norm, positions, activation):
    """The complete grid, one block deep, with small and with large weights, on both paths."""
    tokens = random_tokens()
    for rest in grid(
        attention_bias=[False, True],
        feedforward_bias=[False] if activation == "swiglu" else [False, True],
        tie_embeddings=[True, False],
        n_kv_heads=[6, 3],
        qk_norm=[False, True],
    ):
        model = small_model(
            norm_position=norm_position,
            norm=norm,
            positions=positions,
            activation=activation,
            n_layers=1,
            **rest,
        )
        assert_both_paths(model, tokens, rest)
        assert_both_paths(spread(model), tokens, rest)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("norm_position", BLOCKS)
def test_every_placement_with_every_kind_of_norm_equals_the_reference(norm_position, norm):
    """With every kind of position and every activation. In a stack of two the second block of
    lns and mix is of another kind than the first. Without norms, numbers would grow until their
    rounding alone is above the tolerance, so weights are smaller there."""
    tokens, std = random_tokens(), 0.15 if norm == "none" else 0.3
    for changes in grid(positions=get_args(Positions), activation=get_args(Activation)):
        model = small_model(norm_position=norm_position, norm=norm, **changes)
        assert_both_paths(model, tokens, changes)
        assert_both_paths(spread(model, std=std), tokens, changes)


def assert_both_paths(model, tokens, rest):
    expected = reference_pass(model, tokens)
    try:
        assert_parity(model, tokens, expected)
        fused = [block.attention.attend for block in model.blocks]
        for block in model.blocks:
            block.attention.attend = explicit_attention
        assert_parity(model, tokens, expected)
        for block, attend in zip(model.blocks, fused, strict=True):
            block.attention.attend = attend
    except AssertionError as error:
        raise AssertionError(f"{rest}: {error}") from error


@pytest.mark.parametrize("changes", EVERY_VARIANT, ids=variant_name)
@pytest.mark.parametrize("init", ["gpt2", "xavier", "native"])
def test_a_stack_equals_the_reference_over_the_whole_context(init, changes):
    model = small_model(init=init, **changes)
    tokens = random_tokens(model.config.context_length)
    assert_both_paths(model, tokens, changes)
    assert_both_paths(spread(model), tokens, changes)


def test_every_value_is_compared():
    """Two blocks of 13 values each and what a placement adds, with the embedding, the final norm
    and the logits."""
    expected = {
        "pre": 2 * 13 + 3,
        "post": 2 * 13 + 2,
        "sandwich": 2 * (13 + 2) + 3,
        "reordered": 2 * 13 + 3,
        "deepnorm": 2 * 13 + 2,
        "residual_dual": 2 * (13 + 1) + 3,
        "lns": 2 * (13 + 2) + 3,
        "mix": 2 * 13 + 3,
    }
    found = {
        placement: len(reference_pass(small_model(norm_position=placement), random_tokens()))
        for placement in BLOCKS
    }
    assert found == expected


@pytest.mark.parametrize("changes", EVERY_VARIANT, ids=variant_name)
def test_the_reference_reads_every_weight(changes):
    """A weight that the reference ignored would be proved equal by nothing."""
    model = spread(small_model(**changes))
    state, read = state_of(model), set()

    class Recording(dict):
        def __getitem__(self, name):
            read.add(name)
            return super().__getitem__(name)

    config = vars(model.config)
    reference.forward(Recording(state), random_tokens().numpy(), config)
    assert read == state.keys()


def test_the_reference_has_the_loss_of_torch():
    logits = 9 * torch.randn(5, 7, VOCAB_SIZE, dtype=torch.float64)
    targets = random_tokens(seed=1)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = reference.loss(logits.numpy(), targets.numpy())
    assert_equal({"loss": loss}, {"loss": expected}, 1e-12)


def test_hooks_leave_the_model_as_it_was():
    model, tokens = small_model(), random_tokens()
    attend = model.blocks[0].attention.attend
    intermediates(model, tokens)
    assert model.blocks[0].attention.attend is attend
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


GOOD = {"a": np.zeros((2, 3)), "b": np.arange(4.0)}


class TestTheComparison:
    """It decides everything above, so it is seen to fail."""

    def test_it_accepts_what_is_within_the_tolerance(self):
        assert assert_equal(GOOD | {"a": np.full((2, 3), 9e-11)}, GOOD) == 9e-11

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_it_fails_on_a_number_that_is_not_finite_on_either_side_or_both(self, bad):
        broken = GOOD | {"b": np.array([0, 1, bad, 3])}
        for actual, expected in [(broken, GOOD), (GOOD, broken), (broken, broken)]:
            with pytest.raises(AssertionError, match="not finite"):
                assert_equal(actual, expected)

    def test_it_says_how_much_and_where_and_what_differs_first(self):
        actual = GOOD | {"a": np.full((2, 3), 1e-9), "b": np.array([0, 1, 2.5, 3])}
        with pytest.raises(AssertionError, match=r"0\.5 > 1e-10 at b\[2\].*first .* is a"):
            assert_equal(actual, GOOD)

    def test_it_fails_on_other_shapes_even_if_they_broadcast(self):
        with pytest.raises(AssertionError, match="shape"):
            assert_equal(GOOD | {"a": np.zeros((1, 3))}, GOOD)

    @pytest.mark.parametrize("key", ["a", "b"])
    def test_it_fails_on_a_missing_value(self, key):
        fewer = {k: v for k, v in GOOD.items() if k != key}
        for actual, expected in [(fewer, GOOD), (GOOD, fewer)]:
            with pytest.raises(AssertionError):
                assert_equal(actual, expected)

    def test_it_fails_on_a_model_that_turns_nan(self):
        model = small_model()
        with torch.no_grad():
            model.blocks[1].norm_2.gamma[3] = torch.nan
        with pytest.raises(AssertionError, match="not finite"):
            assert_parity(model, random_tokens())


def test_the_sizes_are_all_different():
    config = small_config(n_kv_heads=3).resolved()
    tokens = random_tokens()
    axes = [
        *tokens.shape,
        VOCAB_SIZE,
        config.n_heads,
        config.n_kv_heads,
        config.d_k,
        config.d_model,
        config.d_ff,
        config.context_length,
    ]
    assert len(set(axes)) == len(axes)
