import json
import math
from pathlib import Path

import pytest
import torch

from gpt.config import RunConfig
from gpt.config_files import read_toml
from gpt.corpus import read_text
from gpt.errors import FolderInUseError, NonFiniteError, UsageError
from gpt.resuming import resume_point
from gpt.run import Keeper, Run
from gpt.runfolder import given_folder, new_folder, owner
from gpt.training import disk
from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics

SMALL = {
    "d_model": 12, "n_heads": 3, "n_layers": 2, "context_length": 9, "dropout": 0.1,
    "steps": 6, "batch_size": 5, "eval_every": 2, "log_every": 1, "sample_chars": 11,
}  # fmt: skip


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "a text.txt"
    lines = (f"{n} green bottles hanging on the wall\n" for n in range(40))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def config_for(text: Path, **changes) -> RunConfig:
    return RunConfig().with_changes(SMALL | {"text": str(text)} | changes)


class FolderRun(Run):
    """A run that knows its folder, and has ears for tests."""

    def in_folder(self, folder: Path) -> "FolderRun":
        self.folder, self.heard = folder, lambda keeper, step: None
        return self

    def go(self):
        with pytest.MonkeyPatch.context() as patch:
            logged = Keeper.logged

            def hear(keeper, step, values):
                logged(keeper, step, values)
                self.heard(keeper, step)

            patch.setattr(Keeper, "logged", hear)
            return super().go(self.folder, quiet=True)


def started(config: RunConfig, folder: Path) -> FolderRun:
    return FolderRun(config, read_text(config)).in_folder(given_folder(folder))


def resumed(config: RunConfig, folder: Path, *, allow: bool = False) -> FolderRun:
    checkpoint, corpus, notices = resume_point(folder, config, allow)
    run = FolderRun(config, corpus, checkpoint).in_folder(folder)
    run.notices += notices
    return run


def stop_at(run: FolderRun, step: int) -> FolderRun:
    """As a signal would: remembered, and obeyed between two steps."""

    def heard(keeper, now):
        if now == step:
            keeper.signals.stop = 2

    run.heard = heard
    return run


def untimed(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in record.items() if "speed" not in k} for record in records]


def test_a_run_leaves_everything_that_was_promised(text, tmp_path):
    config = config_for(text)
    result = started(config, tmp_path / "run").go()
    assert (result.steps, result.signal) == (6, 0)
    folder = tmp_path / "run"
    assert RunConfig().with_changes(read_toml([folder / "config.toml"])) == config.resolved()
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names == ["best.pt", "step-00000004.pt", "step-00000006.pt"]
    curves = read_metrics(folder)
    assert [step for step, _ in curves["loss/train"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in curves["loss/val"]] == [0, 2, 4, 6]
    for tag in ("lr", "grad_norm/total", "grad_norm/block_01", "stream_rms/block_00",
                "update_ratio/block_01", "speed/chars_per_second", "speed/mfu"):  # fmt: skip
        assert len(curves[tag]) == 6
    samples = (folder / "samples.txt").read_text(encoding="utf-8")
    assert [line for line in samples.splitlines() if line.startswith("---")] == [
        "--- step 0 ---", "--- step 2 ---", "--- step 4 ---", "--- step 6 ---",
    ]  # fmt: skip
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert [p for p in folder.iterdir() if p.is_dir()] == [folder / "checkpoints"]


def test_the_best_checkpoint_is_that_of_the_lowest_loss(text, tmp_path):
    result = started(config_for(text), tmp_path / "run").go()
    losses = dict(read_metrics(tmp_path / "run")["loss/val"])
    best = min(losses, key=losses.get)
    assert result.best == {"step": best, "loss": losses[best]}
    assert load_checkpoint(tmp_path / "run").step == best


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_run_resumed_from_its_files_is_the_unbroken_one(text, tmp_path, optimizer, stop):
    config = config_for(text, optimizer=optimizer, grad_accumulation=2)
    started(config, tmp_path / "whole").go()
    first = stop_at(started(config, tmp_path / "parts"), stop).go()
    assert (first.steps, first.signal) == (stop, 2)
    assert resumed(config, tmp_path / "parts").go().steps == 6
    whole, parts = (
        load_checkpoint(tmp_path / name, prefer="newest") for name in ("whole", "parts")
    )
    for name, tensor in whole.model.items():
        assert torch.equal(tensor, parts.model[name]), name
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "parts")
    assert whole.best == parts.best


