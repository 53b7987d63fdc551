"""The text that a config names. Needs no torch, so that unusable data is answered at once."""

from collections.abc import Iterable

from tqdm import tqdm

from gpt.config import RunConfig
from gpt.text.reading import Corpus, default_text, read_corpus


def read_text(config: RunConfig, vocabulary: str | None = None) -> Corpus:
    """The corpus that the config names, encoded and split."""
    text = config.text
    return read_corpus(
        text.text or str(default_text()),
        context_length=config.model.context_length,
        val_fraction=text.val_fraction,
        encoding=text.encoding,
        keep_newlines=text.keep_newlines,
        vocabulary=vocabulary,
        progress=_bar,
    )


def _bar(pieces: Iterable[str]) -> Iterable[str]:
    """A bar on a terminal when reading takes longer than a second."""
    return tqdm(pieces, desc="reading", unit=" x 4 MB", delay=1, leave=False, disable=None)
