"""The block: its equations, stacking, and what it is when its sublayers say nothing."""

from typing import get_args

import pytest
import torch
from helpers import SIZES, assert_equal, random_tokens, small_config, small_model, spread

from gpt.config import Norm, NormPosition
from gpt.model import block as module
from gpt.model.block import BLOCKS, PostLNBlock, PreLNBlock
from gpt.model.feedforward import FeedForward, SwiGLU
from gpt.model.norms import NORMS


def block(i=0, **changes):
    return spread(small_model(**changes)).blocks[i]


def stream():
    g = torch.Generator().manual_seed(0)
    return torch.randn(5, 7, 24, dtype=torch.float64, generator=g)


def test_pre_adds_what_each_sublayer_makes_of_the_normalised_stream():
    b, x = block(norm_position="pre"), stream()
    middle = x + b.attention(b.norm_1(x))
    assert torch.equal(b(x), middle + b.feedforward(b.norm_2(middle)))


def test_post_normalises_what_each_sublayer_made_of_the_stream_itself():
    b, x = block(norm_position="post"), stream()
    middle = b.norm_1(x + b.attention(x))
    assert torch.equal(b(x), b.norm_2(middle + b.feedforward(middle)))


def test_sandwich_normalises_what_a_sublayer_reads_and_what_it_makes():
    b, x = block(norm_position="sandwich"), stream()
    middle = x + b.output_norm_1(b.attention(b.norm_1(x)))
    assert torch.equal(b(x), middle + b.output_norm_2(b.feedforward(b.norm_2(middle))))


def test_reordered_normalises_what_a_sublayer_makes():
    b, x = block(norm_position="reordered"), stream()
    middle = x + b.norm_1(b.attention(x))
    assert torch.equal(b(x), middle + b.norm_2(b.feedforward(middle)))


@pytest.mark.parametrize(("n_layers", "alpha"), [(8, 2.0), (2, 2**0.5)])
def test_deepnorm_makes_the_skip_louder_than_the_branch(n_layers, alpha):
    b, x = block(norm_position="deepnorm", n_layers=n_layers), stream()
    middle = b.norm_1(alpha * x + b.attention(x))
    torch.testing.assert_close(b(x), b.norm_2(alpha * middle + b.feedforward(middle)))


def test_residual_dual_sums_beside_post_what_each_sublayer_makes():
    b, x = block(norm_position="residual_dual"), stream()
    r = 3 * stream()
    attended = b.attention(x)
    middle = b.norm_1(x + attended)
    made = b.feedforward(middle)
    left, right = b((x, r))
    assert torch.equal(left, b.norm_2(middle + made))
    assert torch.equal(right, r + attended + made)
    post = block(norm_position="post")
    assert torch.equal(left, post(x))  # the same names, so the same weights


def test_the_head_of_residual_dual_reads_both_streams():
    model = spread(small_model(norm_position="residual_dual", tie_embeddings=False))
    seen = {}
    model.blocks[0].register_forward_pre_hook(lambda m, inputs: seen.update(first=inputs[0]))
    model.blocks[-1].register_forward_hook(lambda m, inputs, out: seen.update(last=out))
    logits = model(random_tokens())
    (x_0, r_0), (x, r) = seen["first"], seen["last"]
    assert torch.equal(x_0, r_0)
    assert torch.equal(logits, (x + model.final_norm(r)) @ model.head.weight.T)


def test_lns_divides_what_a_sublayer_reads_by_the_root_of_the_blocks_number():
    x = stream()
    for i, root in ((0, 1), (3, 2)):
        b = block(i, norm_position="lns", n_layers=4)
        middle = x + b.attention(b.norm_1(x) / root)
        assert torch.equal(b(x), middle + b.feedforward(b.norm_2(middle) / root))


@pytest.mark.parametrize(
    ("n_layers", "n_post"), [(1, 1), (2, 1), (4, 1), (5, 2), (8, 2), (9, 3), (12, 3), (24, 6)]
)
def test_mix_is_post_in_the_first_quarter_rounded_up_and_then_pre(n_layers, n_post):
    config, x = small_config(norm_position="mix", n_layers=n_layers), stream().float()
    like_post = []
    for number in range(1, n_layers + 1):
        mixed = BLOCKS["mix"](config, number)
        alone = {}
        for kind in (PreLNBlock, PostLNBlock):
            alone[kind] = kind(config)
            alone[kind].load_state_dict(mixed.state_dict())
        like_post.append(torch.equal(mixed(x), alone[PostLNBlock](x)))
        assert torch.equal(mixed(x), alone[PreLNBlock](x)) is not like_post[-1]
    assert like_post == [True] * n_post + [False] * (n_layers - n_post)


