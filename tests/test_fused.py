"""Hand-written backward passes beside those of the plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from gpt.model.fused import ReluSquared, RMSNormalise, Turn

COS, SIN = torch.randn(2, 7, 3, dtype=torch.float64).unbind()


def plain_turn(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * COS - second * SIN, second * COS + first * SIN], dim=-1)


PAIRS = {
    "rms": (lambda x: RMSNormalise.apply(x, 1e-5), lambda x: F.rms_norm(x, (6,), eps=1e-5)),
    "relu2": (ReluSquared.apply, lambda x: F.relu(x).square()),
    "turn": (lambda x: Turn.apply(x, COS, SIN), plain_turn),
}


@pytest.mark.parametrize(("ours", "plain"), PAIRS.values(), ids=PAIRS.keys())
def test_value_and_gradient_are_those_of_the_plain_formula(ours, plain):
    x = torch.randn(2, 5, 7, 6, dtype=torch.float64)
    x[0, 0, 0] = 0
    towards = torch.randn_like(x)
    found = []
    for function in (ours, plain):
        one = x.clone().requires_grad_()
        value = function(one)
        value.backward(towards)
        found.append((value.detach(), one.grad))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-13, atol=1e-13)


def test_what_is_turned_may_lie_in_memory_in_any_order():
    x = torch.randn(7, 2, 6, dtype=torch.float64)
    expected = plain_turn(x.transpose(0, 1))
    torch.testing.assert_close(
        Turn.apply(x.transpose(0, 1), COS, SIN), expected, rtol=0, atol=1e-14
    )


def test_a_root_mean_square_is_float32_or_better():
    x = torch.randn(5, 300).bfloat16().requires_grad_()
    normalised = RMSNormalise.apply(x, 1e-5)
    assert normalised.dtype == torch.float32
    normalised.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    exact = F.rms_norm(x.detach().double(), (300,), eps=1e-5)
    torch.testing.assert_close(normalised.double(), exact, rtol=1e-5, atol=1e-6)
