"""Formats as data: every fact against the standard's tables, and against two libraries that know them too."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from muon_lab.arithmetic import formats, rounding, roundtrip
from muon_lab.arithmetic.formats import BlockFormat, Format

VECTORS = json.loads((Path(__file__).parent.parent / "golden" / "mx_vectors.json").read_text("utf-8"))
SCALARS = [name for name in formats.known() if isinstance(formats.get(name), Format)]
FLOATS = [name for name in SCALARS if name not in ("int8", "e8m0")]
BLOCKS = [name for name in formats.known() if name not in SCALARS]
NARROW = [name for name in SCALARS if formats.get(name).bits <= 19]
ML_DTYPES = {
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
}
GFLOAT = {
    "fp64": "format_info_binary64",
    "fp32": "format_info_binary32",
    "bf16": "format_info_bfloat16",
    "fp16": "format_info_binary16",
    "fp8_e4m3": "format_info_ocp_e4m3",
    "fp8_e5m2": "format_info_ocp_e5m2",
    "e3m2": "format_info_ocp_e3m2",
    "e2m3": "format_info_ocp_e2m3",
    "e2m1": "format_info_ocp_e2m1",
    "e8m0": "format_info_ocp_e8m0",
}


def test_facts_are_those_of_the_standard():
    """OCP MX v1.0, tables 1-6: bits, emax, max, smallest normal, smallest subnormal."""
    table = {
        "fp8_e4m3": (8, 8, 448, -6, -9),
        "fp8_e5m2": (8, 15, 57344, -14, -16),
        "e3m2": (6, 4, 28, -2, -4),
        "e2m3": (6, 2, 7.5, 0, -3),
        "e2m1": (4, 2, 6, 0, -1),
        "int8": (8, 0, 127 / 64, 0, -6),
        "e8m0": (8, 127, 2.0**127, -127, -127),
    }
    for name, (bits, emax, largest, normal, smallest) in table.items():
        format = formats.get(name)
        assert (format.bits, format.emax, format.max) == (bits, emax, largest)
        assert (format.smallest_normal, format.smallest) == (2.0**normal, 2.0**smallest)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)],
)
def test_facts_are_those_of_torch(name, dtype):
    format, info = formats.get(name), torch.finfo(dtype)
    assert (format.bits, format.max, format.smallest_normal) == (info.bits, info.max, info.tiny)
    assert 2 * format.unit_roundoff == info.eps


@pytest.mark.parametrize("name", ML_DTYPES)
def test_facts_and_codes_are_those_of_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np = pytest.importorskip("numpy")
    format, dtype = formats.get(name), getattr(ml_dtypes, ML_DTYPES[name])
    info = ml_dtypes.finfo(dtype)
    assert format.bits == info.bits
    assert format.max == float(info.max)
    assert format.smallest_normal == float(info.smallest_normal)
    assert format.smallest == float(info.smallest_subnormal)
    assert 2 * format.unit_roundoff == float(info.eps)
    codes = np.arange(format.codes, dtype=np.uint16 if format.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = codes.view(dtype).astype(np.float64).tolist()
    same([format.decode(int(code)) for code in codes], expected)


@pytest.mark.parametrize("name", GFLOAT)
def test_facts_and_codes_are_those_of_gfloat(name):
    gfloat = pytest.importorskip("gfloat")
    from gfloat import formats as theirs

    format, info = formats.get(name), getattr(theirs, GFLOAT[name])
    assert (format.bits, format.max, format.smallest, format.bias) == (info.bits, info.max, info.smallest, info.bias)
    assert format.emax == info.emax or name == "fp64"  # whose logarithm theirs rounds up to 1024
    assert sum(map(len, format.nan_codes)) == info.num_nans
    edges = {
        0,
        1,
        format.codes // 2,
        format.codes - 1,
        format.max_code,
        *format.inf_codes,
        *range(256),
        *range(65408, 65536),
    }
    for code in edges | {format.max_code + 1, *(codes.start for codes in format.nan_codes)}:
        if 0 <= code < format.codes:
            same([format.decode(code)], [gfloat.decode_float(info, code).fval])


@pytest.mark.parametrize("table", VECTORS["decode_tables"])
def test_decode_tables_are_exact(table):
    record = formats.get(table)
    format = record if isinstance(record, Format) else record.element
    expected = [float.fromhex(value) for value in VECTORS["decode_tables"][table]]
    same([format.decode(code) for code in range(format.codes)], expected)


@pytest.mark.parametrize("name", NARROW)
def test_tensors_decode_as_the_definition_does(name):
    format = formats.get(name)
    codes = range(format.codes) if format.bits <= 8 else range(0, format.codes, 37)
    same(rounding.decode(torch.tensor(codes), format).tolist(), [format.decode(code) for code in codes])
    same(rounding.decoder(format)(torch.tensor(codes)).tolist(), [format.decode(code) for code in codes])


@pytest.mark.parametrize("name", [name for name in NARROW if name != "e8m0"])
@pytest.mark.parametrize("carrier", [rounding.SINGLE, rounding.DOUBLE])
def test_encode_inverts_decode_on_every_code(name, carrier):
    format = formats.get(name)
    codes = torch.arange(format.codes)
    values = rounding.decode(codes, format, carrier)
    keep = ~values.isnan()
    if name == "int8":
        keep[0x80] = False  # -2 is never made
    assert torch.equal(rounding.encode(values[keep], format).long(), codes[keep])
    nan = rounding.encode(values[values.isnan()], format)
    assert rounding.decode(nan, format).isnan().all()


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_wide_codes_are_the_bits_of_the_number(name):
    values = [0.0, -0.0, 1.0, -1.5, formats.get(name).smallest, -formats.get(name).max, math.inf, -math.inf]
    x = torch.tensor(values, dtype=torch.float64)
    codes = rounding.encode(x, formats.get(name))
    expected = x.view(torch.int64) if name == "fp64" else x.float().view(torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(codes, expected)
    same(rounding.decode(codes, formats.get(name)).tolist(), values)


@pytest.mark.parametrize("name", SCALARS)
def test_properties_agree_with_decoding(name):
    format = formats.get(name)
    assert format.decode(format.max_code) == format.max
    assert math.frexp(format.max)[1] - 1 == format.emax
    first = 1 if format.subnormals else 0
    assert format.decode(first) == format.smallest
    assert all(math.isinf(format.decode(code)) for code in format.inf_codes)
    assert all(math.isnan(format.decode(codes[k])) for codes in format.nan_codes for k in (0, -1))
    assert format.nan_code is None or math.isnan(format.decode(format.nan_code))
    one = format.bias << format.mantissa_bits
    gap = Fraction(format.decode(one + 1)) - 1 if format.decode(one) == 1 and format.mantissa_bits else None
    assert gap in (None, 2 * Fraction(format.unit_roundoff))


def test_block_formats_are_those_of_the_standard():
    sizes = {name: (formats.get(name).block, formats.get(name).bits) for name in BLOCKS}
    assert sizes == {
        "mxfp8_e4m3": (32, 8.25),
        "mxfp8_e5m2": (32, 8.25),
        "mxfp6_e3m2": (32, 6.25),
        "mxfp6_e2m3": (32, 6.25),
        "mxfp4_e2m1": (32, 4.25),
        "mxint8": (32, 8.25),
        "nvfp4": (16, 4.5),
    }


def test_records_hold_facts_only():
    """A format made from the same facts is the same format, and a variant is one replaced fact away."""
    assert Format("fp8_e4m3", 4, 3, bias=7, top="nan") == formats.FP8_E4M3
    ieee = replace(formats.FP8_E4M3, top="ieee")
    assert (ieee.max, ieee.emax, len(ieee.nan_codes[0]), ieee.inf_codes) == (240.0, 7, 7, (0x78, 0xF8))


def test_records_pass_where_names_do():
    for name in formats.known():
        record = formats.get(name)
        assert formats.get(record) is record
    own = Format("e5m3", 5, 3, bias=15, top="finite")
    for of in (formats.get, formats.of_numbers, formats.of_results):
        assert of(own) is own
    assert formats.of_numbers("nvfp4") is formats.NVFP4
    assert formats.of_results("int8") is formats.INT8


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("of", [formats.get, formats.of_numbers, formats.of_results])
@pytest.mark.parametrize("wrong", [None, 3, 8.0, [], {}, torch.bfloat16, Format, b"bf16"])
def test_what_is_neither_a_name_nor_a_record_is_refused(of, wrong):
    with pytest.raises(ValueError, match=r"a format must be a name of formats\.known, a Format or a BlockFormat, not"):
        of(wrong)


def test_refuses():
    with pytest.raises(ValueError, match="unknown format 'bf61': did you mean 'bf16'"):
        formats.get("bf61")
    for scales in ("e8m0", replace(formats.E8M0, name="e8m0")):
        with pytest.raises(ValueError, match="e8m0 is a format for scales: it has no sign and no zero"):
            formats.of_numbers(scales)
    with pytest.raises(ValueError, match="since blocks would need an axis, got 'nvfp4'"):
        formats.of_results(formats.NVFP4)
    with pytest.raises(ValueError, match="code 256 of fp8_e4m3: there are only 0 to 255"):
        formats.FP8_E4M3.decode(256)
    with pytest.raises(ValueError, match="0 exponent bits"):
        Format("e0m3", 0, 3, bias=0, top="finite")
    with pytest.raises(ValueError, match="no mantissa bit"):
        Format("e5m0", 5, 0, bias=15, top="ieee")
    with pytest.raises(ValueError, match="neither Inf nor NaN"):
        Format("e2m1", 2, 1, bias=1, top="finite", saturates=False)
    for block in (0, -32):
        with pytest.raises(ValueError, match=f"has {block} elements a block: at least 1"):
            replace(formats.MXFP8_E4M3, block=block)
    with pytest.raises(ValueError, match="bf16 of 16 bits: at most 8"):
        BlockFormat("mxbf16", formats.BF16, 32, formats.E8M0)
    with pytest.raises(ValueError, match="scale"):
        BlockFormat("odd", formats.E2M1, 32, formats.E3M2)
    with pytest.raises(ValueError, match="global"):
        BlockFormat("odd", formats.E2M1, 32, formats.E8M0, global_scale=True)


def same(ours, theirs):
    """Demand equal numbers, sign of zero included, NaN equal to itself."""
    for ours_, theirs_ in zip(ours, theirs, strict=True):
        assert (math.isnan(ours_) and math.isnan(theirs_)) or (
            ours_ == theirs_ and math.copysign(1, ours_) == math.copysign(1, theirs_)
        ), (ours_, theirs_)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"exponent_bits": 12, "bias": 2047}, "12 exponent bits and 3 mantissa bits: at most 11 and 52"),
        ({"mantissa_bits": 53}, "4 exponent bits and 53 mantissa bits: at most 11 and 52"),
        ({"exponent_bits": 11, "bias": 1023}, "exponents from -1022 to 1024, beyond those of float64"),
        ({"bias": 1024}, "exponents from -1023 to -1009, beyond those of float64"),
        ({"bias": 500}, "exponents from -499 to -485, of which float32 tensors hold none"),
        ({"exponent_bits": 1, "mantissa_bits": 0, "bias": 0}, "has no number above zero"),
    ],
)
def test_formats_whose_numbers_nobody_holds_are_refused(given, sentence):
    facts = {"name": "own", "exponent_bits": 4, "mantissa_bits": 3, "bias": 7, "top": "nan"}
    assert Format(**facts).max == 448.0
    with pytest.raises(ValueError, match=sentence):
        Format(**facts | given)


def test_elements_have_a_sign():
    with pytest.raises(ValueError, match="block format 'own' has elements of e8m0, which has no sign"):
        BlockFormat("own", formats.E8M0, 32, formats.E8M0)


def test_arguments_of_other_types_are_refused_in_one_sentence():
    """In a process of its own, without the type checks of the tests."""
    code = """
