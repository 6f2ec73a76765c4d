"""What a layout sends for the error that it has: one marker a layout, one path over the numbers of ranks."""

from itertools import product
from typing import Any, NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import frames, labels, layouts, style, summaries, zeros

#: Bytes of an entry.
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

#: What rows of both tables must agree in: all that bytes depend on, the length of the short axis aside.
JOINED = ("layout", "dtype", "tp", "aspect", "across")

#: Sizes of a marker from the smallest to the largest number of ranks.
SIZES = 2.2, 5.2

CUTS = {False: "long axis cut", True: "short axis cut"}


class Panel(NamedTuple):
    """The matrices of a panel: source, ratio of the axes, and whether the short one is cut."""

    source: str
    aspect: float
    across: bool

    @property
    def title(self) -> str:
        """What stands above it."""
        cut = "" if self.aspect == 1 else f", {CUTS[self.across]}"
        return f"{self.source}\n1:{self.aspect:g}{cut}"


@style.house()
def layout_work(errors: pl.DataFrame, volumes: pl.DataFrame, dtype: str = "float32") -> Figure:
    """Draw errors against bytes sent over those of the matrix, a panel a kind of matrices.

    Bytes over those of the matrix depend on the ratio of its axes alone, but for the norm, which is fewer than 50
    bytes a rank: so tables of different sizes go together.

    Parameters
    ----------
    errors : polars.DataFrame
        Rows of the study `blockwise` with a schedule; medians over matrices, with quartiles.
    volumes : polars.DataFrame
        Rows of the study `volume`, by rings, in which the ratios of the axes are among those of ``errors``.
    dtype : str
        Of the shards and of the iteration.

    Raises
    ------
    ValueError
        If the tables have no layout, ratio of axes, cut, number of ranks and dtype in common.
    """
    needed = ("source", "matrix", "rows", "cols", "layout", "dim", "tp", "method", "steps", "dtype")
    shown, note = summaries.shown(errors, needed, ("relative",))
    sent, _ = summaries.shown(volumes, ("layout", "rows", "cols", "dim", "tp", "dtype"), ("sent_bytes",))
    rows = _with_volume(shown.drop_nulls("steps").filter(dtype=dtype), sent)
    if rows.is_empty():
        raise ValueError(f"tables of errors and of volumes must agree in {', '.join(JOINED)} somewhere, in {dtype}")
    sources, shapes = _sources(rows), sorted(rows.select("aspect", "across").unique().rows())
    figure = Figure(figsize=(max(style.SINGLE, 2.25 * len(shapes)), 0.7 + 1.9 * len(sources)))
    grid = figure.subplots(len(sources), len(shapes), sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, (Panel(one, *shape) for one, shape in product(sources, shapes)), strict=True):
        own = _of(rows, panel)
        axes.set_title(panel.title)
        axes.set_visible(len(own) > 0)
        _paths(axes, own, rows)
    _scales(grid, rows)
    frames.name_outside(grid, "sent by a rank / matrix", r"$\|B-U\|\,/\,\|U\|$")
    labels.legend(figure, layouts.entries(rows["layout"]) | _sizes(rows), columns=6)
    labels.note(figure, note)
    return figure


def _with_volume(errors: pl.DataFrame, volumes: pl.DataFrame) -> pl.DataFrame:
    """Return errors with what was sent, over the bytes of the matrix."""
    entries = pl.col("rows") * pl.col("cols") * pl.col("dtype").replace_strict(BYTES, default=None)
    sent = _shaped(volumes).with_columns(sent=pl.col("sent_bytes") / entries)
    sent = sent.group_by(JOINED).agg(pl.col("sent").median())
    recorded = pl.lit("recorded ") + pl.col("matrix").cast(pl.String).str.split("/").list.first()
    source = pl.when(pl.col("source") == "recorded").then(recorded).otherwise(pl.col("source"))
    return _shaped(errors).with_columns(source=source).join(sent, on=JOINED)


def _shaped(rows: pl.DataFrame) -> pl.DataFrame:
    ratio = pl.max_horizontal("rows", "cols") / pl.min_horizontal("rows", "cols")
    return rows.with_columns(layouts.across(), aspect=ratio.round(6))


def _sources(rows: pl.DataFrame) -> list[str]:
    return sorted(rows["source"].unique(), key=lambda source: (source.startswith("recorded"), source))


def _of(rows: pl.DataFrame, panel: Panel) -> pl.DataFrame:
    return rows.filter(pl.col("aspect") == panel.aspect, source=panel.source, across=panel.across)


def _paths(axes: Axes, rows: pl.DataFrame, shown: pl.DataFrame) -> None:
    sizes = _marker_sizes(shown)
    for layout in layouts.present(rows["layout"]):
        own = rows.filter(layout=layout)
        found = summaries.quartiles(own, ["tp"], "relative")
        sent = found.join(own.group_by("tp").agg(pl.col("sent").first()), on="tp").sort("tp")
        look = layouts.look(layout, filled=0.35)
        colour = look["color"]
        axes.plot(sent["sent"], sent["median"], color=colour, linewidth=0.7, label=layout, zorder=2)
        for row in sent.iter_rows(named=True):
            axes.vlines(row["sent"], row["low"], row["high"], color=colour, linewidth=0.7)
            point = look | {"markersize": sizes[row["tp"]], "linestyle": ""}
            axes.plot([row["sent"]], [row["median"]], label=f"{layout} {row['tp']}", clip_on=False, **point)


def _marker_sizes(rows: pl.DataFrame) -> dict[int, float]:
    sizes = sorted(rows["tp"].unique())
    low, high = SIZES
    step = (high - low) / max(1, len(sizes) - 1)
    return {tp: low + step * place for place, tp in enumerate(sizes)}


def _scales(grid: Any, rows: pl.DataFrame) -> None:
    """Make both axes logarithmic, with room left of what sends nothing."""
    zeros.logarithmic(grid.flat, "x", rows["sent"], base=2, most=6)
    zeros.logarithmic(grid.flat, "y", rows["relative"], base=10)
    grid[0, 0].set_xlim(left=grid[0, 0].get_xlim()[0] / 2**0.3)


def _sizes(rows: pl.DataFrame) -> dict[str, Line2D]:
    look: style.Look = {"marker": "o", "color": style.GREY, "linestyle": ""}
    return {f"tp {tp}": Line2D([], [], markersize=size, **look) for tp, size in _marker_sizes(rows).items()}
