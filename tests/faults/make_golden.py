"""Writes the checkpoints in ``golden/``, which every later version of this program has to read.

    python tests/faults/make_golden.py

Once for each format version, when it is new: files that are there already do not change. Each comes
with a JSON file of what it must give: ids, and the logits of the model for them. Those of format 1
were written when the optimisers were torch's own.
"""

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from helpers import spread  # noqa: E402
from states import state_of  # noqa: E402

from gpt.config import RunConfig  # noqa: E402
from gpt.model.gpt import GPT  # noqa: E402
from gpt.training.checkpoint import save_checkpoint  # noqa: E402
from gpt.training.optimisers import build_optimisers  # noqa: E402
from gpt.training.schema import FORMAT_VERSION  # noqa: E402

GOLDEN = HERE / "golden"
VOCABULARY = "\n !aehlorw\u00e9"
IDS = [[3, 1, 4, 1, 5, 9, 2], [10, 7, 1, 8, 2, 8, 0]]
SIZES = {"n_heads": 2, "d_model": 12, "d_ff": 10, "context_length": 8, "n_layers": 2}
KINDS = {
    "adamw": {"norm_position": "pre", "positions": "learned", "dropout": 0.1},
    "muon": {
        "optimizer": "muon", "norm_position": "post", "positions": "rotary",
        "activation": "swiglu", "tie_embeddings": False,
    },
}  # fmt: skip


def trained(**changes):
    """A config, its model in no special state, and its optimisers after two updates."""
    config = RunConfig().with_changes(SIZES | changes)
    model = spread(GPT(config.model, len(VOCABULARY), config.training.seed))
    optimisers = build_optimisers(model, config.training, torch.device("cpu"))
    for _ in range(2):
        update(model, optimisers)
    return config, model, optimisers


def update(model, optimisers) -> None:
    torch.manual_seed(7)
    model.train()(torch.tensor(IDS)[:, : model.config.context_length]).square().mean().backward()
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad()


def state_after(step, config, model, optimisers) -> dict:
    return state_of(
        config,
        model.state_dict(),
        step,
        vocabulary=VOCABULARY,
        optimisers=[optimiser.state_dict() for optimiser in optimisers],
        best={"step": 1, "loss": 1.5},
        source={"path": "a.txt", "bytes": 1234, "sha256": "ab" * 32},
        environment={"torch": "2.13.0", "threads": 1, "device": "cpu", "dtype": "float32"},
    )


def logits(model) -> list:
    with torch.no_grad():
        return model.double().eval()(torch.tensor(IDS)).tolist()


def main() -> None:
    for kind, changes in KINDS.items():
        target = GOLDEN / f"format-{FORMAT_VERSION}-{kind}.pt"
        if target.exists():
            continue
        config, model, optimisers = trained(**changes)
        with tempfile.TemporaryDirectory() as folder:
            state = state_after(2, config, model, optimisers)
            saved = save_checkpoint(Path(folder), state, is_best=False)
            target.write_bytes(saved.read_bytes())
        facts = {"ids": IDS, "logits": logits(model)}
        target.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
