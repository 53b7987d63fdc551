"""Many trials, over processes: cached ones at once, the rest as they end.

Each process trains one trial after the other on one thread, so what comes out does not depend on
how many there are. The parent hears signals and the workers do not: it ends them by their own
handles. A worker that finds its parent gone ends by itself.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gpt import errors
from gpt.errors import FolderInUseError, UsageError
from gpt.lab.curves import curves_of
from gpt.lab.outcomes import Outcome
from gpt.lab.progress import Progress
from gpt.lab.trials import Stopped, Trial, finished, run_trial
from gpt.runfolder import owner, refuse_link
from gpt.text.reading import Corpus
from gpt.training.atomic import make_folder
from gpt.training.signals import Signals

LOOK = 0.2
"""Seconds between two looks for a signal."""
SAVING = 60.0
"""Seconds that a run gets to save after it was asked to stop."""
HANDING_OVER = 10.0
"""Seconds that a folder may stay locked by a worker whose parent was killed."""


def run_trials(
    trials: Sequence[Trial], corpus: Corpus, out: Path, workers: int = 2
) -> Iterator[Outcome]:
    """Every trial in ``out / trial.name``: finished ones first, then the others as they end.

    ``workers`` is how many train at once; with 1 they train in this process. Progress goes to
    stderr. Raises Stopped after SIGINT, SIGTERM or SIGHUP: finished outcomes stay, runs that keep
    checkpoints have saved. Raises UsageError for two trials of one name, for folders that hold
    others, that are links or that have lost their curves, and for a worker that died,
    FolderInUseError while another comparison is in ``out``.
    """
    _refuse_repeated(trials)
    with owner(out):
        for trial in trials:
            refuse_link(out / trial.name)
        cached = {trial.name: finished(trial, corpus, out / trial.name) for trial in trials}
        there = [outcome for outcome in cached.values() if outcome]
        for outcome in there:
            curves_of(out, outcome)
        yield from there
        todo = [trial for trial in trials if not cached[trial.name]]
        if not todo:
            return
        with Signals() as signals, Progress(len(todo)) as progress:
            ended = (
                _here(todo, corpus, out, signals)
                if workers == 1
                else _in_processes(todo, corpus, out, min(workers, len(todo)), signals)
            )
            for outcome in ended:
                progress.ended(outcome)
                yield outcome


def _refuse_repeated(trials: Sequence[Trial]) -> None:
    names = [trial.name for trial in trials]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two trials are called {name!r}; give the arms different names")


def _here(todo: list[Trial], corpus: Corpus, out: Path, signals: Signals) -> Iterator[Outcome]:
    for trial in todo:
        try:
            if signals.stop:
                raise Stopped(signals.stop)
            yield _train(trial, corpus, out, lambda: signals.stop)
        except Stopped as stopped:
            raise Stopped(stopped.signal, out) from None


def _train(trial: Trial, corpus: Corpus, out: Path, stop: Any = lambda: 0) -> Outcome:
    folder = out / trial.name
    make_folder(folder)
    end = time.monotonic() + HANDING_OVER
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(owner(folder))
            except FolderInUseError:
                if time.monotonic() > end:
                    raise
                time.sleep(LOOK)
                continue
            return run_trial(trial, corpus, folder, stop)


FROM_TERMINALS = [getattr(signal, n) for n in ("SIGINT", "SIGHUP") if hasattr(signal, n)]
"""A terminal sends these to all processes; the parent decides what they mean."""


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """A process that begins inside gets no signal of a terminal until it asks for them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A process, what it trains now, and the pipe to it."""

    def __init__(self, corpus: Corpus, out: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, corpus, out), daemon=True)
        with _held_back():
            self.process.start()
        theirs.close()
        self.trial: Trial | None = None

    def give(self, trial: Trial) -> None:
        self.trial = trial
        with contextlib.suppress(OSError):  # it died; whoever waits for the answer hears of it
            self.pipe.send(trial)

    def answer(self) -> Any:
        """What it sent. Raises UsageError where it died."""
        assert self.trial
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(SAVING)
            code = self.process.exitcode
            how = f"was killed by signal {-code}" if code and code < 0 else f"ended with {code}"
            raise UsageError(
                f"the process that trained {self.trial.name} {how}, perhaps for want of memory; "
                "what was finished is kept. Go on with the same --out, and fewer --workers"
            ) from None

    def ask_to_stop(self) -> None:
        """A run with checkpoints saves first; anything else ends at once."""
        if self.trial and self.trial.keeps_checkpoints:
            self.process.terminate()
        else:
            self.process.kill()
        self.pipe.close()  # a run that ended just now does not wait for another

    def end(self, deadline: float) -> None:
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _in_processes(
    todo: list[Trial], corpus: Corpus, out: Path, workers: int, signals: Signals
) -> Iterator[Outcome]:
    waiting = deque(todo)
    started: list[_Worker] = []
    try:
        for _ in range(workers):
            started.append(_Worker(corpus, out))
            started[-1].give(waiting.popleft())
        while busy := {worker.pipe: worker for worker in started if worker.trial}:
            ready = wait(list(busy), timeout=LOOK)
            if signals.stop:
                raise Stopped(signals.stop, out)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = busy[pipe]
                outcome = _outcome_of(worker)
                worker.trial = None
                if waiting:
                    worker.give(waiting.popleft())
                yield outcome
    finally:
        for worker in started:
            worker.ask_to_stop()
        deadline = time.monotonic() + SAVING
        for worker in started:
            worker.end(deadline)


def _outcome_of(worker: _Worker) -> Outcome:
    kind, value = worker.answer()
    if kind == "outcome":
        return Outcome.from_json(value)
    assert worker.trial
    if kind == "MemoryError":
        raise MemoryError(value)
    error = getattr(errors, kind, None)
    if error:
        raise error(f"{worker.trial.name}: {value}")
    raise RuntimeError(f"{worker.trial.name}: {value}")


def _work(pipe: Connection, corpus: Corpus, out: Path) -> None:
    """What a worker does: trials from the pipe, outcomes into it, until the parent is gone."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for number in FROM_TERMINALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_TERMINALS)
    parent = multiprocessing.parent_process()
    assert parent
    keeps = threading.Event()
    threading.Thread(target=_mourn, args=(parent.sentinel, keeps), daemon=True).start()
    while True:
        try:
            trial = pipe.recv()
        except (EOFError, OSError):
            return
        keeps.set() if trial.keeps_checkpoints else keeps.clear()
        try:
            answer = ("outcome", _train(trial, corpus, out).to_json())
        except Stopped:
            return
        except UsageError as error:
            answer = (type(error).__name__, str(error))
        except MemoryError as error:
            answer = ("MemoryError", str(error))
        except Exception:  # noqa: BLE001 - a bug here is told where it can be seen
            answer = ("bug", traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return


def _mourn(sentinel: int, keeps: threading.Event) -> None:
    """Wait for the parent's end, and follow it; a run with checkpoints may save first."""
    wait([sentinel])
    if keeps.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SAVING)
    os._exit(1)
