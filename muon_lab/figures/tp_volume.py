"""What tensor-parallel layouts make a rank send: against the number of ranks, and against the shape of the matrix."""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import frames, labels, layouts, style, summaries, zeros

#: Panels of single layers, side by side.
MOST = 3

#: What tells two curves of one layout apart, and how they are told apart.
VARIANTS = ("steps", "wire", "period", "algorithm")
DASHES: tuple[style.Dashes, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)))

#: A layer of the table.
LAYER = ("model", "layer", "rows", "cols", "dim")

CUTS = {0: "rows", 1: "columns"}
MIB = 2**20


@style.house()
def volume(table: pl.DataFrame, layers: Sequence[tuple[str, str]] | None = None) -> Figure:
    """Draw MiB that a rank sends against tp, a panel a layer; below, a panel a dtype, as a share of duplicated's.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `volume`.
    layers : sequence of (str, str), optional
        Model and layer of the upper panels; without it some that differ in their shape.
    """
    axes_needed = ("layout", *LAYER, "tp", "dtype", *VARIANTS)
    shown, note = summaries.shown(table, axes_needed, ("sent_bytes", "aspect"))
    shown = shown.with_columns(layouts.across(), mib=pl.col("sent_bytes") / MIB)
    dtype = style.in_order(shown["dtype"], style.MARKERS)[0]
    first = shown.filter(dtype=dtype)
    chosen = _named(first, layers) if layers else _spread(first)
    ranks = int(max(shown["tp"]))
    shares = shown.drop_nulls("sent_ratio").filter(tp=ranks)
    dtypes = style.in_order(shares["dtype"], style.MARKERS)
    figure = Figure(figsize=(max(style.SINGLE, 2.25 * max(len(chosen), 1.5 * len(dtypes))), 4.4 if dtypes else 2.4))
    upper, lower = _panels(figure, len(chosen), len(dtypes))
    for axes, layer in zip(upper[0], chosen, strict=True):
        _volumes(axes, _of(first, layer), shown)
        axes.set_title(_title(layer))
        style.log2(axes, "x", shown["tp"])
    sent = pl.concat([_of(first, layer) for layer in chosen])["mib"]
    zeros.logarithmic(upper[0], "y", sent, base=10)
    frames.name_outside(upper, "tensor-parallel ranks", f"MiB sent by a rank\n({dtype})")
    for axes, name in zip(lower[0] if dtypes else (), dtypes, strict=True):
        _shares(axes, shares.filter(dtype=name), shown)
        axes.set_title(f"{name}, tp {ranks}")
    if dtypes:
        _ratios(lower, shares)
        frames.name_outside(lower, "long axis / short axis", "sent /\nsent by duplicated")
    labels.legend(figure, _entries(shown, bool(dtypes)), columns=7)
    labels.note(figure, note)
    return figure


# --- layers -----------------------------------------------------------------------------------------------------------


def _named(rows: pl.DataFrame, layers: Sequence[tuple[str, str]]) -> list[tuple[Any, ...]]:
    """Return the layers that are asked for, in that order."""
    found = {row[:2]: row for row in rows.select(LAYER).unique().sort(LAYER).rows()}
    missing = [name for name in layers if name not in found]
    if missing:
        raise ValueError(f"layers must be in the table, which has no {' of '.join(map(str, reversed(missing[0])))}")
    return [found[name] for name in layers]


def _spread(rows: pl.DataFrame) -> list[tuple[Any, ...]]:
    """Return a few layers, from square to long, of as many shapes as there are."""
    order = rows.sort("aspect", *LAYER, nulls_last=True).unique(["aspect", "dim"], keep="first", maintain_order=True)
    found = order.select(LAYER).rows()
    last = len(found) - 1
    places = range(last + 1) if last < MOST else [round(part * last / (MOST - 1)) for part in range(MOST)]
    return [found[place] for place in places]


def _of(rows: pl.DataFrame, layer: Sequence[Any]) -> pl.DataFrame:
    for name, value in zip(LAYER, layer, strict=True):
        rows = rows.filter(pl.col(name).eq_missing(pl.lit(value)))
    return rows


def _title(layer: Sequence[Any]) -> str:
    """Name a layer.

    Examples
    --------
    >>> _title((None, None, 4096, 1024, 0)), _title(("gpt2-xl", "mlp.fc", 6400, 1600, 0))
    ('4096 × 1024, rows cut', 'gpt2-xl, mlp.fc\\n6400 × 1600, rows cut')
    """
    model, name, rows, cols, dim = layer
    shape = f"{rows} × {cols}, {CUTS[dim]} cut"
    return shape if model is None else f"{model}, {name}\n{shape}"


# --- panels -----------------------------------------------------------------------------------------------------------


