r"""How far an update X is from the polar factor U of G = U H, in ten numbers.

.. math:: S = \operatorname{sym}(G X^T) \;(m \le n), \qquad S = \operatorname{sym}(X^T G) \;(m > n)

What each number reads, to first order, for planted errors. U has full rank r, s are the singular values of G, u_i and v_i
its singular vectors; a dash stands for second order or zero, and "one direction" for :math:`X = U + \delta u_i v_i^T`.

============== ======================== ================================== ================================
metric         shrink (1 - δ) U         one direction, δ                   turn exp(δK) U, K skew
============== ======================== ================================== ================================
relative       δ                        :math:`|δ| / \sqrt r`              :math:`δ \|K\|_F / \sqrt r`
orthogonality  2 δ                      :math:`2 |δ| / \sqrt r`            0
residual       2 δ                      :math:`2 |δ| s_i / \|s\|`          :math:`δ \|P K + K P\|_F / 2 \|s\|`
definiteness   0                        0; :math:`-(1 + δ) s_i / s_1`      -
                                        where δ < -1
gap            δ                        :math:`-δ s_i / \sum s`            -
excess         0 (-δ where δ < 0)       max(δ, 0)                          0
cosine         1                        -                                  -
sigma_max      1 - δ                    1 + max(δ, 0)                      1
sigma_min      1 - δ                    1 + min(δ, 0)                      1
fro_ratio      1 - δ                    1 + δ / r                          1
============== ======================== ================================== ================================

with :math:`P = (G G^T)^{1/2}` (and :math:`m \le n`). No number sees everything: a turn leaves orthogonality at zero, and a
flipped direction (δ = -2) leaves both orthogonality and residual at zero; definiteness and gap read it.

References
----------
Higham, *Functions of Matrices* (2008), chapter 8 (S is positive semidefinite and G = S X exactly for the polar factor);
Fan & Hoffman (1955) for the nuclear norm as :math:`\max_{\|X\|_2 \le 1} \langle X, G \rangle`.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.oracle.polar import Polar

#: The largest finite float64: an overflowing square is reported as this number.
LARGEST = float(np.finfo(np.float64).max)


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
    zero X against a non-zero U has `cosine` 0. Every number is finite: what overflows float64 is reported as `LARGEST`.

    Parameters
    ----------
    X : tensor or array of shape (m, n)
        The update, of any real dtype and on any device.
    oracle : Polar
        The truth, from ``oracle.polar.polar(G)``; from ``filled(G)`` the distances are to the filled factor.

    Raises
    ------
    ValueError
        If the shapes differ, or X has entries that are complex or not finite.

    Examples
    --------
    >>> from muon_lab.oracle.polar import polar
    >>> G = np.diag([4.0, 2.0])
    >>> error = errors(np.diag([1.0, 0.9]), polar(G))
    >>> round(error.relative, 4), round(error.gap, 4), round(error.sigma_min, 4)
    (0.0707, 0.0333, 0.9)
    """
    Y = _array(X, oracle)
    unit, scale = _scaled(Y)
    U, (largest, total) = oracle.U, (float(oracle.s.max(initial=0.0)), 0.0)
    rank = int(oracle.rank)
    h = oracle.H / largest if largest > 0 else oracle.H
    s = oracle.s / largest if largest > 0 else oracle.s
    G, total = U @ h, float(s.sum())
    norm_U, norm_X = float(np.linalg.norm(U)), float(np.linalg.norm(unit))
    sigma = np.linalg.svd(unit, compute_uv=False)
    # Homogeneity keeps squares of a huge X in range: X = up * V with |V| <= 1, and every power of `up` is exact.
    up = max(scale, 1.0)
    V = unit * (scale / up)
    S = _symmetric_product(G, V)
    return PolarError(
        relative=_finite(up * float(np.linalg.norm(V - U / up)), norm_U),
        orthogonality=_finite(up * (up * _orthogonality(V, U / up)), math.sqrt(rank)),
        residual=_finite(up * (up * _residual(G, S, V, up)), float(np.linalg.norm(s))),
        definiteness=_finite(up * max(0.0, -_smallest_eigenvalue(S))),
        gap=_finite(up * (1 / up - float(np.vdot(V, G)) / total)) if total > 0 else 0.0,
        excess=max(0.0, _finite(scale * _at(sigma, 0)) - 1),
        cosine=_cosine(unit, U, norm_X, norm_U),
        sigma_max=_finite(scale * _at(sigma, 0)),
        sigma_min=_finite(scale * _at(sigma, rank - 1)),
        fro_ratio=_finite(scale * norm_X, norm_U),
    )
