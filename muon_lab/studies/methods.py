r"""Names of the axes `method` and `dtype`, and the orthogonalizers that they stand for.

A method is an exact one (`svd`, `qdwh`, `newton`, `halley`, `gram_eigh`) or ``[FORM:][START[-DROP]:]SCHEDULE``. FORM is
how the polynomials are applied: `plain`, `gram`, ``gram@2,4`` with the restarts given, ``gram@none``, or `auto`. START
is what the matrix is divided by: `frobenius`, `schatten4`, `aol`, `spectral`; DROP is how many steps it saves at the
beginning. SCHEDULE is anything that `polar.schedules.get` takes.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from muon_lab.nearest import unknown
from muon_lab.polar import flops, schedules
from muon_lab.problems.loaded import DTYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from muon_lab import polar
    from muon_lab.polar import Direct, Orthogonalizer

#: Methods that give the exact polar factor, to rounding.
EXACT = ("svd", "qdwh", "newton", "halley", "gram_eigh")

FORMS = ("plain", "gram", "auto")

#: As `polar.starts.known`, without importing torch.
STARTS = ("frobenius", "schatten4", "aol", "spectral")

#: What a cast may have left in the null space: one rounding an entry, of which a lopsided matrix can put up to three
#: times the average into one direction. (Data that were computed carry more, see `polar.svd`.)
CAST_ROUNDINGS = 3


@dataclass(frozen=True)
class Method:
    """How a schedule is applied.

    Parameters
    ----------
    schedule : Schedule
        What is applied, after the dropped steps.
    form : str
        One of `FORMS`.
    restarts : tuple of int, optional
        Given restarts of the Gram form; None where they are chosen.
    start : str
        One of `STARTS`.
    drop : int
        Steps dropped at the beginning.
    """

    schedule: schedules.Schedule
    form: str = "plain"
    restarts: tuple[int, ...] | None = None
    start: str = "frobenius"
    drop: int = 0


def known() -> tuple[str, ...]:
    """Return the plainest values of the axis `method`."""
    return (*schedules.known(), *EXACT)


def parse(method: str, steps: int | None) -> Method:
    """Read a method that is not exact. Raises ``ValueError``.

    Examples
    --------
    >>> parse("quintic", 5).schedule.steps
    5
    >>> found = parse("gram@2,3:aol-1:quintic", 5)
    >>> found.form, found.restarts, found.start, found.drop, found.schedule.steps
    ('gram', (2, 3), 'aol', 1, 4)
    """
    *prefixes, name = method.split(":")
    given: dict[str, dict[str, Any]] = {}
    for prefix in prefixes:
        kind, values = _prefix(prefix)
        if kind in given or (kind, *given) == ("form", "start"):
            raise ValueError(
                f"method {method!r} must be written [FORM:][START[-DROP]:]SCHEDULE, each part at most once"
            )
        given[kind] = values
    found = Method(schedules.get(name, steps), **given.get("form", {}), **given.get("start", {}))
    if found.start != "frobenius" and found.form == "auto":
        raise ValueError(f"method {method!r}: the form is chosen for matrices divided by their Frobenius norm")
    schedule = found.schedule
    if found.drop >= schedule.steps:
        raise ValueError(f"method {method!r} drops {found.drop} of {schedule.steps} steps: at least one must be left")
    if found.drop:
        rows = schedule.coefficients[found.drop :]
        schedule = replace(schedule, rows=rows, steps=len(rows), past="repeat_last", design=None)
    for position in found.restarts or ():
        if not 1 <= position < schedule.steps:
            raise ValueError(f"method {method!r} restarts before step {position}: there are 1 to {schedule.steps - 1}")
    return replace(found, schedule=schedule)


def _prefix(text: str) -> tuple[str, dict[str, Any]]:
    """Read one part before a schedule: whether it is a form or a start, and what it says."""
    form, at, positions = text.partition("@")
    if form in FORMS and not at:
        return "form", {"form": form}
    if form == "gram" and re.fullmatch(r"none|\d+(,\d+)*", positions):
        restarts = () if positions == "none" else tuple(int(one) for one in positions.split(","))
        return "form", {"form": form, "restarts": restarts}
    start, minus, count = text.partition("-")
    if start in STARTS and (not minus or count.isdecimal()):
        return "start", {"start": start, "drop": int(count or 0)}
    raise unknown("form or start", text, (*FORMS, *STARTS))


def settle(method: str, steps: int) -> int | None:
    """Check a method and its number of steps; None where steps do not matter. Raises ``ValueError``."""
    if method in EXACT:
        return None
    named = (*known(), *schedules.circulating(), *schedules.tuned_names())
    if ":" not in method and "(" not in method and method not in named:
        raise unknown("method", method, named)
    found = parse(method, steps)
    return found.schedule.steps + found.drop


def check_dtype(dtype: str) -> None:
    """Raise ``ValueError`` for an unknown dtype."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)


def dtype_named(dtype: str) -> "torch.dtype":
    """Return the torch dtype of a name."""
    import torch

    return getattr(torch, dtype)


