"""Files made by somebody who means harm: nothing of them runs, fills the memory, or gets through.

They are refused with one message each, whatever they hold.
"""

import contextlib
import copy
import os
import pickle
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from commands import ROOT, python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_golden import GOLDEN, VOCABULARY

from gpt.config import RunConfig, to_flat
from gpt.config_files import LARGEST, read_toml
from gpt.errors import CheckpointError, UsageError
from gpt.training.checkpoint import load_checkpoint, restore, restore_optimisers
from gpt.training.optimisers import build_optimisers

GOOD = GOLDEN / "format-1-adamw.pt"


@pytest.fixture(scope="module")
def data():
    return torch.load(GOOD, weights_only=True)


def changed(data: dict, *keys_and_value) -> dict:
    """A copy in which the value at the path of keys is another."""
    *keys, last, value = keys_and_value
    data = copy.deepcopy(data)
    inner = data
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return data


def refused(path, reason: str = "", says: int = 1000) -> None:
    with pytest.raises(CheckpointError, match=f"{path.name}.*cannot be used: .*{reason}") as caught:
        load_checkpoint(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < says


def with_entries(path, **contents: bytes) -> None:
    """The good checkpoint with some entries replaced or added."""
    with zipfile.ZipFile(GOOD) as good, zipfile.ZipFile(path, "w") as bad:
        entries = {name.partition("/")[2]: good.read(name) for name in good.namelist()}
        for name, content in (entries | contents).items():
            bad.writestr(f"{path.stem}/{name}", content)


# Code


class Calls:
    """Unpickling this calls ``function(*arguments)`` and gives the result a state."""

    def __init__(self, function, *arguments, state=None):
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.parts


def payloads(marker: Path) -> dict[str, object]:
    import functools
    import runpy

    import numpy as np

    touch = f"open({str(marker)!r}, 'w').close()"
    inner = pickle.dumps(Calls(os.system, f"touch {marker}"))
    return {
        "os.system": Calls(os.system, f"touch {marker}"),
        "eval": Calls(eval, touch),
        "exec": Calls(exec, touch),
        "subprocess": Calls(subprocess.check_call, ["touch", str(marker)]),
        "a chain of getattr": Calls(getattr, Calls(open, str(marker), "w"), "name"),
        "functools.partial": Calls(functools.partial, open, str(marker), "w"),
        "map": Calls(list, Calls(map, eval, [touch])),
        "runpy": Calls(runpy.run_path, str(marker)),
        "torch.load within": Calls(torch.load, str(marker)),
        "a setstate": Calls(torch.nn.Module, state={"__class__": Calls(eval, touch)}),
        "a storage from bytes": Calls(torch.storage._load_from_bytes, inner),
        "an array of objects": np.array([Calls(os.system, f"touch {marker}")], dtype=object),
        "pickle.loads": Calls(pickle.loads, inner),
    }  # fmt: skip


def handwritten(marker: Path) -> dict[str, bytes]:
    touch = f"touch {marker}".encode()
    text = b"X" + struct.pack("<I", len(touch)) + touch
    return {
        "an INST opcode": b"(S'" + touch + b"'\nios\nsystem\n.",
        "an OBJ opcode": b"(cos\nsystem\n" + text + b"o.",
        "a REDUCE of protocol 0": b"cposix\nsystem\n(V" + touch + b"\ntR.",
        "a STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        "a NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + text + b"\x85\x81.",
        "a BUILD": b"\x80\x02cos\nsystem\n)\x81}X\x01\x00\x00\x00a" + text + b"sb.",
        "an extension code": b"\x80\x02\x82\x01" + text + b"\x85R.",
        "a persistent id": b"\x80\x02" + text + b"Q.",
        "a persistent id of protocol 0": b"Pos.system\n.",
        "a name with a dot": b"\x80\x04\x8c\x08builtins\x8c\x0deval.__call__\x93"
        + text
        + b"\x85R.",
        "two pickles": b"\x80\x02}.\x80\x02cos\nsystem\n" + text + b"\x85R.",
        "a name behind a memo": b"\x80\x02cos\nsystem\nq\x000h\x00" + text + b"\x85R.",
    }


PLACES = {
    "the whole": (),
    "a weight": ("model", "final_norm.beta"),
    "an optimiser": ("optimisers", 0, "state", 3, "exp_avg"),
    "a setting": ("config", "d_model"),
    "a field more": ("extra",),
}


def test_no_payload_runs_wherever_it_lies(tmp_path, data, faults):
    marker = tmp_path / "marker"
    path = tmp_path / "evil.pt"
    for kind, payload in payloads(marker).items():
        for keys in PLACES.values():
            with faults(f"code: {kind}"):
                content = changed(data, *keys, payload) if keys else payload
                torch.save(content, path)
                refused(path, "asks for .*nothing was run")
                assert not marker.exists()


def test_no_handwritten_pickle_runs_in_any_entry(tmp_path, faults):
    marker = tmp_path / "marker"
    path = tmp_path / "evil.pt"
    for kind, content in handwritten(marker).items():
        for entry in ("data.pkl", "extra/DATA.PKL"):
            with faults(f"code: {kind}"):
                with_entries(path, **{entry: content})
                if entry == "data.pkl":
                    refused(path)
                with contextlib.suppress(CheckpointError):
                    load_checkpoint(path)
                assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["os.system", "a storage from bytes"])
