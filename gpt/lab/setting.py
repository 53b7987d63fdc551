"""The setting of a comparison in one sentence, so that nobody reads a result without it."""

from collections.abc import Sequence

from gpt.config import RunConfig, to_flat

_SENTENCE = (
    ("", "n_layers", " blocks"), ("d_model ", "d_model", ""), ("", "n_heads", " heads"),
    ("context ", "context_length", ""), ("norm_position ", "norm_position", ""),
    ("norm ", "norm", ""), ("init ", "init", ""), ("", "optimiser", ""),
    ("learning rate ", "learning_rate", ""), ("", "schedule", " schedule"),
    ("warm-up ", "warmup_steps", " steps"), ("weight decay ", "weight_decay", ""),
    ("clip ", "grad_clip", ""), ("dropout ", "dropout", ""), ("", "steps", " steps"),
    ("", "characters", " characters a step"),
)  # fmt: skip
"""Words before a value, its name, words after it."""
_IF_CHANGED = ("windows", "attention_dropout", "confidence_penalty")
"""Told where they are not those of the block of the teaching texts."""
_TOLD = {name for _, name, _ in _SENTENCE}
_TOLD |= {"optimizer", "beta1", "beta2", "muon_momentum", "batch_size", "grad_accumulation"}
_UNTOLD = {"seed", "text", "threads"}


def setting_of(configs: Sequence[RunConfig], seeds: Sequence[int], code: str, data: str) -> str:
    """The sentence, from the configs of the arms in their order and the two digests.

    What all arms share stands once, what they differ in as ``norm_position pre / post``, a setting
    that the sentence usually leaves out included.
    """
    flats = [_facts(config.resolved()) for config in configs]
    parts = [f"{before}{_values(flats, name)}{after}" for before, name, after in _SENTENCE]
    usual = _facts(RunConfig().resolved())
    for name in sorted(flats[0].keys() - _TOLD - _UNTOLD):
        values = {flat[name] for flat in flats}
        if len(values) > 1 or (name in _IF_CHANGED and values != {usual[name]}):
            parts.append(f"{name} {_values(flats, name)}")
    return (
        f"Setting: {', '.join(parts)}; seeds {ranges(seeds)}; "
        f"code {code[:12]}, data {data[:12]} (sha256)."
    )


def ranges(numbers: Sequence[int]) -> str:
    """``10-14, 20``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _facts(config: RunConfig) -> dict[str, str]:
    """Every field as it is shown, and two that are made of several."""
    training = config.training
    adamw = f"AdamW({training.beta1:g}, {training.beta2:g})"
    muon = f"Muon({training.muon_momentum:g}) with {adamw}"
    windows = training.batch_size * training.grad_accumulation
    flat = to_flat(config)
    return {name: f"{v:g}" if isinstance(v, float) else str(v) for name, v in flat.items()} | {
        "optimiser": muon if training.optimizer == "muon" else adamw,
        "characters": f"{windows * config.model.context_length:,}",
    }


def _values(flats: Sequence[dict[str, str]], name: str) -> str:
    values = [flat[name] for flat in flats]
    return " / ".join(values if len(set(values)) > 1 else values[:1])
