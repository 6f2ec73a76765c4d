"""What low-precision number formats do to the parts of Muon: one band of panels for each part that is in the table."""

import math
from collections.abc import Mapping, Sequence

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import failures, labels, style
from muon_lab.figures.effects import BANDS, PAGE, Entries, Part

AXES = ("what", "spectrum", "shape", "format", "scale_mode", "method", "steps", "beta", "rounding", "start", "operands")

#: Columns of a legend.
ACROSS = 7


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
    """Return the legend of every row of the page; effects that share a row share their legend."""
    together = ({what: parts[what] for what in row} for row in page)
    return [
        BANDS[next(iter(row))].entries(Part(*(pl.concat(some) for some in zip(*row.values(), strict=True))))
        for row in together
    ]