def test_a_resumed_run_takes_new_flags_and_says_so(text, tmp_path):
    stop_at(started(config_for(text), tmp_path / "run"), 4).go()
    run = resumed(config_for(text, steps=9, learning_rate=5e-4), tmp_path / "run")
    assert "changed: steps 6 -> 9" in run.notices
    assert "changed: learning_rate 0.001 -> 0.0005" in run.notices
    assert run.go().steps == 9
    assert [step for step, _ in read_metrics(tmp_path / "run")["lr"]] == list(range(1, 10))


def test_another_machine_is_said_to_break_exactness(text, tmp_path):
    stop_at(started(config_for(text, dtype="float32"), tmp_path / "run"), 2).go()
    run = resumed(config_for(text, dtype="bfloat16"), tmp_path / "run")
    assert any("dtype was float32, is bfloat16" in line for line in run.notices)


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"d_model": 24}, r"d_model = 24, but the checkpoint was trained with 12"),
        ({"norm_position": "post"}, r"norm_position = post"),
        ({"val_fraction": 0.2}, r"val_fraction = 0.2, but the run began with 0.1"),
    ],
)
def test_what_cannot_change_on_resume_is_refused(text, tmp_path, changes, needle):
    stop_at(started(config_for(text), tmp_path / "run"), 2).go()
    with pytest.raises(UsageError, match=needle):
        resumed(config_for(text, **changes), tmp_path / "run")


