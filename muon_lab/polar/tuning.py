r"""Schedules for a number format: the minimax lower bound, then the coefficients, with the least *measured* error.

A schedule that is optimal in exact arithmetic lifts small singular values with steep polynomials, whose image touches
2, and rounding of the operands pushes values past the repelling fixed point. What a format bears depends on the shape
and the spectrum of the matrices, so it is measured on matrices: every product rounded, against the exact polar factor.

The error of a result X is that of its direction, the distance of U to the line through X,

.. math:: \min_\alpha \frac{\|\alpha X - U\|}{\|U\|} = \sqrt{1 - \cos^2}, \qquad
          \cos = \frac{\langle X, U \rangle}{\|X\| \|U\|},

since the scale of an update is the learning rate's business; a result that is not finite, or points away, counts as 1.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor

from muon_lab.arithmetic import Arithmetic
from muon_lab.oracle import polar as oracle
from muon_lab.polar import schedules
from muon_lab.polar.engine import newton_schulz
from muon_lab.polar.schedules import Schedule

#: Lower bounds and safety factors among which `search` looks: from flat spectra to the published 1e-3.
LOWERS = (0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.003, 0.001)
SAFETIES = (0.0, 0.02, 0.05, 0.1, 0.2)

#: Results whose norm is between this factor below and above that of the polar factor cost nothing in `refine`.
LARGEST = 1.5

#: A refined schedule maps this range of normalised singular values, into which the rounded 1 falls too, to that band in
#: exact arithmetic: without, it would lose what its matrices do not show, such as a matrix of nearly rank 1.
RANGE, BAND = (0.05, 1.05), (0.6, 1.3)

#: Exponent of the mean over matrices that `refine` lowers: high, so that the worst one counts.
POWER = 6


class Target(NamedTuple):
    """A matrix and its exact polar factor, in float32 and float64."""

    G: Float[Tensor, "m n"]
    U: Float[Tensor, "m n"]


@dataclass(frozen=True)
class Tuned:
    """A schedule and what was measured of it, in the order of the matrices."""

    schedule: Schedule
    errors: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.errors)


def target(G: Float[Tensor, "m n"] | Float[np.ndarray, "m n"]) -> Target:
    """Return a matrix with its exact polar factor, by an SVD in float64.

    Examples
    --------
    >>> target(np.diag([2.0, 3.0])).U.tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    X = torch.as_tensor(G).float()
    return Target(X, torch.tensor(oracle.polar(X.double().numpy(), roundoff=2.0**-24).U))


def direction_error(X: Float[Tensor, "m n"], U: Float[Tensor, "m n"]) -> float:
    """Return the relative distance of U to the line through X; 1 if X is not finite, zero, or points away.

    Examples
    --------
    >>> identity = torch.eye(2)
    >>> direction_error(3 * identity, identity) < 1e-7, direction_error(-identity, identity)
    (True, 1.0)
    """
    X, U = X.double(), U.double()
    if not torch.isfinite(X).all() or not X.any():
        return 1.0
    X = X / X.abs().max()
    cosine = float((X * U).sum() / (X.norm() * U.norm()))
    return math.sqrt(max(0.0, 1.0 - cosine * cosine)) if cosine > 0 else 1.0


def measured(schedule: Schedule, arithmetic: Arithmetic | Sequence[Arithmetic], targets: Iterable[Target]) -> Tuned:
    """Measure a schedule under an arithmetic: the direction error on every matrix.

    Examples
    --------
    >>> from muon_lab.arithmetic import Rounded
    >>> G = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    >>> tuned = measured(schedules.get("taylor"), Rounded("mxfp8_e4m3"), [target(G)])
    >>> tuned.worst < 0.1
    True
    """
    orthogonalize = newton_schulz(schedule, arithmetic)
    return Tuned(schedule, tuple(direction_error(orthogonalize(G), U) for G, U in targets))


def search(
    steps: int,
    arithmetic: Arithmetic | Sequence[Arithmetic],
    targets: Sequence[Target],
    lowers: Iterable[float] = LOWERS,
    safeties: Iterable[float] = SAFETIES,
) -> Tuned:
    """Return the minimax schedule, over lower bounds and safety factors, whose worst measured error is least.

    Parameters
    ----------
    steps : int
        Number of steps.
    arithmetic : Arithmetic or sequence of Arithmetic
        In which it will be used; a sequence has one for each step.
    targets : sequence of Target
        Matrices such as it will meet, from `target`.
    lowers, safeties : iterable of float
        Where to look: the bound l of `minimax` and its safety factor.

    Returns
    -------
    Tuned
        The schedule, whose ``design`` has the lower bound and the safety factor, and its errors.

    Raises
    ------
    ValueError
        Without matrices, for some that do not come from `target`, and as `newton_schulz` and `schedules.get`.

    Examples
    --------
    In MXFP8 a flat spectrum wants a lower bound far above the published 1e-3.

    >>> from muon_lab.arithmetic import Rounded
    >>> G = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    >>> tuned = search(5, Rounded("mxfp8_e4m3"), [target(G)], lowers=(0.03, 0.001), safeties=(0.1,))
    >>> tuned.schedule.name
    'minimax(lower=0.03,safety=0.1)'
    """
    if not len(targets):
        raise ValueError("a search for a schedule needs at least one matrix to measure it on")
    _check_targets(targets)
    names = (f"minimax(lower={lower:g},safety={safety:g})" for lower, safety in itertools.product(lowers, safeties))
    tried = [measured(schedules.get(name, steps), arithmetic, targets) for name in names]
    if not tried:
        raise ValueError("a search for a schedule needs at least one lower bound and one safety factor")
    return min(tried, key=lambda tuned: tuned.worst)


