"""The curves of a run: ``metrics.jsonl``, which is the truth, and TensorBoard, which shows it.

One run is one folder for TensorBoard and each curve one tag, so two runs side by side overlay.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from gpt.errors import DiskError
from gpt.text.printable import printable
from gpt.training.board import Board
from gpt.training.curves import line_of, rewind
from gpt.training.progress import warn


class Metrics:
    """Writes the points of one run. Logging never stops training.

    ``first_step`` is the first step to be written: points that an earlier session left there or
    later are dropped, so a resumed curve has each step once. After an OSError there is one
    warning on stderr, nothing more is written, and ``failed`` says why.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        self.failed = ""
        self._folder = folder
        self._open: list[Board | IO[str]] = []
        path = folder / "metrics.jsonl"
        with self._guarded():
            again = path.exists()
            for written in (path, folder / "samples.txt"):
                _refuse_planted(written)
            if again and (n := rewind(folder, first_step)):
                warn(f"{n} damaged lines of {str(path)!r} were dropped")
            if first_step and not again:
                warn(f"there is no {str(path)!r}; the curves begin at step {first_step}")
            self._lines = path.open("a", encoding="utf-8", newline="\n")
            self._open.append(self._lines)
            self._board = Board(folder, first_step if again else None)
            self._open.append(self._board)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Points of several curves at one step (optimiser updates done). Not flushed."""
        with self._guarded() as works:
            if works:
                self._lines.write(line_of(step, values))
                self._board.scalars(values, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """A text for TensorBoard only, shown as it is: no markup in it is obeyed."""
        with self._guarded() as works:
            if works:
                self._board.text(tag, _preformatted(text), step)

    def sample(self, text: str, step: int) -> None:
        """A text that the model wrote, for ``samples.txt`` and TensorBoard."""
        with self._guarded() as works:
            if works:
                path = self._folder / "samples.txt"
                with path.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(f"--- step {step} ---\n{text}\n")
        self.text("sample", text, step)

    def flush(self) -> None:
        """Force metrics.jsonl to the disk, and hand TensorBoard's file to the system."""
        with self._guarded() as works:
            if works:
                self._lines.flush()
                os.fsync(self._lines.fileno())
                self._board.flush()
                if os.fstat(self._lines.fileno()).st_nlink == 0:
                    raise FileNotFoundError(errno.ENOENT, "deleted", self._lines.name)

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
        except (OSError, DiskError, UnicodeError) as error:  # a host name or path may not encode
            self.failed = str(error)
            warn(f"the curves are not written from here on ({self.failed}); training goes on")
            # What is still in a buffer fails once more when its file is closed.
            while self._open:
                with contextlib.suppress(OSError):
                    self._open.pop().close()


def _refuse_planted(path: Path) -> None:
    """A link, a pipe or a folder where a file of the run should be is not ours to write to."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))


def _preformatted(text: str) -> str:
    """Markdown that shows the text as it is: indented by four, it is code.

    TensorBoard escapes the HTML in code; escaped here as well, ``<`` would be shown as ``&lt;``.
    """
    return "\n".join("    " + line for line in printable(text).split("\n"))
