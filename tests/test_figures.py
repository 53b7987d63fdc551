"""Figures: what is said and shown, for good data, bad data and hostile names."""

import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpt.lab import figures
from gpt.lab.figures import Drawn, colours
from gpt.lab.figures.drawing import standalone
from gpt.lab.figures.looks import DASHES, INK, LONGEST_NAME, labels, looks_of

HOSTILE = '</text></svg><script>alert("x")</script> & $x_1$ -->\x1b[31m\u202e'
LONG = [f"{'a file of changes with a very long name ' * 2}{i}" for i in range(8)]
STEPS = (0, 1, 2, 5, 9, 30)


def falling(end: float, shift: float = 0.0) -> list[tuple[int, float]]:
    return [(step, end + (4.0 - end) * math.exp(-step / 7) + shift) for step in STEPS]


def ended(*curves, failed: bool = False) -> list[tuple]:
    """Runs for ``loss_bands``."""
    return [(curve, failed) for curve in curves]


def texts(svg: str) -> list[str]:
    return [
        element.text or ""
        for element in ElementTree.fromstring(svg).iter()
        if is_a(element, "text")
    ]


def is_a(element: ElementTree.Element, kind: str) -> bool:
    return element.tag.endswith("}" + kind)


def arguments(name: str, curve, value: float = 0.7) -> tuple:
    """Of the figure of that name: one arm ``name`` that has ``curve``, or the number ``value``."""
    return {
        "loss_bands": (
            {name: ended(curve, curve, failed=not math.isfinite(curve[-1][1]))},
            3.3,
            2.5,
        ),
        "loss_against_rate": ({name: {1e-3: [value, 2.6], 3e-2: [value]}}, 3.3, 2.5),
        "phase_map": ({name: {(1e-3, 2): ["learned", "plateau"], (3e-3, 7): ["diverged"] * 8}},),
        "gradient_heat": ({name: [curve, [(0, value)]]},),
        "gradient_by_block": ({name: [1.5, value, 0.9]},),
        "gradient_by_depth": ({name: {2: [1.2, value], 5: [value], 12: [0.4, 0.5, 0.6]}},),
        "stream_growth": ({name: [value, 1.1, 1.7]},),
        "against_step": ({name: [curve, curve]}, "A probe", "its unit"),
        "branch_over_skip": ({name: [curve]},),
        "spread": ({name: [curve]},),
    }


FIGURES = sorted(arguments("pre", falling(2.5)))
EMPTY = {"loss_bands": ({},), "against_step": ({}, "A probe", "its unit")}
AXES = {
    "loss_bands": ("updates", "validation loss (nats per character)"),
    "loss_against_rate": ("learning rate", "final validation loss (nats per character)"),
    "phase_map": ("learning rate", "number of blocks"),
    "gradient_heat": ("updates", "block (0: by the embedding)"),
    "gradient_by_block": ("block (0: by the embedding)", "gradient of W_out (Frobenius norm)"),
    "gradient_by_depth": ("number of blocks", "gradient of W_out (Frobenius norm)"),
    "stream_growth": ("sublayers passed, k", "rms of the residual stream"),
    "against_step": ("updates", "its unit"),
    "branch_over_skip": ("updates", "rms of branch / rms of skip"),
    "spread": ("updates", "sd of predicted probabilities"),
}


def draw(name: str, *args, **kwargs) -> str:
    return getattr(figures, name)(*args, **kwargs)


def test_every_figure_is_tested():
    drawn = {name for name in figures.__all__ if isinstance(getattr(figures, name), Drawn)}
    assert drawn == set(FIGURES) == set(AXES)


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_the_arm_is_named(name):
    said = texts(draw(name, *arguments("an arm", falling(2.5))[name]))
    assert {*AXES[name]} <= {*said}
    assert any("an arm" in text for text in said)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_a_number_that_cannot_be_drawn_is_shown_and_does_no_harm(name, value):
    curve = [*falling(2.5)[:-1], (30, value)]
    svg = draw(name, *arguments("an arm", curve, value)[name])
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<text.*?</text>", "", svg))
    said = " ".join(texts(svg))
    log = name in ("gradient_by_block", "gradient_by_depth", "against_step", "spread")
    if name == "loss_bands" and value != 0:
        assert "an arm (2 of 2 failed)" in said
    elif name == "loss_against_rate" and value != 0:
        assert {"1/2", "1/1"} <= {*said.split()}
    elif name == "gradient_heat":
        assert ("0" if value == 0 else "✕") in said.split()
    elif log:
        assert ("▼ at the bottom: 0" in said) == (value <= 0)
        assert ("✕ at the top: not a finite number" in said) == (value != 0)


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_to_show_is_said(name):
    for nothing in (EMPTY.get(name, ({},)), ({"an arm": []}, *EMPTY.get(name, ({},))[1:])):
        if name in ("loss_against_rate", "phase_map", "gradient_by_depth") and nothing[0]:
            nothing = ({"an arm": {}},)
        words = "no gradient above 0" if name == "gradient_heat" else "no data"
        assert words in texts(draw(name, *nothing))


