"""Attention: two paths that agree, a mask that holds, a cache that changes nothing, heads."""

import numpy as np
import pytest
import torch
from helpers import assert_equal

from gpt.model.attention import (
    KVCache,
    MultiHeadAttention,
    attention_weights,
    causal_attention,
    explicit_attention,
    visible,
)
from gpt.model.positions import RotaryPositions


def heads(T=7, S=7, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, T, 4), (2, 3, S, 4), (2, 3, S, 4)]
    return [torch.randn(shape, dtype=torch.float64, generator=g) for shape in shapes]


def attention(**options):
    torch.manual_seed(0)
    defaults = {"d_model": 24, "n_heads": 6, "n_kv_heads": 3, "bias": True}
    return MultiHeadAttention(**(defaults | options)).double()


@pytest.mark.parametrize(("T", "S"), [(7, 7), (1, 1), (1, 7), (3, 7), (6, 7)])
def test_the_fused_and_the_explicit_path_agree(T, S):
    q, k, v = heads(T, S)
    assert_equal({"out": causal_attention(q, k, v)}, {"out": explicit_attention(q, k, v)}, 1e-14)


@pytest.mark.parametrize("attend", [causal_attention, explicit_attention])
def test_queries_after_a_cache_are_the_last_rows_of_the_whole(attend):
    """The mask is aligned with the last key, not with the first."""
    q, k, v = heads()
    whole = attend(q, k, v)
    for T in (1, 3, 6):
        assert_equal({"out": attend(q[:, :, -T:], k, v)}, {"out": whole[:, :, -T:]}, 1e-14)


def test_attention_is_its_equation_head_by_head():
    q, k, v = heads()
    expected = np.empty((2, 3, 7, 4))
    for b, h, t in np.ndindex(2, 3, 7):
        scores = [float(q[b, h, t] @ k[b, h, s]) / 2 for s in range(t + 1)]  # sqrt(d_k) = 2
        weights = np.exp(scores) / np.exp(scores).sum()
        expected[b, h, t] = sum(weights[s] * v[b, h, s].numpy() for s in range(t + 1))
    assert_equal({"out": causal_attention(q, k, v)}, {"out": expected})


def test_weights_are_a_distribution_over_the_past():
    q, k, _ = heads(3, 7)
    weights = attention_weights(q, k)
    assert weights.shape == (2, 3, 3, 7)
    assert_equal({"sum": weights.sum(-1)}, {"sum": np.ones((2, 3, 3))}, 1e-14)
    assert torch.equal(weights > 0, visible(3, 7, q.device).expand_as(weights))


