"""The figure of measured layouts draws its table."""

import numpy as np
import polars as pl
import pytest

from muon_lab.figures import panels


def table(megabits=(0.0, 100.0)):
    rows = [
        {
            "layout": layout,
            "megabits": rate,
            "predicted": 0.1 * place + rate / 1e3,
            "time": 0.2 * place,
            "swapped": swap,
        }
        for rate in megabits
        for place, (layout, swap) in enumerate([("gram", 0), ("owner", 1), ("duplicated", 1), ("blockwise", None)], 1)
    ]
    facts = {"shape": "64x16", "dim": 0, "ranks": 2, "count": 2, "steps": 5, "outcome": "ok"}
    return (
        pl.DataFrame(rows)
        .with_columns(**{name: pl.lit(value) for name, value in facts.items()})
        .with_columns(time_low=0.9 * pl.col("time"), time_high=1.2 * pl.col("time"))
        .with_columns(predicted_low=pl.col("predicted") / 2)
    )


def points(axes, name):
    (found,) = [one for one in axes.lines if one.get_label() == name]
    return found


def test_a_panel_a_rate_and_a_marker_a_row():
    figure = panels.draw("layout_time", table())
    assert [axes.get_title() for axes in figure.axes] == ["loopback", "100 Mbit/s"]
    for axes, rate in zip(figure.axes, (0.0, 100.0), strict=True):
        own = table().filter(layout="gram", megabits=rate)
        np.testing.assert_array_equal(points(axes, "gram").get_xydata(), own.select("predicted", "time").to_numpy())
        assert axes.get_xlim() == axes.get_ylim()
        segments = [tuple(map(tuple, one)) for bars in axes.collections for one in bars.get_segments()]
        (row,) = own.to_dicts()
        assert ((row["predicted"], row["time_low"]), (row["predicted"], row["time_high"])) in segments
        assert ((row["predicted_low"], row["time"]), (row["predicted"], row["time"])) in segments


def test_swaps_are_light():
    axes = panels.draw("layout_time", table()).axes[0]
    assert points(axes, "owner, swapped").get_markerfacecolor() == "#ffffff"
    assert points(axes, "gram").get_markerfacecolor() != "#ffffff"
    legend = panels.draw("layout_time", table()).legends[0]
    assert "another order than predicted" in {text.get_text() for text in legend.get_texts()}
    right = panels.draw("layout_time", table().with_columns(swapped=pl.lit(0))).legends[0]
    assert "another order than predicted" not in {text.get_text() for text in right.get_texts()}


def test_a_table_without_predictions_is_refused():
    with pytest.raises(ValueError, match="predicted"):
        panels.draw("layout_time", table().drop("predicted"))
