"""Named rows with a dot and an interval each: for what has no order to draw a curve over."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from muon_lab.figures.style import Look


class Rung(NamedTuple):
    """One row: its name, where its dot and the ends of its interval are, and how the dot looks."""

    name: str
    low: float
    middle: float
    high: float
    colour: str
    marker: str


def ladder(axes: Axes, rungs: Sequence[Rung]) -> None:
    """Draw rows from top to bottom, with their names as the ticks of the vertical axis."""
    heights = range(len(rungs))
    for height, rung in zip(heights, rungs, strict=True):
        axes.hlines(height, rung.low, rung.high, color=rung.colour, linewidth=1.2)
        look: Look = {"color": rung.colour, "marker": rung.marker, "markerfacecolor": "white", "linestyle": ""}
        axes.plot([rung.middle], [height], label=rung.name, **look)
    axes.set_yticks(list(heights), [rung.name for rung in rungs])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rungs) - 0.5, -0.5)
