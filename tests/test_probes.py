import contextlib
from typing import get_args

import numpy as np
import pytest
import torch
from helpers import small_config

from gpt.config import NormPosition, TrainingConfig
from gpt.lab.probes import Probes, measure, probe_batch
from gpt.model.gpt import GPT
from gpt.training import loop
from gpt.training.kernels import install
from gpt.training.optimisers import build_optimisers

VOCAB_SIZE = 11
IDS = np.random.default_rng(4).integers(0, VOCAB_SIZE, 900).astype(np.uint8)
PLACEMENTS = get_args(NormPosition)


def model_of(placement: str, **changes) -> GPT:
    changes = {"norm_position": placement, "init": "xavier", "n_layers": 3} | changes
    return GPT(small_config(**changes), VOCAB_SIZE, 5)


def by_hand(model: GPT, inputs: torch.Tensor) -> tuple[list[float], list[float]]:
    """rms of what each sublayer of a Pre-LN or Post-LN model adds, and of what it is added to."""
    post = model.config.norm_position == "post"
    branches, skips = [], []
    x = model.positions(model.token_embedding(inputs))
    for block in model.blocks:
        for norm, f in ((block.norm_1, block.attention), (block.norm_2, block.feedforward)):
            branch = f(x) if post else f(norm(x))
            branches.append(branch.square().mean().sqrt().item())
            skips.append(x.square().mean().sqrt().item())
            x = norm(x + branch) if post else x + branch
    return branches, skips


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_every_value_is_that_of_the_plain_computation(placement):
    model = model_of(placement)
    probes = Probes(model, IDS)
    first = probes.values()
    assert first["probe/dF"] == 0
    before = model(probes.inputs).log_softmax(-1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    values = probes.values()

    logits = model(probes.inputs)
    moved = (logits.log_softmax(-1) - before).square().mean().sqrt().item()
    p = logits.softmax(-1).reshape(-1, VOCAB_SIZE)
    expected = {
        "probe/dF": moved,
        "probe/pred_std": (p - p.mean(0)).square().mean(0).sqrt().mean().item(),
    }
    branches, skips = by_hand(model, probes.inputs)
    ratios = [b / s for b, s in zip(branches, skips, strict=True)]
    expected["probe/branch_over_skip"] = sum(sorted(ratios)[2:4]) / 2
    for i in range(6):
        expected[f"probe/branch_over_skip_{i:02}"] = ratios[i]
        expected[f"probe/stream_rms_{i:02}"] = skips[i]
    loop.loss_of(model, probes.inputs, probes.targets).backward()
    norms = [block.feedforward.W_out.weight.grad.norm().item() for block in model.blocks]
    for i in range(3):
        expected[f"probe/grad_W_out_{i:02}"] = norms[i]
    expected["probe/grad_first_over_last"] = norms[0] / norms[2]
    everything = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected["probe/grad_total"] = everything.norm().item()
    assert values == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_has_one_addition_a_sublayer(placement):
    model = model_of(placement)
    seen = measure(model, *probe_batch(IDS, model))
    assert len(seen.additions) == 6
    assert len(seen.output_gradients) == 3
    assert seen.norm_inputs
    assert all(one.skip > 0 and one.branch > 0 for one in seen.additions)


def test_the_batch_is_the_first_windows_of_the_text_in_order():
    model = model_of("pre")
    inputs, targets = probe_batch(IDS, model, characters=30)
    assert inputs.flatten().tolist() == IDS[:24].tolist()  # three windows of 8
    assert targets.flatten().tolist() == IDS[1:25].tolist()
    assert probe_batch(IDS, model, characters=5)[0].shape == (1, 8)


def test_the_kernels_of_the_machine_change_nothing_but_rounding():
    plain, fast = model_of("post"), model_of("post")
    install(fast)
    assert Probes(fast, IDS).values() == pytest.approx(Probes(plain, IDS).values(), rel=1e-4)


def test_a_training_with_probes_is_the_training_without():
    assert all(torch.equal(a, b) for a, b in zip(trained(0), trained(1), strict=True))


def trained(every: int) -> list[torch.Tensor]:
    """The weights after some steps with dropout, measured before every ``every``th step."""
    model = model_of("post", dropout=0.3)
    config = TrainingConfig(steps=7, batch_size=3, warmup_steps=2, eval_every=4, log_every=2)
    probes = Probes(model, IDS) if every else None

    class Observer:
        def before_step(self, step):
            if probes:
                probes.values()
                assert model.training
                assert all(p.grad is None for p in model.parameters())
            return True

        def logged(self, step, values):
            pass

        evaluated = failed = stopped = logged

    optimisers = build_optimisers(model, config, torch.device("cpu"))
    loop.train(model, optimisers, IDS, IDS[:60], config, contextlib.nullcontext, Observer())
    return [parameter.detach() for parameter in model.parameters()]


def test_gradients_that_were_there_stay_and_no_hook_does():
    model = model_of("pre", dropout=0.4)
    inputs, targets = probe_batch(IDS, model)
    loop.loss_of(model, inputs, targets).backward()
    before = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    Probes(model, IDS).values()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_tells_every_position_the_same_has_no_spread():
    model = model_of("pre")
    torch.nn.init.zeros_(model.final_norm.gamma)
    torch.nn.init.normal_(model.final_norm.beta)
    assert Probes(model, IDS).values()["probe/pred_std"] == pytest.approx(0, abs=1e-8)
