"""Optimizers side by side: losses at the best learning rate, against the rate, and against errors of the direction."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from muon_lab.figures import failures, frames, labels, style, summaries
from muon_lab.figures.scale_modes import scale_modes

#: One colour an optimizer, of Okabe and Ito's palette, in the order of the legend.
OPTIMIZERS: Mapping[str, str] = {
    "adamw": "#000000",
    "muon": "#0072b2",
    "mop": "#d55e00",
    "soap": "#009e73",
    "rekls": "#cc79a7",
}

#: Planted errors: colour, marker and name; the marker is white inside for an error that is the same in every step.
ERRORS: Mapping[str, tuple[str, str, str]] = {
    "radial": ("#aa4499", "o", "singular values spread"),
    "turn": ("#117733", "s", "turned"),
    "scale": ("#000000", "D", "scaled"),
}

#: The losses of a run, and after which tenth of its steps they are.
CURVE: Mapping[str, int] = {**{f"loss_{10 * tenth}": tenth for tenth in range(10)}, "loss": 10}

#: What makes a direction of Muon.
DIRECTION = ("method", "steps", "scale", "planted", "size", "persistence")

AXES = ("problem", "optimizer", *DIRECTION, "lr", "updates", "seed")

#: The problems from left to right.
PROBLEMS = ("gpt", "gpt_noisy", "gpt_small", "gpt_quiet", "quadratic", "factorization")

#: Errors of a direction, and how they are called.
ERRORS_OF: Mapping[str, str] = {
    "relative": r"polar error $\|X-U\|\,/\,\|U\|$",
    "orthogonality": r"$\|XX^T-UU^T\|\,/\,\sqrt{r}$",
}

#: Inches of a row of panels, and of the legend, axis names and titles.
HEIGHT, FRAME = 1.7, 0.55

#: So many columns leave room for three rates on an axis.
NARROW = 5

#: Where curves begin on a plain axis.
BEGUN = "loss_20"

#: A loss that spans more than this has a decimal axis.
SPAN = 10.0


def best(table: pl.DataFrame, by: Sequence[str] = ("problem", "optimizer")) -> pl.DataFrame:
    """Return the learning rate with the lowest median loss over seeds, among those at which every seed ended well.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `convergence`.
    by : sequence of str
        What has a rate of its own.

    Examples
    --------
    >>> table = pl.DataFrame({"problem": "gpt", "optimizer": "muon", "lr": [0.01, 0.01, 0.1, 0.1, 0.2],
    ...                       "loss": [3.0, 2.0, 1.0, 1.4, 0.0], "outcome": [*4 * ["ok"], "diverged"]})
    >>> best(table).rows()
    [('gpt', 'muon', 0.1)]
    """
    well = pl.col("outcome").cast(pl.String) == "ok"
    found = table.group_by(*by, "lr").agg(pl.col("loss").median().alias("median"), well.all().alias("held"))
    ordered = found.filter(pl.col("held")).sort(*by, "median", "lr", nulls_last=True)
    return ordered.group_by(*by, maintain_order=True).first().select(*by, "lr")


def at_best(table: pl.DataFrame, by: Sequence[str] = ("problem", "optimizer")) -> pl.DataFrame:
    """Return the rows at the best learning rates.

    Examples
    --------
    >>> table = pl.DataFrame({"problem": "gpt", "optimizer": "muon", "lr": [0.01, 0.1], "loss": [3.0, 1.0],
    ...                       "outcome": "ok"})
    >>> at_best(table)["loss"].to_list()
    [1.0]
    """
    return table.join(best(table, by), on=[*by, "lr"], how="inner", nulls_equal=True, maintain_order="left")


def reached(losses: Sequence[float], target: float) -> float | None:
    """Return the first share of the steps at which a curve of equally spaced losses is down at a target, or None.

    Between two losses a straight line is followed: a convex curve is there earlier.

    Examples
    --------
    >>> reached([4.0, 2.0, 1.0], 1.5), reached([4.0, 2.0, 1.0], 0.5)
    (0.75, None)
    """
    for index, loss in enumerate(losses):
        if loss <= target:
            above = losses[index - 1] if index else loss
            part = (above - target) / (above - loss) if above > loss else 0.0
            return (max(index - 1, 0) + part) / (len(losses) - 1) if index else 0.0
    return None


def speedups(table: pl.DataFrame, reference: str = "adamw") -> pl.DataFrame:
    """Return how many times fewer steps an optimizer takes to the last loss of a reference, both at their best rates.

    One row an optimizer, problem and seed, which both share: `factor` is None where the loss is never reached.

    Examples
    --------
    >>> curve = {f"loss_{10 * k}": [4.0 - 0.2 * k, 4.0 - 0.4 * k] for k in range(10)}
    >>> table = pl.DataFrame({"problem": "gpt", "optimizer": ["adamw", "muon"], "lr": 0.1, "seed": 0, "outcome": "ok",
    ...                       **curve, "loss": [2.0, 0.0]})
    >>> speedups(table).select("optimizer", pl.col("factor").round(6)).rows()
    [('adamw', 1.0), ('muon', 2.0)]
    """
    rows = at_best(table)
    runs = {(row["problem"], row["optimizer"], row["seed"]): [row[name] for name in CURVE] for row in rows.to_dicts()}
    found = []
    for (problem, optimizer, seed), losses in runs.items():
        base = runs.get((problem, reference, seed))
        if base is not None:
            own, theirs = reached(losses, base[-1]), reached(base, base[-1])
            factor = theirs / own if own and theirs else None
            found.append({"problem": problem, "optimizer": optimizer, "seed": seed, "factor": factor})
    schema = {"problem": pl.String, "optimizer": pl.String, "seed": pl.Int64, "factor": pl.Float64}
    return pl.DataFrame(found, schema=schema).sort("problem", "optimizer", "seed")


@style.house()
def convergence(table: pl.DataFrame) -> Figure:
    """Draw loss curves at the best rates above the last loss against the rate, a column a problem; or planted errors.

    Lines are medians over seeds, bands and bars go from the lowest to the highest. Where Muon has several directions,
    the loss is drawn against the error of the direction instead; where it has several factors, against the rate and the
    size of the update.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `convergence`.
    """
    table = failures.plain(table, AXES, tuple(CURVE))
    rows, note = summaries.shown(table, AXES, tuple(CURVE))
    muon = rows.filter(optimizer="muon")
    if muon["scale"].n_unique() > 1:
        return scale_modes(summaries.shown(muon, AXES, ("loss", "update_rms"))[0], note)
    if muon.select(DIRECTION).n_unique() > 1:
        return _directions(table.filter(optimizer="muon"), note)
    chosen = rows.join(best(table), on=["problem", "optimizer", "lr"], how="semi")
    problems, optimizers = style.in_order(rows["problem"], PROBLEMS), style.in_order(rows["optimizer"], OPTIMIZERS)
    width = style.SINGLE if len(problems) == 1 else style.DOUBLE
    figure = Figure(figsize=(width, 2 * HEIGHT + FRAME))
    grid = figure.subplots(2, len(problems), squeeze=False)
    for (upper, lower), problem in zip(grid.T, problems, strict=True):
        upper.set_title(problem.replace("_", " "))
        shown = rows.filter(problem=problem)
        for optimizer in optimizers:
            _curve(upper, chosen.filter(problem=problem, optimizer=optimizer), optimizer)
            _against_rate(lower, shown.filter(optimizer=optimizer), optimizer)
        _loss_axis(upper, shown.filter(pl.col("lr").is_in(chosen["lr"].implode())), tuple(CURVE))
        if upper.get_yscale() == "linear":  # the first steps are alike and would flatten what follows
            upper.set_ylim(top=1.02 * max(chosen.filter(problem=problem)[BEGUN]))
        _loss_axis(lower, shown, ("loss",))
        rates = shown["lr"].to_numpy()
        style.log10(lower, "x", rates.min() / 1.5, rates.max() * 1.5, most=4)
        if len(problems) >= NARROW:
            measured = np.unique(rates)
            style.ticks(lower, "x", measured[:: -math.ceil(len(measured) / 3)].tolist())
        upper.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        upper.set_xlabel("steps")
        lower.set_xlabel("learning rate")
    for row, name in zip(grid, ("loss", "loss at the end"), strict=True):
        row[0].set_ylabel(name)
    entries = {name: Line2D([], [], color=_colour(name)) for name in optimizers}
    labels.legend(figure, entries, columns=5)
    labels.note(figure, note)
    return figure


def _colour(optimizer: str) -> str:
    return OPTIMIZERS.get(optimizer) or style.colour(optimizer)


def _curve(axes: Axes, own: pl.DataFrame, optimizer: str) -> None:
    """Draw the losses of an optimizer's runs at its best rate."""
    for updates in sorted(own["updates"].unique()):
        ran = own.filter(updates=updates)
        steps = [tenth * updates / 10 for tenth in CURVE.values()]
        low, middle, high = ([getattr(ran[name], of)() for name in CURVE] for of in ("min", "median", "max"))
        axes.fill_between(steps, low, high, color=_colour(optimizer), alpha=0.2, linewidth=0)
        axes.plot(steps, middle, color=_colour(optimizer), label=optimizer)


