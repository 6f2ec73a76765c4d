r"""Polar factors that are computed, not approximated: what all such methods share, and the two by a decomposition.

.. math:: G = U H \;(m \ge n), \qquad G = H U \;(m \le n), \qquad H = H^T \succeq 0

U is the partial isometry of the range of G. H stands on the short side, as in `muon_lab.measure.polar`: it is the small
one. The right factor that ``oracle.polar`` returns for every shape is :math:`U^T H U` if G is wide.

One rule tells the range from rounding (`svd`), and one record says what was done (`Decomposition`). Flops are real
additions and multiplications in whatever precision, with m the short and n the long side; a product counts as general
where its result is symmetric.

References
----------
Golub and Van Loan, *Matrix Computations* (2013), for the flops: sections 5.2 and 8.3, figure 8.6.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from muon_lab.arithmetic.policy import EXACT_EXPONENT, largest, power_of_two
from muon_lab.polar.engine import check, not_finite

#: How far above the mean spectral norm of the input's own rounding a direction must stand to count: a matrix that was
#: computed, by a product of inner length up to 64 say, carries about √64 roundings an entry, not one.
ROUNDINGS = 8

#: Unit roundoffs by which an iteration may stop short of 1; one that stops there and its products leave a Gram matrix
#: that is a projector to this many roundings for each entry of the long side (the worst measured is below one).
TOLERATED = 10


class Decomposition(NamedTuple):
    r"""A polar decomposition and how it was reached; every field has the batch axes of the input.

    Attributes
    ----------
    U : tensor of shape (*batch, m, n)
        The polar factor, in the dtype of the input.
    H : tensor of shape (*batch, k, k)
        The symmetric factor on the short side, k = min(m, n), in the unit of the input and the dtype of the
        computation. Exactly symmetric; positive semidefinite but for rounding of the order of :math:`u \|G\|`. It keeps
        what G has in the directions that U leaves out.
    rank : tensor of shape (*batch,)
        The number of directions that U has.
    iterations : tensor of shape (*batch,)
        Steps taken; 0 for `svd` and `gram_eigh`.
    converged : tensor of shape (*batch,)
        Whether the Gram matrix of U was measured to be a projector of that rank, to :math:`10 u \max(m, n)`.
    lower : tensor of shape (*batch,)
        The bound on :math:`\sigma_{\min} / \sigma_1` by which the iteration was planned; NaN where nothing was planned.
    flops : tensor of shape (*batch,)
        What U cost, with all that the method did to plan its steps and to decide the rank, but without H.
    """

    U: Float[Tensor, "*batch m n"]
    H: Float[Tensor, "*batch k k"]
    rank: Int[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    lower: Float[Tensor, "*batch"]
    flops: Float[Tensor, "*batch"]

    @property
    def matrix(self) -> Float[Tensor, "*batch m n"]:
        """The product of the two factors: the input, to rounding, less what lies below the cutoff for the rank."""
        U = self.U.to(self.H.dtype)
        return self.H @ U if U.shape[-2] < U.shape[-1] else U @ self.H


class Factor(NamedTuple):
    """What a method finds for a batch of matrices; the fields are those of `Decomposition`."""

    U: Float[Tensor, "batch m n"]
    hermitian: Callable[[], Float[Tensor, "batch k k"]]
    """Computes H."""
    rank: Int[Tensor, " batch"]
    iterations: Int[Tensor, " batch"]
    lower: Float[Tensor, " batch"]
    flops: Float[Tensor, " batch"]


#: The work: from a batch of float32 or float64 matrices, largest entries below 1, and the unit roundoff of the data (or
#: None, to ask for all directions) to the factors.
Method = Callable[[Float[Tensor, "batch m n"], float | None], Factor]


@dataclass(frozen=True)
class Direct:
    r"""An orthogonalizer that has the whole decomposition.

    Called on a matrix G ``(*batch, m, n)`` of any real floating dtype it returns U, in the same shape and dtype; the
    scale of G does not matter, nor do its strides. Zero gives zero, and empty gives empty. The matrices of a batch do
    not know of each other, and G is never changed.

    Attributes
    ----------
    method : Method
        Does the work.
    roundoff : float, optional
        The unit roundoff u of the numbers from which G comes; that of its dtype by default.
    dtype : torch.dtype, optional
        In which to compute, float32 or float64; by default that of the data, but at least float32.

    Raises
    ------
    ValueError
        When made with another dtype, or a roundoff outside [0, 1). When called, as for `newton_schulz`.

    Examples
    --------
    >>> import torch
    >>> G = torch.tensor([[0.0, 2.0, 0.0], [-3.0, 0.0, 0.0]])
    >>> found = svd().decompose(G)
    >>> found.U
    tensor([[ 0.,  1.,  0.],
            [-1.,  0.,  0.]])
    >>> found.H.round(decimals=12) + 0.0
    tensor([[2., 0.],
            [0., 3.]], dtype=torch.float64)
    >>> found.rank, found.flops
    (tensor(2), tensor(232., dtype=torch.float64))
    """

    method: Method
    roundoff: float | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in EXACT_EXPONENT:
            raise ValueError(f"dtype must be torch.float32 or torch.float64, not {self.dtype}")
        if self.roundoff is not None and not (isinstance(self.roundoff, Real) and 0 <= self.roundoff < 1):
            raise ValueError(f"roundoff must be at least 0 and below 1, not {self.roundoff!r}")

    def __call__(self, G: Tensor) -> Float[Tensor, "*batch m n"]:
        """Return U."""
        check(G)
        if G.numel() == 0:
            return torch.zeros_like(G)
        X, _ = self._normalised(G)
        return _as(self.method(X, self._roundoff(G)).U, G)

    def decompose(self, G: Tensor) -> Decomposition:
        """Return U, H and how they were reached.

        Raises
        ------
        ValueError
            As for a call, or if an entry of H is beyond the dtype of the computation.
        """
        check(G)
        return self._decomposed(G, self._roundoff(G))

    def filled(self, G: Tensor) -> Decomposition:
        r"""Return the decomposition from which nothing is left out: U has orthonormal rows or columns.

        Directions whose singular value is below the error of the computation, a few :math:`u \|G\|`, are then those of
        a neighbour of G. Only an iteration on a zero matrix stays at zero, and has not ``converged``.
        """
        check(G)
        return self._decomposed(G, None)

    def _roundoff(self, G: Tensor) -> float:
        """Return the unit roundoff of the data, at least 2^-24 if they are going to be kept in float32."""
        own = torch.finfo(G.dtype).eps / 2 if self.roundoff is None else self.roundoff
        return max(own, torch.finfo(torch.float32).eps / 2) if self._dtype(G) == torch.float32 else own

    def _dtype(self, G: Tensor) -> torch.dtype:
        """Return the dtype of the computation."""
        return self.dtype or (G.dtype if G.dtype in EXACT_EXPONENT else torch.float32)

    def _normalised(self, G: Tensor) -> tuple[Float[Tensor, "flat m n"], Float[Tensor, "*batch 1 1"]]:
        """Return G times powers of two, in the dtype of the computation and with one batch axis, and the powers."""
        X = G.to(torch.promote_types(G.dtype, self._dtype(G)))
        size = largest(X)
        if not torch.isfinite(size).all():
            raise not_finite(G)
        scale = power_of_two(size, EXACT_EXPONENT[X.dtype])
        X = (X * scale.to(X.dtype)).to(self._dtype(G)).contiguous()  # the order of sums must not depend on strides
        return X.reshape(-1, *X.shape[-2:]), scale

    def _decomposed(self, G: Tensor, roundoff: float | None) -> Decomposition:
        batch, k = G.shape[:-2], min(G.shape[-2:])
        if G.numel() == 0:
            H = G.new_zeros((*batch, k, k), dtype=self._dtype(G))
            count = torch.zeros(batch, dtype=torch.int64, device=G.device)
            number = count.double()
            return Decomposition(torch.zeros_like(G), H, count, count, count == 0, number + math.nan, number)
        X, scale = self._normalised(G)
        found = self.method(X, roundoff)
        H = found.hermitian().reshape(*batch, k, k) / scale.to(X.dtype)
        if not torch.isfinite(H).all():
            raise ValueError(f"the Hermitian factor has entries above {torch.finfo(H.dtype).max:.2g}, beyond {H.dtype}")
        converged = _is_partial_isometry(
            found.U, found.rank if roundoff is not None else torch.full_like(found.rank, k)
        )
        told = (found.rank, found.iterations, converged, found.lower, found.flops)
        return Decomposition(_as(found.U, G), H, *(field.reshape(batch) for field in told))


def _as(U: Float[Tensor, "flat m n"], G: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Return the factors with the batch axes and in the dtype of the input."""
    return U.reshape(G.shape).to(G.dtype).contiguous()