def test_the_commands_refuse_a_strangers_checkpoint(tmp_path, data, faults, kind):
    marker = tmp_path / "marker"
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text("steps = 7\n", encoding="utf-8")
    path = run / "checkpoints" / "step-00000002.pt"
    for words in (["sample.py", path], ["sample.py", run], ["train.py", "--resume", run]):
        with faults("a stranger's checkpoint in a command"):
            evil = changed(data, "config", "d_model", payloads(marker)[kind])
            torch.save(evil, path)
            ended = python(ROOT / words[0], *words[1:], folder=tmp_path)
            assert ended.returncode == 4, ended.stderr
            assert ended.stderr.count("error: ") == 1
            assert "nothing was run" in ended.stderr
            assert "Traceback" not in ended.stderr
            assert not marker.exists()


# Memory

LIMITED = """
import resource, sys
from pathlib import Path
from gpt.errors import CheckpointError
from gpt.training.checkpoint import load_checkpoint

def highest():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

load_checkpoint(sys.argv[1])
pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + 2**30, pages + 2**30))
for path in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")
    before = highest()
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        print(Path(path).stem, "refused", highest() - before)
"""


def tensor(n: int, dims: bytes | None = None, storage: str = "Float") -> bytes:
    """The opcodes of a tensor of n numbers in the storage 0."""
    size = b"J" + struct.pack("<i", n)
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n"
        + storage.encode() + b"Storage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + size + b"tQK\x00"
        + (dims or size + b"\x85K\x01\x85") + b"\x89ccollections\nOrderedDict\n)RtR"
    )  # fmt: skip


def holding(value: bytes) -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00a" + value + b"s."


def archive(
    path, pickle: bytes, storage: bytes = b"", *, deflated=False, claim=0, n_more=0
) -> None:
    method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("a/data.pkl", pickle)
        file.writestr("a/byteorder", b"little")
        file.writestr("a/version", b"3\n")
        file.writestr("a/data/0", storage)
        for n in range(n_more):
            file.writestr(f"a/more/{n}", b"")
        entry = file.getinfo("a/data/0")
        entry.file_size += claim
        entry.compress_size += claim


