"""Planted matrices: the factor is known, the singular vectors are uniform, nothing global moves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.measure import bounds
from muon_lab.oracle import polar
from muon_lab.problems import planted, spectra

U64 = bounds.unit_roundoff("fp64")
SHAPES = [(1, 1), (1, 7), (7, 1), (6, 6), (5, 17), (33, 7)]
SPECTRA = ["gaussian", "flat", "geometric(1e6)", "clustered(1e3, 3)", "deficient(0.5)", "rank_one(0)", "one_small(1e8)"]


# --- reduces to -------------------------------------------------------------------------------------------------------


def test_a_flat_spectrum_plants_an_orthogonal_matrix():
    p = planted.draw("flat", 5, 8, np.random.default_rng(0))
    assert np.array_equal(p.matrix, p.polar)
    np.testing.assert_allclose(p.matrix @ p.matrix.T, np.eye(5), rtol=0, atol=bounds.svd(5, 8, 8 * U64))


def test_a_zero_spectrum_plants_zero():
    p = planted.draw("zero", 3, 4, np.random.default_rng(0))
    assert not p.matrix.any()
    assert not p.polar.any()
    assert not p.hermitian.any()


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_an_empty_matrix_is_empty(shape):
    p = planted.draw("geometric", *shape, np.random.default_rng(0))
    assert p.matrix.shape == p.polar.shape == shape


def test_one_entry_is_a_sign():
    assert {planted.haar(1, 1, np.random.default_rng(seed)).item() for seed in range(20)} == {-1.0, 1.0}


# --- matches the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_planted_factor_is_the_oracle_factor(shape, spectrum):
    p = planted.draw(spectrum, *shape, np.random.default_rng(2))
    oracle = polar.polar(p.matrix)
    rank = int((p.s > 0).sum())
    atol = 2 * bounds.polar_by_svd(p.s[0], p.s[rank - 1], rank, *shape, U64)  # forming G rounds like the oracle
    assert int(oracle.rank) == rank
    np.testing.assert_allclose(p.polar, oracle.U, rtol=0, atol=atol)
    np.testing.assert_allclose(p.s, oracle.s, rtol=0, atol=p.s[0] * bounds.svd(*shape, 8 * U64))
    np.testing.assert_allclose(p.hermitian, oracle.H, rtol=0, atol=p.s[0] * bounds.svd(*shape, 8 * U64))


def test_a_factor_planted_with_another_sign_is_seen():
    p = planted.draw("geometric(10)", 5, 8, np.random.default_rng(2))
    wrong = planted.Planted(p.G, p.U * [1, 1, 1, 1, -1], p.s, p.V)
    assert np.linalg.norm(wrong.polar - polar.polar(p.matrix).U) == pytest.approx(2)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 99))
def test_haar_columns_are_orthonormal(n, k, seed):
    Q = planted.haar(n, min(k, n), np.random.default_rng(seed))
    np.testing.assert_allclose(Q.T @ Q, np.eye(min(k, n)), rtol=0, atol=bounds.svd(n, n, 8 * U64))


def moments(draw, n, k, count=4000):
    """Return standard scores of E Q_ij = 0, E Q_ij^2 = 1/n and E Q_ij^4 = 3/(n(n+2)) over independent draws."""
    Q = np.stack([draw() for _ in range(count)])
    fourth, eighth = 3 / (n * (n + 2)), 105 / (n * (n + 2) * (n + 4) * (n + 6))  # moments of a coordinate on the sphere
    expected = [(Q, 0, 1 / n), (Q**2, 1 / n, fourth - 1 / n**2), (Q**4, fourth, eighth - fourth**2)]
    return np.stack([(power.mean(axis=0) - mean) / np.sqrt(variance / count) for power, mean, variance in expected])


def test_haar_entries_have_the_moments_of_the_uniform_distribution():
    # 18 scores, normal by the central limit theorem: one beyond 5 once in 1e5 seeds. The seed is fixed.
    generator = np.random.default_rng(3)
    assert np.abs(moments(lambda: planted.haar(3, 2, generator), 3, 2)).max() < 5


def test_without_the_signs_the_distribution_is_seen_to_be_wrong():
    generator = np.random.default_rng(3)
    scores = moments(lambda: np.linalg.qr(generator.standard_normal((3, 2)))[0], 3, 2)
    assert np.abs(scores).max() > 20


def test_haar_columns_are_uncorrelated_with_one_another():
    # E (tr Q)^2 = 1 on O(n) and E tr Q = 0; (tr Q)^2 has variance 2 for n >= 2: five deviations, once in 1e6 seeds.
    generator, count = np.random.default_rng(4), 4000
    traces = np.array([np.trace(planted.haar(4, 4, generator)) for _ in range(count)])
    assert abs(traces.mean()) < 5 / np.sqrt(count)
    assert abs((traces**2).mean() - 1) < 5 * np.sqrt(2 / count)


# --- invariances ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits_and_another_seed_another_matrix():
    draws = [planted.draw("gaussian", 5, 8, np.random.default_rng(seed)).matrix for seed in (7, 7, 8)]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def test_a_spectrum_and_its_text_draw_the_same():
    spectrum = spectra.parse("power(2)")
    by_value, by_text = (planted.draw(x, 5, 8, np.random.default_rng(0)) for x in (spectrum, "power(2)"))
    assert np.array_equal(by_value.matrix, by_text.matrix)


def test_spectra_that_draw_nothing_share_singular_vectors():
    one, other = (planted.draw(x, 5, 8, np.random.default_rng(0)) for x in ("flat", "geometric"))
    assert np.array_equal(one.U, other.U)
    assert np.array_equal(one.V, other.V)


@pytest.mark.parametrize("scale", [2.0**-900, 2.0**900])
def test_scaling_the_spectrum_scales_the_matrix(scale):
    s = np.array([3.0, 2.0, 0.0])
    p, q = (planted.planted(x, 3, 5, np.random.default_rng(0)) for x in (s, scale * s))
    assert np.array_equal(q.matrix, scale * p.matrix)
    assert np.array_equal(q.polar, p.polar)


# --- rates ------------------------------------------------------------------------------------------------------------


def test_the_distance_to_the_oracle_grows_no_faster_than_the_condition_number():
    for kappa in (1e2, 1e5, 1e8):
        p = planted.draw(f"geometric({kappa})", 8, 12, np.random.default_rng(0))
        moved = np.linalg.norm(p.polar - polar.polar(p.matrix).U)
        assert moved < 2 * bounds.polar_by_svd(1.0, 1 / kappa, 8, 8, 12, U64), kappa


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "message"),
    [
        ([1.0, 0.5, 0.2], r"s has shape \(3,\), needed \(2,\) for a matrix of shape \(2, 3\)"),
        ([0.5, 1.0], "out of order, needed s1 >= "),
        ([1.0, -0.5], "negative"),
        ([np.nan, 0.5], "not finite"),
        ([np.inf, 0.5], "not finite"),
    ],
)
def test_bad_singular_values_are_named(s, message):
    with pytest.raises(ValueError, match=message):
        planted.planted(np.array(s), 2, 3, np.random.default_rng(0))


def test_bad_shapes_and_names_are_named():
    with pytest.raises(ValueError, match="n = 2 and k = 3 given, needed 0 <= k <= n"):
        planted.haar(2, 3, np.random.default_rng(0))
    with pytest.raises(ValueError, match="unknown spectrum 'gausian': did you mean 'gaussian'"):
        planted.draw("gausian", 2, 3, np.random.default_rng(0))
