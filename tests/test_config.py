"""Settings: every rule answers with value, rule and remedy, and nothing else gets out."""

import ast
import contextlib
import dataclasses
import inspect
import tomllib
import typing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt import config as module
from gpt.checks import nearest
from gpt.config import (
    MachineConfig,
    ModelConfig,
    RunConfig,
    TextConfig,
    TrainingConfig,
    changed,
    from_flat,
    to_flat,
)
from gpt.config_files import read_toml, write_toml
from gpt.errors import UsageError

SECTIONS = (TextConfig, ModelConfig, TrainingConfig, MachineConfig)
EVERY_FIELD = [f for cls in SECTIONS for f in dataclasses.fields(cls)]

# Everything set to something else than its default.
UNUSUAL = {
    "d_model": 48,
    "n_heads": 6,
    "n_kv_heads": 2,
    "n_layers": 3,
    "d_ff": 100,
    "context_length": 17,
    "norm_position": "post",
    "norm": "rms",
    "positions": "rotary",
    "activation": "relu2",
    "attention_bias": True,
    "feedforward_bias": False,
    "qk_norm": True,
    "tie_embeddings": False,
    "init": "xavier",
    "dropout": 0.25,
    "attention_dropout": 0.125,
    "text": 'a "quoted" \\ name\n\x07 é中😀.txt',
    "val_fraction": 0.05,
    "encoding": "cp1252",
    "keep_newlines": True,
    "steps": 123,
    "batch_size": 7,
    "windows": "epochs",
    "grad_accumulation": 5,
    "optimizer": "muon",
    "learning_rate": 1e-22,
    "warmup_steps": 11,
    "schedule": "wsd",
    "decay_fraction": 1 / 3,
    "final_lr_fraction": 0.0,
    "weight_decay": 1e22,
    "beta1": 0.0,
    "beta2": 0.1 + 0.2,
    "muon_momentum": 0.5,
    "grad_clip": 0.0,
    "confidence_penalty": 0.0625,
    "eval_every": 9,
    "log_every": 13,
    "sample_chars": 0,
    "seed": 2**63 - 1,
    "device": "cpu",
    "dtype": "bfloat16",
    "compile": True,
    "threads": 3,
    "native": False,
}


