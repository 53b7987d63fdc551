"""The run _aggregate and the hyperparameters, as TensorBoard reads them."""

import dataclasses
import errno
import importlib.util
import json
import math
import os
import shutil
import struct
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PluginEventAccumulator,
)
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray

from gpt.config import RunConfig
from gpt.errors import DiskError, UsageError
from gpt.lab.board import hashes, write_board
from gpt.lab.figures import loss_bands
from gpt.lab.outcomes import Outcome
from gpt.training.board import Board
from gpt.training.metrics import Metrics

STEPS = (0, 4, 11)
LOSSES = {  # (arm, seed) -> the curve
    ("post", 3): (4.0, 3.5, 3.25), ("post", 8): (4.5, 3.0, 2.75),
    ("pre <x>", 3): (4.25, 3.0, 2.0), ("pre <x>", 8): (4.25, 3.5, 2.5),
}  # fmt: skip
CONFIGS = {
    "post": RunConfig().with_changes({"norm_position": "post", "warmup_steps": 7}),
    "pre <x>": RunConfig().with_changes({"warmup_steps": 5}),
}


def outcome(arm: str, seed: int, losses: tuple[float, ...], **changes) -> Outcome:
    values = {
        "arm": arm, "seed": seed, "state": "learned", "first": losses[0], "final": losses[-1],
        "best": min(losses), "steps": 11, "characters": 352, "n_parameters": 99, "seconds": 1.5,
        "hashes": {"weights/a": f"w{seed}", "weights/b": "w", "batches": f"b{seed}"},
    }  # fmt: skip
    return Outcome(**(values | changes))


@pytest.fixture
def outcomes(tmp_path) -> list[Outcome]:
    for (arm, seed), losses in LOSSES.items():
        write_curves(tmp_path / f"{arm}-s{seed}", losses)
    return [outcome(arm, seed, losses) for (arm, seed), losses in LOSSES.items()]


def write_curves(folder, losses, extra=()):
    folder.mkdir()
    with Metrics(folder) as metrics:
        for step, loss in zip(STEPS, losses, strict=False):
            metrics.write(step, {"loss/val": loss, **dict.fromkeys(extra, 0.5)})


def read(folder) -> PluginEventAccumulator:
    """What a TensorBoard server knows of a run."""
    board = PluginEventAccumulator(str(folder), size_guidance={"tensors": 0})
    board.Reload()
    return board


def scalars(board: PluginEventAccumulator) -> dict[str, list[tuple[int, float]]]:
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in board.Tensors(tag)]
        for tag in board.PluginTagToContent("scalars")
        if board.Tensors(tag)
    }


def value(board: PluginEventAccumulator, tag: str) -> list[bytes]:
    (event,) = board.Tensors(tag)
    return list(event.tensor_proto.string_val)


def layout(board: PluginEventAccumulator) -> Layout:
    return Layout.FromString(value(board, "custom_scalars__config__")[0])


def text(board: PluginEventAccumulator, tag: str) -> str:
    return value(board, f"{tag}/text_summary")[0].decode()


def write(out, outcomes, **changes):
    figure = {
        "loss_bands": loss_bands.png(
            {"post": [([*zip(STEPS, (4.0, 3.0, 2.0), strict=True)], False)]}
        )
    }
    values = {
        "arms": ["post", "pre <x>"], "outcomes": outcomes, "statement": ["<b>NOT</b>", "RESOLVED"],
        "figures": figure, "differences": ["post: norm_position"], "configs": CONFIGS,
    }  # fmt: skip
    write_board(out, **(values | changes))


