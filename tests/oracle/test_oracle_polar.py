"""The float64 oracle: special cases, second opinions, invariances, conditioning, refusals."""

import json
import pathlib

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.measure import bounds
from muon_lab.oracle import multiprecision, polar
from muon_lab.problems import planted

U64 = bounds.unit_roundoff("fp64")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SHAPES = [(6, 6), (4, 9), (9, 4), (1, 7), (7, 1), (1, 1), (5, 17), (33, 7)]
QUINTIC = [(3.4445, -4.7750, 2.0315)] * 5  # Jordan et al. 2024


def quintic(s):
    for a, b, c in QUINTIC:
        s = a * s + b * s**3 + c * s**5
    return s


def matrix(m, n, seed=0, spectrum="geometric(100)"):
    return planted.draw(spectrum, m, n, np.random.default_rng(seed)).G


def tolerance(s, m, n):
    rank = int((s > bounds.svd(m, n, 2 * U64) * s[0]).sum())
    return bounds.polar_by_svd(s[0], s[rank - 1], rank, m, n, U64)


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (4, 6), (6, 4)])
def test_a_zero_matrix_has_a_zero_factor_and_a_filled_one_that_is_the_identity(shape):
    U, H, s = polar.polar(np.zeros(shape))
    assert not U.any()
    assert not H.any()
    assert not s.any()
    assert int(polar.polar(np.zeros(shape)).rank) == 0
    assert np.array_equal(polar.filled(np.zeros(shape)).U, np.eye(*shape))
    assert not polar.singular_value_map(np.zeros(shape), lambda s: s + 1).any()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 0, 3), (0, 3, 4)])
def test_an_empty_matrix_has_empty_factors(shape):
    U, H, s = polar.polar(np.zeros(shape))
    assert U.shape == shape
    assert H.shape == (*shape[:-2], shape[-1], shape[-1])
    assert s.shape == (*shape[:-2], min(shape[-2:]))
    assert polar.polar(np.zeros(shape)).rank.shape == shape[:-2]
    assert polar.singular_value_map(np.zeros(shape), quintic).shape == shape


def test_a_vector_becomes_its_direction():
    g = np.array([[3.0, 0.0, -4.0]])
    for G in (g, g.T):
        U, _, s = polar.polar(G)
        np.testing.assert_allclose(U, G / 5, rtol=0, atol=tolerance(s, *G.shape))
        np.testing.assert_allclose(s, [5.0], rtol=4 * U64)


def test_an_orthogonal_matrix_is_its_own_factor_whatever_its_scale():
    H = np.array([[1.0]])
    for _ in range(3):
        H = np.block([[H, H], [H, -H]])
    U, P, s = polar.polar(3.7 * H)
    np.testing.assert_allclose(U, H / np.sqrt(8), rtol=0, atol=tolerance(s, 8, 8))
    np.testing.assert_allclose(P, s[0] * np.eye(8), rtol=0, atol=s[0] * tolerance(s, 8, 8))


def test_the_range_of_a_rank_one_matrix_is_orthogonalized_and_its_null_space_stays_empty():
    G = np.ones((4, 4))
    oracle, filled = polar.polar(G), polar.filled(G)
    atol = tolerance(oracle.s, 4, 4)
    assert int(oracle.rank) == 1
    np.testing.assert_allclose(oracle.U, G / 4, rtol=0, atol=atol)
    assert abs(np.linalg.norm(filled.U) - 2) < atol
    np.testing.assert_allclose(filled.U.T @ filled.U, np.eye(4), rtol=0, atol=atol)
    assert np.linalg.eigvalsh((filled.U.T @ G + G.T @ filled.U) / 2).min() > -4 * atol
    np.testing.assert_allclose(polar.singular_value_map(G, quintic), quintic(1.0) * G / 4, rtol=0, atol=atol)


def test_a_diagonal_matrix_gives_its_signs():
    U, H, s = polar.polar(np.diag([2.0, -3.0, 0.0]))
    assert np.array_equal(U + 0.0, np.diag([1.0, -1.0, 0.0]))
    assert np.array_equal(H, np.diag([2.0, 3.0, 0.0]))
    assert np.array_equal(s, [3.0, 2.0, 0.0])


