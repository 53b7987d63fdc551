"""One run's TensorBoard file. Written at once and by name order, not from a thread and by clock.

TensorBoard reads the files of a folder in the order of their names, which begin with a time, and
drops the points that a later file declares void. So a file is named after those that are there,
even when the clock has gone back. Points and errors come when they are written: torch's
SummaryWriter writes in a thread, where an error is a traceback that nobody can catch.
"""

import os
import re
import struct
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text as text_summary

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")


class Board:
    """A new event file in ``folder``. Raises OSError wherever the disk refuses.

    ``first_step`` voids the points that older files of the folder have there or later. ``kind``
    ends the file's name, for those who write beside a run.
    """

    def __init__(self, folder: Path, first_step: int | None = None, kind: str = "") -> None:
        there = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        stamp = max([int(time.time()), *(int(match[1]) + 1 for match in there)])
        self.path = folder / f"events.out.tfevents.{stamp:010d}.{os.getpid()}{kind}"
        self._file = open(self.path, "xb")  # noqa: SIM115 - closed by close()
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if first_step is not None:
            start = SessionLog(status=SessionLog.START)
            # Twice: the first that a server meets is a beginning to it, and voids nothing.
            for _ in range(2):
                self._write(Event(step=first_step, session_log=start))

    def scalars(self, values: dict[str, float], step: int) -> None:
        """One point of each curve."""
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.summary(Summary(value=points), step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """A text that TensorBoard shows as Markdown."""
        self.summary(text_summary(tag, markdown), step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        """A picture, the bytes of a PNG file. Raises ValueError for another kind of file."""
        if png[:8] != b"\x89PNG\r\n\x1a\n" or len(png) < 24:
            raise ValueError(f"the image {tag!r} is not a PNG file; give the bytes of one")
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self.summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def summary(self, summary: Summary, step: int) -> None:
        """Values of any kind, as TensorBoard's plugins want them."""
        self._write(Event(step=step, summary=summary))

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()  # TensorBoard can show it; nothing is computed from it
        self._records.write(event.SerializeToString())
