"""How a figure is drawn, whatever it shows: canvas, axes, legend, SVG and PNG.

matplotlib is loaded when something is drawn and only its canvases are used: no window, no pyplot,
no setting of the user's. The same data give the same bytes.
"""

import hashlib
import io
import logging
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec
from xml.sax.saxutils import quoteattr

from gpt.lab.figures.looks import FAINT, INK, PAPER, THIN
from gpt.text.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

WIDTH = 7.2
"""Inches; at 100 dots an inch a figure is 720 pixels wide."""

_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "gpt", "svg.fonttype": "none", "text.parse_math": False,
    "font.family": ["DejaVu Sans"], "font.size": 10, "text.color": INK,
    "figure.facecolor": PAPER, "axes.facecolor": "none", "savefig.facecolor": PAPER,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "axes.titlesize": 10, "axes.grid": True, "grid.color": FAINT, "grid.alpha": 0.25,
    "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.8,
    "lines.markersize": 5,
}  # fmt: skip
_METADATA = ("Date", "Creator", "Format", "Type")
_GENERIC_ID = re.compile(r' id="[A-Za-z0-9.]+_\d+"')


class Drawn(Generic[P]):
    """A function that makes a Figure, called for SVG text; ``.png`` takes the same arguments."""

    def __init__(self, make: "Callable[P, Figure]") -> None:
        self._make = make
        update_wrapper(self, make)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The figure as one ``<svg>`` element, to stand inside a page."""
        with _matplotlib():
            figure = self._make(*args, **kwargs)
            return _element(_saved(figure, "svg").decode("utf-8"), figure.get_suptitle())

    def png(self, *args: P.args, **kwargs: P.kwargs) -> bytes:
        """The figure as a PNG file, 1,080 pixels wide."""
        with _matplotlib():
            return _saved(self._make(*args, **kwargs), "png")


def canvas(
    title: str, *, height: float = 3.8, rows: int = 1, columns: int = 1
) -> "tuple[Figure, list[Axes]]":
    """A figure with a title, and its panels, which have the same axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.08, h_pad=0.06, hspace=0.06)
    title = "\n".join(textwrap.wrap(printable(title, keep=""), 72))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel().tolist()
    return figure, axes


def panels(
    title: str, names: Sequence[str], label: str, *, height: float
) -> "tuple[Figure, list[Axes]]":
    """A canvas with a panel a name, two in a row; ``height`` of each. ``label``: of the x axis."""
    rows, columns = max(1, math.ceil(len(names) / 2)), 2 if len(names) > 1 else 1
    figure, axes = canvas(title, height=0.9 + rows * height, rows=rows, columns=columns)
    for i, panel in enumerate(axes):
        panel.grid(visible=False)
        panel.set_visible(i < max(1, len(names)))
        panel.set_title(names[i] if i < len(names) else "")
        lowest = i + columns >= len(names)
        panel.tick_params(labelbottom=lowest)
        panel.set_xlabel(label if lowest else "")
    return figure, axes


def explain(axes: "Axes", parts: Sequence[str], *, above: bool = False) -> None:
    """A line over a panel that says what is drawn; ``above`` the panel's own title."""
    axes.annotate(
        " · ".join(parts), (0, 1), (0, 22 if above else 6), xycoords="axes fraction",
        textcoords="offset points", color=FAINT, fontsize=8.5, va="bottom", annotation_clip=False,
    )  # fmt: skip


def level_line(axes: "Axes", words: str, height: float, *, left: bool = False) -> None:
    """A dashed line across with its words: on it at the right, or under it at the left."""
    axes.axhline(height, color=INK, linewidth=0.9, linestyle=THIN, zorder=1)
    axes.annotate(
        words, (0 if left else 1, height), (3, -3) if left else (-2, 3),
        xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8.5,
        ha="left" if left else "right", va="top" if left else "bottom",
        bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
    )  # fmt: skip


def legend(figure: "Figure", handles: Sequence[Any], names: Sequence[str]) -> None:
    """One legend below all panels, for which the figure grows."""
    from matplotlib.legend import Legend

    if not handles:
        return
    columns = max(1, min(len(names), 96 // (max(map(len, names)) + 7)))
    rows = math.ceil(len(names) / columns)
    figure.set_figheight(figure.get_figheight() + 0.18 * rows)
    made = Legend(
        figure, handles, list(names), loc="outside lower left", ncols=math.ceil(len(names) / rows),
        fontsize=9, handlelength=2.6, columnspacing=1.4, labelspacing=0.35,
    )  # fmt: skip
    figure.legends.append(made)


def nothing(axes: "Axes", what: str = "no data") -> None:
    """Say that there is nothing to show, where it would be."""
    axes.text(0.5, 0.5, what, transform=axes.transAxes, ha="center", va="center", color=FAINT)


def plain(value: float) -> str:
    """A number for an axis: ``0.003``, ``1e-05``, ``2,000``."""
    return f"{value:,g}" if abs(value) < 1e5 else f"{value:.3g}"


def log_axis(axes: "Axes", which: str, values: Iterable[float]) -> None:
    """Logarithmic where there is something above 0, with plain numbers as ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    usable = [v for v in values if math.isfinite(v) and v > 0]
    if not usable:
        return
    axes.set(**{f"{which}scale": "log"})
    axis = axes.yaxis if which == "y" else axes.xaxis
    subs = (1.0, 2.0, 5.0) if max(usable) / min(usable) < 300 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_locator(NullLocator())


def standalone(svg: str) -> str:
    """A figure as a file of its own: on paper of its own, so that any page behind it will do."""
    end = svg.index(">", svg.index("<svg")) + 1
    paper = f'\n <rect width="100%" height="100%" fill="{PAPER}"/>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{svg[:end]}{paper}{svg[end:]}'


@contextmanager
def _matplotlib() -> Iterator[None]:
    """matplotlib with our settings only, and quiet.

    It tells the log when the home folder is missing, and warns of every letter that its own font
    lacks; an SVG is drawn with the reader's fonts.
    """
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        from matplotlib.style import context

        with context(["default", _SETTINGS]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s)Glyph .* missing from font")
            yield
    finally:
        log.setLevel(level)


def _saved(figure: "Figure", kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "png":
        figure.savefig(file, format=kind, dpi=150, metadata={"Software": None})
    else:
        figure.savefig(file, format=kind, transparent=True, metadata=dict.fromkeys(_METADATA))
    return file.getvalue()


def _element(document: str, title: str) -> str:
    """The ``<svg>`` of a document, with ids that no other figure of a page has."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    own = f"f{hashlib.sha256(svg.encode()).hexdigest()[:10]}-"

    def changed(tag: re.Match[str]) -> str:
        text = _GENERIC_ID.sub("", tag[0])
        text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
        return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{own}", text)

    svg = re.sub(r"<[^<>]+>", changed, svg)
    words = f'<svg role="img" aria-label={quoteattr(title)} style="stroke-linejoin: round"'
    return svg.replace("<svg", words, 1).strip() + "\n"
