"""The figures of layer-wise data parallelism draw what the table has."""

from itertools import product

import numpy as np
import polars as pl
import pytest
from matplotlib.text import Text

from muon_lab.figures import layerwise, panels, save

POLICIES = tuple(layerwise.POLICIES)


def balances(models=(("llama", 1, None), ("kimi", 32, "apart"), ("kimi", 32, "together"))):
    """Return a table in which every excess is drawn at random; round robin has two orders."""
    pairs = [("round_robin", "blocks"), *((policy, "kinds") for policy in POLICIES)]
    points = [(*model, ranks, *pair) for model, ranks, pair in product(models, (8, 64, 256), pairs)]
    schema = {"model": pl.String, "ep": pl.Int64, "experts": pl.String, "ranks": pl.Int64}
    table = pl.DataFrame(points, schema=schema | {"policy": pl.String, "order": pl.String}, orient="row")
    noise = 1 + 10.0 ** np.random.default_rng(0).uniform(-2.5, 0.5, (2, len(table)))
    return table.with_columns(
        ratio=pl.Series(noise[0]),
        memory=pl.Series(noise[1]),
        largest=pl.when(pl.col("ranks") == 256).then(1.5).otherwise(0.2),
        matrices=pl.when(pl.col("model") == "kimi").then(9000).otherwise(500),
        outcome=pl.lit("ok"),
    )


def overlaps(links=("ib", "nvlink"), gathers=("exact", "padded"), kinds=tuple(layerwise.OVERLAPS)):
    points = list(product(("round_robin", "lpt_flops"), links, gathers, kinds, (1, 4, 16)))
    table = pl.DataFrame(points, schema=["policy", "link", "gather", "overlap", "buckets"], orient="row")
    noise = np.random.default_rng(1).uniform(0.1, 2, (2, len(table)))
    return table.with_columns(
        model=pl.lit("llama"),
        ep=pl.lit(1),
        experts=pl.lit(None, pl.String),
        ranks=pl.lit(64),
        order=pl.lit("blocks"),
        matrices=pl.lit(500),
        compute_seconds=pl.lit(0.75),
        update_seconds=pl.lit(0.25),
        exposed_seconds=pl.Series(noise[0]),
        hidden_seconds=pl.Series(noise[1]),
        step_seconds=1 + pl.Series(noise[0]),
        outcome=pl.lit("ok"),
    )


def line(axes, name):
    (found,) = [one for one in axes.lines if one.get_label() == name]
    return found


def words(figure):
    return [text.get_text() for text in figure.findobj(Text)]


# --- balance ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def balance_figure():
    """The figure of `balances`, for those who only look at it."""
    return panels.layerwise_balance(balances())


@pytest.fixture(scope="module")
def overlap_figure():
    return panels.overlap(overlaps())


@pytest.mark.parametrize("policy", POLICIES)
def test_curves_are_distances_to_one(policy, balance_figure):
    table, figure = balances(), balance_figure
    name = layerwise.POLICIES[policy].name + (", kind after kind" if policy == "round_robin" else "")
    for column, model in enumerate(("llama", "kimi")):
        own = table.filter(pl.col("experts").is_null() | (pl.col("experts") == "apart"), model=model, policy=policy)
        own = own.filter(order="kinds").sort("ranks")
        for row, metric in enumerate(("ratio", "memory")):
            curve = line(figure.axes[3 * row + column], name)
            assert curve.get_xdata().tolist() == [8, 64, 256]
            np.testing.assert_allclose(curve.get_ydata(), own[metric].to_numpy() - 1, rtol=1e-12)


def test_models_with_few_matrices_come_first_and_experts_are_named(balance_figure):
    titles = [axes.get_title() for axes in balance_figure.axes[:3]]
    assert titles == ["llama", "kimi, EP 32,\nexperts apart", "kimi, EP 32,\nexperts together"]


def test_what_is_even_stands_on_the_floor():
    table = balances().with_columns(ratio=pl.lit(1.0))
    upper = panels.layerwise_balance(table).axes[0]
    assert set(line(upper, "hybrid").get_ydata()) == {layerwise.EVEN} == {upper.get_ylim()[0]}


def test_the_bound_is_drawn_where_it_is_above_one(balance_figure):
    upper = balance_figure.axes[0]
    assert line(upper, "bound").get_xydata().tolist() == [[256, 0.5]]