def two_directories(path, n: int) -> None:
    """What the end record names has an entry that unfolds; what a search finds is harmless."""
    parts = bytearray()

    def entry(name: bytes, contents: bytes, method: int = 0) -> tuple[bytes, bytes, int]:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        body = packer.compress(contents) + packer.flush() if method else contents
        facts = struct.pack(
            "<HHHIIIHH", method, 0, 0, zlib.crc32(contents), len(body), len(contents), len(name), 0
        )
        at = len(parts)
        parts.extend(b"PK\3\4" + struct.pack("<HH", 20, 0) + facts + name + body)
        return facts, name, at

    def directory(entries, shift: int) -> int:
        at = len(parts)
        for facts, name, place in entries:
            head = b"PK\1\2" + struct.pack("<HHH", 20, 20, 0) + facts
            parts.extend(head + struct.pack("<HHHII", 0, 0, 0, 0, place - shift(at)) + name)
        return at

    plain = [(b"a/data.pkl", holding(tensor(n))), (b"a/byteorder", b"little"), (b"a/version", b"3")]
    unfolding = [entry(*each) for each in plain] + [entry(b"a/data/0", bytes(4 * n), 8)]
    named = directory(unfolding, lambda at: 0)
    length = len(parts) - named
    harmless = [entry(*each) for each in plain] + [entry(b"a/data/0", b"tiny")]
    directory(harmless, lambda at: at - named)
    parts += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 4, 4, length, named, 0)
    path.write_bytes(parts)


def overlapping(path) -> None:
    """Forty entries with the data of one."""
    archive(path, holding(tensor(100)), bytes(400_000))
    with zipfile.ZipFile(path, "a") as file:
        first = file.getinfo("a/data/0")
        for n in range(1, 40):
            again = copy.copy(first)
            again.filename = again.orig_filename = f"a/data/{n}"
            file.filelist.append(again)
            file._didModify = True


def memory_bombs(folder: Path) -> list[Path]:
    n = 75_000_000
    sizes = {
        "compressed": lambda p: archive(p, holding(tensor(n)), bytes(4 * n), deflated=True),
        "claimed": lambda p: archive(p, holding(tensor(n)), b"1234", claim=4 * n),
        "resized": lambda p: archive(p, holding(tensor(n)), b"1234"),
        "two_directories": lambda p: two_directories(p, n),
        "overlapping": overlapping,
        "many_dicts": lambda p: archive(p, b"\x80\x02" + b"}" * 3_500_000 + b"."),
        "many_lists": lambda p: archive(p, holding(b"]" * 3_000_000 + b"a" * 2_999_999)),
        "many_dimensions": lambda p: archive(
            p, holding(tensor(1, (b"(" + b"K\x01" * 100_000 + b"t") * 2)), bytes(4)
        ),
        "many_entries": lambda p: archive(p, holding(tensor(1)), bytes(4), n_more=20_000),
    }
    for name, make in sizes.items():
        make(folder / f"{name}.pt")
    return [folder / f"{name}.pt" for name in sizes]


@pytest.mark.slow
def test_no_small_file_takes_much_memory(tmp_path, faults):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the highest use of memory is measured on Linux")
    bombs = memory_bombs(tmp_path)
    ended = python("-c", LIMITED, GOOD, *bombs, folder=tmp_path)
    told = dict(zip(bombs, ended.stdout.splitlines(), strict=False))
    for path in bombs:
        with faults(f"memory: {path.stem.replace('_', ' ')}"):
            assert path.stat().st_size < 7_000_000
            name, verdict, taken = told.get(path, ended.stderr).split()
            assert (name, verdict) == (path.stem, "refused")
            assert int(taken) < 200e6


def test_a_file_with_two_directories_never_unfolds(tmp_path, faults):
    with faults("memory: two directories"):
        path = tmp_path / "two.pt"
        two_directories(path, 75_000)
        refused(path)


def test_shared_and_repeated_entries_are_refused(tmp_path, faults):
    with faults("entries that share their data"):
        path = tmp_path / "shared.pt"
        overlapping(path)
        refused(path, "compressed or repeated|larger than the file")


# What would crash


