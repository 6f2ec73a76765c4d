"""A number format and how its scales are rounded: in which order they stand, what they are called, how they look."""

from collections.abc import Iterable
from typing import NamedTuple

import polars as pl
from matplotlib.lines import Line2D

from muon_lab.figures import style

#: How scales of blocks are rounded, and how far a marker is filled for it; formats without a choice are filled.
FILLS = {"rceil": 1.0, "floor": 0.0, "ceil": 0.55, "even": 0.3}
_OTHER_FILL = 0.45


class Kind(NamedTuple):
    """One way to store numbers."""

    format: str
    mode: str | None

    @property
    def look(self) -> style.Look:
        """How a marker looks: the colour is the format, the filling the rounding of its scales."""
        colour = style.format_colour(self.format)
        fill = style.tint(colour, 1.0 if self.mode is None else FILLS.get(self.mode, _OTHER_FILL))
        return {"color": colour, "marker": "o", "markerfacecolor": fill, "markeredgewidth": 0.8, "markersize": 3.5}


def present(rows: pl.DataFrame) -> list[Kind]:
    """Return the kinds of a table in the order of the house."""
    formats, modes = style.in_order(rows["format"], style.FORMATS), _modes(rows)
    found = {Kind(*pair) for pair in rows.select("format", "scale_mode").iter_rows()}
    return sorted(found, key=lambda kind: (formats.index(kind.format), modes.index(kind.mode) if kind.mode else -1))


def names(kinds: Iterable[Kind]) -> list[str]:
    """Return what kinds are called: the rounding of the scales is said where there are several.

    Examples
    --------
    >>> names([Kind("bf16", None), Kind("mxfp8_e4m3", "rceil")])
    ['bf16', 'mxfp8_e4m3']
    >>> names([Kind("mxfp8_e4m3", "rceil"), Kind("mxfp8_e4m3", "floor")])
    ['mxfp8_e4m3, rceil', 'mxfp8_e4m3, floor']
    """
    kinds = list(kinds)
    several = len({kind.mode for kind in kinds if kind.mode}) > 1
    return [f"{kind.format}, {kind.mode}" if several and kind.mode else kind.format for kind in kinds]


def of(rows: pl.DataFrame, kind: Kind) -> pl.DataFrame:
    """Return the rows of a kind."""
    return rows.filter(pl.col("scale_mode").eq_missing(pl.lit(kind.mode)), format=kind.format)


def entries(rows: pl.DataFrame) -> dict[str, Line2D]:
    """Return the entries of a legend: a colour a format, and a filling a rounding of scales where there are several."""
    found = {
        name: Line2D([], [], color=style.format_colour(name), linewidth=2.5)
        for name in style.in_order(rows["format"], style.FORMATS)
    }
    modes = _modes(rows)
    for mode in modes if len(modes) > 1 else []:
        look = Kind("", mode).look | {"color": style.GREY}
        look["markerfacecolor"] = style.tint(style.GREY, FILLS.get(mode, _OTHER_FILL))
        found[f"scales by {mode}"] = Line2D([], [], linestyle="", **look)
    return found


def _modes(rows: pl.DataFrame) -> list[str]:
    return style.in_order(rows["scale_mode"].drop_nulls(), FILLS)
