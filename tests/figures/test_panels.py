import subprocess
import sys
from itertools import product

import layout_tables
import numpy as np
import polars as pl
import pytest
from matplotlib.text import Text

from muon_lab import figures
from muon_lab.figures import labels, panels, save

GENERATOR = np.random.default_rng


def blockwise(sources=("recorded", "gaussian"), dims=(0, 1), tps=(1, 2, 4, 8), methods=("svd", "quintic")):
    matrices = {
        "recorded": [f"{kind}/200/{layer}" for kind in ("gradient", "momentum") for layer in "abcde"],
        "gaussian": [None] * 3,
    }
    rows = []
    for source, dim, tp, method in product(sources, dims, tps, methods):
        for seed, matrix in enumerate(matrices[source]):
            rows.append((source, matrix, seed, dim, tp, method, None if method == "svd" else 5))
    table = pl.DataFrame(
        rows,
        schema={"source": pl.String, "matrix": pl.String, "seed": pl.Int64, "dim": pl.Int64, "tp": pl.Int64}
        | {"method": pl.String, "steps": pl.Int64},
        orient="row",
    )
    noise = GENERATOR(0).uniform(0.5, 1, (2, len(table)))
    return table.with_columns(
        layout=pl.lit("blockwise"),
        cut=pl.lit("even"),
        dtype=pl.lit("float64"),
        outcome=pl.lit("ok"),
        relative=pl.Series(noise[0]) * pl.col("tp").sqrt(),
        sigma_max=pl.Series(noise[1]) * pl.col("tp").sqrt(),
        bound=pl.col("tp").sqrt(),
    )


def orthogonalization(steps=(1, 2, 3)):
    axes = ("gaussian", "power(1)"), ("float32", "bfloat16"), ("simple", "taylor"), steps, (0, 1, 2)
    rows = [*product(*axes), *((*point, "svd", None, 0) for point in product(*axes[:2]))]
    table = pl.DataFrame(rows, schema=["spectrum", "dtype", "method", "steps", "seed"], orient="row")
    noise = 10.0 ** GENERATOR(1).uniform(-4, 0, (3, len(table)))
    names = ("relative", "truncation", "rounding")
    return table.with_columns(pl.lit("ok").alias("outcome"), *map(pl.Series, names, noise))


def schedules():
    points = list(product(("simple", "aol", "mine"), (1, 2, 3, 4, 5, 6), (1e-4, 1e-3, 1e-2, 0.1, 1.0)))
    table = pl.DataFrame(points, schema=["method", "steps", "sigma"], orient="row")
    noise = GENERATOR(2).uniform(0, 1, (4, len(table)))
    names = ("image", "worst", "low", "high")
    return table.with_columns(pl.lit("ok").alias("outcome"), *map(pl.Series, names, noise))


def speed():
    points = list(product(("64x64", "64x256", "512x512", "512x2048"), ("simple", "svd"), ("lab", "torch")))
    table = pl.DataFrame(points, schema=["shape", "method", "peer"], orient="row")
    ratio = 2.0 ** GENERATOR(3).uniform(-1, 2, len(table))
    facts = {"threads": 1, "dtype": "float32", "steps": 5, "repeats": 7, "outcome": "ok"}
    return table.with_columns(**{name: pl.lit(value) for name, value in facts.items()}).with_columns(
        ratio=pl.Series(ratio), ratio_low=pl.Series(0.9 * ratio), ratio_high=pl.Series(1.2 * ratio)
    )


def work_precision(spectra=("gaussian", "geometric(100)"), shapes=("64x256", "256x256"), dtypes=("float32",)):
    methods = ("svd", "qdwh", "simple", "taylor", "auto:taylor", "gram@2:schatten4-1:simple", "minimax(lower=1e-3)")
    points = [
        (*point, steps)
        for point in product(spectra, shapes, dtypes, methods)
        for steps in ((None,) if point[-1] in ("svd", "qdwh") else (2, 3, 5))
        for seed in (0, 1, 2)
    ]
    names = ["spectrum", "shape", "dtype", "method", "steps"]
    table = pl.DataFrame(points, schema=names, orient="row")
    error, flops, ratio = 10.0 ** GENERATOR(6).uniform(-1, 0.5, (3, len(table)))
    facts = {"threads": 1, "repeats": 5, "outcome": "ok"}
    return (
        table.with_columns(**{name: pl.lit(value) for name, value in facts.items()})
        .with_columns(relative=pl.Series(error**5), flops_ratio=pl.Series(flops), ratio=pl.Series(ratio))
        .with_columns(ratio_low=0.9 * pl.col("ratio"), ratio_high=1.1 * pl.col("ratio"))
    )


