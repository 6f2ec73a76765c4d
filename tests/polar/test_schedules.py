"""Schedules are understood as maps of one number before they meet a matrix."""

import warnings
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from muon_lab.polar import schedules
from muon_lab.polar.schedules import Schedule, ScheduleWarning


def quietly(name, steps=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScheduleWarning)
        return schedules.get(name, steps)


# The published scalar facts: name, steps, slope at zero, band of [0.01, 1].
FACTS = [
    ("simple", 5, 484.88, 0.6818, 1.1344),
    ("quintic", 5, 492.75, 0.9778, 1.0318),
    ("polar_express", 5, 976.28, 0.8704, 1.1236),
    ("polar_express", 8, 6363.46, 1.0000, 1.0000),
    ("cans", 5, 1048.94, 0.8844, 1.1198),
    ("cans", 8, 12330, 1.0069, 1.0546),
    ("deepseekv4", 10, 79262.8, 1.0000, 1.0005),
    ("cubic5", 5, 119.32, 0.7741, 1.3000),
    ("aol", 4, 104.06, -1.0844, 1.0844),
]


@pytest.mark.parametrize(("name", "steps", "slope", "low", "high"), FACTS)
def test_published_scalar_facts_hold(name, steps, slope, low, high):
    schedule = schedules.get(name, steps)
    assert schedule.slope == pytest.approx(slope, rel=1e-4)
    assert schedule.band(1e-2) == pytest.approx((low, high), abs=5.5e-5)


@pytest.mark.parametrize("name", schedules.known())
def test_interval_starts_where_the_table_settles(name):
    schedule = schedules.get(name)
    if name == "polar_express":
        assert schedule.interval == (1e-3, 1.0)  # the fit of the source; the whole table settles from 1.3e-4 already
        return
    low, high = (0.68, 1.21) if name == "simple" else (0.7, 1.3)
    lower, upper = schedule.interval
    sigma = np.geomspace(1e-6, 0.87 if upper < 1 else 1.0, 400_001)
    image = schedule.map(sigma)
    settled = sigma[np.flatnonzero((image < low) | (image > high))[-1] + 1]
    assert settled == pytest.approx(lower, rel=5e-3)


def test_cans_does_not_converge_to_one():
    assert schedules.get("cans", 30).map(0.5) == pytest.approx(1.028, abs=5e-4)


def test_aol_turns_singular_values_above_0_8837_around():
    aol = schedules.get("aol")
    root = np.sqrt(min(np.roots(aol.rows[0][::-1]).real))  # of the first step's a + b x² + c x⁴
    assert root == pytest.approx(0.88370, abs=2e-5)
    assert 0 <= root - aol.headroom < 5e-5
    assert 0 <= aol.headroom - aol.interval[1] < 1e-4
    assert aol.map(aol.interval[1]) > 0
    assert aol.map(0.87) > 0 > aol.map(0.89)


def test_simple_never_settles_but_runs_around_a_four_cycle():
    tail = np.array(list(schedules.get("simple", 200).maps(0.3)))[-4:]
    assert sorted(tail) == pytest.approx([0.6819, 0.7529, 1.0469, 1.1343], abs=1e-4)


@pytest.mark.parametrize(("name", "order", "constant"), [("cubic", 2, 1.5), ("taylor", 3, 2.5)])
def test_declared_order_of_convergence_is_measured(name, order, constant):
    """The errors near 1 fall as constant · e^order, in 200 digits: slope and constant by regression."""
    with mpmath.workdps(200):
        x, errors = mpmath.mpf("0.97"), []
        for a, b, c in schedules.get(name, 4).coefficients:
            x = mpmath.mpf(a) * x + mpmath.mpf(b) * x**3 + mpmath.mpf(c) * x**5
            errors.append(float(mpmath.log(1 - x)))
        slope, offset = np.polyfit(errors[:-1], errors[1:], 1)
    assert slope == pytest.approx(order, rel=5e-3)
    assert np.exp(offset) == pytest.approx(constant, rel=5e-2)


def test_rational_steps_are_exact_rationals():
    a, b, c = map(Fraction, schedules.get("taylor", 1).coefficients[0])
    assert (a, b, c) == (Fraction(15, 8), Fraction(-5, 4), Fraction(3, 8))
    assert a + b + c == 1
    assert a + 3 * b + 5 * c == 0


