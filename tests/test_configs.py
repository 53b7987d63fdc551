import tomllib
from pathlib import Path

import pytest
import torch

from gpt.config import RunConfig, to_flat
from gpt.config_files import read_toml
from gpt.model.count import parameter_count
from gpt.model.gpt import GPT

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
TOO_BIG_TO_BUILD = {"gpt2", "llama"}


def test_every_promised_preset_is_there():
    names = {path.stem for path in CONFIGS}
    assert names >= {
        "tiny", "default", "large", "gpt2", "llama", "pre_ln", "post_ln", "sinusoidal", "rms",
        "rotary", "swiglu",
    }  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_builds_and_runs(path):
    config = RunConfig().with_changes(read_toml([path]))
    if path.stem in TOO_BIG_TO_BUILD:
        assert sum(parameter_count(config.model, 50257).values()) > 100_000_000
        return
    model = GPT(config.model, 67)
    tokens = torch.arange(config.model.context_length)[None] % 67
    assert model(tokens).shape == (1, config.model.context_length, 67)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_preset_lists_only_what_differs_from_the_defaults(path):
    defaults = to_flat(RunConfig())
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    same = [name for name, value in document.items() if defaults[name] == value]
    assert not same or path.stem == "pre_ln", "pre_ln alone repeats a default, to be named"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_line_of_a_preset_has_its_reason(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    settings = [line for line in lines if "=" in line.split("#")[0]]
    if len(settings) > 1:
        assert [line for line in settings if "#" not in line] == []
