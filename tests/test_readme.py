"""Every command of README.md, as it stands there, one after another in a copy of the repository."""

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
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def test_every_use_is_among_the_commands():
    for script in ("train.py", "sample.py", "compare.py"):
        assert any(line.startswith(f"python {script}") for line in COMMANDS)
    assert any("--resume" in line for line in COMMANDS)
    assert any(line.startswith("tensorboard ") for line in COMMANDS)


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`((?:gpt|tests|configs|benchmarks|data)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_command_works(tmp_path):
    for name in ("gpt", "configs", "data", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("train.py", "sample.py", "compare.py"):
        shutil.copy(ROOT / name, tmp_path)
    lines = (
        f"{n} little ducks went out one day, over the hills and far away.\n" for n in range(999)
    )
    (tmp_path / "my.txt").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "docs").mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line in COMMANDS:
        run = serve if line.startswith("tensorboard ") else finish
        run(line, tmp_path, os.environ | {"PATH": path})


def finish(line: str, folder: Path, environment: dict[str, str]) -> None:
    ended = subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, encoding="utf-8"
    )
    assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"


def serve(line: str, folder: Path, environment: dict[str, str]) -> None:
    """The command goes on until it is stopped; it works when it says its address."""
    with (folder / "log").open("w+", encoding="utf-8") as log:
        server = subprocess.Popen(
            [*line.split(), "--port", "0"], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            deadline = time.monotonic() + 60
            while "http://" not in (folder / "log").read_text(encoding="utf-8"):
                assert time.monotonic() < deadline
                assert server.poll() is None, (folder / "log").read_text(encoding="utf-8")
                time.sleep(0.2)
        finally:
            server.terminate()
            server.wait()