EFFECTS = {
    "gradient": {},
    "products": {"method": ("simple", "taylor"), "steps": (5,)},
    "momentum": {"beta": (0.9, 0.95), "rounding": ("nearest", "stochastic"), "start": ("zero", "gradient")},
    "factor": {},
    "polar": {},
    "training": {"operands": ("all", "weights")},
}


def stability(
    whats=EFFECTS,
    spectra=("gaussian", "geometric(100)", "recorded"),
    formats=("bf16", "mxfp8_e4m3"),
    shapes=("128x256",),
):
    """Return a table in which mxfp8 fails in two ways: `simple` on recorded matrices, and once in three elsewhere."""
    modes = {"bf16": (None,), "mxfp8_e4m3": ("rceil", "floor")}
    schema = {"what": pl.String, "spectrum": pl.String, "seed": pl.Int64, "format": pl.String, "scale_mode": pl.String}
    schema |= {"method": pl.String, "steps": pl.Int64, "beta": pl.Float64, "rounding": pl.String}
    schema |= {"start": pl.String, "operands": pl.String, "shape": pl.String}
    rows = []
    for what, spectrum, shape, seed, format in product(whats, spectra, shapes, (0, 1, 2), formats):
        names = [name for name in schema if name in EFFECTS[what]]
        for mode, *values in product(modes[format], *(EFFECTS[what][name] for name in names)):
            axes = {"what": what, "spectrum": spectrum, "seed": seed, "format": format, "scale_mode": mode}
            axes["shape"] = ("96x384", "384x96", "96x96")[seed] if spectrum == "recorded" else shape
            rows.append(axes | dict(zip(names, values, strict=True)))
    table = pl.DataFrame([dict.fromkeys(schema) | row for row in rows], schema=schema)
    metrics = ("error", "saturated", "flushed", "relative", "bound", "gain", "lowest", "negative")
    metrics += ("truncation", "rounding_error", "quantization", "remainder")
    metrics += ("gradient_cosine", "gradient_gain", "end_cosine", "end_gain", "loss_gap")
    noise = dict(zip(metrics, 10.0 ** GENERATOR(4).uniform(-3, 0, (len(metrics), len(table))), strict=True))
    failing = (pl.col("what") == "products") & (pl.col("method") == "simple") & pl.col("scale_mode").is_not_null()
    lost = failing & (pl.col("spectrum") == "recorded")
    return (
        table.with_columns(pl.Series(name, values) for name, values in noise.items())
        .with_columns(pl.when(pl.col("format") != "bf16").then(pl.col("quantization")).alias("quantization"))
        .with_columns(
            outcome=pl.when(lost)
            .then(pl.lit("nonfinite"))
            .when(failing & (pl.col("seed") == 2))
            .then(pl.lit("diverged"))
            .otherwise(pl.lit("ok")),
            failed_step=pl.when(lost).then(5 + pl.col("seed")),
        )
        .with_columns(pl.when(~lost).then(pl.col(name)).alias(name) for name in metrics)
        .with_columns(pl.when(pl.col("outcome") == "diverged").then(1e6).otherwise(pl.col("error")).alias("error"))
    )