def _panels(figure: Figure, above: int, below: int) -> tuple[Any, Any]:
    """Return two grids of one row, panels of each sharing their vertical axis."""
    if not below:
        return figure.subplots(1, above, sharey=True, squeeze=False), None
    parts: Any = figure.subfigures(2, 1)
    grids = (
        part.subplots(1, count, sharey=True, squeeze=False) for part, count in zip(parts, (above, below), strict=True)
    )
    return next(grids), next(grids)


def _curves(rows: pl.DataFrame, shown: pl.DataFrame) -> list[tuple[str, tuple[Any, ...], style.Look]]:
    """Return layout, variant and look of every curve."""
    found = []
    for layout in layouts.present(rows["layout"]):
        kinds = shown.filter(layout=layout).select(VARIANTS).unique().sort(VARIANTS).rows()
        for place, kind in enumerate(kinds):
            found.append((layout, kind, layouts.look(layout) | {"linestyle": DASHES[place % len(DASHES)]}))
    return found


def _curve(rows: pl.DataFrame, layout: str, kind: Sequence[Any]) -> pl.DataFrame:
    rows = rows.filter(layout=layout)
    for name, value in zip(VARIANTS, kind, strict=True):
        rows = rows.filter(pl.col(name).eq_missing(pl.lit(value)))
    return rows


def _label(layout: str, kind: Sequence[Any], shown: pl.DataFrame) -> str:
    """Name a curve: what the layout has several of is said."""
    own = shown.filter(layout=layout)
    several = [
        f"{name} {value}"
        for name, value in zip(VARIANTS, kind, strict=True)
        if value is not None and own[name].n_unique() > 1
    ]
    return ", ".join((layout, *several))


def _volumes(axes: Axes, rows: pl.DataFrame, shown: pl.DataFrame) -> None:
    for layout, kind, look in _curves(rows, shown):
        own = _curve(rows, layout, kind).sort("tp")
        axes.plot(own["tp"], own["mib"], label=_label(layout, kind, shown), clip_on=False, **look)


def _shares(axes: Axes, rows: pl.DataFrame, shown: pl.DataFrame) -> None:
    """Draw what is sent over what duplicated sends, curves by which axis is cut, and where a curve reaches 1."""
    axes.axhline(1.0, color=style.GREY, linewidth=0.8, zorder=1)
    for (layout, kind, look), across in ((curve, across) for curve in _curves(rows, shown) for across in (False, True)):
        own = _curve(rows, layout, kind).filter(across=across).filter(pl.lit(layout != "duplicated"))
        own = own.group_by("aspect").agg(pl.col("sent_ratio", "beats_duplicated").median()).sort("aspect")
        if own.is_empty():
            continue
        dashes = {"linestyle": (0, (3, 1.5)), "markerfacecolor": "white"} if across else {}
        small = {"linewidth": 0.9, "markersize": 3.0, "clip_on": False}
        name = _label(layout, kind, shown) + (", across" if across else "")
        axes.plot(own["aspect"], own["sent_ratio"], label=name, **(look | dashes | small))
        beats = [float(ratio) for ratio in own["beats_duplicated"].drop_nulls() if ratio > 1]
        if beats:
            ring: style.Look = {"marker": "o", "markersize": 7.0, "markerfacecolor": "none", "color": look["color"]}
            axes.plot([sorted(beats)[len(beats) // 2]], [1.0], linestyle="", label=f"{name}, break-even", **ring)


def _ratios(grid: Any, rows: pl.DataFrame) -> None:
    zeros.logarithmic(grid[0], "y", rows["sent_ratio"], base=2, most=5)
    beats = rows["beats_duplicated"].drop_nulls()
    most = max([float(rows["aspect"].max()), *beats])  # type: ignore[arg-type]
    powers = range(math.ceil(math.log2(most)) + 1)
    for axes in grid[0]:
        style.log2(axes, "x", [2.0**power for power in powers])
        axes.set_xlim(2**-0.2, most * 2**0.3)


def _entries(shown: pl.DataFrame, shares: bool) -> dict[str, Line2D]:
    found = {}
    for layout, kind, look in _curves(shown, shown):
        found[_label(layout, kind, shown)] = Line2D([], [], linewidth=1.0, **look)
    grey: style.Look = {"color": style.GREY, "linewidth": 1.0, "marker": "o", "markersize": 3.6}
    if shares and shown["across"].n_unique() > 1:
        found["long axis cut"] = Line2D([], [], **grey)
        found["short axis cut"] = Line2D([], [], linestyle=(0, (3, 1.5)), markerfacecolor="white", **grey)
    if shares and (shown["beats_duplicated"].fill_null(0) > 1).any():
        ring: style.Look = {"marker": "o", "markersize": 7.0, "markerfacecolor": "none", "color": style.GREY}
        found["break-even"] = Line2D([], [], linestyle="", **ring)
    return found
