"""Quantizers: every stored vector exact, every code and every bfloat16 input, what must not matter, what is decided."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab import oracle
from muon_lab.arithmetic import blocks, formats, kernels, rounding
from muon_lab.arithmetic.formats import Format
from muon_lab.arithmetic.microscaling import Quantized, quantize, roundtrip
from muon_lab.arithmetic.scales import MODES

VECTORS = json.loads((Path(__file__).parent.parent / "golden" / "mx_vectors.json").read_text("utf-8"))["rows"]
MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")
BLOCK = (*MX, "nvfp4")
NARROW = ("fp8_e4m3", "fp8_e5m2", "e3m2", "e2m3", "e2m1", "int8")
SCALAR = ("fp32", "tf32", "bf16", "fp16", *NARROW)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ML_DTYPES = {
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
}
FLOAT_MAX = torch.finfo(torch.float32).max


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def graded(m, n):
    """Rows scaled by 2⁻²⁴ … 1, shuffled: the data that tells blocks along one axis from blocks along the other."""
    order = torch.randperm(m, generator=torch.Generator().manual_seed(1))
    return normal(m, n) * torch.logspace(-24, 0, m, base=2.0)[order, None]


def wild(*shape, seed=0):
    """Random bit patterns: every exponent, subnormals, NaN and Inf."""
    bits = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed))
    return bits.int().view(torch.float32)


def same(ours, theirs):
    """Demand equal bits, but for the payload of NaN."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    integer = torch.int64 if ours.dtype == torch.float64 else torch.int32
    differ = (ours.contiguous().view(integer) != theirs.contiguous().view(integer)) & ~(ours.isnan() & theirs.isnan())
    assert not differ.any(), (ours[differ][:5].tolist(), theirs[differ][:5].tolist())


# Reduces to: stored vectors, all codes, all bfloat16 inputs


def test_every_stored_vector_is_exact():
    def hexadecimal(rows, key):
        return torch.tensor([[float.fromhex(value) for value in row[key]] for row in rows], dtype=torch.float64)

    assert len(VECTORS) == 520
    for name, mode in itertools.product(MX, MODES):
        rows = [row for row in VECTORS if (row["format"], row["scale_mode"]) == (name, mode)]
        exact = hexadecimal(rows, "dequant") if rows else torch.empty(0, 32, dtype=torch.float64)
        x = hexadecimal(rows, "inputs") if rows else exact
        for data, values in ((x.float(), exact.float()), (x, exact)):
            q = quantize(data, name, scale_mode=mode)
            for row, byte, codes in zip(rows, q.scale_bytes[:, 0].tolist(), q.codes.tolist(), strict=True):
                assert byte == row["scale_code"], row["id"]
                assert row["codes"] in (None, codes), row["id"]
            same(q.dequantize(), values)
            same(roundtrip(data, name, scale_mode=mode), values)
            same(roundtrip(data.mT, name, scale_mode=mode, axis=0), values.mT)


@pytest.mark.parametrize("name", [name for name in SCALAR if name != "fp32"])
def test_representable_numbers_stay(name):
    format = formats.get(name)
    codes = torch.arange(format.codes)
    x = rounding.decode(codes, format)
    keep = x.isfinite() & (x >= -format.max)
    for carried in (x[keep], x[keep].float()):
        q = quantize(carried, name)
        assert torch.equal(q.codes.long(), codes[keep])
        same(q.dequantize(), carried)


@pytest.mark.parametrize("name", MX)
def test_every_element_code_stays_under_every_scale(name):
    """Blocks with max in front and scale bytes 0, 1, 127, 134, 253 and 254: the places where scales go wrong."""
    format = formats.get(name)
    codes = torch.arange(format.element.codes)
    elements = rounding.decode(codes, format.element)
    keep = elements.isfinite() & (elements.abs() <= format.element.max)
    codes, elements = codes[keep], elements[keep]
    whole = torch.cat([elements.new_full((len(elements), 1), format.element.max), elements[:, None]], dim=1)
    for byte in (0, 1, 127, 134, 253, 254):
        x = whole * 2.0 ** (byte - 127)
        q = quantize(x, name)
        assert (q.scale_bytes == byte).all()
        assert torch.equal(q.codes[:, 1].long(), codes)
        same(q.dequantize(), x)
        if x.abs().max() <= FLOAT_MAX:
            same(quantize(x.float(), name).dequantize(), x.float())
            same(roundtrip(x.float(), name), x.float())


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_bfloat16_number_rounds_as_in_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    format, dtype = formats.get(name), getattr(ml_dtypes, ML_DTYPES[name])
    x = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
    x = x[~x.isnan()] if format.top == "finite" else x
    clamped = x.float().clamp(-format.max, format.max) if format.saturates else x.float()
    with np.errstate(invalid="ignore"):
        theirs = torch.from_numpy(clamped.numpy().astype(dtype).astype(np.float32))
    for data in (x, x.float()):
        same(roundtrip(data, name), theirs)
        same(quantize(data, name).dequantize(), theirs)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_plain_formats_round_as_torch_does_from_float32(name, dtype):
    x = wild(2**16)
    same(roundtrip(x, name), x.to(dtype).float())
    same(quantize(x, name).dequantize(), x.to(dtype).float())


