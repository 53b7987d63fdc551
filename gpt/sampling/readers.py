"""What reads characters and scores the next: torch with its caches, or the kernels in C.

A reader keeps what it has read of each stream, so that a step reads the new characters only.
"""

from typing import Protocol

import numpy as np
import torch

from gpt.config import Dtype
from gpt.model.gpt import GPT, evaluating
from gpt.sampling.native import NativeReader, native_readers


class Reader(Protocol):
    """Streams of text, read side by side."""

    n_streams: int

    @property
    def where(self) -> str:
        """Device and dtype, for messages."""

    def restart(self) -> None:
        """Forget what was read."""

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Read ids ``(n_streams, T)`` after the earlier ones; return logits ``(n_streams,
        vocab_size)`` of the character that follows, float32 or float64."""


class TorchReader:
    """The model itself, and its caches."""

    def __init__(self, model: GPT, n_streams: int) -> None:
        self.model, self.n_streams = model, n_streams
        self.restart()

    @property
    def where(self) -> str:
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return f"device {self.model.device}, {dtype}"

    def restart(self) -> None:
        with evaluating(self.model):
            self.cache = self.model.new_cache(self.n_streams)

    def read(self, ids: np.ndarray) -> np.ndarray:
        model = self.model
        with evaluating(model):
            tokens = torch.from_numpy(ids).to(model.device)
            logits = model.forward(tokens, self.cache)[:, -1]  # -> (B, vocab_size)
            exact = logits.dtype in (torch.float32, torch.float64)
            return (logits if exact else logits.float()).cpu().numpy()


def readers_for(
    model: GPT, n_streams: int, *, native: bool, dtype: Dtype
) -> list[NativeReader] | list[TorchReader]:
    """Readers that share the streams, in order: of the kernels in C where they are wanted, can be
    had and agree with the model, else one of torch."""
    found = native_readers(model, n_streams, dtype) if native else []
    return found or [TorchReader(model, n_streams)]
