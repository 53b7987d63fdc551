"""Python programs that run to their end, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACES = os.pathsep.join([str(ROOT), str(HERE)])


def python(
    *words: object,
    folder: Path = ROOT,
    environment: Mapping[str, str] = {},
    **options: Any,
) -> subprocess.CompletedProcess:
    """Run Python on these words; it may import what a test may. ``options`` of subprocess.run."""
    usual = {"capture_output": True, "encoding": "utf-8", "stdin": subprocess.DEVNULL}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, timeout=250,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PLACES} | dict(environment),
        **usual | options,
    )  # fmt: skip
