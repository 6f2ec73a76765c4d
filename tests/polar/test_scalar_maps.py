"""Schedules as maps of one number, in exact rational or fifty-digit arithmetic, before they meet a matrix.

Bands are proven ranges (`minimax.image`), not grids; a printed figure is right if it rounds to what is proven.
"""

import warnings
from dataclasses import replace
from fractions import Fraction
from math import prod

import numpy as np
import pytest
from mpmath import mp, mpf

from muon_lab.polar import minimax, schedules
from muon_lab.polar.schedules import Design, Schedule, ScheduleWarning

DIGITS = 50
CLASSICS = {
    "two": (2.0, -1.5, 0.5),
    "modula": (3.0, -16 / 5, 6 / 5),
}


@pytest.fixture(autouse=True)
def many_digits():
    with mp.workdps(DIGITS):
        yield


def get(name, steps=None):
    if name in CLASSICS:
        return Schedule(name, (CLASSICS[name],), steps or 1, "repeat_last", (0.1, 1.0), "textbook")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScheduleWarning)
        return schedules.get(name, steps)


def band(name, steps, lower, upper=1):
    low, high = minimax.image(get(name, steps).coefficients, lower, upper)
    return float(low.mid), float(high.mid)


def worst(name, steps, lower):
    return minimax.worst(get(name, steps).coefficients, lower)


def rational(name):
    """The coefficients of the last step as the decimals that they are printed as."""
    return [Fraction(repr(x)) for x in get(name).rows[-1]]


def decimals(name):
    """The same in fifty digits."""
    return [mpf(x.numerator) / x.denominator for x in rational(name)]


def slope_at(row, x):
    a, b, c = row
    return a + 3 * b * x**2 + 5 * c * x**4


def reads(value, printed):
    """Whether a value rounds to the printed figure."""
    mantissa, _, power = printed.partition("e")
    place = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    return abs(float(value) - float(printed)) <= place / 2 * (1 + 1e-9)


def zeros(a, b, c):
    """The two positive roots of a + b x^2 + c x^4, ascending."""
    root = mp.sqrt(b * b - 4 * a * c)
    return [mp.sqrt((-b - root) / (2 * c)), mp.sqrt((-b + root) / (2 * c))]


def turns(name):
    a, b, c = decimals(name)
    return zeros(a, 3 * b, 5 * c)


# --- simple: one step -------------------------------------------------------------------------------------------------


def keller(x, steps=1):
    for _ in range(steps):
        x = minimax.value(decimals("simple"), x)
    return x


def test_simple_does_not_fix_one():
    assert sum(rational("simple")) == Fraction("0.7010")
    assert reads(rational("simple")[0] ** 5, "484.88")


def test_simple_turns_at_two_points():
    top, bottom = turns("simple")
    assert reads(top, "0.55453")
    assert reads(keller(top), "1.20237")
    assert reads(bottom, "1.05014")
    assert reads(keller(bottom), "0.68183")


def test_simple_repels_from_both_fixed_points():
    a, b, c = decimals("simple")
    inner, outer = zeros(a - 1, b, c)
    assert abs(keller(inner) - inner) < mpf("1e-45")
    assert reads(inner, "0.86803")
    assert reads(slope_at((a, b, c), inner), "-1.5824")
    assert reads(outer, "1.26373")
    assert reads(slope_at((a, b, c), outer), "6.4735")


def test_simple_maps_its_range_after_many_steps_onto_itself():
    low, high = band("simple", 1, "0.68183", "1.13436")
    assert reads(low, "0.68183")
    assert reads(high, "1.13436")
    start = keller(turns("simple")[1])
    low, high = minimax.image([decimals("simple")], start, keller(start))
    # exactly: its ends are the images of the minimum and of its image
    assert abs(mpf(low.mid) - start) + abs(mpf(high.mid) - keller(start)) < mpf("1e-45")


