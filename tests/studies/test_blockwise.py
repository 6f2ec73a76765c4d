"""Every layout through the study: which bits are those of one rank, how far others are off, and what theory expects."""

import math

import numpy as np
import pytest
from cases import polar_factor

from muon_lab import studies
from muon_lab.measure import bounds
from muon_lab.studies import assembled, blockwise, sources
from muon_lab.studies.running import run_case
from muon_lab.studies.study import LeftOut

STUDY = studies.get("blockwise")
SMALL = {"source": "gaussian", "rows": 12, "cols": 40, "method": "quintic"}


def settled(**point):
    (case,) = STUDY.settle({name: values[0] for name, values in STUDY.defaults.items()} | SMALL | point, None)
    return case


def row(**point):
    found = run_case("blockwise", settled(**point))
    assert (found["outcome"], found["note"]) == ("ok", None)
    return found


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", assembled.CUTS)
@pytest.mark.parametrize("layout", ["duplicated", "owner"])
def test_gathered_layouts_are_the_whole_to_the_bit(layout, cut):
    for dim, tp, dtype in ((0, 3, "float32"), (1, 7, "float64"), (1, 2, "bfloat16")):
        found = row(layout=layout, dim=dim, tp=tp, cut=cut, dtype=dtype)
        assert (found["layout_relative"], found["bound"], found["correction"]) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize("cut", assembled.CUTS)
@pytest.mark.parametrize("layout", assembled.SUMMED)
def test_summed_layouts_are_off_by_rounding(layout, cut):
    """Within four of the error of one rank in the same precision: its distance to the same steps in float64."""
    for dim, tp in ((0, 3), (1, 7)):
        single, many = (row(layout=layout, dim=dim, tp=ranks, cut=cut, dtype="float32") for ranks in (1, tp))
        exact = row(layout=layout, dim=dim, tp=tp, cut=cut, dtype="float64")
        floor = bounds.unit_roundoff("float32")
        assert many["layout_relative"] <= 8 * max(abs(single["relative"] - exact["relative"]), 4 * floor)
        assert exact["layout_relative"] < 1e-13
        assert many["layout_relative"] > 0 or many["layout_relative"] == single["layout_relative"]


def test_blocks_are_another_update_and_periodic_is_between():
    blocks, whole = row(layout="blockwise", tp=4), row(layout="duplicated", tp=4)
    errors = [row(layout="periodic", tp=4, period=period)["layout_relative"] for period in (1, 2, 5, 50)]
    assert errors[0] == 0.0
    assert errors == sorted(errors)
    assert whole["layout_relative"] < errors[1] < errors[-1] < 1.1 * blocks["layout_relative"]


def test_the_mean_over_a_period_is_that_of_its_steps():
    """By hand, with exact factors: one whole step and four of corrected blocks."""
    case = settled(layout="periodic", dim=1, tp=4, method="svd")
    G = sources.matrix(case)
    B = np.concatenate([polar_factor(shard) for shard in np.split(G, 4, axis=1)], axis=1)
    U = polar_factor(G)
    size = math.sqrt(12 / (4 * 10))
    mean = (U + 4 * size * B) / 5
    assert row(layout="periodic", dim=1, tp=4, method="svd")["relative"] == pytest.approx(
        np.linalg.norm(mean - U) / np.linalg.norm(U), rel=1e-9
    )
    assert case["period"] == 5
    assert settled()["period"] is None


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "cut"), [(0, "even"), (1, "even"), (1, "half"), (0, "chunked")])
def test_norm_correction_and_nuclear_norm_are_what_shards_say(dim, cut):
    case = settled(dim=dim, cut=cut, tp=5, method="svd")
    found = row(dim=dim, cut=cut, tp=5, method="svd")
    placement = assembled.placed(cut, (12, 40)[dim], 5, dim)
    shards = [placement.shard(sources.matrix(case), rank) for rank in range(5) if placement.sizes[rank]]
    assert found["correction"] * found["fro_ratio"] == pytest.approx(1, rel=1e-12)
    assert found["fro_ratio"] ** 2 == pytest.approx(sum(min(shard.shape) for shard in shards) / 12, rel=1e-12)
    nuclear = sum(np.linalg.svd(shard, compute_uv=False).sum() for shard in shards)
    whole = np.linalg.svd(sources.matrix(case), compute_uv=False).sum()
    assert found["nuclear_ratio"] == pytest.approx(nuclear / whole, rel=1e-12)
    assert 1 <= found["nuclear_ratio"] <= math.sqrt(5)


def test_theory_stands_beside_gaussian_matrices_and_nothing_else():
    """Fluctuations and what a finite size adds are of the order of the inverse of the short axis."""
    for tp in (2, 4, 8):
        found = row(rows=96, cols=96, tp=tp, method="svd")
        assert found["relative"] == pytest.approx(found["expected_relative"], abs=1 / 96)
        assert found["cosine"] == pytest.approx(found["expected_cosine"], abs=1 / 96)
        assert found["nuclear_ratio"] == pytest.approx(found["expected_nuclear"], abs=1 / 96)
    others = (
        {"source": "geometric(100)", "method": "svd"},
        {"method": "quintic"},
        {"layout": "owner", "method": "svd"},
    )
    for other in others:
        assert row(tp=2, **other)["expected_relative"] is None


def test_one_rank_is_the_whole_in_every_layout():
    for layout in assembled.LAYOUTS:
        found = row(layout=layout, tp=1, dtype="float64")
        rounded = layout in ("gram", "periodic")  # another form, and a mean of equal things
        assert found["layout_relative"] <= (1e-14 if rounded else 0.0)
        assert found["bound"] == 1.0


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_left_out_or_refused():
    for layout in assembled.SUMMED:
        for method in ("svd", "qdwh", "gram:quintic", "auto:quintic"):
            with pytest.raises(LeftOut, match="in its plain form"):
                settled(layout=layout, method=method)
    for point, message in (
        ({"layout": "blokwise"}, "did you mean 'blockwise'"),
        ({"cut": "evenly"}, "did you mean 'even'"),
        ({"period": 0}, "period must be at least 1, not 0"),
        ({"dim": 2}, r"must be 0 \(rows\) or 1"),
        ({"tp": 0}, "at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=message):
            settled(**point)


def test_a_zero_matrix_stays_zero_in_every_layout():
    for layout in assembled.LAYOUTS:
        found = row(source="zero", rows=4, cols=6, layout=layout, tp=2)
        assert (found["relative"], found["layout_relative"], found["nuclear_ratio"]) == (0, 0, 1)


def test_a_direction_that_is_not_finite_is_an_outcome(monkeypatch):
    monkeypatch.setattr(blockwise, "_update", lambda case, cut, G: G * math.nan)
    assert run_case("blockwise", settled(tp=2))["outcome"] == "nonfinite"
