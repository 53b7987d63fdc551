"""The iterator that writes: a model, a prompt, and one id a row for every step."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gpt import streams
from gpt.errors import NonFiniteError, UsageError
from gpt.model.gpt import GPT, evaluating
from gpt.sampling.filters import distribution, draw
from gpt.sampling.options import SamplingConfig


def generate(
    model: GPT,
    prompt: Tensor,
    n_chars: int,
    *,
    temperature: float = SamplingConfig.temperature,
    top_k: int = SamplingConfig.top_k,
    top_p: float = SamplingConfig.top_p,
    min_p: float = SamplingConfig.min_p,
    repetition_penalty: float = SamplingConfig.repetition_penalty,
    seed: int = SamplingConfig.seed,
) -> Iterator[Tensor]:
    """Continue each row of ``prompt`` ``(B, T)``, T >= 1: yields ids ``(B,)`` on the CPU, n_chars
    times, each before the next is computed.

    Of a prompt longer than the context only the last context_length characters are read. When the
    window is full, its last context_length // 2 characters are read anew and the writing goes on
    with the room won; so a character costs about the same however long the text, and within the
    first window the text is the one that a model without a cache writes.

    Row k draws from a stream of its own, keyed by (seed, k): it is the same text in any company, up
    to rounding. The filters and the draw are computed on the CPU in float64, on any device.
    ``repetition_penalty`` counts the last context_length characters, those of the prompt included.

    The model is in evaluation mode only while it computes: between two characters it is as the
    caller left it. Raises UsageError for an unusable prompt or setting at once, and NonFiniteError
    when the logits of a character are not finite.
    """
    config = SamplingConfig(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise UsageError(
            f"the prompt has shape {tuple(prompt.shape)}, not (B, T) with T >= 1; "
            "start with at least one character a row"
        )
    return _write(model, prompt.cpu().long(), n_chars, config)


def _write(model: GPT, prompt: Tensor, n_chars: int, config: SamplingConfig) -> Iterator[Tensor]:
    context = model.config.context_length
    streams = [_stream(config.seed, row) for row in range(len(prompt))]
    window = unread = prompt[:, -context:]  # (B, T)
    room, cache = 0, None
    for step in range(n_chars):
        with evaluating(model):
            if cache is None or room == 0:
                cache, room = model.new_cache(len(prompt)), context
                unread = window if step == 0 else window[:, -max(1, context // 2) :]
            logits = model.forward(unread.to(model.device), cache)[:, -1]  # -> (B, vocab_size)
            room -= unread.shape[1]
        _check_finite(logits, step)
        probabilities = distribution(
            logits.to("cpu", torch.float64),
            window,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
        )
        uniform = torch.tensor([stream.random() for stream in streams], dtype=torch.float64)
        ids = draw(probabilities, uniform)
        unread = ids[:, None]
        window = torch.cat([window, unread], dim=1)[:, -context:]
        yield ids


def _stream(seed: int, row: int) -> np.random.Generator:
    """The uniform numbers of a row: counter-based, and no two (seed, row) share a key."""
    return np.random.Generator(np.random.Philox(key=streams.key(seed, "sample", row)))


def _check_finite(logits: Tensor, step: int) -> None:
    if not logits.isfinite().all():
        dtype = str(logits.dtype).removeprefix("torch.")
        raise NonFiniteError(
            f"the logits of character {step + 1} are not finite (device {logits.device}, {dtype}); "
            "the weights or the device are at fault: try --device cpu, or another checkpoint"
        )
