"""Compare arms: ``python compare.py run [TEXT] --arms pre post --seeds 5``; see ``run --help``."""

import sys
from pathlib import Path

from gpt.commandline import parse_compare, run, run_config, run_name, shell_line
from gpt.errors import UsageError
from gpt.text.printable import printable


def main() -> int:
    subcommand, *words = sys.argv[1:] or [""]
    if subcommand in ("-h", "--help"):
        print("usage: compare.py run [TEXT] [--arms ARM ...] [--seeds N] [--out DIR] ...")
        print("train the arms and print a table; every flag: compare.py run --help")
        return 0
    if subcommand != "run":
        raise UsageError(f"unknown subcommand {subcommand!r}; try: compare.py run --help")
    command = parse_compare(words)
    base = run_config(command)
    from gpt.corpus import read_text

    corpus = read_text(base)
    from gpt.lab.arms import parse_arms
    from gpt.lab.runs import run_arms
    from gpt.lab.table import table
    from gpt.runfolder import given_folder, new_folder

    arms = parse_arms(command.arms, base)
    seeds = [base.training.seed + k for k in range(command.seeds)]
    name = "compare-" + run_name(command)
    out = given_folder(Path(command.out)) if command.out else new_folder(name)
    outcomes = []
    try:
        for outcome in run_arms(arms, seeds, base, corpus, out):
            outcomes.append(outcome)
            print(f"{len(outcomes):>3} of {len(arms) * len(seeds)}  {outcome}", flush=True)
    finally:
        print("\n" + "\n".join(table(outcomes)) if outcomes else "no run ended")
    print("curves: " + printable(shell_line("-m", "tensorboard.main", "--logdir", out)))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
