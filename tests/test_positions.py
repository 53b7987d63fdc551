"""Learned, sinusoidal and rotary positions: values, precision, and what they leave alone."""

import math

import numpy as np
import pytest
import torch
from helpers import assert_equal

from gpt.model.positions import LearnedPositions, RotaryPositions, SinusoidalPositions


def randn(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def learned():
    positions = LearnedPositions(9, 6).double()
    torch.nn.init.normal_(positions.weight, generator=torch.Generator().manual_seed(0))
    return positions


def test_learned_positions_are_added():
    positions, x = learned(), randn(2, 5, 6)
    assert torch.equal(positions(x), x + positions.weight[:5])


def test_sinusoidal_values_are_those_of_the_paper():
    table = SinusoidalPositions(9, 6).double()(torch.zeros(1, 9, 6, dtype=torch.float64))[0]
    for p in range(9):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-15)
            assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-15)


def test_sinusoidal_positions_scale_the_embedding_first():
    positions, x = SinusoidalPositions(9, 16).double(), randn(2, 5, 16)
    assert_equal({"x": positions(x) - positions(0 * x)}, {"x": 4 * x}, 1e-14)


@pytest.mark.parametrize("make", [learned, lambda: SinusoidalPositions(9, 6).double()])
def test_a_later_start_takes_the_later_positions(make):
    positions, x = make(), randn(2, 7, 6)
    assert torch.equal(positions(x)[:, 3:], positions(x[:, 3:], 3))


def test_rotary_turns_feature_i_and_i_plus_half_by_their_angle():
    rotary, heads = RotaryPositions(9, 6).double(), randn(2, 3, 9, 6)
    turned = torch.empty_like(heads)
    for p in range(9):
        for i in range(3):
            turn = complex(math.cos(p / 10000 ** (i / 3)), math.sin(p / 10000 ** (i / 3)))
            pair = torch.complex(heads[:, :, p, i], heads[:, :, p, i + 3]) * turn
            turned[:, :, p, i], turned[:, :, p, i + 3] = pair.real, pair.imag
    assert_equal({"heads": rotary(heads)}, {"heads": turned}, 1e-14)


def test_rotary_leaves_position_zero_and_every_length_alone():
    rotary, heads = RotaryPositions(9, 6).double(), randn(2, 3, 9, 6)
    turned = rotary(heads)
    assert torch.equal(turned[:, :, 0], heads[:, :, 0])
    assert_equal({"norm": turned.norm(dim=-1)}, {"norm": heads.norm(dim=-1)}, 1e-14)


def test_rotary_products_depend_on_the_distance_alone():
    rotary = RotaryPositions(9, 6).double()
    q, k = randn(6), randn(6) + 1
    products = {}
    for m in range(9):
        for n in range(9):
            at_m, at_n = (rotary(h.expand(1, 1, 1, 6), p) for h, p in ((q, m), (k, n)))
            products.setdefault(m - n, []).append((at_m * at_n).sum().item())
    assert all(np.ptp(values) < 1e-14 for values in products.values())
    assert np.ptp([values[0] for values in products.values()]) > 0.1


def test_rotary_start_is_the_position_of_the_first_head():
    rotary, heads = RotaryPositions(9, 6).double(), randn(2, 3, 7, 6)
    assert torch.equal(rotary(heads)[:, :, 3:], rotary(heads[:, :, 3:], 3))


@pytest.mark.parametrize("make", [SinusoidalPositions, RotaryPositions])
def test_fixed_tables_are_no_parameters_and_not_saved(make):
    module = make(9, 6)
    assert not list(module.parameters())
    assert not module.state_dict()


@pytest.mark.parametrize("make", [SinusoidalPositions, RotaryPositions])
def test_fixed_tables_are_exact_whatever_dtypes_the_module_went_through(make):
    straight, detour = make(9, 6).double(), make(9, 6).bfloat16().float().half().double()
    assert torch.equal(straight.table, detour.table)
    assert straight.table.dtype == torch.float64
    # float32 would show: the waves are not exact in it
    assert not torch.equal(straight.table, straight.table.float().double())
    assert torch.equal(make(9, 6).bfloat16().table, straight.table.bfloat16())


def test_positions_keep_the_dtype_of_a_half_precision_model():
    heads = torch.ones(1, 1, 3, 6, dtype=torch.bfloat16)
    assert RotaryPositions(9, 6)(heads).dtype == torch.bfloat16
    assert SinusoidalPositions(9, 6).bfloat16()(heads[0]).dtype == torch.bfloat16
