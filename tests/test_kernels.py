"""The C kernels beside the plain forms that they stand for: values, gradients, dropout, NaN."""

import copy
import itertools

import pytest
import torch
from helpers import EVERY_VARIANT, VARIANTS, VOCAB_SIZE, random_tokens, small_config, variant_name

from gpt.model.attention import MultiHeadAttention
from gpt.model.block import BLOCKS
from gpt.model.feedforward import gelu_tanh, relu2
from gpt.model.gpt import GPT
from gpt.model.norms import NORMS, LayerNorm, RMSNorm
from gpt.model.positions import RotaryPositions
from gpt.sampling.native import native_readers
from gpt.training import kernels

# (B, T, n_heads, n_kv_heads, d_k): one position, less than a register, ragged ends, several tiles.
SHAPES = [(2, 1, 3, 3, 4), (3, 7, 4, 2, 10), (2, 33, 3, 1, 24), (1, 150, 2, 2, 64)]
CASES = [*itertools.product(SHAPES, [False, True], [False, True]), ((2, 5, 3, 1, 5), True, False)]
"""Shape, qk_norm, rotary: heads of odd width cannot be turned."""


@pytest.fixture(scope="module")
def native():
    found = kernels._library()
    if found is None:
        pytest.skip("no C compiler")
    return found


def attention(shape, qk_norm, rotary):
    _, T, n_heads, n_kv_heads, d_k = shape
    module = MultiHeadAttention(n_heads * d_k, n_heads, n_kv_heads, qk_norm=qk_norm)
    return module, RotaryPositions(T, d_k) if rotary else None


def joined_like(shape, seed=0):
    B, T, n_heads, n_kv_heads, d_k = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, (n_heads + 2 * n_kv_heads) * d_k, generator=generator)


def value_and_gradient(function, x, towards):
    x = x.clone().requires_grad_()
    value = function(x)
    value.backward(towards.to(value.dtype))
    return value.detach().double(), x.grad.double()


@pytest.mark.parametrize(("shape", "qk_norm", "rotary"), CASES, ids=str)
def test_attention_is_that_of_the_plain_path(native, shape, qk_norm, rotary):
    module, rotate = attention(shape, qk_norm, rotary)
    kernel = kernels.attention_kernel(native, module)
    joined = joined_like(shape)
    towards = torch.randn(*joined.shape[:2], module.n_heads * module.d_k)
    found = value_and_gradient(lambda x: kernel(x, rotate, 0.0), joined, towards)
    exact = rotate.double() if rotate else None
    expected = value_and_gradient(
        lambda x: module.heads(x, exact, None, 0.0), joined.double(), towards
    )
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("shape", "qk_norm", "rotary"), CASES, ids=str)
def test_attention_in_bfloat16_is_off_by_its_rounding_only(native, shape, qk_norm, rotary):
    """Queries, keys, weights and their gradients are rounded to 8 bits before their products."""
    module, rotate = attention(shape, qk_norm, rotary)
    kernel = kernels.attention_kernel(native, module)
    joined = joined_like(shape).bfloat16()
    towards = torch.randn(*joined.shape[:2], module.n_heads * module.d_k).bfloat16()
    found = value_and_gradient(lambda x: kernel(x, rotate, 0.0), joined, towards)
    exact = rotate.double() if rotate else None
    expected = value_and_gradient(
        lambda x: module.heads(x, exact, None, 0.0), joined.double(), towards
    )
    for mine, plain in zip(found, expected, strict=True):
        assert (mine - plain).norm() <= 2**-7 * plain.norm()
        assert (mine - plain).abs().max() <= 2**-6 * plain.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_does_not_depend_on_the_number_of_threads(native, dtype):
    module, rotate = attention(SHAPES[2], True, True)
    kernel, joined = kernels.attention_kernel(native, module), joined_like(SHAPES[2]).to(dtype)
    towards = torch.randn(2, 33, 72)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(value_and_gradient(lambda x: kernel(x, rotate, 0.0), joined, towards))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_dropped_weights_are_as_many_as_asked_and_the_others_make_up_for_them(native):
    module, _ = attention((1, 64, 2, 2, 16), False, False)
    kernel = kernels.attention_kernel(native, module)
    joined = torch.zeros(1, 64, 6, 16)  # equal scores: a query takes 1 / (its position + 1) of each
    joined[0, :, 4:] = torch.eye(64)[:, None, :16]  # values: the first 16 positions, told apart
    torch.manual_seed(5)
    weights = kernel(joined.flatten(2), None, 0.3).unflatten(-1, (2, 16))[0, 16:]
    kept = weights * torch.arange(17, 65)[:, None, None]
    assert torch.allclose(kept[kept != 0], torch.tensor(1 / 0.7))
    assert (kept == 0).float().mean() == pytest.approx(0.3, abs=0.05)
    torch.manual_seed(6)
    assert not torch.equal(weights, kernel(joined.flatten(2), None, 0.3).unflatten(-1, (2, 16)))


def test_the_gradient_drops_what_the_value_dropped(native):
    module, rotate = attention(SHAPES[1], True, True)
    kernel = kernels.attention_kernel(native, module)
    joined = joined_like(SHAPES[1])
    direction, towards = joined_like(SHAPES[1], seed=1), torch.randn(3, 7, 40)

    def value(x):
        torch.manual_seed(5)
        return kernel(x, rotate, 0.4)

    _, gradient = value_and_gradient(value, joined, towards)
    step = 1e-2
    ahead, behind = (value(joined + sign * step * direction).double() for sign in (1, -1))
    slope = ((ahead - behind) * towards).sum() / (2 * step)
    assert slope == pytest.approx((gradient * direction).sum().item(), rel=2e-3)


