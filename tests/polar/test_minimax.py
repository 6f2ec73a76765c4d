"""Optimal schedules: the best polynomial of a step, its composition, and what is proven of them."""

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from muon_lab.polar import Design, minimax, schedules

INTERVALS = [("1e-12", "1"), ("1e-3", "1"), ("0.02", "1.97"), ("0.5", "1.5"), ("0.999", "1"), ("0.99999999", "1")]
DIGITS = minimax.DIGITS


@pytest.fixture(autouse=True)
def many_digits():
    """What a test computes itself is computed with twice the digits of what it judges."""
    with mp.workdps(2 * DIGITS):
        yield


def close(x, y, digits=DIGITS - 5):
    """Equal but for the last five of the digits that were asked for."""
    return abs(x - y) <= mpf(10) ** -digits * max(abs(x), abs(y))


# --- the best polynomial of an interval -------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [3, 5])
@pytest.mark.parametrize(("lower", "upper"), INTERVALS)
def test_a_fit_equioscillates_and_is_nowhere_worse(lower, upper, degree):
    best = minimax.fit(lower, upper, degree)
    seen = minimax.equioscillation(best)
    assert len(best.points) == (degree + 1) // 2 + 1
    assert list(best.points) == sorted(best.points)
    assert (best.points[0], best.points[-1]) == (best.lower, best.upper)
    assert seen.alternating
    assert seen.errors[0] > 0
    assert seen.spread < mpf(10) ** -(DIGITS - 5)
    assert all(close(abs(error), best.error) for error in seen.errors)
    assert seen.worst <= best.error * (1 + mpf(10) ** -(DIGITS - 5))


@pytest.mark.parametrize("degree", [3, 5])
def test_what_is_not_the_best_polynomial_is_seen(degree):
    best = minimax.fit("0.1", 1, degree)
    bent = replace(best, coefficients=(best.coefficients[0] * (1 + mpf("1e-20")), *best.coefficients[1:]))
    spread = minimax.equioscillation(bent).spread
    assert mpf("1e-21") < spread < mpf("1e-18")  # of the order of the change, relative to E
    assert minimax.equioscillation(bent).worst > best.error
    moved = replace(best, points=(best.lower, best.points[1] + mpf("1e-10"), *best.points[2:]))
    assert minimax.equioscillation(moved).spread > mpf("1e-20")  # the square of the shift: the error is stationary
    assert not minimax.equioscillation(replace(best, coefficients=(mpf(1), mpf(0), mpf(0)))).alternating


@given(st.sampled_from([3, 5]), st.floats(0.01, 0.9), st.lists(st.floats(-1, 1), min_size=3, max_size=3))
def test_no_other_polynomial_is_as_good(degree, lower, direction):
    best = minimax.fit(lower, 1, degree)
    bend = [mpf(x) / 1000 for x in direction]
    other = [c + d for c, d in zip(best.coefficients, bend, strict=True)]
    if degree == 3:
        other[2] = mpf(0)
    assert minimax.worst([other], lower) >= minimax.worst([best.coefficients], lower)


@pytest.mark.parametrize("degree", [3, 5])
def test_a_scaled_interval_has_the_scaled_polynomial(degree):
    one, two = minimax.fit("0.1", "0.7", degree), minimax.fit("0.2", "1.4", degree)
    assert close(one.error, two.error)
    assert all(close(x, 2**k * y) for x, y, k in zip(one.coefficients, two.coefficients, (1, 3, 5), strict=True))


@pytest.mark.parametrize(("degree", "order", "limit"), [(3, 2, "0.75"), (5, 3, "0.625")])
def test_narrow_intervals_have_the_error_of_a_chebyshev_polynomial(degree, order, limit):
    """On [1 - e, 1 + e] it is constant * e^order (1 + O(e^2)), with half of the cubic's 1.5 e^2 and a quarter of
    Taylor's 2.5 e^3, as the monic Chebyshev polynomial of degree n is 2^(1-n) of e^n."""
    for e in ("1e-2", "1e-4", "1e-8"):
        e = mpf(e)
        ratio = minimax.fit(1 - e, 1 + e, degree).error / e**order
        assert abs(ratio / mpf(limit) - 1) < 2 * e**2


