"""The iterator that writes: a model, a prompt, and one id a row for every step."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from gpt import streams
from gpt.config import Dtype
from gpt.errors import NonFiniteError, UsageError
from gpt.model.gpt import GPT
from gpt.sampling.filters import distribution, draw
from gpt.sampling.native import NativeReader
from gpt.sampling.options import SamplingConfig
from gpt.sampling.readers import Reader, readers_for

AHEAD = 128
"""Steps that one of many readers writes before the next one's turn."""


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
    native: bool = True,
    dtype: Dtype = "auto",
) -> Iterator[Tensor]:
    """Continue each row of ``prompt`` ``(B, T)``, T >= 1: yields ids ``(B,)`` on the CPU, n_chars
    times: of a few rows each before the next is computed, of many rows up to AHEAD steps at once.

    Of a prompt longer than the context only the last context_length characters are read. When the
    window is full, its last context_length // 2 characters are read anew and the writing goes on
    with the room won; so a character costs about the same however long the text, and within the
    first window the text is the one that a model without a cache writes.

    Row k draws from a stream of its own, keyed by (seed, k): it is the same text in any company, up
    to rounding. The filters and the draw are computed on the CPU in float64, on any device.
    ``repetition_penalty`` counts the last context_length characters, those of the prompt included.

    ``native`` computes a model on the CPU with kernels compiled by the system's C compiler, where
    there is one, from the weights that the model has at the first character; the logits are the
    model's up to rounding. ``dtype`` is how these kernels store matrices (SampleCompute says when).

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
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise UsageError(
            f"the prompt has shape {tuple(prompt.shape)}, not (B, T) with B and T of 1 or more; "
            "start with at least one character a row"
        )
    return _write(model, prompt.cpu().long().numpy(), n_chars, config, native, dtype)


def _write(
    model: GPT,
    prompt: np.ndarray,
    n_chars: int,
    config: SamplingConfig,
    native: bool,
    dtype: Dtype,
) -> Iterator[Tensor]:
    if n_chars < 1:
        return
    readers = readers_for(model, len(prompt), native=native, dtype=dtype)
    context, ahead = model.config.context_length, 1 if len(readers) == 1 else AHEAD
    writings, row = [], 0
    for reader in readers:
        rows = range(row, row + reader.n_streams)
        writings.append(_rows(reader, rows, prompt[rows], n_chars, context, ahead, config))
        row = rows.stop
    steps = writings[0] if len(writings) == 1 else _side_by_side(writings)
    yield from map(torch.from_numpy, steps)


def _side_by_side(writings: list[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """The steps of all writings joined, each written AHEAD steps before the next one's turn.

    So a reader's caches are warm for more than one step, and threads seldom wait for each other.
    """

    def some(writing: Iterator[np.ndarray]) -> tuple[list[np.ndarray], NonFiniteError | None]:
        steps: list[np.ndarray] = []
        try:
            for step in islice(writing, AHEAD):
                steps.append(step)
        except NonFiniteError as error:
            return steps, error
        return steps, None

    pool = ThreadPoolExecutor(min(torch.get_num_threads(), len(writings)))
    try:
        coming = pool.map(some, writings)
        while True:
            written = list(coming)
            steps, error = min(written, key=lambda one: len(one[0]))  # what all have
            if not error:
                coming = pool.map(some, writings)  # while the caller takes the earlier ones
            together = zip(*(steps for steps, _ in written), strict=False)
            yield from map(np.concatenate, together)
            if error:
                raise error
            if not steps:
                return
    finally:
        pool.shutdown(cancel_futures=True)  # the caller may have seen enough


def _rows(
    reader: Reader,
    rows: range,
    prompt: np.ndarray,
    n_chars: int,
    context: int,
    ahead: int,
    config: SamplingConfig,
) -> Iterator[np.ndarray]:
    """What one reader's rows go on with: ids ``(n_streams,)``, n_chars times, up to ``ahead`` of
    them computed at once."""
    generators = [_stream(config.seed, row) for row in rows]
    text = _Window(prompt, context)
    unread, room, made = text.last(context), context, 0
    while made < n_chars:
        if room == 0:
            reader.restart()
            unread, room = text.last(max(1, context // 2)), context
        steps = 1
        if isinstance(reader, NativeReader) and not config.has_filters:
            steps = min(ahead, n_chars - made, room - unread.shape[1] + 1)
            uniforms = np.array([generator.random(steps) for generator in generators])
            new = reader.write(unread, uniforms, config.temperature)
        else:
            uniforms = np.array([generator.random() for generator in generators])
            new = _one_step(reader.read(unread), text.last(context), uniforms, config)
        if len(new) < steps:
            yield from new
            raise NonFiniteError(
                f"the logits of character {made + len(new) + 1} are not finite ({reader.where}); "
                "the weights or the device are at fault: try --device cpu, or another checkpoint"
            )
        room -= unread.shape[1] + steps - 1
        made += steps
        text.append(new)
        unread = text.last(1)
        yield from new


def _one_step(
    logits: np.ndarray, recent: np.ndarray, uniforms: np.ndarray, config: SamplingConfig
) -> np.ndarray:
    """Ids ``(1, n_streams)``; none, ``(0, n_streams)``, where a logit is not finite."""
    if not np.isfinite(logits).all():
        return np.empty((0, len(logits)), np.int64)
    probabilities = distribution(
        logits.astype(np.float64),
        recent,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
    )
    return draw(probabilities, uniforms)[None]


class _Window:
    """The last characters of every row, at least ``context`` of them: ids ``(B, ...)``."""

    def __init__(self, start: np.ndarray, context: int) -> None:
        start = start[:, -context:]
        self.context, self.end = context, start.shape[1]
        self.ids = np.empty((len(start), 2 * context + AHEAD), np.int64)
        self.ids[:, : self.end] = start

    def last(self, n: int) -> np.ndarray:
        return self.ids[:, max(0, self.end - n) : self.end]

    def append(self, new: np.ndarray) -> None:
        """Add ids ``(n, B)``, n at most AHEAD."""
        if self.end + AHEAD > self.ids.shape[1]:
            self.ids[:, : self.context] = self.last(self.context)
            self.end = self.context
        stop = self.end + len(new)
        self.ids[:, self.end : stop] = new.T
        self.end = stop


def _stream(seed: int, row: int) -> np.random.Generator:
    """The uniform numbers of a row: counter-based, and no two (seed, row) share a key."""
    return np.random.Generator(np.random.Philox(key=streams.key(seed, "sample", row)))
