"""What cutting a matrix over tensor-parallel ranks does to its update: the distance, and the largest singular value."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import frames, labels, layouts, style, summaries

CUTS = {0: "rows cut", 1: "columns cut"}
QUANTITIES = {"relative": r"$\|B-U\|\,/\,\|U\|$", "sigma_max": r"largest singular value of $B$"}
RECORDED = {"gradient": "recorded gradients", "momentum": "recorded momenta"}

#: How the kinds of matrices are told apart: line, and how far the marker is filled.
KINDS: tuple[tuple[style.Dashes, float], ...] = (
    ("-", 1.0),
    ((0, (4, 1.5)), 0.0),
    ((0, (1, 1.2)), 0.45),
    ((0, (4, 1.2, 1, 1.2)), 0.2),
)

#: The smallest height of the axis of errors: below it they are rounding.
FLAT = 1e-2

#: The smallest singular value that the axis has to reach: that of the zero matrix has no place on it.
SMALLEST = 1 / 8

#: Room that the points of one tp share, in octaves.
DODGE = 0.34

#: What has a pair of rows of its own: another layout, or another cut, is another update.
FACET = ("layout", "cut")

#: Heights of a pair of rows, in inches: of the only one, and of one among others.
ALONE, AMONG = 4.0, 3.2


class Series(NamedTuple):
    """One curve: the rows it stands for and how it looks."""

    kind: str
    method: str
    steps: int | None
    dtype: str
    look: style.Look
    shift: float


@style.house()
def blockwise(table: pl.DataFrame) -> Figure:
    """Draw error and largest singular value against tp, one column of panels a dim: medians over matrices, quartiles.

    Every layout and every cut of the table has a pair of rows of its own.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `blockwise`.
    """
    axes_needed = ("source", "matrix", *FACET, "dim", "tp", "method", "steps", "dtype")
    rows, note = summaries.shown(table, axes_needed, (*QUANTITIES, "bound"))
    rows = rows.with_columns(kind=pl.Series([_kind(*pair) for pair in rows.select("source", "matrix").iter_rows()]))
    dims, series, facets = sorted(rows["dim"].unique()), _series(rows), _facets(rows)
    height = ALONE if len(facets) == 1 else AMONG * len(facets)
    figure = Figure(figsize=(style.SINGLE if len(dims) == 1 else style.DOUBLE, height))
    grid = figure.subplots(2 * len(facets), len(dims), sharex=True, sharey="row", squeeze=False)
    for place, facet in enumerate(facets):
        part = rows.filter(layout=facet[0], cut=facet[1])
        pair = grid[2 * place : 2 * place + 2]
        _pair(pair, dims, part, series)
        _finish(pair, dims, part, _facet_name(facet, rows))
    _ranks(grid, rows)
    _legend(figure, rows, series)
    labels.note(figure, note)
    return figure


def _facets(rows: pl.DataFrame) -> list[tuple[str, str]]:
    found = rows.select(FACET).unique().rows()
    order = layouts.present(rows["layout"])
    return sorted(found, key=lambda facet: (order.index(facet[0]), facet[1] != "even", facet[1]))


def _facet_name(facet: Sequence[str], rows: pl.DataFrame) -> str:
    """Name a pair of rows by what the table has several of."""
    return ", ".join(
        value if name == "layout" else f"{value} cut"
        for name, value in zip(FACET, facet, strict=True)
        if summaries.several(rows, name)
    )


def _pair(pair: Any, dims: Sequence[int], rows: pl.DataFrame, series: Sequence[Series]) -> None:
    for (row, name), (column, dim) in product(enumerate(QUANTITIES), enumerate(dims)):
        axes, part = pair[row, column], rows.filter(pl.col("dim") == dim)
        for one in series:
            _draw(axes, part, one, name)
        if name == "sigma_max":
            _bound(axes, part)


def _kind(source: str, matrix: str | None) -> str:
    if source == "recorded" and matrix is not None:
        first = matrix.split("/")[0]
        return RECORDED.get(first, f"recorded {first}")
    return source if source in ("recorded", "file") else f"planted {source}"


def _kinds(rows: pl.DataFrame) -> list[str]:
    return sorted(rows["kind"].unique(), key=lambda kind: (kind.startswith("planted"), kind))


def _series(rows: pl.DataFrame) -> list[Series]:
    kinds, methods = _kinds(rows), style.in_order(rows["method"])
    present = set(rows.select("kind", "method", "steps", "dtype").iter_rows())
    order = sorted(present, key=lambda one: (kinds.index(one[0]), methods.index(one[1]), one[2] or 0, one[3]))
    shifts = np.linspace(-DODGE / 2, DODGE / 2, len(order)) if len(order) > 1 else [0.0]
    return [
        Series(kind, method, steps, dtype, _look(rows, kinds.index(kind), method, steps, dtype), float(shift))
        for (kind, method, steps, dtype), shift in zip(order, shifts, strict=True)
    ]


def _look(rows: pl.DataFrame, kind: int, method: str, steps: int | None, dtype: str) -> style.Look:
    dashes, filled = KINDS[kind % len(KINDS)]
    counts = sorted(rows.filter(pl.col("method") == method)["steps"].drop_nulls().unique())
    strength = 1.0 if len(counts) < 2 else 0.45 + 0.55 * counts.index(steps) / (len(counts) - 1)
    colour = style.tint(style.colour(method), strength)
    return {
        "color": colour,
        "linestyle": dashes,
        "marker": style.marker(dtype),
        "markerfacecolor": style.tint(colour, filled),
        "markeredgewidth": 0.8,
    }


def _draw(axes: Axes, rows: pl.DataFrame, one: Series, metric: str) -> None:
    own = rows.filter(pl.col("steps").eq_missing(one.steps), kind=one.kind, method=one.method, dtype=one.dtype)
    if own.is_empty():
        return
    found = summaries.quartiles(own, ["tp"], metric)
    x = found["tp"].to_numpy() * 2.0**one.shift
    low, median, high = (found[name].to_numpy() for name in ("low", "median", "high"))
    axes.vlines(x, low, high, color=one.look["color"], linewidth=0.8)
    name = " ".join(str(part) for part in (one.kind, one.method, one.steps, one.dtype) if part is not None)
    axes.plot(x, median, label=name, linewidth=0.9, **one.look)


def _bound(axes: Axes, rows: pl.DataFrame) -> None:
    """Draw the bound of every tp as a bar below all the points of that tp."""
    bound = rows.group_by("tp").agg(pl.col("bound").first()).sort("tp")
    x, y = bound["tp"].to_numpy(), bound["bound"].to_numpy()
    reach = 2.0 ** (DODGE / 2 + 0.1)
    axes.hlines(y, x / reach, x * reach, color=style.tint(style.GREY, 0.4), linewidth=3.0, zorder=1, label="bound")


def _finish(grid: Any, dims: Sequence[int], rows: pl.DataFrame, facet: str) -> None:
    for axes, dim in zip(grid[0], dims, strict=True):
        cut = f"{CUTS[dim]} (dim {dim})"
        axes.set_title(f"{facet}: {cut}" if facet else cut)
    frames.name_outside(grid)
    for row, label in zip(grid, QUANTITIES.values(), strict=True):
        row[0].set_ylabel(label)
    top = max(FLAT, *(axes.dataLim.y1 for axes in grid[0]))
    grid[0, 0].set_ylim(-0.03 * top, 1.05 * top)  # room for the markers at 0
    style.log2(grid[1, 0], "y", rows["bound"].unique(), _root)
    low, high = min(axes.dataLim.y0 for axes in grid[1]), max(axes.dataLim.y1 for axes in grid[1])
    grid[1, 0].set_ylim(max(low, SMALLEST) / 2**0.1, high * 2**0.2)


def _ranks(grid: Any, rows: pl.DataFrame) -> None:
    sizes = sorted(rows["tp"].unique())
    for axes in grid[0]:
        style.log2(axes, "x", sizes)
        axes.set_xlim(sizes[0] / 2**0.45, sizes[-1] * 2**0.45)
    for axes in grid[-1]:
        axes.set_xlabel("tensor-parallel ranks")


def _root(value: float) -> str:
    """Write the square root of a whole number as such: 2 is 2, 1.414… is √2."""
    square = round(value**2)
    whole = round(value)
    return f"{whole}" if whole * whole == square else rf"$\sqrt{{{square}}}$"


def _legend(figure: Figure, rows: pl.DataFrame, series: Sequence[Series]) -> None:
    entries: dict[str, Line2D] = {}
    for one in sorted(series, key=lambda one: style.in_order(rows["method"]).index(one.method)):
        counted = summaries.several(rows.filter(method=one.method), "steps")
        name = f"{one.method}, {one.steps} steps" if counted else one.method
        entries.setdefault(name, Line2D([], [], color=one.look["color"], linewidth=2.5))
    for index, kind in enumerate(_kinds(rows)):
        dashes, filled = KINDS[index % len(KINDS)]
        fill = style.tint(style.GREY, filled)
        shape = "o" if summaries.several(rows, "dtype") else series[0].look["marker"]
        entries[kind] = Line2D([], [], color=style.GREY, linestyle=dashes, marker=shape, markerfacecolor=fill)
    if summaries.several(rows, "dtype"):
        for dtype in style.in_order(rows["dtype"], style.MARKERS):
            entries[dtype] = Line2D([], [], color=style.GREY, linestyle="", marker=style.marker(dtype))
    entries[r"bound $\sqrt{tp}$"] = Line2D([], [], color=style.tint(style.GREY, 0.4), linewidth=3.0)
    labels.legend(figure, entries, columns=2 if figure.get_figwidth() < style.DOUBLE else 6)
