"""Flags and files -> config. Nothing here imports torch.

Values come from the dataclass defaults, then TOML files from left to right, then flags.
"""

import contextlib
import dataclasses
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import tyro

from gpt.checks import nearest
from gpt.config import RunConfig, TextConfig, from_flat
from gpt.config_files import read_toml
from gpt.errors import UsageError
from gpt.exits import to_stderr
from gpt.text.printable import printable

T = TypeVar("T")

Files = Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE.toml ...")]


@dataclass(frozen=True, kw_only=True)
class TrainCommand(RunConfig):
    """Train a character-level GPT on a text file.

    Without flags: the preset configs/default.toml, useful on two CPU cores in about two minutes.
    """

    config: Files = ()
    """TOML files of settings, stacked left to right under the flags."""
    out: str = ""
    """Folder of the run (default: a new one under runs/)."""
    resume: str = ""
    """Folder of a run to go on with, with its own settings; flags given here change them."""
    allow_data_change: bool = False
    """Resume although the text has changed, if it holds no new characters."""


def parse_train(argv: Sequence[str], preset: Path) -> TrainCommand:
    """The command line of train.py; ``preset`` applies when no --config and no --resume is given.

    Raises SystemExit (0 for --help, 2 for wrong usage) and UsageError for unusable files.
    """
    words, given = take(not_empty(argv), "--config", ".toml")
    folder = _peek(words, "--resume")
    if folder:
        base = [Path(folder) / "config.toml"]
        if not os.path.isfile(base[0]):
            raise UsageError(
                f"--resume {folder}: there is no {base[0]}; give a folder that train.py made, or "
                "put the settings of the run back into that file"
            )
    elif given:
        base = []
    else:
        base = [preset]
    settings = from_flat(read_toml([*base, *given]), checked=False)
    command = parse(TrainCommand, words, TrainCommand(**vars(settings), config=tuple(given)))
    if command.out and command.resume:
        raise UsageError("--out and --resume exclude each other: a resumed run keeps its folder")
    return command


def parse(cls: type[T], argv: Sequence[str], default: T, prog: str | None = None) -> T:
    """Fill the dataclass from flags named like its fields (``--d_model``; ``--d-model`` too).

    ``prog`` is what --help calls the program (default: the name of the script).

    Raises SystemExit: 0 after --help, 2 after a message that names the wrong word.
    """
    known = {f"--{name}" for name in ("help", *_flags(default))}
    for word in argv:
        flag = re.match(r"(--[A-Za-z][\w-]*)(=|$)", word)
        written = "--" + flag[1][2:].replace("-", "_") if flag else ""
        if flag and written not in known:
            raise UsageError(f"unknown flag {flag[1]!r}.{nearest(written, known)} See --help")
    if shutil.get_terminal_size().columns < 40:
        os.environ["COLUMNS"] = "40"  # tyro cannot lay its help out in fewer
    # tyro shows words and defaults as they are, and no text may drive the terminal. A stream of
    # this kind has an encoding; without one tyro draws no boxes.
    said = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", newline="")
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return tyro.cli(
                cls, args=list(argv), default=default, config=(tyro.conf.OmitArgPrefixes,),
                use_underscores=True, prog=prog,
            )  # fmt: skip
    except SystemExit as leaving:
        said.seek(0)
        text = printable(said.read())
        if leaving.code:
            to_stderr(text.removesuffix("\n"))
        else:
            print(text, end="")
        raise


def run_config(command: RunConfig) -> RunConfig:
    """The run alone, without what only the command knows, the path of its text made absolute."""
    text = command.text
    if text.text not in ("", "-"):
        try:
            text = dataclasses.replace(text, text=str(Path(text.text).absolute()))
        except OSError as error:
            raise UsageError("this folder has been deleted; change to another") from error
    return RunConfig(
        text=text, model=command.model, training=command.training, machine=command.machine
    )


class Named(Protocol):
    """A command whose run can be named."""

    @property
    def text(self) -> TextConfig: ...
    @property
    def config(self) -> tuple[str, ...]: ...


def run_name(command: Named) -> str:
    """A name for a run's folder: its text and its config files."""
    path = command.text.text
    text = {"": "shakespeare", "-": "stdin"}.get(path, Path(path).stem)
    return "-".join([text, *(Path(path).stem for path in command.config)])


def shell_line(*words: str | Path) -> str:
    """The command as it can be pasted into a shell, python itself as it was started."""
    python = "python" if shutil.which("python") == sys.executable else _relative(sys.executable)
    # A path that begins with a dash would be taken for a flag.
    shown = [_relative(str(w)) if isinstance(w, Path) else w for w in words]
    safe = [
        f"./{w}" if isinstance(p, Path) and w.startswith("-") else w
        for p, w in zip(words, shown, strict=True)
    ]
    quoted = [python, *safe]
    return subprocess.list2cmdline(quoted) if os.name == "nt" else shlex.join(quoted)


def _relative(path: str) -> str:
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the working directory has been deleted
        return path


def _flags(default: Any) -> list[str]:
    """The flags of a dataclass and of the dataclasses within it, without the leading dashes."""
    names = []
    for f in dataclasses.fields(default):
        value = getattr(default, f.name)
        if dataclasses.is_dataclass(value):
            names += _flags(value)
        else:
            names += [f.name, f"no_{f.name}"] if isinstance(value, bool) else [f.name]
    return names


def take(words: list[str], flag: str, ending: str) -> tuple[list[str], list[str]]:
    """Split off ``flag`` and the words after it that end in ``ending``.

    So ``--config a.toml b.toml my.txt`` leaves my.txt to be the text.
    """
    rest: list[str] = []
    taken: list[str] = []
    while words:
        word = words.pop(0)
        if word.startswith(f"{flag}="):
            words.insert(0, word.removeprefix(f"{flag}="))
        elif word != flag:
            rest.append(word)
            continue
        if not words or not words[0].endswith(ending):
            found = repr(words[0]) if words else "nothing"
            raise UsageError(f"{flag} takes files that end in {ending}, and {found} follows it")
        while words and words[0].endswith(ending):
            taken.append(words.pop(0))
    return rest, taken


def _peek(words: list[str], flag: str) -> str:
    """The value that follows a flag (the last one counts), or an empty string."""
    value = ""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def not_empty(argv: Sequence[str]) -> list[str]:
    """The words, none of which is empty: a script's variable that was not set is no choice."""
    for word in argv:
        if not word or re.fullmatch(r"--[A-Za-z][\w-]*=", word):
            raise UsageError(f"{word or 'a word'!r} is empty; is a variable not set?")
    return list(argv)
