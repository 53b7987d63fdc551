"""What happens inside a model, measured from outside on a fixed batch, at any step of a training.

probe/dF                    root mean square change of log-probabilities since the first call (the
                            function update of Wang et al. 2022, arXiv 2203.00555)
probe/branch_over_skip      median of those of the sublayers
probe/branch_over_skip_00   rms of what sublayer 0 adds / rms of what it is added to; sublayers
                            count from 0: attention and feed-forward of each block in turn
probe/stream_rms_00         rms of what sublayer 0 is added to
probe/grad_W_out_00         Frobenius norm of the gradient of the loss in W_out of block 0
probe/grad_first_over_last  that of the first block / that of the last
probe/grad_total            norm of the gradient in all parameters
probe/pred_std              standard deviation over positions of a character's predicted
                            probability, averaged over characters: 0 if every position is told
                            the same

rms is the root mean square over all entries of a tensor ``(B, T, d_model)``.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from statistics import median
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gpt.model.gpt import GPT
from gpt.text.windows import evaluation_batches

CHARACTERS = 1024
"""Of the probe batch; at least one window."""


@dataclass(frozen=True)
class Addition:
    """One ``skip + branch`` on the way through the blocks: root mean squares of the two."""

    skip: float
    branch: float


@dataclass(frozen=True)
class Measured:
    """One forward and one backward pass. All gradients are of the mean loss of the batch."""

    logits: Tensor
    """``(B, T, vocab_size)``, without gradient."""
    additions: list[Addition]
    """One a sublayer, in order."""
    norm_inputs: list[float]
    """rms of what each norm of the blocks reads, in order."""
    leaves: float
    """rms of the stream behind the last block (of the first, where a block has two)."""
    gradients: dict[str, Tensor]
    """Of every parameter that takes part, by its name."""

    @property
    def output_gradients(self) -> list[Tensor]:
        """Gradient of each block's ``W_out``, ``(d_model, d_ff)``: the last matrix before the
        stream, which Xiong et al. 2020 (arXiv 2002.04745) study."""
        names = (f"blocks.{i}.feedforward.W_out.weight" for i in count())
        return [self.gradients[name] for name in takewhile(self.gradients.__contains__, names)]

    @property
    def total(self) -> float:
        """Norm of the gradient in all parameters."""
        return torch.stack([g.norm() for g in self.gradients.values()]).norm().item()


class Probes:
    """``values()`` measures the model as it is; the first call is the reference of dF.

    Takes the first windows of ``val``, one after the other. Draws no random number, is without
    dropout, and leaves the mode of the model and every ``.grad`` as they were.
    """

    def __init__(self, model: GPT, val: np.ndarray) -> None:
        self.model = model
        self.inputs, self.targets = probe_batch(val, model)
        self.before: Tensor | None = None

    def values(self) -> dict[str, float]:
        """The tags above."""
        now = measure(self.model, self.inputs, self.targets)
        log_probabilities = now.logits.log_softmax(-1)
        if self.before is None:
            self.before = log_probabilities
        ratios = [one.branch / max(one.skip, 1e-30) for one in now.additions]
        norms = [gradient.norm().item() for gradient in now.output_gradients]
        values = {
            "probe/dF": rms(log_probabilities - self.before),
            "probe/branch_over_skip": median(ratios),
            "probe/grad_first_over_last": norms[0] / max(norms[-1], 1e-30),
            "probe/grad_total": now.total,
            "probe/pred_std": spread(now.logits),
        }
        for i, (ratio, one) in enumerate(zip(ratios, now.additions, strict=True)):
            values[f"probe/branch_over_skip_{i:02}"] = ratio
            values[f"probe/stream_rms_{i:02}"] = one.skip
        return values | {f"probe/grad_W_out_{i:02}": norm for i, norm in enumerate(norms)}


def probe_batch(val: np.ndarray, model: GPT, characters: int = CHARACTERS) -> tuple[Tensor, Tensor]:
    """The first windows of the ids, inputs and targets ``(B, context_length)`` each."""
    length = model.config.context_length
    inputs, targets = next(evaluation_batches(val, length, max(1, characters // length)))
    return torch.from_numpy(inputs).to(model.device), torch.from_numpy(targets).to(model.device)


def measure(model: GPT, inputs: Tensor, targets: Tensor) -> Measured:
    """One pass forward and back over ids ``(B, T)``, without dropout and without a trace."""
    named = dict(model.named_parameters())
    with without_dropout(model), torch.enable_grad():
        with _Watched(model) as seen:
            logits = model.forward(inputs)  # not model(...): a compiled call hides what it does
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return Measured(
        logits.detach(),
        seen.additions(),
        seen.norm_inputs,
        seen.leaves,
        {name: g for name, g in zip(named, gradients, strict=True) if g is not None},
    )


def rms(x: Tensor) -> float:
    """``sqrt(mean(x^2))`` over all entries."""
    return x.detach().float().square().mean().sqrt().item()


def spread(logits: Tensor) -> float:
    """Deviation of ``softmax(logits)`` over all positions, ``(B, T, V)`` -> mean of V numbers."""
    return logits.float().softmax(-1).flatten(0, 1).std(0, correction=0).mean().item()


@contextmanager
def without_dropout(model: GPT) -> Iterator[None]:
    """Inside, the mode of evaluation; afterwards the mode the model was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class _Watched(TorchFunctionMode):
    """Sees the sums of two streams that a model's blocks make, and what their norms read.

    The equations of a block stay free of anything that measures them: this mode meets every
    operation inside it, and takes ``skip + branch`` where both are ``(B, T, d_model)``.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.blocks = list(model.blocks)
        self.d_model = model.config.d_model
        self.norm_inputs: list[float] = []
        self.leaves = 0.0
        self._in_block = False
        self._sums: list[tuple[Tensor, Tensor, Addition]] = []  # branch, sum, what is measured
        self._normed: set[int] = set()
        self._hooks: list[RemovableHandle] = []

    def additions(self) -> list[Addition]:
        """One a sublayer. A branch that is added to two streams counts where a norm follows."""
        times = Counter(id(branch) for branch, _, _ in self._sums)
        return [
            addition
            for branch, total, addition in self._sums
            if times[id(branch)] == 1 or id(total) in self._normed
        ]

    def __enter__(self) -> Self:
        for block in self.blocks:
            self._hooks.append(block.register_forward_pre_hook(self._enters))
            self._hooks.append(block.register_forward_hook(self._leaves))
            for part in block.children():
                if part not in (block.attention, block.feedforward):
                    self._hooks.append(part.register_forward_pre_hook(self._normalises))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        result = operation(*arguments, **(named or {}))
        if self._in_block and operation in _ADDITIONS and len(arguments) == 2:
            skip, branch = arguments
            if self._is_stream(skip) and self._is_stream(branch):
                self._sums.append((branch, result, Addition(rms(skip), rms(branch))))
        return result

    def _is_stream(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() == 3 and value.shape[-1] == self.d_model

    def _enters(self, _block: nn.Module, _inputs: Any) -> None:
        self._in_block = True

    def _leaves(self, _block: nn.Module, _inputs: Any, output: Any) -> None:
        self._in_block = False
        self.leaves = rms(output[0] if isinstance(output, tuple) else output)

    def _normalises(self, _norm: nn.Module, inputs: tuple[Tensor]) -> None:
        self._normed.add(id(inputs[0]))
        self.norm_inputs.append(rms(inputs[0]))


_ADDITIONS = (Tensor.add, Tensor.__add__, torch.add)
