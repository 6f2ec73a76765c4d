r"""Eigenbases of symmetric matrices in one order and with one sign, and what is left of the freedom in them.

.. math:: K = Q \Lambda Q^T, \qquad \lambda_1 \ge \dots \ge \lambda_n, \qquad Q^T Q = I

Eigenvectors are unique up to a sign, and where eigenvalues coincide up to a rotation among themselves. Two results can
therefore be compared only after the order (descending, equal values in the order of LAPACK), the signs (the entry of
largest magnitude in a column is positive, the first one where several are as large) and, within clusters, the rotation
are fixed: `aligned`, `clusters` and `aligned_within` do that.

References
----------
Golub & Van Loan, *Matrix Computations* (2013), sections 8.2.4 (orthogonal iteration) and 6.4.1 (orthogonal Procrustes);
Parlett, *The Symmetric Eigenvalue Problem* (1998), chapter 11, for residuals as bounds.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from mpmath import mp
from numpy.typing import ArrayLike

from muon_lab.oracle import polar
from muon_lab.oracle.multiprecision import GUARD


class Eigenbasis(NamedTuple):
    """Eigenvalues, descending, and an orthonormal basis of eigenvectors in the columns of Q.

    Attributes
    ----------
    values : array of shape (*batch, n)
        In the unit of K.
    Q : array of shape (*batch, n, n)
        Column i belongs to value i.
    """

    values: Float[np.ndarray, "*batch n"]
    Q: Float[np.ndarray, "*batch n n"]


def eigenbasis(K: ArrayLike) -> Eigenbasis:
    r"""Return the eigenbasis of the symmetric part :math:`(K + K^T)/2`, descending, in float64.

    The symmetric part is meant to remove rounding: a Kronecker factor that was accumulated in another order than its
    transpose differs from it in the last bits.

    Parameters
    ----------
    K : array_like of shape (*batch, n, n)
        Real and finite.

    Returns
    -------
    Eigenbasis
        The identity for a zero matrix and for a multiple of the identity.

    Raises
    ------
    ValueError
        If K is not a square matrix of finite real numbers.

    Examples
    --------
    >>> values, Q = eigenbasis([[0.0, 2.0], [2.0, 0.0]])
    >>> values
    array([ 2., -2.])
    >>> (Q * 2**0.5).round(12)
    array([[ 1.,  1.],
           [ 1., -1.]])
    """
    A = _square("eigenbasis", "K", K)
    return descending(*np.linalg.eigh(A / 2 + A.mT / 2))


def exactly(K: Any, digits: int) -> tuple[Any, Any]:
    r"""Return the values (n, 1) and the basis (n, n) of `eigenbasis` as mpmath matrices, to about `digits` digits.

    Parameters
    ----------
    K : rows of numbers, array of shape (n, n), or mpmath matrix
        Any real numbers that mpmath reads, taken as exact; the symmetric part is used.
    digits : int
        Decimal digits, at least 1.

    Raises
    ------
    ValueError
        If K is not a square matrix of finite real numbers, or `digits` is below 1.

    Examples
    --------
    >>> values, Q = exactly([[2, 1], [1, 1]], digits=30)
    >>> mp.nstr(values[0], 20)  # the square of the golden ratio
    '2.6180339887498948482'
    """
    if digits < 1:
        raise ValueError(f"exactly: digits is {digits}, needed at least 1")
    with mp.workdps(digits + GUARD):
        A = mp.matrix([list(row) for row in (K.tolist() if hasattr(K, "tolist") else K)])
        if A.rows != A.cols or not all(isinstance(x, mp.mpf) and mp.isfinite(x) for x in A):
            raise ValueError(f"exactly: K is {A.rows} by {A.cols}, needed a square matrix of finite real numbers")
        values, P = mp.eigsy((A + A.T) / 2)
        order = sorted(range(A.rows), key=lambda i: values[i], reverse=True)
        Q = mp.matrix(A.rows)
        for column, i in enumerate(order):
            largest = max(P[:, i], key=abs)  # max keeps the first of several
            Q[:, column] = P[:, i] if largest > 0 else -P[:, i]
        return mp.matrix([values[i] for i in order]), Q


def descending(values: Float[np.ndarray, "*batch n"], Q: Float[np.ndarray, "*batch n n"]) -> Eigenbasis:
    """Sort values and columns together, largest first and equal ones in the order given, and fix the signs.

    Examples
    --------
    >>> descending(np.array([1.0, 3.0]), np.array([[0.0, -1.0], [1.0, 0.0]]))
    Eigenbasis(values=array([3., 1.]), Q=array([[1., 0.],
           [0., 1.]]))
    """
    order = np.argsort(-values, axis=-1, kind="stable")
    columns = np.take_along_axis(Q, order[..., None, :], axis=-1)
    return Eigenbasis(np.take_along_axis(values, order, axis=-1), signed(columns))


def signed(Q: Float[np.ndarray, "*batch n k"]) -> Float[np.ndarray, "*batch n k"]:
    """Return the columns with the sign that makes their largest entry positive.

    Examples
    --------
    >>> signed(np.array([[0.6, -0.8], [-0.8, -0.6]]))
    array([[-0.6,  0.8],
           [ 0.8,  0.6]])
    """
    if Q.size == 0:
        return Q
    largest = np.take_along_axis(Q, np.abs(Q).argmax(axis=-2, keepdims=True), axis=-2)
    return np.where(largest < 0, -Q, Q) + 0.0  # no negative zeros


def orthogonal_iteration(K: ArrayLike, Q: ArrayLike, steps: int = 1) -> Float[np.ndarray, "n n"]:
    r"""Return the basis after `steps` times :math:`K Q = Q' R`, with :math:`R_{ii} \ge 0`, and Q' for Q.

    Columns turn towards eigenvectors in the order of the magnitude of their values: what couples two directions falls
    by :math:`|\lambda_j / \lambda_i|` a step. With the sign of R fixed, an eigenbasis of a positive definite K stays
    where it is.

    Parameters
    ----------
    K : array_like of shape (n, n)
        Symmetric.
    Q : array_like of shape (n, n)
        Orthonormal columns.
    steps : int
        At least 1.

    Raises
    ------
    ValueError
        If K or Q is not a matrix of finite numbers, if their shapes differ, or if `steps` is below 1.

    Examples
    --------
    >>> orthogonal_iteration(np.diag([2.0, 1.0]), np.eye(2))
    array([[1., 0.],
           [0., 1.]])
    """
    A, P = _square("orthogonal_iteration", "K", K), _square("orthogonal_iteration", "Q", Q)
    if A.shape != P.shape or A.ndim != 2:
        raise ValueError(f"orthogonal_iteration: K has shape {A.shape} and Q {P.shape}, needed (n, n) for both")
    if steps < 1:
        raise ValueError(f"orthogonal_iteration: steps is {steps}, needed at least 1")
    for _ in range(steps):
        P, R = np.linalg.qr(A @ P)
        P = P * np.where(np.diag(R) < 0, -1.0, 1.0)
    return P + 0.0


def aligned(Q: ArrayLike, to: ArrayLike) -> Float[np.ndarray, "n k"]:
    r"""Return the columns of Q in the order and with the signs in which they are closest to another basis.

    Pairs are taken from the largest :math:`|q_i^T t_j|` down. The result is the closest of all orders if every column
    has a partner with a squared product above 1/2, for then each such product is the largest of its row and of its
    column; otherwise it is one good order among others.

    Parameters
    ----------
    Q, to : array_like of shape (n, k)
        Orthonormal columns.

    Raises
    ------
    ValueError
        If the shapes differ.

    Examples
    --------
    >>> aligned(np.array([[0.0, -1.0], [1.0, 0.0]]), np.eye(2))
    array([[1., 0.],
           [0., 1.]])
    """
    P, products = _products("aligned", Q, to)
    result = np.empty_like(P)
    free = np.abs(products)
    for _ in range(free.shape[1]):
        i, j = np.unravel_index(np.argmax(free), free.shape)
        result[:, j] = P[:, i] if products[i, j] > 0 else -P[:, i]
        free[i, :] = free[:, j] = -1.0
    return result + 0.0


def clusters(values: Float[np.ndarray, " n"], tolerance: float) -> list[slice]:
    r"""Return the runs of descending values that lie within `tolerance` of their neighbours.

    Parameters
    ----------
    values : array of shape (n,)
        Descending.
    tolerance : float
        In units of the largest magnitude among the values; an eigenvector is determined to about the error of K
        divided by the distance of its cluster from the next.

    Raises
    ------
    ValueError
        If the values are not descending, or the tolerance is negative.

    Examples
    --------
    >>> clusters(np.array([4.0, 1.0, 1.0, 0.0]), 1e-12)
    [slice(0, 1, None), slice(1, 3, None), slice(3, 4, None)]
    """
    gaps = -np.diff(values)
    if (gaps < 0).any() or not tolerance >= 0:
        raise ValueError(f"clusters: values {values} with tolerance {tolerance}, needed descending ones and at least 0")
    cuts = np.flatnonzero(gaps > tolerance * np.abs(values).max(initial=0.0)) + 1
    edges = [0, *cuts.tolist(), values.size]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]


def aligned_within(Q: ArrayLike, to: ArrayLike, groups: Sequence[slice]) -> Float[np.ndarray, "n k"]:
    r"""Return Q with each group of columns turned within its own span as close as possible to the same group of `to`.

    For groups :math:`Q_c` and :math:`T_c` the turn is the polar factor of :math:`Q_c^T T_c`. A group of one column
    keeps or changes its sign.

    Parameters
    ----------
    Q, to : array_like of shape (n, k)
        Orthonormal columns, in the same order of groups.
    groups : sequence of slices
        As from `clusters`.

    Raises
    ------
    ValueError
        If the shapes differ.

    Examples
    --------
    >>> turned = np.array([[0.6, -0.8], [0.8, 0.6]])
    >>> aligned_within(turned, np.eye(2), [slice(0, 2)]).round(12) + 0.0
    array([[1., 0.],
           [0., 1.]])
    """
    P, products = _products("aligned_within", Q, to)
    result = P.copy()
    for group in groups:
        result[:, group] = P[:, group] @ polar.filled(products[group, group]).U
    return result


def residual(K: ArrayLike, values: Float[np.ndarray, " k"], Q: Float[np.ndarray, "n k"]) -> float:
    r"""Return :math:`\|K Q - Q \Lambda\|_F / \|K\|_F`: zero exactly for eigenvectors with their values.

    A turn by :math:`\delta` in the plane of columns i and j of an eigenbasis with Rayleigh quotients for values reads
    :math:`\sqrt 2\, \delta |\lambda_i - \lambda_j| / \|K\|_F` to first order, and values off by :math:`\delta` read
    :math:`\delta \sqrt k / \|K\|_F`.

    Examples
    --------
    >>> residual(np.diag([3.0, 4.0]), np.array([3.0, 4.5]), np.eye(2))
    0.1
    """
    A = _square("residual", "K", K)
    return _ratio(A @ Q - Q * values, A)


def off_diagonal(K: ArrayLike, Q: Float[np.ndarray, "n k"]) -> float:
    r"""Return :math:`\|Q^T K Q - \mathrm{diag}(Q^T K Q)\|_F / \|K\|_F`: how far the basis is from diagonalizing K.

    A turn by :math:`\delta` in the plane of columns i and j of an eigenbasis reads
    :math:`\sqrt 2\, \delta |\lambda_i - \lambda_j| / \|K\|_F` to first order.

    Examples
    --------
    >>> off_diagonal([[3.0, 4.0], [4.0, -3.0]], np.eye(2))
    0.8
    """
    A = _square("off_diagonal", "K", K)
    B = Q.T @ A @ Q
    return _ratio(B - np.diag(np.diag(B)), A)


def orthonormality(Q: Float[np.ndarray, "n k"]) -> float:
    r"""Return :math:`\|Q^T Q - I\|_F`; columns too long by :math:`\delta` read :math:`2 \delta \sqrt k` to first order.

    Examples
    --------
    >>> orthonormality(2.0 * np.eye(4))
    6.0
    """
    return float(np.linalg.norm(Q.T @ Q - np.eye(Q.shape[1])))


def _ratio(error: np.ndarray, A: np.ndarray) -> float:
    """Return the relative Frobenius norm at any scale, 0 for no error even where A is zero."""
    if not error.any():
        return 0.0
    size = float(np.abs(A).max())
    return float(np.linalg.norm(error / size) / np.linalg.norm(A / size)) if size else float("inf")


def _products(caller: str, Q: ArrayLike, to: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return Q in float64 and the inner products of its columns with the others."""
    P, T = np.asarray(Q, np.float64), np.asarray(to, np.float64)
    if P.shape != T.shape or P.ndim != 2:
        raise ValueError(f"{caller}: Q has shape {P.shape} and the other basis {T.shape}, needed (n, k) for both")
    return P, P.T @ T


def _square(caller: str, name: str, K: ArrayLike) -> Float[np.ndarray, "*batch n n"]:
    """Return K in float64, or say what is wrong with it."""
    A = np.asarray(K)
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or A.dtype.kind not in "fiu":
        raise ValueError(f"{caller}: {name} has shape {A.shape} and dtype {A.dtype}, needed real matrices (..., n, n)")
    bad = A.size - np.count_nonzero(np.isfinite(A))
    if bad:
        raise ValueError(f"{caller}: {bad} of the {A.size} entries of {name} are not finite, needed all finite")
    return A.astype(np.float64)
