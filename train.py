"""Train a character-level GPT on a text file: ``python train.py [TEXT]``; see ``--help``."""

import sys
from pathlib import Path

from gpt.commandline import parse_train, run, run_config, run_name, shell_line


def main() -> int:
    here = Path(__file__).parent
    command = parse_train(sys.argv[1:], preset=here / "configs" / "default.toml")
    config = run_config(command)
    # Heavy imports follow one by one, so that wrong flags and unusable texts are answered first.
    if command.resume:
        from gpt.runfolder import resume_point

        folder = Path(command.resume)
        checkpoint, corpus, notices = resume_point(folder, config, command.allow_data_change)
    else:
        from gpt.corpus import read_text

        checkpoint, corpus, notices = None, read_text(config), []

    from gpt.run import Run
    from gpt.runfolder import given_folder, new_folder
    from gpt.training.progress import say

    run_of_model = Run(config, corpus, checkpoint)
    if not command.resume:
        folder = given_folder(Path(command.out)) if command.out else new_folder(run_name(command))
    result = run_of_model.go(folder, notices)

    say(f"{result.steps} of {config.training.steps} steps done in {folder}")
    if result.best:
        say(f"best validation loss {result.best['loss']:.4f} at step {result.best['step']}")
    if result.signal:
        say("go on:  " + shell_line(here / "train.py", "--resume", folder))
        return 128 + result.signal
    say("write:  " + shell_line(here / "sample.py", folder))
    say("curves: " + shell_line("-m", "tensorboard.main", "--logdir", folder.parent))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
