r"""Arithmetic policies: all that an iteration asks of its numbers.

An iteration written against `Arithmetic` runs unchanged in exact products, in emulated low precision, over shards or
on a symmetric-product kernel. Every product may carry a fused addition, :math:`\alpha \cdot product + \beta \cdot C`,
which is rounded once instead of three times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from muon_lab.compiling import as_written

#: The largest power of two, and the smallest, by which scaling is exact: both are normal numbers of the dtype.
EXACT_EXPONENT = {torch.float32: 126, torch.float64: 1022}


@runtime_checkable
class Arithmetic(Protocol):
    """What an iteration asks of its numbers. Matrices are 2-D, or 3-D with a leading batch axis."""

    def norm(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch 1 1"]:
        """Return the Frobenius norm of each matrix in float64, safe from overflow and underflow."""
        ...

    def roundoff(self, dtype: torch.dtype) -> float:
        """Return the unit roundoff of operands or results, whichever is coarser, for data of a dtype."""
        ...

    def store(self, X: Float[Tensor, "*batch m n"], dtype: torch.dtype) -> Float[Tensor, "*batch m n"]:
        """Bring a normalised matrix into the format in which the iteration keeps it; the data came in this dtype."""
        ...

    def gram(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m m"]:
        """Return X Xᵀ."""
        ...

    def square(
        self, A: Float[Tensor, "*batch m m"], *, alpha: float = 1.0, beta: float = 0.0
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A² + beta·A for a symmetric A."""
        ...

    def commuting(
        self,
        A: Float[Tensor, "*batch m m"],
        B: Float[Tensor, "*batch m m"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m m"] | None = None,
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A B + beta·C for symmetric A, B, C where A B = B A: symmetric, at least to rounding."""
        ...

    def matmul(
        self,
        A: Float[Tensor, "*batch m k"],
        B: Float[Tensor, "*batch k n"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m n"] | None = None,
    ) -> Float[Tensor, "*batch m n"]:
        """Return alpha·A B + beta·C."""
        ...


#: The methods of `Arithmetic`.
METHODS = ("norm", "roundoff", "store", "gram", "square", "commuting", "matmul")


def check_arithmetic(arithmetic: object, argument: str = "arithmetic") -> None:
    """Raise ``ValueError`` for what is not an arithmetic: a text, a class instead of its value, a method missing.

    Parameters
    ----------
    arithmetic : object
        What was given.
    argument : str
        For which argument, in the words of the error.

    Raises
    ------
    ValueError
        If it is none, with what it lacks.

    Examples
    --------
    >>> check_arithmetic(Exact())
    >>> check_arithmetic("bf16")
    Traceback (most recent call last):
    ValueError: arithmetic must be a value such as Exact(), not the text 'bf16': did you mean Rounded('bf16')?
    >>> check_arithmetic(Exact)
    Traceback (most recent call last):
    ValueError: arithmetic must be a value such as Exact(), not the class Exact: did you mean Exact(...)?
    """
    needed = f"{argument} must be a value such as Exact()"
    if isinstance(arithmetic, str):
        raise ValueError(f"{needed}, not the text {arithmetic!r}: did you mean Rounded({arithmetic!r})?")
    if isinstance(arithmetic, type):
        name = arithmetic.__name__
        meant = f": did you mean {name}(...)?" if all(hasattr(arithmetic, method) for method in METHODS) else ""
        raise ValueError(f"{needed}, not the class {name}{meant}")
    if arithmetic is None or isinstance(arithmetic, Sequence):
        raise ValueError(f"{needed}, not {'None' if arithmetic is None else f'a {type(arithmetic).__name__} of them'}")
    missing = [method for method in METHODS if not callable(getattr(arithmetic, method, None))]
    if missing:
        raise ValueError(f"{needed}, but this {type(arithmetic).__name__} has no {' and no '.join(missing)}")


@dataclass(frozen=True)
class Exact:
    """Products in one dtype, each rounded once: the dtype of the data, or the one given.

    Parameters
    ----------
    dtype : torch.dtype, optional
        The dtype in which the iteration keeps its matrix. The norm is always taken in at least float32 before the
        cast, so a float32 gradient with entries of 1e30 survives ``Exact(torch.float16)``.

    Examples
    --------
    >>> import torch
    >>> Exact().gram(torch.tensor([[3.0, 4.0]]))
    tensor([[25.]])
    >>> print(f"{float(Exact().norm(torch.full((2, 2), 1e30))):.5g}")
    2e+30
    """

    dtype: torch.dtype | None = None

    def norm(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch 1 1"]:
        """Return the Frobenius norm of each matrix in float64, safe from overflow and underflow.

        Row by row in the dtype of the data, then over rows in float64: one long float32 sum is off by 6e-4 at 4096².
        """
        X = _wide_enough(X)
        if X.numel() == 0:
            return X.new_zeros((*X.shape[:-2], 1, 1), dtype=torch.float64)
        scale = power_of_two(largest(X), EXACT_EXPONENT[X.dtype])
        rows = torch.linalg.vector_norm(X * scale.to(X.dtype), dim=-1, keepdim=True)
        return torch.linalg.vector_norm(rows.double(), dim=-2, keepdim=True) / scale

    def roundoff(self, dtype: torch.dtype) -> float:
        """Return the unit roundoff of the dtype in which products are taken of data of a dtype."""
        return torch.finfo(dtype if self.dtype is None else self.dtype).eps / 2

    def store(self, X: Float[Tensor, "*batch m n"], dtype: torch.dtype) -> Float[Tensor, "*batch m n"]:
        """Cast to the dtype of this arithmetic, or to that of the data if it has none."""
        return X.to(dtype if self.dtype is None else self.dtype)

    def gram(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m m"]:
        """Return X Xᵀ."""
        return X @ X.mT

    def square(
        self, A: Float[Tensor, "*batch m m"], *, alpha: float = 1.0, beta: float = 0.0
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A² + beta·A for a symmetric A."""
        return self.matmul(A, A, alpha=alpha, beta=beta, C=A)

    def commuting(
        self,
        A: Float[Tensor, "*batch m m"],
        B: Float[Tensor, "*batch m m"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m m"] | None = None,
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A B + beta·C for symmetric A, B, C where A B = B A."""
        return self.matmul(A, B, alpha=alpha, beta=beta, C=C)

    def matmul(
        self,
        A: Float[Tensor, "*batch m k"],
        B: Float[Tensor, "*batch k n"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m n"] | None = None,
    ) -> Float[Tensor, "*batch m n"]:
        """Return alpha·A B + beta·C."""
        if C is None:
            return A @ B if alpha == 1.0 else alpha * (A @ B)
        fused = torch.addmm if A.ndim == 2 else torch.baddbmm
        return fused(C, A, B, beta=beta, alpha=alpha)


def mirrored(A: Float[Tensor, "*batch m m"]) -> Float[Tensor, "*batch m m"]:
    """Return the symmetric matrix that has the lower triangle of A.

    Examples
    --------
    >>> import torch
    >>> mirrored(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 3.0], [3.0, 4.0]]
    """
    return A.tril() + A.tril(-1).mT


@as_written
def unit(X: Float[Tensor, "*batch m n"], norm: Float[Tensor, "*batch 1 1"]) -> Float[Tensor, "*batch m n"]:
    r"""Return a new matrix :math:`X / \|X\|` in at least float32; zero stays zero.

    A power of two is divided out first, which is exact, then a number close to 1: no intermediate overflows or
    vanishes, whatever the scale of X in its dtype.

    Examples
    --------
    >>> import torch
    >>> X = torch.tensor([[3e-30, 4e-30]])
    >>> unit(X, Exact().norm(X))
    tensor([[0.6000, 0.8000]])
    """
    X = _wide_enough(X)
    scale = power_of_two(norm, EXACT_EXPONENT[X.dtype])
    near_one = torch.where(norm == 0, 1.0, norm * scale)
    return (X * scale.to(X.dtype)).div_(near_one.to(X.dtype))


def largest(X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch 1 1"]:
    """Return the largest magnitude in each matrix; not finite if any entry isn't (torch's ∞-norm is many times slower).

    Examples
    --------
    >>> import torch
    >>> largest(torch.tensor([[1.0, -3.0]]))
    tensor([[3.]])
    """
    return torch.maximum(X.amax(dim=(-2, -1), keepdim=True), -X.amin(dim=(-2, -1), keepdim=True))


@as_written
def power_of_two(size: Float[Tensor, "*batch 1 1"], limit: int) -> Float[Tensor, "*batch 1 1"]:
    r"""Return the power of two (float64, within 2^±limit) that brings a size near 1.

    Examples
    --------
    >>> import torch
    >>> power_of_two(torch.tensor([[6.0]]), 126).item() * 6.0
    0.75
    """
    _, exponent = torch.frexp(size.double())
    return two_to(-exponent.clamp(-limit, limit))


@as_written
def two_to(exponent: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return powers of two in float64 from the bits of a double: ``exp2`` and ``ldexp`` are not exact everywhere.

    Examples
    --------
    >>> import torch
    >>> two_to(torch.tensor([-1, 0, 10])).tolist()
    [0.5, 1.0, 1024.0]
    """
    return ((1023 + exponent.to(torch.int64)) << 52).view(torch.float64)


def _wide_enough(X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Return X in float32 if its own dtype is narrower, else X itself."""
    return X if X.dtype in (torch.float32, torch.float64) else X.float()
