import copy
import dataclasses
import errno
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from helpers import EVERY_VARIANT, SIZES, variant_name

import gpt.training.checkpoint as module
from gpt.config import ModelConfig, RunConfig, to_flat
from gpt.errors import CheckpointError, DiskError, NonFiniteError
from gpt.model.block import BLOCKS
from gpt.model.gpt import GPT
from gpt.training import archive
from gpt.training.atomic import sweep
from gpt.training.checkpoint import (
    load_checkpoint,
    restore,
    restore_optimisers,
    save_checkpoint,
)
from gpt.training.optimisers import build_optimisers
from gpt.training.schema import FORMAT_VERSION, expected_shapes

VOCABULARY = "\n !aehlorw\u00e9"
CPU = torch.device("cpu")


def run_config(**changes) -> RunConfig:
    return RunConfig().with_changes(SIZES | {"dropout": 0.1} | changes)


def trained(config: RunConfig):
    """A model and its optimisers after two updates."""
    model = GPT(config.model, len(VOCABULARY), config.training.seed)
    optimisers = build_optimisers(model, config.training, CPU)
    for step in range(2):
        update(model, optimisers, step)
    return model, optimisers


def update(model, optimisers, step):
    torch.manual_seed(step)
    tokens = torch.randint(len(VOCABULARY), (3, 7))
    model(tokens).square().mean().backward()
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad()


def state_of(config: RunConfig, model, optimisers, step=2) -> dict:
    return {
        "config": to_flat(config),
        "vocabulary": VOCABULARY,
        "model": model.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "step": step,
        "best": {"step": 1, "loss": np.float32(1.5)},
        "source": {"path": "a.txt", "bytes": 1234, "sha256": "ab" * 32},
        "environment": {"torch": torch.__version__, "threads": 1, "device": "cpu", "dtype": "x"},
    }


@pytest.fixture(scope="module")
def shared_state():
    config = run_config()
    return state_of(config, *trained(config))


@pytest.fixture
def state(shared_state):
    return copy.deepcopy(shared_state)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


def save(folder, state, step, is_best=False):
    return save_checkpoint(folder, state | {"step": step}, is_best=is_best)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


def forged(folder, state, change=lambda data: None):
    """A file that ``save_checkpoint`` would not write."""
    good = torch.load(save(folder, state, 2), weights_only=True)
    change(good)
    path = folder / "forged.pt"
    torch.save(good, path)
    return path


# Round trips


@pytest.mark.parametrize("changes", EVERY_VARIANT, ids=variant_name)
def test_a_restored_model_is_the_model_that_was_saved(folder, changes):
    config = run_config(**changes)
    model, optimisers = trained(config)
    checkpoint = load_checkpoint(
        save_checkpoint(folder, state_of(config, model, optimisers), is_best=False)
    )
    again, tokenizer = restore(checkpoint)
    tokens = torch.arange(8)[None] % len(VOCABULARY)
    assert torch.equal(again(tokens), model.eval()(tokens))
    assert not again.training
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert again.config == config.model.resolved()
    assert tokenizer.vocabulary == VOCABULARY
    assert checkpoint.config == to_flat(config)


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        ("adamw", {}),
        ("muon", {}),
        *(("adamw", {"norm_position": name, "norm": "dyt"}) for name in BLOCKS if name != "pre"),
    ],
    ids=str,
)
def test_training_goes_on_bit_for_bit_from_a_checkpoint(folder, optimizer, changes):
    config = run_config(optimizer=optimizer, **changes)
    model, optimisers = trained(config)
    checkpoint = load_checkpoint(
        save_checkpoint(folder, state_of(config, model, optimisers), is_best=False)
    )
    again = GPT(config.model, len(VOCABULARY), seed=5)
    again.load_state_dict(checkpoint.model)
    new = build_optimisers(again, config.training, CPU)
    restore_optimisers(checkpoint, new)
    for step in range(2, 5):
        update(model, optimisers, step)
        update(again, new, step)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_the_facts_come_back_as_plain_values(folder, state):
    path = save_checkpoint(folder, state, is_best=False)
    checkpoint = load_checkpoint(path)
    assert checkpoint.path == path
    assert checkpoint.notices == ()
    assert (checkpoint.format_version, checkpoint.step) == (FORMAT_VERSION, 2)
    assert checkpoint.best == {"step": 1, "loss": 1.5}
    assert type(checkpoint.best["loss"]) is float
    assert checkpoint.source == state["source"]
    assert type(checkpoint.environment["torch"]) is str
    with pytest.raises(dataclasses.FrozenInstanceError):
        checkpoint.step = 3