def refine(
    tuned: Tuned,
    arithmetic: Arithmetic | Sequence[Arithmetic],
    targets: Sequence[Target],
    *,
    scale: Sequence[float] | None = None,
    evaluations: int = 2000,
    decimals: int = 4,
    name: str = "refined",
) -> Tuned:
    r"""Move the coefficients of a schedule to lower its measured errors, by Nelder and Mead's simplex.

    What falls is the mean of (error / scale)⁶ over the matrices, plus penalties: for results of another norm than U's
    by more than a factor of 1.5, and for a polynomial that takes [0.05, 1.05] out of [0.6, 1.3]. The simplex starts
    anew, smaller, from the best point every 500 measurements.

    Parameters
    ----------
    tuned : Tuned
        Where to begin, from `search`.
    arithmetic : Arithmetic or sequence of Arithmetic
        As for `search`.
    targets : sequence of Target
        Matrices to measure on; the result should be judged on others.
    scale : sequence of float, optional
        What an error is compared with, one a matrix: the error of the best published schedule, say. By default 1.
    evaluations : int
        How often the schedule may be measured.
    decimals : int
        Decimals of the coefficients of the result.
    name : str
        Of the result.

    Raises
    ------
    ValueError
        Without matrices, for some that do not come from `target`, if there is not one scale for each, if there is no
        evaluation, and as `newton_schulz`.
    """
    _check_targets(targets)
    if not isinstance(evaluations, int) or evaluations < 1:
        raise ValueError(f"evaluations of a refined schedule must be a positive integer, not {evaluations!r}")
    newton_schulz(tuned.schedule, arithmetic)  # which says what is wrong with them
    scales = [1.0] * len(targets) if scale is None else list(scale)
    if not targets or len(scales) != len(targets):
        raise ValueError(f"one scale for each of {len(targets)} matrices, at least one, is needed; {len(scales)} given")
    start = np.array(tuned.schedule.coefficients)
    mask = start != 0.0

    def moved(point: np.ndarray) -> Schedule:
        rows = start.copy()
        rows[mask] *= np.exp(point)
        rows = rows.round(decimals)
        source = f"muon_lab.polar.tuning.refine from {tuned.schedule.name}"
        return Schedule(name, tuple(map(tuple, rows.tolist())), len(rows), "refuse", tuned.schedule.interval, source)

    best: tuple[float, np.ndarray] = (math.inf, np.zeros(int(mask.sum())))
    spent = 0

    def loss(point: np.ndarray) -> float:
        nonlocal best, spent
        spent += 1
        value = _loss(moved(point), arithmetic, targets, scales)
        if value < best[0]:
            best = value, point.copy()
        return value

    radius = 0.08
    while spent < evaluations:
        center = best[1]
        simplex = np.vstack([center, center + radius * np.diag(_signs(len(center)))])
        options = {"adaptive": True, "initial_simplex": simplex, "maxfev": min(500, evaluations - spent)}
        minimize(loss, center, method="Nelder-Mead", options=options)
        radius = max(0.7 * radius, 0.02)
    return measured(moved(best[1]), arithmetic, targets)


def _check_targets(targets: Iterable[Target]) -> None:
    """Raise ``ValueError`` unless each matrix comes with its polar factor."""
    for index, one in enumerate(targets):
        if not isinstance(one, Target):
            raise ValueError(f"targets must come from tuning.target, but number {index} is a {type(one).__name__}")


def _loss(
    schedule: Schedule,
    arithmetic: Arithmetic | Sequence[Arithmetic],
    targets: Iterable[Target],
    scales: Iterable[float],
) -> float:
    orthogonalize = newton_schulz(schedule, arithmetic)
    terms = []
    for (G, U), scale in zip(targets, scales, strict=True):
        X = orthogonalize(G)
        size = float(X.double().norm() / U.norm()) if torch.isfinite(X).all() else 1e3
        excess = max(0.0, min(size, 1e3) - LARGEST) + max(0.0, 1 / LARGEST - size)
        terms.append((direction_error(X, U) / scale) ** POWER + excess)
    return float(np.mean(terms) ** (1 / POWER)) + 10.0 * _outside(schedule)


def _outside(schedule: Schedule) -> float:
    """Return how far the exact image of `RANGE` leaves `BAND`, at most 2."""
    with np.errstate(all="ignore"):
        image = schedule.map(np.linspace(*RANGE, 201))
    if not np.isfinite(image).all():
        return 2.0
    low, high = BAND
    return min(1.0, max(0.0, low - float(image.min()))) + min(1.0, max(0.0, float(image.max()) - high))


def _signs(count: int) -> np.ndarray:
    """Return alternating signs: a simplex that leans to no side."""
    return np.where(np.arange(count) % 2 == 0, 1.0, -1.0)
