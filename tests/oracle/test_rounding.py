"""The rational oracle of number formats: the vector file, second opinions, definitions, ties, refusals."""

import importlib
import json
import math
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.oracle import rounding
from muon_lab.oracle.rounding import BLOCKS, GRIDS, MODES, SCALE_MODES, block, decode, round_to, scale_exponent

VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "mx_vectors.json").read_text("utf-8"))
SIGNED = [name for name in GRIDS if name != "e8m0"]
SMALL = [name for name in GRIDS if GRIDS[name].bits <= 8]
ELEMENTS = ["fp8_e4m3", "fp8_e5m2", "e3m2", "e2m3", "e2m1", "int8"]
MX = [name for name in BLOCKS if name != "nvfp4"]
DETERMINISTIC = [mode for mode in MODES if mode != "stochastic"]
ML_DTYPES = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
    "e8m0": "float8_e8m0fnu",
    "bf16": "bfloat16",
}
GFLOAT = {
    "fp64": "binary64",
    "fp32": "binary32",
    "bf16": "bfloat16",
    "fp16": "binary16",
    "fp8_e4m3": "ocp_e4m3",
    "fp8_e5m2": "ocp_e5m2",
    "e3m2": "ocp_e3m2",
    "e2m3": "ocp_e2m3",
    "e2m1": "ocp_e2m1",
    "int8": "ocp_int8",
    "e8m0": "ocp_e8m0",
}
GFLOAT_MODES = {
    "nearest_even": "TiesToEven",
    "toward_zero": "TowardZero",
    "up": "TowardPositive",
    "down": "TowardNegative",
}
WHISKER = Fraction(1, 2**200)
FINER = Fraction(1, 2**1200)  # beside the ties of float64

rationals = st.fractions() | st.builds(
    lambda x, e: x * Fraction(2) ** e, st.fractions(-2, 2, max_denominator=10**6), st.integers(-160, 140)
)
elements = st.sampled_from(ELEMENTS)


def same(a, b):
    """Equality of floats in which NaN equals itself, and the zeros differ."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def largest(format):
    return GRIDS[format].magnitude(GRIDS[format].last)


def table(format):
    """Every finite number that rounding can make, ascending."""
    grid = GRIDS[format]
    codes = [grid.code(k, negative) for k in range(grid.last + 1) for negative in (True, False)]
    return sorted({decode(code, format).value for code in codes})


def probes(format, count=40, seed=0):
    """Points of the grid, ties, and their neighbours, of either sign, and beyond the ends, as exact rationals."""
    grid = GRIDS[format]
    inside = np.random.default_rng(seed).integers(0, grid.last + 1, count)
    for k in map(int, [*range(4), *inside, grid.last - 1, grid.last, grid.last + 1]):
        low, high = grid.magnitude(k), grid.magnitude(k + 1)
        for x in (low, (low + high) / 2, low + (high - low) / 3):
            for y in (x - WHISKER, x, x + WHISKER):
                yield y
                yield -y


def float32(count, seed, low=-150, high=128):
    """Float32 numbers of every binade, subnormals included."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore"):
        x = np.ldexp(rng.uniform(-2, 2, count), rng.integers(low, high, count)).astype(np.float32)
    return x[np.isfinite(x)]


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "bits", "top", "least_normal", "least"),
    [
        ("fp64", 64, (2 - Fraction(2) ** -52) * 2**1023, Fraction(2) ** -1022, Fraction(2) ** -1074),
        ("fp32", 32, (2 - Fraction(2) ** -23) * 2**127, Fraction(2) ** -126, Fraction(2) ** -149),
        ("tf32", 19, (2 - Fraction(2) ** -10) * 2**127, Fraction(2) ** -126, Fraction(2) ** -136),
        ("bf16", 16, (2 - Fraction(2) ** -7) * 2**127, Fraction(2) ** -126, Fraction(2) ** -133),
        ("fp16", 16, 65504, Fraction(2) ** -14, Fraction(2) ** -24),
        ("fp8_e4m3", 8, 448, Fraction(2) ** -6, Fraction(2) ** -9),
        ("fp8_e5m2", 8, 57344, Fraction(2) ** -14, Fraction(2) ** -16),
        ("e3m2", 6, 28, Fraction(1, 4), Fraction(1, 16)),
        ("e2m3", 6, Fraction(15, 2), 1, Fraction(1, 8)),
        ("e2m1", 4, 6, 1, Fraction(1, 2)),
    ],
)
def test_the_landmarks_of_each_floating_format_are_the_published_ones(format, bits, top, least_normal, least):
    grid = GRIDS[format]
    assert grid.bits == bits
    assert largest(format) == top
    assert decode(1, format).value == least
    assert decode(2**grid.mantissa_bits, format).value == least_normal
    assert (decode(0, format).value, decode(2 ** (bits - 1), format).negative) == (0, True)


