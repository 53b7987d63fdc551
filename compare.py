"""Compare arms: ``python compare.py run [TEXT] --arms pre post``; see ``compare.py --help``."""

import importlib
import sys
from pathlib import Path

from gpt.exits import end, exit_code


def main() -> int:
    # Imports follow one by one: Ctrl-C, wrong flags and unusable texts are answered at once.
    from gpt.lab.commandline import find, parse_compare, usage

    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    command = parse_compare(name, words)
    from gpt.lab.trials import Stopped

    try:
        return importlib.import_module(find(name).module).main(command)
    except Stopped as stopped:
        from gpt.lab.folders import farewell

        return farewell(stopped, Path(__file__), [name, *words])


if __name__ == "__main__":
    end(exit_code(main))
