r"""One number to one format, and one block by its definition, in exact rational arithmetic.

A format is a finite set of numbers. Its codes, without the sign, count the magnitudes upwards, so that everything
follows from one decoding rule (for the floating formats, with field E, fraction F, m mantissa bits and bias b)

.. math:: |v| = 2^{1-b-m} F \quad (E = 0), \qquad |v| = 2^{E-b-m} (2^m + F) \quad (E > 0)

and rounding is a search: the two codes k, k + 1 with :math:`v_k \le |x| < v_{k+1}`, one of which the mode picks. The
code past the largest number is read by the same rule (480 for E4M3, 65536 for E5M2); a mode that picks it, or any x
from there on, overflows. A block is :math:`X P_i` with the scale X = 2^e and :math:`P_i = \mathrm{round}(V_i / X)`.

Decided here, where the specifications leave it open
----------------------------------------------------
- Any NaN or Inf in a block gives the scale code NaN (0xFF for E8M0, 0x7F for E4M3) and a block of NaN.
- An all-zero block has the scale byte 0. The scale exponent is clamped to [-127, 127].
- The sign of zero is kept, also when a negative number is flushed. Subnormal numbers are kept, on both sides.
- INT8 is symmetric: -2 (code 0x80) can be decoded and is never made. It has one zero. For the scale mode "even" it
  counts the six fraction bits of its largest number, 127/64.
- ``saturate`` means the same for every format: the largest number for whatever overflows and for Inf. Without it,
  overflow is Inf, or NaN where there is no Inf; a format with neither cannot say so, and refuses.
- Directions that point toward zero stop at the largest number, saturating or not (IEEE 754-2019, 7.4). An infinite
  input goes by the line above in every mode.
- A NaN made here is positive and quiet, without payload. A format without NaN refuses it.
- E8M0 has no zero: all from 0 up to its least number, 2^-127, becomes that. It has no sign: negative numbers are
  refused. Where significands have one digit, ties go to the larger number (IEEE 754-2019, 4.3.1).
- NVFP4: quotients are rounded once, from exact rationals. A scale that is zero, of the block or of the tensor, makes
  zeros.

References
----------
OCP Microscaling Formats (MX) v1.0, 5.1 to 5.3 and 6.3; OCP 8-bit Floating Point (OFP8) rev 1.0, table 3 (saturation);
IEEE 754-2019, 4.3 and 7.4.
"""

import difflib
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from numbers import Integral
from typing import Any, Literal

#: A number taken as exact: a Fraction, int or float (NumPy's too), or a string, "0x1.8p-3" or "0.1" or "-inf".
Real = Any

#: How one number is rounded: toward the nearer, ties to the even code; toward zero, +inf or -inf; by chance.
MODES = ("nearest_even", "toward_zero", "up", "down", "stochastic")

#: How the exponent of a block's scale follows from its largest magnitude.
SCALE_MODES = ("floor", "ceil", "rceil", "even")


