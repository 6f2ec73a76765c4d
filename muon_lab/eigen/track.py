r"""Eigenbases of symmetric matrices that are followed from refresh to refresh, and solvers that are not believed.

.. math:: K = Q \Lambda Q^T, \qquad \lambda_1 \ge \dots \ge \lambda_n, \qquad Q^T Q = I

An eigensolver may raise, return numbers that are not finite, or return wrong ones without a word. Its result counts
only if

.. math:: \|Q^T Q - I\|_F \le \tau, \qquad \|K Q - Q \Lambda\|_F \le \tau \|K\|_F, \qquad \tau = 10\, n u

with u the unit roundoff of its dtype: a residual bounds the distance to the nearest matrix that has exactly this
basis, so what passes is the eigenbasis of a matrix as close to K as rounding is. LAPACK's stay below 4 n u in the first
and 2 n u in the second (measured: full, rank-deficient and graded matrices of 2 to 512 rows). What fails is solved once
more in float64, and if that fails too the previous basis stays: `Outcome` says which, for every matrix of a batch.

Order and sign
--------------
- By decomposition: values descending, equal ones in the order of the solver; the largest entry of each column is
  positive, the first one where several are as large.
- By iteration: :math:`K Q = Q' S` with :math:`S_{ii} \ge 0`. Columns keep their places, and their signs where K is
  positive definite; they turn towards eigenvectors in the order of magnitude, so that over many steps, and not at
  once, values come to descend. `by_rayleigh_quotient` sorts them.

References
----------
Parlett, *The Symmetric Eigenvalue Problem* (1998), theorem 11.4.1, for residuals as bounds; Golub and Van Loan,
*Matrix Computations* (2013), section 8.2.4, for orthogonal iteration.
"""

import math
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from muon_lab.arithmetic.policy import EXACT_EXPONENT, Arithmetic, Exact, largest, power_of_two

#: :math:`\tau / (n u)`, two and a half times the worst that was measured.
TOLERATED = 10

#: Products in the dtype of the data.
EXACT = Exact()


class Outcome(IntEnum):
    """How a basis was found."""

    #: By the solver in the dtype of the data.
    SOLVED = 0
    #: In float64, after a bad result in the dtype of the data.
    RETRIED = 1
    #: Not at all: the previous basis stays, its Rayleigh quotients being the values.
    KEPT = 2


class Eigenbasis(NamedTuple):
    """Values, and an orthonormal basis in the columns of Q.

    Attributes
    ----------
    values : tensor of shape (*batch, n)
        In the unit of K.
    Q : tensor of shape (*batch, n, n)
        Column i belongs to value i.
    """

    values: Float[Tensor, "*batch n"]
    Q: Float[Tensor, "*batch n n"]


class Tracked(NamedTuple):
    """A basis and how it was found."""

    basis: Eigenbasis
    #: An `Outcome` for each matrix.
    outcome: Int[Tensor, "*batch"]


class Attempt(NamedTuple):
    """What a solver returned, and how far it is from what it should be."""

    basis: Eigenbasis
    #: Relative to the norm of the matrix.
    residual: Float[Tensor, " flat"]


#: From normalised matrices and their previous bases to an attempt, in the dtype of both.
Solver = Callable[[Float[Tensor, "flat n n"], Float[Tensor, "flat n n"]], Attempt]


def eigenbasis(K: Tensor, previous: Tensor | None = None) -> Tracked:
    r"""Return the eigenbases of the symmetric parts :math:`(K + K^T) / 2`, in a fixed order and with fixed signs.

    The scale of K does not matter: it is brought near 1 by a power of two first. Small negative values of a matrix that
    is positive semidefinite but for rounding come out as they are.

    Parameters
    ----------
    K : tensor of shape (*batch, n, n)
        Finite, in float32 or float64.
    previous : tensor of shape (*batch, n, n), optional
        The bases to keep where no solver returns good ones; the identity by default.

    Returns
    -------
    Tracked
        In the dtype of K. A zero matrix has the identity.

    Raises
    ------
    ValueError
        If K is not a square matrix of finite numbers in float32 or float64, or `previous` is of another shape or dtype.

    Examples
    --------
    >>> import torch
    >>> (values, Q), outcome = eigenbasis(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
    >>> values
    tensor([ 2., -2.])
    >>> Q
    tensor([[ 0.7071,  0.7071],
            [ 0.7071, -0.7071]])
    >>> Outcome(int(outcome)).name
    'SOLVED'
    """
    return _tracked("eigenbasis", _decomposed, K, previous)


