"""Where the weights start.

Each tensor is drawn from a generator of its own, keyed by its name, so two models that differ in
one option share every other weight: a comparison of norm placements compares norm placements.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpt import streams

if TYPE_CHECKING:
    from gpt.model.gpt import GPT


def initialise(model: "GPT", scheme: str, seed: int) -> None:
    """Draw every weight of the model anew; biases and beta are 0, gamma is 1.

    gpt2    N(0, 0.02); W_O and W_out, which write into the residual stream 2 n_layers times,
            N(0, 0.02 / sqrt(2 n_layers)) (Radford et al. 2019, 2.3)
    xavier  N(0, sqrt(2 / (fan_in + fan_out))), embeddings N(0, 1 / sqrt(d_model))
            (Glorot & Bengio 2010); the second numbers here are standard deviations
    identity  W_O and W_out 0, so that a Pre-LN block begins as the identity (Goyal et al. 2017,
            arXiv 1706.02677, 5.1, in residual networks); embeddings N(0, 0.25), the rest N(0, 0.02)
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    unseen = set(names)

    def normal(weight: Tensor, std: float) -> None:
        draw = torch.randn(
            weight.shape, generator=_generator(seed, names[weight]), dtype=torch.float32
        )
        with torch.no_grad():
            weight.copy_(std * draw)
        unseen.discard(weight)

    def constant(weight: Tensor | None, value: float) -> None:
        if weight is not None:
            nn.init.constant_(weight, value)
            unseen.discard(weight)

    def matrix(layer: nn.Linear, std: float = 0.02) -> None:
        fan_out, fan_in = layer.weight.shape
        normal(layer.weight, math.sqrt(2 / (fan_in + fan_out)) if scheme == "xavier" else std)
        constant(layer.bias, 0.0)

    def norm(layer: nn.Module) -> None:
        constant(getattr(layer, "gamma", None), 1.0)
        constant(getattr(layer, "beta", None), 0.0)

    embedding_std = {"gpt2": 0.02, "xavier": model.config.d_model**-0.5, "identity": 0.25}[scheme]
    normal(model.token_embedding.weight, embedding_std)
    if model.config.positions == "learned":
        normal(model.positions.get_parameter("weight"), embedding_std)
    residual_std = 0.0 if scheme == "identity" else 0.02 / math.sqrt(2 * len(model.blocks))
    block: Any
    for block in model.blocks:
        norm(block.norm_1)
        for layer in (block.attention.W_Q, block.attention.W_K, block.attention.W_V):
            matrix(layer)
        matrix(block.attention.W_O, residual_std)
        norm(block.norm_2)
        matrix(block.feedforward.W_in)
        if hasattr(block.feedforward, "W_gate"):
            matrix(block.feedforward.W_gate)
        matrix(block.feedforward.W_out, residual_std)
    norm(model.final_norm)
    if model.head is not None:
        matrix(model.head)
    assert not unseen, f"no initialisation rule for {sorted(names[p] for p in unseen)}"


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(streams.key(seed, "init", name) % 2**63)