def test_bands_are_over_seeds_and_both_arms_are_on_one_chart(outcomes, tmp_path):
    write(tmp_path, outcomes)
    board = read(tmp_path / "_aggregate")
    assert scalars(board) == {
        "agg/post/val/mean": [(0, 4.25), (4, 3.25), (11, 3.0)],
        "agg/post/val/lo": [(0, 4.0), (4, 3.0), (11, 2.75)],
        "agg/post/val/hi": [(0, 4.5), (4, 3.5), (11, 3.25)],
        "agg/pre <x>/val/mean": [(0, 4.25), (4, 3.25), (11, 2.25)],
        "agg/pre <x>/val/lo": [(0, 4.25), (4, 3.0), (11, 2.0)],
        "agg/pre <x>/val/hi": [(0, 4.25), (4, 3.5), (11, 2.5)],
    }
    (category,) = layout(board).category
    assert category.title == "1 Outcome"
    margin = next(chart.margin for chart in category.chart if chart.HasField("margin"))
    assert [(s.value, s.lower, s.upper) for s in margin.series] == [
        tuple(f"agg/{arm}/val/{what}" for what in ("mean", "lo", "hi")) for arm in CONFIGS
    ]


def test_a_failed_run_is_in_no_band(outcomes, tmp_path):
    write_curves(tmp_path / "post-s9", (4.0, 3.25))
    write_curves(tmp_path / "gone-s9", (4.0, math.nan, math.nan))
    failed = {"final": None, "best": None, "state": "diverged", "failure": "loss = nan"}
    more = [outcome("post", 9, (4.0, 3.25), **failed), outcome("gone", 9, (4.0,), **failed)]
    write(tmp_path, outcomes + more, arms=["post", "pre <x>", "gone"])
    board = read(tmp_path / "_aggregate")
    assert scalars(board)["agg/post/val/mean"] == [(0, 4.25), (4, 3.25), (11, 3.0)]
    assert not any("gone" in tag for tag in scalars(board))
    assert "gone" not in str(layout(board))


@pytest.mark.parametrize(("state", "losses"), [("plateau", (4, 3.5, 3.5)), ("diverged", (4, 5, 6))])
def test_a_run_that_failed_with_a_loss_is_in_no_band_but_one_of_failures(
    outcomes, tmp_path, state, losses
):
    write_curves(tmp_path / "post-s9", losses)
    write_curves(tmp_path / "bad-s9", losses)
    write_curves(tmp_path / "bad-s8", (4.0, 3.5))  # it stopped there
    more = [outcome(arm, 9, losses, state=state) for arm in ("post", "bad")]
    more.append(outcome("bad", 8, (4.0,), state="diverged", final=None))
    write(tmp_path, outcomes + more, arms=["post", "pre <x>", "bad"])
    board = read(tmp_path / "_aggregate")
    assert scalars(board)["agg/post/val/mean"] == [(0, 4.25), (4, 3.25), (11, 3.0)]
    for what in ("mean", "lo", "hi"):
        assert scalars(board)[f"agg/bad/val/{what}"] == list(zip(STEPS, losses, strict=True))
    assert "of all where all failed" in str(layout(board))


def test_a_run_too_short_to_tell_is_in_the_band(outcomes, tmp_path):
    undecided = [dataclasses.replace(outcome, state="undecided") for outcome in outcomes]
    write(tmp_path, [*outcomes[1:], undecided[0]])
    assert scalars(read(tmp_path / "_aggregate"))["agg/post/val/mean"][0] == (0, 4.25)


def test_categories_are_there_when_they_have_data(outcomes, tmp_path):
    extra = (
        "probe/dF",
        "probe/branch_over_skip",
        "probe/branch_over_skip_01",
        "grad_norm/block_00",
    )
    write_curves(tmp_path / "post-s9", (4.0, 3.0, 2.0), extra)
    rates = {"post": {0.003: [2.5, 2.75, 2.7], 0.01: [2.5, None]}}
    write(tmp_path, [*outcomes, outcome("post", 9, (4.0, 3.0, 2.0))], rates=rates)
    board = read(tmp_path / "_aggregate")
    shown = {
        category.title: [tag for chart in category.chart for tag in chart.multiline.tag]
        for category in layout(board).category
    }
    assert shown == {
        "1 Outcome": ["loss/val$"],
        "2 Why: first updates": ["probe/dF$", "probe/branch_over_skip$"],
        "3 Signal by depth": [r"probe/branch_over_skip_\d+$", r"grad_norm/block_\d+$"],
        "4 Sweep": ["sweep/.*/median$", "sweep/.*/failed$"],
    }
    points = scalars(board)
    assert points["sweep/post/median"] == [(0, pytest.approx(2.7))]
    assert points["sweep/post/failed"] == [(0, 0), (1, 1)]


