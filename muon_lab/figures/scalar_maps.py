"""What a schedule does to one singular value, and how far the worst one above a lower end is from 1 after k steps."""

import math
from collections.abc import Mapping
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from muon_lab.figures import frames, labels, style, summaries

#: Smallest error that the right panel shows: below it a curve leaves through the floor.
FLOOR = 1e-4

#: The right panel reaches at least to here: an iteration that flips signs is 2 away from 1.
CEILING = 4.0

#: The left panel's number of steps, unless it is said for a method.
STEPS = 5


@style.house()
def schedules(table: pl.DataFrame, steps: Mapping[str, int] | None = None, lower: float = 1e-3) -> Figure:
    """Draw the scalar map of every schedule, and its worst error on [lower, 1] against the number of steps.

    A map is drawn by its images, one dot a sigma, as it may turn several times between two of them, inside the band
    from its smallest to its largest value on [sigma, 1].

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `schedules`.
    steps : mapping from method to int, optional
        How many steps the maps take (5 where nothing is said; the nearest number in the table). The right panel has a
        ring there.
    lower : float
        The lower end of the right panel; the nearest sigma in the table, by ratio.
    """
    metrics = ("image", "worst", "low", "high")
    rows, note = summaries.shown(table, ("method", "steps", "sigma"), metrics)
    chosen = _chosen(rows, steps or {})
    across = math.ceil(math.sqrt(len(chosen)))
    down = math.ceil(len(chosen) / across)
    figure = Figure(figsize=(style.DOUBLE, 3.0))
    halves = figure.add_gridspec(1, 2, width_ratios=(1.25, 1))
    grid = halves[0].subgridspec(down, across).subplots(sharex=True, sharey=True, squeeze=False)
    for method, axes in zip(chosen, grid.flatten(), strict=False):
        _map(axes, rows.filter(method=method, steps=chosen[method]).sort("sigma"), method, chosen[method])
    _frame(grid, len(chosen), float(rows["sigma"].min()))  # type: ignore[arg-type]
    _worst(figure.add_subplot(halves[1]), rows, chosen, _nearest(rows, lower))
    labels.note(figure, note)
    return figure


def _chosen(rows: pl.DataFrame, steps: Mapping[str, int]) -> dict[str, int]:
    """Return every method's number of steps in the left panel."""
    chosen = {}
    for method in style.in_order(rows["method"]):
        counts = sorted(rows.filter(method=method)["steps"].unique())
        chosen[method] = min(counts, key=lambda count: abs(count - steps.get(method, STEPS)))
    return chosen


def _nearest(rows: pl.DataFrame, lower: float) -> float:
    sigmas = sorted(rows["sigma"].unique())
    return min(sigmas, key=lambda sigma: max(sigma / lower, lower / sigma))


def _map(axes: Axes, curve: pl.DataFrame, method: str, count: int) -> None:
    colour = style.colour(method)
    axes.axhline(1.0, color=style.GREY, linewidth=0.6, zorder=1)
    axes.fill_between(curve["sigma"], curve["low"], curve["high"], color=style.tint(colour, 0.25), linewidth=0)
    look: style.Look = {"color": colour, "linestyle": "", "marker": ".", "markersize": 2.0}
    axes.plot(curve["sigma"], curve["image"], label=f"{method} {count}", **look)
    axes.set_title(f"{method}, {count}", color=colour, pad=2.0)


def _frame(grid: Any, count: int, lowest: float) -> None:
    for axes in grid.flatten()[count:]:
        axes.set_visible(False)
    frames.name_outside(grid, r"$\sigma$", r"$p(\sigma)$")
    style.log10(grid[0, 0], "x", lowest / 1.25, 1.25, most=2)
    style.ticks(grid[0, 0], "y", (0.0, 0.5, 1.0))
    grid[0, 0].set_ylim(-0.05, 1.4)


def _worst(axes: Axes, rows: pl.DataFrame, chosen: Mapping[str, int], lower: float) -> None:
    ends = []
    for method, count in chosen.items():
        curve = rows.filter(method=method, sigma=lower).sort("steps")
        look: style.Look = {"color": style.colour(method), "linestyle": style.dashes(method)}
        axes.plot(curve["steps"], curve["worst"], label=method, marker=".", markersize=3, **look)
        at = curve.filter(steps=count)
        axes.plot(at["steps"], at["worst"], color=look["color"], marker="o", markerfacecolor="white", linestyle="")
        ends.append(labels.End(curve["steps"][-1], curve["worst"][-1], method, style.colour(method)))
    counts = sorted(rows["steps"].unique())
    style.log10(axes, "y", FLOOR, max(CEILING, 1.5 * float(rows["worst"].max())))  # type: ignore[arg-type]
    style.ticks(axes, "x", counts)
    axes.set_xlim(counts[0] - 0.3, counts[-1] + 0.3)
    axes.set_xlabel("steps")
    axes.set_ylabel(rf"largest $|1-p|$ on $[${_plain(lower)}$,\,1]$")
    labels.name_ends(axes, ends)


def _plain(value: float) -> str:
    mantissa, _, power = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(power)}" if power else mantissa
