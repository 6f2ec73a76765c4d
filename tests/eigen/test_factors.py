"""Kronecker factors: closed forms, explicit inverses, rounding, the first step of the correction."""

import math

import numpy as np
import pytest
import torch
from cases import orthonormal
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.arithmetic import Rounded
from muon_lab.eigen import factors
from muon_lab.eigen.factors import Factors, averaged, coefficient, corrected, squares
from muon_lab.eigen.track import Eigenbasis, eigenbasis
from muon_lab.measure import bounds
from muon_lab.measure import eigen as measure

U64 = bounds.unit_roundoff("fp64")
SHAPES = [(4, 4), (3, 5), (5, 3), (1, 4), (4, 1), (1, 1)]
every_shape = pytest.mark.parametrize("shape", SHAPES)


def gradient(m, n, seed=0, dtype=torch.float64):
    return torch.tensor(np.random.default_rng(seed).standard_normal((m, n)), dtype=dtype)


def basis_of(values, seed=0):
    n = len(values)
    return Eigenbasis(torch.tensor(values, dtype=torch.float64), torch.tensor(orthonormal(n, n, seed)))


def inverse(basis, floor):
    return (basis.Q / basis.values.clamp_min(floor)) @ basis.Q.T


# --- reduces to -------------------------------------------------------------------------------------------------------


@every_shape
def test_without_a_basis_the_correction_only_divides_by_the_floor_and_a_dimension(shape):
    """The first factors are 1 / eps too large."""
    m, n = shape
    G = gradient(m, n)
    zero = (Eigenbasis(torch.zeros(k, dtype=torch.float64), torch.eye(k, dtype=torch.float64)) for k in shape)
    found, plain = corrected(G, *zero, floor=1e-8), squares(G)
    torch.testing.assert_close(found.L, plain.L / (n * 1e-8), rtol=0, atol=float(plain.L.max()) * 1e8 * 16 * U64)
    torch.testing.assert_close(found.R, plain.R / (m * 1e-8), rtol=0, atol=float(plain.R.max()) * 1e8 * 16 * U64)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_gradient_has_zero_factors(shape):
    G = torch.zeros(2, *shape)
    empty = (Eigenbasis(torch.zeros(2, k), torch.eye(k).expand(2, k, k)) for k in shape)
    for found in (squares(G), corrected(G, *empty, floor=1e-8)):
        assert [tuple(K.shape) for K in found] == [(2, k, k) for k in shape]
        assert not any(K.any() for K in found)


def test_the_coefficient_gives_every_gradient_its_share():
    """The average of t gradients weighs the i-th by beta^(t-i), divided by the sum of all."""
    beta, average = 0.9, 0.0
    for t in range(1, 30):
        past = coefficient(beta, t)
        average = past * average + (1 - past) * t
        weights = [beta ** (t - i) for i in range(1, t + 1)]
        expected = sum(w * i for i, w in enumerate(weights, 1)) / sum(weights)
        assert average == pytest.approx(expected, rel=t * 8 * U64)
    assert coefficient(beta, 1) == 0.0
    assert coefficient(0.0, 5) == 0.0


def test_the_first_gradient_has_all_the_weight_bit_for_bit():
    new = squares(gradient(3, 4))
    old = Factors(*(torch.full_like(K, 7.0) for K in new))
    assert all(torch.equal(a, b) for a, b in zip(averaged(old, new, coefficient(0.95, 1)), new, strict=True))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2],
)
def test_factors_are_kept_in_at_least_float32(dtype, kept):
    assert factors.dtype_of_state(dtype) == kept


# --- matches what is known --------------------------------------------------------------------------------------------


@every_shape
def test_factors_of_integers_are_exact(shape):
    G = torch.tensor(np.random.default_rng(1).integers(-9, 10, shape).astype(float))
    found = squares(G)
    assert np.array_equal(found.L.numpy(), G.numpy() @ G.numpy().T)
    assert np.array_equal(found.R.numpy(), G.numpy().T @ G.numpy())


@every_shape
@pytest.mark.parametrize("floor", [1e-3, 0.5, 10.0])
def test_corrected_factors_are_those_of_explicit_inverses(shape, floor):
    m, n = shape
    G = gradient(m, n, seed=3)
    left = basis_of(np.linspace(2, -0.1, m), 1)  # the smallest is negative, by rounding
    right = basis_of(np.linspace(3, 0.2, n), 2)
    found = corrected(G, left, right, floor)
    for K, expected in (
        (found.L, G @ inverse(right, floor) @ G.T / n),
        (found.R, G.T @ inverse(left, floor) @ G / m),
    ):
        size = float(G.square().sum()) / floor
        torch.testing.assert_close(K, expected, rtol=0, atol=bounds.gemm(4 * max(m, n), U64) * size)


