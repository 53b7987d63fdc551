"""Outside witnesses: GPT-2, GPT-1 and Llama of transformers compute what our model computes.

The weights are random: gains and biases spread with std 0.3, matrices with a std about
1 / sqrt(d_model). Activations, attention scores and logits are then of order one, so every tensor
leaves a trace, and float32 agrees to a few 1e-6. Matrices spread with 0.3 would saturate the
attention and amplify rounding alone above 1e-5; the shipped 0.02 would hide mistakes below it. The
wrong choices at the end show what the tolerances see.
"""

import dataclasses
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt.config import ModelConfig, from_flat
from gpt.config_files import read_toml
from gpt.errors import UsageError
from gpt.interop.huggingface import (
    FAMILIES,
    from_huggingface,
    huggingface_config,
    to_huggingface,
)
from gpt.model.block import BLOCKS, Block
from gpt.model.gpt import GPT
from gpt.model.norms import NORMS

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the fixture below imports transformers

# No two sizes are equal: also d_k 6, d_ff 44 (in GPT-1 192, its only choice), and in Llama 2 key
# and value heads, each shared by 4, together 12 wide.
BATCH, CONTEXT_LENGTH, VOCAB_SIZE = 5, 17, 41
SIZES: dict[str, Any] = {
    "d_model": 48,
    "n_heads": 8,
    "n_layers": 3,
    "context_length": CONTEXT_LENGTH,
}
CONFIGS = {
    "gpt2": ModelConfig(**SIZES, d_ff=44, attention_bias=True),
    "openai-gpt": ModelConfig(**SIZES, norm_position="post", attention_bias=True),
    "llama": ModelConfig(
        **SIZES,
        d_ff=44,
        n_kv_heads=2,
        norm="rms",
        positions="rotary",
        activation="swiglu",
        tie_embeddings=False,
    ),
}
CLASSES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "openai-gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
}
# The class of GPT-1 has no fused attention.
WITNESSES = [
    ("gpt2", "eager"),
    ("gpt2", "sdpa"),
    ("openai-gpt", "eager"),
    ("llama", "eager"),
    ("llama", "sdpa"),
]
DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.float64, id="float64"),
]


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """Imported late, because it takes seconds; in CI its absence is a failure, not a skip."""
    if os.environ.get("CI"):
        return importlib.import_module("transformers")
    return pytest.importorskip("transformers")


def tolerance(family: str, dtype: torch.dtype) -> float:
    """Llama's class computes norms, rotary tables and softmax in float32 whatever the model is."""
    if dtype == torch.float32:
        return 1e-5
    return 1e-6 if family == "llama" else 1e-9


def spread(model: Any, family: str, seed: int) -> Any:
    """Noise on every parameter, around 1 for gains and 0 for the rest."""
    # Smaller for Llama: what its float32 steps cost grows with the logits.
    matrix_std = 0.08 if family == "llama" else 0.15
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            std = matrix_std if parameter.dim() == 2 else 0.3
            parameter += std * torch.randn(parameter.shape, generator=generator)
    return model


def our_model(family: str, config: ModelConfig) -> GPT:
    return spread(GPT(config, VOCAB_SIZE), family, seed=1).eval()


def their_model(
    transformers: ModuleType, family: str, config: ModelConfig, implementation: str = "eager"
) -> nn.Module:
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[family])
    keywords = huggingface_config(family, config, VOCAB_SIZE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)  # it starts from weights of its own
        model = model_class(config_class(**keywords, attn_implementation=implementation))
    return spread(model, family, seed=3).eval()


