"""The norms: their equations, where they are delicate, and what they must not mix."""

import math

import numpy as np
import pytest
import torch
from helpers import assert_equal

from gpt.model.norms import NORMS, DyT, LayerNorm, NoNorm, RMSNorm


def with_gains(norm):
    """Gains and shifts that are all different."""
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.linspace(0.5, 2, parameter.numel()))
    return norm


def rows():
    """Ordinary rows, large ones, shifted ones, and one so flat that eps decides."""
    x = np.random.default_rng(0).standard_normal((5, 7))
    x[1] *= 1000
    x[2] += 100
    x[3] = 3 + 1e-3 * x[3]
    x[4] *= 1e-3
    return x


def test_layernorm_is_its_equation():
    norm, x = with_gains(LayerNorm(7).double()), rows()
    expected = np.empty_like(x)
    for i, row in enumerate(x):
        variance = sum((v - sum(row) / 7) ** 2 for v in row) / 7
        standard = (row - sum(row) / 7) / (variance + 1e-5) ** 0.5
        expected[i] = np.linspace(0.5, 2, 7) * standard + np.linspace(0.5, 2, 7)
    assert_equal({"y": norm(torch.from_numpy(x))}, {"y": expected})


def test_rmsnorm_is_its_equation():
    norm, x = with_gains(RMSNorm(7).double()), rows()
    expected = np.empty_like(x)
    for i, row in enumerate(x):
        expected[i] = np.linspace(0.5, 2, 7) * row / (sum(v * v for v in row) / 7 + 1e-5) ** 0.5
    assert_equal({"y": norm(torch.from_numpy(x))}, {"y": expected})


def test_dyt_is_its_equation():
    norm, x = with_gains(DyT(7).double()), rows()
    with torch.no_grad():
        norm.alpha.fill_(0.3)
    gains = np.linspace(0.5, 2, 7)
    expected = np.array([[gains[i] * math.tanh(0.3 * v) for i, v in enumerate(row)] for row in x])
    assert_equal({"y": norm(torch.from_numpy(x))}, {"y": expected + gains})


def test_dyt_is_bounded_by_its_gain_and_a_line_near_zero():
    norm = DyT(4).double()
    large = torch.tensor([[1e6, -1e6, 1e-6, -1e-6]], dtype=torch.float64)
    assert norm(large)[0].tolist() == pytest.approx([1, -1, 0.5e-6, -0.5e-6], rel=1e-9)


def test_none_changes_nothing_and_learns_nothing():
    norm, x = NoNorm(7), torch.from_numpy(rows())
    assert norm(x) is x
    assert not list(norm.parameters())


def test_on_a_flat_row_the_place_of_eps_is_plain_to_see():
    """Variance 1e-6 beside eps 1e-5: inside the root it shrinks the row to 0.3, outside it would
    hardly touch it."""
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64) * 1e-3
    expected = 1e-3 / (1e-6 + 1e-5) ** 0.5
    for norm in (LayerNorm(4).double(), RMSNorm(4).double()):
        assert norm(x)[0, 0].item() == pytest.approx(expected, rel=1e-12)
    assert 1e-3 / (1e-3 + 1e-5) - expected > 0.6


@pytest.mark.parametrize("norm", NORMS)
def test_a_constant_row_gives_no_nan_forward_or_backward(norm):
    x = torch.zeros(2, 6, requires_grad=True)
    y = NORMS[norm](6)(x)
    y.sum().backward()
    assert_equal({"y": y, "gradient": x.grad}, {"y": np.zeros((2, 6)), "gradient": x.grad})


@pytest.mark.parametrize("norm", NORMS)
def test_positions_and_batch_entries_do_not_mix(norm):
    norm = with_gains(NORMS[norm](6).double())
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = norm(x)
    for b in range(2):
        for t in range(3):
            assert torch.equal(norm(x[b : b + 1, t : t + 1])[0, 0], y[b, t])


def test_layernorm_ignores_shift_and_both_ignore_scale():
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer, rms = LayerNorm(8).double(), RMSNorm(8).double()
    assert_equal({"y": layer(x + 5)}, {"y": layer(x)})
    assert (rms(x + 5) - rms(x)).abs().max() > 0.1
    for norm in (layer, rms):
        assert_equal({"y": norm(3 * x)}, {"y": norm(x)}, 1e-4)  # eps weighs less in 3 x


def test_dyt_starts_with_one_alpha_of_a_half():
    start = {name: parameter.tolist() for name, parameter in DyT(5).named_parameters()}
    assert start == {"alpha": [0.5], "gamma": [1] * 5, "beta": [0] * 5}


def test_gains_start_at_one_shifts_at_zero_and_rms_has_no_shift():
    layer, rms = dict(LayerNorm(5).named_parameters()), dict(RMSNorm(5).named_parameters())
    assert list(layer) == ["gamma", "beta"]
    assert list(rms) == ["gamma"]
    assert layer["gamma"].tolist() == rms["gamma"].tolist() == [1] * 5
    assert layer["beta"].tolist() == [0] * 5
