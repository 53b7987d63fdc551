"""The kernels in C that write: equal to the model, for every variant, or not used."""

import numpy as np
import pytest
import torch
from helpers import PLACED, SIZES, VARIANTS, VOCAB_SIZE, grid, small_model, spread, variant_name

from gpt.errors import NonFiniteError
from gpt.model.block import PreLNBlock
from gpt.native.library import library
from gpt.sampling import native, readers
from gpt.sampling.generate import AHEAD, generate
from gpt.sampling.native import NativeReader, native_readers
from gpt.sampling.readers import TorchReader, readers_for
from gpt.sampling.tape import pack

CONTEXT = SIZES["context_length"]
LONG = 2 * native.MOST_ROWS + 5  # more rows than go through the model together

EXACT = 1e-12  # of logits between 1 and 10

pytestmark = pytest.mark.skipif(library("generate", "REAL=double") is None, reason="no C compiler")

GRID = [
    *VARIANTS,
    *grid(activation=["relu", "gelu", "gelu_tanh", "relu2", "swiglu"], norm_position=["post"]),
    *grid(positions=["learned", "sinusoidal", "rotary"], norm=["layer", "rms"], qk_norm=[True]),
    # Heads and layers wider than a vector and a panel, and no multiple of either.
    {"d_model": 150, "n_heads": 2, "d_ff": 203, "context_length": 37, "n_kv_heads": 1},
    {"d_model": 68, "n_heads": 1, "d_ff": 1, "context_length": 3, "positions": "rotary"},
]


def tokens(B: int, T: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, (B, T))


def logits_of(model, ids: np.ndarray) -> np.ndarray:
    """Of the last position, without a cache."""
    with torch.no_grad():
        return model(torch.from_numpy(ids))[:, -1].numpy()