@pytest.mark.parametrize("digits", [20, 80])
def test_digits_are_as_many_as_asked_for(digits):
    best, better = minimax.fit("1e-3", 1, digits=digits), minimax.fit("1e-3", 1, digits=2 * digits)
    assert all(close(x, y, digits) for x, y in zip(best.coefficients, better.coefficients, strict=True))


def test_the_ambient_precision_is_left_alone():
    before = mp.prec, mpmath.iv.prec
    minimax.schedule.cache_clear()
    minimax.schedule(Design(1e-2, 4))
    minimax.equioscillation(minimax.fit(0.1, 1))
    assert (mp.prec, mpmath.iv.prec) == before


@pytest.mark.parametrize(
    ("lower", "upper", "degree", "message"),
    [
        (0, 1, 5, r"the interval is \[0, 1\], needed 0 < lower < upper"),
        ("0.5", "0.5", 5, r"\[0.5, 0.5\]"),
        (-1, 1, 3, r"\[-1, 1\]"),
        (0.1, 1, 7, "degree is 7, needed 3 or 5"),
        (0.1, math.inf, 5, r"\[0.1, inf\], needed 0 < lower < upper, both finite"),
        (math.nan, 1, 5, r"\[nan, 1\]"),
        ("abc", 1, 5, "the ends of an interval must be numbers or decimal texts, not 'abc'"),
    ],
)
def test_fits_of_nothing_are_refused(lower, upper, degree, message):
    with pytest.raises(ValueError, match=message):
        minimax.fit(lower, upper, degree)


# --- the range of a composition ---------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(-4, 4), st.floats(-4, 4), st.sampled_from([0.0, -1.5, 2.0])), min_size=1, max_size=3),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_the_image_holds_every_value_and_is_taken(rows, x, y):
    lower, upper = min(x, y), max(x, y) + 0.01
    low, high = minimax.image(rows, lower, upper)
    values = np.linspace(lower, upper, 20_001)
    slope = 1.0
    for row in rows:
        largest = np.abs(values).max()
        slope *= abs(row[0]) + 3 * abs(row[1]) * largest**2 + 5 * abs(row[2]) * largest**4
        values = minimax.value(row, values)
    apart = slope * (upper - lower) / 20_000  # how far a value may lie from that of the nearest point of the grid
    rounding = 1e-13 * (1 + slope)  # of the grid's own float64
    assert float(low.a) - rounding <= values.min() <= float(low.b) + apart + rounding
    assert float(high.a) - apart - rounding <= values.max() <= float(high.b) + rounding


def test_an_image_ends_where_the_polynomial_turns():
    low, high = minimax.image([(1.5, -0.5, 0.0)], "0.5", "1.25")
    assert high.a <= 1 <= high.b  # p(1), inside
    assert low.a <= mpf("0.6875") <= low.b  # p(0.5)
    assert high.b - low.a < mpf("0.3125") + mpf("1e-40")
    low, high = minimax.image([(15 / 8, -10 / 8, 3 / 8)], "0.5", 2)  # a double turn at 1 is none
    assert high.a <= mpf("5.75") <= high.b


DESIGNS = [
    Design(1e-1, 3),
    Design(1e-3, 5),
    Design(1e-3, 5, cushion=0.02, safety=0.02),
    Design(1e-3, 6, degree=3),
    Design(1e-2, 4, degree=3, cushion=0.05, safety=0.01),
    Design(7e-3, 5, degree=3, ceiling=1.3, decimals=7),
]


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: f"{d.name} {d.steps}")
def test_the_proven_error_is_that_of_a_dense_grid_in_fifty_digits(design):
    made = minimax.schedule(design)
    with mp.workdps(50):
        table = [tuple(mpf(x) for x in row) for row in made.rows]
        lower = mpf(repr(design.lower))
        errors = []
        for i in range(6001):
            x = lower ** (1 - mpf(i) / 6000)
            for row in table:
                x = minimax.value(row, x)
            errors.append(abs(1 - x))
    assert max(errors) <= mpf(made.design.worst)
    # a grid misses a turn by half its spacing, and its height by the square of that
    assert max(errors) >= mpf(made.design.worst) * (1 - mpf("1e-4"))


