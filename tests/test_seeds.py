"""The numbers printed in the two teaching texts come out of our torch code.

First text: "Multi-head attention & the transformer block" (exercises 1 to 4, and its accounting).
Second text: "A GPT is just this block, repeated" (a NumPy notebook, seed 1337).
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from reference import forward as reference

from gpt.config import ModelConfig
from gpt.model.attention import MultiHeadAttention
from gpt.model.block import PreLNBlock
from gpt.model.feedforward import FeedForward, SwiGLU
from gpt.model.gpt import GPT
from gpt.model.norms import LayerNorm
from gpt.model.positions import SinusoidalPositions


def attend_to_all(q, k, v, dropout=0.0):
    """The first text uses no mask."""
    return F.scaled_dot_product_attention(q, k, v)


def load(block, matrices):
    """Matrices of the texts are (fan_in, fan_out); ours are (fan_out, fan_in)."""
    with torch.no_grad():
        for path, matrix in matrices.items():
            block.get_submodule(path).weight.copy_(torch.from_numpy(matrix.T))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def block_of(config_changes, matrices):
    block = PreLNBlock(ModelConfig(**config_changes)).double()
    for linear in (block.feedforward.W_in, block.feedforward.W_out):
        torch.nn.init.zeros_(linear.bias)
    load(block, matrices)
    return block


# The first text


def test_exercise_1_layernorm_statistics():
    x = torch.from_numpy(np.random.default_rng(42).normal(0, 5, (4, 8)))
    norm = LayerNorm(8).double()
    with torch.no_grad():
        y = norm(x).numpy()
        norm.gamma.fill_(2.0)
        norm.beta.fill_(1.0)
        scaled = norm(x).numpy()
    assert np.abs(y.mean(-1)).max() < 2e-16  # printed: 1.1e-16, -2.8e-17, -2.8e-17, 5.6e-17
    assert np.abs(y.std(-1) - 1).max() < 1e-6  # printed: within 1e-6 of 1
    assert (y.std(-1) < 1).all()  # eps makes the spread a little smaller, never larger
    np.testing.assert_allclose(scaled.mean(-1), 1, atol=1e-15)
    np.testing.assert_allclose(scaled.std(-1), 2, atol=1e-6)


def exercise_3(scale):
    """(block, X): the exercise's weights, N(0, scale), and its input."""
    attention, feedforward = np.random.default_rng(42), np.random.default_rng(42)
    matrices = {f"attention.W_{name}": attention.normal(0, scale, (16, 16)) for name in "QKVO"}
    matrices["feedforward.W_in"] = feedforward.normal(0, scale, (16, 64))
    matrices["feedforward.W_out"] = feedforward.normal(0, scale, (64, 16))
    block = block_of({"d_model": 16, "n_heads": 4}, matrices)
    block.attention.attend = attend_to_all
    return block, np.random.default_rng(0).normal(0, 1, (6, 16))


def exercise_3_in_numpy(block, x):
    """Head by head, on the torch block's weights."""
    w = {name: value.numpy() for name, value in block.state_dict().items()}
    config = {"norm": "layer"}
    n = reference.norm(w, "norm_1", x, config)
    q, k, v = (n @ w[f"attention.W_{name}.weight"].T for name in "QKV")  # (6, 16) each
    heads = []
    for h in range(4):
        part = slice(4 * h, 4 * h + 4)
        weights = reference.softmax(q[:, part] @ k[:, part].T / 2)  # sqrt(d_k) = 2
        heads.append(weights @ v[:, part])
    x = x + np.concatenate(heads, axis=1) @ w["attention.W_O.weight"].T
    n = reference.norm(w, "norm_2", x, config)
    hidden = reference.gelu_tanh(n @ w["feedforward.W_in.weight"].T)
    return x + hidden @ w["feedforward.W_out.weight"].T


def test_exercise_2_attention_keeps_the_shape():
    block, _ = exercise_3(0.02)
    x = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (1, 6, 16)))
    assert block.attention(x).shape == (1, 6, 16)