def test_simple_attracts_to_one_four_cycle_and_repels_from_the_two_cycle():
    cycle = [keller(mpf("0.3"), 400 + i) for i in range(4)]
    assert abs(keller(cycle[3]) - cycle[0]) < mpf("1e-40")
    first = cycle.index(min(cycle))
    for value, printed in zip(cycle[first:] + cycle[:first], ("0.6819", "1.1343", "0.7529", "1.0469"), strict=True):
        assert reads(value, printed)
    row = decimals("simple")
    assert reads(prod(slope_at(row, x) for x in cycle), "-0.143")
    low = mp.findroot(lambda x: keller(x, 2) - x, mpf("0.709"))
    assert reads(low, "0.70926")
    assert reads(keller(low), "1.10398")
    assert reads(slope_at(row, low) * slope_at(row, keller(low)), "-1.279")


# --- simple: bands after k steps --------------------------------------------------------------------------------------

BANDS = {
    3: (("0.682", "1.134"), ("0.400", "1.202"), ("0.041", "1.202"), ("0.0041", "1.202")),
    4: (("0.682", "1.134"), ("0.682", "1.202"), ("0.140", "1.202"), ("0.0141", "1.202")),
    5: (("0.6818", "1.1344"), ("0.6818", "1.1344"), ("0.4705", "1.2024"), ("0.0485", "1.2024")),
    6: (("0.6818", "1.1344"), ("0.6818", "1.1344"), ("0.6818", "1.2024"), ("0.166", "1.2024")),
    7: (("0.6818", "1.1344"), ("0.6818", "1.1344"), ("0.6818", "1.1344"), ("0.551", "1.2024")),
    10: (("0.6818", "1.1344"),) * 4,
}


@pytest.mark.parametrize("steps", BANDS)
def test_bands_of_simple(steps):
    for lower, printed in zip(("1e-1", "1e-2", "1e-3", "1e-4"), BANDS[steps], strict=True):
        assert all(reads(x, text) for x, text in zip(band("simple", steps, lower), printed, strict=True)), lower


@pytest.mark.parametrize(("printed", "reached"), [("1.067e-3", 0.5), ("1.505e-3", 0.681831)])
def test_where_five_steps_of_simple_begin_to_help(printed, reached):
    low, high = 1e-3, 2e-3
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if band("simple", 5, middle)[0] >= reached else (middle, high)
    assert reads(low, printed)


# --- convergence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cubic", "taylor", "two", "modula", "deepseekv4", "polar_express"])
def test_the_order_of_the_last_step_is_measured(name):
    """By regression of log errors near 1, in 200 digits: slope = order; order 1 contracts by |p'(1)| instead."""
    order = get(name).order
    row = rational(name)
    with mp.workdps(200):
        exact = decimals(name)
        error, logs = mpf("1e-8"), []
        while len(logs) < 3:
            logs.append(float(mp.log(abs(error))))
            error = 1 - minimax.value(exact, 1 - error)
        slope, offset = np.polyfit(logs[:-1], logs[1:], 1)
    assert slope == pytest.approx(order, rel=1e-3)
    if order == 1:
        assert np.exp(offset) == pytest.approx(abs(float(sum((2 * i + 1) * x for i, x in enumerate(row)))), rel=2e-2)


@pytest.mark.parametrize(
    ("name", "order", "constant"),
    [("cubic", 2, Fraction(3, 2)), ("taylor", 3, Fraction(5, 2)), ("two", 2, Fraction(-1, 2)), ("modula", 1, -0.6)],
)
def test_orders_and_constants_are_exact(name, order, constant):
    """1 - p(1 - e) = C e^order + ...: the first Taylor coefficient that is not 0."""
    a, b, c = rational(name)
    coefficients = (a + 3 * b + 5 * c, -(3 * b + 10 * c), b + 10 * c)  # of e, e^2, e^3
    assert get(name).order == order
    assert coefficients[: order - 1] == (0,) * (order - 1)
    assert coefficients[order - 1] == Fraction(str(constant))


def test_what_does_not_fix_one_has_no_order():
    assert [name for name in schedules.known() if get(name).order] == ["polar_express", "deepseekv4", "cubic", "taylor"]
    assert get("simple").order is None
    assert replace(get("cubic"), rows=((1.5, -0.5 + 1e-15, 0.0),)).order is None  # exactly


