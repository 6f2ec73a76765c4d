r"""Quantizing tensors: one number at a time, or in blocks with a common scale (OCP MX, NVFP4).

A block :math:`x_1, \dots, x_k` becomes one scale :math:`s` and k elements :math:`p_i = \mathrm{R}(x_i / s)` of a small
format; its value is :math:`s\,p_i`. For an MX format s is a power of two, so R(x/s) s = R(x) with the quantum of the
block: nothing is divided, and the arithmetic is exact. NVFP4 has a floating-point scale and a factor for the whole
tensor; its quotients are taken in float64, its values :math:`(p_i s)\,factor` rounded once to float32.

What is decided here where standards leave it open:

* elements saturate to the largest magnitude, sign kept, and never become Inf or NaN of their own;
* **NaN or Inf** anywhere in a block gives the scale NaN (byte 0xFF, of NVFP4's E4M3 0x7F) and a block of NaN, whose
  codes are 0: elements need no NaN, and processors do not agree on the sign of one;
* a block of **zeros** has scale byte 0;
* the **sign of zero** is kept, also of what rounds to zero (int8 has one zero only);
* **subnormals** are kept, of elements and of float32 data;
* a value beyond float32 (only ``ceil`` and ``rceil`` of a block near its top) is Inf; float64 data has no such end;
* a **ragged** last block has fewer elements, as if padded with zeros; blocks never run from one row into the next;
* scalar formats: fp8 and narrower saturate, also Inf; NaN stays NaN, and is refused where the format has none;
  bf16, fp16, tf32 and fp32 overflow to Inf.

bfloat16 and float16 are widened to float32 before anything else, scales included; float64 is rounded from float64,
never through float32. Values are float32, for float64 data float64.

References
----------
OCP Microscaling Formats (MX) v1.0, sections 5 and 6; OFP8 rev. 1.0, table 3; Mishra et al., arXiv 2506.08027 (rounding
scales up).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from muon_lab.arithmetic import blocks, formats, kernels, scales
from muon_lab.arithmetic.blocks import Layout, Piece
from muon_lab.arithmetic.formats import E8M0, FP32, BlockFormat, Format
from muon_lab.arithmetic.kernels import Kernel
from muon_lab.arithmetic.rounding import DOUBLE, SINGLE, carrier, code_dtype, decoder, encode
from muon_lab.arithmetic.scratch import Scratch
from muon_lab.compiling import as_written
from muon_lab.nearest import unknown

#: How an element is rounded.
ROUNDINGS = ("nearest", "stochastic")
#: What can be quantized.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A tensor as codes and scales.

    Parameters
    ----------
    format : Format or BlockFormat
        What the codes mean.
    codes : tensor
        One code an entry, sign bit on top, not packed: uint8 up to 8 bits, int32 up to 31, int64 beyond.
    scale_bytes : uint8 tensor, optional
        One scale code a block: the shape of `codes`, each axis in blocks shortened to its number of blocks.
    global_scale : float
        Factor of the whole tensor; 1 unless the format has one.
    axis : int
        The axis along which blocks run.
    tile : int, optional
        Edge of square tiles over the last two axes, instead of blocks along one.
    dtype : torch.dtype
        dtype of the values.
    """

    format: Format | BlockFormat
    codes: Int[Tensor, "..."] | UInt8[Tensor, "..."]
    scale_bytes: UInt8[Tensor, "..."] | None
    global_scale: float
    axis: int
    tile: int | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of storage: codes packed, scales and the global scale (4 bytes) included.

        Examples
        --------
        >>> import torch
        >>> [quantize(torch.ones(64, 64), name).nbytes for name in ("mxfp8_e4m3", "mxfp4_e2m1", "nvfp4", "bf16")]
        [4224, 2176, 2308, 8192]
        """
        if isinstance(self.format, Format):
            return -(-self.codes.numel() * self.format.bits // 8)
        assert self.scale_bytes is not None
        elements = -(-self.codes.numel() * self.format.element.bits // 8)
        per_block = -(-self.scale_bytes.numel() * self.format.scale.bits // 8)
        return elements + per_block + 4 * self.format.global_scale

    @as_written
    def dequantize(self) -> Float[Tensor, "..."]:
        """Return the values, decoded from codes and scales.

        Examples
        --------
        >>> import torch
        >>> quantize(torch.tensor([0.3, -2.0, 957.0]), "mxfp8_e4m3").dequantize().tolist()
        [0.3125, -2.0, 960.0]
        """
        layout = _layout(self.codes, self.format, self.axis, self.tile)
        values = layout.new(self.codes, self.dtype)
        codes, out = layout.matrices(self.codes), layout.matrices(values)
        holder = SINGLE if self.dtype == torch.float32 and _in_single(self.format) else DOUBLE
        decoded = decoder(self.format if isinstance(self.format, Format) else self.format.element, holder)
        if isinstance(self.format, Format):
            for piece in _pieces(layout, self.format):
                piece.of(out).copy_(decoded(piece.of(codes)))
            return values
        assert self.scale_bytes is not None
        scale_codes = self.scale_bytes.permute(layout.order).reshape(layout.grid)
        for piece in _pieces(layout, self.format):
            scale = kernels.effective(piece.scales(scale_codes), self.format, self.global_scale)
            elements = decoded(piece.of(codes))
            piece.of(out).copy_(elements.mul_(scale.to(holder.dtype)))
        return values


@as_written
def quantize(
    x: Shaped[Tensor, "..."],
    format: str | Format | BlockFormat,
    *,
    scale_mode: str = "rceil",
    axis: int = -1,
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
    tile: int | None = None,
) -> Quantized:
    """Return a tensor's codes and scales. The tensor is neither changed nor aliased.

    Parameters
    ----------
    x : real floating-point tensor of any shape
        The data: float64, float32, bfloat16 or float16.
    format : str, Format or BlockFormat
        A name of `formats.known`, or a record of your own.
    scale_mode : "floor", "ceil", "rceil" or "even"
        How the exponent of a power-of-two scale is rounded; of no effect on formats without one.
    axis : int
        The axis along which blocks run: of a product, the one that is summed over. The two copies of a weight are two
        calls; neither follows from the other.
    rounding : "nearest" or "stochastic"
        To nearest, ties to even; or up with a probability equal to the fraction, from `generator`. Stochastic rounding
        is unbiased if no element saturates: in MX formats with ``ceil`` and ``rceil``.
    generator : torch.Generator, optional
        Source of randomness: needed for stochastic rounding, refused otherwise. One number an entry is drawn, and draws
        follow memory: equal values that lie in another order get other draws; ``x.contiguous()`` puts them in one.
    tile : int, optional
        Scales a square tile of this edge over the last two axes, instead of a block along one: Q(Wᵀ) = Q(W)ᵀ.

    Raises
    ------
    ValueError
        If the tensor isn't dense and real floating point, a name is unknown, the axis doesn't exist, the tile isn't
        positive, the generator is missing or not needed, an argument has another type, or NaN meets a scalar format
        that has none.

    Examples
    --------
    >>> import torch
    >>> q = quantize(torch.tensor([[0.3, -2.0, 957.0], [0.0, 1e-3, -0.0]]), "mxfp8_e4m3", scale_mode="floor")
    >>> q.scale_bytes.tolist(), q.codes.tolist()
    ([[128], [109]], [[34, 184, 126], [0, 120, 128]])
    >>> q.dequantize()[0].tolist()
    [0.3125, -2.0, 896.0]
    """
    record = _checked(x, format, scale_mode, axis, rounding, generator, tile)
    x = plain(x)
    layout, scratch = _layout(x, record, axis, tile), Scratch()
    kernel, factor = _kernel(x, record, scale_mode, generator, layout, scratch)
    data = layout.matrices(x)
    element = record if isinstance(record, Format) else record.element
    dtype = carrier(x).dtype if generator is None and _in_single(record) else torch.float64
    codes = layout.new(x, code_dtype(element))
    target = layout.matrices(codes)
    if isinstance(record, Format):
        for piece in _pieces(layout, record):
            values, _ = kernels.exactly(kernel, piece.of(data), dtype, scratch)
            piece.of(target).copy_(encode(values, record))
        return Quantized(record, codes, None, factor, axis, tile, carrier(x).dtype)
    scale_codes = torch.empty(layout.grid, dtype=torch.uint8, device=x.device)
    for piece in _pieces(layout, record):
        values, of_piece = kernels.exactly(kernel, piece.of(data), dtype, scratch)
        piece.scales(scale_codes).copy_(of_piece)
        scale = kernels.effective(of_piece, record, factor)
        elements = kernels.unscaled(values, scale)
        if (bad := scale.isnan()).any():
            elements.masked_fill_(bad, 0.0)
        piece.of(target).copy_(encode(elements, record.element))
    return Quantized(record, codes, layout.spread(scale_codes, x), factor, axis, tile, carrier(x).dtype)


@as_written
def roundtrip(
    x: Shaped[Tensor, "..."],
    format: str | Format | BlockFormat,
    *,
    scale_mode: str = "rceil",
    axis: int = -1,
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
    tile: int | None = None,
    out: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "..."]:
    """Return ``quantize(...).dequantize()``, bit for bit, without making codes: a few passes over the data.

    Parameters
    ----------
    out : tensor, optional
        Where the values go: of x's shape, float32 (float64 for float64 data), in memory of its own. Without it the
        result is new, and has the axes of x in the same order in memory.

    Other parameters and errors are those of `quantize`.

    Raises
    ------
    ValueError
        As `quantize`; or if `out` has another shape or dtype, or shares memory with x.

    Examples
    --------
    >>> import torch
    >>> roundtrip(torch.tensor([1.0, 1.0625, -449.0, 5e-324]), "fp8_e4m3")
    tensor([   1.,    1., -448.,    0.])
    >>> x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    >>> error = lambda mode: float((roundtrip(x, "mxfp8_e4m3", scale_mode=mode) - x).norm() / x.norm())
    >>> print(f"{error('rceil'):.3f} {error('floor'):.3f}")
    0.027 0.029
    """
    record = _checked(x, format, scale_mode, axis, rounding, generator, tile)
    x = plain(x)
    layout = _layout(x, record, axis, tile)
    values = layout.new(x, carrier(x).dtype) if out is None else _checked_out(out, x)
    return _write(x, record, scale_mode, generator, layout, Scratch(), values)


@as_written
def operand(
    x: Float[Tensor, "..."], record: Format | BlockFormat, scale_mode: str, axis: int, scratch: Scratch, purpose: str
) -> Float[Tensor, "..."]:
    """Return the values of ``roundtrip`` in scratch memory, which the next call for this purpose overwrites.

    A checked format and a checked, plain tensor are the caller's business. What is saved is fresh memory, half of the
    cost of a round trip of a few megabytes.
    """
    layout = _layout(x, record, axis, None)
    values = scratch.like(x.permute(layout.order), carrier(x).dtype, purpose).permute(layout.back)
    return _write(x, record, scale_mode, None, layout, scratch, values)


@as_written
def result(x: Float[Tensor, "..."], record: Format, scratch: Scratch) -> Float[Tensor, "..."]:
    """Return the values of ``roundtrip`` in the memory of x itself, if that is one run, else in new memory.

    A checked format and a plain tensor of float32 or float64 are the caller's business.

    Raises
    ------
    ValueError
        If NaN meets a format that has none.
    """
    flat = x.reshape(-1)
    parts = flat.split(blocks.PIECE) if flat.numel() else ()
    cast = kernels.CASTS.get(record) if x.dtype == torch.float32 else None
    if cast is not None:  # what the kernel does, without its preparations
        for part in parts:
            part.copy_(scratch.like(part, cast, "half").copy_(part))
    else:
        kernel = kernels.scalar(record, None, scratch)
        for part in parts:
            kernel(part, part)
    return flat.view(x.shape)


def plain(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return a tensor without its gradient, and with the bits that it shows: a view of it where there is one."""
    return x.detach().resolve_neg()