def test_the_8_bit_integers_are_64ths_and_symmetric_and_the_scale_is_a_power_of_two_without_zero():
    assert largest("int8") == Fraction(127, 64)
    assert [decode(code, "int8").value for code in (1, 0xFF, 0x81, 0x80)] == [
        Fraction(1, 64),
        Fraction(-1, 64),
        Fraction(-127, 64),
        -2,
    ]
    assert round_to(-2, "int8").code == 0x81
    assert [decode(c, "e8m0").value for c in range(255)] == [Fraction(2) ** (c - 127) for c in range(255)]
    assert math.isnan(decode(255, "e8m0").value)


@pytest.mark.parametrize("format", [name for name in GRIDS if GRIDS[name].bits <= 19])
def test_every_number_of_a_format_is_a_fixed_point_of_every_mode(format):
    grid = GRIDS[format]
    stride = 1 if grid.bits <= 8 else 2 ** (grid.bits - 10) - 1
    for code in range(0, 2**grid.bits, stride):
        number = decode(code, format)
        if isinstance(number.value, float) or (format, code) == ("int8", 0x80):
            continue
        x = "-0" if number.negative and number.value == 0 else number.value
        for mode in MODES:
            assert round_to(x, format, mode, u=Fraction(99, 100) if mode == "stochastic" else None) == number


@pytest.mark.parametrize("format", [name for name in SMALL if name != "e8m0"])
def test_codes_count_magnitudes_upwards(format):
    grid = GRIDS[format]
    magnitudes = [grid.magnitude(k) for k in range(grid.last + 2)]
    assert magnitudes == sorted(set(magnitudes))


@pytest.mark.parametrize("format", GRIDS)
def test_nan_and_infinity_have_the_published_codes(format):
    nan = {"fp64": 0x7FF8 << 48, "fp32": 0x7FC00000, "tf32": 0x3FE00, "bf16": 0x7FC0, "fp16": 0x7E00}
    nan |= {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7E, "e8m0": 0xFF}
    inf = {"fp64": 0x7FF << 52, "fp32": 0x7F800000, "tf32": 0x3FC00, "bf16": 0x7F80, "fp16": 0x7C00, "fp8_e5m2": 0x7C}
    assert GRIDS[format].nan == nan.get(format)
    assert GRIDS[format].inf == inf.get(format)
    if format in nan:
        assert math.isnan(round_to(math.nan, format).value)
        assert round_to("-nan", format).code == nan[format]
        assert math.isnan(decode(nan[format], format).value)
    if format in inf:
        assert round_to(math.inf, format, saturate=False).code == inf[format]
        assert float(round_to(-math.inf, format, saturate=False)) == -math.inf
    assert round_to(math.inf, format).value == largest(format)


# --- matches the vector file and other libraries ----------------------------------------------------------------------


@pytest.mark.parametrize("format", MX)
def test_every_row_of_the_vector_file_is_reproduced_exactly(format):
    rows = [row for row in VECTORS["rows"] if row["format"] == format]
    assert rows
    for row in rows:
        made = block(row["inputs"], format, row["scale_mode"])
        assert made.scale_code == row["scale_code"], row["id"]
        assert made.codes == (row["codes"] and tuple(row["codes"])), row["id"]
        for value, approximate, text in zip(made.values, made.floats, row["dequant"], strict=True):
            wanted = float.fromhex(text)  # at most 53 bits, so exact
            assert same(approximate, wanted), (row["id"], approximate, text)
            assert math.isnan(wanted) or value == Fraction(wanted), (row["id"], value, text)
        if row["scale_exp"] is not None:
            assert made.scale == Fraction(2) ** row["scale_exp"], row["id"]


def test_the_vector_file_has_every_format_and_mode():
    seen = {(row["format"], row["scale_mode"]) for row in VECTORS["rows"]}
    assert seen == {(format, mode) for format in MX for mode in SCALE_MODES if format != "mxint8" or mode == "floor"}