def test_bounds_are_rounded_up():
    row = (1 - 2.0**-53, 0.0, 0.0)
    assert minimax.worst([row], 1, 1) == 2.0**-53
    assert minimax.worst([(mpf(1) / 3, mpf(0), mpf(0))], 1, 1) == np.nextafter(2 / 3, 1.0)


# --- compositions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [3, 5])
def test_every_step_of_a_plain_design_leaves_an_interval_centred_at_one(degree):
    """So the error of the whole is that of the last step on what the others leave, which no polynomial undercuts."""
    table = minimax.rows(Design(1e-3, 6, degree))
    for count in range(1, 7):
        low, high = minimax.image(table[:count], "1e-3")
        assert close(2 - mpf(low.mid), mpf(high.mid))


def test_no_neighbour_of_a_greedy_table_is_better():
    """The main theorem, locally: bend every coefficient of every step, each way."""
    table = [list(row) for row in minimax.rows(Design(1e-2, 3))]
    least = minimax.worst(table, "1e-2")
    for step in range(3):
        for index in range(3):
            for bend in (-1e-3, 1e-3):
                bent = [row[:] for row in table]
                bent[step][index] *= 1 + bend
                assert minimax.worst(bent, "1e-2") > least


def test_steps_are_added_without_changing_those_before():
    for long, short in zip(minimax.rows(Design(1e-3, 7)), minimax.rows(Design(1e-3, 4)), strict=False):
        assert all(close(x, y) for x, y in zip(long, short, strict=True))


def test_the_published_bound_holds_and_is_loose():
    r"""|1 - l^2|^((q+1)^T) for T steps of degree 2q + 1 (Amsel et al.): 0.9998 where 0.113 is true."""
    for degree, q in ((3, 1), (5, 2)):
        for steps in range(1, 9):
            bound = (1 - mpf("1e-6")) ** ((q + 1) ** steps)
            assert minimax.worst(minimax.rows(Design(1e-3, steps, degree)), "1e-3") <= bound
    assert float((1 - mpf("1e-6")) ** 243) == pytest.approx(0.9998, abs=5e-5)


# --- cushion, safety, ceiling: the published generator, literally, in float64 -----------------------------------------


def literally(lower, steps, cushion=0.0, safety=0.0):
    """The recipe of the Polar Express repository: quintics, safety within the composition."""
    low, high, table = lower, 1.0, []
    for step in range(steps):
        start = max(low, cushion * high)
        if start / high >= 1 - 5e-6:
            a, b, c = 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
        else:
            q, r = (3 * start + high) / 4, (start + 3 * high) / 4
            for _ in range(30):
                system = [[x, x**3, x**5, sign] for x, sign in ((start, 1), (q, -1), (r, 1), (high, -1))]
                a, b, c, _ = np.linalg.solve(system, np.ones(4))
                q, r = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
        if cushion * high > low:
            scale = 2 / (minimax.value((a, b, c), low) + minimax.value((a, b, c), high))
            a, b, c = a * scale, b * scale, c * scale
        if step < steps - 1:
            a, b, c = a / (1 + safety), b / (1 + safety) ** 3, c / (1 + safety) ** 5
        table.append((a, b, c))
        low = minimax.value((a, b, c), low)
        high = 2 - low
    return table


