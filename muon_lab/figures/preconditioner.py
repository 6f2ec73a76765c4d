"""The first steps of SOAP and REKLS under every remedy: how large updates are, and how far they are determined."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import frames, labels, ratios, style, summaries

#: Panels beside each other.
ACROSS = 4

#: Inches of a pair of panels, and of axis names, titles and the first line of the legend.
HEIGHT, FRAME = 2.9, 0.6

#: What is on the vertical axes, the upper one first, and how it is called.
QUANTITIES: Mapping[str, str] = {
    "rms": "RMS of the update",
    "disagreement": "$\\|U-U'\\|\\,/\\,\\|U\\|$",
}

#: Colour and marker of every remedy, in the order of the legend.
REMEDIES: Mapping[str, tuple[str, str]] = {
    "none": ("#000000", "o"),
    "skip": ("#0072b2", "s"),
    "clip": ("#cc79a7", "v"),
    "eps": ("#e69f00", "D"),
    "permuted": ("#8c8c8c", "X"),
    "rotated": ("#009e73", "^"),
    "start": ("#d55e00", "P"),
    "skip+rotated": ("#56b4e9", "h"),
    "start+skip": ("#882255", "<"),
    "start+rotated": ("#999933", ">"),
    "start+skip+rotated": ("#1b6f78", "p"),
    "eps+start+skip+rotated": ("#7a3fb0", "d"),
}

#: In which order the optimizers stand.
OPTIMIZERS = ("soap", "soap_iteration", "rekls", "kl_iteration")

#: Below this nothing is told apart.
FLOOR = 1e-9


class Problem(NamedTuple):
    """What a pair of panels shows."""

    optimizer: str
    shape: str
    persistent: float
    spike: float
    format: str


@style.house()
def preconditioner(table: pl.DataFrame) -> Figure:
    """Draw the RMS of the update above its distance to that of the twin: two panels a problem, a curve a remedy.

    Points are medians over seeds; a thin line reaches up to the largest of them.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `preconditioner`.
    """
    rows, note = summaries.shown(table, (*Problem._fields, "remedy", "step", "disagreement"), ("rms",))
    rows = rows.with_columns(pl.col("disagreement").cast(pl.Float64))
    problems = _problems(rows)
    down = math.ceil(len(problems) / ACROSS)
    across = math.ceil(len(problems) / down)
    figure = Figure(figsize=(style.SINGLE if across == 1 else style.DOUBLE, FRAME + down * HEIGHT))
    grid = figure.subplots(2 * down, across, sharex=True, sharey="row", squeeze=False)
    for pair, problem in zip(frames.pairs(grid, len(problems)), problems, strict=True):
        pair[0].set_title(_title(rows, problem))
        for axes, name in zip(pair, QUANTITIES, strict=True):
            _panel(axes, rows.filter(**problem._asdict()), name)
            style.log10(axes, "y", *_range(rows[name]), most=6)
    steps = [int(step) for step in sorted(rows["step"].unique())]
    style.log2(grid[0, 0], "x", _powers(steps))
    grid[0, 0].set_xlim(steps[0] / 2**0.3, steps[-1] * 2**0.3)
    frames.name_outside(grid, "step")
    for row, name in zip(grid, [*QUANTITIES.values()] * down, strict=True):
        row[0].set_ylabel(name)
    labels.legend(figure, _entries(rows), columns=3 if across == 1 else 8)
    labels.note(figure, note)
    return figure


def _problems(rows: pl.DataFrame) -> list[Problem]:
    """Return the problems: small matrices before large ones within an optimizer, and plain gradients before others."""
    found = {Problem(*one) for one in rows.select(*Problem._fields).iter_rows()}
    optimizers = style.in_order(rows["optimizer"], OPTIMIZERS)
    return sorted(found, key=lambda one: (optimizers.index(one.optimizer), ratios.size(one.shape), *one[2:]))


def _title(rows: pl.DataFrame, problem: Problem) -> str:
    """Return the optimizer and the shape, and what else tells the problem from others."""
    said = {
        "persistent": f"{problem.persistent:g} persistent",
        "spike": f"spike of {problem.spike:g}" if problem.spike != 1 else "no spike",
        "format": problem.format,
    }
    others = [text for name, text in said.items() if summaries.several(rows, name)]
    first = f"{problem.optimizer}, {problem.shape.replace('x', ' × ')}"
    return "\n".join([first, *([", ".join(others)] if others else [])])


def _panel(axes: Axes, rows: pl.DataFrame, name: str) -> None:
    """Draw the curves of one quantity; an update of zero has no place on the axis, and disagrees with nothing."""
    for remedy in style.in_order(rows["remedy"], REMEDIES):
        own = rows.filter(pl.col(name) > 0, remedy=remedy)
        found = own.group_by("step").agg(pl.col(name).median().alias("middle"), pl.col(name).max().alias("top"))
        found = found.sort("step")
        x, middle = found["step"].to_numpy(), found["middle"].to_numpy()
        axes.vlines(x, middle, found["top"], color=_look(remedy)["color"], linewidth=0.5)
        axes.plot(x, middle, label=remedy, linewidth=0.9, **_look(remedy))


def _look(remedy: str) -> style.Look:
    """Return how a remedy looks: one with values of its own is a light version of the usual one."""
    usual = "+".join(part.partition("=")[0] for part in remedy.split("+"))
    colour, shape = REMEDIES.get(usual, (style.colour(usual), "*"))
    fill = colour if remedy == usual else style.tint(colour, 0.3)
    look: style.Look = {"color": colour, "marker": shape, "markerfacecolor": fill, "markeredgecolor": colour}
    return look | {"markersize": 3.0, "markeredgewidth": 0.5}


def _powers(steps: Sequence[int]) -> list[int]:
    """Return the powers of two among the steps, or all steps where there are none.

    Examples
    --------
    >>> _powers([1, 2, 3, 4]), _powers([3, 5])
    ([1, 2, 4], [3, 5])
    """
    return [step for step in steps if step & (step - 1) == 0] or list(steps)


def _range(values: pl.Series) -> tuple[float, float]:
    above = [value for value in values.drop_nulls() if value >= FLOOR]
    return (min(above) / 1.5, max(above) * 1.5) if above else (FLOOR, 1.0)


def _entries(rows: pl.DataFrame) -> dict[str, Line2D]:
    return {remedy: Line2D([], [], **_look(remedy)) for remedy in style.in_order(rows["remedy"], REMEDIES)}
