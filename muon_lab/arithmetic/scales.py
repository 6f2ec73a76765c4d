r"""The scale of a block, from the bits of its largest magnitude.

A power-of-two scale :math:`2^e` (E8M0, byte :math:`e + 127`) is one addition and one shift away from the bits b of the
block's largest magnitude a as a double, with :math:`C = 52` fraction bits:

.. math:: e + 127 = \mathrm{clamp}\big((b + ADD \gg C) - 1023 + 127 - emax,\; 0,\; 254\big).

(The bits of a float32 would do, if float32 had no subnormals: an int8 block just above :math:`2^{-127}` needs byte 0 or
1.) ADD decides from which fraction on the exponent is one larger:

========= ================================================= =============================================
mode      exponent e                                        ADD, in units of the last fraction bit
========= ================================================= =============================================
``floor`` ⌊log₂ a⌋ - emax (OCP MX)                          0
``ceil``  ⌈log₂ a⌉ - emax                                   2^C - 1: any fraction
``rceil`` ⌈log₂(a / max)⌉ (NVIDIA's round-up)               2^C - 1 less the fraction of max: any larger one
``even``  ⌊log₂ a'⌋ - emax, a' = a to M bits, ties away     2^(C-M-1): half a unit of the last place of M bits
========= ================================================= =============================================

``rceil`` and ``ceil`` never saturate an element; ``floor`` maps up to a fifth of all blocks' largest elements down to
max, by up to 12.5 % (E4M3, E5M2, E3M2), 6.25 % (E2M3) or 25 % (E2M1); ``even`` some of them, by less.

What the MX standard leaves open: NaN or Inf in a block gives byte 255, and the block is NaN; a block of zeros has
byte 0; e is clamped to [-127, 127], so that the largest elements may saturate at the top (float64 data, int8) and the
smallest vanish at the bottom.

References
----------
OCP MX v1.0, sections 5.1 and 6.3; the mode ``rceil`` is the rounding of cuBLAS and PTX ``cvt.rp.satfinite.ue8m0x2``;
``even`` is that of AMD Quark.
"""

import math

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from muon_lab.arithmetic import rounding
from muon_lab.arithmetic.formats import E8M0, FP32, FP64, Format
from muon_lab.arithmetic.rounding import DOUBLE, Carrier
from muon_lab.nearest import unknown

#: How the exponent of a power-of-two scale is rounded.
MODES = ("floor", "ceil", "rceil", "even")
#: E8M0's NaN, the scale of a block with NaN or Inf in it.
NAN = 255


def checked(mode: str) -> str:
    """Return a scale mode; raise ``ValueError`` for one that is none of `MODES`."""
    if mode not in MODES:
        raise unknown("scale mode", mode, MODES)
    return mode


def addend(mode: str, element: Format) -> int:
    """Return ADD of the module's table, for the bits of a double.

    Examples
    --------
    >>> from muon_lab.arithmetic import formats
    >>> [hex(addend(mode, formats.FP8_E4M3) >> 29) for mode in MODES]  # the same for float32
    ['0x0', '0x7fffff', '0x1fffff', '0x80000']
    """
    every_fraction = 2**FP64.mantissa_bits - 1
    spare = FP64.mantissa_bits - element.mantissa_bits
    match mode:
        case "floor":
            return 0
        case "ceil":
            return every_fraction
        case "rceil":
            return every_fraction - ((element.max_code << spare) & every_fraction)
        case _:
            return 1 << (spare - 1)


def power_of_two_bytes(largest: Float[Tensor, "*blocks"], mode: str, element: Format) -> Int[Tensor, "*blocks"]:
    """Return the E8M0 byte of each block from its largest magnitude.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> largest = torch.tensor([150.0, 448.0, 450.0, 0.0, 2.0**-149, torch.inf])
    >>> [power_of_two_bytes(largest, mode, formats.FP8_E4M3).tolist() for mode in ("rceil", "ceil")]
    [[126, 127, 128, 0, 0, 255], [127, 128, 128, 0, 0, 255]]
    """
    bits = largest.double().view(torch.int64)
    exponents = (bits + addend(mode, element)).bitwise_right_shift_(FP64.mantissa_bits)
    exponents += E8M0.bias - FP64.bias - element.emax
    return exponents.clamp_(0, NAN - 1).masked_fill_(~largest.isfinite(), NAN)


def power_of_two_bits(codes: Int[Tensor, "*blocks"], exponent: int, carrier: Carrier) -> Int[Tensor, "*blocks"]:
    r"""Return the bits of :math:`2^{exponent}` times the scales of these bytes, where that is normal in the carrier.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic.rounding import SINGLE
    >>> power_of_two_bits(torch.tensor([127, 130], dtype=torch.int32), -1, SINGLE).view(torch.float32).tolist()
    [0.5, 4.0]
    """
    return (codes + (exponent + carrier.format.bias - E8M0.bias)).bitwise_left_shift_(carrier.format.mantissa_bits)


def global_scale(largest: Float[Tensor, ""], element: Format, scale: Format) -> Float[Tensor, ""]:
    r"""Return a tensor's factor :math:`a / (max_{scale}\, max_{element})`, rounded to float32.

    It lets the block with the tensor's largest magnitude a have the largest scale. It is 0 for a tensor of zeros.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> float(global_scale(torch.tensor(2688.0), formats.E2M1, formats.FP8_E4M3))
    1.0
    """
    return (largest.double() / (scale.max * element.max)).clamp(max=FP32.max).float()


def float_bytes(
    largest: Float[Tensor, "*blocks"], factor: Float[Tensor, ""], element: Format, scale: Format
) -> UInt8[Tensor, "*blocks"]:
    r"""Return the code of each block's floating-point scale, :math:`a / (max_{element}\, factor)` to nearest.

    The scale of a block is 0, and its elements are flushed, if its largest magnitude is less than about 2.2e-6 times
    the tensor's (NVFP4). NaN or Inf in a block give a NaN scale.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import formats
    >>> largest = torch.tensor([2688.0, 6.0, 0.0, torch.inf])
    >>> float_bytes(largest, torch.tensor(1.0), formats.E2M1, formats.FP8_E4M3).tolist()
    [126, 56, 0, 127]
    """
    wanted = (largest.double() / (element.max * factor.double())).clamp_(max=scale.max)
    wanted.masked_fill_(factor == 0, 0.0)
    rounded, work = torch.empty_like(wanted), torch.empty_like(wanted)
    rounding.nearest(wanted, DOUBLE.power_of_two(scale.emin), scale, DOUBLE, out=rounded, work=work)
    return rounding.encode(rounded.masked_fill_(~largest.isfinite(), math.nan), scale)
