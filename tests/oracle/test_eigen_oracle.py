"""Eigenbases: closed forms, many digits, order and sign, alignment, planted errors, refusals."""

import numpy as np
import pytest
import scipy.linalg
from cases import orthonormal
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

from muon_lab.measure import bounds
from muon_lab.oracle import eigen, multiprecision

U64 = bounds.unit_roundoff("fp64")
SPECTRA = {
    "distinct": [5.0, 3.0, 2.0, 0.5, 0.1],
    "signs": [2.0, 1.0, 0.0, -1.0, -3.0],
    "graded": [1e8, 1e4, 1.0, 1e-4, 1e-8],
}


def planted(values, seed=0):
    """Return a symmetric matrix and the basis that was put into it."""
    values = np.asarray(values, float)
    Q = eigen.signed(orthonormal(values.size, values.size, seed))
    K = (Q * values) @ Q.T
    return (K + K.T) / 2, Q


def gap_of(values):
    """Return the smallest distance of neighbours in units of the largest magnitude."""
    return np.abs(np.diff(values)).min() / np.abs(values).max()


def second_difference(n):
    return 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("c", [0.0, 1.0, -3.5])
def test_a_multiple_of_the_identity_has_the_identity_as_its_basis(n, c):
    values, Q = eigen.eigenbasis(c * np.eye(n))
    assert np.array_equal(values, np.full(n, c))
    assert np.array_equal(Q, np.eye(n))


def test_a_diagonal_matrix_is_sorted_and_equal_values_stay_in_order():
    values, Q = eigen.eigenbasis(np.diag([1.0, -2.0, 7.0, 1.0]))
    assert np.array_equal(values, [7.0, 1.0, 1.0, -2.0])
    assert np.array_equal(Q, np.eye(4)[:, [2, 0, 3, 1]])


def test_the_symmetric_part_is_taken():
    K, _ = planted(SPECTRA["distinct"])
    skew = np.triu(np.ones_like(K), 1) - np.tril(np.ones_like(K), -1)
    atol = 5 * bounds.svd(5, 5, 8 * U64)  # the largest value is 5
    np.testing.assert_allclose(eigen.eigenbasis(K + skew).values, SPECTRA["distinct"], rtol=0, atol=atol)


# --- matches closed forms and other solvers ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 12])
def test_the_second_difference_matrix_has_sines_for_eigenvectors(n):
    k = np.arange(n, 0, -1)
    values = 2 - 2 * np.cos(np.pi * k / (n + 1))
    sines = np.sqrt(2 / (n + 1)) * np.sin(np.pi * np.outer(np.arange(1, n + 1), k) / (n + 1))
    found = eigen.eigenbasis(second_difference(n))
    atol = bounds.svd(n, n, 8 * U64) / gap_of(values)
    np.testing.assert_allclose(found.values, values, rtol=0, atol=4 * bounds.svd(n, n, 8 * U64))
    np.testing.assert_allclose(eigen.aligned(found.Q, sines), sines, rtol=0, atol=atol)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_agrees_with_forty_digits(spectrum):
    values = np.array(SPECTRA[spectrum])
    K, _ = planted(values)
    found, (exact, basis) = eigen.eigenbasis(K), eigen.exactly(K, 40)
    size = np.abs(values).max()
    gaps = np.abs(np.subtract.outer(values, values)) + np.diag(np.full(values.size, np.inf))
    each = bounds.svd(5, 5, 8 * U64) * size / gaps.min(axis=0)  # an eigenvector turns by error / gap
    errors = np.linalg.norm(found.Q - multiprecision.to_numpy(basis), axis=0)
    np.testing.assert_allclose(
        found.values, multiprecision.to_numpy(exact)[:, 0], rtol=0, atol=size * bounds.svd(5, 5, 4 * U64)
    )
    determined = each < 0.1  # in the graded spectrum the two smallest lie below the rounding of the largest
    assert determined.sum() >= 3
    assert (errors[determined] < each[determined]).all(), (errors, each)


def test_many_digits_are_right_to_as_many():
    values, Q = eigen.exactly([["2", "1"], ["1", "1"]], 50)
    with mp.workdps(60):
        golden, tiny = (1 + mp.sqrt(5)) / 2, mp.mpf(10) ** -50
        assert abs(values[0] - golden**2) < tiny
        assert abs(values[1] - golden**-2) < tiny
        assert abs(Q[0, 0] / Q[1, 0] - golden) < 10 * tiny
        assert max(abs(x) for x in Q.T * Q - mp.eye(2)) < tiny


