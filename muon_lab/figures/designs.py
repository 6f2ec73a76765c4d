"""Which schedule is best with low-precision operands: a row a schedule, a panel a spectrum and a number of steps."""

import math

import polars as pl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import cases, failures, frames, labels, rows, style

AXES = ("spectrum", "format", "fine", "method", "steps")

METRIC = "direction"

#: Inches of a row, and of what stands around the rows of a panel.
ROW, FRAME = 0.135, 0.3


@style.house()
def designs(table: pl.DataFrame) -> Figure:
    """Draw the error of the direction: medians over matrices with quartiles, failures in a strip of their own.

    Filled dots have low-precision operands in every step, hollow ones bfloat16 in the last. Schedules stand in the
    order of the house, designs behind the published ones.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `designs`.
    """
    table = failures.plain(table, AXES, (METRIC,))
    well, failed = failures.split(table, (METRIC,))
    everything = pl.concat([well, failed])
    if everything.is_empty():
        raise ValueError(f"none of the {len(table)} rows of the table ended ok with {METRIC} measured")
    spectra, counts = cases.spectra(everything), sorted(everything["steps"].unique())
    names = {count: _methods(everything.filter(steps=count)) for count in counts}
    heights = [FRAME + ROW * len(names[count]) for count in counts]
    figure = Figure(figsize=(style.DOUBLE if len(spectra) > 1 else style.SINGLE + 1, 0.6 + sum(heights)))
    grid = figure.subplots(
        len(counts), len(spectra), sharex=True, sharey="row", squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    panels = list(grid.flatten())
    style.log10(panels[0], "x", *rows.limits(well[METRIC]), most=4)
    end = failures.strip(panels) if len(failed) else math.inf
    for line, count in zip(grid, counts, strict=True):
        for axes, spectrum in zip(line, spectra, strict=True):
            for height, method in enumerate(names[count]):
                chosen = {"spectrum": spectrum, "steps": count, "method": method}
                colour = style.colour(method)
                for fine in sorted(everything["fine"].unique()):
                    own, bad = (part.filter(**chosen, fine=fine) for part in (well, failed))
                    place = height + (0.0 if not fine else 0.25)
                    face = colour if not fine else "white"
                    look = {"color": colour, "marker": "o", "markersize": 2.8, "markerfacecolor": face}
                    rows.dot(axes, own[METRIC], place, look, f"{method} {count} {fine}")
                    failures.draw(axes, end, place, bad, colour, f"{method} {count} {fine}")
            rows.name(axes, names[count])
            axes.set_title(f"{spectrum}, {count} steps")
    frames.name_outside(grid, "error of the direction")
    labels.legend(figure, _entries(everything, failed), columns=4)
    left = len(table) - len(everything)
    labels.note(figure, f"{left} of {len(table)} cases not shown" if left else "")
    return figure


def _methods(table: pl.DataFrame) -> list[str]:
    """Return the schedules: those of the house, further published ones, then designs."""
    found = style.in_order(table["method"])
    return sorted(found, key=lambda name: (name.startswith(("minimax", "mxfp8")), found.index(name)))


def _entries(table: pl.DataFrame, failed: pl.DataFrame) -> dict[str, Line2D]:
    grey: style.Look = {"color": style.GREY, "linestyle": "", "marker": "o", "markersize": 3.5}
    entries = {f"{name} operands": Line2D([], [], **grey) for name in table["format"].unique().sort()}
    for fine in table["fine"].unique().sort():
        if fine:
            entries[f"last {fine} steps in bf16"] = Line2D([], [], **grey | {"markerfacecolor": "white"})
    return entries | failures.entries(failed)