def data_dtype(dtype: str) -> "torch.dtype":
    """Return the dtype in which a matrix is given to an iteration in some dtype: at least float32, as gradients are."""
    import torch

    return torch.float64 if dtype == "float64" else torch.float32


def cast(G: "Tensor", dtype: str) -> "Tensor":
    """Return a matrix normalised, then rounded to a dtype."""
    from muon_lab.arithmetic import Exact, unit

    return unit(G, Exact().norm(G)).to(dtype_named(dtype))


def noise(roundoff: float, dtype: str) -> float:
    """Return the roundoff by which to judge the rank of data that had one roundoff and were then cast to a dtype."""
    from muon_lab.measure import bounds
    from muon_lab.polar.direct import ROUNDINGS

    return max(roundoff, CAST_ROUNDINGS / ROUNDINGS * bounds.unit_roundoff(dtype))


def build(method: str, steps: int | None, dtype: str, roundoff: float = 0.0) -> "Orthogonalizer":
    """Return the orthogonalizer of a settled case, which keeps its numbers in the given dtype.

    An exact method takes the polar factor of the normalised matrix rounded to that dtype; the roundoff of the data
    from which it comes tells it range from rounding.
    """
    from muon_lab import polar
    from muon_lab.arithmetic import Exact

    if method not in EXACT:
        found, arithmetic = parse(method, steps), Exact(dtype_named(dtype))
        if found.form == "auto":
            choose = lru_cache(lambda *shape: _chosen(found, dtype, shape))  # once a shape, as an optimizer would
            return lambda G: choose(*G.shape)(G)
        if found.form == "gram":
            return polar.gram_newton_schulz(found.schedule, arithmetic, found.restarts, found.start)
        return polar.newton_schulz(found.schedule, arithmetic, found.start)
    exact = direct(method, dtype, noise(roundoff, dtype))
    return lambda G: exact(cast(G, dtype)).to(G.dtype)


def direct(method: str, dtype: str, roundoff: float | None) -> "Direct":
    """Return an exact method that computes in a dtype, at least float32 (`svd` and `gram_eigh`: float64)."""
    from muon_lab import polar

    makers = {"svd": polar.svd, "qdwh": polar.qdwh, "newton": polar.scaled_newton, "halley": polar.halley}
    if method == "gram_eigh":
        return polar.gram_eigh(roundoff)
    return makers[method](roundoff) if method == "svd" else makers[method](roundoff, dtype=data_dtype(dtype))


def image(method: str, steps: int | None, G: np.ndarray, U: np.ndarray) -> np.ndarray:
    """Return what a method gives in exact arithmetic, through an SVD in float64; U is the exact polar factor."""
    from muon_lab.oracle import polar as oracle

    if method in EXACT:
        return U
    found = parse(method, steps)
    if found.start == "aol":
        wide = G if G.shape[0] <= G.shape[1] else G.T
        wide = wide / (float(np.linalg.norm(wide)) or 1.0)
        sums = np.abs(wide @ wide.T).sum(axis=1, keepdims=True)
        G = wide / np.sqrt(np.where(sums > 0, sums, 1.0))
        G, size = (G if U.shape == G.shape else G.T), float(np.linalg.norm(G))
        return oracle.singular_value_map(G, lambda unit: found.schedule.map(size * unit))
    order = {"frobenius": 2.0, "schatten4": 4.0, "spectral": np.inf}[found.start]

    def mapped(unit: np.ndarray) -> np.ndarray:
        return np.asarray(found.schedule.map(unit / (float(np.linalg.norm(unit, order)) or 1.0)))

    return oracle.singular_value_map(G, mapped)


def work(method: str, steps: int | None, rows: int, cols: int, dtype: str = "float32") -> float | None:
    """Return the flops of a polynomial method that keeps its numbers in a dtype; None for an exact method.

    Products are general ones, except for `auto`, which halves those with a symmetric result.
    """
    if method in EXACT:
        return None
    found = parse(method, steps)
    if found.form == "plain":
        return flops.plain(found.schedule.coefficients, rows, cols)
    if found.form == "auto":
        return _chosen(found, dtype, (rows, cols)).flops
    return flops.gram(found.schedule.coefficients, rows, cols, positions(found, rows, cols, dtype))


def positions(found: Method, rows: int, cols: int, dtype: str = "float32") -> tuple[int, ...]:
    """Return the restarts of a Gram form that keeps its numbers in a dtype."""
    if found.restarts is not None:
        return found.restarts
    from muon_lab.measure import bounds
    from muon_lab.polar import restarts

    return restarts.fewest(found.schedule, bounds.unit_roundoff(dtype), min(rows, cols))


def _chosen(found: Method, dtype: str, shape: tuple[int, ...]) -> "polar.Choice":
    """Return what `auto` stands for at a shape."""
    from muon_lab import polar
    from muon_lab.arithmetic import Exact

    return polar.auto(shape, arithmetic=Exact(dtype_named(dtype)), schedule=found.schedule)
