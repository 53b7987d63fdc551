"""The folder of a comparison: one folder a trial, and what the commands make of them."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt.commandline import run_name, shell_line
from gpt.config import RunConfig
from gpt.corpus import read_text
from gpt.errors import DiskError, UsageError
from gpt.exits import hearing_terminations, lost
from gpt.lab.commandline import LabCommand
from gpt.lab.progress import say, tell
from gpt.lab.trials import Stopped
from gpt.runfolder import given_folder, new_folder, refuse_link, refuse_used
from gpt.text.reading import Corpus
from gpt.training.atomic import write_atomically

MARK = "comparison.json"
"""The file that says that a folder is of a comparison; it has its first name."""
AGGREGATE = "_aggregate"
"""The folder of what TensorBoard shows beside the runs."""
FIGURES = "figures"
REPORT = "report.html"


@contextlib.contextmanager
def begin(command: LabCommand, config: RunConfig, prefix: str) -> Iterator[tuple[Corpus, Path]]:
    """The text of the config, what is to be said of it told, and the folder of the command.

    An --out that holds something else is refused before the text is read, and an unusable text
    before a folder is made. Inside, SIGINT, SIGTERM and SIGHUP raise Stopped; at the end, a
    standard output that could not be written is an error that names the report. Raises UsageError
    and DiskError, and BrokenPipeError where the reader of standard output has gone.
    """
    if command.out:
        refuse_other_use(command.out)
    corpus = read_text(config)
    for line in corpus.notices:
        tell(line)
    out = lab_folder(command.out, f"{prefix}-{run_name(command)}")
    for name in (AGGREGATE, FIGURES):
        refuse_link(out / name)
    try:
        with hearing_terminations():
            yield corpus, out
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        raise Stopped(number, out) from None
    _refuse_lost_output(out)


def _refuse_lost_output(out: Path) -> None:
    error = lost(sys.stdout)
    if not error:
        return
    told = (
        f"standard output cannot be written ({getattr(error, 'strerror', error)}), and what was "
        f"found is lost there; read it in {out / REPORT}"
    )
    if isinstance(error, BrokenPipeError):
        tell(told)
        raise error
    raise DiskError(told) from error


def lab_folder(out: str, name: str) -> Path:
    """The folder ``out``, or where it is empty a new one under runs/ called after ``name``.

    One that compare.py made is gone on with. Raises UsageError for one that holds something else,
    and DiskError.
    """
    folder = Path(out)
    if out and is_lab_folder(folder):
        return folder
    folder = given_folder(folder) if out else new_folder(name)
    mark = json.dumps({"name": name}) + "\n"
    write_atomically(folder / MARK, lambda file: file.write(mark.encode()))
    return folder


def refuse_other_use(out: str) -> None:
    """Raise UsageError for a folder that holds something else than a comparison."""
    if not is_lab_folder(Path(out)):
        refuse_used(Path(out))


def is_lab_folder(folder: Path) -> bool:
    """Whether compare.py made it. Raises UsageError where the system does not let one look."""
    try:
        return (folder / MARK).is_file()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot use --out {folder}: {error}; choose another folder") from error


def farewell(stopped: Stopped, script: Path, words: list[str]) -> int:
    """Say what is kept and with which command it goes on; return the exit code."""
    if stopped.out:
        say(f"stopped; what was finished is kept in {stopped.out}")
        say("go on:  " + shell_line(script, *without_out(words), "--out", stopped.out))
    return 128 + stopped.signal


def without_out(words: list[str]) -> list[str]:
    """The words without ``--out DIR``."""
    kept = []
    rest = iter(words)
    for word in rest:
        if word == "--out":
            next(rest, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return kept
