"""What an attack found once, and must not find again: odd words, odd places, odd checkpoints."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt.commandline import parse_train, shell_line
from gpt.config import RunConfig
from gpt.config_files import read_toml
from gpt.corpus import read_text
from gpt.errors import CheckpointError, DiskError, UsageError
from gpt.exits import exit_code
from gpt.run import Run
from gpt.runfolder import _refusal, given_folder, new_folder, refuse_used
from gpt.training.checkpoint import load_checkpoint, restore_optimisers
from gpt.training.plan import check_memory

ROOT = Path(__file__).parents[1]
PRESET = ROOT / "configs" / "tiny.toml"
SMALL = {
    "d_model": 12, "n_heads": 3, "n_layers": 1, "context_length": 9, "steps": 3, "batch_size": 2,
    "eval_every": 2, "sample_chars": 5, "threads": 1,
}  # fmt: skip


@pytest.fixture
def config(tmp_path) -> RunConfig:
    (tmp_path / "text.txt").write_text("a rose is a rose is a rose\n" * 20, encoding="utf-8")
    return RunConfig().with_changes(SMALL | {"text": str(tmp_path / "text.txt")})


@pytest.mark.parametrize(
    "words", [["--resume", ""], ["--resume="], ["--out", ""], [""], ["--encoding="]]
)
def test_an_empty_word_is_no_choice(words):
    with pytest.raises(UsageError, match="is a variable not set"):
        parse_train(words, PRESET)


def test_of_a_repeated_resume_the_last_counts_for_settings_too(tmp_path):
    for name, width in (("a", 12), ("b", 24)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"d_model = {width}", encoding="utf-8")
    words = ["--resume", str(tmp_path / "a"), "--resume", str(tmp_path / "b")]
    command = parse_train(words, PRESET)
    assert (command.resume, command.model.d_model) == (str(tmp_path / "b"), 24)


def test_a_dangling_link_for_a_folder_of_runs_is_an_error_and_no_endless_loop(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="cannot make a run folder"):
        new_folder("novel", tmp_path / "runs")


def test_a_folder_without_a_checkpoint_is_not_sent_to_resume(tmp_path):
    (tmp_path / ".lock").touch()
    refuse_used(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(UsageError, match="it has no checkpoint"):
        refuse_used(tmp_path)
    (tmp_path / "pre-s1" / "checkpoints").mkdir(parents=True)
    (tmp_path / "pre-s1" / "checkpoints" / "best.pt").touch()
    with pytest.raises(UsageError, match="it holds the checkpoints of other runs"):
        refuse_used(tmp_path)


def test_a_refusing_disk_has_its_own_exit_code():
    assert type(_refusal(OSError(30, "Read-only file system"), "x")) is DiskError
    assert type(_refusal(OSError(13, "Permission denied"), "x")) is UsageError


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"threads": 2**31}, "threads = 2147483648 is more than 1024"),
        ({"learning_rate": 1e300}, "learning_rate = 1e.300 is more than"),
        ({"weight_decay": 1e300}, "weight_decay"),
    ],
)
def test_numbers_that_torch_cannot_take_are_refused(changes, needle):
    with pytest.raises(UsageError, match=needle):
        RunConfig().with_changes(changes)


@pytest.mark.parametrize(
    "changes",
    [{"d_model": 2_000_000}, {"n_layers": 10**8}, {"batch_size": 10**12},
     {"grad_accumulation": 10**12}, {"d_ff": 2**62}],
    ids=str,
)  # fmt: skip
def test_a_run_larger_than_the_machine_is_refused_before_it_is_built(changes):
    with pytest.raises(UsageError, match=r"needs about .* and the machine has"):
        check_memory(RunConfig().with_changes(changes), 65)


def test_sections_in_a_config_file_are_explained(tmp_path):
    (tmp_path / "a.toml").write_text("[model]\nd_model = 24", encoding="utf-8")
    with pytest.raises(UsageError, match="settings stand without sections"):
        read_toml([tmp_path / "a.toml"])


def test_a_pipe_or_a_huge_file_is_no_config(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(UsageError, match="is a pipe"):
        read_toml([tmp_path / "pipe.toml"])
    (tmp_path / "huge.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(UsageError, match="larger than 1000000 bytes"):
        read_toml([tmp_path / "huge.toml"])


def test_a_path_that_begins_with_a_dash_stays_a_path_when_pasted():
    assert shell_line("sample.py", Path("-y")).endswith("sample.py ./-y")


def test_running_out_of_memory_is_one_message(capsys):
    def greedy():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    assert exit_code(greedy) == 2
    assert capsys.readouterr().err.startswith("error: out of memory")


def trained(config: RunConfig, folder: Path):
    Run(config, read_text(config)).go(given_folder(folder), quiet=True)
    return load_checkpoint(folder, prefer="newest")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["scalar", "missing", "text", "double", "negative step"])
def test_crafted_optimiser_memory_never_reaches_a_kernel(config, tmp_path, optimizer, kind):
    config = config.with_changes({"optimizer": optimizer})
    checkpoint = trained(config, tmp_path / "run")
    optimisers = Run(config, read_text(config), checkpoint).optimisers
    entries = checkpoint.optimisers[-1]["state"][0]
    name = "exp_avg" if "exp_avg" in entries else "momentum_buffer"
    match kind:
        case "scalar":
            entries[name] = torch.tensor(0.0)
        case "missing":
            del entries[name]
        case "text":
            entries[name] = "foo"
        case "double":
            entries[name] = entries[name].double()
        case "negative step":
            entries["step"] = torch.tensor(-1e30)
    with pytest.raises(CheckpointError, match="other optimisers"):
        restore_optimisers(checkpoint, optimisers)


def test_fewer_steps_than_are_done_are_refused(config, tmp_path):
    from gpt.resuming import resume_point

    trained(config, tmp_path / "run")
    with pytest.raises(UsageError, match=r"steps = 2, but 3 are done already"):
        resume_point(tmp_path / "run", config.with_changes({"steps": 2}), False)


def test_samples_are_cut_like_the_curves_when_an_older_checkpoint_goes_on(config, tmp_path):
    from gpt.resuming import resume_point

    trained(config, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000003.pt").unlink()
    (tmp_path / "run" / "checkpoints" / "best.pt").unlink(missing_ok=True)
    checkpoint, corpus, _ = resume_point(tmp_path / "run", config, False)
    assert checkpoint.step == 2
    Run(config, corpus, checkpoint).go(tmp_path / "run", quiet=True)
    text = (tmp_path / "run" / "samples.txt").read_text(encoding="utf-8")
    headings = [line for line in text.splitlines() if line.startswith("--- step")]
    assert headings == ["--- step 0 ---", "--- step 2 ---", "--- step 3 ---"]


def test_an_old_format_that_hides_behind_a_zip_is_refused(config, tmp_path):
    trained(config, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000003.pt"
    (tmp_path / "poly.pt").write_bytes(b"\x80\x02}q\x00." + path.read_bytes())
    with pytest.raises(CheckpointError, match="does not begin and end as"):
        load_checkpoint(tmp_path / "poly.pt")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_run_without_streams_trains(config, tmp_path, closed):
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    words = [sys.executable, ROOT / "train.py", config.text.text, *flags, "--out", tmp_path / "o"]
    command = shlex.join(map(str, words))
    ended = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert load_checkpoint(tmp_path / "o", prefer="newest").step == 3


@pytest.mark.slow
def test_help_fits_any_terminal():
    for columns in ("1", "5", "39"):
        ended = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), "--help"],
            capture_output=True, timeout=60, env=os.environ | {"COLUMNS": columns}, check=False,
        )  # fmt: skip
        assert ended.returncode == 0
        assert b"--d_model" in ended.stdout
