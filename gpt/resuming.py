"""Where an interrupted run goes on, and what keeps it from being the unbroken one."""

from pathlib import Path

from gpt.config import RunConfig, changed, from_flat
from gpt.corpus import read_text
from gpt.errors import UsageError
from gpt.text.reading import Corpus
from gpt.training.checkpoint import Checkpoint, load_checkpoint
from gpt.training.machine import Machine, set_up


def resume_point(
    folder: Path, config: RunConfig, allow_data_change: bool
) -> tuple[Checkpoint, Corpus, list[str]]:
    """The newest usable checkpoint of a run, its text, and what is to be said about the two.

    The caller owns the folder. Raises CheckpointError or UsageError when the run cannot go on as
    this config asks.
    """
    # First: a thread of torch treats denormals as the thread that started it did at that moment,
    # and the checks of a checkpoint start threads.
    set_up(config.machine)
    checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True)
    notices = [*checkpoint.notices, f"resumed at step {checkpoint.step}"]
    if checkpoint.step == config.training.steps:
        notices.append(f"nothing is left to do; --steps {2 * checkpoint.step} would add as many")
    if config.training.steps < checkpoint.step:
        raise UsageError(
            f"steps = {config.training.steps}, but {checkpoint.step} are done already; give "
            f"--steps {checkpoint.step} or more"
        )
    for name, (old, new) in changed(from_flat(checkpoint.config), config).items():
        if hasattr(config.model, name) and name not in ("dropout", "attention_dropout"):
            raise UsageError(
                f"{name} = {new}, but the checkpoint was trained with {old}; a resumed run keeps "
                "its model, so drop the flag or start a new run"
            )
        if name == "optimizer":
            raise UsageError(
                f"optimizer = {new}, but the run began with {old}, whose memory means nothing to "
                "another; drop the flag or start a new run"
            )
        if name in ("val_fraction", "encoding", "keep_newlines"):
            raise UsageError(
                f"{name} = {new}, but the run began with {old}; a resumed run keeps its split, so "
                "drop the flag or start a new run"
            )
        if name != "text":
            notices.append(f"changed: {name} {old} -> {new}")
    corpus = read_text(config, checkpoint.vocabulary)
    then, now = checkpoint.source["sha256"], corpus.source.sha256
    if then != now and not allow_data_change:
        raise UsageError(
            f"the text has changed since the checkpoint: sha256 was {then[:16]}..., "
            f"is {now[:16]}...; restore it, or pass --allow_data_change"
        )
    if then != now:
        notices.append("the text has changed since the checkpoint (--allow_data_change)")
    return checkpoint, corpus, notices


def inexact(checkpoint: Checkpoint, machine: Machine) -> list[str]:
    """What differs from where the checkpoint was made, so that resuming is not bit for bit."""
    here = machine.environment()
    return [
        f"{name} was {checkpoint.environment.get(name) or 'off'}, is {here[name] or 'off'}: "
        "the run goes on, but not bit for bit as it would have"
        for name in here
        if checkpoint.environment.get(name) != here[name]
    ]
