"""How many parameters a model has and what a character costs, known from the config alone."""

from gpt.config import ModelConfig
from gpt.model.block import BLOCKS


def parameter_count(config: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Parameters by component; the sum is the real number, every bias and gain included.

    With grouped heads g = n_kv_heads / n_heads (1 by default) and d = d_model:

    token_embedding  vocab_size d
    positions        context_length d when learned, else 0
    attention        n_layers (2 + 2 g) d^2: W_Q, W_O, W_K, W_V; with attention_bias + (2 + 2 g) d
    feedforward      n_layers 2 d d_ff, swiglu 3 d d_ff; with feedforward_bias + d_ff + d
    norms            2 n_layers norms (sandwich: 4 n_layers), one more where the placement has a
                     final norm, of 2 d (layer), d (rms), 2 d + 1 (dyt) or 0 (none)
    head             0 when tied, else vocab_size d

    With the defaults, d_ff = 4 d, the matrices of a block hold 4 d^2 + 8 d^2 = 12 d^2 parameters.
    """
    attention, feedforward = _matrices(config)
    attention_bias, feedforward_bias = _biases(config)
    return {
        "token_embedding": vocab_size * config.d_model,
        "positions": config.context_length * config.d_model * (config.positions == "learned"),
        "attention": config.n_layers * (attention + attention_bias),
        "feedforward": config.n_layers * (feedforward + feedforward_bias),
        "norms": _gains(config),
        "head": vocab_size * config.d_model * (not config.tie_embeddings),
    }


def kind_count(config: ModelConfig, vocab_size: int) -> dict[str, int]:
    """The same parameters by the way they are optimised.

    matrices  of the blocks: W_Q, W_K, W_V, W_O, W_in, W_gate, W_out
    tables    token embedding, learned positions, an untied head
    vectors   gains, shifts and alphas of norms, and biases
    """
    counts = parameter_count(config, vocab_size)
    return {
        "matrices": config.n_layers * sum(_matrices(config)),
        "tables": counts["token_embedding"] + counts["positions"] + counts["head"],
        "vectors": counts["norms"] + config.n_layers * sum(_biases(config)),
    }


def flops_per_character(config: ModelConfig, vocab_size: int, length: int | None = None) -> int:
    """Floating-point operations of a forward pass, per character; training takes three times that.

    Two for each multiply-add of a matrix product, T = length (default: context_length):

        n_layers (2 (weights of the block's matrices) + 4 T d_model) + 2 d_model vocab_size

    With the default widths a block costs 24 d_model^2 + 4 T d_model: attention's scores and its
    mixing are 2 T d_model each, over all T x T pairs, as most kernels compute them. Norms,
    activations, softmax and rotations are not counted. The backward pass multiplies twice for
    every product of the forward pass.
    """
    T = config.context_length if length is None else length
    block = 2 * sum(_matrices(config)) + 4 * T * config.d_model
    return config.n_layers * block + 2 * config.d_model * vocab_size


def _matrices(config: ModelConfig) -> tuple[int, int]:
    """Weights of one block's matrices: attention, feed-forward."""
    d_ff, kv_width = _widths(config)
    d_model = config.d_model
    gate = config.activation == "swiglu"
    return 2 * d_model**2 + 2 * d_model * kv_width, (2 + gate) * d_model * d_ff


def _biases(config: ModelConfig) -> tuple[int, int]:
    """Biases of one block: attention, feed-forward."""
    d_ff, kv_width = _widths(config)
    return (
        config.attention_bias * (2 * config.d_model + 2 * kv_width),
        bool(config.resolved().feedforward_bias) * (d_ff + config.d_model),
    )


def _gains(config: ModelConfig) -> int:
    in_a_block = 4 if config.norm_position == "sandwich" else 2
    n_norms = in_a_block * config.n_layers + BLOCKS[config.norm_position].needs_final_norm
    d = config.d_model
    return n_norms * {"layer": 2 * d, "rms": d, "dyt": 2 * d + 1, "none": 0}[config.norm]


def _widths(config: ModelConfig) -> tuple[int, int]:
    """d_ff, and the width of all key heads together."""
    config = config.resolved()
    assert config.d_ff is not None
    assert config.n_kv_heads is not None
    return config.d_ff, config.n_kv_heads * config.d_k
