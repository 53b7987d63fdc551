"""A trial: its curves, its outcome, its key; begun again, gone on with, or found finished."""

import json
import math
import re
import signal
from pathlib import Path

import pytest
import torch

from gpt.config import RunConfig
from gpt.corpus import read_text
from gpt.errors import UsageError
from gpt.lab import light, trials
from gpt.lab.trials import Stopped, Trial, finished, run_trial
from gpt.model.gpt import GPT
from gpt.run import Run
from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics
from gpt.training.loop import evaluate
from gpt.training.machine import set_up

SMALL = {
    "d_model": 12, "n_heads": 3, "n_layers": 2, "context_length": 9, "steps": 5, "log_every": 1,
    "batch_size": 4, "eval_every": 2, "sample_chars": 0, "native": False, "dtype": "float32",
}  # fmt: skip
PART = 70


@pytest.fixture
def base(tmp_path, monkeypatch) -> RunConfig:
    monkeypatch.setattr(light, "PART", PART)
    path = tmp_path / "text.txt"
    path.write_text("she sells sea shells on the sea shore\n" * 30, encoding="utf-8")
    return RunConfig().with_changes(SMALL | {"text": str(path)})


@pytest.fixture
def folder(tmp_path) -> Path:
    place = tmp_path / "pre-s1337"
    place.mkdir()
    return place


def trial_of(base: RunConfig, *, kept: bool = False, probe_steps=(), **changes) -> Trial:
    config = base.with_changes(changes).resolved()
    return Trial("pre", config, keeps_checkpoints=kept, probe_steps=probe_steps)


def stop_at(step: int):
    """A signal that comes before that step."""
    looks = iter(range(10**6))
    return lambda: signal.SIGTERM if next(looks) >= step else 0


def without_speed(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if "speed/" not in k} for line in lines]


def test_a_light_trial_writes_curves_and_no_checkpoint(base, folder):
    corpus = read_text(base)
    outcome = run_trial(trial_of(base), corpus, folder)
    curves = read_metrics(folder)
    assert [step for step, _ in curves["loss/val"]] == [0, 2, 4, 5]
    assert curves["loss/val_whole"] == [(5, outcome.final)]
    assert (outcome.first, outcome.best) == (
        curves["loss/val"][0][1], min(loss for _, loss in curves["loss/val"]),
    )  # fmt: skip
    assert outcome.final != curves["loss/val"][-1][1]
    assert (outcome.steps, outcome.characters) == (5, 5 * 4 * 9)
    assert sorted(p.name.split(".")[0] for p in folder.iterdir()) == [
        "config", "events", "metrics", "outcome", "trial",
    ]  # fmt: skip


def test_its_curve_is_of_a_part_of_the_split_and_its_end_of_all(base, folder):
    corpus = read_text(base)
    run_trial(trial_of(base), corpus, folder)
    config = light.one_thread(base)
    model = GPT(config.model, corpus.tokenizer.vocab_size, config.training.seed)
    machine = set_up(config.machine)
    part = evaluate(model, corpus.val[:PART], machine.autocast)
    assert read_metrics(folder)["loss/val"][0] == (0, part)
    assert part != evaluate(model, corpus.val, machine.autocast)


def test_a_kept_trial_is_the_run_that_train_makes(base, folder):
    outcome = run_trial(trial_of(base, kept=True), read_text(base), folder)
    checkpoint = load_checkpoint(folder, prefer="newest")
    assert checkpoint.step == 5
    curve = read_metrics(folder)["loss/val"]
    assert curve[-1] == (5, outcome.final)
    assert (outcome.first, outcome.best) == (curve[0][1], min(loss for _, loss in curve))


def test_light_and_kept_learn_the_same(base, folder, tmp_path):
    corpus = read_text(base)
    other = tmp_path / "other"
    other.mkdir()
    one = run_trial(trial_of(base), corpus, folder)
    two = run_trial(trial_of(base, kept=True), corpus, other)
    assert (one.final, one.hashes, one.n_parameters) == (two.final, two.hashes, two.n_parameters)


def test_probes_change_nothing_that_is_learned(base, folder, tmp_path):
    corpus = read_text(base)
    other = tmp_path / "other"
    other.mkdir()
    plain = run_trial(trial_of(base, dropout=0.3), corpus, folder)
    probed = run_trial(trial_of(base, dropout=0.3, probe_steps=(0, 3)), corpus, other)
    assert probed.final == plain.final
    curves = read_metrics(other)
    assert [step for step, _ in curves["probe/dF"]] == [0, 3, 5]
    assert not [tag for tag in read_metrics(folder) if tag.startswith("probe/")]


