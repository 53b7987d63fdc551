"""What a checkpoint holds, and the check that a dict of plain data is one.

    format_version  1; a reader refuses a newer one
    config          every setting, flat: ``gpt.config.to_flat``
    vocabulary      the characters, by code point
    model           state dict of the unwrapped GPT, float32
    optimisers      their state dicts, in the order of ``build_optimisers``
    step            updates done
    best            {"step", "loss"} of the lowest validation loss so far, or None
    source          {"path", "bytes", "sha256"} of the text
    environment     {"torch", "threads", "device", "dtype", "native"}

The same check runs before a checkpoint is written and after it is read: what was saved loads.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpt.config import ModelConfig, RunConfig, from_flat, to_flat
from gpt.errors import CheckpointError, UsageError
from gpt.model.count import parameter_count
from gpt.model.gpt import GPT
from gpt.text.tokenizer import CharTokenizer
from gpt.training.integrity import non_finite
from gpt.training.optimisers import build_optimisers
from gpt.training.updates import accepted

FORMAT_VERSION = 1

_KINDS: dict[str, tuple[type, ...]] = {
    "format_version": (int,),
    "config": (dict,),
    "vocabulary": (str,),
    "model": (dict,),
    "optimisers": (list,),
    "step": (int,),
    "best": (dict, type(None)),
    "source": (dict,),
    "environment": (dict,),
}
_BEST_KINDS: dict[str, tuple[type, ...]] = {"step": (int,), "loss": (float,)}
_SOURCE_KINDS: dict[str, tuple[type, ...]] = {"path": (str,), "bytes": (int,), "sha256": (str,)}
_ENVIRONMENT_KINDS: dict[str, tuple[type, ...]] = {
    "torch": (str,),
    "threads": (int,),
    "device": (str,),
    "dtype": (str,),
    "native": (str,),
}
_OPTIMISER_KINDS: dict[str, tuple[type, ...]] = {"state": (dict,), "param_groups": (list,)}


class NewerFormatError(CheckpointError):
    """The file is of a later version of this program: not damaged, and not for us to skip."""


class WithoutDraws(TorchFunctionMode):
    """A GPT built inside has its shapes and fixed tables, and weights that nobody has written.

    Drawing them takes longer than reading a file. The meta device would do for shapes, but its
    first use imports torch's compiler, more than a second.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.randn:
            return torch.empty(0, device="cpu")
        if func is Tensor.copy_:
            return args[0]
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)


def check_state(state: dict[str, Any]) -> None:
    """Raise CheckpointError (the reason alone) unless the plain data is a whole checkpoint.

    Everything is checked against the model that the config describes, and nothing is built that
    is larger than the file.
    """
    version = state.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError("it has no format_version and is not one of our checkpoints")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"its format_version is {version} and this program reads up to {FORMAT_VERSION}; "
            "use the version of the program that wrote it, or a later one"
        )
    _check_kinds("the checkpoint", state, _KINDS)
    _check_kinds("source", state["source"], _SOURCE_KINDS)
    # Added within version 1: files without it come from before there were kernels.
    state["environment"].setdefault("native", "")
    _check_kinds("environment", state["environment"], _ENVIRONMENT_KINDS)
    if not 0 <= state["step"] < 2**63:
        raise CheckpointError(f"step = {state['step']} is not in [0, 2**63)")
    best = state["best"]
    if best is not None:
        _check_kinds("best", best, _BEST_KINDS)
        if not (math.isfinite(best["loss"]) and best["loss"] >= 0):
            raise CheckpointError(f"best loss = {best['loss']} is no cross-entropy")
        if best["step"] > state["step"]:
            raise CheckpointError(f"its best step, {best['step']}, is later than its step")
    config = _checked_config(state["config"])
    try:
        vocab_size = CharTokenizer(state["vocabulary"]).vocab_size
    except UsageError as error:
        raise CheckpointError(str(error)) from error
    _check_model(state["model"], config.model, vocab_size)
    for i, optimiser in enumerate(state["optimisers"]):
        _check_optimiser(f"optimisers.{i}", optimiser)
    wrong = non_finite(state)
    if wrong is not None:
        raise CheckpointError(f"{wrong!r} holds a number that is not finite")
    rules = build_optimisers(
        skeleton(config.model, vocab_size), config.training, torch.device("cpu")
    )
    if state["optimisers"] and not accepted(rules, state["optimisers"]):
        raise CheckpointError("its optimisers do not fit its weights")