def _against_rate(axes: Axes, own: pl.DataFrame, optimizer: str) -> None:
    """Draw the last loss of an optimizer against its rates."""
    if own.is_empty():
        return
    loss = pl.col("loss")
    found = own.group_by("lr").agg(loss.min().alias("low"), loss.median().alias("median"), loss.max().alias("high"))
    found = found.sort("lr")
    axes.vlines(found["lr"], found["low"], found["high"], color=_colour(optimizer), linewidth=0.8)
    axes.plot(found["lr"], found["median"], color=_colour(optimizer), marker="o", markersize=2.6, label=optimizer)


def _loss_axis(axes: Axes, rows: pl.DataFrame, metrics: Sequence[str]) -> None:
    """Make the axis of losses decimal where they span more than `SPAN`."""
    found = [loss for name in metrics for loss in rows[name] if loss > 0]
    if found and max(found) > SPAN * min(found):
        style.log10(axes, "y", min(found) / 1.5, max(found) * 1.5, most=4)


def _directions(table: pl.DataFrame, note: str) -> Figure:
    """Draw the last loss of every direction against its polar error and its orthogonality error, a row a problem."""
    by = ("problem", *DIRECTION)
    chosen, _ = summaries.shown(at_best(table, by), AXES, ("loss", *ERRORS_OF))
    problems = style.in_order(chosen["problem"], PROBLEMS)
    figure = Figure(figsize=(style.DOUBLE, HEIGHT * len(problems) + FRAME))
    grid = figure.subplots(len(problems), len(ERRORS_OF), squeeze=False, sharey="row")
    for row, problem in zip(grid, problems, strict=True):
        arms = _arms(chosen.filter(problem=problem))
        for axes, metric in zip(row, ERRORS_OF, strict=True):
            for arm in arms:
                _arm(axes, arm, metric)
            axes.axhspan(*_exact(arms), color=style.tint(style.GREY, 0.3), linewidth=0, zorder=0, label="exact")
    for column, name in zip(grid.T, ERRORS_OF.values(), strict=True):
        column[-1].set_xlabel(name)
    frames.name_outside(grid[:, :1], x=next(iter(ERRORS_OF.values())), y="loss at the end")
    labels.legend(figure, _entries(chosen), columns=4)
    labels.note(figure, note)
    return figure


