"""``metrics.jsonl``, the truth about a run's curves: one object a line, read and rewound.

A line is ``{"step": 100, "loss/train": 2.31}``. JSON has no NaN and no infinity; they are written
as the strings "nan", "inf" and "-inf", and come back as numbers.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from gpt.errors import UsageError
from gpt.training.atomic import write_atomically


def line_of(step: int, values: dict[str, float]) -> str:
    """The line for the points of several curves at one step."""
    record: dict[str, Any] = {"step": step}
    record |= {tag: _json_number(value) for tag, value in values.items()}
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def read_metrics(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve of a run: tag -> ``[(step, value), ...]`` in the order written.

    A last line that a crash cut short is passed over. Raises UsageError for a missing file and
    for any other line that cannot be read.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UsageError(
            f"cannot read {str(path)!r}: {error.strerror}; give the folder of a training run"
        ) from error
    curves: dict[str, list[tuple[int, float]]] = {}
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise UsageError(
                f"line {number} of {str(path)!r} is damaged; delete the line to go on without it"
            )
        step = record.pop("step")
        for tag, value in record.items():
            curves.setdefault(tag, []).append((step, value))
    return curves


def rewind(folder: Path, first_step: int) -> int:
    """Drop what a run wrote about ``first_step`` and later, and lines that cannot be read.

    Returns how many could not. Raises OSError and DiskError.
    """
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    steps = [record["step"] if (record := _record(line)) else None for line in lines]
    kept = [
        line.rstrip(b"\n") + b"\n"
        for line, step in zip(lines, steps, strict=True)
        if step is not None and step < first_step
    ]
    write_atomically(path, lambda file: file.write(b"".join(kept)))
    path = folder / "samples.txt"
    if path.exists():
        text = path.read_bytes()
        headings = re.finditer(rb"^--- step (\d{1,18}) ---$", text, re.MULTILINE)
        ends = [heading.start() for heading in headings if int(heading[1]) >= first_step]
        if ends:
            write_atomically(path, lambda file: file.write(text[: ends[0]]))
    return steps.count(None)


def _record(line: bytes) -> dict[str, Any] | None:
    """One line as ``{"step": int, tag: float, ...}``; None when it is not such a line."""
    try:
        record = json.loads(line.decode("utf-8"))
        step = record.pop("step")
        values = {tag: float(value) for tag, value in record.items()}
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None
    return {"step": step, **values} if type(step) is int else None


def _json_number(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)
