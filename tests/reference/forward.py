"""The GPT's forward pass in NumPy: the frozen reference that the torch model must equal.

Functions only. ``state`` maps parameter names to arrays, and each function takes the weights whose
names start with its ``name``. What a function computes on the way it leaves in ``seen``.

Weights may be complex. A real weight plus ``1e-20j`` times a direction then carries the exact
derivative along that direction in the imaginary part (Squire & Trapp 1998), as long as every step
is analytic. So nothing here takes an absolute value (``np.var`` does), maxima and signs are those
of the real part, and erf is continued by its first-order expansion.
"""

import math

import numpy as np

EPS = 1e-5
BASE = 10000.0


def forward(state, tokens, config):
    """Every intermediate of the pass, by name, from ``embedding`` to ``logits``.

    state   parameter name -> array, float64 or complex128
    tokens  ids (B, T)
    config  the fields of a resolved ModelConfig, as a dict
    """
    seen, placement = {}, config["norm_position"]
    x = embed(state, tokens, config)  # (B, T) -> (B, T, d_model)
    seen["embedding"] = r = x
    for i in range(config["n_layers"]):
        name = f"blocks.{i}"
        x = block(state, name, x, config, seen, i)  # (B, T, d_model) -> (B, T, d_model)
        if placement == "residual_dual":
            r = seen[f"{name}.dual"] = r + seen[f"{name}.attention"] + seen[f"{name}.feedforward"]
    if placement == "residual_dual":
        seen["final_norm"] = norm(state, "final_norm", r, config)
        x = x + seen["final_norm"]
    elif placement not in ("post", "deepnorm"):
        x = seen["final_norm"] = norm(state, "final_norm", x, config)
    head = state["token_embedding.weight" if config["tie_embeddings"] else "head.weight"]
    seen["logits"] = x @ head.T  # (B, T, d_model) -> (B, T, vocab_size)
    return seen


def loss(logits, targets):
    """Mean cross-entropy in nats: logits (B, T, vocab_size), targets (B, T) -> one number."""
    shifted = logits - logits.real.max(axis=-1, keepdims=True)
    log_total = np.log(np.exp(shifted).sum(axis=-1))  # (B, T, vocab_size) -> (B, T)
    chosen = np.take_along_axis(shifted, targets[..., None], axis=-1)[..., 0]  # -> (B, T)
    return (log_total - chosen).mean()


def embed(state, tokens, config):
    x = state["token_embedding.weight"][tokens]  # (B, T) -> (B, T, d_model)
    T, d_model = x.shape[1:]
    if config["positions"] == "learned":
        return x + state["positions.weight"][:T]
    if config["positions"] == "sinusoidal":
        return math.sqrt(d_model) * x + sinusoids(T, d_model)
    return x  # rotary positions act inside attention


def block(state, name, x, config, seen, i=0):
    """Attention, then feed-forward, in block i, counted from 0."""
    for j in (1, 2):
        x = sublayer(state, name, i, j, x, config, seen)
    seen[name] = x
    return x


def sublayer(state, name, i, j, x, config, seen):
    """Attention (j = 1) or feed-forward (j = 2) of block i, and its norms."""

    def f(x):
        part, function = (("attention", attention), ("feedforward", feedforward))[j - 1]
        y = seen[f"{name}.{part}"] = function(state, f"{name}.{part}", x, config, seen)
        return y

    def n(x, kind="norm"):
        y = seen[f"{name}.{kind}_{j}"] = norm(state, f"{name}.{kind}_{j}", x, config)
        return y

    def total(x):
        seen[f"{name}.residual_{j}"] = x
        return x

    placement, n_layers = config["norm_position"], config["n_layers"]
    if placement == "mix":
        placement = "post" if 4 * i < n_layers else "pre"
    if placement == "pre":
        return total(x + f(n(x)))
    if placement in ("post", "residual_dual"):
        return n(total(x + f(x)))
    if placement == "sandwich":
        return total(x + n(f(n(x)), "output_norm"))
    if placement == "reordered":
        return total(x + n(f(x)))
    if placement == "deepnorm":
        return n(total((2 * n_layers) ** 0.25 * x + f(x)))
    assert placement == "lns", placement
    scaled = seen[f"{name}.scaled_{j}"] = n(x) * (i + 1) ** -0.5
    return total(x + f(scaled))


