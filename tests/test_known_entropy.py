"""A text whose entropy is known: no model can learn more than there is, unless it sees the future.

The source is a Markov chain of order 2, so that the last character alone is not enough: a model
must look back. Its entropy rate, and the loss of the source's own probabilities on the very text
that validates the model, are computed here from the table of probabilities.
"""

import contextlib
import math

import numpy as np
import torch
import torch.nn.functional as F

from gpt.config import ModelConfig, TrainingConfig
from gpt.model.gpt import GPT
from gpt.training import loop
from gpt.training.optimisers import build_optimisers

K = 4  # characters
TABLE = np.random.default_rng(7).dirichlet(np.ones(K), size=(K, K))  # p(next | two before)
MODEL = ModelConfig(
    d_model=24, d_ff=48, n_heads=4, n_layers=2, context_length=64, positions="rotary",
    activation="relu2",
)  # fmt: skip
TRAINING = TrainingConfig(
    steps=500, batch_size=10, learning_rate=1e-2, schedule="linear", final_lr_fraction=0.02,
    weight_decay=0.0, eval_every=500,
)  # fmt: skip


class Losses(dict):
    def logged(self, step, values):
        pass

    def evaluated(self, step, loss):
        self[step] = loss

    def before_step(self, step):
        return True


def sampled(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = [0, 1]
    cumulative = TABLE.cumsum(-1)
    for uniform in rng.random(n):
        ids.append(int(np.searchsorted(cumulative[ids[-2], ids[-1]], uniform)))
    return np.array(ids[2:], np.uint8).clip(max=K - 1)


def entropy_rate() -> float:
    """Sum over pairs of their stationary probability times the entropy of what follows, nats."""
    pairs = np.full((K, K), 1 / K**2)
    for _ in range(2000):
        pairs = np.einsum("ab,abc->bc", pairs, TABLE)
    return float((pairs * -(TABLE * np.log(TABLE)).sum(-1)).sum())


def trained(attend=None) -> tuple[float, np.ndarray]:
    """Validation loss of a model trained on the source, and the text that validated it."""
    train, val = sampled(100_000, seed=1), sampled(60_000, seed=2)
    model = GPT(MODEL, K)
    for block in model.blocks:
        block.attention.attend = attend or block.attention.attend
    optimisers = build_optimisers(model, TRAINING, torch.device("cpu"))
    told = Losses()
    loop.train(model, optimisers, train, val, TRAINING, contextlib.nullcontext, told)
    assert told[0] > math.log(K) - 0.05
    return told[TRAINING.steps], val


def test_the_loss_approaches_the_entropy_of_the_source_and_does_not_beat_it():
    loss, val = trained()
    source = -np.log(TABLE[val[:-2], val[1:-1], val[2:]])
    error = source.std() / math.sqrt(len(source))
    entropy = entropy_rate()
    assert abs(source.mean() - entropy) < 4 * error, "the text is not of the source"
    assert loss < 1.02 * entropy
    assert loss > entropy - 4 * error
    # On this very text no model without the source's table, or a view of the future, does better.
    assert loss > source.mean() - 0.002


def test_a_model_that_sees_the_future_would_be_caught():
    def leaking(q, k, v, dropout=0.0):
        return F.scaled_dot_product_attention(q, k, v)

    loss, _ = trained(leaking)
    assert loss < 0.8 * entropy_rate()
