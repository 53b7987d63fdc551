"""The benchmarks: turns, tables, peers and the report. No speed is asserted, and none is slow."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import all as driver
from benchmarks import goals, measure, peers, start, steps
from gpt.config import RunConfig
from gpt.config_files import read_toml
from gpt.model.count import parameter_count

ROOT = Path(__file__).parents[1]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 60


def python(code: str) -> list[str | Path]:
    return [sys.executable, "-c", code]


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "my text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


# Measuring


def test_contestants_take_turns():
    order = []

    def named(name: str):
        return lambda number: order.append((name, number)) or len(order)

    results, absent = measure.interleaved({"theirs": named("a"), "ours": named("b")}, 2)
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert results == {"theirs": [1, 3], "ours": [2, 4]}
    assert absent == {}


def test_one_that_is_absent_or_fails_has_a_reason_and_no_result():
    tries = []

    def fails(number: int) -> float:
        tries.append(number)
        if number == 1:
            measure.finished(python("raise SystemExit('first line\\nlast | line')"))
        return 1.5

    contestants = {"one": "not here", "two": fails, "ours": lambda number: number}
    results, absent = measure.interleaved(contestants, 3)
    assert results == {"ours": [0, 1, 2]}
    assert absent == {"one": "skipped: not here", "two": "failed: last / line"}
    assert tries == [0, 1]


@pytest.mark.parametrize("name", ["ours", "ours: tiny"])
def test_ours_must_not_fail(name):
    def fails(_: int) -> None:
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        measure.interleaved({name: fails}, 1)


def test_the_time_to_a_line_ends_the_process(monkeypatch, tmp_path):
    ended = []

    class Popen(subprocess.Popen):
        def __exit__(self, *arguments):
            super().__exit__(*arguments)
            ended.append(self.returncode)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    endless = (
        "import pathlib, time; print('step 7'); time.sleep(0.2); pathlib.Path('between').touch(); "
        "print('step 12 train'); time.sleep(1000)"
    )
    assert measure.seconds_to_line(python(endless), r"step 12", tmp_path) > 0
    assert (tmp_path / "between").exists()
    assert len(ended) == 1
    assert ended[0] != 0


def test_a_process_without_the_line_is_reported_with_its_last():
    with pytest.raises(RuntimeError, match="the last was: so far"):
        measure.seconds_to_line(python("print('begin'); print('so far')"), "never")


def test_a_function_computes_in_a_process_of_its_own():
    assert measure.in_new_process(measure.spread, [7.25, 1.5, 2.0], ".1f") == "2.0 (1.5 to 7.2)"


def test_a_flag_that_is_accepted_is_no_refusal(tmp_path):
    assert start.refused(python("raise SystemExit(3)"), tmp_path) > 0
    with pytest.raises(RuntimeError, match="not refused"):
        start.refused(python("print(1)"), tmp_path)


# Peers


def test_a_copy_of_nanogpt_has_the_text_and_leaves_the_checkout_alone(tmp_path, text):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "train.py").write_text("")
    (tmp_path / "work").mkdir()
    options = measure.Options(text, text, nanogpt=checkout)
    data = peers.nanogpt_copy(options, tmp_path / "work") / "data" / peers.DATASET
    parts = [np.fromfile(data / f"{split}.bin", np.uint16) for split in ("train", "val")]
    characters = sorted(set(TEXT))
    assert "".join(characters[number] for number in np.concatenate(parts)) == TEXT
    assert len(parts[0]) == int(0.9 * len(TEXT))
    assert [path.name for path in checkout.iterdir()] == ["train.py"]


def test_the_loss_of_nanogpt_is_that_of_every_character_of_the_split(tmp_path):
    """A stand-in model, whose loss of a character is its number."""
    import torch

    (tmp_path / "model.py").write_text("""
class GPTConfig:
    def __init__(self, block_size): pass