from muon_lab.arithmetic.formats import E2M1, E8M0, MXINT8, BlockFormat, Format
scalar = {"name": "own", "exponent_bits": 4, "mantissa_bits": 3, "bias": 7, "top": "nan"}
blocks = {"name": "own", "element": E2M1, "block": 32, "scale": E8M0}
for kind, facts, given in (
    (Format, scalar, {"exponent_bits": 4.5, "mantissa_bits": True, "bias": "7", "top": "nonsense", "sign": None,
                      "subnormals": 1, "saturates": "no", "name": 3}),
    (BlockFormat, blocks, {"element": "e2m1", "scale": MXINT8, "block": 32.0, "global_scale": None, "name": None}),
    (BlockFormat, blocks, {"block": "32"}),
):
    for parameter, wrong in given.items():
        try:
            kind(**facts | {parameter: wrong})
        except ValueError as error:
            print(error)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split("BlockFormat(")[0] for line in answer.stdout.splitlines()] == [
        "exponent_bits of format 'own' must be an integer, not 4.5",
        "mantissa_bits of format 'own' must be an integer, not True",
        "bias of format 'own' must be an integer, not '7'",
        "top of format 'own' must be 'ieee' or 'nan' or 'finite', not 'nonsense'",
        "sign of format 'own' must be 'bit' or 'complement' or 'none', not None",
        "subnormals of format 'own' must be True or False, not 1",
        "saturates of format 'own' must be True or False, not 'no'",
        "name of a format must be a text, not 3",
        "element of block format 'own' must be a Format, such as formats.get('e2m1'), not 'e2m1'",
        "scale of block format 'own' must be a Format, such as formats.get('e2m1'), not ",
        "block of block format 'own' must be an integer, not 32.0",
        "global_scale of block format 'own' must be True or False, not None",
        "name of a block format must be a text, not None",
        "block of block format 'own' must be an integer, not '32'",
    ]


def test_the_widest_own_formats_round_at_their_ends():
    """Every format that is accepted rounds its largest and its smallest number to themselves, in float64."""
    for own in (
        Format("wide", 10, 9, bias=511, top="ieee"),
        Format("low", 4, 3, bias=127, top="nan"),
        Format("high", 8, 7, bias=0, top="finite"),
    ):
        ends = torch.tensor([own.max, -own.smallest], dtype=torch.float64)
        assert torch.equal(roundtrip(ends, own), ends)
