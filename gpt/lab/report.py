"""``report.html``: what was found, on one page that opens anywhere.

It holds its figures and its style, fetches nothing and runs nothing: its policy forbids both.
"""

import html
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.lab.figures.drawing import standalone
from gpt.lab.figures.looks import FAINT, INK, PAPER
from gpt.lab.folders import FIGURES, REPORT
from gpt.runfolder import refuse_link
from gpt.text.printable import printable
from gpt.training.atomic import make_folder, write_atomically


@dataclass(frozen=True)
class Table:
    """A row of column names, and rows of cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """``name``: of its file, and of no other figure of the report; letters, digits, ``_``, ``-``.

    ``svg``: what a function of ``gpt.lab.figures`` returned. The caption may be anything.
    """

    name: str
    caption: str
    svg: str

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[\w-]+", self.name, re.ASCII), self.name


@dataclass(frozen=True)
class Section:
    """A part of the report: its lines (shown as they are), tables and figures, in this order.

    Their text may be anything.
    """

    title: str
    lines: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


def write_report(
    out: Path, title: str, sections: Sequence[Section], *, made: Mapping[str, str] | None = None
) -> Path:
    """Write ``out/report.html``, and each figure as ``out/figures/NAME.svg`` too; return the page.

    Every file is there whole or not at all; one of that name is replaced, others stay. ``made``:
    how it was made, what -> value: the command, settings, digests of code and data. It stands at
    the end. Raises DiskError, and UsageError where ``out/figures`` is a link.
    """
    figures = [figure for section in sections for figure in section.figures]
    assert len({figure.name for figure in figures}) == len(figures)
    if figures:
        refuse_link(out / FIGURES)
        make_folder(out / FIGURES)
    for figure in figures:
        _write(out / FIGURES / f"{figure.name}.svg", standalone(figure.svg))
    path = out / REPORT
    _write(path, report(title, sections, made=made))
    return path


def _write(path: Path, text: str) -> None:
    data = text.encode("utf-8")
    write_atomically(path, lambda file: file.write(data), needed=len(data))


def report(
    title: str, sections: Sequence[Section], *, made: Mapping[str, str] | None = None
) -> str:
    """The page as text."""
    parts = [_section(section) for section in sections]
    if made:
        items = "".join(
            f"<dt>{_shown(what)}</dt><dd><code>{_shown(value)}</code></dd>\n"
            for what, value in made.items()
        )
        parts.append(f"<section>\n<h2>How this was made</h2>\n<dl>\n{items}</dl>\n</section>\n")
    return _PAGE.format(title=_shown(title), style=_STYLE, body="".join(parts))


def _section(section: Section) -> str:
    parts = [f"<h2>{_shown(section.title)}</h2>\n"]
    if section.lines:
        parts.append(f"<pre>{_lines(section.lines)}</pre>\n")
    parts += map(_table, section.tables)
    parts += map(_figure, section.figures)
    return f"<section>\n{''.join(parts)}</section>\n"


def _lines(lines: Sequence[str]) -> str:
    """The lines, those with columns in blocks that a narrow screen does not fold."""
    parts = []
    for columns, group in itertools.groupby(lines, lambda line: bool(_COLUMNS.search(line))):
        text = "\n".join(map(_shown, group))
        parts.append(f'<span class="columns">{text}</span>' if columns else text + "\n")
    return "".join(parts).removesuffix("\n")


def _figure(figure: Figure) -> str:
    """The SVG in the page's own colours, so that it can be read on a dark page too."""

    def of_page(tag: re.Match[str]) -> str:
        return _COLOURS.sub(lambda colour: _VARIABLES[colour[0]], tag[0])

    svg = re.sub(r"<[^<>]+>", of_page, figure.svg)
    words = f"<figcaption>{_shown(figure.caption)}</figcaption>\n" if figure.caption else ""
    return f'<figure>\n<div class="wide">{svg}</div>\n{words}</figure>\n'


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_shown(cell)}</th>' for cell in table.header)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_shown(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows
    )
    caption = f"<caption>{_shown(table.caption)}</caption>\n" if table.caption else ""
    return (
        f'<div class="wide"><table>\n{caption}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )


def _shown(text: str) -> str:
    """Text for HTML: visible characters only, none of which is markup."""
    return html.escape(printable(text))


_COLUMNS = re.compile(r"\S {2,}\S")
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", PAPER: "var(--paper)"}
_COLOURS = re.compile("|".join(_VARIABLES))

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}</main>
</body>
</html>
"""

_STYLE = f"""\
:root {{ --ink: {INK}; --faint: {FAINT}; --paper: {PAPER}; --panel: #f5f6f8; --line: #d8dce1; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e9ed; --faint: #9aa3ad; --paper: #14171b; --panel: #1d2127; --line: #353b44; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}
main {{ max-width: 860px; margin: 0 auto; padding: 1.5rem 1.1rem 4rem; }}
h1 {{ font-size: 1.65rem; line-height: 1.25; margin: 0.5rem 0 1.2rem; }}
h2 {{ font-size: 1.2rem; margin: 2.4rem 0 0.8rem; padding-top: 0.9rem;
  border-top: 1px solid var(--line); }}
h1, h2, caption, figcaption, dd {{ overflow-wrap: anywhere; }}
pre {{ background: var(--panel); border-radius: 6px; padding: 0.9rem 1rem; overflow-wrap: anywhere;
  white-space: pre-wrap; font: 0.8rem/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }}
.columns {{ display: block; white-space: pre; overflow-x: auto; }}
figure {{ margin: 1.4rem 0 2rem; }}
.wide {{ overflow-x: auto; }}
svg {{ display: block; width: 100%; min-width: 540px; max-width: 760px; height: auto; }}
figcaption, caption {{ color: var(--faint); font-size: 0.9rem; text-align: left;
  margin: 0.5rem 0; }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.3rem 0.8rem 0.3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }}
dt {{ font-weight: 600; margin-top: 0.7rem; }}
dd {{ margin: 0; }}
code {{ font: 0.84rem/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; }}
"""
