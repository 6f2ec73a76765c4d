"""Named rows that hold several dots each: what a ladder is where its rungs are not alone."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl
from matplotlib.axes import Axes

from muon_lab.figures import style

#: Below this an error counts as none.
FLOOR = 1e-9

#: Between two rows.
RULE = "#e6e6e6"


def name(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a panel from top to bottom, with a thin line between them."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    for height in range(1, len(names)):
        axes.axhline(height - 0.5, color=RULE, linewidth=0.5, zorder=0.5)


def dodge(count: int) -> list[float]:
    """Return where the dots of one row stand around it.

    Examples
    --------
    >>> dodge(1), dodge(3)
    ([0.0], [-0.3, 0.0, 0.3])
    """
    room = 0.45 * (1 - 1 / count)
    return [round(float(place), 3) for place in np.linspace(-room, room, count)]


def dot(axes: Axes, values: pl.Series, height: float, look: style.Look, label: str) -> None:
    """Draw the median of values and a line from their lower to their upper quartile."""
    if values.is_empty():
        return
    low, middle, high = (quantile(values, part) for part in (0.25, 0.5, 0.75))
    axes.hlines(height, low, high, color=look["color"], linewidth=0.9)
    axes.plot([middle], [height], linestyle="", label=label, **look)


def quantile(values: pl.Series, part: float = 0.5) -> float:
    """Return a quantile, the median by default; of nothing it is NaN, which is not drawn."""
    found = values.quantile(part, "linear")
    return math.nan if found is None else float(found)


def limits(values: Iterable[float]) -> tuple[float, float]:
    """Return the ends of a decimal axis that shows values.

    Examples
    --------
    >>> limits([0.0, 0.02, 0.5])
    (0.01, 1.0)
    """
    above = [value for value in values if value >= FLOOR]
    return (min(above) / 2, max(above) * 2) if above else (FLOOR, 1.0)
