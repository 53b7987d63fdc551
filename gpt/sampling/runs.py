"""Which run to write with. No torch in here, so a wrong path is answered at once."""

import contextlib
from pathlib import Path

from gpt.checks import nearest
from gpt.errors import CheckpointError


def find_run(run: str, runs: Path = Path("runs")) -> Path:
    """The run folder or checkpoint file that ``run`` names, or the newest run when it is empty.

    The newest run is the folder, anywhere under ``runs``, whose checkpoints were written last.
    Raises CheckpointError when there is none, or ``run`` is not there.
    """
    if not run:
        written = {}
        for path in runs.glob("**/checkpoints/*.pt"):
            with contextlib.suppress(FileNotFoundError):  # a training run replaces its older ones
                written[path] = path.stat().st_mtime_ns
        if not written:
            raise CheckpointError(
                f"there is no checkpoint under {runs}/; `python train.py` makes one, "
                "or name a run folder"
            )
        return max(written, key=lambda path: (written[path], path)).parent.parent
    if not Path(run).exists():
        known = [str(folder.parent) for folder in runs.glob("**/checkpoints")]
        raise CheckpointError(
            f"{run!r} is neither a run folder nor a checkpoint file.{nearest(run, known)} "
            "`python train.py` makes a run"
        )
    return Path(run)
