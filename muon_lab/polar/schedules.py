r"""Polynomial schedules as data: the numbers of a Newton-Schulz iteration, where they come from and what they promise.

An odd polynomial :math:`p(x) = a x + b x^3 + c x^5` acts on the singular values of a matrix alone,
:math:`p(U \Sigma V^T) = U p(\Sigma) V^T`, so a schedule is understood as a map of one number before it meets a matrix.

Symbols
-------
sigma : a singular value after division by the Frobenius norm, so in (0, 1].
(a, b, c) : the coefficients of one step.

Source of the six published tables as used in training: NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026),
``orthogonalized_optimizers/muon_utils.py``; the origin of each is named with it.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from muon_lab.nearest import unknown

Coefficients = tuple[float, float, float]
Past = Literal["repeat_last", "cycle", "refuse"]

#: An input below this (after normalisation) is left aside when a schedule's band is judged: at a condition number
#: above 100 every published five-step table is still on its way.
JUDGED_FROM = 1e-2

#: A step that halves what an earlier step count had reached is a collapse, not progress.
COLLAPSE = 0.5


class ScheduleWarning(UserWarning):
    """A schedule is used where it gives a worse answer than its user can expect."""


@dataclass(frozen=True)
class Schedule:
    r"""A composition of odd quintics, :math:`p = p_k \circ \dots \circ p_1`.

    Attributes
    ----------
    name : str
        As in `get`.
    rows : tuple of (a, b, c)
        The table of the source, in order.
    steps : int
        How many polynomials are applied.
    past : {"repeat_last", "cycle", "refuse"}
        The source's rule for more steps than rows ("refuse": the source fixes the length).
    interval : (float, float)
        The normalised singular values that the whole table is meant for: the lower end is the source's design bound
        where it states one, else the smallest value from which the table settles in [0.7, 1.3] (`simple`, which never
        settles: [0.68, 1.21]); the upper end is below 1 only where larger values change their sign.
    source : str
        Where the numbers come from.

    Examples
    --------
    >>> quintic = get("quintic")
    >>> quintic.steps, quintic.past, round(quintic.slope, 2)
    (5, 'cycle', 492.75)
    >>> print(f"{quintic.map(0.5):.4f}")
    0.9859
    >>> low, high = quintic.band(1e-2)
    >>> print(f"[{low:.4f}, {high:.4f}]")
    [0.9778, 1.0318]
    """

    name: str
    rows: tuple[Coefficients, ...]
    steps: int
    past: Past
    interval: tuple[float, float]
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(f"steps of schedule {self.name!r} must be a positive integer, not {self.steps!r}")
        if self.past == "refuse" and self.steps != len(self.rows):
            raise ValueError(
                f"schedule {self.name!r} has exactly {len(self.rows)} steps, by its source; {self.steps} were asked for"
            )

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        """The (a, b, c) of every step that is applied, after the rule past the table."""
        count = len(self.rows)
        if self.past == "cycle":
            return tuple(self.rows[i % count] for i in range(self.steps))
        return tuple(self.rows[min(i, count - 1)] for i in range(self.steps))

    @property
    def slope(self) -> float:
        """The derivative of the composition at zero: the product of the a, the gain of a tiny singular value."""
        return float(np.prod([a for a, _, _ in self.coefficients]))

    def map(self, sigma: Any) -> Any:
        """Apply the composition to a number or array (float, NumPy, torch, mpmath: whatever multiplies)."""
        for value in self.maps(sigma):
            sigma = value
        return sigma

    def maps(self, sigma: Any) -> Iterator[Any]:
        """Yield the image of a number or array after each step."""
        for a, b, c in self.coefficients:
            square = sigma * sigma
            sigma = sigma * (a + square * (b + square * c))
            yield sigma

    def band(self, low: float, high: float = 1.0) -> tuple[float, float]:
        """Return the smallest and the largest image of [low, high], on a grid of 40,001 points (20,001 of them log)."""
        image = self.map(_grid(low, high))
        return float(image.min()), float(image.max())

    @cached_property
    def headroom(self) -> float:
        """The largest normalised singular value (at most 1) up to which the image stays positive."""
        sigma = _grid(1e-3, 1.0)
        wrong = np.flatnonzero(self.map(sigma) <= 0)
        return float(sigma[wrong[0] - 1]) if wrong.size else 1.0

    @cached_property
    def caution(self) -> str | None:
        """Why this number of steps is a bad choice, or None."""
        lows = [float(np.abs(image).min()) for image in self.maps(_grid(JUDGED_FROM, min(1.0, 0.99 * self.headroom)))]
        best = max(lows)
        if lows[-1] >= COLLAPSE * best:
            return None
        why = f"; its table of {len(self.rows)} rows starts over, with steps made for tiny values"
        return (
            f"schedule {self.name!r} collapses at {self.steps} steps: singular values in [{JUDGED_FROM:g}, 1] fall as "
            f"low as {lows[-1]:.2g}, after {lows.index(best) + 1} steps they stayed above {best:.2g}"
            + (why if self.past == "cycle" else "")
        )


def _grid(low: float, high: float) -> np.ndarray:
    """Return 40,001 points of [low, high], half of them evenly spaced, half logarithmically."""
    return np.union1d(np.linspace(low, high, 20_001), np.geomspace(low, high, 20_001))


_KELLER = (3.4445, -4.7750, 2.0315)

_TABLES: tuple[Schedule, ...] = (
    Schedule(
        "simple",
        (_KELLER,),
        5,
        "repeat_last",
        (1.50e-3, 1.0),
        "K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024); KellerJordan/Muon",
    ),
    Schedule(
        "quintic",
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        5,
        "cycle",
        (1.55e-3, 1.0),
        "You Jiacheng (2025), five tuned triples; default of Emerging-Optimizers and Megatron Core",
    ),
    Schedule(
        "polar_express",
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        8,
        "repeat_last",
        (1e-3, 1.0),
        "Amsel et al., The Polar Express (arXiv 2505.16932), lower bound 1e-3, divided by 1.01^degree, four decimals, "
        "as shipped by Emerging-Optimizers",
    ),
    Schedule(
        "cans",
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        5,
        "repeat_last",
        (7.32e-4, 1.0),
        "Grishina et al., Chebyshev-type polynomials, CANS (arXiv 2506.10935), as shipped by Emerging-Optimizers",
    ),
    Schedule(
        "aol",
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        4,
        "cycle",
        (7.47e-3, 0.8836),
        "flash-newton-schulz (Turbo-Muon): made for almost-orthogonal-layer preconditioned input, as "
        "shipped by Emerging-Optimizers with Frobenius normalisation",
    ),
    Schedule(
        "deepseekv4",
        (_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        10,
        "repeat_last",
        (1.03e-5, 1.0),
        "DeepSeek-V4 report (2026): eight steps of `simple`, then two of (2, -1.5, 0.5); Emerging-Optimizers #167",
    ),
    Schedule(
        "cubic5",
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        5,
        "refuse",
        (6.24e-3, 1.0),
        "Emerging-Optimizers #217 (2026): five cubic steps, two products each",
    ),
    Schedule(
        "cubic",
        ((3 / 2, -1 / 2, 0.0),),
        12,
        "repeat_last",
        (6.40e-3, 1.0),
        "the classical Newton-Schulz step (Higham, Functions of Matrices, 2008, eq. 8.20): converges quadratically",
    ),
    Schedule(
        "taylor",
        ((15 / 8, -10 / 8, 3 / 8),),
        9,
        "repeat_last",
        (2.90e-3, 1.0),
        "Kovarik (SIAM J. Numer. Anal. 7, 1970): the first three terms of (1 - e)^(-1/2); converges cubically",
    ),
)

_BY_NAME = {schedule.name: schedule for schedule in _TABLES}


def known() -> tuple[str, ...]:
    """Return the names that `get` accepts.

    Examples
    --------
    >>> known()[:3]
    ('simple', 'quintic', 'polar_express')
    """
    return tuple(_BY_NAME)


@lru_cache(typed=True)  # a schedule keeps what it found out about itself, and a sweep asks for it at every case
def _with_steps(name: str, steps: int | None) -> Schedule:
    """Return one and the same value for the same request."""
    return _BY_NAME[name] if steps is None else replace(_BY_NAME[name], steps=steps)


def get(name: str, steps: int | None = None) -> Schedule:
    """Return a published schedule by name, with the given number of steps.

    Parameters
    ----------
    name : str
        One of `known`.
    steps : int, optional
        How many polynomials to apply; the source's own number by default. Past the table the source's rule applies.

    Raises
    ------
    ValueError
        For an unknown name, for steps below 1, and where the source fixes another length.

    Warns
    -----
    ScheduleWarning
        If that number of steps collapses (`quintic` with 6, 7 or 11 steps).

    Examples
    --------
    >>> get("polar_express", 10).coefficients[-1]
    (1.875, -1.25, 0.375)
    >>> get("cubic5", 6)
    Traceback (most recent call last):
    ValueError: schedule 'cubic5' has exactly 5 steps, by its source; 6 were asked for
    """
    if name not in _BY_NAME:
        raise unknown("schedule", name, _BY_NAME)
    if steps is None or isinstance(steps, int):
        schedule = _with_steps(name, steps)
    else:
        schedule = replace(_BY_NAME[name], steps=steps)  # which says what is wrong with it
    if schedule.caution:
        warnings.warn(schedule.caution, ScheduleWarning, stacklevel=2)
    return schedule