def test_a_finished_trial_is_not_trained_again(base, folder, monkeypatch):
    corpus = read_text(base)
    outcome = run_trial(trial_of(base), corpus, folder)
    monkeypatch.setattr(light, "train_light", None)
    assert run_trial(trial_of(base), corpus, folder) == outcome


def test_an_interrupted_light_trial_begins_again_and_leaves_no_trace(base, folder, tmp_path):
    corpus = read_text(base)
    with pytest.raises(Stopped) as stopped:
        run_trial(trial_of(base), corpus, folder, stop_at(3))
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    assert stopped.value.signal == signal.SIGTERM
    assert not (folder / "outcome.json").exists()
    again = run_trial(trial_of(base), corpus, folder)
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    assert run_trial(trial_of(base), corpus, unbroken).final == again.final
    assert without_speed(folder) == without_speed(unbroken)
    assert len(list(folder.glob("events.*"))) == 1
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("kept", [False, True], ids=["light", "kept"])
def test_a_folder_that_is_no_trial_is_left_alone(base, folder, kept):
    (folder / "metrics.jsonl").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="holds something that is no trial"):
        run_trial(trial_of(base, kept=kept), read_text(base), folder)
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    assert (folder / "metrics.jsonl").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 0.5}, {"steps": 7}, {"d_model": 24}], ids=str
)
def test_a_kept_trial_does_not_go_on_with_the_run_of_another(base, folder, monkeypatch, changes):
    corpus = read_text(base)
    stop_run(monkeypatch, 3)
    with pytest.raises(Stopped):
        run_trial(trial_of(base, kept=True), corpus, folder)
    monkeypatch.undo()
    for path in folder.glob("checkpoints/*.pt"):
        path.unlink()
    Run(trial_of(base, **changes).config, corpus).go(folder, quiet=True)
    saved = {path.name: path.read_bytes() for path in folder.glob("checkpoints/*.pt")}
    with pytest.raises(UsageError, match=f"holds a run with another .*{next(iter(changes))}"):
        run_trial(trial_of(base, kept=True), corpus, folder)
    assert saved == {path.name: path.read_bytes() for path in folder.glob("checkpoints/*.pt")}


