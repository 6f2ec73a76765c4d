r"""Rounding one piece of a tensor: a scalar format, blocks with a power-of-two scale, blocks with a float scale.

Each function binds a format and what goes with it, and returns ``kernel(v, out)``, which writes the values of the piece
v to `out`, v itself or memory apart from it, and returns its scale codes. A float64 `out` gets exact values, rounded by
nothing but the format. For a float32 `out` the work is done in float32 where that gives the same bits, which nearly
always holds, and in float64 for pieces with a block too near the ends of float32, and for stochastic rounding.

Five passes over a piece in cache are the whole cost of a block format (``and``, ``max``, two additions, the sign), and
two more find the scales; scratch memory is kept from one piece to the next.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from muon_lab.arithmetic import formats, rounding, scales
from muon_lab.arithmetic.formats import E8M0, BlockFormat, Format
from muon_lab.arithmetic.rounding import DOUBLE, SINGLE, Carrier
from muon_lab.arithmetic.scratch import Scratch

#: Writes the values of a piece to its second argument; returns its scale codes, one a tile (none without blocks).
Kernel = Callable[[Tensor, Tensor], Tensor]

#: Formats that a CPU converts to and back in one instruction each, correctly rounded from float32.
CASTS = {formats.BF16: torch.bfloat16, formats.FP16: torch.float16}


def scalar(format: Format, generator: torch.Generator | None, scratch: Scratch) -> Kernel:
    """Return the kernel of a format without blocks. It saturates or overflows as the format says.

    The kernel raises ``ValueError`` for NaN if the format has none.
    """
    none = torch.empty(0, dtype=torch.uint8)
    bound = format.max if format.saturates else 2 * format.max
    reach = rounding.largest_exponent(format, SINGLE)
    narrow = format.emax + 2 <= reach
    in_single = generator is None and format.emin >= SINGLE.format.emin

    def kernel(v: Tensor, out: Tensor) -> Tensor:
        if format.top == "finite" and v.isnan().any():
            raise ValueError(f"the tensor holds NaN, which {format.name} cannot represent")
        if _holds(format, rounding.carrier(v).format):
            out.copy_(v)
        elif generator is None and format in CASTS and v.dtype != torch.float64:
            out.copy_(scratch.like(v, CASTS[format], "half").copy_(v))
        elif in_single and out.dtype == torch.float32 and (narrow or below_reach(v)):
            rounded(v, out, SINGLE, bound if narrow else None)
        else:
            rounded(v, out, DOUBLE, bound)
        return none

    def below_reach(v: Tensor) -> bool:
        return bool(torch.abs(v, out=scratch.like(v, v.dtype, "work")).max() < 2.0**reach)

    def rounded(v: Tensor, out: Tensor, carrier: Carrier, bound: float | None) -> None:
        _round(v, carrier.power_of_two(format.emin), bound, format, carrier, generator, out, scratch)
        if bound is not None and not format.saturates:
            overflow = math.inf if format.inf_codes else math.nan
            out.masked_fill_(out > format.max, overflow).masked_fill_(out < -format.max, -overflow)

    return kernel


def power_of_two_scaled(format: BlockFormat, mode: str, generator: torch.Generator | None, scratch: Scratch) -> Kernel:
    """Return the kernel of an MX format with one of the scale modes of `scales.MODES`."""
    element = format.element
    lowest = 1 - element.emin
    highest = E8M0.bias + rounding.largest_exponent(element, SINGLE) - element.emax

    def kernel(v: Tensor, out: Tensor) -> Tensor:
        v = scratch.cast(v, rounding.carrier(v).dtype, "data")
        largest = largest_in_tiles(v, scratch)
        codes = scales.power_of_two_bytes(largest, mode, element)
        if out.dtype == torch.float32 and generator is None and not out_of_reach(codes, largest):
            scaled(v, out, codes.int(), SINGLE, saturating=mode in ("floor", "even"))
        else:
            scaled(v, out, codes, DOUBLE, saturating=True)
        return codes

    def out_of_reach(codes: Tensor, largest: Tensor) -> bool:
        least, most = codes.aminmax()
        if lowest <= int(least) and int(most) <= highest:
            return False
        low = (codes < lowest) & (largest > 0)
        high = (codes > highest) & (codes < scales.NAN)
        return bool(low.logical_or_(high).any())

    def scaled(v: Tensor, out: Tensor, codes: Tensor, carrier: Carrier, *, saturating: bool) -> None:
        floor = scales.power_of_two_bits(codes, element.emin, carrier)
        floor.masked_fill_(codes == scales.NAN, carrier.quiet_nan)
        bound = scales.power_of_two_bits(codes, 0, carrier).view(carrier.dtype) * element.max if saturating else None
        _round(v, floor, bound, element, carrier, generator, out, scratch)

    return kernel


def float_scaled(
    format: BlockFormat, factor: Float[Tensor, ""], generator: torch.Generator | None, scratch: Scratch
) -> Kernel:
    """Return the kernel of a format with floating-point scales, given the factor of the whole tensor.

    Data of 24 bits and a scale of at most 28 make a quotient that is either a midpoint of two elements or 2⁻³¹ away
    from it, relatively: float64 decides every tie rightly.
    """
    element = format.element

    def kernel(v: Tensor, out: Tensor) -> Tensor:
        v = scratch.cast(v, rounding.carrier(v).dtype, "data")
        codes = scales.float_bytes(largest_in_tiles(v, scratch), factor, element, format.scale)
        scale = effective(codes, format, factor)
        quotients = unscaled(scratch.like(v, torch.float64, "quotients").copy_(v), scale)
        values = scratch.like(v, torch.float64, "values")
        _round(quotients, DOUBLE.power_of_two(element.emin), element.max, element, DOUBLE, generator, values, scratch)
        out.copy_(values.mul_(scale))
        return codes

    return kernel


def exactly(
    kernel: Kernel, v: Float[Tensor, "..."], dtype: torch.dtype, scratch: Scratch
) -> tuple[Float[Tensor, "..."], Tensor]:
    """Return the values and scale codes of a piece, the values in a dtype if it holds them all, else in float64."""
    values = scratch.like(v, dtype, "exact")
    codes = kernel(v, values)
    if dtype == torch.float64 or not values.isinf().any():
        return values, codes
    values = scratch.like(v, torch.float64, "exact")
    return values, kernel(v, values)


def effective(
    codes: Int[Tensor, "..."] | UInt8[Tensor, "..."], format: BlockFormat, factor: float | Float[Tensor, ""]
) -> Float[Tensor, "..."]:
    """Return what an element of 1 means in each block, in float64: the scale times the tensor's factor.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> effective(torch.tensor([0, 127, 255]), formats.MXFP8_E4M3, 1.0).tolist()
    [5.877471754111438e-39, 1.0, nan]
    """
    return rounding.decode(codes, format.scale).mul_(factor)


def unscaled(values: Float[Tensor, "..."], scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Divide values by their scales in place; where the scale is 0, zeros remain, each with its sign.

    Examples
    --------
    >>> import torch
    >>> unscaled(torch.tensor([3.0, -3.0]), torch.tensor([2.0, 0.0])).tolist()
    [1.5, -0.0]
    """
    return values.div_(scale.masked_fill(scale == 0, math.inf).to(values.dtype))


