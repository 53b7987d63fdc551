"""Which checkpoint to write with. No torch in here, so a wrong path is answered at once."""

from pathlib import Path

from gpt.config import nearest
from gpt.errors import CheckpointError


def find_checkpoint(run: str, runs: Path = Path("runs")) -> Path:
    """The checkpoint file that ``run`` means: a file itself, or the best of a run folder.

    A run folder without a best checkpoint (validation was off) gives the one of the latest step.
    An empty ``run`` is the newest run: the folder anywhere under ``runs`` whose checkpoints were
    written last. Raises CheckpointError when there is none.
    """
    if run and Path(run).is_file():
        return Path(run)
    if not run:
        written = {path: path.stat().st_mtime_ns for path in runs.glob("**/checkpoints/*.pt")}
        if not written:
            raise CheckpointError(
                f"no checkpoint under {runs}/; `python train.py` makes one, or name a run folder"
            )
        return _best(max(written, key=lambda path: (written[path], path)).parent)
    if not Path(run).is_dir():
        known = [str(folder.parent) for folder in runs.glob("**/checkpoints")]
        raise CheckpointError(
            f"{run!r} is neither a run folder nor a checkpoint file.{nearest(run, known)} "
            "`python train.py` makes a run"
        )
    return _best(Path(run) / "checkpoints")


def _best(folder: Path) -> Path:
    best, steps = folder / "best.pt", sorted(folder.glob("step-*.pt"))
    if not best.is_file() and not steps:
        raise CheckpointError(
            f"the run folder {str(folder.parent)!r} holds no checkpoint; "
            "one comes with the first evaluation of `python train.py`"
        )
    return best if best.is_file() else steps[-1]