def toml_file(folder, text: str | bytes, name: str = "some.toml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


# --- The rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        # Model: the value, the rule, the remedy.
        ({"d_model": 30, "n_heads": 4}, ["30", "not divisible by n_heads = 4", "28 or 32"]),
        ({"d_model": 3, "n_heads": 4}, ["3", "not divisible by n_heads = 4", "try d_model 4"]),
        ({"n_heads": 8, "n_kv_heads": 3}, ["8", "not divisible by n_kv_heads = 3", "1, 2, 4, 8"]),
        ({"d_model": 0}, ["d_model = 0", "less than 1", "choose 1 or more"]),
        ({"n_heads": 0}, ["n_heads = 0", "less than 1", "choose 1 or more"]),
        ({"n_kv_heads": 0}, ["n_kv_heads = 0", "less than 1", "choose 1 or more"]),
        ({"n_layers": -2}, ["n_layers = -2", "less than 1", "choose 1 or more"]),
        ({"d_ff": 0}, ["d_ff = 0", "less than 1", "choose 1 or more"]),
        ({"context_length": 0}, ["context_length = 0", "less than 1", "choose 1 or more"]),
        ({"positions": "rotary", "d_model": 12}, ["rotary", "= 3 is odd", "choose a d_model"]),
        (
            {"positions": "sinusoidal", "d_model": 9, "n_heads": 3},
            ["sinusoidal", "d_model = 9 is odd", "choose an even d_model"],
        ),
        ({"activation": "swiglu", "feedforward_bias": True}, ["swiglu", "no biases", "drop"]),
        ({"dropout": 1.0}, ["dropout = 1.0", "not in [0, 1)", "try 0.1"]),
        ({"attention_dropout": 1.5}, ["attention_dropout = 1.5", "not in [0, 1)", "try 0.1"]),
        ({"dropout": -0.1}, ["dropout = -0.1", "not in [0, 1)", "try 0.1"]),
        # Text.
        ({"val_fraction": 1.0}, ["val_fraction = 1.0", "not in [0, 1)", "try 0.1"]),
        ({"text": "a\udce9.txt"}, ["'a\\udce9.txt'", "not a Unicode name", "rename the file"]),
        # Training.
        ({"steps": 0}, ["steps = 0", "less than 1", "choose 1 or more"]),
        ({"batch_size": 0}, ["batch_size = 0", "less than 1", "choose 1 or more"]),
        ({"grad_accumulation": 0}, ["grad_accumulation = 0", "less than 1", "choose"]),
        ({"eval_every": 0}, ["eval_every = 0", "less than 1", "choose 1 or more"]),
        ({"log_every": 0}, ["log_every = 0", "less than 1", "choose 1 or more"]),
        ({"warmup_steps": -1}, ["warmup_steps = -1", "less than 0", "choose 0 or more"]),
        ({"sample_chars": -1}, ["sample_chars = -1", "less than 0", "choose 0 or more"]),
        ({"weight_decay": -0.1}, ["weight_decay = -0.1", "less than 0", "choose 0 or more"]),
        ({"confidence_penalty": 101.0}, ["confidence_penalty = 101.0", "100"]),
        ({"confidence_penalty": -0.5}, ["confidence_penalty = -0.5", "choose 0 or more"]),
        ({"grad_clip": -1.0}, ["grad_clip = -1.0", "less than 0", "choose 0 or more"]),
        ({"seed": -1}, ["seed = -1", "less than 0", "choose 0 or more"]),
        ({"seed": 2**63}, ["seed", "64 bits", "choose a smaller number"]),
        ({"learning_rate": 0.0}, ["learning_rate = 0.0", "not above 0", "try 0.001"]),
        ({"beta1": 1.0}, ["beta1 = 1.0", "not in [0, 1)", "try"]),
        ({"beta2": -0.5}, ["beta2 = -0.5", "not in [0, 1)", "try"]),
        ({"muon_momentum": 1.5}, ["muon_momentum = 1.5", "not in [0, 1)", "try"]),
        ({"decay_fraction": 1.1}, ["decay_fraction = 1.1", "not in [0, 1]", "try"]),
        ({"final_lr_fraction": -0.1}, ["final_lr_fraction = -0.1", "not in [0, 1]", "try"]),
        # Machine.
        ({"threads": -1}, ["threads = -1", "less than 0", "choose 0 or more"]),
        # Types and words.
        ({"norm": "layr"}, ["norm = 'layr'", "layer, rms", "Did you mean 'layer'?"]),
        ({"positions": "rotery"}, ["'rotery'", "learned, sinusoidal, rotary", "'rotary'?"]),
        ({"device": 3}, ["device = 3", "not one of auto, cpu, cuda, mps"]),
        ({"norm": ["layer"]}, ["norm = ['layer']", "not one of layer, rms"]),
        ({"learning_rate": "5e-5"}, ["learning_rate = '5e-5'", "not of type float"]),
        ({"steps": 1.5}, ["steps = 1.5", "not of type int"]),
        ({"steps": "100"}, ["steps = '100'", "not of type int"]),
        ({"steps": True}, ["steps = True", "not of type int"]),
        ({"dropout": False}, ["dropout = False", "not of type float"]),
        ({"compile": "False"}, ["compile = 'False'", "not of type bool"]),
        ({"compile": 1}, ["compile = 1", "not of type bool"]),
        ({"feedforward_bias": "yes"}, ["feedforward_bias = 'yes'", "not of type bool"]),
        ({"d_ff": 10.5}, ["d_ff = 10.5", "not of type int"]),
        ({"text": 7}, ["text = 7", "not of type str"]),
        ({"learning_rate": float("nan")}, ["learning_rate = nan", "not a finite number"]),
        ({"weight_decay": float("inf")}, ["weight_decay = inf", "not a finite number"]),
        ({"steps": float("inf")}, ["steps = inf", "not of type int"]),
        ({"learning_rate": 10**400}, ["learning_rate", "64 bits", "choose a smaller number"]),
        ({"d_model": 10**400, "n_heads": 1}, ["d_model", "64 bits", "choose a smaller number"]),
    ],
    ids=lambda value: "-".join(map(str, value))[:40] if isinstance(value, dict) else "",
)
def test_a_broken_rule_names_the_value_the_rule_and_the_remedy(changes, parts):
    with pytest.raises(UsageError) as caught:
        RunConfig().with_changes(changes)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize(
    "changes",
    [
        {"n_heads": 1, "d_model": 1},
        {"n_heads": 8, "n_kv_heads": 8},
        {"positions": "rotary", "d_model": 10, "n_heads": 5},
        {"activation": "swiglu", "feedforward_bias": False},
        {"dropout": 0.0},
        {"dropout": 0.999},
        {"val_fraction": 0.0},
        {"steps": 40, "warmup_steps": 40},
        {"warmup_steps": 0, "steps": 1},
        {"decay_fraction": 1.0, "final_lr_fraction": 1.0},
        {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "grad_clip": 0.0},
        {"seed": 2**63 - 1},
    ],
)
def test_the_edge_of_a_rule_is_allowed(changes):
    flat = to_flat(RunConfig().with_changes(changes))
    assert flat == to_flat(RunConfig()) | changes


