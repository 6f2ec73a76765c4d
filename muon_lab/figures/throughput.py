"""The published throughput of Muon: what each way to count gives, and what rates of products would cost."""

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from muon_lab.figures import labels, rows, style, summaries

AXES = ("model", "order", "gate_up", "kernel", "rate", "overlap")
METRICS = ("optimizer_tflops", "published_tflops", "slowdown", "published_slowdown")

#: One colour a model.
MODELS = {"kimi-k2": "#0072b2", "qwen3-30b-a3b": "#d55e00"}

#: What the Gram matrix is as long as, and how gate and up-projection are kept.
NAMES = {"short": "shorter side", "rows": "rows", "long": "longer side"}


@style.house()
def throughput(table: pl.DataFrame) -> Figure:
    """Draw the optimizer's TFLOP/s by convention, and the predicted slowdown against the rate of products.

    Dashed lines are what was published. A band goes from the lowest to the highest prediction at a rate: with hidden or
    exposed communication, and with more or less time for each product besides its flops.

    Parameters
    ----------
    table : polars.DataFrame
        Rows of the study `throughput`.
    """
    shown, note = summaries.shown(table, AXES, METRICS)
    kernel = style.in_order(shown["kernel"], ("gemm", "syrk"))[0]
    shown = shown.filter(kernel=kernel)
    figure = Figure(figsize=(style.DOUBLE, 2.5))
    counted, predicted = figure.subplots(1, 2)
    conventions = [pair for pair in _conventions() if not shown.filter(order=pair[0], gate_up=pair[1]).is_empty()]
    models = style.in_order(shown["model"], MODELS)
    for model in models:
        own, colour = shown.filter(model=model), MODELS.get(model) or style.colour(model)
        _counted(counted, own, conventions, colour)
        _predicted(predicted, own, colour)
    rows.name(counted, [f"{NAMES[order]}, {gate_up}" for order, gate_up in conventions])
    counted.set_xlabel("TFLOP/s a GPU, counted for the optimizer")
    predicted.set_xlabel("rate of products, TFLOP/s")
    predicted.set_ylabel("slowdown")
    rates = shown["rate"].to_numpy()
    style.log10(predicted, "x", float(rates.min()) / 1.3, float(rates.max()) * 1.3, most=4)
    entries = {name: Line2D([], [], color=MODELS.get(name) or style.colour(name), marker="o") for name in models}
    entries["published"] = Line2D([], [], color=style.GREY, linestyle=(0, (2, 1.5)))
    labels.legend(figure, entries, columns=3)
    labels.note(figure, note)
    return figure


def _conventions() -> list[tuple[str, str]]:
    return [(order, gate_up) for order in NAMES for gate_up in ("fused", "split")]


def _counted(axes: Axes, own: pl.DataFrame, conventions: list[tuple[str, str]], colour: str) -> None:
    for row, (order, gate_up) in enumerate(conventions):
        found = own.filter(order=order, gate_up=gate_up)["optimizer_tflops"]
        axes.plot(found.head(1), [row] * len(found.head(1)), color=colour, marker="o", linestyle="", markersize=4.0)
    axes.axvline(float(own["published_tflops"][0]), color=colour, linewidth=0.8, linestyle=(0, (2, 1.5)), zorder=1)
    axes.set_xlim(left=0.0)


def _predicted(axes: Axes, own: pl.DataFrame, colour: str) -> None:
    slowdown = pl.col("slowdown")
    by_rate = own.group_by("rate").agg(slowdown.min().alias("low"), slowdown.max().alias("high")).sort("rate")
    axes.fill_between(by_rate["rate"], by_rate["low"], by_rate["high"], color=colour, alpha=0.25, linewidth=0)
    axes.plot(by_rate["rate"], by_rate["low"], color=colour, marker="o", markersize=2.8, linewidth=1.0)
    axes.axhline(float(own["published_slowdown"][0]), color=colour, linewidth=0.8, linestyle=(0, (2, 1.5)), zorder=1)
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
