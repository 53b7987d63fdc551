import contextlib

import pytest
import torch

from gpt.config import ModelConfig
from gpt.model.block import BLOCKS
from gpt.model.gpt import GPT
from gpt.training import loop
from gpt.training.watch import Watch, stream_rms

TOKENS = torch.arange(24).reshape(3, 8) % 11


@pytest.fixture
def model() -> GPT:
    model = GPT(ModelConfig(d_model=12, n_heads=3, n_layers=2, context_length=8, dropout=0.4), 11)
    loop.backward(model, iter([(TOKENS, TOKENS)]), contextlib.nullcontext)
    return model


def test_gradient_norms_are_those_of_each_block(model):
    values = Watch(model).values(TOKENS)
    for i, block in enumerate(model.blocks):
        flat = torch.cat([p.grad.flatten() for p in block.parameters()])
        assert values[f"grad_norm/block_{i:02}"] == pytest.approx(flat.norm().item(), rel=1e-5)


def test_update_ratio_is_the_relative_change_of_the_weights(model):
    watch = Watch(model)
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.mul_(1.25)
    values = watch.values(TOKENS)
    assert values["update_ratio/block_00"] == 0
    assert values["update_ratio/block_01"] == pytest.approx(0.25, rel=1e-5)


def test_stream_rms_is_measured_without_dropout_and_without_a_draw(model):
    model.train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = stream_rms(model, TOKENS)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    model.eval()
    x = model.positions(model.token_embedding(TOKENS))
    for i, block in enumerate(model.blocks):
        x = block(x)
        assert found[i] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize("norm_position", BLOCKS)
def test_stream_rms_is_that_of_the_residual_stream_of_every_placement(norm_position):
    """In residual_dual, of the sum: the other stream leaves every block with a size of 1."""
    config = ModelConfig(
        d_model=12, n_heads=3, n_layers=3, context_length=8,
        norm_position=norm_position, init="xavier",
    )  # fmt: skip
    model = GPT(config, 11)
    found = stream_rms(model, TOKENS)
    stream = model.blocks[0].enter(model.positions(model.token_embedding(TOKENS)))
    for i, block in enumerate(model.blocks):
        stream = block(stream)
        x = stream[1] if norm_position == "residual_dual" else stream
        assert found[i] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-5)
    if norm_position in ("post", "deepnorm"):
        assert found == pytest.approx([1, 1, 1], rel=1e-3)
    elif norm_position != "mix":
        assert found[0] < found[1] < found[2]


def test_watching_leaves_no_hooks(model):
    stream_rms(model, TOKENS)
    assert not any(block._forward_hooks for block in model.blocks)