class GPT:
    def __init__(self, config): pass
    def load_state_dict(self, state): assert state == {"some": 3}
    def eval(self): pass
    def __call__(self, x, y):
        assert x.shape == y.shape and (x[:, 1:] == y[:, :-1]).all()
        return None, y.float().mean()
""")
    (tmp_path / "out-shakespeare-char").mkdir()
    saved = {"model_args": {"block_size": 7}, "model": {"some": 3}}
    torch.save(saved, tmp_path / "out-shakespeare-char" / "ckpt.pt")
    data = tmp_path / "data" / peers.DATASET
    data.mkdir(parents=True)
    ids = np.random.default_rng(0).integers(0, 60, 7 * 128 * 2 + 5).astype(np.uint16)
    ids.tofile(data / "val.bin")
    found = measure.in_new_process(peers.nanogpt_loss, str(tmp_path))
    assert found == pytest.approx(float(ids[1:].mean()), rel=1e-5)


def test_a_model_of_llama2c_has_the_sizes_of_its_header(tmp_path):
    shape = peers.Shape(n_layers=3, n_heads=2, d_model=24, context_length=20, batch_size=1)
    model, vocabulary = peers.llama2c_files(shape, tmp_path)
    header, numbers = np.fromfile(model, np.int32, 7), np.fromfile(model, np.float32, offset=28)
    dim, hidden, layers, heads, kv_heads, vocab_size, length = header.tolist()
    assert (dim, hidden, layers, heads, kv_heads, length) == (24, 64, 3, 2, 2, 20)
    assert vocab_size == -peers.VOCAB_SIZE  # negative: a head of its own
    block = 2 * dim + 4 * dim * dim + 3 * dim * hidden
    outside = 2 * 65 * dim + dim + length * dim // heads
    assert len(numbers) == layers * block + outside
    assert np.isfinite(numbers).all()
    assert len(vocabulary.read_bytes()) == 4 + peers.VOCAB_SIZE * (4 + 4 + 1)


def test_the_text_of_llama2c_does_not_end_early(tmp_path):
    """Its character 1 ends it: the stream's first component makes that one all but impossible."""
    shape = peers.Shape(n_layers=1, n_heads=2, d_model=24, context_length=20, batch_size=1)
    model, _ = peers.llama2c_files(shape, tmp_path)
    numbers = np.fromfile(model, np.float32, offset=28)
    embedding, head = (part.reshape(65, 24) for part in (numbers[: 65 * 24], numbers[-65 * 24 :]))
    stream = embedding / np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    logits = stream @ head.T  # (65, 65)
    others = np.delete(logits, 1, axis=1)
    assert (others.min(axis=1) - logits[:, 1] > 30).all()
    w_o = numbers[65 * 24 + 24 + 3 * 24 * 24 :][: 24 * 24].reshape(24, 24)
    assert not w_o[0].any()
    assert w_o[1:].all()


def test_the_steps_of_nanogpt_fill_a_minute(monkeypatch):
    """Seven seconds to start, and eight steps a second."""

    def timed(command: list[str], _: Path) -> float:
        n = int(next(word for word in command if "max_iters" in word).split("=")[1])
        return 7 + n / 8

    monkeypatch.setattr(goals, "timed", timed)
    assert goals.fitting_steps(Path("somewhere else")) == (60 - 7) * 8


# The report


def some_section(work: str, ours: str, text: Path) -> measure.Section:
    lines = measure.table(["", "value"], [["a row", ours]])
    return measure.Section(lines, text, {work: measure.Row("5", ours, "yes")})


