"""Arms, their folder, the commands run and demo: what is asked for, said, written and refused."""

import importlib.util
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from gpt.config import RunConfig
from gpt.corpus import read_text
from gpt.errors import UsageError
from gpt.exits import exit_code, lost
from gpt.lab import cost, demo, folders, run
from gpt.lab.arms import Arm, parse_arms
from gpt.lab.commandline import parse_compare
from gpt.lab.folders import farewell, lab_folder, without_out
from gpt.lab.outcomes import Outcome
from gpt.lab.progress import duration, say
from gpt.lab.trials import Stopped, Trial
from gpt.training.curves import read_metrics

SMALL = {
    "d_model": 12, "n_heads": 3, "n_layers": 2, "context_length": 9, "steps": 4,
    "batch_size": 5, "eval_every": 2, "sample_chars": 0,
}  # fmt: skip
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "my text.txt"
    path.write_text("she sells sea shells on the sea shore\n" * 30, encoding="utf-8")
    return path


@pytest.fixture
def base(text) -> RunConfig:
    return RunConfig().with_changes(SMALL | {"text": str(text)})


def compare(name: str, *words: object) -> int:
    """The exit code of the command in this process, with one worker."""
    command = parse_compare(name, [*map(str, words), "--workers", "1"])
    module = {"run": run, "demo": demo}[name]
    return exit_code(lambda: module.main(command))


def test_arms_are_placements_norms_or_files_of_changes(base, tmp_path):
    (tmp_path / "wide.toml").write_text("d_model = 24", encoding="utf-8")
    arms = parse_arms(("post", "none", "rms", str(tmp_path / "wide.toml")), base)
    assert arms == [
        Arm("post", {"norm_position": "post"}), Arm("none", {"norm": "none"}),
        Arm("rms", {"norm": "rms"}), Arm("wide", {"d_model": 24}),
    ]  # fmt: skip
    config = arms[3].config(base, seed=9)
    assert (config.model.d_model, config.training.seed, config.training.steps) == (24, 9, 4)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (("pre", "middle"), r"'middle' is neither a norm placement \(pre, post, "),
        (("pre", "dyd"), "Did you mean 'dyt'"),
        (("pre", "pre"), "two arms are called 'pre'"),
        (("text.toml",), "changes the text"),
        (("seed.toml",), "sets the seed"),
        (("broken.toml",), "not divisible"),
        (("absent.toml",), "absent.toml"),
    ],
)
def test_unusable_arms_are_refused_before_anything_runs(base, tmp_path, monkeypatch, words, needle):
    monkeypatch.chdir(tmp_path)
    Path("text.toml").write_text("val_fraction = 0.3", encoding="utf-8")
    Path("seed.toml").write_text("seed = 3", encoding="utf-8")
    Path("broken.toml").write_text("n_heads = 5", encoding="utf-8")
    with pytest.raises(UsageError, match=needle):
        parse_arms(words, base)


# The folder


def test_a_new_folder_is_marked_and_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = lab_folder("", "demo-shakespeare")
    assert first == Path("runs/demo-shakespeare-1")
    assert lab_folder("", "demo-shakespeare") == Path("runs/demo-shakespeare-2")
    given = lab_folder("an out", "demo")
    (given / "pre-s1").mkdir()
    assert lab_folder("an out", "demo") == given


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="is not empty"):
        folders.refuse_other_use(str(tmp_path))
    with pytest.raises(UsageError, match="is not empty"):
        lab_folder(str(tmp_path), "demo")
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_the_command_that_goes_on_names_the_folder_once(capsys):
    words = ["demo", "my text.txt", "--out", "a b", "--steps", "3", "--out=c"]
    assert without_out(words) == ["demo", "my text.txt", "--steps", "3"]
    assert farewell(Stopped(15, Path("a b")), Path("compare.py"), words) == 143
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("compare.py demo 'my text.txt' --steps 3 --out 'a b'")


@pytest.fixture
def script(monkeypatch):
    """compare.py from its words to its exit code, in this process."""
    path = Path(__file__).parents[1] / "compare.py"
    spec = importlib.util.spec_from_file_location("compare", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, words), "--workers", "1"])
        return exit_code(module.main)

    return call


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("when", ["announce", "write"])
def test_a_signal_while_nothing_trains_says_how_to_go_on(
    script, text, tmp_path, capsys, monkeypatch, name, when
):
    number = getattr(signal, name)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run, when, lambda *_: signal.raise_signal(number))
    words = ["run", text, *FLAGS, "--seeds", 1, "--out", tmp_path / "o"]
    assert script(*words) == 128 + number
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said[0] == f"stopped; what was finished is kept in {tmp_path / 'o'}"
    assert said[1].startswith("go on: ")
    assert said[1].endswith(f"--workers 1 --out {tmp_path / 'o'}")
    assert signal.getsignal(signal.SIGTERM) == before[1]
    assert signal.signal(signal.SIGHUP, before[0]) == signal.SIG_DFL


