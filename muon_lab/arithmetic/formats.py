r"""Number formats as data: a few independent facts each, everything else by formula.

A code with exponent field :math:`E` and fraction field :math:`F` (:math:`M` bits) has the value

.. math:: 2^{E - bias}\,(1 + F / 2^M), \qquad\text{or}\qquad 2^{1 - bias}\,F / 2^M \quad\text{if } E = 0,

and what its highest codes mean is a fact of the format. An int8 element is the same formula with one exponent bit: its
magnitudes are evenly spaced because the only normal binade has the spacing of the subnormal one.

References
----------
OCP Microscaling Formats (MX) v1.0, tables 1-7; OCP 8-bit floating point (OFP8) rev. 1.0, tables 1-3; IEEE 754-2019,
section 3. The facts are checked against ml_dtypes and gfloat in the tests.
"""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from muon_lab.nearest import unknown

Top = Literal["ieee", "nan", "finite"]
Sign = Literal["bit", "complement", "none"]

#: Fraction bits and largest exponents of float64, in which all is decided, and of float32, in which tensors are kept.
_FRACTION, _LARGEST, _LARGEST_SINGLE = 52, 1023, 127


@dataclass(frozen=True)
class Format:
    """One number format.

    Parameters
    ----------
    name : str
        What it is called in case files.
    exponent_bits, mantissa_bits : int
        Width of the two fields; the leading 1 of normal numbers is not stored.
    bias : int
        Subtracted from the exponent field.
    top : "ieee", "nan" or "finite"
        What the highest codes mean: the whole top exponent is Inf and NaN; the single code of all ones is NaN; or every
        code is a number.
    sign : "bit", "complement" or "none"
        A sign bit on top, two's complement of the magnitude, or no negative numbers.
    subnormals : bool
        Whether exponent field 0 holds zero and the subnormals. Scales have neither.
    saturates : bool
        Whether conversion clamps to the largest number, as OFP8 does by default, or goes to Inf (NaN without one).

    Raises
    ------
    ValueError
        If an argument has another type or value than these, if a field has too few bits, if no code is left for what
        conversion has to write, or if float64 cannot hold the numbers or float32 holds none of them.

    Examples
    --------
    >>> e5m3 = Format("e5m3", exponent_bits=5, mantissa_bits=3, bias=15, top="finite")
    >>> e5m3.bits, e5m3.emax, e5m3.max
    (9, 16, 122880.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: Top
    sign: Sign = "bit"
    subnormals: bool = True
    saturates: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        if self.exponent_bits < 1 or self.mantissa_bits < 0 or self.bias < 0:
            raise ValueError(
                f"format {self.name!r} has {self.exponent_bits} exponent bits, {self.mantissa_bits} mantissa bits and "
                f"bias {self.bias}: at least 1, 0 and 0 are needed"
            )
        if self.top == "ieee" and self.mantissa_bits == 0:
            raise ValueError(f"format {self.name!r} has Inf but no mantissa bit that could tell NaN from it")
        if self.top == "finite" and not self.saturates:
            raise ValueError(f"format {self.name!r} has neither Inf nor NaN, so it has to saturate")
        if self.max_code < self.subnormals:
            raise ValueError(f"format {self.name!r} has no number above zero: more bits are needed")
        self._check_range()

    def _check_types(self) -> None:
        """Raise ``ValueError`` for an argument of another type, or a text that is no choice."""
        if not isinstance(self.name, str):
            raise ValueError(f"name of a format must be a text, not {self.name!r}")
        for parameter in ("exponent_bits", "mantissa_bits", "bias"):
            if not _is_integer(given := getattr(self, parameter)):
                raise ValueError(f"{parameter} of format {self.name!r} must be an integer, not {given!r}")
        for parameter, choices in (("top", get_args(Top)), ("sign", get_args(Sign)), ("subnormals", (True, False))):
            given = getattr(self, parameter)
            if not isinstance(given, type(choices[0])) or given not in choices:
                needed = " or ".join(map(repr, choices))
                raise ValueError(f"{parameter} of format {self.name!r} must be {needed}, not {given!r}")
        if not isinstance(self.saturates, bool):
            raise ValueError(f"saturates of format {self.name!r} must be True or False, not {self.saturates!r}")

    def _check_range(self) -> None:
        """Raise ``ValueError`` for numbers beyond float64, or which float32 tensors cannot keep."""
        if self.mantissa_bits > _FRACTION or self.exponent_bits > 11:
            raise ValueError(
                f"format {self.name!r} has {self.exponent_bits} exponent bits and {self.mantissa_bits} mantissa bits: "
                f"at most 11 and {_FRACTION}, those of float64, are possible"
            )
        if self.emin <= -_LARGEST or self.emax > _LARGEST:
            raise ValueError(
                f"format {self.name!r} with bias {self.bias} has exponents from {self.emin} to {self.emax}, beyond "
                f"those of float64"
            )
        if self.emax < -_LARGEST_SINGLE or self.emin > _LARGEST_SINGLE:
            raise ValueError(
                f"format {self.name!r} with bias {self.bias} has exponents from {self.emin} to {self.emax}, of which "
                f"float32 tensors hold none"
            )

    @property
    def bits(self) -> int:
        r"""Width of a code, :math:`1 + E + M`, without the 1 if there is no sign."""
        return (self.sign != "none") + self.exponent_bits + self.mantissa_bits

    @property
    def codes(self) -> int:
        r"""Number of codes, :math:`2^{bits}`."""
        return 2**self.bits

    @property
    def max_code(self) -> int:
        r"""Code of the largest number: :math:`2^{E+M} - 1` less the codes that mean Inf or NaN."""
        reserved = {"ieee": 2**self.mantissa_bits, "nan": 1, "finite": 0}[self.top]
        return 2 ** (self.exponent_bits + self.mantissa_bits) - 1 - reserved

    @property
    def emax(self) -> int:
        r"""Exponent of the largest number, :math:`\lfloor\log_2 max\rfloor`: its exponent field less the bias."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def emin(self) -> int:
        r"""Exponent of the smallest normal number: :math:`1 - bias`, or :math:`-bias` without subnormals."""
        return self.subnormals - self.bias

    @property
    def max(self) -> float:
        """The largest number.

        Examples
        --------
        >>> [get(name).max for name in ("fp8_e4m3", "fp8_e5m2", "e3m2", "e2m3", "e2m1", "int8")]
        [448.0, 57344.0, 28.0, 7.5, 6.0, 1.984375]
        """
        return self._magnitude(self.max_code)

    @property
    def smallest_normal(self) -> float:
        r"""The smallest normal number, :math:`2^{emin}`."""
        return math.ldexp(1.0, self.emin)

    @property
    def smallest(self) -> float:
        r"""The smallest positive number: the subnormal :math:`2^{emin - M}`, or :math:`2^{emin}` without subnormals."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits * self.subnormals)

    @property
    def unit_roundoff(self) -> float:
        r"""Largest relative error of rounding to nearest in the normal range, :math:`2^{-(M+1)}`."""
        return math.ldexp(1.0, -(self.mantissa_bits + 1))

    @property
    def binades(self) -> float:
        r"""Dynamic range in factors of two, :math:`\log_2(max / smallest)`.

        Examples
        --------
        >>> print(f"{get('fp8_e4m3').binades:.1f} {get('fp8_e5m2').binades:.1f} {get('e2m1').binades:.1f}")
        17.8 31.8 3.6
        """
        return math.log2(self.max) - math.log2(self.smallest)

    @property
    def inf_codes(self) -> tuple[int, ...]:
        """Codes of +Inf and -Inf; empty if there are none.

        Examples
        --------
        >>> [hex(code) for code in get("fp8_e5m2").inf_codes]
        ['0x7c', '0xfc']
        """
        if self.top != "ieee":
            return ()
        return tuple(sign + self.max_code + 1 for sign in self._signs)

    @property
    def nan_codes(self) -> tuple[range, ...]:
        """Codes that are not a number, one range a sign (there are 2⁵³ of them in fp64).

        Examples
        --------
        >>> [list(map(hex, codes)) for codes in get("fp8_e4m3").nan_codes]
        [['0x7f'], ['0xff']]
        >>> get("e2m1").nan_codes
        ()
        """
        if self.top == "finite":
            return ()
        first = self.max_code + 1 + (self.top == "ieee")
        past = 2 ** (self.exponent_bits + self.mantissa_bits)
        return tuple(range(sign + first, sign + past) for sign in self._signs)

    @property
    def nan_code(self) -> int | None:
        """The NaN that a conversion writes: the quiet one with no payload; None if there is none.

        Examples
        --------
        >>> [hex(get(name).nan_code) for name in ("fp16", "fp8_e5m2", "fp8_e4m3", "e8m0")]
        ['0x7e00', '0x7e', '0x7f', '0xff']
        """
        if self.top == "finite":
            return None
        return self.max_code + 1 + (2 ** (self.mantissa_bits - 1) if self.top == "ieee" else 0)

    def decode(self, code: int) -> float:
        """Return the number that a code means, exactly.

        Raises
        ------
        ValueError
            If there is no such code.

        Examples
        --------
        >>> [get("e2m1").decode(code) for code in range(16)]
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
        >>> get("int8").decode(0xFF), get("fp8_e4m3").decode(0x7F), get("e8m0").decode(127)
        (-0.015625, nan, 1.0)
        """
        if not 0 <= code < self.codes:
            raise ValueError(f"code {code} of {self.name}: there are only 0 to {self.codes - 1}")
        half = self.codes // 2
        if self.sign == "none" or code < half:
            return self._magnitude(code)
        return -self._magnitude(self.codes - code if self.sign == "complement" else code - half)

    @property
    def _signs(self) -> tuple[int, ...]:
        """What each sign adds to a magnitude's code."""
        return (0, self.codes // 2) if self.sign == "bit" else (0,)

    def _magnitude(self, code: int) -> float:
        """Return the number that a code without its sign means."""
        if self.top != "finite" and code > self.max_code:
            return math.inf if code in self.inf_codes else math.nan
        field, fraction = divmod(code, 2**self.mantissa_bits)
        if field == 0 and self.subnormals:
            return math.ldexp(fraction, self.emin - self.mantissa_bits)
        return math.ldexp(2**self.mantissa_bits + fraction, field - self.bias - self.mantissa_bits)


@dataclass(frozen=True)
class BlockFormat:
    """Elements of one format that share a scale, block by block.

    Parameters
    ----------
    name : str
        What it is called in case files.
    element : Format
        Format of the elements; at most 8 bits wide, so that a code fits in a byte.
    block : int
        Elements a scale.
    scale : Format
        Format of the scale; at most 8 bits wide, with NaN.
    global_scale : bool
        Whether a float32 factor for the whole tensor comes on top.

    Raises
    ------
    ValueError
        If an argument has another type, a block has no element, a code doesn't fit in a byte, elements have no sign,
        the scale has no NaN, or a global factor is asked of a scale that is a power of two.

    Examples
    --------
    >>> BlockFormat("mxfp8_e4m3_16", FP8_E4M3, 16, E8M0).bits
    8.5
    """

    name: str
    element: Format
    block: int
    scale: Format
    global_scale: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        if self.block < 1:
            raise ValueError(f"block format {self.name!r} has {self.block} elements a block: at least 1 is needed")
        for part in (self.element, self.scale):
            if part.bits > 8:
                raise ValueError(
                    f"block format {self.name!r} uses {part.name} of {part.bits} bits: at most 8 fit a code"
                )
        if self.element.sign == "none":
            raise ValueError(f"block format {self.name!r} has elements of {self.element.name}, which has no sign")
        if self.scale.top == "finite":
            raise ValueError(
                f"block format {self.name!r} has scale {self.scale.name}, which has no NaN for a bad block"
            )
        if self.global_scale and self.scale == E8M0:
            raise ValueError(f"block format {self.name!r} has a global scale, but no float scale below it")

    def _check_types(self) -> None:
        """Raise ``ValueError`` for an argument of another type."""
        if not isinstance(self.name, str):
            raise ValueError(f"name of a block format must be a text, not {self.name!r}")
        if not _is_integer(self.block):
            raise ValueError(f"block of block format {self.name!r} must be an integer, not {self.block!r}")
        for parameter in ("element", "scale"):
            if not isinstance(given := getattr(self, parameter), Format):
                raise ValueError(
                    f"{parameter} of block format {self.name!r} must be a Format, such as formats.get('e2m1'), not "
                    f"{given!r}"
                )
        if not isinstance(self.global_scale, bool):
            given = self.global_scale
            raise ValueError(f"global_scale of block format {self.name!r} must be True or False, not {given!r}")

    @property
    def bits(self) -> float:
        """Bits of storage an element, its share of the scale included; a global scale is not counted.

        Examples
        --------
        >>> [get(name).bits for name in ("mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_e2m1", "nvfp4")]
        [8.25, 6.25, 4.25, 4.5]
        """
        return self.element.bits + self.scale.bits / self.block


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


FP64 = Format("fp64", 11, 52, bias=1023, top="ieee", saturates=False)
FP32 = Format("fp32", 8, 23, bias=127, top="ieee", saturates=False)
TF32 = Format("tf32", 8, 10, bias=127, top="ieee", saturates=False)
BF16 = Format("bf16", 8, 7, bias=127, top="ieee", saturates=False)
FP16 = Format("fp16", 5, 10, bias=15, top="ieee", saturates=False)
FP8_E4M3 = Format("fp8_e4m3", 4, 3, bias=7, top="nan")
FP8_E5M2 = Format("fp8_e5m2", 5, 2, bias=15, top="ieee")
E3M2 = Format("e3m2", 3, 2, bias=3, top="finite")
E2M3 = Format("e2m3", 2, 3, bias=1, top="finite")
E2M1 = Format("e2m1", 2, 1, bias=1, top="finite")
#: Two's complement with an implied factor 2⁻⁶. Conversions leave 0x80 (-2) unused, so that the range is symmetric.
INT8 = Format("int8", 1, 6, bias=1, top="finite", sign="complement")
#: A power of two and nothing else: the scale of the MX formats.
E8M0 = Format("e8m0", 8, 0, bias=127, top="nan", sign="none", subnormals=False)

MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", FP8_E4M3, 32, E8M0)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", FP8_E5M2, 32, E8M0)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2, 32, E8M0)
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3, 32, E8M0)
MXFP4_E2M1 = BlockFormat("mxfp4_e2m1", E2M1, 32, E8M0)
MXINT8 = BlockFormat("mxint8", INT8, 32, E8M0)
NVFP4 = BlockFormat("nvfp4", E2M1, 16, FP8_E4M3, global_scale=True)