@pytest.mark.parametrize("name", FIGURES)
def test_a_hostile_name_is_text_and_nothing_else(name):
    svg = draw(name, *arguments(HOSTILE, falling(2.5))[name])
    kinds = {element.tag.split("}")[1] for element in ElementTree.fromstring(svg).iter()}
    assert kinds <= {"svg", "g", "defs", "path", "use", "text", "tspan", "clipPath", "rect"}
    assert svg.count("<svg") == svg.count("</svg>") == 1
    assert any("</text></svg><s" in text for text in texts(svg))
    assert "\x1b" not in svg
    assert "\u202e" not in svg


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_data_give_the_same_bytes_and_ids_of_their_own(name):
    these = arguments("pre", falling(2.5))[name]
    svg, png = draw(name, *these), getattr(figures, name).png(*these)
    assert svg == draw(name, *these)
    assert png == getattr(figures, name).png(*these)
    assert png.startswith(b"\x89PNG")
    other = draw(name, *arguments("post", falling(2.6))[name])
    ids, others = (set(re.findall(r'id="([^"]+)"', text)) for text in (svg, other))
    assert ids
    assert not ids & others
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg)) <= ids


@pytest.mark.parametrize(
    "name", ["$x_1$", "_under", "a & b < c", "100 %", "#1b1f24", "\u4e2d\u6587"]
)
def test_no_character_of_a_name_has_a_meaning(name):
    assert f"{name} (1 seed)" in texts(figures.loss_bands({name: ended(falling(2.5))}))


def test_settings_of_the_user_change_nothing():
    import matplotlib

    before = figures.loss_bands({"pre": ended(falling(2.5))})
    with matplotlib.rc_context({"font.size": 31, "axes.linewidth": 9, "xtick.major.size": 20}):
        assert figures.loss_bands({"pre": ended(falling(2.5))}) == before
        assert matplotlib.rcParams["font.size"] == 31
    assert "matplotlib.pyplot" not in sys.modules