def test_visible_is_a_triangle_in_the_lower_right_corner():
    assert visible(2, 4, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("attend", [causal_attention, explicit_attention])
def test_no_query_depends_on_a_later_key_or_value(attend):
    q, k, v = (h.requires_grad_() for h in heads())
    out = attend(q, k, v)
    for t in range(7):
        gradients = torch.autograd.grad(out[:, :, t].pow(2).sum(), (q, k, v), retain_graph=True)
        for name, gradient in zip("qkv", gradients, strict=True):
            reached = gradient.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
            # The first query has one key: its weight is 1, whatever q and k are.
            expected = [t] if name == "q" else list(range(t + 1))
            assert reached == expected or (t == 0 and name in "qk")
            assert not gradient[:, :, t + 1 :].any()


def test_huge_scores_stay_finite():
    q, k, v = heads()
    for attend in (causal_attention, explicit_attention):
        assert torch.isfinite(attend(1e6 * q, k, v)).all()


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
def test_grouped_heads_equal_full_heads_with_the_weights_repeated(n_kv_heads):
    grouped, full = attention(n_kv_heads=n_kv_heads), attention(n_kv_heads=6)
    state = grouped.state_dict()
    for name in ("W_K.weight", "W_K.bias", "W_V.weight", "W_V.bias"):
        shared = state[name].unflatten(0, (n_kv_heads, 4))
        state[name] = torch.cat([shared[h * n_kv_heads // 6] for h in range(6)])
    full.load_state_dict(state)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    assert_equal({"out": grouped(x)}, {"out": full(x)}, 1e-14)


def test_projections_have_the_documented_shapes():
    module = attention()
    q, k, v = module.split(module.project(torch.zeros(2, 7, 24, dtype=torch.float64)))
    assert q.shape == (2, 6, 7, 4)
    assert k.shape == v.shape == (2, 3, 7, 4)
    assert module.W_K.weight.shape == module.W_V.weight.shape == (12, 24)
    assert module.W_Q.weight.shape == module.W_O.weight.shape == (24, 24)


def test_head_h_is_the_hth_slice_of_the_projection():
    module = attention()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    q, _, _ = module.split(module.project(x))
    for h in range(6):
        assert torch.equal(q[:, h], module.W_Q(x)[..., 4 * h : 4 * h + 4])


def test_qk_norm_gives_queries_and_keys_length_sqrt_d_k_and_leaves_values():
    plain, normed = attention(), attention(qk_norm=True)
    x = 100 * torch.randn(2, 7, 24, dtype=torch.float64)
    q, k, v = normed.split(normed.project(x), RotaryPositions(7, 4).double())
    torch.testing.assert_close(q.norm(dim=-1), torch.full((2, 6, 7), 2.0).double())
    torch.testing.assert_close(k.norm(dim=-1), torch.full((2, 3, 7), 2.0).double())
    assert torch.equal(v, plain.split(plain.project(x))[2])


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 3, 1], [7], [6, 1]])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("attend", [causal_attention, explicit_attention])
def test_a_cache_changes_nothing(chunks, qk_norm, attend):
    module, rotary = attention(qk_norm=qk_norm), RotaryPositions(9, 4).double()
    module.attend = attend
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    cache = KVCache(torch.empty(2, 3, 9, 4, dtype=torch.float64))
    parts = [module(part, rotary, cache) for part in x.split(chunks, dim=1)]
    assert cache.length == 7
    assert_equal({"out": torch.cat(parts, dim=1)}, {"out": module(x, rotary)}, 1e-14)


def test_a_cache_returns_what_was_appended_in_order():
    cache = KVCache(torch.full((1, 1, 4, 2), torch.nan))
    for start, T in ((0, 1), (1, 2)):
        k = torch.arange(start, start + T).float().view(1, 1, T, 1).expand(1, 1, T, 2)
        keys, values = cache.append(k, 10 * k)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2]
    assert values[0, 0, :, 0].tolist() == [0, 10, 20]


@pytest.mark.parametrize("attend", [causal_attention, explicit_attention])
def test_dropout_acts_while_training_only(attend):
    module = attention(dropout=0.3, attention_dropout=0.4)
    module.attend = attend
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    torch.manual_seed(0)
    first, second = module.train()(x), module(x)
    assert not torch.equal(first, second)
    assert torch.equal(module.eval()(x), module(x))
    assert_equal({"out": module(x)}, {"out": attention(dropout=0.0)(x)}, 1e-14)


@pytest.mark.parametrize("attend", [causal_attention, explicit_attention])
def test_dropout_of_weights_keeps_their_mean(attend):
    torch.manual_seed(0)
    ones = torch.ones(40, 3, 50, 4)
    out = attend(ones, ones, ones, 0.4)
    assert out.mean().item() == pytest.approx(1, abs=0.02)
    assert out.std().item() > 0.05


def test_the_module_asks_for_dropout_of_its_weights_while_training_only():
    module, asked = attention(dropout=0.3, attention_dropout=0.4), []

    def attend(q, k, v, dropout):
        asked.append(dropout)
        return causal_attention(q, k, v)

    module.attend = attend
    x = torch.zeros(2, 7, 24, dtype=torch.float64)
    module.train()(x)
    module.eval()(x)
    assert asked == [0.4, 0.0]
