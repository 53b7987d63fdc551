"""A NaN or an infinity stops the run before it reaches an update, a mean or a file."""

import json
import math
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import python
from small_runs import (
    SmallRun,
    assert_same_run,
    board,
    config_for,
    newest_state,
    records,
    resumed,
    some_text,
    started,
)

from gpt.config import RunConfig
from gpt.errors import NonFiniteError
from gpt.training import loop
from gpt.training.checkpoint import load_checkpoint
from gpt.training.schedules import learning_rate

FAULT = "a number that is not finite"
AT = 3  # updates done when it comes; a checkpoint was saved after 2


@pytest.fixture
def text(tmp_path) -> Path:
    return some_text(tmp_path)


def assert_goes_on_as_if_nothing_had_been(config: RunConfig, folder: Path) -> None:
    resumed(config, folder).go()
    started(config, folder.with_name("whole")).go()
    assert_same_run(folder, folder.with_name("whole"))


def at_step(step: int, do: Callable[[SmallRun], object]) -> Callable[[SmallRun], object]:
    return lambda run: do(run) if run.step == step else None


def into_weight(name: str, value: float, place: int = 5) -> Callable[[SmallRun], None]:
    def do(run: SmallRun) -> None:
        with torch.no_grad():
            run.model.get_parameter(name).view(-1)[place] = value

    return do


