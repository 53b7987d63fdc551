"""Our state dict as three Hugging Face models know it, and back.

    family        class in transformers    the model
    gpt2          GPT2LMHeadModel          Pre-LN (Radford et al. 2019)
    openai-gpt    OpenAIGPTLMHeadModel     Post-LN: the first GPT (Radford et al. 2018)
    llama         LlamaForCausalLM         RMSNorm, SwiGLU, rotary (Touvron et al. 2023)

Pure functions over dicts of tensors; transformers itself is not needed. The names of a family are
its ``model_type`` there. Key names as of transformers 5.24.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt.checks import nearest
from gpt.config import ModelConfig
from gpt.errors import UsageError


class Row(NamedTuple):
    """One tensor of theirs and the tensors of ours that it holds, one below the other."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def _layer_norm(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.weight", (f"{ours}.gamma",)), Row(f"{theirs}.bias", (f"{ours}.beta",))]


def _conv1d(theirs: str, *ours: str) -> list[Row]:
    """Their Conv1D is a linear layer whose weight is stored as (inputs, outputs)."""
    return [
        Row(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed=True),
        Row(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours)),
    ]


@dataclass(frozen=True)
class Family:
    """What a family is made of; ``{i}`` is the number of a block, the same on both sides."""

    fixed: dict[str, object]
    """Fields of the resolved ModelConfig that the family cannot vary."""
    outside: list[Row]
    block: list[Row]
    their_block: str
    buffers: str
    """Pattern of constants that some of their state dicts carry and that are no weights."""


_GPT_FIXED: dict[str, object] = {
    "norm": "layer",
    "positions": "learned",
    "activation": "gelu_tanh",
    "attention_bias": True,
    "feedforward_bias": True,
    "qk_norm": False,
}

_GPT_BLOCK = [
    *_layer_norm("ln_1", "norm_1"),
    *_conv1d("attn.c_attn", "attention.W_Q", "attention.W_K", "attention.W_V"),
    *_conv1d("attn.c_proj", "attention.W_O"),
    *_layer_norm("ln_2", "norm_2"),
    *_conv1d("mlp.c_fc", "feedforward.W_in"),
    *_conv1d("mlp.c_proj", "feedforward.W_out"),
]

FAMILIES = {
    "gpt2": Family(
        fixed={"norm_position": "pre", **_GPT_FIXED},
        outside=[
            Row("transformer.wte.weight", ("token_embedding.weight",)),
            Row("transformer.wpe.weight", ("positions.weight",)),
            *_layer_norm("transformer.ln_f", "final_norm"),
        ],
        block=_GPT_BLOCK,
        their_block="transformer.h.{i}.",
        buffers=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    ),
    "openai-gpt": Family(
        fixed={"norm_position": "post", **_GPT_FIXED},
        outside=[
            Row("transformer.tokens_embed.weight", ("token_embedding.weight",)),
            Row("transformer.positions_embed.weight", ("positions.weight",)),
        ],
        block=_GPT_BLOCK,
        their_block="transformer.h.{i}.",
        buffers=r"transformer\.(position_ids|h\.\d+\.attn\.bias)",
    ),
    "llama": Family(
        fixed={
            "norm_position": "pre",
            "norm": "rms",
            "positions": "rotary",
            "activation": "swiglu",
            "attention_bias": False,
            "qk_norm": False,
        },
        outside=[
            Row("model.embed_tokens.weight", ("token_embedding.weight",)),
            Row("model.norm.weight", ("final_norm.gamma",)),
        ],
        block=[
            Row("input_layernorm.weight", ("norm_1.gamma",)),
            Row("self_attn.q_proj.weight", ("attention.W_Q.weight",)),
            Row("self_attn.k_proj.weight", ("attention.W_K.weight",)),
            Row("self_attn.v_proj.weight", ("attention.W_V.weight",)),
            Row("self_attn.o_proj.weight", ("attention.W_O.weight",)),
            Row("post_attention_layernorm.weight", ("norm_2.gamma",)),
            Row("mlp.gate_proj.weight", ("feedforward.W_gate.weight",)),
            Row("mlp.up_proj.weight", ("feedforward.W_in.weight",)),
            Row("mlp.down_proj.weight", ("feedforward.W_out.weight",)),
        ],
        their_block="model.layers.{i}.",
        buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    ),
}

_HEAD = "lm_head.weight"


def to_huggingface(
    family: str, state_dict: dict[str, Tensor], config: ModelConfig
) -> dict[str, Tensor]:
    """Copies of our weights under the family's names and in its shapes.

    A tied head is left out, as in their files: their model ties it to the embedding itself.
    Raises UsageError when the family cannot express the config or the keys are not the config's.
    """
    rows = _rows(family, config)
    _check_keys(set(state_dict), {name for row in rows for name in row.ours}, "our state dict")
    theirs = {}
    for row in rows:
        joined = torch.cat([state_dict[name] for name in row.ours])  # n x (out, in) -> (n out, in)
        theirs[row.theirs] = joined.T.contiguous() if row.transposed else joined
    return theirs


def from_huggingface(
    family: str, state_dict: dict[str, Tensor], config: ModelConfig
) -> dict[str, Tensor]:
    """The inverse of ``to_huggingface``: copies of their weights, for our ``GPT(config, ...)``.

    Masks and rotary frequencies, which older files carry, are dropped; so is the head of a tied
    config, once it is seen to equal the embedding.
    Raises UsageError when the family cannot express the config or the keys are not the config's.
    """
    rows = _rows(family, config)
    buffers = re.compile(FAMILIES[family].buffers)
    theirs = {name: t for name, t in state_dict.items() if not buffers.fullmatch(name)}
    if config.tie_embeddings:
        head, embedding = theirs.pop(_HEAD, None), theirs.get(rows[0].theirs)
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise UsageError(
                f"{_HEAD} differs from {rows[0].theirs}, but tie_embeddings = True makes them one; "
                "set tie_embeddings = False"
            )
    _check_keys(set(theirs), {row.theirs for row in rows}, f"the {family} state dict")
    ours = {}
    for row in rows:
        joined = theirs[row.theirs].T if row.transposed else theirs[row.theirs]
        for name, part in zip(row.ours, joined.tensor_split(len(row.ours)), strict=True):
            ours[name] = part.clone(memory_format=torch.contiguous_format)
    return ours


def huggingface_config(family: str, config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Keyword arguments of the family's config class that make it compute what ``config`` does.

    Dropout, which plays no part once trained, is theirs where they have it: Llama only in the
    attention. Characters include no special tokens, so there is no begin or end token.
    Raises UsageError when the family cannot express the config.
    """
    config = _expressible(family, config)
    common = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "llama":
        return common | {
            "hidden_size": config.d_model,
            "intermediate_size": config.d_ff,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_kv_heads,
            "max_position_embeddings": config.context_length,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_dropout": config.attention_dropout,
        }
    gpt = common | {
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_positions": config.context_length,
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }
    if family == "gpt2":
        return gpt | {"n_inner": config.d_ff, "activation_function": "gelu_new"}
    # The class for GPT-1 means the tanh form by "gelu": its ACT_FNS maps the word to gelu_new.
    return gpt | {"afn": "gelu"}


def _expressible(family: str, config: ModelConfig) -> ModelConfig:
    """The resolved config, if the family has everything it asks for."""
    if family not in FAMILIES:
        raise UsageError(
            f"family = {family!r} is not one of {', '.join(FAMILIES)}.{nearest(family, FAMILIES)}"
        )
    config = config.resolved()
    fixed = dict(FAMILIES[family].fixed)
    if family != "llama":
        fixed["n_kv_heads"] = config.n_heads
    if family == "openai-gpt":
        fixed["d_ff"] = 4 * config.d_model
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise UsageError(
                f"{name} = {getattr(config, name)!r} cannot be written as {family}, "
                f"which has {name} = {value!r}; train with that or choose another family"
            )
    return config


def _rows(family: str, config: ModelConfig) -> list[Row]:
    """Every tensor of the model; the first row is the token embedding."""
    config = _expressible(family, config)
    names = FAMILIES[family]
    rows = list(names.outside)
    for i in range(config.n_layers):
        prefix = names.their_block.format(i=i)
        for theirs, ours, transposed in names.block:
            ours = tuple(f"blocks.{i}.{name}" for name in ours)
            rows.append(Row(prefix + theirs, ours, transposed))
    if not config.tie_embeddings:
        rows.append(Row(_HEAD, ("head.weight",)))
    return rows


def _check_keys(found: set[str], wanted: set[str], source: str) -> None:
    for problem, keys in (("lacks", wanted - found), ("has unknown", found - wanted)):
        if keys:
            shown = ", ".join(repr(key) for key in sorted(keys)[:3])
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise UsageError(
                f"{source} {problem} {shown}{more}; the keys must be those of the config: "
                "check n_layers and tie_embeddings"
            )
