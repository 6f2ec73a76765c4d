r"""Products with a symmetric result, of which only the lower triangle of blocks is multiplied.

A Gram matrix, the square of a symmetric matrix and the product of two that commute are symmetric. With k blocks along
the diagonal, :math:`(k + 1) / 2k` of the multiplications determine the result; the rest is a copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic.policy import Exact


@dataclass(frozen=True)
class Symmetric(Exact):
    r"""`Exact`, at little more than half the cost where results are symmetric.

    Parameters
    ----------
    dtype : torch.dtype, optional
        As in `Exact`.
    edge : int
        Rows and columns of a block, at least: a product that is too small runs below the machine's rate, so a side
        is split into :math:`\lfloor m / edge \rfloor` blocks.

    Raises
    ------
    ValueError
        If the edge is not positive.

    Examples
    --------
    >>> import torch
    >>> X = torch.randn(600, 700, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> A = Symmetric().gram(X)
    >>> bool((A - X @ X.mT).abs().max() < 1e-12), torch.equal(A[:300, 300:], A[300:, :300].mT), Symmetric().share(600)
    (True, True, 0.75)
    """

    edge: int = 256

    def __post_init__(self) -> None:
        if self.edge < 1:
            raise ValueError(f"edge of the blocks of symmetric products must be at least 1, not {self.edge}")

    def share(self, m: int) -> float:
        """Return the share of the multiplications of an m×m product that are done."""
        blocks = max(1, m // self.edge)
        return (blocks + 1) / (2 * blocks)

    def gram(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m m"]:
        """Return X Xᵀ."""
        return self._half(X, X.mT, 1.0, 0.0, None)

    def square(
        self, A: Float[Tensor, "*batch m m"], *, alpha: float = 1.0, beta: float = 0.0
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A² + beta·A for a symmetric A."""
        return self._half(A, A, alpha, beta, A)

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
        return self._half(A, B, alpha, beta, C)

    def _half(self, A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor | None) -> Tensor:
        """Return a symmetric alpha·A B + beta·C, row of blocks by row of blocks."""
        if A.shape[-2] < 2 * self.edge:
            return self.matmul(A, B, alpha=alpha, beta=beta, C=C)
        if A.ndim == 3:
            none = [None] * len(A)
            parts = (self._half(a, b, alpha, beta, c) for a, b, c in zip(A, B, none if C is None else C, strict=True))
            return torch.stack(list(parts)) if len(A) else A.new_zeros(*A.shape[:-1], B.shape[-1])
        m = A.shape[0]
        out = A.new_empty(m, m)
        for row in _spans(m, max(1, m // self.edge)):
            up_to = slice(0, row.stop)
            block = out[row, up_to]
            if C is None:
                torch.mm(A[row], B[:, up_to], out=block)
                if alpha != 1.0:
                    block.mul_(alpha)
            else:
                torch.addmm(C[row, up_to], A[row], B[:, up_to], beta=beta, alpha=alpha, out=block)
            out[: row.start, row] = out[row, : row.start].mT
        return out


def _spans(m: int, count: int) -> Iterator[slice]:
    """Yield ranges of rows, as even as they can be."""
    for block in range(count):
        yield slice(block * m // count, (block + 1) * m // count)
