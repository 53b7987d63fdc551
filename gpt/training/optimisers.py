"""Which optimiser moves which weights, and what decays.

Parameters are told apart by the module that holds them, never by their names or ranks, and every
one is accounted for: a parameter that no rule covers stops the run before it starts.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpt.config import TrainingConfig
from gpt.model.gpt import GPT
from gpt.model.norms import NORMS
from gpt.model.positions import LearnedPositions
from gpt.training.updates import AdamW, Muon, UpdateRule


@dataclass(frozen=True)
class ParameterKinds:
    """Every parameter of a model, once."""

    matrices: list[Tensor]
    """Weights of the linear layers inside the blocks: W_Q, W_K, W_V, W_O, W_in, W_gate, W_out."""
    tables: list[Tensor]
    """One row a character or position: token embedding, learned positions, an untied head."""
    vectors: list[Tensor]
    """Gains and shifts of norms, and biases: they are never decayed."""


def parameter_kinds(model: GPT) -> ParameterKinds:
    """Sort the parameters by the module that holds them.

    Raises AssertionError when a parameter is of no known kind, or of two.
    """
    kinds = ParameterKinds([], [], [])
    in_blocks = set(model.blocks.modules())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            (kinds.matrices if module in in_blocks else kinds.tables).append(module.weight)
            if module.bias is not None:
                kinds.vectors.append(module.bias)
        elif isinstance(module, nn.Embedding | LearnedPositions):
            kinds.tables.append(module.weight)
        elif isinstance(module, tuple(NORMS.values())):
            kinds.vectors.extend(module.parameters())
    covered = Counter([*kinds.matrices, *kinds.tables, *kinds.vectors])
    wrong = {name: covered[p] for name, p in model.named_parameters() if covered[p] != 1}
    assert not wrong, f"parameters with another number of optimiser rules than one: {wrong}"
    return kinds


def build_optimisers(model: GPT, config: TrainingConfig, device: torch.device) -> list[UpdateRule]:
    """The optimisers that together move every parameter; call ``step`` on each.

    adamw  one AdamW, eps 1e-8
    muon   Muon for the matrices of the blocks, AdamW for everything else

    Weight decay is decoupled (each step multiplies by 1 - rate weight_decay) and applies to
    matrices and tables, never to vectors. All start at the peak rate; see ``set_learning_rate``.
    Raises AssertionError when a parameter is of no known kind.
    """
    kinds = parameter_kinds(model)
    rate, decay = config.learning_rate, config.weight_decay
    muon = config.optimizer == "muon"
    optimisers: list[UpdateRule] = []
    if muon:
        optimisers.append(
            Muon(
                [{"params": kinds.matrices}],
                lr=rate,
                momentum=config.muon_momentum,
                weight_decay=decay,
            )
        )
    decayed = kinds.tables if muon else [*kinds.matrices, *kinds.tables]
    optimisers.append(
        AdamW(
            [{"params": decayed}, {"params": kinds.vectors, "weight_decay": 0.0}],
            lr=rate,
            betas=(config.beta1, config.beta2),
            eps=1e-8,
            weight_decay=decay,
            fused=device.type in ("cpu", "cuda"),
        )
    )
    return optimisers


def set_learning_rate(optimisers: list[UpdateRule], rate: float) -> None:
    """Give every group the same rate, for the next step."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate
