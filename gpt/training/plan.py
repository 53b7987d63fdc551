"""What a run will be, told before it starts: the text, the losses to expect, the cost.

Everything is computed from the config and the text, except the machine's speed, which is measured.
"""

import math
import os
import statistics
import textwrap
import time
from pathlib import Path
from typing import Any

import torch

from gpt.config import RunConfig
from gpt.errors import DiskError, UsageError
from gpt.model.count import flops_per_character, kind_count, parameter_count
from gpt.text.reading import Corpus
from gpt.training.atomic import disk_errors, free_bytes, megabytes
from gpt.training.checkpoint import KEPT

LABEL = 10
"""Columns before the text of a line."""
NO_BREAK = "\N{NO-BREAK SPACE}"
"""Keeps a number with its name and unit when a line is wrapped; printed as a space."""


def describe(config: RunConfig, corpus: Corpus, machine: dict[str, Any]) -> list[str]:
    """The lines printed at the start of a run, at most 100 columns wide.

    ``machine`` says where it runs: device, dtype and threads. Losses and entropies are in nats per
    character, costs those of ``training_flops`` and ``memory``.
    """
    model, training = config.model, config.training
    vocab_size = corpus.tokenizer.vocab_size
    counts = parameter_count(model, vocab_size)
    kinds = kind_count(model, vocab_size)
    step = characters_per_step(config)
    flops = training_flops(config, vocab_size)
    bytes_of = memory(config, vocab_size)
    n_val = len(corpus.val)
    windows = f"{training.batch_size} windows of {model.context_length}"
    if training.grad_accumulation > 1:
        windows = f"{training.grad_accumulation} x {windows}"
    decay = (
        f"{training.weight_decay:g} on {_short(kinds['matrices'] + kinds['tables'])} parameters "
        f"(matrices, tables), none on {_short(kinds['vectors'])} (gains, shifts, biases)"
    )
    if training.optimizer == "muon":
        decay += f"; muon moves {_short(kinds['matrices'])} (the blocks' matrices), adamw the rest"
    return [
        *_line(
            "text",
            f"{corpus.n_chars:,} characters, {vocab_size} distinct; {len(corpus.train):,} to "
            f"train on, {f'{n_val:,} to validate on' if n_val else 'validation is off'}",
        ),
        *_line(
            "loss",
            f"nats per character; starts near ln {vocab_size} = {math.log(vocab_size):.3f}; at the "
            f"unigram entropy {corpus.unigram_entropy:.3f} it knows how often each character "
            f"comes; below the bigram entropy {corpus.bigram_entropy:.3f} more than pairs",
        ),
        *_line(
            "model",
            f"{sum(counts.values()):,} parameters: {_parts(counts)}",
        ),
        *_line("decay", decay),
        *_line(
            "steps",
            f"{training.steps:,}, each of {step:,} characters ({windows}): "
            f"{training.steps * step / len(corpus.train):,.1f} passes over the training text",
        ),
        *_line(
            "memory",
            f"about {_short(sum(bytes_of.values()), 'B')}: {_parts(bytes_of, 'B')}",
        ),
        *_line(
            "machine",
            f"{machine['device']}, {machine['dtype']}, threads {machine['threads']}, "
            f"{'C kernels' if machine['native'] else 'no C kernels'}; "
            f"{_short(flops, 'FLOP')} a step, {_short(flops * training.steps, 'FLOP')} in all",
        ),
    ]


