"""The settings of sampling: names, types, defaults, rules and help texts, in one place.

No torch in here: the command line is parsed and refused before torch is imported.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from gpt.checks import at_least, at_most, check_types
from gpt.config import ComputeConfig, Dtype
from gpt.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next character is chosen."""

    temperature: float = 0.8
    """Below 1 bolder on the likely, above 1 more even; 0 is greedy."""
    top_k: int = 0
    """Only the k most probable characters; 0 is off."""
    top_p: float = 1.0
    """Only the most probable characters, as few as reach this probability together; 1 is off."""
    min_p: float = 0.0
    """Only characters at least min_p times as probable as the most probable; 0 is off."""
    repetition_penalty: float = 1.0
    """Makes characters of the last context_length ones less probable; 1 is off, try 1.1."""
    seed: int = 0
    """Each sample draws from a stream of its own, keyed by (seed, number of the sample)."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.temperature < math.inf:
            raise UsageError(
                f"temperature = {self.temperature} is not a finite number of 0 or more; "
                "try 0.8, or 0 for greedy"
            )
        at_least("top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p = {self.top_p} is not in (0, 1]; try 0.9, or 1 to turn it off")
        if not 0 <= self.min_p <= 1:
            raise UsageError(
                f"min_p = {self.min_p} is not in [0, 1]; try 0.05, or 0 to turn it off"
            )
        if not 0 < self.repetition_penalty < math.inf:
            raise UsageError(
                f"repetition_penalty = {self.repetition_penalty} is not a finite number above 0; "
                "try 1.1, or 1 to turn it off"
            )

    @property
    def has_filters(self) -> bool:
        """Whether anything but the temperature changes the distribution."""
        return bool(self.top_k or self.top_p < 1 or self.min_p or self.repetition_penalty != 1)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is written, and from where it starts."""

    prompt: str = ""
    """Text to continue; it is written before its continuation (default: a new line, not shown)."""
    prompt_file: str = ""
    """UTF-8 file that holds the prompt, taken whole; - is standard input."""
    unknown: Literal["error", "skip"] = "error"
    """Prompt characters that the model has never seen: refuse them, or leave them out."""
    n_chars: int = 500
    """Characters to add in each sample."""
    n_samples: int = 1
    """Samples, made at once; with several, a line "--- sample k of n ---" precedes each."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End a sample before this text, which is not shown; give the flag again for more texts."""
    interactive: bool = False
    """Ask for prompts, line by line; Ctrl-C stops a sample, Ctrl-D ends."""
    raw: bool = False
    """Send control characters to a terminal as they are, not as \\x1b (pipes always get them)."""

    def __post_init__(self) -> None:
        at_least("n_chars", self.n_chars, 0)
        at_least("n_samples", self.n_samples, 1)
        at_most("n_samples", self.n_samples, 4096)
        if "" in self.stop:
            raise UsageError("an empty stop text would end every sample at once; leave --stop out")
        if self.prompt and self.prompt_file:
            raise UsageError("--prompt and --prompt_file exclude each other; give one")
        if self.interactive and (self.prompt or self.prompt_file):
            raise UsageError("--interactive asks for its prompts; leave the other prompt out")


@dataclass(frozen=True, kw_only=True)
class SampleCompute(ComputeConfig):
    """Where and from what it is computed."""

    threads: int = 0
    """CPU threads; 0 is one for a few samples, whose characters are little work, else all."""
    dtype: Dtype = "auto"
    """How the compiled kernels store matrices, as training in bfloat16 rounds them; arithmetic is
    in float32. auto is bfloat16 where the matrices take more than 8 MB in float32."""


FEW = 8
"""Samples that one thread writes as fast as several."""


@dataclass(frozen=True, kw_only=True)
class SampleCommand:
    """Write text with a trained model.

    The text goes to standard output as it is made, everything else to standard error. A file or a
    pipe gets exactly the prompt and what follows it; a terminal also gets a last line end.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = ""
    """Run folder (its best checkpoint is taken) or checkpoint file (default: the newest run)."""
    output: OutputConfig = field(default_factory=OutputConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    compute: SampleCompute = field(default_factory=SampleCompute)
