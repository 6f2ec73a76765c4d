"""The figure of the published throughput draws what the table has."""

from itertools import product

import numpy as np
import polars as pl
import pytest

from muon_lab.figures import panels


def table():
    rows = list(product(("kimi-k2", "qwen3-30b-a3b"), ("short", "rows", "long"), ("fused", "split"), (400.0, 1250.0)))
    frame = pl.DataFrame(rows, schema=["model", "order", "gate_up", "rate"], orient="row")
    cases = frame.join(pl.DataFrame({"overlap": ["hidden", "exposed"], "extra": [0.0, 0.01]}), how="cross")
    return cases.with_columns(
        kernel=pl.lit("gemm"),
        outcome=pl.lit("ok"),
        optimizer_tflops=pl.col("order").str.len_chars().cast(pl.Float64),
        published_tflops=pl.when(model="kimi-k2").then(51.0).otherwise(35.0),
        slowdown=10 / pl.col("rate") + pl.col("extra"),
        published_slowdown=pl.lit(0.02),
    )


def test_conventions_and_predictions_are_those_of_the_table():
    counted, predicted = panels.draw("throughput", table()).axes
    dots = [line.get_xdata()[0] for line in counted.lines if line.get_marker() == "o"]
    assert dots == 2 * [5.0, 5.0, 4.0, 4.0, 4.0, 4.0]
    assert {line.get_xdata()[0] for line in counted.lines if line.get_marker() != "o"} >= {51.0, 35.0}
    curves = [line for line in predicted.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(curves[0].get_ydata(), [10 / 400, 10 / 1250])
    assert len(curves) == 2
    band = predicted.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(10 / 400 + 0.01)


def test_failed_cases_are_counted_and_not_drawn():
    rows = table().with_columns(outcome=pl.when(order="long").then(pl.lit("error")).otherwise(pl.lit("ok")))
    figure = panels.draw("throughput", rows)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][-1] == "rows, split"
    assert "16 of 48 cases not shown" in [text.get_text() for text in figure.findobj(lambda x: hasattr(x, "get_text"))]