@pytest.mark.parametrize("name", VECTORS["decode_tables"])
def test_the_decode_tables_are_reproduced(name):
    format = BLOCKS[name].element if name in BLOCKS else name
    wanted = VECTORS["decode_tables"][name]
    assert len(wanted) == 2 ** GRIDS[format].bits
    for code, text in enumerate(wanted):
        assert same(abs(float(decode(code, format))), abs(float.fromhex(text)))
        assert text == "nan" or same(float(decode(code, format)), float.fromhex(text))


@pytest.mark.parametrize("format", ML_DTYPES)
def test_ml_dtypes_decodes_every_code_alike(format):
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), ML_DTYPES[format]))
    bits = GRIDS[format].bits
    with np.errstate(invalid="ignore"):
        theirs = np.arange(2**bits, dtype=np.uint16 if bits > 8 else np.uint8).view(dtype).astype(np.float64)
    stride = 1 if bits <= 8 else 13
    for code in range(0, 2**bits, stride):
        assert same(abs(float(decode(code, format))), abs(theirs[code])), code
        assert np.isnan(theirs[code]) or np.signbit(theirs[code]) == decode(code, format).negative


@pytest.mark.parametrize("format", [name for name in ML_DTYPES if name != "e8m0"])
def test_ml_dtypes_rounds_float32_to_nearest_alike(format):
    """It has no saturation; formats without NaN and Inf saturate in both."""
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), ML_DTYPES[format]))
    grid = GRIDS[format]
    top = math.log2(largest(format))
    exact = [float(x) for x in probes(format) if abs(x) < 2**127 and float(x) == x]
    ties = np.array([x for x in exact if float(np.float32(x)) == x], np.float32)
    near = [np.nextafter(ties, np.float32(side)) for side in (-math.inf, math.inf)]
    x = np.concatenate([float32(1000, seed=1), float32(1000, 2, -20, 2 + int(min(top, 120))), ties, *near])
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = x.astype(dtype)
        back = theirs.astype(np.float64)
    for value, code, decoded in zip(x, theirs.view(f"u{dtype.itemsize}"), back, strict=True):
        ours = round_to(value, format, saturate=grid.nan is None)
        assert same(abs(float(ours)), abs(decoded)), value
        assert np.isnan(decoded) or ours.code == code, value


def test_numpy_rounds_float64_to_float16_and_float32_alike_and_decodes_alike():
    rng = np.random.default_rng(3)
    for format, dtype, low, high in (("fp16", np.float16, -30, 20), ("fp32", np.float32, -155, 130)):
        x = np.ldexp(rng.uniform(-2, 2, 2000), rng.integers(low, high, 2000))
        with np.errstate(over="ignore", under="ignore"):
            theirs = x.astype(dtype)
        for value, code in zip(x, theirs.view(f"u{theirs.itemsize}"), strict=True):
            assert round_to(value, format, saturate=False).code == code
            assert same(float(decode(int(code), format)), float(np.array(code).view(dtype)))


@pytest.mark.parametrize("format", GFLOAT)
def test_gfloat_decodes_alike(format):
    gfloat, formats = pytest.importorskip("gfloat"), importlib.import_module("gfloat.formats")
    info = getattr(formats, f"format_info_{GFLOAT[format]}")
    bits = GRIDS[format].bits
    rng = np.random.default_rng(4)
    for code in range(2**bits) if bits <= 8 else (int.from_bytes(rng.bytes(8), "big") % 2**bits for _ in range(500)):
        theirs = gfloat.decode_float(info, code).fval
        assert same(abs(float(decode(code, format))), abs(theirs)), code
        assert math.isnan(theirs) or same(float(decode(code, format)), theirs), code


@pytest.mark.parametrize("mode", DETERMINISTIC)
@pytest.mark.parametrize("format", [name for name in GFLOAT if name not in ("e8m0", "int8", "fp64")])
def test_gfloat_rounds_alike_saturating_and_not(format, mode):
    gfloat, formats = pytest.importorskip("gfloat"), importlib.import_module("gfloat.formats")
    info = getattr(formats, f"format_info_{GFLOAT[format]}")
    theirs = getattr(gfloat.RoundMode, GFLOAT_MODES[mode])
    top = min(int(math.log2(largest(format))), 120)
    values = [float(x) for x in probes(format) if float(x) == x]
    values += [float(x) for x in (*float32(300, seed=5), *float32(300, 6, -12, top + 2))]
    values += [math.inf, -math.inf, 0.0, -0.0, 2.0**-149, -(2.0**-126)]
    for x in values:
        for saturate in (True, False):
            try:
                wanted = gfloat.round_float(info, x, theirs, sat=saturate)
            except ValueError:
                with pytest.raises(ValueError, match="neither Inf nor NaN"):
                    round_to(x, format, mode, saturate=saturate)
                continue
            ours = float(round_to(x, format, mode, saturate=saturate))
            assert same(ours, wanted) or (math.isnan(ours) and math.isnan(wanted)), (x, saturate)


