"""The two ways to train a trial: for its curves alone, or as a run that can be gone on with."""

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.config import RunConfig, changed, from_flat
from gpt.config_files import write_toml
from gpt.errors import DiskError, NonFiniteError, UsageError
from gpt.lab.fairness import hashes
from gpt.lab.outcomes import Outcome, state_of
from gpt.lab.trials import NO_DIFFERENCE, PART, Stopped, Trial
from gpt.lab.yardsticks import yardsticks
from gpt.model.gpt import GPT
from gpt.run import Run
from gpt.text.reading import Corpus
from gpt.training import loop
from gpt.training.atomic import disk_errors, sweep, write_atomically
from gpt.training.checkpoint import Checkpoint, load_checkpoint
from gpt.training.curves import read_metrics
from gpt.training.machine import compile_model, set_up
from gpt.training.metrics import Metrics
from gpt.training.optimisers import build_optimisers

if TYPE_CHECKING:
    from gpt.lab.probes import Probes


def train_light(trial: Trial, corpus: Corpus, folder: Path, stop: Callable[[], int]) -> Outcome:
    """From the first step to the last; what an earlier attempt left is removed first."""
    started = time.perf_counter()
    config = one_thread(trial.config)
    remove_attempt(folder)
    settings = write_toml(config).encode()
    write_atomically(folder / "config.toml", lambda file: file.write(settings))
    machine = set_up(config.machine)
    model = GPT(config.model, corpus.tokenizer.vocab_size, trial.seed)
    must_agree = hashes(config, model, corpus, machine.environment())
    machine.prepared(model)
    if config.machine.compile:
        compile_model(model)
    optimisers = build_optimisers(model, config.training, machine.device)
    probes = None
    if trial.probe_steps:
        from gpt.lab.probes import Probes

        probes = Probes(model, corpus.val)
    failure = ""
    with Metrics(folder) as metrics:
        watcher = Watcher(trial, metrics, probes, stop)
        try:
            loop.train(model, optimisers, corpus.train, corpus.val[:PART], config.training,
                       machine.autocast, watcher)  # fmt: skip
            if watcher.signal:
                raise Stopped(watcher.signal)
            if probes:
                metrics.write(config.training.steps, probes.values())
            watcher.final = (
                loop.evaluate(model, corpus.val, machine.autocast)
                if len(corpus.val) > PART
                else watcher.losses[-1]
            )
            metrics.write(config.training.steps, {"loss/val_whole": watcher.final})
        except NonFiniteError as error:
            failure = cause(error)
        metrics.flush()
        refuse_lost_curves(metrics.failed)
    return _outcome(
        trial, corpus, model, watcher.losses, watcher.final, watcher.done, failure, must_agree,
        time.perf_counter() - started,
    )  # fmt: skip


class Watcher:
    """Hears what happens in the loop (``loop.Observer``), and writes the curves."""

    def __init__(
        self, trial: Trial, metrics: Metrics, probes: "Probes | None", stop: Callable[[], int]
    ) -> None:
        self.metrics, self.probes, self.stop = metrics, probes, stop
        self.probe_steps = frozenset(trial.probe_steps)
        self.losses: list[float] = []
        self.final: float | None = None
        self.done = 0
        self.signal = 0

    def logged(self, step: int, values: dict[str, float]) -> None:
        self.metrics.write(step, values)

    def evaluated(self, step: int, loss: float | None) -> None:
        assert loss is not None, "a comparison has a validation split"
        self.losses.append(loss)
        self.done = step
        self.metrics.write(step, {"loss/val": loss})
        self.metrics.flush()

    def failed(self, step: int, values: dict[str, float]) -> None:
        self.done = max(0, step - 1) if "loss/train" in values else step
        self.metrics.write(step, values)

    def before_step(self, step: int) -> bool:
        self.done = step
        refuse_lost_curves(self.metrics.failed)
        if self.probes and step in self.probe_steps:
            self.metrics.write(step, self.probes.values())
        self.signal = self.stop()
        return not self.signal

    def stopped(self, step: int) -> None:
        """Nothing of a part of a trial is kept."""


