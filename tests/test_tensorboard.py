"""A real TensorBoard server, and its page in a real browser."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpt.training.metrics import Metrics

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "tensorboard_picture.py"
STEPS = range(0, 60, 6)
# Two runs, the same tags and steps, other values.
LOSSES = {"post_ln": lambda step: 3.0 - step / 40, "pre_ln": lambda step: 2.5 - step / 35}


@pytest.fixture(scope="module")
def picture():
    spec = importlib.util.spec_from_file_location("tensorboard_picture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def url(picture, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for run, loss in LOSSES.items():
        (root / run).mkdir()
        with Metrics(root / run) as metrics:
            for step in STEPS:
                metrics.write(step, {"loss/val": loss(step), "lr": 1e-3})
            metrics.text("sample", "<img src=x>\nto be & not", 0)
    with picture.serve(root) as url:
        picture.runs_with(url, "loss/val")
        yield url


@pytest.fixture(scope="module")
def chromium():
    """Skips where there is no browser, but not where tests must not be skipped."""
    missing = [
        name
        for name, there in (
            ("the chromium program", shutil.which("chromium")),
            ("the playwright package", importlib.util.find_spec("playwright")),
        )
        if not there
    ]
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {' and '.join(missing)}")


def test_two_run_folders_are_two_runs_with_the_same_tags(picture, url):
    assert sorted(picture.ask(url, "runs")) == ["post_ln", "pre_ln"]
    tags = picture.ask(url, "plugin/scalars/tags")
    assert tags["post_ln"].keys() == tags["pre_ln"].keys() == {"loss/val", "lr"}


def test_the_curves_have_equal_steps_and_their_own_values(picture, url):
    curves = {
        run: picture.ask(url, "plugin/scalars/scalars", run=run, tag="loss/val") for run in LOSSES
    }
    for run, points in curves.items():
        assert [step for _, step, _ in points] == list(STEPS)
        assert [value for _, _, value in points] == pytest.approx([*map(LOSSES[run], STEPS)])
    assert curves["post_ln"] != curves["pre_ln"]


def test_a_sample_is_served_as_text_without_markup(picture, url):
    (text,) = picture.ask(url, "plugin/text/text", run="pre_ln", tag="sample/text_summary")
    assert "<pre><code>&lt;img src=x&gt;\nto be &amp; not\n</code></pre>" in text["text"]


def test_the_page_overlays_both_runs_in_one_chart(picture, url, chromium, tmp_path):
    out = tmp_path / "chart.png"
    text = picture.take_picture(url, "loss/val", out)
    for run, loss in LOSSES.items():
        assert run in text
        assert f"{loss(STEPS[-1]):.4f}".rstrip("0") in text
    # The page's bar is orange; what else has a colour are the two lines.
    assert len(picture.line_colours(out.read_bytes())) == 3


def test_a_line_colour_is_counted_once_and_grey_never(picture, tmp_path):
    pixels = np.full((40, 50, 3), 255, np.uint8)
    pixels[0:5] = 120, 120, 120
    pixels[10:13] = 18, 181, 203
    pixels[13:15] = 136, 218, 229  # the same, mixed with white
    pixels[20:23] = 66, 80, 102
    Image.fromarray(pixels).save(tmp_path / "lines.png")
    colours = picture.line_colours((tmp_path / "lines.png").read_bytes())
    assert colours == [(66, 80, 102), (18, 181, 203)]


def test_the_script_takes_the_picture_by_command(picture, chromium, tmp_path):
    for run in LOSSES:
        (tmp_path / "runs" / run).mkdir(parents=True)
        with Metrics(tmp_path / "runs" / run) as metrics:
            for step in STEPS:
                metrics.write(step, {"loss/train": LOSSES[run](step)})
    out = tmp_path / "chart.png"
    command = [sys.executable, SCRIPT, tmp_path / "runs", out, "--tag", "loss/train"]
    subprocess.run(command, check=True, capture_output=True)
    assert len(picture.line_colours(out.read_bytes())) == 3
