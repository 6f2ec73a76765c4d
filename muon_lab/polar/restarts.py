r"""Where Gram Newton-Schulz has to restart: a model of one singular value, with the rounding of a matrix injected.

The Gram form iterates on the eigenvalues :math:`r = \sigma^2` of :math:`R = X X^T`. Rounding R to unit roundoff u adds
a symmetric matrix whose entries are independent errors of size :math:`u |R_{ij}| / \sqrt 3`; the root mean square of
its eigenvalues is

.. math:: \eta = \frac{u \|R\|_F}{\sqrt{3 m}},

so eigenvalues below η can become :math:`-\eta`. There :math:`a + b r + c r^2 > a`: a spurious negative eigenvalue grows
in magnitude at every step, and Q with it, until the next restart forms R anew. The model injects ±η into every
eigenvalue whenever R is formed or updated, and the rounding of Q, :math:`u \|Q\|_F \|X\|_F / (\sqrt 3 m)` a direction,
whenever Q meets X; what comes out is compared with the exact image of the schedule.

Sources: the restart and its tuner, which injects one fixed negative eigenvalue and judges the condition of Q, are
those of Dao-AILab/gram-newton-schulz (release 0.1.6). Measured on log-spaced spectra in float16 the prediction is
within a factor of 6, from 1e-3 to 1 (``tests/polar/test_gram.py``).
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np

from muon_lab.polar.schedules import Schedule

#: Condition number of the log-spaced spectrum for which restarts are chosen where none is given.
CONDITION = 1e3

#: Deviation from exact arithmetic, relative to the norm of the result, with which `fewest` is content.
TOLERANCE = 1e-3


def deviation(schedule: Schedule, restarts: Sequence[int], roundoff: float, sigma: Iterable[float]) -> float:
    """Predict the relative deviation of Gram Newton-Schulz from exact arithmetic.

    Parameters
    ----------
    schedule : Schedule
        The polynomials.
    restarts : sequence of int
        Steps (from 1) before which X is formed and R computed anew.
    roundoff : float
        Unit roundoff of the stored matrices.
    sigma : iterable of float
        Singular values of the input, all m of them; their scale does not matter.

    Raises
    ------
    ValueError
        For a restart that is not one of the steps 1 .. steps − 1, and for a spectrum of zeros.

    Examples
    --------
    >>> from muon_lab.polar import schedules
    >>> half = 2.0**-11
    >>> for restarts in ([], [2], [3]):
    ...     print(restarts, f"{deviation(schedules.get('simple', 5), restarts, half, np.geomspace(1, 1e-3, 256)):.1g}")
    [] 0.1
    [2] 0.02
    [3] 0.005
    """
    check(restarts, schedule.steps)
    start = np.array(list(sigma), dtype=np.float64)
    size = float(np.linalg.norm(start))
    if not size > 0:
        raise ValueError("the spectrum for which restarts are judged must hold a positive singular value")
    exact = schedule.map(start / size)
    with np.errstate(all="ignore"):
        worst = max(
            float(np.linalg.norm(_iterate(schedule, frozenset(restarts), roundoff, start / size, sign) - exact))
            for sign in (-1.0, 1.0)
        )
    return worst / float(np.linalg.norm(exact)) if math.isfinite(worst) else math.inf


def best(schedule: Schedule, count: int, roundoff: float, sigma: Iterable[float]) -> tuple[int, ...]:
    """Return the given number of restarts with the least predicted deviation; among equals, the earliest.

    Examples
    --------
    >>> from muon_lab.polar import schedules
    >>> best(schedules.get("polar_express", 5), 1, 2.0**-11, np.geomspace(1, 1e-3, 256))
    (3,)
    """
    if not 0 <= count < schedule.steps:
        raise ValueError(f"{count} restarts in {schedule.steps} steps: 0 to {schedule.steps - 1} are possible")
    sigma = list(sigma)
    options = combinations(range(1, schedule.steps), count)
    return min(options, key=lambda restarts: deviation(schedule, restarts, roundoff, sigma))


@lru_cache
def fewest(
    schedule: Schedule, roundoff: float, m: int, tolerance: float = TOLERANCE, condition: float = CONDITION
) -> tuple[int, ...]:
    """Return the fewest restarts whose predicted deviation is within a tolerance, on a log-spaced spectrum.

    Where even a restart at every step is not, as in bfloat16, the fewest from which one more would gain less than half.

    Examples
    --------
    >>> from muon_lab.polar import schedules
    >>> quintic = schedules.get("quintic", 5)
    >>> fewest(quintic, 2.0**-24, 256), fewest(quintic, 2.0**-11, 256, tolerance=1e-2)
    ((), (3,))
    """
    sigma = np.geomspace(1.0, 1.0 / condition, max(m, 1))
    chosen = best(schedule, 0, roundoff, sigma)
    found = deviation(schedule, chosen, roundoff, sigma)
    for count in range(1, schedule.steps):
        if found <= tolerance:
            break
        more = best(schedule, count, roundoff, sigma)
        reached = deviation(schedule, more, roundoff, sigma)
        if reached > tolerance and reached > found / 2:
            break
        chosen, found = more, reached
    return chosen


def check(restarts: Sequence[int], steps: int) -> None:
    """Raise ``ValueError`` unless restarts are steps before which a restart makes sense."""
    if isinstance(restarts, str) or not isinstance(restarts, Sequence):
        raise ValueError(f"restarts must be a sequence of steps such as [2], not {restarts!r}")
    for step in restarts:
        if not isinstance(step, int) or not 1 <= step < steps:
            raise ValueError(
                f"restart before step {step!r}: with {steps} steps, counted from 0, there are 1 to {steps - 1}"
            )


def _iterate(schedule: Schedule, restarts: frozenset[int], roundoff: float, x: np.ndarray, sign: float) -> np.ndarray:
    """Return the singular values that come out, every rounding error pointing the same way."""
    m = len(x)

    def rounded(r: np.ndarray) -> np.ndarray:
        return np.asarray(r + sign * roundoff * np.linalg.norm(r) / math.sqrt(3 * m))

    def applied(q: np.ndarray, x: np.ndarray) -> np.ndarray:
        error = roundoff * np.linalg.norm(q) * np.linalg.norm(x) / (math.sqrt(3.0) * m)
        return np.asarray(q * x + sign * error)

    q = np.ones_like(x)
    r = rounded(x * x)
    for step, (a, b, c) in enumerate(schedule.coefficients):
        if step in restarts:
            x = applied(q, x)
            q, r = np.ones_like(x), rounded(x * x)
        p = a + b * r + c * r * r
        q = q * p
        r = rounded(r * p * p)
    return applied(q, x)
