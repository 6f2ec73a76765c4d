"""Logarithmic axes with a place for zero: at the lower end, where the tick says so."""

import math
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from muon_lab.figures import style

#: Powers between the smallest number and the place of zero.
GAPS = {2: 2, 10: 1}

#: Room beyond the largest number, in powers.
ROOM = {2: 0.6, 10: 0.2}


def logarithmic(panels: Iterable[Axes], which: style.Which, values: Iterable[float], base: int, most: int = 7) -> None:
    """Scale an axis of all panels alike to show values, and move what is drawn at zero to the place of zero.

    Parameters
    ----------
    panels : iterable of matplotlib.axes.Axes
        In which lines, and bars of quartiles, are drawn.
    which : {"x", "y"}
        The axis.
    values : iterable of float
        What has to be seen; negative ones cannot be.
    base : {2, 10}
        Ticks are at its powers.
    most : int
        Ticks besides that of zero.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> axes = Figure().subplots()
    >>> (line,) = axes.plot([1, 2, 3], [0, 0.5, 4])
    >>> logarithmic([axes], "y", [0.0, 0.5, 4.0], base=2)
    >>> [float(height) for height in line.get_ydata()]
    [0.125, 0.5, 4.0]
    >>> [tick.get_text() for tick in axes.get_yticklabels()]
    ['0', '1/2', '1', '2', '4']
    """
    values = list(values)
    above = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log(min(above), base) + 1e-9), math.floor(math.log(max(above), base) + 1e-9)
    stride = math.ceil((last - first + 1) / most)
    powers = (power for power in range(first, last + 1) if power % stride == 0)
    names = {float(base) ** power: _name(power, base) for power in powers}
    low, high = float(base) ** first / base ** (ROOM[base] / 2), max(above) * base ** ROOM[base]
    if min(values, default=1.0) <= 0:
        low = float(base) ** (first - max(GAPS[base], stride))
        names[low] = "0"
    for axes in panels:
        _move(axes, which, low)
        (style.log2 if base == 2 else _decimal)(axes, which, names)
        style.ticks(axes, which, names, names.__getitem__)
        (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)


def _decimal(axes: Axes, which: style.Which, places: Iterable[float]) -> None:
    style.log10(axes, which, min(places), max(2 * min(places), *places))


def _name(power: int, base: int) -> str:
    """Write a power.

    Examples
    --------
    >>> _name(-2, 2), _name(3, 2), _name(3, 10)
    ('1/4', '8', '$10^{3}$')
    """
    if base == 10:
        return style.power_of_ten(10.0**power)
    return f"{2**power}" if power >= 0 else f"1/{2**-power}"


def _move(axes: Axes, which: style.Which, place: float) -> None:
    """Move what is drawn at zero to its place: points of lines, and ends of bars."""
    for line in axes.lines:
        given = np.asarray(line.get_xdata() if which == "x" else line.get_ydata(), float)
        moved = np.where(given == 0, place, given)
        (line.set_xdata if which == "x" else line.set_ydata)(moved)
    for bars in axes.collections:
        if isinstance(bars, LineCollection):
            segments = [np.array(bar, float) for bar in bars.get_segments()]
            for bar in segments:
                own = bar[:, 0 if which == "x" else 1]
                own[own == 0] = place
            bars.set_segments(segments)
