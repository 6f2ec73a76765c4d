"""A plan at a glance: the time of each layer in the layout that it was given, in parts, and in the others."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import labels, style

#: The parts of a layer's time, and their colours.
PARTS = {
    "compute_seconds": ("products", style.METHODS["quintic"]),
    "elementwise_seconds": ("elementwise", style.METHODS["cans"]),
    "exchange_seconds": ("layout", style.METHODS["simple"]),
    "gather_seconds": ("gather of weights", style.METHODS["deepseekv4"]),
}

#: A marker for each layout that could stand instead.
OTHERS = {
    "duplicated": "s",
    "distributed": "D",
    "owner": "o",
    "gram": "P",
    "blockwise": "x",
    "periodic": "+",
    "split": "D",
    "replicated": "s",
    "layerwise": "o",
}


@style.house()
def draw(row: Mapping[str, Any]) -> Figure:
    """Draw a plan, as `Plan.row` returns it: milliseconds of each layer in parts, and the other layouts in units of it.

    Examples
    --------
    >>> layer = {"name": "attn.q", "layout": "local", "seconds": 0.003, "alternatives": []}
    >>> layer |= {"compute_seconds": 0.002, "exchange_seconds": 0.0}
    >>> layer |= {"elementwise_seconds": 0.0, "gather_seconds": 0.001}
    >>> len(draw({"model": "m", "cluster": "c", "grid": {"gpus": 8}, "layers": [layer]}).axes)
    2
    """
    layers, shown = row["layers"], list[float]()
    figure = Figure(figsize=(style.DOUBLE, 1.2 + 0.19 * len(layers)))
    times, ratios = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, layer in enumerate(layers):
        _bar(times, place, layer)
        for other in _priced(layer):
            shown.append(other["seconds"] / layer["seconds"] if layer["seconds"] else 1.0)
            ratios.plot([shown[-1]], [place], linestyle="", **_look(OTHERS[other["layout"]]))
    times.set_yticks(range(len(layers)), [f"{layer['name']}  ({layer['layout']})" for layer in layers])
    times.set_ylim(len(layers) - 0.4, -0.6)
    times.set_xlim(left=0)
    times.set_xlabel("milliseconds a step")
    times.set_title(f"{row['model']} on {row['grid']['gpus']} ranks of {row['cluster']}")
    _binary(ratios, shown)
    ratios.axvline(1.0, color=style.GREY, linewidth=0.8)
    ratios.set_xlabel("time in another layout / time")
    for axes in (times, ratios):
        axes.grid(axis="y", visible=False)
    labels.legend(figure, _entries(layers), columns=6)
    return figure


def _priced(layer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the other layouts of a layer whose time is known."""
    return [other for other in layer["alternatives"] if other["seconds"] is not None]


def _binary(axes: Axes, ratios: Sequence[float], most: int = 6) -> None:
    """Make the axis of ratios binary, with 1 and at most so many other powers of two."""
    low, high = min((1.0, *ratios)) / 1.3, max((1.0, *ratios)) * 1.3
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    stride = math.ceil(len(powers) / most)
    axes.set_xlim(low, high)
    style.log2(axes, "x", [2.0**power for power in powers if power % stride == 0])


def _bar(axes: Axes, place: int, layer: Mapping[str, Any]) -> None:
    start = 0.0
    for part, (_, colour) in PARTS.items():
        axes.barh(place, 1e3 * layer[part], left=start, height=0.62, color=colour)
        start += 1e3 * layer[part]


def _entries(layers: Sequence[Mapping[str, Any]]) -> dict[str, Line2D]:
    """Return the entries of the legend: parts, and the layouts that are shown, those with the same marker together."""
    shown = {other["layout"] for layer in layers for other in _priced(layer)}
    entries = {name: Line2D([], [], color=colour, linewidth=5.0) for name, colour in PARTS.values()}
    marks: dict[str, list[str]] = {}
    for name, marker in OTHERS.items():
        if name in shown:
            marks.setdefault(marker, []).append(name)
    return entries | {
        ", ".join(names): Line2D([], [], linestyle="", **_look(marker)) for marker, names in marks.items()
    }


def _look(marker: str) -> dict[str, Any]:
    return {"marker": marker, "color": style.GREY, "markerfacecolor": "none", "markersize": 3.5, "markeredgewidth": 0.8}