def test_a_state_without_validation_has_no_best(folder, state):
    assert (
        load_checkpoint(save_checkpoint(folder, state | {"best": None}, is_best=False)).best is None
    )


def test_another_process_with_another_hash_seed_reads_the_same(folder, state):
    path = save_checkpoint(folder, state, is_best=False)
    program = (
        "import sys, torch; from gpt import load_checkpoint, restore\n"
        "model, tokenizer = restore(load_checkpoint(sys.argv[1]))\n"
        "total = sum(p.double().sum().item() for p in model.parameters())\n"
        "print(ascii(tokenizer.vocabulary), total, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path.parent.parent],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "2"},
    )
    total = sum(p.double().sum().item() for p in restore(load_checkpoint(path))[0].parameters())
    assert done.stdout.strip() == f"{VOCABULARY!a} {total} False"


def test_a_view_into_a_large_tensor_is_saved_alone(folder, state):
    large = torch.zeros(1000, *state["model"]["token_embedding.weight"].shape)
    small = save(folder, state, 1).stat().st_size
    state["model"]["token_embedding.weight"] = large[3]
    assert save(folder, state, 2).stat().st_size == small


def test_restoring_draws_nothing(folder, state):
    checkpoint = load_checkpoint(save_checkpoint(folder, state, is_best=False))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    restore(checkpoint)
    assert torch.equal(torch.rand(4), expected)


def test_restored_optimisers_share_no_memory_with_the_checkpoint(folder):
    config = run_config()
    model, optimisers = trained(config)
    checkpoint = load_checkpoint(
        save_checkpoint(folder, state_of(config, model, optimisers), is_best=False)
    )
    before = copy.deepcopy(checkpoint.optimisers[0]["state"][0]["exp_avg"])
    restore_optimisers(checkpoint, optimisers)
    update(model, optimisers, 2)
    assert torch.equal(checkpoint.optimisers[0]["state"][0]["exp_avg"], before)


def test_restored_optimisers_keep_the_settings_of_the_new_config(folder):
    config = run_config(weight_decay=0.1)
    model, optimisers = trained(config)
    checkpoint = load_checkpoint(
        save_checkpoint(folder, state_of(config, model, optimisers), is_best=False)
    )
    changed = config.with_changes({"weight_decay": 0.3, "beta2": 0.5})
    new = build_optimisers(model, changed.training, CPU)
    restore_optimisers(checkpoint, new)
    group = new[0].param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.3, (0.9, 0.5))
    assert new[0].state[group["params"][0]]["step"] == 2


def test_the_state_of_other_optimisers_is_refused_before_anything_is_touched(folder):
    config = run_config()
    model, optimisers = trained(config)
    checkpoint = load_checkpoint(
        save_checkpoint(folder, state_of(config, model, optimisers), is_best=False)
    )
    muon = build_optimisers(model, config.with_changes({"optimizer": "muon"}).training, CPU)
    with pytest.raises(CheckpointError, match="state of other optimisers"):
        restore_optimisers(checkpoint, muon)
    wider = GPT(run_config(d_ff=11).model, len(VOCABULARY))
    other = build_optimisers(wider, config.training, CPU)
    with pytest.raises(CheckpointError, match="state of other optimisers"):
        restore_optimisers(checkpoint, other)
    assert not other[0].state


