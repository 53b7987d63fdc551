"""The iterator that writes: windows, caches, streams, modes and stop texts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpt.errors import NonFiniteError, UsageError
from gpt.model.gpt import GPT, ModelConfig
from gpt.sampling.generate import _stream, generate
from gpt.sampling.stop import TextUntil

VOCAB_SIZE, CONTEXT = 11, 10


class Counting(nn.Module):
    """Scores id + 1 highest, always; records what it was given to read."""

    def __init__(self, context_length: int = CONTEXT) -> None:
        super().__init__()
        self.config = ModelConfig(context_length=context_length)
        self.weight = nn.Parameter(torch.zeros(1))
        self.read, self.modes = [], []

    @property
    def device(self):
        return self.weight.device

    def new_cache(self, batch_size):
        return [[]]

    def forward(self, tokens, cache):
        cache[0].extend(tokens[0].tolist())
        assert len(cache[0]) <= self.config.context_length
        self.read.append(tokens.tolist())
        self.modes.append((self.training, torch.is_inference_mode_enabled()))
        return 9.0 * nn.functional.one_hot((tokens + 1) % VOCAB_SIZE, VOCAB_SIZE) + 0 * self.weight


def real_model(**changes) -> GPT:
    config = {
        "d_model": 24,
        "n_heads": 6,
        "n_layers": 2,
        "d_ff": 20,
        "context_length": CONTEXT,
    }
    model = GPT(ModelConfig(**(config | changes)), VOCAB_SIZE, seed=3).double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():  # far from its nearly uniform start
            parameter += torch.from_numpy(rng.normal(0, 0.3, parameter.shape))
    return model


def prompt(n_rows: int = 1, n: int = 4) -> torch.Tensor:
    row = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB_SIZE, n))
    return row.expand(n_rows, -1)


def texts(model, start, n_chars, **settings) -> list[list[int]]:
    """What is written, a list of ids a row."""
    return torch.stack(list(generate(model, start, n_chars, **settings)), dim=1).tolist()


def test_greedy_takes_the_most_probable_whatever_the_seed():
    start = torch.tensor([[3], [8]])
    for seed in (0, 1):
        written = texts(Counting(), start, 5, temperature=0.0, seed=seed)
        assert written == [[4, 5, 6, 7, 8], [9, 10, 0, 1, 2]]


@pytest.mark.parametrize("tiny", [1e-39, 5e-324])
def test_a_tiny_temperature_writes_the_greedy_text(tiny):
    model = real_model()
    assert texts(model, prompt(), 30, temperature=tiny) == texts(
        model, prompt(), 30, temperature=0.0
    )


VARIANTS = [
    {},
    {"norm_position": "post", "positions": "sinusoidal"},
    {"norm": "rms", "positions": "rotary", "activation": "swiglu", "n_kv_heads": 2},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_within_the_window_the_text_is_the_one_written_without_a_cache(changes, temperature):
    model = real_model(**changes)
    start = prompt(n=3)
    stream = texts_without_cache(model, start, CONTEXT - 3 + 1, temperature)
    assert texts(model, start, CONTEXT - 3 + 1, temperature=temperature, seed=5) == stream


def texts_without_cache(model, start, n_chars, temperature) -> list[list[int]]:
    """Every character from a forward pass over all the text; the scripted uniforms of seed 5."""
    model.eval()
    text, uniforms = start, _stream(5, 0)
    for _ in range(n_chars):
        with torch.no_grad():
            scores = model(text)[0, -1].numpy()
        u = uniforms.random()
        if temperature == 0:
            new = int(scores.argmax())
        else:
            exps = np.exp((scores - scores.max()) / temperature)
            new = int(np.searchsorted(np.cumsum(exps / exps.sum()), u, side="right"))
        text = torch.cat([text, torch.tensor([[new]])], dim=1)
    return text[:, start.shape[1] :].tolist()


def test_a_full_window_is_reread_from_its_middle():
    model = Counting(context_length=6)
    written = texts(model, torch.tensor([[0, 1, 2, 3]]), 8, temperature=0.0)
    assert written == [[4, 5, 6, 7, 8, 9, 10, 0]]
    # The window fills with 5; then its last 3 characters are read anew, and again after 8.
    expected = [[0, 1, 2, 3], [4], [5], [4, 5, 6], [7], [8], [9], [8, 9, 10]]
    assert [read[0] for read in model.read] == expected


@pytest.mark.parametrize("context_length", [1, 2, 3])
def test_the_smallest_windows_go_on_writing(context_length):
    written = texts(Counting(context_length), torch.tensor([[0, 1]]), 6, temperature=0.0)
    assert written == [[2, 3, 4, 5, 6, 7]]


def test_of_a_long_prompt_the_last_characters_are_read():
    model = real_model()
    long = prompt(n=CONTEXT + 7)
    written = texts(model, long, 25)
    assert written == texts(model, long[:, -CONTEXT:], 25)
    assert written != texts(model, long[:, 1 - CONTEXT :], 25)


def test_a_row_is_the_same_in_any_company():
    model = real_model()
    together = texts(model, prompt(5), 40)
    assert together[:1] == texts(model, prompt(1), 40)
    assert together[:3] == texts(model, prompt(3), 40)
    assert len({tuple(row) for row in together}) == 5


def test_the_seed_decides_the_text():
    model = real_model()
    assert texts(model, prompt(), 40, seed=7) == texts(model, prompt(), 40, seed=7)
    assert texts(model, prompt(), 40, seed=7) != texts(model, prompt(), 40, seed=8)


def test_the_streams_of_others_are_left_alone():
    model = real_model()
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    texts(model, prompt(), 5)
    assert torch.equal(torch.rand(3), expected)


def test_the_repetition_penalty_counts_the_last_context_length_characters():
    model = Counting(context_length=10)
    model.forward = lambda tokens, cache: torch.arange(VOCAB_SIZE, 0.0, -1).expand(1, 1, -1)
    settings = {"temperature": 0.0, "repetition_penalty": 1e6}
    # The prompt counts: 1 is skipped. When all but one are in the window, the one outside comes.
    written = texts(model, torch.tensor([[1]]), 12, **settings)
    assert written == [[0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 0]]


def test_each_character_comes_before_the_next_is_computed():
    model = Counting()
    writing = generate(model, prompt(), 5)
    assert model.read == []
    next(writing)
    assert len(model.read) == 1
    next(writing)
    assert len(model.read) == 2


def test_no_characters_are_nothing():
    model = Counting()
    assert list(generate(model, prompt(), 0)) == []
    assert model.read == []


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_it_was_between_characters_and_after(training):
    model = Counting().train(training)
    writing = generate(model, prompt(), 5)
    next(writing)
    assert model.training is training
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    next(writing)
    writing.close()  # abandoned
    assert model.training is training
    assert model.modes == [(False, True)] * 2


def test_the_model_is_as_it_was_after_a_failure():
    model = Counting().train()
    model.forward = None
    with pytest.raises(TypeError):
        next(generate(model, prompt(), 5))
    assert model.training
    assert not torch.is_inference_mode_enabled()


def test_dropout_is_off_and_training_goes_on_after_sampling():
    model = real_model(dropout=0.5).train()
    assert texts(model, prompt(), 20) == texts(model, prompt(), 20)
    ids = next(generate(model, prompt(2), 1))
    model(ids[:, None]).sum().backward()
    assert model.token_embedding.weight.grad is not None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_are_refused_by_name(bad):
    model = Counting()
    writing = generate(model, prompt(2), 5)
    next(writing)
    with torch.no_grad():
        model.weight.fill_(bad)
    with pytest.raises(NonFiniteError, match=r"character 2 .*device cpu, float32.*--device cpu"):
        next(writing)


@pytest.mark.parametrize("ids", [torch.zeros(1, 0), torch.zeros(3)], ids=["empty", "flat"])
def test_a_prompt_that_is_no_batch_of_text_is_refused_at_once(ids):
    with pytest.raises(UsageError, match="at least one character"):
        generate(Counting(), ids.long(), 5)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused_at_once(settings):
    with pytest.raises(UsageError, match=f"{next(iter(settings))} = .* (try|choose) "):
        generate(Counting(), prompt(), 5, **settings)


@given(
    st.sampled_from([0.0, 1e-39, 0.5, 1.0, 50.0]),
    st.integers(0, 20),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1),
    st.floats(0.1, 10),
    st.integers(-(2**63), 2**63 - 1),
)
def test_ids_are_always_in_the_vocabulary(temperature, top_k, top_p, min_p, penalty, seed):
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    writing = generate(Counting(), prompt(2), 3, repetition_penalty=penalty, seed=seed, **settings)
    for ids in writing:
        assert ids.shape == (2,)
        assert ids.dtype == torch.int64
        assert ((ids >= 0) & (ids < VOCAB_SIZE)).all()


def test_rows_draw_uniform_numbers_of_their_own():
    """A model without preference writes every id about as often, in every row."""
    model = Counting()
    model.forward = lambda tokens, cache: torch.zeros(*tokens.shape, VOCAB_SIZE)
    written = np.array(texts(model, prompt(4), 3000, temperature=1.0))
    counts = np.stack([np.bincount(row, minlength=VOCAB_SIZE) for row in written])
    expected = 3000 / VOCAB_SIZE
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    agree = (written[:, None] == written[None]).mean(-1)
    assert np.abs(agree[~np.eye(4, dtype=bool)] - 1 / VOCAB_SIZE).max() < 0.03


def shown(stops, pieces) -> tuple[list[str], str, bool]:
    """What TextUntil lets through after each piece, at the end, and whether it stopped."""
    text = TextUntil(stops)
    return [text.add(piece) for piece in pieces], text.end(), text.done


def test_a_stop_text_ends_the_sample_and_is_not_shown():
    assert shown(["cd"], "bcdab") == (["b", "", "", "", ""], "", True)


def test_what_may_begin_a_stop_text_is_held_until_it_is_certain():
    assert shown(["aab"], "aaac") == (["", "", "a", "aac"], "", False)
    assert shown(["aab"], "xaa") == (["x", "", ""], "aa", False)


def test_the_stop_text_that_is_complete_first_counts():
    assert shown(["abc", "b"], ["abc"]) == (["a"], "", True)
    assert shown(["bc", "c"], ["abc"]) == (["a"], "", True)
    assert shown([], ["abc"]) == (["abc"], "", False)


@given(
    st.text("abc", max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_stopping_equals_cutting_the_whole_text(text, stops, size):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    until = TextUntil(stops)
    streamed = ""
    for piece in pieces:
        streamed += until.add(piece)
        assert text.startswith(streamed)
    streamed += until.end()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        first = min(ends)
        longest = max(len(stop) for stop in stops if text[:first].endswith(stop))
        text = text[: first - longest]
    assert streamed == text
    assert until.done == bool(ends)
