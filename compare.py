"""Compare arms: ``python compare.py run [TEXT] --arms pre post --seeds 5``; see ``run --help``."""

import sys
from pathlib import Path

from gpt.errors import UsageError
from gpt.exits import end, exit_code

USAGE = """usage: compare.py run [TEXT] [--arms ARM ...] [--seeds N] [--out DIR] [settings]
train every arm with every seed and print a table; all settings: compare.py run --help"""


def main() -> int:
    # Imports follow one by one: Ctrl-C, wrong flags and unusable texts are answered at once.
    from gpt.checks import nearest
    from gpt.commandline import parse_compare, run_config, run_name, shell_line

    subcommand, *words = sys.argv[1:] or ["--help"]
    if subcommand in ("-h", "--help"):
        print(USAGE)
        return 0
    if subcommand != "run":
        raise UsageError(
            f"unknown subcommand {subcommand!r}.{nearest(subcommand, ['run'])}\n{USAGE}"
        )
    command = parse_compare(words)
    base = run_config(command)
    from gpt.lab.arms import parse_arms
    from gpt.runfolder import given_folder, new_folder, refuse_used

    arms = parse_arms(command.arms, base)
    if command.out:
        refuse_used(Path(command.out))
    from gpt.corpus import read_text

    configs = [arm.config(base, base.training.seed) for arm in arms]
    corpus = read_text(max(configs, key=lambda config: config.model.context_length))
    from gpt.lab.runs import Stopped, run_arms
    from gpt.lab.table import table
    from gpt.training.machine import find_device
    from gpt.training.plan import caution
    from gpt.training.progress import say

    for line in corpus.notices:
        say(line)
    for arm, config in zip(arms, configs, strict=True):
        find_device(config.machine.device)
        for line in caution(config):
            say(f"{arm.name}: {line}")
    out = (
        given_folder(Path(command.out))
        if command.out
        else new_folder("compare-" + run_name(command))
    )
    seeds = range(base.training.seed, base.training.seed + command.seeds)
    outcomes = []
    stopped = 0
    try:
        for outcome in run_arms(arms, seeds, base, corpus, out):
            outcomes.append(outcome)
            say(f"{len(outcomes):>3} of {len(arms) * len(seeds)}  {outcome}")
    except Stopped as signal:
        stopped = signal.signal
    finally:
        say("\n".join(["", *table(outcomes)]) if outcomes else "no run ended")
    say("curves: " + shell_line("-m", "tensorboard.main", "--logdir", out))
    return 128 + stopped if stopped else 0


if __name__ == "__main__":
    end(exit_code(main))
