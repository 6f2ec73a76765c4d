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


def pairs(grid: Any, count: int) -> list[Any]:
    """Return so many pairs of panels, one above the other, of a grid of twice as many rows; hide those behind.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> grid = Figure().subplots(4, 2)
    >>> [pair[1] is below for pair, below in zip(pairs(grid, 3), (grid[1, 0], grid[1, 1], grid[3, 0]))]
    [True, True, True]
    >>> grid[2, 1].get_visible(), grid[3, 1].get_visible()
    (False, False)
    """
    found = [grid[row : row + 2, column] for row in range(0, len(grid), 2) for column in range(grid.shape[1])]
    for axes in (axes for pair in found[count:] for axes in pair):
        axes.set_visible(False)
    return found[:count]


def _visible(panels: Any) -> list[Axes]:
    return [axes for axes in panels if axes.get_visible()]