def test_more_models_than_fit_beside_each_other_go_below():
    figure = panels.layerwise_balance(balances([(f"model {number}", 1, None) for number in range(5)]))
    visible = [axes for axes in figure.axes if axes.get_visible()]
    assert len(visible) == 10
    assert [axes.get_title() for axes in visible[:4]] == [f"model {number}" for number in range(4)]
    assert [axes.get_title() for axes in visible[8:]] == ["model 4", ""]


def test_policies_that_nobody_knows_are_drawn_too():
    table = balances().with_columns(policy=pl.col("policy").str.replace("hybrid", "mine"))
    assert "mine" in words(panels.layerwise_balance(table))


# --- overlap ----------------------------------------------------------------------------------------------------------


def test_overheads_are_steps_over_compute(overlap_figure):
    table, figure = overlaps(), overlap_figure
    for column, link in enumerate(("ib", "nvlink")):
        for gather, kind in (("exact", "none"), ("exact", "both"), ("padded", "both")):
            own = table.filter(link=link, gather=gather, overlap=kind, policy="lpt_flops").sort("buckets")
            curve = line(figure.axes[column], f"LPT by flops {gather} {kind}")
            assert curve.get_xdata().tolist() == [1, 4, 16]
            np.testing.assert_allclose(curve.get_ydata(), own["step_seconds"], rtol=1e-12)
        assert not [one for one in figure.axes[column].lines if one.get_label() == "LPT by flops padded none"]


def test_bars_stand_for_the_shortest_step_with_all_overlap(overlap_figure):
    table, lower = overlaps(), overlap_figure.axes[2]
    bars = {bar.get_label(): bar.patches[0] for bar in lower.containers}
    for policy, gather in product(("round_robin", "lpt_flops"), ("exact", "padded")):
        own = table.filter(link="ib", policy=policy, gather=gather, overlap="both")
        best = own.sort("step_seconds").row(0, named=True)
        exposed, hidden = (bars[f"{policy} {gather} {what}"] for what in ("exposed", "hidden"))
        assert exposed.get_width() == best["exposed_seconds"]
        assert hidden.get_x() == best["exposed_seconds"]
        assert hidden.get_width() == pytest.approx(best["hidden_seconds"], rel=1e-15 * 8)  # a difference of two ends


def test_rows_name_policy_and_gather(overlap_figure):
    lower = overlap_figure.axes[2]
    names = [label.get_text() for label in lower.get_yticklabels()]
    assert names == ["round robin, exact", "LPT by flops, exact", "round robin, padded", "LPT by flops, padded"]
    alone = panels.overlap(overlaps(("ib",), ("exact",), ("both",)))
    assert [label.get_text() for label in alone.axes[1].get_yticklabels()] == ["round robin", "LPT by flops"]


def test_a_step_that_takes_far_too_long_leaves_the_panel():
    table = overlaps().with_columns(step_seconds=100 * pl.col("step_seconds"))
    upper = panels.overlap(table).axes[0]
    assert upper.get_ylim()[1] < 2 * layerwise.MOST < line(upper, "LPT by flops padded both").get_ydata().max()


# --- both -------------------------------------------------------------------------------------------------------------

FIGURES = [(panels.layerwise_balance, balances), (panels.overlap, overlaps)]


@pytest.mark.parametrize(("draw", "table"), FIGURES)
def test_the_order_of_rows_does_not_matter(draw, table, tmp_path):
    one = table(("ib",)) if draw is panels.overlap else table((("kimi", 32, "apart"),))
    other = one.sample(fraction=1.0, shuffle=True, seed=1)
    found = [[path.read_bytes() for path in save.save(draw(each), tmp_path / "figure")] for each in (one, other)]
    assert found[0] == found[1]


@pytest.mark.parametrize(("draw", "table"), FIGURES)
def test_what_is_not_shown_is_counted(draw, table):
    broken = table().with_columns(outcome=pl.when(policy="lpt_flops").then(pl.lit("error")).otherwise(pl.lit("ok")))
    left = len(broken.filter(outcome="error"))
    assert f"{left} of {len(broken)} cases not shown" in words(draw(broken))
    with pytest.raises(ValueError, match="table lacks the columns policy"):
        draw(broken.drop("policy"))
