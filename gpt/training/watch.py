"""What a step did inside the model: gradients, updates and the residual stream, block by block.

grad_norm/block_00      norm of the block's gradient, before clipping
update_ratio/block_00   |W after - W before| / |W before| of the step
stream_rms/block_00     root mean square of the stream that leaves the block, after the step, on the
                        first windows of its batch
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpt.model.gpt import GPT, evaluating

WINDOWS = 4
"""Of the batch, whose stream is measured: enough for a root mean square, and cheap."""


class Watch:
    """Made after the backward pass and before clipping; asked for its values after the update."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.gradients = [
            total_norm([p.grad for p in block.parameters() if p.grad is not None]).item()
            for block in model.blocks
        ]
        self.before = [[p.detach().clone() for p in b.parameters()] for b in model.blocks]

    def values(self, inputs: Tensor) -> dict[str, float]:
        """The tags above, for every block. ``inputs``: ids ``(B, T)`` of the step."""
        values = {}
        streams = stream_rms(self.model, inputs[:WINDOWS])
        for i, block in enumerate(self.model.blocks):
            after = [p.detach() for p in block.parameters()]
            moved = total_norm(torch._foreach_sub(after, self.before[i])).item()
            values[f"grad_norm/block_{i:02}"] = self.gradients[i]
            values[f"update_ratio/block_{i:02}"] = moved / max(
                total_norm(self.before[i]).item(), 1e-12
            )
            values[f"stream_rms/block_{i:02}"] = streams[i]
        return values


def stream_rms(model: GPT, inputs: Tensor) -> list[float]:
    """``sqrt(mean(x^2))`` of the residual stream after each block; draws no random number.

    Of the two streams of residual_dual it is the sum, r: the other one was just normalised.
    """
    found: list[float] = []

    def record(_block: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, Tensor]) -> None:
        stream = output[1] if isinstance(output, tuple) else output
        found.append(stream.float().square().mean().sqrt().item())

    hooks = [block.register_forward_hook(record) for block in model.blocks]
    try:
        with evaluating(model):
            model.forward(inputs)  # not model(...): a compiled call would not see the hooks
    finally:
        for hook in hooks:
            hook.remove()
    return found


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Root of the sum of squares of all their numbers."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))))