def test_blocks_are_numbered_from_one():
    for name in BLOCKS:
        blocks = small_model(norm_position=name, n_layers=3).blocks
        assert [(b.number, b.n_layers) for b in blocks] == [(1, 3), (2, 3), (3, 3)]


def test_a_first_block_of_lns_is_one_of_pre():
    x = stream()
    assert torch.equal(block(norm_position="lns")(x), block(norm_position="pre")(x))
    assert not torch.equal(block(1, norm_position="lns")(x), block(1, norm_position="pre")(x))


@pytest.mark.parametrize("norm_position", BLOCKS)
def test_without_norms_placements_only_add(norm_position):
    """Then every placement but deepnorm, whose skip is louder, and lns is x + f(x)."""
    x = stream()
    b = block(1, norm_position=norm_position, norm="none")
    plain = block(1, norm_position="pre", norm="none")(x)
    out = b((x, x))[0] if norm_position == "residual_dual" else b(x)
    assert torch.equal(out, plain) is (norm_position not in ("deepnorm", "lns"))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_silent_sublayers_leave_pre_the_identity_and_post_two_norms(norm):
    x = stream()
    for norm_position in ("pre", "post"):
        b = block(norm_position=norm_position, norm=norm)
        with torch.no_grad():
            for layer in (b.attention.W_O, b.feedforward.W_out):
                for parameter in layer.parameters():
                    parameter.zero_()
        expected = x if norm_position == "pre" else b.norm_2(b.norm_1(x))
        assert torch.equal(b(x), expected)


def test_the_gradient_of_pre_has_a_clean_path_and_that_of_post_does_not():
    """A thousandfold input leaves the identity path of Pre-LN whole; the norms of Post-LN divide
    the gradient by that factor."""
    sizes = {}
    for norm_position in ("pre", "post"):
        b = block(norm_position=norm_position)
        x = (1000 * stream()).requires_grad_()
        sizes[norm_position] = torch.autograd.grad((b(x) * stream()).sum(), x)[0].norm().item()
    assert sizes["pre"] == pytest.approx(stream().norm().item(), rel=0.1)
    assert sizes["post"] < 0.05 * sizes["pre"]


@pytest.mark.parametrize("norm_position", BLOCKS)
def test_blocks_stack(norm_position):
    b, x = block(norm_position=norm_position), stream()
    x = b.enter(x)
    for _ in range(3):
        x = b(x)
    x = b.leave(x, torch.nn.Identity())
    assert x.shape == (5, 7, 24)
    assert torch.isfinite(x).all()


def test_the_config_decides_the_parts():
    assert set(BLOCKS) == set(get_args(NormPosition))
    assert set(NORMS) == set(get_args(Norm))
    found = {name: type(small_model(norm_position=name).blocks[0]) for name in BLOCKS}
    assert found == {
        "pre": PreLNBlock,
        "post": PostLNBlock,
        "sandwich": module.SandwichBlock,
        "reordered": module.ReorderedBlock,
        "deepnorm": module.DeepNormBlock,
        "residual_dual": module.ResiDualBlock,
        "lns": module.ScaledLNBlock,
        "mix": module.MixLNBlock,
    }
    for name, kind in NORMS.items():
        assert type(block(norm=name).norm_1) is type(block(norm=name).norm_2) is kind
    assert isinstance(block(activation="relu").feedforward, FeedForward)
    assert isinstance(block(activation="swiglu").feedforward, SwiGLU)
    b = PreLNBlock(small_config(dropout=0.25, attention_dropout=0.5, qk_norm=True, n_kv_heads=2))
    assert b.attention.dropout == b.feedforward.dropout == 0.25
    assert b.attention.attention_dropout == 0.5
    assert PreLNBlock(small_config(dropout=0.25)).attention.attention_dropout == 0.25
    assert (b.attention.qk_norm, b.attention.n_kv_heads, b.attention.n_heads) == (True, 2, 6)
    assert b.feedforward.W_in.weight.shape == (SIZES["d_ff"], SIZES["d_model"])


def test_both_placements_have_the_same_parameters():
    pre, post = PreLNBlock(small_config()), PostLNBlock(small_config())
    post.load_state_dict(pre.state_dict())
    x = stream().float()
    difference = (pre(x) - post(x)).abs().max()
    assert difference > 0.1
    assert_equal(dict(pre.state_dict()), dict(post.state_dict()), 0.0)
