"""Where the weights start: their spreads, and draws that depend on the name and the seed alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import VOCAB_SIZE, small_config
from torch import nn

import gpt.model.init
from gpt.config import ModelConfig
from gpt.model.gpt import GPT
from gpt.model.init import initialise


def build(seed=1337, vocab_size=VOCAB_SIZE, **changes):
    return GPT(small_config(**changes), vocab_size, seed)


def wide(**changes):
    """Wide enough that 5 % are many standard errors of a measured standard deviation."""
    config = ModelConfig(d_model=96, n_heads=4, n_kv_heads=2, context_length=64, **changes)
    return dict(GPT(config, 65).named_parameters())


def is_residual(name):
    return name.endswith(("W_O.weight", "W_out.weight"))


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("n_layers", [2, 8])
def test_gpt2_spreads(n_layers, norm_position):
    weights = wide(
        n_layers=n_layers,
        norm_position=norm_position,
        activation="swiglu",
        tie_embeddings=False,
    )
    for name, weight in weights.items():
        if weight.ndim == 2:
            # n_layers = 8: 0.02 / 4
            expected = 0.02 / math.sqrt(2 * n_layers) if is_residual(name) else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(weight.mean().item()) < 0.1 * expected, name


def test_the_residual_projections_shrink_with_the_root_of_the_depth_exactly():
    """The draws do not depend on the depth, so four times the layers is half of each weight."""
    shallow, deep = (dict(build(n_layers=n).named_parameters()) for n in (2, 8))
    for name, weight in shallow.items():
        expected = weight / 2 if is_residual(name) else weight
        torch.testing.assert_close(deep[name], expected, rtol=1e-6, atol=0)


def test_xavier_spreads():
    weights = wide(n_layers=2, init="xavier", activation="swiglu", tie_embeddings=False)
    for name, weight in weights.items():
        if weight.ndim == 2:
            embedding = name in ("token_embedding.weight", "positions.weight")
            expected = 96**-0.5 if embedding else math.sqrt(2 / sum(weight.shape))
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("init", ["gpt2", "xavier"])
def test_biases_start_at_zero_gains_at_one(init):
    model = build(init=init, attention_bias=True)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, name.endswith("gamma"))), name


def test_weights_are_normal_not_uniform():
    weight = wide(n_layers=2)["blocks.0.feedforward.W_in.weight"]
    z = (weight / 0.02).flatten()
    assert z.pow(4).mean().item() == pytest.approx(3, rel=0.05)  # uniform: 1.8
    assert z.abs().max() > 3.5


ONE_OPTION = [
    {"norm_position": "post"},
    {"norm": "rms"},
    {"positions": "rotary"},
    {"positions": "sinusoidal"},
    {"activation": "relu"},
    {"activation": "swiglu"},
    {"attention_bias": True},
    {"feedforward_bias": False},
    {"qk_norm": True},
    {"tie_embeddings": False},
    {"n_heads": 3},
    {"n_kv_heads": 2},
    {"d_ff": 14},
    {"context_length": 9},
    {"dropout": 0.1},
    {"n_layers": 3},
]


def assert_same_draws(model, other, n_compared):
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    common = [n for n in ours if n in theirs and ours[n].shape == theirs[n].shape]
    assert len(common) >= n_compared
    for name in common:
        scale = math.sqrt(len(other.blocks) / len(model.blocks)) if is_residual(name) else 1.0
        torch.testing.assert_close(
            ours[name], theirs[name] * scale, rtol=1e-6 if scale != 1 else 0, atol=0
        )


@pytest.mark.parametrize("changes", ONE_OPTION, ids=lambda c: "-".join(f"{k}={c[k]}" for k in c))
def test_models_that_differ_in_one_option_share_every_other_weight(changes):
    # Of 26 tensors: at most 6 change their shape (d_ff) and 7 disappear (RMSNorm's 5 shifts).
    assert_same_draws(build(), build(**changes), n_compared=20)


def test_a_single_generator_for_all_weights_would_not_share_them(monkeypatch):
    def build_from_one_generator(**changes):
        generator = torch.Generator().manual_seed(0)
        monkeypatch.setattr(gpt.model.init, "_generator", lambda seed, name: generator)
        return build(**changes)

    with pytest.raises(AssertionError, match=r"not close|not equal"):
        assert_same_draws(
            build_from_one_generator(), build_from_one_generator(positions="rotary"), 20
        )


def test_weights_depend_on_the_seed_and_on_nothing_else():
    torch.manual_seed(0)
    first = build(seed=5).state_dict()
    torch.manual_seed(1)
    torch.randn(100)
    again, other = build(seed=5).state_dict(), build(seed=6).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if weight.ndim == 2:
            assert not torch.equal(weight, other[name])


def test_no_two_tensors_share_their_draws():
    weights = [w for w in build(d_ff=24).parameters() if w.shape == (24, 24)]
    assert len(weights) == 12
    for i, weight in enumerate(weights):
        for other in weights[:i]:
            correlation = torch.corrcoef(torch.stack([weight.flatten(), other.flatten()]))[0, 1]
            assert abs(correlation) < 0.2  # 24^2 independent pairs: one in a million above


def test_weights_do_not_depend_on_the_dtype():
    """A float64 model is the float32 one, not another draw."""
    single = build()
    torch.set_default_dtype(torch.float64)
    try:
        double = build()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, weight in double.named_parameters():
        assert weight.dtype == torch.float64
        assert torch.equal(weight, single.get_parameter(name).double())


def test_weights_are_these():
    """Frozen, so that a seed in an old run means the same model for ever."""
    model = build(seed=1337)
    first = model.token_embedding.weight[0, :3].tolist()
    last = model.blocks[1].feedforward.W_out.weight[-1, -3:].tolist()
    assert first == pytest.approx([0.019556388, 0.0078973313, 0.019094925], rel=1e-5)
    assert last == pytest.approx([0.0032696777, 0.012018123, -0.014154892], rel=1e-5)


def test_a_parameter_without_a_rule_is_refused():
    model = build()
    model.blocks[1].extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(AssertionError, match=r"blocks\.1\.extra"):
        initialise(model, "gpt2", 1337)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_first_loss_is_that_of_guessing(norm_position, tie_embeddings):
    config = ModelConfig(norm_position=norm_position, tie_embeddings=tie_embeddings, n_layers=8)
    model = GPT(config, 65)
    tokens = torch.randint(65, (8, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert loss == pytest.approx(math.log(65), abs=0.1)


def test_identity_starts_pre_ln_blocks_as_the_identity():
    weights = wide(n_layers=2, init="identity", activation="swiglu", tie_embeddings=False)
    for name, weight in weights.items():
        if is_residual(name):
            assert not weight.any(), name
        elif weight.ndim == 2:
            embedding = name in ("token_embedding.weight", "positions.weight")
            assert weight.std().item() == pytest.approx(0.25 if embedding else 0.02, rel=0.05), name
    model = build(init="identity", norm_position="pre")
    x = torch.randn(2, 5, 24)
    for block in model.blocks:
        assert torch.equal(block(x), x)
