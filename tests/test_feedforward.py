"""The feed-forward networks: widths, nonlinearities, independence of the positions, dropout."""

import math

import numpy as np
import pytest
import torch
from helpers import assert_equal

from gpt.model.feedforward import ACTIVATIONS, FeedForward, SwiGLU, gelu_tanh, relu2


def networks():
    torch.manual_seed(0)
    return {
        **{name: FeedForward(6, 10, name).double() for name in ACTIVATIONS},
        "swiglu": SwiGLU(6, 10).double(),
    }


def line():
    return torch.linspace(-6, 6, 2401, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: max(0.0, x)),
        ("relu2", lambda x: max(0.0, x) ** 2),
        ("gelu", lambda x: x * 0.5 * (1 + math.erf(x / 2**0.5))),
        (
            "gelu_tanh",
            lambda x: 0.5 * x * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
        ),
    ],
)
def test_each_activation_is_its_formula(name, formula):
    expected = np.array([formula(x) for x in line().tolist()])
    assert_equal({name: ACTIVATIONS[name](line())}, {name: expected}, 1e-14)


def test_the_two_gelus_differ_by_at_most_4_73e_4():
    difference = (gelu_tanh(line()) - ACTIVATIONS["gelu"](line())).abs().max().item()
    assert round(difference, 6) == 4.73e-4


def test_swiglu_multiplies_swish_of_the_gate_by_the_other_branch():
    network = networks()["swiglu"]
    x = torch.randn(1, 1, 6, dtype=torch.float64)
    gate, wide = (network.get_submodule(w).weight @ x[0, 0] for w in ("W_gate", "W_in"))
    hidden = torch.stack(
        [g / (1 + math.exp(-g)) * w for g, w in zip(gate.tolist(), wide, strict=True)]
    )
    assert_equal({"y": network(x)[0, 0]}, {"y": network.W_out.weight @ hidden})


@pytest.mark.parametrize("name", [*ACTIVATIONS, "swiglu"])
def test_each_position_thinks_alone(name):
    network = networks()[name]
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    y = network(x)
    assert y.shape == x.shape
    (gradient,) = torch.autograd.grad(y[1, 3].sum(), x)
    touched = gradient.abs().sum(-1).nonzero().tolist()
    assert touched == [[1, 3]]


def test_parameters_and_their_shapes():
    shapes = {name: tuple(p.shape) for name, p in FeedForward(6, 10, "relu").named_parameters()}
    assert shapes == {
        "W_in.weight": (10, 6),
        "W_in.bias": (10,),
        "W_out.weight": (6, 10),
        "W_out.bias": (6,),
    }
    bare = dict(FeedForward(6, 10, "relu", bias=False).named_parameters())
    assert list(bare) == ["W_in.weight", "W_out.weight"]
    gated = {name: tuple(p.shape) for name, p in SwiGLU(6, 10).named_parameters()}
    assert gated == {"W_gate.weight": (10, 6), "W_in.weight": (10, 6), "W_out.weight": (6, 10)}


@pytest.mark.parametrize(
    "make",
    [lambda: FeedForward(50, 60, "relu", dropout=0.3), lambda: SwiGLU(50, 60, dropout=0.3)],
    ids=["feedforward", "swiglu"],
)
def test_dropout_acts_on_the_output_while_training_only(make):
    torch.manual_seed(0)
    network = make()
    x = torch.randn(4, 25, 50)
    kept = network.train()(x)
    dropped = kept == 0
    assert dropped.float().mean().item() == pytest.approx(0.3, abs=0.03)
    full = network.eval()(x)
    assert not (full == 0).any()
    torch.testing.assert_close(kept[~dropped], full[~dropped] / 0.7)
    assert torch.equal(network(x), full)


def test_relu2_is_smooth_at_zero():
    x = torch.zeros(1, requires_grad=True)
    relu2(x).backward()
    assert x.grad.item() == 0
