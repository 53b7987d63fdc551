"""One run's TensorBoard file. Written at once and by name order, not from a thread and by clock.

TensorBoard reads the files of a folder in the order of their names, which begin with a time, and
drops the points that a later file declares void. So a file is named after those that are there,
even when the clock has gone back. Points and errors come when they are written: torch's
SummaryWriter writes in a thread, where an error is a traceback that nobody can catch.
"""

import os
import re
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text as text_summary

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")


class Board:
    """A new event file in ``folder``. Raises OSError wherever the disk refuses.

    ``first_step`` voids the points that older files of the folder have there or later.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        there = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        stamp = max([int(time.time()), *(int(match[1]) + 1 for match in there)])
        name = f"events.out.tfevents.{stamp:010d}.{os.getpid()}"
        self._file = open(folder / name, "xb")  # noqa: SIM115 - closed by close()
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if first_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(step=first_step, session_log=start))

    def scalars(self, values: dict[str, float], step: int) -> None:
        """One point of each curve."""
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=points)))

    def text(self, tag: str, markdown: str, step: int) -> None:
        """A text that TensorBoard shows as Markdown."""
        self._write(Event(step=step, summary=text_summary(tag, markdown)))

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()  # TensorBoard can show it; nothing is computed from it
        self._records.write(event.SerializeToString())
