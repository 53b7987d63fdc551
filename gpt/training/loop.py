"""The training loop: forward, backward, update, and what is told about it.

A step is one optimiser update. Everything that a step draws is a pure function of (seed, step):
its windows, its learning rate, and the state of the dropout generator. So a resumed run needs no
random state, and how often it is evaluated cannot change it.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt import streams
from gpt.config import TrainingConfig
from gpt.errors import NonFiniteError
from gpt.model.gpt import GPT, evaluating
from gpt.text.windows import WINDOW_STARTS, evaluation_batches, take
from gpt.training.optimisers import set_learning_rate
from gpt.training.schedules import learning_rate
from gpt.training.updates import UpdateRule
from gpt.training.watch import Watch, total_norm

Autocast = Callable[[], AbstractContextManager[Any]]


class Observer(Protocol):
    """What the run does with what the loop tells; ``step`` counts the updates done."""

    def logged(self, step: int, values: dict[str, float]) -> None:
        """Points for the curves, at the logging interval."""

    def evaluated(self, step: int, loss: float | None) -> None:
        """A validation loss in nats per character (None without a validation split).

        Called at step 0, every ``eval_every`` steps and at the end.
        """

    def failed(self, step: int, values: dict[str, float]) -> None:
        """Points that are not all finite, told before NonFiniteError is raised."""

    def before_step(self, step: int) -> bool:
        """Called before each update; False ends the loop."""

    def stopped(self, step: int) -> None:
        """The loop ended early, because ``before_step`` said so."""


def train(
    model: GPT,
    optimisers: list[UpdateRule],
    train_ids: np.ndarray,
    val_ids: np.ndarray,
    config: TrainingConfig,
    autocast: Autocast,
    observer: Observer,
    first_step: int = 0,
) -> int:
    """Do the updates ``first_step`` to ``config.steps - 1``; return how many are done then.

    Raises NonFiniteError before an update whose loss or gradient is not finite, and for a
    validation loss that is not.
    """
    log_every = max(config.log_every, math.ceil(config.steps / 1000))

    def evaluation() -> None:
        loss = evaluate(model, val_ids, autocast) if len(val_ids) else None
        if loss is not None and not math.isfinite(loss):
            observer.failed(done, {"loss/val": loss})
            raise NonFiniteError(
                f"step {done}: validation loss = {loss}; what was saved before is intact. Try a "
                "lower --learning_rate, or a longer warm-up"
            )
        observer.evaluated(done, loss)

    done = first_step
    model.train()
    if done == 0:
        evaluation()
    clock = _Clock()
    while done < config.steps and observer.before_step(done):
        rate = learning_rate(done, config)
        set_learning_rate(optimisers, rate)
        _seed_dropout(config.seed, done)
        starts = step_windows(config, done, len(train_ids), model.config.context_length)
        batches = _batches(model, train_ids, starts)
        loss = backward(model, batches, autocast, config.confidence_penalty)
        logging = (done + 1) % log_every == 0 or done == 0 or done + 1 == config.steps
        watch = Watch(model) if logging else None
        norm = clip_gradient(model, config.grad_clip)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            observer.failed(done + 1, {"loss/train": loss, "lr": rate, "grad_norm/total": norm})
            raise NonFiniteError(
                f"step {done + 1}: loss = {loss}, gradient norm = {norm}, learning rate = "
                f"{rate:.3g}, windows start at {_shortened(starts.flatten().tolist())}; this "
                "update was not made, and what was saved before is intact. Try a lower "
                "--learning_rate, or a longer warm-up"
            )
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        done += 1
        clock.count(starts.size * model.config.context_length)
        if watch:
            inputs, _ = next(_batches(model, train_ids, starts))
            values = {"loss/train": loss, "lr": rate, "grad_norm/total": norm}
            values |= watch.values(inputs) | {"speed/chars_per_second": clock.speed()}
            observer.logged(done, values)
        if done % config.eval_every == 0 or done == config.steps:
            evaluation()
            clock = _Clock()
    if done < config.steps:
        observer.stopped(done)
    return done


def step_windows(
    config: TrainingConfig, step: int, n_chars: int, context_length: int
) -> np.ndarray:
    """Where the windows of a step start: ``(grad_accumulation, batch_size)``."""
    accumulation, batch = config.grad_accumulation, config.batch_size
    draw = WINDOW_STARTS[config.windows]
    starts = draw(config.seed, step, accumulation * batch, n_chars, context_length)
    return starts.reshape(accumulation, batch)


def loss_of(model: GPT, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of the next characters, in nats per character, in float32 or better.

    Shapes: inputs and targets ``(B, T)`` ids -> scalar.
    """
    return cross_entropy(log_probabilities(model, inputs), targets, reduction)