@dataclass(frozen=True)
class Floating:
    """A floating-point format: the independent facts, and its decoding rule."""

    #: Width of the exponent field.
    exponent_bits: int
    #: Width of the fraction field, without the hidden bit.
    mantissa_bits: int
    #: What is subtracted from the exponent field.
    bias: int
    #: What the topmost codes mean: "ieee", the last binade is Inf and NaN; "nan", the last code is NaN; or numbers.
    top: Literal["ieee", "nan", "numbers"]
    #: Whether there is a sign bit.
    signed: bool = True
    #: Whether the field 0 has no hidden bit, and so a zero.
    subnormals: bool = True

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def last(self) -> int:
        """Magnitude code of the largest number."""
        codes = 2 ** (self.exponent_bits + self.mantissa_bits)
        return {"numbers": codes, "nan": codes - 1, "ieee": codes - 2**self.mantissa_bits}[self.top] - 1

    @property
    def inf(self) -> int | None:
        """Code of +Inf, if there is one."""
        return self.last + 1 if self.top == "ieee" else None

    @property
    def nan(self) -> int | None:
        """Code of the positive quiet NaN, if there is one."""
        quiet = self.last + 1 + 2 ** (self.mantissa_bits - 1) if self.top == "ieee" else self.last + 1
        return None if self.top == "numbers" else quiet

    def magnitude(self, k: int) -> Fraction:
        """Decode magnitude code k, as if the topmost codes and those beyond were numbers."""
        field, fraction = divmod(k, 2**self.mantissa_bits)
        if field == 0 and self.subnormals:
            return fraction * _two(1 - self.bias - self.mantissa_bits)
        return (2**self.mantissa_bits + fraction) * _two(field - self.bias - self.mantissa_bits)

    def code(self, k: int, negative: bool) -> int:
        """Put the sign bit, if there is one, on top of magnitude code k."""
        return k + (negative and self.signed) * 2 ** (self.bits - 1)

    def split(self, code: int) -> tuple[int, bool]:
        """Take the sign bit off."""
        half = 2 ** (self.bits - 1) if self.signed else 2**self.bits
        return code % half, code >= half


@dataclass(frozen=True)
class Integer:
    """Two's complement multiples of a step, symmetric about zero; no Inf, no NaN, one zero."""

    #: Width of a code.
    bits: int
    #: The distance of neighbours.
    step: Fraction
    inf: None = None
    nan: None = None

    @property
    def last(self) -> int:
        """The largest multiple."""
        return 2 ** (self.bits - 1) - 1

    @property
    def mantissa_bits(self) -> int:
        """Fraction bits of the largest number: it has as many digits as `last`, one of them before the point."""
        return self.bits - 2

    def magnitude(self, k: int) -> Fraction:
        """Return k steps."""
        return k * self.step

    def code(self, k: int, negative: bool) -> int:
        """Return the two's complement of k or -k."""
        return -k % 2**self.bits if negative else k

    def split(self, code: int) -> tuple[int, bool]:
        """Return magnitude and sign."""
        negative = code > self.last
        return (2**self.bits - code if negative else code), negative


Grid = Floating | Integer

#: The formats of single numbers: the 8-bit floats are OFP8's, the smaller ones, INT8 (steps of 2^-6) and E8M0 are MX's.
GRIDS: Mapping[str, Grid] = {
    "fp64": Floating(11, 52, 1023, "ieee"),
    "fp32": Floating(8, 23, 127, "ieee"),
    "tf32": Floating(8, 10, 127, "ieee"),
    "bf16": Floating(8, 7, 127, "ieee"),
    "fp16": Floating(5, 10, 15, "ieee"),
    "fp8_e4m3": Floating(4, 3, 7, "nan"),
    "fp8_e5m2": Floating(5, 2, 15, "ieee"),
    "e3m2": Floating(3, 2, 3, "numbers"),
    "e2m3": Floating(2, 3, 1, "numbers"),
    "e2m1": Floating(2, 1, 1, "numbers"),
    "int8": Integer(8, Fraction(1, 64)),
    "e8m0": Floating(8, 0, 127, "nan", signed=False, subnormals=False),
}


@dataclass(frozen=True)
class BlockFormat:
    """A block format: names of grids, and how many elements share a scale."""

    #: Grid of the elements.
    element: str
    #: Grid of the scale.
    scale: str = "e8m0"
    #: Elements of a block.
    size: int = 32
    #: Grid of a second scale, common to the whole tensor.
    tensor_scale: str | None = None


#: The block formats: MX v1.0, table 1, and NVIDIA's NVFP4.
BLOCKS: Mapping[str, BlockFormat] = {
    "mxfp8_e4m3": BlockFormat("fp8_e4m3"),
    "mxfp8_e5m2": BlockFormat("fp8_e5m2"),
    "mxfp6_e3m2": BlockFormat("e3m2"),
    "mxfp6_e2m3": BlockFormat("e2m3"),
    "mxfp4_e2m1": BlockFormat("e2m1"),
    "mxint8": BlockFormat("int8"),
    "nvfp4": BlockFormat("e2m1", scale="fp8_e4m3", size=16, tensor_scale="fp32"),
}


