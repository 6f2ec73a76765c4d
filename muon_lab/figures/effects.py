"""One band of panels for each thing that a number format does to Muon."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
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
OPERANDS = ("all", "weights", "activations", "gradients", "e5m2_gradients")
ROUNDINGS = {"nearest": "to nearest", "stochastic": "stochastic"}
STARTS = {"zero": "from zero", "gradient": "from another gradient"}

#: One marker a decay of an average.
BETAS = ("o", "s", "^", "D", "v", "P")


class When(NamedTuple):
    """When gradients of a training run are compared: the names of the columns, the marker, its place in a row."""

    cosine: str
    gain: str
    marker: str
    shift: float


#: By what a legend says.
WHENS: Mapping[str, When] = {
    "at the common start": When("gradient_cosine", "gradient_gain", "o", -0.2),
    "at the end": When("end_cosine", "end_gain", "D", 0.2),
}


class Part(NamedTuple):
    """The rows of one effect: those with all that is drawn, and those that failed."""

    rows: pl.DataFrame
    failed: pl.DataFrame

    @property
    def all(self) -> pl.DataFrame:
        """Both."""
        return pl.concat([self.rows, self.failed])


Entries = Mapping[str, Line2D]


class Band(NamedTuple):
    """How an effect is drawn: what it needs, its share of a row of the page, its height in inches, its function.

    The last one returns the entries of its legend.
    """

    metrics: tuple[str, ...]
    width: float
    height: Callable[[Part], float]
    draw: Callable[[SubFigure, Part], None]
    entries: Callable[[Part], Entries]


class Cell(NamedTuple):
    """What one row of a panel of products shows."""

    title: str
    name: str
    spectrum: str
    kind: kinds.Kind
    shape: str | None

    def of(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return its rows of a table."""
        own = kinds.of(rows, self.kind).filter(spectrum=self.spectrum)
        return own if self.shape is None else own.filter(shape=self.shape)


def _panels(band: SubFigure, count: int, across: int, **shared: Any) -> tuple[Any, list[Axes]]:
    """Return a grid and its first panels; those behind are hidden."""
    grid = band.subplots(math.ceil(count / across), across, squeeze=False, **shared)
    for axes in grid.flatten()[count:]:
        axes.set_visible(False)
    return grid, list(grid.flatten()[:count])


def _stack(rows: int, dots: int) -> float:
    """Return the height of a panel of rows that hold some dots each."""
    return max(rows * max(ROW, DOT * dots + 0.03), LOW)


def cells(part: Part) -> list[list[Cell]]:
    """Return the rows of every panel of products: a panel a spectrum and a row a format, or, where planted matrices
    have several shapes, a panel a spectrum and format and a row a shape.
    """
    spectra, stored = cases.spectra(part.all), kinds.present(part.all)
    named = list(zip(stored, kinds.names(stored), strict=True))
    planted = part.all.filter(~pl.col("spectrum").str.split(":").list.first().is_in(cases.FOUND))
    if planted["shape"].n_unique() < 2:
        return [[Cell(spectrum, name, spectrum, kind, None) for kind, name in named] for spectrum in spectra]
    shapes = sorted(part.all["shape"].unique(), key=_sides)
    return [
        [Cell(name if len(spectra) == 1 else f"{spectrum}\n{name}", shape, spectrum, kind, shape) for shape in shapes]
        for spectrum, (kind, name) in product(spectra, named)
    ]


def _sides(shape: str) -> tuple[int, ...]:
    """Sort shapes by their short side, then by the long one."""
    return tuple(sorted(int(side) for side in shape.split("x")))


def _products_height(part: Part) -> float:
    found = cells(part)
    down = math.ceil(len(found) / ACROSS)
    panel = _stack(len(found[0]), len(cases.curves(part.all)))
    title = 0.25 * (1 + found[0][0].title.count("\n") / 2)
    unfinished = 0.35 if down > 1 and len(found) % ACROSS else 0.0  # names below a panel that has none below it
    return down * (panel + title) + unfinished + FRAME - 0.25