def test_a_section_replaces_itself_and_its_goals_only(text):
    [first, second] = list(steps.GOALS)
    report = driver.replaced("", start.TITLE, some_section(start.HELP, "0.25", text), "origin 1")
    report = driver.replaced(report, steps.TITLE, some_section(first, "31", text), "origin 2")
    assert driver.replaced(report, steps.TITLE, some_section(first, "31", text), "origin 2") == (
        report
    )
    again = driver.replaced(report, steps.TITLE, some_section(first, "47", text), "origin 3")
    assert "31" not in again.split("wanted")[1]
    assert "origin 2" not in again
    rows, sections = driver.read(again)
    assert rows[start.HELP] == measure.Row("5", "0.25", "yes")
    assert rows[first] == measure.Row("5", "47", "yes")
    assert rows[second] == driver.UNMEASURED
    assert list(sections) == [steps.TITLE, start.TITLE]  # in the order of the report
    assert sections[start.TITLE].endswith("origin 1")
    assert "| a row | 47 |" in sections[steps.TITLE]


def test_every_goal_has_a_row_and_an_owner_and_every_section_a_title():
    known = driver.modules().values()
    works = [work for module in known for work in module.GOALS]
    assert len(works) == len(set(works)) == 12
    assert len({module.TITLE for module in known}) == len(driver.SECTIONS)
    rows, _ = driver.read(driver.written({}, {}))
    assert set(works) <= set(rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "nowhere.txt"], "no file 'nowhere.txt'"),
        (["--nanogpt", "."], "no checkout of nanoGPT"),
        (["--llama2c", "."], "no program"),
        (["--rounds", "0"], "at least 1"),
        (["--quick"], "give --out"),
        (["--only", "speed"], "invalid choice"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_measured(
    words, said, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        driver.parsed(words)
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err


def run_all(text: Path, *words: str | Path) -> subprocess.CompletedProcess:
    given = ["--text", text, "--corpus", text, *words]
    return subprocess.run(
        [sys.executable, *map(str, [ROOT / "benchmarks" / "all.py", *given])],
        cwd=text.parent, capture_output=True, encoding="utf-8",
    )  # fmt: skip


@pytest.mark.slow
def test_a_preset_gets_a_row(text):
    out = text.with_name("results.md")
    ended = run_all(text, "--only", "presets", "--presets", "tiny", "--seeds", "2", "--out", out)
    assert ended.returncode == 0, ended.stderr
    report = out.read_text(encoding="utf-8")
    section, top = ended.stdout.strip().split(f"{driver.HEADING}\n")
    assert section.strip() in report
    assert top.strip() in report
    config = RunConfig().with_changes(read_toml([ROOT / "configs" / "tiny.toml"]))
    sizes = f"{sum(parameter_count(config.model, 28).values()):,} | {config.training.steps}"
    number = r"(\d[\d.]*) \((\d[\d.]*) to (\d[\d.]*)\)"
    row = re.search(rf"^\| `tiny` \| {re.escape(sizes)} \| {number} \| {number} \|$", report, re.M)
    assert row, report
    median, least, greatest = map(float, row.groups()[:3])
    assert 0 < least <= median <= greatest < 3
    for word in (text.name, "cores", "Python 3", "torch 2", "commit "):
        assert word in report.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_runs_without_peers_and_says_why_they_are_absent(text):
    out = text.with_name("results.md")
    ended = run_all(text, "--quick", "--rounds", "1", "--presets", "tiny", "--out", out)
    assert ended.returncode == 0, ended.stderr
    report = out.read_text(encoding="utf-8")
    rows, sections = driver.read(report)
    known = driver.modules().values()
    assert list(sections) == [module.TITLE for module in known]
    assert all(text.name in body and "--quick" in body for body in sections.values())
    assert report.count("skipped: no checkout given (--nanogpt DIR)") > 8
    assert report.count("skipped: no binary given (--llama2c BINARY)") == 2
    assert "nan" not in report.replace("nanoGPT", "").replace("nanogpt", "")
    measured = [row for work, row in rows.items() if re.search(r"characters a second", work)]
    assert len(measured) == 5
    assert all(rate(row.ours) > 0 for row in measured)


def rate(cell: str) -> float:
    return float(re.match(r"[\d,]+", cell)[0].replace(",", ""))
