"""Write text with a trained model: ``python sample.py [RUN]``; see ``--help``."""

import sys

from gpt.commandline import parse, run
from gpt.sampling.options import SampleCommand
from gpt.sampling.prompts import read_prompt
from gpt.sampling.runs import find_run


def main() -> None:
    command = parse(SampleCommand, sys.argv[1:], SampleCommand())
    run_path = find_run(command.run)
    prompt = read_prompt(command.output)
    from gpt.writing import write  # imports torch, which takes seconds: after all refusals

    write(command, run_path, prompt)


if __name__ == "__main__":
    sys.exit(run(main))