@pytest.mark.parametrize("changes", EVERY_VARIANT, ids=variant_name)
def test_expected_shapes_are_those_of_the_model(changes):
    config = ModelConfig(**SIZES | changes)
    shapes = {key: tensor.shape for key, tensor in GPT(config, 11).state_dict().items()}
    assert expected_shapes(config, 11) == shapes


# Keeping


def test_the_newest_two_by_the_step_in_their_names_and_the_best_are_kept(folder, state):
    for step in (900, 1000, 99_999_999, 100_000_000):
        path = save(folder, state, step, is_best=step == 1000)
        os.utime(path, (10**9 - step, 10**9 - step))
    assert names(folder) == ["best.pt", "step-100000000.pt", "step-99999999.pt"]
    assert load_checkpoint(folder / "best.pt").step == 1000


def test_what_was_just_saved_is_kept_although_others_have_later_steps(folder, state):
    for step in (30, 40, 20):
        path = save(folder, state, step)
    assert path.exists()
    assert names(folder) == ["step-00000020.pt", "step-00000030.pt", "step-00000040.pt"]


def test_the_best_is_a_second_name_of_a_step_until_a_better_one_comes(folder, state):
    first = save(folder, state, 1, is_best=True)
    assert (folder / "best.pt").samefile(first)
    save(folder, state, 2)
    assert (folder / "best.pt").samefile(first)
    third = save(folder, state, 3, is_best=True)
    assert (folder / "best.pt").samefile(third)


def test_saving_the_same_step_twice_replaces_it(folder, state):
    save(folder, state, 5, is_best=True)
    state["best"] = {"step": 4, "loss": 0.25}
    save(folder, state, 5, is_best=True)
    assert names(folder) == ["best.pt", "step-00000005.pt"]
    assert load_checkpoint(folder).best["loss"] == 0.25


def test_older_checkpoints_go_only_after_the_new_one_is_safe(folder, state, monkeypatch):
    save(folder, state, 1)
    save(folder, state, 2)
    monkeypatch.setattr(module, "link_atomically", lambda *args: pytest.fail("stop here"))
    with pytest.raises(pytest.fail.Exception):
        save(folder, state, 3, is_best=True)
    assert names(folder) == ["step-00000001.pt", "step-00000002.pt", "step-00000003.pt"]


def test_a_folder_that_was_deleted_is_made_again(folder, state):
    save(folder, state, 1)
    (folder / "step-00000001.pt").unlink()
    folder.rmdir()
    save(folder, state, 2)
    assert names(folder) == ["step-00000002.pt"]


# Refusing to save


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(folder, state, bad):
    save(folder, state, 1)
    state["model"]["blocks.1.norm_2.gamma"][3] = bad
    with pytest.raises(NonFiniteError, match=r"model\.blocks\.1\.norm_2\.gamma .* step 2 "):
        save(folder, state, 2)
    assert names(folder) == ["step-00000001.pt"]


def test_optimiser_state_that_is_not_finite_is_not_saved(folder, state):
    state["optimisers"][0]["state"][0]["exp_avg_sq"][0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"optimisers\.0\.state\.0\.exp_avg_sq"):
        save(folder, state, 2)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_the_names_of_a_wrapped_module_reach_no_file(folder, state, prefix):
    state["model"] = {prefix + key: value for key, value in state["model"].items()}
    with pytest.raises(CheckpointError, match=f"'{prefix}token_embedding.weight' is unknown"):
        save(folder, state, 2)
    assert not folder.exists()


def test_what_is_not_plain_data_is_not_saved(folder, state):
    state["source"]["path"] = folder
    with pytest.raises(AssertionError, match=r"cannot hold a .*Path"):
        save(folder, state, 2)


