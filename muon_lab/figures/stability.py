"""What low-precision number formats do to the parts of Muon: one band of panels for each part that is in the table."""

import math
from collections.abc import Mapping, Sequence

import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import cases, failures, kinds, labels, style
from muon_lab.figures.effects import BANDS, PAGE, Part

AXES = ("what", "spectrum", "format", "scale_mode", "method", "steps", "beta", "rounding", "operands")

#: Columns of a legend.
ACROSS = 7

Entries = Mapping[str, Line2D]


@style.house()
def stability(table: pl.DataFrame) -> Figure:
    """Draw what number formats do: a band of panels for every value of `what`, failed products in a strip of their own.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `stability`.
    """
    parts = split(table)
    page = [row for row in ([what for what in row if what in parts] for row in PAGE) if row]
    legends = _legends(page, parts)
    heights = [max(BANDS[what].height(parts[what]) for what in row) for row in page]
    width, across = (style.SINGLE, 3) if set(parts) == {"polar"} else (style.DOUBLE, ACROSS)
    lines = [math.ceil(len(entries) / across) for entries in legends]
    heights = [height + count * labels.LINE for height, count in zip(heights, lines, strict=True)]
    figure = Figure(figsize=(width, sum(heights)))
    bands = figure.subfigures(len(page), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, band, entries, count in zip(page, bands, legends, lines, strict=True):
        cells = band.subfigures(1, len(row), squeeze=False, width_ratios=[BANDS[what].width for what in row])[0]
        for what, cell in zip(row, cells, strict=True):
            BANDS[what].draw(cell, parts[what])
        if entries:
            columns = math.ceil(len(entries) / count)
            band.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=columns)
    left = len(table) - sum(len(part.all) for part in parts.values())
    labels.note(figure, f"{left} of {len(table)} cases not shown" if left else "")
    return figure


def split(table: pl.DataFrame) -> dict[str, Part]:
    """Return what can be drawn of every effect; raises ``ValueError`` if that is nothing, or columns are missing."""
    metrics = sorted({metric for band in BANDS.values() for metric in band.metrics})
    table = failures.plain(table, AXES, metrics)
    parts = {}
    for what, band in BANDS.items():
        well, failed = failures.split(table.filter(what=what), band.metrics)
        part = Part(well, failed if what == "products" else failed.clear())
        if len(part.all):
            parts[what] = part
    if not parts:
        raise ValueError(f"none of the {len(table)} rows of the table ended ok with {' or '.join(metrics)} measured")
    return parts


def _legends(page: Sequence[Sequence[str]], parts: Mapping[str, Part]) -> list[Entries]:
    """Return the legend of every row of the page: methods above products, formats above the first row that uses them.

    Rows of formats name them themselves: alone on a page they need no colours.
    """
    stored = pl.concat([part.all.select("format", "scale_mode") for part in parts.values()])
    legends: list[Entries] = []
    said = False
    for row in page:
        if row == ["products"]:
            curves = cases.curves(parts["products"].all)
            named = {f"{one.method}, {one.steps}": cases.shade(one, curves) for one in curves}
            lines = {name: Line2D([], [], color=colour, linewidth=2.5) for name, colour in named.items()}
            legends.append(lines | failures.entries(parts["products"].failed))
        else:
            legends.append({} if said or set(parts) <= {"products", "gradient", "training"} else kinds.entries(stored))
            said = True
    return legends
