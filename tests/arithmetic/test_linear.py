"""Emulated linear layers: exact when nothing is rounded, each operand along its own axis, a model swapped in place."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (PyTorch's own abbreviation)

from muon_lab.arithmetic import formats, linear
from muon_lab.arithmetic.linear import BF16, Products
from muon_lab.arithmetic.microscaling import quantize
from muon_lab.problems import models

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
TINY = models.GPTConfig(width=32, depth=2, heads=2, context=12)
BATCH, LENGTH, INPUTS, OUTPUTS = 3, 40, 96, 64
#: Of X and W in Y, of dY and W in dX, of dY and X in dW: the axis that is summed over, and the other one.
SUMMED = ("in", "in", "out", "out", "tokens", "tokens")
KEPT = ("tokens", "out", "tokens", "in", "out", "in")


def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def graded(rows, cols, seed):
    """Rows and columns scaled by 2⁻²⁴ … 1, shuffled: blocks along one axis lose what those along the other keep."""
    source = torch.Generator().manual_seed(seed)
    left, right = (torch.logspace(-24, 0, n, base=2.0)[torch.randperm(n, generator=source)] for n in (rows, cols))
    return normal(rows, cols, seed=seed) * left[:, None] * right


def operands(dtype=torch.float32):
    X = graded(BATCH * LENGTH, INPUTS, 1).reshape(BATCH, LENGTH, INPUTS).to(dtype)
    dY = graded(BATCH * LENGTH, OUTPUTS, 3).reshape(BATCH, LENGTH, OUTPUTS).to(dtype)
    return X, graded(OUTPUTS, INPUTS, 2).to(dtype), dY


def products_of(layer, X, W, dY):
    """Return Y, dX and dW of a layer, given as a function of X and W."""
    X, W = X.clone().requires_grad_(), W.clone().requires_grad_()
    Y = layer(X, W)
    Y.backward(dY)
    return Y.detach(), X.grad, W.grad


def reference(X, W, dY, products, axes=SUMMED):
    """The three products by definition: every operand a copy of its own, along the axis that is summed over."""

    def copy(operand, format, names, axis):
        if format is None:
            return operand
        q = quantize(operand, format, scale_mode=products.scale_mode, axis=names.index(axis))
        return q.dequantize()

    def stored(result):
        return result if products.stored is None else quantize(result, products.stored).dequantize()

    def x(axis):
        return copy(X.flatten(0, 1), products.activations, ("tokens", "in"), axis)

    def w(axis):
        return copy(W, products.weights, ("out", "in"), axis)

    def dy(axis):
        return copy(dY.flatten(0, 1), products.gradients, ("tokens", "out"), axis)

    Y = x(axes[0]) @ w(axes[1]).T
    dX = dy(axes[2]) @ w(axes[3])
    dW = dy(axes[4]).T @ x(axes[5])
    return stored(Y).reshape(*X.shape[:-1], -1), stored(dX).reshape(X.shape), stored(dW)


def emulated(products):
    return lambda X, W: linear.linear(X, W, products)


# Reduces to


@pytest.mark.parametrize("dtype", linear.DTYPES)
def test_products_without_formats_are_those_of_a_linear_layer_bit_for_bit(dtype):
    data = operands(dtype)
    for ours, theirs in zip(products_of(emulated(Products()), *data), products_of(F.linear, *data), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


def test_formats_that_hold_the_data_change_nothing():
    data = tuple(x.bfloat16().float() for x in operands())
    everything = linear.uniform("bf16")
    for ours, theirs in zip(products_of(emulated(everything), *data), products_of(F.linear, *data), strict=True):
        assert torch.equal(ours, theirs)


# Matches the definition


@pytest.mark.parametrize(
    "products",
    [
        Products(weights=E4M3),
        Products(activations=E4M3),
        Products(gradients=E4M3),
        Products(E4M3, E4M3, E5M2),
        linear.uniform(E4M3, scale_mode="floor"),
        linear.uniform("mxfp4_e2m1", scale_mode="even"),
        linear.uniform("nvfp4", stored="bf16"),
        BF16,
    ],
    ids=str,
)
def test_every_product_is_that_of_copies_rounded_along_its_own_axis(products):
    data = operands()
    for ours, theirs in zip(products_of(emulated(products), *data), reference(*data, products), strict=True):
        assert torch.equal(ours, theirs)  # the same matrices, multiplied in the same way


@pytest.mark.parametrize("operand", range(6))
def test_a_copy_along_another_axis_would_be_seen(operand):
    """Negative control: the data tells each of the six copies from the one along the wrong axis."""
    axes = [*SUMMED]
    axes[operand] = KEPT[operand]
    right, wrong = (reference(*operands(), linear.uniform(E4M3), each) for each in (SUMMED, axes))
    assert [torch.equal(a, b) for a, b in zip(right, wrong, strict=True)].index(False) == operand // 2


@pytest.mark.parametrize(
    ("products", "changed"),
    [
        (Products(weights=E4M3), (True, True, False)),
        (Products(activations=E4M3), (True, False, True)),
        (Products(gradients=E4M3), (False, True, True)),
    ],
    ids=str,
)
def test_an_operand_changes_the_two_products_that_read_it(products, changed):
    data = operands()
    both = zip(products_of(emulated(products), *data), products_of(F.linear, *data), strict=True)
    assert tuple(not torch.equal(ours, theirs) for ours, theirs in both) == changed


def test_small_rows_of_gradients_keep_their_digits_along_outputs():
    """Scales of one token each: dX of a token 2⁻²⁴ times smaller is as accurate as that of the largest."""
    X, W = normal(64, INPUTS, seed=1), normal(OUTPUTS, INPUTS, seed=2)
    dY = normal(64, OUTPUTS, seed=3) * torch.logspace(-24, 0, 64, base=2.0)[:, None]
    _, dX, _ = products_of(emulated(Products(gradients=E4M3)), X, W, dY)
    exact = dY @ W
    errors = (dX - exact).norm(dim=1) / exact.norm(dim=1)
    # rounding by at most 2^-4 of each entry; the sum over outputs adds them as it adds the products themselves
    assert errors.max() < 2**-4


def test_stored_results_are_numbers_of_their_format():
    for result in products_of(emulated(BF16), *operands()):
        assert result.dtype == torch.float32
        assert torch.equal(result, result.bfloat16().float())


def test_records_stand_where_names_do():
    named = Products(E4M3, "bf16", E5M2, "floor", "fp16")
    own = Products(formats.MXFP8_E4M3, formats.BF16, formats.MXFP8_E5M2, "floor", formats.FP16)
    for ours, theirs in zip(*(products_of(emulated(p), *operands()) for p in (own, named)), strict=True):
        assert torch.equal(ours, theirs)


# What stays


def test_operands_are_neither_changed_nor_aliased():
    data = operands()
    before = [x.clone() for x in data]
    products_of(emulated(linear.uniform(E4M3)), *data)
    assert all(torch.equal(x, y) for x, y in zip(data, before, strict=True))


def test_layouts_of_memory_do_not_matter():
    X, W, dY = operands()
    strided = (X.mT.contiguous().mT, W.T.contiguous().T, dY.mT.contiguous().mT)
    both = (products_of(emulated(linear.uniform(E4M3)), *data) for data in ((X, W, dY), strided))
    for ours, theirs in zip(*both, strict=True):
        # the sums of up to 120 products may run in another order
        scale = theirs.abs().max()
        assert (ours - theirs).abs().max() <= BATCH * LENGTH * torch.finfo(torch.float32).eps * scale


def test_no_product_is_taken_for_a_gradient_that_nobody_asked_for():
    X, W, dY = operands()
    Y = linear.linear(X, W.requires_grad_(), linear.uniform(E4M3))
    (dW,) = torch.autograd.grad(Y, W, dY)
    assert torch.equal(dW, reference(X, W.detach(), dY, linear.uniform(E4M3))[2])
    assert not linear.linear(X, W.detach(), linear.uniform(E4M3)).requires_grad


def test_a_quantized_model_keeps_its_parameters_and_their_names():
    model = models.GPT(TINY, torch.Generator().manual_seed(0))
    before, state = dict(model.named_parameters()), deepcopy(model.state_dict())
    linear.quantized(model, linear.uniform(E4M3))
    after = dict(model.named_parameters())
    assert [*after] == [*before]
    assert all(after[name] is before[name] for name in before)
    assert [*model.state_dict()] == [*state]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    model.load_state_dict(state)
    swapped = [name for name, layer in model.named_modules() if isinstance(layer, linear.QuantizedLinear)]
    assert [f"{name}.weight" for name in swapped] == [*models.matrices(model)]
    assert type(model.head) is nn.Linear
    assert type(model.embedding) is nn.Embedding


def test_a_model_quantized_to_nothing_has_the_same_loss_and_gradients():
    tokens = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(7))
    plain, swapped = (models.GPT(TINY, torch.Generator().manual_seed(0)) for _ in range(2))
    linear.quantized(swapped, Products())
    losses = [model.loss(tokens[:, :-1], tokens[:, 1:]) for model in (plain, swapped)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(swapped.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_subclasses_of_linear_layers_keep_their_own_products():
    class Other(nn.Linear):
        pass

    source = torch.Generator().manual_seed(0)
    model = models.GPT(TINY, source)
    model.blocks[0].mlp.up = nn.utils.skip_init(Other, 32, 128, bias=False)
    linear.quantized(model, linear.uniform(E4M3))
    assert type(model.blocks[0].mlp.up) is Other
    assert type(model.blocks[1].mlp.up) is linear.QuantizedLinear


def test_nan_spreads_to_its_block_and_stays_visible():
    X, W, dY = operands()
    W[0, 0] = torch.nan
    Y, dX, dW = products_of(emulated(Products(weights=E4M3)), X, W, dY)
    assert Y[..., 0].isnan().all()
    assert Y[..., 1:].isfinite().all()
    assert dX[..., 0].isnan().all()
    assert dW.isfinite().all()


# Refuses


def test_the_backward_pass_cannot_be_differentiated_again():
    X, W, dY = operands()
    Y = linear.linear(X.requires_grad_(), W, Products(gradients=E4M3))
    (dX,) = torch.autograd.grad(Y, X, dY.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dX.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "mxfp8-e4m3"}, "unknown format 'mxfp8-e4m3': did you mean 'mxfp8_e4m3'"),
        ({"scale_mode": "round"}, "unknown scale mode 'round'"),
        ({"gradients": "e8m0"}, "e8m0 is a format for scales"),
        ({"stored": "e8m0"}, "e8m0 is a format for scales"),
        ({"weights": 8}, "a format must be a name of formats.known, a Format or a BlockFormat, not 8"),
        ({"stored": formats.NVFP4}, "stored must be a scalar format, since blocks would need an axis, got 'nvfp4'"),
        ({"stored": E4M3}, "stored must be a scalar format, since blocks would need an axis, got 'mxfp8_e4m3'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_products_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Products(**arguments)


def test_models_without_hidden_layers_are_refused():
    with pytest.raises(ValueError, match=r"nn\.Linear layers in blocks, got a Bilinear without"):
        linear.quantized(nn.utils.skip_init(nn.Bilinear, 2, 2, 2), BF16)
    model = models.GPT(TINY, torch.Generator().manual_seed(0))
    linear.quantized(model, BF16)
    with pytest.raises(ValueError, match="got a GPT without"):  # swapped already
        linear.quantized(model, BF16)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.utils.skip_init(nn.Linear, 32, 32), r"no bias, got one in blocks\.1\.attention\.out"),
        (
            lambda: nn.utils.skip_init(nn.Linear, 32, 32, bias=False, dtype=torch.bfloat16),
            r"must be float32 or float64, got torch\.bfloat16 in blocks\.1\.attention\.out",
        ),
    ],
    ids=("bias", "dtype"),
)
def test_layers_that_cannot_be_swapped_are_refused_and_none_is(layer, message):
    model = models.GPT(TINY, torch.Generator().manual_seed(0))
    model.blocks[1].attention.out = layer()
    with pytest.raises(ValueError, match=message):
        linear.quantized(model, BF16)
    assert not any(isinstance(each, linear.QuantizedLinear) for each in model.modules())
