"""Words in a figure: names at the ends of curves, kept apart, and the note on what isn't shown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from muon_lab.figures import style

#: Points from baseline to baseline, in font sizes.
LEADING = 1.1

#: Inches from line to line of a legend: the font size of 8 points and half of one.
LINE = 12 / 72

#: Where the names begin, in widths of the axes.
MARGIN = 1.05


class End(NamedTuple):
    """The end of a curve, in data coordinates, and its name."""

    x: float
    y: float
    text: str
    colour: str


def spread(places: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Move places as little as possible (in squares) until neighbours are a gap apart; the order stays.

    With i·gap taken off the i-th place it is an isotonic regression: neighbours out of order share their mean.

    Examples
    --------
    >>> spread([0.5, 0.5, 0.9], gap=0.25)
    [0.375, 0.625, 0.9]
    """
    order = np.argsort(places, kind="stable")
    pools: list[list[float]] = []
    for index, place in enumerate(np.asarray(places, float)[order]):
        pools.append([place - index * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    means = [float(np.mean(pool)) for pool in pools for _ in pool]
    room = max(low, high - (len(means) - 1) * gap)
    moved = [float(np.clip(mean, low, room)) + index * gap for index, mean in enumerate(means)]
    back = np.empty(len(moved))
    back[order] = moved
    return [float(place) for place in back]


def name_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write names right of the axes, at the heights of their curves as far as they do not meet; limits must be set."""
    figure = axes.get_figure(root=True)
    if figure is None or not ends:
        return
    across = axes.transData + axes.transAxes.inverted()
    tips = np.clip(across.transform([(end.x, end.y) for end in ends]), 0.0, 1.0)
    gap = LEADING * rcParams["font.size"] / (72 * axes.get_position().height * figure.get_figheight())
    for end, tip, height in zip(ends, tips, spread(list(tips[:, 1]), gap), strict=True):
        line = {"arrowstyle": "-", "color": end.colour, "linewidth": 0.5, "shrinkA": 0.0, "shrinkB": 2.0}
        axes.annotate(
            end.text,
            xy=(tip[0], tip[1]),
            xycoords="axes fraction",
            xytext=(MARGIN, height),
            textcoords="axes fraction",
            color=end.colour,
            va="center_baseline",
            arrowprops=line if tip[0] > 0.9 and abs(tip[1] - height) > gap / 4 else None,
        )


def legend(figure: Figure, entries: Mapping[str, Line2D], columns: int) -> None:
    """Write a legend above the panels, in so many columns at most and no wider than the figure.

    From its second line on it makes the figure higher instead of the panels low.
    """
    room = 72 * figure.get_figwidth()
    columns = next(
        count for count in range(min(columns, len(entries)), 0, -1) if count == 1 or _fits(entries, count, room)
    )
    lines = math.ceil(len(entries) / columns)
    figure.set_figheight(figure.get_figheight() + LINE * (lines - 1))
    figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=columns)


def _fits(names: Iterable[str], columns: int, room: float) -> bool:
    """Say whether a legend of so many columns, filled one after another, takes no more than so many points."""
    em = rcParams["legend.fontsize"]
    widest = [max(map(_width, column)) for column in np.array_split(list(names), columns)]
    handles = columns * (rcParams["legend.handlelength"] + rcParams["legend.handletextpad"])
    edges = 2 * (rcParams["legend.borderpad"] + rcParams["legend.borderaxespad"])
    gaps = (columns - 1) * rcParams["legend.columnspacing"] + edges
    return bool(sum(widest) + em * (handles + gaps) <= room)


def _width(text: str) -> float:
    """Return the width of a text of a legend in points."""
    font = FontProperties(family=rcParams["font.family"])
    return float(TextPath((0.0, 0.0), text, size=rcParams["legend.fontsize"], prop=font).get_extents().width)


def note(figure: Figure, text: str) -> None:
    """Write a small note below the figure."""
    if text:
        figure.supxlabel(text, x=0.995, ha="right", fontsize=6.5, color=style.GREY)