def test_a_changed_text_is_refused_unless_allowed(text, tmp_path):
    config = config_for(text)
    stop_at(started(config, tmp_path / "run"), 2).go()
    text.write_text(text.read_text(encoding="utf-8") + "green\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"sha256 was .*--allow_data_change"):
        resumed(config, tmp_path / "run")
    assert any("changed" in line for line in resumed(config, tmp_path / "run", allow=True).notices)
    text.write_text(text.read_text(encoding="utf-8") + "Zürich\n", encoding="utf-8")
    with pytest.raises(UsageError, match="ü"):
        resumed(config, tmp_path / "run", allow=True)


def test_a_non_finite_loss_keeps_the_checkpoints(text, tmp_path):
    run = started(config_for(text), tmp_path / "run")

    def poison(_keeper, step):
        if step == 3:
            with torch.no_grad():
                run.model.blocks[1].attention.W_V.weight[2, 1] = torch.nan

    run.heard = poison
    with pytest.raises(NonFiniteError, match="step 4"):
        run.go()
    assert load_checkpoint(tmp_path / "run", prefer="newest").step == 2
    curves = read_metrics(tmp_path / "run")
    assert [step for step, value in curves["loss/train"] if not math.isfinite(value)] == [4]


def test_without_validation_it_trains_and_keeps_the_newest(text, tmp_path):
    result = started(config_for(text, val_fraction=0.0), tmp_path / "run").go()
    assert (result.steps, result.val_loss, result.best) == (6, None, None)
    assert load_checkpoint(tmp_path / "run").step == 6


def test_a_folder_has_one_owner_at_a_time(tmp_path):
    with owner(tmp_path), pytest.raises(FolderInUseError, match="in use"), owner(tmp_path):
        pass
    with owner(tmp_path) as folder:
        assert folder == tmp_path


def test_new_folders_are_numbered_and_their_names_are_harmless(tmp_path):
    assert new_folder("novel", tmp_path) == tmp_path / "novel-1"
    assert new_folder("novel", tmp_path) == tmp_path / "novel-2"
    for name in ("../../x", "a/b", "~", "\0", "é" * 300, "..", ""):
        folder = new_folder(name, tmp_path)
        assert folder.resolve().parent == tmp_path.resolve()


def test_a_used_out_folder_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "out").mkdir()
    assert given_folder(tmp_path / "out") == tmp_path / "out"
    (tmp_path / "out" / "mine").write_text("kept", encoding="utf-8")
    with pytest.raises(UsageError, match="is not empty"):
        given_folder(tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(UsageError, match=r"cannot (use|make) --out"):
        given_folder(tmp_path / "out" / "mine")


def test_two_placements_start_alike_and_see_the_same_batches(text, tmp_path):
    pre = started(config_for(text), tmp_path / "pre")
    post = started(config_for(text, norm_position="post"), tmp_path / "post")
    ours, theirs = pre.model.state_dict(), post.model.state_dict()
    assert ours.keys() - theirs.keys() == {"final_norm.gamma", "final_norm.beta"}
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    results = [run.go() for run in (pre, post)]
    curves = [read_metrics(tmp_path / name) for name in ("pre", "post")]
    assert curves[0].keys() == curves[1].keys()
    for tag in curves[0]:
        assert [s for s, _ in curves[0][tag]] == [s for s, _ in curves[1][tag]]
    assert curves[0]["loss/val"] != curves[1]["loss/val"]
    assert results[0] != results[1]


def saved_steps(monkeypatch) -> list[int]:
    """The steps of all saves from now on."""
    steps, original = [], Keeper._save

    def save(keeper, step, new_best):
        steps.append(step)
        original(keeper, step, new_best)

    monkeypatch.setattr(Keeper, "_save", save)
    return steps


def test_a_run_stopped_at_an_evaluation_saves_once(text, tmp_path, monkeypatch):
    steps = saved_steps(monkeypatch)
    result = stop_at(started(config_for(text), tmp_path / "run"), 2).go()
    assert result.steps == 2
    assert steps == [0, 2]


def test_a_save_that_reads_back_damaged_is_tried_again(text, tmp_path, monkeypatch, capsys):
    write, n_writes = disk.write, 0

    def flip(file, data):
        nonlocal n_writes
        n_writes += 1
        if "step-00000002" in file.name and len(data) > 500:
            data = bytes(data[:300]) + bytes([data[300] ^ 1]) + bytes(data[301:])
        return write(file, data)

    monkeypatch.setattr(disk, "write", flip)
    assert started(config_for(text), tmp_path / "run").go().steps == 6
    warnings = capsys.readouterr().err
    assert "cannot be read back" in warnings
    assert "next save tries again" in warnings
    checkpoints = tmp_path / "run" / "checkpoints"
    assert load_checkpoint(checkpoints, prefer="newest").step == 6
    assert not list(checkpoints.glob("*2.pt"))


def test_a_link_to_nowhere_among_the_checkpoints_does_not_stop_a_resumed_run(text, tmp_path):
    stop_at(started(config_for(text), tmp_path / "run"), 3).go()
    (tmp_path / "run" / "checkpoints" / "step-00000009.pt").symlink_to(tmp_path / "nowhere")
    assert resumed(config_for(text), tmp_path / "run").go().steps == 6


def test_the_step_inside_a_checkpoint_counts_and_not_a_name(text, tmp_path):
    folder = tmp_path / "run"
    stop_at(started(config_for(text, steps=9), folder), 5).go()
    checkpoints = folder / "checkpoints"
    for name in ("step-00000098.pt", "step-00000099.pt"):
        (checkpoints / name).write_bytes((checkpoints / "best.pt").read_bytes())
    run = resumed(config_for(text, steps=9), folder)
    assert run.first_step == 5
    assert len([n for n in run.notices if "its name says another" in n]) == 2
    run.go()
    assert sorted(p.name for p in checkpoints.glob("step-*.pt")) == [
        "step-00000008.pt", "step-00000009.pt",
    ]  # fmt: skip


def test_a_save_deletes_no_checkpoint_of_a_later_step(text, tmp_path):
    folder = tmp_path / "run"
    stop_at(started(config_for(text), folder), 3).go()
    later = [folder / "checkpoints" / f"step-0000009{n}.pt" for n in (7, 8, 9)]

    def plant(keeper, step):
        for path in later:
            path.write_bytes(b"of another run")

    run = resumed(config_for(text), folder)
    run.heard = plant
    run.go()
    assert all(path.exists() for path in later)


@pytest.mark.parametrize("harm", ["negative", "missing"])
def test_damaged_optimiser_memory_is_passed_over(text, tmp_path, harm):
    folder = tmp_path / "run"
    stop_at(started(config_for(text), folder), 3).go()
    newest = folder / "checkpoints" / "step-00000003.pt"
    state = torch.load(newest, weights_only=True)
    if harm == "negative":
        state["optimisers"][0]["state"][0]["exp_avg_sq"] -= 1
    else:
        del state["optimisers"][0]["state"][3]
    torch.save(state, newest)
    run = resumed(config_for(text), folder)
    assert run.first_step == 2
    assert any("optimisers do not fit" in notice for notice in run.notices)


def test_curves_that_are_missing_are_said(text, tmp_path, capsys):
    folder = tmp_path / "run"
    stop_at(started(config_for(text), folder), 3).go()
    (folder / "metrics.jsonl").unlink()
    resumed(config_for(text), folder).go()
    assert "the curves begin at step 4" in capsys.readouterr().err