@dataclass(frozen=True)
class Number:
    """A number of a format. ``float(number)`` keeps the sign of zero.

    Attributes
    ----------
    value : Fraction or float
        Exact; a float for NaN and the infinities alone.
    code : int
        Its bits as an unsigned integer.
    negative : bool
        Whether the sign is minus, also of zero and NaN.
    """

    value: Fraction | float
    code: int
    negative: bool

    def __float__(self) -> float:
        return math.copysign(float(self.value), -1.0 if self.negative else 1.0)


@dataclass(frozen=True)
class Block:
    """A quantized block.

    Attributes
    ----------
    scale_code : int
        The scale as stored: an E8M0 byte, or an E4M3 code for NVFP4.
    scale : Fraction or float
        The factor of the elements, that of the tensor included; NaN for a block of NaN.
    elements : tuple of Number, or None
        What the scale multiplies; None in a block of NaN, whose element codes mean nothing.
    size : int
        How many elements there are.
    """

    scale_code: int
    scale: Fraction | float
    elements: tuple[Number, ...] | None
    size: int

    @property
    def codes(self) -> tuple[int, ...] | None:
        """The codes of the elements, or None in a block of NaN."""
        return None if self.elements is None else tuple(element.code for element in self.elements)

    @property
    def values(self) -> tuple[Fraction | float, ...]:
        """The exact values, scale times element; they may exceed float32."""
        if self.elements is None:
            return (math.nan,) * self.size
        return tuple(self.scale * element.value for element in self.elements)

    @property
    def floats(self) -> tuple[float, ...]:
        """The values in float64, with the sign of zero. An MX block has them all exactly."""
        if self.elements is None:
            return (math.nan,) * self.size
        return tuple(float(Number(self.scale * x.value, x.code, x.negative)) for x in self.elements)


def round_to(x: Real, format: str, mode: str = "nearest_even", u: Real | None = None, saturate: bool = True) -> Number:
    r"""Round one number to a format.

    With :math:`t = (|x| - v_k) / (v_{k+1} - v_k)` the magnitude becomes :math:`v_{k+1}` rather than :math:`v_k` if
    :math:`t > 1/2`, or :math:`t = 1/2` and k is odd ("nearest_even"); if :math:`t + u \ge 1` ("stochastic", of
    probability t for u uniform in [0, 1)); if t > 0 and the direction is away from zero ("up", "down").

    Parameters
    ----------
    x : number or string
        Taken as exact: a Fraction, int, float, or a string such as "0x1.8p-3", "0.1", "nan", "-inf".
    format : str
        A name in `GRIDS`.
    mode : str
        One of `MODES`.
    u : number
        For "stochastic" and nothing else, in [0, 1).
    saturate : bool
        Whether overflow and Inf become the largest number, or else Inf (NaN where there is no Inf).

    Returns
    -------
    Number
        Value, code and sign.

    Raises
    ------
    ValueError
        If the format or mode is unknown, x cannot be read, u is missing, needless or out of [0, 1), or the format
        cannot express the result: NaN or unsaturated overflow without a code for it, a negative number without sign.

    Examples
    --------
    >>> round_to("0.1", "fp8_e4m3")
    Number(value=Fraction(13, 128), code=29, negative=False)
    >>> [float(round_to(464, "fp8_e4m3", saturate=False)), float(round_to(465, "fp8_e4m3", saturate=False))]
    [448.0, nan]
    >>> [float(round_to("0.3", "e2m1", mode)) for mode in ("nearest_even", "toward_zero", "up", "down")]
    [0.5, 0.0, 0.5, 0.0]
    >>> [float(round_to(-5, "e2m1", "stochastic", u=u)) for u in (0, 0.49, 0.5, 0.99)]
    [-4.0, -4.0, -6.0, -6.0]
    """
    check_name("format", format, GRIDS)
    grid = GRIDS[format]
    _check_mode(mode, u)
    magnitude, negative = _exact(x)
    if isinstance(magnitude, float) and math.isnan(magnitude):
        return _nan(format)
    if negative and magnitude and isinstance(grid, Floating) and not grid.signed:
        raise ValueError(f"round_to: x is {x}, needed one that is not negative for {format}, which has no sign")
    if isinstance(magnitude, float):
        return _overflow(format, negative, saturate)
    k = _rounded(magnitude, format, _unsigned(mode, negative), u)
    return _overflow(format, negative, saturate) if k > grid.last else _number(format, k, negative)


