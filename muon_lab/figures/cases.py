"""What tells the rows of a table apart, in an order that does not depend on that of the rows."""

from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from muon_lab.figures import style

#: Sources of matrices that nobody planted: they stand last.
FOUND = ("recorded", "file")


class Curve(NamedTuple):
    """A schedule at a number of steps."""

    method: str
    steps: int


def spectra(rows: pl.DataFrame) -> list[str]:
    """Return the spectra: planted ones first, and those of one family by their parameter.

    Examples
    --------
    >>> spectra(pl.DataFrame({"spectrum": ["recorded", "geometric(1000)", "geometric(100)"]}))
    ['geometric(100)', 'geometric(1000)', 'recorded']
    """
    return sorted(rows["spectrum"].unique(), key=_place)


def _place(spectrum: str) -> tuple[bool, str, float, str]:
    family, _, rest = spectrum.partition("(")
    try:
        parameter = float(rest.removesuffix(")"))
    except ValueError:
        parameter = 0.0
    return family.split(":")[0] in FOUND, family, parameter, spectrum


def curves(rows: pl.DataFrame) -> list[Curve]:
    """Return the schedules with their numbers of steps, in the order of the house."""
    methods = style.in_order(rows["method"])
    found = {Curve(*pair) for pair in rows.select("method", "steps").iter_rows()}
    return sorted(found, key=lambda curve: (methods.index(curve.method), curve.steps))


def shade(curve: Curve, curves: Sequence[Curve]) -> str:
    """Return the colour of a schedule, lighter for fewer steps where it has several numbers of them."""
    counts = sorted(other.steps for other in curves if other.method == curve.method)
    strength = 1.0 if len(counts) < 2 else 0.45 + 0.55 * counts.index(curve.steps) / (len(counts) - 1)
    return style.tint(style.colour(curve.method), strength)
