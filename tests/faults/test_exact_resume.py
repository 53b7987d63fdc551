"""A run that was stopped or broken off, and goes on, is the unbroken run bit for bit.

What keeps it from being that is refused or said.
"""

import hashlib
import itertools
import os
import shutil
import signal
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import python
from small_runs import (
    SMALL,
    BrokenOffError,
    assert_same_run,
    break_off_after,
    config_for,
    live_state,
    newest_state,
    records,
    resumed,
    some_text,
    started,
    stop_after,
)
from states import assert_same

from gpt import run as run_module
from gpt.config import RunConfig, Schedule
from gpt.errors import UsageError
from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics
from gpt.training.schedules import learning_rate

STEPS = SMALL["steps"]
STOPPED = "a run stopped and resumed"
CRASHED = "a run broken off between two saves"


def settings(*values: object) -> dict[str, Any]:
    names = ("optimizer", "schedule", "dropout", "grad_accumulation", "eval_every")
    return dict(zip(names, values, strict=True))


# Together each value of each setting, so each is there at every save point.
VARIANTS = [
    settings("muon", "cosine", 0.1, 3, 3) | {"log_every": 3, "windows": "epochs"},
    settings("adamw", "constant", 0.0, 1, 2),
    settings("adamw", "linear", 0.1, 3, 2) | {"warmup_steps": 3},
    settings("muon", "wsd", 0.0, 1, 3)
    | {"decay_fraction": 0.5, "attention_dropout": 0.2, "confidence_penalty": 0.1},
]
VALUES = (("adamw", "muon"), typing.get_args(Schedule), (0.0, 0.1), (1, 3), (2, 3))
# Half of all combinations: any four of the five settings have all of theirs.
COMBINATIONS = [
    settings(*(values[i] for values, i in zip(VALUES, picked, strict=True)))
    for picked in itertools.product(*(range(len(values)) for values in VALUES))
    if sum(picked) % 2 == 0
]
slow = pytest.mark.slow