def decode(code: int, format: str) -> Number:
    """Return the number that a code stands for.

    Parameters
    ----------
    code : int
        The bits as an unsigned integer, sign on top.
    format : str
        A name in `GRIDS`.

    Raises
    ------
    ValueError
        If the format is unknown or the code has too many bits.

    Examples
    --------
    >>> [float(decode(code, "fp8_e5m2")) for code in (0x01, 0x7B, 0x7C, 0x7D, 0x80)]
    [1.52587890625e-05, 57344.0, inf, nan, -0.0]
    >>> decode(0, "e8m0").value == Fraction(1, 2**127)
    True
    """
    check_name("format", format, GRIDS)
    grid = GRIDS[format]
    if not 0 <= code < 2**grid.bits:
        raise ValueError(f"decode: code is {code}, needed 0 to {2**grid.bits - 1} for {format}")
    k, negative = grid.split(code)
    value: Fraction | float = _magnitude(format, k)
    if isinstance(grid, Floating) and k > grid.last:
        value = math.inf if k == grid.inf else math.nan
    return Number(-value if negative else value, code, negative)


def scale_exponent(amax: Real, format: str, scale_mode: str) -> int:
    r"""Return the exponent of a block's scale by its definition, before it is clamped to [-127, 127].

    ======  ================================================================================================
    floor   :math:`\lfloor \log_2 a \rfloor - e_{\max}`, MX v1.0, 6.3
    ceil    :math:`\lceil \log_2 a \rceil - e_{\max}`
    rceil   :math:`\lceil \log_2 (a / v_{\max}) \rceil`, the least e with :math:`a \le 2^e v_{\max}`
    even    :math:`\lfloor \log_2 a' \rfloor - e_{\max}`, a' being a rounded to m fraction bits, ties away
    ======  ================================================================================================

    Here :math:`v_{\max}` is the largest element, :math:`2^{e_{\max}}` the largest power of two not above it, and m the
    element's number of fraction bits.

    Parameters
    ----------
    amax : number or string
        The largest magnitude, positive and finite; read as in `round_to`.
    format : str
        A name in `BLOCKS`, or that of an element in `GRIDS`.
    scale_mode : str
        One of `SCALE_MODES`.

    Raises
    ------
    ValueError
        If a name is unknown, or amax is not positive and finite.

    Examples
    --------
    >>> [scale_exponent(150, "mxfp8_e4m3", mode) for mode in SCALE_MODES]
    [-1, 0, -1, -1]
    >>> [scale_exponent("0x1.fp8", "mxfp8_e4m3", mode) for mode in SCALE_MODES]  # 496, a tie of "even"
    [0, 1, 1, 1]
    """
    check_name("format", format, [*BLOCKS, *GRIDS])
    grid = GRIDS[BLOCKS[format].element if format in BLOCKS else format]
    check_name("scale mode", scale_mode, SCALE_MODES)
    a, negative = _exact(amax)
    if isinstance(a, float) or negative or not a:
        raise ValueError(f"scale_exponent: amax is {amax}, needed a positive finite number")
    largest = grid.magnitude(grid.last)
    emax = _floor_log2(largest)
    if scale_mode == "floor":
        return _floor_log2(a) - emax
    if scale_mode == "ceil":
        return _ceil_log2(a) - emax
    if scale_mode == "rceil":
        return _ceil_log2(a / largest)
    unit = _two(_floor_log2(a) - grid.mantissa_bits)
    return _floor_log2(math.floor(a / unit + Fraction(1, 2)) * unit) - emax


