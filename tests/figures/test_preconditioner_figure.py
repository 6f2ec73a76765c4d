"""The figure of the first steps draws what its table says."""

from itertools import product

import numpy as np
import polars as pl
import pytest
from figures.test_panels import misplaced, texts

from muon_lab import figures
from muon_lab.figures import save

REMEDIES = ("none", "skip", "clip", "eps", "rotated", "skip+rotated", "clip=0.3", "mine")


def table(
    optimizers=("soap", "rekls"), shapes=("32x64", "128x16"), steps=(1, 2, 3, 8), spikes=(1.0,), formats=("fp32",)
):
    points = list(product(optimizers, shapes, spikes, formats, REMEDIES, steps, (0, 1, 2)))
    names = ["optimizer", "shape", "spike", "format", "remedy", "step", "seed"]
    found = pl.DataFrame(points, schema=names, orient="row")
    noise = 10.0 ** np.random.default_rng(0).uniform(-3, 2, (2, len(found)))
    found = found.with_columns(persistent=0.0, outcome=pl.lit("ok"), rms=pl.Series(noise[0]))
    found = found.with_columns(disagreement=pl.Series(noise[1]))
    skipped = (pl.col("step") == 1) & pl.col("remedy").str.starts_with("skip")
    return found.with_columns(
        rms=pl.when(skipped).then(0.0).otherwise("rms"),
        disagreement=pl.when(skipped).then(None).otherwise("disagreement"),
    )


def curve(axes, remedy):
    (found,) = [one for one in axes.lines if one.get_label() == remedy]
    return found


def test_curves_are_medians_and_lines_reach_the_largest():
    rows = table()
    figure = figures.draw("preconditioner", rows)
    titles = ["rekls, 128 × 16", "rekls, 32 × 64", "soap, 128 × 16", "soap, 32 × 64"]
    upper, lower = figure.axes[:4], figure.axes[4:]
    assert sorted(axes.get_title() for axes in upper) == titles
    for axes, name in ((upper[0], "rms"), (lower[0], "disagreement")):
        optimizer, shape = upper[0].get_title().split(", ")
        own = rows.filter(optimizer=optimizer, shape=shape.replace(" × ", "x"), remedy="rotated")
        groups = own.group_by("step").agg(middle=pl.col(name).median(), top=pl.col(name).max()).sort("step")
        drawn = curve(axes, "rotated")
        np.testing.assert_array_equal(drawn.get_xydata(), groups.select("step", "middle").to_numpy())
        segments = {
            tuple(map(float, path.vertices[-1])) for strokes in axes.collections for path in strokes.get_paths()
        }
        assert set(groups.select("step", "top").iter_rows()) <= segments


def test_a_step_that_is_left_out_is_no_point():
    figure = figures.draw("preconditioner", table())
    for axes in figure.axes:
        assert list(curve(axes, "skip").get_xdata()) == [2, 3, 8]
        assert list(curve(axes, "none").get_xdata()) == [1, 2, 3, 8]
    assert not any("not shown" in text for text in texts(figure))


def test_every_remedy_looks_like_no_other():
    figure = figures.draw("preconditioner", table())
    (legend,) = figure.legends
    looks = {(one.get_color(), one.get_marker(), one.get_markerfacecolor()) for one in legend.get_lines()}
    assert len(looks) == len(REMEDIES)
    assert {*REMEDIES, "RMS of the update", "step"} <= set(texts(figure))


TABLES = {
    "five problems": lambda: table(("soap",), ("8x8", "8x16", "16x8", "32x8", "8x32")),
    "spikes and formats": lambda: table(("soap",), ("32x64",), spikes=(1.0, 1e3), formats=("fp32", "tf32")),
    "one row": lambda: table().head(1),
    "nothing above the floor": lambda: table(steps=(3, 5)).with_columns(rms=0.0, disagreement=0.0).head(3),
}


@pytest.mark.parametrize("name", TABLES)
def test_is_legible(name):
    figure = figures.draw("preconditioner", TABLES[name]())
    assert not misplaced(figure)


def test_the_order_of_rows_does_not_matter(tmp_path):
    rows = table(("soap",), ("32x64",))
    found = [
        [path.read_bytes() for path in save.save(figures.draw("preconditioner", one), tmp_path / "drawn")]
        for one in (rows, rows.sample(fraction=1.0, shuffle=True, seed=1))
    ]
    assert found[0] == found[1]


def test_cases_that_failed_are_counted():
    rows = table()
    bad = rows.head(2).with_columns(outcome=pl.lit("nonfinite"), rms=1e9)
    figure = figures.draw("preconditioner", pl.concat([rows, bad]))
    assert f"2 of {len(rows) + 2} cases not shown" in texts(figure)
    assert all(np.nanmax(one.get_ydata()) < 1e9 for axes in figure.axes for one in axes.lines)


def test_a_table_without_results_is_refused():
    with pytest.raises(ValueError, match="of the table ended ok with rms measured"):
        figures.draw("preconditioner", table().with_columns(outcome=pl.lit("error")))
    with pytest.raises(ValueError, match="table lacks the columns remedy"):
        figures.draw("preconditioner", table().drop("remedy"))