def each_variant(n_fast: int) -> pytest.MarkDecorator:
    ids = ["-".join(map(str, changes.values())) for changes in VARIANTS]
    marks = [() if n < n_fast else slow for n in range(len(VARIANTS))]
    parameters = zip(VARIANTS, ids, marks, strict=True)
    return pytest.mark.parametrize(
        "changes",
        [pytest.param(changes, id=name, marks=mark) for changes, name, mark in parameters],
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return some_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Callable[[RunConfig], tuple[Path, dict[int, dict[str, Any]]]]:
    """Trains without a break: its folder, and its state after each number of steps."""
    known = {}

    def train(config: RunConfig) -> tuple[Path, dict[int, dict[str, Any]]]:
        if config not in known:
            states = {}
            folder = tmp_path_factory.mktemp("whole")
            started(config, folder, lambda run: states.update({run.step: live_state(run)})).go()
            states[config.training.steps] = newest_state(folder)
            assert sorted(states) == list(range(config.training.steps + 1))
            known[config] = folder, states
        return known[config]

    return train


def stop_and_go_on(config: RunConfig, folder: Path, *stops: int) -> None:
    """A run that is stopped after each of these numbers of steps, and resumed."""
    for stop in stops:
        make = resumed if folder.exists() else started
        assert make(config, folder, stop_after(stop)).go().steps == stop
    assert resumed(config, folder).go().steps == config.training.steps


def crash(config: RunConfig, folder: Path, step: int) -> int:
    """A run that is broken off after that many steps; returns the step of its last checkpoint."""
    make = resumed if folder.exists() else started
    with pytest.raises(BrokenOffError):
        make(config, folder, break_off_after(step)).go()
    assert records(folder)[-1]["step"] == step
    return load_checkpoint(folder, prefer="newest").step


@each_variant(1)
def test_a_run_stopped_after_every_step_is_the_unbroken_one(
    text, unbroken, tmp_path, faults, changes
):
    config, folder = config_for(text, **changes), tmp_path / "parts"
    whole, states = unbroken(config)
    for step in range(STEPS):
        with faults(STOPPED):
            make = resumed if step else started
            assert make(config, folder, stop_after(step)).go().steps == step
            assert load_checkpoint(folder, prefer="newest").step == step
            assert_same(newest_state(folder), states[step])
            assert records(folder) == [r for r in records(whole) if r["step"] <= step]
    resumed(config, folder).go()
    assert_same_run(folder, whole)


@each_variant(0)
def test_a_run_stopped_at_any_one_step_is_the_unbroken_one(
    text, unbroken, tmp_path, faults, changes
):
    config = config_for(text, **changes)
    whole, _ = unbroken(config)
    for step in range(STEPS + 1):
        with faults(STOPPED):
            stop_and_go_on(config, tmp_path / str(step), step)
            assert_same_run(tmp_path / str(step), whole)


@slow
def test_combinations_of_settings_resume_exactly(text, unbroken, tmp_path, faults):
    for number, changes in enumerate(COMBINATIONS):
        config, folder = config_for(text, **changes), tmp_path / str(number)
        whole, _ = unbroken(config)
        with faults(STOPPED):
            stop_and_go_on(config, folder, number % STEPS)
            assert_same_run(folder, whole)


@slow
def test_a_run_twice_interrupted_is_the_unbroken_one_with_two_threads_too(
    text, unbroken, tmp_path, faults
):
    config = config_for(text, threads=2, batch_size=35, **VARIANTS[2])
    with faults(STOPPED):
        stop_and_go_on(config, tmp_path / "parts", 1, 4)
        assert torch.get_num_threads() == 2
        assert_same_run(tmp_path / "parts", unbroken(config)[0])


def test_how_often_a_resumed_run_is_evaluated_does_not_change_it(text, unbroken, tmp_path, faults):
    config, folder = config_for(text, **VARIANTS[2]), tmp_path / "parts"
    _, states = unbroken(config)
    with faults(STOPPED):
        started(config, folder, stop_after(3)).go()
        resumed(config.with_changes({"eval_every": 1, "sample_chars": 0}), folder).go()
        for part in ("model", "optimisers"):
            assert_same(newest_state(folder)[part], states[STEPS][part])


@pytest.mark.parametrize("step", [5, *(pytest.param(n, marks=slow) for n in (1, 2, 3, 4, 6))])
def test_what_a_crashed_run_did_after_its_last_checkpoint_is_replaced(
    text, unbroken, tmp_path, faults, step
):
    config, folder = config_for(text, **VARIANTS[3]), tmp_path / "parts"
    with faults(CRASHED):
        assert crash(config, folder, step) == step // 3 * 3
        resumed(config, folder).go()
        assert_same_run(folder, unbroken(config)[0])


def test_a_run_that_crashes_again_and_again_is_the_unbroken_one(text, unbroken, tmp_path, faults):
    config, folder = config_for(text, **VARIANTS[2]), tmp_path / "parts"
    for step, saved in ((1, 0), (5, 4), (5, 4)):
        with faults(CRASHED):
            assert crash(config, folder, step) == saved
    resumed(config, folder).go()
    assert_same_run(folder, unbroken(config)[0])


def test_a_crash_between_a_checkpoint_and_its_sample_loses_no_sample(
    text, unbroken, tmp_path, faults, monkeypatch
):
    config, folder = config_for(text, **VARIANTS[1]), tmp_path / "parts"

    def break_off(model, *arguments, **options):
        if next(calls) == 2:  # after those of the steps 0 and 2
            raise BrokenOffError
        return generate(model, *arguments, **options)

    generate, calls = run_module.generate, itertools.count()
    monkeypatch.setattr(run_module, "generate", break_off)
    with faults("a run broken off in a sample"):
        with pytest.raises(BrokenOffError):
            started(config, folder).go()
        monkeypatch.undo()
        resumed(config, folder).go()
        assert_same_run(folder, unbroken(config)[0])


KILLED = """
import os, signal, sys
from pathlib import Path

from small_runs import config_for, started

def between(run):
    if run.step == 3:
        signal.raise_signal(signal.SIGUSR1)
    if run.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

started(config_for(Path(sys.argv[1]), eval_every=100), Path(sys.argv[2]), between).go()
"""


@slow
def test_a_run_killed_after_a_save_that_was_asked_for_has_every_point_of_its_curves(
    text, unbroken, tmp_path, faults
):
    config, folder = config_for(text, eval_every=100), tmp_path / "parts"
    with faults("a run killed after a signal to save"):
        ended = python("-c", KILLED, text, folder)
        assert ended.returncode == -signal.SIGKILL
        assert load_checkpoint(folder, prefer="newest").step in (3, 4)
        resumed(config, folder).go()
        assert_same_run(folder, unbroken(config)[0])


TORN = {
    "cut": lambda data: data[:-31],
    "its last byte cut": lambda data: data[:-1],
    "half a record after it": lambda data: data + data[-60:-9],
    "zeros after it": lambda data: data + bytes(23),
    "garbage after it": lambda data: data + b"\xff{\0\n" * 3,
}


@pytest.mark.parametrize("pattern", ["metrics.jsonl", "events.*"])
@pytest.mark.parametrize(
    "damage", ["cut", *(pytest.param(name, marks=slow) for name in list(TORN)[1:])]
)
def test_a_torn_end_of_the_curves_is_replaced(text, unbroken, tmp_path, faults, damage, pattern):
    config, folder = config_for(text, **VARIANTS[1]), tmp_path / "parts"
    crash(config, folder, 5)
    (path,) = folder.glob(pattern)
    with faults("a torn end of the curves"):
        path.write_bytes(TORN[damage](path.read_bytes()))
        resumed(config, folder).go()
        assert_same_run(folder, unbroken(config)[0])


def test_another_environment_is_said_to_break_exactness(text, tmp_path, faults, capsys):
    config = config_for(text, dtype="float32")
    started(config, tmp_path / "run", stop_after(3)).go()
    (path,) = (tmp_path / "run" / "checkpoints").glob("step-*3.pt")
    state = torch.load(path, weights_only=True)
    here = state["environment"]
    others = {"torch": "2.0.1", "threads": 96, "device": "cuda", "dtype": "bfloat16"}
    others["native"] = "another"
    assert here.keys() == others.keys()
    for name, then in others.items():
        with faults("a run resumed elsewhere"):
            torch.save(state | {"environment": here | {name: then}}, path)
            run = resumed(config, tmp_path / "run")
            (line,) = run.notices
            assert line == (
                f"{name} was {then}, is {here[name]}: "
                "the run goes on, but not bit for bit as it would have"
            )
    run.go(quiet=False)
    assert capsys.readouterr().out.splitlines().count(line) == 1


def test_where_nothing_differs_nothing_is_said_about_exactness(text, tmp_path, capsys):
    started(config_for(text), tmp_path / "run", stop_after(3)).go()
    resumed(config_for(text), tmp_path / "run").go(quiet=False)
    said = capsys.readouterr().out
    assert "resumed at step 3" in said
    assert "bit for bit" not in said
    assert "changed" not in said


def test_a_new_rate_length_and_number_of_threads_take_effect_and_are_printed(
    text, tmp_path, faults, capsys
):
    before = config_for(text, schedule="linear", warmup_steps=2)
    after = before.with_changes({"learning_rate": 4e-4, "steps": 11, "threads": 2})
    with faults("a run resumed with new settings"):
        started(before, tmp_path / "run", stop_after(3)).go()
        resumed(after, tmp_path / "run").go(quiet=False)
        said = capsys.readouterr().out
        assert "changed: learning_rate 0.001 -> 0.0004" in said
        assert "changed: steps 7 -> 11" in said
        assert "changed: threads 1 -> 2" in said
        assert "threads was 1, is 2: the run goes on, but not bit for bit" in said
        assert torch.get_num_threads() == 2
        rates = [learning_rate(step, before.training) for step in range(3)]
        rates += [learning_rate(step, after.training) for step in range(3, 11)]
        assert read_metrics(tmp_path / "run")["lr"] == list(enumerate(rates, start=1))
        assert load_checkpoint(tmp_path / "run", prefer="newest").step == 11


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=slow)])
def test_a_new_decay_takes_effect_and_is_printed(text, tmp_path, faults, capsys, optimizer):
    config = config_for(text, optimizer=optimizer, schedule="constant", warmup_steps=0)
    started(config, tmp_path / "run", stop_after(3)).go()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    old = newest_state(tmp_path / "run")["model"]
    resumed(config, tmp_path / "run", stop_after(4)).go()
    with faults("a run resumed with new settings"):
        changed = config.with_changes({"weight_decay": 40.1})
        resumed(changed, tmp_path / "other", stop_after(4)).go(quiet=False)
        assert "changed: weight_decay 0.1 -> 40.1" in capsys.readouterr().out
        mine, other = (newest_state(tmp_path / name)["model"] for name in ("run", "other"))
        for name, weights in old.items():
            decayed = weights.ndim == 2
            expected = 1e-3 * 40 * weights if decayed else torch.zeros_like(weights)
            assert torch.allclose(mine[name] - other[name], expected, atol=1e-7), name


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


