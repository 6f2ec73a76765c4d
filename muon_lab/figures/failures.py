"""Cases that ended in no matrix to measure, shown as such: in a strip behind the right end of the axis of errors."""

from collections.abc import Sequence

import polars as pl
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from muon_lab.figures import style

#: The outcomes that are a result, though there is no number to draw for it.
DIVERGED, NONFINITE = "diverged", "nonfinite"

#: The column that has the step at which an iterate stopped being finite.
STEP = "failed_step"

#: Of the width of the axes, what the strip takes.
STRIP = 0.2

#: Where the two outcomes stand in it.
PLACES = {DIVERGED: 0.3, NONFINITE: 0.75}

#: What a legend says.
NAMES = {DIVERGED: "diverged", NONFINITE: "not finite at step $k$"}

#: The strip, a shade darker than the page.
SHADE = "#f3f3f3"


def plain(table: pl.DataFrame, axes: Sequence[str], metrics: Sequence[str]) -> pl.DataFrame:
    """Return a table with words as strings and metrics as floats; raises ``ValueError`` if a column is missing."""
    missing = [name for name in (*axes, "outcome", *metrics, STEP) if name not in table.columns]
    if missing:
        raise ValueError(f"table lacks the columns {', '.join(missing)}; it has {', '.join(table.columns)}")
    texts = [name for name, dtype in table.schema.items() if dtype in (pl.Enum, pl.Categorical, pl.Null)]
    numbers = [*metrics, STEP, *(name for name in ("beta",) if name in axes)]
    return table.with_columns(pl.col(texts).cast(pl.String)).with_columns(pl.col(numbers).cast(pl.Float64))


def split(table: pl.DataFrame, metrics: Sequence[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows that ended well and have every metric, and those that failed; errors are in neither."""
    failed = table.filter(pl.col("outcome").is_in((DIVERGED, NONFINITE)))
    return table.filter(outcome="ok").drop_nulls(list(metrics)), failed


def marker(outcome: str, step: int | None) -> str:
    """Return the marker of a failure: the number of the step for an iterate that is not finite.

    Examples
    --------
    >>> marker("nonfinite", 7), marker("nonfinite", None), marker("diverged", None)
    ('$7$', 'x', '>')
    """
    if outcome == DIVERGED:
        return ">"
    return "x" if step is None else f"${step}$"


def strip(panels: Sequence[Axes]) -> float:
    """Lengthen the logarithmic horizontal axis that panels share by the strip, and return where it begins."""
    low, end = panels[0].get_xlim()
    right = end * (end / low) ** (STRIP / (1 - STRIP))
    panels[0].set_xlim(low, right)
    for axes in panels:
        axes.axvspan(end, right, color=SHADE, linewidth=0, zorder=0)
        axes.axvline(end, color=style.GREY, linewidth=0.6, zorder=1)
    return end


def draw(axes: Axes, end: float, height: float, failed: pl.DataFrame, colour: str, name: str) -> None:
    """Mark how the cases of one curve failed, at a height of the strip; the earliest step counts."""
    right = axes.get_xlim()[1]
    for outcome, place in PLACES.items():
        own = failed.filter(outcome=outcome)
        if own.is_empty():
            continue
        shape = marker(outcome, _earliest(own))
        look: style.Look = {"color": colour, "marker": shape, "markeredgewidth": 0.4 if "$" in shape else 0.8}
        look["markersize"] = 4.2 if "$" in shape else 3.2
        axes.plot([end * (right / end) ** place], [height], linestyle="", label=f"{name} {outcome}", **look)


def entries(failed: pl.DataFrame) -> dict[str, Line2D]:
    """Return the entries of a legend, for the outcomes that occur."""
    found: dict[str, Line2D] = {}
    for outcome, name in NAMES.items():
        own = failed.filter(outcome=outcome)
        if len(own):
            look: style.Look = (
                {"marker": ">"} if outcome == DIVERGED else {"marker": "$k$", "markeredgewidth": 0.2, "markersize": 5.5}
            )
            found[name] = Line2D([], [], color=style.GREY, linestyle="", **look)
    return found


def _earliest(failed: pl.DataFrame) -> int | None:
    return min((int(step) for step in failed[STEP].drop_nulls()), default=None)
