"""Every distance between bases reads a planted error of known size, and the degenerate cases have decided answers."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from cases import orthonormal
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.measure import bounds
from muon_lab.measure.eigen import BasisError, Definiteness, Drift, angles, definiteness, drift, errors, within
from muon_lab.oracle import eigen

U32, U64 = bounds.unit_roundoff("fp32"), bounds.unit_roundoff("fp64")
VALUES = np.array([5.0, 3.0, 2.0, 2.0, 0.5])  # the third and the fourth form a cluster
DELTAS = [1e-2, 1e-4]
HIGHER_ORDER = 4.0  # times delta: the second-order terms of the distances below, relative to the first
FLOOR = 1e3 * U64  # a few dozen roundings in matrices of a few dozen entries of size 1
TOLERANCE = 1e-9  # closer values form one cluster


def problem(seed=0, values=VALUES):
    """Return K with its values and basis, which no eigensolver has seen."""
    Q = orthonormal(len(values), len(values), seed)
    K = (Q * values) @ Q.T
    return (K + K.T) / 2, values.copy(), Q


def turned(Q, i, j, delta):
    """Return the basis with columns i and j turned in their plane by an angle."""
    P = Q.copy()
    P[:, i] = math.cos(delta) * Q[:, i] + math.sin(delta) * Q[:, j]
    P[:, j] = math.cos(delta) * Q[:, j] - math.sin(delta) * Q[:, i]
    return P


def reads(value, expected, delta):
    """Assert equality to first order in delta."""
    assert value == pytest.approx(expected, rel=HIGHER_ORDER * delta, abs=FLOOR)


# --- reduces to -------------------------------------------------------------------------------------------------------


def test_the_eigenbasis_itself_has_no_error_whatever_its_signs_and_the_basis_of_its_cluster():
    K, values, Q = problem()
    np.testing.assert_allclose(errors(K, values, Q, TOLERANCE), BasisError(*[0.0] * 6), rtol=0, atol=FLOOR)
    other = turned(-Q, 2, 3, 0.7)
    np.testing.assert_allclose(errors(K, values, other, TOLERANCE), BasisError(*[0.0] * 6), rtol=0, atol=FLOOR)
    assert errors(K, values, other, 0.0).angle > 0.01  # but for who insists on single columns


@pytest.mark.parametrize("n", [1, 3])
def test_a_zero_matrix_has_any_basis_and_no_other_values(n):
    Q = orthonormal(n, n, 1)
    np.testing.assert_allclose(errors(np.zeros((n, n)), np.zeros(n), Q), BasisError(*[0.0] * 6), rtol=0, atol=FLOOR)
    error = errors(np.zeros((n, n)), np.ones(n), Q)
    assert error.values == error.residual == math.inf
    assert definiteness(np.zeros((n, n))) == Definiteness(0, 0.0)


def test_an_empty_matrix_has_no_error():
    empty = np.zeros((0, 0))
    assert errors(empty, np.zeros(0), empty) == BasisError(*[0.0] * 6)
    assert drift(empty, empty) == Drift(0.0, 0.0, 0)
    assert definiteness(empty) == Definiteness(0, 0.0)
    assert angles(np.zeros((3, 0)), np.zeros((3, 0))).shape == (0,)


def test_exchanged_columns_are_a_right_angle_and_diagonalize_as_well():
    K, values, Q = problem()
    error = errors(K, values[[1, 0, 2, 3, 4]], Q[:, [1, 0, 2, 3, 4]], TOLERANCE)
    assert error.angle == pytest.approx(math.pi / 2)
    assert error.turn == pytest.approx(math.pi / math.sqrt(2))
    assert error.values == pytest.approx(2 / 5)
    assert max(error.residual, error.off_diagonal, error.orthonormality) < FLOOR
    assert errors(K, values, Q[:, [0, 1, 3, 2, 4]], TOLERANCE).angle < FLOOR  # within the cluster


def test_spans_that_are_orthogonal_or_equal_have_the_extreme_angles():
    Q = orthonormal(6, 6, 2)
    np.testing.assert_allclose(angles(Q[:, :3], Q[:, 3:]), [math.pi / 2] * 3)
    assert angles(Q[:, :3], Q[:, :3] @ orthonormal(3, 3, 4)).max() < FLOOR


# --- matches what was planted: a negative control for every number ----------------------------------------------------


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize(("i", "j"), [(0, 1), (1, 4), (0, 2)])
def test_a_turn_between_clusters_reads_delta(i, j, delta):
    K, values, Q = problem()
    error = errors(K, values, turned(Q, i, j, delta), TOLERANCE)
    coupling = math.sqrt(2) * delta * abs(VALUES[i] - VALUES[j]) / np.linalg.norm(VALUES)
    reads(error.residual, coupling, delta)
    reads(error.off_diagonal, coupling, delta)
    reads(error.angle, delta, delta)
    reads(error.turn, math.sqrt(2) * delta, delta)
    assert max(error.orthonormality, error.values) < FLOOR


@pytest.mark.parametrize("delta", DELTAS)
def test_a_turn_within_a_cluster_reads_nothing(delta):
    K, values, Q = problem()
    np.testing.assert_allclose(errors(K, values, turned(Q, 2, 3, delta), TOLERANCE), [0.0] * 6, rtol=0, atol=FLOOR)


@pytest.mark.parametrize("delta", DELTAS)
def test_a_column_too_long_reads_delta_in_orthonormality_alone(delta):
    K, values, Q = problem()
    Q[:, 1] *= 1 + delta
    error = errors(K, values, Q, TOLERANCE)
    reads(error.orthonormality, 2 * delta, delta)
    assert max(error._replace(orthonormality=0.0)) < FLOOR


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_wrong_value_reads_delta(sign, delta):
    K, values, Q = problem()
    values[1] += sign * delta
    error = errors(K, values, Q, TOLERANCE)
    reads(error.values, delta / 5, delta)
    reads(error.residual, delta / np.linalg.norm(VALUES), delta)
    assert max(error.angle, error.turn, error.off_diagonal, error.orthonormality) < FLOOR


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-8, 1e-11])
def test_angles_are_those_that_were_planted_however_small(delta):
    """A cosine would lose everything below 1e-8."""
    Q = orthonormal(7, 6, 3)
    planted = np.array([delta, 3 * delta, 0.7])
    T = np.cos(planted) * Q[:, :3] + np.sin(planted) * Q[:, 3:]
    np.testing.assert_allclose(angles(Q[:, :3] @ orthonormal(3, 3, 9), T), planted[::-1], rtol=0, atol=FLOOR)
    groups = [slice(0, 2), slice(2, 3)]
    np.testing.assert_allclose(within(T, Q[:, :3], groups), [3 * delta, delta, 0.7], rtol=0, atol=FLOOR)


@pytest.mark.parametrize("delta", DELTAS)
def test_drift_reads_the_size_of_a_rotation(delta):
    Q = orthonormal(5, 5, 6)
    A = np.random.default_rng(8).standard_normal((5, 5))
    S = (A - A.T) / np.linalg.norm(A - A.T)
    found = drift(Q, Q @ scipy.linalg.expm(delta * S))
    reads(found.turn, delta, delta)
    columns = delta * np.linalg.norm(S, axis=0)
    reads(found.angle, columns.max(), delta)
    assert found.displaced == 0


@pytest.mark.parametrize(("order", "displaced"), [([0, 1, 2, 3, 4], 0), ([1, 0, 2, 3, 4], 2), ([4, 0, 1, 2, 3], 5)])
def test_drift_counts_the_columns_that_changed_places(order, displaced):
    Q = orthonormal(5, 5, 6)
    signs = np.array([1, -1, 1, -1, -1])
    found = drift(Q, turned(Q, 0, 4, 0.1)[:, order] * signs)
    assert found.displaced == displaced
    assert (found.angle > 1.4) == (displaced > 0)


def test_drift_within_a_group_is_none():
    Q = orthonormal(5, 5, 6)
    groups = [slice(0, 1), slice(1, 4), slice(4, 5)]
    assert drift(Q, Q[:, [0, 3, 1, 2, 4]], groups) == pytest.approx((0, 0, 0), abs=FLOOR)
    assert drift(Q, Q[:, [4, 3, 1, 2, 0]], groups).displaced == 2


@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-12])
@pytest.mark.parametrize("count", [1, 3])
def test_planted_negative_values_are_counted_and_their_depth_is_read(count, delta):
    values = np.array([2.0, 1.0, 0.5, *([0.0] * 2), *(-delta * np.arange(1, count + 1))])
    K, _, _ = problem(values=values)
    found = definiteness(K)
    assert found.negative == count
    assert found.depth == pytest.approx(count * delta / 2, rel=FLOOR / delta)


def test_s25_rounding_to_float32_makes_half_of_the_zero_values_negative():
    A = np.random.default_rng(25).standard_normal((256, 7))
    exact, rounded = A @ A.T, (A @ A.T).astype(np.float32)
    assert definiteness(exact).negative == 0
    found = definiteness(rounded)
    assert 249 / 2 - 3 * math.sqrt(249) < found.negative < 249 / 2 + 3 * math.sqrt(249)
    assert U32 / 64 < found.depth < U32 * math.sqrt(256)


# --- invariances ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99))
def test_a_rotation_of_everything_changes_nothing(seed):
    K, values, Q = problem(seed)
    P = turned(Q, 0, 1, 0.1)
    R = orthonormal(5, 5, seed + 100)
    here, there = errors(K, values, P, TOLERANCE), errors(R @ K @ R.T, values, R @ P, TOLERANCE)
    np.testing.assert_allclose(there, here, rtol=0, atol=FLOOR)
    assert drift(R @ Q, R @ P) == pytest.approx(drift(Q, P), abs=FLOOR)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_the_scale_of_the_matrix_does_not_matter(scale):
    K, values, Q = problem()
    P = turned(Q, 0, 1, 0.1)
    here, there = errors(K, values, P, TOLERANCE), errors(scale * K, scale * values, P, TOLERANCE)
    np.testing.assert_allclose(there, here, rtol=0, atol=FLOOR)
    low = K - 0.6 * np.eye(5)
    assert definiteness(scale * low) == pytest.approx(definiteness(low), abs=FLOOR)
    assert definiteness(low).negative == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_tensor_is_read_like_its_float64_array(dtype):
    K, values, Q = (torch.tensor(X).to(dtype).requires_grad_() for X in problem())
    arrays = [X.detach().double().numpy() for X in (K, values, Q)]
    assert errors(K, values, Q, 0.1) == errors(*arrays, 0.1)
    assert drift(Q, Q) == drift(arrays[2], arrays[2])
    assert definiteness(K) == definiteness(arrays[0])


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-3])
def test_an_eigenvector_is_known_to_the_error_over_the_gap_and_its_cluster_better(gap):
    values = np.array([1.0, 1 - gap, 0.2])
    K, _, _ = problem(values=values)
    noise = np.random.default_rng(1).standard_normal((3, 3)) * 1e-6
    found = eigen.eigenbasis(K + noise + noise.T)
    single = errors(K, found.values, found.Q).angle
    together = errors(K, found.values, found.Q, tolerance=2 * gap).angle
    assert 1e-8 / gap < single < 1e-5 / gap
    assert together < 1e-5


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: errors(np.eye(2), np.ones(3), np.eye(2)), r"values \(3,\) and Q \(2, 2\), needed"),
        (lambda: errors(np.eye(2), np.ones(2), np.eye(3)), r"Q \(3, 3\), needed"),
        (lambda: errors(np.eye(2), np.ones(2), np.eye(2), -1.0), "tolerance -1.0"),
        (lambda: errors(np.eye(2) * 1j, np.ones(2), np.eye(2)), "K has shape .* and dtype complex128"),
        (lambda: errors(torch.eye(2) * 1j, np.ones(2), np.eye(2)), "dtype torch.complex64"),
        (lambda: errors(np.eye(2), np.ones(2), np.eye(2) * math.nan), "4 of the 4 entries of Q are not finite"),
        (lambda: angles(np.eye(3)[:, :1], np.eye(2)), r"angles: Q has shape \(3, 1\) and T \(2, 2\)"),
        (lambda: angles(np.ones((3, 2)), np.eye(3)[:, :2]), "spans has 1 dimensions, needed 2"),
        (lambda: drift(np.eye(2), np.eye(3)), r"Q has shape \(2, 1\) and T \(3, 1\)"),
        (lambda: definiteness(np.ones((2, 3))), r"shape \(2, 3\)"),
        (lambda: definiteness(np.ones(3)), "K has shape .* needed 2 axes"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
