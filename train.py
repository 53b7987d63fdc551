"""Train a character-level GPT on a text file: ``python train.py [TEXT]``; see ``--help``."""

import sys
from pathlib import Path

from gpt.exits import end, exit_code

HERE = Path(__file__).parent


def main() -> int:
    # Imports follow one by one: Ctrl-C, wrong flags and unusable texts are answered at once.
    from gpt.commandline import parse_train, run_config, run_name

    command = parse_train(sys.argv[1:], preset=HERE / "configs" / "default.toml")
    config = run_config(command)
    from gpt.runfolder import given_folder, new_folder, owner, refuse_used

    if command.resume:
        with owner(Path(command.resume)) as folder:
            from gpt.resuming import resume_point

            point = resume_point(folder, config, command.allow_data_change)
            checkpoint, corpus, notices = point
            from gpt.run import Run

            return farewell(Run(config, corpus, checkpoint).go(folder, notices), config, folder)
    out = Path(command.out)
    if command.out:
        refuse_used(out)
    from gpt.corpus import read_text

    corpus = read_text(config)
    from gpt.run import Run

    run = Run(config, corpus)
    with owner(given_folder(out) if command.out else new_folder(run_name(command))) as folder:
        return farewell(run.go(folder), config, folder)


def farewell(result, config, folder: Path) -> int:
    """Say how the run ended and what can be done with it; return the exit code."""
    from gpt.commandline import shell_line
    from gpt.training.progress import say, warn

    say(f"{result.steps} of {config.training.steps} steps done in {folder}")
    if result.best:
        say(f"best validation loss {result.best['loss']:.4f} at step {result.best['step']}")
    stopped = result.steps < config.training.steps
    if stopped:
        say("go on:  " + shell_line(HERE / "train.py", "--resume", folder))
    else:
        say("write:  " + shell_line(HERE / "sample.py", folder))
        say("curves: " + shell_line("-m", "tensorboard.main", "--logdir", folder.parent))
    if result.unlogged:
        warn(f"the curves are not complete ({result.unlogged}); the checkpoints are")
    return 128 + result.signal if stopped else 0


if __name__ == "__main__":
    end(exit_code(main))
