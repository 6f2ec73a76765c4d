"""Work-precision diagrams: the error of a method against its flops, and against its time."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import cases, frames, labels, ratios, style, summaries

#: Panels beside each other.
ACROSS = 4

#: Inches of a panel, and of axis names, titles and the first line of the legend.
HEIGHT, FRAME = 1.35, 0.75

#: The most ticks of a horizontal axis.
TICKS = 5

#: What is on the horizontal axes, the upper one first, and how it is called. Five steps of any quintic schedule in the
#: plain loop are the unit of both.
WORKS: Mapping[str, str] = {"flops_ratio": "flops / five plain steps", "ratio": "time / five plain steps"}

ERROR = "relative"
LABEL = r"$\|X-U\|\,/\,\|U\|$"

#: Below this nothing is told apart.
FLOOR = 1e-16


class Problem(NamedTuple):
    """What a pair of panels shows."""

    spectrum: str
    shape: str
    threads: int


@style.house()
def work_precision(table: pl.DataFrame) -> Figure:
    """Draw the error against work, flops above time: two panels a spectrum, a curve a method over its steps.

    A method that has no steps is one point. Points are medians over matrices; times have their quartiles over rounds.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `work_precision`.
    """
    axes_needed = ("spectrum", "shape", "threads", "dtype", "method", "steps")
    rows, note = summaries.shown(table, axes_needed, (ERROR, *WORKS, "ratio_low", "ratio_high"))
    problems = _problems(rows)
    down = math.ceil(len(problems) / ACROSS)
    across = math.ceil(len(problems) / down)
    width = style.SINGLE if across == 1 else style.DOUBLE
    figure = Figure(figsize=(width, FRAME + down * (2 * HEIGHT + 0.3)))
    grid = figure.subplots(2 * down, across, sharey=True, squeeze=False)
    for pair, problem in zip(frames.pairs(grid, len(problems)), problems, strict=True):
        pair[0].set_title(_title(rows, problem))
        for axes, work in zip(pair, WORKS, strict=True):
            _panel(axes, _of(rows, problem), work)
            _scale(axes, rows[work])
    style.log10(grid[0, 0], "y", *_range(rows[ERROR]), most=5)
    for row, name in zip(grid, [*WORKS.values()] * down, strict=True):
        frames.name_outside(row[None, :], name, LABEL)
    labels.legend(figure, _entries(rows), columns=2 if across == 1 else 5)
    labels.note(figure, note)
    return figure


def _problems(rows: pl.DataFrame) -> list[Problem]:
    """Return the problems in the order of their spectra, small matrices before large ones."""
    spectra = cases.spectra(rows)
    found = {Problem(*one) for one in rows.select(*Problem._fields).iter_rows()}
    return sorted(found, key=lambda one: (one.threads, ratios.size(one.shape), spectra.index(one.spectrum)))


def _of(rows: pl.DataFrame, problem: Problem) -> pl.DataFrame:
    return rows.filter(**problem._asdict())


def _title(rows: pl.DataFrame, problem: Problem) -> str:
    """Return the spectrum, and what else tells the problem from others."""
    said = [problem.shape.replace("x", " × ")] if summaries.several(rows, "shape") else []
    said += [ratios.WORDS["threads"].format(problem.threads)] if summaries.several(rows, "threads") else []
    return "\n".join([problem.spectrum, *([", ".join(said)] if said else [])])


def _panel(axes: Axes, rows: pl.DataFrame, work: str) -> None:
    axes.axvline(1.0, color=style.GREY, linewidth=0.6, zorder=1)
    for dtype in style.in_order(rows["dtype"], style.MARKERS):
        for method in style.in_order(rows["method"]):
            _curve(axes, rows.filter(method=method, dtype=dtype), method, dtype, work)


def _curve(axes: Axes, own: pl.DataFrame, method: str, dtype: str, work: str) -> None:
    if own.is_empty():
        return
    names = (ERROR, work, "ratio_low", "ratio_high")
    found = own.group_by("steps").agg(pl.col(*names).median()).sort("steps", nulls_last=True)
    error = np.maximum(found[ERROR].to_numpy(), FLOOR)
    if work == "ratio":
        axes.hlines(error, found["ratio_low"], found["ratio_high"], color=style.colour(method), linewidth=0.6)
    axes.plot(found[work], error, label=f"{method} {dtype}", **_look(method, dtype, stepped=len(found) > 1))


def _look(method: str, dtype: str, *, stepped: bool) -> style.Look:
    """Return how a curve looks; what is one point has a larger marker, and a white one."""
    look: style.Look = {"color": style.colour(method), "marker": style.marker(dtype), "markeredgewidth": 0.7}
    if stepped:
        dots = {"markersize": 2.6, "markerfacecolor": style.face(method)}
        return look | dots | {"linestyle": style.dashes(method), "linewidth": 0.9}
    return look | {"markersize": 4.5, "markerfacecolor": style.face(method), "linestyle": ""}


def _scale(axes: Axes, works: pl.Series) -> None:
    """Make the axis of a work binary: one range for all panels of it, so that they can be compared."""
    shown = [1.0, *(work for work in works if work > 0)]  # a zero matrix may have cost nothing
    low, high = min(shown) / 1.2, max(shown) * 1.2
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    stride = math.ceil((last - first + 1) / TICKS)
    style.log2(axes, "x", [2.0**power for power in range(first, last + 1) if power % stride == 0], _power)
    axes.set_xlim(low, high)


def _power(value: float) -> str:
    """Write a power of two: fractions as such, as 1/2 is shorter than 0.5 and 1/8 than 0.125.

    Examples
    --------
    >>> _power(0.25), _power(4.0)
    ('1/4', '4')
    """
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"


def _range(errors: pl.Series) -> tuple[float, float]:
    above = [error for error in errors if error >= FLOOR]
    return (min(above) / 3, max(above) * 3) if above else (FLOOR, 1.0)


def _entries(rows: pl.DataFrame) -> dict[str, Line2D]:
    """Return the entries of the legend: methods as they are drawn, and dtypes where there are several."""
    dtypes: Sequence[str] = style.in_order(rows["dtype"], style.MARKERS)
    entries = {}
    for method in style.in_order(rows["method"]):
        own = rows.filter(method=method)
        look = _look(method, dtypes[0], stepped=summaries.several(own, "steps"))
        entries[method] = Line2D([], [], **look)
    if len(dtypes) > 1:
        for dtype in dtypes:
            entries[dtype] = Line2D([], [], color=style.GREY, linestyle="", marker=style.marker(dtype))
    return entries