_SCALAR = (FP64, FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2, E3M2, E2M3, E2M1, INT8, E8M0)
_BLOCK = (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4_E2M1, MXINT8, NVFP4)
_BY_NAME: dict[str, Format | BlockFormat] = {format.name: format for format in (*_SCALAR, *_BLOCK)}


def known() -> tuple[str, ...]:
    """Return the names of all formats, scalar ones first.

    Examples
    --------
    >>> print(*known())
    fp64 fp32 tf32 bf16 fp16 fp8_e4m3 fp8_e5m2 e3m2 e2m3 e2m1 int8 e8m0 mxfp8_e4m3 mxfp8_e5m2 mxfp6_e3m2 mxfp6_e2m3 \
mxfp4_e2m1 mxint8 nvfp4
    """
    return tuple(_BY_NAME)


def get(name: str | Format | BlockFormat) -> Format | BlockFormat:
    """Return the format of a name; a record of your own passes through.

    Raises
    ------
    ValueError
        If there is none, with the nearest name, or if it is neither a name nor a record.

    Examples
    --------
    >>> get("fp8_e4m3").emax, get("mxfp8_e4m3").block
    (8, 32)
    >>> try:
    ...     get("mxfp8-e4m3")
    ... except ValueError as error:
    ...     print(str(error).partition(" Known")[0])
    unknown format 'mxfp8-e4m3': did you mean 'mxfp8_e4m3'?
    """
    if isinstance(name, Format | BlockFormat):
        return name
    if not isinstance(name, str):
        raise ValueError(f"a format must be a name of formats.known, a Format or a BlockFormat, not {name!r}")
    if name not in _BY_NAME:
        raise unknown("format", name, known())
    return _BY_NAME[name]


def of_numbers(name: str | Format | BlockFormat) -> Format | BlockFormat:
    """Return a format that holds numbers of both signs: that of an operand.

    Raises
    ------
    ValueError
        As `get`, and for a format of scales.

    Examples
    --------
    >>> of_numbers("e8m0")
    Traceback (most recent call last):
    ValueError: e8m0 is a format for scales: it has no sign and no zero
    """
    record = get(name)
    if isinstance(record, Format) and record.sign == "none":
        raise ValueError(f"{record.name} is a format for scales: it has no sign and no zero")
    return record


def of_results(name: str | Format | BlockFormat) -> Format:
    """Return a format in which results are stored, one number at a time.

    Raises
    ------
    ValueError
        As `of_numbers`, and for blocks.

    Examples
    --------
    >>> of_results("mxfp8_e4m3")
    Traceback (most recent call last):
    ValueError: stored must be a scalar format, since blocks would need an axis, got 'mxfp8_e4m3'
    """
    record = of_numbers(name)
    if isinstance(record, BlockFormat):
        raise ValueError(f"stored must be a scalar format, since blocks would need an axis, got {record.name!r}")
    return record
