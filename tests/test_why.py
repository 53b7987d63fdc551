import math

import pytest

from gpt.lab import why
from gpt.lab.commandline import parse_compare
from gpt.lab.why import reading, table
from gpt.training.curves import read_metrics


def curves_of(first: list[float], last: list[float], branches: list[float], spreads: list[float]):
    steps = [0, 1, 20, 80]
    values = {
        "probe/dF": [0, 1.25, 1.5, 2.5],
        "probe/branch_over_skip": branches,
        "probe/grad_W_out_00": first,
        "probe/grad_W_out_01": [1, 1, 1, 1],
        "probe/grad_W_out_02": last,
        "probe/pred_std": spreads,
    }
    return {tag: list(zip(steps, of, strict=True)) for tag, of in values.items()}


VANISHED = curves_of([1, 0.1, 1e-2, 1e-4], [0.9, 0.8, 0.3, 0.3], [0.5, 0.6, 1.5, 2], [1, 1, 0, 0])
THROUGH = curves_of([1, 0.9, 0.05, 0.5], [2, 3, 4, 5], [0.5, 0.5, 0.6, 0.7], [1, 1, 0.1, 1.5])


def test_a_vanished_gradient_is_told_with_its_numbers():
    lines = reading("post-w0", VANISHED)
    assert lines[0] == "post-w0: the first block's gradient vanishes"
    text = "\n".join(lines)
    assert "the first update moves log-probabilities by 1.2" in text
    assert "from 0.5 to 2, and outgrow the skip path" in text
    assert "the first block's gradient falls 10,000x by step 80: 1 -> 0.0001" in text
    assert "the last block's falls 3.0x by step 80" in text
    assert "at step 80 every position is told the same (spread 0 of its start)" in text


def test_a_gradient_that_comes_back_is_told_so():
    text = "\n".join(reading("pre-w0", THROUGH))
    assert "pre-w0: the gradient gets through" in text
    assert "falls 20x by step 20 and returns: 1 -> 0.5" in text
    assert "the last block's grows 2.5x by step 80" in text
    assert "smaller than the skip path" in text
    assert "spread 1.5 times that at the start" in text


def test_a_small_gradient_alone_has_not_vanished_while_predictions_differ():
    curves = VANISHED | {"probe/pred_std": THROUGH["probe/pred_std"]}
    assert "gets through" in reading("post-w0", curves)[0]


def test_of_a_run_that_is_not_finite_no_mechanism_is_told():
    gone = curves_of([1, 0.1, 0.1, math.nan], [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5], [1, 1, 1, 1])
    (line,) = reading("post-w0", gone)
    assert line == "post-w0: it fails otherwise, by numbers that are not finite at step 80"


def test_the_table_has_a_row_a_measurement():
    rows = [line.split() for line in table(VANISHED)]
    assert rows[0] == ["step", "dF", "branch/skip", "grad", "first", "grad", "last", "spread"]
    assert rows[3] == ["20", "1.5", "1.5", "0.01", "0.3", "0"]
    assert len(rows) == 5


def test_the_command_measures_its_four_runs(tmp_path, capfd):
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells on the sea shore\n" * 30, encoding="utf-8")
    out = tmp_path / "out"
    words = ["--out", str(out), "--steps", "4", "--d_model", "12", "--n_heads", "3", "--n_layers",
             "2", "--context_length", "9", "--batch_size", "5", "--workers", "1"]  # fmt: skip
    assert why.main(parse_compare("why", [str(text), *words])) == 0
    said = capfd.readouterr()
    assert "4 runs of 4 steps" in said.err
    for arm in ("post-w0", "post-w100", "pre-w0", "post-gpt2"):
        assert said.out.count(f"{arm}\n") == 1
        curves = read_metrics(out / f"{arm}-s1337")
        assert [step for step, _ in curves["probe/dF"]] == [0, 1, 2, 3, 4]
        assert {"probe/grad_W_out_01", "probe/stream_rms_03"} <= curves.keys()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "python compare.py why" in page
    assert {path.name for path in (out / "figures").iterdir()} == {
        "branch_over_skip.svg", "gradient_heat.svg", "spread.svg", "moved.svg"
    }  # fmt: skip
    assert (out / "_aggregate").is_dir()


@pytest.mark.slow
def test_in_the_setting_that_needs_warm_up_only_post_without_it_vanishes(tmp_path, capfd):
    assert why.main(parse_compare("why", ["--out", str(tmp_path / "out")])) == 0
    said = capfd.readouterr().out
    assert "post-w0: the first block's gradient vanishes" in said
    assert said.count("the gradient gets through") == 3
