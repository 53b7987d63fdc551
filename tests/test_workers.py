"""Many trials over processes: cached, interrupted, killed, locked; results as with one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt.config import RunConfig
from gpt.corpus import read_text
from gpt.errors import FolderInUseError, UsageError
from gpt.lab import trials as trials_module
from gpt.lab import workers as workers_module
from gpt.lab.trials import Stopped, Trial
from gpt.lab.workers import run_trials
from gpt.runfolder import owner

ROOT = Path(__file__).parents[1]
SMALL = {
    "d_model": 12, "n_heads": 3, "n_layers": 2, "context_length": 9, "steps": 4,
    "batch_size": 5, "eval_every": 2, "sample_chars": 0, "native": False, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def base(tmp_path) -> RunConfig:
    path = tmp_path / "a text.txt"
    path.write_text("she sells sea shells on the sea shore\n" * 30, encoding="utf-8")
    return RunConfig().with_changes(SMALL | {"text": str(path)})


@pytest.fixture
def out(tmp_path) -> Path:
    folder = tmp_path / "the out"
    folder.mkdir()
    return folder


def trials_of(base: RunConfig, **options) -> list[Trial]:
    return [
        Trial(arm, base.with_changes({"norm_position": arm, "seed": seed}).resolved(), **options)
        for seed in (5, 6)
        for arm in ("pre", "post")
    ]


def curves(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if "speed/" not in k} for line in lines]


def test_outcomes_come_from_the_folders_when_they_are_there(base, out, monkeypatch):
    trials = trials_of(base)
    first = list(run_trials(trials[:3], read_text(base), out, workers=1))
    assert [o.name for o in first] == ["pre-s5", "post-s5", "pre-s6"]
    trained = []
    monkeypatch.setattr(
        workers_module, "run_trial",
        lambda trial, *rest: trained.append(trial.name) or trials_module.run_trial(trial, *rest),
    )  # fmt: skip
    again = list(run_trials(trials, read_text(base), out, workers=1))
    assert trained == ["post-s6"]
    assert again[:3] == first


@pytest.mark.parametrize(
    "written", [None, b"", b'{"step": 9223372036854775808, "loss/val": 2.5}\n']
)
def test_a_finished_trial_without_its_curves_is_refused_with_the_remedy(base, out, written):
    corpus = read_text(base)
    list(run_trials(trials_of(base)[:1], corpus, out, workers=1))
    path = out / "pre-s5" / "metrics.jsonl"
    path.unlink()
    if written is not None:
        path.write_bytes(written)
    with pytest.raises(UsageError, match=r"pre-s5' is of a finished run.* delete that folder"):
        next(run_trials(trials_of(base)[:2], corpus, out, workers=1))


def test_a_trial_is_not_written_through_a_link(base, out, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (out / "post-s5").symlink_to(other)
    with pytest.raises(UsageError, match="post-s5' is a link"):
        next(run_trials(trials_of(base)[:2], read_text(base), out, workers=1))
    assert not list(other.iterdir())
    assert not (out / "pre-s5").exists()


def test_two_trials_of_one_name_are_refused(base, out):
    with pytest.raises(UsageError, match="two trials are called 'pre-s5'"):
        list(run_trials([trials_of(base)[0]] * 2, read_text(base), out, workers=1))


def test_a_folder_of_another_trial_is_refused_and_stays(base, out):
    corpus = read_text(base)
    (outcome,) = run_trials(trials_of(base)[:1], corpus, out, workers=1)
    before = (out / outcome.name / "outcome.json").read_bytes()
    other = trials_of(base.with_changes({"learning_rate": 0.5}))[:1]
    with pytest.raises(UsageError, match=r"pre-s5 of other settings.*choose another --out"):
        list(run_trials(other, corpus, out, workers=1))
    assert (out / outcome.name / "outcome.json").read_bytes() == before


def test_a_comparison_in_use_is_refused(base, out):
    with owner(out), pytest.raises(FolderInUseError):
        list(run_trials(trials_of(base), read_text(base), out, workers=1))


def ended_by_a_signal(outcomes):
    """The same, and SIGTERM after the second."""
    for n, outcome in enumerate(outcomes):
        yield outcome
        if n == 1:
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_ends_the_work_between_two_steps_and_what_was_finished_stays(base, out):
    corpus = read_text(base)
    found = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        found.extend(ended_by_a_signal(run_trials(trials_of(base), corpus, out, workers=1)))
    assert (stopped.value.signal, stopped.value.out) == (signal.SIGTERM, out)
    assert signal.getsignal(signal.SIGTERM) == before
    assert sorted(p.parent.name for p in out.glob("*/outcome.json")) == ["post-s5", "pre-s5"]
    again = list(run_trials(trials_of(base), corpus, out, workers=1))
    assert again[:2] == found
    assert len(again) == 4


def test_progress_is_a_line_a_trial_on_stderr_and_nothing_on_stdout(base, out, capsys):
    list(run_trials(trials_of(base)[:2], read_text(base), out, workers=1))
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0].split()[:4] == ["1", "of", "2", "pre-s5"]
    assert "left)" in lines[0]
    assert "left" not in lines[1]


# With processes


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True], ids=["light", "kept"])
def test_results_do_not_depend_on_how_many_train_at_once(base, tmp_path, keeps):
    corpus = read_text(base)
    found = {}
    for workers in (1, 2):
        folder = tmp_path / f"with {workers}"
        folder.mkdir()
        trials = trials_of(base, keeps_checkpoints=keeps)
        outcomes = {o.name: o for o in run_trials(trials, corpus, folder, workers)}
        found[workers] = {
            name: (o.final, o.first, o.best, o.hashes, curves(folder / name))
            for name, o in outcomes.items()
        }
    assert len(found[1]) == 4
    assert found[1] == found[2]


def start(out: Path, text: str, *words: object) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable, ROOT / "compare.py", *words, text, "--out", out, "--d_model", "12",
            "--n_heads", "3", "--n_layers", "1", "--context_length", "9", "--batch_size", "4",
            "--steps", "20000", "--eval_every", "100", "--no_native",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip


def processes_in(session: int) -> list[int]:
    """Living processes of the session, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def until(true, what: str, timeout: float = 90) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.05)


