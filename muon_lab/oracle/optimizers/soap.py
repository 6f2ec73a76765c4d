r"""SOAP: Adam in the eigenbases of the two Kronecker factors of the gradient, and REKLS as its special case.

Factors. With :math:`\beta = 1 - (1 - \beta_s) / (1 - \beta_s^t)`, or :math:`\beta_s` itself without correction, where t
counts the gradients in the factors, this one included (so that the first has all the weight):

.. math::

    L \leftarrow \beta L + (1 - \beta)\, G G^T, \qquad R \leftarrow \beta R + (1 - \beta)\, G^T G

or with the Kullback-Leibler correction, the values and bases being those of the last refresh for both,

.. math::

    L \leftarrow \beta L + \tfrac{1 - \beta}{n}\, G\, Q_R \max(\Lambda_R, \epsilon)^{-1} Q_R^T\, G^T, \qquad
    R \leftarrow \beta R + \tfrac{1 - \beta}{m}\, G^T Q_L \max(\Lambda_L, \epsilon)^{-1} Q_L^T\, G.

Refresh. New bases :math:`Q_L, Q_R`, descending, by an eigendecomposition or by orthogonal iteration from the old ones
(the first always by a decomposition; :math:`\Lambda = \mathrm{diag}(Q^T K Q)`). The first moment goes along,
:math:`M \leftarrow Q_L'^T (Q_L M Q_R^T) Q_R'`. What happens to the second is a choice:

=========== ==========================================================================================================
`unchanged` V keeps its entries, whatever directions they now stand for (Emerging-Optimizers from 0.4.0 on)
`permuted`  before the refresh the old columns, and V with them, are sorted by :math:`\mathrm{diag}(Q^T K Q)` with the
            new factor; nothing is sorted after an iteration (Emerging-Optimizers up to 0.3.1, and the first SOAP)
`rotated`   :math:`V \leftarrow (S \circ S)^T V (T \circ T)` with :math:`S = Q_L^T Q_L'`, :math:`T = Q_R^T Q_R'`
=========== ==========================================================================================================

For `rotated`: if the entries of :math:`Q_L^T G Q_R` are uncorrelated with variances V, then those of
:math:`S^T (Q_L^T G Q_R)\, T` have the variances :math:`\sum_{kl} S_{ki}^2 V_{kl} T_{lj}^2`. Permutations and signs are
followed exactly, and the sum of V is kept.

Update. Decay; :math:`G' = Q_L^T G Q_R`; the Adam step of `adam` on G' with M and V; :math:`U = Q_L U' Q_R^T`; times
:math:`\min(1, r / (\mathrm{rms}(U) + 10^{-7}))` where a limit r is set; :math:`W \leftarrow W - \eta U`. Decay of the
form `l2` enters here: the factors see the raw gradient.

Decided here
------------
- `order`: "current" has the gradient in the factors and the bases before it is projected; "lagged" projects with the
  bases as they are and adds the gradient to the factors after the update, as the first SOAP does.
- `first_step`: "skip" lets the first gradient make the bases and nothing else. No decay, no moments, and the counter of
  Adam stays at 0. "lagged" has to skip: there is no basis yet.
- Bases are refreshed when the number of the Adam step is a multiple of `frequency`, and at the first gradient.
- A zero matrix has the identity as its basis.

What cannot be reproduced
-------------------------
- In exact arithmetic and "current" order the first projected gradient is diagonal, and each is zero in the null spaces
  of the factors. Adam divides what rounding leaves in these entries by its own size plus :math:`\epsilon`. With
  :math:`\epsilon` far below the gradient no two implementations agree on such a step; they differ by
  :math:`u \|G\| / \epsilon` in units of it. For a square matrix "skip" leaves that step out.
- A factor of low rank leaves the basis of its null space to the eigensolver. That basis shows wherever something that
  is not in the factor yet is projected: a later gradient, with a frequency above 1 or in "lagged" order, or the weight,
  with decay of the form `l2`; and in where an iteration goes and how `permuted` sorts. Only a trajectory that is
  decomposed anew at every gradient in "current" order, with `unchanged` or `rotated` moments, is free of it.
- With the Kullback-Leibler correction the first factors are :math:`1 / \epsilon` too large, the stored values being
  zero. If a factor is singular then (every rectangular matrix has one), what rounding puts into its zero values is
  :math:`u / \epsilon`, and with :math:`\epsilon = 10^{-8}` as large as :math:`\epsilon` itself. REKLS with its usual
  settings is then off by up to tens of per cents in float64 over five steps of a 3 by 4 matrix, and has no digit right
  at the third step of an 8 by 24 one. `multiprecision` holds it; so does :math:`\epsilon = 0.05`, to 1e-13.

References
----------
Vyas et al. (2025), *SOAP* (arXiv 2409.11321), and nikhilvyas/SOAP for the lagged order; Lin et al. (2025), *KL-Shampoo*
(arXiv 2509.03378); NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), ``legacy_soap``, and release 0.3.0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from muon_lab.oracle import eigen
from muon_lab.oracle.optimizers.adam import moments, quotient
from muon_lab.oracle.optimizers.step import (
    DECAYS,
    check_fractions,
    check_positive,
    check_rates,
    decayed,
)
from muon_lab.oracle.rounding import check_name

EIGENBASES = ("eigh", "iteration")
FIRST_STEPS = ("apply", "skip")
ORDERS = ("current", "lagged")
SECOND_MOMENTS = ("unchanged", "permuted", "rotated")

#: Added to the RMS of the update before the limit is divided by it (Emerging-Optimizers).
RMS_EPS = 1e-7


class SOAPState(NamedTuple):
    """The weight, the counters, the moments in the eigenbases, the factors with their bases and values."""

    W: Float[np.ndarray, "m n"]
    #: Adam steps taken.
    step: int
    #: Gradients in the factors.
    seen: int
    M: Float[np.ndarray, "m n"]
    V: Float[np.ndarray, "m n"]
    L: Float[np.ndarray, "m m"]
    R: Float[np.ndarray, "n n"]
    Q_L: Float[np.ndarray, "m m"]
    Q_R: Float[np.ndarray, "n n"]
    #: Values of the last refresh, those of L in the basis Q_L and those of R in Q_R.
    Lambda_L: Float[np.ndarray, " m"]
    Lambda_R: Float[np.ndarray, " n"]


@dataclass(frozen=True)
class SOAP:
    r"""SOAP with every choice that published versions make differently.

    Attributes
    ----------
    lr : float
        The learning rate :math:`\eta`.
    betas, eps, nesterov, correct_bias
        Of Adam, as for `AdamW`; eps is also the floor of the values in the Kullback-Leibler correction.
    shampoo_beta, correct_shampoo_bias : float and bool
        The coefficient :math:`\beta_s` of the factors, in [0, 1), and its correction.
    weight_decay, decay : float and str
        How much, and in which of the forms `step.DECAYS`.
    eigenbasis, power_steps, frequency : str, int and int
        One of `EIGENBASES`; how many products and QR decompositions an iteration has; refreshes at its multiples.
    second_moment, first_step, order : str
        One of `SECOND_MOMENTS`, `FIRST_STEPS` and `ORDERS`.
    kl : bool
        The Kullback-Leibler correction.
    max_rms : float, optional
        The limit r of the RMS of the update.

    Raises
    ------
    ValueError
        If a value is out of its range, a name is unknown, or the order is "lagged" and the first step is not skipped.

    Examples
    --------
    >>> from muon_lab.oracle.optimizers import trajectory
    >>> G1, G2 = [[2.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [0.0, 1.0]]
    >>> first, second = trajectory(SOAP(lr=1.0, betas=(0.95, 0.95), eps=1e-12), np.zeros((2, 2)), [G1, G2])
    >>> first.W.round(3) + 0.0  # the polar factor of the first gradient
    array([[-1.,  0.],
           [ 0., -1.]])
    >>> (first.W - second.W).round(3)
    array([[0.802, 0.279],
           [0.063, 1.173]])
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    shampoo_beta: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: str = "decoupled"
    nesterov: bool = False
    correct_bias: bool = True
    correct_shampoo_bias: bool = True
    eigenbasis: str = "eigh"
    power_steps: int = 1
    frequency: int = 1
    second_moment: str = "unchanged"
    first_step: str = "apply"
    order: str = "current"
    kl: bool = False
    max_rms: float | None = None

    def __post_init__(self) -> None:
        check_rates("SOAP", lr=self.lr, weight_decay=self.weight_decay)
        check_fractions("SOAP", beta1=self.betas[0], beta2=self.betas[1], shampoo_beta=self.shampoo_beta)
        check_positive("SOAP", eps=self.eps, power_steps=self.power_steps, frequency=self.frequency)
        check_positive("SOAP", max_rms=1.0 if self.max_rms is None else self.max_rms)
        check_name("decay", self.decay, DECAYS)
        check_name("eigenbasis", self.eigenbasis, EIGENBASES)
        check_name("second moment", self.second_moment, SECOND_MOMENTS)
        check_name("first step", self.first_step, FIRST_STEPS)
        check_name("order", self.order, ORDERS)
        if self.order == "lagged" and self.first_step == "apply":
            raise ValueError("SOAP: order is 'lagged' and first_step 'apply', needed 'skip': there is no basis yet")

    def start(self, W: Float[np.ndarray, "m n"]) -> SOAPState:
        """Return the state before the first gradient: zero factors with the identity as their bases."""
        m, n = W.shape
        M, V, L, R = np.zeros((m, n)), np.zeros((m, n)), np.zeros((m, m)), np.zeros((n, n))
        return SOAPState(W, 0, 0, M, V, L, R, np.eye(m), np.eye(n), np.zeros(m), np.zeros(n))

    def step(self, state: SOAPState, G: Float[np.ndarray, "m n"]) -> SOAPState:
        """Return the state after one gradient."""
        first = state.seen == 0
        if self.order == "lagged":
            state = state if first else self.updated(state, G)
            state = self.accumulated(state, G)
            return self.refreshed(state) if first or state.step % self.frequency == 0 else state
        state = self.accumulated(state, G)
        state = self.refreshed(state) if first or (state.step + 1) % self.frequency == 0 else state
        return state if first and self.first_step == "skip" else self.updated(state, G)

    def accumulated(self, state: SOAPState, G: Float[np.ndarray, "m n"]) -> SOAPState:
        """Return the state with the gradient in the factors."""
        m, n = G.shape
        beta, t = self.shampoo_beta, state.seen + 1
        if self.correct_shampoo_bias:
            beta = 1 - (1 - beta) / (1 - beta**t)
        left, right = G @ G.T, G.T @ G
        if self.kl:
            left = G @ inverse(state.Lambda_R, state.Q_R, self.eps) @ G.T / max(n, 1)
            right = G.T @ inverse(state.Lambda_L, state.Q_L, self.eps) @ G / max(m, 1)
        return state._replace(seen=t, L=beta * state.L + (1 - beta) * left, R=beta * state.R + (1 - beta) * right)

    def refreshed(self, state: SOAPState) -> SOAPState:
        """Return the state in new bases."""
        Q_L, Q_R, V = state.Q_L, state.Q_R, state.V
        M = Q_L @ state.M @ Q_R.T
        if self.second_moment == "permuted":
            left, right = by_rayleigh_quotient(state.L, Q_L), by_rayleigh_quotient(state.R, Q_R)
            Q_L, Q_R, V = Q_L[:, left], Q_R[:, right], V[left, :][:, right]
        first = state.seen == 1
        Lambda_L, new_L = self.basis(state.L, Q_L, first)
        Lambda_R, new_R = self.basis(state.R, Q_R, first)
        if self.second_moment == "rotated":
            V = np.square(Q_L.T @ new_L).T @ V @ np.square(Q_R.T @ new_R)
        return state._replace(M=new_L.T @ M @ new_R, V=V, Q_L=new_L, Q_R=new_R, Lambda_L=Lambda_L, Lambda_R=Lambda_R)

    def basis(
        self, K: Float[np.ndarray, "n n"], Q: Float[np.ndarray, "n n"], first: bool
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n n"]]:
        """Return the values and the new basis of a factor."""
        if first or self.eigenbasis == "eigh":
            values, Q = eigen.eigenbasis(K)
            return values, Q
        Q = eigen.orthogonal_iteration(K, Q, self.power_steps)
        if self.second_moment != "permuted":
            Q = Q[:, by_rayleigh_quotient(K, Q)]
        return np.diag(Q.T @ K @ Q).copy(), Q

    def updated(self, state: SOAPState, G: Float[np.ndarray, "m n"]) -> SOAPState:
        """Return the state after an Adam step in the bases."""
        W, G = decayed(state.W, G, self.lr, self.weight_decay, self.decay)
        t, projected = state.step + 1, state.Q_L.T @ G @ state.Q_R
        M, V = moments(state.M, state.V, projected, self.betas)
        U = quotient(M, V, projected, t, self.betas, self.eps, self.nesterov, self.correct_bias)
        return state._replace(W=W - self.lr * self.limited(state.Q_L @ U @ state.Q_R.T), step=t, M=M, V=V)

    def limited(self, U: Float[np.ndarray, "m n"]) -> Float[np.ndarray, "m n"]:
        """Return the update with its RMS at most at the limit."""
        if self.max_rms is None or U.size == 0:
            return U
        return U * min(1.0, self.max_rms / (float(np.sqrt((U * U).mean())) + RMS_EPS))


def rekls(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    shampoo_beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: str = "decoupled",
    second_moment: str = "unchanged",
) -> SOAP:
    """Return REKLS: SOAP with the Kullback-Leibler correction and an eigendecomposition at every step.

    Parameters
    ----------
    lr, betas, shampoo_beta, eps, weight_decay, decay, second_moment
        As for `SOAP`.

    Examples
    --------
    >>> rekls(lr=0.1).kl, rekls(lr=0.1).eigenbasis, rekls(lr=0.1).frequency
    (True, 'eigh', 1)
    """
    return SOAP(lr, betas, shampoo_beta, eps, weight_decay, decay, second_moment=second_moment, kl=True)


def inverse(values: Float[np.ndarray, " n"], Q: Float[np.ndarray, "n n"], floor: float) -> Float[np.ndarray, "n n"]:
    r"""Return :math:`Q \max(\Lambda, \epsilon)^{-1} Q^T`.

    Examples
    --------
    >>> inverse(np.array([4.0, -1e-9]), np.eye(2), floor=0.5)
    array([[0.25, 0.  ],
           [0.  , 2.  ]])
    """
    return (Q / np.maximum(values, floor)) @ Q.T


def by_rayleigh_quotient(K: Float[np.ndarray, "n n"], Q: Float[np.ndarray, "n n"]) -> np.ndarray:
    r"""Return the order in which :math:`q_i^T K q_i` descends, equal ones as they are.

    Examples
    --------
    >>> by_rayleigh_quotient(np.diag([1.0, 3.0, 2.0]), np.eye(3))
    array([1, 2, 0])
    """
    return np.argsort(-np.diag(Q.T @ K @ Q), kind="stable")