def block(
    values: Sequence[Real],
    format: str,
    scale_mode: str = "rceil",
    mode: str = "nearest_even",
    u: Sequence[Real] | None = None,
) -> Block:
    """Quantize one MX block: the scale from the largest magnitude, then every element alone, saturating.

    Parameters
    ----------
    values : sequence of 32 numbers or strings
        Read as in `round_to`.
    format : str
        One of the MX formats in `BLOCKS`.
    scale_mode : str
        One of `SCALE_MODES`; "floor" is the text of the specification, "rceil" never saturates.
    mode : str
        One of `MODES`, for the elements.
    u : sequence of 32 numbers
        For "stochastic" and nothing else, each in [0, 1).

    Raises
    ------
    ValueError
        If a name is unknown, values or u have a wrong length, or one of them cannot be read or used.

    Examples
    --------
    >>> quantized = block([957.0, -1.0, -0.0] + [0.0] * 29, "mxfp8_e4m3", "floor")
    >>> quantized.scale_code, quantized.floats[:3]
    (128, (896.0, -1.0, -0.0))
    >>> block([957.0] + [0.0] * 31, "mxfp8_e4m3").floats[0]
    960.0
    >>> block([float("inf")] + [0.0] * 31, "mxfp8_e4m3").scale_code
    255
    """
    check_name("block format", format, BLOCKS)
    spec = BLOCKS[format]
    if spec.tensor_scale is not None:
        raise ValueError(f"block: {format} has a second scale, needed nvfp4_block for it")
    check_name("scale mode", scale_mode, SCALE_MODES)
    draws = _draws("block", values, spec, mode, u)
    amax = _amax(values)
    if isinstance(amax, float):
        return Block(_nan(spec.scale).code, math.nan, None, spec.size)
    scale = decode(0, spec.scale)
    if amax:
        exponent = scale_exponent(amax, spec.element, scale_mode)
        scale = round_to(_two(min(max(exponent, -127), 127)), spec.scale)
    return _filled(values, spec, scale.code, Fraction(scale.value), mode, draws)


def nvfp4_scale(amax: Real) -> Number:
    r"""Return the scale of a whole NVFP4 tensor, :math:`a / (448 \cdot 6)` rounded to float32 once.

    448 and 6 are the largest numbers of E4M3 and E2M1, so that the block with the largest magnitude has the scale 448.

    Parameters
    ----------
    amax : number or string
        The largest magnitude of the tensor, not negative; read as in `round_to`. NaN and Inf give NaN.

    Raises
    ------
    ValueError
        If amax is negative or cannot be read.

    Examples
    --------
    >>> float(nvfp4_scale(2688)), float(nvfp4_scale(0)), float(nvfp4_scale("inf"))
    (1.0, 0.0, nan)
    """
    spec = BLOCKS["nvfp4"]
    assert spec.tensor_scale is not None
    a, negative = _exact(amax)
    if negative and a:
        raise ValueError(f"nvfp4_scale: amax is {amax}, needed a magnitude")
    if isinstance(a, float):
        return _nan(spec.tensor_scale)
    return round_to(a / (_largest(spec.scale) * _largest(spec.element)), spec.tensor_scale)


