r"""AdamW, and the Adam step that SOAP takes in its eigenbases.

.. math::

    M \leftarrow \beta_1 M + (1 - \beta_1) G, \qquad V \leftarrow \beta_2 V + (1 - \beta_2) G \circ G, \qquad
    U = \frac{M / (1 - \beta_1^t)}{\sqrt{V / (1 - \beta_2^t)} + \epsilon}

with t = 1 at the first step, and for the look-ahead of Nesterov, in place of :math:`M / (1 - \beta_1^t)`,

.. math:: \beta_1 M / (1 - \beta_1^{t+1}) + (1 - \beta_1) G / (1 - \beta_1^t).

Without bias correction all the denominators :math:`1 - \beta^t` are 1. :math:`\epsilon` stands after the root and after
the correction; where an implementation corrects the learning rate instead, as the first SOAP does, its
:math:`\epsilon` acts like :math:`\epsilon / \sqrt{1 - \beta_2^t}` here.

References
----------
Kingma & Ba (2015); Loshchilov & Hutter (2019); Dozat (2016) for the look-ahead;
NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), for the form of its correction.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from muon_lab.oracle.optimizers.step import (
    DECAYS,
    check_fractions,
    check_positive,
    check_rates,
    decayed,
)
from muon_lab.oracle.rounding import check_name


class AdamState(NamedTuple):
    """The weight, the number of steps taken, and the averages of the gradient and of its square."""

    W: Float[np.ndarray, "m n"]
    step: int
    M: Float[np.ndarray, "m n"]
    V: Float[np.ndarray, "m n"]


@dataclass(frozen=True)
class AdamW:
    r"""Adam with weight decay: decay, then :math:`W \leftarrow W - \eta U`.

    Attributes
    ----------
    lr : float
        The learning rate :math:`\eta`.
    betas : (float, float)
        Of the two averages, in [0, 1).
    eps : float
        Above 0, in the unit of the gradient.
    weight_decay, decay : float and str
        How much, and in which of the forms `step.DECAYS`.
    nesterov, correct_bias : bool
        The look-ahead, and the denominators :math:`1 - \beta^t`.

    Raises
    ------
    ValueError
        If a value is out of its range or a name is unknown.

    Examples
    --------
    >>> from muon_lab.oracle.optimizers import trajectory
    >>> trajectory(AdamW(lr=0.5, eps=1e-12), [[0.0, 0.0]], [[[-3.0, 7.0]]])[0].W.round(9)
    array([[ 0.5, -0.5]])
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: str = "decoupled"
    nesterov: bool = False
    correct_bias: bool = True

    def __post_init__(self) -> None:
        check_rates("AdamW", lr=self.lr, weight_decay=self.weight_decay)
        check_fractions("AdamW", beta1=self.betas[0], beta2=self.betas[1])
        check_positive("AdamW", eps=self.eps)
        check_name("decay", self.decay, DECAYS)

    def start(self, W: Float[np.ndarray, "m n"]) -> AdamState:
        """Return the state before the first gradient."""
        return AdamState(W, 0, np.zeros_like(W), np.zeros_like(W))

    def step(self, state: AdamState, G: Float[np.ndarray, "m n"]) -> AdamState:
        """Return the state after one gradient."""
        W, G = decayed(state.W, G, self.lr, self.weight_decay, self.decay)
        t = state.step + 1
        M, V = moments(state.M, state.V, G, self.betas)
        U = quotient(M, V, G, t, self.betas, self.eps, self.nesterov, self.correct_bias)
        return AdamState(W - self.lr * U, t, M, V)


def moments(
    M: Float[np.ndarray, "m n"], V: Float[np.ndarray, "m n"], G: Float[np.ndarray, "m n"], betas: tuple[float, float]
) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, "m n"]]:
    """Return the averages of the gradient and of its square with one more gradient in them."""
    return betas[0] * M + (1 - betas[0]) * G, betas[1] * V + (1 - betas[1]) * G * G


def quotient(
    M: Float[np.ndarray, "m n"],
    V: Float[np.ndarray, "m n"],
    G: Float[np.ndarray, "m n"],
    t: int,
    betas: tuple[float, float],
    eps: float,
    nesterov: bool,
    correct_bias: bool,
) -> Float[np.ndarray, "m n"]:
    """Return the update U of step t from the averages that hold its gradient already."""

    def missing(beta: float, steps: int) -> float:
        return 1 - beta**steps if correct_bias else 1.0

    numerator = M / missing(betas[0], t)
    if nesterov:
        numerator = betas[0] * M / missing(betas[0], t + 1) + (1 - betas[0]) * G / missing(betas[0], t)
    return numerator / (np.sqrt(V / missing(betas[1], t)) + eps)
