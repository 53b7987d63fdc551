"""A long run is not slowly filled with garbage, and no number in it is denormal."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import python
from small_runs import config_for, newest_state, some_text, started
from states import assert_same

from gpt.training.curves import read_metrics

TRAIN = """
import json, sys
from pathlib import Path

from gpt.config import RunConfig
from gpt.corpus import read_text
from gpt.run import Keeper, Run

text, folder, settings = sys.argv[1:]
before_step = Keeper.before_step

def kilobytes():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

def measured(keeper, step):
    if step % 500 == 0:
        found[step] = kilobytes()
    return before_step(keeper, step)

found = {}
Keeper.before_step = measured
config = RunConfig().with_changes(json.loads(settings) | {"text": text})
Path(folder).mkdir()
Run(config, read_text(config)).go(Path(folder), quiet=True)
found[config.training.steps] = kilobytes()
print(json.dumps(found))
"""

# NumPy makes and reads the numbers, because torch's flush would hide them.
FLUSHED = """
import sys

import numpy as np
import torch

from gpt.config import ComputeConfig
from gpt.training.machine import set_up

small = torch.from_numpy(np.full(1_000_003, 1e-39, np.float32))
set_up(ComputeConfig(device="cpu", threads=int(sys.argv[1])))
print(torch.get_num_threads(), np.count_nonzero((small * 0.9).numpy().view(np.int32)))
"""

DECAYING = """
import sys
from pathlib import Path

from small_runs import config_for, resumed, started, stop_after

text, folder, parts = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
config = config_for(
    Path(text), threads=2, steps=20, tie_embeddings=False, weight_decay=990.0, warmup_steps=0,
    schedule="constant", eval_every=100, sample_chars=0,
)
if parts == ["first"]:
    started(config, folder / "whole").go()
    started(config, folder / "parts", stop_after(11)).go()
else:
    resumed(config, folder / "parts").go()
"""


def printed(code: str, *words: object) -> str:
    """By a program."""
    ended = python("-c", code, *words, environment={"GOMP_SPINCOUNT": "1000"})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc here")
def test_memory_does_not_grow_in_5000_steps(tmp_path, faults):
    settings = {
        "d_model": 8, "n_heads": 2, "n_layers": 1, "context_length": 6, "batch_size": 2,
        "steps": 5000, "eval_every": 250, "log_every": 10, "sample_chars": 3, "threads": 1,
        "dropout": 0.1,
    }  # fmt: skip
    with faults("a long run"):
        told = printed(TRAIN, some_text(tmp_path), tmp_path / "run", json.dumps(settings))
        found = {int(step): n for step, n in json.loads(told).items()}
        assert sorted(found) == list(range(0, 5001, 500))
        assert found[5000] <= found[500] + 15_000, found
        curves = read_metrics(tmp_path / "run")
        assert (len(curves["loss/train"]), len(curves["loss/val"])) == (501, 21)
        samples = (tmp_path / "run" / "samples.txt").read_text(encoding="utf-8")
        assert samples.count("--- step ") == 21


def test_a_run_flushes_denormals(tmp_path):
    small = torch.from_numpy(np.full(1009, 1e-39, np.float32))
    left = []

    def between(run):
        left.append(np.count_nonzero((small * 0.9).numpy().view(np.int32)))

    between(None)
    started(config_for(some_text(tmp_path)), tmp_path / "run", between).go()
    assert left == [1009] + [0] * 7


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_every_thread_flushes_denormals(threads):
    assert printed(FLUSHED, threads) == f"{threads} 0\n"


@pytest.mark.slow
def test_a_run_with_denormals_resumes_exactly_in_every_thread(tmp_path, faults):
    text = some_text(tmp_path)
    unseen = "".join(chr(0x5000 + n) for n in range(3000))  # in the validation part, and large
    lines = text.read_text(encoding="utf-8") * 20
    text.write_text(lines + unseen, encoding="utf-8")
    with faults("a run with denormals stopped and resumed"):
        printed(DECAYING, text, tmp_path, "first")
        printed(DECAYING, text, tmp_path)
        whole, parts = (newest_state(tmp_path / name) for name in ("whole", "parts"))
        assert (whole["model"]["token_embedding.weight"][-3000:] == 0).all()
        assert_same(parts, whole)
