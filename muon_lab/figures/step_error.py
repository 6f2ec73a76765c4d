"""How far an orthogonalized matrix is from its polar factor: all of it, what truncation leaves, what rounding adds."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import frames, labels, style, summaries
from muon_lab.figures.ladder import Rung, ladder

#: Panels beside each other.
ACROSS = 4

#: Below this nothing is told apart: half a unit in the last place of a float64, rounded down to a power of ten.
FLOOR = 1e-16

WHOLE = "relative"

#: The parts of the distance beside the whole, with the line of a curve and the marker of a ladder.
PARTS: dict[str, tuple[style.Dashes, str]] = {"truncation": ((0, (1, 1.3)), "|"), "rounding": ((0, (4, 1.5)), "x")}

LABEL = r"$\|X-U\|\,/\,\|U\|$"


class Panel(NamedTuple):
    """The rows of one spectrum and one dtype."""

    spectrum: str
    dtype: str
    rows: pl.DataFrame


@style.house()
def orthogonalization(table: pl.DataFrame) -> Figure:
    """Draw the relative error, one panel a spectrum and a dtype: medians over matrices, with quartiles.

    Against the number of steps where the table has several, else as one row a method.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `orthogonalization`.
    """
    rows, note = summaries.shown(table, ("spectrum", "dtype", "method", "steps"), (WHOLE, *PARTS))
    figure = _stepped(rows) if summaries.several(rows, "steps") else _laddered(rows)
    labels.note(figure, note)
    return figure


def _stepped(rows: pl.DataFrame) -> Figure:
    figure, grid, axes_of = _grid(rows, 1.45)
    counts = sorted(rows["steps"].drop_nulls().unique())
    for panel, axes in axes_of:
        for method in style.in_order(panel.rows["method"]):
            _curve(axes, panel, method, counts)
        style.log10(axes, "y", *_range(rows.filter(dtype=panel.dtype)), most=5)
        style.ticks(axes, "x", counts)
    frames.name_outside(grid, "steps", LABEL)
    parts = {"all of it": {"marker": style.marker(axes_of[0][0].dtype)}}
    _legend(figure, rows, parts | {name: {"linestyle": dashes} for name, (dashes, _) in PARTS.items()})
    return figure


def _laddered(rows: pl.DataFrame) -> Figure:
    methods = style.in_order(rows["method"])
    figure, grid, axes_of = _grid(rows, 0.45 + 0.17 * len(methods))
    for panel, axes in axes_of:
        _rungs(axes, panel, methods)
        style.log10(axes, "x", *_range(rows), most=4)
    frames.name_outside(grid, LABEL)
    hollow = {"linestyle": "", "markerfacecolor": "white"}
    parts = {"all of it": {"marker": style.marker(axes_of[0][0].dtype), **hollow}}
    _legend(figure, rows.clear(), parts | {name: {"marker": m, "linestyle": ""} for name, (_, m) in PARTS.items()})
    return figure


def _grid(rows: pl.DataFrame, height: float) -> tuple[Figure, Any, list[tuple[Panel, Axes]]]:
    """Return a figure and its panels: every dtype begins a row, and the spectra follow from the mildest."""
    spectra, dtypes = _spectra(rows), style.in_order(rows["dtype"], style.MARKERS)
    across, down = min(ACROSS, len(spectra)), math.ceil(len(spectra) / ACROSS)
    width = style.SINGLE if across == 1 else style.DOUBLE
    figure = Figure(figsize=(width, 0.55 + height * down * len(dtypes)))
    grid = figure.subplots(down * len(dtypes), across, sharex=True, sharey="row", squeeze=False)
    drawn = []
    for axes in grid.flatten():
        axes.set_visible(False)
    for block, dtype in enumerate(dtypes):
        cells = grid[block * down : (block + 1) * down].flatten()
        for spectrum, axes in zip(spectra, cells, strict=False):
            panel = Panel(spectrum, dtype, rows.filter(spectrum=spectrum, dtype=dtype))
            if len(panel.rows):
                axes.set_visible(True)
                axes.set_title(f"{spectrum}, {dtype}" if len(dtypes) > 1 else spectrum)
                drawn.append((panel, axes))
    return figure, grid, drawn


def _spectra(rows: pl.DataFrame) -> list[str]:
    if "condition" not in rows.columns:
        return sorted(rows["spectrum"].unique())
    worst = rows.group_by("spectrum").agg(pl.col("condition").median()).sort("condition", "spectrum")
    return worst["spectrum"].to_list()


def _range(rows: pl.DataFrame) -> tuple[float, float]:
    """Return limits around the whole and its rounding; truncation may leave through the floor, where it is over."""
    values = [value for name in (WHOLE, "rounding") for value in rows[name] if value >= FLOOR]
    return (min(values) / 3, max(values) * 3) if values else (FLOOR, 1.0)


def _curve(axes: Axes, panel: Panel, method: str, counts: Sequence[int]) -> None:
    own, colour = panel.rows.filter(method=method), style.colour(method)
    lines: dict[str, style.Dashes] = {WHOLE: "-"} | {name: dashes for name, (dashes, _) in PARTS.items()}
    for name, dashes in lines.items():
        found = summaries.quartiles(own, ["steps"], name)
        look: style.Look = {"color": colour, "linestyle": dashes, "linewidth": 1.1 if name == WHOLE else 0.8}
        if own["steps"].is_null().all():  # an exact method has no steps: it is a level
            x, found = [counts[0], counts[-1]], pl.concat([found, found])
        else:
            x = found["steps"].to_list()
            look |= _dots(panel.dtype, method) if name == WHOLE else {}
        axes.plot(x, found["median"], label=f"{method} {name}", **look)
        axes.fill_between(x, found["low"], found["high"], color=colour, alpha=0.15, linewidth=0)


def _dots(dtype: str, method: str) -> style.Look:
    """Return the markers of a curve: the form of a method shows inside, as lines tell the parts of the distance."""
    return {"marker": style.marker(dtype), "markersize": 2.5, "markerfacecolor": style.face(method)}


def _rungs(axes: Axes, panel: Panel, methods: Sequence[str]) -> None:
    wholes = {row[0]: row[1:] for row in summaries.quartiles(panel.rows, ["method"], WHOLE).iter_rows()}
    nothing, shape = (math.nan, math.nan, math.nan), style.marker(panel.dtype)
    rungs = []
    for method in methods:
        low, middle, high = wholes.get(method, nothing)
        rungs.append(Rung(method, low, middle, high, style.colour(method), shape))
    ladder(axes, rungs)
    for part, (_, mark) in PARTS.items():
        for method, _, median, _ in summaries.quartiles(panel.rows, ["method"], part).iter_rows():
            look: style.Look = {"color": style.colour(method), "marker": mark}
            look["markersize"] = 8.0 if mark == "|" else 3.0
            axes.plot([median], [methods.index(method)], linestyle="", label=f"{method} {part}", **look)


def _legend(figure: Figure, rows: pl.DataFrame, parts: dict[str, style.Look]) -> None:
    """Name methods by colour, for the rows given, and the parts of the distance by line or marker."""
    entries = {
        method: Line2D([], [], color=style.colour(method), linewidth=2.5, **_inside(method))
        for method in style.in_order(rows["method"])
    }
    entries |= {name: Line2D([], [], color=style.GREY, **look) for name, look in parts.items()}
    labels.legend(figure, entries, columns=3 if figure.get_figwidth() < style.DOUBLE else 8)


def _inside(method: str) -> style.Look:
    """Return a dot that shows the form of a method on its line of the legend; a plain loop needs none."""
    inside = style.face(method)
    return {} if inside == style.colour(method) else {"marker": "o", "markersize": 4.0, "markerfacecolor": inside}
