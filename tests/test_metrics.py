import json
import math
import os
import re
import warnings

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt.errors import UsageError
from gpt.training.curves import read_metrics
from gpt.training.metrics import Metrics


def lines(folder):
    return (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


def board(folder):
    """What TensorBoard reads: tag -> [(step, value), ...]."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def write(folder, steps, offset=0.0, first_step=0):
    with Metrics(folder, first_step) as metrics:
        for step in steps:
            metrics.write(step, {"loss/train": step + offset, "lr": step / 8})


class Full:
    """Stands for a file on a full disk."""

    def __getattr__(self, name):
        def fail(*args):
            raise OSError(28, "No space left on device")

        return fail


def test_a_line_is_an_object_with_the_step_and_the_tags(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(0, {"loss/val": 4.125})
        metrics.write(10, {"loss/train": 0.1 + 0.2, "lr": 1e-3})
    assert [json.loads(line) for line in lines(tmp_path)] == [
        {"step": 0, "loss/val": 4.125},
        {"step": 10, "loss/train": 0.1 + 0.2, "lr": 1e-3},
    ]


def test_the_file_and_tensorboard_hold_the_same_points(tmp_path):
    write(tmp_path, range(0, 50, 7))
    curves = read_metrics(tmp_path)
    assert curves.keys() == {"loss/train", "lr"}
    assert curves["lr"] == [(step, step / 8) for step in range(0, 50, 7)]
    assert board(tmp_path) == curves


def test_flushed_points_can_be_read_while_the_run_goes_on(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(3, {"lr": 0.5})
        metrics.flush()
        assert read_metrics(tmp_path) == board(tmp_path) == {"lr": [(3, 0.5)]}


def test_numbers_that_are_not_finite_are_kept_and_the_file_stays_json(tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.0}
    with Metrics(tmp_path) as metrics:
        metrics.write(1, values)
    record = json.loads(lines(tmp_path)[0], parse_constant=lambda word: pytest.fail(word))
    assert record == {"step": 1, "a": "nan", "b": "inf", "c": "-inf", "d": 2.0}
    read = {tag: points[0][1] for tag, points in read_metrics(tmp_path).items()}
    assert math.isnan(read.pop("a"))
    assert read == {"b": math.inf, "c": -math.inf, "d": 2.0}


def test_a_resumed_run_has_each_step_once_and_the_later_values(tmp_path):
    write(tmp_path, range(8))
    write(tmp_path, range(5, 11), offset=0.5, first_step=5)
    expected = [(s, float(s)) for s in range(5)] + [(s, s + 0.5) for s in range(5, 11)]
    assert read_metrics(tmp_path)["loss/train"] == expected
    assert board(tmp_path)["loss/train"] == expected


def test_a_run_resumed_from_the_start_keeps_nothing(tmp_path):
    write(tmp_path, range(4))
    write(tmp_path, range(2), offset=0.5)
    assert board(tmp_path) == read_metrics(tmp_path)
    assert read_metrics(tmp_path)["loss/train"] == [(0, 0.5), (1, 1.5)]


def test_a_run_is_one_folder_without_subfolders(tmp_path):
    for first_step in (0, 2, 4):
        with Metrics(tmp_path, first_step) as metrics:
            metrics.write(first_step, {"loss/train": 1.0, "grad_norm/block_00": 2.0})
            metrics.text("sample", "to be", first_step)
    names = {path.name for path in tmp_path.iterdir() if not path.is_file()}
    assert names == set()
    kinds = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert kinds == ["events"] * 3 + ["metrics"]


def test_a_last_line_cut_short_is_passed_over_and_gone_after_a_resume(tmp_path):
    write(tmp_path, range(4))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for cut in (1, 2, 9):
        path.write_bytes(whole[:-cut])
        assert len(read_metrics(tmp_path)["lr"]) == (4 if cut == 1 else 3)
    write(tmp_path, [4], first_step=4)
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [0, 1, 2, 4]


def test_a_last_line_without_its_end_is_not_lost_in_a_resume(tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    write(tmp_path, [3], first_step=3)
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "bad", [b"{]", b"17", b'{"lr": 1}', b'{"step": "1"}', b'{"step": 1, "lr": [2]}', b"\xff"]
)
def test_a_damaged_line_before_the_last_is_named(tmp_path, bad):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(bad + b"\n" + path.read_bytes())
    with pytest.raises(UsageError, match=r"line 1 of .*metrics\.jsonl' is damaged; delete"):
        read_metrics(tmp_path)


def test_numbers_too_large_to_be_read_do_not_stop_a_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lr": 1%s}\n' % ("0" * 400))
    (tmp_path / "samples.txt").write_text(f"--- step {'9' * 5000} ---\nto be\n")
    with Metrics(tmp_path, 2) as metrics:
        metrics.write(2, {"lr": 0.5})
    assert metrics.failed == ""
    assert read_metrics(tmp_path) == {"lr": [(2, 0.5)]}


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"metrics\.jsonl.*give the folder of a training run"):
        read_metrics(tmp_path)


def test_text_is_shown_as_it_is_in_tensorboard(tmp_path):
    with warnings.catch_warnings():  # TensorBoard's own conversion imports a deprecated parser
        warnings.simplefilter("ignore")
        from tensorboard.plugin_util import markdown_to_safe_html

    text = "<img src=x>\n\n# a & b\n*c*\x1b[31m\u202e\n```\n\t<script>"
    shown = "&lt;img src=x&gt;\n\n# a &amp; b\n*c*\\x1b[31m\\u202e\n```\n    &lt;script&gt;"
    with Metrics(tmp_path) as metrics:
        metrics.text("sample", text, 3)
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("sample/text_summary")
    markdown = event.tensor_proto.string_val[0].decode("utf-8")
    assert markdown_to_safe_html(markdown) == f"<pre><code>{shown}\n</code></pre>"


@pytest.mark.parametrize("part", ["_lines", "_board"])
def test_a_disk_that_fails_ends_the_logging_with_one_warning(tmp_path, capsys, part):
    with Metrics(tmp_path) as metrics:
        metrics.write(1, {"lr": 1.0})
        metrics.flush()
        setattr(metrics, part, Full())
        metrics._open.append(Full())
        for step in (2, 3):
            metrics.write(step, {"lr": 1.0})
            metrics.text("sample", "to be", step)
            metrics.flush()
        assert "No space left on device" in metrics.failed
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.match(r"warning: .*No space left on device.*training goes on", error)
    assert read_metrics(tmp_path)["lr"][0] == (1, 1.0)


def test_a_disk_that_fails_at_the_end_is_only_a_warning(tmp_path, capsys):
    with Metrics(tmp_path) as metrics:
        metrics._open.append(Full())
    assert "No space left" in metrics.failed
    assert capsys.readouterr().err.count("warning") == 1


def test_a_folder_that_cannot_be_written_is_only_a_warning(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    with Metrics(tmp_path) as metrics:
        metrics.write(0, {"lr": 1.0})
    assert metrics.failed
    assert "training goes on" in capsys.readouterr().err


def test_files_that_somebody_deleted_are_noticed(tmp_path, capsys):
    with Metrics(tmp_path / "run") as metrics:
        assert metrics.failed  # there is no such folder
    with Metrics(tmp_path) as metrics:
        metrics.write(0, {"lr": 1.0})
        metrics.flush()
        assert metrics.failed == ""
        (tmp_path / "metrics.jsonl").unlink()
        metrics.flush()
        metrics.write(1, {"lr": 1.0})
    assert "deleted" in metrics.failed
    assert capsys.readouterr().err.count("warning") == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.txt"])
@pytest.mark.parametrize("plant", ["link", "pipe"])
def test_a_link_or_a_pipe_in_the_place_of_a_file_is_not_written_to(tmp_path, name, plant, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    folder = tmp_path / "run"
    folder.mkdir()
    if plant == "link":
        (folder / name).symlink_to(elsewhere)
    else:
        os.mkfifo(folder / name)
    with Metrics(folder) as metrics:
        metrics.write(0, {"lr": 1.0})
        metrics.sample("to be", 0)
    assert "not an ordinary file" in metrics.failed
    assert elsewhere.read_bytes() == b"precious"
    assert capsys.readouterr().err.count("warning") == 1


def test_what_works_fails_nothing(tmp_path, capsys):
    with Metrics(tmp_path) as metrics:
        metrics.write(0, {"lr": 1.0})
    metrics.close()
    assert metrics.failed == ""
    assert capsys.readouterr().err == ""
