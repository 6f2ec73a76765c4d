r"""How far an update X is from the polar factor U of G = U H, in ten numbers.

.. math:: S = \operatorname{sym}(G X^T) \;(m \le n), \qquad S = \operatorname{sym}(X^T G) \;(m > n)

What each number reads, to first order, for planted errors. U has full rank r, s are the singular values of G, u_i and
v_i its singular vectors; a dash stands for second order in δ, "one direction" for :math:`X = U + δ u_i v_i^T`.

============== ======================== ================================== ================================
metric         shrink (1 - δ) U         one direction, δ                   turn exp(δK) U, K skew
============== ======================== ================================== ================================
relative       δ                        :math:`|δ| / \sqrt r`              :math:`δ \|K\|_F / \sqrt r`
orthogonality  2 δ                      :math:`2 |δ| / \sqrt r`            0
residual       2 δ                      :math:`2 |δ| s_i / \|s\|`          :math:`δ \|P K + K P\|_F / 2 \|s\|`
definiteness   0                        0; :math:`-(1 + δ) s_i / s_1`      0
                                        where δ < -1
gap            δ                        :math:`-δ s_i / \sum s`            -
excess         0 (-δ where δ < 0)       max(δ, 0)                          0
cosine         1                        -                                  -
sigma_max      1 - δ                    1 + max(δ, 0)                      1
sigma_min      1 - δ                    1 + min(δ, 0)                      1
fro_ratio      1 - δ                    1 + δ / r                          1
============== ======================== ================================== ================================

with :math:`P = (G G^T)^{1/2}` and :math:`m \le n`. No number sees everything: a turn leaves orthogonality at zero, and
a flipped direction (δ = -2) leaves both orthogonality and residual at zero; definiteness and gap read it. All ten are
the same for X and X^T, except that a square matrix has a residual on either side: the left one is read.

References
----------
Higham, *Functions of Matrices* (2008), chapter 8 (S is positive semidefinite and G = S X exactly for the polar factor);
Fan & Hoffman (1955) for the nuclear norm as :math:`\max_{\|X\|_2 \le 1} \langle X, G \rangle`.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from muon_lab.oracle.polar import Polar

#: Larger entries are read as this number, 1.6e60: its fourth power, summed over any matrix, is a float64.
CEILING = 2.0**200


class PolarError(NamedTuple):
    r"""Ten distances between X and the polar factor, all ratios without unit.

    Attributes
    ----------
    relative : float
        :math:`\|X - U\|_F / \|U\|_F`.
    orthogonality : float
        :math:`\|X X^T - U U^T\|_F / \sqrt r` on the short side, r the rank of G.
    residual : float
        :math:`\|G - S X\|_F / \|G\|_F`, or with X S for a tall matrix.
    definiteness : float
        :math:`\max(0, -\lambda_{\min}(S)) / s_{\max}`.
    gap : float
        :math:`1 - \langle X, G \rangle / \|G\|_*`, negative where X is too large.
    excess : float
        :math:`\max(0, \sigma_{\max}(X) - 1)`.
    cosine : float
        :math:`\langle X, U \rangle / (\|X\|_F \|U\|_F)`.
    sigma_max : float
        The largest singular value of X.
    sigma_min : float
        The r-th largest singular value of X.
    fro_ratio : float
        :math:`\|X\|_F / \|U\|_F`.
    """

    relative: float
    orthogonality: float
    residual: float
    definiteness: float
    gap: float
    excess: float
    cosine: float
    sigma_max: float
    sigma_min: float
    fro_ratio: float


def errors(X: Float[Tensor, "m n"] | Float[np.ndarray, "m n"], oracle: Polar) -> PolarError:
    r"""Measure X against the polar factor of one matrix, in float64 NumPy.

    A zero matrix G has U = 0, and the numbers are then: `relative` and `fro_ratio` :math:`\|X\|_F`, `orthogonality`
    :math:`\|X X^T\|_F`, `residual`, `definiteness`, `gap` and `sigma_min` 0, `cosine` 1 if X is zero too and else 0. A
    zero X against a non-zero U has `cosine` 0. Every number is finite: entries beyond `CEILING` are read as `CEILING`.

    Parameters
    ----------
    X : tensor or array of shape (m, n)
        The update, of any floating-point dtype and on any device.
    oracle : Polar
        The truth, from ``oracle.polar.polar(G)``; from ``filled(G)`` the distances are to the filled factor.

    Raises
    ------
    ValueError
        If the shapes differ, or X is complex or has entries that are not finite.

    Examples
    --------
    >>> from muon_lab.oracle.polar import polar
    >>> G = np.diag([4.0, 2.0])
    >>> error = errors(np.diag([1.0, 0.9]), polar(G))
    >>> round(error.relative, 4), round(error.gap, 4), round(error.sigma_min, 4)
    (0.0707, 0.0333, 0.9)
    """
    A = np.clip(_array(X, oracle), -CEILING, CEILING)
    U, rank, scale = oracle.U, int(oracle.rank), float(oracle.s.max(initial=0.0)) or 1.0
    G, s = U @ (oracle.H / scale), oracle.s / scale
    S = _hermitian(G, A)
    sigma = np.linalg.svd(A, compute_uv=False)
    size = _or_one(np.linalg.norm(U))
    return PolarError(
        relative=float(np.linalg.norm(A - U)) / size,
        orthogonality=float(np.linalg.norm(_short_gram(A) - _short_gram(U))) / math.sqrt(max(rank, 1)),
        residual=float(np.linalg.norm(G - (S @ A if _wide(A) else A @ S))) / _or_one(np.linalg.norm(s)),
        definiteness=max(0.0, -float(np.linalg.eigvalsh(S).min(initial=0.0))),
        gap=1 - float(np.vdot(A, G) / s.sum()) if rank else 0.0,
        excess=max(0.0, float(sigma.max(initial=0.0)) - 1),
        cosine=_cosine(A, U),
        sigma_max=float(sigma.max(initial=0.0)),
        sigma_min=float(sigma[rank - 1]) if rank else 0.0,
        fro_ratio=float(np.linalg.norm(A)) / size,
    )


def _wide(A: Float[np.ndarray, "m n"]) -> bool:
    return A.shape[0] <= A.shape[1]


def _short_gram(A: Float[np.ndarray, "m n"]) -> Float[np.ndarray, "k k"]:
    """Return A A^T or A^T A, whichever is smaller."""
    return A @ A.T if _wide(A) else A.T @ A


def _hermitian(G: Float[np.ndarray, "m n"], X: Float[np.ndarray, "m n"]) -> Float[np.ndarray, "k k"]:
    """Return S on the short side."""
    S = G @ X.T if _wide(G) else X.T @ G
    return (S + S.T) / 2


def _cosine(X: Float[np.ndarray, "m n"], U: Float[np.ndarray, "m n"]) -> float:
    """Return the cosine of the angle between X and U, 1 between two zeros and 0 between a zero and anything else."""
    largest = np.abs(X).max(initial=0.0)
    if largest == 0 or not U.any():
        return float(largest == 0 and not U.any())
    unit = X / largest
    return float(np.vdot(unit, U) / (np.linalg.norm(unit) * np.linalg.norm(U)))


def _or_one(norm: np.floating) -> float:
    """Return a divisor: the norm, or 1 for a zero matrix."""
    return float(norm) or 1.0


def _array(X: Tensor | np.ndarray, oracle: Polar) -> Float[np.ndarray, "m n"]:
    """Return X in float64 on the host, or say what is wrong with it."""
    A = X.detach().cpu() if isinstance(X, Tensor) else np.asarray(X)
    if A.ndim != 2 or tuple(A.shape) != oracle.U.shape:
        raise ValueError(
            f"errors: X has shape {tuple(A.shape)}, needed that of the oracle's one matrix, {oracle.U.shape}"
        )
    if A.is_complex() if isinstance(A, Tensor) else np.iscomplexobj(A):
        raise ValueError(f"errors: X has dtype {A.dtype}, needed real numbers")
    values = A.double().numpy() if isinstance(A, Tensor) else A.astype(np.float64)
    bad = values.size - np.count_nonzero(np.isfinite(values))
    if bad:
        raise ValueError(f"errors: {bad} of the {values.size} entries of X are not finite, needed all finite")
    return values
