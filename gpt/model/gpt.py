"""The GPT: embeddings, a stack of blocks, and a head that scores the next character."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import ModelConfig
from gpt.errors import UsageError
from gpt.model.attention import KVCache
from gpt.model.block import BLOCKS
from gpt.model.init import initialise
from gpt.model.kernels import DropoutKernel
from gpt.model.norms import NORMS
from gpt.model.positions import LearnedPositions, RotaryPositions, SinusoidalPositions


class GPT(nn.Module):
    """A stack of identical blocks between an embedding and a head.

    ``GPT(config, vocab_size)(tokens)`` takes ids ``(B, T)``, T <= context_length, and returns
    logits ``(B, T, vocab_size)``, always: those at position t score the character at t + 1.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, seed: int = 1337) -> None:
        super().__init__()
        self.config = config = config.resolved()
        self.vocab_size = vocab_size
        self.drop: DropoutKernel = F.dropout
        self.token_embedding = nn.Embedding(vocab_size, config.d_model)
        self.positions: nn.Module
        if config.positions == "learned":
            self.positions = LearnedPositions(config.context_length, config.d_model)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(config.context_length, config.d_model)
        else:
            self.positions = RotaryPositions(config.context_length, config.d_k)
        block = BLOCKS[config.norm_position]
        numbers = range(1, config.n_layers + 1)
        self.blocks = nn.ModuleList(block(config, number) for number in numbers)
        norm = NORMS[config.norm]
        self.final_norm = norm(config.d_model) if block.needs_final_norm else nn.Identity()
        tied = config.tie_embeddings
        self.head = None if tied else nn.Linear(config.d_model, vocab_size, bias=False)
        initialise(self, config.init, seed)

    def forward(self, tokens: Tensor, cache: list[KVCache] | None = None) -> Tensor:
        start = cache[0].length if cache else 0
        stop = start + tokens.shape[1]
        if stop > self.config.context_length:
            raise UsageError(
                f"{stop} characters do not fit in context_length = {self.config.context_length}; "
                "give the last ones only"
            )
        x = self.token_embedding(tokens)  # (B, T) -> (B, T, d_model)
        rotate = self.positions if self.config.positions == "rotary" else None
        if rotate is None:
            x = self.positions(x, start)
        x = self.drop(x, self.config.dropout, self.training)
        placement = BLOCKS[self.config.norm_position]
        stream = placement.enter(x)
        for i, block in enumerate(self.blocks):
            stream = block(stream, rotate, cache[i] if cache else None)
        x = placement.leave(stream, self.final_norm)
        head = self.token_embedding if self.head is None else self.head
        return F.linear(x, head.weight)  # (B, T, d_model) -> (B, T, vocab_size)

    def new_cache(self, batch_size: int = 1) -> list[KVCache]:
        """An empty cache a block. ``model(tokens, cache)`` then reads only the new tokens."""
        config = self.config
        shape = (batch_size, config.n_kv_heads, config.context_length, config.d_k)
        return [KVCache(self.token_embedding.weight.new_empty(shape)) for _ in self.blocks]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.token_embedding.weight.device


@contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards the mode the model was in."""
    was_training = model.training
    if was_training:  # switching walks through every module, so only when needed
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if was_training:
            model.train()