def test_bfloat16_drops_what_float32_drops(native):
    module, rotate = attention(SHAPES[2], True, True)
    kernel, joined = kernels.attention_kernel(native, module), joined_like(SHAPES[2]).bfloat16()
    towards = torch.randn(2, 33, 72).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(5)
        x = joined.to(dtype)
        found.append(value_and_gradient(lambda x: kernel(x, rotate, 0.4), x, towards))
    for half, whole in zip(*found, strict=True):
        assert (half - whole).norm() <= 2**-7 * whole.norm()


def test_dropout_drops_as_asked_and_its_gradient_the_same(native):
    drop = kernels.dropout_kernel(native)
    x = torch.ones(3, 7, 1001, requires_grad=True)
    torch.manual_seed(4)
    y = drop(x, 0.3, True)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert (y == 0).float().mean() == pytest.approx(0.3, abs=0.02)
    assert (y[0] == 0).float().mean(0).std() < 0.25  # rows drop apart from each other
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, y.detach())
    torch.manual_seed(4)
    assert torch.equal(drop(x, 0.3, True), y)
    assert not torch.equal(drop(x, 0.3, True), y)
    assert drop(x, 0.3, False) is x
    assert drop(x, 0.0, True) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(native, bad, dtype):
    module, _ = attention(SHAPES[1], False, False)
    kernel, joined = kernels.attention_kernel(native, module), joined_like(SHAPES[1]).to(dtype)
    joined[0, 2, 0] = bad  # the first query head, at position 2
    heads = kernel(joined, None, 0.0).unflatten(-1, (4, 10))
    assert not heads[0, 2, 0].isfinite().any()
    assert heads[1:].isfinite().all()
    for name in ("relu2", "gelu_tanh"):
        x = torch.tensor([1.0, float("nan"), -2.0], requires_grad=True)
        y = kernels.activation_kernel(native, name)(x)
        y.sum().backward()
        assert y.isnan().tolist() == x.grad.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("plain", [relu2, gelu_tanh])
def test_activations_are_the_plain_ones(native, plain):
    ours = kernels.activation_kernel(native, plain.__name__)
    x = torch.cat([torch.linspace(-30, 30, 1203), torch.tensor([0.0, -1e5, 1e5])])
    towards = torch.randn(x.shape)
    found = value_and_gradient(ours, x, towards)
    expected = value_and_gradient(plain, x, towards)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)
    half = x.bfloat16()
    assert torch.equal(ours(half), ours(half.float()).bfloat16())


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_are_the_plain_ones(native, kind):
    plain = NORMS[kind](37)
    torch.nn.init.normal_(plain.gamma)
    x, towards = 3 + 2 * torch.randn(5, 19, 37), torch.randn(5, 19, 37)
    x[0, 0] = 0
    found = []
    for kernel in (kernels.norm_kernel(native, plain.eps, True), None):
        norm = copy.deepcopy(plain if kernel else plain.double())
        norm.kernel = kernel
        found.append(value_and_gradient(norm, x if kernel else x.double(), towards))
        found[-1] += tuple(p.grad.double() for p in norm.parameters())
    assert len(found[0]) == 2 + len(list(plain.parameters()))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("norm_position", "dtype"), [("pre", "bfloat16"), ("post", "float32")])
def test_a_norm_rounds_only_what_products_would_round(native, norm_position, dtype):
    model = GPT(small_config(norm_position=norm_position), VOCAB_SIZE)
    kernels.install(model)
    norm = model.blocks[0].norm_1
    x = torch.randn(2, 5, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = norm(x)
    assert rounded.dtype == getattr(torch, dtype)
    assert torch.equal(rounded, norm(x).to(rounded.dtype))


@pytest.mark.parametrize("changes", EVERY_VARIANT, ids=variant_name)
def test_a_model_computes_the_same_with_and_without_kernels(native, changes):
    gradients = []
    for with_kernels in (False, True):
        model = GPT(small_config(**changes), VOCAB_SIZE)
        if with_kernels:
            kernels.install(model)
            assert all(block.attention.kernel for block in model.blocks)
            norms = [m for m in model.modules() if isinstance(m, LayerNorm | RMSNorm)]
            assert all(norm.kernel for norm in norms)
            assert bool(norms) is (model.config.norm in ("layer", "rms"))
            if changes in VARIANTS:  # a model that is being trained can be sampled fast
                assert native_readers(model, 1)
        model(random_tokens()).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    largest = max(plain.abs().max().item() for plain in gradients[0].values())
    for name, plain in gradients[0].items():  # that of the keys' bias is 0 but for rounding
        apart = (gradients[1][name] - plain).abs().max()
        assert apart <= 1e-4 * plain.abs().max() + 1e-9 * max(1.0, largest), name


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("norm_position", BLOCKS)
def test_autocast_reaches_every_norm_of_every_placement(native, norm_position, norm):
    """What a sublayer made is of 16 bits, and norms behind sublayers read it."""
    config = small_config(norm_position=norm_position, norm=norm, init="xavier")
    gradients = []
    for with_kernels, half in ((False, False), (True, True)):
        model = GPT(config, VOCAB_SIZE)
        if with_kernels:
            kernels.install(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            logits = model(random_tokens())
        logits.float().square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    wrong = sum(float((a - b).square().sum()) for a, b in zip(*gradients, strict=True))
    whole = sum(float(a.square().sum()) for a in gradients[0])
    assert 0 < wrong < 0.05**2 * whole


def test_without_a_compiler_the_plain_forms_stay(monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda *names, **options: None)
    model = GPT(small_config(), VOCAB_SIZE)
    assert kernels.version() == ""
    kernels.install(model)
    assert model.blocks[0].attention.kernel is None
