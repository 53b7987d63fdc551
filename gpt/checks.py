"""Rules that every settings dataclass shares: declared types, bounds, and near names."""

import difflib
import math
import types
import typing
from typing import Any, Literal

from gpt.errors import UsageError


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """`` Did you mean 'x'?``, or nothing when no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The plain types that a field accepts; for a Literal, its words."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def check_types(config: Any) -> None:
    """Refuse a value of another type than declared, with the name, the value and the type."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if typing.get_origin(hint) is Literal:
            words = typing.get_args(hint)
            if value not in words:
                raise UsageError(
                    f"{name} = {value!r} is not one of {', '.join(words)}."
                    f"{nearest(str(value), words)}"
                )
            continue
        kinds = kinds_of(hint)
        exact = any(type(value) is kind for kind in kinds)
        if not exact and not (float in kinds and type(value) is int):
            wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
            raise UsageError(f"{name} = {value!r} is not of type {wanted}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} = {value} is not a finite number")
        if type(value) is int and not fits(value):
            raise UsageError(f"{name} does not fit in 64 bits; choose a smaller number")


def fits(value: int) -> bool:
    return -(2**63) <= value < 2**63


def at_least(name: str, value: float, low: int) -> None:
    if value < low:
        raise UsageError(f"{name} = {value} is less than {low}; choose {low} or more")