@pytest.mark.parametrize(
    ("lower", "steps", "cushion", "safety"),
    [
        (1e-3, 5, 0.0, 0.0),
        (1e-3, 6, 0.02407327424182761, 0.0),
        (1e-3, 6, 0.02, 0.01),
        (1e-3, 5, 0.02, 0.02),
        (1e-5, 7, 0.1, 0.05),
    ],
)
def test_a_design_is_the_published_recipe(lower, steps, cushion, safety):
    exact = minimax.rows(Design(lower, steps, cushion=cushion, safety=safety))
    # the system is solved to its condition times the roundoff: 1e3 or so for the wide intervals, 1e9 by the sixth step
    tolerance = 1e-12 if steps == 5 else 1e-6
    np.testing.assert_allclose(np.array(exact, dtype=float), literally(lower, steps, cushion, safety), rtol=tolerance)


def test_the_next_interval_sees_the_safe_polynomial():
    """Dividing a finished table by the safety factor is another table: rows 2 and 5 of 0.02."""
    within = minimax.rows(Design(1e-3, 6, cushion=0.02, safety=0.02))
    after = minimax.rows(Design(1e-3, 6, cushion=0.02, safety=0.02, applied="after"))
    assert within[0] == after[0]
    assert [mp.nstr(table[1][0], 5) for table in (within, after)] == ["4.0429", "4.0419"]
    last = [minimax.rows(Design(1e-3, 5, cushion=0.02, safety=0.02, applied=how))[4][0] for how in schedules.APPLIED]
    assert [mp.nstr(a, 5) for a in last] == ["2.3465", "2.2938", "2.2488"]


@pytest.mark.parametrize("applied", schedules.APPLIED)
def test_safety_is_a_scale_of_the_argument(applied):
    plain = minimax.rows(Design(1e-3, 4))
    safe = minimax.rows(Design(1e-3, 4, safety=0.25, applied=applied))
    divided = {"within": 1, "after": 3, "after_all": 4}[applied]  # rows that are the plain one of x over 5/4
    for row, other in list(zip(plain, safe, strict=True))[:divided]:
        assert all(close(x, y * mpf(5) ** k / mpf(4) ** k) for x, y, k in zip(row, other, (1, 3, 5), strict=True))
    assert safe[3] != plain[3] if applied == "within" else (safe[3] == plain[3]) == (applied == "after")


@pytest.mark.parametrize("degree", [3, 5])
def test_a_cushioned_step_is_centred_on_the_interval_that_it_gets(degree):
    for count in (1, 2, 3):
        low, high = minimax.image(minimax.rows(Design(1e-4, 3, degree, cushion=0.1))[:count], "1e-4")
        assert close(2 - mpf(low.mid), mpf(high.mid))


def test_a_cushion_that_is_below_the_interval_does_nothing():
    assert minimax.rows(Design(0.1, 3, cushion=0.05)) == minimax.rows(Design(0.1, 3))
    assert minimax.rows(Design(0.1, 3, cushion=0.3)) != minimax.rows(Design(0.1, 3))


@pytest.mark.parametrize("degree", [3, 5])
def test_a_ceiling_scales_the_composition_and_changes_nothing_else(degree):
    """p(x) with every step under the ceiling c is c/(1 + E) times the plain composition, which ends at 1 + E."""
    plain, under = (minimax.rows(Design(1e-2, 4, degree, ceiling=c)) for c in (None, 1.25))
    scale = mpf("1.25") / mpf(minimax.image(plain, "1e-2").high.mid)
    for x in ("0.01", "0.3", "1"):
        images = []
        for table in (plain, under):
            y = mpf(x)
            for row in table:
                y = minimax.value(row, y)
            images.append(y)
        assert close(images[0] * scale, images[1], DIGITS - 10)  # each step passes errors on, times its slope
    for count in range(1, 5):
        assert close(mpf(minimax.image(under[:count], "1e-2").high.mid), mpf("1.25"))


def test_narrow_intervals_take_the_taylor_quintic():
    exact = minimax.rows(Design(0.999, 4))
    last = exact[-1]
    assert close(sum(last) * 1, mpf(1), 20)
    assert [mp.nstr(8 * x, 12) for x in last] == ["15.0", "-10.0", "3.0"]


# --- schedules by name ------------------------------------------------------------------------------------------------


