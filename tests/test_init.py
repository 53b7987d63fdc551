"""Where the weights start: their spreads, and draws that depend on the name and the seed alone."""

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from helpers import VOCAB_SIZE, small_config
from torch import nn

import gpt.model.init
from gpt.config import Init, ModelConfig
from gpt.model.block import BLOCKS
from gpt.model.gpt import GPT
from gpt.model.init import NATIVE, initialise
from gpt.model.norms import NORMS


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


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("init", get_args(Init))
def test_biases_start_at_zero_gains_at_one_and_alphas_at_a_half(init, norm):
    for norm_position in BLOCKS:
        model = build(init=init, norm=norm, norm_position=norm_position, attention_bias=True)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                expected = {"gamma": 1.0, "alpha": 0.5}.get(name.split(".")[-1], 0.0)
                assert torch.equal(parameter, torch.full_like(parameter, expected)), name


NATIVE_SPREADS = {
    # Placement -> standard deviations of the embeddings, W_Q and W_K, W_V, W_O, W_in, W_out of
    # a model 96 wide with half as many key heads, d_ff 384 and 8 blocks. Xavier's are
    # sqrt(2 / (fan_in + fan_out)): of 96 + 96, 96 + 48 and 96 + 384. The 1/4 is 1 / sqrt(2 x 8).
    "pre": (0.02, 0.02, 0.02, 0.02, 0.02 / 4, 0.02, 0.02 / 4),
    "post": (96**-0.5, 96**-0.5, 72**-0.5, 72**-0.5, 96**-0.5, 240**-0.5, 240**-0.5),
    "sandwich": (0.02,) * 7,
    "reordered": (0.02,) * 7,
    "lns": (0.02,) * 7,
    "mix": (0.02,) * 7,
}
NATIVE_SPREADS["residual_dual"] = NATIVE_SPREADS["post"]
BETA = 64**-0.25  # (8 x 8)^(-1/4)
NATIVE_SPREADS["deepnorm"] = (
    96**-0.5, 96**-0.5, 72**-0.5, BETA / 72**0.5, BETA / 96**0.5, BETA / 240**0.5, BETA / 240**0.5
)  # fmt: skip


@pytest.mark.parametrize("norm_position", BLOCKS)
def test_native_spreads_are_those_of_the_paper(norm_position):
    weights = wide(n_layers=8, init="native", norm_position=norm_position, tie_embeddings=False)
    tensors = ["token_embedding"] + [f"attention.W_{m}" for m in "QKVO"]
    tensors += ["feedforward.W_in", "feedforward.W_out"]
    for tensor, expected in zip(tensors, NATIVE_SPREADS[norm_position], strict=True):
        found = [w for name, w in weights.items() if name.endswith(f"{tensor}.weight")]
        assert len(found) == (8 if "." in tensor else 1)
        for weight in found:
            assert weight.std().item() == pytest.approx(expected, rel=0.06), tensor


def test_native_is_another_name_where_the_paper_has_one_of_our_schemes():
    for norm_position, scheme in (("pre", "gpt2"), ("post", "xavier"), ("residual_dual", "xavier")):
        native = build(init="native", norm_position=norm_position).state_dict()
        for name, weight in build(init=scheme, norm_position=norm_position).state_dict().items():
            assert torch.equal(native[name], weight), name


@pytest.mark.parametrize("n_layers", [2, 5])
def test_beta_multiplies_the_draws_that_values_pass_through_and_never_those_of_the_scores(n_layers):
    options = {"norm_position": "deepnorm", "n_layers": n_layers, "activation": "swiglu"}
    plain, native = (
        dict(build(init=i, **options).named_parameters()) for i in ("xavier", "native")
    )
    scaled = ("W_V.weight", "W_O.weight", "W_in.weight", "W_gate.weight", "W_out.weight")
    for name, weight in plain.items():
        factor = (8 * n_layers) ** -0.25 if name.endswith(scaled) else 1.0
        torch.testing.assert_close(native[name], factor * weight, rtol=1e-6, atol=0)


def test_every_placement_has_a_native_scheme_and_they_share_their_draws():
    """The draws are the same up to a factor a tensor, whatever the placement."""
    assert set(NATIVE) == set(BLOCKS)
    models = [dict(build(init="native", norm_position=p).named_parameters()) for p in BLOCKS]
    for name, weight in models[0].items():
        for other in models[1:]:
            if name in other and weight.ndim == 2:
                ratio = other[name] / weight
                torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-5, atol=0)


@pytest.mark.parametrize("n_layers", [6, 12])
def test_the_stream_of_sandwich_starts_to_grow_with_the_root_of_the_sublayers(n_layers):
    """Each output norm adds a vector of root mean square 1, nearly orthogonal to the stream: after
    k of them it is sqrt(x0^2 + k). Kim et al. 2025, arXiv 2502.02732. (With weights of 0.02 and a
    width of 64 attention makes vectors so small that eps is seen: the first norm adds 0.90.)"""
    config = ModelConfig(norm_position="sandwich", n_layers=n_layers, d_model=64, init="xavier")
    model = GPT(config, 65)
    tokens = torch.randint(65, (16, 32), generator=torch.Generator().manual_seed(0))
    sums = []

    def keep(module, inputs):
        sums.append(inputs[0].square().mean().sqrt().item())

    for block in model.blocks:
        block.norm_1.register_forward_pre_hook(keep)
        block.norm_2.register_forward_pre_hook(keep)
    model.final_norm.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(tokens)
    assert len(sums) == 2 * n_layers + 1
    for k, found in enumerate(sums):
        assert found == pytest.approx(math.sqrt(sums[0] ** 2 + k), rel=0.05), k


def test_weights_are_normal_not_uniform():
    weight = wide(n_layers=2)["blocks.0.feedforward.W_in.weight"]
    z = (weight / 0.02).flatten()
    assert z.pow(4).mean().item() == pytest.approx(3, rel=0.05)  # uniform: 1.8
    assert z.abs().max() > 3.5


ONE_OPTION = [
    *({"norm_position": name} for name in BLOCKS if name != "pre"),
    {"norm": "rms"},
    {"norm": "dyt"},
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


def test_without_norms_all_other_weights_are_shared():
    assert_same_draws(build(), build(norm="none"), n_compared=16)


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