def _products(band: SubFigure, part: Part) -> None:
    found, curves = cells(part), cases.curves(part.all)
    grid, panels = _panels(band, len(found), min(ACROSS, len(found)), sharex=True, sharey=True)
    style.log10(panels[0], "x", *rows.limits(part.rows["error"]), most=4)
    end = failures.strip(panels) if len(part.failed) else math.inf
    for axes, own in zip(panels, found, strict=True):
        axes.set_title(own[0].title)
        places = zip(rows.dodge(len(curves)), curves, strict=True)
        for (row, cell), (shift, curve) in product(enumerate(own), places):
            chosen = {"method": curve.method, "steps": curve.steps}
            well, failed = (cell.of(some).filter(**chosen) for some in part)
            words = (*curve, *cell.kind, cell.shape)
            name = " ".join(str(word) for word in words if word is not None)
            colour = cases.shade(curve, curves)
            look = {"color": colour, "marker": "o", "markersize": 2.8}
            rows.dot(axes, well["error"], row + shift, look, name)
            failures.draw(axes, end, row + shift, failed, colour, name)
        rows.name(axes, [cell.name for cell in own])
    frames.name_outside(grid, "error of the update")


def _products_entries(part: Part) -> Entries:
    curves = cases.curves(part.all)
    named = {f"{one.method}, {one.steps}": cases.shade(one, curves) for one in curves}
    lines = {name: Line2D([], [], color=colour, linewidth=2.5) for name, colour in named.items()}
    return lines | failures.entries(part.failed)


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
    """Draw a row a format, so that none hides another: many reach all of the gradient."""
    stored, markers = kinds.present(part.rows), _betas(part)
    roundings, starts = (
        style.in_order(part.rows[name], known) for name, known in (("rounding", ROUNDINGS), ("start", STARTS))
    )
    pairs = list(product(roundings, starts))
    grid, panels = _panels(band, len(pairs), len(pairs), sharex=True, sharey=True)
    for axes, (rounding, start) in zip(panels, pairs, strict=True):
        axes.set_title(f"{ROUNDINGS.get(rounding, rounding)},\n{STARTS.get(start, start)}")
        axes.axvline(1.0, color=style.GREY, linewidth=0.6, zorder=1)
        for (row, kind), (beta, marker) in product(enumerate(stored), markers.items()):
            own = kinds.of(part.rows, kind).filter(rounding=rounding, start=start, beta=beta)
            name = " ".join(filter(None, (*kind, rounding, start, f"{beta:.6g}")))
            rows.dot(axes, own["gain"], float(row), kind.look | {"marker": marker}, name)
        rows.name(axes, kinds.names(stored))
    panels[0].set_xlim(-0.06, max(1.08, 1.05 * float(part.rows["gain"].max())))  # type: ignore[arg-type]
    frames.name_outside(grid, "share of the gradient reached")


def _betas(part: Part) -> dict[float, str]:
    """Return the marker of every decay, the smallest first."""
    betas = sorted(part.rows["beta"].unique())
    return {beta: BETAS[index % len(BETAS)] for index, beta in enumerate(betas)}


def _momentum_entries(part: Part) -> Entries:
    grey: style.Look = {"color": style.GREY, "linestyle": "", "markersize": 3.5}
    return {rf"$\beta$ = {beta:.6g}": Line2D([], [], marker=marker, **grey) for beta, marker in _betas(part).items()}


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
    names = [f"{name}, {operands.replace('_', ' ')}" for (_, operands), name in _named(arms)]
    _, (angle, gain, gap) = _panels(band, 3, 3, sharey=True)
    lost = part.rows.with_columns((1 - pl.col(one.cosine)).clip(ROUNDOFF).alias(one.cosine) for one in WHENS.values())
    for row, (kind, operands) in enumerate(arms):
        own = kinds.of(lost, kind).filter(operands=operands)
        for label, when in WHENS.items():
            look = kind.look | {"marker": when.marker, "markersize": 3.0}
            rows.dot(angle, own[when.cosine], row + when.shift, look, f"{names[row]}, {label}")
            rows.dot(gain, own[when.gain], row + when.shift, look, f"{names[row]}, {label}")
        rows.dot(gap, own["loss_gap"], float(row), kind.look | {"marker": "D", "markersize": 3.0}, names[row])
    labels = {angle: "1 − cosine of the gradient", gain: "gain of the gradient", gap: "loss gap, nat/byte"}
    for axes, label in labels.items():
        axes.set_xlabel(label)
        rows.name(axes, names)
    found = [value for when in WHENS.values() for value in lost[when.cosine]]
    style.log10(angle, "x", *rows.limits(found), most=4)
    for axes, neutral in ((gain, 1.0), (gap, 0.0)):
        axes.axvline(neutral, color=style.GREY, linewidth=0.6, zorder=1)
        axes.xaxis.set_major_locator(MaxNLocator(4))


def _training_entries(part: Part) -> Entries:
    grey: style.Look = {"color": style.GREY, "linestyle": "", "markersize": 3.5}
    return {label: Line2D([], [], marker=when.marker, **grey) for label, when in WHENS.items()}