def test_a_bare_machine_draws_without_a_word(tmp_path):
    code = """
import sys
from pathlib import Path
from gpt.lab.figures import loss_bands
assert "matplotlib" not in sys.modules
svg = loss_bands({"\\u4e2d\\u6587 \\u05d0": [([(0, 4.0), (7, 3.0)], False)]}, 3.3, 2.5)
assert "\\u4e2d\\u6587" in svg
Path(sys.argv[1]).write_bytes(loss_bands.png({"\\u4e2d": [([(0, 4.0), (7, 3.0)], False)]}))
"""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "SYSTEMROOT", "OMP_NUM_THREADS")}
    bare = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "MPLCONFIGDIR": "/proc/1/no",
    }
    command = [sys.executable, "-W", "error", "-c", code, tmp_path / "figure.png"]
    done = subprocess.run(
        command, env=kept | bare, cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_has_its_colour_in_every_figure_and_in_a_part_of_the_comparison():
    arms = ["post", "pre", "sandwich"]
    palette = colours(arms)
    assert len(set(palette.values())) == 3
    svg = draw("loss_bands", {"sandwich": ended(falling(2.5))}, arms=arms)
    assert palette["sandwich"] in svg
    assert palette["post"] not in svg
    for name in set(FIGURES) - {"phase_map", "gradient_heat", "against_step"}:
        svg = draw(name, *arguments("sandwich", falling(2.5))[name], arms=arms)
        assert palette["sandwich"] in svg, name


def test_arms_differ_in_two_ways_and_never_look_alike():
    looks = looks_of(map(str, range(32))).values()
    assert len({(look.colour, str(look.dashes)) for look in looks}) == 32
    for a, b in itertools.pairwise(looks):
        assert a.colour != b.colour
        assert a.dashes != b.dashes
    assert len(DASHES) > 1


def test_long_names_are_cut_in_the_middle_and_stay_different():
    shown = labels([*LONG, "x" * 99, "x" * 98, "", "two\nlines", "x" * 99])
    assert len(set(shown.values())) == len(shown) == 12
    assert all(len(label) <= LONGEST_NAME + 4 for label in shown.values())
    assert shown[LONG[3]].endswith("name 3")
    assert shown["two\nlines"] == r"two\x0alines"
    assert shown[""] == "(no name)"


@pytest.mark.parametrize("name", FIGURES)
def test_eight_long_names_stay_inside_the_figure(name):
    """The widest letters of the font are about nine tenths of its size, the mean of names 0.62."""
    of_arms = [arguments(arm, falling(2.5))[name] for arm in LONG]
    data = {arm: values for of_arm in of_arms for arm, values in of_arm[0].items()}
    svg = draw(name, data, *of_arms[0][1:])
    root = ElementTree.fromstring(svg)
    width, height = (float(root.get(side, "").removesuffix("pt")) for side in ("width", "height"))
    assert width == pytest.approx(518.4)
    for element in root.iter():
        if is_a(element, "text") and "text-anchor: start" in element.get("style", ""):
            size = float(re.search(r"font-size: ([\d.]+)px", element.get("style", ""))[1])
            end = float(element.get("x", "nan")) + 0.62 * size * len(element.text or "")
            assert end < width + 1, element.text
            assert 0 < float(element.get("y", "nan")) < height, element.text
    said = " ".join(texts(svg))
    assert all(label in said for label in labels(LONG).values())


def lines_of(svg: str, colour: str, width: str) -> list[list[tuple[float, float]]]:
    """The points of the lines of a colour and width."""
    found = []
    for element in ElementTree.fromstring(svg).iter():
        style = element.get("style", "")
        if is_a(element, "path") and f"stroke: {colour}" in style and f"width: {width}" in style:
            numbers = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", element.get("d", ""))
            found.append([(float(x), float(y)) for x, y in numbers])
    return found


def crosses(svg: str, colour: str) -> list[tuple[float, float]]:
    """Where the marks of an arm's failures are."""
    style = f"stroke: {colour}; stroke-width: 2"
    return [
        (float(element.get("x", "nan")), float(element.get("y", "nan")))
        for element in ElementTree.fromstring(svg).iter()
        if is_a(element, "use") and style in element.get("style", "")
    ]


def frame_of(svg: str) -> list[float]:
    """Left, upper edge and width of the frame."""
    (rect,) = re.findall(r'<clipPath[^>]*>\s*<rect x="(\S+)" y="(\S+)" width="(\S+)"', svg)
    return list(map(float, rect))


PLATEAU = [(step, 3.3 + (4.0 - 3.3) * math.exp(-step)) for step in STEPS]


@pytest.mark.parametrize(
    "curve",
    [
        PLATEAU,
        [*falling(2.5)[:4], (9, 4.2), (30, 4.5)],
        [*falling(2.5, 0.9)[:3], (5, math.nan), (9, 1.0), (30, 1.0)],
        falling(2.5, 0.9)[:3],
    ],
    ids=["plateau", "diverged", "not finite", "stopped"],
)
def test_a_failed_seed_is_drawn_counted_and_in_no_mean(curve):
    svg = draw("loss_bands", {"post": [(falling(2.5), False), (curve, True)]}, 3.3, 2.5)
    assert "post (1 of 2 seeds, 1 failed)" in texts(svg)
    colour = colours(["post"])["post"]
    good, bad = lines_of(svg, colour, "0.6")
    assert lines_of(svg, colour, "1.8")[0] == good
    finite = list(itertools.takewhile(lambda point: math.isfinite(point[1]), curve))
    assert len(bad) == len(finite)
    ((x, y),) = crosses(svg, colour)
    assert x == good[len(finite) - 1][0]
    above = finite[-1][1] > curve[0][1] + 0.2  # the frame ends a little above the first losses
    assert y == pytest.approx(frame_of(svg)[1] if above else bad[-1][1], abs=0.01)


def test_an_arm_that_failed_in_every_seed_has_a_band_of_its_own():
    higher = [(step, loss + 0.2) for step, loss in PLATEAU]
    stopped = falling(2.5)[:2]
    runs = {"post": ended(PLATEAU, higher, stopped, failed=True), "pre": ended(falling(2.5))}
    svg = draw("loss_bands", runs, 3.3, 2.5)
    assert {"post (3 of 3 failed)", "pre (1 seed)"} <= set(texts(svg))
    colour = colours(runs)["post"]
    low, high, short = lines_of(svg, colour, "0.6")
    mean = lines_of(svg, colour, "1.8")[0]
    assert mean == [
        (x, pytest.approx((a + b) / 2, abs=0.01)) for (x, a), (_, b) in zip(low, high, strict=True)
    ]
    assert len(short) == 2
    assert len(crosses(svg, colour)) == 3
    assert any("averaged only if all did" in text for text in texts(svg))
    left, _, width = frame_of(svg)
    assert left + width > 500  # of 518 points: no words beside it take its room


def test_without_a_failure_no_word_is_said_of_any():
    svg = draw("loss_bands", {"post": ended(PLATEAU, falling(2.5))}, 3.3, 2.5)
    assert "post (2 seeds)" in texts(svg)
    assert not any("failed" in text for text in texts(svg))
    assert crosses(svg, colours(["post"])["post"]) == []


def test_an_explosion_does_not_press_the_other_curves_flat():
    calm, wild = falling(2.5), [(0, 4.0), (1, 2e5), (2, 4.1), (5, 4.0), (9, 4.0), (30, 4.0)]
    svg = draw("loss_bands", {"pre": ended(calm), "post": ended(wild)}, 3.3, 2.5)
    ys = [y for _, y in lines_of(svg, colours(["pre"])["pre"], "1.8")[0]]
    assert max(ys) - min(ys) > 100
    assert "↑ up to 2e+05" in texts(svg)


def test_yardsticks_are_drawn_with_their_values():
    said = texts(draw("loss_bands", {"pre": ended(falling(2.5))}, 3.347, 2.484))
    assert {"unigram 3.347", "bigram 2.484"} <= set(said)
    assert not any(
        "gram" in text for text in texts(draw("loss_bands", {"pre": ended(falling(2.5))}))
    )


def test_a_line_of_medians_breaks_where_a_seed_failed():
    points = {"post": {1e-3: [2.6], 2e-3: [2.5, None], 5e-3: [2.4, 2.7, 2.8], 1e-2: [2.9]}}
    svg = draw("loss_against_rate", points)
    (line, *_) = lines_of(svg, colours(points)["post"], "1.8")
    assert len(line) == 3  # one point alone, no line; then two
    assert {"1/2", "0.002"} <= set(texts(svg))


def test_the_phase_map_marks_every_seed_and_counts_many():
    states = {
        "post": {
            (1e-3, 2): ["learned"] * 3,
            (1e-3, 6): ["learned", "plateau", "diverged", "undecided"],
            (3e-3, 6): ["plateau"] * 7 + ["diverged"] * 4,
        }
    }
    svg = draw("phase_map", states)
    assert svg.count("fill: #009e73; stroke: " + INK) == 3 + 1
    assert {"7", "4", "learned", "plateau", "diverged", "undecided"} <= set(texts(svg))
    assert svg.count("opacity: 0.3") == 1  # one field whose seeds agree


def test_the_slopes_of_depth_are_measured_and_those_of_theory_drawn():
    data = {
        "pre": {d: [1.3 * d**-0.5, 1.3 * d**-0.5] for d in (2, 4, 7, 12)},
        "post": {2: [1], 9: [1]},
    }
    said = texts(draw("gradient_by_depth", data))
    assert {"pre (slope -0.50)", "post (slope +0.00)", "slope 0", "slope −1/2"} <= set(said)


def test_the_square_root_law_starts_at_the_stream_of_the_embedding():
    svg = draw("stream_growth", {"sandwich": [math.hypot(0.5, math.sqrt(k)) for k in range(7)]})
    assert "√(x₀² + k), x₀ = 0.5" in texts(svg)
    (measured,) = lines_of(svg, colours(["sandwich"])["sandwich"], "1.8")[:1]
    law = next(line for line in lines_of(svg, INK, "0.9") if len(line) == 7)
    assert [y for _, y in law] == pytest.approx([y for _, y in measured], abs=0.01)


def test_a_line_has_no_point_where_its_value_has_no_place():
    svg = draw("gradient_by_block", {"pre": [1.0, 0.5, 0.0, 0.7, math.inf, 0.6, 0.9]})
    (line, *_) = lines_of(svg, colours(["pre"])["pre"], "1.8")
    assert len(line) == 5
    assert "▼ at the bottom: 0" in " ".join(texts(svg))


def test_the_heat_map_has_a_field_for_every_block_and_step():
    svg = draw(
        "gradient_heat", {"post": [[(s, 10.0 ** -(b + s)) for s in (0, 1, 3)] for b in range(5)]}
    )
    fields = re.findall(r'<path d="[^"]*" clip-path="[^"]*" style="fill: (#\w{6}); stroke', svg)
    assert len(fields) == 15
    assert fields[0] != fields[-1]


def test_a_title_is_the_callers_and_the_accessible_name():
    svg = draw("loss_bands", {"pre": ended(falling(2.5))}, title='Losses of "mine" & <yours> ' * 4)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label", "").startswith('Losses of "mine" & <yours> Losses')
    assert sum('Losses of "mine"' in text for text in texts(svg)) > 1


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_in_a_file_of_its_own_is_on_white(name):
    svg = draw(name, *arguments(HOSTILE, falling(2.5))[name])
    file = standalone(svg)
    assert file.startswith("<?xml")
    root = ElementTree.fromstring(file.encode("utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    paper, *rest = root
    assert paper.attrib == {"width": "100%", "height": "100%", "fill": "#ffffff"}
    assert len(rest) == len(ElementTree.fromstring(svg))
    assert "var(" not in file