def train_kept(trial: Trial, corpus: Corpus, folder: Path, stop: Callable[[], int]) -> Outcome:
    """A whole run, with checkpoints and samples, from its newest checkpoint where it has one."""
    started = time.perf_counter()
    config = one_thread(trial.config)
    set_up(config.machine)  # before a checkpoint is checked, as in gpt.resuming
    there = any(folder.glob("checkpoints/*.pt"))
    checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True) if there else None
    if checkpoint:
        refuse_other_run(checkpoint, config, corpus, folder)
    fresh = GPT(config.model, corpus.tokenizer.vocab_size, trial.seed)
    run = Run(config, corpus, checkpoint)
    must_agree = hashes(config, fresh, corpus, run.machine.environment())
    failure = ""
    final: float | None = None
    done = config.training.steps
    try:
        result = run.go(folder, quiet=True)
        if result.steps < done:
            raise Stopped(result.signal or stop())
        refuse_lost_curves(result.unlogged)
        final = result.val_loss
        if final is None:  # it had been stopped after its last step
            final = loop.evaluate(run.model, corpus.val, run.machine.autocast)
    except NonFiniteError as error:
        failure = cause(error)
    curves = read_metrics(folder)
    losses = [loss for _, loss in curves.get("loss/val", []) if math.isfinite(loss)]
    if failure:
        number = re.match(r"step (\d+): (validation)?", failure)
        assert number, failure
        done = int(number[1]) - (not number[2])  # an update that would spoil is not made
    return _outcome(
        trial, corpus, fresh, losses, final, done, failure, must_agree,
        time.perf_counter() - started,
    )  # fmt: skip


def refuse_other_run(
    checkpoint: Checkpoint, config: RunConfig, corpus: Corpus, folder: Path
) -> None:
    """Raise UsageError for a checkpoint that is not of this trial, or was trained on otherwise."""
    differs = changed(from_flat(checkpoint.config), config).keys() - set(NO_DIFFERENCE)
    if checkpoint.source["sha256"] != corpus.source.sha256:
        differs |= {"text"}
    if differs:
        raise UsageError(
            f"{str(folder)!r} holds a run with another {', '.join(sorted(differs))}; choose "
            "another --out, or move that folder away"
        )


def cause(error: NonFiniteError) -> str:
    """What was not finite, without the advice."""
    return re.split(r", learning rate|;", str(error))[0]


def one_thread(config: RunConfig) -> RunConfig:
    """So that results do not depend on how many trials train at once."""
    return config.with_changes({"threads": 1})


def refuse_lost_curves(reason: str) -> None:
    """Raise DiskError where curves could not be written: a trial without them is not finished."""
    if reason:
        raise DiskError(f"the curves cannot be written ({reason}); make room, and go on")


def remove_attempt(folder: Path) -> None:
    """Remove what an unfinished attempt wrote, and nothing else. Raises DiskError."""
    sweep(folder)
    names = [folder / "metrics.jsonl", *folder.glob("events.out.tfevents.*")]
    with disk_errors(folder, 0):
        for path in names:
            path.unlink(missing_ok=True)


def _outcome(
    trial: Trial, corpus: Corpus, model: GPT, losses: list[float], final: float | None, steps: int,
    failure: str, must_agree: dict[str, str], seconds: float,
) -> Outcome:  # fmt: skip
    warmup_steps = trial.config.training.resolved().warmup_steps
    assert warmup_steps is not None
    if final is not None and not math.isfinite(final):
        failure, final = f"step {steps}: validation loss = {final}", None
    unigram, _ = yardsticks(corpus)
    best = min(losses, default=None)
    first = losses[0] if losses else math.log(corpus.tokenizer.vocab_size)
    windows = steps * trial.config.training.batch_size * trial.config.training.grad_accumulation
    return Outcome(
        arm=trial.arm,
        seed=trial.seed,
        state=state_of(final, first, unigram, steps, warmup_steps),
        first=first,
        final=final,
        best=best,
        steps=steps,
        characters=windows * trial.config.model.context_length,
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=seconds,
        failure=failure,
        hashes=must_agree,
    )