CHAINS = {
    "tuples in tuples": lambda n: b"N" + b"\x85" * n,
    "tuples from the memo": lambda n: b"NN\x86q\x00" + b"h\x00h\x00\x86q\x00" * n,
    "tuples behind marks": lambda n: b"(" * n + b"N" + b"t" * n,
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_a_deep_tuple_is_refused_before_it_is_hashed(tmp_path, faults, chain):
    path = tmp_path / "deep.pt"
    with faults("a deep tuple as a key"):
        content = b"\x80\x02}" + chain(9) + b"K\x01s."
        archive(path, content, bytes(5_000))
        refused(path, "has a key of type tuple|uses a part of itself twice")


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_a_deep_tuple_does_not_crash_the_process(tmp_path, faults, chain):
    path = tmp_path / "deep.pt"
    with faults("a deep tuple as a key"):
        archive(path, b"\x80\x02}" + chain(300_000) + b"K\x01s.", bytes(5_000_000))
        program = "import sys; from gpt import load_checkpoint; load_checkpoint(sys.argv[1])"
        ended = python("-c", program, path, folder=tmp_path)
        assert ended.returncode == 1
        assert "CheckpointError: " in ended.stderr


@pytest.mark.parametrize(
    "storage", ["QInt8", "QUInt8", "QInt32", "QUInt4x2", "ComplexFloat", "Untyped", "Typed"]
)
def test_a_storage_of_another_kind_is_refused(tmp_path, faults, storage):
    path = tmp_path / "odd.pt"
    with faults("an odd storage"):
        archive(path, holding(tensor(4, storage=storage)), bytes(16))
        refused(path, f"asks for 'torch.{storage}Storage'")


# Settings and weights that do not fit

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**31, 2**60, 2**63, 10**9, 10**600, -(10**600)]),
    st.floats(),
)
ODD = st.one_of(
    NUMBERS, st.none(), st.booleans(), st.text(max_size=9), st.lists(NUMBERS, max_size=2),
    st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2),
)  # fmt: skip
SHAPING = ["d_model", "n_heads", "n_kv_heads", "n_layers", "d_ff", "context_length"]
WORDS = ["norm_position", "norm", "positions", "activation", "optimizer", "dtype"]
CHOICES = ["pre", "post", "layer", "rms", "rotary", "sinusoidal", "swiglu", "relu", "muon", "auto"]
HOSTILE = st.one_of(
    st.dictionaries(st.sampled_from(sorted(to_flat(RunConfig()))), ODD, min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(SHAPING), NUMBERS, min_size=1, max_size=6),
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(SHAPING, NUMBERS)
        | {name: st.sampled_from(CHOICES) for name in WORDS},
    ),
    st.dictionaries(st.text(max_size=9), ODD, min_size=1, max_size=2),
)  # fmt: skip