@pytest.mark.parametrize("format", ["fp8_e4m3", "e2m1"])
def test_gfloat_draws_alike(format):
    gfloat, formats = pytest.importorskip("gfloat"), importlib.import_module("gfloat.formats")
    info = getattr(formats, f"format_info_{GFLOAT[format]}")
    bits = 12
    for draw in (0, 1, 2**11 - 1, 2**11, 3000, 2**12 - 1):
        for i in range(-400, 400):
            x = i / 64  # few enough bits that the fraction of a cell is a multiple of 2^-12
            wanted = gfloat.round_float(info, x, gfloat.RoundMode.Stochastic, True, draw, bits)
            assert float(round_to(x, format, "stochastic", u=Fraction(draw, 2**bits))) == wanted


# --- definitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", SMALL)
def test_rounding_picks_the_nearest_of_the_whole_table(format):
    numbers = table(format)
    for x in probes(format):
        if format == "e8m0" and x < 0:
            continue
        distance = min(abs(x - v) for v in numbers)
        assert abs(round_to(x, format).value - x) == distance


@given(rationals, st.sampled_from(SIGNED))
def test_directed_modes_bracket_and_the_others_choose_between_them(x, format):
    top = largest(format)
    low, high = (round_to(x, format, mode).value for mode in ("down", "up"))
    inside = min(max(x, -top), top)
    assert low <= inside <= high
    assert (low == high) == (inside in (low, high))
    assert round_to(x, format, "toward_zero").value == (low if x > 0 else high)
    assert round_to(x, format).value in (low, high)
    assert round_to(x, format, "stochastic", u=Fraction(1, 3)).value in (low, high)


@given(rationals, st.sampled_from(SIGNED), st.sampled_from(MODES), st.fractions(0, 1).filter(lambda u: u < 1))
def test_negation_commutes_with_rounding_and_exchanges_up_and_down(x, format, mode, u):
    mirrored = {"up": "down", "down": "up"}.get(mode, mode)
    draw = u if mode == "stochastic" else None
    assert round_to(-x, format, mirrored, draw).value == -round_to(x, format, mode, draw).value


@given(rationals, rationals, st.sampled_from(SIGNED), st.sampled_from(MODES))
def test_rounding_is_monotone(x, y, format, mode):
    u = Fraction(3, 7) if mode == "stochastic" else None
    low, high = (round_to(z, format, mode, u).value for z in sorted((x, y)))
    assert low <= high


@pytest.mark.parametrize("format", SIGNED)
def test_a_tie_goes_to_the_even_code_and_a_whisker_beside_it_to_the_nearer(format):
    grid = GRIDS[format]
    for k in [*range(min(grid.last, 40)), *range(max(0, grid.last - 20), grid.last)]:
        tie = (grid.magnitude(k) + grid.magnitude(k + 1)) / 2
        for sign in (1, -1):
            whisker = FINER if format == "fp64" else WHISKER
            codes = [round_to(sign * x, format).code for x in (tie - whisker, tie, tie + whisker)]
            assert codes == [grid.code(j, sign < 0) for j in (k, k + k % 2, k + 1)]