def test_a_planted_covariance_is_a_fixed_point_of_the_correction():
    """E[G R^-1 G^T] / n = L for the true R: here the mean over all patterns of signs of uncorrelated entries."""
    left, right = basis_of([4.0, 1.0], 1), basis_of([2.0, 1.0, 0.5], 2)
    A, B = (b.Q * b.values.sqrt() for b in (left, right))
    total = Factors(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64))
    patterns = [torch.tensor(signs, dtype=torch.float64).reshape(2, 3) for signs in np.ndindex(*(2,) * 6)]
    for signs in patterns:
        found = corrected(A @ (2 * signs - 1) @ B.T, left, right, 1e-9)
        total = Factors(*(a + b / len(patterns) for a, b in zip(total, found, strict=True)))
    for K, basis in zip(total, (left, right), strict=True):
        expected = (basis.Q * basis.values) @ basis.Q.T
        torch.testing.assert_close(K, expected, rtol=0, atol=len(patterns) * 16 * U64)


@pytest.mark.parametrize("form", ["plain", "corrected"])
@every_shape
def test_float32_is_off_by_the_bound_of_its_products(shape, form):
    m, n = shape
    G = gradient(m, n, dtype=torch.float32)
    bases = [eigenbasis(torch.eye(k) + gradient(k, k, 7, torch.float32).square()).basis for k in shape]

    def found(dtype):
        wide = (Eigenbasis(b.values.to(dtype), b.Q.to(dtype)) for b in bases)
        return squares(G.to(dtype)) if form == "plain" else corrected(G.to(dtype), *wide, 0.5)

    size = float(G.square().sum()) / (1.0 if form == "plain" else 0.5)
    for coarse, fine in zip(found(torch.float32), found(torch.float64), strict=True):
        error = float(torch.linalg.matrix_norm(coarse - fine))
        assert error <= bounds.gemm(4 * max(m, n), bounds.unit_roundoff("fp32")) * size


@pytest.mark.parametrize("format", ["tf32", "bf16"])
def test_products_may_be_in_another_arithmetic(format):
    G = gradient(8, 12, dtype=torch.float32)
    exact, coarse = squares(G), squares(G, Rounded(format))
    for a, b in zip(exact, coarse, strict=True):
        error = float(torch.linalg.matrix_norm(a - b) / torch.linalg.matrix_norm(a))
        u = bounds.unit_roundoff(format)
        assert u / 16 < error < 4 * u


# --- invariances ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(SHAPES), st.integers(0, 99))
def test_factors_of_the_transpose_change_places(shape, seed):
    G = gradient(*shape, seed)
    left, right = basis_of(np.linspace(2, 0.5, shape[0]), seed), basis_of(np.linspace(3, 0.2, shape[1]), seed + 1)
    for here, there in (
        (squares(G), squares(G.mT)),
        (corrected(G, left, right, 0.1), corrected(G.mT, right, left, 0.1)),
    ):
        size = 10 * float(G.square().sum())
        torch.testing.assert_close(there.L, here.R, rtol=0, atol=16 * max(shape) * U64 * size)
        torch.testing.assert_close(there.R, here.L, rtol=0, atol=16 * max(shape) * U64 * size)


@given(st.sampled_from(SHAPES), st.integers(0, 99))
def test_corrected_factors_are_positive_semidefinite_but_for_rounding(shape, seed):
    G = gradient(*shape, seed, torch.float32)
    left, right = (eigenbasis(K).basis for K in squares(gradient(*shape, seed + 1, torch.float32)))
    for K in corrected(G, left, right, 1e-8):
        depth = measure.definiteness(K).depth
        assert depth <= bounds.gemm(2 * max(shape), bounds.unit_roundoff("fp32"))


@every_shape
def test_a_batch_has_the_factors_of_its_members_to_rounding(shape):
    G = torch.stack([gradient(*shape, seed) for seed in range(5)])
    batch = squares(G)
    for i, one in enumerate(G):
        for a, b in zip(batch, squares(one), strict=True):
            torch.testing.assert_close(a[i], b, rtol=0, atol=bounds.gemm(max(shape), U64) * float(one.square().sum()))


# --- rates ------------------------------------------------------------------------------------------------------------


def test_the_first_corrected_factor_is_forgotten_like_its_share():
    """Its share of the average is 0.95^(t-1) / (1 + ... + 0.95^(t-1)): from 1e8 too large to 1e3 in 200 steps."""
    n, generator, tops = 6, np.random.default_rng(0), []
    kept = Factors(*(torch.zeros(n, n, dtype=torch.float64) for _ in range(2)))
    bases = [Eigenbasis(torch.zeros(n, dtype=torch.float64), torch.eye(n, dtype=torch.float64))] * 2
    for t in range(1, 152):
        G = torch.tensor(generator.standard_normal((n, n)))
        kept = averaged(kept, corrected(G, *bases, floor=1e-8), coefficient(0.95, t))
        bases = [eigenbasis(K).basis for K in kept]
        tops.append(float(bases[0].values[0]))
    first = np.random.default_rng(0).standard_normal((n, n))
    assert tops[0] == pytest.approx(np.linalg.norm(first, 2) ** 2 / (n * 1e-8), rel=64 * n * U64)
    for t in (50, 100, 150):
        share = 0.95**t * 0.05 / (1 - 0.95 ** (t + 1))
        assert math.log10(tops[t] / tops[0]) == pytest.approx(math.log10(share), abs=0.5)
