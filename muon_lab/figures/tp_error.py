"""Blocks against what random-matrix theory says of them, and every layout against one rank."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import frames, labels, layouts, style, summaries, zeros

#: What theory speaks of, its column, and its name.
QUANTITIES = {
    "relative": ("expected_relative", r"$\|B-U\|\,/\,\|U\|$"),
    "nuclear_ratio": ("expected_nuclear", r"$\sum_b\|G_b\|_*\,/\,\|G\|_*$"),
}
SIDES = {True: "short axis cut", False: "long axis cut"}

#: One colour a ratio of the axes, in their order; none is that of a layout.
ASPECTS = ("#332288", "#999933", "#8b5a2b", "#b2182b", "#225555", "#aa4499")

#: Markers of the sources of matrices: Gaussian ones, others that were planted, and those that were found.
SOURCES: tuple[style.Look, ...] = (
    {"marker": "o", "markerfacecolor": None},
    {"marker": "s", "markerfacecolor": "white"},
    {"marker": "D", "markerfacecolor": "white"},
    {"marker": "^", "markerfacecolor": "white"},
)

#: Room that the points of one tp share, in octaves.
DODGE = 0.56


class Kind(NamedTuple):
    """Matrices that are drawn as one: source and ratio of the axes."""

    source: str
    aspect: float


@style.house()
def tp_error(table: pl.DataFrame) -> Figure:
    """Draw exact blocks with theory laid over, and below what lies between every layout and one rank, a panel a dtype.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `blockwise`, for several layouts; what is planted and recorded with exact blocks, and layouts
        with a schedule.
    """
    axes_needed = ("source", "matrix", "rows", "cols", "layout", "dim", "tp", "method", "steps", "dtype")
    metrics = ("relative", "nuclear_ratio", "layout_relative")
    shown, note = summaries.shown(table, axes_needed, metrics)
    aspect = pl.max_horizontal("rows", "cols") / pl.min_horizontal("rows", "cols")
    shown = shown.with_columns(layouts.across(), source=_sources(), aspect=aspect)
    blocks, steps = _exact_blocks(shown), shown.drop_nulls("steps")
    if blocks.is_empty() or steps.is_empty():
        raise ValueError("table must have exact blocks and layouts with a schedule")
    sides = [side for side in SIDES if side in set(blocks["across"])]
    dtypes = style.in_order(steps["dtype"], style.MARKERS)
    figure = Figure(figsize=(style.DOUBLE, 5.9))
    parts: Any = figure.subfigures(2, 1, height_ratios=[2.0, 1.1])
    upper, lower = parts
    grid = upper.subplots(len(QUANTITIES), len(sides), sharex=True, sharey="row", squeeze=False)
    kinds = _kinds(blocks)
    for (row, name), (column, side) in product(enumerate(QUANTITIES), enumerate(sides)):
        part = blocks.filter(across=side)
        _theory(grid[row, column], part, QUANTITIES[name][0], kinds)
        _points(grid[row, column], part, name, kinds)
    _name(grid, sides, blocks)
    panels = lower.subplots(1, len(dtypes), sharey=True, squeeze=False)
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        _apart(axes, steps.filter(dtype=dtype))
        axes.set_title(dtype)
        style.log2(axes, "x", steps["tp"])
    ends = [end for axes in panels[0] for bars in axes.collections for _, end in np.concatenate(bars.get_segments())]
    zeros.logarithmic(panels[0], "y", ends, base=10, most=6)
    frames.name_outside(panels, "tensor-parallel ranks", "distance to one rank,\nrelative")
    labels.legend(figure, _entries(kinds) | layouts.entries(steps["layout"]), columns=6)
    labels.note(figure, note)
    return figure


def _sources() -> pl.Expr:
    """Return what a matrix is called: recorded ones by their kind, as they are many."""
    kind = pl.lit("recorded ") + pl.col("matrix").cast(pl.String).str.split("/").list.first()
    return pl.when(pl.col("source") == "recorded").then(kind).otherwise(pl.col("source"))


def _exact_blocks(shown: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of exact blocks, in the dtype with most bits."""
    rows = shown.filter(pl.col("steps").is_null(), pl.col("tp") > 1, layout="blockwise")
    dtypes = style.in_order(rows["dtype"], style.MARKERS)
    return rows.filter(dtype=dtypes[0]) if dtypes else rows


def _kinds(rows: pl.DataFrame) -> list[Kind]:
    found = (Kind(*pair) for pair in rows.select("source", "aspect").unique().rows())
    return sorted(found, key=lambda kind: (kind.aspect, kind.source != "gaussian", kind.source))