@pytest.mark.parametrize("format", ELEMENTS)
def test_the_share_of_draws_that_round_away_is_the_fraction_of_the_cell(format):
    grid, draws = GRIDS[format], 64
    for k in (0, 1, grid.last // 2, grid.last - 1):
        low, high = grid.magnitude(k), grid.magnitude(k + 1)
        for i in range(0, draws, 7):
            x = low + (high - low) * Fraction(i, draws)
            for sign in (1, -1):
                made = [round_to(sign * x, format, "stochastic", u=Fraction(j, draws)).value for j in range(draws)]
                assert made.count(sign * high) == i
                assert made.count(sign * low) == draws - i
                assert sum(made) / draws == sign * x  # unbiased


@pytest.mark.parametrize(
    ("format", "x", "saturated", "bare"),
    [
        ("fp8_e4m3", 448, 448, 448),
        ("fp8_e4m3", 464, 448, 448),  # a tie with the absent 480; 448 has the even code
        ("fp8_e4m3", 464 + WHISKER, 448, math.nan),
        ("fp8_e4m3", 465, 448, math.nan),
        ("fp8_e4m3", 10**9, 448, math.nan),
        ("fp8_e4m3", math.inf, 448, math.nan),
        ("fp8_e5m2", 57344, 57344, 57344),
        ("fp8_e5m2", 61440 - WHISKER, 57344, 57344),
        ("fp8_e5m2", 61440, 57344, math.inf),  # a tie with the absent 65536, which is even
        ("fp8_e5m2", math.inf, 57344, math.inf),
        ("fp16", 65519, 65504, 65504),
        ("fp16", 65520, 65504, math.inf),
        ("e2m1", 7, 6, None),
        ("e2m1", math.inf, 6, None),
        ("int8", Fraction(255, 128) - WHISKER, Fraction(127, 64), Fraction(127, 64)),
        ("int8", Fraction(255, 128), Fraction(127, 64), None),
        ("e8m0", 2**127, 2**127, 2**127),
        ("e8m0", Fraction(3, 2) * 2**127, 2**127, math.nan),
    ],
)
def test_overflow_saturates_or_says_so(format, x, saturated, bare):
    for sign in (1, -1) if format != "e8m0" else (1,):
        assert round_to(sign * x, format).value == sign * saturated
        if bare is None:
            with pytest.raises(ValueError, match="neither Inf nor NaN"):
                round_to(sign * x, format, saturate=False)
        else:
            value = round_to(sign * x, format, saturate=False).value
            assert value == sign * bare or (math.isnan(bare) and math.isnan(value))


@pytest.mark.parametrize(("format", "beyond"), [("fp8_e4m3", math.nan), ("fp8_e5m2", math.inf), ("fp32", math.inf)])
def test_only_modes_that_go_away_from_zero_overflow(format, beyond):
    top = largest(format)
    for x in (top + WHISKER, 3 * top):
        for mode in ("toward_zero", "down"):
            assert round_to(x, format, mode, saturate=False).value == top
        for mode in ("toward_zero", "up"):
            assert round_to(-x, format, mode, saturate=False).value == -top
        for mode, sign in (("up", 1), ("down", -1)):
            value = round_to(sign * x, format, mode, saturate=False).value
            assert value == sign * beyond or (math.isnan(beyond) and math.isnan(value))


@pytest.mark.parametrize("format", SIGNED)
def test_the_sign_of_zero_is_kept_also_by_what_is_flushed(format):
    signed = format != "int8"
    for x in (-0.0, "-0x0.0p+0", "-0", Fraction(-1, 2**2000)):
        number = round_to(x, format)
        assert number.value == 0
        assert number.negative is signed
        assert math.copysign(1, float(number)) == (-1 if signed else 1)
        assert number.code == (2 ** (GRIDS[format].bits - 1) if signed else 0)
    assert round_to(0, format).code == round_to(Fraction(1, 2**2000), format).code == 0


def test_subnormal_float32_numbers_are_kept():
    for x in (2.0**-149, -3 * 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-133):
        assert round_to(x, "fp32").value == Fraction(x)
        assert float(round_to(np.float32(x), "fp32")) == x
        assert round_to(x, "fp8_e4m3").value == 0
        assert abs(round_to(x, "fp8_e4m3", "up" if x > 0 else "down").value) == Fraction(1, 512)


def test_a_detour_over_another_format_rounds_twice():
    x = Fraction(17, 16) + Fraction(1, 2**20)
    assert round_to(x, "fp8_e4m3").value == Fraction(9, 8)
    assert round_to(round_to(x, "bf16").value, "fp8_e4m3").value == 1


def test_the_scale_grid_has_no_zero_and_sends_ties_up():
    assert [round_to(x, "e8m0").code for x in (0, -0.0, Fraction(1, 2**140), Fraction(3, 4), 3, 2.9)] == [
        0,
        0,
        0,
        127,
        129,
        128,
    ]
    assert round_to(2.9, "e8m0", "up").code == 129


def test_all_spellings_of_a_number_are_one():
    for x in (0.15625, Fraction(5, 32), "0x1.4p-3", "0x.28", "0X0.28P0", "0.15625", "5/32", np.float32(0.15625)):
        assert round_to(x, "fp32").value == Fraction(5, 32)
    assert round_to(np.int64(-3), "bf16") == round_to("-0x3", "bf16") == round_to(-3, "bf16")
    assert float(round_to("0x1.00000000000000001p0", "fp64", "up")) == 1 + 2.0**-52  # more digits than a float has


# --- scales and blocks ------------------------------------------------------------------------------------------------


@given(st.builds(lambda x, e: x * Fraction(2) ** e, st.fractions(1, 2), st.integers(-170, 170)), elements)
def test_scale_exponents_obey_their_definitions_as_inequalities(a, format):
    two, top = Fraction(2), largest(format)
    emax = {"fp8_e4m3": 8, "fp8_e5m2": 15, "e3m2": 4, "e2m3": 2, "e2m1": 2, "int8": 0}[format]
    floor, ceil, rceil, even = (scale_exponent(a, format, mode) for mode in SCALE_MODES)
    assert two ** (floor + emax) <= a < two ** (floor + emax + 1)
    assert two ** (ceil + emax - 1) < a <= two ** (ceil + emax)
    assert top * two ** (rceil - 1) < a <= top * two**rceil
    threshold = 2 - two ** -(GRIDS[format].mantissa_bits + 1)
    assert even == floor + (a >= threshold * two ** (floor + emax))
    assert floor <= even <= rceil <= ceil


@pytest.mark.parametrize("format", MX)
@pytest.mark.parametrize("mode", SCALE_MODES)
def test_the_integer_formula_gives_the_byte_of_every_float32(format, mode):
    """byte = clamp(((bits + ADD) >> 23) - emax, 0, 254), ADD from the mantissa of the largest element.

    For INT8, whose emax is 0, the formula holds for normal numbers alone, except in floor.
    """
    grid, top = GRIDS[BLOCKS[format].element], largest(BLOCKS[format].element)
    emax = math.floor(math.log2(top))
    mantissa = int((top / 2**emax - 1) * 2**23)
    add = {"floor": 0, "ceil": 0x7FFFFF, "rceil": 0x7FFFFF - mantissa, "even": 1 << (22 - grid.mantissa_bits)}[mode]
    edges = [float(top) * 2.0**k for k in range(-140, 110, 18)] + [2.0**k for k in range(-149, 128, 12)]
    edges = np.array(edges, np.float32)
    near = [
        edges,
        np.nextafter(edges, np.float32(0)),
        np.nextafter(edges, np.float32(np.inf)),
        abs(float32(40, seed=7)),
    ]
    for a in np.concatenate(near):
        if a > 0 and (format != "mxint8" or mode == "floor" or a >= 2.0**-126):
            byte = min(max(((int(a.view(np.uint32)) + add) >> 23) - emax, 0), 254)
            assert block([a] + [0] * 31, format, mode).scale_code == byte, a


def test_a_subnormal_amax_needs_byte_zero_also_where_the_integer_formula_gives_one():
    a = 2.0**-127  # half the least normal number, bits 0x400000
    assert (0x400000 + 0x7FFFFF) >> 23 == 1
    assert scale_exponent(a, "int8", "ceil") == -127
    assert block([a] + [0] * 31, "mxint8", "ceil").scale_code == 0


@pytest.mark.parametrize("format", MX)
def test_rceil_never_saturates_and_floor_halves_a_cell_at_most(format):
    element = BLOCKS[format].element
    for x in float32(60, seed=8, low=-100, high=100):
        values = [x, x / 3, -x / 7] + [0.0] * 29
        made = block(values, format)
        for value, q, number in zip(values, made.values, made.elements, strict=True):
            k = min(GRIDS[element].split(number.code)[0], GRIDS[element].last - 1)
            cell = GRIDS[element].magnitude(k + 1) - GRIDS[element].magnitude(k)
            assert abs(Fraction(float(value)) - q) <= cell * made.scale / 2


@pytest.mark.parametrize("format", MX)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_anywhere_makes_a_block_of_nan(format, bad):
    for i in range(32):
        made = block([1.0] * i + [bad] + [2.0] * (31 - i), format)
        assert made.scale_code == 255
        assert made.codes is None
        assert all(math.isnan(x) for x in (made.scale, *made.values, *made.floats))


@pytest.mark.parametrize("format", MX)
def test_a_zero_block_has_scale_byte_zero_and_keeps_signs(format):
    made = block([0.0, -0.0] * 16, format)
    negative = 0 if format == "mxint8" else 2 ** (GRIDS[BLOCKS[format].element].bits - 1)
    assert (made.scale_code, made.scale) == (0, Fraction(1, 2**127))
    assert made.codes == (0, negative) * 16
    assert math.copysign(1, made.floats[1]) == (1 if format == "mxint8" else -1)


def test_the_scale_exponent_is_clamped_at_both_ends():
    assert block([2.0**-149] + [0] * 31, "mxfp8_e4m3").scale_code == 0
    assert block([Fraction(2) ** 400] + [0] * 31, "mxfp8_e4m3").scale_code == 254
    assert block([Fraction(2) ** 400] + [0] * 31, "mxfp8_e4m3").values[0] == 448 * 2**127
    assert block([2.0**-135] + [0] * 31, "mxfp8_e4m3").values[0] == Fraction(1, 2**135)


@pytest.mark.parametrize("mode", SCALE_MODES)
def test_floor_maps_the_last_bin_to_one_number_and_the_round_up_modes_do_not(mode):
    gains = [Fraction(7, 8) + Fraction(i, 256) for i in range(1, 32)] + [Fraction(255, 256)]
    distinct = set(block(gains, "mxfp8_e4m3", mode).values)
    assert distinct == ({Fraction(7, 8)} if mode == "floor" else {Fraction(k, 16) for k in (14, 15, 16)})


def test_block_elements_are_drawn_with_their_own_numbers():
    values = [448] + [Fraction(17)] * 31  # between 16 and 18
    u = [Fraction(i, 32) for i in range(32)]
    made = block(values, "mxfp8_e4m3", mode="stochastic", u=u)
    assert made.values[1:] == tuple(18 if i >= 16 else 16 for i in range(1, 32))
    assert block(values, "mxfp8_e4m3", mode="down").values[1:] == (16,) * 31


@given(st.permutations(range(32)), st.sampled_from(MX), st.sampled_from(SCALE_MODES), st.integers(-60, 60))
def test_permutations_and_powers_of_two_commute_with_quantization(order, format, mode, e):
    values = [Fraction(int(k), 1000) for k in np.random.default_rng(9).integers(-(10**6), 10**6, 32)]
    plain = block(values, format, mode)
    moved = block([values[i] * Fraction(2) ** e for i in order], format, mode)
    assert moved.scale == plain.scale * Fraction(2) ** e
    assert moved.codes == tuple(plain.codes[i] for i in order)


@pytest.mark.parametrize("format", MX)
@pytest.mark.parametrize("mode", SCALE_MODES)
def test_quantization_is_idempotent_in_value(format, mode):
    for seed in range(20):
        once = block(list(np.random.default_rng(seed).standard_normal(32)), format, mode).values
        assert block(once, format, mode).values == once


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def test_the_scale_of_an_nvfp4_tensor_is_the_float32_quotient():
    for a in (1.0, 0.1, 1e-20, 3e38):
        s = rounding.nvfp4_scale(a)
        assert float(s) == float(np.float32(a / 2688))  # float64 is wide enough for these four
    assert (rounding.nvfp4_scale(0).code, math.isnan(rounding.nvfp4_scale(math.nan).value)) == (0, True)


def test_the_block_with_the_largest_number_has_the_largest_nvfp4_scale():
    for a in float32(50, seed=10, low=-100, high=120):
        s = rounding.nvfp4_scale(abs(a)).value
        made = rounding.nvfp4_block([a, -a / 2] + [0.0] * 14, s)
        assert made.scale == 448 * s
        assert made.scale_code == 0x7E
        assert made.codes[0] in (0b0111, 0b1111)


def test_nvfp4_values_are_the_product_of_two_scales_and_an_element():
    values = [Fraction(k) for k in (6, -4, 3, 2, 1, 0, *range(-5, 5))]
    made = rounding.nvfp4_block(values, 1)
    assert (made.scale, made.size) == (1, 16)
    assert made.values[:6] == (6, -4, 3, 2, 1, 0)
    assert all(q == round_to(v, "e2m1").value for v, q in zip(values, made.values, strict=True))


def test_a_zero_scale_at_either_level_makes_signed_zeros():
    flushed = rounding.nvfp4_block([-(2.0**-20)] + [2.0**-21] * 15, 1)  # far below the least E4M3 scale
    absent = rounding.nvfp4_block([-1.0] + [0.0] * 15, 0)
    for made in (flushed, absent):
        assert (made.scale_code, made.scale) == (0, 0)
        assert made.codes == (0b1000, *[0] * 15)
        assert set(made.values) == {0}
        assert math.copysign(1, made.floats[0]) == -1


@pytest.mark.parametrize(("bad", "s"), [(math.nan, 1), (math.inf, 1), (1.0, math.nan), (1.0, math.inf)])
def test_nvfp4_blocks_with_bad_numbers_or_scales_are_nan(bad, s):
    made = rounding.nvfp4_block([bad] + [1.0] * 15, s)
    assert (made.scale_code, made.codes) == (0x7F, None)
    assert all(map(math.isnan, made.values))


# --- refuses ----------------------------------------------------------------------------------------------------------

ONES = [1.0] * 32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: round_to(1, "fp8e4m3"), "unknown format 'fp8e4m3': did you mean 'fp8_e4m3'"),
        (lambda: decode(0, "e2m2"), "unknown format 'e2m2'.*Known: fp64, fp32"),
        (lambda: round_to(1, "bf16", "nearest"), "unknown rounding mode 'nearest': did you mean 'nearest_even'"),
        (lambda: round_to(1, "bf16", "stochastic"), "u is None for the rounding mode 'stochastic', needed"),
        (lambda: round_to(1, "bf16", u=0.5), "u is 0.5 for the rounding mode 'nearest_even'"),
        (lambda: round_to(1, "bf16", "stochastic", u=1), r"u is 1, needed a number in \[0, 1\)"),
        (lambda: round_to(1, "bf16", "stochastic", u=-0.1), "u is -0.1, needed"),
        (lambda: round_to(1, "bf16", "stochastic", u=math.nan), "u is nan, needed"),
        (lambda: round_to("one", "bf16"), "x is 'one' of type str, needed a real number"),
        (lambda: round_to("--1", "bf16"), "x is '--1' of type str"),
        (lambda: round_to("0x", "bf16"), "x is '0x' of type str"),
        (lambda: round_to(1j, "bf16"), "x is 1j of type complex"),
        (lambda: round_to(None, "bf16"), "x is None of type NoneType"),
        (lambda: round_to(math.nan, "e2m1"), "x is NaN, needed a number for e2m1, which has no NaN"),
        (lambda: round_to(9, "e3m2", saturate=False) and round_to(99, "e3m2", saturate=False), "neither Inf nor NaN"),
        (lambda: round_to(-1, "e8m0"), "x is -1, needed one that is not negative for e8m0"),
        (lambda: round_to(-math.inf, "e8m0"), "x is -inf, needed one that is not negative"),
        (lambda: decode(256, "fp8_e4m3"), "code is 256, needed 0 to 255 for fp8_e4m3"),
        (lambda: decode(-1, "e2m1"), "code is -1, needed 0 to 15 for e2m1"),
        (lambda: scale_exponent(0, "e2m1", "floor"), "amax is 0, needed a positive finite number"),
        (lambda: scale_exponent(math.inf, "e2m1", "floor"), "amax is inf, needed"),
        (lambda: scale_exponent(1, "mxfp9", "floor"), "unknown format 'mxfp9'"),
        (lambda: scale_exponent(1, "e2m1", "rciel"), "unknown scale mode 'rciel': did you mean 'rceil'"),
        (lambda: block(ONES, "mxfp8"), "unknown block format 'mxfp8': did you mean 'mxfp8_e"),
        (lambda: block(ONES, "mxint8", "round"), "unknown scale mode 'round'"),
        (lambda: block(ONES, "nvfp4"), "nvfp4 has a second scale, needed nvfp4_block"),
        (lambda: block(ONES[1:], "mxint8"), "block: values has 31 numbers, needed 32"),
        (lambda: block(ONES, "mxint8", mode="stochastic"), "u is None for the rounding mode 'stochastic'"),
        (lambda: block(ONES, "mxint8", mode="stochastic", u=[0]), "block: u has 1 numbers, needed 32"),
        (lambda: block(ONES, "mxint8", u=[0] * 32), "u is 0 for the rounding mode 'nearest_even'"),
        (lambda: rounding.nvfp4_block(ONES, 1), "nvfp4_block: values has 32 numbers, needed 16"),
        (lambda: rounding.nvfp4_block(ONES[:16], -1), "tensor_scale is -1, needed one that is not negative"),
        (lambda: rounding.nvfp4_scale(-1), "nvfp4_scale: amax is -1, needed a magnitude"),
    ],
)
def test_refusals_say_what_was_given_and_needed(call, message):
    with pytest.raises(ValueError, match=message):
        call()