@pytest.mark.parametrize("allowed", [0, 1, 4, 9])
def test_a_disk_that_fills_up_in_a_save_leaves_the_older_checkpoints(
    folder, state, monkeypatch, allowed
):
    save(folder, state, 1)
    before = (folder / "step-00000001.pt").read_bytes()
    torch_save = torch.save

    def filling(data, file):
        class Filling:
            writes = 0

            def write(self, data):
                self.writes += 1
                if self.writes > allowed:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return original.write(data)

        original, file.file = file.file, Filling()
        torch_save(data, file)

    monkeypatch.setattr(torch, "save", filling)
    with pytest.raises(
        DiskError, match=r"step-00000002.pt.*No space left.*free.*it takes 0\.\d MB"
    ):
        save(folder, state, 2, is_best=True)
    assert names(folder) == ["step-00000001.pt"]
    assert (folder / "step-00000001.pt").read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_a_checkpoint_that_loads(tmp_path, state):
    small = tmp_path / "small"
    small.mkdir()
    size = save(tmp_path, state, 1).stat().st_size
    options = f"size={2 * size + size // 2}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", small]).returncode:
        pytest.skip("this root may not mount")
    try:
        save(small, state, 1)
        save(small, state, 2)
        with pytest.raises(DiskError, match="No space left on device"):
            save(small, state, 3)
        assert names(small) == ["step-00000001.pt", "step-00000002.pt"]
        assert load_checkpoint(small).step == 2
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_checkpoint_that_the_disk_garbles_is_not_given_its_name(folder, state, monkeypatch):
    save(folder, state, 1)
    torch_save = torch.save

    def garbled(data, file):
        torch_save(data, file)
        file.file.seek(20_000)
        file.file.write(b"garbage")
        file.file.seek(0, 2)

    monkeypatch.setattr(torch, "save", garbled)
    with pytest.raises(DiskError, match="Bad CRC-32"):
        save(folder, state, 2)
    assert names(folder) == ["step-00000001.pt"]


def test_too_little_memory_is_not_taken_for_damage(folder, state, monkeypatch):
    save(folder, state, 1)

    def none_left(*_):
        raise MemoryError

    monkeypatch.setattr(archive, "_tensor", none_left)
    with pytest.raises(MemoryError):
        load_checkpoint(folder, prefer="newest", set_aside=True)
    assert names(folder) == ["step-00000001.pt"]


# Choosing


def test_sampling_takes_the_best_and_resuming_the_newest(folder, state):
    for step in (1, 2, 3):
        save(folder, state, step, is_best=step == 2)
    for path in (folder, folder.parent, str(folder.parent)):
        assert load_checkpoint(path).step == 2
        assert load_checkpoint(path, prefer="best").path == folder / "best.pt"
        assert load_checkpoint(path, prefer="newest").step == 3


def test_without_a_best_the_newest_is_taken(folder, state):
    save(folder, state, 9)
    save(folder, state, 10)
    assert load_checkpoint(folder).step == 10


def test_a_damaged_checkpoint_is_named_and_passed_over(folder, state):
    for step in (1, 2):
        save(folder, state, step)
    damage(folder / "step-00000002.pt")
    checkpoint = load_checkpoint(folder, prefer="newest")
    assert checkpoint.step == 1
    (notice,) = checkpoint.notices
    assert "step-00000002.pt" in notice
    assert "damaged" in notice
    assert "\n" not in notice
    assert names(folder) == ["step-00000001.pt", "step-00000002.pt"]


def test_a_resume_sets_damaged_checkpoints_aside_and_deletes_none(folder, state):
    for _ in range(2):
        for step in (1, 2):
            save(folder, state, step)
        damage(folder / "step-00000002.pt")
        checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True)
        assert checkpoint.step == 1
        assert "renamed 'step-00000002.pt.corrupt" in checkpoint.notices[0]
    assert names(folder) == [
        "step-00000001.pt", "step-00000002.pt.corrupt", "step-00000002.pt.corrupt-2"
    ]  # fmt: skip


def test_the_best_is_the_last_hope_of_a_resume(folder, state):
    save(folder, state, 1, is_best=True)
    for step in (2, 3):
        damage(save(folder, state, step))
    checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True)
    assert checkpoint.path.name == "best.pt"
    assert len(checkpoint.notices) == 2


