"""A run as a TOML file, and back."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from gpt.config import RunConfig, coerced, sections
from gpt.errors import UsageError


def read_toml(paths: list[str | Path]) -> dict[str, Any]:
    """The fields that the files set, later files over earlier ones.

    Raises UsageError with the file, the key and the nearest known name.
    """
    values: dict[str, Any] = {}
    for path in paths:
        try:
            document = tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
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
        escaped = "".join(
            f"\\U{ord(c):08X}" if c in '"\\' or not c.isprintable() else c for c in value
        )
        return f'"{escaped}"'
    return repr(value)