@settings(
    max_examples=100, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(changes=HOSTILE)
def test_a_hostile_config_is_refused_or_means_the_same_model(tmp_path, data, faults, changes):
    path = tmp_path / "config.pt"
    with faults("a hostile config"):
        torch.save(changed(data, "config", data["config"] | changes), path)
        with contextlib.suppress(CheckpointError):
            restore(load_checkpoint(path))


@pytest.mark.parametrize(
    "vocabulary",
    ["", "ba", "aa", "\ud800", "a" * 10**6, "".join(map(chr, range(0xD000))), VOCABULARY + "€"],
    ids=["empty", "order", "twice", "surrogate", "long", "huge", "one more"],
)
def test_a_hostile_vocabulary_is_refused(tmp_path, data, faults, vocabulary):
    with faults("a hostile vocabulary"):
        path = tmp_path / "vocabulary.pt"
        torch.save(changed(data, "vocabulary", vocabulary), path)
        refused(path)


def test_at_most_five_differences_are_listed(tmp_path, data, faults):
    path = tmp_path / "other.pt"
    weights = data["model"]
    wrong = {
        "other names": {f"x.{key}": value for key, value in weights.items()},
        "missing names": dict(list(weights.items())[9:]),
        "other dtypes": {key: value.half() for key, value in weights.items()},
        "other shapes": {key: value[None] for key, value in weights.items()},
    }
    for kind, model in wrong.items():
        with faults(f"weights with {kind}"):
            torch.save(changed(data, "model", model), path)
            refused(path)
            with pytest.raises(CheckpointError, match=r", and \d+ more") as caught:
                load_checkpoint(path)
            listed = str(caught.value).partition("cannot be used: ")[2]
            assert sum(listed.count(f" {word} ") for word in ("is", "are")) == 5


def test_a_failed_resume_leaves_the_model_and_its_optimisers_as_they_were(tmp_path, faults):
    good = load_checkpoint(GOOD)
    model, _ = restore(good)
    config = RunConfig().with_changes(good.config)
    optimisers = build_optimisers(model, config.training, torch.device("cpu"))
    restore_optimisers(good, optimisers)
    before = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimisers]))
    last = max(good.optimisers[0]["state"])
    for name, value in [
        ("exp_avg", torch.zeros(3)), ("exp_avg_sq", torch.zeros(12).int()), ("step", "2"),
        ("more", torch.zeros(12)),
    ]:  # fmt: skip
        with faults("optimiser memory that does not fit"):
            bad = load_checkpoint(GOOD)
            bad.optimisers[0]["state"][last][name] = value
            with pytest.raises(CheckpointError, match="other optimisers"):
                restore_optimisers(bad, optimisers)
    other = pytest.raises(CheckpointError, match="other optimisers")
    with faults("optimiser memory of another optimiser"), other:
        restore_optimisers(load_checkpoint(GOLDEN / "format-1-muon.pt"), optimisers)
    after = (model.state_dict(), [o.state_dict() for o in optimisers])
    for name, weight in before[0].items():
        assert torch.equal(weight, after[0][name])
    for number, entries in before[1][0]["state"].items():
        for name, value in entries.items():
            assert torch.equal(value, after[1][0]["state"][number][name])


# Config files

TOML = {
    "python": b"import os\nos.system('touch marker')\n",
    "a python literal": b"d_model = __import__('os').getpid()\n",
    "a deep array": b"d_model = " + b"[" * 100_000 + b"]" * 100_000,
    "a deep table": b"d_model = " + b"{a=" * 50_000 + b"1" + b"}" * 50_000,
    "a deep key": b".".join([b"a"] * 100_000) + b" = 1",
    "a huge number": b"d_model = " + b"9" * 5_000,
    "a huge hexadecimal number": b"d_model = 0x" + b"f" * 100_000,
    "a number of 64 bits": b"d_model = 18446744073709551616",
    "an infinity": b"learning_rate = inf",
    "not a number": b"learning_rate = nan",
    "a section": b"[model]\nd_model = 24",
    "a list of sections": b"[[model]]\nd_model = 24",
    "a key twice": b"d_model = 24\nd_model = 48",
    "a NUL": b"d_model = 24\0",
    "what is not UTF-8": b"text = '\xff\xfe'",
    "half a character": "text = 'é'".encode()[:-2],
    "UTF-16": "d_model = 24".encode("utf-16"),
    "a date": b"d_model = 1979-05-27",
    "a truth for a number": b"d_model = true",
    "an include": b"include = '/etc/passwd'",
    "an unknown key": b"__class__ = 1",
    "a control character": b"text = '\x1b]52;c;x\x07'",
    "an open string": b'text = """' + b"a" * 1000,
    "a zip": GOOD.read_bytes()[:3000],
    "a megabyte": b"#" * (LARGEST + 1),
}


@pytest.mark.parametrize("content", TOML.values(), ids=TOML.keys())
def test_a_hostile_config_file_is_one_message(tmp_path, monkeypatch, faults, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile.toml"
    with faults("a hostile config file"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"hostile\.toml"):
            read_toml([path])
        assert os.listdir(tmp_path) == ["hostile.toml"]
