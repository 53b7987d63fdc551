"""Names of run folders: whatever a text or a config file is called, a new folder in its root."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.commandline import TrainCommand, parse_train, run_name
from gpt.config import TextConfig
from gpt.errors import CheckpointError, UsageError
from gpt.runfolder import find_run, new_folder

ROOT = Path(__file__).parents[2]
HARMLESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# With any ending after a dot they are still devices on Windows.
DEVICES = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\..*)?", re.IGNORECASE)
HOSTILE = [
    "../x", "/etc/x", "a/../../b", "..", ".", "", "~", "~root", "a\0b", "\0", "x" * 300, "é" * 300,
    "CON", "con.x", "NUL", "nul.tar.gz", "COM1", "lpt9.x", "a.", "a...", "a ", " ", "a\nb", "\n",
    "-rf", "--help", "_x", ".hidden", "...", "$(id)", "`id`", "a;b", "a|b", "C:\\x", "\\\\host\\x",
    "a:b", "a*b", "\x1b[2J", "\u202egnp.exe", "\ufeffa", "日本語", "😀", "\udcff", "%2e%2e%2fx",
    "{0}", "NUL\0.x",
]  # fmt: skip


def assert_new_and_inside(folder: Path, root: Path) -> None:
    assert folder.parent == root
    assert folder.resolve().parent == root.resolve()
    assert folder.is_dir()
    assert not folder.is_symlink()
    assert not list(folder.iterdir())
    assert HARMLESS.fullmatch(folder.name), folder.name
    assert not DEVICES.fullmatch(folder.name), folder.name
    assert not folder.name.endswith(".")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_any_name_is_a_new_folder_directly_in_its_root(tmp_path, faults, name):
    root = tmp_path / "some" / "runs"
    made = []
    for _ in range(3):
        with faults("a hostile name of a run"):
            made.append(new_folder(name, root))
            assert_new_and_inside(made[-1], root)
    assert len(set(made)) == 3
    assert sorted(root.iterdir()) == sorted(made)
    assert [path.name for path in tmp_path.iterdir()] == ["some"]
    assert [path.name for path in root.parent.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    "n_examples", [60, pytest.param(300, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_any_text_and_config_file_name_a_run(tmp_path, faults, n_examples):
    paths = st.lists(st.sampled_from("./~-_ \\:\0") | st.characters(), max_size=90).map("".join)
    made = set()

    @settings(
        max_examples=n_examples, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(paths, st.lists(paths, max_size=3))
    def check(text, files):
        try:
            command = TrainCommand(text=TextConfig(text=text), config=tuple(files))
        except UsageError:
            return
        with faults("a hostile name of a run"):
            folder = new_folder(run_name(command), tmp_path)
            assert_new_and_inside(folder, tmp_path)
            assert folder not in made
            made.add(folder)

    check()
    assert len(made) > n_examples // 2


def test_what_is_there_already_is_passed_over_and_not_followed(tmp_path, faults):
    root, outside = tmp_path / "runs", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "novel-1").symlink_to(outside)
    (root / "novel-2").symlink_to(tmp_path / "nowhere")
    (root / "novel-3").write_text("mine", encoding="utf-8")
    (root / "novel-4").symlink_to("novel-4")
    (root / "novel-6").mkdir()
    with faults("a planted link at a run's name"):
        folder = new_folder("novel", root)
        assert folder == root / "novel-5"
        assert_new_and_inside(folder, root)
        assert new_folder("novel", root) == root / "novel-7"
        assert not list(outside.iterdir())
        assert not (tmp_path / "nowhere").exists()
        assert (root / "novel-3").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("planted", ["file", "dangling link", "loop"])
def test_a_root_that_is_no_folder_is_a_usage_error(tmp_path, faults, planted):
    root = tmp_path / "runs"
    if planted == "file":
        root.write_text("mine", encoding="utf-8")
    else:
        root.symlink_to("runs" if planted == "loop" else "nowhere")
    with faults("a root that is no folder"), pytest.raises(UsageError, match=r"runs.*--out"):
        new_folder("novel", root)


@pytest.mark.parametrize("name", [*HOSTILE, "x/" * 3000, "loop"], ids=lambda name: ascii(name[:20]))
def test_a_name_of_no_run_is_an_error_that_says_so(tmp_path, monkeypatch, faults, name):
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    with faults("a hostile name of a run"):
        if name not in ("", ".", ".."):
            with pytest.raises(CheckpointError, match=r"neither a run folder nor"):
                find_run(name)
        if name:
            with pytest.raises(UsageError, match=r"(?s)--resume.*there is no"):
                parse_train(["--resume", name], tmp_path / "preset.toml")


N_PROCESSES, N_FOLDERS = 8, 15
MAKE_FOLDERS = f"""
import sys
from pathlib import Path
from gpt.runfolder import new_folder
print("ready", flush=True)
sys.stdin.readline()
for _ in range({N_FOLDERS}):
    print(new_folder(sys.argv[1], Path(sys.argv[2])).name, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["novel", "../../x"])
def test_processes_that_start_at_once_never_share_a_folder(tmp_path, faults, name):
    root = tmp_path / "runs"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_FOLDERS, name, str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", cwd=ROOT,
        )
        for _ in range(N_PROCESSES)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        made = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for names in made:
        with faults("eight processes with one name"):
            assert len(names) == N_FOLDERS
            assert all(HARMLESS.fullmatch(name) for name in names)
    everything = [name for names in made for name in names]
    assert len(set(everything)) == N_PROCESSES * N_FOLDERS
    assert sorted(everything) == sorted(path.name for path in root.iterdir())
