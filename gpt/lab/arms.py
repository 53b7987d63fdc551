"""Arms: configs that differ from a common base in the thing that is compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gpt.checks import nearest
from gpt.config import Norm, NormPosition, RunConfig
from gpt.config_files import read_toml
from gpt.errors import UsageError


@dataclass(frozen=True)
class Arm:
    """A name and the fields it changes: ``Arm("post", {"norm_position": "post"})``."""

    name: str
    changes: dict[str, Any]

    def config(self, base: RunConfig, seed: int) -> RunConfig:
        """The base with this arm's changes, at one seed."""
        return base.with_changes({**self.changes, "seed": seed})


def parse_arms(words: tuple[str, ...], base: RunConfig) -> list[Arm]:
    """Norm placements, norm kinds or TOML files, one arm a word, each checked against the base.

    Raises UsageError for an unknown word, a repeated name or a config that breaks a rule.
    """
    placements, kinds = get_args(NormPosition), get_args(Norm)
    arms = []
    for word in words:
        if word in placements:
            arms.append(Arm(word, {"norm_position": word}))
        elif word in kinds:
            arms.append(Arm(word, {"norm": word}))
        elif word.endswith(".toml"):
            arms.append(Arm(Path(word).stem, read_toml([word])))
        else:
            raise UsageError(
                f"arm {word!r} is neither a norm placement ({', '.join(placements)}), nor a kind "
                f"of norm ({', '.join(kinds)}), nor a file of changes that ends in .toml."
                f"{nearest(word, [*placements, *kinds])}"
            )
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two arms are called {name!r}; give the files different names")
    for arm in arms:
        if "seed" in arm.changes:
            raise UsageError(f"arm {arm.name!r} sets the seed; drop it, all arms share --seeds")
        if arm.config(base, base.training.seed).text != base.text:
            raise UsageError(
                f"arm {arm.name!r} changes the text, and all arms must learn the same; drop "
                "text, val_fraction, encoding and keep_newlines from it"
            )
    return arms