@pytest.fixture
def training(base, tmp_path, request):
    """A comparison in which two runs train, and its folder; nothing of it outlives the test."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    folder = tmp_path / "some out"
    process = start(folder, base.text.text, request.param)

    def both_train() -> bool:
        assert process.poll() is None, process.communicate()
        curves = list(folder.glob("*/metrics.jsonl"))
        return len(curves) == 2 and all(path.stat().st_size > 100 for path in curves)

    try:
        until(both_train, "two runs to train")
        yield process, folder
    finally:
        for pid in processes_in(process.pid):
            os.kill(pid, signal.SIGKILL)
        with process:  # closes its pipes
            pass


@pytest.mark.slow
@pytest.mark.parametrize("training", ["demo", "run"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_all_processes_and_says_how_to_go_on(training, number):
    process, folder = training
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 128 + number, err
    until(lambda: not processes_in(process.pid), "the tracker of multiprocessing to end", 10)
    assert "Traceback" not in err
    (line,) = [line for line in out.splitlines() if line.startswith("go on:")]
    assert line.endswith(f"--out '{folder}'")
    kept = "run" in process.args
    assert bool(list(folder.glob("*/checkpoints/step-*[1-9]*.pt"))) == kept


@pytest.mark.slow
@pytest.mark.parametrize("training", ["demo", "run"], indirect=True)
def test_no_process_outlives_a_parent_that_was_killed(training):
    process, folder = training
    process.kill()
    process.wait()
    until(lambda: not processes_in(process.pid), "the workers to end", 30)
    with owner(folder):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("training", ["demo"], indirect=True)
def test_a_worker_that_is_killed_is_an_error_that_names_its_trial(training):
    process, _ = training
    children = [
        pid for pid in processes_in(process.pid)
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 2
    assert "was killed by signal 9" in err
    assert "the process that trained" in err
    assert "Traceback" not in err
    until(lambda: not processes_in(process.pid), "the tracker of multiprocessing to end", 10)