def test_exercise_3_output_norms():
    block, x = exercise_3(0.02)
    with torch.no_grad():
        out = block(torch.from_numpy(x)[None])[0].numpy()
    assert out.shape == (6, 16)
    norms = np.linalg.norm(out, axis=-1).round(3)
    assert norms.tolist() == [3.671, 2.77, 4.033, 4.022, 4.686, 3.702]


@pytest.mark.parametrize("scale", [0.02, 0.5])
def test_exercise_3_output_itself(scale):
    """The printed norms are nearly those of the input, since weights of 0.02 add little: that alone
    would excuse many errors. With weights of 0.5 the block changes its input completely."""
    block, x = exercise_3(scale)
    with torch.no_grad():
        out = block(torch.from_numpy(x)[None])[0]
    assert_equal({"out": out}, {"out": exercise_3_in_numpy(block, x)})
    change = np.linalg.norm(out.numpy() - x) / np.linalg.norm(x)
    assert change < 0.05 if scale == 0.02 else change > 2


def test_exercise_4_parameter_counts_and_shape():
    standard, swiglu = FeedForward(64, 256, "gelu_tanh", bias=False), SwiGLU(64, int(64 * 8 / 3))
    assert count(standard) == 32768
    assert count(swiglu) == 32640
    assert round(count(swiglu) / count(standard), 3) == 0.996
    assert swiglu(torch.zeros(1, 6, 64)).shape == (1, 6, 64)


def test_swiglu_is_170_wide_by_default_and_the_others_4_d_model():
    assert ModelConfig(d_model=64, activation="swiglu").resolved().d_ff == 170
    assert ModelConfig(d_model=64).resolved().d_ff == 256


@pytest.mark.parametrize("d_model", [24, 64])
def test_a_block_has_12_d_model_squared_weights_and_13_d_model_others(d_model):
    """4 d^2 in attention, 8 d^2 in the network; norms 4 d, biases 4 d and 5 d."""
    d = d_model
    full = PreLNBlock(ModelConfig(d_model=d, n_heads=4, attention_bias=True))
    assert count(full) == 12 * d**2 + 13 * d
    assert count(full.attention) == 4 * d**2 + 4 * d
    assert count(full.feedforward) == 8 * d**2 + 5 * d
    bare = PreLNBlock(ModelConfig(d_model=d, n_heads=4, feedforward_bias=False))
    assert count(bare) == 12 * d**2 + 4 * d
    matrices = sum(p.numel() for p in full.parameters() if p.ndim == 2)
    assert matrices == 12 * d**2


@pytest.mark.parametrize("n_heads", [1, 2, 8])
def test_heads_cost_no_parameters(n_heads):
    assert count(MultiHeadAttention(24, n_heads, n_heads)) == 4 * 24**2


def test_gpt_3_has_173_billion_weights_in_its_blocks():
    with torch.device("meta"):  # shapes without memory
        block = PreLNBlock(ModelConfig(d_model=12288, n_heads=96, context_length=2048))
    matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    assert matrices == 12 * 12288**2
    assert round(matrices / 1e9, 1) == 1.8
    assert int(96 * matrices / 1e9) == 173
    feedforward = sum(p.numel() for p in block.feedforward.parameters() if p.ndim == 2)
    assert feedforward / matrices == pytest.approx(2 / 3)


# The second text


@pytest.fixture(scope="module")
def notebook():
    """Its draws, in its order."""
    random = np.random.RandomState(1337)
    z = random.randn(2, 5) * 5 + 3
    matrices = {f"attention.W_{name}": random.randn(64, 64) * 0.02 for name in "QKVO"}
    x = random.randn(4, 16, 64)
    matrices["feedforward.W_in"] = random.randn(64, 256) * 0.02
    matrices["feedforward.W_out"] = random.randn(256, 64) * 0.02
    return z, x, block_of({"d_model": 64, "n_heads": 4}, matrices)