def _arms(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the rows of every direction, in a fixed order."""
    return rows.sort(*DIRECTION, nulls_last=True).partition_by(*DIRECTION, maintain_order=True)


def _exact(arms: Iterable[pl.DataFrame]) -> tuple[float, float]:
    """Return the lowest and highest loss of the most exact direction without a planted error."""
    plain = [arm for arm in arms if arm["planted"][0] == "none"] or list(arms)
    losses = min(plain, key=lambda arm: float(np.median(arm["relative"].to_numpy())))["loss"].to_numpy()
    return float(losses.min()), float(losses.max())


def _arm(axes: Axes, arm: pl.DataFrame, metric: str) -> None:
    """Draw a direction: the median of its losses, with their range, at the median of its error."""
    place, loss = np.median(arm[metric].to_numpy()), arm["loss"].to_numpy()
    look = _look(arm["method"][0], arm["planted"][0], arm["persistence"][0])
    axes.vlines(place, loss.min(), loss.max(), color=look["color"], linewidth=0.6)
    name = " ".join(str(arm[one][0]) for one in DIRECTION if arm[one][0] is not None)
    axes.plot(place, np.median(loss), linestyle="", markersize=3.4, markeredgewidth=0.7, label=name, **look)


def _look(method: str, planted: str, persistence: str | None) -> style.Look:
    colour, marker, _ = ERRORS.get(planted, (style.colour(method), "^", ""))
    return {"color": colour, "marker": marker, "markerfacecolor": "white" if persistence == "fixed" else colour}


def _entries(rows: pl.DataFrame) -> dict[str, Line2D]:
    """Return the entries of the legend: schedules, then planted errors."""
    entries = {}
    for method in style.in_order(rows.filter(planted="none")["method"]):
        stepped = rows.filter(planted="none", method=method)["steps"].null_count() == 0
        name = f"{method}, by steps" if stepped else method
        entries[name] = Line2D([], [], linestyle="", **_look(method, "none", None))
    for planted, (_, _, name) in ERRORS.items():
        for persistence in rows.filter(planted=planted)["persistence"].unique().sort(nulls_last=True):
            words = {"fresh": ", anew each step", "fixed": ", always the same"}.get(persistence, "")
            entries[f"{name}{words}"] = Line2D([], [], linestyle="", **_look("", planted, persistence))
    return entries