TABLES = {
    "orthogonalization": orthogonalization,
    "blockwise": blockwise,
    "volume": layout_tables.volume,
    "sharded_training": layout_tables.sharded_training,
    "reduction": layout_tables.reduction,
    "stability": stability,
    "schedules": schedules,
    "speed": speed,
    "work_precision": work_precision,
}
DEGENERATE = {
    **layout_tables.DEGENERATE,
    "several layouts": lambda: ("blockwise", several("layout", "gram", "periodic")),
    "several cuts": lambda: ("blockwise", several("cut", "half")),
    "one dim": lambda: ("blockwise", blockwise(dims=(1,))),
    "one source": lambda: ("blockwise", blockwise(sources=("gaussian",)).with_columns(matrix=pl.lit(None))),
    "one tp": lambda: ("blockwise", blockwise(tps=(4,))),
    "one method": lambda: ("blockwise", blockwise(methods=("quintic",))),
    "one row": lambda: ("blockwise", blockwise().head(1)),
    "tp of no power of two": lambda: ("blockwise", blockwise(tps=(1, 3, 6))),
    "no error at all": lambda: ("blockwise", blockwise(tps=(1,)).with_columns(relative=0.0)),
    "zero matrices": lambda: ("blockwise", blockwise().with_columns(relative=0.0, sigma_max=0.0)),
    "one number of steps": lambda: ("orthogonalization", orthogonalization(steps=(5,))),
    "exact alone": lambda: ("orthogonalization", orthogonalization().filter(method="svd")),
    "exact to the last bit": lambda: ("orthogonalization", orthogonalization().with_columns(truncation=0.0)),
    "one schedule at one value": lambda: ("schedules", schedules().head(1)),
    "exact schedules": lambda: ("schedules", schedules().with_columns(worst=0.0, image=1.0, low=1.0, high=1.0)),
    "a schedule that escapes": lambda: ("schedules", schedules().with_columns(worst=1e9)),
    "one shape": lambda: ("speed", speed().filter(shape="64x64")),
    "a peer that is missing once": lambda: ("speed", speed().slice(1)),
    **{f"{what} alone": lambda what=what: ("stability", stability((what,))) for what in EFFECTS},
    "one format": lambda: ("stability", stability(formats=("bf16",))),
    "one spectrum": lambda: ("stability", stability(spectra=("recorded",))),
    "one effect of one matrix": lambda: ("stability", stability().filter(what="products").head(1)),
    "failures alone": lambda: ("stability", stability().filter(outcome="nonfinite")),
    "no error in any format": lambda: ("stability", stability().with_columns(error=0.0, bound=0.0, relative=0.0)),
    "one problem": lambda: ("work_precision", work_precision(("gaussian",), ("8x8",))),
    "one case": lambda: ("work_precision", work_precision().head(1)),
    "five spectra": lambda: ("work_precision", work_precision((*"abcde",), ("8x8",))),
    "exact methods alone": lambda: ("work_precision", work_precision().filter(pl.col("steps").is_null())),
    "two dtypes": lambda: ("work_precision", work_precision(dtypes=("float32", "bfloat16"))),
    "two numbers of threads": lambda: ("work_precision", pl.concat([work_precision(), more_threads()])),
    "no error left": lambda: ("work_precision", work_precision().with_columns(relative=0.0)),
    "no flops at all": lambda: ("work_precision", work_precision().with_columns(flops_ratio=0.0)),
    "work that is the unit": lambda: ("work_precision", work_precision().with_columns(flops_ratio=1.0, ratio=1.0)),
    "forms and starts": lambda: ("orthogonalization", variants()),
    "several numbers of steps": lambda: ("stability", pl.concat([stability(), more_steps()])),
    "several shapes": lambda: ("stability", stability(shapes=("32x64", "64x128", "512x1024"))),
    "shapes of one spectrum": lambda: ("stability", stability(("products",), ("gaussian",), shapes=("32x64", "64x8"))),
    "one start": lambda: ("stability", stability(("momentum",)).filter(start="zero")),
    "stability in categories": lambda: ("stability", stability().with_columns(pl.col(pl.String).cast(pl.Categorical))),
    "categories": lambda: ("speed", speed().with_columns(pl.col("peer", "method", "outcome").cast(pl.Categorical))),
}


def several(name, *others):
    """Return a table of a column's first value and others, whose numbers are larger."""
    table = blockwise(sources=("gaussian",))
    more = [
        table.with_columns(pl.lit(other).alias(name), relative=(2 + place) * pl.col("relative"))
        for place, other in enumerate(others)
    ]
    return pl.concat([table, *more])


def more_steps():
    return stability(("products",)).with_columns(steps=pl.lit(7, pl.Int64))


def more_threads():
    return work_precision().with_columns(threads=pl.lit(2, pl.Int32))


def variants():
    names = {"simple": "gram@none:aol-1:polar_express_1.05", "taylor": "auto:minimax(lower=1e-3,cushion=0.02)"}
    return orthogonalization().with_columns(pl.col("method").replace(names))


def line(axes, name):
    (found,) = [one for one in axes.lines if one.get_label() == name]
    return found


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def unseen(figure):
    """Return what is never drawn: panels that are hidden, and ticks beyond the ends of their axis."""
    for axes in figure.axes:
        if not axes.get_visible():
            yield from axes.findobj()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            yield from (tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high)


def boxes(figure):
    """Return every visible word, and where it stands on the page: left, bottom, right, top."""
    figure.draw_without_rendering()
    hidden = {id(artist) for artist in unseen(figure)}
    seen = figure.findobj(lambda one: isinstance(one, Text) and one.get_visible() and one.get_text().strip())
    words = [text for text in seen if id(text) not in hidden]
    return [text.get_text() for text in words], np.array([Text.get_window_extent(text).extents for text in words])


def cut_off(words, places, page):
    """Return the words that leave the page by more than a dot."""
    inside = np.concatenate([places[:, :2] - page.extents[:2], page.extents[2:] - places[:, 2:]], axis=1)
    return [words[i] for i in np.flatnonzero(inside.min(axis=1) < -1)]