def test_coefficients_are_rounded_once():
    for design in (Design(1e-3, 8), Design(1e-3, 8, cushion=0.02, safety=0.01), Design(1e-5, 10, 3)):
        better = [[float(mp.mpf(x)) for x in row] for row in minimax.rows(design, 2 * DIGITS)]
        with mp.workprec(53):
            nearest = [tuple(float(+x) for x in row) for row in minimax.rows(design, 2 * DIGITS)]
        assert list(minimax.schedule(design).rows) == nearest
        assert np.allclose(better, nearest, rtol=2.0**-52, atol=0)


@pytest.mark.parametrize(
    ("text", "steps", "name", "design"),
    [
        ("minimax(lower=1e-3)", None, "minimax(lower=0.001)", Design(1e-3, 5)),
        ("minimax( lower = 0.001 )", 7, "minimax(lower=0.001)", Design(1e-3, 7)),
        ("minimax(degree=3,lower=1e-2)", 4, "minimax(lower=0.01,degree=3)", Design(1e-2, 4, 3)),
        ("minimax(lower=1e-3, degree=5, cushion=0)", 5, "minimax(lower=0.001)", Design(1e-3, 5)),
        (
            "minimax(lower=1e-5,safety=2e-2,cushion=0.02)",
            6,
            "minimax(lower=1e-05,cushion=0.02,safety=0.02)",
            Design(1e-5, 6, cushion=0.02, safety=0.02),
        ),
        (
            "minimax(lower=7e-3,degree=3,ceiling=1.3,decimals=7)",
            5,
            "minimax(lower=0.007,degree=3,ceiling=1.3,decimals=7)",
            Design(7e-3, 5, 3, ceiling=1.3, decimals=7),
        ),
    ],
)
def test_a_design_has_one_canonical_name(text, steps, name, design):
    made = schedules.get(text, steps)
    assert made.name == name
    assert replace(made.design, worst=None) == design
    assert made.steps == len(made.rows) == design.steps
    assert schedules.get(made.name, steps) is made  # and is computed once


@given(
    st.floats(1e-6, 0.5),
    st.sampled_from([3, 5]),
    st.floats(0, 0.5),
    st.floats(0, 0.2),
    st.sampled_from(schedules.APPLIED),
    st.none() | st.floats(1, 1.9),
    st.none() | st.integers(1, 9),
)
def test_names_are_read_back(lower, degree, cushion, safety, applied, ceiling, decimals):
    design = Design(lower, 3, degree, cushion, safety, applied, ceiling, decimals)
    assert schedules.design(design.name, 3) == design


@pytest.mark.parametrize(
    ("text", "steps", "message"),
    [
        ("minimax", None, r"'minimax' is not a design: needed minimax\(lower=1e-3\) .* degree=, cushion=, safety="),
        ("minimax()", None, "is not a design"),
        ("minimax(lower=1e-3", None, "is not a design"),
        ("minimax(degree=5)", None, "is not a design"),
        ("minimax(lower=1e-3,lower=1e-2)", None, "once each"),
        ("minimax(lower=small)", None, "lower cannot be 'small': could not convert"),
        ("minimax(lower=1e-3,degree=5.0)", None, "degree cannot be '5.0': invalid literal"),
        ("minimax(lower=1e-3,safty=0.1)", None, "unknown parameter 'safty': did you mean 'safety'"),
        ("minimax(lower=1e-3,steps=4)", None, "unknown parameter 'steps'"),
        ("minimax(lower=1.5)", None, "lower of a minimax design must be above 0 and below 1, not 1.5"),
        ("minimax(lower=nan)", None, "not nan"),
        ("minimax(lower=1e-3,degree=7)", None, "degree of a minimax design must be 3 or 5, not 7"),
        ("minimax(lower=1e-3,cushion=2)", None, "cushion of a minimax design must be at least 0 and below 1, not 2.0"),
        ("minimax(lower=1e-3,safety=-1)", None, "safety"),
        (
            "minimax(lower=1e-3,applied=before)",
            None,
            "applied cannot be 'before': unknown place .* Known: within, after, after_all",
        ),
        ("minimax(lower=1e-3)", 0, "steps of a minimax design must be a positive integer, not 0"),
        ("minimax(lower=1e-3)", True, "positive integer, not True"),
        ("maximin(lower=1e-3)", None, r"unknown schedule .* did you mean 'minimax\(lower=1e-3\)'"),
    ],
)
def test_malformed_designs_are_refused_in_one_sentence(text, steps, message):
    with pytest.raises(ValueError, match=message) as error:
        schedules.get(text, steps)
    assert "\n" not in str(error.value)