def nvfp4_block(
    values: Sequence[Real], tensor_scale: Real, mode: str = "nearest_even", u: Sequence[Real] | None = None
) -> Block:
    r"""Quantize one NVFP4 block: with the tensor's scale s, :math:`X = s \cdot \mathrm{E4M3}(a / (6 s))`.

    Parameters
    ----------
    values : sequence of 16 numbers or strings
        Read as in `round_to`.
    tensor_scale : number or string
        The scale s of the whole tensor, not negative, taken as exact: the value of `nvfp4_scale`.
    mode : str
        One of `MODES`, for the elements; the scale is always rounded to nearest even.
    u : sequence of 16 numbers
        For "stochastic" and nothing else, each in [0, 1).

    Raises
    ------
    ValueError
        If the mode is unknown, values or u have a wrong length, one of them cannot be read or used, or the tensor's
        scale is negative.

    Examples
    --------
    >>> quantized = nvfp4_block([6.0, -2.4, 0.2] + [0.0] * 13, tensor_scale=nvfp4_scale(6).value)
    >>> quantized.scale_code, [round(x, 3) for x in quantized.floats[:3]]
    (126, [6.0, -2.0, 0.0])
    """
    spec = BLOCKS["nvfp4"]
    draws = _draws("nvfp4_block", values, spec, mode, u)
    amax = _amax(values)
    s, negative = _exact(tensor_scale)
    if negative and s:
        raise ValueError(f"nvfp4_block: tensor_scale is {tensor_scale}, needed one that is not negative")
    if isinstance(amax, float) or isinstance(s, float):
        return Block(_nan(spec.scale).code, math.nan, None, spec.size)
    scale = round_to(amax / (_largest(spec.element) * s) if s else 0, spec.scale)
    return _filled(values, spec, scale.code, scale.value * s, mode, draws)


def _filled(
    values: Sequence[Real], spec: BlockFormat, code: int, scale: Fraction | float, mode: str, draws: Sequence[Any]
) -> Block:
    """Round the elements of a block whose scale is known; they are zeros if the scale is zero."""
    elements = []
    for value, u in zip(values, draws, strict=True):
        magnitude, negative = _exact(value)
        ratio = Fraction(magnitude / scale if scale else 0)
        k = _rounded(ratio, spec.element, _unsigned(mode, negative), u)
        elements.append(_number(spec.element, min(k, GRIDS[spec.element].last), negative))
    return Block(code, scale, tuple(elements), spec.size)


def _rounded(magnitude: Fraction, format: str, mode: str, u: Real | None) -> int:
    """Return the magnitude code, one past the last for overflow; mode is "toward_zero" or "away" if directed."""
    beyond = GRIDS[format].last + 1
    v = partial(_magnitude, format)
    k = bisect_right(range(beyond + 1), magnitude, key=v) - 1
    if k < 0:
        return 0
    if k == beyond:
        return beyond - 1 if mode == "toward_zero" else beyond
    t = (magnitude - v(k)) / (v(k + 1) - v(k))
    if mode == "nearest_even":
        one_digit = GRIDS[format].mantissa_bits == 0
        return k + (t > Fraction(1, 2) or (t == Fraction(1, 2) and (one_digit or k % 2 == 1)))
    if mode == "stochastic":
        return k + (t + _exact(u)[0] >= 1)
    return k + (mode == "away" and t > 0)


@lru_cache(2**16)
def _magnitude(format: str, k: int) -> Fraction:
    """Remember decoded magnitudes: a search decodes the same few again and again."""
    return GRIDS[format].magnitude(k)


def _unsigned(mode: str, negative: bool) -> str:
    """Turn a direction on the line into one of magnitudes."""
    directed = {("up", True): "toward_zero", ("down", False): "toward_zero", ("up", False): "away"}
    return {**directed, ("down", True): "away"}.get((mode, negative), mode)


def _number(format: str, k: int, negative: bool) -> Number:
    """Return the number with magnitude code k."""
    return decode(GRIDS[format].code(k, negative), format)


def _overflow(format: str, negative: bool, saturate: bool) -> Number:
    """Return the largest number, or Inf, or NaN."""
    grid = GRIDS[format]
    if saturate:
        return _number(format, grid.last, negative)
    if grid.inf is not None:
        return _number(format, grid.inf, negative)
    if grid.nan is None:
        raise ValueError(f"round_to: x overflows {format}, which has neither Inf nor NaN, needed saturate=True")
    return _nan(format)