def logits_of(ours: nn.Module, theirs: nn.Module) -> tuple[Tensor, Tensor]:
    """Both ``(BATCH, CONTEXT_LENGTH, VOCAB_SIZE)``, on the same characters."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCAB_SIZE, (BATCH, CONTEXT_LENGTH), generator=generator)
    with torch.no_grad():
        return ours(tokens), theirs(tokens).logits


def with_tying(family: str, tied: bool) -> ModelConfig:
    return dataclasses.replace(CONFIGS[family], tie_embeddings=tied)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "implementation"), WITNESSES)
class TestLogitsAreEqual:
    def test_of_our_weights_in_their_model(
        self,
        transformers: ModuleType,
        family: str,
        implementation: str,
        dtype: torch.dtype,
        tied: bool,
    ) -> None:
        config = with_tying(family, tied)
        ours = our_model(family, config).to(dtype)
        theirs = their_model(transformers, family, config, implementation).to(dtype)
        keys = theirs.load_state_dict(
            to_huggingface(family, ours.state_dict(), config), strict=False
        )
        assert keys.missing_keys == (["lm_head.weight"] if tied else [])
        assert keys.unexpected_keys == []
        self.check(ours, theirs, tolerance(family, dtype))

    def test_of_their_weights_in_our_model(
        self,
        transformers: ModuleType,
        family: str,
        implementation: str,
        dtype: torch.dtype,
        tied: bool,
    ) -> None:
        config = with_tying(family, tied)
        ours = our_model(family, config).to(dtype)
        theirs = their_model(transformers, family, config, implementation).to(dtype)
        ours.load_state_dict(from_huggingface(family, theirs.state_dict(), config))
        self.check(ours, theirs, tolerance(family, dtype))

    def check(self, ours: nn.Module, theirs: nn.Module, atol: float) -> None:
        found, expected = logits_of(ours, theirs)
        assert found.dtype == expected.dtype
        assert expected.std() > 0.4  # else an absolute tolerance would mean little
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def swap_queries_and_keys(block: Block) -> None:
    attention = block.attention
    attention.W_Q, attention.W_K = attention.W_K, attention.W_Q


def swap_norms(block: Block) -> None:
    block.norm_1, block.norm_2 = block.norm_2, block.norm_1


def swap_gate(block: Block) -> None:
    feedforward: Any = block.feedforward
    feedforward.W_gate, feedforward.W_in = feedforward.W_in, feedforward.W_gate


def pair_neighbours(block: Block) -> None:
    """Reads queries and keys as if features 2i and 2i + 1 were turned together."""
    d_k = block.attention.d_k
    for layer in (block.attention.W_Q, block.attention.W_K):
        pairs = layer.weight.unflatten(0, (-1, d_k // 2, 2))  # (heads, d_k/2, 2, d_model)
        layer.weight = nn.Parameter(pairs.transpose(1, 2).flatten(0, 2))


def smaller_eps(block: Block) -> None:
    block.norm_1.eps = block.norm_2.eps = 1e-6


def nothing(block: Block) -> None:
    """The mistake is in the config."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "changes", "mistake"),
    [
        ("gpt2", {"activation": "gelu"}, nothing),
        ("gpt2", {"norm_position": "post"}, nothing),
        ("gpt2", {"n_heads": 6}, nothing),
        ("gpt2", {}, swap_queries_and_keys),
        ("gpt2", {}, smaller_eps),
        ("openai-gpt", {"activation": "gelu"}, nothing),
        ("openai-gpt", {"norm_position": "pre"}, nothing),
        ("openai-gpt", {"n_heads": 6}, nothing),
        ("openai-gpt", {}, swap_norms),
        ("llama", {"norm": "layer"}, nothing),
        ("llama", {"norm_position": "post"}, nothing),
        ("llama", {}, pair_neighbours),
        ("llama", {}, swap_gate),
        ("llama", {}, smaller_eps),
    ],
)
def test_one_wrong_choice_moves_the_logits_ten_times_the_tolerance(
    transformers: ModuleType,
    family: str,
    changes: dict[str, Any],
    mistake: Callable[[Block], None],
    dtype: torch.dtype,
) -> None:
    config = CONFIGS[family]
    theirs = their_model(transformers, family, config).to(dtype)
    ours = GPT(dataclasses.replace(config, **changes), VOCAB_SIZE).to(dtype).eval()
    weights = from_huggingface(family, theirs.state_dict(), config)
    ours.load_state_dict(weights, strict=False)  # another placement has another final norm
    for block in ours.blocks:
        mistake(block)
    found, expected = logits_of(ours, theirs)
    assert (found - expected).abs().max() > 10 * tolerance(family, dtype)


# Two placements that no family of ours writes, where transformers has them: Llama in all else.
PLACED = {
    "sandwich": ("Gemma2Config", "Gemma2ForCausalLM"),
    "reordered": ("Olmo2Config", "Olmo2ForCausalLM"),
}
PLACED_NORMS = {
    "sandwich": {
        "input_layernorm": "norm_1",
        "post_attention_layernorm": "output_norm_1",
        "pre_feedforward_layernorm": "norm_2",
        "post_feedforward_layernorm": "output_norm_2",
    },
    "reordered": {
        "post_attention_layernorm": "norm_1",
        "post_feedforward_layernorm": "norm_2",
    },
}


def placed_config(placement: str) -> ModelConfig:
    """OLMo 2 normalises the queries of all heads together, which is our qk_norm for one head."""
    heads = {"n_heads": 1, "n_kv_heads": 1, "qk_norm": True} if placement == "reordered" else {}
    return dataclasses.replace(CONFIGS["llama"], norm_position=placement, **heads)