def native_reader(model, n_streams: int, dtype="auto") -> NativeReader:
    """One for all streams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "MOST_STREAMS", n_streams)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        (reader,) = native_readers(model, n_streams, dtype)
    return reader


def texts(model, prompt, n_chars, **settings) -> list[list[int]]:
    written = generate(model, torch.from_numpy(prompt), n_chars, **settings)
    return torch.stack(list(written), dim=1).tolist()


@pytest.mark.parametrize("changes", GRID, ids=variant_name)
def test_every_position_gets_the_logits_of_the_model(changes):
    model = spread(small_model(**changes))
    context = model.config.context_length
    ids = tokens(3, context)
    for first in (1, 2, context):
        reader = native_reader(model, 3)
        found = reader.read(ids[:, :first])
        for n in range(first, context + 1):
            if n > first:
                found = reader.read(ids[:, n - 1 : n])
            assert np.abs(found - logits_of(model, ids[:, :n])).max() < EXACT


@pytest.mark.parametrize("changes", VARIANTS, ids=variant_name)
def test_float32_is_close_to_the_model_in_float32(changes):
    model = spread(small_model(**changes)).float()
    ids = tokens(4, CONTEXT)
    expected = logits_of(model, ids)
    found = native_reader(model, 4).read(ids)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("changes", VARIANTS, ids=variant_name)
def test_bfloat16_is_the_model_whose_matrices_were_rounded(changes):
    # Tied, the embedding would be rounded here, but not where the kernels look characters up.
    model = spread(small_model(**changes | {"tie_embeddings": False})).float()
    reader = native_reader(model, 4, "bfloat16")
    ids = tokens(4, CONTEXT)
    exact = logits_of(model, ids)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(module.weight.bfloat16())
    rounded = logits_of(model, ids)
    found = reader.read(ids)
    assert np.abs(found - rounded).max() < 1e-4 * np.abs(rounded).max()
    assert np.abs(exact - rounded).max() > 1e-3 * np.abs(rounded).max()


@pytest.mark.parametrize("n_rows", [2, 3, 4, 5, 6, 7, native.MOST_ROWS + 1, LONG])
def test_any_number_of_streams_and_of_characters_read_at_once(n_rows):
    model = spread(small_model(positions="rotary", context_length=LONG))
    for B, T in ((n_rows, 1), (2, n_rows)):
        ids = tokens(B, T)
        found = native_reader(model, B).read(ids)
        assert np.abs(found - logits_of(model, ids)).max() < EXACT


@pytest.mark.parametrize("n_streams", [1, 7, 4 * native.MOST_STREAMS + 1])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_readers_share_the_streams(n_streams, n_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    model = spread(small_model())
    ids = tokens(n_streams, CONTEXT)
    parts, row = [], 0
    for reader in native_readers(model, n_streams):
        assert 1 <= reader.n_streams <= native.MOST_STREAMS
        part = ids[row : (row := row + reader.n_streams)]
        reader.read(part[:, :5])
        for n in range(5, CONTEXT):
            found = reader.read(part[:, n : n + 1])
        parts.append(found)
    assert row == n_streams
    assert np.abs(np.concatenate(parts) - logits_of(model, ids)).max() < EXACT


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 3}], ids=str)
def test_many_rows_write_the_text_that_torch_writes(settings, n_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    model = spread(small_model(context_length=AHEAD + 9))
    prompt = tokens(3 * native.MOST_STREAMS + 1, 3)
    n_chars = 3 * AHEAD + 5
    written = texts(model, prompt, n_chars, **settings)
    assert written == texts(model, prompt, n_chars, native=False, **settings)


@pytest.mark.parametrize("n_streams", [1, 2 * native.MOST_STREAMS + 1])
@pytest.mark.parametrize("settings", [{}, {"min_p": 0.01}], ids=str)
def test_logits_that_are_not_finite_are_refused_by_name(n_streams, settings):
    model = spread(small_model())
    bad = 5  # not among the characters with which the kernels are checked
    with torch.no_grad():
        model.head = torch.nn.Linear(SIZES["d_model"], VOCAB_SIZE, bias=False).double()
        model.token_embedding.weight[bad] = float("inf")
    assert native_readers(model, 1)
    prompt = np.full((n_streams, 2), 3)
    prompt[-1, 1] = bad
    with pytest.raises(NonFiniteError, match=r"character \d+ .*device cpu, float64.*--device cpu"):
        texts(model, prompt, 5, **settings)


@pytest.mark.parametrize("n_streams", [2, 2 * native.MOST_STREAMS + 1])
def test_what_comes_before_a_logit_that_is_not_finite_is_written(n_streams):
    model = spread(small_model(context_length=19))
    with torch.no_grad():
        model.positions.weight[13] = float("nan")
    prompt = torch.from_numpy(tokens(n_streams, 3))

    def written(**settings):
        steps = []
        writing = generate(model, prompt, 16, **settings)
        with pytest.raises(NonFiniteError, match="character 12 "):
            steps.extend(step.tolist() for step in writing)
        return steps

    assert native_readers(model, 1)
    assert len(written()) == 11
    assert written() == written(native=False)


def test_a_reader_begins_again():
    model = spread(small_model())
    reader, ids = native_reader(model, 2), tokens(2, CONTEXT)
    expected = reader.read(ids).copy()
    reader.restart()
    assert (reader.read(ids) == expected).all()


@pytest.mark.parametrize("changes", VARIANTS, ids=variant_name)
@pytest.mark.parametrize("n", [1, 2, CONTEXT, CONTEXT + 3])
def test_the_text_is_the_one_that_torch_writes_past_the_context_too(changes, n):
    model = spread(small_model(**changes))
    prompt = tokens(3, n)
    written = texts(model, prompt, 3 * CONTEXT, seed=6)
    assert written == texts(model, prompt, 3 * CONTEXT, seed=6, native=False)


def test_the_text_in_float32_is_the_one_that_torch_writes():
    model = spread(small_model()).float()
    prompt = tokens(2, 3)
    assert texts(model, prompt, 40) == texts(model, prompt, 40, native=False)


def test_weights_that_changed_between_two_texts_are_used():
    model = spread(small_model())
    prompt = tokens(2, 3)
    before = texts(model, prompt, 20)
    spread(model, seed=1)
    after = texts(model, prompt, 20)
    assert after == texts(model, prompt, 20, native=False)
    assert after != before


def test_a_text_goes_on_with_the_weights_that_it_began_with():
    model = spread(small_model())
    prompt = tokens(2, 3)
    whole = texts(model, prompt, 20)
    writing = generate(model, torch.from_numpy(prompt), 20)
    written = [next(writing)]
    spread(model, seed=1)
    assert torch.stack([*written, *writing], dim=1).tolist() == whole


def test_the_kernels_are_used_where_they_are_wanted():
    model = spread(small_model())
    assert isinstance(readers_for(model, 2, native=True, dtype="auto")[0], NativeReader)
    assert isinstance(readers_for(model, 2, native=False, dtype="auto")[0], TorchReader)


def test_auto_halves_matrices_that_leave_the_caches(monkeypatch):
    model = spread(small_model()).float()
    assert not native_reader(model, 1).tape.halved
    assert native_reader(model, 1, "bfloat16").tape.halved
    monkeypatch.setattr(native, "CACHED_BYTES", 1000)
    assert native_reader(model, 1).tape.halved
    assert not native_reader(model, 1, "float32").tape.halved
    assert not native_reader(model.double(), 1).tape.halved


class Another(PreLNBlock):
    """A placement that no tape knows."""


def reject_placement(model):
    model.blocks[1].__class__ = Another


def reject_activation(model):
    model.blocks[0].feedforward.activation = torch.sin


def reject_mathematics(model):
    model.blocks[1].attention.attend = lambda q, k, v, dropout: v


def reject_numbers(model):
    with torch.no_grad():
        model.blocks[1].norm_2.gamma[3] = float("nan")


def reject_dtype(model):
    model.bfloat16()


@pytest.mark.parametrize(
    "reject",
    [reject_placement, reject_activation, reject_mathematics, reject_numbers, reject_dtype],
)
def test_what_is_unknown_or_computes_something_else_is_left_to_torch(reject):
    model = spread(small_model())
    assert native_readers(model, 2)
    reject(model)
    assert not native_readers(model, 2)


@pytest.mark.parametrize("changes", PLACED, ids=variant_name)
def test_placements_and_norms_that_no_tape_knows_are_written_by_torch(changes):
    model = spread(small_model(**changes))
    assert not native_readers(model, 2)
    prompt = tokens(2, 3)
    written = texts(model, prompt, CONTEXT - 2, temperature=0.0)  # as far as the context reaches
    for row, text in zip(prompt.tolist(), written, strict=True):
        for new in text:
            assert logits_of(model, np.array([row])).argmax() == new  # without a cache
            row.append(new)


def test_a_model_too_large_to_copy_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(native, "MOST_BYTES", 1000)
    assert not native_readers(small_model(), 2)


def test_without_a_library_the_text_is_the_same(monkeypatch):
    model = spread(small_model())
    written = texts(model, tokens(2, 3), 20)
    monkeypatch.setattr(native, "library", lambda *names, **options: None)
    assert isinstance(readers_for(model, 2, native=True, dtype="auto")[0], TorchReader)
    assert texts(model, tokens(2, 3), 20) == written


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
def test_ids_outside_the_vocabulary_are_refused(bad):
    model = spread(small_model())
    reader, ids = native_reader(model, 2), tokens(2, 3)
    ids[1, 2] = bad
    with pytest.raises(IndexError):
        reader.read(ids)
    for settings in ({}, {"top_k": 2}, {"native": False}):
        with pytest.raises(IndexError):
            texts(model, ids, 2, **settings)


def test_more_than_the_context_is_refused():
    reader = native_reader(spread(small_model()), 2)
    reader.read(tokens(2, CONTEXT - 1))
    with pytest.raises(IndexError):
        reader.read(tokens(2, 2))
    reader.read(tokens(2, 1))


def test_packed_outputs_lie_side_by_side():
    weight = torch.arange(1.0, 16.0).reshape(5, 3)  # (n_out, n_in)
    packed = pack(weight, 4, halved=False)  # -> (panels, n_in, panel)
    assert packed.shape == (2, 3, 4)
    assert packed[0, 1].tolist() == weight[:4, 1].tolist()
    assert packed[1, 2].tolist() == [15, 0, 0, 0]


@pytest.mark.parametrize("value", [1.0, -1.5, 3.14159, -1e-3, 1e30])
def test_halved_outputs_are_bfloat16_low_and_high(value):
    weight = torch.tensor([[value], [1.0], [-value], [2.0]])
    packed = pack(weight, 4, halved=True)  # -> (panels, n_in, panel / 2)
    assert packed.shape == (1, 1, 2)
    low = (packed[0, 0] << 16).view(torch.float32)
    high = (packed[0, 0] & -65536).view(torch.float32)
    assert torch.cat([low, high]).tolist() == weight.bfloat16().float()[:, 0].tolist()


def test_the_message_names_device_and_dtype():
    assert native_reader(spread(small_model()).float(), 1).where == "device cpu, float32"
    assert readers.TorchReader(small_model(), 1).where == "device cpu, float64"