def overlaps(words, places):
    """Return the pairs of words that share more than a dot of the page."""
    low, high = places[:, :2], places[:, 2:]
    shared = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    return [(words[i], words[j]) for i, j in np.argwhere((shared > 1).all(axis=2)) if i < j]


def misplaced(figure):
    """Return the words of a figure that cannot be read, and why."""
    words, places = boxes(figure)
    found = {"overlap": overlaps(words, places), "cut off": cut_off(words, places, figure.bbox)}
    return {why: which for why, which in found.items() if which}


def test_blockwise_draws_medians_and_quartiles():
    table = blockwise()
    figure = panels.blockwise(table)
    own = table.filter(pl.col("matrix").str.starts_with("momentum"), dim=1, method="quintic").sort("tp")
    for row, metric in enumerate(("relative", "sigma_max")):
        values = own[metric].to_numpy().reshape(4, 5)
        axes = figure.axes[2 * row + 1]
        curve = line(axes, "recorded momenta quintic 5 float64")
        np.testing.assert_array_equal(curve.get_ydata(), np.median(values, axis=1))
        np.testing.assert_array_equal(np.round(np.log2(curve.get_xdata())), [0, 1, 2, 3])
        bars = np.array([bar for one in axes.collections for bar in one.get_segments() if bar[0][0] == bar[1][0]])
        for low, high in zip(*np.quantile(values, [0.25, 0.75], axis=1), strict=True):
            assert np.isclose(bars[:, :, 1], [low, high], rtol=1e-14).all(axis=1).any()


def test_blockwise_has_a_pair_of_rows_for_every_layout():
    """A median over layouts would be that of no layout."""
    table = several("layout", "gram", "periodic")
    figure = panels.blockwise(table)
    assert len(figure.axes) == 12
    for place, layout in enumerate(("gram", "blockwise", "periodic")):
        axes = figure.axes[4 * place]
        assert axes.get_title() == f"{layout}: rows cut (dim 0)"
        own = table.filter(layout=layout, dim=0, method="svd").group_by("tp").agg(pl.col("relative").median())
        drawn = line(axes, "planted gaussian svd float64").get_ydata()
        np.testing.assert_array_equal(drawn, own.sort("tp")["relative"])


def test_blockwise_has_a_pair_of_rows_for_every_cut():
    figure = panels.blockwise(several("cut", "half"))
    assert [axes.get_title() for axes in figure.axes[::4]] == [
        "even cut: rows cut (dim 0)",
        "half cut: rows cut (dim 0)",
    ]
    first, second = (line(axes, "planted gaussian svd float64").get_ydata() for axes in figure.axes[::4])
    np.testing.assert_array_equal(2 * first, second)


def test_blockwise_draws_the_bound_of_the_table():
    figure = panels.blockwise(blockwise())
    (bound,) = [one for one in figure.axes[2].collections if one.get_label() == "bound"]
    assert [segment[0][1] for segment in bound.get_segments()] == [1.0, 2**0.5, 2.0, 8**0.5]


def test_schedules_draw_images_and_worst_errors():
    table = schedules()
    figure = panels.schedules(table, {"aol": 4}, lower=2e-3)
    image = line(figure.axes[1], "aol 4")
    own = table.filter(method="aol", steps=4)
    np.testing.assert_array_equal(image.get_xydata(), own.select("sigma", "image").to_numpy())
    worst = line(figure.axes[-1], "mine")
    own = table.filter(method="mine", sigma=1e-3)
    np.testing.assert_array_equal(worst.get_xydata(), own.select("steps", "worst").to_numpy())


def test_orthogonalization_draws_the_whole_and_its_parts():
    table = orthogonalization()
    figure = panels.orthogonalization(table)
    axes = figure.axes[3]
    assert axes.get_title() == "power(1), bfloat16"
    for name in ("relative", "truncation", "rounding"):
        own = table.filter(spectrum="power(1)", dtype="bfloat16", method="taylor").sort("steps")
        medians = np.median(own[name].to_numpy().reshape(3, 3), axis=1)
        np.testing.assert_array_equal(line(axes, f"taylor {name}").get_ydata(), medians)


def test_orthogonalization_at_one_number_of_steps_has_a_row_a_method():
    table = orthogonalization(steps=(5,))
    axes = panels.orthogonalization(table).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["svd", "simple", "taylor"]
    own = table.filter(spectrum="gaussian", dtype="float32", method="taylor")
    assert line(axes, "taylor").get_xdata() == [own["relative"].median()]
    assert line(axes, "taylor rounding").get_xdata() == [own["rounding"].median()]


