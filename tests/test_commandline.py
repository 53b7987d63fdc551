import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt import commandline
from gpt.commandline import parse_train, run_config, run_name
from gpt.config import ModelConfig, RunConfig
from gpt.config_files import write_toml
from gpt.errors import UsageError
from gpt.exits import exit_code
from gpt.lab.commandline import SUBCOMMANDS, parse_compare

ROOT = Path(__file__).parents[1]


@pytest.fixture
def preset(tmp_path) -> Path:
    path = tmp_path / "preset.toml"
    path.write_text("d_model = 36\nsteps = 77\n", encoding="utf-8")
    return path


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def status_of(main) -> int:
    """What the process would exit with: tyro leaves by SystemExit."""
    try:
        return exit_code(main)
    except SystemExit as leaving:
        return leaving.code


def test_without_flags_the_preset_applies(preset):
    command = parse_train(["my.txt"], preset)
    assert (command.model.d_model, command.training.steps) == (36, 77)
    assert command.model.n_layers == ModelConfig().n_layers
    assert command.text.text == "my.txt"


def test_with_files_the_preset_does_not_apply(preset, tmp_path):
    file = written(tmp_path / "a.toml", "n_layers = 3")
    command = parse_train(["--config", file], preset)
    assert (command.model.n_layers, command.model.d_model) == (3, ModelConfig().d_model)


def test_flags_win_over_later_files_over_earlier_ones(preset, tmp_path):
    a = written(tmp_path / "a.toml", "n_layers = 3\nbatch_size = 5\nsteps = 40")
    b = written(tmp_path / "b.toml", "n_layers = 6\nbatch_size = 7")
    command = parse_train(["--config", a, b, "--n_layers", "9"], preset)
    assert (command.model.n_layers, command.training.batch_size, command.training.steps) == (
        9,
        7,
        40,
    )


@pytest.mark.parametrize("shape", ["{f} {a} {b} {t}", "{t} {f} {a} {b}", "{f}={a} {f} {b} {t}"])
def test_the_text_may_stand_before_or_after_the_config_files(preset, tmp_path, shape):
    a = written(tmp_path / "a.toml", "n_layers = 3")
    b = written(tmp_path / "b.toml", "batch_size = 7")
    words = shape.format(f="--config", a=a, b=b, t="my.txt").split()
    command = parse_train(words, preset)
    assert (command.model.n_layers, command.training.batch_size) == (3, 7)
    assert command.text.text == "my.txt"


def test_flags_may_mend_what_only_the_files_break(preset, tmp_path):
    file = written(tmp_path / "a.toml", "d_model = 30")
    assert parse_train(["--config", file, "--n_heads", "3"], preset).model.d_k == 10


def test_flags_work_with_hyphens_too(preset):
    command = parse_train(["--context-length", "19", "--no-tie-embeddings"], preset)
    assert command.model.context_length == 19
    assert not command.model.tie_embeddings


@pytest.mark.parametrize(
    ("words", "needles"),
    [
        (["--blok_size", "8"], ["--blok_size", "Did you mean"]),
        (["--n_layer", "8"], ["--n_layer", "Did you mean '--n_layers'"]),
        (["--block", "8"], ["--block"]),
        (["--config", "a.tml"], ["--config", ".toml", "a.tml"]),
        (["--config"], [".toml", "nothing follows it"]),
        (["--config", "absent.toml"], ["absent.toml", "there is no file"]),
        (["--resume", "nowhere"], ["nowhere", "config.toml"]),
    ],
    ids=lambda value: "-".join(value) if value and value[0].startswith("--") else "",
)
def test_wrong_words_are_refused_with_the_word_and_a_remedy(capsys, tmp_path, words, needles):
    preset = tmp_path / "preset.toml"
    preset.write_text("", encoding="utf-8")
    code = status_of(lambda: parse_train(words, preset) and 0)
    message = re.sub(r"[│\s]+", " ", capsys.readouterr().err)
    assert code == 2
    for needle in needles:
        assert needle in message


@pytest.mark.parametrize(
    "words",
    [
        ["a.txt", "batch_size=8"],
        ["--compile", "maybe", "extra"],
        ["--steps", "1e3"],
        ["--d_model", "30", "--n_heads", "4"],
        ["--norm_position", "middle"],
        ["--learning_rate", "nan"],
        ["--dropout", "-1"],
    ],
    ids=" ".join,
)
def test_wrong_values_exit_with_2_and_no_traceback(capsys, preset, words):
    assert status_of(lambda: parse_train(words, preset) and 0) == 2
    error = capsys.readouterr().err
    assert error
    assert "Traceback" not in error


@settings(deadline=None)
@given(st.lists(st.text(max_size=12), max_size=5))
def test_no_command_line_gives_a_traceback(words):
    preset = ROOT / "configs" / "default.toml"
    assert status_of(lambda: parse_train(words, preset) and 0) in (0, 2)


def test_out_and_resume_exclude_each_other(preset, tmp_path):
    (tmp_path / "config.toml").write_text(write_toml(RunConfig()), encoding="utf-8")
    with pytest.raises(UsageError, match="exclude"):
        parse_train(["--resume", str(tmp_path), "--out", "x"], preset)