@pytest.mark.parametrize(
    "damage",
    [{"arm": "evil"}, {"seed": 99}, {"state": "superb"}, {"final": "lie"}, {"final": math.nan},
     {"seconds": "x"}, {"hashes": 3}, {"hashes": {"batches": 3}}, {"more": 3}],
    ids=str,
)  # fmt: skip
def test_an_outcome_that_is_none_is_refused(base, folder, damage):
    corpus = read_text(base)
    run_trial(trial_of(base), corpus, folder)
    record = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    record["outcome"] |= damage
    (folder / "outcome.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UsageError, match="is damaged; delete"):
        run_trial(trial_of(base), corpus, folder)


def test_what_an_interrupted_light_trial_was_of_does_not_matter(base, folder):
    corpus = read_text(base)
    with pytest.raises(Stopped):
        run_trial(trial_of(base, learning_rate=0.5), corpus, folder, stop_at(3))
    assert run_trial(trial_of(base), corpus, folder).steps == 5


def stop_run(monkeypatch, step: int) -> None:
    from gpt.run import Keeper

    before_step = Keeper.before_step

    def hear(keeper, done):
        if done == step:
            signal.raise_signal(signal.SIGTERM)
        return before_step(keeper, done)

    monkeypatch.setattr(Keeper, "before_step", hear)


def test_an_interrupted_kept_trial_goes_on_and_ends_as_the_unbroken(base, folder, tmp_path):
    corpus = read_text(base)
    trial = trial_of(base, kept=True)
    with pytest.MonkeyPatch.context() as patch:
        stop_run(patch, 3)
        with pytest.raises(Stopped) as stopped:
            run_trial(trial, corpus, folder)
    assert stopped.value.signal == signal.SIGTERM
    assert load_checkpoint(folder, prefer="newest").step == 3
    first_steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            light,
            "Run",
            lambda config, corpus, checkpoint: (
                first_steps.append(checkpoint.step) or Run(config, corpus, checkpoint)
            ),
        )
        outcome = run_trial(trial, corpus, folder)
    assert first_steps == [3]
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    expected = run_trial(trial, corpus, unbroken)
    assert (outcome.final, outcome.first, outcome.best) == (
        expected.final, expected.first, expected.best,
    )  # fmt: skip
    states = [load_checkpoint(f, prefer="newest").model for f in (folder, unbroken)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_a_kept_trial_that_was_stopped_after_its_last_step_has_its_outcome(base, folder):
    corpus = read_text(base)
    trial = trial_of(base, kept=True)
    outcome = run_trial(trial, corpus, folder)
    (folder / "outcome.json").unlink()
    again = run_trial(trial, corpus, folder)
    assert (again.final, again.best) == (outcome.final, outcome.best)


def test_an_interrupted_kept_trial_of_other_settings_is_refused(base, folder, monkeypatch):
    corpus = read_text(base)
    stop_run(monkeypatch, 3)
    with pytest.raises(Stopped):
        run_trial(trial_of(base, kept=True), corpus, folder)
    with pytest.raises(UsageError, match="of other settings"):
        run_trial(trial_of(base, kept=True, learning_rate=0.5), corpus, folder)


@pytest.mark.parametrize("kept", [False, True], ids=["light", "kept"])
def test_a_number_that_is_not_finite_is_an_outcome_with_a_failure(base, folder, kept, monkeypatch):
    from gpt.training import loop

    clip, calls = loop.clip_gradient, iter(range(99))
    monkeypatch.setattr(
        loop, "clip_gradient", lambda *a: math.nan if next(calls) == 3 else clip(*a)
    )
    outcome = run_trial(trial_of(base, kept=kept), read_text(base), folder)
    assert (outcome.state, outcome.final, outcome.steps) == ("diverged", None, 3)
    assert re.fullmatch(r"step 4: loss = [\d.]+, gradient norm = nan", outcome.failure)
    assert outcome.best == min(loss for _, loss in read_metrics(folder)["loss/val"])
    assert outcome.characters == 3 * 4 * 9


@pytest.mark.parametrize("kept", [False, True], ids=["light", "kept"])
def test_an_update_after_which_the_validation_loss_is_not_finite_was_made(
    base, folder, kept, monkeypatch
):
    from gpt.training import loop

    evaluate, calls = loop.evaluate, iter(range(99))
    monkeypatch.setattr(loop, "evaluate", lambda *a: math.nan if next(calls) == 1 else evaluate(*a))
    outcome = run_trial(trial_of(base, kept=kept), read_text(base), folder)
    assert (outcome.state, outcome.final, outcome.steps) == ("diverged", None, 2)
    assert outcome.failure == "step 2: validation loss = nan"
    assert outcome.characters == 2 * 4 * 9


def test_the_key_holds_all_that_decides_and_nothing_else(base, tmp_path):
    corpus = read_text(base)
    key = trial_of(base).key(corpus)
    for changes in ({"seed": 5}, {"learning_rate": 0.5}, {"norm": "rms"}, {"eval_every": 3}):
        assert trial_of(base, **changes).key(corpus) != key
    assert trial_of(base, threads=1).key(corpus) == key
    assert trial_of(base, probe_steps=(0,)).key(corpus) != key
    assert trial_of(base, kept=True).key(corpus) != key
    moved = tmp_path / "moved.txt"
    moved.write_bytes(Path(base.text.text).read_bytes())
    assert trial_of(base, text=str(moved)).key(read_text(base)) == key
    moved.write_bytes(b"x" + moved.read_bytes()[1:])
    assert trial_of(base).key(read_text(base.with_changes({"text": str(moved)}))) != key


def test_another_version_of_the_program_is_another_key(base, tmp_path, monkeypatch):
    corpus = read_text(base)
    key = trial_of(base).key(corpus)
    for name in trials.DECISIVE:
        assert (trials.PACKAGE / name).exists(), name
    package = tmp_path / "package"
    (package / "model").mkdir(parents=True)
    (package / "model" / "block.py").write_text("x = x + f(norm(x))", encoding="utf-8")
    monkeypatch.setattr(trials, "PACKAGE", package)
    found = {key}
    for source in ("x = x + f(norm(x))", "x = norm(x + f(x))"):
        trials.source_digest.cache_clear()
        (package / "model" / "block.py").write_text(source, encoding="utf-8")
        found.add(trial_of(base).key(corpus))
    trials.source_digest.cache_clear()
    assert len(found) == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "KEY", "outcome": {"arm": 1}}'])
def test_a_damaged_outcome_is_refused(base, folder, content):
    corpus = read_text(base)
    trial = trial_of(base)
    content = content.replace("KEY", trial.key(corpus))
    (folder / "outcome.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="is damaged; delete"):
        finished(trial, corpus, folder)