@pytest.mark.parametrize("x", [448.0, 464.0, 464.00003, 465.0, 1e9, math.inf])
def test_overflow_saturates_or_not_as_the_record_says(x):
    data = torch.tensor([x, -x], dtype=torch.float32)
    assert roundtrip(data, "fp8_e4m3").tolist() == [448.0, -448.0]
    strict = roundtrip(data, replace(formats.FP8_E4M3, saturates=False)).tolist()
    assert strict == [448.0, -448.0] if x <= 464 else all(map(math.isnan, strict))
    assert roundtrip(data * 128, "fp8_e5m2").tolist() == [57344.0, -57344.0]
    strict = roundtrip(data * 128, replace(formats.FP8_E5M2, saturates=False)).tolist()
    assert strict == ([57344.0, -57344.0] if x * 128 < 61440 else [math.inf, -math.inf])


# Matches the oracle


@given(st.data())
def test_random_bits_agree_with_exact_rationals_for_scalars(data):
    x = data.draw(st.floats(width=32, allow_nan=False, allow_subnormal=True))
    for name in SCALAR:
        expected = oracle.rounding.round_to(x, name, saturate=formats.get(name).saturates)
        q = quantize(torch.tensor(x), name)
        assert int(q.codes) == expected.code
        same(q.dequantize(), torch.tensor(float(expected)))


@given(st.data(), st.sampled_from(MX), st.sampled_from(MODES))
def test_random_blocks_agree_with_exact_rationals(data, name, mode):
    top = data.draw(st.integers(-149, 127))
    number = st.floats(-1, 1, width=32).map(lambda v: float(np.float32(v * 2.0**top)))
    x = data.draw(st.lists(number, min_size=32, max_size=32))
    expected = oracle.rounding.block(x, name, mode)
    q = quantize(torch.tensor(x), name, scale_mode=mode)
    assert q.scale_bytes.tolist() == [expected.scale_code]
    assert q.codes.tolist() == list(expected.codes)
    same(q.dequantize(), torch.tensor(expected.floats, dtype=torch.float64).float())
    same(roundtrip(torch.tensor(x), name, scale_mode=mode), q.dequantize())


@given(st.integers(0, 2**30), st.integers(-140, 120))
def test_nvfp4_agrees_with_exact_rationals(seed, top):
    x = normal(16 * 6, seed=seed) * torch.logspace(-30, 0, 6, base=2.0).repeat_interleave(16)
    x = (x.double() * 2.0**top).float()
    factor = oracle.rounding.nvfp4_scale(float(x.abs().max()))
    expected = [oracle.rounding.nvfp4_block(block.tolist(), factor.value) for block in x.view(6, 16)]
    q = quantize(x, "nvfp4")
    assert q.global_scale == float(factor.value)
    assert q.scale_bytes.tolist() == [block.scale_code for block in expected]
    assert q.codes.view(6, 16).tolist() == [list(block.codes) for block in expected]
    values = [value for block in expected for value in block.floats]
    same(q.dequantize(), torch.tensor(values, dtype=torch.float64).float())
    same(roundtrip(x, "nvfp4"), q.dequantize())


def test_scales_are_right_on_both_sides_of_every_threshold():
    """The next float32 below, at and above 2^k and max·2^k, where logarithms in float32 go wrong."""
    for name, mode in itertools.product(MX, MODES):
        largest = formats.get(name).element.max
        centres = torch.tensor([c * 2.0**k for k in range(-149, 128) for c in (1.0, largest)], dtype=torch.float64)
        centres = centres[centres <= FLOAT_MAX].float()
        up, down = torch.tensor(math.inf), torch.tensor(0.0)
        x = torch.cat([centres, centres.nextafter(up), centres.nextafter(down)])
        x = x[(x > 0) & x.isfinite()]
        exponents = [oracle.rounding.scale_exponent(float(value), name, mode) for value in x]
        expected = torch.tensor(exponents).clamp(-127, 127) + 127
        assert torch.equal(quantize(x[:, None], name, scale_mode=mode).scale_bytes[:, 0].long(), expected), (name, mode)


