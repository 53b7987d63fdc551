"""Where and how precisely a model is computed: device, threads, dtype, compilation."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from gpt.config import ComputeConfig, MachineConfig
from gpt.errors import UsageError
from gpt.model.gpt import GPT, evaluating


@dataclass(frozen=True)
class Machine:
    """A device, and the dtype of matrix products on it (parameters stay float32)."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which a loss is computed."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def environment(self) -> dict[str, Any]:
        """What must be equal for a resumed run to be exact."""
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def set_up(config: ComputeConfig) -> Machine:
    """Choose the device and dtype, set the threads. Raises UsageError for what is not there."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_flush_denormal(True)  # denormals slow long runs down and carry no information
    device = find_device(config.device)
    wanted = config.dtype if isinstance(config, MachineConfig) else "float32"
    if wanted == "auto":
        wide = device.type == "cuda" and torch.cuda.is_bf16_supported()
        wanted = "bfloat16" if wide else "float32"
    return Machine(device, {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted])


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
