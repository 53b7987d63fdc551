"""Models before any training: their gradients, their stream, and how easily they change."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gpt import streams
from gpt.config import ModelConfig, RunConfig
from gpt.lab.probes import Measured, measure, rms, without_dropout
from gpt.model.gpt import GPT
from gpt.text.reading import Corpus
from gpt.text.windows import evaluation_batches

N_BATCHES = 4
NOISE = 0.03
"""Relative: each weight of the blocks is multiplied by ``1 + NOISE z``, z standard normal."""
RATE = 1e-3
"""Of the one update, by plain gradient descent: small enough to be linear at 24 blocks."""

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, ids ``(B, T)`` each."""


@dataclass(frozen=True)
class Start:
    """What one model is like before its first update."""

    gradients: list[float]
    """Of each block's W_out: Frobenius norm of its mean over batches, the expected gradient."""
    last: float
    """Of the last block's W_out: mean over positions of the norm of that position's gradient."""
    total: float
    """Norm of the gradient in all parameters, on the first batch."""
    branch_over_skip: list[float]
    """A number a sublayer."""
    stream: list[float]
    """rms after 0, 1, ... sublayers: of what the next is added to, and of what leaves the last."""
    amplification: float
    """Squared relative change of the logits under NOISE (Liu et al. 2020, arXiv 2004.08249)."""
    update: float
    """rms change of the logits by one update (Wang et al. 2022, arXiv 2203.00555)."""


def fresh(config: RunConfig, corpus: Corpus, seed: int) -> GPT:
    """The model as the first step of a training with this seed finds it."""
    return GPT(config.model, corpus.tokenizer.vocab_size, seed)


def first_batches(config: RunConfig, corpus: Corpus) -> list[Batch]:
    """The first windows of the validation split, in batches of the size that trains."""
    parts = evaluation_batches(corpus.val, config.model.context_length, config.training.batch_size)
    return [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in islice(parts, N_BATCHES)]


def look(model: GPT, batches: Sequence[Batch], seed: int) -> Start:
    """Everything above. ``seed`` draws the noise; the model stays as it is."""
    seen = [measure(model, *batch) for batch in batches]
    first, (inputs, targets) = seen[0], batches[0]
    return Start(
        _expected([one.output_gradients for one in seen]),
        position_gradient(model, inputs, targets),
        first.total,
        [one.branch / max(one.skip, 1e-30) for one in first.additions],
        [*(one.skip for one in first.additions), first.leaves],
        amplification(model, inputs, first.logits, seed),
        update(model, inputs, first),
    )


def expected_gradients(model: GPT, batches: Sequence[Batch]) -> list[float]:
    """Of each block's W_out: the mean over batches first, then its Frobenius norm.

    Source: Xiong et al. 2020, arXiv 2002.04745, section 3.4.
    """
    return _expected([measure(model, *batch).output_gradients for batch in batches])


def _expected(gradients: Sequence[Sequence[Tensor]]) -> list[float]:
    return [
        torch.stack(of_block).mean(0).norm().item() for of_block in zip(*gradients, strict=True)
    ]


def position_gradient(model: GPT, inputs: Tensor, targets: Tensor) -> float:
    """Mean over positions of ``|dL_t / dW_out|``, W_out of the last block, L_t the loss there.

    What Theorem 1 of Xiong et al. 2020 bounds is this; the gradient of the mean loss can be any
    part of it, because positions may pull in different directions. Behind the last W_out nothing
    crosses positions, so the gradient at t is ``g_t h_t^T``, with norm ``|g_t| |h_t|``.
    """
    caught: list[Tensor] = []

    def catch(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        caught.extend((inputs[0], output))

    W_out = model.get_submodule(f"blocks.{len(model.blocks) - 1}.feedforward.W_out")
    hook = W_out.register_forward_hook(catch)
    try:
        with without_dropout(model), torch.enable_grad():
            logits = model.forward(inputs)
    finally:
        hook.remove()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    h, out = caught
    (g,) = torch.autograd.grad(loss, out)
    return (h.detach().norm(dim=-1) * g.norm(dim=-1)).mean().item()


def amplification(
    model: GPT, inputs: Tensor, logits: Tensor, seed: int, noise: float = NOISE
) -> float:
    """``|dF|^2 / |F|^2`` of the logits F when the matrices of the blocks get relative noise."""
    changed = {}
    for name, weight in model.named_parameters():
        if name.startswith("blocks.") and weight.dim() == 2:
            random = torch.Generator().manual_seed(streams.key(seed, "noise", name) % 2**63)
            draw = torch.randn(weight.shape, generator=random, dtype=torch.float32)
            changed[name] = weight.detach() * (1 + noise * draw)
    return (rms(_with(model, changed, inputs) - logits) / rms(logits)) ** 2


def update(model: GPT, inputs: Tensor, measured: Measured, rate: float = RATE) -> float:
    """rms change of the logits of a batch by one step of gradient descent on it."""
    weights = dict(model.named_parameters())
    changed = {
        name: weights[name].detach() - rate * gradient
        for name, gradient in measured.gradients.items()
    }
    return rms(_with(model, changed, inputs) - measured.logits)


def _with(model: GPT, changed: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """The logits ``(B, T, vocab_size)`` with some parameters replaced; the model keeps its own."""
    with without_dropout(model), torch.no_grad():
        return functional_call(model, changed, (inputs,))


def begin_at_rms_1(model: GPT, inputs: Tensor) -> GPT:
    """Scale the tables of tokens and positions so that the stream begins with rms 1, as theory
    has it. The head must be one of its own."""
    assert model.head is not None
    factor = 1 / measure(model, inputs, inputs).additions[0].skip
    with torch.no_grad():
        for table in (model.token_embedding, model.positions):
            for weight in table.parameters():
                weight.mul_(factor)
    return model


def theory(norm_position: str, n_layers: int, d_model: int, seed: int) -> list[float]:
    """``|x|^2 / d_model`` in the setting of Xiong et al. 2020's proofs, from standard normal x.

    One head, Q = K = 0, d_ff = d_model, ReLU, every weight N(0, 1 / d_model). For post a number a
    block, of what its second norm reads (theirs: ``x^{post,5}``); else one, of what leaves the
    last block. Means over 256 positions in 8 windows.
    """
    config = ModelConfig(
        norm_position=norm_position,  # type: ignore[arg-type]
        n_layers=n_layers, d_model=d_model, n_heads=1, d_ff=d_model, activation="relu",
        init="xavier", context_length=32,
    )  # fmt: skip
    model = GPT(config, 2, seed)
    random = torch.Generator().manual_seed(streams.key(seed, "noise", "theory") % 2**63)
    x = torch.randn(8, 32, d_model, generator=random)
    squares: list[float] = []
    with torch.no_grad():
        for block in model.blocks:
            for name in ("attention.W_Q.weight", "attention.W_K.weight"):
                block.get_parameter(name).zero_()
            hook = block.get_submodule("norm_2").register_forward_pre_hook(
                lambda _norm, inputs: squares.append(rms(inputs[0]) ** 2)
            )
            x = block(x)
            hook.remove()
    return squares if norm_position == "post" else [rms(x) ** 2]


def slope(values: dict[int, float]) -> float:
    """Of log y against log x, by least squares."""
    x, y = np.log(list(values)), np.log(list(values.values()))
    return float(np.polyfit(x, y, 1)[0])
