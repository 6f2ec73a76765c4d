"""The figure of optimizers draws what the table has, and its choices are those of the table."""

from itertools import pairwise, product

import numpy as np
import polars as pl
import pytest
from matplotlib.text import Text

from muon_lab.figures import convergence, panels, save

CURVE = tuple(convergence.CURVE)
GRID = (0.0025, 0.005, 0.01, 0.02, 0.04)


def runs(problems=("gpt_small", "quadratic"), optimizers=("adamw", "muon", "soap"), rates=(0.01, 0.03, 0.1)):
    """Return a table in which every loss is drawn at random; losses of the quadratic span decades."""
    rows = list(product(problems, optimizers, rates, (0, 1, 2)))
    table = pl.DataFrame(rows, schema=["problem", "optimizer", "lr", "seed"], orient="row")
    noise = np.random.default_rng(0).uniform(1, 2, (len(CURVE), len(table)))
    power = 3.0 * (table["problem"] == "quadratic").to_numpy()
    losses = {name: noise[index] * 10.0 ** (-power * index / 10) for index, name in enumerate(CURVE)}
    direction = {"method": "quintic", "steps": 5, "scale": "none", "planted": "none"}
    nothing = {"size": pl.Float64, "persistence": pl.String, "failed_step": pl.Int64}
    return table.with_columns(
        **{name: pl.lit(value) for name, value in direction.items()},
        **{name: pl.lit(None, kind) for name, kind in nothing.items()},
        **{name: pl.Series(values) for name, values in losses.items()},
        updates=pl.lit(200),
        outcome=pl.lit("ok"),
    )


def directions(rates=(0.03,)):
    """Return a table of Muon's directions: exact ones, a schedule at two numbers of steps, and three planted errors."""
    arms = [("svd", None, "none", None, None), ("simple", 3, "none", None, None), ("simple", 5, "none", None, None)]
    arms += [("svd", None, "scale", 0.5, None)]
    arms += [("svd", None, kind, 0.3, how) for kind, how in product(("radial", "turn"), ("fresh", "fixed"))]
    base = runs(("gpt_small",), ("muon",), rates).drop("method", "steps", "planted", "size", "persistence")
    names = ["method", "steps", "planted", "size", "persistence"]
    schema = dict(zip(names, (pl.String, pl.Int64, pl.String, pl.Float64, pl.String), strict=True))
    table = pl.DataFrame(arms, schema=schema, orient="row").join(base, how="cross")
    noise = np.random.default_rng(1).uniform(0.1, 0.5, (3, len(table)))
    exact = (table["method"] == "svd").to_numpy() & (table["planted"] == "none").to_numpy()
    return table.with_columns(
        relative=pl.Series(np.where(exact, 1e-7, noise[0])),
        orthogonality=pl.Series(np.where(exact, 1e-7, noise[1])),
        loss=pl.Series(2 + noise[2]),
    )


def line(axes, name):
    (found,) = [one for one in axes.lines if one.get_label() == name]
    return found