def placed_model(transformers: ModuleType, ours: GPT, dtype: torch.dtype) -> nn.Module:
    """Their model with our weights."""
    config = ours.config
    placement = config.norm_position
    keywords = huggingface_config(
        "llama", dataclasses.replace(CONFIGS["llama"], n_kv_heads=config.n_kv_heads), VOCAB_SIZE
    )
    keywords |= {"num_attention_heads": config.n_heads, "pad_token_id": None}
    if placement == "sandwich":
        keywords |= {
            "hidden_activation": keywords.pop("hidden_act"),
            "head_dim": config.d_k,
            "query_pre_attn_scalar": config.d_k,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        }
    config_class, model_class = (getattr(transformers, name) for name in PLACED[placement])
    theirs = model_class(config_class(**keywords, attn_implementation="eager")).to(dtype)
    plain = dataclasses.replace(config, norm_position="pre", qk_norm=False)
    weights = ours.state_dict()
    named = to_huggingface(
        "llama", {n: w for n, w in weights.items() if "output_norm" not in n}, plain
    )
    for i in range(config.n_layers):
        prefix = f"model.layers.{i}."
        named.pop(f"{prefix}input_layernorm.weight")
        for name, own in PLACED_NORMS[placement].items():
            named[f"{prefix}{name}.weight"] = weights[f"blocks.{i}.{own}.gamma"]
        if placement == "reordered":
            for name in ("q_norm", "k_norm"):
                named[f"{prefix}self_attn.{name}.weight"] = torch.ones(config.d_model)
    if placement == "sandwich":  # Gemma's gains are offsets from one, its embeddings scaled
        for name in named:
            if "norm" in name:
                named[name] = named[name] - 1
        named["model.embed_tokens.weight"] = (
            named["model.embed_tokens.weight"] / config.d_model**0.5
        )
    theirs.load_state_dict(named)
    return theirs.eval()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", PLACED)
def test_gemma_2_is_sandwich_and_olmo_2_is_reordered(
    transformers: ModuleType, placement: str, dtype: torch.dtype
) -> None:
    ours = our_model("llama", placed_config(placement)).to(dtype)
    theirs = placed_model(transformers, ours, dtype)
    found, expected = logits_of(ours, theirs)
    assert found.dtype == expected.dtype
    assert expected.std() > 0.4
    atol = 3 * tolerance("llama", dtype)  # more norms in float32
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
    for block in ours.blocks:
        swap_norms(block)
    found, expected = logits_of(ours, theirs)
    assert (found - expected).abs().max() > 10 * atol


@pytest.mark.slow
def test_the_gpt2_preset_is_what_their_config_calls_gpt2(transformers: ModuleType) -> None:
    keywords = huggingface_config("gpt2", preset("gpt2"), 50257)
    assert keywords.pop("n_inner") == 3072  # None there, which means the same
    theirs = transformers.GPT2Config()
    ours_only = {"bos_token_id", "eos_token_id", "resid_pdrop", "embd_pdrop", "attn_pdrop"}
    for name in keywords.keys() - ours_only:
        assert keywords[name] == getattr(theirs, name), name


def preset(name: str) -> ModelConfig:
    path = Path(__file__).parent.parent / "configs" / f"{name}.toml"
    return from_flat(read_toml([path])).model


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [("gpt2", 50257, 124_439_808), ("llama", 128256, 8_030_261_248)],
)
def test_presets_have_the_published_number_of_parameters(
    name: str, vocab_size: int, parameters: int
) -> None:
    with torch.device("meta"):
        model = GPT(preset(name), vocab_size)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", CONFIGS)
