"""The figures of tensor-parallel layouts draw what their tables have."""

import numpy as np
import polars as pl
import pytest
from layout_tables import LAYERS, errors, reduction, sharded_training, volume
from matplotlib.text import Text

from muon_lab.figures import layouts, panels, tp_volume

MIB = 2**20


def line(axes, name):
    (found,) = [one for one in axes.lines if one.get_label() == name]
    return found


def panel(figure, title):
    (found,) = [axes for axes in figure.axes if axes.get_title() == title]
    return found


def bars(axes, name):
    (found,) = [one for one in axes.collections if one.get_label() == name]
    return np.array(found.get_segments())


# --- volume -----------------------------------------------------------------------------------------------------------


def test_volume_draws_what_a_rank_sends_in_a_layer():
    table = volume()
    figure = panels.volume(table, [("small", "mlp.up"), ("large", "mlp.down")])
    axes = panel(figure, "small, mlp.up\n512 × 128, rows cut")
    own = table.filter(model="small", layer="mlp.up", layout="gram", dtype="float32").sort("tp")
    np.testing.assert_array_equal(line(axes, "gram").get_ydata(), own["sent_bytes"] / MIB)
    np.testing.assert_array_equal(line(axes, "gram").get_xdata(), [2, 4, 8])


def test_what_sends_nothing_stands_where_the_axis_says_0():
    axes = panels.volume(volume()).axes[0]
    heights = line(axes, "blockwise").get_ydata()
    names = dict(zip(axes.get_yticks(), axes.yaxis.get_major_formatter().seq, strict=True))
    assert names[heights[0]] == "0"
    assert heights[0] == axes.get_ylim()[0]
    others = [y for one in axes.lines if one.get_label() != "blockwise" for y in one.get_ydata()]
    assert min(others) > 2 * heights[0]


def test_shares_are_drawn_by_the_axis_that_is_cut():
    table = volume()
    axes = panel(panels.volume(table), "bfloat16, tp 8")
    own = table.filter(dtype="bfloat16", tp=8, layout="gram").sort("aspect")
    long = own.filter(pl.col("layer") != "attn.k")
    np.testing.assert_array_equal(line(axes, "gram").get_xydata(), long.select("aspect", "sent_ratio").to_numpy())
    short = own.filter(layer="attn.k")
    np.testing.assert_array_equal(
        line(axes, "gram, across").get_xydata(), short.select("aspect", "sent_ratio").to_numpy()
    )
    assert line(axes, "gram, break-even").get_xydata().tolist() == [[2.5, 1.0]]


def test_numbers_of_steps_are_curves_of_their_own():
    table = volume(layouts=("distributed",), steps=(3, 5))
    axes = panels.volume(table).axes[0]
    looks = {line(axes, f"distributed, steps {steps}").get_linestyle() for steps in (3, 5)}
    assert len(looks) == 2


def test_layers_are_spread_from_square_to_long():
    titles = [axes.get_title() for axes in panels.volume(volume()).axes[:3]]
    assert titles[0].startswith("small, attn.q")
    assert titles[-1].startswith("large, mlp.down")
    assert len(LAYERS) > tp_volume.MOST


def test_a_layer_that_the_table_has_not_is_named():
    with pytest.raises(ValueError, match=r"has no attn\.z of small"):
        panels.volume(volume(), [("small", "attn.z")])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_theory_is_laid_over_exact_blocks():
    table = errors()
    figure = panels.tp_error(table)
    axes = panel(figure, "exact blocks, short axis cut")
    own = table.filter(source="gaussian", layout="blockwise", method="svd", dtype="float32", cols=128, dim=0)
    expected = own.group_by("tp").agg(pl.col("expected_relative").first()).sort("tp").filter(pl.col("tp") > 1)
    theory = bars(axes, "theory 4")
    np.testing.assert_array_equal(theory[:, 0, 1], expected["expected_relative"])
    np.testing.assert_array_equal(line(axes, "gaussian 4").get_ydata(), theory[:, 0, 1])  # the table says they agree


def test_recorded_matrices_stand_beside_gaussian_ones():
    table = errors()
    axes = panel(panels.tp_error(table), "exact blocks, long axis cut")
    own = table.filter(source="recorded", layout="blockwise", method="svd", dtype="float32", cols=128, dim=1, tp=4)
    assert own["relative"].median() in line(axes, "recorded momentum 4").get_ydata()
    square = table.filter(source="recorded", layout="blockwise", method="svd", dtype="float32", cols=32, tp=8)
    assert square["relative"].median() == line(axes, "recorded momentum 1").get_ydata()[-1]  # both cuts are one


def test_layouts_are_compared_with_one_rank_by_dtype():
    table = errors()
    axes = panel(panels.tp_error(table), "bfloat16")
    own = table.filter(layout="blockwise", dtype="bfloat16", method="quintic", tp=8)
    assert line(axes, "blockwise").get_ydata()[-1] == own["layout_relative"].median()
    assert set(line(axes, "owner").get_ydata()) == {axes.get_ylim()[0]}


def test_a_table_without_exact_blocks_is_refused():
    with pytest.raises(ValueError, match="exact blocks"):
        panels.tp_error(errors().filter(pl.col("method") == "quintic"))


