r"""How far a basis is from the eigenbasis of K, how far one basis is from another, and how indefinite K is.

Columns are compared as subspaces: eigenvectors of values that are equal, or closer than what is known of K, may turn
among themselves, so a cluster of them counts as one span, and the distance of two spans is that of their principal
angles. What each number reads, to first order, for errors planted in an eigenbasis of K with its values
:math:`\lambda`; columns i and j belong to different clusters unless said otherwise, a dash stands for second order:

============== =========================================== ================== ===================== ================
metric         turn by δ in the plane of i and j           the same, in one   column i longer by δ  value i off by δ
                                                           cluster
============== =========================================== ================== ===================== ================
orthonormality 0                                           0                  2 δ                   0
residual       :math:`\sqrt 2 δ |λ_i - λ_j| / \|K\|_F`     0 (equal values)   0 (of eigenvectors)   :math:`δ/\|K\|_F`
off_diagonal   :math:`\sqrt 2 δ |λ_i - λ_j| / \|K\|_F`     0 (equal values)   0                     0
values         0                                           0                  0                     :math:`δ / |λ_1|`
angle          δ                                           0                  0                     0
turn           :math:`\sqrt 2 δ`                           0                  0                     0
============== =========================================== ================== ===================== ================

with :math:`|λ_1|` the largest magnitude. Two columns exchanged read :math:`π/2` in angle and nothing in off_diagonal,
which does not know of order; both angle and turn are blind to signs, to lengths and to the basis of a cluster.

References
----------
Björck and Golub, *Numerical methods for computing angles between linear subspaces* (1973); Knyazev and Argentati,
*Principal angles between subspaces in an A-based scalar product* (2002), for small angles from sines and not cosines.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from muon_lab.measure import bounds
from muon_lab.oracle import eigen

#: The unit roundoff of float64, in which everything here is computed.
U64 = bounds.unit_roundoff("fp64")


class BasisError(NamedTuple):
    r"""Six distances between values and columns and the eigenbasis of K, without unit.

    Attributes
    ----------
    orthonormality : float
        :math:`\|Q^T Q - I\|_F`.
    residual : float
        :math:`\|K Q - Q \Lambda\|_F / \|K\|_F`.
    off_diagonal : float
        :math:`\|Q^T K Q - \mathrm{diag}(Q^T K Q)\|_F / \|K\|_F`.
    values : float
        The largest difference to the values of K, in units of their largest magnitude; infinite for values of zero.
    angle : float
        The largest principal angle between the span of a cluster and that of the same columns of Q, in radians.
    turn : float
        The root of the sum of the squares of all of them, in radians.
    """

    orthonormality: float
    residual: float
    off_diagonal: float
    values: float
    angle: float
    turn: float


class Drift(NamedTuple):
    r"""How far a basis has come since another.

    Attributes
    ----------
    angle : float
        The largest principal angle between the spans of the same group of columns, in radians.
    turn : float
        The root of the sum of the squares of all of them, in radians: for columns one by one and small turns
        :math:`\|\log Q^T T\|_F`.
    displaced : int
        How many columns resemble most a column of another group: they changed places.
    """

    angle: float
    turn: float
    displaced: int


class Definiteness(NamedTuple):
    r"""Whether a symmetric matrix is positive semidefinite.

    Attributes
    ----------
    negative : int
        Eigenvalues below :math:`-n u \max |\lambda|`, u that of float64: as many as are told from zero.
    depth : float
        :math:`\max(0, -\lambda_{\min}) / \max |\lambda|`.
    """

    negative: int
    depth: float


def errors(
    K: Tensor | ArrayLike, values: Tensor | ArrayLike, Q: Tensor | ArrayLike, tolerance: float = 0.0
) -> BasisError:
    r"""Measure a basis against the eigenbasis of one matrix, in float64.

    Values of K closer than `tolerance` form one cluster. An angle is determined to about the error of K over the
    distance of its cluster from the next, so a tolerance of :math:`u / \delta`, u the roundoff of K, leaves only angles
    known to δ.

    Parameters
    ----------
    K : tensor or array of shape (n, n)
        The symmetric part is used.
    values : tensor or array of shape (n,)
        Supposed eigenvalues, descending.
    Q : tensor or array of shape (n, n)
        Supposed eigenvectors, in columns.
    tolerance : float
        In units of the largest magnitude among the values of K.

    Raises
    ------
    ValueError
        If the shapes do not fit, numbers are not real or finite, or the tolerance is negative.

    Examples
    --------
    >>> error = errors(np.diag([4.0, 3.0]), [4.0, 2.0], [[0.8, -0.6], [0.6, 0.8]])
    >>> round(error.values, 3), round(error.off_diagonal, 3), round(math.degrees(error.angle), 2)
    (0.25, 0.136, 36.87)
    """
    A, found, P = _read("K", K, 2), _read("values", values, 1), _read("Q", Q, 2)
    n = len(found)
    if A.shape != (n, n) or P.shape != (n, n):
        raise ValueError(
            f"errors: K has shape {A.shape}, values {found.shape} and Q {P.shape}, needed (n, n), (n,) and (n, n)"
        )
    A, scale = _normalised(A)
    found = found * scale
    truth = eigen.eigenbasis(A)
    turns = within(P, truth.Q, eigen.clusters(truth.values, tolerance))
    return BasisError(
        orthonormality=eigen.orthonormality(P),
        residual=eigen.residual(A, found, P),
        off_diagonal=eigen.off_diagonal(A, P),
        values=_ratio(np.abs(found - truth.values).max(initial=0.0), np.abs(truth.values).max(initial=0.0)),
        angle=float(turns.max(initial=0.0)),
        turn=float(np.linalg.norm(turns)),
    )


def angles(Q: Tensor | ArrayLike, T: Tensor | ArrayLike) -> Float[np.ndarray, " k"]:
    r"""Return the principal angles between two spans, descending, in radians within 0 and :math:`\pi / 2`.

    Small angles are as accurate as large ones: they come from sines.

    Parameters
    ----------
    Q, T : tensor or array of shape (n, k)
        Linearly independent columns; orthonormal ones span the same.

    Raises
    ------
    ValueError
        If the shapes differ, or columns are not finite or not independent.

    Examples
    --------
    >>> np.degrees(angles([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[0.8, 0.0], [0.0, 2.0], [0.6, 0.0]])).round(2) + 0.0
    array([36.87,  0.  ])
    """
    P, B = _read("Q", Q, 2), _read("T", T, 2)
    if P.shape != B.shape:
        raise ValueError(f"angles: Q has shape {P.shape} and T {B.shape}, needed (n, k) for both")
    if P.size == 0:
        return np.zeros(0)
    found = scipy.linalg.subspace_angles(P, B)
    if len(found) < P.shape[1]:
        raise ValueError(f"angles: one of the spans has {len(found)} dimensions, needed {P.shape[1]}, one a column")
    return np.asarray(found)


def within(Q: Tensor | ArrayLike, T: Tensor | ArrayLike, groups: Sequence[slice]) -> Float[np.ndarray, " k"]:
    """Return the principal angles between the spans of each group of columns and of the same columns of the other.

    Parameters
    ----------
    Q, T : tensor or array of shape (n, k)
        As for `angles`.
    groups : sequence of slices
        As from ``oracle.eigen.clusters``.

    Returns
    -------
    array
        Group by group, in radians.

    Raises
    ------
    ValueError
        As for `angles`.

    Examples
    --------
    >>> swap = [[0.0, 1.0], [1.0, 0.0]]
    >>> np.degrees(within(swap, np.eye(2), [slice(0, 1), slice(1, 2)]))
    array([90., 90.])
    >>> within(swap, np.eye(2), [slice(0, 2)])
    array([0., 0.])
    """
    P, B = _read("Q", Q, 2), _read("T", T, 2)
    return np.concatenate([np.zeros(0), *(angles(P[:, group], B[:, group]) for group in groups)])


def drift(old: Tensor | ArrayLike, new: Tensor | ArrayLike, groups: Sequence[slice] | None = None) -> Drift:
    r"""Measure how far the columns of one basis have come from those of another.

    Parameters
    ----------
    old, new : tensor or array of shape (n, k)
        Orthonormal columns.
    groups : sequence of slices, optional
        Columns that count as one span; by default each alone.

    Raises
    ------
    ValueError
        As for `angles`.

    Examples
    --------
    >>> cosine, sine = math.cos(0.1), math.sin(0.1)
    >>> moved = drift(np.eye(3), [[cosine, 0.0, -sine], [0.0, 1.0, 0.0], [sine, 0.0, cosine]])
    >>> round(moved.angle, 6), round(moved.turn, 6), moved.displaced
    (0.1, 0.141421, 0)
    """
    P, B = _read("old", old, 2), _read("new", new, 2)
    spans = [slice(i, i + 1) for i in range(B.shape[1])] if groups is None else groups
    turns = within(P, B, spans)
    group_of = np.zeros(B.shape[1], dtype=int)
    for number, span in enumerate(spans):
        group_of[span] = number
    partner = np.abs(P.T @ B).argmax(axis=0) if P.size else np.zeros(0, dtype=int)
    displaced = int((group_of[partner] != group_of).sum())
    return Drift(float(turns.max(initial=0.0)), float(np.linalg.norm(turns)), displaced)


def definiteness(K: Tensor | ArrayLike) -> Definiteness:
    r"""Count the negative eigenvalues of the symmetric part of one matrix, exactly as it is stored.

    A Gram matrix has none. What rounding makes of it in a format of roundoff u has values down to about
    :math:`-u \|K\|_2`, and half of those that were zero are negative.

    Parameters
    ----------
    K : tensor or array of shape (n, n)
        Of any real dtype.

    Raises
    ------
    ValueError
        If K is not a square matrix of finite numbers.

    Examples
    --------
    >>> definiteness(np.diag([4.0, -1.0, 0.0]))
    Definiteness(negative=1, depth=0.25)
    """
    A, _ = _normalised(_read("K", K, 2))
    values = eigen.eigenbasis(A).values
    size = float(np.abs(values).max(initial=0.0))
    negative = int((values < -bounds.svd(len(A), len(A), U64) * size).sum())
    return Definiteness(negative, _ratio(max(0.0, -float(values.min(initial=0.0))), size))


def _normalised(A: Float[np.ndarray, "m n"]) -> tuple[Float[np.ndarray, "m n"], float]:
    """Return the matrix times a power of two that brings it near 1, and the power."""
    _, exponent = math.frexp(float(np.abs(A).max(initial=0.0)))
    scale = math.ldexp(1.0, min(max(-exponent, -1022), 1022))
    return A * scale, scale


def _ratio(error: float, size: float) -> float:
    """Return the quotient, 0 for no error even where there is no size."""
    return float(error / size) if size else (math.inf if error else 0.0)


def _read(name: str, X: Tensor | ArrayLike, ndim: int) -> np.ndarray:
    """Return an array in float64 on the host, or say what is wrong with it."""
    A = X.detach().cpu() if isinstance(X, Tensor) else np.asarray(X)
    if A.ndim != ndim or (A.is_complex() if isinstance(A, Tensor) else A.dtype.kind not in "fiu"):
        raise ValueError(f"{name} has shape {tuple(A.shape)} and dtype {A.dtype}, needed {ndim} axes of real numbers")
    values = A.double().numpy() if isinstance(A, Tensor) else A.astype(np.float64)
    bad = values.size - np.count_nonzero(np.isfinite(values))
    if bad:
        raise ValueError(f"{bad} of the {values.size} entries of {name} are not finite, needed all finite")
    return values
