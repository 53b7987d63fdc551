"""The transformer block: communicate, then compute, and add each result to the stream.

Where the norms stand is a subclass of ``Block``, which is its two equations. The names in
``BLOCKS`` are those of the setting ``norm_position``.
"""

import math
from typing import Any

from torch import Tensor, nn

from gpt.config import ModelConfig
from gpt.model.attention import KVCache, MultiHeadAttention, Rotate
from gpt.model.feedforward import FeedForward, SwiGLU
from gpt.model.norms import NORMS


class Block(nn.Module):
    """Two sublayers and two norms; where the norms stand is left to the subclasses.

    ``number`` counts the blocks of a stack from 1.
    Shapes: x and the result ``(B, T, d_model)``, so blocks stack.
    """

    needs_final_norm = True
    """Whether a stack of these leaves a stream that was never normalised."""

    def __init__(self, config: ModelConfig, number: int = 1) -> None:
        super().__init__()
        config = config.resolved()
        self.number, self.n_layers = number, config.n_layers
        self.norm_1 = NORMS[config.norm](config.d_model)
        self.attention = MultiHeadAttention(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            bias=config.attention_bias,
            qk_norm=config.qk_norm,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
        )
        self.norm_2 = NORMS[config.norm](config.d_model)
        self.feedforward = (
            SwiGLU(config.d_model, config.d_ff, dropout=config.dropout)
            if config.activation == "swiglu"
            else FeedForward(
                config.d_model,
                config.d_ff,
                config.activation,
                bias=config.feedforward_bias,
                dropout=config.dropout,
            )
        )

    @staticmethod
    def enter(x: Tensor) -> Any:
        """What the first block reads, from the embedding."""
        return x

    @staticmethod
    def leave(x: Any, final_norm: nn.Module) -> Tensor:
        """What the head reads, from the last block."""
        return final_norm(x)


class PreLNBlock(Block):
    """``x + f(norm(x))``: the stream itself is never normalised, but for the head (GPT-2)."""

    def forward(
        self, x: Tensor, rotate: Rotate | None = None, cache: KVCache | None = None
    ) -> Tensor:
        x = x + self.attention(self.norm_1(x), rotate, cache)
        x = x + self.feedforward(self.norm_2(x))
        return x


class PostLNBlock(Block):
    """``norm(x + f(x))``: the stream is normalised after every addition (Vaswani et al. 2017)."""

    needs_final_norm = False

    def forward(
        self, x: Tensor, rotate: Rotate | None = None, cache: KVCache | None = None
    ) -> Tensor:
        x = self.norm_1(x + self.attention(x, rotate, cache))
        x = self.norm_2(x + self.feedforward(x))
        return x


class SandwichBlock(Block):
    """``x + norm(f(norm(x)))``: a norm before each sublayer and another one after it.

    Sources: Ding et al. 2021 (CogView), arXiv 2105.13290; Kim et al. 2025 (Peri-LN), arXiv
    2502.02732; Gemma 2.
    """

    def __init__(self, config: ModelConfig, number: int = 1) -> None:
        super().__init__(config, number)
        self.output_norm_1 = NORMS[config.norm](config.d_model)
        self.output_norm_2 = NORMS[config.norm](config.d_model)

    def forward(
        self, x: Tensor, rotate: Rotate | None = None, cache: KVCache | None = None
    ) -> Tensor:
        x = x + self.output_norm_1(self.attention(self.norm_1(x), rotate, cache))
        x = x + self.output_norm_2(self.feedforward(self.norm_2(x)))
        return x


class ReorderedBlock(Block):
    """``x + norm(f(x))``: the norm is inside the residual branch, behind the sublayer.

    Source: OLMo 2, arXiv 2501.00656, section 2.1, where qk_norm belongs to it.
    """

    def forward(
        self, x: Tensor, rotate: Rotate | None = None, cache: KVCache | None = None
    ) -> Tensor:
        x = x + self.norm_1(self.attention(x, rotate, cache))
        x = x + self.norm_2(self.feedforward(x))
        return x


class DeepNormBlock(Block):
    """``norm(alpha x + f(x))``, ``alpha = (2 n_layers)^(1/4)``: Post-LN with a louder skip.

    With ``init native``, which scales the weights of f down as the depth grows.
    Source: Wang et al. 2022, arXiv 2203.00555.
    """

    needs_final_norm = False

    def forward(
        self, x: Tensor, rotate: Rotate | None = None, cache: KVCache | None = None
    ) -> Tensor:
        alpha = (2 * self.n_layers) ** 0.25
        x = self.norm_1(alpha * x + self.attention(x, rotate, cache))
        x = self.norm_2(alpha * x + self.feedforward(x))
        return x


class ResiDualBlock(Block):
    """``x <- norm(x + f(x))``, ``r <- r + f(x)``: Post-LN, and beside it a sum of every f(x).

    Both begin as the embedding; the head reads ``x + norm(r)``. A block takes and returns (x, r).
    Source: Xie et al. 2023, arXiv 2304.14802.
    """

    def forward(
        self,
        streams: tuple[Tensor, Tensor],
        rotate: Rotate | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, r = streams
        f = self.attention(x, rotate, cache)
        x, r = self.norm_1(x + f), r + f
        f = self.feedforward(x)
        x, r = self.norm_2(x + f), r + f
        return x, r

    @staticmethod
    def enter(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    @staticmethod
    def leave(streams: tuple[Tensor, Tensor], final_norm: nn.Module) -> Tensor:
        x, r = streams
        return x + final_norm(r)


class ScaledLNBlock(Block):
    """``x + f(norm(x) / sqrt(l))`` in block number l: Pre-LN whose stream grows less with depth.

    Source: Sun et al. 2025 (LayerNorm scaling), arXiv 2502.05795, which excludes the factor
    1 / sqrt(2 n_layers) of ``init gpt2``.
    """

    def forward(
        self, x: Tensor, rotate: Rotate | None = None, cache: KVCache | None = None
    ) -> Tensor:
        root = math.sqrt(self.number)
        x = x + self.attention(self.norm_1(x) / root, rotate, cache)
        x = x + self.feedforward(self.norm_2(x) / root)
        return x


class MixLNBlock(Block):
    """Post-LN in the first quarter of the blocks, rounded up, and Pre-LN in the others.

    Source: Li et al. 2024 (Mix-LN), arXiv 2412.13795.
    """

    def forward(
        self, x: Tensor, rotate: Rotate | None = None, cache: KVCache | None = None
    ) -> Tensor:
        if self.number <= math.ceil(self.n_layers / 4):
            x = self.norm_1(x + self.attention(x, rotate, cache))
            x = self.norm_2(x + self.feedforward(x))
        else:
            x = x + self.attention(self.norm_1(x), rotate, cache)
            x = x + self.feedforward(self.norm_2(x))
        return x


BLOCKS: dict[str, type[Block]] = {
    "pre": PreLNBlock,
    "post": PostLNBlock,
    "sandwich": SandwichBlock,
    "reordered": ReorderedBlock,
    "deepnorm": DeepNormBlock,
    "residual_dual": ResiDualBlock,
    "lns": ScaledLNBlock,
    "mix": MixLNBlock,
}
