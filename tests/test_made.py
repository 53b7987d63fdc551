"""How a report says that it was made."""

import dataclasses
import shlex

import pytest

from gpt.config import to_flat
from gpt.lab.commandline import SUBCOMMANDS, parse_compare
from gpt.lab.made import command_line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sweep", ["--quick", "--rates", "1e-3", "4e-3", "--no_tie_embeddings", "--seeds", "2"]),
        ("duel", ["post", "pre", "my text.txt", "--warmups", "0", "7", "--margin", "0.05"]),
        ("run", ["--config", "configs/tiny.toml", "--arms", "pre", "post", "--steps", "30"]),
        ("duel", ["--config", "configs/default.toml"]),
        ("run", []),
        ("demo", ["my text.txt", "--seeds", "2", "--eval_every", "7"]),
        ("why", ["--steps", "30", "--d_model", "32"]),
        ("verify", ["--only", "R6", "R14", "--seed", "3"]),
        ("init", ["--inits", "native", "--depths", "2", "6", "--seeds", "1", "--d_model", "32"]),
    ],
)
def test_the_command_of_a_report_asks_for_the_same(name, words):
    command = parse_compare(name, [*words, "--out", "somewhere", "--workers", "7"])
    line = command_line(name, command)
    assert "somewhere" not in line
    python, script, again, *rest = shlex.split(line)
    assert (python, script, again) == ("python", "compare.py", name)
    same = parse_compare(name, rest)
    before, after = to_flat(command), to_flat(same)
    assert {key for key in before if before[key] != after[key]} <= SUBCOMMANDS[name].varies.keys()
    for field in dataclasses.fields(command):
        if field.name not in ("training", "model", "out", "workers", "config", "quick"):
            assert getattr(same, field.name) == getattr(command, field.name), field.name
