"""The multiprecision oracle against exact rationals, surds and itself."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

from muon_lab.oracle import multiprecision

QUINTIC = [(Fraction(34445, 10000), Fraction(-4775, 1000), Fraction(20315, 10000))] * 2
CUBIC = [("1.5", "-0.5", "0")]


def largest(A):
    return max((abs(x) for x in A), default=mp.mpf(0))


def integers(m, n, seed=0):
    return np.random.default_rng(seed).integers(-9, 10, (m, n)).astype(float)


# --- reduces to -------------------------------------------------------------------------------------------------------


def test_zero_stays_zero():
    U, H, s = multiprecision.polar([[0, 0, 0], [0, 0, 0]], 30)
    assert not any(largest(part) for part in (U, H, s))
    assert (U.rows, U.cols, H.rows, H.cols, s.rows) == (2, 3, 3, 3, 2)
    assert largest(multiprecision.newton_schulz([[0, 0]], CUBIC, 30)) == 0


def test_a_single_number_gives_its_sign():
    U, H, s = multiprecision.polar([["-0.1"]], 30)
    with mp.workdps(30):
        assert U[0, 0] == -1
        assert abs(H[0, 0] - mp.mpf("0.1")) < mp.mpf(10) ** -30
        assert abs(s[0] - mp.mpf("0.1")) < mp.mpf(10) ** -30


def test_a_rank_one_matrix_has_a_partial_isometry():
    U = multiprecision.polar(np.ones((4, 4)), 30).U
    with mp.workdps(40):
        assert largest(U - mp.ones(4) / 4) < mp.mpf(10) ** -30


def test_no_coefficients_leave_a_number_and_normalise_a_matrix():
    assert multiprecision.compose([], "0.25", 20) == 0.25
    assert multiprecision.to_numpy(multiprecision.newton_schulz([[3, 4]], [], 20)).tolist() == [[0.6, 0.8]]


# --- matches exact arithmetic -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [Fraction(1, 8), Fraction(-3, 4), Fraction(1)])
def test_compose_agrees_with_rationals(x):
    exact = x
    for a, b, c in QUINTIC:
        exact = a * exact + b * exact**3 + c * exact**5
    value = multiprecision.compose(QUINTIC, x, 50)
    with mp.workdps(60):
        assert abs(value - mp.mpf(exact.numerator) / exact.denominator) < mp.mpf(10) ** -50


def test_the_shear_has_a_closed_form():
    U, H, s = multiprecision.polar([[1, 2], [0, 1]], 50)
    with mp.workdps(60):
        w, tiny = mp.sqrt(2), mp.mpf(10) ** -50
        assert largest(U - mp.matrix([[1, 1], [-1, 1]]) / w) < tiny
        assert largest(H - mp.matrix([[1, 1], [1, 3]]) / w) < tiny
        assert largest(s - mp.matrix([w + 1, w - 1])) < tiny


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (4, 2)])
def test_the_matrix_iteration_is_the_scalar_one_on_singular_values(shape):
    G = integers(*shape)
    X = multiprecision.newton_schulz(G, QUINTIC, 40)
    with mp.workdps(50):
        P, s, Qt = mp.svd_r(mp.matrix(G.tolist()), full_matrices=False)
        norm = mp.sqrt(mp.fsum(x**2 for x in s))
        f = mp.diag([multiprecision.compose(QUINTIC, x / norm, 40) for x in s])
        assert largest(X - P * f * Qt) < mp.mpf(10) ** -38  # ten operations a digit


# --- invariances ------------------------------------------------------------------------------------------------------


@given(st.tuples(st.integers(1, 5), st.integers(1, 5)), st.integers(0, 99))
def test_defining_properties_hold_to_the_digits_asked_for(shape, seed):
    G = integers(*shape, seed)
    U, H, s = multiprecision.polar(G, 30)
    T = multiprecision.polar(G.T, 30).U
    with mp.workdps(40):
        tiny = 100 * mp.mpf(10) ** -30  # entries up to 9 in up to 5 × 5, cubed below
        assert largest(U * H - mp.matrix(G.tolist())) < tiny
        assert largest(U * U.T * U - U) < tiny
        assert largest(T.T - U) < tiny
        assert largest(H - H.T) < tiny
        assert all(s[i] >= s[i + 1] for i in range(s.rows - 1))


def test_the_ambient_precision_stays():
    before = mp.dps
    multiprecision.polar([[1, 2]], 60)
    multiprecision.compose(CUBIC, 1, 60)
    with pytest.raises(ValueError, match="needed three"):
        multiprecision.compose([(1, 2)], 1, 60)
    assert mp.dps == before == mpmath.mp.dps


# --- rates ------------------------------------------------------------------------------------------------------------


def test_the_classical_iteration_converges_quadratically():
    errors = [1 - multiprecision.compose(CUBIC * steps, "0.9", 200) for steps in (2, 3, 4, 5)]
    orders = [float(mp.log(errors[i + 1]) / mp.log(errors[i])) for i in range(3)]
    assert abs(orders[-1] - 2) < 0.1, orders


@pytest.mark.parametrize("digits", [15, 30, 60])
def test_more_digits_are_more_digits(digits):
    G = integers(4, 6)
    coarse, fine = multiprecision.polar(G, digits).U, multiprecision.polar(G, 2 * digits).U
    with mp.workdps(2 * digits):
        assert largest(coarse - fine) < mp.mpf(10) ** -digits


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("G", "message"),
    [
        ([1.0, 2.0], "G of type list cannot be read as rows"),
        ([["a"]], "G of type list cannot be read as rows"),
        ([[1], [1, 2]], r"lengths \[1, 2\], needed one common length"),
        ([], r"lengths \[\], needed one common length"),
        ([[1j, 1]], "1 of the 2 entries of G are not finite real"),
        ([[float("nan"), 1]], "1 of the 2 entries of G are not finite real"),
    ],
)
def test_bad_matrices_are_named(G, message):
    with pytest.raises(ValueError, match=message):
        multiprecision.polar(G, 20)
    with pytest.raises(ValueError, match=message):
        multiprecision.newton_schulz(G, CUBIC, 20)


def test_bad_digits_and_coefficients_are_named():
    with pytest.raises(ValueError, match="digits is 0, needed at least 1"):
        multiprecision.polar([[1]], 0)
    with pytest.raises(ValueError, match="step 1 of coefficients has 2 numbers"):
        multiprecision.newton_schulz([[1]], [(1, 0, 0), (1, 0)], 20)
