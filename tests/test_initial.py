import copy
from statistics import fmean, geometric_mean

import numpy as np
import pytest
import torch
from helpers import B, T, random_tokens, small_config

from gpt.commandline import run_config
from gpt.corpus import read_text
from gpt.errors import UsageError
from gpt.lab import initial
from gpt.lab.at_start import (
    amplification,
    begin_at_rms_1,
    expected_gradients,
    look,
    position_gradient,
    slope,
    theory,
    update,
)
from gpt.lab.commandline import parse_compare
from gpt.lab.probes import measure
from gpt.model.gpt import GPT
from gpt.training.loop import loss_of

VOCAB_SIZE = 11
TEXT = "she sells sea shells on the sea shore\n" * 30


def model_of(placement: str = "post", **changes) -> GPT:
    changes = {"init": "xavier", "n_layers": 3, "tie_embeddings": False} | changes
    return GPT(small_config(norm_position=placement, **changes), VOCAB_SIZE, 5)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_tokens(seed=seed), random_tokens(seed=seed + 100)


def gradient_of_last(model: GPT, loss: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, model.blocks[-1].feedforward.W_out.weight)[0]


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "deepnorm", "residual_dual"])
def test_position_gradient_is_the_mean_norm_of_each_positions_own(placement):
    model = model_of(placement)
    inputs, targets = batch(1)
    expected = []
    for b in range(B):
        for t in range(T):
            log_p = model(inputs)[b, t].log_softmax(-1)
            expected.append(gradient_of_last(model, -log_p[targets[b, t]]).norm().item())
    assert position_gradient(model, inputs, targets) == pytest.approx(fmean(expected), rel=1e-4)
    assert not any(module._forward_hooks for module in model.modules())


def test_expected_gradients_are_averaged_over_batches_before_the_norm():
    model = model_of()
    batches = [batch(1), batch(2), batch(3)]
    mean = sum(gradient_of_last(model, loss_of(model, *one)) for one in batches) / 3
    found = expected_gradients(model, batches)
    assert found[-1] == pytest.approx(mean.norm().item(), rel=1e-4)
    norms = [gradient_of_last(model, loss_of(model, *one)).norm().item() for one in batches]
    assert found[-1] < 0.95 * fmean(norms)
    assert len(found) == 3


def test_update_is_one_step_of_gradient_descent_and_leaves_the_model():
    model = model_of()
    inputs, targets = batch(1)
    moved = update(model, inputs, measure(model, inputs, targets), rate=0.05)
    after = copy.deepcopy(model)
    gradients = torch.autograd.grad(loss_of(after, inputs, targets), list(after.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(after.parameters(), gradients, strict=True):
            parameter -= 0.05 * gradient
    difference = (after(inputs) - model(inputs)).square().mean().sqrt().item()
    assert moved == pytest.approx(difference, rel=1e-4)


def test_amplification_is_of_second_order_in_the_noise():
    model = model_of()
    before = [p.clone() for p in model.parameters()]
    inputs, targets = batch(1)
    logits = measure(model, inputs, targets).logits
    a, b = (amplification(model, inputs, logits, seed=3, noise=noise) for noise in (1e-3, 2e-3))
    assert b / a == pytest.approx(4, rel=0.02)
    assert amplification(model, inputs, logits, seed=3, noise=0) == 0
    assert amplification(model, inputs, logits, seed=4, noise=1e-3) != a
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_a_stream_can_begin_at_rms_1():
    model = begin_at_rms_1(model_of("pre"), random_tokens(seed=1))
    assert measure(model, *batch(1)).additions[0].skip == pytest.approx(1, rel=1e-4)


def test_the_setting_of_the_proofs_has_the_norms_of_lemma_2():
    assert fmean(theory("post", 6, 96, seed=1)) == pytest.approx(1.5, rel=0.1)
    assert len(theory("post", 6, 96, seed=1)) == 6
    (square,) = theory("pre", 6, 96, seed=1)
    assert 1 + 6 / 2 < square < 1 + 3 * 6 / 2


def test_a_sandwich_grows_by_one_mean_square_a_sublayer():
    start = look(model_of("sandwich", n_layers=5, d_model=96), [batch(1), batch(2)], seed=3)
    law = [(start.stream[0] ** 2 + k) ** 0.5 for k in range(11)]
    assert start.stream == pytest.approx(law, rel=0.15)
    assert len(start.branch_over_skip) == 10


def test_slope_is_that_of_the_logarithms():
    assert slope({2: 3.0, 8: 1.5, 32: 0.75}) == pytest.approx(-0.5)


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


SIZES = ["--d_model", "12", "--n_heads", "3", "--context_length", "9", "--batch_size", "5"]


def test_the_command_measures_every_placement_init_and_depth(text, tmp_path, capfd):
    out = tmp_path / "out"
    words = [text, "--out", str(out), "--depths", "2", "4", "--inits", "xavier", "native"]
    command = parse_compare("init", [*words, *SIZES, "--arms", "pre", "lns", "rms"])
    assert initial.main(command) == 0
    said = capfd.readouterr()
    assert "24 models of 2 to 4 blocks" in said.err
    assert said.out.count("init xavier") == said.out.count("init native") == 1
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(caption in page for caption in ("init xavier", "init native"))
    assert page.count("<svg") == 6
    assert "python compare.py init" in page
    assert "nothing was trained" in page
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"{name}_{init}.svg"
        for name in ("gradient_by_depth", "gradient_by_block", "stream_growth")
        for init in ("xavier", "native")
    }


def test_the_table_is_of_what_was_measured(text):
    command = parse_compare("init", [text, *SIZES])
    base = run_config(command)
    cells = [
        initial.Cell("pre", "xavier", depth, base.with_changes({"n_layers": depth}))
        for depth in (2, 3)
    ]
    corpus = read_text(base)
    found = initial.measure_all(cells, corpus, seeds=(5, 6), workers=1)
    twice = initial.measure_all(cells, corpus, seeds=(5, 6), workers=3)
    assert found == twice
    last = [start.last for start in found[cells[1]]]
    assert initial.values(found, "xavier", "last") == {
        "pre": {2: pytest.approx(geometric_mean(s.last for s in found[cells[0]])),
                3: pytest.approx(np.sqrt(last[0] * last[1]))},
    }  # fmt: skip


def test_blocks_that_begin_as_the_identity_add_and_amplify_nothing(text, tmp_path, capfd):
    words = [text, "--out", str(tmp_path / "out"), "--depths", "2", "4", "--inits", "identity"]
    assert initial.main(parse_compare("init", [*words, *SIZES, "--arms", "pre"])) == 0
    (row,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("pre ")]
    # arm, last gradient, slope, last / first, branch / skip, stream, noise, update
    numbers = row.split()
    assert (numbers[4], numbers[6]) == ("0", "-")
    assert float(numbers[1]) > 0
    assert numbers[7].startswith("x")


def test_an_init_or_depth_that_does_not_exist_is_refused(text):
    for words, needle in ((["--inits", "xavjer"], "xavier"), (["--depths", "0"], "n_layers")):
        with pytest.raises(UsageError, match=needle):
            initial.main(parse_compare("init", [text, *words]))
