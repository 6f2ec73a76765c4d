"""From axes to cases."""

import pytest

from muon_lab import studies
from muon_lab.sweep import grid
from muon_lab.sweep.grid import Experiment


def experiment(**fields):
    axes = {"source": ("gaussian",), "rows": (4,), "cols": (8,), **fields.pop("axes", {})}
    return Experiment("test", "blockwise", axes, **fields)


def test_the_grid_is_a_product_and_the_last_axis_runs_fastest():
    points = list(grid.points(experiment(axes={"seed": (0, 1), "dim": (0,), "tp": (1, 2), "dtype": ("float32",)})))
    assert [(point["seed"], point["tp"]) for point in points] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_zipped_axes_run_together():
    points = list(grid.points(experiment(axes={"tp": (1, 2)}, zips=({"rows": (4, 16), "cols": (8, 32)},))))
    assert {(point["rows"], point["cols"]) for point in points} == {(4, 8), (16, 32)}


def test_command_line_values_replace_a_whole_zip_or_none_of_it():
    zipped = experiment(zips=({"rows": (4, 16), "cols": (8, 32)},))
    points = list(grid.points(zipped.with_axes({"rows": (5,), "cols": (6, 7)})))
    assert {(point["rows"], point["cols"]) for point in points} == {(5, 6), (5, 7)}
    with pytest.raises(ValueError, match="run together: with rows give cols too"):
        zipped.with_axes({"rows": (5,)})


def test_what_cannot_matter_is_one_case():
    planned = grid.plan(experiment(axes={"dim": (0,), "tp": (2,), "method": ("svd",), "steps": (3, 5, 7)}))
    assert len(planned.cases) == 1
    recorded = Experiment("r", "blockwise", {"source": ("recorded:gradient/*up",), "rows": (1, 2), "seed": (0, 1)})
    cases = grid.plan(recorded).cases.values()
    assert len(cases) == 2 * 2 * 4
    assert {(case["rows"], case["cols"], case["seed"]) for case in cases} == {(384, 96, None)}


def test_another_axis_value_changes_no_other_case():
    few = grid.plan(experiment(axes={"tp": (2,), "seed": (1,)})).cases
    many = grid.plan(experiment(axes={"tp": (1, 2, 3), "seed": (0, 1, 2), "method": ("simple", "svd")})).cases
    assert set(few) <= set(many)


def test_a_new_version_of_a_study_is_another_case():
    from dataclasses import replace

    study = studies.get("blockwise")
    (case,) = grid.plan(experiment(axes={"tp": (2,), "dim": (0,)})).cases.values()
    assert replace(study, version=study.version + 1).key(case) != study.key(case)


@pytest.mark.parametrize("name", studies.NAMES)
def test_every_study_is_complete(name):
    study = studies.get(name)
    assert study.headline in {column.name for column in study.columns}
    assert set(study.group) <= set(study.axis_names)
    assert len(study.row_names) == len(set(study.row_names))
    assert all(column.meaning and column.unit for column in study.columns)
    planned = grid.plan(Experiment(name, name, {}))
    assert planned.cases
    assert all(study.work(case) > 0 for case in planned.cases.values())