def attention(state, name, x, config, seen):
    n_heads, n_kv_heads = config["n_heads"], config["n_kv_heads"]
    bias = config["attention_bias"]
    d_k = x.shape[-1] // n_heads
    q = split(linear(state, f"{name}.W_Q", x, bias), d_k)  # (B, T, d_model) -> (B, n_heads, T, d_k)
    k = split(linear(state, f"{name}.W_K", x, bias), d_k)  # -> (B, n_kv_heads, T, d_k)
    v = split(linear(state, f"{name}.W_V", x, bias), d_k)  # -> (B, n_kv_heads, T, d_k)
    if config["qk_norm"]:
        q, k = rms(q), rms(k)
    if config["positions"] == "rotary":
        q, k = rotate(q), rotate(k)
    serves = np.arange(n_heads) // (n_heads // n_kv_heads)  # head -> its key and value head
    k, v = k[:, serves], v[:, serves]  # (B, n_kv_heads, T, d_k) -> (B, n_heads, T, d_k)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(d_k)  # -> (B, n_heads, T, T)
    T = x.shape[1]
    weights = softmax(np.where(np.tril(np.ones((T, T), dtype=bool)), scores, -np.inf))
    heads = weights @ v  # (B, n_heads, T, T) -> (B, n_heads, T, d_k)
    joined = np.concatenate(list(heads.swapaxes(0, 1)), axis=-1)  # -> (B, T, d_model)
    seen |= {
        f"{name}.q": q,
        f"{name}.k": k,
        f"{name}.v": v,
        f"{name}.weights": weights,
        f"{name}.heads": joined,
    }
    return linear(state, f"{name}.W_O", joined, bias)


def feedforward(state, name, x, config, seen):
    bias = config["feedforward_bias"]
    wide = linear(state, f"{name}.W_in", x, bias)  # (B, T, d_model) -> (B, T, d_ff)
    if config["activation"] == "swiglu":
        hidden = swish(linear(state, f"{name}.W_gate", x, bias)) * wide
    else:
        hidden = ACTIVATIONS[config["activation"]](wide)
    seen[f"{name}.hidden"] = hidden
    return linear(state, f"{name}.W_out", hidden, bias)  # (B, T, d_ff) -> (B, T, d_model)


def linear(state, name, x, bias):
    y = x @ state[f"{name}.weight"].T  # (..., fan_in) -> (..., fan_out)
    return y + state[f"{name}.bias"] if bias else y


def norm(state, name, x, config):
    if config["norm"] == "none":
        return x
    if config["norm"] == "dyt":
        bent = np.tanh(state[f"{name}.alpha"] * x)
        return state[f"{name}.gamma"] * bent + state[f"{name}.beta"]
    if config["norm"] == "rms":
        return rms(x) * state[f"{name}.gamma"]
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + EPS) * state[f"{name}.gamma"] + state[f"{name}.beta"]


def rms(x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)


def split(x, d_k):
    """Consecutive slices of d_k features are the heads: (B, T, heads d_k) -> (B, heads, T, d_k)."""
    return np.stack(np.split(x, x.shape[-1] // d_k, axis=-1), axis=1)


def softmax(scores):
    e = np.exp(scores - scores.real.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def angles(T, width):
    """Pair i turns by 1 / BASE^(2i / width) a position: -> (T, width / 2)."""
    pair = np.arange(width // 2)
    return np.arange(T)[:, None] / BASE ** (2 * pair / width)


def sinusoids(T, d_model):
    """Sine in the even features, cosine in the odd ones: -> (T, d_model)."""
    table = np.empty((T, d_model))
    table[:, 0::2] = np.sin(angles(T, d_model))
    table[:, 1::2] = np.cos(angles(T, d_model))
    return table


def rotate(heads):
    """Feature i and feature i + d_k/2 are turned as a pair; (B, heads, T, d_k) in and out."""
    T, d_k = heads.shape[2:]
    theta = np.tile(angles(T, d_k), 2)  # (T, d_k/2) -> (T, d_k)
    quarter_turn = np.concatenate([-heads[..., d_k // 2 :], heads[..., : d_k // 2]], axis=-1)
    return np.cos(theta) * heads + np.sin(theta) * quarter_turn


def relu(x):
    return np.where(x.real > 0, x, 0)


def relu2(x):
    return relu(x) ** 2


def gelu(x):
    return x * (1 + erf(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def swish(x):
    return x / (1 + np.exp(-x))


def erf(x):
    real = _real_erf(x.real)
    if not np.iscomplexobj(x):
        return real
    return real + 1j * x.imag * 2 / math.sqrt(math.pi) * np.exp(-(x.real**2))


_real_erf = np.vectorize(math.erf, otypes=[float])

ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
