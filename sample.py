"""Write text with a trained model: ``python sample.py [RUN]``; see ``--help``."""

import sys

from gpt.commandline import exit_code, parse
from gpt.sampling.options import SampleCommand


def main() -> None:
    command = parse(SampleCommand, sys.argv[1:], SampleCommand())
    # Heavy imports follow one by one, so that wrong flags and prompts are answered first.
    from gpt.runfolder import find_run
    from gpt.sampling.prompts import read_prompt

    run = find_run(command.run)
    prompt = read_prompt(command.output)
    from gpt.writing import write

    write(command, run, prompt)


if __name__ == "__main__":
    sys.exit(exit_code(main))