def caution(config: RunConfig) -> list[str]:
    """Lines about settings that were seen to fail, or lack what their paper asks for; few have any.

    Post-LN was seen to stay at the unigram entropy with 6 blocks, Xavier weights, rate 3e-3 and no
    warm-up (100 steps of it helped; so did the gpt2 weights), with 12 blocks at rate 1e-3, and
    with 6 blocks at rate 1e-2 whatever the weights. Up to 4 blocks trained without warm-up.
    """
    model, training = config.model, config.training.resolved()
    assert training.warmup_steps is not None, "resolved() writes every default out"
    lines = _lacking(config)
    if training.warmup_steps > training.steps:
        return lines + _line(
            "caution",
            f"the warm-up ({training.warmup_steps:,} steps) is longer than the run "
            f"({training.steps:,}): the learning rate never reaches its peak; "
            f"--warmup_steps {training.steps // 10} would be a tenth",
        )
    if model.norm_position != "post" or model.n_layers < 6:
        return lines
    xavier = model.init == "xavier"
    short = training.warmup_steps < (min(100, training.steps // 2) if xavier else 1)
    if short and (xavier or model.n_layers >= 12):
        longer = max(1, min(200, training.steps // 2))
        lines += _line(
            "caution",
            f"Post-LN with {model.n_layers} blocks, {model.init} weights and "
            f"{training.warmup_steps} warm-up steps may stay at the unigram entropy; try "
            f"--warmup_steps {longer}" + (" or --init gpt2" if xavier else ""),
        )
    if training.learning_rate >= 1e-2:
        lines += _line(
            "caution",
            f"Post-LN with {model.n_layers} blocks at learning_rate {training.learning_rate:g} may "
            "stay at the unigram entropy; try --learning_rate 0.001",
        )
    return lines


def _lacking(config: RunConfig) -> list[str]:
    """What the placement of the norms needs to be the published one, and the config does not give.

    Wang et al. 2022, arXiv 2203.00555, 4.3; Sun et al. 2025, arXiv 2502.05795, and the README of
    its code; OLMo 2, arXiv 2501.00656, 3.2, where order and qk_norm together end the spikes.
    """
    placement, init = config.model.norm_position, config.model.init
    if placement == "deepnorm" and init != "native":
        text = f"deepnorm with init {init} lacks its beta; try --init native"
    elif placement == "lns" and init == "gpt2":
        text = "lns with init gpt2 scales twice, which its paper forbids; try --init native"
    elif placement == "reordered" and not config.model.qk_norm:
        text = "reordered norms are published together with qk_norm; try --qk_norm"
    else:
        return []
    return _line("caution", text)


def characters_per_step(config: RunConfig) -> int:
    """Characters that one update learns from."""
    training = config.training
    return training.batch_size * config.model.context_length * training.grad_accumulation


def training_flops(config: RunConfig, vocab_size: int) -> int:
    """FLOPs of one update: three forward passes' worth a character."""
    return 3 * flops_per_character(config.model, vocab_size) * characters_per_step(config)


def memory(config: RunConfig, vocab_size: int) -> dict[str, int]:
    """Bytes of the tensors of training, roughly; torch itself comes on top.

    Four bytes a number. AdamW keeps two numbers a parameter, Muon one. Autograd keeps of each
    character and block 9 d_model (norms 4, queries, keys and values 3, heads 2), d_ff before and
    after the activation (swiglu: four times d_ff), and three numbers a logit (five with a
    confidence penalty); dropout adds up to half, bfloat16 takes about a fifth off.
    """
    model, training = config.model.resolved(), config.training
    assert model.d_ff is not None
    kinds = kind_count(model, vocab_size)
    n_parameters = sum(kinds.values())
    state = 2 * n_parameters - (kinds["matrices"] if training.optimizer == "muon" else 0)
    kept = 9 * model.d_model + (4 if model.activation == "swiglu" else 2) * model.d_ff
    of_logits = 5 if training.confidence_penalty else 3
    characters = training.batch_size * model.context_length
    return {
        "weights": 4 * n_parameters,
        "gradients": 4 * n_parameters,
        "optimiser": 4 * state,
        "activations": 4 * characters * (model.n_layers * kept + of_logits * vocab_size),
    }


def check_memory(config: RunConfig, vocab_size: int) -> None:
    """Raise UsageError for a run on the CPU that needs more memory than the machine has.

    Silent where the system does not say how much that is.
    """
    windows = 8 * config.training.batch_size * config.training.grad_accumulation
    bytes_of = memory(config, vocab_size)
    saving = 2 * (bytes_of["weights"] + bytes_of["optimiser"])  # what was written is read back
    needed = max(sum(bytes_of.values()) + windows, saving)
    try:
        present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    if needed > present:
        raise UsageError(
            f"the run needs about {_short(needed, 'B')} of memory, and the machine has "
            f"{_short(present, 'B')}; try a smaller batch_size, d_model, n_layers or context_length"
        )


def check_disk(folder: Path, config: RunConfig, vocab_size: int) -> None:
    """Raise DiskError when the checkpoints of a run will not fit where its folder is.

    Those that are kept, the best one, and the one being written; those of a resumed run are there.
    """
    bytes_of = memory(config, vocab_size)
    with disk_errors(folder, 0):
        files = [path.lstat() for path in folder.glob("checkpoints/*.pt")]
    there = sum({file.st_ino: file.st_size for file in files}.values())  # best.pt is a second name
    needed = (KEPT + 2) * (bytes_of["weights"] + bytes_of["optimiser"]) - there
    free = free_bytes(folder)
    if free is not None and needed > free:
        raise DiskError(
            f"the checkpoints of the run take {megabytes(needed)}, and {megabytes(free)} are free "
            f"where {str(folder)!r} is; make room, or choose another place with --out"
        )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large square matrix product here, the yardstick of ``speed/mfu``.

    The median of five products, of matrices doubled until one takes 2 ms: about 50 ms in all. The
    model's rate divided by this is how well it uses the machine; it draws no random numbers.
    """
    size = 256
    while True:
        matrix = torch.linspace(-1, 1, size * size, device=device, dtype=dtype).view(size, size)
        _seconds(matrix)  # the first product also pays for loading the kernel
        seconds = statistics.median(_seconds(matrix) for _ in range(5))
        if seconds >= 2e-3 or size >= 8192:
            return 2 * size**3 / seconds
        size *= 2


def _seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    (matrix @ matrix)[0, 0].item()  # reading a number waits for the device
    return time.perf_counter() - start


def _line(label: str, text: str) -> list[str]:
    lines = textwrap.wrap(
        text,
        width=100,
        initial_indent=f"{label:<{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_on_hyphens=False,
    )
    return [line.replace(NO_BREAK, " ") for line in lines]


def _parts(sizes: dict[str, int], unit: str = "") -> str:
    return ", ".join(
        f"{name}{NO_BREAK}{_short(size, unit)}" for name, size in sizes.items() if size
    )


def _short(number: float, unit: str = "") -> str:
    """Three digits with a prefix: ``12.3M``, ``4.56 GFLOP``."""
    thousands = 0
    while number >= 999.5 and thousands < 6:
        number, thousands = number / 1000, thousands + 1
    prefix = " kMGTPE"[thousands].strip()
    return f"{number:.3g}{NO_BREAK}{prefix}{unit}" if unit else f"{number:.3g}{prefix}"
