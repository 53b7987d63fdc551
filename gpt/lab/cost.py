"""What a comparison will cost, told before it starts: runs, characters, minutes."""

import time
from collections.abc import Sequence
from pathlib import Path

from gpt.config import RunConfig
from gpt.lab.progress import duration, tell
from gpt.lab.trials import PART, Trial, finished
from gpt.text.reading import Corpus

STARTING = 4.0
"""Seconds until a worker trains."""
NAMED = 4
"""Cached runs whose names are told."""
MEASURED = 5
"""Steps that are timed."""
CALM = 1e-9
"""Learning rate of those: whatever a run comes to, its estimate does not fail."""


def announce(trials: Sequence[Trial], corpus: Corpus, out: Path, workers: int) -> list[Trial]:
    """Tell on stderr what is to do, what is there already and about how long it takes.

    Returns what is to do. Raises UsageError for folders that hold other trials.
    """
    there: list[Trial] = []
    todo: list[Trial] = []
    for trial in trials:
        (there if finished(trial, corpus, out / trial.name) else todo).append(trial)
    if there:
        names = ", ".join(t.name for t in there[:NAMED])
        more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
        tell(f"{len(there)} of {len(trials)} runs are there already: {names}{more}")
    if todo:
        characters = sum(t.characters for t in todo)
        steps = sorted({t.config.training.steps for t in todo})
        span = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else "")
        busy = min(workers, len(todo))
        seconds = estimate(todo, corpus, busy)
        tell(
            f"{len(todo)} run{'s' * (len(todo) > 1)} of {span} steps, {characters:,} characters in "
            f"all, {busy} at once: about {duration(seconds)}, if the machine has nothing else to do"
        )
    return todo


def estimate(trials: Sequence[Trial], corpus: Corpus, workers: int) -> float:
    """Seconds that the trials take, from some steps of the largest; evaluations are counted.

    A character of an evaluation costs a third of one that is trained on.
    """
    from gpt.model.count import flops_per_character

    vocab_size = corpus.tokenizer.vocab_size

    def flops(trial: Trial) -> int:
        return flops_per_character(trial.config.model, vocab_size)

    largest = max(trials, key=flops)
    a_flop = seconds_per_character(largest.config, corpus) / flops(largest)
    work = 0.0
    for trial in trials:
        part = len(corpus.val) if trial.keeps_checkpoints else min(PART, len(corpus.val))
        looks = 1 + -(-trial.config.training.steps // trial.config.training.eval_every)
        evaluated = looks * part + (0 if trial.keeps_checkpoints else len(corpus.val))
        work += (trial.characters + evaluated / 3) * flops(trial) * a_flop
    return work / workers + (STARTING if workers > 1 else 0.0)


def seconds_per_character(config: RunConfig, corpus: Corpus) -> float:
    """Of training on one thread here: the fastest of a few steps."""
    from gpt.lab.light import one_thread
    from gpt.model.gpt import GPT
    from gpt.training import loop
    from gpt.training.machine import set_up
    from gpt.training.optimisers import build_optimisers

    config = one_thread(config)
    machine = set_up(config.machine)
    model = GPT(config.model, corpus.tokenizer.vocab_size, config.training.seed)
    machine.prepared(model)
    optimisers = build_optimisers(model, config.training, machine.device)
    clock = _Stopwatch()
    short = config.with_changes(
        {"steps": MEASURED, "log_every": 1000, "eval_every": 1000, "learning_rate": CALM}
    )
    loop.train(model, optimisers, corpus.train, corpus.val[:2], short.training,
               machine.autocast, clock)  # fmt: skip
    training = config.training
    windows = training.batch_size * training.grad_accumulation
    return clock.fastest() / (windows * config.model.context_length)


class _Stopwatch:
    """Hears what happens in the loop (``loop.Observer``), and remembers when."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def fastest(self) -> float:
        return min(b - a for a, b in zip(self.times, self.times[1:], strict=False))

    def before_step(self, step: int) -> bool:
        self.times.append(time.perf_counter())
        return True

    def logged(self, step: int, values: dict[str, float]) -> None: ...

    def evaluated(self, step: int, loss: float | None) -> None: ...

    def failed(self, step: int, values: dict[str, float]) -> None: ...

    def stopped(self, step: int) -> None: ...
