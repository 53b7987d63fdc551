"""The curves of a run: ``metrics.jsonl``, which is the truth, and TensorBoard, which shows it.

One line of ``metrics.jsonl`` is one object: ``{"step": 100, "loss/train": 2.31}``. JSON has no NaN
and no infinity; they are written as the strings "nan", "inf" and "-inf", and come back as numbers.

One run is one folder for TensorBoard and each curve one tag, so two runs side by side overlay.
"""

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from gpt.errors import DiskError, UsageError
from gpt.text.printable import printable
from gpt.training.atomic import write_atomically


class Metrics:
    """Writes the points of one run. Logging never stops training.

    ``first_step`` is the first step to be written: points that an earlier session left there or
    later are dropped, so a resumed curve has each step once. After an OSError there is one
    warning on stderr, nothing more is written, and ``failed`` says why.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        self.failed = ""
        self._folder = folder
        self._open: list[Any] = []
        path = folder / "metrics.jsonl"
        with self._guarded():
            again = path.exists()
            if again:
                _cut(path, first_step)
                _cut_samples(folder / "samples.txt", first_step)
            self._lines = path.open("a", encoding="utf-8", newline="\n")
            self._open.append(self._lines)
            self._board = SummaryWriter(str(folder), purge_step=first_step if again else None)
            self._open.append(self._board)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Points of several curves at one step (optimiser updates done). Not flushed."""
        with self._guarded() as works:
            if works:
                record: dict[str, Any] = {"step": step}
                record |= {tag: _json_number(value) for tag, value in values.items()}
                self._lines.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
                for tag, value in values.items():
                    self._board.add_scalar(tag, value, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """A text for TensorBoard only, shown as it is: no markup in it is obeyed."""
        with self._guarded() as works:
            if works:
                self._board.add_text(tag, _preformatted(text), step)

    def sample(self, text: str, step: int) -> None:
        """A text that the model wrote, for ``samples.txt`` and TensorBoard."""
        with self._guarded() as works:
            if works:
                path = self._folder / "samples.txt"
                with path.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(f"--- step {step} ---\n{text}\n")
        self.text("sample", text, step)

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        with self._guarded() as works:
            if works:
                self._lines.flush()
                self._board.flush()

    def close(self) -> None:
        """Flush and close; later calls do nothing."""
        with self._guarded():
            while self._open:
                self._open.pop().close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[bool]:
        """Yields whether to write; the first OSError of a body ends the logging."""
        try:
            yield not self.failed
        except (OSError, DiskError, UnicodeError) as error:  # TensorBoard wants UTF-8 paths
            self.failed = str(error)
            print(
                f"warning: the curves are not written from here on ({printable(self.failed)}); "
                "training goes on",
                file=sys.stderr,
            )
            # TensorBoard writes in a thread, and its error comes once more when it is closed.
            while self._open:
                with contextlib.suppress(OSError):
                    self._open.pop().close()


def _cut_samples(path: Path, first_step: int) -> None:
    """Drop the samples of ``first_step`` and later ones."""
    if path.exists():
        text = path.read_bytes()
        headings = re.finditer(rb"^--- step (\d+) ---$", text, re.MULTILINE)
        ends = [heading.start() for heading in headings if int(heading[1]) >= first_step]
        if ends:
            write_atomically(path, lambda file: file.write(text[: ends[0]]))


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


def _record(line: bytes) -> dict[str, Any] | None:
    """One line as ``{"step": int, tag: float, ...}``; None when it is not such a line."""
    try:
        record = json.loads(line.decode("utf-8"))
        step = record.pop("step")
        values = {tag: float(value) for tag, value in record.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return {"step": step, **values} if type(step) is int else None


def _cut(path: Path, first_step: int) -> None:
    """Drop the lines of ``first_step`` and later, and those that cannot be read."""
    kept = b"".join(
        line.rstrip(b"\n") + b"\n"
        for line in path.read_bytes().splitlines(keepends=True)
        if (record := _record(line)) and record["step"] < first_step
    )
    write_atomically(path, lambda file: file.write(kept))


def _json_number(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _preformatted(text: str) -> str:
    """Markdown that shows the text as it is: indented by four, it is code.

    TensorBoard escapes the HTML in code; escaped here as well, ``<`` would be shown as ``&lt;``.
    """
    return "\n".join("    " + line for line in printable(text).split("\n"))
