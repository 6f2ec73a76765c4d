"""Layer-wise data parallelism: how even the load is by policy, and what of the link's time hides behind compute."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import frames, labels, rows, style, summaries


class Policy(NamedTuple):
    """How a policy is drawn and called."""

    colour: str
    marker: str
    name: str


#: Policies in the order of the legend, in Okabe and Ito's colours.
POLICIES: Mapping[str, Policy] = {
    "round_robin": Policy("#d55e00", "o", "round robin"),
    "ping_pong": Policy("#e69f00", "s", "ping-pong"),
    "lpt_elements": Policy("#56b4e9", "^", "LPT by elements"),
    "lpt_flops": Policy("#0072b2", "v", "LPT by flops"),
    "lpt_buckets": Policy("#009e73", "D", "LPT, bucket by bucket"),
    "hybrid": Policy("#000000", "P", "hybrid"),
}

#: In which order matrices are dealt out, where that is seen.
ORDERS: Mapping[str, str] = {"kinds": "kind after kind", "blocks": "block after block"}

#: Which model, and how its experts are dealt out.
MODEL = ("model", "ep", "experts")

#: What is drawn above each other, and how it is called.
BALANCES: Mapping[str, str] = {"ratio": "makespan over ideal", "memory": "elements over mean"}

#: Excess over 1 that counts as none, and where ticks may stand.
EVEN, EXCESSES = 1e-3, (1e-3, 1e-2, 0.1, 1.0, 10.0)

#: Panels beside each other.
ACROSS = 4

#: How far colours are kept by what overlaps, and what that is called.
OVERLAPS: Mapping[str, tuple[float, str]] = {
    "none": (0.3, "no overlap"),
    "gather": (0.6, "weights overlap"),
    "both": (1.0, "weights and gradients"),
}

#: Dashes by how long the parts of a gather are, and what that is called.
GATHERS: Mapping[str, tuple[style.Dashes, str]] = {
    "exact": ("-", "exact sizes"),
    "padded": ((0, (3, 1.5)), "padded to the largest"),
}

SETTING = (*MODEL, "ranks", "policy", "order")

#: What has a column of its own in the figure of overlap.
PLACE = (*MODEL, "link")

#: What no whole matrices go below.
BOUND = {"whole layers go no lower": Line2D([], [], linestyle="", marker="_", markersize=9.0, color=style.GREY)}

#: Steps that take longer than this leave the panel.
MOST = 8.0


@style.house()
def layerwise_balance(table: pl.DataFrame) -> Figure:
    """Draw makespan and memory over even ones against the number of ranks, by their excess; a column a model.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `layerwise`; medians over axes that are not drawn.
    """
    shown, note = summaries.shown(table, SETTING, (*BALANCES, "largest", "matrices"))
    models = _models(shown)
    across = min(ACROSS, len(models))
    down = -(-len(models) // across)
    figure = Figure(figsize=(max(style.SINGLE, style.DOUBLE * across / ACROSS), 0.6 + 2.9 * down))
    grid = figure.subplots(2 * down, across, sharex=True, sharey=True, squeeze=False)
    for place in range(down * across):
        pair = [grid[2 * (place // across) + row, place % across] for row in range(2)]
        if place >= len(models):
            for axes in pair:
                axes.set_visible(False)
            continue
        own = _of(shown, MODEL, models[place])
        pair[0].set_title(_title(*models[place]))
        for axes, metric in zip(pair, BALANCES, strict=True):
            _excess(axes, own, metric)
        _bound(pair[0], own)
    _excess_axis(grid[0, 0], shown)
    style.log2(grid[0, 0], "x", shown["ranks"])
    frames.name_outside(grid, "ranks")
    for row, name in zip(grid, [*BALANCES.values()] * down, strict=True):
        row[0].set_ylabel(name)
    labels.legend(figure, _policies(shown) | BOUND, columns=4)
    labels.note(figure, note)
    return figure


@style.house()
def overlap(table: pl.DataFrame) -> Figure:
    """Draw the step over one without a link against the number of buckets, above what of the link's time is exposed.

    Bars stand for the number of buckets at which the step is shortest, with all overlap that the table has.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `layerwise`; medians over axes that are not drawn.
    """
    metrics = ("step_seconds", "compute_seconds", "update_seconds", "exposed_seconds", "hidden_seconds", "matrices")
    shown, note = summaries.shown(table, (*SETTING, "link", "gather", "overlap", "buckets"), metrics)
    shown = shown.with_columns(
        overhead=pl.col("step_seconds") / (pl.col("compute_seconds") + pl.col("update_seconds")),
    )
    places = [(*model, link) for model in _models(shown) for link in sorted(shown["link"].unique())]
    places = [place for place in places if len(_of(shown, PLACE, place))]
    kinds = _kinds(shown)
    figure = Figure(figsize=(max(style.SINGLE, 2.25 * len(places)), 2.6 + 0.17 * len(kinds)))
    grid = figure.subplots(2, len(places), sharey="row", squeeze=False, height_ratios=[1.5, 0.17 * len(kinds)])
    for (upper, lower), place in zip(grid.T, places, strict=True):
        own = _of(shown, PLACE, place)
        several = len({other[:-1] for other in places}) > 1
        upper.set_title(f"{_title(*place[:-1])}\n{place[-1]}" if several else place[-1])
        _overheads(upper, own)
        style.log2(upper, "x", own["buckets"])
        upper.set_xlabel("buckets")
        _bars(lower, own, kinds)
        lower.set_xlabel("seconds on the link")
    top = min(MOST, 2 ** math.ceil(math.log2(max(2.0, float(shown["overhead"].max())))))  # type: ignore[arg-type]
    grid[0, 0].set_ylim(0.95, 1.05 * top)
    style.log2(grid[0, 0], "y", [2**power for power in range(int(math.log2(top)) + 1)])
    grid[0, 0].set_ylabel("step over one without a link")
    rows.name(grid[1, 0], [_kind_name(kind, kinds) for kind in kinds])
    labels.legend(figure, _policies(shown) | _looks(shown), columns=4)
    labels.note(figure, note)
    return figure


# --- models and policies ----------------------------------------------------------------------------------------------


def _models(shown: pl.DataFrame) -> list[tuple[Any, ...]]:
    """Return the models of a table and what is done with their experts, those with few matrices first."""
    most = dict(shown.group_by("model").agg(pl.col("matrices").max()).iter_rows())
    found = shown.select(MODEL).unique().rows()
    return sorted(found, key=lambda model: (most[model[0]], model[0], model[1], str(model[2] or "")))


def _of(shown: pl.DataFrame, names: Sequence[str], values: Sequence[Any]) -> pl.DataFrame:
    """Return the rows with some values, None among them."""
    for name, value in zip(names, values, strict=True):
        shown = shown.filter(pl.col(name).eq_missing(pl.lit(value)))
    return shown


def _title(model: str, ep: int, experts: str | None) -> str:
    """Name a model.

    Examples
    --------
    >>> _title("llama-3-70b", 1, None), _title("kimi-k2", 32, "apart")
    ('llama-3-70b', 'kimi-k2, EP 32,\\nexperts apart')
    """
    return model if ep == 1 else f"{model}, EP {ep},\nexperts {experts}"


def _policies(shown: pl.DataFrame) -> dict[str, Line2D]:
    """Return the entries of a legend for policies, one an order where a policy has several."""
    return {_name(*pair, shown): Line2D([], [], **_look(*pair, shown)) for pair in _pairs(shown)}


def _pairs(shown: pl.DataFrame) -> list[tuple[str, str]]:
    found = shown.select("policy", "order").unique().rows()
    policies, orders = style.in_order(shown["policy"], POLICIES), style.in_order(shown["order"], ORDERS)
    return sorted(found, key=lambda pair: (policies.index(pair[0]), orders.index(pair[1])))


def _name(policy: str, order: str, shown: pl.DataFrame) -> str:
    name = POLICIES[policy].name if policy in POLICIES else policy
    return f"{name}, {ORDERS.get(order, order)}" if _ordered(policy, shown) else name


def _look(policy: str, order: str, shown: pl.DataFrame) -> style.Look:
    colour, marker, _ = POLICIES.get(policy, Policy(style.colour(policy), "X", policy))
    hollow = _ordered(policy, shown) and order != next(iter(ORDERS))
    return {
        "color": colour,
        "marker": marker,
        "markersize": 3.2,
        "markerfacecolor": "white" if hollow else colour,
        "linestyle": (0, (3, 1.5)) if hollow else "-",
        "linewidth": 1.0,
    }


def _ordered(policy: str, shown: pl.DataFrame) -> bool:
    return shown.filter(policy=policy)["order"].n_unique() > 1


# --- balance ----------------------------------------------------------------------------------------------------------


def _excess(axes: Axes, own: pl.DataFrame, metric: str) -> None:
    """Draw how far above 1 a metric is, policy by policy."""
    for policy, order in _pairs(own):
        line = summaries.quartiles(own.filter(policy=policy, order=order), ["ranks"], metric)
        heights = np.maximum(line["median"].to_numpy() - 1, EVEN)
        axes.plot(line["ranks"], heights, label=_name(policy, order, own), clip_on=False, **_look(policy, order, own))


def _bound(axes: Axes, own: pl.DataFrame) -> None:
    """Draw what no assignment of whole matrices goes below."""
    line = own.group_by("ranks").agg(pl.col("largest").median()).sort("ranks").filter(pl.col("largest") > 1 + EVEN)
    look: style.Look = {"linestyle": "", "marker": "_", "markersize": 9.0, "color": style.GREY, "zorder": 1}
    axes.plot(line["ranks"], line["largest"] - 1, label="bound", **look)


def _excess_axis(axes: Axes, shown: pl.DataFrame) -> None:
    most = max(float(shown[metric].max()) for metric in BALANCES) - 1  # type: ignore[arg-type]
    style.log10(axes, "y", EVEN, max(1.3 * most, 10 * EVEN))
    style.ticks(axes, "y", [place for place in EXCESSES if place <= 1.3 * most], lambda excess: f"{1 + excess:g}")


# --- overlap ----------------------------------------------------------------------------------------------------------


def _overheads(axes: Axes, own: pl.DataFrame) -> None:
    """Draw steps over those without a link, a curve a policy and way to gather; of less overlap, exact sizes alone."""
    most = _most_overlap(own)
    for (policy, order), gather, kind in product(_pairs(own), GATHERS, OVERLAPS):
        curve = own.filter(policy=policy, order=order, gather=gather, overlap=kind)
        if curve.is_empty() or (gather == "padded" and kind != most):
            continue
        line = summaries.quartiles(curve, ["buckets"], "overhead")
        look = _look(policy, order, own) | {"linestyle": GATHERS[gather][0], "markersize": 2.6}
        shade = style.tint(look["color"], OVERLAPS[kind][0])
        look |= {"color": shade, "markerfacecolor": shade, "zorder": 2 + OVERLAPS[kind][0]}
        axes.plot(line["buckets"], line["median"], label=f"{_name(policy, order, own)} {gather} {kind}", **look)


def _most_overlap(shown: pl.DataFrame) -> str:
    return [kind for kind in OVERLAPS if kind in set(shown["overlap"])][-1]


def _kinds(shown: pl.DataFrame) -> list[tuple[str, str, str]]:
    """Return policies, orders and ways to gather in the order of the rows."""
    there = set(shown.select("policy", "order", "gather").unique().rows())
    return [(*pair, gather) for gather in GATHERS for pair in _pairs(shown) if (*pair, gather) in there]


def _kind_name(kind: tuple[str, str, str], kinds: Sequence[tuple[str, str, str]]) -> str:
    policy, _, gather = kind
    name = POLICIES[policy].name if policy in POLICIES else policy
    return f"{name}, {gather}" if len({other[2] for other in kinds}) > 1 else name


def _bars(axes: Axes, own: pl.DataFrame, kinds: Sequence[tuple[str, str, str]]) -> None:
    """Draw hidden and exposed seconds where the step is shortest, with the number of buckets behind them."""
    for height, (policy, order, gather) in enumerate(kinds):
        some = own.filter(policy=policy, order=order, gather=gather, overlap=_most_overlap(own))
        if some.is_empty():
            continue
        best = some.sort("step_seconds", "buckets").row(0, named=True)
        colour = _look(policy, order, own)["color"]
        exposed, hidden = best["exposed_seconds"], best["hidden_seconds"]
        bar: style.Look = {"height": 0.62, "linewidth": 0}
        axes.barh(height, exposed, color=colour, label=f"{policy} {gather} exposed", **bar)
        axes.barh(height, hidden, left=exposed, color=style.tint(colour, 0.3), label=f"{policy} {gather} hidden", **bar)
        axes.annotate(
            f"{best['buckets']}",
            (exposed + hidden, height),
            xytext=(2, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=6.5,
            color=style.GREY,
        )
    axes.margins(x=0.12)
    axes.set_xlim(left=0)


def _looks(shown: pl.DataFrame) -> dict[str, Line2D]:
    """Return the entries of a legend for ways to gather, overlaps and bars."""
    grey: style.Look = {"color": style.GREY, "linewidth": 1.0}
    found: dict[str, Line2D] = {}
    if summaries.several(shown, "gather"):
        found |= {name: Line2D([], [], linestyle=dashes, **grey) for dashes, name in GATHERS.values()}
    there = set(shown["overlap"])
    if len(there) > 1:
        for kind, (strength, name) in OVERLAPS.items():
            if kind in there:
                found[name] = Line2D([], [], linewidth=2.5, color=style.tint(style.GREY, strength))
    for name, strength in (("exposed", 1.0), ("hidden", 0.3)):
        found[name] = Line2D([], [], linewidth=6.0, color=style.tint(style.GREY, strength))
    return found
