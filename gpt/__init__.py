"""A character-level GPT that is exact, fast on a laptop, and safe.

The public names load on first use: importing torch takes seconds, and ``--help`` should not.
"""

import importlib
from typing import Any

_HOMES = {
    "GPT": "gpt.model.gpt",
    "ModelConfig": "gpt.config",
    "RunConfig": "gpt.config",
    "CharTokenizer": "gpt.text.tokenizer",
    "generate": "gpt.sampling.generate",
    "load_checkpoint": "gpt.training.checkpoint",
    "restore": "gpt.training.checkpoint",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
