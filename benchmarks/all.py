"""All benchmarks, or some: each writes its own section of ``benchmarks/RESULTS.md``.

    python benchmarks/all.py [--text FILE] [--nanogpt DIR] [--llama2c BINARY ...]
                             [--only SECTION ...]

Peers run from where the user has them, in the Python that runs this; one that is absent is skipped
with its reason in the table. A section that runs again replaces itself and its rows of the table at
the top, which is printed last. Everything takes about an hour on two cores that do nothing else.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import ROOT, Options, Row, Section, origin, table

SECTIONS = {
    "presets": "presets",
    "nanogpt": "nanogpt",
    "goals": "goals",
    "texts": "texts",
    "steps": "steps",
    "generation": "generation",
    "start": "start",
    "logging": "logging_cost",  # a script's folder comes before the standard library's logging
}
"""Name -> module."""
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
HEADING = "# Benchmarks"
WORDS = (
    "Written by `make bench`. Medians of rounds in which the contestants take turns; every section "
    "says when, where and with what it was measured, and its module in `benchmarks/` how."
)
UNMEASURED = Row("", "", "not measured")


def modules() -> dict[str, ModuleType]:
    """Every section's module, in the order of the report."""
    return {
        name: importlib.import_module(f"benchmarks.{module}") for name, module in SECTIONS.items()
    }


def read(report: str) -> tuple[dict[str, Row], dict[str, str]]:
    """A report taken apart: rows of the table of goals by work, sections by title."""
    top, *parts = re.split(r"^## ", report, flags=re.MULTILINE)
    rows = {}
    for line in top.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5:
            work, theirs, ours, _, reached = cells
            rows[work] = Row(theirs, ours, reached)
    titles = (part.partition("\n") for part in parts)
    return rows, {title: body.strip() for title, _, body in titles}


def written(rows: dict[str, Row], sections: dict[str, str]) -> str:
    """The whole report: goals and sections that are known, in order, whatever was measured."""
    known = modules().values()
    goals = {work: wanted for module in known for work, wanted in module.GOALS.items()}
    lines = []
    for work, wanted in goals.items():
        row = rows.get(work, UNMEASURED)
        lines.append([work, row.theirs, row.ours, wanted, row.reached])
    parts = [
        HEADING,
        "\n".join(table(["work", "nanoGPT", "ours", "wanted", "reached"], lines)),
        WORDS,
    ]
    for module in known:
        if module.TITLE in sections:
            parts += [f"## {module.TITLE}", sections[module.TITLE]]
    return "\n\n".join(parts) + "\n"


def replaced(report: str, title: str, section: Section, source: str) -> str:
    """The report with one section, and its rows of the table of goals, measured anew."""
    rows, sections = read(report)
    body = "\n".join([*section.lines, "", source])
    return written(rows | section.reached, sections | {title: body})


def parsed(words: list[str] | None = None) -> tuple[Options, list[str], Path]:
    """What is asked: options, sections, and where the report is. Leaves with 2 for wrong words."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file (default: the default corpus)")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument(
        "--llama2c", type=Path, nargs="+", default=[], metavar="BINARY", help="run.c, compiled"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--rounds", type=int, default=3, help="of every contest (default: 3)")
    parser.add_argument("--presets", nargs="+", default=["tiny", "default"], metavar="PRESET")
    parser.add_argument("--corpus", type=Path, help="theirs (default: the default corpus)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each preset (default: 1)")
    parser.add_argument("--out", type=Path, help="the report (default: benchmarks/RESULTS.md)")
    parser.add_argument(
        "--quick", action="store_true", help="does it all run? Figures mean nothing, so give --out"
    )
    given = parser.parse_args(words)
    for name in ("text", "corpus"):
        if (path := getattr(given, name)) and not path.is_file():
            parser.error(f"--{name}: there is no file {str(path)!r}")
    if given.nanogpt and not (given.nanogpt / "train.py").is_file():
        parser.error(f"--nanogpt: {str(given.nanogpt)!r} is no checkout of nanoGPT: no train.py")
    for binary in given.llama2c:
        if not os.access(binary, os.X_OK) or binary.is_dir():
            parser.error(f"--llama2c: {str(binary)!r} is no program; compile run.c of llama2.c")
    if min(given.rounds, given.seeds) < 1:
        parser.error("--rounds and --seeds are at least 1")
    if given.quick and not given.out:
        parser.error("--quick measures nothing: give --out, so that no real report is overwritten")
    from gpt.corpus import default_text
    from gpt.errors import UsageError

    text, corpus = given.text, given.corpus
    try:
        text = text or Path(default_text())
        corpus = corpus or Path(default_text() if {"presets", "texts"} & {*given.only} else text)
    except UsageError as error:
        parser.error(str(error))
    options = Options(
        text=text.absolute(),
        corpus=corpus.absolute(),
        nanogpt=given.nanogpt and given.nanogpt.absolute(),
        llama2c=tuple(binary.absolute() for binary in given.llama2c),
        rounds=given.rounds,
        quick=given.quick,
        presets=tuple(given.presets),
        seeds=given.seeds,
    )
    return options, given.only, given.out or RESULTS


def main() -> int:
    """Run the sections; one that fails keeps what the report had, and the exit code is 1."""
    options, only, out = parsed()
    failed = []
    for name in (name for name in SECTIONS if name in only):
        module = modules()[name]
        print(f"{name}: {module.TITLE}", file=sys.stderr, flush=True)
        try:
            section = module.measure(options)
        except (subprocess.CalledProcessError, RuntimeError) as error:
            print(f"{name} failed: {error}\n{getattr(error, 'stderr', '')}", file=sys.stderr)
            failed.append(name)
            continue
        source = origin(options, section.text)
        print("\n".join([f"\n## {module.TITLE}\n", *section.lines, "", source, ""]), flush=True)
        before = out.read_text(encoding="utf-8") if out.exists() else ""
        out.write_text(replaced(before, module.TITLE, section, source), encoding="utf-8")
    if out.exists():
        print(out.read_text(encoding="utf-8").partition("\n## ")[0])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