def test_layernorm_takes_mean_0_44_and_spread_5_02_to_0_and_1(notebook):
    z = notebook[0]
    assert (round(z.mean(), 2), round(z.std(), 2)) == (0.44, 5.02)
    assert z[1].std() > 6  # "row 1 starts wildly spread (std over 6)"
    with torch.no_grad():
        after = LayerNorm(5).double()(torch.from_numpy(z)).numpy()
    assert (round(abs(after.mean()), 2), round(after.std(), 2)) == (0.0, 1.0)
    np.testing.assert_allclose(after.mean(-1), 0, atol=1e-15)
    np.testing.assert_allclose(after.std(-1), 1, atol=1e-6)


def notebook_positions(T, d_model):
    """Sine in even and cosine in odd slots, each pair of slots i with 10000^(2 (i // 2) / C)."""
    table = np.empty((T, d_model))
    for t in range(T):
        for i in range(d_model):
            angle = t / 10000 ** (2 * (i // 2) / d_model)
            table[t, i] = np.cos(angle) if i % 2 else np.sin(angle)
    return table


def test_positional_encoding():
    ours = SinusoidalPositions(16, 64).double()(torch.zeros(1, 16, 64, dtype=torch.float64))
    assert_equal({"table": ours[0]}, {"table": notebook_positions(16, 64)}, 1e-14)


def test_multi_head_output_shape(notebook):
    _, x, block = notebook
    assert block.attention(torch.from_numpy(x)).shape == (4, 16, 64)


def test_three_blocks_keep_the_shape_stay_finite_and_equal_numpy(notebook):
    _, x, block = notebook
    expected = h = x + notebook_positions(16, 64)
    h = torch.from_numpy(h)
    state = {f"b.{name}": value.numpy() for name, value in block.state_dict().items()}
    config = vars(ModelConfig(d_model=64, n_heads=4).resolved())
    with torch.no_grad():
        for _ in range(3):
            h = block(h)
            expected = reference.block(state, "b", expected, config, {})
    assert h.shape == (4, 16, 64)
    assert torch.isfinite(h).all()
    assert_equal({"h": h}, {"h": expected})


def test_corrections_are_small_and_the_stream_keeps_its_scale(notebook):
    _, x, block = notebook

    def rms(tensor):
        return tensor.square().mean().sqrt().item()

    with torch.no_grad():
        x = torch.from_numpy(x + notebook_positions(16, 64))
        attended = block.attention(block.norm_1(x))
        computed = block.feedforward(block.norm_2(x + attended))
    assert round(rms(x), 1) == 1.2  # "about 1.2"
    assert rms(attended) < 0.1 * rms(x)
    assert rms(computed) < 0.1 * rms(x)
    assert rms(x + attended + computed) == pytest.approx(rms(x), rel=0.01)


def test_widths_64_256_64(notebook):
    feedforward = notebook[2].feedforward
    assert feedforward.W_in.weight.shape == (256, 64)
    assert feedforward.W_out.weight.shape == (64, 256)


def test_attention_is_order_blind_without_mask_and_positions():
    """Shuffled tokens in, the same vectors out, shuffled."""
    block, x = exercise_3(0.5)
    shuffle = [3, 0, 5, 1, 4, 2]
    x = torch.from_numpy(x)[None]
    with torch.no_grad():
        assert_equal({"out": block(x[:, shuffle])}, {"out": block(x)[:, shuffle]})


def test_a_model_of_gpt_2_small_shape_has_its_124_million_parameters():
    """12 blocks of 768 with all biases, 50257 tokens, 1024 positions, tied head: 124439808."""
    config = ModelConfig(
        d_model=768, n_heads=12, n_layers=12, context_length=1024, attention_bias=True
    )
    d = 768
    expected = 12 * (12 * d**2 + 13 * d) + 2 * d + (50257 + 1024) * d
    assert expected == 124439808
    block = PreLNBlock(config)
    assert count(block) * 12 + (50257 + 1024) * d + 2 * d == expected
    small = GPT(ModelConfig(d_model=24, n_heads=3, n_layers=2, attention_bias=True), 11)
    assert count(small) == 2 * (12 * 24**2 + 13 * 24) + 2 * 24 + (11 + 64) * 24