def orthogonal_iteration(K: Tensor, Q: Tensor, steps: int = 1, arithmetic: Arithmetic = EXACT) -> Tracked:
    r"""Return the bases after `steps` times :math:`K Q = Q' S`, :math:`S_{ii} \ge 0`, with their Rayleigh quotients.

    What couples columns i and j falls by :math:`|\lambda_j / \lambda_i|` a step.

    Parameters
    ----------
    K : tensor of shape (*batch, n, n)
        Finite, in float32 or float64; the symmetric part is used.
    Q : tensor of shape (*batch, n, n)
        The previous bases, in the dtype of K.
    steps : int
        At least 1.
    arithmetic : Arithmetic
        Of the products K Q. The decompositions are in the dtype of K.

    Returns
    -------
    Tracked
        Columns in the order of the previous ones.

    Raises
    ------
    ValueError
        As for `eigenbasis`, or if `steps` is below 1.

    Examples
    --------
    >>> import torch
    >>> K = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> (values, Q), _ = orthogonal_iteration(K, torch.eye(2), steps=20)
    >>> values
    tensor([3.0000, 1.0000])
    >>> Q
    tensor([[ 0.7071, -0.7071],
            [ 0.7071,  0.7071]])
    """
    if steps < 1:
        raise ValueError(f"orthogonal_iteration: steps is {steps}, needed at least 1")

    def iterated(A: Tensor, P: Tensor) -> Attempt:
        residual = A.new_zeros(A.shape[0])
        for _ in range(steps):
            product = arithmetic.matmul(A, P)
            P, S = torch.linalg.qr(product)
            residual = torch.maximum(residual, _norm(product - P @ S) / _norm(A).where(_norm(A) > 0, 1.0))
            P = torch.where(S.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) < 0, -P, P) + 0.0
        return Attempt(Eigenbasis(rayleigh(A, P, arithmetic), P), residual)

    return _tracked("orthogonal_iteration", iterated, K, Q)


def rayleigh(
    K: Float[Tensor, "*batch n n"], Q: Float[Tensor, "*batch n k"], arithmetic: Arithmetic = EXACT
) -> Float[Tensor, "*batch k"]:
    r"""Return :math:`q_i^T K q_i`.

    Examples
    --------
    >>> import torch
    >>> rayleigh(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), torch.tensor([[0.6], [0.8]]))
    tensor([1.9200])
    """
    return (Q * arithmetic.matmul(K, Q)).sum(-2)


def by_rayleigh_quotient(K: Float[Tensor, "*batch n n"], Q: Float[Tensor, "*batch n k"]) -> Int[Tensor, "*batch k"]:
    r"""Return the order in which :math:`q_i^T K q_i` descends, equal ones as they are.

    Examples
    --------
    >>> import torch
    >>> by_rayleigh_quotient(torch.diag(torch.tensor([1.0, 3.0, 1.0])), torch.eye(3))
    tensor([1, 0, 2])
    """
    return rayleigh(K, Q).argsort(dim=-1, descending=True, stable=True)


def sorted_columns(Q: Float[Tensor, "*batch n k"], order: Int[Tensor, "*batch k"]) -> Float[Tensor, "*batch n k"]:
    """Return the columns in an order.

    Examples
    --------
    >>> import torch
    >>> sorted_columns(torch.eye(2), torch.tensor([1, 0]))
    tensor([[0., 1.],
            [1., 0.]])
    """
    return Q.gather(-1, order.unsqueeze(-2).expand(Q.shape))


def descending(values: Float[Tensor, "*batch n"], Q: Float[Tensor, "*batch n n"]) -> Eigenbasis:
    """Sort values and columns together, largest first and equal ones in the order given, and fix the signs.

    Examples
    --------
    >>> import torch
    >>> descending(torch.tensor([1.0, 3.0]), torch.tensor([[0.0, -1.0], [1.0, 0.0]])).Q
    tensor([[1., 0.],
            [0., 1.]])
    """
    order = values.argsort(dim=-1, descending=True, stable=True)
    return Eigenbasis(values.gather(-1, order), signed(sorted_columns(Q, order)))