def into_gradient(name: str, value: float, of_batch: int) -> Callable[[SmallRun], None]:
    """Of one of the batches whose gradients a step adds up."""

    def do(run: SmallRun) -> None:
        batch = -1

        def poison(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal batch
            batch += 1
            gradient = gradient.clone()
            if batch == of_batch:
                gradient.view(-1)[5] = value
            return gradient

        run.model.get_parameter(name).register_hook(poison)

    return do


def into_loss(monkeypatch, value: float, of_batch: int) -> Callable[[SmallRun], None]:
    def do(run: SmallRun) -> None:
        cross_entropy, batch = loop.cross_entropy, -1

        def poisoned(log_p, *arguments):
            nonlocal batch
            loss = cross_entropy(log_p, *arguments)
            batch += log_p.requires_grad
            return loss * value if log_p.requires_grad and batch == of_batch else loss

        monkeypatch.setattr(loop, "cross_entropy", poisoned)

    return do


def stopped_by(fault: Callable[[SmallRun], object], config: RunConfig, folder: Path) -> str:
    """Run into the fault, check what everyone must be told, and return the message."""
    run = started(config, folder, at_step(AT, fault))
    with pytest.raises(NonFiniteError) as refusal:
        run.go()
    message = str(refusal.value)
    length = config.model.context_length
    starts = loop.step_windows(config.training, AT, len(run.corpus.train), length)
    assert message.startswith(f"step {AT + 1}: loss = ")
    assert "gradient norm = " in message
    assert f"learning rate = {learning_rate(AT, config.training):.3g}" in message
    assert str(starts.flatten().tolist()) in message
    assert "lower --learning_rate" in message
    assert load_checkpoint(folder, prefer="newest").step == 2
    return message


def curves_tell(folder: Path) -> set[str]:
    """The curves that say that the step was not finite; no other line and no mean does."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    *before, last = (json.loads(line) for line in lines)
    assert last["step"] == AT + 1
    assert not any(isinstance(value, str) for record in before for value in record.values())
    told = {tag for tag, value in last.items() if value in ("nan", "inf", "-inf")}
    shown = {tag: dict(points) for tag, points in board(folder).items()}
    assert told == {tag for tag in shown if not math.isfinite(shown[tag].get(AT + 1, 0.0))}
    return told


@pytest.mark.parametrize(
    ("where", "grad_accumulation", "value"),
    [
        ("loss", 3, math.nan),
        ("gradient", 3, math.inf),
        ("weight", 1, math.nan),
        pytest.param("loss", 1, math.inf, marks=pytest.mark.slow),
        pytest.param("gradient", 1, math.nan, marks=pytest.mark.slow),
        pytest.param("weight", 3, math.inf, marks=pytest.mark.slow),
    ],
)
def test_it_stops_the_run_before_the_update_and_all_is_as_it_was(
    text, tmp_path, monkeypatch, faults, where, grad_accumulation, value
):
    config = config_for(text, grad_accumulation=grad_accumulation)
    one = grad_accumulation // 2
    faulty = {
        "loss": into_loss(monkeypatch, value, one),
        "gradient": into_gradient("blocks.1.attention.W_V.weight", value, one),
        "weight": into_weight("blocks.0.feedforward.W_in.weight", value),
    }[where]
    folder = tmp_path / "run"
    with faults(FAULT):
        stopped_by(faulty, config, folder)
        assert ("grad_norm/total" if where == "gradient" else "loss/train") in curves_tell(folder)
        monkeypatch.undo()
        assert_goes_on_as_if_nothing_had_been(config, folder)


@pytest.mark.slow
def test_it_stops_the_run_in_whichever_weight_it_is(text, tmp_path, faults):
    names = [name for name, _ in started(config_for(text), tmp_path / "x").model.named_parameters()]
    for number, name in enumerate(names):
        config = config_for(text, optimizer=("adamw", "muon")[number % 2])
        for fault in (into_weight(name, math.nan), into_gradient(name, math.nan, 0)):
            with faults(FAULT):
                stopped_by(fault, config, tmp_path / f"{number}-{fault.__qualname__}")


def test_it_is_told_also_at_a_step_that_would_not_be_logged(text, tmp_path, faults):
    config = config_for(text, log_every=5)
    with faults(FAULT):
        stopped_by(into_weight("token_embedding.weight", math.nan), config, tmp_path / "run")
        assert "loss/train" in curves_tell(tmp_path / "run")
        assert [r["step"] for r in records(tmp_path / "run")] == [0, 1, 2, AT + 1]


@pytest.mark.parametrize(
    ("rate", "changes"), [(1e10, {}), (1e30, {"optimizer": "muon", "grad_clip": 0.0})]
)
def test_a_run_away_from_the_start_goes_on_with_a_lower_rate(text, tmp_path, faults, rate, changes):
    config, folder = config_for(text, learning_rate=rate, **changes), tmp_path / "run"
    with faults("a learning rate far too high"):
        with pytest.raises(NonFiniteError, match="lower --learning_rate") as refusal:
            started(config, folder).go()
        assert f"learning rate = {learning_rate(1, config.training):.3g}" in str(refusal.value)
        assert records(folder)[-1]["grad_norm/total"] in ("nan", "inf")
        lower = config.with_changes({"learning_rate": 1e-3})
        result = resumed(lower, folder).go()
        assert (result.steps, result.best["step"]) == (7, 7)
        assert "nan" not in (folder / "metrics.jsonl").read_text(encoding="utf-8")


def unseen(text: Path, character: str, *, last: bool) -> Path:
    """The text with a character that no training window has: its first, or a validation one."""
    written = text.read_text(encoding="utf-8")
    text.write_text(written + character if last else character + written, encoding="utf-8")
    return text


def into_embedding_of(character: str, value: float) -> Callable[[SmallRun], None]:
    def do(run: SmallRun) -> None:
        row = run.corpus.tokenizer.vocabulary.index(character)
        into_weight("token_embedding.weight", value, 12 * row + 5)(run)

    return do


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_a_validation_loss_that_is_not_finite_stops_the_run_unsaved(text, tmp_path, faults, value):
    # The last character is only ever a target, so two of them.
    config = config_for(unseen(text, "§§", last=True), tie_embeddings=False)
    folder = tmp_path / "run"
    with faults(FAULT):
        fault = at_step(AT, into_embedding_of("§", value))
        with pytest.raises(NonFiniteError, match="step 4: validation loss = nan"):
            started(config, folder, fault).go()
        assert curves_tell(folder) == {"loss/val"}
        saved = load_checkpoint(folder, prefer="newest")
        assert (saved.step, saved.best["step"]) == (2, 2)
        assert load_checkpoint(folder).step == 2
        assert_goes_on_as_if_nothing_had_been(config, folder)


def into_memory(run: SmallRun) -> None:
    """Of the optimiser: the infinite mean of squares makes an update of 0, which no loss shows."""
    weight = run.model.get_parameter("blocks.1.norm_2.gamma")
    run.optimisers[-1].state[weight]["exp_avg_sq"][5] = math.inf


def stopping(run: SmallRun) -> None:
    into_embedding_of("¶", math.nan)(run)
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("fault", [into_embedding_of("¶", math.nan), into_memory, stopping])
def test_what_no_loss_sees_is_not_saved(text, tmp_path, faults, fault):
    config = config_for(unseen(text, "¶", last=False), tie_embeddings=False)
    folder = tmp_path / "run"
    with faults(FAULT):
        run = started(config, folder, at_step(AT, fault))
        with pytest.raises(NonFiniteError, match=r"holds NaN or infinity at step [34] "):
            run.go()
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names == ["best.pt", "step-00000000.pt", "step-00000002.pt"]
        assert_goes_on_as_if_nothing_had_been(config, folder)


@pytest.mark.slow
def test_train_py_says_it_exits_3_and_goes_on_with_a_lower_rate(text, tmp_path, faults):
    folder = tmp_path / "run"
    small = ["--d_model", "12", "--n_heads", "3", "--n_layers", "2", "--context_length", "9"]

    with faults("a learning rate far too high"):
        words = [*small, "--learning_rate", "1e10", "--steps", 5, "--out", folder]
        ended = python("train.py", text, *words)
        assert ended.returncode == 3
        assert re.match(r"error: step [2-5]: loss = ", ended.stderr)
        assert "lower --learning_rate" in ended.stderr
        assert "Traceback" not in ended.stderr + ended.stdout
        ended = python("train.py", "--resume", folder, "--learning_rate", "1e-3")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "changed: learning_rate 10000000000.0 -> 0.001" in ended.stdout
        assert all(tensor.isfinite().all() for tensor in newest_state(folder)["model"].values())
