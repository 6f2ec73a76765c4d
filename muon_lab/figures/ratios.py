"""How long an orthogonalization takes, as a ratio to the named reference of the same run."""

import math
from collections.abc import Iterable

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muon_lab.figures import frames, labels, style, summaries
from muon_lab.figures.ladder import Rung, ladder

#: Panels beside each other.
ACROSS = 3

#: What tells two candidates apart where the table has several values of it, and how a value reads.
WORDS = {"steps": "{} steps", "dtype": "{}", "threads": "{} threads", "repeats": "{} rounds"}


@style.house()
def speed(table: pl.DataFrame) -> Figure:
    """Draw the ratio of every implementation and method, with its quartiles, one panel a shape.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `speed`.
    """
    metrics = ("ratio", "ratio_low", "ratio_high")
    rows, note = summaries.shown(table, ("shape", "threads", "dtype", "method", "steps", "peer", "repeats"), metrics)
    words = [name for name in WORDS if summaries.several(rows, name)]
    shapes = sorted(rows["shape"].unique(), key=size)
    candidates = _candidates(rows, words)
    across, down = min(ACROSS, len(shapes)), math.ceil(len(shapes) / ACROSS)
    width = style.SINGLE + (style.DOUBLE - style.SINGLE) * (across - 1) / (ACROSS - 1)
    figure = Figure(figsize=(width, 0.5 + down * (0.45 + 0.18 * len(candidates))))
    grid = figure.subplots(down, across, sharey=True, sharex=True, squeeze=False)
    for axes, shape in zip(grid.flatten(), shapes, strict=False):
        _panel(axes, rows.filter(shape=shape), candidates, words)
        axes.set_title(shape.replace("x", " × "))
    for axes in grid.flatten()[len(shapes) :]:
        axes.set_visible(False)
    frames.name_outside(grid, "time / reference")
    _finish(grid[0, 0], [bound for metric in metrics for bound in rows[metric]])
    labels.note(figure, note)
    return figure


def emulation(table: pl.DataFrame) -> Figure:
    """Draw the ratio of every emulated operation and format to its float32 counterpart, one panel a size.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `emulation`.
    """
    side = pl.col("size").cast(pl.String)
    return speed(
        table.with_columns(
            shape=side + "x" + side, method=pl.col("operation"), dtype=pl.col("format"), steps=pl.lit(None, pl.Int64)
        )
    )


@style.house()
def step_cost(table: pl.DataFrame) -> Figure:
    """Draw the ratio of every optimizer's step, with its quartiles, one panel a model and number of threads.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `step_cost`.
    """
    metrics = ("ratio", "ratio_low", "ratio_high")
    rows, note = summaries.shown(table, ("model", "layers", "threads", "optimizer", "repeats"), metrics)
    models = rows.select("model", "layers", "threads").unique(maintain_order=True).rows()
    optimizers = list(dict.fromkeys(rows["optimizer"]))
    width = style.SINGLE if len(models) == 1 else style.DOUBLE
    figure = Figure(figsize=(width, 0.95 + 0.18 * len(optimizers)))
    grid = figure.subplots(1, len(models), sharey=True, sharex=True, squeeze=False)
    for axes, (model, layers, threads) in zip(grid[0], models, strict=True):
        own = rows.filter(model=model, layers=layers, threads=threads)
        rungs = []
        for name in optimizers:
            low, middle, high = (
                _only(own.filter(optimizer=name)[metric]) for metric in ("ratio_low", "ratio", "ratio_high")
            )
            rungs.append(Rung(name, low, middle, high, "#0072b2" if "." not in name else style.GREY, "s"))
        axes.axvline(1.0, color=style.GREY, linewidth=0.8, zorder=1)
        ladder(axes, rungs)
        axes.set_title(f"{model}, {layers} layers, {threads} thread{'s' * (threads > 1)}")
    frames.name_outside(grid, "time of a step / plain float32 loop")
    _finish(grid[0, 0], [bound for metric in metrics for bound in rows[metric]])
    labels.note(figure, note)
    return figure


def size(shape: str) -> tuple[int, str]:
    """Return what shapes are sorted by: the number of entries.

    Examples
    --------
    >>> sorted(["512x64", "64x64"], key=size)
    ['64x64', '512x64']
    """
    return math.prod(int(side) for side in shape.split("x")), shape


def _candidates(rows: pl.DataFrame, words: Iterable[str]) -> list[tuple[object, ...]]:
    """Return what is compared, method by method, the lab before its peers."""
    methods = style.in_order(rows["method"])
    found = set(rows.select("peer", "method", *words).iter_rows())
    return sorted(found, key=lambda one: (methods.index(one[1]), one[0] != "lab", [str(part) for part in one]))


def _panel(axes: Axes, rows: pl.DataFrame, candidates: list[tuple[object, ...]], words: list[str]) -> None:
    rungs = []
    for peer, method, *values in candidates:
        said = [WORDS[name].format(value) for name, value in zip(words, values, strict=True) if value is not None]
        keys = dict(zip(words, values, strict=True))
        same = [pl.col(name).eq_missing(value) for name, value in keys.items()]
        own = rows.filter(pl.col("peer") == peer, pl.col("method") == method, *same)
        name = ", ".join([f"{method}, {peer}", *said])
        low, middle, high = (_only(own[metric]) for metric in ("ratio_low", "ratio", "ratio_high"))
        shape = style.marker(own["dtype"][0] if len(own) else "")
        rungs.append(Rung(name, low, middle, high, style.colour(str(method)), shape))
    axes.axvline(1.0, color=style.GREY, linewidth=0.8, zorder=1)
    ladder(axes, rungs)


def _only(values: pl.Series) -> float:
    """Return the one value of a cell, or nothing to draw."""
    return float(values.median()) if len(values) else math.nan  # type: ignore[arg-type]


def _finish(axes: Axes, ratios: Iterable[float]) -> None:
    """Put ticks at powers of two, and between them too where there are few; a ratio of 1 is always in sight."""
    low, high = min(1.0, *ratios) / 1.15, max(1.0, *ratios) * 1.15
    octaves = math.ceil(math.log2(high / low))
    powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1, math.ceil(octaves / 6))
    between = (1.0, 1.5) if octaves <= 3 else (1.0,)
    values = [part * 2.0**power for power in powers for part in between]
    style.log2(axes, "x", [value for value in values if low <= value <= high])
    axes.set_xlim(low, high)