def test_speed_draws_ratios_with_their_quartiles():
    table = speed()
    axes = panels.speed(table).axes[2]
    assert axes.get_title() == "512 × 512"
    own = table.filter(shape="512x512", method="simple", peer="torch")
    assert line(axes, "simple, torch").get_xdata() == [own["ratio"].item()]
    ends = [list(one.get_segments()[0][:, 0]) for one in axes.collections]
    assert [own["ratio_low"].item(), own["ratio_high"].item()] in ends


def test_work_precision_draws_medians_of_errors_against_flops_and_time():
    table = work_precision()
    figure = panels.work_precision(table)
    flops, time = figure.axes[1], figure.axes[5]
    assert flops.get_title() == "geometric(100)\n64 × 256"
    own = table.filter(spectrum="geometric(100)", shape="64x256", method="auto:taylor").sort(
        "steps", maintain_order=True
    )
    medians = {
        name: np.median(own[name].to_numpy().reshape(3, 3), axis=1) for name in ("relative", "flops_ratio", "ratio")
    }
    for axes, work in ((flops, "flops_ratio"), (time, "ratio")):
        curve = line(axes, "auto:taylor float32")
        np.testing.assert_array_equal(curve.get_xdata(), medians[work])
        np.testing.assert_array_equal(curve.get_ydata(), medians["relative"])
        assert curve.get_linestyle() != line(axes, "taylor float32").get_linestyle()
        assert curve.get_color() == line(axes, "taylor float32").get_color()
        assert len(line(axes, "qdwh float32").get_xdata()) == 1
        assert line(axes, "qdwh float32").get_linestyle() == "None"
    low = own["ratio_low"].to_numpy().reshape(3, 3)
    ends = np.array([bar[:, 0] for one in time.collections for bar in one.get_segments()])
    assert np.isclose(ends[:, 0], np.median(low[0])).any()
    assert not flops.collections


def test_work_precision_shares_its_axes_so_that_panels_compare():
    figure = panels.work_precision(work_precision())
    limits = [{axes.get_xlim() for axes in figure.axes if axes.get_xlabel() == name} for name in panels_of_works()]
    assert [len(one) for one in limits] == [1, 1]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert {"1/2", "1", "2"} <= {tick.get_text() for tick in figure.axes[0].get_xticklabels()}


def panels_of_works():
    from muon_lab.figures.work_precision import WORKS

    return WORKS.values()


def panel(figure, title):
    (found,) = [axes for axes in figure.axes if axes.get_title() == title]
    return found


def named(figure, name):
    """Return the artists of all panels that bear a name."""
    return [one for axes in figure.axes for one in axes.lines if one.get_label() == name]


def test_stability_draws_errors_of_products():
    table = stability()
    figure = panels.stability(table)
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert names == ["bf16", "mxfp8_e4m3, rceil", "mxfp8_e4m3, floor"]
    axes = panel(figure, "geometric(100)")
    own = table.filter(what="products", spectrum="geometric(100)", method="taylor", scale_mode="floor")
    dot = line(axes, "taylor 5 mxfp8_e4m3 floor")
    assert dot.get_xdata() == [own["error"].median()]
    assert round(dot.get_ydata()[0]) == 2
    ends = [list(one.get_segments()[0][:, 0]) for one in axes.collections if len(one.get_segments())]
    assert any(np.allclose(pair, np.quantile(own["error"], [0.25, 0.75]), rtol=1e-14) for pair in ends)


def test_stability_shows_failures_with_their_step_behind_the_axis():
    figure = panels.stability(stability())
    axes = panel(figure, "recorded")
    mark = line(axes, "simple 5 mxfp8_e4m3 rceil nonfinite")
    assert mark.get_marker() == "$5$"  # the earliest of 5, 6 and 7
    assert not [one for one in axes.lines if one.get_label() == "simple 5 mxfp8_e4m3 rceil"]
    partly = panel(figure, "gaussian")
    triangle = line(partly, "simple 5 mxfp8_e4m3 rceil diverged")
    (dot,) = line(partly, "simple 5 mxfp8_e4m3 rceil").get_xdata()
    assert triangle.get_marker() == ">"
    shown = [one.get_xdata()[0] for one in partly.lines if one.get_label().startswith("taylor")]
    for failure, place in ((mark, axes), (triangle, partly)):
        assert max(dot, *shown) < failure.get_xdata()[0] < place.get_xlim()[1]
    assert {"diverged", "not finite at step $k$"} <= {*texts(figure)}
    assert not any("not shown" in text for text in texts(figure))