CHANGES = {
    "one byte": lambda text: text.replace("7 green", "8 green", 1),
    "something after it": lambda text: text + "green\n",
    "something less": lambda text: text[:-20],
    "another text": lambda text: text[::-1],
}


def test_a_changed_text_is_refused_with_both_hashes_unless_allowed(tmp_path, faults, capsys):
    text, folder = some_text(tmp_path), tmp_path / "run"
    then, before = text.read_text(encoding="utf-8"), hash_of(text)
    started(config_for(text), folder, stop_after(3)).go()
    files = sorted(folder.rglob("*"))
    for change in CHANGES.values():
        with faults("a text changed under a run"):
            text.write_text(change(then), encoding="utf-8")
            with pytest.raises(UsageError, match="allow_data_change") as refusal:
                resumed(config_for(text), folder)
            assert before[:16] in str(refusal.value)
            assert hash_of(text)[:16] in str(refusal.value)
            assert sorted(folder.rglob("*")) == files
            run = resumed(config_for(text), folder, allow_data_change=True)
            assert "the text has changed since the checkpoint (--allow_data_change)" in run.said
    assert run.go(quiet=False).steps == STEPS
    assert "the text has changed" in capsys.readouterr().out
    assert load_checkpoint(folder, prefer="newest").source["sha256"] == hash_of(text)


def test_a_changed_text_with_new_characters_is_refused_even_if_allowed(tmp_path, faults):
    text = some_text(tmp_path)
    started(config_for(text), tmp_path / "run", stop_after(1)).go()
    with faults("a text changed under a run"):
        text.write_text(text.read_text(encoding="utf-8") + "ü", encoding="utf-8")
        for allowed in (False, True):
            with pytest.raises(UsageError, match="ü"):
                resumed(config_for(text), tmp_path / "run", allow_data_change=allowed)


def test_a_text_that_was_only_touched_is_the_same(text, unbroken, tmp_path, faults):
    config, folder = config_for(text, **VARIANTS[1]), tmp_path / "parts"
    started(config, folder, stop_after(3)).go()
    for when in (1.0, 4e9):
        with faults("a text touched under a run"):
            os.utime(text, (when, when))
            run = resumed(config, folder)
            assert run.said == ["resumed at step 3"]
    run.go()
    assert_same_run(folder, unbroken(config)[0])