def test_rates_have_steps_of_their_own_whatever_they_are(outcomes, tmp_path):
    rates = {"post": {1e-3: [2.5], 1e30: [2.75]}, "pre": {1e-3: [2.0], 1.0000001e-3: [2.25]}}
    write(tmp_path, outcomes, rates=rates)
    board = read(tmp_path / "_aggregate")
    points = scalars(board)
    assert points["sweep/post/median"] == [(0, 2.5), (2, 2.75)]
    assert points["sweep/pre/median"] == [(0, 2.0), (1, 2.25)]
    assert text(board, "rates").split() == [
        "step", "0:", "1e-3", "step", "1:", "1.0000001e-3", "step", "2:", "1e30",
    ]  # fmt: skip


def test_texts_are_shown_as_they_are_and_figures_are_images(outcomes, tmp_path):
    write(tmp_path, outcomes)
    board = read(tmp_path / "_aggregate")
    assert text(board, "statement") == "    <b>NOT</b>\n    RESOLVED"
    assert text(board, "differences") == "    post: norm_position"
    assert text(board, "hashes").splitlines() == ["    " + line for line in hashes(outcomes)]
    width, height, png = value(board, "figures/loss_bands")
    assert (int(width), int(height)) == struct.unpack(">II", png[16:24])
    assert int(width) == 1080


def test_hashes_show_which_arms_agree(outcomes):
    odd = outcome("third", 3, (4.0,), hashes={"weights/a": "w3", "weights/b": "w", "batches": "b8"})
    lines = [line.split() for line in hashes([*outcomes, odd])]
    assert [line[1:3] + line[4:] for line in lines] == [
        ["3", "batches", "post", "pre", "<x>"],
        ["3", "weights", "post", "pre", "<x>", "third"],
        ["3", "batches", "third"],
        ["8", "batches", "post", "pre", "<x>"],
        ["8", "weights", "post", "pre", "<x>"],
    ]
    assert len({line[3] for line in lines}) == 4  # the third has the batches of another seed


