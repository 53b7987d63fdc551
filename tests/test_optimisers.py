"""AdamW and Muon against NumPy, and which parameters each of them moves."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import EVERY_VARIANT, VOCAB_SIZE, grid, random_tokens, small_config, small_model
from torch import nn

from gpt.config import TrainingConfig
from gpt.model.block import BLOCKS
from gpt.model.gpt import GPT
from gpt.model.norms import NORMS
from gpt.training import updates
from gpt.training.optimisers import build_optimisers, parameter_kinds, set_learning_rate

CPU = torch.device("cpu")
RATES = [1e-3, 3e-3, 2e-3, 1.5e-3, 4e-4]
SETTINGS = {"beta1": 0.8, "beta2": 0.97, "muon_momentum": 0.9, "weight_decay": 0.3}
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def decays(name: str) -> bool:
    """The rule of the state dict's names; the code under test goes by modules."""
    return name.endswith(".weight")


def is_matrix(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(".weight")


def orthogonal(update: np.ndarray, rounded=lambda x: x) -> np.ndarray:
    """Five quintic Newton-Schulz steps towards the nearest orthogonal matrix (Jordan 2024)."""
    a, b, c = NEWTON_SCHULZ
    tall = update.shape[0] > update.shape[1]
    x = rounded(update.T if tall else update)
    x = rounded(x / max(rounded(np.sqrt((x**2).sum())), 1e-7))
    for _ in range(5):
        gram = rounded(x @ x.T)
        x = rounded(a * x + rounded(b * gram + c * gram @ gram) @ x)
    return x.T if tall else x


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, as torch does; the arithmetic stays NumPy's."""
    return torch.as_tensor(x).bfloat16().double().numpy()


class AdamWTwin:
    """Loshchilov & Hutter 2019, algorithm 2, for one tensor."""

    def __init__(self, weight: np.ndarray) -> None:
        self.m, self.v, self.t = np.zeros_like(weight), np.zeros_like(weight), 0

    def step(self, weight, gradient, rate, decay):
        beta1, beta2 = SETTINGS["beta1"], SETTINGS["beta2"]
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        self.v = beta2 * self.v + (1 - beta2) * gradient**2
        m, v = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
        return weight * (1 - rate * decay) - rate * m / (np.sqrt(v) + 1e-8)


class MuonTwin:
    """Liu et al. 2025, algorithm 1 with Nesterov momentum, for one matrix."""

    def __init__(self, weight: np.ndarray, rounded) -> None:
        self.m, self.rounded = np.zeros_like(weight), rounded

    def step(self, weight, gradient, rate, decay):
        mu = SETTINGS["muon_momentum"]
        self.m = mu * self.m + (1 - mu) * gradient
        direction = orthogonal(mu * self.m + (1 - mu) * gradient, self.rounded)
        scale = 0.2 * np.sqrt(max(weight.shape))
        return weight * (1 - rate * decay) - rate * scale * direction


def largest_differences(optimizer: str, rounded=lambda x: x) -> list[float]:
    """Five updates of a small float64 model with real gradients, beside the twins.

    Returns, for each update, the largest difference of any weight. The twins start every update
    from the model's own weights, so a difference is that of one update.
    """
    model = small_model(seed=3, attention_bias=True, tie_embeddings=False)
    config = TrainingConfig(optimizer=optimizer, **SETTINGS)
    optimisers = build_optimisers(model, config, CPU)
    weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    twins = {
        name: MuonTwin(w, rounded) if optimizer == "muon" and is_matrix(name) else AdamWTwin(w)
        for name, w in weights.items()
    }
    differences = []
    for step, rate in enumerate(RATES):
        tokens = random_tokens(seed=step)
        model.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        set_learning_rate(optimisers, rate)
        for optimiser in optimisers:
            optimiser.step()
        largest = 0.0
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().sum() > 0, f"no gradient at {name}"
            decay = SETTINGS["weight_decay"] if decays(name) else 0.0
            expected = twins[name].step(weights[name], parameter.grad.numpy(), rate, decay)
            weights[name] = parameter.detach().numpy().copy()
            largest = max(largest, np.abs(weights[name] - expected).max())
        differences.append(largest)
    assert np.isfinite(differences).all()
    return differences


def test_five_adamw_updates_equal_numpy():
    assert max(largest_differences("adamw")) < 1e-10


def test_five_muon_updates_equal_numpy_but_for_the_precision_of_orthogonalisation(monkeypatch):
    """Muon orthogonalises in bfloat16; with that one function in float64, all the rest is exact:
    momentum, Nesterov's look ahead, decay, the scale, and AdamW for what is no matrix."""
    monkeypatch.setattr(
        updates,
        "orthogonal",
        lambda matrices: torch.stack([torch.from_numpy(orthogonal(m.numpy())) for m in matrices]),
    )
    assert max(largest_differences("muon")) < 1e-10


def test_muon_as_shipped_equals_numpy_rounded_to_bfloat16():
    """The same with the real orthogonalisation. NumPy rounds to bfloat16 after each product;
    torch sums in another order, so a last bit may differ and is then multiplied by later steps.
    An entry of the orthogonal matrix (at most about 1) was seen to differ by 0.006 at worst, over
    six seeds; without the rounding NumPy differs by 0.06 to 0.15.
    """
    scale = 0.2 * np.sqrt(24)  # of the largest matrix: 24 x 24
    per_rate = np.array(largest_differences("muon", to_bfloat16)) / RATES
    assert per_rate.max() < 0.02 * scale


@pytest.mark.parametrize("norm", ["layer", "dyt"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_without_gradient_matrices_and_tables_shrink_and_vectors_stay(optimizer, norm):
    model = small_model(attention_bias=True, tie_embeddings=False, norm=norm)
    config = TrainingConfig(optimizer=optimizer, learning_rate=0.02, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimiser in build_optimisers(model, config, CPU):
        optimiser.step()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, before[name]), name
        else:
            assert decays(name), name
            assert torch.allclose(parameter, before[name] * (1 - 0.02 * 0.1), rtol=1e-14), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_of_every_variant_is_moved_by_exactly_one_group(optimizer):
    variants = [
        *EVERY_VARIANT,
        *grid(norm=list(NORMS), norm_position=list(BLOCKS), tie_embeddings=[True, False]),
    ]
    for changes in variants:
        model = GPT(small_config(**changes), VOCAB_SIZE)
        names = {parameter: name for name, parameter in model.named_parameters()}
        optimisers = build_optimisers(model, TrainingConfig(optimizer=optimizer), CPU)
        moved = []
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                found = [names[p] for p in group["params"]]
                assert {decays(name) for name in found} == {group["weight_decay"] > 0}, changes
                if isinstance(optimiser, updates.Muon):
                    assert all(is_matrix(name) for name in found), changes
                elif optimizer == "muon":
                    assert not any(is_matrix(name) for name in found), changes
                moved += found
        assert sorted(moved) == sorted(names.values()), changes


def test_an_unknown_parameter_is_refused_by_name():
    model = small_model()
    model.blocks[1].gate = nn.Parameter(torch.zeros(3))
    with pytest.raises(AssertionError, match=r"blocks\.1\.gate"):
        parameter_kinds(model)


def test_a_parameter_that_two_rules_would_move_is_refused_by_name():
    model = small_model(tie_embeddings=False)
    model.head.weight = model.token_embedding.weight
    with pytest.raises(AssertionError, match=r"token_embedding\.weight"):
        parameter_kinds(model)


def test_one_rate_reaches_every_group_of_both_optimisers():
    optimisers = build_optimisers(small_model(), TrainingConfig(optimizer="muon"), CPU)
    set_learning_rate(optimisers, 0.0123)
    rates = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
    assert rates == [0.0123] * 3


def test_the_fused_kernel_is_used_where_it_exists_and_nowhere_else():
    for device, fused in (("cpu", True), ("cuda", True), ("mps", False)):
        (adamw,) = build_optimisers(small_model(), TrainingConfig(), torch.device(device))
        assert {group["fused"] for group in adamw.param_groups} == {fused}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_and_state_dicts_are_those_of_torch(optimizer):
    """Bit for bit, over several steps, with a state dict handed to the other half way."""
    shapes = [(12, 12), (30, 12), (12, 30), (12, 12), (7, 12)]
    torch.manual_seed(2)
    mine = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    if optimizer == "muon":
        settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3}
        rule = updates.Muon([{"params": mine}], **settings)
        oracle = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    else:
        settings = {"lr": 0.02, "betas": (0.8, 0.97), "eps": 1e-8, "weight_decay": 0.3}
        settings["fused"] = True
        rule = updates.AdamW([{"params": mine[:2]}, {"params": mine[2:]}], **settings)
        oracle = torch.optim.AdamW([{"params": theirs[:2]}, {"params": theirs[2:]}], **settings)
    for step in range(5):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        if step == 3:
            rule.load_state_dict(oracle.state_dict())
        rule.step()
        oracle.step()
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
    saved, expected = rule.state_dict(), oracle.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for number, memory in saved["state"].items():
        assert memory.keys() == expected["state"][number].keys()
        assert all(torch.equal(memory[name], expected["state"][number][name]) for name in memory)
    for group, other in zip(saved["param_groups"], expected["param_groups"], strict=True):
        assert group["params"] == other["params"]


def test_building_optimisers_does_not_import_the_compiler_of_torch():
    code = (
        "import sys, torch\n"
        "from gpt import GPT, ModelConfig\n"
        "from gpt.config import TrainingConfig\n"
        "from gpt.training.optimisers import build_optimisers\n"
        "model = GPT(ModelConfig(), 7)\n"
        "for optimizer in ('adamw', 'muon'):\n"
        "    rules = build_optimisers(model, TrainingConfig(optimizer=optimizer), model.device)\n"
        "    model(torch.arange(7)[None]).sum().backward()\n"
        "    [rule.step() for rule in rules]\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