def test_a_damaged_best_gives_way_to_the_newest(folder, state):
    save(folder, state, 1, is_best=True)
    for step in (2, 3):
        save(folder, state, step)
    damage(folder / "best.pt")
    checkpoint = load_checkpoint(folder)
    assert checkpoint.step == 3
    assert "best.pt" in checkpoint.notices[0]


def test_when_all_are_damaged_each_is_named(folder, state):
    for step in (1, 2):
        damage(save(folder, state, step))
    with pytest.raises(CheckpointError, match=r"(?s)step-00000002\.pt.*step-00000001\.pt"):
        load_checkpoint(folder)


def test_a_path_to_a_file_has_no_second_choice(folder, state):
    for step in (1, 2):
        save(folder, state, step)
    path = folder / "step-00000002.pt"
    damage(path)
    with pytest.raises(CheckpointError, match=r"step-00000002\.pt' cannot be used: it is damaged"):
        load_checkpoint(path, set_aside=True)
    assert path.exists()


def test_no_checkpoint_at_all_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*train first"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*give a run folder"):
        load_checkpoint(tmp_path / "absent.pt")


def test_a_folder_or_pipe_in_the_place_of_a_checkpoint_is_passed_over(folder, state):
    save(folder, state, 1)
    (folder / "step-00000002.pt").mkdir()
    os.mkfifo(folder / "step-00000003.pt")
    checkpoint = load_checkpoint(folder, prefer="newest")
    assert checkpoint.step == 1
    assert ["not a file" in notice for notice in checkpoint.notices] == [True, True]


def test_stray_temporary_files_are_swept_and_never_read(folder, state):
    path = save(folder, state, 1)
    stray = folder / ".step-00000002.pt.tmp.4321"
    stray.write_bytes(path.read_bytes()[:1000])
    assert load_checkpoint(folder).notices == ()
    assert sweep(folder) == [stray.name]
    assert names(folder) == ["step-00000001.pt"]


@pytest.mark.parametrize("prefer", ["best", "newest"])
def test_a_newer_format_is_refused_and_not_passed_over(folder, state, prefer):
    save(folder, state, 1)
    path = forged(folder, state, lambda data: data.update(format_version=FORMAT_VERSION + 1))
    path.rename(folder / ("best.pt" if prefer == "best" else "step-00000003.pt"))
    with pytest.raises(CheckpointError, match=r"format_version is 2 .* reads up to 1; use the"):
        load_checkpoint(folder, prefer=prefer, set_aside=True)
    assert not list(folder.glob("*.corrupt"))


# Refusing what does not belong


def set_config(**changes):
    return lambda data: data["config"].update(changes)


def drop(*keys):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(data):
        for key in keys:
            data = data[key]
        data[last] = value

    return change


