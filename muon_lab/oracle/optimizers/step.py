r"""What the rules have in common: decay, momentum and scale, and the walk along a list of gradients.

For a weight W (m, n) with gradient G, learning rate :math:`\eta` and decay :math:`\lambda`, the order is decay,
momentum, direction, step. Decay acts before everything else and by :math:`\eta` itself, not by a scaled one:

============= ====================================================
`decoupled`   :math:`W \leftarrow (1 - \eta\lambda) W`
`independent` :math:`W \leftarrow (1 - \lambda) W`
`palm`        :math:`W \leftarrow (1 - \eta^2\lambda) W`
`l2`          :math:`G \leftarrow G + \lambda W`
============= ====================================================

======== ============================================= =======================================
momentum buffer                                        with Nesterov's look-ahead the candidate
======== ============================================= =======================================
`average` :math:`M \leftarrow \mu M + (1 - \mu) G`     :math:`C = \mu M + (1 - \mu) G`
`sum`    :math:`M \leftarrow \mu M + G`                :math:`C = \mu M + G`
======== ============================================= =======================================

Without look-ahead C = M. The buffer starts at zero and has no bias correction. The two forms differ by the factor
:math:`1 - \mu` as long as :math:`\mu` is constant.

=================== =================================================================================
`none`              1
`spectral`          :math:`\sqrt{\max(m, n)}`, for an update of RMS 1 from orthonormal rows or columns
`match_rms_adamw`   :math:`0.2 \sqrt{\max(m, n)}`, for RMS 0.2
`unit_rms_norm`     :math:`\sqrt{m / n}`
`shape_scaling`     :math:`\sqrt{\max(1, m / n)}`
`nuclear_norm`      :math:`\langle U, C \rangle`, the nuclear norm of C if U is its polar factor
=================== =================================================================================

References
----------
NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), for the order and the names; Loshchilov & Hutter (2019)
and Chowdhery et al. (2022) for decoupled decay and the one with :math:`\eta^2`; Liu et al. (2025), *Muon is scalable
for LLM training*, for 0.2; Lau et al. (2025), *PolarGrad*, for the nuclear norm.
"""

import math
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

DECAYS = ("decoupled", "independent", "palm", "l2")
MOMENTA = ("average", "sum")
SCALES = ("none", "spectral", "match_rms_adamw", "unit_rms_norm", "shape_scaling", "nuclear_norm")

#: The RMS of a typical AdamW update (Liu et al. 2025, section 2.2).
ADAMW_RMS = 0.2

State = TypeVar("State", bound=tuple[Any, ...])


@runtime_checkable
class Rule(Protocol[State]):
    """An optimizer with its hyperparameters: how the state begins and what one finite gradient makes of it.

    A state is a named tuple whose first field is the weight W.
    """

    def start(self, W: Float[np.ndarray, "m n"]) -> State:
        """Return the state before the first gradient."""
        ...

    def step(self, state: State, G: Float[np.ndarray, "m n"]) -> State:
        """Return the state after one gradient."""
        ...


def trajectory(rule: Rule[State], W: ArrayLike, gradients: Iterable[ArrayLike | None]) -> list[State]:
    """Return the state after each gradient.

    Parameters
    ----------
    rule : Rule
        `AdamW`, `Muon`, `AdaptiveMuon` or `SOAP`.
    W : array_like of shape (m, n)
        The first weight, real and finite; integers are converted to float64. It is copied.
    gradients : iterable of array_like of shape (m, n), or None
        As for `advance`.

    Returns
    -------
    list of states
        As many as gradients.

    Raises
    ------
    ValueError
        If W is not a matrix of finite numbers, or as for `advance`.

    Examples
    --------
    >>> from muon_lab.oracle.optimizers import Muon
    >>> states = trajectory(Muon(lr=0.5, scale="none"), [[1.0, 2.0]], [[[0.0, 3.0]], [[0.0, float("nan")]]])
    >>> [state.W.tolist() for state in states]  # the second gradient changes nothing
    [[[1.0, 1.5]], [[1.0, 1.5]]]
    """
    first = _matrix("W", W)
    if not np.isfinite(first).all():
        raise ValueError("trajectory: W has entries that are not finite, needed all finite")
    state, states = rule.start(first), []
    for G in gradients:
        state = advance(rule, state, G)
        states.append(state)
    return states


