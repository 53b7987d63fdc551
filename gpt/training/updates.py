"""The update rules, AdamW and Muon: from gradients to new weights.

Torch has both, and the tests hold these to torch's. They are here because torch's Optimizer imports
its compiler, a second of every start, and its Muon takes one matrix at a time. State dicts have the
layout of torch.optim.
"""

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients that move all singular values towards 1 fast, to about 0.7 ... 1.2 in five steps."""


class UpdateRule(ABC):
    """Groups of parameters, each with its settings, and what is remembered of every parameter."""

    memory: ClassVar[dict[str, type]]
    """What is remembered: ``float`` for one number, ``Tensor`` for one of the parameter's shape."""
    never_negative: ClassVar[set[str]] = set()

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        self.param_groups = [settings | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                moved = [p for p in group["params"] if p.grad is not None]
                for parameter in moved:
                    if not self.state[parameter]:
                        self.state[parameter] = self._nothing_remembered(parameter)
                if moved:
                    memory = {name: [self.state[p][name] for p in moved] for name in self.memory}
                    self._move(moved, [p.grad for p in moved], group, **memory)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {number: memory}, "param_groups": [settings and "params": [number, ...]]}``.

        Parameters are numbered through the groups. The tensors are not copied.
        """
        numbers = {parameter: n for n, parameter in enumerate(self._parameters())}
        groups = [g | {"params": [numbers[p] for p in g["params"]]} for g in self.param_groups]
        state = {numbers[p]: dict(memory) for p, memory in self.state.items() if memory}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the memory in a state dict, as copies. The settings stay."""
        parameters = list(self._parameters())
        self.state.clear()
        for number, memory in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {
                name: value.clone()
                if self.memory[name] is float
                else value.to(parameter, copy=True)
                for name, value in memory.items()
            }

    def accepts(self, state_dict: dict[str, Any]) -> bool:
        """Whether a state dict has memory of all these parameters, or of none yet, and it fits."""
        parameters = list(self._parameters())
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        return (
            saved == [len(group["params"]) for group in self.param_groups]
            and len(state_dict["state"]) in (0, len(parameters))
            and all(
                memory.keys() == self.memory.keys()
                and all(self._fits(name, value, parameters[n]) for name, value in memory.items())
                for n, memory in state_dict["state"].items()
            )
        )

    def _fits(self, name: str, value: Any, parameter: Tensor) -> bool:
        shape = torch.Size() if self.memory[name] is float else parameter.shape
        return (
            isinstance(value, Tensor)
            and value.shape == shape
            and value.dtype == torch.float32
            and (name not in self.never_negative or not bool((value < 0).any()))
        )

    def _parameters(self) -> Iterable[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def _nothing_remembered(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.zeros(()) if kind is float else torch.zeros_like(parameter)
            for name, kind in self.memory.items()
        }

    @abstractmethod
    def _move(self, parameters: list[Tensor], gradients: list[Any], group: dict[str, Any],
              **memory: list[Tensor]) -> None:  # fmt: skip
        """Move the parameters, and bring their memory up to date."""


class AdamW(UpdateRule):
    """``w <- (1 - lr decay) w - lr m / (sqrt(v) + eps)``, m and v the debiased running moments.

    Source: Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2.
    """

    memory: ClassVar = {"step": float, "exp_avg": Tensor, "exp_avg_sq": Tensor}
    never_negative: ClassVar = {"step", "exp_avg_sq"}

    def _move(self, parameters, gradients, group, *, step, exp_avg, exp_avg_sq):  # type: ignore[override]
        adamw(
            parameters, gradients, exp_avg, exp_avg_sq, [], step,
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], fused=group["fused"], amsgrad=False, maximize=False,
        )  # fmt: skip


class Muon(UpdateRule):
    """``w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) orthogonal(m)``, for matrices.

    m is Nesterov's momentum; ``orthogonal`` its nearest orthogonal matrix, roughly. The factor
    gives an update the root mean square of AdamW's, so that one learning rate serves both.
    Sources: Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982, algorithm 1.
    """

    memory: ClassVar = {"momentum_buffer": Tensor}

    def _move(self, parameters, gradients, group, *, momentum_buffer):  # type: ignore[override]
        mu, rate = group["momentum"], group["lr"]
        torch._foreach_lerp_(momentum_buffer, gradients, 1 - mu)
        ahead = torch._foreach_lerp(gradients, momentum_buffer, mu)
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        for shape, numbers in _alike(parameters).items():
            directions = orthogonal(torch.stack([_wide(ahead[n]) for n in numbers]))
            scale = rate * 0.2 * max(shape) ** 0.5
            for n, direction in zip(numbers, directions.unbind(), strict=True):
                tall = parameters[n].shape != shape
                parameters[n].sub_(direction.T if tall else direction, alpha=scale)


def accepted(rules: Sequence[UpdateRule], saved: Sequence[dict[str, Any]]) -> bool:
    """Whether the state dicts hold what the rules remember: their kernels trust every shape."""
    return len(rules) == len(saved) and all(
        rule.accepts(one) for rule, one in zip(rules, saved, strict=True)
    )


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """``U V^T`` of each matrix ``U S V^T``, but for singular values between about 0.7 and 1.2.

    Newton-Schulz steps ``x <- a x + (b x x^T + c (x x^T)^2) x`` in bfloat16.
    Shapes: ``(n, rows, columns)`` with rows <= columns, and the same back.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    x /= x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # (n, rows, rows)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _wide(matrix: Tensor) -> Tensor:
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _alike(parameters: list[Tensor]) -> dict[torch.Size, list[int]]:
    """Which parameters have the same shape once they lie on their wide side."""
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for n, parameter in enumerate(parameters):
        alike[_wide(parameter).shape].append(n)
    return alike