# The fast path is the definition


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCK)
@pytest.mark.parametrize("mode", MODES)
def test_roundtrip_is_quantize_then_dequantize(name, mode):
    data = [wild(40, 64), wild(40, 64) * 2.0**-60, normal(7, 100), graded(64, 96), normal(3, 5, dtype=torch.float64)]
    data += [normal(8, 64).bfloat16(), normal(8, 64).half(), normal(5, 40, 3), torch.zeros(2, 64), normal(64)]
    data += [
        wild(64, 8).double() ** 3,
        normal(64, 40).mT,
        normal(1, 40).expand(3, 40),
        normal(4, 6, 8).permute(2, 0, 1),
    ]
    for x in data:
        for axis in range(-x.ndim, x.ndim):
            q = quantize(x, name, scale_mode=mode, axis=axis)
            same(roundtrip(x, name, scale_mode=mode, axis=axis), q.dequantize())
            assert q.codes.shape == x.shape
            assert q.dequantize().dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
        if x.ndim > 1:
            same(roundtrip(x, name, scale_mode=mode, tile=4), quantize(x, name, scale_mode=mode, tile=4).dequantize())


@pytest.mark.parametrize("name", SCALAR)
def test_roundtrip_is_quantize_then_dequantize_for_scalars(name):
    x = wild(40, 64)
    x = x.nan_to_num(nan=-0.0) if formats.get(name).top == "finite" else x
    for data in (x, x.double(), x.double() ** 3, normal(7, 9).half(), x.mT, x[:, ::3], torch.tensor(-0.3), x[:0]):
        same(roundtrip(data, name), quantize(data, name).dequantize())


@pytest.mark.slow
def test_pieces_do_not_matter(monkeypatch):
    x, G = graded(130, 100), torch.Generator()
    for name, axis, tile in itertools.product(("mxfp8_e4m3", "nvfp4", "bf16"), (0, 1), (None, 32)):
        wanted = [roundtrip(x, name, axis=axis, tile=tile), quantize(x, name, axis=axis, tile=tile).codes]
        with monkeypatch.context() as patch:
            patch.setattr(blocks.pieces, "__defaults__", (1,))
            patch.setattr(blocks, "PIECE", 2)
            same(roundtrip(x, name, axis=axis, tile=tile), wanted[0])
            assert torch.equal(quantize(x, name, axis=axis, tile=tile).codes, wanted[1])
    first, second = (
        roundtrip(x, "mxfp8_e4m3", rounding="stochastic", generator=G.manual_seed(1)),
        quantize(x, "mxfp8_e4m3", rounding="stochastic", generator=G.manual_seed(1)).dequantize(),
    )
    same(first, second)


def test_out_receives_the_values():
    x = normal(40, 70)
    for out in (torch.empty(40, 70), torch.empty(70, 40).mT, torch.empty(40, 140)[:, ::2]):
        assert roundtrip(x, "mxfp8_e4m3", axis=0, out=out) is out
        same(out, roundtrip(x, "mxfp8_e4m3", axis=0))


# Invariances


def blocks_of():
    return st.lists(st.floats(-8, 8, width=32), min_size=32, max_size=32).map(torch.tensor)


@pytest.mark.slow
@given(blocks_of(), st.sampled_from(BLOCK), st.sampled_from(MODES))
def test_idempotent_in_value(x, name, mode):
    once = roundtrip(x, name, scale_mode=mode)
    if name != "nvfp4":  # whose second factor need not be the first
        same(roundtrip(once, name, scale_mode=mode), once)
    for scalar in SCALAR:
        once = roundtrip(x, scalar)
        same(roundtrip(once, scalar), once)


@given(blocks_of(), st.sampled_from(BLOCK), st.sampled_from(MODES))
def test_odd(x, name, mode):
    if name == "mxint8":
        assert torch.equal(roundtrip(-x, name, scale_mode=mode), -roundtrip(x, name, scale_mode=mode))
    else:
        same(roundtrip(-x, name, scale_mode=mode), -roundtrip(x, name, scale_mode=mode))


@given(blocks_of(), st.permutations(range(32)), st.sampled_from(MX), st.sampled_from(MODES))
def test_permuting_a_block_permutes_its_values(x, order, name, mode):
    same(roundtrip(x[order], name, scale_mode=mode), roundtrip(x, name, scale_mode=mode)[order])