def test_there_and_back_is_bit_equal_and_shares_no_memory(family: str, tied: bool) -> None:
    config = with_tying(family, tied)
    ours = our_model(family, config).state_dict()
    theirs = to_huggingface(family, ours, config)
    again = from_huggingface(family, theirs, config)
    assert again.keys() == ours.keys()
    for name in ours:
        assert torch.equal(again[name], ours[name]), name
    assert all(tensor.is_contiguous() for tensor in [*theirs.values(), *again.values()])
    storages = {
        tensor.untyped_storage().data_ptr()
        for tensors in (ours, theirs, again)
        for tensor in tensors.values()
    }
    assert len(storages) == len(ours) + len(theirs) + len(again)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"norm_position": "post"}, "norm_position = 'post'"),
        ("gpt2", {"norm": "rms"}, "norm = 'rms'"),
        ("gpt2", {"positions": "sinusoidal"}, "positions = 'sinusoidal'"),
        ("gpt2", {"activation": "gelu"}, "activation = 'gelu'"),
        ("gpt2", {"attention_bias": False}, "attention_bias = False"),
        ("gpt2", {"feedforward_bias": False}, "feedforward_bias = False"),
        ("gpt2", {"qk_norm": True}, "qk_norm = True"),
        ("gpt2", {"n_kv_heads": 2}, "n_kv_heads = 2 cannot .* n_kv_heads = 8"),
        ("openai-gpt", {"norm_position": "pre"}, "norm_position = 'pre'"),
        ("openai-gpt", {"n_kv_heads": 2}, "n_kv_heads = 2"),
        ("openai-gpt", {"d_ff": 44}, "d_ff = 44 cannot .* d_ff = 192"),
        ("llama", {"norm_position": "post"}, "norm_position = 'post'"),
        ("llama", {"norm": "layer"}, "norm = 'layer'"),
        *(
            (family, {field: value}, f"{field} = '{value}' cannot be written as {family}, which")
            for family in FAMILIES
            for field, values in (("norm_position", BLOCKS), ("norm", NORMS))
            for value in values
            if value not in ("pre", "post", "layer", "rms")
        ),
        ("llama", {"positions": "learned"}, "positions = 'learned'"),
        ("llama", {"activation": "relu"}, "activation = 'relu'"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"qk_norm": True}, "qk_norm = True"),
        ("gpt3", {}, "family = 'gpt3' .* Did you mean 'gpt2'"),
    ],
)
def test_what_a_family_cannot_express_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    config = dataclasses.replace(CONFIGS.get(family, CONFIGS["gpt2"]), **changes)
    with pytest.raises(UsageError, match=message):
        to_huggingface(family, {}, config)
    with pytest.raises(UsageError, match=message):
        from_huggingface(family, {}, config)
    with pytest.raises(UsageError, match=message):
        huggingface_config(family, config, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gpt2", {"resid_pdrop", "embd_pdrop", "attn_pdrop"}),
        ("openai-gpt", {"resid_pdrop", "embd_pdrop", "attn_pdrop"}),
        ("llama", {"attention_dropout"}),
    ],
)
def test_dropout_is_passed_on_where_the_family_has_it(family: str, names: set[str]) -> None:
    config = dataclasses.replace(CONFIGS[family], dropout=0.25)
    keywords = huggingface_config(family, config, VOCAB_SIZE)
    assert {name for name, value in keywords.items() if value == 0.25} == names


@pytest.mark.parametrize("family", CONFIGS)
def test_no_character_is_a_begin_or_end_token(family: str) -> None:
    keywords = huggingface_config(family, CONFIGS[family], VOCAB_SIZE)
    assert keywords["bos_token_id"] is keywords["eos_token_id"] is None


@pytest.mark.parametrize("family", CONFIGS)
def test_missing_and_unknown_keys_are_refused(family: str) -> None:
    config = CONFIGS[family]
    ours = our_model(family, config).state_dict()
    theirs = to_huggingface(family, ours, config)
    for convert, weights in ((to_huggingface, ours), (from_huggingface, theirs)):
        last = list(weights)[-1]
        with pytest.raises(UsageError, match=f"lacks '{last}'; .* check n_layers"):
            convert(family, {k: v for k, v in weights.items() if k != last}, config)
        extra = {f"surprise.{i}": weights[last] for i in range(5)}
        with pytest.raises(UsageError, match=r"has unknown 'surprise.0', .* and 2 more"):
            convert(family, weights | extra, config)


@pytest.mark.parametrize(
    ("family", "buffer"),
    [
        ("gpt2", "transformer.h.2.attn.bias"),
        ("gpt2", "transformer.h.2.attn.masked_bias"),
        ("openai-gpt", "transformer.h.2.attn.bias"),
        ("openai-gpt", "transformer.position_ids"),
        ("llama", "model.rotary_emb.inv_freq"),
        ("llama", "model.layers.2.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_their_constants_are_dropped(family: str, buffer: str) -> None:
    config = CONFIGS[family]
    theirs = to_huggingface(family, our_model(family, config).state_dict(), config)
    with_buffer = from_huggingface(family, theirs | {buffer: torch.ones(1)}, config)
    assert with_buffer.keys() == from_huggingface(family, theirs, config).keys()


@pytest.mark.parametrize("family", CONFIGS)
def test_a_tied_head_is_accepted_only_if_it_is_the_embedding(family: str) -> None:
    config = with_tying(family, True)
    theirs = to_huggingface(family, our_model(family, config).state_dict(), config)
    embedding = next(iter(theirs.values()))  # the first row of the mapping
    same = from_huggingface(family, theirs | {"lm_head.weight": embedding.clone()}, config)
    assert "head.weight" not in same
    with pytest.raises(UsageError, match="set tie_embeddings = False"):
        from_huggingface(family, theirs | {"lm_head.weight": embedding + 1}, config)
