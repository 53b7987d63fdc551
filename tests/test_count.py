"""Parameters and FLOPs from the config alone, against real models and torch's counter."""

import pytest
import torch.nn.functional as F
from helpers import EVERY_VARIANT, VOCAB_SIZE, B, grid, random_tokens, small_config, variant_name
from torch.utils.flop_counter import FlopCounterMode

from gpt.config import ModelConfig
from gpt.model.attention import explicit_attention
from gpt.model.block import BLOCKS
from gpt.model.count import flops_per_character, kind_count, parameter_count
from gpt.model.gpt import GPT
from gpt.model.norms import NORMS
from gpt.training.optimisers import parameter_kinds

EVERY_SHAPE = [
    changes
    for changes in grid(
        norm_position=["pre", "post"],
        norm=["layer", "rms"],
        positions=["learned", "sinusoidal", "rotary"],
        activation=["gelu_tanh", "swiglu"],
        attention_bias=[False, True],
        feedforward_bias=[None, False, True],
        tie_embeddings=[True, False],
        n_kv_heads=[None, 2],
    )
    if not (changes["activation"] == "swiglu" and changes["feedforward_bias"])
]
EVERY_SHAPE += grid(norm_position=list(BLOCKS), norm=list(NORMS), n_layers=[1, 5])


def component(name: str) -> str:
    """The component that a state-dict key belongs to."""
    if "norm" in name:
        return "norms"
    words = name.split(".")
    return words[2] if words[0] == "blocks" else words[0]


def test_every_component_and_kind_of_every_variant_has_its_real_number_of_parameters():
    for changes in EVERY_SHAPE:
        config = small_config(**changes)
        model = GPT(config, VOCAB_SIZE)
        components = dict.fromkeys(parameter_count(config, VOCAB_SIZE), 0)
        for name, parameter in model.named_parameters():
            components[component(name)] += parameter.numel()
        assert parameter_count(config, VOCAB_SIZE) == components, changes
        members = vars(parameter_kinds(model)).items()
        kinds = {kind: sum(p.numel() for p in parameters) for kind, parameters in members}
        assert kind_count(config, VOCAB_SIZE) == kinds, changes


def test_norms_are_as_many_as_the_placement_has_and_as_large_as_their_kind():
    """Of width d = 24 in 3 blocks: two a block (sandwich: four), and a final one or not."""
    in_blocks = dict.fromkeys(BLOCKS, 6) | {"sandwich": 12}
    for placement in BLOCKS:
        n_norms = in_blocks[placement] + (placement not in ("post", "deepnorm"))
        for norm, size in (("layer", 48), ("rms", 24), ("dyt", 49), ("none", 0)):
            config = small_config(norm_position=placement, norm=norm, n_layers=3)
            assert parameter_count(config, VOCAB_SIZE)["norms"] == n_norms * size


def test_derived_widths_are_counted_as_the_model_derives_them():
    for changes in ({}, {"activation": "swiglu"}):
        config = ModelConfig(d_model=20, n_heads=5, n_layers=3, **changes)
        real = sum(p.numel() for p in GPT(config, 13).parameters())
        assert sum(parameter_count(config, 13).values()) == real


def test_the_matrices_of_a_block_hold_twelve_squares_of_the_width():
    config = ModelConfig(d_model=72, n_heads=6, n_layers=5)
    assert kind_count(config, 65)["matrices"] == 5 * 12 * 72**2


def test_a_swiglu_two_thirds_as_wide_holds_about_as_much_as_the_plain_network():
    plain = ModelConfig(d_model=64, n_layers=1, feedforward_bias=False)
    gated = ModelConfig(d_model=64, n_layers=1, activation="swiglu")
    assert parameter_count(plain, 65)["feedforward"] == 32768
    assert parameter_count(gated, 65)["feedforward"] == 32640


def test_the_blocks_of_gpt_3_hold_about_173_billion():
    config = ModelConfig(d_model=12288, n_heads=96, n_layers=96, context_length=2048)
    assert kind_count(config, 50257)["matrices"] == 96 * 12 * 12288**2 == 173_946_175_488
    assert sum(parameter_count(config, 50257).values()) == pytest.approx(175e9, rel=0.01)


def counted_flops(config: ModelConfig, length: int) -> tuple[int, int]:
    """FLOPs of a forward pass and of both passes, over ``(B, length)``, by torch's counter.

    The counter has no formula for the fused attention kernel of the CPU, so the explicit one
    is counted: it makes the same two products.
    """
    model = GPT(config, VOCAB_SIZE)
    for block in model.blocks:
        block.attention.attend = explicit_attention
    tokens = random_tokens(length)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
        forward = counter.get_total_flops()
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("changes", EVERY_VARIANT, ids=variant_name)
def test_flops_agree_with_torchs_counter_within_one_percent(changes):
    for config, length in (
        (small_config(**changes), 8),
        (small_config(**changes), 5),
        (small_config(**changes | {"d_model": 48, "d_ff": 100, "context_length": 64}), 64),
    ):
        expected = flops_per_character(config, VOCAB_SIZE, length) * B * length
        forward, both = counted_flops(config, length)
        assert forward == pytest.approx(expected, rel=0.01)
        assert both == pytest.approx(3 * expected, rel=0.01)


def test_flops_are_those_of_a_full_window_unless_a_length_is_given():
    config = small_config()
    assert flops_per_character(config, 65) == flops_per_character(config, 65, 8)
    assert flops_per_character(config, 65, 7) < flops_per_character(config, 65, 8)


def test_the_plain_block_costs_24_squares_of_the_width_and_4_widths_a_position():
    with_block = ModelConfig(n_layers=2, d_model=96, n_heads=3, context_length=40)
    without = ModelConfig(n_layers=1, d_model=96, n_heads=3, context_length=40)
    cost = flops_per_character(with_block, 65) - flops_per_character(without, 65)
    assert cost == 24 * 96**2 + 4 * 40 * 96
