"""Autograd equals the complex-step derivative of the NumPy reference, for every weight tensor.

Random directions suffice. Let E be the difference of the two gradients of one tensor. Along a
direction D of independent N(0, 1) entries the derivatives differ by sum(E * D), which is
N(0, |E|^2): it is below the tolerance by accident with probability about tolerance / |E|, for each
of the two directions. An error that matters, |E| > 1e-6, therefore passes both with probability
below 1e-6. The largest entry and a random one are checked alone, too.
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EVERY_VARIANT,
    assert_equal,
    assert_parity,
    random_tokens,
    small_model,
    spread,
    state_of,
    variant_name,
)
from reference import forward as reference

from gpt.model.block import BLOCKS
from gpt.model.norms import NORMS, LayerNorm

STEP = 1e-20
TOLERANCE = 1e-9


def complex_step(state, name, direction, tokens, targets, config):
    """The derivative of the reference's loss along one direction of one weight tensor."""
    nudged = state | {name: state[name] + STEP * 1j * direction}
    logits = reference.forward(nudged, tokens, config)["logits"]
    return reference.loss(logits, targets).imag / STEP


def directions(gradient, rng):
    """Label -> direction: two random ones, the largest entry, and an entry at random."""
    chosen = {f"random {i}": rng.standard_normal(gradient.shape) for i in range(2)}
    entries = {int(np.abs(gradient).argmax()), int(rng.integers(gradient.size))}
    for flat in entries:
        at = np.unravel_index(flat, gradient.shape)
        chosen[f"entry {[int(i) for i in at]}"] = one_hot = np.zeros(gradient.shape)
        one_hot[at] = 1
    return chosen


def assert_gradients(model, seed=0):
    tokens, targets = random_tokens(seed=1), random_tokens(seed=2)
    logits = model(tokens)
    model.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    state, config = state_of(model), dataclasses.asdict(model.config)
    rng = np.random.default_rng(seed)
    actual, expected = {}, {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        for label, direction in directions(gradient, rng).items():
            key = f"{name}, {label}"
            actual[key] = (gradient * direction).sum()
            expected[key] = complex_step(
                state, name, direction, tokens.numpy(), targets.numpy(), config
            )
    assert {key.split(",")[0] for key in expected} == state.keys()
    return assert_equal(actual, expected, TOLERANCE)


@pytest.mark.parametrize("weights", ["shipped", "spread"])
@pytest.mark.parametrize("changes", EVERY_VARIANT, ids=variant_name)
def test_every_tensor_has_the_gradient_of_the_reference(changes, weights):
    model = small_model(**changes)
    assert_gradients(spread(model) if weights == "spread" else model)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "relu2", "swiglu"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_every_activation_in_every_placement_has_the_gradient_of_the_reference(
    activation, norm_position, norm
):
    changes = {"activation": activation, "norm_position": norm_position, "norm": norm}
    assert_gradients(spread(small_model(n_layers=1, **changes)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("norm_position", BLOCKS)
def test_every_placement_with_every_kind_of_norm_has_the_gradient_of_the_reference(
    norm_position, norm
):
    assert_gradients(spread(small_model(norm_position=norm_position, norm=norm)))


def test_the_check_fails_on_a_backward_pass_that_the_forward_pass_hides(monkeypatch):
    """A LayerNorm whose statistics are constants for autograd has the right values."""

    def detached(self, x):
        mean = x.mean(-1, keepdim=True).detach()
        variance = x.var(-1, keepdim=True, correction=0).detach()
        return self.gamma * (x - mean) / torch.sqrt(variance + self.eps) + self.beta

    monkeypatch.setattr(LayerNorm, "forward", detached)
    model = spread(small_model())
    assert_parity(model, random_tokens())
    with pytest.raises(AssertionError, match="largest difference"):
        assert_gradients(model)


def test_the_check_fails_on_one_wrong_entry():
    model = spread(small_model(n_layers=1))
    model.blocks[0].attention.W_V.weight.register_hook(
        lambda gradient: gradient + 1e-6 * F.one_hot(torch.tensor(17), 24 * 24).view(24, 24)
    )
    with pytest.raises(AssertionError, match=r"W_V\.weight, random"):
        assert_gradients(model)


@pytest.mark.parametrize(
    "function", [reference.gelu, reference.gelu_tanh, reference.swish, reference.relu2]
)
def test_an_imaginary_part_does_not_touch_the_real_one(function):
    x = np.linspace(-3, 3, 13)
    nudged = function(x + STEP * 1j)
    assert_equal({"value": nudged.real}, {"value": function(x)}, 1e-14)
    slope = (function(x + 1e-5) - function(x - 1e-5)) / 2e-5
    assert_equal({"slope": nudged.imag / STEP}, {"slope": slope}, 2e-5)