def test_a_wrong_divisor_is_answered_at_once_however_many_heads_there_are():
    heads = 2**60
    with pytest.raises(UsageError, match=r"try n_kv_heads 1, 2, 4, .*, 512$"):
        ModelConfig(d_model=heads, n_heads=heads, n_kv_heads=3)


# --- Derived defaults ----------------------------------------------------------------------------


def test_derived_widths_and_biases_are_written_out():
    plain = ModelConfig(d_model=40, n_heads=5).resolved()
    assert (plain.d_ff, plain.n_kv_heads, plain.feedforward_bias, plain.d_k) == (160, 5, True, 8)
    gated = ModelConfig(d_model=40, activation="swiglu").resolved()
    assert (gated.d_ff, gated.feedforward_bias) == (106, False)
    given_widths = ModelConfig(
        d_ff=7, n_kv_heads=1, feedforward_bias=False, dropout=0.25, attention_dropout=0.0
    )
    assert given_widths.resolved() == given_widths


def test_the_default_warmup_is_a_tenth_of_the_steps_and_at_most_100():
    for steps, warmup in ((1, 0), (9, 0), (10, 1), (999, 99), (1000, 100), (5000, 100)):
        assert TrainingConfig(steps=steps).resolved().warmup_steps == warmup
    assert TrainingConfig(warmup_steps=0).resolved().warmup_steps == 0


def test_a_resolved_run_has_no_open_default_and_stays_resolved():
    resolved = RunConfig().resolved()
    assert None not in to_flat(resolved).values()
    assert resolved.resolved() == resolved


def test_what_differs_between_two_runs_is_found_past_derived_defaults():
    spelled_out = RunConfig().with_changes({"d_ff": 512, "warmup_steps": 100})
    assert changed(RunConfig(), spelled_out) == {}
    other = RunConfig().with_changes({"d_ff": 100, "seed": 5})
    assert changed(RunConfig(), other) == {"d_ff": (512, 100), "seed": (1337, 5)}


# --- Names and documentation ---------------------------------------------------------------------


def test_field_names_are_unique_across_sections():
    names = [f.name for f in EVERY_FIELD]
    assert len(names) == len(set(names))
    assert set(names) == set(to_flat(RunConfig()))
    assert set(names) == set(UNUSUAL)


def test_every_field_has_a_docstring_of_its_own():
    documented = {}
    for cls in ast.parse(inspect.getsource(module)).body:
        if isinstance(cls, ast.ClassDef) and cls.name in {
            c.__name__ for section in SECTIONS for c in section.__mro__
        }:
            for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    documented[field.target.id] = after.value.value.strip()
    assert set(documented) == {f.name for f in EVERY_FIELD}
    assert all(text.endswith(".") for text in documented.values())
    assert len(set(documented.values())) == len(documented)


def test_sections_are_frozen_and_keyword_only():
    for cls in SECTIONS:
        name = dataclasses.fields(cls)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(cls(), name, getattr(cls(), name))
        with pytest.raises(TypeError):
            cls(getattr(cls(), name))


