"""Which skips fail where CI is set, and how many threads a worker has: small sessions of pytest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import faultcount
import pytest
import skips

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PASSED, FAILED = 0, 1


def session(folder: Path, test: str, *options: str, **environment: str) -> int:
    """The exit code of pytest for one file, with the conftest.py of this folder."""
    return run(folder, test, *options, **environment).returncode


def output(folder: Path, test: str, *options: str) -> str:
    return run(folder, test, *options).stdout


def run(folder: Path, test: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    for name in ("conftest.py", "skips.py", "faultcount.py"):
        shutil.copy(HERE / name, folder)
    (folder / "test_one.py").write_text(test, encoding="utf-8")
    outer = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CI", "OMP_NUM_THREADS") and not name.startswith("PYTEST")
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", ".", "-p", "no:cacheprovider", *options],
        cwd=folder, env=outer | environment, capture_output=True, text=True,
    )  # fmt: skip


def skipping(reason: str) -> str:
    return f"import pytest\ndef test_it():\n    pytest.skip({reason!r})\n"


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "worker"])
def test_what_is_not_installed_fails_in_ci_only(tmp_path, options):
    test = skipping("no browser")
    assert session(tmp_path, test, *options) == PASSED
    assert session(tmp_path, test, *options, CI="true") == FAILED


def test_a_missing_package_fails_in_ci_also_while_tests_are_collected(tmp_path):
    test = "import pytest\npytest.importorskip('no_such_package')\ndef test_it(): pass\n"
    assert session(tmp_path, test + "def test_other(): pass\n", CI="true") == FAILED


@pytest.mark.parametrize("reason", sorted(skips.TOLERATED))
def test_a_place_without_something_passes(tmp_path, reason):
    assert session(tmp_path, skipping(reason), CI="true") == PASSED


def test_a_worker_and_its_child_processes_use_one_thread(tmp_path):
    test = "import os\ndef test_it(): assert os.environ.get('OMP_NUM_THREADS') == '1'\n"
    assert session(tmp_path, test) == FAILED
    assert session(tmp_path, test, "-n", "1") == PASSED


INJECTING = (
    "import pytest\n"
    "@pytest.mark.parametrize('last', [3, 5])\n"
    "def test_it(faults, last):\n"
    "    for i in range(4):\n"
    "        with faults('a flipped bit'):\n"
    "            assert i < last\n"
    "    with faults('a cut file', 7):\n"
    "        pass\n"
    "    with faults('a lost file', last):\n"
    "        assert False\n"
)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "workers"])
def test_faults_are_counted_over_all_tests_and_a_failed_check_is_a_loss(tmp_path, options):
    lines = output(tmp_path, INJECTING, *options).splitlines()
    assert ["all", "20", "14", "6"] in [line.split() for line in lines]


@pytest.mark.parametrize("place", ["faults", "faults/clone"])
def test_each_kind_of_fault_is_told_where_only_faults_were_asked_for(tmp_path, place):
    folder = tmp_path / place
    folder.mkdir(parents=True)
    lines = output(folder, INJECTING).splitlines()
    assert any(line.startswith("a cut file ") for line in lines) == (place == "faults")
    assert any(line.startswith("all ") for line in lines)


@pytest.mark.parametrize(
    ("argument", "asks"),
    [
        ("tests/faults", True), ("faults/", True), ("tests/faults/test_kills.py", True),
        ("tests/faults/test_names.py::test_it[faults::a]", True), ("tests", False),
        ("faults/tests", False), ("faults/tests/test_gpt.py", False), ("my-faults", False),
        ("tests/test_faults.py", False), ("tests/test_gpt.py::test_it[faults]", False),
    ],
)  # fmt: skip
def test_which_arguments_ask_for_faults(argument, asks):
    assert faultcount.asks_for_faults(argument) == asks
