"""The text that a config names. Needs no torch, so that unusable data is answered at once."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from gpt.config import RunConfig
from gpt.errors import UsageError
from gpt.text.reading import Corpus, read_corpus

_RECIPE = Path(__file__).parents[1] / "data" / "prepare.py"


def read_text(config: RunConfig, vocabulary: str | None = None) -> Corpus:
    """The corpus that the config names, encoded and split."""
    text = config.text
    return read_corpus(
        text.text or default_text(),
        context_length=config.model.context_length,
        val_fraction=text.val_fraction,
        encoding=text.encoding,
        keep_newlines=text.keep_newlines,
        vocabulary=vocabulary,
        progress=_bar,
    )


def default_text() -> str:
    """The path of the default corpus, prepared by ``data/prepare.py`` where it is missing.

    Raises UsageError when it cannot be prepared.
    """
    spec = importlib.util.spec_from_file_location("prepare_default_text", _RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(recipe)
    except FileNotFoundError:
        raise UsageError(
            f"there is no default text: its recipe {_RECIPE} is missing; pass a text file of "
            "your own: python train.py my.txt"
        ) from None
    try:
        return str(recipe.prepare())
    except recipe.CannotPrepareError as error:
        raise UsageError(str(error)) from error


def _bar(pieces: Iterable[str]) -> Iterable[str]:
    """A bar on a terminal when reading takes longer than a second."""
    return tqdm(pieces, desc="reading", unit=" x 4 MB", delay=1, leave=False, disable=None)
