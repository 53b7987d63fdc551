"""From what the user gives to what the model reads: files, encodings, unknown characters."""

import os
from dataclasses import dataclass

import numpy as np

from gpt.errors import UsageError
from gpt.sampling.options import OutputConfig
from gpt.text.opening import open_text
from gpt.text.tokenizer import CharTokenizer


@dataclass(frozen=True)
class Prompt:
    """What is shown before the continuation, what the model reads ``(T,)``, and what to say."""

    shown: str
    ids: np.ndarray
    notices: tuple[str, ...] = ()


def read_prompt(output: OutputConfig) -> str:
    """The text of --prompt or --prompt_file, or an empty string. Raises UsageError."""
    name = output.prompt_file
    if not name:
        return from_argument(output.prompt)
    try:
        with open_text(name) as file:
            data = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the prompt file {name!r}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt file {name!r} is not UTF-8: byte 0x{data[error.start]:02x} at offset "
            f"{error.start}; convert it"
        ) from error


def prepare(text: str, tokenizer: CharTokenizer, *, skip_unknown: bool) -> Prompt:
    """Encode a prompt; an empty one starts at a new line, or at the first known character.

    That start is read by the model but not shown: it is not part of the text. Line ends become LF
    as in training, unless the model learned CR. Raises UsageError that names each unknown
    character, unless they are to be skipped.
    """
    notices = []
    if "\r" not in tokenizer.vocabulary:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    unknown = tokenizer.unknown(text) if skip_unknown else []
    if unknown:
        notices.append(f"left out of the prompt, unknown: {tokenizer.describe(unknown)}")
        text = text.translate({ord(c): None for c in unknown})
    start = "\n" if "\n" in tokenizer.vocabulary else tokenizer.vocabulary[0]
    return Prompt(text, tokenizer.encode(text or start), tuple(notices))


def from_argument(text: str) -> str:
    """UTF-8 text of the command line, also where the locale made Python read it as ASCII."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return os.fsencode(text).decode("utf-8", "surrogateescape")
    return text
