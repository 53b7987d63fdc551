"""Checkpoints that a disk, a copy or a version has spoiled: noticed, named, passed over."""

import contextlib
import json
import os
import random
import re
import shutil
import zipfile

import pytest
import torch
from make_golden import GOLDEN, state_after, trained, update
from states import assert_same

from gpt.config import from_flat
from gpt.errors import CheckpointError
from gpt.training.checkpoint import (
    load_checkpoint,
    restore,
    restore_optimisers,
    save_checkpoint,
)
from gpt.training.integrity import read_plain
from gpt.training.optimisers import build_optimisers
from gpt.training.schema import FORMAT_VERSION

GOLDEN_FILES = sorted(GOLDEN.glob("*.pt"))
ONE_BLOCK = {"n_layers": 1, "d_model": 6, "d_ff": 5, "context_length": 4}
FIELDS = ["config", "vocabulary", "step", "best", "source", "environment", "model", "optimisers"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of two checkpoints of one run."""
    folder = tmp_path_factory.mktemp("saved")
    config, model, optimisers = trained(**ONE_BLOCK)
    contents = []
    for step in (2, 3):
        state = state_after(step, config, model, optimisers)
        contents.append(save_checkpoint(folder, state, is_best=False).read_bytes())
        update(model, optimisers)
    return contents


@pytest.fixture
def folder(tmp_path, saved):
    for step, contents in zip((2, 3), saved, strict=True):
        (tmp_path / f"step-0000000{step}.pt").write_bytes(contents)
    return tmp_path


@pytest.fixture
def newest(folder):
    return folder / "step-00000003.pt"


def facts(checkpoint):
    return {name: getattr(checkpoint, name) for name in FIELDS}


def refused(path) -> None:
    with pytest.raises(CheckpointError, match=path.name):
        load_checkpoint(path)


def passed_over(folder, damaged, reason: str = "") -> None:
    """A resume names the damaged checkpoint, sets it aside, keeps it, and goes on from step 2."""
    contents = damaged.read_bytes() if damaged.is_file() else None
    refused(damaged)
    checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True)
    assert checkpoint.step == 2
    (notice,) = checkpoint.notices
    aside = damaged.with_name(damaged.name + ".corrupt")
    assert damaged.name in notice
    assert reason in notice
    assert aside.name in notice
    assert not damaged.exists()
    if contents is not None:
        assert aside.read_bytes() == contents
    shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


def structure(path) -> list[int]:
    """Where a file holds no tensor: heads of entries, the pickle, the directory and its end."""
    with zipfile.ZipFile(path) as archive:
        places = list(range(archive.start_dir, path.stat().st_size))
        for entry in archive.infolist():
            data = entry.header_offset + 30 + len(entry.filename)
            places += range(entry.header_offset, data)
            if entry.filename.endswith("data.pkl"):
                places += range(data, data + entry.file_size)
    return places


def test_no_flipped_bit_is_resumed_from(folder, newest, saved, faults):
    good = facts(load_checkpoint(newest))
    chance = random.Random(11)
    places = chance.sample(structure(newest), 150) + chance.sample(range(len(saved[1])), 150)
    noticed = 0
    for place in places:
        with faults("a flipped bit"):
            spoiled = bytearray(saved[1])
            spoiled[place] ^= 1 << chance.randrange(8)
            newest.write_bytes(spoiled)
            checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True)
            if not checkpoint.notices:
                assert_same(facts(checkpoint), good)
                continue
            noticed += 1
            (notice,) = checkpoint.notices
            assert newest.name in notice
            assert checkpoint.step == 2
            newest.with_name(newest.name + ".corrupt").rename(newest)
            assert newest.read_bytes() == spoiled
    assert noticed > 100


def test_a_bit_that_no_checksum_covers_is_harmless(newest, saved, faults):
    """Torch takes the tensor for a folder then, and returns memory that nobody has written."""
    good = facts(load_checkpoint(newest))
    for at in (match.start() + 38 for match in re.finditer(b"PK\x01\x02", saved[1])):
        with faults("a bit that marks a folder"):
            newest.write_bytes(saved[1][:at] + b"\x10" + saved[1][at + 1 :])
            assert_same(facts(load_checkpoint(newest)), good)


@pytest.mark.slow
def test_no_single_bit_of_a_directory_changes_what_is_read(tmp_path, faults):
    path = tmp_path / "small.pt"
    data = {"a": torch.arange(5.0)}
    torch.save(data, path)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    for place in range(directory, len(good)):
        for bit in range(8):
            with faults("each bit of a directory flipped"):
                path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
                with contextlib.suppress(CheckpointError):
                    assert_same(read_plain(path), data)


def test_a_file_cut_at_any_length_is_refused(newest, saved, faults):
    size = len(saved[1])
    lengths = {*range(0, size, 997), *range(499, size, 997), *range(size - 64, size)}
    for length in sorted(lengths):
        with faults("a cut checkpoint"):
            newest.write_bytes(saved[1][:length])
            refused(newest)


def kinds_of_damage(good: bytes, older: bytes) -> dict[str, bytes]:
    half = len(good) // 2
    return {
        "an empty checkpoint": b"",
        "a checkpoint cut in half": good[:half],
        "a tail of zeros": good[:-700] + bytes(700),
        "a file of zeros": bytes(len(good)),
        "an old end on a new beginning": good[:half] + older[half:],
        "a picture in the place of a checkpoint": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        "appended zeros": good + bytes(512),
        "appended garbage": good + random.Random(5).randbytes(70_001),
        "an appended end record": good + b"PK\x05\x06" + bytes(18),
        "a checkpoint behind another": older + good,
        "garbage before a checkpoint": random.Random(6).randbytes(513) + good,
        "line ends made those of Windows": good.replace(b"\n", b"\r\n"),
        "bytes read as text and written back": good.decode("utf-8", "replace").encode(),
    }


def test_every_kind_of_damage_is_passed_over(folder, newest, saved, faults):
    for kind, contents in kinds_of_damage(saved[1], saved[0]).items():
        with faults(kind):
            newest.write_bytes(contents)
            passed_over(folder, newest)


def test_a_block_of_zeros_anywhere_is_passed_over_or_harmless(folder, newest, saved, faults):
    good = facts(load_checkpoint(newest))
    noticed = 0
    for start in range(0, len(saved[1]), 1024):
        with faults("a block of zeros"):
            newest.write_bytes(saved[1][:start] + bytes(512) + saved[1][start + 512 :])
            try:
                assert_same(facts(load_checkpoint(newest)), good)
            except CheckpointError:
                noticed += 1
                passed_over(folder, newest)
    assert noticed > 15


def test_what_is_no_file_is_passed_over(folder, newest, faults):
    makers = {
        "a folder in the place of a checkpoint": newest.mkdir,
        "a pipe in the place of a checkpoint": lambda: os.mkfifo(newest),
        "a device in the place of a checkpoint": lambda: newest.symlink_to("/dev/zero"),
    }
    for kind, make in makers.items():
        with faults(kind):
            newest.unlink(missing_ok=True)
            make()
            passed_over(folder, newest, "it is not a file")


def test_a_link_to_nowhere_is_passed_over(folder, newest, faults):
    with faults("a link to nowhere"):
        newest.unlink()
        newest.symlink_to(folder / "absent")
        checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True)
        assert checkpoint.step == 2
        assert newest.name in checkpoint.notices[0]


def test_a_damaged_best_gives_way_to_the_newest(folder, newest, saved, faults):
    best = folder / "best.pt"
    for kind, contents in kinds_of_damage(saved[1], saved[0]).items():
        with faults(kind):
            best.write_bytes(contents)
            checkpoint = load_checkpoint(folder)
            assert checkpoint.path == newest
            assert "best.pt" in checkpoint.notices[0]


def test_many_damaged_checkpoints_leave_the_good_one(folder, saved, faults):
    for step in range(4, 30):
        (folder / f"step-{step:08d}.pt").write_bytes(saved[1][: -7 * step])
    with faults("all newer checkpoints damaged"):
        checkpoint = load_checkpoint(folder, prefer="newest", set_aside=True)
        assert checkpoint.step == 3
        assert len(checkpoint.notices) == 26
        assert len(list(folder.glob("*.corrupt"))) == 26


# Files of this and of other versions


@pytest.fixture(params=GOLDEN_FILES, ids=lambda path: path.stem)
def golden(request):
    return request.param


def test_there_are_golden_files_of_every_format():
    versions = {int(path.name.split("-")[1]) for path in GOLDEN_FILES}
    assert versions == set(range(1, FORMAT_VERSION + 1))


def test_a_golden_checkpoint_gives_the_logits_that_it_gave(golden):
    checkpoint = load_checkpoint(golden)
    expected = json.loads(golden.with_suffix(".json").read_text(encoding="utf-8"))
    model, tokenizer = restore(checkpoint)
    with torch.no_grad():
        logits = model.double()(torch.tensor(expected["ids"]))
    assert tokenizer.vocab_size == logits.shape[-1]
    torch.testing.assert_close(
        logits, torch.tensor(expected["logits"], dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_training_goes_on_from_a_golden_checkpoint(golden):
    checkpoint = load_checkpoint(golden)
    config = from_flat(checkpoint.config)
    model, _ = restore(checkpoint)
    optimisers = build_optimisers(model, config.training, torch.device("cpu"))
    restore_optimisers(checkpoint, optimisers)
    for optimiser, saved in zip(optimisers, checkpoint.optimisers, strict=True):
        assert_same(optimiser.state_dict()["state"], saved["state"])
    update(model, optimisers)
    for name, weight in model.state_dict().items():
        assert torch.isfinite(weight).all()
        assert not torch.equal(weight, checkpoint.model[name]), name


def test_a_golden_checkpoint_is_saved_again_as_it_was(golden, tmp_path):
    checkpoint = load_checkpoint(golden)
    again = load_checkpoint(save_checkpoint(tmp_path, facts(checkpoint), is_best=False))
    assert_same(facts(again), facts(checkpoint))


@pytest.mark.parametrize("prefer", ["best", "newest"])
def test_a_newer_format_is_refused_by_its_number_and_never_passed_over(
    golden, tmp_path, prefer, faults
):
    shutil.copy(golden, tmp_path / "step-00000002.pt")
    newer = tmp_path / {"best": "best.pt", "newest": "step-00000003.pt"}[prefer]
    for version in (FORMAT_VERSION + 1, FORMAT_VERSION + 41, 2**40):
        with faults("a checkpoint of a newer format"):
            data = torch.load(golden, weights_only=True)
            torch.save(data | {"format_version": version, "a new field": [1]}, newer)
            before = newer.read_bytes()
            for path in (newer, tmp_path):
                with pytest.raises(
                    CheckpointError, match=rf"{newer.name}.*format_version is {version} and"
                ):
                    load_checkpoint(path, prefer=prefer, set_aside=True)
            assert newer.read_bytes() == before
            assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
                ["step-00000002.pt", newer.name]
            )
