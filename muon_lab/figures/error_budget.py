"""Where the error of an orthogonalization in a low-precision format comes from: its parts beside the whole."""

import math
from collections.abc import Mapping, Sequence
from itertools import product

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import cases, failures, frames, kinds, labels, rows, style

AXES = ("what", "spectrum", "format", "scale_mode", "method", "steps")
WHOLE = "relative"

#: The parts, with their names in a legend and their looks.
PARTS: Mapping[str, tuple[str, style.Look]] = {
    "truncation": ("truncation", {"marker": "|", "markersize": 7.0, "markeredgewidth": 1.2}),
    "rounding_error": ("rounding", {"marker": "x", "markersize": 3.2, "markeredgewidth": 0.9}),
    "quantization": ("quantization", {"marker": "D", "markersize": 2.2}),
    "remainder": ("remainder", {"marker": "+", "markersize": 4.0, "markeredgewidth": 0.7}),
}
RING: style.Look = {"marker": "o", "markersize": 5.0, "markerfacecolor": "none", "markeredgewidth": 0.9}

#: Ends of the interval that the lengths of the parts leave to the whole, and its colour.
LEAST, MOST, BAR = "least", "most", "#d9d9d9"

#: Parts below this leave through the floor.
FLOOR = 1e-7

#: Inches of a row of dots, of the lowest panel, of its title, and of the axis and the legend.
ROW, LOW, TITLE, FRAME = 0.14, 0.35, 0.24, 0.75

LABEL = r"$\|\cdot\|\,/\,\|U\|$"


@style.house()
def error_budget(table: pl.DataFrame) -> Figure:
    """Draw the parts of the distance to the polar factor: a row of panels a schedule, a panel a spectrum, medians.

    The parts add as vectors, so their lengths do not add up to the whole: a grey bar behind them shows all lengths
    that vectors so long can add up to. It is short where one part is the error, and long where two might cancel.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `stability`, of which those with `what` = products count.
    """
    own = failures.plain(table, AXES, (WHOLE, *PARTS)).filter(what="products")
    well, failed = failures.split(own, (WHOLE, "truncation"))
    if well.is_empty() and failed.is_empty():
        raise ValueError(f"none of the {len(table)} rows of the table are products that ended ok or failed")
    well, everything = within(well), pl.concat([well, failed])
    spectra, curves, stored = cases.spectra(everything), cases.curves(everything), kinds.present(everything)
    width = style.SINGLE if len(spectra) == 1 else style.DOUBLE
    figure = Figure(figsize=(width, FRAME + len(curves) * (TITLE + max(ROW * len(stored), LOW))))
    grid = figure.subplots(len(curves), len(spectra), sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flatten())
    style.log10(panels[0], "x", *_limits(well), most=4)
    end = failures.strip(panels) if len(failed) else math.inf
    for axes, (curve, spectrum) in zip(panels, product(curves, spectra), strict=True):
        chosen = {"spectrum": spectrum, "method": curve.method, "steps": curve.steps}
        colour = cases.shade(curve, curves)
        _panel(axes, (well.filter(**chosen), failed.filter(**chosen)), stored, colour, end)
        axes.set_title(f"{curve.method}, {curve.steps}", loc="left", color=colour, pad=3.0)
        if curve == curves[0]:
            axes.annotate(spectrum, (0.5, 1.0), (0, 16), "axes fraction", "offset points", ha="center")
    frames.name_outside(grid, LABEL)
    labels.legend(figure, _entries(failed), columns=2 if width == style.SINGLE else 4)
    left = len(own) - len(everything)
    labels.note(figure, f"{left} of {len(own)} cases not shown" if left else "")
    return figure


def within(well: pl.DataFrame) -> pl.DataFrame:
    """Add the least and the greatest length that a sum of vectors can have that are as long as the parts.

    Examples
    --------
    >>> parts = {"truncation": [0.3, 0.3], "rounding_error": 0.0, "quantization": [0.1, None], "remainder": 0.0}
    >>> within(pl.DataFrame(parts)).select(pl.col(LEAST, MOST).round(3)).rows()
    [(0.2, 0.4), (0.3, 0.3)]
    """
    parts = [pl.col(name).fill_null(0.0) for name in PARTS]
    total, longest = pl.sum_horizontal(parts), pl.max_horizontal(parts)
    return well.with_columns((2 * longest - total).clip(0.0).alias(LEAST), total.alias(MOST))


def _limits(well: pl.DataFrame) -> tuple[float, float]:
    return rows.limits(value for name in (WHOLE, MOST, *PARTS) for value in well[name].drop_nulls() if value >= FLOOR)


def _panel(
    axes: Axes, cells: tuple[pl.DataFrame, pl.DataFrame], stored: Sequence[kinds.Kind], colour: str, end: float
) -> None:
    for row, kind in enumerate(stored):
        well, failed = (kinds.of(cell, kind) for cell in cells)
        name = " ".join(filter(None, kind))
        if len(well):
            # a least length of 0 has no place on the axis: the bar leaves through the floor
            low = max(rows.quantile(well[LEAST]), axes.get_xlim()[0] / 2)
            axes.fill_betweenx(
                [row - 0.38, row + 0.38], low, rows.quantile(well[MOST]), color=BAR, linewidth=0, zorder=0.8
            )
        for part, (_, look) in PARTS.items():
            if len(well[part].drop_nulls()):
                axes.plot(
                    [rows.quantile(well[part])], [row], color=colour, label=f"{name} {part}", linestyle="", **look
                )
        if len(well):
            axes.plot([rows.quantile(well[WHOLE])], [row], color=colour, label=f"{name} {WHOLE}", linestyle="", **RING)
        failures.draw(axes, end, float(row), failed, colour, name)
    rows.name(axes, kinds.names(stored))


def _entries(failed: pl.DataFrame) -> dict[str, Line2D]:
    grey: style.Look = {"color": style.GREY, "linestyle": ""}
    entries = {"all of it": Line2D([], [], **grey, **RING)}
    entries |= {name: Line2D([], [], **grey, **look) for name, look in PARTS.values()}
    entries["possible sums"] = Line2D([], [], color=BAR, linewidth=5.0)
    return entries | failures.entries(failed)
