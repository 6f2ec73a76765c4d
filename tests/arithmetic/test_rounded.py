"""Emulated products: what is rounded, along which axis, how it is summed, and what the engine makes of it."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import distance, through_svd, with_singular_values

from muon_lab import polar
from muon_lab.arithmetic import Exact, Rounded, TensorCore, Wide, blocks, formats, quantize, roundtrip
from muon_lab.arithmetic.formats import BlockFormat, Format
from muon_lab.polar import schedules

GOLDEN = Path(__file__).parent.parent / "golden"
#: One format of every kind: stored as well or not, cast by torch or not, block scales of both kinds.
KINDS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "int8", "mxfp8_e4m3", "nvfp4")
SCALARS = tuple(name for name in formats.known() if isinstance(formats.get(name), Format) and name != "e8m0")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- reduces to -------------------------------------------------------------------------------------------------------


def test_rounding_to_the_dtype_of_the_data_is_exact_arithmetic():
    G = randn(12, 20)
    schedule = schedules.get("quintic")
    expected = polar.newton_schulz(schedule)(G)
    assert torch.allclose(polar.newton_schulz(schedule, Rounded("fp32"))(G), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_product_is_the_rounded_float32_product_of_rounded_operands(format, batch):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[format]
    A, B, C = randn(*batch, 5, 7), randn(*batch, 7, 6, seed=1), randn(*batch, 5, 6, seed=2)

    def rounded(X):
        return X.to(dtype).float()

    found = Rounded(format).matmul(A, B, alpha=0.5, beta=-2.0, C=C)
    assert torch.equal(found, rounded(0.5 * (rounded(A) @ rounded(B)) - 2.0 * C))
    assert torch.equal(Rounded(format).gram(A), rounded(rounded(A) @ rounded(A).mT))


# --- blocks run along the summed axis ---------------------------------------------------------------------------------


def test_blocks_run_along_the_axis_that_is_summed_over():
    """Rows of A and columns of B scaled over 2^-24..1: blocks across them would flush the small ones to zero."""
    scales = torch.logspace(-24, 0, 32, base=2)
    A, B = randn(32, 96) * scales[:, None], randn(96, 32, seed=1) * scales
    found = Rounded("mxfp8_e4m3").matmul(A, B)
    left, right = (quantize(X, "mxfp8_e4m3", axis=axis).dequantize().double() for X, axis in ((A, -1), (B, -2)))
    assert distance(found, (left @ right).numpy()) < 1e-6
    exact = (A.double() @ B.double()).numpy()
    assert distance(found[0], exact[0]) < 0.1
    wrong = roundtrip(A, "mxfp8_e4m3", axis=-2) @ roundtrip(B, "mxfp8_e4m3", axis=-1)
    assert distance(wrong[0], exact[0]) == 1.0


def test_a_gram_matrix_of_quantized_operands_is_symmetric():
    A = Rounded("mxfp8_e4m3", accumulator=Wide(torch.float64)).gram(randn(40, 70))
    assert torch.equal(A, A.mT)


def test_inputs_are_not_changed():
    A, B, C = randn(8, 8), randn(8, 8, seed=1), randn(8, 8, seed=2)
    before = A.clone(), B.clone(), C.clone()
    Rounded("bf16").matmul(A, B, alpha=2.0, beta=3.0, C=C)
    Rounded("mxfp8_e4m3").square(A, alpha=2.0, beta=3.0)
    for X, old in zip((A, B, C), before, strict=True):
        assert torch.equal(X, old)


@pytest.mark.parametrize("name", KINDS)
def test_results_are_neither_operands_nor_memory_that_is_used_again(name):
    arithmetic, A, C = Rounded(name), randn(8, 8), randn(8, 8, seed=1)
    results = [arithmetic.gram(A), arithmetic.square(A, beta=0.5), arithmetic.matmul(A, C, alpha=2.0, beta=3.0, C=C)]
    before = [X.clone() for X in results]
    for X in (A, C):
        arithmetic.commuting(7 * X, 3 * X, C=X)
    assert all(torch.equal(X, old) for X, old in zip(results, before, strict=True))
    assert len({X.untyped_storage().data_ptr() for X in (A, C, *results)}) == 5


@pytest.mark.parametrize("name", ["bf16", "mxfp8_e4m3", "nvfp4"])
def test_operands_that_are_negated_views_are_what_they_show(name):
    """The imaginary part of a conjugate is a view with the negative bit set."""
    A = torch.view_as_complex(randn(8, 8, 2)).conj().imag
    assert A.is_neg()
    plain, arithmetic = A.clone().resolve_neg(), Rounded(name)
    assert torch.equal(arithmetic.matmul(A, A, beta=0.5, C=A), arithmetic.matmul(plain, plain, beta=0.5, C=plain))
    assert torch.equal(arithmetic.gram(A), arithmetic.gram(plain))
    assert torch.equal(arithmetic.store(A, A.dtype), arithmetic.store(plain, A.dtype))


# --- stored results ---------------------------------------------------------------------------------------------------


def same_bits(X, Y):
    """Whether the numbers are equal, and the signs of the zeros."""
    return torch.equal(X, Y) and torch.equal(X.signbit(), Y.signbit())


@pytest.mark.parametrize("stored", SCALARS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_stored_in_any_scalar_format_as_a_roundtrip_would(stored, dtype):
    A, B, C = randn(8, 40, dtype=dtype), randn(40, 9, seed=1, dtype=dtype), randn(8, 9, seed=2, dtype=dtype)
    for operands in ("mxfp8_e4m3", "bf16"):
        plain = Rounded(operands, "fp64")
        for arithmetic in (Rounded(operands, stored), Rounded(operands, formats.get(stored))):
            found, wide = (each.matmul(A, B, alpha=1e-3, beta=-0.7, C=C) for each in (arithmetic, plain))
            assert same_bits(found, roundtrip(wide, stored))
            assert same_bits(arithmetic.gram(A), roundtrip(plain.gram(A), stored))
            assert same_bits(arithmetic.store(A, dtype), roundtrip(A, stored))
            assert arithmetic.roundoff(dtype) >= formats.get(stored).unit_roundoff


@pytest.mark.parametrize("name", SCALARS)
def test_results_longer_than_a_piece_are_stored_as_short_ones(name, monkeypatch):
    A = randn(9, 11) * 2.0 ** torch.arange(-20, 13, 3)
    for X in (A, A.mT, A.double(), A[:, ::2], A[:0]):
        whole = Rounded("bf16", name)._result(X.clone())
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "PIECE", 7)
            pieces = Rounded("bf16", name)._result(X.clone())
        assert same_bits(whole, roundtrip(X, name))
        assert same_bits(pieces, whole)


def test_nan_is_refused_where_results_cannot_hold_it():
    A = torch.full((2, 2), torch.inf)
    assert Rounded("bf16", "fp8_e4m3").matmul(A, A - 1).tolist() == [[448.0, 448.0], [448.0, 448.0]]
    with pytest.raises(ValueError, match="NaN, which e2m1 cannot represent"):
        Rounded("bf16", "e2m1").matmul(A, torch.zeros(2, 2))


# --- formats of your own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_record_is_as_good_as_its_name(name):
    record, A, B = formats.get(name), randn(6, 40), randn(40, 5, seed=1)
    for dtype in (torch.float32, torch.float64):
        named, own = (Rounded(format).matmul(A.to(dtype), B.to(dtype)) for format in (name, record))
        assert torch.equal(named, own)
    assert Rounded(name).roundoff(torch.float32) == Rounded(record).roundoff(torch.float32)
    assert Rounded(name).kept == Rounded(record).kept
    assert hash(Rounded(record)) == hash(Rounded(replace(record)))


def test_records_of_your_own_are_operands_and_results():
    e5m3 = Format("e5m3", 5, 3, bias=15, top="finite")
    A, B = randn(6, 40), randn(40, 5, seed=1)
    rounded = roundtrip(A, e5m3) @ roundtrip(B, e5m3)
    assert torch.equal(Rounded(e5m3).matmul(A, B), rounded)
    assert torch.equal(Rounded(e5m3, e5m3).matmul(A, B), roundtrip(rounded, e5m3))
    fine = BlockFormat("mxfp8_e4m3_8", formats.FP8_E4M3, 8, formats.E8M0)
    assert torch.equal(Rounded(fine).matmul(A, B), roundtrip(A, fine, axis=1) @ roundtrip(B, fine, axis=0))
    narrow = replace(formats.FP32, exponent_bits=5, bias=15)  # no IEEE format that torch has, whatever its name
    assert Rounded(narrow).kept is None


# --- no gradient, no inference tensors --------------------------------------------------------------------------------


def results_of(arithmetic, A, C):
    """Everything that an arithmetic returns for square matrices."""
    return (
        arithmetic.norm(A),
        arithmetic.store(A, A.dtype),
        arithmetic.gram(A),
        arithmetic.square(A, alpha=0.5, beta=0.25),
        arithmetic.commuting(A, A, C=C),
        arithmetic.matmul(A, A, alpha=2.0, beta=-1.0, C=C),
        polar.newton_schulz(schedules.get("quintic", 2), arithmetic)(A),
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("stored", [None, "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("accumulator", [None, TensorCore(13)])
def test_no_gradient_runs_through_emulated_products(name, stored, accumulator):
    A, C, arithmetic = randn(8, 8), randn(8, 8, seed=1), Rounded(name, stored, accumulator=accumulator)
    expected = results_of(arithmetic, A, C)
    for left, right in ((True, False), (False, True), (True, True)):
        found = results_of(arithmetic, A.clone().requires_grad_(left), C.clone().requires_grad_(right))
        for X, plain in zip(found, expected, strict=True):
            assert not X.requires_grad
            assert torch.equal(X, plain)
    assert not any(memory.requires_grad for memory in arithmetic.scratch.buffers.values())
    assert not any(X.requires_grad for X in results_of(arithmetic, A, C))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_come_first_or_last(name, first):
    A, C, arithmetic = randn(8, 8), randn(8, 8, seed=1), Rounded(name, "bf16")
    expected = results_of(Rounded(name, "bf16"), A, C)
    for inference in (first, not first, first):
        with torch.inference_mode(inference):
            found = results_of(arithmetic, A.clone(), C.clone())
            assert not any(memory.is_inference() for memory in arithmetic.scratch.buffers.values())
        assert all(torch.equal(X, plain) for X, plain in zip(found, expected, strict=True))


def test_operands_made_in_inference_mode_can_be_multiplied_outside():
    with torch.inference_mode():
        A = randn(8, 40)
    for name in KINDS:
        assert torch.equal(Rounded(name).gram(A), Rounded(name).gram(randn(8, 40)))


# --- accumulation -----------------------------------------------------------------------------------------------------


def quantized_pair(kind, k):
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn if kind == "gaussian" else torch.rand
    return roundtrip(draw(16, k, generator=generator), "fp8_e4m3"), roundtrip(
        draw(k, 16, generator=generator), "fp8_e4m3"
    )


@pytest.mark.parametrize(
    ("kind", "k", "error"),
    [("gaussian", 1024, 5.7e-4), ("gaussian", 4096, 1.4e-3), ("uniform", 1024, 1.5e-2), ("uniform", 4096, 7.5e-2)],
)
def test_a_hopper_accumulator_loses_what_was_measured(kind, k, error):
    """Published model, 32×32 outputs: the same to 20 % on other draws; on one-signed data it is a bias downwards."""
    A, B = quantized_pair(kind, k)
    exact = (A.double() @ B.double()).numpy()
    found = TensorCore(13).product(A, B).double().numpy()
    assert distance(found, exact) == pytest.approx(error, rel=0.2)
    if kind == "uniform":
        assert (found < exact).all()


def test_a_blackwell_accumulator_is_as_good_as_float32():
    A, B = quantized_pair("gaussian", 1024)
    exact = (A.double() @ B.double()).numpy()
    assert distance(TensorCore(25).product(A, B).double().numpy(), exact) < 2e-7
    assert distance(Wide().product(A, B).double().numpy(), exact) < 2e-7


def test_a_tensor_core_truncates_each_product_of_a_group_to_the_largest():
    """1 + 63/64·2^-13: aligned to 1 with 13 bits the small product vanishes, with 25 it stays."""
    A = torch.tensor([[1.0, 2.0**-7]])
    B = torch.tensor([[1.0], [2.0**-7 * 63 / 64]])
    assert TensorCore(13).product(A, B).item() == 1.0
    assert TensorCore(25).product(A, B).item() == 1.0 + 2.0**-14 * 63 / 64
    assert TensorCore(13, group=1).product(A, B).item() == 1.0
    assert TensorCore(13).product(torch.zeros(1, 4), torch.ones(4, 1)).item() == 0.0


def test_sums_have_the_digits_of_the_operands():
    """1 + 2^-40 - 1: kept where fp64 operands are summed in float64, lost where narrower ones are in float32."""
    A, B = torch.tensor([[1.0, 2.0**-40, -1.0]], dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    assert Rounded("fp64").matmul(A, B).item() == Rounded(formats.FP64).matmul(A, B).item() == 2.0**-40
    assert Rounded("fp64").matmul(A.float(), B.float()).item() == 2.0**-40
    for name in KINDS[1:]:
        assert Rounded(name).summed == Wide(torch.float32)
    assert Rounded("fp32").matmul(A, B).item() == 0.0
    assert Rounded("fp64", accumulator=Wide(torch.float32)).matmul(A, B).item() == 0.0
    assert Rounded("fp32", accumulator=Wide(torch.float64)).matmul(A, B).item() == 2.0**-40
    X, Y = randn(5, 70, dtype=torch.float64), randn(70, 6, seed=1, dtype=torch.float64)
    assert torch.equal(Rounded("fp64").matmul(X, Y), X @ Y)


def test_values_are_compared_printed_and_copied_by_what_they_were_made_of():
    arithmetic = Rounded("mxfp8_e4m3", "bf16", "floor", TensorCore(13))
    X = arithmetic.gram(randn(8, 40))  # fills memory and caches, which are no part of the value
    for other in (copy.copy(arithmetic), copy.deepcopy(arithmetic), pickle.loads(pickle.dumps(arithmetic))):
        assert (other, hash(other), repr(other)) == (arithmetic, hash(arithmetic), repr(arithmetic))
        assert torch.equal(other.gram(randn(8, 40)), X)
    assert "kept" not in repr(arithmetic)
    assert repr(Rounded("bf16")) == "Rounded(operands='bf16', stored=None, scale_mode='rceil', accumulator=None)"
    assert eval(repr(arithmetic)) == arithmetic
    half = Rounded("bf16")
    half.gram(randn(8, 40))
    wide = replace(half, operands="fp64")
    assert (wide.summed, wide.kept) == (Wide(torch.float64), formats.FP64)
    assert Rounded("bf16") != Rounded("bf16", accumulator=TensorCore())


# --- the same engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "tolerance"), [("fp16", 2e-2), ("bf16", 6e-2), ("tf32", 2e-2)])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e15])
def test_newton_schulz_in_half_precision_stays_near_the_exact_result(format, tolerance, scale):
    G = with_singular_values(16, 24, np.geomspace(1, 0.01, 16), seed=3) * scale
    X = polar.newton_schulz(schedules.get("simple"), Rounded(format))(torch.tensor(G, dtype=torch.float32))
    assert torch.isfinite(X).all()
    assert distance(X, through_svd(G, schedules.get("simple").map)) < tolerance


def test_emulated_bf16_is_the_native_one_up_to_its_last_bits():
    """torch multiplies bfloat16 with float32 sums too: what differs is the order of the sums."""
    G = randn(24, 40)
    schedule = schedules.get("simple")
    native = polar.newton_schulz(schedule, Exact(torch.bfloat16))(G)
    emulated = polar.newton_schulz(schedule, Rounded("bf16"))(G)
    assert distance(emulated, native.double().numpy()) < 5 * 2.0**-8


@pytest.mark.slow
def test_torch_optim_muon_steps_are_reproduced_in_bf16():
    """Golden trajectory of torch.optim.Muon (torch 2.13.0): its direction is our bf16 iteration."""
    rows = json.loads((GOLDEN / "trajectories_torch.json").read_text())["rows"]
    assert rows
    orthogonalize = polar.newton_schulz(schedules.get("simple"), Rounded("bf16"))
    with np.load(GOLDEN / "trajectories_torch.npz") as arrays:
        for row in rows:
            W = torch.tensor(arrays[row["w0"]], dtype=torch.float32)
            M = torch.zeros_like(W)
            for step, G in enumerate(torch.tensor(arrays[row["grads"]], dtype=torch.float32)):
                M = row["momentum"] * M + (1 - row["momentum"]) * G
                direction = (1 - row["momentum"]) * G + row["momentum"] * M if row["nesterov"] else M
                factor = max(1.0, W.shape[0] / W.shape[1]) ** 0.5
                if row["adjust_lr_fn"] == "match_rms_adamw":
                    factor = 0.2 * max(W.shape) ** 0.5
                W = W * (1 - row["lr"] * row["weight_decay"]) - row["lr"] * factor * orthogonalize(direction)
                expected = arrays[row["key"]][step]
                moved = np.linalg.norm(expected - arrays[row["w0"]])
                assert np.linalg.norm(W.double().numpy() - expected) < 3e-2 * moved, (row["key"], step)


def test_polar_express_escapes_under_mxfp8_and_taylor_does_not():
    G = randn(64, 128)
    assert not torch.isfinite(polar.newton_schulz(schedules.get("polar_express"), Rounded("mxfp8_e4m3"))(G)).all()
    X = polar.newton_schulz(schedules.get("taylor"), Rounded("mxfp8_e4m3"))(G)
    assert float(torch.linalg.svdvals(X.double()).max()) < 1.2


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mxfp8_e4m4",), "unknown format 'mxfp8_e4m4': did you mean 'mxfp8_e4m3'"),
        (("bf16", "e4m3"), "unknown format 'e4m3': did you mean 'fp8_e4m3'"),
        (("bf16", "mxfp8_e4m3"), "stored must be a scalar format, since blocks would need an axis, got 'mxfp8_e4m3'"),
        (("bf16", formats.NVFP4), "stored must be a scalar format, since blocks would need an axis, got 'nvfp4'"),
        (("bf16", "e8m0"), "e8m0 is a format for scales: it has no sign and no zero"),
        (("e8m0",), "e8m0 is a format for scales: it has no sign and no zero"),
        ((formats.E8M0,), "e8m0 is a format for scales"),
        ((None,), "a format must be a name of formats.known, a Format or a BlockFormat, not None"),
        (("bf16", 8), "a format must be a name of formats.known, a Format or a BlockFormat, not 8"),
        (("bf16", None, "rceill"), "unknown scale mode 'rceill': did you mean 'rceil'"),
        (("bf16", None, "rceil", "fp64"), r"a value with a product, such as Wide\(\), not 'fp64'"),
        (("bf16", None, "rceil", Wide), r"a value with a product, such as Wide\(\), not <class"),
    ],
)
def test_bad_policies_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rounded(*arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("arguments", [(0,), (-3,), (13, 0), (13, -1), (13.5,), ("13",)])
def test_bad_tensor_cores_are_refused(arguments):
    with pytest.raises(ValueError, match="bits and group of a tensor core must be integers of at least 1, not"):
        TensorCore(*arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bfloat16, "float32"])
def test_sums_in_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"products are summed in torch\.float32 or torch\.float64, not in"):
        Wide(dtype)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["bf16", "fp32", "mxfp8_e4m3", "nvfp4", "int8"])
@pytest.mark.parametrize(
    ("bad", "given"),
    [
        (torch.ones(4, 4, dtype=torch.int32), r"torch.int32 of shape \(4, 4\)"),
        (torch.ones(4, 4, dtype=torch.bool), "torch.bool"),
        (torch.ones(4, 4, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(4, 4).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (torch.ones(4), r"torch.float32 of shape \(4,\)"),
        (torch.tensor(1.0), r"torch.float32 of shape \(\)"),
        (np.ones((4, 4)), "of type ndarray"),
    ],
)
def test_what_is_no_matrix_is_refused(name, bad, given):
    arithmetic, good = Rounded(name), torch.ones(4, 4)
    for call in (
        lambda: arithmetic.gram(bad),
        lambda: arithmetic.square(bad),
        lambda: arithmetic.store(bad, torch.float32),
        lambda: arithmetic.matmul(bad, good),
        lambda: arithmetic.matmul(good, bad),
        lambda: arithmetic.matmul(good, good, beta=1.0, C=bad),
        lambda: arithmetic.commuting(good, good, beta=1.0, C=bad),
    ):
        with pytest.raises(ValueError, match=f"a matrix must have at least 2 axes and be .* but this one is {given}"):
            call()


@pytest.mark.parametrize("name", ["bf16", "mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("odd", range(3))
def test_operands_of_two_precisions_are_refused(name, odd):
    """Silently, the first one would have decided; bfloat16 and float32 are the same number to a product."""
    operands = [torch.ones(4, 4, dtype=torch.float64 if i == odd else torch.float32) for i in range(3)]
    with pytest.raises(ValueError, match=r"all be float64 or none, but these are .*torch\.float64"):
        Rounded(name).matmul(*operands[:2], C=operands[2])
    assert torch.equal(Rounded(name).matmul(torch.ones(4, 4).bfloat16(), torch.ones(4, 4)), torch.full((4, 4), 4.0))


@pytest.mark.parametrize(
    "shapes", [((2, 3), (4, 5)), ((2, 3), (3, 5), (2, 4)), ((2, 2, 3), (3, 3, 5)), ((2, 3), (3, 5), (2, 2, 5, 5))]
)
def test_operands_that_do_not_fit_are_refused(shapes, unchecked):
    A, B, *C = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"must be \(m, k\) and \(k, n\), added to \(m, n\), but these are \(2, "):
        Rounded("bf16").matmul(A, B, C=C[0] if C else None)


def test_batches_broadcast(unchecked):
    A, B = torch.ones(2, 3), torch.ones(4, 3, 5)
    assert torch.equal(Rounded("bf16").matmul(A, B, C=torch.ones(2, 5)), torch.full((4, 2, 5), 3.0))