# --- error against bytes ----------------------------------------------------------------------------------------------


def test_layout_work_joins_errors_and_bytes_by_shape():
    table = errors()
    figure = panels.layout_work(table, volume())
    axes = panel(figure, "recorded momentum\n1:4, short axis cut")
    own = table.filter(source="recorded", layout="gram", method="quintic", dtype="float32", cols=128, dim=0)
    errors_ = own.group_by("tp").agg(pl.col("relative").median()).sort("tp").filter(pl.col("tp") > 1)
    sent = volume().filter(layer="attn.k", layout="gram", dtype="float32").sort("tp")["sent_bytes"] / (4 * 32 * 128)
    path = line(axes, "gram")
    np.testing.assert_allclose(path.get_xdata(), sent, rtol=1e-15)
    np.testing.assert_array_equal(path.get_ydata(), errors_["relative"])
    sizes = [line(axes, f"gram {tp}").get_markersize() for tp in (2, 4, 8)]
    assert sizes == sorted(set(sizes))


def test_layouts_that_send_nothing_are_at_the_left_end():
    axes = panels.layout_work(errors(), volume()).axes[0]
    (place,) = set(line(axes, "blockwise").get_xdata())
    names = dict(zip(axes.get_xticks(), axes.xaxis.get_major_formatter().seq, strict=True))
    assert names[place] == "0"


def test_tables_without_a_shape_in_common_are_refused():
    with pytest.raises(ValueError, match="must agree in layout, dtype, tp, aspect, across"):
        panels.layout_work(errors(shapes=((32, 96),)), volume())


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_draws_gaps_and_deviations_against_tp():
    table = sharded_training()
    figure = panels.sharded_training(table)
    along, end, rule = (figure.axes[place] for place in (0, 4, 8))
    assert figure.axes[0].get_title() == "gpt small\nmuon"
    own = table.filter(problem="gpt_small", optimizer="muon", layout="periodic", step_size="corrected")
    medians = own.group_by("tp").agg(pl.col("loss_gap", "deviation").median()).sort("tp")
    np.testing.assert_array_equal(line(end, "periodic corrected 5").get_ydata(), medians["loss_gap"])
    np.testing.assert_array_equal(line(rule, "periodic corrected 5").get_ydata(), medians["deviation"])
    assert set(line(along, "duplicated, tp 8").get_ydata()) == {0.0}


def test_training_is_compared_with_duplicated_of_the_same_seed():
    table = sharded_training()
    along = panels.sharded_training(table).axes[0]
    own = table.filter(problem="gpt_small", optimizer="muon", tp=8).sort("seed")
    losses = own.filter(layout="gram")["loss_40"] - own.filter(layout="duplicated")["loss_40"]
    drawn = dict(line(along, "gram, tp 8").get_xydata())
    assert drawn[40.0] == losses.median()


def test_a_ring_says_that_a_rule_is_that_of_one_rank():
    table = sharded_training().with_columns(  # one seed of one tp differs: no ring there
        tp_invariant=pl.when(layout="gram", tp=4, seed=1).then(0).otherwise(pl.col("tp_invariant"))
    )
    rule = panels.sharded_training(table).axes[8]
    rings = line(rule, "gram, independent of tp").get_xdata()
    assert [round(np.log2(x)) for x in rings] == [1, 3]
    assert not [
        one for one in rule.lines if one.get_label().startswith("blockwise") and "independent" in one.get_label()
    ]


def test_training_without_duplicated_has_no_panel_along_the_run():
    table = sharded_training(layouts=("gram", "blockwise"))
    figure = panels.sharded_training(table)
    words = [text.get_text() for text in figure.findobj(Text)]
    assert not [word for word in words if "tp 8" in word]


# --- sums -------------------------------------------------------------------------------------------------------------


def test_reduction_draws_medians_of_ratios():
    table = reduction()
    figure = panels.reduction(table)
    upper, lower = figure.axes[2], figure.axes[6]
    assert upper.get_title() == "gaussian\nbfloat16"
    own = table.filter(source="gaussian", dtype="bfloat16", sums="hops", order="tree")
    medians = own.group_by("tp").agg(pl.col("gram_ratio", "update_ratio").median()).sort("tp")
    np.testing.assert_array_equal(line(upper, "hops tree").get_ydata(), medians["gram_ratio"])
    np.testing.assert_array_equal(line(lower, "hops tree").get_ydata(), medians["update_ratio"])
    assert line(upper, "once").get_linestyle() == "-"


# --- looks ------------------------------------------------------------------------------------------------------------


def test_every_layout_looks_like_no_other():
    assert len(set(layouts.LOOKS.values())) == len(layouts.LOOKS)
    assert len({colour for colour, _ in layouts.LOOKS.values()}) == len(layouts.LOOKS)
    assert len({marker for _, marker in layouts.LOOKS.values()}) == len(layouts.LOOKS)


def test_layouts_of_the_studies_have_looks():
    from muon_lab.studies.volume import LAYOUTS

    assert set(LAYOUTS) == set(layouts.LOOKS)
