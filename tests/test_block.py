"""The block: its two equations, stacking, and what it is when its sublayers say nothing."""

import pytest
import torch
from helpers import SIZES, assert_equal, small_config, small_model, spread

from gpt.model.block import BLOCKS, PostLNBlock, PreLNBlock
from gpt.model.feedforward import FeedForward, SwiGLU
from gpt.model.norms import LayerNorm, RMSNorm


def block(**changes):
    return spread(small_model(**changes)).blocks[0]


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
    for _ in range(3):
        x = b(x)
    assert x.shape == (5, 7, 24)
    assert torch.isfinite(x).all()


def test_the_config_decides_the_parts():
    assert {name: type(small_model(norm_position=name).blocks[0]) for name in BLOCKS} == {
        "pre": PreLNBlock,
        "post": PostLNBlock,
    }
    assert isinstance(block(norm="layer").norm_1, LayerNorm)
    assert isinstance(block(norm="rms").norm_2, RMSNorm)
    assert isinstance(block(activation="relu").feedforward, FeedForward)
    assert isinstance(block(activation="swiglu").feedforward, SwiGLU)
    b = PreLNBlock(small_config(dropout=0.25, qk_norm=True, n_kv_heads=2))
    assert b.attention.dropout == b.feedforward.dropout == 0.25
    assert (b.attention.qk_norm, b.attention.n_kv_heads, b.attention.n_heads) == (True, 2, 6)
    assert b.feedforward.W_in.weight.shape == (SIZES["d_ff"], SIZES["d_model"])


def test_both_placements_have_the_same_parameters():
    pre, post = PreLNBlock(small_config()), PostLNBlock(small_config())
    post.load_state_dict(pre.state_dict())
    x = stream().float()
    difference = (pre(x) - post(x)).abs().max()
    assert difference > 0.1
    assert_equal(dict(pre.state_dict()), dict(post.state_dict()), 0.0)