# --- matches other oracles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spectrum", ["gaussian", "geometric(1e6)", "flat", "clustered(1e4, 3)"])
@pytest.mark.parametrize("shape", [(8, 8), (5, 8), (8, 3), (1, 6)])
def test_agrees_with_forty_digits(shape, spectrum):
    G = matrix(*shape, spectrum=spectrum)
    U, H, s = polar.polar(G)
    exact = multiprecision.polar(G, 40)
    atol = tolerance(s, *shape)
    np.testing.assert_allclose(U, multiprecision.to_numpy(exact.U), rtol=0, atol=atol)
    np.testing.assert_allclose(H, multiprecision.to_numpy(exact.H), rtol=0, atol=s[0] * bounds.svd(*shape, 8 * U64))
    np.testing.assert_allclose(s, multiprecision.to_numpy(exact.s)[:, 0], rtol=0, atol=s[0] * bounds.svd(*shape, U64))


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3)])
def test_the_map_of_singular_values_is_the_literal_iteration(shape):
    G = matrix(*shape)
    exact = multiprecision.to_numpy(multiprecision.newton_schulz(G, QUINTIC, 40))
    slope = 3.4445**5  # at zero, the steepest point of the composition
    atol = slope * bounds.UNCOUNTED * bounds.svd(*shape, U64)
    np.testing.assert_allclose(polar.singular_value_map(G, quintic), exact, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_scipy(shape):
    G = matrix(*shape)
    U, H = scipy.linalg.polar(G)
    oracle = polar.polar(G)
    np.testing.assert_allclose(oracle.U, U, rtol=0, atol=2 * tolerance(oracle.s, *shape))
    np.testing.assert_allclose(oracle.H, H, rtol=0, atol=bounds.svd(*shape, 8 * U64))


@pytest.mark.parametrize("row", json.loads((GOLDEN / "polar.json").read_text())["rows"], ids=lambda row: row["input"])
def test_agrees_with_the_published_implementation(row):
    with np.load(GOLDEN / "polar.npz") as arrays:
        G, U, H, s = (arrays[row[key]] for key in ("input", "polar", "hermitian", "singular_values"))
    ours = polar.polar(G)
    atol = 1e-5  # the peer's arithmetic is float32: a few hundred times its unit roundoff
    np.testing.assert_allclose(ours.U, U, rtol=0, atol=atol)
    np.testing.assert_allclose(ours.H, H, rtol=0, atol=atol * s[0])
    np.testing.assert_allclose(ours.s, s, rtol=0, atol=atol * s[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_takes_what_numpy_takes(dtype):
    G = torch.arange(6).reshape(2, 3).to(dtype)
    assert np.array_equal(polar.polar(G).U, polar.polar([[0, 1, 2], [3, 4, 5]]).U)


# --- invariances ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(SHAPES), st.integers(0, 99))
def test_defining_properties_hold(shape, seed):
    G = matrix(*shape, seed)
    oracle = polar.polar(G)
    U, H, s = oracle
    atol = tolerance(s, *shape)
    short = U @ U.T if shape[0] <= shape[1] else U.T @ U
    np.testing.assert_allclose(short, np.eye(min(shape)), rtol=0, atol=atol)
    np.testing.assert_allclose(oracle.matrix, G, rtol=0, atol=s[0] * atol)
    assert np.array_equal(H, H.T)
    assert np.linalg.eigvalsh(H).min() > -s[0] * atol
    assert (np.diff(s) <= 0).all()
    assert int(oracle.rank) == min(shape)


@given(st.sampled_from(SHAPES), st.integers(0, 99))
def test_commutes_with_rotations_transposition_and_sign(shape, seed):
    m, n = shape
    generator = np.random.default_rng(seed)
    G = matrix(m, n, seed)
    Q, P = planted.haar(m, m, generator), planted.haar(n, n, generator)
    U, _, s = polar.polar(G)
    atol = 3 * tolerance(s, m, n)  # two factors, and the rounding of the rotated matrix
    np.testing.assert_allclose(polar.polar(Q @ G @ P).U, Q @ U @ P, rtol=0, atol=atol)
    np.testing.assert_allclose(polar.polar(G.T).U, U.T, rtol=0, atol=atol)
    np.testing.assert_allclose(polar.polar(-G).U, -U, rtol=0, atol=atol)


@given(st.sampled_from(SHAPES), st.integers(-990, 990))
def test_a_power_of_two_scales_h_and_s_and_leaves_u_bit_for_bit(shape, exponent):
    G = matrix(*shape)
    U, H, s = polar.polar(G)
    scaled = polar.polar(np.ldexp(G, exponent))
    assert np.array_equal(scaled.U, U)
    assert np.array_equal(scaled.H, np.ldexp(H, exponent))
    assert np.array_equal(scaled.s, np.ldexp(s, exponent))
    assert np.array_equal(
        polar.singular_value_map(np.ldexp(G, exponent), quintic), polar.singular_value_map(G, quintic)
    )


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_every_scale_of_float64_works(scale):
    G = matrix(4, 6)
    U, _, s = polar.polar(G)
    far = polar.polar(scale * G)
    np.testing.assert_allclose(far.U, U, rtol=0, atol=2 * tolerance(s, 4, 6))
    np.testing.assert_allclose(far.s / scale, s, rtol=0, atol=bounds.svd(4, 6, 4 * U64))
    assert int(far.rank) == 4


def test_a_batch_is_its_matrices():
    G = np.stack([matrix(4, 6, 0), np.zeros((4, 6)), 1e200 * matrix(4, 6, 1, "deficient(0.5)")]).reshape(3, 1, 4, 6)
    batched = polar.polar(G)
    assert batched.rank.tolist() == [[4], [0], [2]]
    for i in range(3):
        for together, alone in zip(batched, polar.polar(G[i, 0]), strict=True):
            assert np.array_equal(together[i, 0], alone)
        assert np.array_equal(polar.singular_value_map(G, quintic)[i, 0], polar.singular_value_map(G[i, 0], quintic))


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 6), (5, 8)])
def test_a_perturbation_moves_the_factor_in_proportion_and_within_the_bound_of_li(shape):
    generator = np.random.default_rng(3)
    G = matrix(*shape, spectrum="geometric(10)")
    E = generator.standard_normal(shape)
    U, _, s = polar.polar(G)
    sizes = np.array([1e-3, 1e-4, 1e-5, 1e-6])
    moved = []
    for size in sizes:
        far = polar.polar(G + size * E)
        moved.append(np.linalg.norm(far.U - U))
        assert moved[-1] <= bounds.polar(s[-1], far.s[-1], min(shape), *shape) * size * np.linalg.norm(E)
    order = np.polyfit(np.log(sizes), np.log(moved), 1)[0]
    assert abs(order - 1) < 0.02, order


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("G", "message"),
    [
        ([1.0, 2.0], r"G has shape \(2,\), needed at least two axes"),
        (np.array([[1j]]), "G has dtype complex128, needed real"),
        (np.array([["a"]]), "needed real floating-point"),
        ([[1.0, np.nan], [np.inf, 0.0]], "2 of the 4 entries of G are not finite"),
        (np.full((4, 4), 1e308), "singular value above 1.8e.308"),
        (torch.ones(2, 2, dtype=torch.bfloat16), "G of type Tensor cannot be read .*BFloat16"),
        (torch.ones(2, 2, requires_grad=True), "G of type Tensor cannot be read .*requires grad"),
        ([[1.0], [1.0, 2.0]], "G of type list cannot be read"),
    ],
)
@pytest.mark.parametrize("function", [polar.polar, polar.filled])
def test_bad_input_is_named(function, G, message):
    with pytest.raises(ValueError, match=message):
        function(G)


def test_directions_below_the_rounding_of_stored_data_are_no_part_of_the_truth():
    """A rank-4 product computed in float32 has rank 4 as float32 data, and full rank as float64 data."""
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((24, 4)).astype(np.float32), rng.standard_normal((4, 16)).astype(np.float32)
    assert int(polar.polar(A @ B, roundoff=2.0**-24).rank) == 4
    assert int(polar.polar(A @ B).rank) == 16


def test_directions_above_the_rounding_of_stored_data_are_kept():
    G = planted.draw("geometric(1e6)", 24, 48, np.random.default_rng(1)).matrix.astype(np.float32)
    assert int(polar.polar(G, roundoff=2.0**-24).rank) == 24