@given(st.integers(-60, 60), st.sampled_from(MX), st.sampled_from(MODES))
def test_powers_of_two_pass_through(k, name, mode):
    x = normal(4, 64)
    same(roundtrip(x * 2.0**k, name, scale_mode=mode), roundtrip(x, name, scale_mode=mode) * 2.0**k)


@given(st.integers(1, 70), st.sampled_from(BLOCK))
def test_padding_with_zeros_changes_nothing(n, name):
    block = formats.get(name).block
    x = graded(3, n)
    padded = torch.cat([x, x.new_zeros(3, -n % block)], dim=1)
    q, expected = quantize(x, name), quantize(padded, name)
    assert torch.equal(q.scale_bytes, expected.scale_bytes)
    assert torch.equal(q.codes, expected.codes[:, :n])


def test_blocks_never_run_past_the_end_of_a_row():
    x = graded(3, 40)
    x[1, 8:] *= 2.0**-30
    for i in range(3):
        same(roundtrip(x, "mxfp8_e4m3")[i], roundtrip(x[i], "mxfp8_e4m3"))
    assert quantize(x, "mxfp8_e4m3").scale_bytes.shape == (3, 2)
    assert quantize(x, "mxfp8_e4m3", axis=0).scale_bytes.shape == (1, 40)


def test_poison_beyond_the_view_is_not_read():
    memory = torch.full((6, 60), math.nan)
    memory[:3, :40] = normal(3, 40)
    for axis, tile in ((0, None), (1, None), (1, 32)):
        same(
            roundtrip(memory[:3, :40], "mxfp8_e4m3", axis=axis, tile=tile),
            roundtrip(memory[:3, :40].clone(), "mxfp8_e4m3", axis=axis, tile=tile),
        )


@pytest.mark.parametrize("name", BLOCK)
def test_an_axis_is_any_axis(name):
    x = graded(48, 2 * 40).view(48, 2, 40)
    for axis in range(3):
        last = x.movedim(axis, -1)
        expected = quantize(last.contiguous(), name)
        for got in (quantize(x, name, axis=axis), quantize(x, name, axis=axis - 3), quantize(last, name)):
            back = axis if got.axis != -1 else -1
            assert torch.equal(got.scale_bytes.movedim(back, -1), expected.scale_bytes)
            assert torch.equal(got.codes.movedim(back, -1), expected.codes)


@pytest.mark.parametrize("name", BLOCK)
def test_tiles_commute_with_transposition(name):
    for W in (graded(64, 96), graded(40, 70), graded(80, 70).view(2, 40, 70)):
        Q, T = quantize(W, name, tile=32), quantize(W.mT.contiguous(), name, tile=32)
        same(T.dequantize(), Q.dequantize().mT)
        assert torch.equal(T.scale_bytes, Q.scale_bytes.mT)
        same(roundtrip(W.mT, name, tile=32), Q.dequantize().mT)


def test_tiles_are_blocks_of_their_entries():
    W = graded(64, 64)
    tile = quantize(W, "mxfp8_e4m3", tile=32)
    flat = W.view(2, 32, 2, 32).transpose(1, 2).reshape(4, 1024)
    blocks_ = quantize(flat, replace(formats.MXFP8_E4M3, block=1024))
    assert torch.equal(tile.scale_bytes.flatten(), blocks_.scale_bytes.flatten())


# Decided cases


@pytest.mark.parametrize("name", BLOCK)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_entry_makes_its_block_nan_and_no_other(name, bad):
    block = formats.get(name).block
    clean = normal(3, 2 * block)
    for position in range(block):
        x = clean.clone()
        x[1, position] = bad
        q = quantize(x, name)
        assert q.scale_bytes[1, 0] == formats.get(name).scale.nan_code
        values = q.dequantize()
        assert values[1, :block].isnan().all()
        assert values.isnan().sum() == block
        same(roundtrip(x, name), values)