def session(folder) -> HParamsPluginData:
    content = read(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    return HParamsPluginData.FromString(content).session_start_info.hparams


def test_a_run_has_its_hyperparameters_beside_its_curves(outcomes, tmp_path):
    write(tmp_path, outcomes)
    run = tmp_path / "post-s8"
    settings = {k: v.string_value or v.number_value for k, v in session(run).items()}
    config = CONFIGS["post"].resolved()
    assert settings == {
        "placement": "post", "norm": "layer", "init": config.model.init, "warmup_steps": 7,
        "learning_rate": config.training.learning_rate, "n_layers": config.model.n_layers,
        "d_model": config.model.d_model, "seed": 8, "state": "learned",
    }  # fmt: skip
    points = scalars(read(run))
    assert points["loss/val"] == [(0, 4.5), (4, 3.0), (11, 2.75)]
    assert points["hp/final"] == points["hp/best"] == [(0, 2.75)]
    assert points["hp/warmup_steps"] == [(0, 7.0)]


def test_written_again_everything_is_there_once(outcomes, tmp_path):
    write(tmp_path, outcomes)
    running = [read(tmp_path / "_aggregate"), read(tmp_path / "post-s8")]
    for arms, words in ((["post", "pre <x>"], "NOT RESOLVED"), (["post"], "EQUIVALENT")):
        write(tmp_path, outcomes, arms=arms, statement=[words])
        fresh = [read(tmp_path / "_aggregate"), read(tmp_path / "post-s8")]
        for aggregate, run in (running, fresh):  # a server reads on; another starts
            aggregate.Reload()
            run.Reload()
            assert scalars(aggregate)["agg/post/val/mean"] == [(0, 4.25), (4, 3.25), (11, 3.0)]
            assert text(aggregate, "statement") == f"    {words}"
            assert value(aggregate, "figures/loss_bands")[2].startswith(b"\x89PNG")
            assert len(layout(aggregate).category[0].chart[0].margin.series) == len(arms)
            assert scalars(run)["loss/val"] == [(0, 4.5), (4, 3.0), (11, 2.75)]
        assert scalars(fresh[1])["hp/final"] == [(0, 2.75)]
    assert "agg/pre <x>/val/mean" not in scalars(fresh[0])
    files = sorted((tmp_path / "_aggregate").glob("events.*"))
    assert [path.stat().st_size > 0 for path in files] == [False, True]
    assert len(list((tmp_path / "post-s8").glob("*.hparams"))) == 1
    other = [dataclasses.replace(outcome, best=1.5) for outcome in outcomes]
    for changed in (other, outcomes, other):
        write(tmp_path, changed)
        fresh = read(tmp_path / "post-s8")
        best = min(outcome.best for outcome in changed if outcome.name == "post-s8")
        assert scalars(fresh)["hp/best"] == [(0, best)]
        assert len(list((tmp_path / "post-s8").glob("*.hparams"))) == 2


def test_a_planted_link_is_not_followed(outcomes, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine", encoding="utf-8")
    (tmp_path / "_aggregate").mkdir()
    (tmp_path / "_aggregate" / "events.out.tfevents.0000000007.1").symlink_to(precious)
    write(tmp_path, outcomes)
    assert precious.read_text(encoding="utf-8") == "mine"
    assert scalars(read(tmp_path / "_aggregate"))["agg/post/val/lo"][0] == (0, 4.0)


@pytest.mark.parametrize("name", ["_aggregate", "post-s8"])
def test_a_folder_that_is_a_link_is_refused_and_what_it_leads_to_stays(outcomes, tmp_path, name):
    other = tmp_path / "other"
    write_curves(other, (4.5, 3.0, 2.75))
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    (tmp_path / name).symlink_to(other)
    before = {path: path.read_bytes() for path in other.iterdir()}
    with pytest.raises(UsageError, match=rf"{name}' is a link.* delete the link"):
        write(tmp_path, outcomes)
    assert before == {path: path.read_bytes() for path in other.iterdir()}


def test_event_files_of_others_beside_its_own_are_left_alone(outcomes, tmp_path):
    write_curves(tmp_path / "_aggregate", (4.5, 3.0, 2.75))
    (theirs,) = (tmp_path / "_aggregate").glob("events.*")
    before = theirs.read_bytes()
    for _ in range(3):
        write(tmp_path, outcomes)
    assert theirs.read_bytes() == before


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "another curve": lambda path: path.write_bytes(b'{"step": 0, "lr": 1.0}\n'),
    "no line": lambda path: path.write_bytes(b"?\n" + path.read_bytes()),
    "long step": lambda path: path.write_bytes(
        path.read_bytes() + b'{"step": %d, "loss/val": 2.5}\n' % 2**63
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_run_without_its_curves_is_named_with_the_remedy(outcomes, tmp_path, damage):
    DAMAGES[damage](tmp_path / "post-s8" / "metrics.jsonl")
    with pytest.raises(UsageError, match=r"post-s8' is of a finished run.* delete that folder"):
        write(tmp_path, outcomes)


def test_without_settings_no_run_is_touched(outcomes, tmp_path):
    before = sorted(tmp_path.glob("*/*"))
    write(tmp_path, outcomes, configs={})
    assert sorted(set(tmp_path.glob("*/*")) - set(before)) == list(tmp_path.glob("_aggregate/*"))


def test_a_disk_that_refuses_is_one_readable_error(outcomes, tmp_path):
    (tmp_path / "_aggregate").write_text("in the way", encoding="utf-8")
    with pytest.raises(DiskError, match="_aggregate"):
        write(tmp_path, outcomes)


def test_a_full_disk_is_one_too(outcomes, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Board, "scalars", full)
    with pytest.raises(DiskError, match="No space left"):
        write(tmp_path, outcomes)


def test_what_a_resumed_run_declares_void_is_gone_in_the_server(tmp_path):
    for first_step, steps, value in ((None, range(5), 1.0), (3, range(3, 6), 2.0), (4, [4], 3.0)):
        board = Board(tmp_path, first_step)
        for step in steps:
            board.scalars({"loss/val": value}, step)
        board.close()
    points = scalars(read(tmp_path))["loss/val"]
    assert points == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0)]


def test_an_image_is_a_png(tmp_path):
    board = Board(tmp_path)
    with pytest.raises(ValueError, match="'figures/x' is not a PNG file"):
        board.image("figures/x", b"<svg>" * 9, 0)
    board.close()


@pytest.fixture(scope="module")
def picture():
    path = Path(__file__).parents[1] / "benchmarks" / "tensorboard_picture.py"
    spec = importlib.util.spec_from_file_location("tensorboard_picture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def request(picture, url, what: str, **content):
    return picture.ask(url, f"plugin/hparams/{what}", request=json.dumps(content))


@pytest.mark.slow
def test_a_server_shows_bands_hyperparameters_images_and_texts(picture, outcomes, tmp_path):
    write(tmp_path, outcomes)
    write(tmp_path, outcomes)
    with picture.serve(tmp_path) as url:
        assert picture.runs_with(url, "loss/val") == [f"{arm}-s{seed}" for arm, seed in LOSSES]
        (category,) = picture.ask(url, "plugin/custom_scalars/layout")["category"]
        assert [series["value"] for series in category["chart"][0]["margin"]["series"]] == [
            "agg/post/val/mean",
            "agg/pre <x>/val/mean",
        ]
        tags = picture.ask(url, "plugin/scalars/tags")
        assert tags["post-s3"].keys() == tags["pre <x>-s8"].keys()
        for arm in CONFIGS:
            for what in ("mean", "lo", "hi"):
                query = {"run": "_aggregate", "tag": f"agg/{arm}/val/{what}"}
                points = picture.ask(url, "plugin/scalars/scalars", **query)
                assert [step for _, step, _ in points] == list(STEPS)
        columns = request(picture, url, "experiment")
        domains = {info["name"]: info.get("domainDiscrete") for info in columns["hparamInfos"]}
        assert domains["placement"] == ["post", "pre"]
        groups = request(picture, url, "session_groups", startIndex=0, sliceSize=9,
                         allowedStatuses=["STATUS_SUCCESS"])["sessionGroups"]  # fmt: skip
        assert [group["name"] for group in groups] == [f"{arm}-s{seed}" for arm, seed in LOSSES]
        finals = [group["metricValues"][0] for group in groups]
        assert {metric["name"]["tag"] for metric in finals} == {"hp/final"}
        assert [metric["value"] for metric in finals] == [3.25, 2.75, 2.0, 2.5]
        assert list(picture.ask(url, "plugin/images/tags")["_aggregate"]) == ["figures/loss_bands"]
        query = {"run": "_aggregate", "tag": "statement/text_summary"}
        (text,) = picture.ask(url, "plugin/text/text", **query)
        assert "<pre><code>&lt;b&gt;NOT&lt;/b&gt;\nRESOLVED\n</code></pre>" in text["text"]


@pytest.mark.slow
def test_a_browser_draws_both_bands_on_one_chart(picture, outcomes, tmp_path):
    chromium = shutil.which("chromium")
    if not (chromium and importlib.util.find_spec("playwright")):
        needed = "needs the chromium program and the playwright package"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(needed)
    from playwright.sync_api import sync_playwright

    write(tmp_path, outcomes)
    with picture.serve(tmp_path) as url, sync_playwright() as playwright:
        picture.runs_with(url, "agg/post/val/mean")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.set_default_timeout(1000 * picture.PATIENCE)
        page.goto(f"{url}#custom_scalars")
        chart = page.locator("tf-custom-scalar-margin-chart-card")
        chart.get_by_text("Matches (2)").wait_for()
        for arm in CONFIGS:
            chart.get_by_text(f"agg/{arm}/val/mean").first.wait_for(state="attached")
        bands = chart.locator("path.area")
        bands.nth(1).wait_for()
        assert bands.count() == 2
        shapes = [bands.nth(i).get_attribute("d") for i in range(2)]
        assert shapes[0] != shapes[1]
        assert min(map(len, shapes)) > 30
        assert picture.line_colours(chart.screenshot())
        browser.close()
