"""A run as a TOML file, and back."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from gpt.config import RunConfig, coerced, sections
from gpt.errors import UsageError
from gpt.text.opening import open_text

LARGEST = 1_000_000
"""Bytes of a config file: more is a mistake, or an attack."""
MOST_DOTS = 50
"""In a line of it: the parser needs memory by the square of the parts of a dotted key."""


def read_toml(paths: list[str | Path]) -> dict[str, Any]:
    """The fields that the files set, later files over earlier ones.

    Raises UsageError with the file, the key and the nearest known name.
    """
    values: dict[str, Any] = {}
    for path in paths:
        try:
            with open_text(str(path)) as file:
                content = file.read(LARGEST + 1)
            if len(content) > LARGEST:
                raise UsageError(f"config {str(path)!r} is larger than {LARGEST} bytes; shorten it")
            if max(line.count(b".") for line in content.split(b"\n")) > MOST_DOTS:
                raise UsageError(
                    f"config {str(path)!r} has a line with more than {MOST_DOTS} dots, and no "
                    "setting has one in its name; shorten it"
                )
            document = tomllib.loads(content.decode("utf-8-sig"))
        except UsageError:
            raise
        except OSError as error:
            raise UsageError(
                f"cannot read config {str(path)!r}: {error.strerror}; the presets are in configs/"
            ) from error
        except (ValueError, RecursionError) as error:  # bytes, grammar, digits, depth
            raise UsageError(f"{str(path)!r} is not valid TOML: {error}") from error
        values |= coerced(document, f"config {str(path)!r}")
    return values


def write_toml(config: RunConfig) -> str:
    """Every field, resolved, as a TOML file that ``--config`` accepts."""
    resolved = config.resolved()
    lines = []
    for section, cls in sections().items():
        lines.append(f"# {section}: {(cls.__doc__ or '').strip()}")
        values = getattr(resolved, section)
        lines += [
            f"{f.name} = {_toml_value(getattr(values, f.name))}" for f in dataclasses.fields(cls)
        ]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        special = '"\\.' if value.count(".") > MOST_DOTS else '"\\'
        escaped = "".join(
            f"\\U{ord(c):08X}" if c in special or not c.isprintable() else c for c in value
        )
        return f'"{escaped}"'
    return repr(value)