@pytest.mark.parametrize(
    "name", [*BLOCK, replace(formats.NVFP4, name="int8_e5m2", element=formats.INT8, scale=formats.FP8_E5M2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_nan_block_has_the_code_zero_everywhere(name, dtype, bad):
    """No other code is one that every element format and every processor agrees on; the scale alone says NaN."""
    record = formats.get(name)
    for x, where, kwargs in (
        (normal(3, 2 * record.block, dtype=dtype), (slice(1, 2), slice(0, record.block)), {}),
        (normal(2 * record.block, 3, dtype=dtype), (slice(0, record.block), slice(1, 2)), {"axis": 0}),
        (normal(8, 8, dtype=dtype), (slice(0, 4), slice(0, 4)), {"tile": 4}),
    ):
        x[where][0, 0] = bad
        q = quantize(x, record, **kwargs)
        inside = torch.zeros(x.shape, dtype=torch.bool)
        inside[where] = True
        assert (q.codes[inside] == 0).all()
        assert (q.scale_bytes == record.scale.nan_code).sum() == 1
        clean = quantize(x.masked_fill(inside, 0.0), record, **kwargs)
        assert torch.equal(q.codes, clean.codes)
        assert torch.equal(q.dequantize().isnan(), inside)
        same(roundtrip(x, record, **kwargs), q.dequantize())


@pytest.mark.parametrize("name", BLOCK)
def test_zeros_stay_zeros_beside_large_numbers(name):
    x = torch.zeros(2, 64)
    x[0, 32:] = normal(32) * 1e30
    x[1, 3] = -0.0
    q = quantize(x, name)
    assert (q.scale_bytes[0, : 32 // formats.get(name).block] == 0).all()
    assert (q.scale_bytes[1] == 0).all()
    values = q.dequantize()
    assert torch.equal(values[1], torch.zeros(64))
    assert bool(torch.signbit(values[1, 3])) == (name != "mxint8")
    assert quantize(torch.zeros(64), name).dequantize().abs().max() == 0


def test_numbers_from_the_bug_reports():
    def values(entries, name="mxfp8_e4m3", mode="rceil"):
        return quantize(torch.tensor(entries), name, scale_mode=mode)

    assert [values([150.0], mode=mode).scale_bytes.item() for mode in ("rceil", "ceil")] == [126, 127]
    assert values([957.0], mode="floor").dequantize().item() == 896
    assert values([957.0]).dequantize().item() == 960
    assert values([127.99999], "mxfp8_e5m2", "floor").dequantize().item() == 112
    above = torch.tensor(448.0 * 2**10).nextafter(torch.tensor(math.inf))
    assert quantize(above[None], "mxfp8_e4m3").scale_bytes.item() == 138
    assert values([1e-37]).dequantize().item() == pytest.approx(1e-37, rel=2**-4)
    for k in (-133, -126, -120):  # all-small blocks: finite, and the sign is right
        x = torch.tensor([1.0, -1.0]) * 2.0**k
        same(roundtrip(x, "mxfp8_e4m3"), x)
    assert values([1.0, 0.25000006], "mxfp4_e2m1", "floor").dequantize().tolist() == [1.0, 0.25]
    assert roundtrip(torch.tensor([0.25000006, 0.25]), "e2m1").tolist() == [0.5, 0.0]
    assert roundtrip(torch.tensor([400.199585, 272.156555, 136.002075]), "fp8_e4m3").tolist() == [416.0, 288.0, 144.0]
    assert roundtrip(torch.tensor([126.2386, 31.6051, 1.97]), "fp8_e4m3").tolist() == [128.0, 32.0, 2.0]
    for scaled in range(449, 512):  # floor pushes these past max: saturated, never NaN
        assert values([float(scaled)], mode="floor").dequantize().item() == 448
    small = normal(64, 64) * 1e-7
    assert float((roundtrip(small, "mxfp8_e4m3") - small).norm() / small.norm()) < 2.8e-2


def test_floor_flattens_a_narrow_band_that_rceil_resolves():
    gains = torch.linspace(0.876, 0.999, 32)
    assert roundtrip(gains, "mxfp8_e4m3", scale_mode="floor").unique().tolist() == [0.875]
    assert roundtrip(gains, "mxfp8_e4m3").unique().tolist() == [0.875, 0.9375, 1.0]


def test_half_precision_inputs_are_widened_first():
    for dtype in (torch.bfloat16, torch.float16):
        x = (normal(16, 64) * 2.0 ** torch.randint(-10, 10, (16, 1), generator=torch.Generator().manual_seed(1))).to(
            dtype
        )
        for name in (*BLOCK, *NARROW):
            same(roundtrip(x, name), roundtrip(x.float(), name))
            assert torch.equal(quantize(x, name).codes, quantize(x.float(), name).codes)


def test_float64_is_not_rounded_through_float32():
    """Just above a tie, by less than float32 sees."""
    x = torch.tensor([1.0625 + 2.0**-40, 1.0], dtype=torch.float64)
    for name in ("mxfp8_e4m3", "fp8_e4m3"):
        assert roundtrip(x, name).tolist() == [1.125, 1.0]
        assert roundtrip(x.float(), name).tolist() == [1.0, 1.0]
    tie = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert roundtrip(tie, "bf16").item() == 1 + 2.0**-7
    assert roundtrip(torch.tensor([1e300], dtype=torch.float64), "mxfp8_e4m3").item() == 448 * 2.0**127


@pytest.mark.parametrize("name", [*BLOCK, *SCALAR])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_input_is_neither_changed_nor_aliased(name, dtype):
    x = normal(4, 64).to(dtype)
    before = x.clone()
    q, values = quantize(x, name), roundtrip(x, name)
    for result in (q.codes, values, q.dequantize()):
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        result.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", [*BLOCK, *SCALAR])
def test_no_gradient_runs_through_rounding(name):
    x = normal(4, 32).requires_grad_()
    assert not roundtrip(x, name).requires_grad
    assert not quantize(x, name).dequantize().requires_grad


@pytest.mark.parametrize("name", [*BLOCK, *SCALAR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_negated_view_is_what_it_shows(name, dtype):
    """The imaginary part of a conjugate is a view with the negative bit set."""
    x = torch.view_as_complex(normal(4, 32, 2, dtype=dtype)).conj().imag
    assert x.is_neg()
    assert not x.clone().is_neg()
    for axis in (0, 1):
        same(roundtrip(x, name, axis=axis), roundtrip(x.clone(), name, axis=axis))
        assert torch.equal(quantize(x, name, axis=axis).codes, quantize(x.clone(), name, axis=axis).codes)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_empty_tensors(shape):
    for name in (*BLOCK, *SCALAR):
        q = quantize(torch.empty(shape), name)
        assert isinstance(q, Quantized)
        assert q.dequantize().shape == roundtrip(torch.empty(shape), name).shape == shape


# Stochastic rounding


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4_e2m1", "fp8_e5m2", "bf16", "mxint8", "nvfp4"])
def test_stochastic_rounding_is_unbiased(name):
    """The mean of N draws is off by at most 5 σ/√N; over 256 entries that fails by chance once in 6000 runs."""
    draws = 1000
    x, generator = normal(256), torch.Generator().manual_seed(0)
    samples = roundtrip(x.expand(draws, 256), name, rounding="stochastic", generator=generator).double()
    q = quantize(x, name)
    element, scale = q.format, torch.ones(())
    if q.scale_bytes is not None:
        element = q.format.element
        scale = kernels.effective(q.scale_bytes, q.format, q.global_scale).repeat_interleave(q.format.block)
    quantum = torch.maximum(2 * element.unit_roundoff * x.abs(), element.smallest * scale)  # or one half of it
    inside = x.abs() <= element.max * scale  # NVFP4 rounds its scale to nearest, so the largest may saturate
    assert ((samples.mean(0) - x).abs() <= 5 * quantum / 2 / math.sqrt(draws))[inside].all()
    assert ((samples - x).abs() <= quantum).all()
    assert len(samples.unique(dim=0)) > 1


def test_stochastic_rounding_reproduces_from_the_generator_and_moves_it():
    x, generator = normal(64, 64), torch.Generator().manual_seed(3)
    state = generator.get_state()
    first, second = (roundtrip(x, "mxfp8_e4m3", rounding="stochastic", generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    generator.set_state(state)
    same(roundtrip(x, "mxfp8_e4m3", rounding="stochastic", generator=generator), first)
    q = quantize(x, "mxfp8_e4m3", rounding="stochastic", generator=generator)
    same(q.dequantize(), second)


@pytest.mark.parametrize("name", [*BLOCK, "fp8_e4m3", "bf16"])
def test_draws_follow_memory(name):
    """Equal values in another order of memory get the draws of that order, and the same as a contiguous copy has."""

    def rounded(x, axis=-1):
        generator = torch.Generator().manual_seed(3)
        return roundtrip(x, name, axis=axis, rounding="stochastic", generator=generator)

    x = normal(48, 64)
    turned = x.mT.contiguous().mT
    assert torch.equal(turned, x)
    assert not torch.equal(rounded(turned), rounded(x))
    same(rounded(turned), rounded(x.mT.contiguous(), axis=0).mT)
    same(rounded(turned.contiguous()), rounded(x))
    same(rounded(torch.stack([x, x])[1]), rounded(x))


@pytest.mark.parametrize("name", [*BLOCK, *NARROW, "bf16"])
def test_stochastic_rounding_leaves_what_is_represented(name):
    x = roundtrip(normal(8, 64), name)
    if name != "nvfp4":
        same(roundtrip(x, name, rounding="stochastic", generator=torch.Generator().manual_seed(0)), x)


def test_stochastic_rounding_of_a_midpoint_is_a_coin():
    """10⁴ tosses are within 3 σ of half, as 99.7 % of seeds are."""
    x = torch.full((10_000,), 1.0625)
    up = roundtrip(x, "fp8_e4m3", rounding="stochastic", generator=torch.Generator().manual_seed(0)) > 1.1
    assert abs(int(up.sum()) - 5000) < 3 * 50


# Measured facts


def relative(x, **kwargs):
    return float((roundtrip(x, **kwargs) - x).norm() / x.norm())


def test_errors_on_gaussian_data_are_the_known_ones():
    x = normal(4096, 1024)
    assert relative(x, format="mxfp8_e4m3") == pytest.approx(2.65e-2, rel=5e-3)
    assert relative(x, format="mxfp8_e4m3", scale_mode="ceil") == pytest.approx(2.65e-2, rel=5e-3)
    assert relative(x, format="mxfp8_e4m3", scale_mode="even") == pytest.approx(2.76e-2, rel=5e-3)
    q = quantize(x, "mxfp8_e4m3", scale_mode="floor")
    values = q.dequantize()
    assert float((values - x).norm() / x.norm()) == pytest.approx(2.94e-2, rel=5e-3)
    largest = (q.codes & 0x7F) == formats.FP8_E4M3.max_code
    saturated = largest & (x.abs() > values.abs())
    assert float(saturated.float().mean()) == pytest.approx(0.86e-2, rel=3e-2)
    assert relative(x, format="mxfp8_e5m2") == pytest.approx(5.29e-2, rel=5e-3)
    assert relative(x, format="mxfp6_e2m3") == pytest.approx(2.83e-2, rel=5e-3)
    assert relative(x, format="mxfp4_e2m1") == pytest.approx(0.1153, rel=5e-3)


def test_rceil_never_saturates_and_bounds_every_normal_element():
    x = graded(256, 256)
    for name in MX[:5]:
        element = formats.get(name).element
        q = quantize(x, name)
        scale = rounding.decode(q.scale_bytes, formats.E8M0).repeat_interleave(32, dim=1)
        assert (x.abs() <= element.max * scale).all()
        normal_ = x.abs() >= element.smallest_normal * scale
        error = (q.dequantize() - x).abs()
        assert (error[normal_] <= element.unit_roundoff * x.abs()[normal_]).all()


def test_graded_rows_tell_row_blocks_from_column_blocks_from_one_scale():
    """Share of elements flushed to zero; the Frobenius error is 2.65e-2 for all three."""
    x = graded(512, 512)
    e = math.ceil(math.log2(float(x.abs().max()) / 448))
    copies = {
        "row": roundtrip(x, "mxfp8_e4m3", axis=1),
        "column": roundtrip(x, "mxfp8_e4m3", axis=0),
        "tensor": roundtrip(x * 2.0**-e, "fp8_e4m3") * 2.0**e,
    }
    flushed = {name: float((values == 0).float().mean()) for name, values in copies.items()}
    assert flushed["row"] == 0
    assert flushed["column"] == pytest.approx(0.239, abs=2e-2)
    assert flushed["tensor"] == pytest.approx(0.318, abs=6e-2)  # 4 % more for each binade that the scale is larger
    for values in copies.values():
        assert float((values - x).norm() / x.norm()) == pytest.approx(2.65e-2, rel=2e-2)


@pytest.mark.parametrize(("beta", "share"), [(0.9, 0.715), (0.95, 0.540)])
def test_a_running_mean_stored_in_e4m3_stalls(beta, share):
    def stored(rounding, generator):
        m = torch.zeros(1024)
        for _ in range(math.ceil(8 / (1 - beta))):
            m = roundtrip(beta * m + (1 - beta) * g, "mxfp8_e4m3", rounding=rounding, generator=generator)
        return float((m / g).mean())

    g = torch.rand(1024, generator=torch.Generator().manual_seed(0)) + 0.5
    assert stored("nearest", None) == pytest.approx(share, abs=0.03)
    assert stored("stochastic", torch.Generator().manual_seed(1)) == pytest.approx(1.0, abs=0.02)


def test_storage_is_counted():
    q = quantize(normal(3, 40), "mxfp6_e3m2")
    assert q.nbytes == 3 * 40 * 6 // 8 + 3 * 2
    assert q.shape == (3, 40)
    assert quantize(normal(3, 40), "tf32").nbytes == -(-120 * 19 // 8)


def test_a_record_of_your_own_is_a_format():
    x = normal(4, 64)
    fine = relative(x, format=replace(formats.MXFP8_E4M3, block=8))
    assert fine == pytest.approx(relative(x, format="mxfp8_e4m3"), rel=5e-2)
    e5m3 = Format("e5m3", 5, 3, bias=15, top="finite")
    assert roundtrip(torch.tensor([1.0626, 1e9]), e5m3).tolist() == [1.125, e5m3.max]
    wide = Format("e11m2", 11, 2, bias=1023, top="ieee", saturates=False)
    assert roundtrip(torch.tensor([9 * 2.0**-149, 3.3e38]), wide).tolist() == [8 * 2.0**-149, math.inf]


# Refuses


@pytest.mark.usefixtures("unchecked")
def test_refuses():
    x = normal(4, 64)
    for call in (quantize, roundtrip):
        with pytest.raises(ValueError, match="unknown format 'mxfp8_e4m4': did you mean 'mxfp8_e4m3'"):
            call(x, "mxfp8_e4m4")
        with pytest.raises(ValueError, match="unknown scale mode 'flor': did you mean 'floor'"):
            call(x, "mxfp8_e4m3", scale_mode="flor")
        with pytest.raises(ValueError, match="unknown rounding 'stochastik': did you mean 'stochastic'"):
            call(x, "mxfp8_e4m3", rounding="stochastik")
        for dtype in (torch.int32, torch.complex64, torch.bool):
            with pytest.raises(ValueError, match=f"tensor to quantize is {dtype}"):
                call(x.to(dtype), "bf16")
        for axis in (2, -3):
            with pytest.raises(ValueError, match=rf"axis {axis} of a tensor of shape \(4, 64\): -2 to 1 exist"):
                call(x, "mxfp8_e4m3", axis=axis)
        with pytest.raises(ValueError, match="a single number, without an axis for the blocks of mxfp8_e4m3"):
            call(torch.tensor(1.0), "mxfp8_e4m3")
        with pytest.raises(ValueError, match=r"is torch\.sparse_coo: a dense one is needed"):
            call(x.to_sparse(), "mxfp8_e4m3")
        with pytest.raises(ValueError, match="needs a generator"):
            call(x, "bf16", rounding="stochastic")
        with pytest.raises(ValueError, match="takes no generator"):
            call(x, "bf16", generator=torch.Generator())
        for tile, axis, data in ((0, -1, x), (-32, -1, x), (32, 0, normal(2, 3, 4)), (32, 0, normal(5))):
            with pytest.raises(ValueError, match=f"tile {tile} with axis {axis}"):
                call(data, "mxfp8_e4m3", tile=tile, axis=axis)
        with pytest.raises(ValueError, match="NaN, which e2m1 cannot represent"):
            call(torch.tensor([math.nan]), "e2m1")
        with pytest.raises(ValueError, match="e8m0 is a format for scales"):
            call(x, "e8m0")
        for needed, generator in (("a generator, a torch.Generator, not None", None), (".* not 3", 3)):
            with pytest.raises(ValueError, match=f"rounding 'stochastic' needs {needed}"):
                call(x, "bf16", rounding="stochastic", generator=generator)
        for format in (None, 3, [], torch.bfloat16):
            with pytest.raises(ValueError, match=r"a format must be a name of formats\.known, a Format or a Block"):
                call(x, format)
        for name, wrong in itertools.product(("axis", "tile"), (1.0, "1", (0, 1), True)):
            with pytest.raises(ValueError, match="axis must be an integer, and tile an integer or None, not"):
                call(x, "mxfp8_e4m3", **{name: wrong})
        with pytest.raises(ValueError, match="axis must be an integer, and tile an integer or None, not None and None"):
            call(x, "mxfp8_e4m3", axis=None)
        for data, kind in (([1.0], "of type list"), (x.numpy(), "of type ndarray")):
            with pytest.raises(ValueError, match=f"the tensor to quantize is {kind}: float64"):
                call(data, "bf16")
        assert call(x, "bf16", axis=np.int64(1)) is not None
    with pytest.raises(ValueError, match="shares memory"):
        roundtrip(x, "bf16", out=x)
    with pytest.raises(ValueError, match=r"out is torch.float64 of shape \(4, 64\): torch.float32"):
        roundtrip(x, "bf16", out=x.double())
    with pytest.raises(ValueError, match=r"of shape \(4, 63\)"):
        roundtrip(x, "bf16", out=torch.empty(4, 63))