def test_the_cubic_squares_its_error():
    r"""e <- (3 e^2 - e^3)/2, as polynomials: equal at four points."""
    for e in (Fraction(1, 3), Fraction(1, 2), Fraction(-1), Fraction(2)):
        x = 1 - e
        assert 1 - (Fraction(3, 2) * x - Fraction(1, 2) * x**3) == (3 * e**2 - e**3) / 2


#: name, lower end, steps, worst error on [lower, 1].
CONVERGENT = [
    ("taylor", "1e-1", 5, "4.2e-3"),
    ("taylor", "1e-2", 10, "2.3e-10"),
    ("taylor", "1e-3", 12, "1.9e-2"),
    ("two", "1e-1", 5, "4.6e-4"),
    ("two", "1e-2", 8, "1.7e-3"),
    ("two", "1e-3", 12, "5.0e-6"),
    ("modula", "1e-1", 5, "1.8e-2"),
    ("modula", "1e-1", 8, "3.7e-3"),
    ("modula", "1e-2", 8, "1.2e-2"),
    ("modula", "1e-3", 8, "7.1e-2"),
]


@pytest.mark.parametrize(("name", "lower", "steps", "printed"), CONVERGENT)
def test_errors_of_convergent_polynomials(name, lower, steps, printed):
    assert reads(worst(name, steps, lower), printed)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("cubic", {"1e-1": 11, "1e-2": 17, "1e-3": 22, "1e-5": 34, "1e-8": 51, "1e-16": 96}),
        ("taylor", {"1e-1": 7, "1e-3": 15, "1e-5": 22, "1e-8": 33, "1e-16": 62}),
    ],
)
def test_steps_to_fifteen_digits(name, table):
    for lower, steps in table.items():
        assert worst(name, steps, lower) <= 1e-15 < worst(name, steps - 1, lower), lower


# --- minimax compositions ---------------------------------------------------------------------------------------------

#: Worst error on [l, 1] without cushion and safety: l, degree, {steps: error}.
WORST = [
    ("1e-1", 5, {3: "1.54e-4", 4: "2.3e-12"}),
    ("1e-2", 5, {3: "2.69e-1", 4: "1.25e-2", 5: "1.23e-6", 6: "3.7e-17"}),
    ("1e-3", 5, {3: "8.60e-1", 4: "5.46e-1", 5: "1.13e-1", 6: "9.16e-4", 7: "4.8e-10", 8: "2.2e-27"}),
    ("1e-4", 5, {3: "0.985", 4: "0.937", 5: "0.764", 6: "0.353", 7: "2.88e-2", 8: "1.49e-5"}),
    ("1e-5", 5, {3: "0.998", 4: "0.993", 5: "0.973", 6: "0.890", 7: "0.622", 8: "0.174"}),
    ("1e-3", 3, {3: "0.966", 4: "0.914", 5: "0.796", 6: "0.568", 7: "0.265", 8: "5.37e-2"}),
]


@pytest.mark.parametrize(
    ("lower", "degree", "steps", "printed"), [(low, n, k, text) for low, n, row in WORST for k, text in row.items()]
)
def test_worst_errors_of_minimax_compositions(lower, degree, steps, printed):
    assert reads(minimax.worst(minimax.rows(Design(float(lower), steps, degree)), lower), printed)


# --- published tables -------------------------------------------------------------------------------------------------

#: Worst error of the first k rows on [1e-3, 1].
PUBLISHED = [
    ("polar_express_raw", {5: "0.124", 6: "1.18e-3", 7: "1.0e-9"}),
    ("polar_express_1.01", {5: "0.137", 6: "2.5e-3", 7: "4.6e-6"}),
    ("polar_express_1.02_5", {5: "0.141"}),
    ("polar_express_1.02", {5: "0.154", 6: "4.6e-3", 7: "3.4e-5"}),
    ("polar_express_1.05", {5: "0.271"}),
    ("polar_express", {5: "0.154", 6: "5.6e-3", 7: "7.1e-6"}),
    ("simple", {5: "0.529"}),
    ("quintic", {5: "0.525"}),
]


