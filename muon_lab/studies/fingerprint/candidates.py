"""What an unknown map of singular values is compared with: every table the lab knows, at every length, and the factor.

Tables end differently in different projects. With fewer steps than rows some take the first rows, optax the last; with
more some repeat the last row and some start over. So each table stands for many maps.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muon_lab.polar import schedules
from muon_lab.polar.schedules import Coefficients, Schedule

#: The most steps that are tried.
MOST = 16


@dataclass(frozen=True)
class Candidate:
    """A map of normalised singular values: a schedule, or without one `EXACT` or `IDENTITY`.

    Attributes
    ----------
    said : str
        Its name and length in words.
    schedule : Schedule, optional
        The polynomials.
    argument : (str, int), optional
        The name and steps under which `schedules.get` returns it.
    """

    said: str
    schedule: Schedule | None
    argument: tuple[str, int] | None = None

    def map(self, sigma: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the images of singular values."""
        if self.schedule is None:
            return sigma if self is IDENTITY else np.ones_like(sigma)
        with np.errstate(over="ignore", invalid="ignore"):
            image: NDArray[np.float64] = self.schedule.map(sigma)
        return image


#: The exact polar factor, and none.
EXACT = Candidate("the exact polar factor", None)
IDENTITY = Candidate("none: the update is a multiple of the gradient", None)


@cache
def known() -> tuple[Candidate, ...]:
    """Return every table at every length, those of `schedules.known` first, and what has none.

    Examples
    --------
    >>> [candidate.said for candidate in known() if candidate.argument == ("quintic", 5)]
    ['quintic, 5 steps']
    """
    names = (*schedules.known(), *schedules.circulating())
    tables = [_table(name) for name in names]
    return (*(each for table in tables for each in _lengths(table)), EXACT, IDENTITY)


def own(settings: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield the tables that the settings of a group seem to hold, as hypotheses: whether they act, the steps say.

    Examples
    --------
    >>> [each.schedule.steps for each in own({"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 6})]
    [6]
    """
    counts = {value for name, value in settings.items() if "steps" in name and type(value) is int and 1 <= value <= 99}
    for value in settings.values():
        rows = _rows(value)
        for steps in sorted(counts or {len(rows)}) if rows else ():
            said = f"{len(rows)} coefficient triples of its own settings, {steps} steps"
            yield Candidate(said.replace("1 coefficient triples", "the triple"), table(rows, steps))


def table(rows: Iterable[Coefficients], steps: int) -> Schedule:
    """Return a schedule that is in no list.

    Examples
    --------
    >>> table([(1.5, -0.5, 0.0)], 3).coefficients
    ((1.5, -0.5, 0.0), (1.5, -0.5, 0.0), (1.5, -0.5, 0.0))
    """
    return Schedule("found", tuple(rows), steps, "repeat_last", (1e-3, 1.0), "measured")


def same(candidate: Candidate) -> tuple[str, ...]:
    """Return the other names, with numbers of steps, under which `schedules` has the same coefficients.

    Examples
    --------
    >>> same(next(each for each in known() if each.argument == ("simple", 5)))
    ('deepseekv4, 5 steps',)
    """
    if candidate.schedule is None:
        return ()
    rows = candidate.schedule.coefficients
    alike = [each for each in known() if each.schedule is not None and each.schedule.coefficients == rows]
    return tuple(each.said for each in alike if each.argument is not None and each.said != candidate.said)


def _table(name: str) -> Schedule:
    return schedules.get(name)


def _lengths(whole: Schedule) -> Iterator[Candidate]:
    """Yield a table with its own number of steps first, then with others."""
    count = len(whole.rows)
    for steps in sorted(range(1, MOST + 1), key=lambda steps: steps != whole.steps):
        if whole.past != "refuse" or steps == whole.steps:
            yield Candidate(f"{whole.name}, {_steps(steps)}", replace(whole, steps=steps), (whole.name, steps))
        elif steps < count:
            first = table(whole.rows[:steps], steps)
            yield Candidate(f"the first {_steps(steps)} of {whole.name}", first)
    for steps in range(1, count):
        if whole.rows[-steps:] != whole.rows[:steps]:
            yield Candidate(f"the last {_steps(steps)} of {whole.name}", table(whole.rows[-steps:], steps))


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _rows(value: Any) -> tuple[Coefficients, ...]:
    """Return triples of numbers, or none if this is neither one nor a sequence of them."""
    if not isinstance(value, list | tuple) or not value:
        return ()
    if len(value) == 3 and all(isinstance(x, int | float) and not isinstance(x, bool) for x in value):
        return ((float(value[0]), float(value[1]), float(value[2])),)
    rows = [_rows(row) for row in value]
    return tuple(row[0] for row in rows) if all(len(row) == 1 for row in rows) else ()
