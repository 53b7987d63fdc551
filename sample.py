"""Write text with a trained model: ``python sample.py [RUN]``; see ``--help``."""

import sys

from gpt.exits import end, exit_code


def main() -> None:
    # Imports follow one by one: Ctrl-C, wrong flags and prompts are answered at once.
    from gpt.commandline import parse
    from gpt.sampling.options import SampleCommand

    command = parse(SampleCommand, sys.argv[1:], SampleCommand())
    from gpt.runfolder import find_run
    from gpt.sampling.prompts import read_prompt

    run = find_run(command.run)
    prompt = read_prompt(command.output)
    from gpt.writing import write

    write(command, run, prompt)


if __name__ == "__main__":
    end(exit_code(main))