@pytest.mark.parametrize("what", ["gradient", "factor"])
def test_stability_draws_medians_of_a_matrix_in_a_format(what):
    table = stability()
    figure = panels.stability(table)
    own = table.filter(what=what, scale_mode="floor")
    name, metrics = "mxfp8_e4m3 floor", ("error", "saturated", "flushed")
    if what == "factor":
        own, name, metrics = own.filter(spectrum="recorded"), f"recorded {name}", ("lowest", "negative")
    drawn = [one.get_xdata()[0] for one in named(figure, name) if len(one.get_xdata()) == 1]
    assert drawn == [own[metric].median() for metric in metrics]


def test_stability_draws_momentum_in_a_row_a_format():
    table = stability()
    axes = panel(panels.stability(table), "stochastic,\nfrom another gradient")
    kinds = {"bf16": None, "mxfp8_e4m3 rceil": "rceil", "mxfp8_e4m3 floor": "floor"}
    for row, (kind, mode) in enumerate(kinds.items()):
        own = table.filter(pl.col("scale_mode").eq_missing(pl.lit(mode)), what="momentum", format=kind.split()[0])
        for beta in (0.9, 0.95):
            dot = line(axes, f"{kind} stochastic gradient {beta}")
            found = own.filter(rounding="stochastic", start="gradient", beta=beta)
            assert dot.get_xydata().tolist() == [[found["gain"].median(), row]]
    markers = {line(axes, f"bf16 stochastic gradient {beta}").get_marker() for beta in (0.9, 0.95)}
    assert len(markers) == 2
    assert {r"$\beta$ = 0.9", r"$\beta$ = 0.95"} <= {*texts(axes.get_figure(root=True))}


def test_no_format_hides_another_in_the_panels_of_momentum():
    """All reach the gradient: as curves they would be one."""
    axes = panel(panels.stability(stability(("momentum",)).with_columns(gain=1.0)), "to nearest,\nfrom zero")
    dots = [one for one in axes.lines if one.get_label().endswith("0.9")]
    assert len(dots) == 3
    assert len({tuple(one.get_xydata()[0]) for one in dots}) == 3


def test_stability_draws_products_by_shape_where_there_are_several():
    table = stability(("products",), spectra=("gaussian",), shapes=("128x256", "32x64", "64x32", "512x512"))
    figure = panels.stability(table)
    assert [axes.get_title() for axes in figure.axes] == ["bf16", "mxfp8_e4m3, rceil", "mxfp8_e4m3, floor"]
    shapes = ["32x64", "64x32", "128x256", "512x512"]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] in (shapes, ["64x32", "32x64", *shapes[2:]])
    own = table.filter(shape="64x32", method="taylor", scale_mode="floor")
    dot = line(figure.axes[2], "taylor 5 mxfp8_e4m3 floor 64x32")
    assert dot.get_xdata() == [own["error"].median()]
    both = panels.stability(stability(("products",), shapes=("128x256", "32x64")))
    assert both.axes[3].get_title() == "geometric(100)\nbf16"


def test_stability_draws_every_polar_factor_against_its_bound():
    table = stability()
    (axes,) = [axes for axes in panels.stability(table).axes if "polar factor" in axes.get_ylabel()]
    own = table.filter(what="polar", format="bf16").sort("bound").select("bound", "relative")
    np.testing.assert_array_equal(line(axes, "bf16").get_xydata(), own.to_numpy())
    x, y = line(axes, "bound").get_data()
    assert list(x) == list(y)


def test_stability_draws_training_by_operands():
    table = stability()
    figure = panels.stability(table)
    own = table.filter(what="training", scale_mode="floor", operands="weights")
    angle, gain, gap = figure.axes[-3:]
    assert "loss gap" in gap.get_xlabel()
    for when, name in (("at the common start", "gradient"), ("at the end", "end")):
        label = f"mxfp8_e4m3, floor, weights, {when}"
        np.testing.assert_allclose(line(angle, label).get_xdata(), 1 - own[f"{name}_cosine"].median())
        assert line(gain, label).get_xdata() == [own[f"{name}_gain"].median()]
        assert when in texts(figure)
    assert line(gap, "mxfp8_e4m3, floor, weights").get_xdata() == [own["loss_gap"].median()]


def test_a_gradient_that_is_exact_is_drawn_at_roundoff():
    table = stability(("training",)).with_columns(gradient_cosine=1.0)
    assert all(dot.get_xdata()[0] > 0 for dot in named(panels.stability(table), "bf16, all, at the common start"))


