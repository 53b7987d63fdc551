"""Ends a process at every file operation of a save in turn: a script, run by ``test_storage``.

``crash_points.py FOLDER`` prints how many operations a save has, and one line for each that was
not survived.
"""

import os
import shutil
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from disk_faults import at, each_operation  # noqa: E402
from states import is_whole, state_at  # noqa: E402

from gpt.training.atomic import sweep  # noqa: E402
from gpt.training.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402


def save(folder: Path, step: int, *, ends_at: int = 0) -> None:
    with each_operation(at(ends_at, lambda name: os._exit(9))):
        save_checkpoint(folder, state_at(step), is_best=step % 2 == 1)


def verdict(folder: Path, ended: bool) -> str:
    """What is wrong after a save of step 5 over those of 3 and 4, or nothing."""
    newest = load_checkpoint(folder, prefer="newest")
    best = load_checkpoint(folder, prefer="best")
    if newest.notices or best.notices:
        return f"damage: {newest.notices + best.notices}"
    if not is_whole(newest) or not is_whole(best):
        return "other weights"
    if newest.step not in ({4, 5} if ended else {5}) or best.step not in {3, 5}:
        return f"newest {newest.step}, best {best.step}"
    sweep(folder)
    save(folder, 6)
    if load_checkpoint(folder, prefer="newest").step != 6:
        return "the next save does not work"
    names = sorted(path.name for path in folder.iterdir())
    return f"left over: {names}" if any(".tmp." in name for name in names) else ""


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # a fork has only the thread that forked
    before = folder / "before"
    for step in (3, 4):
        save(before, step)
    n, ended = 0, True
    while ended:
        n += 1
        place = folder / "now"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(before, place)
        child = os.fork()
        if not child:
            save(place, 5, ends_at=n)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended = status == 9
        if status not in (0, 9):
            print(f"operation {n}: the save ended with {status}")
        elif wrong := verdict(place, ended):
            print(f"operation {n}: {wrong}")
    print(f"{n - 1} operations")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
