"""Made golden.npz and golden_placements.npz, once: ``python tests/reference/make_golden.py``.

The arrays are frozen. They let neither the reference nor the model drift, not even both together.
For each variant: config (JSON), state, tokens, targets, every intermediate, the loss, and the
gradient of the loss in every weight, entry by entry. The second file, of the later placements and
kinds of norms, has the arrays of a group end to end, and their shapes (JSON): a tenth of the size.
"""

import json
from pathlib import Path

import forward as reference  # this file is run as a script, beside it
import numpy as np

GOLDEN = Path(__file__).with_name("golden.npz")
GOLDEN_PLACEMENTS = Path(__file__).with_name("golden_placements.npz")
STEP = 1e-20

B, T, VOCAB_SIZE, CONTEXT_LENGTH, D_FF = 2, 5, 7, 6, 10
DEFAULTS = {
    "d_model": 12,
    "n_heads": 3,
    "n_kv_heads": 3,
    "n_layers": 2,
    "norm_position": "pre",
    "norm": "layer",
    "positions": "learned",
    "activation": "gelu_tanh",
    "attention_bias": False,
    "feedforward_bias": True,
    "qk_norm": False,
    "tie_embeddings": True,
}
VARIANTS = {
    "pre": {},
    "post": {"norm_position": "post"},
    "gpt1": {"norm_position": "post", "attention_bias": True, "activation": "gelu"},
    "paper": {"norm_position": "post", "positions": "sinusoidal", "activation": "relu"},
    "llama": {
        "norm": "rms",
        "positions": "rotary",
        "activation": "swiglu",
        "feedforward_bias": False,
        "tie_embeddings": False,
        "n_kv_heads": 1,
    },
    "recent": {"norm": "rms", "positions": "rotary", "activation": "relu2", "qk_norm": True},
}
SMALL = {"d_model": 8, "n_heads": 4, "n_kv_heads": 4}
PLACEMENTS = {
    "sandwich": {"norm_position": "sandwich"},
    "reordered": {"norm_position": "reordered", "norm": "rms", "qk_norm": True},
    "deepnorm": {"norm_position": "deepnorm"},
    "residual_dual": {"norm_position": "residual_dual"},
    "lns": {"norm_position": "lns", "norm": "rms", "positions": "rotary"},
    "mix": {"norm_position": "mix"},
    "dyt": {"norm": "dyt"},
    "none": {"norm": "none"},
}
"""Of ``DEFAULTS | SMALL``."""


def draw_state(config, rng):
    """Weights from N(0, 0.3), gains around 1, alphas around 0.5; rounded to float16, which keeps
    the files small."""
    d_model = config["d_model"]
    d_kv = d_model // config["n_heads"] * config["n_kv_heads"]
    shapes = {"token_embedding.weight": (VOCAB_SIZE, d_model)}
    if config["positions"] == "learned":
        shapes["positions.weight"] = (CONTEXT_LENGTH, d_model)
    kinds = ("norm", "output_norm") if config["norm_position"] == "sandwich" else ("norm",)
    norms = [
        f"blocks.{i}.{kind}_{j}"
        for i in range(config["n_layers"])
        for kind in kinds
        for j in (1, 2)
    ]
    for i in range(config["n_layers"]):
        for name, fan_out in (("Q", d_model), ("K", d_kv), ("V", d_kv), ("O", d_model)):
            shapes[f"blocks.{i}.attention.W_{name}.weight"] = (fan_out, d_model)
            if config["attention_bias"]:
                shapes[f"blocks.{i}.attention.W_{name}.bias"] = (fan_out,)
        ways = {"W_in": (D_FF, d_model), "W_out": (d_model, D_FF)}
        if config["activation"] == "swiglu":
            ways["W_gate"] = (D_FF, d_model)
        for name, shape in ways.items():
            shapes[f"blocks.{i}.feedforward.{name}.weight"] = shape
            if config["feedforward_bias"]:
                shapes[f"blocks.{i}.feedforward.{name}.bias"] = shape[:1]
    if config["norm_position"] not in ("post", "deepnorm"):
        norms.append("final_norm")
    for name in norms if config["norm"] != "none" else ():
        shapes[f"{name}.gamma"] = (d_model,)
        if config["norm"] != "rms":
            shapes[f"{name}.beta"] = (d_model,)
        if config["norm"] == "dyt":
            shapes[f"{name}.alpha"] = (1,)
    if not config["tie_embeddings"]:
        shapes["head.weight"] = (VOCAB_SIZE, d_model)
    state = {}
    for name, shape in shapes.items():
        value = 0.3 * rng.standard_normal(shape) + name.endswith("gamma")
        value = value + 0.5 * name.endswith("alpha")
        state[name] = value.astype(np.float16)
    return state


def gradient(state, tokens, targets, config):
    """The derivative of the loss in every entry of every weight, by complex step."""
    gradients = {}
    for name, weight in state.items():
        gradients[name] = np.empty(weight.shape)
        for at in np.ndindex(weight.shape):
            nudged = weight.astype(complex)
            nudged[at] += STEP * 1j
            logits = reference.forward(state | {name: nudged}, tokens, config)["logits"]
            gradients[name][at] = reference.loss(logits, targets).imag / STEP
    return gradients


def arrays_of(variants, seed):
    """Variant -> {config, tokens, targets, loss} and the groups state, seen and gradient."""
    rng = np.random.default_rng(seed)
    for variant, changes in variants.items():
        config = DEFAULTS | changes
        stored = draw_state(config, rng)
        tokens, targets = rng.integers(0, VOCAB_SIZE, (2, B, T))
        state = {name: weight.astype(np.float64) for name, weight in stored.items()}
        seen = reference.forward(state, tokens, config)
        yield (
            variant,
            {
                "config": np.array(json.dumps(config)),
                "tokens": tokens.astype(np.uint8),
                "targets": targets.astype(np.uint8),
                "loss": np.array(reference.loss(seen["logits"], targets)),
            },
            {
                "state": stored,
                "seen": seen,
                "gradient": gradient(state, tokens, targets, config),
            },
        )


def one_by_one(group):
    return {f"/{name}": value for name, value in group.items()}


def end_to_end(group):
    shapes = {name: value.shape for name, value in group.items()}
    joined = np.concatenate([value.ravel() for value in group.values()])
    return {"": joined, "_shapes": np.array(json.dumps(shapes))}


def main():
    small = {variant: SMALL | changes for variant, changes in PLACEMENTS.items()}
    for path, variants, seed, layout in (
        (GOLDEN, VARIANTS, 20240613, one_by_one),
        (GOLDEN_PLACEMENTS, small, 20250917, end_to_end),
    ):
        if path.exists():
            print(f"{path} exists and is frozen; to change the mathematics, delete it")
            continue
        arrays = {}
        for variant, facts, groups in arrays_of(variants, seed):
            arrays |= {f"{variant}/{name}": value for name, value in facts.items()}
            for kind, group in groups.items():
                named = layout(group)
                arrays |= {f"{variant}/{kind}{name}": value for name, value in named.items()}
        np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main()