def test_the_ambient_precision_stays():
    before = mp.dps
    eigen.exactly([[1]], 70)
    assert mp.dps == before


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_values_agree_with_scipy(spectrum):
    K, _ = planted(SPECTRA[spectrum], seed=3)
    expected = scipy.linalg.eigh(K, eigvals_only=True, driver="evx")[::-1]
    atol = np.abs(expected).max() * bounds.svd(5, 5, 8 * U64)
    np.testing.assert_allclose(eigen.eigenbasis(K).values, expected, rtol=0, atol=atol)


# --- invariances ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(0, 99))
def test_defining_properties_hold(n, seed):
    A = np.random.default_rng(seed).standard_normal((n, n))
    K = A + A.T
    values, Q = eigen.eigenbasis(K)
    assert (np.diff(values) <= 0).all()
    assert eigen.residual(K, values, Q) < bounds.svd(n, n, 8 * U64)
    assert eigen.off_diagonal(K, Q) < bounds.svd(n, n, 16 * U64)
    assert eigen.orthonormality(Q) < bounds.svd(n, n, 16 * U64)
    largest = np.take_along_axis(Q, np.abs(Q).argmax(axis=0)[None], axis=0)
    assert (largest > 0).all()


@given(st.integers(1, 7), st.integers(0, 99))
def test_order_and_signs_of_a_basis_are_restored_bit_for_bit(n, seed):
    generator = np.random.default_rng(seed)
    Q = orthonormal(n, n, seed)
    shuffled = Q[:, generator.permutation(n)] * generator.choice([-1.0, 1.0], n)
    assert np.array_equal(eigen.aligned(shuffled, Q), Q)
    assert np.array_equal(eigen.signed(eigen.signed(shuffled)), eigen.signed(shuffled))


@given(st.integers(2, 7), st.integers(0, 99))
def test_the_closest_order_is_found_where_every_column_has_a_partner(n, seed):
    generator = np.random.default_rng(seed)
    skew = np.triu(generator.standard_normal((n, n)), 1)
    Q = orthonormal(n, n, seed)
    turned = Q @ scipy.linalg.expm(0.3 * (skew - skew.T) / np.linalg.norm(skew - skew.T))
    shuffled = turned[:, generator.permutation(n)] * generator.choice([-1.0, 1.0], n)
    assert (np.square(np.diag(Q.T @ turned)) > 0.5).all()
    assert np.array_equal(eigen.aligned(shuffled, Q), turned)


@given(st.integers(-300, 300))
def test_a_power_of_two_scales_the_values(exponent):
    K, _ = planted(SPECTRA["distinct"])
    values, Q = eigen.eigenbasis(K)
    scaled = eigen.eigenbasis(np.ldexp(K, exponent))
    np.testing.assert_allclose(np.ldexp(scaled.values, -exponent), values, rtol=0, atol=5 * bounds.svd(5, 5, 8 * U64))
    np.testing.assert_allclose(scaled.Q, Q, rtol=0, atol=bounds.svd(5, 5, 8 * U64) / gap_of(values))
    assert eigen.residual(np.ldexp(K, exponent), *scaled) < bounds.svd(5, 5, 8 * U64)


def test_a_batch_is_its_matrices():
    K = np.stack([planted(SPECTRA[name], seed)[0] for seed, name in enumerate(SPECTRA)])
    together = eigen.eigenbasis(K[:, None])
    for i in range(len(SPECTRA)):
        alone = eigen.eigenbasis(K[i])
        assert np.array_equal(together.values[i, 0], alone.values)
        assert np.array_equal(together.Q[i, 0], alone.Q)


@pytest.mark.parametrize("seed", range(3))
def test_a_repeated_value_leaves_its_span_alone_and_a_turn_within_it_is_undone(seed):
    values = np.array([4.0, 1.0, 1.0, 1.0, 0.0])
    K, _ = planted(values)
    Q = eigen.eigenbasis(K).Q
    groups = eigen.clusters(values, 8 * U64)
    assert groups == [slice(0, 1), slice(1, 4), slice(4, 5)]
    turned = Q.copy()
    turned[:, 1:4] = Q[:, 1:4] @ orthonormal(3, 3, seed)
    turned[:, 4] *= -1
    atol = bounds.svd(5, 5, 8 * U64)
    assert eigen.residual(K, values, turned) < atol
    assert np.linalg.norm(turned - Q) > 0.5
    np.testing.assert_allclose(eigen.aligned_within(turned, Q, groups), Q, rtol=0, atol=atol)


