r"""Products as low-precision hardware forms them, emulated: operands rounded, sums wide, results stored narrow.

.. math:: \operatorname{store}(\alpha \sum_k Q(A_{ik})\, Q(B_{kj}) + \beta\, C_{ij})

Q rounds both operands along the axis that is summed over, which for MX formats is where their blocks run. A product in
float32 of operands rounded to bfloat16 is as accurate as a native one, which sums in float32 too, and on a processor
without bfloat16 units tens of times faster.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import formats, scales
from muon_lab.arithmetic.formats import FP32, BlockFormat, Format
from muon_lab.arithmetic.microscaling import DTYPES, operand, plain, result, roundtrip
from muon_lab.arithmetic.policy import Exact, mirrored, two_to
from muon_lab.arithmetic.scratch import Scratch
from muon_lab.compiling import as_written

#: Significant bits of float32.
SIGNIFICANT = 24

#: Formats of operands in which results are stored as well; after all others results stay as they were summed.
STORED = ("fp64", "fp32", "bf16", "fp16")


@runtime_checkable
class Accumulator(Protocol):
    """How a product of rounded operands is summed."""

    def product(self, A: Float[Tensor, "*batch m k"], B: Float[Tensor, "*batch k n"]) -> Float[Tensor, "*batch m n"]:
        """Return A B."""
        ...


@dataclass(frozen=True)
class Wide:
    """Sums in a dtype of torch: float32, as documented for the tensor cores of Blackwell, or float64 as its oracle.

    Raises
    ------
    ValueError
        For any other dtype.

    Examples
    --------
    >>> import torch
    >>> Wide(torch.float64).product(torch.ones(1, 3), torch.ones(3, 1))
    tensor([[3.]])
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"products are summed in torch.float32 or torch.float64, not in {self.dtype!r}")

    def product(self, A: Float[Tensor, "*batch m k"], B: Float[Tensor, "*batch k n"]) -> Float[Tensor, "*batch m n"]:
        """Return A B in the dtype of A."""
        return (A.to(self.dtype) @ B.to(self.dtype)).to(A.dtype)


@dataclass(frozen=True)
class TensorCore:
    r"""Sums as a tensor core does: groups of products, aligned to the largest exponent among them and truncated.

    The accumulator and the products of a group are cut to multiples of :math:`2^{e - bits}`, e the largest exponent
    among them, summed exactly, and cut again to float32. Slow: for comparison, not for sweeps.

    Parameters
    ----------
    bits : int
        Fraction bits kept: 13 models FP8 on Hopper, 25 FP8 on Blackwell (mma.sync).
    group : int
        Products summed at once.

    Raises
    ------
    ValueError
        If one of them is not a positive integer.

    References
    ----------
    Khattak and Mikaitis, *Accurate Models of NVIDIA Tensor Cores*, arXiv 2512.07004.

    Examples
    --------
    >>> import torch
    >>> x = torch.rand(1, 4096, generator=torch.Generator().manual_seed(0))
    >>> for bits in (13, 25):
    ...     print(f"{float(TensorCore(bits).product(x, x.mT) / (x @ x.mT)):.4f}")
    0.9219
    1.0000
    """

    bits: int = 13
    group: int = 32

    def __post_init__(self) -> None:
        if not all(isinstance(count, int) and count >= 1 for count in (self.bits, self.group)):
            raise ValueError(
                f"bits and group of a tensor core must be integers of at least 1, not {self.bits!r} and {self.group!r}"
            )

    @as_written
    def product(self, A: Float[Tensor, "*batch m k"], B: Float[Tensor, "*batch k n"]) -> Float[Tensor, "*batch m n"]:
        """Return A B in the dtype of A."""
        total = torch.zeros(*A.shape[:-1], B.shape[-1], dtype=torch.float64, device=A.device)
        for start in range(0, A.shape[-1], self.group):
            left, right = A[..., start : start + self.group].double(), B[..., start : start + self.group, :].double()
            terms = torch.cat([left.unsqueeze(-1) * right.unsqueeze(-3), total.unsqueeze(-2)], dim=-2)
            _, exponent = torch.frexp(terms.abs().amax(dim=-2, keepdim=True))
            quantum = two_to((exponent - 1 - self.bits).clamp(min=-1022))
            total = _truncated_to_float32(((terms / quantum).trunc_() * quantum).sum(dim=-2))
        return total.to(A.dtype)