def _source_look(source: str, kinds: Sequence[Kind]) -> style.Look:
    names = sorted({kind.source for kind in kinds} | {"gaussian"}, key=lambda name: (name != "gaussian", name))
    return SOURCES[names.index(source) % len(SOURCES)]


def _colour(aspect: float, kinds: Sequence[Kind]) -> str:
    aspects = sorted({kind.aspect for kind in kinds})
    return ASPECTS[aspects.index(aspect) % len(ASPECTS)]


def _theory(axes: Axes, rows: pl.DataFrame, column: str, kinds: Sequence[Kind]) -> None:
    """Draw what is expected at every tp as a bar behind all the points of that tp."""
    reach = 2.0 ** (DODGE / 2 + 0.06)
    for aspect, own in sorted(rows.drop_nulls(column).group_by("aspect"), key=lambda pair: pair[0]):
        bar = own.group_by("tp").agg(pl.col(column).median()).sort("tp")
        x, colour = bar["tp"].to_numpy(), _colour(aspect[0], kinds)
        look: style.Look = {"color": style.tint(colour, 0.45), "linewidth": 2.2, "zorder": 1}
        axes.hlines(bar[column], x / reach, x * reach, label=f"theory {aspect[0]:g}", **look)


def _points(axes: Axes, rows: pl.DataFrame, metric: str, kinds: Sequence[Kind]) -> None:
    """Draw medians with quartiles, the kinds of one tp side by side."""
    shifts = np.linspace(-DODGE / 2, DODGE / 2, len(kinds)) if len(kinds) > 1 else [0.0]
    for kind, shift in zip(kinds, shifts, strict=True):
        own = rows.filter((pl.col("aspect") - kind.aspect).abs() < 1e-9, source=kind.source)
        if own.is_empty():
            continue
        found = summaries.quartiles(own, ["tp"], metric)
        x, colour = found["tp"].to_numpy() * 2.0**shift, _colour(kind.aspect, kinds)
        look = _source_look(kind.source, kinds)
        face = colour if look["markerfacecolor"] is None else look["markerfacecolor"]
        axes.vlines(x, found["low"], found["high"], color=colour, linewidth=0.8)
        shape: style.Look = {"marker": look["marker"], "markerfacecolor": face, "markersize": 3.2}
        name = f"{kind.source} {kind.aspect:g}"
        axes.plot(x, found["median"], linestyle="", color=colour, markeredgewidth=0.8, label=name, **shape)


def _name(grid: Any, sides: Sequence[bool], blocks: pl.DataFrame) -> None:
    sizes = sorted(blocks["tp"].unique())
    for axes, side in zip(grid[0], sides, strict=True):
        axes.set_title(f"exact blocks, {SIDES[side]}")
        style.log2(axes, "x", sizes)
        axes.set_xlim(sizes[0] / 2**0.45, sizes[-1] * 2**0.45)
    frames.name_outside(grid, "tensor-parallel ranks")
    for row, (_, label) in zip(grid, QUANTITIES.values(), strict=True):
        row[0].set_ylabel(label)
    grid[0, 0].set_ylim(bottom=0)
    grid[1, 0].set_ylim(bottom=1)


def _apart(axes: Axes, rows: pl.DataFrame) -> None:
    """Draw how far every layout is from one rank, with the quartiles over matrices and axes cut."""
    names = layouts.present(rows["layout"])
    shifts = np.linspace(-0.12, 0.12, len(names)) if len(names) > 1 else [0.0]
    for layout, shift in zip(names, shifts, strict=True):
        found = summaries.quartiles(rows.filter(layout=layout), ["tp"], "layout_relative")
        x, look = found["tp"].to_numpy() * 2.0**shift, layouts.look(layout)
        axes.plot(x, found["median"], label=layout, linewidth=0.8, clip_on=False, **look)
        axes.vlines(x, found["low"], found["high"], color=look["color"], linewidth=0.8)


def _entries(kinds: Sequence[Kind]) -> dict[str, Line2D]:
    found = {}
    for aspect in sorted({kind.aspect for kind in kinds}):
        found[f"1:{aspect:g}"] = Line2D([], [], color=_colour(aspect, kinds), linewidth=2.5)
    found["theory, Gaussian"] = Line2D([], [], color=style.tint(style.GREY, 0.45), linewidth=2.2)
    for source in sorted({kind.source for kind in kinds}, key=lambda name: (name != "gaussian", name)):
        look = _source_look(source, kinds)
        face = style.GREY if look["markerfacecolor"] is None else look["markerfacecolor"]
        shape: style.Look = {"marker": look["marker"], "markerfacecolor": face}
        found[source] = Line2D([], [], linestyle="", color=style.GREY, **shape)
    return found
