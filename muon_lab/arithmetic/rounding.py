r"""Rounding of many numbers to one format, on the bits of their carrier.

The *carrier* is the IEEE format in which tensors hold the numbers, float32 or float64, with :math:`C` fraction bits. A
format with :math:`M` of them has, in the binade of x, the quantum :math:`q = 2^{\max(\lfloor\log_2|x|\rfloor, L) - M}`,
where :math:`2^L` is its smallest normal number. With the magic number :math:`c = \tfrac32\, 2^C q`

.. math:: \mathrm{RN}(x) = (x + c) - c,

because every number between :math:`\tfrac12 c` and :math:`2c/\tfrac32` is a multiple of q, and c an even one: nearest,
ties to even, for both signs and for subnormals alike. The largest power of two in x is its exponent field with the
fraction cleared, so c costs one ``and`` and one ``maximum``; no logarithm is taken and nothing is scaled. The sum
loses the sign of zero, which is put back.

All of it needs the default floating-point environment: round to nearest, no flushing of subnormals, no fast-math.

Symbols
-------
floor : bits of :math:`2^L` in the carrier, one number or one a block. NaN there makes the block NaN.
v, out : the numbers and where their rounded values go.
work : scratch of the same dtype and shape.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from muon_lab.arithmetic.formats import FP32, FP64, Format
from muon_lab.compiling import as_written


@dataclass(frozen=True)
class Carrier:
    """The floating-point numbers of a tensor, seen as bits.

    Parameters
    ----------
    format : Format
        An IEEE format.
    dtype, integer : torch.dtype
        The dtype of the numbers, and the integer dtype of the same width.

    Examples
    --------
    >>> hex(SINGLE.infinity), hex(SINGLE.power_of_two(0))
    ('0x7f800000', '0x3f800000')
    """

    format: Format
    dtype: torch.dtype
    integer: torch.dtype

    @property
    def infinity(self) -> int:
        """Bits of Inf, which are also the mask of the exponent field."""
        return self.format.max_code + 1

    @property
    def sign(self) -> int:
        """Mask of the sign bit, as the (negative) integer that PyTorch holds."""
        return -(2 ** (self.format.bits - 1))

    @property
    def quiet_nan(self) -> int:
        """Bits of NaN."""
        return self.infinity + 2 ** (self.format.mantissa_bits - 1)

    def power_of_two(self, exponent: int) -> int:
        """Return the bits of a power of two in the normal range."""
        return (exponent + self.format.bias) << self.format.mantissa_bits


SINGLE = Carrier(FP32, torch.float32, torch.int32)
DOUBLE = Carrier(FP64, torch.float64, torch.int64)


def carrier(x: Tensor) -> Carrier:
    """Return the carrier in which numbers of this dtype are rounded: float64 for itself, float32 for narrower ones."""
    return DOUBLE if x.dtype == torch.float64 else SINGLE


def largest_exponent(format: Format, carrier: Carrier) -> int:
    r"""Return the largest exponent that `nearest` can round: :math:`\tfrac32 2^{e + C - M}` and its sum are finite.

    Examples
    --------
    >>> from muon_lab.arithmetic import formats
    >>> largest_exponent(formats.FP8_E4M3, SINGLE)
    107
    """
    return carrier.format.emax - (carrier.format.mantissa_bits - format.mantissa_bits)


@as_written
def nearest(
    v: Float[Tensor, "..."],
    floor: int | Int[Tensor, "..."],
    format: Format,
    carrier: Carrier,
    *,
    out: Float[Tensor, "..."],
    work: Float[Tensor, "..."],
) -> None:
    """Round to nearest, ties to even, without an upper bound. Zero comes out positive; `out` may be v.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> v = torch.tensor([1.0625, -0.0009765625, 0.0029296875])
    >>> out, work = torch.empty(3), torch.empty(3)
    >>> nearest(v, SINGLE.power_of_two(formats.FP8_E4M3.emin), formats.FP8_E4M3, SINGLE, out=out, work=work)
    >>> out.tolist()
    [1.0, 0.0, 0.00390625]
    """
    _leading_power(v, floor, carrier, work)
    magic = 1.5 * 2 ** (carrier.format.mantissa_bits - format.mantissa_bits)
    torch.add(v, work, alpha=magic, out=out)
    out.sub_(work, alpha=magic)


@as_written
def stochastic(
    v: Float[Tensor, "..."],
    floor: int | Int[Tensor, "..."],
    format: Format,
    carrier: Carrier,
    *,
    out: Float[Tensor, "..."],
    work: Float[Tensor, "..."],
    generator: torch.Generator,
) -> None:
    r"""Round the magnitude to :math:`\lfloor |x|/q + u \rfloor\, q`, with u uniform in [0, 1): up as often as x is far.

    One u an entry is drawn with the carrier's precision, so that the mean is v up to :math:`2^{-53} q` in
    float64 (:math:`2^{-24} q` in float32). Representable numbers stay.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> v = torch.full((10_000,), 1.03125)  # a quarter of the way from 1 to 1.125
    >>> out, work = torch.empty_like(v), torch.empty_like(v)
    >>> floor = SINGLE.power_of_two(formats.FP8_E4M3.emin)
    >>> generator = torch.Generator().manual_seed(0)
    >>> stochastic(v, floor, formats.FP8_E4M3, SINGLE, out=out, work=work, generator=generator)
    >>> out.unique().tolist(), bool(abs(out.mean() - 1.03125) < 4 * 0.125 * 0.4330127 / 100)
    ([1.0, 1.125], True)
    """
    _leading_power(v, floor, carrier, work)
    work.mul_(2.0**-format.mantissa_bits)
    steps = v.abs().div_(work)
    whole = steps.floor()
    chance = torch.rand(v.shape, generator=generator, dtype=carrier.dtype, device=v.device)
    torch.mul(whole.add_(chance >= 1 - steps.sub_(whole)), work, out=out)


@as_written
def encode(values: Float[Tensor, "..."], format: Format) -> Int[Tensor, "..."] | UInt8[Tensor, "..."]:
    r"""Return the codes of numbers that the format represents. NaN becomes a NaN, or the largest number without one.

    Multiplied by :math:`2^{bias - bias_C}`, a number has the format's code in its top bits, subnormals included:
    the smallest normal numbers of format and carrier then coincide. Formats of 32 bits and more need float64.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> encode(torch.tensor([448.0, -0.0, 2.0**-9]), formats.FP8_E4M3).tolist()
    [126, 128, 1]
    """
    holder = carrier(values)
    signs = values.view(holder.integer)
    bits = values.abs().mul_(2.0 ** (format.bias - holder.format.bias)).view(holder.integer)
    codes = bits.bitwise_right_shift_(holder.format.mantissa_bits - format.mantissa_bits)
    if format.top == "ieee":  # the top exponents of carrier and format are both all ones
        codes.bitwise_and_(2 ** (format.exponent_bits + format.mantissa_bits) - 1)
    else:
        codes.clamp_(max=format.max_code if format.nan_code is None else format.nan_code)
    if format.sign == "complement":
        negative = signs >> (holder.format.bits - 1)
        codes.bitwise_xor_(negative).sub_(negative).bitwise_and_(format.codes - 1)
    elif format.bits == FP64.bits:
        codes.bitwise_or_(signs & DOUBLE.sign)
    else:
        codes.bitwise_or_((signs >> (holder.format.bits - format.bits)).bitwise_and_(format.codes // 2))
    return codes.to(code_dtype(format))


@as_written
def decode(
    codes: Int[Tensor, "..."] | UInt8[Tensor, "..."], format: Format, holder: Carrier = DOUBLE
) -> Float[Tensor, "..."]:
    """Return the numbers that codes mean, in a carrier that holds them all; the inverse of `encode`.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> decode(torch.tensor([126, 128, 1, 127]), formats.FP8_E4M3).tolist()
    [448.0, -0.0, 0.001953125, nan]
    >>> decode(torch.tensor([0, 127, 255]), formats.E8M0).tolist()
    [5.877471754111438e-39, 1.0, nan]
    """
    codes = codes.to(holder.integer)
    if format.bits == FP64.bits:
        return codes.view(torch.float64)
    half = format.codes // 2 if format.sign != "none" else format.codes
    negative = codes >= half
    magnitudes = torch.where(negative, format.codes - codes if format.sign == "complement" else codes - half, codes)
    bits = magnitudes << (holder.format.mantissa_bits - format.mantissa_bits)
    if format.subnormals:
        values = bits.view(holder.dtype) * 2.0 ** (holder.format.bias - format.bias)
    else:
        values = bits.add_(holder.power_of_two(-format.bias)).view(holder.dtype)
    if format.inf_codes:
        values.masked_fill_(magnitudes == format.inf_codes[0], torch.inf)
    if format.nan_codes:
        values.masked_fill_(magnitudes >= format.nan_codes[0].start, torch.nan)
    return torch.where(negative, -values, values)


def decoder(format: Format, holder: Carrier = DOUBLE) -> Callable[[Tensor], Tensor]:
    """Return `decode` for one format; from a table if its codes fit in a byte, which is ten times faster.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> decoder(formats.FP8_E4M3)(torch.tensor([[126, 128]], dtype=torch.uint8)).tolist()
    [[448.0, -0.0]]
    """
    if format.bits > 8:
        return lambda codes: decode(codes, format, holder)

    def looked_up(codes: Tensor) -> Tensor:
        table = decode(torch.arange(format.codes, device=codes.device), format, holder)
        return table.index_select(0, codes.int().flatten()).view(codes.shape)

    return looked_up


def code_dtype(format: Format) -> torch.dtype:
    """Return the dtype of codes: uint8 up to 8 bits, int32 up to 31, int64 beyond (fp64: the bits, sign and all)."""
    if format.bits <= 8:
        return torch.uint8
    return torch.int32 if format.bits < 32 else torch.int64


def _leading_power(
    v: Float[Tensor, "..."], floor: int | Int[Tensor, "..."], carrier: Carrier, work: Float[Tensor, "..."]
) -> None:
    """Write the largest power of two in each number to `work`, or the floor if that is larger."""
    bits = work.view(carrier.integer)
    torch.bitwise_and(v.view(carrier.integer), carrier.infinity, out=bits)
    bits.clamp_(min=floor)
