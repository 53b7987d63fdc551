"""What several files of this folder need: a text, a training of it, and torch as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_runs import some_text


@pytest.fixture(autouse=True)
def _threads_come_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return some_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(request, source, tmp_path_factory) -> Path:
    """The folder of a run with the file's SETTINGS that nothing disturbed."""
    from processes import run  # it needs what only a POSIX system has

    folder = tmp_path_factory.mktemp("whole") / "run"
    ended = run("train.py", source, *request.module.SETTINGS, "--out", folder)
    assert ended.returncode == 0, ended.err
    return folder
