"""What must be equal between arms, as hashes that are compared seed by seed.

    weights/NAME   shape, and the signs of a tensor that was drawn at random
    batches        the training split and where the windows of every step start
    evaluation     the validation split, and the length of the windows it is read in
    budget         characters trained on, those of the warm-up included
    machine        device, dtype, torch and C kernels: a difference is a warning

Signs, because an arm may draw the same numbers and scale them (an initialisation, DeepNorm's beta):
a factor changes no sign. Constant tensors (norms, biases, what starts at zero) are left out.
"""

import hashlib
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt.config import RunConfig, changed, to_flat
from gpt.errors import UsageError
from gpt.lab.outcomes import Outcome
from gpt.text.reading import Corpus

if TYPE_CHECKING:
    from gpt.model.gpt import GPT

DRAWS = "weights/"
SHOWN = 3
"""Names in a message."""


def hashes(
    config: RunConfig, model: "GPT", corpus: Corpus, environment: dict[str, Any]
) -> dict[str, str]:
    """Of a run whose model is as it was made, and that is computed in ``environment``
    (``Machine.environment``). The names are at the head of this file."""
    training = config.training
    context_length = config.model.context_length
    windows = training.steps * training.batch_size * training.grad_accumulation
    return {
        **draws(model),
        "batches": _batches(config, corpus.train),
        "evaluation": f"{_digest(np.ascontiguousarray(corpus.val).tobytes())} in {context_length}",
        "budget": f"{windows * context_length}",
        "machine": ", ".join(f"{k} {v}" for k, v in environment.items() if k != "threads"),
    }


def draws(model: "GPT") -> dict[str, str]:
    """``weights/NAME -> shape and hash of the signs`` of every tensor that is not constant."""
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().cpu().numpy()
        if values.min() != values.max():
            shape = "x".join(map(str, values.shape))
            found[DRAWS + name] = f"{shape} {_digest(np.packbits(values > 0).tobytes())}"
    return found


def refuse_unfair(outcomes: Sequence[Outcome], strict: bool = False) -> list[str]:
    """Compare the arms seed by seed; return warnings. Raises UsageError that names what differs.

    Shared tensors of equal shape must have been drawn alike; batches, evaluation and budget must be
    equal. Tensors of other shapes, which an arm may have on purpose, are a warning, and a refusal
    where ``strict``.
    """
    warnings: list[str] = []
    seeds = sorted({outcome.seed for outcome in outcomes})
    for seed in seeds:
        for first, second in combinations([o for o in outcomes if o.seed == seed], 2):
            wrong, sizes = _differences(first.hashes, second.hashes)
            where = f"arms {first.arm!r} and {second.arm!r} (seed {seed})"
            if wrong or (strict and sizes):
                raise UsageError(
                    f"{where} differ in {_listed(wrong or sizes)}, so their losses are not "
                    "comparable; give both the same, or compare them in two runs"
                )
            machines = [outcome.hashes.get("machine", "") for outcome in (first, second)]
            if machines[0] != machines[1]:
                warnings.append(
                    f"{first.arm} and {second.arm} were computed differently "
                    f"({'; '.join(machines)}): this compares that too"
                )
            if sizes:
                warnings.append(
                    f"{first.arm} and {second.arm} have tensors of other sizes ("
                    f"{_listed(sizes)}): this compares sizes too"
                )
    return list(dict.fromkeys(warnings))


EQUAL = {"steps", "batch_size", "grad_accumulation", "context_length", "windows", "seed"}
"""Settings without which arms would not learn from the same characters."""


def refuse_unequal_plans(configs: dict[str, RunConfig]) -> list[str]:
    """The same before anything has run, from the arms' configs; return warnings.

    Raises UsageError where the batches, the evaluation or the budget cannot be equal. Warns where
    an arm differs from the first in more than one setting.
    """
    (first, base), *others = configs.items()
    warnings = []
    for name, config in others:
        before, after = to_flat(base), to_flat(config)
        settings = {  # what follows from another setting is no change of its own
            key: pair for key, pair in changed(base, config).items() if before[key] != after[key]
        }
        unequal = [
            f"{key} ({old} and {new})" for key, (old, new) in settings.items() if key in EQUAL
        ]
        if unequal:
            raise UsageError(
                f"arms {first!r} and {name!r} differ in {', '.join(unequal)}, so they would not "
                "learn from the same characters or be measured alike; give all arms the same"
            )
        if len(settings) > 1:
            warnings.append(
                f"{first} and {name} differ in {len(settings)} settings ({', '.join(settings)}); "
                "one change at a time says which of them matters"
            )
    return warnings


def _differences(first: dict[str, str], second: dict[str, str]) -> tuple[list[str], list[str]]:
    """What differs though it must not, and the tensors that have another shape."""
    wrong: list[str] = []
    sizes: list[str] = []
    for name in first.keys() | second.keys():
        one, other = first.get(name), second.get(name)
        if one == other or name == "machine":
            continue
        if not name.startswith(DRAWS):
            wrong.append(name)
        elif one is not None and other is not None:
            alike = one.split()[0] == other.split()[0]
            (wrong if alike else sizes).append(name)
    return sorted(wrong), sorted(sizes)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _batches(config: RunConfig, ids: np.ndarray) -> str:
    from gpt.training.loop import step_windows

    digest = hashlib.sha256(np.ascontiguousarray(ids).tobytes())
    for step in range(config.training.steps):
        digest.update(
            step_windows(config.training, step, len(ids), config.model.context_length).tobytes()
        )
    return digest.hexdigest()[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