def _check_kinds(where: str, data: Any, kinds: dict[str, tuple[type, ...]]) -> None:
    if type(data) is not dict:
        raise CheckpointError(f"{where} is a {type(data).__name__}, not a dict")
    problems = [f"{key!r} is unknown" for key in data if key not in kinds]
    problems += [f"{key!r} is missing" for key in kinds if key not in data]
    problems += [
        f"{key!r} is of type {type(data[key]).__name__}"
        for key in kinds
        if key in data and type(data[key]) not in kinds[key]
    ]
    if problems:
        raise CheckpointError(f"in {where}, {_first(problems)}")


def _checked_config(flat: dict[str, Any]) -> RunConfig:
    """The config by the rules of the command line. Fields that are missing take their defaults."""
    known = to_flat(RunConfig())
    for name, value in flat.items():
        if name not in known:
            raise CheckpointError(f"its config has the unknown field {name!r}")
        if value is not None and type(value) not in (str, int, float, bool):
            raise CheckpointError(f"its config has {name} of type {type(value).__name__}")
    try:
        return from_flat(flat)
    except ValueError as error:
        raise CheckpointError(f"its config is refused: {error}") from error


def _check_model(weights: dict[Any, Any], config: ModelConfig, vocab_size: int) -> None:
    loose = [key for key, value in weights.items() if type(value) is not Tensor]
    if loose:
        raise CheckpointError(f"in its model, {loose[0]!r} is not a tensor")
    wanted = sum(parameter_count(config, vocab_size).values())
    found = sum(value.numel() for value in weights.values())
    # Sizes first: shapes are only worked out, and differences listed, for about the right size.
    if config.n_layers > len(weights) or wanted > 2 * found:
        raise CheckpointError(
            f"its config describes {wanted:,} weights in {config.n_layers:,} layers, but it has "
            f"{found:,} in {len(weights):,} tensors"
        )
    expected = expected_shapes(config, vocab_size)
    problems = [f"{key!r} is unknown" for key in weights if key not in expected]
    problems += [f"{key!r} is missing" for key in expected if key not in weights]
    for key, tensor in weights.items():
        if key not in expected:
            continue
        if tensor.shape != expected[key]:
            problems.append(f"{key!r} is {tuple(tensor.shape)}, not {tuple(expected[key])}")
        elif tensor.dtype != torch.float32:
            problems.append(f"{key!r} is {tensor.dtype}, not torch.float32")
    if problems:
        raise CheckpointError(f"its weights do not fit its config: {_first(problems)}")


def expected_shapes(config: ModelConfig, vocab_size: int) -> dict[str, torch.Size]:
    """The state dict's keys and shapes."""
    return {key: t.shape for key, t in skeleton(config, vocab_size).state_dict().items()}


def skeleton(config: ModelConfig, vocab_size: int) -> GPT:
    """A model of which no number is drawn or written, and no table is longer than needed."""
    if config.positions != "learned":  # only a learned table is a weight
        config = dataclasses.replace(config, context_length=1)
    with WithoutDraws():
        return GPT(config, vocab_size)


def _check_optimiser(where: str, optimiser: Any) -> None:
    _check_kinds(where, optimiser, _OPTIMISER_KINDS)
    groups = optimiser["param_groups"]
    if not all(type(g) is dict and type(g.get("params")) is list for g in groups):
        raise CheckpointError(f"{where}.param_groups is not a list of groups of parameters")
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(numbers))):
        raise CheckpointError(f"{where}.param_groups does not number its parameters from 0 on")
    for number, entries in optimiser["state"].items():
        if type(number) is not int or not 0 <= number < len(numbers) or type(entries) is not dict:
            raise CheckpointError(f"{where}.state has {number!r}, which is no parameter")


def _first(problems: list[str], n: int = 5) -> str:
    more = f", and {len(problems) - n} more" if len(problems) > n else ""
    return ", ".join(problems[:n]) + more
