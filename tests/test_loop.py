import contextlib
import math

import numpy as np
import pytest
import torch

from gpt.config import ModelConfig, TrainingConfig
from gpt.errors import NonFiniteError
from gpt.model.gpt import GPT
from gpt.training import loop
from gpt.training.optimisers import build_optimisers
from gpt.training.schedules import learning_rate

VOCAB_SIZE = 7
MODEL = ModelConfig(d_model=12, n_heads=3, n_layers=2, context_length=9)
IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, 211).astype(np.uint8)
TRAIN, VAL = IDS[:170], IDS[170:]


class Recorder:
    """Remembers what the loop tells; asks to stop once ``stop_at`` updates are logged."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.points: dict[int, dict[str, float]] = {}
        self.losses: dict[int, float | None] = {}
        self.failures: dict[int, dict[str, float]] = {}
        self.stops: list[int] = []
        self.stop_at = stop_at

    def logged(self, step, values):
        self.points[step] = values

    def evaluated(self, step, loss):
        self.losses[step] = loss

    def failed(self, step, values):
        self.failures[step] = values

    def stopped(self, step):
        self.stops.append(step)

    def before_step(self, step):
        return self.stop_at is None or self.stop_at not in self.points


def training(**changes) -> TrainingConfig:
    return TrainingConfig(
        **{"steps": 6, "batch_size": 5, "log_every": 1, "eval_every": 4} | changes
    )


def run(config, model_config=MODEL, first_step=0, state=None, stop_at=None, val_ids=VAL):
    """One run from the seed, or from ``state`` = (model, optimisers) states; all it left."""
    model = GPT(model_config, VOCAB_SIZE, config.seed)
    optimisers = build_optimisers(model, config, torch.device("cpu"))
    if state:
        model.load_state_dict(state[0])
        for optimiser, one in zip(optimisers, state[1], strict=True):
            optimiser.load_state_dict(one)
    told = Recorder(stop_at)
    done = loop.train(
        model, optimisers, TRAIN, val_ids, config, contextlib.nullcontext, told, first_step
    )
    return model, optimisers, told, done


def same_weights(a: GPT, b: GPT) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_every_step_is_told_once_with_its_learning_rate():
    config = training(grad_accumulation=3)
    _, _, told, done = run(config)
    assert done == 6
    assert list(told.points) == [1, 2, 3, 4, 5, 6]
    rates = [point["lr"] for point in told.points.values()]
    assert rates == [learning_rate(step, config) for step in range(6)]


def test_it_evaluates_at_the_start_at_the_interval_and_at_the_end():
    _, _, told, _ = run(training())
    assert list(told.losses) == [0, 4, 6]
    assert told.losses[0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.1)


def test_the_last_evaluation_is_not_done_twice():
    _, _, told, _ = run(training(eval_every=3))
    assert list(told.losses) == [0, 3, 6]


def test_without_a_validation_split_the_loss_is_none_and_never_nan():
    _, _, told, _ = run(training(), val_ids=VAL[:0])
    assert list(told.losses.values()) == [None, None, None]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_how_often_it_evaluates_changes_no_bit_of_the_weights(optimizer):
    config = ModelConfig(**vars(MODEL) | {"dropout": 0.2})
    often, _, told, _ = run(training(optimizer=optimizer, eval_every=1), config)
    seldom, _, other, _ = run(training(optimizer=optimizer, eval_every=6), config)
    assert same_weights(often, seldom)
    for step, point in told.points.items():
        assert point["loss/train"] == other.points[step]["loss/train"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_resumed_run_is_the_unbroken_run_bit_for_bit(optimizer, at):
    config = training(optimizer=optimizer, grad_accumulation=2)
    noisy = ModelConfig(**vars(MODEL) | {"dropout": 0.3})
    whole, _, told, _ = run(config, noisy)
    model, optimisers, first, done = run(config, noisy, stop_at=at)
    assert (done, first.stops) == (at, [at])
    assert at not in first.losses or at in told.losses, "a stop leaves no point of its own"
    state = model.state_dict(), [o.state_dict() for o in optimisers]
    resumed, _, second, _ = run(config, noisy, first_step=at, state=state)
    assert same_weights(whole, resumed)
    joined = first.points | second.points
    for step, point in told.points.items():
        assert {k: v for k, v in point.items() if "speed" not in k} == {
            k: v for k, v in joined[step].items() if "speed" not in k
        }
    assert first.losses | second.losses == told.losses


def test_dropout_differs_from_step_to_step():
    noisy = ModelConfig(**vars(MODEL) | {"dropout": 0.5})
    model = GPT(noisy, VOCAB_SIZE).train()
    tokens = torch.arange(VOCAB_SIZE)[None]
    outputs = []
    for step in (3, 3, 4):
        loop._seed_dropout(11, step)
        outputs.append(model(tokens))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_accumulation_logs_the_loss_and_gradient_norm_of_the_whole_batch():
    _, _, whole, _ = run(training(batch_size=6))
    _, _, parts, _ = run(training(batch_size=2, grad_accumulation=3))
    for step in whole.points:
        for tag in ("loss/train", "grad_norm/total", "grad_norm/block_01"):
            assert parts.points[step][tag] == pytest.approx(whole.points[step][tag], rel=1e-4)


def test_windows_of_a_step_depend_on_seed_and_step_alone():
    config = training(grad_accumulation=2)
    first = loop.step_windows(config, 3, 170, 9)
    assert first.shape == (2, 5)
    assert np.array_equal(first, loop.step_windows(config, 3, 170, 9))
    assert not np.array_equal(first, loop.step_windows(config, 4, 170, 9))
    assert not np.array_equal(first, loop.step_windows(training(seed=8), 3, 170, 9)[:1])


def test_clipping_bounds_the_gradient_and_reports_the_norm_before():
    model = GPT(MODEL, VOCAB_SIZE)
    inputs = torch.arange(18).reshape(2, 9) % VOCAB_SIZE
    loop.backward(model, iter([(inputs, inputs)]), contextlib.nullcontext)
    before = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert loop.clip_gradient(model, 0.0) == pytest.approx(before, rel=1e-5)
    assert loop.clip_gradient(model, before / 3) == pytest.approx(before, rel=1e-5)
    after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert after == pytest.approx(before / 3, rel=1e-4)


def test_the_confidence_penalty_moves_the_gradient_and_not_the_loss_that_is_told():
    """By the formula: d(loss - beta entropy) / d logits = p - target + beta p (ln p + entropy)."""
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[0, 4, 2], [1, 1, 3]])
    table = torch.nn.Parameter(logits)

    def model(_: torch.Tensor) -> torch.Tensor:
        return 1.0 * table

    log_p = logits.log_softmax(-1)
    p, one_hot = log_p.exp(), torch.eye(5)[targets]
    h = -(p * log_p).sum(-1, keepdim=True)
    assert loop.entropy(log_p).item() == pytest.approx(h.mean().item(), rel=1e-12)
    loss = -(one_hot * log_p).sum(-1).mean().item()
    for beta in (0.0, 0.3):
        table.grad = None
        told = loop.backward(model, iter([(targets, targets)] * 2), contextlib.nullcontext, beta)
        assert told == pytest.approx(loss, rel=1e-12)
        expected = (p - one_hot + beta * p * (log_p + h)) / 6  # the mean over 6 characters
        assert torch.allclose(table.grad, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_weight_stops_before_the_update(value):
    model = GPT(MODEL, VOCAB_SIZE)
    with torch.no_grad():
        model.blocks[0].feedforward.W_in.weight[3, 2] = value
    before = [p.clone() for p in model.parameters()]
    optimisers = build_optimisers(model, training(), torch.device("cpu"))
    told = Recorder()
    with pytest.raises(NonFiniteError, match=r"step 1: .*learning rate.*windows start at"):
        loop.train(model, optimisers, TRAIN, VAL[:0], training(), contextlib.nullcontext, told)
    assert math.isnan(told.failures[1]["loss/train"])
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new) or old.isnan().any()


def test_a_validation_loss_that_is_not_finite_ends_the_run():
    model = GPT(MODEL, VOCAB_SIZE)
    with torch.no_grad():
        model.token_embedding.weight.fill_(math.inf)
    optimisers = build_optimisers(model, training(), torch.device("cpu"))
    told = Recorder()
    with pytest.raises(NonFiniteError, match="step 0: validation loss = nan"):
        loop.train(model, optimisers, TRAIN, VAL, training(), contextlib.nullcontext, told)
    assert math.isnan(told.failures[0]["loss/val"])
    assert told.losses == {}


def test_evaluation_equals_a_plain_pass_and_leaves_the_mode():
    model = GPT(ModelConfig(**vars(MODEL) | {"dropout": 0.5}), VOCAB_SIZE).double().train()
    found = loop.evaluate(model, VAL, contextlib.nullcontext)
    assert found == loop.evaluate(model, VAL, contextlib.nullcontext)
    assert model.training
    model.eval()
    losses = []
    for start in range(0, len(VAL) - 1, 9):
        window = torch.from_numpy(VAL[start : start + 10].astype(np.int64))
        scores = model(window[None, :-1])[0].log_softmax(-1)
        losses += [-scores[t, c].item() for t, c in enumerate(window[1:])]
    assert len(losses) == len(VAL) - 1
    assert found == pytest.approx(sum(losses) / len(losses), abs=1e-12)


def test_a_curve_has_at_most_a_thousand_points():
    tiny = ModelConfig(d_model=4, n_heads=2, n_layers=1, context_length=3)
    _, _, told, _ = run(training(steps=2300, batch_size=1, eval_every=2300), tiny)
    assert 700 < len(told.points) <= 1000
    assert max(told.points) == 2300
