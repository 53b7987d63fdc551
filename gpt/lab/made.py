"""How a report was made: what its reader needs to make it again."""

import dataclasses
import importlib.metadata
import shlex
from typing import Any

from gpt.config import to_flat
from gpt.lab.commandline import SUBCOMMANDS, LabCommand, parse_compare
from gpt.lab.trials import source_digest
from gpt.text.reading import Corpus


def made(name: str, command: LabCommand, corpus: Corpus) -> dict[str, str]:
    """What -> value, for ``write_report``. ``name``: of the subcommand."""
    trains = name != "init"
    return {
        "command": command_line(name, command),
        "settings": "everything resolved is in config.toml in the folder of each run"
        if trains
        else "those of the command; nothing was trained",
        "data": f"{corpus.source.bytes:,} bytes, sha256 {corpus.source.sha256}",
        "code": f"sha256 {source_digest()} of the sources that determine a training; "
        f"torch {importlib.metadata.version('torch')}",
    }


def command_line(name: str, command: LabCommand) -> str:
    """A command that asks for the same, whatever its files of settings say by then.

    It names every setting that is not the subcommand's default, but for those that it varies
    itself, and neither folder nor workers, on which the results do not depend.
    """
    usual = _values(parse_compare(name, []))
    asked = _values(command)
    words = ["python", "compare.py", name]
    if name == "duel":  # its first words are the arms
        words += asked.pop("arms")
    for setting, value in asked.items():
        if value in (None, usual[setting]) or setting in SUBCOMMANDS[name].varies:
            continue
        if setting == "text":
            words.append(value)
        elif isinstance(usual[setting], bool):
            words.append(f"--{setting}" if value else f"--no_{setting}")
        else:
            several = value if isinstance(value, tuple) else (value,)
            words += [f"--{setting}", *map(str, several)]
    return shlex.join(words)


def _values(command: LabCommand) -> dict[str, Any]:
    """By flag; the text, which has none, comes first."""
    own = {k: v for k, v in vars(command).items() if not dataclasses.is_dataclass(v)}
    values = {"text": "", **to_flat(command), **own}
    return {k: v for k, v in values.items() if k not in ("config", "out", "workers", "quick")}
