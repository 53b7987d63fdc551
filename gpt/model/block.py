"""The transformer block: communicate, then compute, and add each result to the stream."""

from torch import Tensor, nn

from gpt.config import ModelConfig
from gpt.model.attention import KVCache, MultiHeadAttention, Rotate
from gpt.model.feedforward import FeedForward, SwiGLU
from gpt.model.norms import NORMS


class Block(nn.Module):
    """Two sublayers and two norms; where the norms stand is left to the subclasses.

    Shapes: x and the result ``(B, T, d_model)``, so blocks stack.
    """

    needs_final_norm: bool
    """Whether a stack of these leaves a stream that was never normalised."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config = config.resolved()
        self.norm_1 = NORMS[config.norm](config.d_model)
        self.attention = MultiHeadAttention(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            bias=config.attention_bias,
            qk_norm=config.qk_norm,
            dropout=config.dropout,
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


class PreLNBlock(Block):
    """``x + f(norm(x))``: the stream itself is never normalised, but for the head (GPT-2)."""

    needs_final_norm = True

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


BLOCKS = {"pre": PreLNBlock, "post": PostLNBlock}
