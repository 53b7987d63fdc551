"""What a machine may put in place of the plain forms, where it computes the same faster.

Modules hold None, or the plain form, until then; ``gpt.training.kernels`` knows what there is.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

AttentionKernel = Callable[[Tensor, Any, float], Tensor]
"""From joined projections, rotary positions or None, and dropout, to the joined heads."""
ActivationKernel = Callable[[Tensor], Tensor]
NormKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of x, gamma and beta."""
DropoutKernel = Callable[[Tensor, float, bool], Tensor]
"""Of x, the part to drop, and whether the model is training."""