def test_resume_takes_the_settings_of_the_run_and_flags_change_them(preset, tmp_path):
    before = RunConfig().with_changes({"d_model": 52, "steps": 31})
    (tmp_path / "config.toml").write_text(write_toml(before), encoding="utf-8")
    command = parse_train([f"--resume={tmp_path}", "--steps", "62"], preset)
    assert (command.model.d_model, command.training.steps) == (52, 62)
    assert run_config(command).model == before.model.resolved()


@pytest.mark.parametrize("name", SUBCOMMANDS)
@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--val_fraction", "0"], "val_fraction must be above 0"),
        (["--workers", "0"], "workers = 0 is less than 1"),
        (["--threads", "2"], "threads = 2.*use --workers"),
        (["--steps", ""], "is empty"),
    ],
)
def test_what_no_comparison_can_do_is_refused(name, words, needle):
    with pytest.raises(UsageError, match=needle):
        parse_compare(name, words)


def test_compare_run_takes_arms_seeds_and_a_text():
    with pytest.raises(UsageError, match="seeds = 0"):
        parse_compare("run", ["--seeds", "0"])
    with pytest.raises(UsageError, match="--arms names nothing"):
        parse_compare("run", ["--arms"])
    command = parse_compare("run", ["my.txt", "--arms", "post", "pre", "--seeds", "7"])
    assert (command.arms, command.seeds, command.text.text) == (("post", "pre"), 7, "my.txt")
    assert command.model.d_model == ModelConfig().d_model


def test_a_duel_names_its_arms_first():
    command = parse_compare("duel", ["pre", "a.toml", "my.txt", "--seeds", "7"])
    assert (command.arms, command.seeds, command.text.text) == (("pre", "a.toml"), 7, "my.txt")
    with pytest.raises(UsageError, match="names one arm, 'post'"):
        parse_compare("duel", ["post", "--seeds", "7"])


@pytest.mark.parametrize("margin", ["0", "-0.1", "nan", "inf"])
def test_a_margin_that_is_no_difference_is_refused_before_anything_runs(margin):
    with pytest.raises(UsageError, match=f"margin = {float(margin)}"):
        parse_compare("run", [f"--margin={margin}"])


@pytest.mark.parametrize("name", ["demo", "why", "verify"])
def test_a_setting_that_a_subcommand_gives_values_itself_is_refused(name):
    for flag in ("--norm_position=mix", "--warmup-steps"):
        with pytest.raises(UsageError, match=f"has no effect here: {name} varies it; drop it"):
            parse_compare(name, [flag, "3"])
    with pytest.raises(UsageError, match="init varies it; use --depths"):
        parse_compare("init", ["--n_layers", "3"])


def test_an_unknown_subcommand_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"'dmeo'\. Did you mean 'demo'"):
        parse_compare("dmeo", [])


def test_the_demo_begins_in_the_setting_that_needs_warm_up(tmp_path):
    demo = parse_compare("demo", [])
    assert (demo.model.init, demo.training.eval_every) == ("xavier", 10)
    assert parse_compare("demo", ["--eval_every", "40"]).training.eval_every == 40
    other = parse_compare("demo", ["--config", written(tmp_path / "a.toml", "n_layers = 3")])
    assert (other.model.n_layers, other.model.init) == (3, ModelConfig().init)


def test_a_run_is_named_after_its_text_and_config_files(preset):
    toml = [str(ROOT / "configs" / name) for name in ("tiny.toml", "post_ln.toml")]
    command = parse_train(["some/novel.txt", "--config", *toml], preset)
    assert run_name(command) == "novel-tiny-post_ln"
    assert run_name(parse_train([], preset)) == "shakespeare"


def test_the_text_of_a_run_is_an_absolute_path(preset):
    assert Path(run_config(parse_train(["novel.txt"], preset)).text.text).is_absolute()
    assert run_config(parse_train(["-"], preset)).text.text == "-"
    assert run_config(parse_train([], preset)).text.text == ""


def test_a_shell_line_can_be_pasted(monkeypatch):
    monkeypatch.setattr(commandline.os, "name", "posix")
    line = commandline.shell_line("-m", "tensorboard.main", "--logdir", Path("out dir/é"))
    assert line.endswith("-m tensorboard.main --logdir 'out dir/é'")


@pytest.mark.parametrize(
    "script", ["train.py", "sample.py", *(f"compare.py {name}" for name in SUBCOMMANDS)]
)
def test_help_and_wrong_flags_are_answered_without_torch(script):
    script, *run_words = script.split()
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{script!r}, *sys.argv[1:]]\n"
        "try:\n"
        f"    runpy.run_path({script!r}, run_name='__main__')\n"
        "except SystemExit as leaving:\n"
        "    print('left', leaving.code, 'torch' in sys.modules)\n"
    )
    for words, status in ((["--help"], 0), (["--blok_size", "8"], 2)):
        ended = subprocess.run(
            [sys.executable, "-c", code, *run_words, *words],
            capture_output=True, text=True, cwd=ROOT, encoding="utf-8",
        )  # fmt: skip
        assert ended.stdout.splitlines()[-1] == f"left {status} False"
    assert "--blok_size" in ended.stderr
