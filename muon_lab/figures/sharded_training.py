"""What a tensor-parallel layout does to training: along a run, at its end, and to the rule itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import labels, layouts, style, summaries, zeros

#: Columns of the loss after so many per cent of the steps.
CURVE = {percent: f"loss_{percent}" for percent in range(0, 100, 10)} | {100: "loss"}

#: How far a marker is filled, and the line, by the step size of blocks.
STEP_SIZES: dict[str | None, tuple[float, style.Dashes]] = {
    None: (1.0, "-"),
    "plain": (1.0, "-"),
    "corrected": (0.0, (0, (4, 1.5))),
}

#: What a run is told apart by, besides layout, tp and step size.
SETTING = ("problem", "optimizer", "method", "steps", "lr", "updates")

#: The order of the columns of one problem.
OPTIMIZERS = ("muon", "mop", "soap", "rekls")

#: What says that a rule is that of one rank.
RING: style.Look = {"marker": "o", "markersize": 7.0, "markerfacecolor": "none", "markeredgewidth": 0.7}

#: Room that the curves of one tp share, in octaves.
DODGE = 0.3


class Kind(NamedTuple):
    """One curve."""

    layout: str
    step_size: str | None
    period: int | None


@style.house()
def sharded_training(table: pl.DataFrame) -> Figure:
    """Draw losses less those of one rank, along the run and at its end, and the deviation of the rule; by problem.

    Along the run layouts are compared with `duplicated`, at the largest tp and from the same start: that row is left
    out where the table has none. Medians over seeds with quartiles.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `sharded_training`.
    """
    axes_needed = ("layout", "tp", "step_size", "period", "seed", *SETTING)
    shown, note = summaries.shown(table, axes_needed, (*CURVE.values(), "loss_gap", "deviation", "rounding"))
    settings = _settings(shown)
    ranks, curves = int(max(shown["tp"])), _along(shown)
    down = 3 if len(curves) else 2
    figure = Figure(figsize=(max(style.SINGLE, 1.75 * len(settings)), 0.7 + 1.45 * down))
    grid = figure.subplots(down, len(settings), squeeze=False)
    for column, setting in zip(grid.T, settings, strict=True):
        own = _of(shown, setting)
        column[0].set_title(_title(setting, settings))
        if len(curves):
            _gaps(column[0], _of(curves, setting), f"tp {ranks}")
        _ends(column[-2], own, "loss_gap")
        _ends(column[-1], own, "deviation")
        for axes in column[-2:]:
            _ranks(axes, shown)
    zeros.logarithmic(grid[-1], "y", shown["deviation"], base=10, most=4)
    for axes in grid[-1, 1:]:
        axes.tick_params(axis="y", labelleft=False)
    grid[-2, 0].set_ylabel("loss less that\nof one rank, at the end")
    grid[-1, 0].set_ylabel("distance of four steps\nto those of one rank")
    if len(curves):
        for axes in grid[0]:
            axes.set_xlabel("of the steps")
        grid[0, 0].set_ylabel(f"loss less that\nof one rank, tp {ranks}")
    for axes in grid[-1]:
        axes.set_xlabel("tensor-parallel ranks")
    labels.legend(figure, _entries(shown), columns=5)
    labels.note(figure, note)
    return figure


# --- settings ---------------------------------------------------------------------------------------------------------


def _settings(shown: pl.DataFrame) -> list[tuple[Any, ...]]:
    """Return problems, optimizers and whatever else sets runs apart, learned problems first."""
    order = style.in_order(shown["optimizer"], OPTIMIZERS)

    def place(one: tuple[Any, ...]) -> tuple[Any, ...]:
        return not one[0].startswith("gpt"), one[0], order.index(one[1]), *(str(value) for value in one[2:])

    return sorted(shown.select(SETTING).unique().rows(), key=place)


def _of(shown: pl.DataFrame, setting: Sequence[Any]) -> pl.DataFrame:
    for name, value in zip(SETTING, setting, strict=True):
        shown = shown.filter(pl.col(name).eq_missing(pl.lit(value)))
    return shown


def _title(setting: Sequence[Any], settings: Sequence[Sequence[Any]]) -> str:
    """Name a column: problem, optimizer, and what there are several of.

    Examples
    --------
    >>> one = ("gpt_small", "muon", "quintic", 5, 0.01, 60)
    >>> _title(one, [one, ("quadratic", *one[1:])]), _title(one, [one, (*one[:4], 0.02, 60)])
    ('gpt small\\nmuon', 'gpt small\\nmuon, lr 0.01')
    """
    alike = [other for other in settings if other[:2] == setting[:2]]
    several = [
        f"{name} {value}"
        for name, value, *others in zip(SETTING[2:], setting[2:], *(other[2:] for other in alike), strict=True)
        if len(set(others)) > 1
    ]
    return f"{setting[0].replace('_', ' ')}\n{', '.join((setting[1], *several))}"


def _kinds(rows: pl.DataFrame) -> list[Kind]:
    found = (Kind(*one) for one in rows.select("layout", "step_size", "period").unique().rows())
    order = layouts.present(rows["layout"])
    return sorted(found, key=lambda kind: (order.index(kind.layout), kind.step_size != "plain", kind.period or 0))


def _kind(rows: pl.DataFrame, kind: Kind) -> pl.DataFrame:
    for name, value in kind._asdict().items():
        rows = rows.filter(pl.col(name).eq_missing(pl.lit(value)))
    return rows


def _look(kind: Kind) -> style.Look:
    filled, dashes = STEP_SIZES.get(kind.step_size, (0.45, (0, (1, 1.2))))
    return layouts.look(kind.layout, filled) | {"linestyle": dashes, "linewidth": 0.9}


def _name(kind: Kind) -> str:
    """Name a curve.

    Examples
    --------
    >>> _name(Kind("periodic", "plain", 5)), _name(Kind("gram", None, None))
    ('periodic plain 5', 'gram')
    """
    return " ".join(str(value) for value in kind if value is not None)


# --- along the run ----------------------------------------------------------------------------------------------------


def _along(shown: pl.DataFrame) -> pl.DataFrame:
    """Return losses along runs at the largest tp less those of duplicated; nothing where that is missing."""
    percent = pl.col("percent").replace_strict({name: key for key, name in CURVE.items()}, return_dtype=pl.Int64)
    long = shown.filter(tp=shown["tp"].max()).unpivot(
        list(CURVE.values()),
        index=[*SETTING, "seed", "layout", "tp", "step_size", "period"],
        variable_name="percent",
        value_name="value",
    )
    long = long.with_columns(percent)
    by = [*SETTING, "seed", "percent"]
    whole = long.filter(layout="duplicated").select(*by, whole="value")
    return long.join(whole, on=by, nulls_equal=True).with_columns(gap=pl.col("value") - pl.col("whole"))


def _gaps(axes: Axes, rows: pl.DataFrame, tp: str) -> None:
    axes.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=1)
    for kind in _kinds(rows):
        found = summaries.quartiles(_kind(rows, kind), ["percent"], "gap")
        axes.plot(found["percent"], found["median"], label=f"{_name(kind)}, {tp}", **_look(kind) | {"markersize": 2.4})
    style.ticks(axes, "x", [0, 50, 100], "{:g} %".format)
    axes.locator_params(axis="y", nbins=4)


# --- against the number of ranks --------------------------------------------------------------------------------------


def _ends(axes: Axes, rows: pl.DataFrame, metric: str) -> None:
    """Draw a metric against tp, layouts side by side; of deviations also which rules are those of one rank."""
    kinds = _kinds(rows)
    shifts = np.linspace(-DODGE / 2, DODGE / 2, len(kinds)) if len(kinds) > 1 else [0.0]
    if metric == "loss_gap":
        axes.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=1)
        axes.locator_params(axis="y", nbins=4)
    for kind, shift in zip(kinds, shifts, strict=True):
        own, look = _kind(rows, kind), _look(kind)
        found = summaries.quartiles(own, ["tp"], metric)
        x = found["tp"].to_numpy() * 2.0**shift
        axes.vlines(x, found["low"], found["high"], color=look["color"], linewidth=0.8)
        axes.plot(x, found["median"], label=_name(kind), clip_on=False, **look)
        if metric == "deviation":
            always = own.group_by("tp").agg(pl.col("tp_invariant").min()).sort("tp")["tp_invariant"].to_numpy() == 1
            if always.any():  # no artist without data: outside of its axes it would have no extent
                ring = RING | {"color": look["color"], "linestyle": "", "clip_on": False}
                heights = found["median"].to_numpy()[always]
                axes.plot(x[always], heights, label=f"{_name(kind)}, independent of tp", **ring)


def _ranks(axes: Axes, shown: pl.DataFrame) -> None:
    sizes = sorted(shown["tp"].unique())
    style.log2(axes, "x", sizes)
    axes.set_xlim(sizes[0] / 2**0.35, sizes[-1] * 2**0.35)


def _entries(shown: pl.DataFrame) -> dict[str, Line2D]:
    found = layouts.entries(shown["layout"])
    grey: style.Look = {"color": style.GREY, "marker": "o", "markersize": 3.6, "linewidth": 0.9}
    if (shown["step_size"] == "corrected").any():
        for size, text in {"plain": "blocks, plain step", "corrected": "blocks, corrected step"}.items():
            filled, dashes = STEP_SIZES[size]
            found[text] = Line2D([], [], linestyle=dashes, markerfacecolor=style.tint(style.GREY, filled), **grey)
    found["independent of tp"] = Line2D([], [], linestyle="", color=style.GREY, **RING)
    return found
