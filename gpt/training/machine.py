"""Where and how precisely a model is computed: device, threads, dtype, compilation."""

import contextlib
import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.config import ComputeConfig, MachineConfig
from gpt.errors import UsageError
from gpt.model.attention import MultiHeadAttention, causal_attention
from gpt.model.gpt import GPT, evaluating
from gpt.training import kernels


@dataclass(frozen=True)
class Machine:
    """A device, the dtype of matrix products on it (parameters stay float32), the C kernels."""

    device: torch.device
    dtype: torch.dtype
    native: str
    """The version of the C kernels, or nothing where they are not used."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which a loss is computed."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def prepared(self, model: GPT) -> GPT:
        """Move the model here, and let it compute by what is fastest here."""
        if self.device.type == "cpu" and self.dtype != torch.float32:
            for attention in (m for m in model.modules() if isinstance(m, MultiHeadAttention)):
                attention.attend = attention_in_float32
        model.to(self.device)
        if self.native and self.device.type == "cpu":
            kernels.install(model)
        return model

    def environment(self) -> dict[str, Any]:
        """What must be equal for a resumed run to be exact."""
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "native": self.native,
        }


def attention_in_float32(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """``causal_attention``, which the CPU computes slower in bfloat16 than in float32."""
    with torch.autocast(q.device.type, enabled=False):
        return causal_attention(q.float(), k.float(), v.float(), dropout)


def set_up(config: ComputeConfig) -> Machine:
    """Choose the device and dtype, set the threads. Raises UsageError for what is not there."""
    if config.threads:
        torch.set_num_threads(config.threads)
    keep_freed_memory()
    torch.set_flush_denormal(True)  # denormals slow long runs down and carry no information
    device = find_device(config.device)
    wanted = config.dtype if isinstance(config, MachineConfig) else "float32"
    if wanted == "auto":
        wanted = "bfloat16" if _has_fast_bfloat16(device) else "float32"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
    # The kernels are for training. torch.compile cannot look into them, and writes its own.
    trains = isinstance(config, MachineConfig) and not config.compile
    return Machine(device, dtype, kernels.version() if trains and config.native else "")


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, for the next step; return whether it listens.

    A step frees its large tensors and the next asks for as many. glibc gives them back to the
    system in between, and every page of them is then cleared anew: a tenth of the time of a step.
    """
    sizes = {-3: 32 * 2**20, -1: 2**31 - 1, -2: 64 * 2**20}  # M_MMAP_THRESHOLD, _TRIM_, M_TOP_PAD
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return all(mallopt(name, size) == 1 for name, size in sizes.items())


def _has_fast_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are in hardware (on a CPU with AVX-512 about twice as fast).

    Asked, not timed: two runs on one machine must not differ because it was busy for a moment.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def find_device(wanted: str) -> torch.device:
    """auto: the first of cuda, mps and cpu that works here. Raises UsageError if absent."""
    present = [name for name, there in (
        ("cuda", torch.cuda.is_available),
        ("mps", torch.backends.mps.is_available),
        ("cpu", lambda: True),
    ) if there()]  # fmt: skip
    if wanted == "auto":
        return torch.device(present[0])
    if wanted not in present:
        raise UsageError(f"device = {wanted} is not available here; choose {' or '.join(present)}")
    return torch.device(wanted)


def compile_model(
    model: GPT, compiler: Callable[[GPT], None] = lambda model: model.compile()
) -> str:
    """Compile the model in place, so that its state dict keeps its names.

    Returns why it did not work, or nothing. After a compiler that fails, or whose model computes
    something else, the model goes on uncompiled.
    """
    length = min(8, model.config.context_length)
    tokens = torch.arange(2 * length, device=model.device).reshape(2, length) % model.vocab_size
    reason = ""
    with evaluating(model):
        expected = model.forward(tokens)
        try:
            compiler(model)
            found = model(tokens)
            if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
                reason = f"its logits differ by {(found - expected).abs().max():.2g}"
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises, we can go on
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if reason:
        model._compiled_call_impl = None
    return reason
