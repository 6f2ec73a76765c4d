"""One band of panels for each thing that a number format does to Muon."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator

from muon_lab.figures import cases, failures, frames, kinds, rows, style

#: Panels beside each other.
ACROSS = 5

#: Inches that a dot takes in a row, and a whole row at least; and that titles, ticks and names take.
DOT, ROW, FRAME = 0.056, 0.14, 0.7

#: Below this a cosine differs from 1 by its rounding alone.
ROUNDOFF = 1e-9

#: The lowest panel.
LOW = 0.7

GRADIENT = {"error": "error of the matrix", "saturated": "saturated", "flushed": "flushed to zero"}
FACTOR = {"lowest": r"$\lambda_{\min}/\lambda_{\max}$", "negative": "negative eigenvalues"}
TRAINING = {
    "lost": "1 − cosine of the gradient",
    "gradient_gain": "gain of the gradient",
    "loss_gap": "loss gap, nat/byte",
}
OPERANDS = ("all", "weights", "activations", "gradients", "e5m2_gradients")
ROUNDINGS = {"nearest": "rounded to nearest", "stochastic": "rounded stochastically"}


class Part(NamedTuple):
    """The rows of one effect: those with all that is drawn, and those that failed."""

    rows: pl.DataFrame
    failed: pl.DataFrame

    @property
    def all(self) -> pl.DataFrame:
        """Both."""
        return pl.concat([self.rows, self.failed])


class Band(NamedTuple):
    """How an effect is drawn: what it needs, its share of a row of the page, its height in inches, its function."""

    metrics: tuple[str, ...]
    width: float
    height: Callable[[Part], float]
    draw: Callable[[SubFigure, Part], None]


def _panels(band: SubFigure, count: int, across: int, **shared: Any) -> tuple[Any, list[Axes]]:
    """Return a grid and its first panels; those behind are hidden."""
    grid = band.subplots(math.ceil(count / across), across, squeeze=False, **shared)
    for axes in grid.flatten()[count:]:
        axes.set_visible(False)
    return grid, list(grid.flatten()[:count])


def _stack(rows: int, dots: int) -> float:
    """Return the height of a panel of rows that hold some dots each."""
    return max(rows * max(ROW, DOT * dots + 0.03), LOW)


def _products_height(part: Part) -> float:
    down = math.ceil(len(cases.spectra(part.all)) / ACROSS)
    panel = _stack(len(kinds.present(part.all)), len(cases.curves(part.all)))
    return down * (panel + 0.25) + FRAME - 0.25


def _products(band: SubFigure, part: Part) -> None:
    spectra, curves, stored = cases.spectra(part.all), cases.curves(part.all), kinds.present(part.all)
    grid, panels = _panels(band, len(spectra), min(ACROSS, len(spectra)), sharex=True, sharey=True)
    style.log10(panels[0], "x", *rows.limits(part.rows["error"]), most=4)
    end = failures.strip(panels) if len(part.failed) else math.inf
    for axes, spectrum in zip(panels, spectra, strict=True):
        axes.set_title(spectrum)
        places = zip(rows.dodge(len(curves)), curves, strict=True)
        for (row, kind), (shift, curve) in product(enumerate(stored), places):
            well, failed = (
                kinds.of(some, kind).filter(spectrum=spectrum, method=curve.method, steps=curve.steps) for some in part
            )
            name = " ".join(str(word) for word in (*curve, *kind) if word is not None)
            colour = cases.shade(curve, curves)
            look = {"color": colour, "marker": "o", "markersize": 2.8}
            rows.dot(axes, well["error"], row + shift, look, name)
            failures.draw(axes, end, row + shift, failed, colour, name)
        rows.name(axes, kinds.names(stored))
    frames.name_outside(grid, "error of the update")


def _gradient(band: SubFigure, part: Part) -> None:
    stored = kinds.present(part.rows)
    _, panels = _panels(band, len(GRADIENT), len(GRADIENT), sharey=True)
    for axes, (metric, label) in zip(panels, GRADIENT.items(), strict=True):
        for row, kind in enumerate(stored):
            rows.dot(axes, kinds.of(part.rows, kind)[metric], float(row), kind.look, " ".join(filter(None, kind)))
        axes.set_xlabel(label)
        rows.name(axes, kinds.names(stored))
    style.log10(panels[0], "x", *rows.limits(part.rows["error"]), most=4)
    for axes, metric in zip(panels[1:], list(GRADIENT)[1:], strict=True):
        _shares(axes, part.rows[metric])


def _shares(axes: Axes, values: pl.Series) -> None:
    """Make an axis one of shares in per cent, from nothing on."""
    top = max(1e-3, float(values.max()))  # type: ignore[arg-type]
    axes.set_xlim(-0.06 * top, 1.1 * top)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.xaxis.set_major_locator(MaxNLocator(3))


def _momentum(band: SubFigure, part: Part) -> None:
    roundings = style.in_order(part.rows["rounding"], ROUNDINGS)
    grid, panels = _panels(band, len(roundings), len(roundings), sharex=True, sharey=True)
    betas = sorted(part.rows["beta"].unique())
    for axes, rounding in zip(panels, roundings, strict=True):
        axes.set_title(ROUNDINGS.get(rounding, rounding))
        axes.axhline(1.0, color=style.GREY, linewidth=0.6, zorder=1)
        for kind in kinds.present(part.rows):
            own = kinds.of(part.rows, kind).filter(rounding=rounding)
            found = own.group_by("beta").agg(pl.col("gain").median()).sort("beta")
            name = " ".join(filter(None, (*kind, rounding)))
            axes.plot([1 / (1 - beta) for beta in found["beta"]], found["gain"], label=name, **kind.look)
    style.log2(panels[0], "x", [1 / (1 - beta) for beta in betas], lambda value: f"{1 - 1 / value:.6g}")
    panels[0].set_xlim(1 / (1 - betas[0]) / 1.3, 1 / (1 - betas[-1]) * 1.3)
    panels[0].set_ylim(-0.04, max(1.08, 1.05 * float(part.rows["gain"].max())))  # type: ignore[arg-type]
    frames.name_outside(grid, r"$\beta$", "share of the gradient reached")


def _factor_height(part: Part) -> float:
    return max(0.65 * _stack(len(cases.spectra(part.rows)), len(kinds.present(part.rows))), LOW) + FRAME - 0.2


def _factor(band: SubFigure, part: Part) -> None:
    spectra, stored = cases.spectra(part.rows), kinds.present(part.rows)
    _, panels = _panels(band, len(FACTOR), len(FACTOR), sharey=True)
    for axes, (metric, label) in zip(panels, FACTOR.items(), strict=True):
        for (row, spectrum), (shift, kind) in product(
            enumerate(spectra), zip(rows.dodge(len(stored)), stored, strict=True)
        ):
            own = kinds.of(part.rows, kind).filter(spectrum=spectrum)
            rows.dot(
                axes,
                own[metric],
                row + shift,
                kind.look | {"markersize": 2.8},
                " ".join(filter(None, (spectrum, *kind))),
            )
        axes.axvline(0.0, color=style.GREY, linewidth=0.6, zorder=1)
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        rows.name(axes, spectra)


def _polar(band: SubFigure, part: Part) -> None:
    axes = band.subplots()
    low, high = rows.limits([*part.rows["bound"], *part.rows["relative"]])
    bound = axes.plot([low, high], [low, high], color=style.GREY, linewidth=0.6, label="bound", zorder=1)
    axes.legend(bound, ["bound"], loc="upper left", borderaxespad=0.0, handlelength=1.2)
    for kind in kinds.present(part.rows):
        own = kinds.of(part.rows, kind).sort("bound", "relative")
        look = kind.look | {"markersize": 2.8, "linestyle": ""}
        axes.plot(own["bound"], own["relative"], label=" ".join(filter(None, kind)), **look)
    style.log10(axes, "x", *rows.limits(part.rows["bound"]), most=4)
    style.log10(axes, "y", *rows.limits(part.rows["relative"]), most=5)
    axes.set_xlabel(r"bound $\|\delta G\|\,/\,(\sigma_r\sqrt{r})$")
    axes.set_ylabel("error of the polar factor")


def _arms(part: Part) -> list[tuple[kinds.Kind, str]]:
    """Return which operands have which format, in the order of the house."""
    found = set(part.rows.select("format", "scale_mode", "operands").iter_rows())
    operands = style.in_order(part.rows["operands"], OPERANDS)
    return [(kind, name) for kind in kinds.present(part.rows) for name in operands if (*kind, name) in found]


def _training(band: SubFigure, part: Part) -> None:
    arms = _arms(part)
    table = part.rows.with_columns(lost=(1 - pl.col("gradient_cosine")).clip(lower_bound=ROUNDOFF))
    names = [f"{name}, {operands.replace('_', ' ')}" for (_, operands), name in _named(arms)]
    _, panels = _panels(band, len(TRAINING), len(TRAINING), sharey=True)
    for axes, (metric, label) in zip(panels, TRAINING.items(), strict=True):
        for row, (kind, operands) in enumerate(arms):
            own = kinds.of(table, kind).filter(operands=operands)
            rows.dot(axes, own[metric], float(row), kind.look, names[row])
        axes.set_xlabel(label)
        rows.name(axes, names)
    style.log10(panels[0], "x", *rows.limits(table["lost"]), most=4)
    for axes, neutral in zip(panels[1:], (1.0, 0.0), strict=True):
        axes.axvline(neutral, color=style.GREY, linewidth=0.6, zorder=1)
        axes.xaxis.set_major_locator(MaxNLocator(4))


def _named(arms: Sequence[tuple[kinds.Kind, str]]) -> list[tuple[tuple[kinds.Kind, str], str]]:
    return list(zip(arms, kinds.names(kind for kind, _ in arms), strict=True))


#: The effects by the values of the column `what`, in the order of the page.
BANDS: Mapping[str, Band] = {
    "products": Band(("error",), 1.0, _products_height, _products),
    "gradient": Band(
        tuple(GRADIENT), 1.0, lambda part: _stack(len(kinds.present(part.rows)), 1) + FRAME - 0.2, _gradient
    ),
    "momentum": Band(("gain",), 1.0, lambda part: 1.8, _momentum),
    "factor": Band(tuple(FACTOR), 1.6, _factor_height, _factor),
    "polar": Band(("relative", "bound"), 1.0, lambda part: 1.95, _polar),
    "training": Band(
        ("gradient_cosine", "gradient_gain", "loss_gap"),
        1.0,
        lambda part: _stack(len(_arms(part)), 1) + FRAME - 0.2,
        _training,
    ),
}

#: Which effects share a row of the page.
PAGE: Sequence[Sequence[str]] = (("products",), ("gradient",), ("momentum",), ("factor", "polar"), ("training",))
