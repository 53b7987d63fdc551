"""Where the weights start.

Each tensor is drawn from a generator of its own, keyed by its name, so two models that differ in
one option share every other weight: a comparison of norm placements compares norm placements.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpt import streams
from gpt.model.norms import NORMS

if TYPE_CHECKING:
    from gpt.model.gpt import GPT

NATIVE = {
    "pre": "gpt2",  # Radford et al. 2019, 2.3
    "post": "xavier",  # Vaswani et al. 2017 as their code has it; Xiong et al. 2020, 2002.04745
    "sandwich": "plain",  # Kim et al. 2025, 2502.02732
    "reordered": "plain",  # OLMo 2, 2501.00656: 0.02 whatever the depth
    "deepnorm": "deepnorm",  # Wang et al. 2022, 2203.00555, figure 2
    "residual_dual": "xavier",  # Xie et al. 2023, 2304.14802: that of Post-LN
    "lns": "plain",  # Sun et al. 2025, 2502.05795: never with 1 / sqrt(2 n_layers)
    "mix": "plain",  # Li et al. 2024, 2412.13795
}
"""Placement of the norms -> the scheme of its paper."""


def initialise(model: "GPT", scheme: str, seed: int) -> None:
    """Draw every weight of the model anew; biases and beta are 0, gamma is 1, DyT's alpha 0.5.

    gpt2    N(0, 0.02); W_O and W_out, which write into the residual stream 2 n_layers times,
            N(0, 0.02 / sqrt(2 n_layers)) (Radford et al. 2019, 2.3)
    xavier  N(0, sqrt(2 / (fan_in + fan_out))), embeddings N(0, 1 / sqrt(d_model))
            (Glorot & Bengio 2010); the second numbers here are standard deviations
    identity  W_O and W_out 0, so that a Pre-LN block begins as the identity (Goyal et al. 2017,
            arXiv 1706.02677, 5.1, in residual networks); embeddings N(0, 0.25), the rest N(0, 0.02)
    native  that of the placement, by the table ``NATIVE``: one of the above, or
            plain     N(0, 0.02) everywhere
            deepnorm  xavier, and the matrices that values pass through (W_V, W_O, W_in, W_gate,
                      W_out, not W_Q and W_K) times beta = (8 n_layers)^(-1/4)
    """
    if scheme == "native":
        scheme = NATIVE[model.config.norm_position]
    xavier = scheme in ("xavier", "deepnorm")
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

    def matrix(layer: nn.Linear, std: float = 0.02, factor: float = 1.0) -> None:
        fan_out, fan_in = layer.weight.shape
        std = math.sqrt(2 / (fan_in + fan_out)) if xavier else std
        normal(layer.weight, factor * std)
        constant(layer.bias, 0.0)

    def norm(layer: nn.Module) -> None:
        constant(getattr(layer, "gamma", None), 1.0)
        constant(getattr(layer, "beta", None), 0.0)
        constant(getattr(layer, "alpha", None), 0.5)

    embedding_std = 0.25 if scheme == "identity" else 0.02
    if xavier:
        embedding_std = model.config.d_model**-0.5
    normal(model.token_embedding.weight, embedding_std)
    if model.config.positions == "learned":
        normal(model.positions.get_parameter("weight"), embedding_std)
    n_layers = len(model.blocks)
    residual_std = {"gpt2": 0.02 / math.sqrt(2 * n_layers), "identity": 0.0}.get(scheme, 0.02)
    beta = (8 * n_layers) ** -0.25 if scheme == "deepnorm" else 1.0
    block: Any
    for block in model.blocks:
        matrix(block.attention.W_Q)
        matrix(block.attention.W_K)
        matrix(block.attention.W_V, factor=beta)
        matrix(block.attention.W_O, residual_std, beta)
        matrix(block.feedforward.W_in, factor=beta)
        if hasattr(block.feedforward, "W_gate"):
            matrix(block.feedforward.W_gate, factor=beta)
        matrix(block.feedforward.W_out, residual_std, beta)
    for module in model.modules():
        if isinstance(module, tuple(NORMS.values())):
            norm(module)
    if model.head is not None:
        matrix(model.head)
    assert not unseen, f"no initialisation rule for {sorted(names[p] for p in unseen)}"


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(streams.key(seed, "init", name) % 2**63)