def test_a_design_has_no_steps_past_its_own():
    with pytest.raises(ValueError, match="exactly 5 steps"):
        replace(schedules.get("minimax(lower=1e-3)"), steps=6)


def test_longer_designs_are_better_down_to_the_roundoff_of_their_coefficients():
    worst = [schedules.get("minimax(lower=1e-4)", steps).design.worst for steps in range(1, 11)]
    assert all(after < before for before, after in pairwise(worst))
    assert worst[-1] <= (15 + 10 + 3) / 8 * 2.0**-53


def test_designed_schedules_need_no_caution_for_their_steps_but_for_their_headroom(recwarn):
    """No number of steps collapses; nothing above 1 is borne without safety, and about the safety with it."""
    for text in ("minimax(lower=0.5)", "minimax(lower=1e-6)", "minimax(lower=1e-3,degree=3,safety=0.1)"):
        for steps in (1, 2, 5, 12):
            schedules.get(text, steps)
    assert not recwarn.list
    for lower in ("1e-3", "1e-5"):
        assert 1 <= schedules.get(f"minimax(lower={lower})", 8).reach < 1 + 1e-5
        for safety in (0.01, 0.05):
            reach = schedules.get(f"minimax(lower={lower},safety={safety})", 8).reach
            assert 1 + safety / 2 < reach < (1 + safety) * (1 + 1e-5) * (1 + safety)


@pytest.mark.parametrize(
    ("text", "steps", "furthest"), [("lower=1e-10", 15, "66"), ("lower=1e-10", 20, "inf"), ("lower=1e-12", 30, "inf")]
)
def test_designs_that_float64_cannot_hold_are_refused(text, steps, furthest):
    with pytest.raises(ValueError, match=rf"^float64 coefficients cannot hold minimax.* end {furthest}.* add safety"):
        schedules.get(f"minimax({text})", steps)


def test_designs_that_float64_just_holds_are_made():
    assert schedules.get("minimax(lower=1e-9)", 18).design.worst < 1e-3
    assert schedules.get("minimax(lower=1e-10,safety=0.01)", 20).design.worst < 1e-3
    assert schedules.get("minimax(lower=1e-10)", 1).design.worst <= 1


def test_the_worst_of_no_interval_is_refused():
    with pytest.raises(ValueError, match=r"worst: the interval is \[2, 1\], needed lower <= upper"):
        minimax.worst([(1.5, -0.5, 0.0)], 2, 1)
    assert minimax.worst([(1.5, -0.5, 0.0)], 1, 1) == 0.0


def test_the_study_of_schedules_takes_a_design():
    from muon_lab.studies import schedules as study

    point = {"method": "minimax(lower=1e-3)", "steps": 5, "sigma": 1e-3}
    (case,) = study.settle(point, None)
    assert case["method"] == "minimax(lower=0.001)"
    # a grid of 40,001 points against the proven bound
    assert study.measure(case)["worst"] == pytest.approx(schedules.get(**point_of(case)).design.worst, rel=1e-6)


def point_of(case):
    return {"name": case["method"], "steps": case["steps"]}


def test_schedules_are_read_without_torch_and_without_mpmath():
    code = (
        "import sys; from muon_lab.polar import schedules; schedules.get('quintic'); schedules.circulating();"
        "schedules.design('minimax(lower=1e-3)'); print({'torch', 'mpmath'} & set(sys.modules));"
        "schedules.get('minimax(lower=1e-3)'); print({'torch', 'mpmath'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split("\n")[:2] == ["set()", "{'mpmath'}"]