def test_nearest_suggests_a_close_word_and_is_silent_otherwise():
    assert nearest("n_hads", ["n_heads", "n_layers"]) == " Did you mean 'n_heads'?"
    assert nearest("xyzzy", ["n_heads", "n_layers"]) == ""


# --- Files ---------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_the_file_the_key_and_the_nearest_name(tmp_path):
    path = toml_file(tmp_path, "blok_size = 8\n")
    with pytest.raises(UsageError, match=r"some\.toml.*unknown field 'blok_size'"):
        read_toml([path])
    path = toml_file(tmp_path, "n_layer = 8\n")
    with pytest.raises(UsageError, match=r"some\.toml.*'n_layer'\. Did you mean 'n_layers'\?"):
        read_toml([path])


def test_later_files_win_over_earlier_ones(tmp_path):
    first = toml_file(tmp_path, "n_heads = 2\nd_model = 64\nsteps = 5", "first.toml")
    second = toml_file(tmp_path, "d_model = 32\nseed = 8", "second.toml")
    both = {"n_heads": 2, "d_model": 32, "steps": 5, "seed": 8}
    assert read_toml([first, second]) == both
    assert read_toml([second, first]) == both | {"d_model": 64}
    assert read_toml([]) == {}


def test_a_whole_number_may_be_written_in_the_scientific_way(tmp_path):
    values = read_toml([toml_file(tmp_path, "steps = 1e3\nd_ff = 2e2\nn_kv_heads = 4.0\n")])
    assert values == {"steps": 1000, "d_ff": 200, "n_kv_heads": 4}
    assert all(type(value) is int for value in values.values())


def test_a_number_with_a_fraction_is_no_whole_number(tmp_path):
    with pytest.raises(UsageError, match=r"some\.toml.*steps = 1\.5 is not of type int"):
        read_toml([toml_file(tmp_path, "steps = 1.5")])


def test_a_whole_number_will_do_for_a_fraction(tmp_path):
    values = read_toml([toml_file(tmp_path, "learning_rate = 1\ngrad_clip = 5e-1")])
    assert values == {"learning_rate": 1.0, "grad_clip": 0.5}
    assert all(type(value) is float for value in values.values())


def test_a_number_in_quotes_is_refused_with_its_type(tmp_path):
    with pytest.raises(UsageError, match="learning_rate = '5e-5' is not of type float"):
        read_toml([toml_file(tmp_path, 'learning_rate = "5e-5"')])


@pytest.mark.parametrize("value", ["1", "0", '"true"', "1.0"])
def test_only_true_and_false_are_booleans(tmp_path, value):
    with pytest.raises(UsageError, match=r"some\.toml.*qk_norm = .* is not of type bool"):
        read_toml([toml_file(tmp_path, f"qk_norm = {value}")])


def test_what_several_files_say_is_only_checked_together(tmp_path):
    values = read_toml([toml_file(tmp_path, "d_model = 30")])
    half = from_flat(values, checked=False)
    assert half.model.d_model == 30
    assert half.model.n_heads == ModelConfig().n_heads
    assert half.with_changes({"n_heads": 5}).model.d_model == 30
    with pytest.raises(UsageError, match="not divisible"):
        from_flat(values)


def test_a_byte_order_mark_at_the_start_of_a_file_is_no_part_of_it(tmp_path):
    assert read_toml([toml_file(tmp_path, b"\xef\xbb\xbfsteps = 3")]) == {"steps": 3}


@pytest.mark.parametrize(
    "content",
    [b"steps = ", b"\xff\xfe", b"steps 3", b"a = " + b"[" * 100_000, b"steps = 1" + b"0" * 5000],
    ids=["half", "bytes", "grammar", "depth", "digits"],
)
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path, content):
    with pytest.raises(UsageError, match=r"some\.toml' is not valid TOML"):
        read_toml([toml_file(tmp_path, content)])


def test_a_file_that_cannot_be_read_is_refused_by_name_with_the_reason(tmp_path):
    with pytest.raises(UsageError, match=r"there is no file .*missing\.toml"):
        read_toml([tmp_path / "missing.toml"])
    with pytest.raises(UsageError, match="is a folder"):
        read_toml([tmp_path])