def panel(figure, title):
    (index,) = [index for index, axes in enumerate(figure.axes) if axes.get_title() == title]
    return figure.axes[index], figure.axes[index + len(figure.axes) // 2]


def chosen(table, problem, optimizer):
    """Choose the rate anew, in the test's own words."""
    own = table.filter(problem=problem, optimizer=optimizer)
    medians = {rate: np.median(own.filter(lr=rate)["loss"].to_numpy()) for rate in own["lr"].unique()}
    return own.filter(lr=min(medians, key=medians.get))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap"])
@pytest.mark.parametrize("problem", ["gpt small", "quadratic"])
def test_curves_are_medians_over_seeds_at_the_best_rate(problem, optimizer):
    table = runs()
    upper, lower = panel(panels.convergence(table), problem)
    own = chosen(table, problem.replace(" ", "_"), optimizer)
    curve = line(upper, optimizer)
    np.testing.assert_array_equal(curve.get_xdata(), np.linspace(0, 200, 11))
    np.testing.assert_array_equal(curve.get_ydata(), np.median(own.select(CURVE).to_numpy(), axis=0))
    against = line(lower, optimizer)
    np.testing.assert_array_equal(against.get_xdata(), [0.01, 0.03, 0.1])
    (place,) = np.flatnonzero(against.get_xdata() == own["lr"][0])
    assert against.get_ydata()[place] == curve.get_ydata()[-1] == min(against.get_ydata())


def test_rates_on_narrow_axes_are_apart():
    """Five columns in the width of a page: labels of the rates do not touch each other."""
    table = runs(("gpt_noisy", "gpt_small", "gpt_quiet", "quadratic", "factorization"), ("muon",), GRID)
    figure = panels.convergence(table)
    figure.draw_without_rendering()
    for axes in figure.axes[5:]:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0.0025", "0.01", "0.04"]
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_bands_reach_from_the_lowest_to_the_highest_seed():
    table = runs(("gpt_small",), ("muon",))
    upper, lower = panels.convergence(table).axes
    own = chosen(table, "gpt_small", "muon").select(CURVE).to_numpy()
    corners = upper.collections[0].get_paths()[0].vertices
    assert corners[:, 1].min() == own.min()
    assert corners[:, 1].max() == own.max()
    bars = [segment[:, 1].tolist() for segment in lower.collections[0].get_segments()]
    for rate, bar in zip((0.01, 0.03, 0.1), bars, strict=True):
        losses = table.filter(lr=rate)["loss"]
        assert bar == [losses.min(), losses.max()]


def test_a_rate_at_which_one_seed_failed_is_not_the_best():
    table = runs(("gpt_small",), ("muon",)).with_columns(loss=pl.col("lr") * (1 + pl.col("seed")))
    assert convergence.best(table)["lr"].to_list() == [0.01]
    failed = (pl.col("lr") == 0.01) & (pl.col("seed") == 2)
    broken = table.with_columns(outcome=pl.when(failed).then(pl.lit("diverged")).otherwise(pl.lit("ok")))
    assert convergence.best(broken)["lr"].to_list() == [0.03]
    assert convergence.at_best(broken)["seed"].to_list() == [0, 1, 2]
    none = table.with_columns(outcome=pl.lit("nonfinite"))
    assert convergence.best(none).is_empty()


def test_an_optimizer_whose_rates_all_failed_has_no_curve_and_the_note_counts_it():
    muon = pl.col("optimizer") == "muon"
    table = runs().with_columns(outcome=pl.when(muon).then(pl.lit("diverged")).otherwise(pl.lit("ok")))
    figure = panels.convergence(table)
    assert not [one for axes in figure.axes for one in axes.lines if one.get_label() == "muon"]
    assert "18 of 54 cases not shown" in [text.get_text() for text in figure.findobj(Text)]


def test_speedups_find_a_planted_factor():
    """Curves 4 − rate·t reach the loss at which the slow one ends in the proportion of their rates."""
    grid = np.linspace(0, 1, 11)
    rows = [
        ("gpt_small", name, 0.1, seed, *(4 - rate * (1 + seed) * grid))
        for name, rate in (("adamw", 0.5), ("muon", 0.8), ("soap", 0.4))
        for seed in (0, 1)
    ]
    table = pl.DataFrame(rows, schema=["problem", "optimizer", "lr", "seed", *CURVE], orient="row")
    found = convergence.speedups(table.with_columns(outcome=pl.lit("ok")))
    factors = {name: found.filter(optimizer=name)["factor"].to_list() for name in ("adamw", "muon", "soap")}
    assert factors["adamw"] == [1.0, 1.0]
    assert factors["muon"] == pytest.approx([1.6, 1.6], rel=1e-12)
    assert factors["soap"] == [None, None]


def test_a_target_is_reached_where_the_curve_first_crosses_it():
    assert convergence.reached([4.0, 3.0, 3.5, 1.0], 3.0) == 1 / 3
    assert convergence.reached([4.0, 3.0, 3.5, 1.0], 2.25) == pytest.approx((2 + 0.5) / 3, rel=1e-15)
    assert convergence.reached([4.0, 3.0], 4.0) == 0.0


def test_directions_stand_at_their_measured_errors():
    table = directions()
    figure = panels.convergence(table)
    polar, orthogonality = figure.axes
    own = table.filter(planted="turn", persistence="fixed")
    for axes, metric in ((polar, "relative"), (orthogonality, "orthogonality")):
        dot = line(axes, "svd none turn 0.3 fixed")
        assert dot.get_xydata().tolist() == [[own[metric].median(), own["loss"].median()]]
        assert dot.get_markerfacecolor() == "white"
    exact = table.filter(planted="none", method="svd")["loss"]
    (band,) = [one for one in polar.patches if one.get_label() == "exact"]
    assert [band.get_y(), band.get_y() + band.get_height()] == pytest.approx([exact.min(), exact.max()], rel=1e-12)
    words = [text.get_text() for text in figure.findobj(Text)]
    assert {"simple, by steps", "turned, always the same", "scaled"} <= set(words)


def test_directions_each_have_their_best_rate():
    table = directions(rates=(0.03, 0.1)).with_columns(loss=pl.when(lr=0.1).then(1.0).otherwise(pl.col("loss")))
    figure = panels.convergence(table)
    assert {dot.get_ydata()[0] for dot in figure.axes[0].lines} == {1.0}


@pytest.mark.parametrize("table", [runs, directions, lambda: runs(("gpt",), ("adamw",), (0.1,)).head(1)])
def test_the_order_of_rows_does_not_matter(table, tmp_path):
    one = table()
    other = one.sample(fraction=1.0, shuffle=True, seed=1)
    found = [
        [path.read_bytes() for path in save.save(panels.convergence(each), tmp_path / "convergence")]
        for each in (one, other)
    ]
    assert found[0] == found[1]


def test_factors_are_drawn_against_the_rate_and_against_the_size_of_the_update():
    """Losses that depend on the size of the update alone, and rates in units of their own: right, the curves meet."""
    units = {"none": 0.1, "spectral": 1.0, "match_rms_adamw": 0.2}
    base = runs(("gpt_small",), ("muon",)).drop("scale")
    table = pl.concat(
        base.with_columns(
            scale=pl.lit(name),
            update_rms=pl.col("lr"),
            lr=pl.col("lr") / unit,
            loss=2 + (pl.col("lr") - 0.03).abs() + pl.col("seed") / 100,
        )
        for name, unit in units.items()
    )
    left, right = panels.convergence(table).axes
    for name, unit in units.items():
        np.testing.assert_allclose(line(left, name).get_xdata(), np.array([0.01, 0.03, 0.1]) / unit)
        np.testing.assert_allclose(line(right, name).get_xdata(), [0.01, 0.03, 0.1])
        np.testing.assert_allclose(line(right, name).get_ydata(), [2.03, 2.01, 2.08])
    assert "9 of 27 cases not shown" in [
        text.get_text()
        for text in panels.convergence(
            table.with_columns(outcome=pl.when(scale="none").then(pl.lit("diverged")).otherwise(pl.lit("ok")))
        ).findobj(Text)
    ]
