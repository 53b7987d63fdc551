"""What the tests of the model share: small models, their intermediates, the strict comparison."""

import dataclasses
import itertools

import numpy as np
import torch
from reference import forward as reference

from gpt.config import ModelConfig
from gpt.model.attention import attention_weights
from gpt.model.gpt import GPT

# No two axes are equally long, so no test passes by mixing two of them up.
B, T, VOCAB_SIZE = 5, 7, 11
SIZES = {"n_heads": 6, "d_model": 24, "d_ff": 10, "context_length": 8, "n_layers": 2}  # d_k = 4

TOLERANCE = 1e-10

# Each option of the pinned mathematics at least once, and each in another company.
VARIANTS = [
    {},
    {"norm_position": "post"},
    {"norm": "rms", "positions": "rotary", "activation": "swiglu", "tie_embeddings": False},
    {"norm": "rms", "norm_position": "post", "positions": "sinusoidal", "activation": "relu"},
    {"positions": "rotary", "qk_norm": True, "activation": "relu2", "n_kv_heads": 3},
    {"positions": "sinusoidal", "activation": "gelu", "attention_bias": True, "n_kv_heads": 1},
    {
        "norm_position": "post",
        "positions": "rotary",
        "activation": "gelu",
        "attention_bias": True,
        "feedforward_bias": False,
        "tie_embeddings": False,
        "n_kv_heads": 2,
    },
    {"norm": "rms", "qk_norm": True, "activation": "swiglu", "attention_bias": True},
]

# The placements and kinds of norms that the C kernels do not know, each in another company.
PLACED = [
    {"norm_position": "sandwich", "n_layers": 3, "attention_bias": True},
    {"norm_position": "sandwich", "norm": "rms", "positions": "rotary", "activation": "swiglu"},
    {"norm_position": "reordered", "norm": "rms", "positions": "rotary", "qk_norm": True},
    {"norm_position": "deepnorm", "n_layers": 3, "activation": "relu", "n_kv_heads": 2},
    {"norm_position": "residual_dual", "positions": "sinusoidal", "tie_embeddings": False},
    {"norm_position": "lns", "n_layers": 3, "norm": "rms", "activation": "gelu"},
    {"norm_position": "mix", "n_layers": 5, "activation": "relu2", "feedforward_bias": False},
    {"norm": "dyt", "positions": "rotary", "activation": "swiglu", "tie_embeddings": False},
    {"norm": "none", "positions": "sinusoidal", "attention_bias": True, "n_kv_heads": 3},
    {"norm_position": "residual_dual", "norm": "dyt", "qk_norm": True, "n_layers": 3},
]
EVERY_VARIANT = [*VARIANTS, *PLACED]


def variant_name(changes: dict) -> str:
    return "-".join(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in changes.items())


def grid(**options):
    """Every combination of the options, as dicts."""
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]


def small_config(**changes) -> ModelConfig:
    return ModelConfig(**(SIZES | changes))


def small_model(seed: int = 1337, **changes) -> GPT:
    """A float64 model with the shipped initial weights."""
    return GPT(small_config(**changes), VOCAB_SIZE, seed).double().eval()


