import platform

import pytest
import torch
from helpers import VOCAB_SIZE, random_tokens, small_config

from gpt.config import MachineConfig, ModelConfig
from gpt.errors import UsageError
from gpt.model.gpt import GPT
from gpt.training.machine import (
    attention_in_float32,
    compile_model,
    find_device,
    keep_freed_memory,
    set_up,
)

MODEL = ModelConfig(d_model=12, n_heads=3, n_layers=2, context_length=8)


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu_is_bfloat16_where_it_is_in_hardware(monkeypatch, fast, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    machine = set_up(MachineConfig())
    assert machine.device.type == "cpu"
    assert machine.dtype == dtype


def test_in_bfloat16_attention_stays_in_float32_on_a_cpu_and_weights_everywhere():
    machine = set_up(MachineConfig(device="cpu", dtype="bfloat16", native=False))
    model = machine.prepared(GPT(small_config(), VOCAB_SIZE))
    seen = []
    for block in model.blocks:
        attend = block.attention.attend
        assert attend is attention_in_float32
        block.attention.attend = lambda *args, attend=attend: seen.append(attend(*args)) or seen[-1]
    with machine.autocast():
        logits = model(random_tokens())
    assert [heads.dtype for heads in seen] == [torch.float32] * len(model.blocks)
    logits.float().sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    exact = set_up(MachineConfig(device="cpu", dtype="float32"))
    plain = exact.prepared(GPT(small_config(), VOCAB_SIZE))(random_tokens())
    assert 0 < (logits.float() - plain).abs().max() < 0.02 * plain.abs().max()


def test_an_absent_device_is_refused_with_those_present(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"device = cuda is not available here; choose cpu"):
        find_device("cuda")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
def test_memory_that_is_freed_is_kept_for_the_next_step():
    resource = pytest.importorskip("resource")
    assert keep_freed_memory()
    held = []
    for _ in range(2):
        tensor = torch.ones(6_000_000)  # 24 MB
        del tensor
        held.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    torch.ones(6_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - held[-1] < 1000  # of 5,900 pages


def test_threads_are_set_and_recorded():
    before = torch.get_num_threads()
    try:
        assert set_up(MachineConfig(threads=1)).environment()["threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_bfloat16_computes_products_in_it_and_keeps_parameters_in_float32():
    machine = set_up(MachineConfig(device="cpu", dtype="bfloat16", native=False))
    model = GPT(MODEL, 7)
    with machine.autocast():
        logits = model(torch.arange(5)[None])
    assert logits.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_compiler_that_computes_something_else_is_refused():
    model = GPT(MODEL, 7)
    expected = model(torch.arange(5)[None])

    def wrong(model):
        model._compiled_call_impl = lambda tokens: model.forward(tokens) + 1.0

    assert "its logits differ by 1" in compile_model(model, wrong)
    assert torch.equal(model(torch.arange(5)[None]), expected)
    assert model.training


def test_a_compiler_that_fails_is_answered_with_one_warning():
    model = GPT(MODEL, 7)

    def failing(_model):
        raise RuntimeError("no C++ compiler\nand a long trace")

    assert compile_model(model, failing) == "no C++ compiler"
    model(torch.arange(5)[None])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_keeps_its_state_dict_names():
    model = GPT(MODEL, 7)
    names = list(model.state_dict())
    assert compile_model(model) == ""
    assert list(model.state_dict()) == names