def advance(rule: Rule[State], state: State, G: ArrayLike | None) -> State:
    """Return the state after one more gradient, or `state` itself if there is none or one that is not finite.

    A gradient with a single entry that is not finite changes nothing: no weight, no moment, no factor, no counter, and
    no decay takes place. To change a hyperparameter between steps, pass ``dataclasses.replace(rule, lr=...)``.

    Parameters
    ----------
    rule : Rule
        With the hyperparameters of this step.
    state : tuple
        Of this rule.
    G : array_like of shape (m, n), or None
        The gradient.

    Raises
    ------
    ValueError
        If G is not a matrix of real numbers in the shape of W, or if the step leaves the range of float64.
    """
    if G is None:
        return state
    A = _matrix("G", G)
    if A.shape != state[0].shape:
        raise ValueError(f"advance: G has shape {A.shape}, needed that of W, {state[0].shape}")
    if not np.isfinite(A).all():
        return state
    with np.errstate(over="ignore", invalid="ignore"):
        after = rule.step(state, A)
    if not all(np.isfinite(part).all() for part in after):
        raise ValueError("advance: the step leaves the range of float64, needed smaller gradients or weights")
    return after


def decayed(
    W: Float[np.ndarray, "m n"], G: Float[np.ndarray, "m n"], lr: float, weight_decay: float, method: str
) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, "m n"]]:
    """Return the weight and the gradient after decay, in one of the forms `DECAYS`.

    Examples
    --------
    >>> W, G = decayed(np.ones((1, 1)), np.zeros((1, 1)), lr=0.1, weight_decay=0.5, method="decoupled")
    >>> W, G
    (array([[0.95]]), array([[0.]]))
    """
    if method == "decoupled":
        return (1 - lr * weight_decay) * W, G
    if method == "independent":
        return (1 - weight_decay) * W, G
    if method == "palm":
        return (1 - lr * lr * weight_decay) * W, G
    return W, G + weight_decay * W


def momentum(
    M: Float[np.ndarray, "m n"], G: Float[np.ndarray, "m n"], mu: float, form: str, nesterov: bool
) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, "m n"]]:
    """Return the new buffer M and the candidate C, in one of the forms `MOMENTA`.

    Examples
    --------
    >>> M, C = momentum(np.zeros((1, 1)), np.ones((1, 1)), mu=0.5, form="average", nesterov=True)
    >>> M, C
    (array([[0.5]]), array([[0.75]]))
    """
    fresh = (1 - mu) * G if form == "average" else G
    M = mu * M + fresh
    return M, mu * M + fresh if nesterov else M


def scale(mode: str, C: Float[np.ndarray, "m n"], U: Float[np.ndarray, "m n"]) -> float:
    """Return the factor of the direction U of the candidate C, in one of the modes `SCALES`; 0 for an empty matrix.

    Examples
    --------
    >>> C = np.full((32, 8), 0.5)
    >>> [round(scale(mode, C, C), 3) for mode in SCALES]
    [1.0, 5.657, 1.131, 2.0, 2.0, 64.0]
    """
    m, n = C.shape
    if m * n == 0:
        return 0.0
    factors = {
        "none": 1.0,
        "spectral": math.sqrt(max(m, n)),
        "match_rms_adamw": ADAMW_RMS * math.sqrt(max(m, n)),
        "unit_rms_norm": math.sqrt(m / n),
        "shape_scaling": math.sqrt(max(1.0, m / n)),
        "nuclear_norm": float((U * C).sum()),
    }
    return factors[mode]


def check_fractions(rule: str, **values: float) -> None:
    """Refuse a value that is not in [0, 1): a coefficient of an average."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{rule}: {name} is {value}, needed a number in [0, 1)")


def check_rates(rule: str, **values: float) -> None:
    """Refuse a value that is negative or not finite: a learning rate, a decay, a factor."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{rule}: {name} is {value}, needed a finite number of at least 0")


def check_positive(rule: str, **values: float | int) -> None:
    """Refuse a value that is not positive: what keeps a quotient finite, a number of steps."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{rule}: {name} is {value}, needed a finite number above 0")


def _matrix(name: str, X: ArrayLike) -> Float[np.ndarray, "m n"]:
    """Return a copy in float64, or say why it is no real matrix."""
    A = np.asarray(X)
    if A.ndim != 2 or A.dtype.kind not in "fiu":
        raise ValueError(f"{name} has shape {A.shape} and dtype {A.dtype}, needed a real matrix (m, n)")
    return A.astype(np.float64)