def spread(model: GPT, seed: int = 0, std: float = 0.3) -> GPT:
    """Every weight anew from N(0, std), gains around 1 and alphas around 0.5: no part of the model
    is idle or small."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            start = name.endswith("gamma") + 0.5 * name.endswith("alpha")
            parameter.copy_(torch.from_numpy(start + std * rng.standard_normal(parameter.shape)))
    return model


def random_tokens(n: int = T, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB_SIZE, (B, n)))


def state_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {k: v.detach().double().numpy().copy() for k, v in model.state_dict().items()}


def reference_pass(model: GPT, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    return reference.forward(state_of(model), tokens.numpy(), dataclasses.asdict(model.config))


def intermediates(model: GPT, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The torch model's values under the reference's names, caught by hooks."""
    seen, handles = {}, []

    def keep_output(name, module, take=lambda out: out):
        hook = module.register_forward_hook(lambda m, inputs, out: seen.update({name: take(out)}))
        handles.append(hook)

    def keep_input(name, module, take=lambda x: x):
        hook = module.register_forward_pre_hook(
            lambda m, inputs: seen.update({name: take(inputs[0])})
        )
        handles.append(hook)

    def first(streams):
        return streams[0]

    def second(streams):
        return streams[1]

    def watched(name, attend):
        def watching(q, k, v, dropout=0.0):
            weights = attention_weights(q, k)
            seen.update({f"{name}.q": q, f"{name}.k": k, f"{name}.v": v})
            seen[f"{name}.weights"] = weights
            return attend(q, k, v, dropout)

        return watching

    placement = model.config.norm_position
    two_streams = {"take": first} if placement == "residual_dual" else {}
    keep_input("embedding", model.blocks[0], **two_streams)
    original = [block.attention.attend for block in model.blocks]
    for i, block in enumerate(model.blocks):
        name = f"blocks.{i}"
        for kind in ("norm", "output_norm") if placement == "sandwich" else ("norm",):
            keep_output(f"{name}.{kind}_1", block.get_submodule(f"{kind}_1"))
            keep_output(f"{name}.{kind}_2", block.get_submodule(f"{kind}_2"))
        keep_output(f"{name}.attention", block.attention)
        keep_input(f"{name}.attention.heads", block.attention.W_O)
        keep_input(f"{name}.feedforward.hidden", block.feedforward.W_out)
        keep_output(f"{name}.feedforward", block.feedforward)
        keep_output(name, block, **two_streams)
        if placement == "residual_dual":
            keep_output(f"{name}.dual", block, second)
        if placement == "lns":
            keep_input(f"{name}.scaled_1", block.attention)
            keep_input(f"{name}.scaled_2", block.feedforward)
        # A sum is read by the norm after it, by the norm or sublayer of the next step, or is last.
        mixed = ("post" if i < len(model.blocks) / 4 else "pre") if placement == "mix" else ""
        if (mixed or placement) in ("post", "deepnorm", "residual_dual"):
            keep_input(f"{name}.residual_1", block.norm_1)
            keep_input(f"{name}.residual_2", block.norm_2)
        else:
            reader = block.feedforward if placement == "reordered" else block.norm_2
            keep_input(f"{name}.residual_1", reader)
            keep_output(f"{name}.residual_2", block)
        block.attention.attend = watched(f"{name}.attention", block.attention.attend)
    if placement not in ("post", "deepnorm"):
        keep_output("final_norm", model.final_norm)
    try:
        seen["logits"] = model(tokens)
    finally:
        for handle in handles:
            handle.remove()
        for block, attend in zip(model.blocks, original, strict=True):
            block.attention.attend = attend
    return seen


def assert_equal(actual: dict, expected: dict, tolerance: float = TOLERANCE) -> float:
    """The two hold the same names, the same shapes, finite numbers, and differ by no more.

    Returns the largest difference. On failure, says where it is, and what differs first.
    """
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    worst, where, first = 0.0, "", ""
    for name in expected:
        got, want = np.asarray(_numpy(actual[name])), np.asarray(_numpy(expected[name]))
        assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
        # A NaN compares as no difference at all.
        assert np.isfinite(got).all(), f"{name}: not finite"
        assert np.isfinite(want).all(), f"{name}: expected value not finite"
        difference = np.abs(got - want)
        if difference.size and difference.max() > worst:
            at = np.unravel_index(difference.argmax(), difference.shape)
            worst = float(difference.max())
            where = f"{name}{[int(i) for i in at]}: {got[at]!r}, expected {want[at]!r}"
        if worst > tolerance and not first:
            first = name
    assert worst <= tolerance, (
        f"largest difference {worst:.3g} > {tolerance:g} at {where}; the first to differ is {first}"
    )
    return worst


def assert_parity(model: GPT, tokens: torch.Tensor, expected: dict | None = None) -> float:
    """Every intermediate of the model equals the reference's, or what is expected instead."""
    with torch.no_grad():
        actual = intermediates(model, tokens)
    return assert_equal(actual, expected or reference_pass(model, tokens))


def _numpy(value):
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value