def test_error_budget_draws_the_whole_its_parts_and_what_they_can_add_up_to():
    table = stability()
    figure = panels.error_budget(table)
    axes = figure.axes[4]  # the second schedule, the second spectrum
    assert axes.get_title(loc="left") == "taylor, 5"
    own = table.filter(what="products", spectrum="geometric(100)", method="taylor", scale_mode="rceil")
    names = ("truncation", "rounding_error", "quantization", "remainder")
    for name in ("relative", *names):
        assert line(axes, f"mxfp8_e4m3 rceil {name}").get_xdata() == [own[name].median()]
    lengths = np.sort(own.select(names).to_numpy(), axis=1)
    least = np.median(np.maximum(lengths[:, -1] - lengths[:, :-1].sum(axis=1), 0))
    bar = axes.collections[1].get_paths()[0].vertices[:, 0]
    np.testing.assert_allclose(bar.max(), np.median(lengths.sum(axis=1)))
    assert bar.min() == pytest.approx(least) or bar.min() < axes.get_xlim()[0] >= least


def test_error_budget_knows_no_quantization_of_a_stored_format_and_shows_failures():
    figure = panels.error_budget(stability())
    assert not named(figure, "bf16 quantization")
    assert [one.get_marker() for one in named(figure, "mxfp8_e4m3 floor nonfinite")] == ["$5$"]
    assert [one.get_marker() for one in named(figure, "mxfp8_e4m3 floor diverged")] == [">", ">"]