def _nan(format: str) -> Number:
    """Return the positive quiet NaN."""
    code = GRIDS[format].nan
    if code is None:
        raise ValueError(f"round_to: x is NaN, needed a number for {format}, which has no NaN")
    return decode(code, format)


def _largest(format: str) -> Fraction:
    """Return the largest number."""
    return GRIDS[format].magnitude(GRIDS[format].last)


def _amax(values: Iterable[Real]) -> Fraction | float:
    """Return the largest magnitude, NaN if one is not finite."""
    magnitudes = [_exact(value)[0] for value in values]
    return math.nan if any(isinstance(a, float) for a in magnitudes) else max(magnitudes)


def _exact(x: Real) -> tuple[Fraction | float, bool]:
    """Return the magnitude, a float for NaN and Inf alone, and whether the sign is minus."""
    try:
        if isinstance(x, str):
            return _parsed(x.strip().lower())
        if isinstance(x, Fraction):
            return abs(x), x < 0
        if isinstance(x, Integral):
            return Fraction(abs(int(x))), int(x) < 0
        negative = math.copysign(1.0, x) < 0
        if not math.isfinite(x):
            return abs(float(x)), negative
        return abs(Fraction(*x.as_integer_ratio())), negative
    except (AttributeError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"x is {x!r} of type {type(x).__name__}, needed a real number or its text") from error


def _parsed(text: str) -> tuple[Fraction | float, bool]:
    """Read C99 hexadecimal or decimal text without the rounding of ``float.fromhex``."""
    negative = text.startswith("-")
    digits = text[1:] if text.startswith(("+", "-")) else text
    if digits in ("nan", "inf", "infinity"):
        return float(digits), negative
    if digits.startswith(("+", "-")):
        raise ValueError("two signs")
    if not digits.startswith("0x"):
        return Fraction(digits), negative
    match = re.fullmatch(r"0x(?=\.?[0-9a-f])([0-9a-f]*)\.?([0-9a-f]*)(?:p([+-]?\d+))?", digits)
    if match is None:
        raise ValueError("no hexadecimal number")
    whole, fraction, exponent = match.groups()
    return int(whole + fraction, 16) * _two(int(exponent or 0) - 4 * len(fraction)), negative


def _two(exponent: int) -> Fraction:
    """Return a power of two."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def _floor_log2(x: Fraction) -> int:
    """Return the greatest e with 2^e <= x."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if _two(e) <= x else e - 1


def _ceil_log2(x: Fraction) -> int:
    """Return the least e with x <= 2^e."""
    e = _floor_log2(x)
    return e if x == _two(e) else e + 1


def _check_mode(mode: str, u: Any) -> None:
    """Refuse an unknown mode, and u where it is missing, needless or out of range."""
    check_name("rounding mode", mode, MODES)
    if (u is None) == (mode == "stochastic"):
        raise ValueError(f"u is {u} for the rounding mode {mode!r}, needed one in [0, 1) for 'stochastic' alone")
    if u is not None:
        magnitude, negative = _exact(u)
        if not (magnitude < 1 and (not negative or magnitude == 0)):
            raise ValueError(f"u is {u}, needed a number in [0, 1)")


def _draws(caller: str, values: Sequence[Real], spec: BlockFormat, mode: str, u: Sequence[Real] | None) -> list[Any]:
    """Return one u for every element, after checking lengths and mode."""
    if len(values) != spec.size:
        raise ValueError(f"{caller}: values has {len(values)} numbers, needed {spec.size}")
    if u is not None and len(u) != spec.size:
        raise ValueError(f"{caller}: u has {len(u)} numbers, needed {spec.size}")
    draws = [None] * spec.size if u is None else list(u)
    for draw in draws:
        _check_mode(mode, draw)
    return draws


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse an unknown name: list the known ones, and the nearest."""
    names = list(known)
    if name not in names:
        close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.0)
        raise ValueError(f"unknown {what} {name!r}: did you mean {close[0]!r}? Known: {', '.join(names)}")
