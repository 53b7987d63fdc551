import collections
import os
import random
import zipfile
from pathlib import Path

import pytest
import torch

from gpt.errors import CheckpointError
from gpt.training.integrity import non_finite, read_plain, tensors

DATA = {
    "weights": {"a": torch.arange(35.0).reshape(5, 7), "b": torch.tensor([1, 2, 3])},
    "numbers": [1, 2.5, True, None, "é\x1b"],
    7: {},
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.pt"
    torch.save(DATA, path)
    return path


def refused(path: Path, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_plain(path)


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


def rewritten(path: Path, change, **options) -> None:
    """The archive with every entry passed through ``change(name, contents)``."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, contents in entries:
            archive.writestr(name, change(name, contents))


def test_plain_data_comes_back_as_it_was(path):
    assert equal(read_plain(path), DATA)


def test_a_flipped_bit_is_noticed_or_harmless(path):
    good = path.read_bytes()
    chance = random.Random(3)
    noticed = 0
    for _ in range(400):
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        try:
            assert equal(read_plain(path), DATA)
        except CheckpointError:
            noticed += 1
    assert noticed > 100


def test_a_flipped_bit_in_a_tensor_is_noticed(path):
    good = path.read_bytes()
    at = good.index(DATA["weights"]["a"].numpy().tobytes()) + 4 * 17
    path.write_bytes(good[:at] + bytes([good[at] ^ 64]) + good[at + 1 :])
    assert not equal(torch.load(path, weights_only=True), DATA), "torch has begun to check"
    refused(path, "damaged.*Bad CRC-32 for file 'data/data/0'")


def test_a_file_that_does_not_begin_and_end_as_it_should_is_refused(path):
    good = path.read_bytes()
    for contents in (
        good[:-1], good[: len(good) // 2], good[:-300] + bytes(300), good + bytes(7),
        b"\x89PNG\r\n\x1a\n" + bytes(50), b"step loss\n1 2.3\n",
    ):  # fmt: skip
        path.write_bytes(contents)
        refused(path, "not begin and end as a file of torch.save")
    path.write_bytes(b"")
    refused(path, "empty")


def test_a_torch_archive_of_another_kind_is_refused(path):
    torch.save(torch.ones(3), path)
    refused(path, "holds a Tensor, not a checkpoint")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(path, "no data.pkl or several; it is not a file of torch.save")


class Runs:
    """Unpickling this calls ``function(*arguments)``."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, r"(posix|nt)\.system"), (eval, "eval"), (getattr, "getattr"), (open, "open")],
)
def test_a_file_that_would_run_code_runs_none(path, tmp_path, function, name):
    marker = tmp_path / "marker"
    arguments = {
        "system": (f"touch {marker}",),
        "eval": (f"open({str(marker)!r}, 'w')",),
        "getattr": (Runs(open, str(marker), "w"), "name"),
        "open": (str(marker), "w"),
    }[function.__name__]
    torch.save({"model": Runs(function, *arguments)}, path)
    refused(path, f"asks for '.*{name}'.*nothing was run")
    assert not marker.exists()


@pytest.mark.parametrize("protocol", [0, 4])
def test_other_ways_to_call_a_function_run_no_code_either(path, tmp_path, protocol):
    marker = tmp_path / "marker"
    if protocol == 4:
        torch.save({"model": Runs(open, str(marker), "w")}, path, pickle_protocol=4)
        refused(path, "uses FRAME, which torch.save does not write")
    else:
        call = f"(S'touch {marker}'\nios\nsystem\n.".encode()
        rewritten(path, lambda name, old: call if name.endswith("data.pkl") else old)
        refused(path, "uses STRING, which torch.save does not write")
    assert not marker.exists()


@pytest.mark.parametrize(
    "value",
    [Runs(bytearray, 10**12), Runs(torch.Tensor, 10**6), {1, 2}, collections.Counter("ab"), 1j],
)
def test_names_that_torch_allows_but_a_checkpoint_does_not_need_are_refused(path, value):
    torch.save({"model": value}, path)
    refused(path, "asks for ")


def test_a_second_pickle_is_not_read(path, tmp_path):
    marker = tmp_path / "marker"
    torch.save({"model": Runs(open, str(marker), "w")}, path)
    with zipfile.ZipFile(path) as archive:
        pickle = archive.read("data/data.pkl")
    torch.save(DATA, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("data/extra/DATA.pkl", pickle)
    assert equal(read_plain(path), DATA)
    assert not marker.exists()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("data/extra/data.pkl", pickle)
    refused(path, "no data.pkl or several")


@pytest.mark.parametrize("value", [("a", "b"), b"bytes", {2.5: 1}, {None: 1}])
def test_types_that_are_not_plain_are_refused(path, value):
    torch.save({"model": value}, path)
    refused(path, "of type|asks for '_codecs.encode'")


def test_a_compressed_entry_is_refused_before_it_is_opened(path):
    torch.save({"zeros": torch.zeros(5_000_000)}, path)
    rewritten(path, lambda name, contents: contents, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    refused(path, "compressed or repeated")
    torch.save({"noise": torch.randn(50)}, path)
    rewritten(path, lambda name, contents: contents, compression=zipfile.ZIP_DEFLATED)
    refused(path, "compressed or repeated")


def test_a_repeated_entry_is_refused(path):
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("data/version", b"3\n")
    refused(path, "compressed or repeated")


def test_a_storage_that_claims_more_than_is_there_is_refused(path):
    torch.save({"a": torch.zeros(100)}, path)
    with zipfile.ZipFile(path) as archive:
        claimed = archive.read("data/data.pkl").replace(b"Kdt", b"M\x10\x27t")
    rewritten(path, lambda name, old: claimed if name.endswith("data.pkl") else old)
    refused(path, r"a tensor of shape \(100,\) in 400 bytes")


def test_tensors_that_repeat_a_small_storage_are_refused(path):
    torch.save({"a": torch.zeros(1).expand(10**12)}, path)
    refused(path, "not a plain array")
    storage = torch.zeros(1000)
    torch.save({"a": [storage.view(1000) for _ in range(50)]}, path)
    refused(path, "the entry 'data/data/0' is not there, or used twice")
    one = torch.zeros(1000)
    torch.save({"a": [one] * 50}, path)
    refused(path, "uses a part of itself twice")


def test_a_structure_that_unfolds_without_end_is_refused(path):
    nested: list = []
    for _ in range(7):
        nested = [nested] * 100
    torch.save({"a": nested}, path)
    refused(path, "uses a part of itself twice")
    deep: list = []
    for _ in range(50):
        deep = [deep]
    torch.save({"a": deep}, path)
    refused(path, "nested deeper")


def test_tensors_are_found_under_their_paths():
    assert [name for name, _ in tensors(DATA)] == ["weights.a", "weights.b"]
    assert non_finite(DATA) is None
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert non_finite({"x": [torch.ones(3), torch.tensor([1.0, bad])]}) == "x.1"
