"""A tensor-parallel layout: in which order they stand, how they look, and where shards do not follow the long axis."""

from collections.abc import Iterable

import polars as pl
from matplotlib.lines import Line2D

from muon_lab.figures import style

#: Colour (Okabe and Ito's) and marker of every layout, those first that give the update of one rank.
LOOKS = {
    "duplicated": ("#000000", "o"),
    "owner": ("#0072b2", "s"),
    "distributed": ("#d55e00", "^"),
    "gram": ("#009e73", "D"),
    "blockwise": ("#cc79a7", "v"),
    "periodic": ("#e69f00", "P"),
    "factors": ("#56b4e9", "X"),
}

#: Layouts that take shards for matrices of their own.
BLOCKS = ("blockwise", "periodic")


def look(layout: str, filled: float = 1.0) -> style.Look:
    """Return how a layout looks: colour and marker, filled or light.

    Examples
    --------
    >>> look("gram")["color"], look("gram", filled=0.0)["markerfacecolor"]
    ('#009e73', '#ffffff')
    >>> look("mine") == look("mine")
    True
    """
    colour, marker = LOOKS.get(layout, (style.colour(layout), "*"))
    face = style.tint(colour, filled)
    return {"color": colour, "marker": marker, "markerfacecolor": face, "markeredgewidth": 0.8, "markersize": 3.6}


def present(names: Iterable[str]) -> list[str]:
    """Return layouts in the order of the house.

    Examples
    --------
    >>> present(["blockwise", "mine", "gram", "gram"])
    ['gram', 'blockwise', 'mine']
    """
    return style.in_order(names, LOOKS)


def entries(names: Iterable[str]) -> dict[str, Line2D]:
    """Return the entries of a legend."""
    return {name: Line2D([], [], linewidth=1.0, **look(name)) for name in present(names)}


def across() -> pl.Expr:
    """Say whether the short axis is the one that is cut: then sums of Gram matrices need another cut first.

    Examples
    --------
    >>> pl.DataFrame({"rows": [8, 8, 8], "cols": [8, 16, 16], "dim": [0, 0, 1]}).select(across())["across"].to_list()
    [False, True, False]
    """
    rows, cols = pl.col("rows"), pl.col("cols")
    cut = pl.when(pl.col("dim") == 0).then(rows).otherwise(cols)
    return (cut < pl.max_horizontal(rows, cols)).alias("across")
