"""Write text with a trained model: ``python sample.py [RUN]``; see ``--help``."""

import sys

from gpt.commandline import parse, run
from gpt.sampling.options import SampleCommand
from gpt.sampling.prompts import read_prompt
from gpt.sampling.runs import find_checkpoint


def main() -> None:
    command = parse(SampleCommand, sys.argv[1:], SampleCommand())
    path = find_checkpoint(command.run)
    prompt = read_prompt(command.output)
    from gpt.writing import write  # imports torch, which takes seconds: after all refusals

    write(command, path, prompt)


if __name__ == "__main__":
    sys.exit(run(main))
