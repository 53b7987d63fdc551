"""train.py and compare.py as processes: what a shell, a pipe and a signal see."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import skips
import torch

from gpt.training.checkpoint import load_checkpoint
from gpt.training.curves import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TINY = [
    "--d_model", "12", "--n_heads", "3", "--n_layers", "1", "--context_length", "9",
    "--batch_size", "4", "--sample_chars", "10", "--threads", "1",
]  # fmt: skip


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "my text é.txt"
    path.write_text("the cat sat on the mat, é 中\n" * 40, encoding="utf-8")
    return path


def script(name: str, *words: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / name), *map(str, words)],
        capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL, timeout=120,
        env=os.environ | environment, cwd=ROOT,
    )  # fmt: skip


def begun(*words: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT,
    )  # fmt: skip


def test_a_run_in_a_pipe_is_plain_lines_and_its_last_commands_work(text, tmp_path):
    out = tmp_path / "out dir" / "é"
    ended = script("train.py", text, *TINY, "--steps", 5, "--eval_every", 2, "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert not set(ended.stdout) & {"\r", "\x1b"}
    write, curves = (line.split(": ", 1)[1] for line in ended.stdout.splitlines()[-2:])
    sampled = subprocess.run(
        [*shlex.split(write), "--n_chars", "7"], capture_output=True, encoding="utf-8", cwd=ROOT
    )
    assert (sampled.returncode, len(sampled.stdout)) == (0, 7), sampled.stderr
    assert shlex.split(curves)[-2:] == ["--logdir", str(out.parent)]


def test_the_locale_does_not_matter(text, tmp_path):
    text = text.rename(tmp_path / "plain.txt")
    plain = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    words = [text, *TINY, "--steps", 2]
    ended = script("train.py", *words, "--out", tmp_path / "c", **plain)
    assert ended.returncode == 0, ended.stderr
    assert script("train.py", *words, "--out", tmp_path / "utf8").returncode == 0
    ours, theirs = load_checkpoint(tmp_path / "c"), load_checkpoint(tmp_path / "utf8")
    assert ours.vocabulary == theirs.vocabulary
    assert "中" in ours.vocabulary
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in ours.model)


def test_standard_input_can_be_the_text(text, tmp_path):
    ended = subprocess.run(
        [sys.executable, "train.py", "-", *TINY, "--steps", "2", "--out", tmp_path / "o"],
        input=text.read_bytes(), capture_output=True, cwd=ROOT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("content", "flags", "needles"),
    [
        (b"", [], ["empty"]),
        (b"a" * 500, [], ["one"]),
        (b"it\x92s\n" * 40, [], ["0x92", "--encoding"]),
        (b"too short", [], ["--context_length"]),
        (b"the cat sat on the mat\n" * 40, ["--device", "cuda"], ["cuda", "cpu"]),
    ],
    ids=["empty", "one character", "cp1252", "short", "no cuda"],
)
def test_what_a_user_can_get_wrong_is_one_message_and_leaves_no_folder(
    tmp_path, content, flags, needles
):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip(skips.A_GPU)
    path = tmp_path / "t.txt"
    path.write_bytes(content)
    ended = script("train.py", path, *TINY, "--steps", 2, "--out", tmp_path / "out", *flags)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
    for needle in needles:
        assert needle in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_never_writes_over_another(text, tmp_path):
    words = ["train.py", text, *TINY, "--steps", 2, "--out", tmp_path / "out"]
    assert script(*words).returncode == 0
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    again = script(*words)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_the_continued_run_is_the_unbroken_one(text, tmp_path, number):
    steps = [*TINY, "--steps", 1500, "--eval_every", 400, "--dropout", "0.1"]
    assert script("train.py", text, *steps, "--out", tmp_path / "whole").returncode == 0
    pick = random.Random(int(number))
    process = begun(text, *steps, "--out", tmp_path / "parts")
    for _ in range(3):
        while "step" not in process.stdout.readline():
            pass
        time.sleep(pick.uniform(0, 0.8))
        process.send_signal(number)
        rest, errors = process.communicate(timeout=60)
        assert process.returncode in (128 + number, 0), errors
        if process.returncode:
            assert "go on:" in rest
        process = begun("--resume", tmp_path / "parts")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    ours, theirs = (
        load_checkpoint(tmp_path / name, prefer="newest") for name in ("whole", "parts")
    )
    assert ours.step == theirs.step == 1500
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in ours.model)
    curves = [read_metrics(tmp_path / name) for name in ("whole", "parts")]
    assert curves[0]["loss/train"] == curves[1]["loss/train"]
    assert curves[0]["loss/val"] == curves[1]["loss/val"]


def test_a_second_run_in_the_folder_is_refused_while_the_first_lives(text, tmp_path):
    first = begun(text, *TINY, "--steps", 200000, "--eval_every", 50, "--out", tmp_path / "out")
    while "validation" not in first.stdout.readline():
        pass
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out" / "checkpoints").glob("step-*.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second = script("train.py", "--resume", tmp_path / "out")
    assert second.returncode == 5
    assert "in use" in second.stderr
    first.kill()
    first.communicate()
    third = script("train.py", "--resume", tmp_path / "out", "--steps", 101)
    assert third.returncode == 0, third.stderr


def test_a_reader_that_goes_away_does_not_stop_the_run(text, tmp_path):
    process = begun(text, *TINY, "--steps", 300, "--eval_every", 100, "--out", tmp_path / "out")
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert load_checkpoint(tmp_path / "out", prefer="newest").step == 300


def test_without_a_compiler_compile_warns_and_the_run_is_the_same(text, tmp_path):
    words = [text, *TINY, "--steps", 3]
    empty = tmp_path / "bin"
    empty.mkdir()
    without = {"PATH": str(empty), "CXX": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = script("train.py", *words, "--compile", "--out", tmp_path / "a", **without)
    assert ended.returncode == 0, ended.stderr
    assert "--compile does not work here" in ended.stdout
    plain = script("train.py", *words, "--no_native", "--out", tmp_path / "b")
    assert plain.returncode == 0
    ours, theirs = load_checkpoint(tmp_path / "a"), load_checkpoint(tmp_path / "b")
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in ours.model)


def test_compare_trains_every_arm_with_every_seed_and_states_what_was_found(text, tmp_path):
    ended = script(
        "compare.py", "run", text, *TINY, "--steps", 3, "--seeds", 2, "--out", tmp_path / "pair"
    )
    assert ended.returncode == 0, ended.stderr
    assert "post against pre" in ended.stdout
    assert sorted(p.name for p in (tmp_path / "pair").glob("*/outcome.json")) == 4 * [
        "outcome.json"
    ]
    assert (tmp_path / "pair" / "report.html").exists()


def test_compare_explains_its_subcommands():
    helped = script("compare.py", "--help")
    assert helped.returncode == 0
    for name in ("run", "demo", "why", "sweep", "duel", "verify", "init"):
        assert f"\n  {name} " in helped.stdout
    wrong = script("compare.py", "swep")
    assert wrong.returncode == 2
    assert "'swep'. Did you mean 'sweep'?" in wrong.stderr