#: In the order of the page.
OPTIMIZERS = ("adamw", "muon", "mop", "soap", "rekls")
PLACES = ("products", "momentum", "second_moment", "factors")


def _held(part: Part) -> list[tuple[str, str]]:
    """Return which places of which optimizers are in the table."""
    found = set(part.rows.select("optimizer", "place").iter_rows())
    return [pair for pair in product(OPTIMIZERS, PLACES) if pair in found]


def _stored(part: Part) -> list[tuple[kinds.Kind, str]]:
    """Return which formats are rounded how, in the order of the house."""
    found = set(part.rows.select("format", "scale_mode", "rounding").iter_rows())
    return [(kind, name) for kind in kinds.present(part.rows) for name in ROUNDINGS if (*kind, name) in found]


def _optimizer(band: SubFigure, part: Part) -> None:
    arms, stored = _held(part), _stored(part)
    _, (gap, away) = _panels(band, 2, 2, sharey=True)
    for (row, (optimizer, place)), (shift, (kind, rounding)) in product(
        enumerate(arms), zip(rows.dodge(len(stored)), stored, strict=True)
    ):
        own = kinds.of(part.rows, kind).filter(optimizer=optimizer, place=place, rounding=rounding)
        look = kind.look | {"marker": STORED[rounding], "markersize": 2.8}
        for axes, metric in ((gap, "loss_gap"), (away, "error")):
            rows.dot(axes, own[metric], row + shift, look, f"{optimizer} {place} {kind.format} {rounding}")
    for axes, label in ((gap, "loss gap, nat/byte"), (away, "distance to the weights of the float32 run")):
        axes.set_xlabel(label)
        rows.name(axes, [f"{optimizer}, {place.replace('_', ' ')}" for optimizer, place in arms])
    gap.axvline(0.0, color=style.GREY, linewidth=0.6, zorder=1)
    gap.xaxis.set_major_locator(MaxNLocator(4))
    style.log10(away, "x", *rows.limits(part.rows["error"]), most=4)


#: How a state was rounded.
STORED = {"nearest": "o", "stochastic": "D"}


def _optimizer_entries(part: Part) -> Entries:
    grey: style.Look = {"color": style.GREY, "linestyle": "", "markersize": 3.5}
    found = {name for _, name in _stored(part)}
    roundings = {
        ROUNDINGS[name]: Line2D([], [], marker=marker, **grey) for name, marker in STORED.items() if name in found
    }
    return {**kinds.entries(part.all), **(roundings if len(found) > 1 else {})}


def _named(arms: Sequence[tuple[kinds.Kind, str]]) -> list[tuple[tuple[kinds.Kind, str], str]]:
    return list(zip(arms, kinds.names(kind for kind, _ in arms), strict=True))


def _nothing(part: Part) -> Entries:
    """Formats that are named by rows need no legend."""
    return {}


def _format_entries(part: Part) -> Entries:
    return kinds.entries(part.all)


def _formats_height(part: Part, dots: int) -> float:
    return _stack(len(kinds.present(part.rows)), dots) + FRAME - 0.2


#: The effects by the values of the column `what`, in the order of the page.
BANDS: Mapping[str, Band] = {
    "products": Band(("error",), 1.0, _products_height, _products, _products_entries),
    "gradient": Band(tuple(GRADIENT), 1.0, lambda part: _formats_height(part, 1), _gradient, _nothing),
    "momentum": Band(("gain",), 1.0, lambda part: _formats_height(part, 1) + 0.3, _momentum, _momentum_entries),
    "factor": Band(tuple(FACTOR), 1.6, _factor_height, _factor, _format_entries),
    "polar": Band(("relative", "bound"), 1.0, lambda part: 1.95, _polar, _format_entries),
    "training": Band(
        (*(name for when in WHENS.values() for name in when[:2]), "loss_gap"),
        1.0,
        lambda part: _stack(len(_arms(part)), 2) + FRAME - 0.2,
        _training,
        _training_entries,
    ),
    "optimizer": Band(
        ("loss_gap", "error"),
        1.0,
        lambda part: _stack(len(_held(part)), len(_stored(part))) + FRAME - 0.2,
        _optimizer,
        _optimizer_entries,
    ),
}

#: Which effects share a row of the page.
PAGE: Sequence[Sequence[str]] = (
    ("products",),
    ("gradient",),
    ("momentum",),
    ("factor", "polar"),
    ("training",),
    ("optimizer",),
)
