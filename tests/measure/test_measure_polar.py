"""Every metric reads a planted error of known size, and the degenerate cases have their decided answers."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.measure import bounds
from muon_lab.measure.polar import CEILING, PolarError, errors
from muon_lab.oracle import polar
from muon_lab.oracle.polar import Polar
from muon_lab.problems import planted

U64 = bounds.unit_roundoff("fp64")
SHAPES = [(5, 5), (4, 7), (7, 4), (1, 6), (6, 1)]
DELTAS = [1e-2, 1e-4]
HIGHER_ORDER = 4.0  # times delta: the second-order terms of the metrics below, relative to the first
FLOOR = 1e3 * U64  # a few dozen roundings in matrices of a few dozen entries of size 1


def problem(shape, seed=0, spectrum="geometric(10)"):
    p = planted.draw(spectrum, *shape, np.random.default_rng(seed))
    return p, Polar(p.polar, p.hermitian, p.s)


def one_direction(p, i, delta):
    """Return U + delta u_i v_i^T."""
    return p.polar + delta * np.outer(p.U[:, i], p.V[:, i])


def turned(p, delta, seed=1):
    """Return the factor turned by exp(delta K) on its short side, with K and the Hermitian factor of that side."""
    m, n = p.G.shape
    K = np.random.default_rng(seed).standard_normal((min(m, n), min(m, n)))
    K = K - K.T
    R = scipy.linalg.expm(delta * K)
    P = (p.U * p.s) @ p.U.T if m <= n else p.hermitian
    return (R @ p.polar if m <= n else p.polar @ R.T), K, P


def reads(value, expected, delta):
    """Assert equality to first order in delta."""
    assert value == pytest.approx(expected, rel=HIGHER_ORDER * delta, abs=FLOOR)


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_factor_itself_has_no_error(shape):
    _, oracle = problem(shape)
    ideal = PolarError(0, 0, 0, 0, 0, 0, 1, 1, 1, 1)
    np.testing.assert_allclose(errors(oracle.U, oracle), ideal, rtol=0, atol=FLOOR)


def test_the_fields_come_in_the_agreed_order():
    assert PolarError._fields == (
        *("relative", "orthogonality", "residual", "definiteness", "gap", "excess", "cosine"),
        *("sigma_max", "sigma_min", "fro_ratio"),
    )
    assert all(type(value) is float for value in errors(np.eye(2), polar.polar(np.eye(2))))


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (4, 6), (6, 4)])
def test_a_zero_matrix_has_decided_answers(shape):
    oracle = polar.polar(np.zeros(shape))
    assert errors(np.zeros(shape), oracle) == PolarError(0, 0, 0, 0, 0, 0, 1, 0, 0, 0)
    X = np.zeros(shape)
    X[0, 0] = 3.0
    assert errors(X, oracle) == PolarError(3, 9, 0, 0, 0, 2, 0, 3, 0, 3)


def test_a_zero_update_is_all_of_the_error():
    for shape in SHAPES:
        _, oracle = problem(shape)
        error = errors(np.zeros(shape), oracle)
        expected = PolarError(1, 1, 1, 0, 1, 0, 0, 0, 0, 0)
        np.testing.assert_allclose(error, expected, rtol=0, atol=FLOOR)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_matrix_has_no_error(shape):
    assert errors(np.zeros(shape), polar.polar(np.zeros(shape))) == PolarError(0, 0, 0, 0, 0, 0, 1, 0, 0, 0)


def test_a_filled_null_space_is_an_error_against_the_partial_isometry_and_none_against_the_filled_factor():
    G = np.ones((4, 4))
    X = polar.filled(G).U
    against = errors(X, polar.polar(G))
    assert against.relative == pytest.approx(math.sqrt(3))  # three directions of size 1 against one
    assert against.orthogonality == pytest.approx(math.sqrt(3))
    assert against.cosine == pytest.approx(0.5)
    assert against.fro_ratio == pytest.approx(2)
    assert abs(against.residual) < FLOOR
    assert abs(against.gap) < FLOOR
    assert errors(X, polar.filled(G)).relative == 0


@pytest.mark.parametrize("t", [1.0, 10.0, 1000.0])
def test_blockwise_on_two_proportional_blocks_has_the_known_error(t):
    G = np.vstack([np.eye(3), t * np.eye(3)])
    X = np.vstack([polar.polar(G[:3]).U, polar.polar(G[3:]).U])
    error = errors(X, polar.polar(G))
    full = 1 / math.hypot(1, t), t / math.hypot(1, t)  # the factor is these two multiples of the identity
    assert error.relative == pytest.approx(math.hypot(1 - full[0], 1 - full[1]), rel=FLOOR)  # 0.4142, 0.9005, 0.9990
    assert error.sigma_max == pytest.approx(math.sqrt(2))
    assert error.excess == pytest.approx(math.sqrt(2) - 1)
    assert error.fro_ratio == pytest.approx(math.sqrt(2))


# --- matches what was planted: a negative control for every metric ----------------------------------------------------


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shrunk_factor_reads_delta(shape, delta):
    _, oracle = problem(shape)
    error = errors((1 - delta) * oracle.U, oracle)
    reads(error.relative, delta, delta)
    reads(error.orthogonality, 2 * delta, delta)
    reads(error.residual, 2 * delta, delta)
    reads(error.gap, delta, delta)
    reads(1 - error.sigma_max, delta, delta)
    reads(1 - error.sigma_min, delta, delta)
    reads(1 - error.fro_ratio, delta, delta)
    assert abs(error.cosine - 1) < FLOOR
    assert error.excess == error.definiteness == 0


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
def test_one_wrong_direction_reads_delta(shape, sign, delta):
    p, oracle = problem(shape)
    r, i = min(shape), 2
    error = errors(one_direction(p, i, sign * delta), oracle)
    reads(error.relative, delta / math.sqrt(r), delta)
    reads(error.orthogonality, 2 * delta / math.sqrt(r), delta)
    reads(error.residual, 2 * delta * p.s[i] / np.linalg.norm(p.s), delta)
    reads(error.gap, -sign * delta * p.s[i] / p.s.sum(), delta)
    reads(error.excess, max(sign * delta, 0), delta)
    reads(error.sigma_max - 1, max(sign * delta, 0), delta)
    reads(error.sigma_min - 1, min(sign * delta, 0), delta)
    reads(error.fro_ratio - 1, sign * delta / r, delta)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
def test_a_turn_reads_delta_in_relative_and_residual_alone(shape, delta):
    p, oracle = problem(shape)
    X, K, P = turned(p, delta)
    error = errors(X, oracle)
    second = HIGHER_ORDER * (delta * np.linalg.norm(K)) ** 2
    assert error.relative == pytest.approx(delta * np.linalg.norm(K) / math.sqrt(min(shape)), abs=second)
    assert error.residual == pytest.approx(delta * np.linalg.norm(P @ K + K @ P) / 2 / np.linalg.norm(p.s), abs=second)
    assert error.orthogonality < FLOOR
    assert error.definiteness < FLOOR
    assert 0 < error.gap < second
    assert 0 < 1 - error.cosine < second


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
def test_a_direction_past_zero_reads_delta_in_definiteness(shape, delta):
    p, oracle = problem(shape)
    i = 1
    error = errors(one_direction(p, i, -1 - delta), oracle)
    reads(error.definiteness, delta * p.s[i] / p.s[0], delta)


@pytest.mark.parametrize("angle", DELTAS)
@pytest.mark.parametrize("shape", [(4, 4), (4, 7), (7, 4)])
def test_a_turn_towards_an_orthogonal_matrix_reads_its_angle_in_cosine(shape, angle):
    p, oracle = problem(shape)
    W = (p.U * [1, -1, 1, -1]) @ p.V.T  # orthogonal to U, of equal norm
    cosine = errors(math.cos(angle) * oracle.U + math.sin(angle) * W, oracle).cosine
    assert math.acos(cosine) == pytest.approx(angle, abs=FLOOR / angle)


@pytest.mark.parametrize("delta", DELTAS)
def test_a_direction_in_the_null_space_reads_delta(delta):
    p, oracle = problem((4, 6), spectrum="deficient(0.5)")
    X = one_direction(p, 3, delta)
    error = errors(X, oracle)
    reads(error.relative, delta / math.sqrt(2), delta)
    reads(error.orthogonality, delta**2 / math.sqrt(2), delta)
    assert error.sigma_min == pytest.approx(1)  # the r-th largest, r = 2
    assert abs(error.residual) < FLOOR


def test_a_flipped_direction_escapes_orthogonality_and_residual_but_not_definiteness_and_gap():
    p, oracle = problem((4, 7))
    error = errors(one_direction(p, 3, -2.0), oracle)
    assert error.orthogonality < FLOOR
    assert error.residual < FLOOR
    assert error.definiteness == pytest.approx(p.s[3] / p.s[0])
    assert error.gap == pytest.approx(2 * p.s[3] / p.s.sum())


# --- invariances ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(SHAPES), st.integers(0, 99))
def test_rotations_and_transposition_leave_every_number(shape, seed):
    m, n = shape
    generator = np.random.default_rng(seed)
    Q, P = planted.haar(m, m, generator), planted.haar(n, n, generator)
    p, oracle = problem(shape, seed)
    X = oracle.U + 0.1 * generator.standard_normal(shape)
    expected = errors(X, oracle)
    np.testing.assert_allclose(
        errors(Q @ X @ P, Polar(Q @ oracle.U @ P, P.T @ oracle.H @ P, oracle.s)), expected, rtol=0, atol=FLOOR
    )
    mirrored = Polar(oracle.U.T, (p.U * p.s) @ p.U.T, p.s)
    transposed = errors(X.T, mirrored)
    if m == n:  # a square matrix has a left and a right residual
        transposed = transposed._replace(residual=expected.residual)
    np.testing.assert_allclose(transposed, expected, rtol=0, atol=FLOOR)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_the_scale_of_the_matrix_does_not_matter(scale):
    p, oracle = problem((4, 7))
    X = oracle.U + 0.1
    np.testing.assert_allclose(errors(X, polar.polar(scale * p.G)), errors(X, oracle), rtol=0, atol=FLOOR)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_is_read_like_its_float64_array(dtype):
    _, oracle = problem((4, 7))
    X = torch.from_numpy(oracle.U).to(dtype).requires_grad_()
    assert errors(X, oracle) == errors(X.detach().double().numpy(), oracle)


@pytest.mark.parametrize("size", [1e-300, 1e-100, 1e30, 1e100, 1e308])
def test_every_finite_update_has_finite_errors(size):
    for shape in SHAPES:
        _, oracle = problem(shape)
        error = errors(size * oracle.U, oracle)
        assert np.isfinite(error).all(), error
        if size < CEILING:
            assert error.cosine == pytest.approx(1)
            assert error.sigma_max == pytest.approx(size)


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")]
)
def test_the_error_of_a_rounded_factor_is_its_unit_roundoff(dtype, name):
    _, oracle = problem((7, 9))
    u = bounds.unit_roundoff(name)
    relative = errors(torch.from_numpy(oracle.U).to(dtype), oracle).relative
    assert u / 8 < relative <= u  # entry by entry at most u; on average about u / 3


# --- refuses ----------------------------------------------------------------------------------------------------------


def test_bad_input_is_named():
    oracle = polar.polar(np.eye(2))
    with pytest.raises(ValueError, match=r"X has shape \(2, 3\), needed that of the oracle's one matrix, \(2, 2\)"):
        errors(np.ones((2, 3)), oracle)
    with pytest.raises(ValueError, match="one matrix"):
        errors(np.ones((2, 2)), polar.polar(np.ones((3, 2, 2))))
    for X in (np.full((2, 2), np.nan), torch.full((2, 2), torch.inf)):
        with pytest.raises(ValueError, match="4 of the 4 entries of X are not finite"):
            errors(X, oracle)
