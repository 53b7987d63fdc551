"""README.md does what it says: every command and program, in a copy of the repository.

Lines of ```sh blocks are run one after another, then each ```python block that begins with
``from gpt import``. The block with an ellipsis adds an activation, and is put where it belongs.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line]
PROGRAMS = [block for block in blocks("python") if block.startswith("from gpt import")]
SNIPPETS = [block for block in blocks("python") if "{..., " in block]


def test_every_use_is_among_the_commands():
    for script in ("train.py", "sample.py", "compare.py"):
        assert any(line.startswith(f"python {script}") for line in COMMANDS)
    assert any("--resume" in line for line in COMMANDS)
    assert any(line.startswith("tensorboard ") for line in COMMANDS)


def test_every_file_of_the_faults_that_is_named_exists():
    table = README.partition("## What you cannot lose")[2].partition("Not promised")[0]
    named = re.findall(r"`(test_\w+\.py)`", table)
    assert len(named) > 9
    assert not [name for name in named if not (ROOT / "tests" / "faults" / name).is_file()]


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`((?:gpt|tests|configs|benchmarks|data)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_lines_without_make_are_those_of_make():
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    section = README.split("## Two commands\n")[1].split("\n## ")[0]
    lines = re.findall(r"^    ((?:python3|\.venv/bin/python) .*)$", section, re.MULTILINE)
    # What an outer make, one that runs these tests, would hand on.
    handed_on = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON")
    printed = subprocess.run(
        ["make", "-n", "-B", "train", "test"], cwd=ROOT, check=True, capture_output=True,
        encoding="utf-8", env={k: v for k, v in os.environ.items() if k not in handed_on},
    ).stdout.splitlines()  # fmt: skip
    # make also marks that the environment is ready, and runs the tests on several cores.
    made = [line.removesuffix(" -n auto") for line in printed if not line.startswith("touch ")]
    assert [line.removesuffix(" -n auto") for line in lines] == made


def test_there_are_programs_and_one_change():
    assert PROGRAMS
    assert len(SNIPPETS) == 1


@pytest.fixture
def copy(tmp_path) -> Path:
    """What a user has, and a text of their own."""
    for name in ("gpt", "configs", "data", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("train.py", "sample.py", "compare.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "docs").mkdir()
    lines = (
        f"The {n} little ducks went out one day, over the hills and far away.\n" for n in range(999)
    )
    (tmp_path / "my.txt").write_text("".join(lines), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_command_and_then_every_program_works(copy):
    for line in COMMANDS:
        run = serve if line.startswith("tensorboard ") else finish
        run(line, copy)
    for program in PROGRAMS:
        (copy / "program.py").write_text(program, encoding="utf-8")
        finish("python program.py", copy)


@pytest.mark.slow
def test_a_new_activation_is_known_everywhere(copy):
    definition, entries = re.fullmatch(
        r"(.*)ACTIVATIONS = {\.\.\., (.*)}\n", SNIPPETS[0], re.DOTALL
    ).groups()
    name = re.search(r'"(\w+)"', entries)[1]
    edit(copy / "gpt/model/feedforward.py", r"^ACTIVATIONS\b.*{\n", definition, f"{entries},\n")
    edit(copy / "gpt/config.py", r"^Activation = Literal\[", "", f'"{name}", ')
    short = "--steps 3 --threads 1"
    finish(f"python train.py my.txt --activation {name} --out runs/new {short}", copy)
    finish(f"python train.py my.txt --config runs/new/config.toml --out runs/same {short}", copy)
    for run in ("new", "same"):
        config = (copy / "runs" / run / "config.toml").read_text(encoding="utf-8")
        assert re.search(rf'^activation = "{name}"', config, re.MULTILINE)
    finish("python sample.py runs/same --n_chars 9", copy)


def edit(path: Path, pattern: str, before: str, after: str) -> None:
    """Write around what the pattern finds, in the one place where it is."""
    source = path.read_text(encoding="utf-8")
    changed, n_places = re.subn(
        pattern, lambda found: before + found[0] + after, source, flags=re.M
    )
    assert n_places == 1, f"{path.name}: {pattern}"
    path.write_text(changed, encoding="utf-8")


def with_our_python() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path}


def finish(line: str, folder: Path) -> None:
    ended = subprocess.run(
        line, shell=True, cwd=folder, env=with_our_python(), stdin=subprocess.DEVNULL,
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"


def serve(line: str, folder: Path) -> None:
    """The command goes on until it is stopped; it works when it says its address."""
    with (folder / "log").open("w+", encoding="utf-8") as log:
        server = subprocess.Popen(
            [*line.split(), "--port", "0"], cwd=folder, env=with_our_python(),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while "http://" not in (folder / "log").read_text(encoding="utf-8"):
                assert time.monotonic() < deadline
                assert server.poll() is None, (folder / "log").read_text(encoding="utf-8")
                time.sleep(0.2)
        finally:
            server.terminate()
            server.wait()


def test_no_placeholder_is_left():
    assert "@@" not in README