def _write(
    x: Tensor,
    record: Format | BlockFormat,
    mode: str,
    generator: torch.Generator | None,
    layout: Layout,
    scratch: Scratch,
    values: Tensor,
) -> Tensor:
    """Write the values of the rounded x, a piece at a time; return them."""
    kernel, _ = _kernel(x, record, mode, generator, layout, scratch)
    data, target = layout.matrices(x), layout.matrices(values)
    for piece in _pieces(layout, record):
        kernel(piece.of(data), piece.of(target))
    if target.data_ptr() != values.data_ptr():
        values.copy_(target.reshape([values.shape[axis] for axis in layout.order]).permute(layout.back))
    return values


def _in_single(format: Format | BlockFormat) -> bool:
    """Return whether float32 holds the format's numbers, but for overflow, and its codes."""
    return format.bits < FP32.bits if isinstance(format, Format) else format.scale == E8M0


def _kernel(
    x: Tensor,
    format: Format | BlockFormat,
    mode: str,
    generator: torch.Generator | None,
    layout: Layout,
    scratch: Scratch,
) -> tuple[Kernel, float]:
    """Return what rounds one piece of x, and the factor of the whole tensor."""
    if isinstance(format, Format):
        return kernels.scalar(format, generator, scratch), 1.0
    if format.scale == E8M0:
        return kernels.power_of_two_scaled(format, mode, generator, scratch), 1.0
    factor = torch.ones((), device=x.device)
    if format.global_scale:
        factor = scales.global_scale(_largest_finite(x, format, layout, scratch), format.element, format.scale)
    return kernels.float_scaled(format, factor, generator, scratch), float(factor)