def test_clusters_chain_neighbours():
    values = np.array([1.0, 0.9, 0.8, 0.1])
    assert eigen.clusters(values, 0.11) == [slice(0, 3), slice(3, 4)]
    assert eigen.clusters(values, 0.0) == [slice(i, i + 1) for i in range(4)]
    assert eigen.clusters(values, 1.0) == [slice(0, 4)]
    assert eigen.clusters(np.zeros(3), 0.0) == [slice(0, 3)]
    assert eigen.clusters(np.zeros(0), 0.0) == []


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.5, 0.2])
def test_orthogonal_iteration_converges_by_the_ratio_of_neighbours(ratio):
    K, Q = planted(ratio ** np.arange(4.0))
    P = Q @ scipy.linalg.expm(1e-2 * (np.eye(4, k=1) - np.eye(4, k=-1)))
    errors = []
    for _ in range(8):
        P = eigen.orthogonal_iteration(K, P)
        errors.append(np.linalg.norm(P - Q))  # the sign of R keeps the columns where they are
    slope = np.polyfit(range(6), np.log(errors[2:]), 1)[0]
    assert np.exp(slope) == pytest.approx(ratio, rel=0.05)


def test_several_steps_are_one_after_another_and_an_eigenbasis_stays():
    K, Q = planted(SPECTRA["distinct"])
    start = orthonormal(5, 5, 9)
    twice = eigen.orthogonal_iteration(K, eigen.orthogonal_iteration(K, start))
    assert np.array_equal(eigen.orthogonal_iteration(K, start, steps=2), twice)
    gain = 5.0 / 0.1  # errors along the largest value grow against those along the smallest
    np.testing.assert_allclose(eigen.orthogonal_iteration(K, Q), Q, rtol=0, atol=gain * bounds.svd(5, 5, 8 * U64))


# --- negative controls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-3, 1e-5])
@pytest.mark.parametrize(("i", "j"), [(0, 1), (1, 4)])
def test_a_planted_turn_is_read_back(delta, i, j):
    values = np.array(SPECTRA["signs"])
    K, Q = planted(values)
    P = Q.copy()
    P[:, i], P[:, j] = (
        np.cos(delta) * Q[:, i] + np.sin(delta) * Q[:, j],
        np.cos(delta) * Q[:, j] - np.sin(delta) * Q[:, i],
    )
    expected = np.sqrt(2) * delta * abs(values[i] - values[j]) / np.linalg.norm(values)
    assert eigen.residual(K, np.diag(P.T @ K @ P), P) == pytest.approx(expected, rel=10 * delta)
    assert eigen.off_diagonal(K, P) == pytest.approx(expected, rel=10 * delta)
    assert eigen.orthonormality(P) < bounds.svd(5, 5, 8 * U64)


@pytest.mark.parametrize("delta", [1e-3, -1e-5])
def test_planted_lengths_and_values_are_read_back(delta):
    values = np.array(SPECTRA["distinct"])
    K, Q = planted(values)
    assert eigen.orthonormality((1 + delta) * Q) == pytest.approx(2 * abs(delta) * np.sqrt(5), rel=abs(delta))
    expected = abs(delta) * np.sqrt(5) / np.linalg.norm(values)
    assert eigen.residual(K, values + delta, Q) == pytest.approx(expected, rel=1e-9)


def test_measures_of_a_zero_matrix():
    assert eigen.residual(np.zeros((2, 2)), np.zeros(2), np.eye(2)) == 0.0
    assert eigen.residual(np.zeros((2, 2)), np.ones(2), np.eye(2)) == np.inf
    assert eigen.off_diagonal(np.zeros((2, 2)), np.eye(2)) == 0.0


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: eigen.eigenbasis(np.zeros((2, 3))), r"eigenbasis: K has shape \(2, 3\)"),
        (lambda: eigen.eigenbasis([1.0, 2.0]), r"eigenbasis: K has shape \(2,\)"),
        (lambda: eigen.eigenbasis(np.eye(2) * 1j), "dtype complex128"),
        (lambda: eigen.eigenbasis([[np.nan, 0.0], [0.0, 1.0]]), "1 of the 4 entries of K are not finite"),
        (lambda: eigen.exactly([[1, 2, 3]], 20), "exactly: K is 1 by 3"),
        (lambda: eigen.exactly([[float("inf")]], 20), "finite real numbers"),
        (lambda: eigen.exactly([[1]], 0), "digits is 0"),
        (lambda: eigen.orthogonal_iteration(np.eye(2), np.eye(3)), r"K has shape \(2, 2\) and Q \(3, 3\)"),
        (lambda: eigen.orthogonal_iteration(np.eye(2), np.eye(2), 0), "steps is 0"),
        (lambda: eigen.aligned(np.eye(2), np.eye(3)), "needed [(]n, k[)] for both"),
        (lambda: eigen.aligned_within(np.eye(2), np.eye(3), []), "needed [(]n, k[)] for both"),
        (lambda: eigen.clusters(np.array([1.0, 2.0]), 0.1), "needed descending ones"),
        (lambda: eigen.clusters(np.array([2.0, 1.0]), -0.1), "tolerance -0.1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
