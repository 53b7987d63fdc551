"""What the validation text costs whoever only counted the training text's characters or pairs."""

from functools import lru_cache

from gpt.lab.trials import PART
from gpt.text.entropy import cross_entropies
from gpt.text.reading import Corpus


@lru_cache(maxsize=4)
def yardsticks(corpus: Corpus, *, of_curve: bool = False) -> tuple[float, float]:
    """Unigram and bigram cross-entropy, nats per character, of the whole validation split.

    ``of_curve``: of its first part, which the curves of light trials are measured on.
    """
    val = corpus.val[:PART] if of_curve else corpus.val
    return cross_entropies(corpus.train, val, corpus.tokenizer.vocab_size)
