r"""Muon with any schedule or the exact polar factor, MOP, and Muon with a second moment (AdaMuon, NorMuon, NAMO).

.. math:: W \leftarrow W - \eta\, x\, s(m, n, C)\, O(C)

with the candidate C and the factor s of `step`, an extra factor x, and for the direction D = O(C) either the partial
isometry on the range of C or :math:`P f(\Sigma / \|\Sigma\|_F) Q^T` for :math:`C = P \Sigma Q^T` and the composition f
of odd quintics, which is what a Newton-Schulz iteration gives in exact arithmetic. Zero has the direction zero.

The second moment acts on D before the factor s:

========= ==================================================================================================
`adamuon` :math:`V \leftarrow \beta_2 V + (1 - \beta_2)\, D \circ D`, :math:`\; U = D / (\sqrt V + \epsilon)`
`normuon` V averages the means of :math:`D \circ D` over the columns if m >= n, else over the rows;
          :math:`U' = D / \sqrt{\max(V, \epsilon)}`, :math:`\; U = U' \|D\|_F / \max(\|U'\|_F, \epsilon)`
`namo`    V averages :math:`\|G\|_F^2`, :math:`\; U = D\, \|C\|_F / (\sqrt V + \epsilon)`
========= ==================================================================================================

V has no bias correction.

Decided here, where published implementations differ
----------------------------------------------------
- MOP leaves the null space of C empty. Emerging-Optimizers fills it with whatever basis the decomposition returns, so
  that its zero momentum moves a weight at full size under any factor but the nuclear norm.
- The nuclear norm is taken as :math:`\langle D, C \rangle`: for the polar factor the sum of the singular values that
  count, for a schedule the estimate of PolarGrad.
- `normuon` keeps V as it is; Emerging-Optimizers stores :math:`\max(V, \epsilon)`. They part only where a row or column
  of D all but vanishes. The paper of NorMuon averages over columns for every shape.

References
----------
Jordan et al. (2024), *Muon*; Lau et al. (2025), *PolarGrad*; Si et al. (2025), *AdaMuon* (arXiv 2507.11005); Li et al.
(2025), *NorMuon* (arXiv 2510.05491); NAMO (arXiv 2602.17080); NVIDIA-NeMo/Emerging-Optimizers, commit fd77292.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from muon_lab.oracle import polar
from muon_lab.oracle.optimizers.step import (
    DECAYS,
    MOMENTA,
    SCALES,
    check_fractions,
    check_positive,
    check_rates,
    decayed,
    momentum,
    scale,
)
from muon_lab.oracle.rounding import check_name

SECOND_MOMENTS = ("adamuon", "normuon", "namo")


class MuonState(NamedTuple):
    """The weight and the momentum buffer."""

    W: Float[np.ndarray, "m n"]
    M: Float[np.ndarray, "m n"]


class AdaptiveState(NamedTuple):
    """The weight, the momentum buffer and the second moment, (m, n), (m, 1) or (1, n), or (1, 1)."""

    W: Float[np.ndarray, "m n"]
    M: Float[np.ndarray, "m n"]
    V: Float[np.ndarray, "p q"]


@dataclass(frozen=True)
class Muon:
    r"""Muon, and MOP as its special case.

    Attributes
    ----------
    lr : float
        The learning rate :math:`\eta`.
    momentum : float
        The coefficient :math:`\mu`, in [0, 1).
    coefficients : sequence of (a, b, c), optional
        The odd quintics in the order of application; the exact polar factor if there are none.
    nesterov, form : bool and str
        The look-ahead, and one of the forms `step.MOMENTA`.
    scale, extra : str and float
        One of the modes `step.SCALES`, and the factor x.
    weight_decay, decay : float and str
        How much, and in which of the forms `step.DECAYS`.
    roundoff : float
        Unit roundoff of the gradients, from which `polar.polar` tells the rank; 2^-24 for float32.

    Raises
    ------
    ValueError
        If a value is out of its range or a name is unknown.

    Examples
    --------
    >>> from muon_lab.oracle.optimizers import trajectory
    >>> W, G = [[0.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, -5.0]]
    >>> trajectory(Muon(lr=1.0, scale="none"), W, [G])[0].W
    array([[-1.,  0.],
           [ 0.,  1.]])
    >>> trajectory(Muon(lr=1.0, scale="none", coefficients=[(1.5, -0.5, 0.0)]), W, [G])[0].W.round(3) + 0.0
    array([[-0.531,  0.   ],
           [ 0.   ,  0.993]])
    """

    lr: float
    momentum: float = 0.95
    coefficients: Sequence[Sequence[float]] | None = None
    nesterov: bool = False
    form: str = "average"
    scale: str = "spectral"
    extra: float = 1.0
    weight_decay: float = 0.0
    decay: str = "decoupled"
    roundoff: float = polar.ROUNDOFF

    def __post_init__(self) -> None:
        check_rates("Muon", lr=self.lr, extra=self.extra, weight_decay=self.weight_decay)
        check_fractions("Muon", momentum=self.momentum, roundoff=self.roundoff)
        check_name("momentum form", self.form, MOMENTA)
        check_name("scale", self.scale, SCALES)
        check_name("decay", self.decay, DECAYS)
        for i, row in enumerate(self.coefficients or ()):
            if len(row) != 3:
                raise ValueError(f"Muon: step {i} of coefficients has {len(row)} numbers, needed three (a, b, c)")

    def start(self, W: Float[np.ndarray, "m n"]) -> MuonState:
        """Return the state before the first gradient."""
        return MuonState(W, np.zeros_like(W))

    def step(self, state: MuonState, G: Float[np.ndarray, "m n"]) -> MuonState:
        """Return the state after one gradient."""
        W, G = decayed(state.W, G, self.lr, self.weight_decay, self.decay)
        M, C = momentum(state.M, G, self.momentum, self.form, self.nesterov)
        D = self.direction(C)
        return MuonState(W - self.lr * self.extra * scale(self.scale, C, D) * D, M)

    def direction(self, C: Float[np.ndarray, "m n"]) -> Float[np.ndarray, "m n"]:
        """Return O(C), without unit."""
        if self.coefficients is None:
            return polar.polar(C, roundoff=self.roundoff).U
        return polar.singular_value_map(C, self.composed)

    def composed(self, sigma: Float[np.ndarray, " r"]) -> Float[np.ndarray, " r"]:
        """Apply the odd quintics one after another."""
        for a, b, c in self.coefficients or ():
            sigma = a * sigma + b * sigma**3 + c * sigma**5
        return sigma


def mop(
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = False,
    scale: str = "nuclear_norm",
    extra: float = 1.0,
    weight_decay: float = 0.0,
    decay: str = "decoupled",
) -> Muon:
    r"""Return MOP: the exact polar factor times the nuclear norm of the candidate, :math:`W - \eta \|C\|_* U`.

    Parameters
    ----------
    lr, momentum, nesterov, scale, extra, weight_decay, decay
        As for `Muon`.

    Examples
    --------
    >>> from muon_lab.oracle.optimizers import trajectory
    >>> trajectory(mop(lr=1.0, momentum=0.0), [[0.0, 0.0]], [[[3.0, 4.0]]])[0].W + 0.0
    array([[-3., -4.]])
    """
    return Muon(lr, momentum, None, nesterov, "average", scale, extra, weight_decay, decay)


@dataclass(frozen=True)
class AdaptiveMuon:
    r"""Muon whose direction is divided by a second moment.

    Attributes
    ----------
    muon : Muon
        Everything but the second moment.
    second_moment : str
        One of `SECOND_MOMENTS`.
    beta2 : float
        Of its average, in [0, 1).
    eps : float
        Above 0; without unit, for `namo` in that of the gradient.

    Raises
    ------
    ValueError
        If a value is out of its range, the name is unknown, or `namo` meets `l2`: its V is that of the raw gradient.

    Examples
    --------
    >>> from muon_lab.oracle.optimizers import trajectory
    >>> rule = AdaptiveMuon(Muon(lr=1.0, scale="none"), "normuon", beta2=0.0)
    >>> trajectory(rule, [[0.0], [0.0]], [[[3.0], [4.0]]])[0].W.round(6)  # rows of one length, the norm kept
    array([[-0.707107],
           [-0.707107]])
    """

    muon: Muon
    second_moment: str
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_name("second moment", self.second_moment, SECOND_MOMENTS)
        check_fractions("AdaptiveMuon", beta2=self.beta2)
        check_positive("AdaptiveMuon", eps=self.eps)
        if self.second_moment == "namo" and self.muon.decay == "l2":
            raise ValueError("AdaptiveMuon: second_moment is 'namo' and decay 'l2', needed another decay for 'namo'")

    def start(self, W: Float[np.ndarray, "m n"]) -> AdaptiveState:
        """Return the state before the first gradient."""
        m, n = W.shape
        shapes = {"adamuon": (m, n), "normuon": (m, 1) if m >= n else (1, n), "namo": (1, 1)}
        return AdaptiveState(W, np.zeros_like(W), np.zeros(shapes[self.second_moment]))

    def step(self, state: AdaptiveState, G: Float[np.ndarray, "m n"]) -> AdaptiveState:
        """Return the state after one gradient."""
        muon = self.muon
        W, G = decayed(state.W, G, muon.lr, muon.weight_decay, muon.decay)
        M, C = momentum(state.M, G, muon.momentum, muon.form, muon.nesterov)
        D = muon.direction(C)
        V = self.beta2 * state.V + (1 - self.beta2) * self.statistic(D, G)
        return AdaptiveState(W - muon.lr * muon.extra * scale(muon.scale, C, D) * self.divided(D, V, C), M, V)

    def statistic(self, D: Float[np.ndarray, "m n"], G: Float[np.ndarray, "m n"]) -> Float[np.ndarray, "p q"]:
        """Return what V averages."""
        if self.second_moment == "adamuon":
            return D * D
        if self.second_moment == "namo":
            return np.array([[(G * G).sum()]])
        axis = 1 if D.shape[0] >= D.shape[1] else 0
        return (D * D).sum(axis=axis, keepdims=True) / max(D.shape[axis], 1)

    def divided(
        self, D: Float[np.ndarray, "m n"], V: Float[np.ndarray, "p q"], C: Float[np.ndarray, "m n"]
    ) -> Float[np.ndarray, "m n"]:
        """Return the update U."""
        if self.second_moment == "adamuon":
            return D / (np.sqrt(V) + self.eps)
        if self.second_moment == "namo":
            return D * np.linalg.norm(C) / (np.sqrt(V) + self.eps)
        rows = D / np.sqrt(np.maximum(V, self.eps))
        return rows * np.linalg.norm(D) / max(float(np.linalg.norm(rows)), self.eps)
