"""Take a picture of one chart as TensorBoard draws it, all runs of a folder overlaid.

    python benchmarks/tensorboard_picture.py LOGDIR OUT.png [--tag loss/val]

Starts a TensorBoard server and a headless Chromium (Debian: ``apt install chromium``) that
Playwright drives (``pip install playwright``). TensorBoard draws in real time and in WebGL, so this
takes some seconds and waits for a line of each run.
"""

import argparse
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PATIENCE = 90  # seconds, for a server or browser on a busy machine


@contextlib.contextmanager
def serve(logdir: Path) -> Iterator[str]:
    """The address of a TensorBoard server that shows ``logdir``, stopped at the end."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    command += ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _wait_for(lambda: _address(log, server), "TensorBoard to start")
        finally:
            server.terminate()
            server.wait(timeout=PATIENCE)


def ask(url: str, path: str, **query: str) -> Any:
    """What the server answers to ``/data/<path>?<query>``."""
    address = urllib.parse.urljoin(url, f"data/{path}?{urllib.parse.urlencode(query)}")
    with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
        return json.load(answer)


def runs_with(url: str, tag: str) -> list[str]:
    """The runs that have the scalar ``tag``, once the server has read any."""

    def found() -> list[str]:
        tags = ask(url, "plugin/scalars/tags")
        return sorted(run for run in tags if tag in tags[run])

    return _wait_for(found, f"a run with {tag}")


def take_picture(url: str, tag: str, out: Path) -> str:
    """Write the page with the chart of ``tag`` to ``out``; return the page's text.

    Raises TimeoutError when the chart does not get a line for each run.
    """
    from playwright.sync_api import sync_playwright

    n_runs = len(runs_with(url, tag))
    query = urllib.parse.urlencode({"tagFilter": f"^{tag}$", "smoothing": "0"})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            # Root needs the first; the second draws WebGL without a graphics card.
            args=["--no-sandbox", "--enable-unsafe-swiftshader"],
        )
        page = browser.new_page(viewport={"width": 1000, "height": 640})
        page.set_default_timeout(PATIENCE * 1000)
        page.goto(f"{url}?{query}#timeseries")
        page.get_by_text("Ignore outliers in chart scaling").click()
        page.get_by_label("Toggle settings side pane").click()
        page.get_by_label("Toggle full size mode").first.click()
        chart = page.locator("line-chart").first
        _wait_for(lambda: len(line_colours(chart.screenshot())) >= n_runs, "a line for each run")
        page.mouse.move(0, 0)
        page.screenshot(path=out)
        text = page.inner_text("body")
        browser.close()
    return text


def line_colours(png: bytes) -> list[tuple[int, ...]]:
    """The colours of a chart's lines: frequent, and not grey as axes and text are.

    The soft edge of a line, its colour mixed with white, is not another colour.
    """
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    coloured = (np.ptp(colours.astype(int), axis=1) > 15) & (counts >= 50)
    lines: list[tuple[int, ...]] = []
    for colour in sorted(colours[coloured].tolist(), key=sum):
        if all(_similarity(colour, line) < 0.99 for line in lines):
            lines.append(tuple(colour))
    return lines


def _similarity(a: Iterable[int], b: Iterable[int]) -> float:
    """Cosine between two colours seen from white: 1 for mixtures of one colour with white."""
    u, v = 255.0 - np.array([*a]), 255.0 - np.array([*b])
    return float(u @ v / np.sqrt((u @ u) * (v @ v)))


def _address(log: Any, server: subprocess.Popen) -> str:
    log.seek(0)
    said = log.read()
    if server.poll() is not None:
        raise RuntimeError(f"TensorBoard ended: {said}")
    found = re.search(r"http://127\.0\.0\.1:\d+/", said)
    return found[0] if found else ""


def _wait_for(condition: Any, what: str) -> Any:
    deadline = time.perf_counter() + PATIENCE
    while not (result := condition()):
        if time.perf_counter() > deadline:
            raise TimeoutError(f"waited {PATIENCE} s for {what}")
        time.sleep(0.3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a picture of a TensorBoard chart.")
    parser.add_argument("logdir", type=Path, help="folder of run folders")
    parser.add_argument("out", type=Path, help="PNG to write")
    parser.add_argument("--tag", default="loss/val", help="the curve (default: loss/val)")
    options = parser.parse_args()
    with serve(options.logdir) as url:
        take_picture(url, options.tag, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
