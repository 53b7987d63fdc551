"""What sample.py does once its words are understood: a checkpoint and a prompt in, text out."""

import contextlib
import dataclasses
import errno
import os
import sys
import time
from pathlib import Path
from typing import TextIO

import torch

from gpt.errors import DiskError, UsageError
from gpt.exits import hear_interrupts, to_stderr
from gpt.model.gpt import GPT
from gpt.sampling.generate import generate
from gpt.sampling.options import FEW, SampleCommand, SampleCompute
from gpt.sampling.prompts import Prompt, from_argument, prepare
from gpt.sampling.stop import TextUntil
from gpt.text.printable import printable
from gpt.text.tokenizer import CharTokenizer
from gpt.training.checkpoint import load_checkpoint, restore
from gpt.training.machine import set_up


def write(command: SampleCommand, run: Path, prompt: str) -> None:
    """Continue the prompt with the model of a run folder or file, or converse when asked to."""
    machine = set_up(compute_of(command))
    checkpoint = load_checkpoint(run)
    model, tokenizer = restore(checkpoint)
    model.to(machine.device)
    for notice in checkpoint.notices:
        say(f"notice: {notice}")
    reached = f"step {checkpoint.step}"
    if checkpoint.best and checkpoint.best["step"] == checkpoint.step:
        reached += f", validation loss {checkpoint.best['loss']:.4f}"
    say(f"{checkpoint.path}: {reached}")
    writer = Writer(command, model, tokenizer, Output(sys.stdout, raw=command.output.raw))
    if command.output.interactive:
        writer.converse()
    else:
        writer.write(writer.prepare(prompt))


def compute_of(command: SampleCommand) -> SampleCompute:
    """The settings of the machine, with the number of threads decided where it is one."""
    if command.compute.threads or command.output.n_samples >= FEW:
        return command.compute
    return dataclasses.replace(command.compute, threads=1)


class Output:
    """A text stream that gets each piece at once, and the same bytes on every system.

    On a terminal every control character but newline and tab is made visible, unless ``raw``.
    Raises DiskError when the stream cannot be written, and lets BrokenPipeError pass.
    """

    def __init__(self, stream: TextIO | None, *, raw: bool = False) -> None:
        # Python has no stream at all where the shell closed it (>&-).
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if hasattr(self.stream, "reconfigure"):
            self.stream.reconfigure(newline="\n")  # Windows would write CR LF
        self.terminal = self.stream.isatty()
        self.visible = self.terminal and not raw
        self._last = "\n"

    def write(self, text: str) -> None:
        if not text:
            return
        self._last = text[-1]
        try:
            self.stream.write(printable(text) if self.visible else text)
            self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise DiskError(f"cannot write the text: {error.strerror}; free some space") from error

    def end_line(self) -> None:
        if self._last != "\n":
            self.write("\n")


class Writer:
    """Writes samples of one model, to one output, by one command."""

    def __init__(
        self, command: SampleCommand, model: GPT, tokenizer: CharTokenizer, output: Output
    ) -> None:
        self.command = command
        self.model, self.tokenizer, self.output = model, tokenizer, output
        self.stops = [from_argument(stop) for stop in command.output.stop]
        for stop in self.stops:
            if unknown := tokenizer.unknown(stop):
                say(f"notice: a stop text cannot come, unknown: {tokenizer.describe(unknown)}")

    def prepare(self, text: str) -> Prompt:
        """Encode a prompt and say what was done to it. Raises UsageError."""
        skip = self.command.output.unknown == "skip"
        prompt = prepare(text, self.tokenizer, skip_unknown=skip)
        for notice in prompt.notices:
            say(f"notice: {notice}")
        n, context = len(prompt.ids), self.model.config.context_length
        if n > context:
            say(f"notice: the prompt has {n} characters; the model reads the last {context}")
        return prompt

    def write(self, prompt: Prompt, turn: int = 0) -> None:
        """All samples of one prompt: the first as it is made, the others after it."""
        start = time.perf_counter()
        try:
            n_made = self._samples(prompt, turn)
        finally:
            if self.output.terminal or self.command.output.n_samples > 1:
                self.output.end_line()
        seconds = time.perf_counter() - start
        if sys.stderr is not None and sys.stderr.isatty():
            say(f"{n_made} characters in {seconds:.1f} s: {n_made / seconds:,.0f} a second")

    def converse(self) -> None:
        """Continue each line of standard input. Turn t adds t to the seed."""
        if sys.stdin is None:
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        at_terminal = self.output.terminal and sys.stdin.isatty()
        turn = 0
        while True:
            try:
                prompt = self.prepare(input("> " if at_terminal else ""))
            except EOFError:
                break
            except OSError as error:
                if error.errno != errno.EBADF:  # nohup leaves a standard input that has no reader
                    raise
                raise UsageError(
                    f"cannot read standard input: {error.strerror}; give it a terminal, a pipe or "
                    "a file, or a --prompt instead of --interactive"
                ) from error
            except UsageError as error:
                say(f"error: {error}")
                continue
            with contextlib.suppress(KeyboardInterrupt):
                self.write(prompt, turn)
            hear_interrupts()
            self.output.end_line()
            turn += 1
        if at_terminal:
            self.output.write("\n")

    def _samples(self, prompt: Prompt, turn: int) -> int:
        """Write the samples; return how many characters the model made."""
        wanted, n = self.command.output, self.command.output.n_samples
        sampling = dataclasses.replace(
            self.command.sampling, seed=(self.command.sampling.seed + turn) % 2**63
        )
        texts = [TextUntil(self.stops) for _ in range(n)]
        waiting = [[prompt.shown] for _ in range(n)]
        self._heading(0)
        self.output.write(prompt.shown)
        n_made = 0
        ids = torch.from_numpy(prompt.ids.astype("int64")).expand(n, -1)  # (T,) -> (n_samples, T)
        compute = self.command.compute
        settings = {
            **dataclasses.asdict(sampling), "native": compute.native, "dtype": compute.dtype
        }  # fmt: skip
        for step in generate(self.model, ids, wanted.n_chars, **settings):
            for row, character in enumerate(self.tokenizer.decode(step)):
                piece = texts[row].add(character)
                if row == 0:
                    self.output.write(piece)
                else:
                    waiting[row].append(piece)
            n_made += n
            if all(text.done for text in texts):
                break
        self.output.write(texts[0].end())
        for row in range(1, n):
            self._heading(row)
            self.output.write("".join(waiting[row]) + texts[row].end())
        return n_made

    def _heading(self, row: int) -> None:
        n = self.command.output.n_samples
        if n > 1:
            self.output.end_line()
            self.output.write(f"--- sample {row + 1} of {n} ---\n")


def say(text: str) -> None:
    """One line on standard error, where there is one."""
    if sys.stderr is not None:
        to_stderr(printable(text))
