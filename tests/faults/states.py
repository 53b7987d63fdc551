"""What checkpoints hold: states to save, states that follow from their step, and comparisons."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.config import RunConfig, to_flat
from gpt.training.checkpoint import Checkpoint, load_checkpoint
from gpt.training.curves import read_metrics
from gpt.training.schema import expected_shapes

VOCABULARY = "\n abcdefg"
SMALL = RunConfig().with_changes(
    {"d_model": 12, "n_heads": 3, "n_layers": 1, "context_length": 5, "activation": "relu"}
)
LARGE = RunConfig().with_changes({"d_model": 48, "n_heads": 3, "n_layers": 2, "context_length": 32})


def state_of(
    config: RunConfig, model: dict[str, Tensor], step: int, **changes: Any
) -> dict[str, Any]:
    """What is saved of a model at a step; ``changes`` are other values of its fields."""
    return {
        "config": to_flat(config),
        "vocabulary": VOCABULARY,
        "model": model,
        "optimisers": [],
        "step": step,
        "best": None,
        "source": {"path": "a.txt", "bytes": 7, "sha256": "0" * 64},
        "environment": {
            "torch": "2.13.0",
            "threads": 1,
            "device": "cpu",
            "dtype": "float32",
            "native": "",
        },
    } | changes


def state_at(step: int, config: RunConfig = SMALL) -> dict[str, Any]:
    """A state of which every number follows from the step."""
    drawn = torch.Generator().manual_seed(step)
    model = {name: torch.rand(shape, generator=drawn) for name, shape in _shapes(config).items()}
    best = {"step": step, "loss": step / 3}
    source = {"path": "a.txt", "bytes": step, "sha256": "ab" * 32}
    return state_of(config, model, step, best=best, source=source)


def is_whole(checkpoint: Checkpoint, config: RunConfig = SMALL) -> bool:
    """Whether everything in a checkpoint is as ``state_at`` its step."""
    saved = state_at(checkpoint.step, config)
    found = {name: getattr(checkpoint, name) for name in saved}
    return not list(differences(found, saved))


def differences(found: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Where tensors, and what holds them, are not the same to the last bit.

    A checkpoint has lists for tuples.
    """
    if type(found) is not (list if type(expected) is tuple else type(expected)):
        yield f"{where} is a {type(found).__name__}"
    elif isinstance(expected, Tensor):
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            yield where
    elif isinstance(expected, dict):
        if list(found) != list(expected):
            yield f"{where} has {list(found)}"
        else:
            for key in expected:
                yield from differences(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            yield f"{where} has {len(found)}"
        else:
            for i in range(len(expected)):
                yield from differences(found[i], expected[i], f"{where}.{i}")
    elif found != expected:
        yield f"{where} is {found!r}, not {expected!r}"


def assert_same(found: Any, expected: Any) -> None:
    assert not list(differences(found, expected))


def assert_same_training(ours: Path, theirs: Path) -> None:
    """Two finished runs have the same weights, optimiser memory and curves, bit for bit."""
    one, other = (load_checkpoint(folder, prefer="newest") for folder in (ours, theirs))
    for part in ("step", "best", "model", "optimisers"):
        assert_same(getattr(one, part), getattr(other, part))
    curves = [read_metrics(folder) for folder in (ours, theirs)]
    for tag in ("loss/train", "loss/val", "lr"):
        assert curves[0].get(tag) == curves[1].get(tag), tag


@functools.cache
def _shapes(config: RunConfig) -> dict[str, torch.Size]:
    return expected_shapes(config.model, len(VOCABULARY))