def log_probabilities(model: GPT, inputs: Tensor) -> Tensor:
    """``(B, T)`` ids -> ``(B, T, vocab_size)``, in float32 or better."""
    logits = model(inputs)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.log_softmax(exact, dim=-1)


def cross_entropy(log_p: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """``-log p(target)`` in nats: the mean over ``(B, T)``, or the sum."""
    return F.nll_loss(log_p.flatten(0, 1), targets.flatten(), reduction=reduction)


def entropy(log_p: Tensor) -> Tensor:
    """Mean entropy of the predictions, in nats: 0 where all are sure, ln(vocab_size) at most."""
    return -(log_p.exp() * log_p).sum(dim=-1).mean()


def backward(
    model: GPT,
    batches: Iterator[tuple[Tensor, Tensor]],
    autocast: Autocast,
    confidence_penalty: float = 0.0,
) -> float:
    """Leave the gradient of ``loss - confidence_penalty entropy``, the mean over all batches, in
    the parameters; return the mean loss, without the penalty.

    Source of the penalty: Pereyra et al. 2017, arXiv 1701.06548, section 3.
    """
    pairs = list(batches)
    total = 0.0
    for inputs, targets in pairs:
        with autocast():
            log_p = log_probabilities(model, inputs)
            loss = cross_entropy(log_p, targets)
            objective = loss - confidence_penalty * entropy(log_p) if confidence_penalty else loss
        (objective / len(pairs)).backward()
        total += loss.item() / len(pairs)
    return total


def clip_gradient(model: GPT, largest: float) -> float:
    """Scale the gradient down to the norm ``largest`` (0: leave it); return its norm before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = total_norm(gradients)
    norm = total.item()
    if 0 < largest < norm:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), largest, total)
    return norm


def evaluate(model: GPT, ids: np.ndarray, autocast: Autocast) -> float:
    """Mean loss over the whole split, in nats per character, each but the first predicted once.

    Windows are fixed and in order, dropout is off, and no random number is drawn; the mode of the
    model is put back.
    """
    context_length = model.config.context_length
    total = 0.0
    count = 0
    with evaluating(model), autocast():
        for batch in evaluation_batches(ids, context_length, max(1, 4096 // context_length)):
            inputs, targets = (_moved(part, model.device) for part in batch)
            total += loss_of(model, inputs, targets, reduction="sum").item()
            count += targets.numel()
    return total / count


def _batches(model: GPT, ids: np.ndarray, starts: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """One ``(inputs, targets)`` a row of starts, ``(batch_size, context_length)`` each."""
    for row in starts:
        inputs, targets = take(ids, row, model.config.context_length)
        yield _moved(inputs, model.device), _moved(targets, model.device)


def _moved(part: np.ndarray, device: torch.device) -> Tensor:
    """On the device; to a GPU while it computes, which takes memory that stays in place."""
    tensor = torch.from_numpy(part)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _shortened(numbers: list[int], most: int = 64) -> str:
    more = f" and {len(numbers) - most:,} more" if len(numbers) > most else ""
    return f"{numbers[:most]}{more}"


def _seed_dropout(seed: int, step: int) -> None:
    torch.manual_seed(streams.key(seed, "dropout", step) % 2**63)


class _Clock:
    """Characters per second since it was made or last asked."""

    def __init__(self) -> None:
        self.since, self.chars = time.perf_counter(), 0

    def count(self, chars: int) -> None:
        self.chars += chars

    def speed(self) -> float:
        now = time.perf_counter()
        speed = self.chars / max(now - self.since, 1e-9)
        self.since, self.chars = now, 0
        return speed
