"""Factors of Muon's direction: the loss at the end against the learning rate, and against the size of the update."""

from collections.abc import Mapping

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import labels, style

#: One colour and marker a factor, in the order of the legend.
SCALES: Mapping[str, tuple[str, str]] = {
    "none": ("#000000", "o"),
    "shape_scaling": ("#d55e00", "s"),
    "unit_rms_norm": ("#009e73", "^"),
    "spectral": ("#56b4e9", "D"),
    "match_rms_adamw": ("#0072b2", "v"),
    "nuclear_norm": ("#cc79a7", "P"),
}

#: What the loss is drawn against, and what that is called.
AGAINST: Mapping[str, str] = {"lr": "learning rate", "update_rms": "RMS of the change of a weight"}


def scale_modes(rows: pl.DataFrame, note: str = "") -> Figure:
    """Draw the losses of Muon under each factor twice; medians over seeds, lines from the lowest to the highest.

    Parameters
    ----------
    rows : polars.DataFrame
        Rows of the study `convergence` under Muon, on one problem, that ended well.
    note : str
        What is not shown.
    """
    figure = Figure(figsize=(style.DOUBLE, 2.4))
    panels = figure.subplots(1, len(AGAINST), sharey=True)
    for axes, (metric, name) in zip(panels, AGAINST.items(), strict=True):
        for scale, (colour, marker) in SCALES.items():
            _curve(axes, rows.filter(scale=scale), metric, {"color": colour, "marker": marker}, scale)
        found = rows[metric].to_numpy()
        style.log10(axes, "x", found.min() / 1.5, found.max() * 1.5, most=5)
        axes.set_xlabel(name)
    panels[0].set_ylabel("loss at the end")
    known = style.in_order(rows["scale"], SCALES)
    entries = {name: Line2D([], [], color=SCALES[name][0], marker=SCALES[name][1], markersize=3.0) for name in known}
    labels.legend(figure, {name.replace("_", " "): line for name, line in entries.items()}, columns=6)
    labels.note(figure, note)
    return figure


def _curve(axes: Axes, own: pl.DataFrame, metric: str, look: style.Look, name: str) -> None:
    """Draw the loss of one factor, rate by rate."""
    if own.is_empty():
        return
    loss = pl.col("loss")
    each = own.group_by("lr").agg(
        loss.min().alias("low"), loss.median().alias("middle"), loss.max().alias("high"), pl.col("update_rms").median()
    )
    each = each.sort("lr")
    axes.vlines(each[metric], each["low"], each["high"], color=look["color"], linewidth=0.7)
    axes.plot(each[metric], each["middle"], markersize=2.8, linewidth=1.0, label=name, **look)