def largest_in_tiles(v: Float[Tensor, "b nr p nc q"], scratch: Scratch) -> Float[Tensor, "b nr 1 nc 1"]:
    """Return the largest magnitude of each tile; NaN if there is one in it."""
    largest = torch.abs(v, out=scratch.like(v, v.dtype, "work"))
    for axis in (4, 2):
        if largest.shape[axis] > 1:
            largest = largest.amax(axis, keepdim=True)
    return largest


def _round(
    v: Tensor,
    floor: int | Tensor,
    bound: float | Tensor | None,
    format: Format,
    carrier: Carrier,
    generator: torch.Generator | None,
    out: Tensor,
    scratch: Scratch,
) -> None:
    """Clamp to ±bound, round, and give back the sign of zero if the format has one, all in the carrier.

    `out` may be v itself.
    """
    v = scratch.cast(v, carrier.dtype, "carried")
    work = scratch.like(v, carrier.dtype, "work")
    apart = out.dtype == carrier.dtype and out.data_ptr() != v.data_ptr()  # the signs are read when all else is done
    rounded = out if apart else scratch.like(v, carrier.dtype, "rounded")
    clamped = v if bound is None else _clamp(v, bound, rounded)
    if generator is None:
        rounding.nearest(clamped, floor, format, carrier, out=rounded, work=work)
    else:
        rounding.stochastic(clamped, floor, format, carrier, out=rounded, work=work, generator=generator)
    torch.copysign(rounded, v, out=rounded)
    if format.sign == "complement":
        rounded += 0.0
    if rounded is not out:
        out.copy_(rounded)


def _clamp(v: Tensor, bound: float | Tensor, out: Tensor) -> Tensor:
    """Clamp to ±bound; NaN stays."""
    if isinstance(bound, Tensor):
        return torch.maximum(torch.minimum(v, bound, out=out), -bound, out=out)  # a fifth of the time of clamp
    return torch.clamp(v, -bound, bound, out=out)


def _holds(format: Format, other: Format) -> bool:
    """Return whether every number of the other IEEE format is one of this format."""
    return format.mantissa_bits >= other.mantissa_bits and format.exponent_bits >= other.exponent_bits
