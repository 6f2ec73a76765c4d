r"""Arithmetic over shards: the one iteration engine, run by many ranks on one matrix.

A matrix whose columns are cut, :math:`X = [X_1 \dots X_p]`, has sums over ranks for its Gram matrix and norm,

.. math:: X X^T = \sum_r X_r X_r^T, \qquad \|X\|_F^2 = \sum_r \|X_r\|_F^2,

and a product with that Gram matrix from the left acts on every shard alone. So an iteration that asks its `Arithmetic`
for norm, Gram matrix, square and product runs unchanged where norm and Gram matrix end in an all_reduce.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import Arithmetic
from muon_lab.parallel.collectives import Collectives

#: Norms are summed as squares in three ranges, so that none overflows or vanishes: what is above 2^400, below 2^-400,
#: and between (J. L. Blue, "A portable Fortran program to find the Euclidean norm of a vector", 1978).
RANGE, SHIFT = 2.0**400, 2.0**600


class OnShard:
    """The side of products on a shard: Gram-sized matrices are the same on every rank, the iterate is not.

    The first factor of `matmul` is symmetric and whole, the second is the shard: k rows, and columns of which other
    ranks hold more. The engine turns what is higher than wide, so a shard of fewer than k columns is handed to it with
    columns of zeros (`filled`). They stay zero, and no product sees them.

    Attributes
    ----------
    inner : Arithmetic
        What multiplies.
    columns : int or None
        How many columns of the iterate are there; all of them by default.
    """

    inner: Arithmetic
    columns: int | None

    def there(self, X: Float[Tensor, "*batch k n"]) -> Float[Tensor, "*batch k s"]:
        """Return the columns that are there."""
        return X if self.columns is None else X[..., : self.columns]

    def roundoff(self, dtype: torch.dtype) -> float:
        """Return the unit roundoff of the inner arithmetic."""
        return self.inner.roundoff(dtype)

    def store(self, X: Float[Tensor, "*batch m n"], dtype: torch.dtype) -> Float[Tensor, "*batch m n"]:
        """Bring a matrix into the format of the inner arithmetic."""
        return self.inner.store(X, dtype)

    def square(
        self, A: Float[Tensor, "*batch m m"], *, alpha: float = 1.0, beta: float = 0.0
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A² + beta·A for a symmetric A, on every rank."""
        return self.inner.square(A, alpha=alpha, beta=beta)

    def commuting(
        self,
        A: Float[Tensor, "*batch m m"],
        B: Float[Tensor, "*batch m m"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m m"] | None = None,
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A B + beta·C for symmetric A, B, C where A B = B A, on every rank."""
        return self.inner.commuting(A, B, alpha=alpha, beta=beta, C=C)

    def matmul(
        self,
        A: Float[Tensor, "*batch k k"],
        B: Float[Tensor, "*batch k n"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch k n"] | None = None,
    ) -> Float[Tensor, "*batch k n"]:
        """Return the shard of alpha·A B + beta·C: A is symmetric and whole, B and C are shards."""
        added = None if C is None else self.there(C)
        product = self.inner.matmul(A, self.there(B), alpha=alpha, beta=beta, C=added)
        return filled(product, B.shape[-1])


@dataclass(frozen=True)
class Sharded(OnShard):
    r"""An arithmetic whose norm and Gram matrix are those of the whole matrix, of which a rank holds a shard.

    All ranks get the same bits of both, so decisions that depend on them are the same everywhere. A Gram matrix of a
    shard is rounded to the format of the inner arithmetic before it is summed.

    Parameters
    ----------
    inner : Arithmetic
        What multiplies on each rank.
    collectives : Collectives
        The ranks that hold the matrix.
    columns : int, optional
        How many columns of the iterate are there, see `OnShard`.
    accumulate : torch.dtype, optional
        The dtype in which Gram matrices travel and are summed; that of the inner products by default. Sums of bfloat16
        are rounded at every hop.

    Raises
    ------
    ValueError
        When called, on every rank, if any shard is not finite.

    References
    ----------
    NVIDIA-NeMo/Emerging-Optimizers, ``newton_schulz(tp_group=...)``, which sums one norm over a whole batch.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.arithmetic import Exact
    >>> from muon_lab.parallel import worlds
    >>> def norm_and_gram(world):
    ...     arithmetic = Sharded(Exact(), world)
    ...     X = torch.tensor([[3.0, 4.0]]) if world.rank else torch.tensor([[12.0]])
    ...     return arithmetic.norm(X).item(), arithmetic.gram(X).item()
    >>> worlds.run(norm_and_gram, ranks=2)
    [(13.0, 169.0), (13.0, 169.0)]
    """

    inner: Arithmetic
    collectives: Collectives
    columns: int | None = None
    accumulate: torch.dtype | None = None

    @cached_property
    def _norms(self) -> Collectives:
        return self.collectives.tagged(phase="norm")

    @cached_property
    def _grams(self) -> Collectives:
        return self.collectives.tagged(phase="gram")

    def norm(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch 1 1"]:
        """Return the Frobenius norm of each whole matrix in float64, safe from overflow and underflow."""
        local = self.inner.norm(X)
        norm = _root(self._norms.all_reduce(_squares(local)).wait())
        if torch.isfinite(local).all() and not torch.isfinite(norm).all():
            raise ValueError("the matrix to orthogonalize must be finite, but its shard on another rank is not")
        return norm

    def gram(self, X: Float[Tensor, "*batch k n"]) -> Float[Tensor, "*batch k k"]:
        """Return X Xᵀ of each whole matrix."""
        part = self.inner.gram(self.there(X))
        wire = part if self.accumulate is None else part.to(self.accumulate)
        return self._grams.all_reduce(wire).wait().to(part.dtype)


@dataclass(frozen=True)
class Known(OnShard):
    """An arithmetic to which norm and normalised Gram matrix of the whole matrix are known: nothing is left to ask.

    Parameters
    ----------
    inner : Arithmetic
        What multiplies.
    size : tensor
        The Frobenius norm of each whole matrix, float64, ``(*batch, 1, 1)``.
    grams : tensor
        The Gram matrix of each whole matrix divided by its norm.
    columns : int, optional
        How many columns of the iterate are there, see `OnShard`.

    Examples
    --------
    >>> import torch
    >>> from muon_lab import polar
    >>> from muon_lab.arithmetic import Exact
    >>> known = Known(Exact(), torch.tensor([[5.0]], dtype=torch.float64), torch.ones(1, 1))
    >>> third = polar.gram_newton_schulz(polar.schedules.get("polar_express", 8), known, restarts=())
    >>> third(torch.tensor([[3.0]])), third(torch.tensor([[4.0]]))  # two shards of [3, 4]
    (tensor([[0.6000]]), tensor([[0.8000]]))
    """

    inner: Arithmetic
    size: Float[Tensor, "*batch 1 1"]
    grams: Float[Tensor, "*batch k k"]
    columns: int | None = None

    def norm(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch 1 1"]:
        """Return the norm that is known."""
        return self.size

    def gram(self, X: Float[Tensor, "*batch k n"]) -> Float[Tensor, "*batch k k"]:
        """Return the Gram matrix that is known, as the iteration keeps it."""
        return self.inner.store(self.grams, X.dtype)


def filled(X: Float[Tensor, "*batch k s"], width: int) -> Float[Tensor, "*batch k n"]:
    """Return a matrix with as many columns of zeros after its own as it lacks to a width.

    Examples
    --------
    >>> import torch
    >>> filled(torch.ones(2, 1), 2).tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    return X if X.shape[-1] >= width else torch.nn.functional.pad(X, (0, width - X.shape[-1]))


def _squares(norm: Float[Tensor, "*batch 1 1"]) -> Float[Tensor, "3 *batch 1 1"]:
    """Return the square of a norm in the range that it belongs to, scaled into the middle; zero in the other two."""
    large, small = ~(norm <= RANGE), norm < 1 / RANGE
    scaled = (
        torch.where(large, norm / SHIFT, 0.0),
        torch.where(large | small, 0.0, norm),
        torch.where(small, norm * SHIFT, 0.0),
    )
    return torch.stack(scaled).square()


def _root(sums: Float[Tensor, "3 *batch 1 1"]) -> Float[Tensor, "*batch 1 1"]:
    """Return the root of the total of sums of squares by range."""
    large, middle, small = sums
    below = torch.where(middle > 0, (middle + small / SHIFT / SHIFT).sqrt(), small.sqrt() / SHIFT)
    return torch.where(large == 0, below, (large + middle / SHIFT / SHIFT).sqrt() * SHIFT)
