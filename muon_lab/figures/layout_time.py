"""What layouts take over a link, as measured and as predicted."""

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import frames, labels, layouts, style, summaries

#: What tells one run from another, beside the rate of its links.
RUN = ("shape", "dim", "ranks", "count", "steps")

METRICS = ("time", "time_low", "time_high", "predicted", "predicted_low")

#: Room at the ends of both axes.
ROOM = 1.3


@style.house()
def layout_time(table: pl.DataFrame) -> Figure:
    """Draw measured against predicted seconds, a panel a rate of the links, a marker a layout and run.

    Bars are quartiles over rounds and the interval of the prediction. Light markers took places in another order than
    predicted.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `layout_time`.
    """
    rows, note = summaries.shown(table, ("layout", "megabits", *RUN, "swapped"), METRICS)
    rates = sorted(rows["megabits"].unique())
    figure = Figure(figsize=(style.SINGLE if len(rates) == 1 else style.DOUBLE, 2.9))
    grid = figure.subplots(1, len(rates), sharex=True, sharey=True, squeeze=False)
    ends = [value for metric in METRICS for value in rows[metric]]
    low, high = min(ends) / ROOM, max(ends) * ROOM
    for axes, rate in zip(grid[0], rates, strict=True):
        axes.plot([low, high], [low, high], color=style.GREY, linewidth=0.8, zorder=1)
        _panel(axes, rows.filter(megabits=rate))
        axes.set_title(f"{rate:g} Mbit/s" if rate else "loopback")
        for which in ("x", "y"):
            style.log10(axes, which, low, high)
    frames.name_outside(grid, "predicted seconds", "measured seconds")
    labels.legend(figure, _entries(rows), columns=3 if len(rates) == 1 else 6)
    labels.note(figure, note)
    return figure


def _panel(axes: Axes, rows: pl.DataFrame) -> None:
    for layout in layouts.present(rows["layout"]):
        for swapped in (False, True):
            own = rows.filter((pl.col("swapped").fill_null(0) > 0) == swapped, layout=layout)
            look = layouts.look(layout, filled=0.0 if swapped else 1.0)
            x, y = own["predicted"], own["time"]
            axes.vlines(x, own["time_low"], own["time_high"], color=look["color"], linewidth=0.7)
            axes.hlines(y, own["predicted_low"], x, color=look["color"], linewidth=0.7)
            if len(own):
                axes.plot(x, y, linestyle="", label=f"{layout}, swapped" if swapped else layout, **look)


def _entries(rows: pl.DataFrame) -> dict[str, Line2D]:
    found = {name: Line2D([], [], linestyle="", **layouts.look(name)) for name in layouts.present(rows["layout"])}
    if (rows["swapped"].fill_null(0) > 0).any():
        light = layouts.look("duplicated", filled=0.0) | {"color": style.GREY}
        found["another order than predicted"] = Line2D([], [], linestyle="", **light)
    return found