@dataclass(frozen=True)
class Rounded:
    """Arithmetic with rounded operands and stored results.

    Rounding is not differentiable: no result carries a gradient, whatever the operands do.

    Parameters
    ----------
    operands : str, Format or BlockFormat
        A name of `formats.known`, such as bf16, tf32, fp8_e4m3, mxfp8_e4m3, nvfp4, or a record of your own.
    stored : str or Format, optional
        The scalar format of results: by default that of the operands if it is fp64, fp32, bf16 or fp16, else results
        stay as they were summed. Tensors of results are float32, for float64 data float64.
    scale_mode : str
        How the scales of MX blocks are rounded.
    accumulator : Accumulator, optional
        How products are summed, such as `Wide` or a model of a tensor core: by default in float32, or in float64 if
        the operands have more digits than float32.

    Rounded operands are kept in memory that the next product uses again, one set a thread, as large as the largest pair
    so far: it is freed with the value.

    Raises
    ------
    ValueError
        For an unknown format or scale mode, a format of scales, blocks of results, or an accumulator that is none; when
        called, for operands that are not real floating point, have fewer than two axes or do not fit, and for NaN where
        the format has none.

    Examples
    --------
    The published Polar Express coefficients do not survive MXFP8 operands; the plain Taylor steps do.

    >>> import torch
    >>> from muon_lab import polar
    >>> G = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    >>> for name in ("taylor", "polar_express"):
    ...     X = polar.newton_schulz(polar.schedules.get(name), Rounded("mxfp8_e4m3"))(G)
    ...     print(name, bool(torch.isfinite(X).all()))
    taylor True
    polar_express False
    """

    operands: str | Format | BlockFormat
    stored: str | Format | None = None
    scale_mode: str = "rceil"
    accumulator: Accumulator | None = None
    scratch: Scratch = field(default_factory=Scratch, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        formats.of_numbers(self.operands)
        if self.stored is not None:
            formats.of_results(self.stored)
        scales.checked(self.scale_mode)
        accumulates = isinstance(self.accumulator, Accumulator) and not isinstance(self.accumulator, type)
        if self.accumulator is not None and not accumulates:
            raise ValueError(f"an accumulator must be a value with a product, such as Wide(), not {self.accumulator!r}")

    def norm(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch 1 1"]:
        """Return the Frobenius norm of each matrix in float64: a matrix is normalised before it is rounded."""
        return Exact().norm(X.detach())

    @as_written
    def store(self, X: Float[Tensor, "*batch m n"], dtype: torch.dtype) -> Float[Tensor, "*batch m n"]:
        """Round to the format of results; the tensor itself stays in float32, or in float64 for float64 data."""
        X = _matrix(X)
        return X if self.kept is None else roundtrip(X, self.kept)

    def roundoff(self, dtype: torch.dtype) -> float:
        """Return the unit roundoff of operands or results, whichever is coarser, for data of a dtype."""
        kept = torch.finfo(dtype).eps / 2 if self.kept is None else self.kept.unit_roundoff
        return max(self._element.unit_roundoff, kept)

    @cached_property
    def kept(self) -> Format | None:
        """The format to which results are rounded, or None where they stay as they were summed."""
        if self.stored is not None:
            return formats.of_results(self.stored)
        record = self._record
        return record if isinstance(record, Format) and record in map(formats.get, STORED) else None

    @cached_property
    def summed(self) -> Accumulator:
        """How products are summed: the accumulator, or the one that stands for None."""
        if self.accumulator is not None:
            return self.accumulator
        return Wide(torch.float64 if self._element.mantissa_bits > FP32.mantissa_bits else torch.float32)

    @as_written
    def gram(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m m"]:
        """Return X Xᵀ."""
        Q = self._operand(X, -1, "left")
        return self._result(self.summed.product(Q, Q.mT))

    @as_written
    def square(
        self, A: Float[Tensor, "*batch m m"], *, alpha: float = 1.0, beta: float = 0.0
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A² + beta·A for a symmetric A."""
        return self.matmul(A, A, alpha=alpha, beta=beta, C=A)

    @as_written
    def commuting(
        self,
        A: Float[Tensor, "*batch m m"],
        B: Float[Tensor, "*batch m m"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m m"] | None = None,
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A B + beta·C for symmetric A, B, C where A B = B A: the lower triangle, mirrored."""
        return mirrored(self.matmul(A, B, alpha=alpha, beta=beta, C=C))

    @as_written
    def matmul(
        self,
        A: Float[Tensor, "*batch m k"],
        B: Float[Tensor, "*batch k n"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m n"] | None = None,
    ) -> Float[Tensor, "*batch m n"]:
        """Return alpha·A B + beta·C, the sum rounded once."""
        _require_one_precision(A, B, C)
        _require_fit(A, B, C)
        left = self._operand(A, -1, "left")
        same = A is B and isinstance(self._record, Format)
        X = self.summed.product(left, left if same else self._operand(B, -2, "right"))
        if alpha != 1.0:
            X = X.mul_(alpha)
        if C is not None:
            X = X.add_(_matrix(C), alpha=beta)
        return self._result(X)

    def _operand(self, X: Float[Tensor, "*batch m n"], axis: int, side: str) -> Float[Tensor, "*batch m n"]:
        """Return X rounded, in memory that the next product uses again."""
        return operand(_matrix(X), self._record, self.scale_mode, axis, self.scratch, side)

    def _result(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
        """Round a product in its own memory."""
        return X if self.kept is None else result(X, self.kept, self.scratch)

    @cached_property
    def _record(self) -> Format | BlockFormat:
        """The format of the operands."""
        return formats.get(self.operands)

    @property
    def _element(self) -> Format:
        """The format of their single numbers: that of the elements for blocks."""
        record = self._record
        return record if isinstance(record, Format) else record.element


def _matrix(X: Tensor) -> Tensor:
    """Return a plain matrix, or batch of them; raise ``ValueError`` for what is none."""
    if not isinstance(X, Tensor) or X.dtype not in DTYPES or X.ndim < 2:
        given = f"{X.dtype} of shape {tuple(X.shape)}" if isinstance(X, Tensor) else f"of type {type(X).__name__}"
        raise ValueError(
            f"a matrix must have at least 2 axes and be float64, float32, bfloat16 or float16, but this one is {given}"
        )
    return plain(X)


def _require_one_precision(*operands: Tensor | None) -> None:
    """Raise ``ValueError`` if some operands are float64 and some are not: results have the precision of operands."""
    dtypes = [str(X.dtype) for X in operands if isinstance(X, Tensor)]
    if 0 < dtypes.count("torch.float64") < len(dtypes):
        raise ValueError(f"operands of a product must all be float64 or none, but these are {', '.join(dtypes)}")


def _require_fit(A: Tensor, B: Tensor, C: Tensor | None) -> None:
    """Raise ``ValueError`` unless A B exists and has the shape of C, batches broadcast; what is no matrix is left."""
    given = [X for X in (A, B, C) if X is not None]
    if not all(isinstance(X, Tensor) and X.ndim >= 2 for X in given):
        return
    batches, found = {X.shape[:-2] for X in given}, (A.shape[-2], B.shape[-1])
    if A.shape[-1] == B.shape[-2] and (C is None or C.shape[-2:] == found) and _broadcast(batches):
        return
    shapes = ", ".join(str(tuple(X.shape)) for X in given)
    raise ValueError(f"operands of a product must be (m, k) and (k, n), added to (m, n), but these are {shapes}")


def _broadcast(batches: set[torch.Size]) -> bool:
    """Return whether batch axes go together."""
    try:
        return len(batches) == 1 or bool(torch.broadcast_shapes(*batches) is not None)
    except RuntimeError:
        return False


def _truncated_to_float32(X: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Cut float64 numbers to float32's 24 significant bits, towards zero."""
    _, exponent = torch.frexp(X)
    quantum = two_to((exponent - SIGNIFICANT).clamp(min=-1022))
    return (X / quantum).trunc_() * quantum