NAN = torch.full((24,), float("nan"))
WRONG = {
    "no version": (drop("format_version"), "not one of our checkpoints"),
    "version text": (put("format_version", "1"), "not one of our checkpoints"),
    "version 0": (put("format_version", 0), "not one of our checkpoints"),
    "missing field": (drop("environment"), "'environment' is missing"),
    "unknown field": (put("extra", 1), "'extra' is unknown"),
    "step text": (put("step", "2"), "'step' is of type str"),
    "step true": (put("step", True), "'step' is of type bool"),
    "step below 0": (put("step", -1), "step = -1 is not in"),
    "step too far": (put("step", 2**63), "step = 9223372036854775808 is not in"),
    "best nan": (put("best", "loss", float("nan")), "best loss = nan"),
    "best part": (drop("best", "step"), "in best, 'step' is missing"),
    "source kind": (put("source", "bytes", 1.5), "in source, 'bytes' is of type float"),
    "environment": (put("environment", "threads", None), "'threads' is of type NoneType"),
    "vocabulary order": (put("vocabulary", VOCABULARY[::-1]), "by code point"),
    "vocabulary empty": (put("vocabulary", ""), "vocabulary is empty"),
    "vocabulary size": (put("vocabulary", VOCABULARY[:-1]), r"is \(11, 24\), not \(10, 24\)"),
    "missing weight": (drop("model", "final_norm.beta"), "'final_norm.beta' is missing"),
    "extra weight": (put("model", "head.weight", torch.ones(11, 24)), "'head.weight' is unknown"),
    "shape": (put("model", "final_norm.beta", torch.ones(23)), r"is \(23,\), not \(24,\)"),
    "scalar": (put("model", "final_norm.beta", torch.tensor(1.0)), r"is \(\), not \(24,\)"),
    "int weight": (put("model", "final_norm.beta", torch.ones(24).int()), "torch.int32, not"),
    "half weight": (put("model", "final_norm.beta", torch.ones(24).half()), "torch.float16, not"),
    "nan weight": (put("model", "final_norm.beta", NAN), "'model.final_norm.beta' .* not finite"),
    "no tensor": (put("model", "final_norm.beta", [0.0] * 24), "is not a tensor"),
    "optimiser list": (put("optimisers", 0, []), "optimisers.0 is a list"),
    "optimiser part": (drop("optimisers", 0, "state"), "'state' is missing"),
    "optimiser groups": (put("optimisers", 0, "param_groups", [3]), "not a list of groups"),
    "optimiser numbers": (
        put("optimisers", 0, "param_groups", 0, "params", [5]), "number its parameters"
    ),
    "optimiser entry": (put("optimisers", 0, "state", 10**6, {}), "which is no parameter"),
    "optimiser nan": (put("optimisers", 0, "state", 0, "exp_avg", NAN), "not finite"),
    "config field": (set_config(n_layer=2), "unknown field 'n_layer'"),
    "config type": (set_config(n_layers="2"), "refused: n_layers = '2' is not of type int"),
    "config list": (set_config(norm=["layer"]), "norm of type list"),
    "config rule": (set_config(n_heads=5), "refused: d_model = 24 is not divisible"),
    "config negative": (set_config(n_layers=-1), "refused: n_layers = -1 is less than 1"),
    "config other": (set_config(norm="rms"), r"'blocks\.0\.norm_1\.beta' is unknown"),
    "many layers": (set_config(n_layers=10**9), "1,000,000,000 layers"),
    "too long an int": (set_config(n_layers=-(10**5000)), "it uses LONG4"),
    "wide": (set_config(d_model=6 * 10**17), "config describes"),
    "wide inside": (set_config(d_ff=10**12), "config describes"),
    "long context": (set_config(context_length=10**12), "config describes"),
    "long fixed table": (
        set_config(context_length=10**12, positions="rotary"), "limit for rotary positions"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_file_that_is_not_a_whole_checkpoint_is_refused(folder, state, change, reason):
    path = forged(folder, state, change)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_checkpoint(path)
    assert "forged.pt' cannot be used: " in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_list_of_differences_is_short(folder, state):
    def rename(data):
        data["model"] = {"x" + key: value for key, value in data["model"].items()}

    path = forged(folder, state, rename)
    with pytest.raises(CheckpointError, match=r", and \d+ more") as caught:
        load_checkpoint(path)
    assert str(caught.value).count("is unknown") == 5


def test_a_malicious_checkpoint_runs_nothing(folder, state, tmp_path):
    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'marker'}",)

    path = forged(folder, state, put("step", Runs()))
    with pytest.raises(CheckpointError, match=r"forged\.pt.*system.*nothing was run"):
        load_checkpoint(path)
    assert not (tmp_path / "marker").exists()


def test_control_characters_in_a_file_reach_no_message(folder, state):
    path = forged(folder, state, put("\x1b]52;c;bad\x07", 1))
    with pytest.raises(CheckpointError, match="is unknown") as caught:
        load_checkpoint(path)
    assert str(caught.value).isprintable()


def test_a_compressed_checkpoint_is_refused(folder, state):
    path = save(folder, state, 1)
    bomb = folder / "bomb.pt"
    with zipfile.ZipFile(path) as good, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as bad:
        for name in good.namelist():
            bad.writestr(name, good.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        load_checkpoint(bomb)