def signed(Q: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
    """Return the columns with the sign that makes their largest entry positive, the first one where several are.

    Examples
    --------
    >>> import torch
    >>> signed(torch.tensor([[0.6, -0.8], [-0.8, -0.6]]))
    tensor([[-0.6000,  0.8000],
            [ 0.8000,  0.6000]])
    """
    if Q.numel() == 0:
        return Q
    first = Q.gather(-2, Q.abs().argmax(dim=-2, keepdim=True))
    return torch.where(first < 0, -Q, Q) + 0.0  # no negative zeros


def tolerance(n: int, dtype: torch.dtype) -> float:
    r"""Return :math:`\tau = 10\, n u`.

    Examples
    --------
    >>> import torch
    >>> tolerance(8, torch.float32) == 80 * 2.0**-24
    True
    """
    return TOLERATED * n * torch.finfo(dtype).eps / 2


def _decomposed(A: Float[Tensor, "flat n n"], _: Float[Tensor, "flat n n"]) -> Attempt:
    """Return the result of torch's eigensolver."""
    values, Q = descending(*_by_torch(A))
    error = _norm(A @ Q - Q * values.unsqueeze(-2))
    return Attempt(Eigenbasis(values, Q), error / _norm(A).where(_norm(A) > 0, 1.0))


def _by_torch(A: Float[Tensor, "flat n n"]) -> tuple[Float[Tensor, "flat n"], Float[Tensor, "flat n n"]]:
    """Decompose each matrix alone on a CPU: in a batch its place in memory decides its bits."""
    if A.device.type != "cpu" or len(A) < 2:
        values, Q = torch.linalg.eigh(A)
        return values, Q
    found = [torch.linalg.eigh(each) for each in A.split(1)]
    return torch.cat([values for values, _ in found]), torch.cat([Q for _, Q in found])


def _tracked(caller: str, solver: Solver, K: Tensor, previous: Tensor | None) -> Tracked:
    """Return what a solver finds, checked, with what is left of the retries."""
    A, P, scale = _normalised(caller, K, previous)
    basis, outcome = _solved(solver, A, P)
    values = (basis.values / scale).reshape(K.shape[:-1])
    return Tracked(Eigenbasis(values, basis.Q.reshape(K.shape)), outcome.reshape(K.shape[:-2]))


def _solved(solver: Solver, A: Float[Tensor, "flat n n"], P: Float[Tensor, "flat n n"]) -> Tracked:
    """Return the results in the dtype of the data, in float64 where those are bad, and the previous where both are."""
    outcome = torch.full(A.shape[:1], Outcome.SOLVED.value, device=A.device)
    if A.numel() == 0:
        return Tracked(Eigenbasis(A.new_zeros(A.shape[:-1]), P), outcome)
    (values, Q), bad = _attempted(solver, A, P)
    if bad.any():
        kept = bad
        if A.dtype != torch.float64:
            wide, still = _attempted(solver, A[bad].double(), P[bad].double())
            values[bad], Q[bad] = wide.values.to(A.dtype), wide.Q.to(A.dtype)
            kept = bad.clone()
            kept[bad] = still
        values[kept], Q[kept] = rayleigh(A[kept], P[kept]), P[kept]
        outcome = outcome.where(~bad, Outcome.RETRIED.value).where(~kept, Outcome.KEPT.value)
    return Tracked(Eigenbasis(values, Q), outcome)


def _attempted(
    solver: Solver, A: Float[Tensor, "flat n n"], P: Float[Tensor, "flat n n"]
) -> tuple[Eigenbasis, Bool[Tensor, " flat"]]:
    """Return what the solver returns, and where that is bad; one that raises for a batch is asked for each alone."""
    try:
        found = solver(A, P)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # torch.linalg.LinAlgError, and what else the libraries of a GPU raise
        if len(A) > 1:
            parts = [_attempted(solver, A[i : i + 1], P[i : i + 1]) for i in range(len(A))]
            bases = Eigenbasis(*(torch.cat(field) for field in zip(*(basis for basis, _ in parts), strict=True)))
            return bases, torch.cat([bad for _, bad in parts])
        nothing = Eigenbasis(A.new_full(A.shape[:-1], math.nan), torch.full_like(A, math.nan))
        return nothing, torch.ones(1, dtype=torch.bool, device=A.device)
    limit = tolerance(A.shape[-1], A.dtype)
    Q = found.basis.Q
    error = _norm(Q.mT @ Q - torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))
    good = (error <= limit) & (found.residual <= limit) & found.basis.values.isfinite().all(-1)  # NaN is not within
    return found.basis, ~good


def _norm(A: Float[Tensor, "flat n n"]) -> Float[Tensor, " flat"]:
    return torch.linalg.matrix_norm(A)


def _normalised(
    caller: str, K: Tensor, previous: Tensor | None
) -> tuple[Float[Tensor, "flat n n"], Float[Tensor, "flat n n"], Float[Tensor, "flat 1"]]:
    """Return symmetric parts times powers of two, previous bases, and the powers, with one batch axis."""
    if K.ndim < 2 or K.shape[-1] != K.shape[-2] or K.dtype not in EXACT_EXPONENT:
        raise ValueError(
            f"{caller}: K has shape {tuple(K.shape)} and dtype {K.dtype}, needed (*batch, n, n) in float32 or float64"
        )
    n = K.shape[-1]
    if previous is None:
        previous = torch.eye(n, dtype=K.dtype, device=K.device).expand(K.shape)
    if previous.shape != K.shape or previous.dtype != K.dtype:
        raise ValueError(
            f"{caller}: the previous basis has shape {tuple(previous.shape)} and dtype {previous.dtype}, "
            f"needed those of K, {tuple(K.shape)} and {K.dtype}"
        )
    flat, P = (X.reshape(math.prod(K.shape[:-2]), n, n) for X in (K, previous))
    if K.numel() == 0:
        return flat, P, K.new_ones(flat.shape[0], 1)
    size = largest(flat)
    if not size.isfinite().all():
        bad = int((~K.isfinite()).sum())
        raise ValueError(f"{caller}: {bad} of the {K.numel()} entries of K are not finite, needed all finite")
    scale = power_of_two(size, EXACT_EXPONENT[K.dtype]).to(K.dtype)
    A = flat * scale
    return (A + A.mT) / 2, P, scale.squeeze(-1)