BUDGETS = {
    "all": stability,
    "one spectrum": lambda: stability(spectra=("gaussian",)),
    "one row": lambda: stability(("products",)).head(1),
    "failures alone": lambda: stability().filter(outcome="nonfinite"),
    "several numbers of steps": lambda: pl.concat([stability(), more_steps()]),
    "no error at all": lambda: stability().with_columns(relative=0.0, truncation=0.0, rounding_error=0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETS)
def test_error_budget_is_legible_and_ignores_the_order_of_rows(name, tmp_path):
    table = BUDGETS[name]()
    figure = panels.error_budget(table)
    assert not misplaced(figure)
    tables = table, table.sample(fraction=1.0, shuffle=True, seed=1)  # drawn anew: every drawing moves the layout a bit
    figures = [panels.error_budget(one) for one in tables]
    found = [[path.read_bytes() for path in save.save(one, tmp_path / "budget")] for one in figures]
    assert found[0] == found[1]


def test_error_budget_without_products_is_refused():
    with pytest.raises(ValueError, match="rows of the table are products"):
        panels.error_budget(stability(("polar",)))


@pytest.mark.slow
@pytest.mark.parametrize("study", TABLES)
def test_the_order_of_rows_does_not_matter(study, tmp_path):
    table = TABLES[study]()
    found = [
        [path.read_bytes() for path in save.save(figures.draw(study, one), tmp_path / study)]
        for one in (table, table.sample(fraction=1.0, shuffle=True, seed=1))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("study", "wanted"),
    [
        ("blockwise", {"rows cut (dim 0)", "tensor-parallel ranks", "svd", "recorded momenta", "planted gaussian"}),
        ("volume", {"tensor-parallel ranks", "gram", "float32, tp 8", "break-even", "short axis cut"}),
        ("sharded_training", {"gpt small\nmuon", "independent of tp", "blocks, corrected step", "blockwise"}),
        ("reduction", {"rounded at every hop", "gaussian\nbfloat16", "update,\nquintic, 5", "tree"}),
        (
            "stability",
            {
                "gaussian",
                "simple, 5",
                "mxfp8_e4m3",
                "scales by floor",
                "flushed to zero",
                "to nearest,\nfrom zero",
                "bound",
            },
        ),
        ("schedules", {"steps", r"$\sigma$", "simple", "mine", "aol, 5"}),
        ("orthogonalization", {"steps", "truncation", "rounding", "taylor", "gaussian, float32"}),
        ("speed", {"time / reference", "svd, lab", "512 × 2048"}),
        (
            "work_precision",
            {"flops / five plain steps", "time / five plain steps", "gaussian\n64 × 256", "auto:taylor"},
        ),
    ],
)
def test_everything_has_its_name(study, wanted):
    assert wanted <= {*texts(figures.draw(study, TABLES[study]()))}


@pytest.mark.parametrize("study", TABLES)
def test_words_do_not_meet_and_stay_on_the_page(study):
    figure = figures.draw(study, TABLES[study]())
    assert not misplaced(figure)


LAYOUTS = {
    "errors": lambda: panels.tp_error(layout_tables.errors()),
    "errors of one kind": lambda: panels.tp_error(layout_tables.errors(("gaussian",), ((32, 64),))),
    "work": lambda: panels.layout_work(layout_tables.errors(), layout_tables.volume()),
    "work of one kind": lambda: panels.layout_work(
        layout_tables.errors(("gaussian",), ((32, 32),), ("gram", "owner")), layout_tables.volume()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_figures_of_layouts_are_legible_and_the_same_again(name, tmp_path):
    figure = LAYOUTS[name]()
    assert not misplaced(figure)
    found = [[path.read_bytes() for path in save.save(LAYOUTS[name](), tmp_path / "layouts")] for _ in range(2)]
    assert found[0] == found[1]


def test_words_that_meet_are_seen():
    figure = figures.draw("speed", speed())
    figure.text(0.5, 0.5, "planted")
    figure.text(0.51, 0.5, "twice")
    assert ("planted", "twice") in misplaced(figure)["overlap"]
    figure.text(0.97, 0.1, "too far right")
    assert misplaced(figure)["cut off"] == ["too far right"]


@pytest.mark.parametrize("study", TABLES)
def test_cases_that_did_not_end_well_are_counted_and_not_drawn(study):
    table = TABLES[study]()
    metrics = [name for name, dtype in table.schema.items() if dtype == pl.Float64 and name not in ("sigma", "bound")]
    bad = table.head(2).with_columns(
        pl.lit("nonfinite").alias("outcome"), *(pl.lit(1e9).alias(name) for name in metrics)
    )
    figure = figures.draw(study, pl.concat([table, bad]))
    assert f"2 of {len(table) + 2} cases not shown" in texts(figure)
    assert all(np.nanmax(one.get_ydata(), initial=0) < 1e9 for axes in figure.axes for one in axes.lines)
    assert not any("not shown" in text for text in texts(figures.draw(study, table)))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEGENERATE)
def test_a_thin_table_gives_a_figure(name):
    figure = figures.draw(*DEGENERATE[name]())
    assert not misplaced(figure)


def test_a_legend_is_no_wider_than_its_figure():
    figure = figures.draw("orthogonalization", variants())
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().x0 >= 0
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert figure.get_figheight() > figures.draw("orthogonalization", orthogonalization()).get_figheight()


def test_ends_of_curves_keep_apart_as_they_are_ordered():
    places = GENERATOR(5).uniform(0, 1, 9)
    moved = np.array(labels.spread([float(place) for place in places], 0.1))
    assert (np.argsort(moved) == np.argsort(places)).all()
    assert np.diff(np.sort(moved)).min() > 0.1 - 1e-12
    assert moved.min() >= 0
    assert moved.max() <= 1


def test_unknown_study_names_the_nearest():
    with pytest.raises(ValueError, match="unknown study 'blokwise': did you mean 'blockwise'"):
        figures.draw("blokwise", blockwise())


def test_a_table_of_another_study_is_refused():
    with pytest.raises(ValueError, match="table lacks the columns shape"):
        figures.draw("speed", blockwise())


def test_a_table_without_results_is_refused():
    with pytest.raises(ValueError, match="none of the 208 rows of the table ended ok"):
        figures.draw("blockwise", blockwise().with_columns(outcome=pl.lit("error")))


def test_every_study_has_a_figure():
    from muon_lab import studies

    assert set(figures.names()) == set(studies.NAMES)


def test_figures_never_import_torch():
    code = (
        "import sys; from muon_lab import figures; from muon_lab.figures import save, style; figures.names();"
        "assert 'matplotlib.figure' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules;"
        "assert not {'torch', 'muon_lab.studies', 'muon_lab.polar'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_designs_draws_medians_and_failures():
    points = list(product(("gaussian", "recorded"), (0, 1, 2), (0, 2), ("taylor", "mxfp8_flat"), (5, 8)))
    table = pl.DataFrame(points, schema=["spectrum", "seed", "fine", "method", "steps"], orient="row")
    error = 10.0 ** GENERATOR(7).uniform(-2, 0, len(table))
    lost = (pl.col("method") == "taylor") & (pl.col("steps") == 8) & (pl.col("fine") == 0)
    table = table.with_columns(pl.Series("direction", error), format=pl.lit("mxfp8_e4m3")).with_columns(
        outcome=pl.when(lost).then(pl.lit("nonfinite")).otherwise(pl.lit("ok")),
        failed_step=pl.when(lost).then(7),
    )
    figure = panels.draw("designs", table)
    axes = panel(figure, "recorded, 5 steps")
    own = table.filter(spectrum="recorded", steps=5, method="mxfp8_flat", fine=2)
    assert line(axes, "mxfp8_flat 5 2").get_xdata()[0] == own["direction"].median()
    assert [tick.get_text() for tick in panel(figure, "gaussian, 5 steps").get_yticklabels()] == [
        "taylor",
        "mxfp8_flat",
    ]
    assert line(panel(figure, "gaussian, 8 steps"), "taylor 8 0 nonfinite").get_marker() == "$7$"
    assert not misplaced(figure)
    with pytest.raises(ValueError, match="none of the 0 rows"):
        panels.draw("designs", table.clear())