def _largest_finite(x: Tensor, format: BlockFormat, layout: Layout, scratch: Scratch) -> Float[Tensor, ""]:
    """Return the largest magnitude of all blocks that are finite."""
    dtype = carrier(x).dtype
    largest = torch.zeros((), dtype=dtype, device=x.device)
    data = layout.matrices(x)
    for piece in _pieces(layout, format):
        of_tiles = kernels.largest_in_tiles(scratch.cast(piece.of(data), dtype, "data"), scratch)
        largest = torch.maximum(largest, of_tiles.nan_to_num(nan=0.0, posinf=0.0).max())
    return largest


def _layout(x: Tensor, format: Format | BlockFormat, axis: int, tile: int | None) -> Layout:
    """Return the blocks of a tensor."""
    if isinstance(format, Format):
        return blocks.whole(x)
    return blocks.along(x, axis % x.ndim, format.block) if tile is None else blocks.tiles(x, tile)


def _pieces(layout: Layout, format: Format | BlockFormat) -> Iterator[Piece]:
    """Yield the pieces of a layout, half as long where the scales are floating point: that work is in float64."""
    in_double = isinstance(format, BlockFormat) and format.scale != E8M0
    return blocks.pieces(layout, blocks.PIECE // 2) if in_double else blocks.pieces(layout)


def _checked(
    x: Tensor,
    format: str | Format | BlockFormat,
    mode: str,
    axis: int,
    rounding: str,
    generator: torch.Generator | None,
    tile: int | None,
) -> Format | BlockFormat:
    """Return the format; raise ``ValueError`` for a request that has no answer."""
    record = formats.of_numbers(format)
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        given = x.dtype if isinstance(x, Tensor) else f"of type {type(x).__name__}"
        raise ValueError(f"the tensor to quantize is {given}: float64, float32, bfloat16 or float16 is needed")
    if x.layout != torch.strided:
        raise ValueError(f"the tensor to quantize is {x.layout}: a dense one is needed")
    scales.checked(mode)
    if rounding not in ROUNDINGS:
        raise unknown("rounding", rounding, ROUNDINGS)
    if rounding == "nearest" and generator is not None:
        raise ValueError("rounding 'nearest' takes no generator")
    if rounding == "stochastic" and not isinstance(generator, torch.Generator):
        raise ValueError(f"rounding 'stochastic' needs a generator, a torch.Generator, not {generator!r}")
    if not _is_integer(axis) or not (tile is None or _is_integer(tile)):
        raise ValueError(f"axis must be an integer, and tile an integer or None, not {axis!r} and {tile!r}")
    if x.ndim == 0 and isinstance(record, BlockFormat):
        raise ValueError(f"the tensor to quantize is a single number, without an axis for the blocks of {record.name}")
    if not -x.ndim <= axis < x.ndim and x.ndim > 0:
        raise ValueError(f"axis {axis} of a tensor of shape {tuple(x.shape)}: {-x.ndim} to {x.ndim - 1} exist")
    if tile is not None and (tile < 1 or x.ndim < 2 or axis % x.ndim < x.ndim - 2):
        raise ValueError(
            f"tile {tile} with axis {axis} on shape {tuple(x.shape)}: "
            "a positive edge, at least 2 axes, and one of the last two as axis are needed"
        )
    return record


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _checked_out(out: Tensor, x: Tensor) -> Tensor:
    """Return where values go; raise ``ValueError`` if they cannot."""
    dtype = carrier(x).dtype
    if out.shape != x.shape or out.dtype != dtype:
        raise ValueError(f"out is {out.dtype} of shape {tuple(out.shape)}: {dtype} of shape {tuple(x.shape)} is needed")
    if out.numel() and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        raise ValueError("out shares memory with the tensor to quantize, which must stay as it is")
    return out