def _is_partial_isometry(U: Float[Tensor, "batch m n"], rank: Int[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
    """Say whether the small Gram matrix of U is a projector of that rank, as well as products can tell."""
    tall = upright(U)
    P = tall.mT @ tall
    traces = P.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (torch.linalg.matrix_norm(P @ P - P) <= orthonormality(tall)) & (traces.round() == rank)


def orthonormality(X: Float[Tensor, "*batch p q"]) -> float:
    r"""Return :math:`10 u \max(p, q)`: how far the Gram matrix of a computed factor may be from a projector.

    Examples
    --------
    >>> import torch
    >>> orthonormality(torch.ones(2, 8)) == 80 * 2.0**-24
    True
    """
    return TOLERATED * max(X.shape[-2:]) * torch.finfo(X.dtype).eps / 2


def upright(X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch p q"]:
    """Return X, or its transpose if it is wide.

    Examples
    --------
    >>> import torch
    >>> upright(torch.ones(2, 3)).shape
    torch.Size([3, 2])
    """
    return X.mT if X.shape[-2] < X.shape[-1] else X


def symmetric(A: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch k k"]:
    """Return the symmetric part.

    Examples
    --------
    >>> import torch
    >>> symmetric(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    tensor([[1., 1.],
            [1., 1.]])
    """
    return (A + A.mT) / 2


def rounding(m: int, n: int, roundoff: float) -> float:
    r"""Return :math:`8 u (\sqrt m + \sqrt n) / \sqrt{mn}`, what the rounding of data may reach, relative to their norm.

    Examples
    --------
    >>> rounding(4, 4, 2.0**-53) == 8 * 2.0**-53
    True
    """
    return ROUNDINGS * roundoff * (math.sqrt(m) + math.sqrt(n)) / math.sqrt(m * n)


def above_rounding(s: Float[Tensor, "*batch k"], m: int, n: int, roundoff: float | None) -> Bool[Tensor, "*batch k"]:
    """Say which singular values, in descending order, count towards the rank; all of them if the roundoff is None.

    Examples
    --------
    >>> import torch
    >>> above_rounding(torch.tensor([1.0, 1e-6, 1e-8]), 3, 3, 2.0**-24).tolist()
    [True, True, False]
    """
    if roundoff is None:
        return torch.ones_like(s, dtype=torch.bool)
    norm = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    return s > torch.maximum(rounding(m, n, roundoff) * norm, max(m, n) * torch.finfo(s.dtype).eps * s[..., :1])


def svd(roundoff: float | None = None, dtype: torch.dtype = torch.float64) -> Direct:
    r"""Return the orthogonalizer that takes the polar factor from a singular value decomposition.

    :math:`G = P \Sigma Q^T \mapsto P_r Q_r^T`, the partial isometry of the range: a zero matrix gives zero, and the
    null space is not filled with rounding noise at full size. A direction belongs to the range if its singular value
    exceeds

    .. math:: \max(8 u \|G\|_F (\sqrt m + \sqrt n) / \sqrt{mn},\; \max(m, n)\, \varepsilon\, \sigma_1),

    with u the unit roundoff of the data and ε the spacing of the computation: the first is eight times the expected
    spectral norm of the data's rounding errors, taken as independent, the second the error of the decomposition. The
    usual cutoff :math:`\max(m, n)\, \varepsilon\, \sigma_1` with ε of float32 is hundreds of times larger for the
    layers of a small model, more for larger ones, and drops directions that a real gradient determines to two or three
    digits; so the computation is in float64 by default. It takes :math:`6 n m^2 + 20 m^3` flops.

    Parameters
    ----------
    roundoff : float, optional
        The unit roundoff u of the numbers from which G comes; that of its dtype by default.
    dtype : torch.dtype
        In which to compute.

    Returns
    -------
    Direct
        From ``(*batch, m, n)`` to the same shape and dtype.

    Raises
    ------
    ValueError
        As for `Direct`.

    References
    ----------
    Davidson and Szarek, *Local operator theory, random matrices and Banach spaces* (2001), theorem II.13, for the
    spectral norm :math:`\tau (\sqrt m + \sqrt n)` of noise with standard deviation τ.

    Examples
    --------
    >>> import torch
    >>> svd()(torch.ones(4, 4))[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    return Direct(SVD(), roundoff, dtype)


def gram_eigh(roundoff: float | None = None, dtype: torch.dtype = torch.float64) -> Direct:
    r"""Return the orthogonalizer that takes the polar factor from the eigenvectors of the Gram matrix.

    .. math:: A = X^T X = V \Lambda V^T, \qquad U = X V \Lambda^{-1/2} V^T \qquad (X \text{ tall})

    Cheap, and exact up to :math:`\kappa^2 u`, u the unit roundoff of the computation and κ the condition number: the
    eigenvalues are known to :math:`n \varepsilon \lambda_1` at best, so that a direction is lost below
    :math:`\sqrt{n \varepsilon}\, \sigma_1`, and that is a cutoff beside those of `svd`. In float64 it is 5e-7 for a
    long side of 1024, about the rounding of float32 data; in float32 it would be 1 %. What is kept just above it is
    known to a digit or two, and `Decomposition.converged` tells where that shows.

    It takes :math:`4 m^2 n + 11 m^3` flops: two products, the eigenvectors (9 m³) and the root.

    Parameters
    ----------
    roundoff : float, optional
        As for `svd`.
    dtype : torch.dtype
        In which to compute.

    Returns
    -------
    Direct
        From ``(*batch, m, n)`` to the same shape and dtype. Its ``filled`` raises ``ValueError``: what A has lost it
        cannot fill.

    Raises
    ------
    ValueError
        As for `Direct`.

    Examples
    --------
    >>> import torch
    >>> gram_eigh()(torch.tensor([[2.0, 0.0, 0.0], [0.0, -0.5, 0.0]]))
    tensor([[ 1.,  0.,  0.],
            [ 0., -1.,  0.]])
    """
    return Direct(GramEigh(), roundoff, dtype)


@dataclass(frozen=True)
class SVD:
    """The method of `svd`."""

    def __call__(self, X: Float[Tensor, "batch m n"], roundoff: float | None) -> Factor:
        """Return the factors."""
        m, n = X.shape[-2:]
        P, s, Qt = torch.linalg.svd(X, full_matrices=False)
        kept = above_rounding(s, m, n, roundoff)
        V = Qt.mT if m >= n else P
        return _decided(
            (P * kept.unsqueeze(-2)) @ Qt,
            lambda: symmetric((V * s.unsqueeze(-2)) @ V.mT),
            kept,
            6.0 * max(m, n) * min(m, n) ** 2 + 20.0 * min(m, n) ** 3,
        )


@dataclass(frozen=True)
class GramEigh:
    """The method of `gram_eigh`."""

    def __call__(self, X: Float[Tensor, "batch m n"], roundoff: float | None) -> Factor:
        """Return the factors."""
        if roundoff is None:
            raise ValueError("gram_eigh cannot fill the null space, which the Gram matrix does not tell from rounding")
        tall = upright(X)
        n, m = tall.shape[-2:]
        eigenvalues, V = torch.linalg.eigh(tall.mT @ tall)
        s, V = eigenvalues.clamp(min=0).sqrt().flip(-1), V.flip(-1)
        kept = above_rounding(s, m, n, roundoff) & (s > math.sqrt(n * torch.finfo(s.dtype).eps) * s[..., :1])
        U = tall @ ((V * (kept / s.where(kept, 1.0)).unsqueeze(-2)) @ V.mT)
        return _decided(
            U if tall is X else U.mT,
            lambda: symmetric((V * s.unsqueeze(-2)) @ V.mT),
            kept,
            4.0 * m * m * n + 11.0 * m**3,
        )


def _decided(
    U: Float[Tensor, "batch m n"],
    hermitian: Callable[[], Float[Tensor, "batch k k"]],
    kept: Bool[Tensor, "batch k"],
    flops: float,
) -> Factor:
    """Return what a method found without an iteration."""
    rank = kept.sum(-1)
    cost = torch.full_like(rank, flops, dtype=torch.float64)
    return Factor(U, hermitian, rank, torch.zeros_like(rank), cost * math.nan, cost)
