"""The independent streams of random numbers that one seed gives.

    (seed, "init", parameter name)   the first weights of a tensor       gpt.model.init
    (seed, "dropout", step)          what a step drops                   gpt.training.loop
    (seed, "sample", row)            the characters of a sample          gpt.sampling.generate
    (seed, "batches", step)          the windows of a step: counter-based, see gpt.text.windows
    (seed, "epochs", epoch)          the order of the windows of an epoch: the same

Nothing draws from a stream that is not its own, and evaluation draws from none.
"""

import hashlib


def key(seed: int, stream: str, member: str | int) -> int:
    """128 bits that name one generator: equal for equal arguments, on every machine."""
    digest = hashlib.sha256(f"{seed}:{stream}:{member}".encode()).digest()
    return int.from_bytes(digest[:16], "little")