@pytest.mark.parametrize("buffering", [0, -1])  # PYTHONUNBUFFERED, and without
def test_the_first_line_that_could_not_be_printed_is_known_to_be_lost(monkeypatch, buffering):
    file = open("/dev/full", "wb", buffering)  # noqa: SIM115 - closed by full
    with io.TextIOWrapper(file, encoding="utf-8", write_through=not buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        say("found")
        assert "No space left" in str(lost(full))


def test_a_statement_that_could_not_be_printed_is_pointed_to(
    script, text, tmp_path, capsys, monkeypatch
):
    words = ["run", text, *FLAGS, "--seeds", 1, "--out", tmp_path / "o"]
    page = tmp_path / "o" / "report.html"
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert script(*words) == 6
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "(No space left on device), and what was found is lost there" in error
    assert error.endswith(f"read it in {page}")
    assert "verdict" in page.read_text(encoding="utf-8")
    theirs, ours = os.pipe()
    os.close(theirs)
    with open(ours, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert script(*words) == 141
    assert f"read it in {page}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["_aggregate", "figures"])
def test_a_link_where_the_comparison_writes_is_refused_before_anything_trains(
    text, tmp_path, capsys, name
):
    out = lab_folder(str(tmp_path / "o"), "demo")
    (out / name).symlink_to(tmp_path)
    assert compare("run", text, *FLAGS, "--seeds", 1, "--out", out) == 2
    assert f"{name}' is a link" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == {"comparison.json", name}


# Cost


def test_durations_are_for_people():
    assert [duration(s) for s in (0.1, 41, 130, 9000)] == ["1 s", "41 s", "2 min", "2.5 h"]


def test_the_cost_is_told_and_what_is_there_is_named(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cost, "seconds_per_character", lambda config, corpus: 1.0)
    done = Outcome(
        arm="pre", seed=5, state="learned", first=3.0, final=2.0, best=2.0, steps=4,
        characters=180, n_parameters=7, seconds=1.0,
    )  # fmt: skip
    monkeypatch.setattr(
        cost, "finished", lambda trial, *_: done if trial.name == "pre-s5" else None
    )
    corpus = read_text(base)
    trials = [
        Trial("pre", base.with_changes({"seed": seed}), keeps_checkpoints=seed == 7)
        for seed in (5, 6, 7)
    ]
    assert cost.announce(trials, corpus, tmp_path, workers=3) == trials[1:]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "1 of 3 runs are there already: pre-s5"
    assert second.startswith("2 runs of 4 steps, 360 characters in all, 2 at once: about ")
    light, kept = ([trials[i]] for i in (1, 2))
    n_val = len(corpus.val)
    assert cost.estimate(light, corpus, 1) == pytest.approx(180 + (3 * n_val + n_val) / 3)
    assert cost.estimate(kept, corpus, 1) == pytest.approx(180 + 3 * n_val / 3)
    assert cost.estimate(light * 2, corpus, 2) == pytest.approx(cost.STARTING + 180 + 4 * n_val / 3)


def test_the_speed_is_measured_by_training(base):
    assert 0 < cost.seconds_per_character(base, read_text(base)) < 1


def test_a_learning_rate_at_which_training_fails_has_a_cost_all_the_same(base):
    wild = base.with_changes({"learning_rate": 1e30})
    assert 0 < cost.seconds_per_character(wild, read_text(wild)) < 1


# run and demo


def test_run_trains_every_arm_with_every_seed_and_says_what_was_found(text, tmp_path, capsys):
    out = tmp_path / "an out"
    words = ["run", text, *FLAGS, "--arms", "pre", "post", "--seeds", 2, "--out", out]
    assert compare(*words) == 0
    said = capsys.readouterr()
    for needle in ("seeds 1337-1338", "post against pre", "verdict (margin 0.02 nats)", "report: "):
        assert needle in said.out
    assert "4 runs of 4 steps, 720 characters in all" in said.err
    for name in ("pre-s1337", "post-s1337", "pre-s1338", "post-s1338"):
        outcome = json.loads((out / name / "outcome.json").read_text(encoding="utf-8"))["outcome"]
        assert read_metrics(out / name)["loss/val"][-1] == (4, outcome["final"])
        assert (out / name / "checkpoints" / "step-00000004.pt").exists()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "verdict" in page
    assert "python compare.py run" in page
    assert [path.name for path in (out / "figures").iterdir()] == ["loss_bands.svg"]
    assert list((out / "_aggregate").glob("events.*"))


def test_the_second_time_all_comes_from_the_folder_and_is_said_alike(
    text, tmp_path, capsys, monkeypatch
):
    words = ["run", text, *FLAGS, "--seeds", 2, "--out", tmp_path / "an out"]
    assert compare(*words) == 0
    first = capsys.readouterr().out
    page = (tmp_path / "an out" / "report.html").read_bytes()
    monkeypatch.setattr("gpt.lab.light.train_kept", None)
    assert compare(*words) == 0
    again = capsys.readouterr()
    assert again.out == first
    assert "4 of 4 runs are there already" in again.err
    assert (tmp_path / "an out" / "report.html").read_bytes() == page
    # More seeds go on where it is.
    monkeypatch.undo()
    assert compare(*words, "--seeds", 3) == 0
    assert "4 of 6 runs are there already" in capsys.readouterr().err


def test_run_refuses_arms_that_cannot_be_compared_before_it_makes_a_folder(text, tmp_path, capsys):
    (tmp_path / "long.toml").write_text("steps = 7", encoding="utf-8")
    out = tmp_path / "an out"
    arms = ["--arms", "pre", tmp_path / "long.toml"]
    assert compare("run", text, *FLAGS, "--out", out, *arms) == 2
    assert "differ in steps (4 and 7)" in capsys.readouterr().err
    assert not out.exists()


def test_run_warns_of_two_changes_at_once_and_of_other_sizes(text, tmp_path, capsys):
    (tmp_path / "wide.toml").write_text("d_model = 24\nnorm = 'rms'", encoding="utf-8")
    arms = ["--arms", "pre", tmp_path / "wide.toml"]
    assert compare("run", text, *FLAGS, "--seeds", 1, "--out", tmp_path / "o", *arms) == 0
    said = capsys.readouterr().err
    assert "warning: pre and wide differ in 2 settings (d_model, " in said
    assert "warning: pre and wide have tensors of other sizes" in said


def test_an_unfair_arm_is_refused_and_no_statement_is_made(text, tmp_path, capsys, monkeypatch):
    from gpt.lab import light

    honest = light.hashes

    def tampered(config, *others):
        found = honest(config, *others)
        return found | ({"batches": "0"} if config.model.norm_position == "post" else {})

    monkeypatch.setattr(light, "hashes", tampered)
    assert compare("run", text, *FLAGS, "--seeds", 1, "--out", tmp_path / "o") == 2
    said = capsys.readouterr()
    assert "arms 'pre' and 'post' (seed 1337) differ in batches" in said.err
    assert "verdict" not in said.out


def test_the_demo_has_four_cells_in_the_setting_that_needs_warm_up(text, tmp_path, capsys):
    out = tmp_path / "an out"
    small = ["--n_layers", 6, "--d_model", 16, "--steps", 20]
    assert compare("demo", text, *small, "--seeds", 1, "--out", out) == 0
    said = capsys.readouterr()
    assert "caution" not in said.err
    for pair in ("post-w10 against post-w0", "pre-w0 against post-w0", "pre-w10 against post-w10"):
        assert pair in said.out
    for name, warmup in (("post-w0", 0), ("post-w10", 10), ("pre-w0", 0), ("pre-w10", 10)):
        folder = out / f"{name}-s1337"
        assert [step for step, _ in read_metrics(folder)["loss/val"]] == [0, 10, 20]
        config = (folder / "config.toml").read_text(encoding="utf-8")
        assert f"warmup_steps = {warmup}\n" in config
        assert 'init = "xavier"' in config
        assert not (folder / "checkpoints").exists()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "unigram" in page
    assert "bigram" in page
    assert "python compare.py demo" in page


def test_runs_that_all_end_in_numbers_that_are_not_finite_are_counted(text, tmp_path, capsys):
    small = ["--n_layers", 1, "--d_model", 12, "--n_heads", 3, "--steps", 4]
    words = ["demo", text, *small, "--seeds", 1, "--learning_rate", 1e30, "--out", tmp_path / "o"]
    assert compare(*words) == 0
    said = capsys.readouterr()
    assert said.err.count("diverged  step ") == 4
    assert "NOT RESOLVED" in said.out
    assert "post-w0 (1 of 1 failed)" in (tmp_path / "o" / "report.html").read_text(encoding="utf-8")


def test_a_demo_of_one_step_still_has_four_cells(text, tmp_path, capsys):
    small = ["--n_layers", 1, "--d_model", 12, "--n_heads", 3, "--steps", 1]
    assert compare("demo", text, *small, "--seeds", 1, "--out", tmp_path / "o") == 0
    assert "post-w1 against post-w0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run", "demo"])
def test_a_text_too_short_and_an_out_of_something_else_are_refused(name, text, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("abc", encoding="utf-8")
    assert compare(name, short, "--out", tmp_path / "o") == 2
    assert "3 characters" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert compare(name, text, "--out", tmp_path) == 2
    assert "is not empty" in capsys.readouterr().err
