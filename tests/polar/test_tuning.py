"""Searching for schedules by measurement: what is measured, that the best is found, that refining helps elsewhere."""

import math

import numpy as np
import pytest
import torch
from cases import polar_factor

from muon_lab.arithmetic import Exact, Rounded
from muon_lab.polar import schedules, tuning


def gaussian(m, n, seed):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def test_the_error_is_the_sine_of_the_angle_to_the_polar_factor():
    G = gaussian(6, 10, 0)
    (U,) = [tuning.target(G).U]
    np.testing.assert_allclose(U.numpy(), polar_factor(G.double().numpy()), atol=1e-12)
    orthogonal = gaussian(6, 10, 1).double()
    orthogonal -= U * (orthogonal * U).sum() / (U * U).sum()
    orthogonal *= U.norm() / orthogonal.norm()
    for angle in (0.0, 0.1, 1.0):
        X = 7.0 * (math.cos(angle) * U + math.sin(angle) * orthogonal)
        assert tuning.direction_error(X, U) == pytest.approx(math.sin(angle), abs=1e-7)
    for bad in (-U, 0 * U, orthogonal, U * math.nan, U * math.inf):
        assert tuning.direction_error(bad, U) == pytest.approx(1.0)


def test_exact_arithmetic_wants_the_lower_bound_of_the_spectrum():
    """A minimax schedule for [l, 1] has the least worst error where l is the smallest singular value: here 0.03."""
    from cases import with_singular_values

    sigma = np.geomspace(1, 0.03, 12)
    targets = [tuning.target(with_singular_values(12, 20, sigma / np.linalg.norm(sigma), seed=s)) for s in range(2)]
    least = float((sigma / np.linalg.norm(sigma)).min())
    lowers = (least / 10, least / 3, least, 3 * least)
    found = tuning.search(4, Exact(torch.float64), targets, lowers=lowers, safeties=(0.0,))
    assert found.schedule.design.lower == pytest.approx(least, rel=1e-5)
    assert found.worst < 0.02


def test_a_search_returns_the_best_of_what_it_tried():
    targets = [tuning.target(gaussian(32, 64, seed)) for seed in range(2)]
    arithmetic = Rounded("mxfp8_e4m3")
    lowers, safeties = (0.05, 0.005), (0.0, 0.1)
    found = tuning.search(5, arithmetic, targets, lowers, safeties)
    every = {
        f"minimax(lower={lower:g},safety={safety:g})" if safety else f"minimax(lower={lower:g})": tuning.measured(
            schedules.get(f"minimax(lower={lower:g},safety={safety:g})", 5), arithmetic, targets
        ).worst
        for lower in lowers
        for safety in safeties
    }
    assert found.worst == min(every.values())
    assert every[found.schedule.name] == found.worst


@pytest.mark.slow
def test_refining_helps_on_matrices_that_it_has_not_seen():
    arithmetic = Rounded("mxfp8_e4m3")
    seen, unseen = ([tuning.target(gaussian(24, 48, seed)) for seed in seeds] for seeds in ((0, 1), (2, 3)))
    start = tuning.measured(schedules.get("taylor", 4), arithmetic, seen)
    refined = tuning.refine(start, arithmetic, seen, evaluations=60)
    assert refined.worst < 0.9 * start.worst
    before = tuning.measured(start.schedule, arithmetic, unseen).worst
    assert tuning.measured(refined.schedule, arithmetic, unseen).worst < 0.95 * before
    assert all(round(value, 4) == value for row in refined.schedule.coefficients for value in row)
    assert refined.schedule.steps == 4


def test_bad_requests():
    arithmetic = Exact()
    with pytest.raises(ValueError, match="at least one matrix"):
        tuning.search(5, arithmetic, [])
    one = [tuning.target(gaussian(4, 6, 0))]
    with pytest.raises(ValueError, match="at least one lower bound"):
        tuning.search(5, arithmetic, one, lowers=())
    with pytest.raises(ValueError, match="one scale for each of 1 matrices"):
        tuning.refine(tuning.measured(schedules.get("taylor"), arithmetic, one), arithmetic, one, scale=[1.0, 2.0])
    for evaluations in (-5, 0):
        with pytest.raises(ValueError, match=f"must be a positive integer, not {evaluations}"):
            tuning.refine(
                tuning.measured(schedules.get("taylor"), arithmetic, one), arithmetic, one, evaluations=evaluations
            )


@pytest.mark.parametrize("name", schedules.tuned_names())
@pytest.mark.parametrize("steps", [5, 6, 8])
def test_a_tuned_schedule_keeps_every_large_singular_value(name, steps):
    """In exact arithmetic: positive and bounded on the whole interval, and within the band on its upper part."""
    schedule = schedules.get(name, steps)
    image = schedule.map(np.geomspace(1e-6, 1.0, 20_001))
    assert (image > 0).all()
    low, high = schedule.band(tuning.RANGE[0])
    assert tuning.BAND[0] <= low <= high <= tuning.BAND[1]
    assert schedule.headroom == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::muon_lab.polar.ScheduleWarning")
@pytest.mark.parametrize(("name", "sigma"), [("mxfp8_flat", None), ("mxfp8_graded", np.geomspace(1, 1e-2, 64))])
@pytest.mark.parametrize("steps", [5, 6, 8])
def test_a_tuned_schedule_beats_the_published_ones_on_new_matrices(name, sigma, steps):
    """On matrices of the kind that it is made for, smaller and from other draws than those it was tuned on."""
    from cases import with_singular_values

    arithmetic = Rounded("mxfp8_e4m3")
    matrices = [gaussian(64, 160, s) if sigma is None else with_singular_values(64, 160, sigma, seed=s) for s in (5, 6)]
    targets = [tuning.target(G) for G in matrices]
    own = np.mean(tuning.measured(schedules.get(name, steps), arithmetic, targets).errors)
    for published in ("simple", "quintic", "taylor", "polar_express", "polar_express_1.02", "modula6", "cans_cubic10"):
        try:
            schedule = schedules.get(published, steps)
        except ValueError:
            continue
        assert own < np.mean(tuning.measured(schedule, arithmetic, targets).errors), published