@pytest.mark.parametrize(("name", "errors"), PUBLISHED)
def test_worst_errors_of_published_tables(name, errors):
    for steps, printed in errors.items():
        assert reads(worst(name, steps, "1e-3"), printed), steps


@pytest.mark.parametrize(
    ("name", "five", "all_rows"),
    [
        ("polar_express_raw", "1026", "6822"),
        ("polar_express_1.01", "1000", "6533"),
        ("polar_express_1.02_5", "989", "989"),
        ("polar_express_1.02", "970", "6229"),
        ("polar_express_1.05", "804", "804"),
        ("polar_express", "976", "6363"),
        ("simple", "485", "485"),
        ("quintic", "493", "493"),
    ],
)
def test_slopes_at_zero_are_exact_products(name, five, all_rows):
    exact = [Fraction(repr(a)) for a, _, _ in get(name).coefficients]
    assert reads(prod(exact[:5]), five)
    assert reads(prod(exact), all_rows)
    assert get(name).slope == pytest.approx(float(prod(exact)), rel=len(exact) * 2.0**-53)


@pytest.mark.parametrize(
    ("name", "steps", "lower", "low", "high"),
    [
        ("polar_express_raw", 5, "1e-2", "0.876", "1.124"),
        ("polar_express_1.01", 5, "1e-2", "0.869", "1.131"),
        ("polar_express_1.02_5", 5, "1e-2", "0.859", "1.141"),
        ("polar_express_1.02", 5, "1e-2", "0.859", "1.141"),
        ("polar_express_1.05", 5, "1e-2", "0.846", "1.124"),
        ("polar_express_1.05", 5, "1e-3", "0.729", "1.124"),
        ("quintic", 5, "1e-3", "0.475", "1.145"),
        ("quintic", 5, "1e-4", "0.049", "1.145"),
        # past the table, where it starts over
        ("quintic", 6, "1e-2", "0.064", "0.165"),
        ("quintic", 7, "1e-2", "0.252", "0.624"),
        ("quintic", 8, "1e-2", "0.856", "1.247"),
        ("quintic", 10, "1e-2", "0.978", "1.026"),
        ("quintic", 11, "1e-2", "0.073", "0.165"),
    ],
)
def test_bands_of_published_tables(name, steps, lower, low, high):
    assert all(reads(x, text) for x, text in zip(band(name, steps, lower), (low, high), strict=True))


@pytest.mark.parametrize("name", [*schedules.known(), *schedules.circulating()])
def test_a_grid_band_lies_in_the_proven_one_and_nearly_fills_it(name):
    schedule = get(name)
    low, high = schedule.band(1e-2)
    proven = band(name, None, 0.01)
    rounding = 20 * schedule.steps * np.finfo(float).eps  # coefficients up to 25, in every step
    assert proven[0] - rounding <= low <= proven[0] + 1e-4
    assert proven[1] - 1e-4 <= high <= proven[1] + rounding


def test_cans_settles_above_one():
    a, b, c = decimals("cans")
    limit = zeros(a - 1, b, c)[0]
    assert reads(limit, "1.02826")
    assert reads(slope_at((a, b, c), limit), "-0.617")  # it attracts, slowly
    assert abs(band("cans", 60, "0.5")[1] - float(limit)) < 1e-6


def test_aol_turns_a_rank_one_matrix_around():
    """Images of 1, the only singular value of a normalised rank-one matrix, after one to eight steps."""
    printed = ("-0.585", "-1.090", "-0.933", "-0.994", "0.554", "1.108", "0.955", "0.989")
    x = mpf(1)
    for row, text in zip(get("aol", 8).coefficients, printed, strict=True):
        x = minimax.value([mpf(repr(y)) for y in row], x)
        assert reads(x, text)
    assert reads(zeros(*(mpf(repr(y)) for y in get("aol").rows[0]))[0], "0.88370")