# --- Round trips ---------------------------------------------------------------------------------


def test_the_unusual_run_differs_from_the_default_in_every_field():
    usual = to_flat(RunConfig())
    assert all(usual[name] != value for name, value in UNUSUAL.items())


def test_from_flat_is_the_inverse_of_to_flat():
    config = from_flat(UNUSUAL)
    assert to_flat(config) == UNUSUAL
    assert from_flat(to_flat(config)) == config
    assert from_flat({}) == RunConfig()


@pytest.mark.parametrize(
    "config", [RunConfig(), from_flat(UNUSUAL), RunConfig().with_changes({"activation": "swiglu"})]
)
def test_a_written_file_gives_the_resolved_run_back(tmp_path, config):
    values = read_toml([toml_file(tmp_path, write_toml(config))])
    assert from_flat(values) == config.resolved()
    assert set(values) == set(UNUSUAL)


def test_a_written_file_is_one_line_a_field_under_a_heading_a_section():
    lines = write_toml(from_flat(UNUSUAL)).splitlines()
    headings = [line for line in lines if line.startswith("# ")]
    assert len(headings) == len(SECTIONS)
    assert len([line for line in lines if " = " in line]) == len(UNUSUAL)
    assert all(line == "" or " = " in line or line in headings for line in lines)


TEXTS = st.text(max_size=20) | st.sampled_from(["auto", "-", "utf-8", "layer", "1e3", "../x"])
NUMBERS = st.integers() | st.integers(-3, 130) | st.sampled_from([2**63, 10**400, -(10**400)])
SCALARS = TEXTS | NUMBERS | st.floats() | st.booleans() | st.none() | st.binary(max_size=3)
VALUES = st.recursive(
    SCALARS | st.dates() | st.times() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(sorted(UNUSUAL)) | TEXTS
ONE_FILE = {"suppress_health_check": [HealthCheck.function_scoped_fixture], "deadline": None}


def plausible(field: dataclasses.Field):
    """Mostly values of the right kind, so that rules between fields are reached."""
    usual = UNUSUAL[field.name]
    words = typing.get_args(typing.get_type_hints(module.__dict__[home(field.name)])[field.name])
    of_kind = {bool: st.booleans(), int: st.integers(0, 40), float: st.floats(0, 1.5)}
    return st.sampled_from(words) if isinstance(usual, str) and words else of_kind[type(usual)]


def home(name: str) -> str:
    return next(c.__name__ for c in SECTIONS if name in {f.name for f in dataclasses.fields(c)})


PLAUSIBLE = st.fixed_dictionaries(
    {},
    optional={
        field.name: plausible(field)
        for field in EVERY_FIELD
        if field.name not in ("text", "encoding")
    },
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_arbitrary_settings_give_a_run_or_a_usage_error(changes):
    try:
        config = RunConfig().with_changes(changes)
    except UsageError:
        return
    assert tomllib.loads(write_toml(config)) == to_flat(config.resolved())


@settings(max_examples=150, deadline=None)
@given(PLAUSIBLE, st.text(max_size=12))
def test_every_accepted_run_survives_being_written_and_read(changes, text):
    try:
        config = RunConfig().with_changes(changes | {"text": text})
    except UsageError:
        return
    flat = to_flat(config.resolved())
    assert tomllib.loads(write_toml(config)) == flat
    assert from_flat(flat) == config.resolved()


@settings(max_examples=150, **ONE_FILE)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_give_settings_or_a_usage_error(tmp_path, content):
    with contextlib.suppress(UsageError):
        from_flat(read_toml([toml_file(tmp_path, content)]))


@settings(max_examples=150, **ONE_FILE)
@given(
    st.lists(st.tuples(NAMES, st.text("0123456789e.+-_'\"[]{}=,truefalsinf \n", max_size=12))),
)
def test_arbitrary_lines_give_settings_or_a_usage_error(tmp_path, lines):
    content = "\n".join(f"{name} = {value}" for name, value in lines)
    with contextlib.suppress(UsageError):
        from_flat(read_toml([toml_file(tmp_path, content.encode("utf-8", "replace"))]))