# --- past the table ---------------------------------------------------------------------------------------------------


def test_rules_past_the_table_are_the_sources():
    assert quietly("quintic", 7).coefficients[5:] == schedules.get("quintic").rows[:2]
    assert quietly("aol", 5).coefficients[4] == schedules.get("aol").rows[0]
    assert schedules.get("polar_express", 10).coefficients[8:] == ((1.875, -1.25, 0.375),) * 2
    assert schedules.get("cans", 7).coefficients[5:] == (schedules.get("cans").rows[-1],) * 2
    assert schedules.get("deepseekv4", 12).coefficients[10:] == ((2.0, -1.5, 0.5),) * 2
    assert schedules.get("quintic", 3).coefficients == schedules.get("quintic").rows[:3]


@pytest.mark.parametrize("steps", [6, 7, 11])
def test_quintic_past_its_table_warns_with_the_reason(steps):
    with pytest.warns(ScheduleWarning, match=f"'quintic' collapses at {steps} steps.*as low as 0.0?[0-9]+, after 5"):
        schedules.get("quintic", steps)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 10, 15, 25])
def test_quintic_does_not_cry_wolf(steps):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules.get("quintic", steps)


@pytest.mark.parametrize("name", ["simple", "polar_express", "cans", "deepseekv4", "cubic", "taylor"])
def test_no_caution_where_more_steps_do_no_harm(name):
    assert [k for k in range(1, 31) if schedules.get(name, k).caution] == []


def test_a_warning_is_shown_once():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(5):
            schedules.get("quintic", 6)
    assert len(shown) == 1


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps", "message"),
    [
        ("polar_expres", None, "did you mean 'polar_express'.*Known: simple, quintic"),
        ("cubic5", 4, "exactly 5 steps"),
        ("simple", 0, "positive integer, not 0"),
        ("simple", True, "positive integer, not True"),
    ],
)
def test_bad_requests_are_refused(name, steps, message):
    with pytest.raises(ValueError, match=message):
        schedules.get(name, steps)


def test_own_schedules_are_values():
    own = Schedule("own", ((1.5, -0.5, 0.0),), 3, "cycle", (0.1, 1.0), "this test")
    assert own.coefficients == ((1.5, -0.5, 0.0),) * 3
    assert own.map(1.0) == 1.0
    assert hash(own) == hash(Schedule("own", ((1.5, -0.5, 0.0),), 3, "cycle", (0.1, 1.0), "this test"))


# --- reach ------------------------------------------------------------------------------------------------------------


def test_a_schedule_that_forgets_lets_nothing_escape():
    assert Schedule("none", ((0.0, 0.0, 0.0),), 3, "repeat_last", (0.1, 1.0), "this test").reach == np.inf


def test_a_schedule_that_doubles_reaches_as_far_as_its_power():
    """Without steps that bend, 2³ x = 2 at a quarter; steps that overflow reach the same."""
    double = Schedule("double", ((2.0, 0.0, 0.0),), 3, "repeat_last", (0.1, 1.0), "this test")
    assert double.reach == 0.25
    wild = Schedule("wild", ((1.0, 0.0, 1e300),), 40, "repeat_last", (0.1, 1.0), "this test")
    assert 0 < wild.reach < 1e-70


# --- work of the studies that take steps ------------------------------------------------------------------------------


def test_estimates_of_work_grow_with_every_step():
    from muon_lab.studies import designs, effects, stability

    assert stability.SETTLED == effects.SETTLED
    size = {"rows": 64, "cols": 128, "method": "taylor"}
    for study, case in ((stability, {"what": "products", **size}), (designs, size)):
        one, two, nine = (study.STUDY.work({**case, "steps": steps}) for steps in (1, 2, 9))
        assert nine - two == pytest.approx(7 * (two - one))
        assert two - one >= 4 * 64**2 * 128 + 2 * 64**3
    averages = {"what": "momentum", "rows": 8, "cols": 32}
    short, long = (stability.STUDY.work({**averages, "beta": beta}) for beta in (0.9, 0.99999))
    assert long > 2_000_000 * 8 * 32  # one operation an entry at each of 2e6 steps
    assert short < 2e-2 * long
