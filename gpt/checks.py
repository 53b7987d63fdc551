"""Rules that every settings dataclass shares: declared types, bounds, and near names."""

import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from gpt.errors import UsageError


def nearest(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?``, or nothing when no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_types(config: Any) -> None:
    """Refuse a field whose value is of another type than declared."""
    for name, hint in typing.get_type_hints(type(config)).items():
        check_type(name, getattr(config, name), hint)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value of another type than declared: UsageError with the value and the type."""
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        if value not in words:
            raise UsageError(
                f"{name} = {_shown(value)} is not one of {', '.join(words)}."
                f"{nearest(_shown(value), words)}"
            )
        return
    kinds = kinds_of(hint)
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        wanted = " or ".join(_EXAMPLES[kind] for kind in kinds if kind in _EXAMPLES)
        raise UsageError(f"{name} = {_shown(value)} is not {wanted}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} = {value} is not a finite number; choose one")
    if type(value) is int and not fits(value):
        raise UsageError(f"{name} does not fit in 64 bits; choose a smaller number")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The plain types that a field accepts: of ``int | None``, both."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}..."
    except ValueError:  # Python writes out no more than some thousand digits
        return "a number too long to be shown"


def fits(value: int) -> bool:
    """Whether torch can take it: 64 bits, signed."""
    return -(2**63) <= value < 2**63


def at_least(name: str, value: float, low: int) -> None:
    """Refuse a value below the bound."""
    if value < low:
        raise UsageError(f"{name} = {value} is less than {low}; choose {low} or more")


def at_most(name: str, value: float, high: float) -> None:
    """Refuse a value above the bound."""
    if value > high:
        raise UsageError(f"{name} = {value} is more than {high}; choose {high} or less")


_EXAMPLES = {
    int: "of type int, such as 4",
    float: "of type float, such as 0.1",
    bool: "of type bool: true or false",
    str: 'of type str, such as "utf-8"',
}
