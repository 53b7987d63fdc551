"""A training run in its folder, from a config to the last checkpoint.

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
from gpt.errors import DiskError
from gpt.model.gpt import GPT
from gpt.native.library import why_not
from gpt.resuming import inexact
from gpt.sampling.generate import generate
from gpt.sampling.prompts import prepare
from gpt.text.reading import Corpus
from gpt.training import loop
from gpt.training.atomic import sweep, sync_name, write_atomically
from gpt.training.checkpoint import (
    Checkpoint,
    name_best_again,
    restore_optimisers,
    save_checkpoint,
)
from gpt.training.machine import compile_model, set_up
from gpt.training.metrics import Metrics
from gpt.training.optimisers import build_optimisers
from gpt.training.plan import (
    caution,
    check_disk,
    check_memory,
    describe,
    peak_flops,
    training_flops,
)
from gpt.training.progress import Progress, warn
from gpt.training.signals import Signals

MOST_FAILED_SAVES = 3
"""In a row; then the run ends, because more work would only be lost."""


@dataclass(frozen=True)
class Result:
    """How a run ended: updates done, losses in nats per character, the signal that ended it.

    ``unlogged`` says why the curves are not complete, if they are not.
    """

    steps: int
    val_loss: float | None
    best: dict[str, Any] | None
    signal: int
    unlogged: str


class Run:
    """A model, its optimisers and the machine they are on, ready to be trained."""

    def __init__(
        self, config: RunConfig, corpus: Corpus, checkpoint: Checkpoint | None = None
    ) -> None:
        self.config, self.corpus, self.checkpoint = config, corpus, checkpoint
        self.machine = set_up(config.machine)
        if self.machine.device.type == "cpu":
            check_memory(config, corpus.tokenizer.vocab_size)
        self.model = GPT(config.model, corpus.tokenizer.vocab_size, config.training.seed)
        if checkpoint:
            self.model.load_state_dict(checkpoint.model)
        self.machine.prepared(self.model)
        self.optimisers = build_optimisers(self.model, config.training, self.machine.device)
        if checkpoint:
            restore_optimisers(checkpoint, self.optimisers)
        self.first_step = checkpoint.step if checkpoint else 0
        self.best = checkpoint.best if checkpoint else None
        self.notices = [*corpus.notices, *caution(config)]
        self.notices += inexact(checkpoint, self.machine) if checkpoint else []

    def go(self, folder: Path, notices: Sequence[str] = (), quiet: bool = False) -> Result:
        """Train to the last step, or until a signal. The caller owns the folder.

        Raises what gpt.errors names.
        """
        with Signals() as signals:
            for place in (folder, folder / "checkpoints"):
                sweep(place)
            check_disk(folder, self.config, self.corpus.tokenizer.vocab_size)
            self.write_settings(folder)
            sync_name(folder)
            if self.checkpoint:
                name_best_again(self.checkpoint)
            first_point = self.first_step + 1 if self.first_step else 0
            progress = Progress(self.config.training.steps, self.first_step, quiet)
            with Metrics(folder, first_point) as metrics, progress:
                keeper = Keeper(self, folder, metrics, progress, signals)
                if not self.checkpoint:
                    keeper.save(0)
                metrics.text("config", write_toml(self.config), self.first_step)
                self._introduce(progress, notices)
                done = loop.train(
                    self.model,
                    self.optimisers,
                    self.corpus.train,
                    self.corpus.val,
                    self.config.training,
                    self.machine.autocast,
                    keeper,
                    self.first_step,
                )
        return Result(done, keeper.val_loss, self.best, signals.stop, metrics.failed)

    def _introduce(self, progress: Progress, notices: Sequence[str]) -> None:
        for notice in [*notices, *self.notices]:
            progress.say(notice)
        if self.config.machine.compile and (reason := compile_model(self.model)):
            progress.say(
                f"--compile does not work here ({reason}); going on without, and without C kernels"
            )
        wanted = self.config.machine.native and not self.config.machine.compile
        if wanted and self.machine.device.type == "cpu" and not self.machine.native:
            reason = why_not("train")
            progress.say(f"kernels   none in C: {reason}; torch computes the same, slower")
        for line in describe(self.config, self.corpus, self.machine.environment()):
            progress.say(line)

    def write_settings(self, folder: Path) -> None:
        """Write config.toml. Raises DiskError."""
        settings = write_toml(self.config).encode()
        write_atomically(folder / "config.toml", lambda file: file.write(settings))


class Keeper:
    """Hears what happens in the loop (``loop.Observer``), and keeps it in the run's folder."""

    def __init__(
        self, run: Run, folder: Path, metrics: Metrics, progress: Progress, signals: Signals
    ) -> None:
        self.run, self.folder = run, folder
        self.metrics, self.progress, self.signals = metrics, progress, signals
        self.val_loss: float | None = None
        self.failed_saves = 0
        self.saved_step = run.first_step if run.checkpoint else -1
        config, vocab_size = run.config, run.corpus.tokenizer.vocab_size
        step = config.training.batch_size * config.training.grad_accumulation
        self.flops = training_flops(config, vocab_size) / (step * config.model.context_length)
        self.peak = peak_flops(run.machine.device, run.machine.dtype)

    def logged(self, step: int, values: dict[str, float]) -> None:
        values["speed/mfu"] = values["speed/chars_per_second"] * self.flops / self.peak
        self.metrics.write(step, values)
        self.progress.logged(step, values)

    def evaluated(self, step: int, loss: float | None) -> None:
        self.val_loss, before = loss, self.run.best
        better = step > 0 and loss is not None and (before is None or loss < before["loss"])
        if loss is not None:
            self.metrics.write(step, {"loss/val": loss})
        self.progress.evaluated(step, loss, better)
        if self.run.config.training.sample_chars:
            self._sample(step)
        if step:
            best = {"step": step, "loss": loss} if better else None
            self.save(step, best, last=step == self.run.config.training.steps)
        else:
            self.metrics.flush()

    def failed(self, step: int, values: dict[str, float]) -> None:
        self.metrics.write(step, values)

    def before_step(self, step: int) -> bool:
        if self.signals.save:
            self.signals.save = False
            if self.save(step):
                self.progress.say(f"saved at step {step}, as a signal asked")
        return not self.signals.stop

    def stopped(self, step: int) -> None:
        self.progress.say(f"stopping after step {step}; saving")
        if self.saved_step != step:
            self.save(step, last=True)

    def _sample(self, step: int) -> None:
        training, tokenizer = self.run.config.training, self.run.corpus.tokenizer
        start = torch.from_numpy(prepare("", tokenizer, skip_unknown=False).ids.astype("int64"))
        native = self.run.config.machine.native
        ids = generate(
            self.run.model, start[None], training.sample_chars, seed=training.seed, native=native
        )
        text = tokenizer.decode([int(one) for one in ids])
        self.progress.say("\n" + "\n".join("    " + line for line in text.split("\n")) + "\n")
        self.metrics.sample(text, step)

    def save(
        self, step: int, new_best: dict[str, Any] | None = None, *, last: bool = False
    ) -> bool:
        """Save a checkpoint, the best of the run if ``new_best`` is given; return whether it was.

        A disk that refuses is a warning, and the next save tries again. Raises DiskError where
        this is the ``last`` one, or too many have failed in a row.
        """
        self.metrics.flush()  # first: a resumed run begins its curves where the checkpoint is
        try:
            self._save(step, new_best)
        except DiskError as error:
            self.failed_saves += 1
            if last or self.failed_saves == MOST_FAILED_SAVES:
                raise
            warn(f"{error}. Training goes on, and the next save tries again")
            return False
        self.failed_saves = 0
        self.saved_step = step
        return True

    def _save(self, step: int, new_best: dict[str, Any] | None) -> None:
        run = self.run
        state = {
            "config": to_flat(run.config.resolved()),
            "vocabulary": run.corpus.tokenizer.vocabulary,
            "model": run.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in run.optimisers],
            "step": step,
            "best": new_best or run.best,
            "source": dataclasses.asdict(run.corpus.source),
            "environment": run.machine.environment(),
        }
        save_checkpoint(self.folder / "checkpoints", state, is_best=new_best is not None)
        run.best = new_best or run.best
        if not (self.folder / "config.toml").exists():  # somebody deleted the folder
            run.write_settings(self.folder)
