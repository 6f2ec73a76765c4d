"""Summaries and notebook tables."""

import numpy as np
import polars as pl
import pytest

from muon_lab import studies, sweep
from muon_lab.sweep import tables
from muon_lab.sweep.run import SweepWarning


def test_a_summary_shows_median_worst_and_other_outcomes():
    study = studies.get("blockwise")
    facts = {"study": "blockwise", "dim": 0, "tp": 2, "method": "svd", "source": "gaussian"}
    rows = [
        {**facts, "key": str(i), "outcome": outcome, "relative": value}
        for i, (outcome, value) in enumerate([("ok", 0.1), ("ok", 0.2), ("ok", 0.9), ("error", None)])
    ]
    (line,) = tables.summary(study, tables.frame(study, rows)).to_dicts()
    assert line == {"dim": 0, "tp": 2, "cases": 4, "relative (median)": "0.2", "worst": "0.9", "error": 1}


def test_a_summary_groups_by_what_varies():
    study = studies.get("blockwise")
    rows = [
        {"key": str(i), "outcome": "ok", "dim": 0, "tp": tp, "method": method, "source": "gaussian", "relative": 0.1}
        for i, (tp, method) in enumerate([(1, "svd"), (2, "svd"), (1, "simple"), (2, "simple")])
    ]
    assert tables.summary(study, tables.frame(study, rows)).columns[:2] == ["tp", "method"]


def test_axes_of_a_notebook_table_may_be_arrays_and_ranges():
    found = sweep.table("schedules", method="taylor", steps=range(1, 4), sigma=np.array([0.5, 1.0]))
    assert found.height == 6
    assert sweep.table("schedules", method="taylor", steps=np.int64(3), sigma=np.float64(0.5)).height == 1


def test_a_notebook_table_warns_of_what_is_left_out():
    with pytest.warns(SweepWarning, match="left out: peer 'torch'"):
        found = sweep.table("speed", shape="8x8", method="simple", peer=("lab", "torch"), repeats=1)
    assert found["peer"].to_list() == ["lab"]
    with pytest.warns(SweepWarning, match="collapses at 6 steps"):
        sweep.table("schedules", method="quintic", steps=6, sigma=0.1)


def test_a_notebook_table_takes_the_users_file(tmp_path):
    np.savez(tmp_path / "mine.npz", w=np.eye(3, 5))
    found = sweep.table("blockwise", matrices=tmp_path / "mine.npz", source="file", tp=1, dim=0)
    assert found["matrix"].to_list() == ["w"]


def test_outcomes_are_a_closed_set():
    assert sweep.table("schedules", method="taylor", steps=3, sigma=0.5).schema["outcome"] == pl.Enum(
        ["ok", "nonfinite", "diverged", "not_converged", "error"]
    )


def test_the_summary_of_layout_time_has_the_times_of_layouts():
    study = studies.get("layout_time")
    point = {"shape": "8x4", "ranks": 2, "megabits": 0.0, "outcome": "ok", "swapped": 0}
    rows = [point | {"layout": layout, "time": time} for layout, time in (("owner", 0.25), ("gram", 0.5))]
    shown = tables.summary(study, tables.frame(study, rows))
    assert shown.select("layout", "time (median)").rows() == [("owner", "0.25"), ("gram", "0.5")]
