"""Grids of panels that share their axes: names and tick labels at the outside alone, also where a row is unfinished."""

from typing import Any

from matplotlib.axes import Axes


def name_outside(grid: Any, x: str = "", y: str = "") -> None:
    """Name the horizontal axis below the lowest visible panel of every column, the vertical one left of every row."""
    for column in grid.T:
        for axes in _visible(column)[-1:]:
            axes.tick_params(axis="x", labelbottom=True)
            axes.set_xlabel(x)
    for row in grid:
        for axes in _visible(row)[:1]:
            axes.tick_params(axis="y", labelleft=True)
            axes.set_ylabel(y)


def _visible(panels: Any) -> list[Axes]:
    return [axes for axes in panels if axes.get_visible()]