@pytest.mark.parametrize("name", schedules.circulating())
def test_circulating_tables_are_made_for_their_interval(name):
    schedule = get(name)
    assert schedules.get(name) is schedule  # without a warning
    lower, upper = schedule.interval
    assert (lower, upper) == (schedule.design.lower if schedule.design else 7.10e-4, 1.0)
    low, high = band(name, None, lower)
    assert 0.7 - 1e-3 <= low <= high <= 1.3


def test_modula6_ends_below_one():
    """Six dyadic steps leave a band of 0.4 % that 1 is not in."""
    low, high = band("modula6", 6, "1e-2")
    assert (reads(low, "0.9956"), reads(high, "0.9993")) == (True, True)
    assert all(x * 1024 == round(x * 1024) for row in get("modula6").rows for x in row)


# --- headroom ---------------------------------------------------------------------------------------------------------


def reach(name, steps, level=1.5):
    """The largest normalised singular value up to which the composite stays at most `level`, to six digits."""
    rows = get(name, steps).coefficients
    low, high = 0.9, 3.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        inside = minimax.image(rows, 0, middle).high.b <= level
        low, high = (middle, high) if inside else (low, middle)
    return low


@pytest.mark.parametrize(
    ("name", "steps", "printed"),
    [
        ("simple", 5, "1.264"),
        ("quintic", 5, "1.325"),
        ("polar_express_raw", 8, "1.000"),
        ("polar_express_1.01", 8, "1.011"),
        ("polar_express_1.02_5", 5, "1.022"),
        ("polar_express_1.05", 5, "1.055"),
        ("cans", 5, "1.000"),
        ("cans", 8, "1.000"),
        ("deepseekv4", 10, "1.264"),
        ("taylor", 8, "1.528"),
    ],
)
def test_headroom(name, steps, printed):
    assert reads(reach(name, steps), printed)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("quintic", 5), ("polar_express_raw", 8), ("cans", 5), ("aol", 4), ("taylor", 9), ("cubic5", 5), ("cubic", 12)],
)
def test_the_reach_of_a_schedule_is_proven_by_intervals(name, steps):
    """Up to it the image is within 2, just above it is not; float64 loses digits by the slope of the steps there."""
    schedule = get(name, steps)
    near = 1e-9 * schedule.reach
    low, high = minimax.image(schedule.coefficients, 0, schedule.reach - near)
    assert low.a >= -2
    assert high.b <= 2
    low, high = minimax.image(schedule.coefficients, 0, schedule.reach + near)
    assert low.b < -2 or high.a > 2


def test_headroom_of_the_classical_steps_is_a_root():
    """The cubic turns sqrt(5) around, p(x) = -x; Taylor's quintic fixes sqrt(7/3) = 1.528 and repels from it."""
    assert Fraction(3, 2) - Fraction(5, 2) == -1  # p(x)/x at x^2 = 5
    assert reads(mp.sqrt(5), "2.236")
    y = Fraction(7, 3)
    assert Fraction(15, 8) - Fraction(10, 8) * y + Fraction(3, 8) * y**2 == 1
    assert slope_at([Fraction(k, 8) for k in (15, -10, 3)], 1) == 0
    assert Fraction(15, 8) - Fraction(30, 8) * y + Fraction(15, 8) * y**2 > 1
    assert reads(mp.sqrt(mpf(7) / 3), "1.528")
    below, above = (minimax.image(get("cubic", 12).coefficients, 0, x) for x in ("2.2360", "2.2361"))
    assert above.high.a > 2.23607 > mpf(below.high.b)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("polar_express_1.02_5", ("1.99", "1.97", "1.87", "1.58", "1.14")),
        ("polar_express_raw", ("1.99", "1.97", "1.87", "1.56", "1.12")),
    ],
)
def test_iterates_of_polar_express_reach_two(name, printed):
    rows = get(name).rows
    for steps, text in enumerate(printed, start=1):
        assert reads(float(minimax.image(rows[:steps], 0, 1).high.mid), text)
