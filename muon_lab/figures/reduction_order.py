"""What sums of Gram matrices in few bits do, over a single rank."""

import math
from itertools import product
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import cases, frames, labels, style, summaries

#: How a sum is made: colour (Okabe and Ito's), marker and name.
SUMS = {
    "hops": ("#d55e00", "^", "rounded at every hop"),
    "once": ("#0072b2", "s", "parts rounded, added once"),
    "wide": ("#009e73", "D", "added in the next wider dtype"),
}

#: The order of a sum; one that has none is drawn as the first.
ORDERS: dict[str, style.Dashes] = {"ring": "-", "rank": (0, (1, 1.2)), "tree": (0, (4, 1.5))}

#: The axis of ratios reaches at least from here to there.
LEAST = 0.9, 1.25


@style.house()
def reduction(table: pl.DataFrame) -> Figure:
    """Draw errors over those of one rank against tp: of the first Gram matrix, and of the update by every schedule.

    A column of panels is a dtype and a kind of matrices; medians over matrices with quartiles.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `reduction`.
    """
    axes_needed = ("source", "tp", "sums", "order", "method", "steps", "dtype")
    shown, note = summaries.shown(table, axes_needed, ("gram_ratio", "update_ratio"))
    dtypes = style.in_order(shown["dtype"], style.MARKERS)
    columns = [pair for pair in product(dtypes, cases_of(shown)) if len(_of(shown, *pair))]
    schedules = [
        pair
        for method in style.in_order(shown["method"])
        for pair in sorted(shown.filter(method=method).select("method", "steps").unique().rows())
    ]
    figure = Figure(figsize=(max(style.SINGLE, 1.75 * len(columns)), 1.0 + 1.35 * (1 + len(schedules))))
    grid = figure.subplots(1 + len(schedules), len(columns), sharex=True, sharey="row", squeeze=False)
    for panels, (dtype, source) in zip(grid.T, columns, strict=True):
        own = _of(shown, dtype, source)
        panels[0].set_title(f"{source}\n{dtype}")
        _ratios(panels[0], own, "gram_ratio")
        for axes, (method, steps) in zip(panels[1:], schedules, strict=True):
            _ratios(axes, own.filter(method=method, steps=steps), "update_ratio")
    style.log2(grid[0, 0], "x", shown["tp"])
    frames.name_outside(grid, "ranks")
    names = ["Gram matrix", *(f"update,\n{method}, {steps}" for method, steps in schedules)]
    for row, name in zip(grid, names, strict=True):
        row[0].set_ylabel(name)
        _scale(row)
    figure.supylabel("error / that of one rank", fontsize=8.0)
    labels.legend(figure, _entries(shown), columns=5)
    labels.note(figure, note)
    return figure


def cases_of(shown: pl.DataFrame) -> list[str]:
    """Return the sources of matrices, planted ones first.

    Examples
    --------
    >>> cases_of(pl.DataFrame({"source": ["recorded", "gaussian", "gaussian"]}))
    ['gaussian', 'recorded']
    """
    return cases.spectra(shown.select(spectrum="source"))


def _of(shown: pl.DataFrame, dtype: str, source: str) -> pl.DataFrame:
    return shown.filter(dtype=dtype, source=source)


def _ratios(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
    axes.axhline(1.0, color=style.GREY, linewidth=0.8, zorder=1)
    for sums, order in _kinds(rows):
        own = rows.filter(pl.col("order").eq_missing(pl.lit(order)), sums=sums)
        found = summaries.quartiles(own, ["tp"], metric)
        look = _look(sums, order)
        axes.fill_between(found["tp"], found["low"], found["high"], color=look["color"], alpha=0.12, linewidth=0)
        name = " ".join(part for part in (sums, order) if part is not None)
        axes.plot(found["tp"], found["median"], label=name, **look)


def _kinds(rows: pl.DataFrame) -> list[tuple[str, str | None]]:
    sums, orders = style.in_order(rows["sums"], SUMS), [None, *style.in_order(rows["order"].drop_nulls(), ORDERS)]
    there = set(rows.select("sums", "order").unique().rows())
    return [pair for pair in product(sums, orders) if pair in there]


def _look(sums: str, order: str | None) -> style.Look:
    colour, marker, _ = SUMS.get(sums, (style.colour(sums), "X", sums))
    second = order is not None and order != next(iter(ORDERS))
    return {
        "color": colour,
        "marker": marker,
        "markersize": 3.2,
        "markeredgewidth": 0.8,
        "markerfacecolor": "white" if second else colour,
        "linestyle": ORDERS.get(order, "-") if order else "-",
        "linewidth": 0.9,
    }


def _scale(row: Any) -> None:
    low = min(LEAST[0], *(axes.dataLim.y0 for axes in row))
    high = max(LEAST[1], *(axes.dataLim.y1 for axes in row))
    octaves = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    stride = max(1, math.ceil(len(octaves) / 6))
    places = {2.0**power: _power_of_two(power) for power in octaves if power % stride == 0}
    if len(places) < 3:
        near = {value: f"{value:g}" for value in (0.8, 1.2, 1.4, 1.6) if low <= value <= high}
        places |= near
    style.log2(row[0], "y", places, lambda place: places[place])
    row[0].set_ylim(low / 1.05, high * 1.05)


def _power_of_two(power: int) -> str:
    """Write a power of two.

    Examples
    --------
    >>> _power_of_two(-2), _power_of_two(3)
    ('1/4', '8')
    """
    return f"{2**power}" if power >= 0 else f"1/{2**-power}"


def _entries(shown: pl.DataFrame) -> dict[str, Line2D]:
    found = {
        SUMS[sums][2] if sums in SUMS else sums: Line2D([], [], **_look(sums, None))
        for sums in style.in_order(shown["sums"], SUMS)
    }
    if summaries.several(shown, "order"):
        grey: style.Look = {"color": style.GREY, "marker": "o", "markersize": 3.2, "linewidth": 0.9}
        for order in style.in_order(shown["order"].drop_nulls(), ORDERS):
            face = style.GREY if order == next(iter(ORDERS)) else "white"
            found[order] = Line2D([], [], linestyle=ORDERS.get(order, "-"), markerfacecolor=face, **grey)
    return found
