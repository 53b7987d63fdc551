"""A training run and its folder, from a config to the last checkpoint.

config.toml      everything resolved         metrics.jsonl   the curves
samples.txt      text after each evaluation  events.*        the curves for TensorBoard
checkpoints/     the newest two and the best
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt.config import RunConfig, to_flat
from gpt.config_files import write_toml
from gpt.model.count import flops_per_character
from gpt.model.gpt import GPT
from gpt.runfolder import inexact, owner
from gpt.sampling.generate import generate
from gpt.text.reading import Corpus
from gpt.training import loop
from gpt.training.checkpoint import Checkpoint, restore_optimisers, save_checkpoint, sweep
from gpt.training.machine import compile_model, set_up
from gpt.training.metrics import Metrics
from gpt.training.optimisers import build_optimisers
from gpt.training.plan import caution, describe, peak_flops
from gpt.training.progress import Progress
from gpt.training.signals import StopSignals


@dataclass(frozen=True)
class Result:
    """How a run ended. Losses are in nats per character."""

    folder: Path
    steps: int
    val_loss: float | None
    best: dict[str, Any] | None
    signal: int


class Run:
    """Everything around the loop: it hears what happens and keeps it."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, checkpoint: Checkpoint | None = None
    ) -> None:
        self.config, self.corpus = config, corpus
        self.machine = set_up(config.machine)
        vocab_size = corpus.tokenizer.vocab_size
        self.model = GPT(config.model, vocab_size, config.training.seed)
        if checkpoint:
            self.model.load_state_dict(checkpoint.model)
        self.model.to(self.machine.device)
        self.optimisers = build_optimisers(self.model, config.training, self.machine.device)
        if checkpoint:
            restore_optimisers(checkpoint, self.optimisers)
        self.first_step: int = checkpoint.step if checkpoint else 0
        self.best: dict[str, Any] | None = checkpoint.best if checkpoint else None
        self.val_loss: float | None = None
        self.flops = 3 * flops_per_character(config.model, vocab_size)
        self.notices = inexact(checkpoint, self.machine) if checkpoint else []

    def go(self, folder: Path, notices: Sequence[str] = (), quiet: bool = False) -> Result:
        """Train to the last step, or until a signal. Raises what gpt.errors names."""
        self.folder = folder
        with owner(folder):
            sweep(folder / "checkpoints")
            (folder / "config.toml").write_text(write_toml(self.config), encoding="utf-8")
            training = self.config.training
            first_point = self.first_step + 1 if self.first_step else 0
            self.progress = Progress(training.steps, self.first_step, quiet)
            with Metrics(folder, first_point) as self.metrics, StopSignals() as self.signals:
                try:
                    self._introduce(notices)
                    done = loop.train(
                        self.model,
                        self.optimisers,
                        self.corpus.train,
                        self.corpus.val,
                        training,
                        self.machine.autocast,
                        self,
                        self.first_step,
                    )
                finally:
                    self.progress.close()
            return Result(folder, done, self.val_loss, self.best, self.signals.received)

    def _introduce(self, notices: Sequence[str]) -> None:
        self.peak = peak_flops(self.machine.device, self.machine.dtype)
        if self.config.machine.compile:
            compile_model(self.model)
        lines = describe(self.config, self.corpus, self.machine.environment())
        notices = [*self.corpus.notices, *notices, *self.notices, *caution(self.config)]
        for line in [*notices, *lines]:
            self.progress.say(line)
        self.metrics.text("config", write_toml(self.config), self.first_step)

    def logged(self, step: int, values: dict[str, float]) -> None:
        values["speed/mfu"] = values["speed/chars_per_second"] * self.flops / self.peak
        self.metrics.write(step, values)
        self.progress.logged(step, values)

    def evaluated(self, step: int, loss: float | None) -> None:
        self.val_loss = loss
        better = loss is not None and (self.best is None or loss < self.best["loss"])
        if better:
            self.best = {"step": step, "loss": loss}
        if loss is not None:
            self.metrics.write(step, {"loss/val": loss})
        self.progress.evaluated(step, loss, better)
        self._sample(step)
        self.metrics.flush()
        if step:
            self._save(step, better)

    def stopped(self, step: int) -> None:
        self.metrics.flush()
        self._save(step, False)

    def should_stop(self) -> bool:
        return self.signals.received != 0

    def _sample(self, step: int) -> None:
        length = self.config.training.sample_chars
        if not length:
            return
        tokenizer = self.corpus.tokenizer
        start = "\n" if "\n" in tokenizer.vocabulary else tokenizer.vocabulary[0]
        prompt = torch.from_numpy(tokenizer.encode(start).astype("int64"))[None]
        prompt = prompt.to(self.machine.device)
        seed = self.config.training.seed
        ids = [int(one) for one in generate(self.model, prompt, length, temperature=0.8, seed=seed)]
        text = tokenizer.decode(ids)
        self.progress.say("\n" + "\n".join("    " + line for line in text.split("\n")) + "\n")
        self.metrics.text("sample", text, step)
        with (self.folder / "samples.txt").open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"--- step {step} ---\n{text}\n")

    def _save(self, step: int, is_best: bool) -> None:
        state = {
            "config": to_flat(self.config.resolved()),
            "vocabulary": self.corpus.tokenizer.vocabulary,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": step,
            "best": self.best,
            "source": dataclasses.asdict(self.corpus.source),
            "environment": self.machine.environment(),
        }
        save_checkpoint(self.folder / "checkpoints", state, is_best=is_best)
