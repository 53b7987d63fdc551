"""The report: one page that holds everything, and in which nothing a user named is obeyed."""

import importlib.util
import os
import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from gpt.errors import DiskError, UsageError
from gpt.lab.figures import loss_bands, phase_map, stream_growth
from gpt.lab.figures.drawing import standalone
from gpt.lab.figures.looks import INK
from gpt.lab.report import Figure, Section, Table, report, write_report

HOSTILE = (
    '</pre></td></svg><img src=x onerror=alert(1)><script>alert("x")</script> \' & \x1b\u202e\udcff'
)
CURVE = [(0, 4.1), (3, 3.2), (8, 2.7)]
VOID = {"meta", "path", "use", "rect"}


class Outline(HTMLParser):
    """Which elements the page has, that they are closed in order, and what is said in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.said: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.setdefault(self.open[-1] if self.open else "", []).append(data)


def bands(name: str) -> str:
    return loss_bands({name: [(CURVE, False)]}, 3.3, 2.5)


def sections(name: str = "post") -> list[Section]:
    return [
        Section(
            f"Found about {name}",
            [f"{name}: 5 of 5 failed", "  NOT RESOLVED"],
            [
                Figure("losses", f"The losses of {name}", bands(name)),
                Figure("phase_map", "", phase_map({name: {(1e-3, 2): ["learned"]}})),
            ],
            [Table(["arm", "final"], [[name, "2.5"], ["pre", "2.6"]], f"Runs of {name}")],
        ),
        Section(
            "Inside",
            figures=[Figure("a-stream", "The stream", stream_growth({name: [0.2, 1.1, 1.4]}))],
        ),
    ]


MADE = {"command": "compare.py demo", "code": "0a1b", "data": "2c3d"}


def test_figures_are_not_written_through_a_link(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "figures").symlink_to(other)
    with pytest.raises(UsageError, match="figures' is a link"):
        write_report(tmp_path, "t", sections())
    assert not list(other.iterdir())


def test_the_page_holds_statement_tables_figures_and_how_it_was_made(tmp_path):
    path = write_report(tmp_path, "Norms", sections(), made=MADE)
    assert path == tmp_path / "report.html"
    page = path.read_bytes().decode("utf-8")
    outline = Outline(page)
    assert outline.said["h1"] == ["Norms"]
    assert outline.said["h2"] == ["Found about post", "Inside", "How this was made"]
    assert outline.said["pre"] == ["post: 5 of 5 failed\n  NOT RESOLVED"]
    assert outline.said["th"] == ["arm", "final"]
    assert outline.said["td"] == ["post", "2.5", "pre", "2.6"]
    assert outline.said["caption"] == ["Runs of post"]
    assert outline.said["figcaption"] == ["The losses of post", "The stream"]
    assert outline.said["dt"] == ["command", "code", "data"]
    assert outline.said["code"] == ["compare.py demo", "0a1b", "2c3d"]
    assert [tag for tag, _ in outline.found].count("svg") == 3


def test_lines_stay_lines_and_columns_are_not_folded():
    lines = ["in short", "seed    post    pre", "3      2.500  2.600", "", "  and <more>", "a  b"]
    page = report("Norms", [Section("One", lines)])
    columns = '<span class="columns">'
    assert (
        f"<pre>in short\n{columns}seed    post    pre\n3      2.500  2.600</span>\n"
        f"  and &lt;more&gt;\n{columns}a  b</span></pre>"
    ) in page


def test_the_page_refers_to_nothing_outside_and_runs_nothing():
    outline = Outline(report("Norms", sections(), made=MADE))
    tags = {tag for tag, _ in outline.found}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}
    for tag, attributes in outline.found:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "xlink:href", "src"):
                assert value.startswith("#"), (tag, value)
    policy = next(a for t, a in outline.found if t == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy["content"]
    said = " ".join(outline.said["style"])
    assert "@import" not in said
    assert "url(" not in said


def test_no_two_elements_have_one_id():
    ids = [
        a["id"]
        for _, a in Outline(report("Norms", sections() + sections("pre"))).found
        if "id" in a
    ]
    assert len(ids) > 8
    assert len(ids) == len(set(ids))


def test_what_a_user_named_is_text_wherever_it_stands():
    page = report(HOSTILE, sections(HOSTILE), made={HOSTILE: HOSTILE})
    plain = report("x", sections("x"), made={"x": "x"})
    kinds = [[tag for tag, _ in Outline(text).found] for text in (page, plain)]
    assert kinds[0] == kinds[1]
    assert not re.search("[\x1b\u202e\udcff]", page)
    said = Outline(page).said
    for tag in ("title", "h1", "dt", "code", "td", "pre"):
        assert '<script>alert("x")</script>' in "".join(said[tag]), tag
    page.encode("utf-8")


def test_figures_take_the_colours_of_the_page_but_keep_their_words():
    page = report("Norms", [Section("One", figures=[Figure("losses", "", bands(INK))])])
    body = page[page.index("<main>") :]
    assert "fill: var(--ink)" in body
    assert f"fill: {INK}" not in body
    assert f">{INK} (1 seed)<" in body


def test_a_report_is_replaced_whole_or_not_at_all(tmp_path):
    write_report(tmp_path, "First", sections())
    write_report(tmp_path, "Second", [])
    assert "Second" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "report.html"]
    with pytest.raises(DiskError, match="nowhere"):
        write_report(tmp_path / "nowhere", "Third", [])


def test_every_figure_is_a_file_too(tmp_path):
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / "mine.svg").write_text("mine", encoding="utf-8")
    for name in ("pre", HOSTILE):
        write_report(tmp_path, "Norms", sections(name))
        assert {path.name for path in folder.iterdir()} == {
            "mine.svg", "losses.svg", "phase_map.svg", "a-stream.svg"
        }  # fmt: skip
        assert (folder / "losses.svg").read_text(encoding="utf-8") == standalone(bands(name))
        for path in set(folder.iterdir()) - {folder / "mine.svg"}:
            root = ElementTree.parse(path).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert (folder / "mine.svg").read_text(encoding="utf-8") == "mine"
    write_report(tmp_path, "Norms", [])
    assert len(list(folder.iterdir())) == 4


def test_without_figures_there_is_no_folder_for_them(tmp_path):
    write_report(tmp_path, "Norms", [Section("One", ["a line"])])
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_folder_for_figures_that_cannot_be_made_is_one_readable_error(tmp_path):
    (tmp_path / "figures").write_text("in the way", encoding="utf-8")
    with pytest.raises(DiskError, match="figures"):
        write_report(tmp_path, "Norms", sections())


@pytest.mark.parametrize("name", ["", "../x", "a b", "x.svg", "naïve"])
def test_the_name_of_a_figure_is_one_of_a_file(name):
    with pytest.raises(AssertionError):
        Figure(name, "", "<svg/>")


def test_two_figures_of_one_name_are_a_bug(tmp_path):
    with pytest.raises(AssertionError):
        write_report(tmp_path, "Norms", sections() + sections())


@pytest.fixture
def browser():
    """Skips where there is no browser, but not where tests must not be skipped."""
    chromium = shutil.which("chromium")
    if not (chromium and importlib.util.find_spec("playwright")):
        needed = "needs the chromium program and the playwright package"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(needed)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (900, "dark"), (375, "light")])
def test_a_browser_without_network_shows_all_of_it(browser, tmp_path, width, scheme):
    path = write_report(tmp_path, HOSTILE, sections(HOSTILE), made=MADE)
    context = browser.new_context(
        viewport={"width": width, "height": 700}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append("a dialog"))
    page.goto(path.as_uri())
    assert asked == [path.as_uri()]
    assert said == []
    boxes = page.eval_on_selector_all(
        "svg", "all => all.map(one => [one.getBBox().width, one.clientWidth, one.clientHeight])"
    )
    assert len(boxes) == 3
    assert all(min(box) > 100 for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    colours = page.evaluate(
        "['color', 'background-color'].map(c => getComputedStyle(document.body)[c])"
    )
    ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (ink > paper) == (scheme == "dark")
    fill = page.eval_on_selector("svg text", "one => getComputedStyle(one).fill")
    assert fill == colours[0]
