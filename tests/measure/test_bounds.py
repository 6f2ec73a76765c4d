"""Bounds hold, are attained where they should be, and refuse what they cannot bound."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.measure import bounds
from muon_lab.oracle import polar
from muon_lab.problems import planted

U32, U64 = bounds.unit_roundoff("fp32"), bounds.unit_roundoff("fp64")
CLASSICAL = (1.5, -0.5, 0.0)


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_unit_roundoff_is_half_the_spacing_at_one(dtype):
    assert bounds.unit_roundoff(str(dtype)) == torch.finfo(dtype).eps / 2


def test_exact_arithmetic_has_no_error():
    assert bounds.gemm(0, U64) == bounds.gemm(64, 0.0) == 0
    assert bounds.rounded_gemm(64, 0.0, 0.0, 0.0) == 0
    assert bounds.newton_schulz(1.0, 64, 0.0) == 0
    assert bounds.blockwise(1) == 1


def test_a_rounded_product_in_one_format_is_three_roundings_and_the_sum():
    assert bounds.rounded_gemm(1, U32, U32, U32) == pytest.approx(4 * U32, rel=8 * U32)


# --- hold against measurement -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 16, 256])
def test_a_float32_product_stays_within_gemm(k):
    generator = np.random.default_rng(k)
    A, B = (generator.standard_normal(shape).astype(np.float32) for shape in ((8, k), (k, 8)))
    wide = A.astype(np.float64) @ B.astype(np.float64)
    error = np.abs(A @ B - wide) / (np.abs(A).astype(np.float64) @ np.abs(B))
    assert error.max() <= bounds.gemm(k, U32)
    if k == 1:
        assert error.max() > bounds.gemm(k, U32) / 2  # attained up to the place of the number between powers of two


@pytest.mark.parametrize("k", [1, 16, 256])
def test_a_bfloat16_product_stays_within_rounded_gemm(k):
    generator = torch.Generator().manual_seed(k)
    A, B = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((8, k), (k, 8)))
    low = (A.bfloat16().float() @ B.bfloat16().float()).bfloat16().double()
    u = bounds.unit_roundoff("bf16")
    assert ((low - A @ B).abs() / (A.abs() @ B.abs())).max() <= bounds.rounded_gemm(k, u, U32, u)


@given(
    st.sampled_from([(5, 5, 5), (4, 4, 7), (4, 7, 4), (2, 4, 7), (2, 5, 5)]), st.floats(1e-8, 0.5), st.integers(0, 99)
)
def test_the_polar_factor_moves_within_the_bound(case, size, seed):
    rank, m, n = case
    generator = np.random.default_rng(seed)
    s, t = (np.sort(generator.uniform(0.1, 1.0, min(m, n)))[::-1] * (np.arange(min(m, n)) < rank) for _ in range(2))
    p, q = planted.planted(s.copy(), m, n, generator), planted.planted(t.copy(), m, n, generator)
    # blends of the two frames: near for a small size, and of the same rank
    left, right = (polar.filled(a + size * b).U for a, b in ((p.U, q.U), (p.V, q.V)))
    far = (left * (s + size * t)) @ right.T
    moved = np.linalg.norm((left * (t > 0)) @ right.T - p.polar)
    factor = bounds.polar(s[rank - 1], (s + size * t)[rank - 1], rank, m, n)
    assert moved <= factor * np.linalg.norm(far - p.G)


def test_the_square_bound_is_attained_by_a_quarter_turn_of_a_flat_matrix():
    # G = I and G + E = -I: the factors differ by 2 sqrt(n), and so does E; the bound has the factor 1.
    G = np.eye(4)
    assert np.linalg.norm(polar.polar(-G).U - G) == bounds.polar(1.0, 1.0, 4, 4, 4) * np.linalg.norm(2 * G)


@pytest.mark.parametrize("kappa", [1, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_a_float32_polar_factor_stays_within_its_bound(shape, kappa):
    p = planted.draw(f"geometric({kappa})", *shape, np.random.default_rng(0))
    U, _, Vt = np.linalg.svd(p.G.astype(np.float32), full_matrices=False)
    moved = np.linalg.norm((U @ Vt).astype(np.float64) - p.polar)
    assert moved <= bounds.polar_by_svd(p.s[0], p.s[-1], min(shape), *shape, U32)


@given(st.integers(0, 99), st.sampled_from([(4, 4), (3, 7), (7, 3)]))
def test_an_odd_map_amplifies_no_error_by_more_than_its_largest_slope(seed, shape):
    p = planted.draw("linear(10)", *shape, np.random.default_rng(seed))
    E = 1e-6 * np.random.default_rng(seed + 1).standard_normal(shape)

    def mapped(G):  # sin is odd, with largest slope 5 at zero
        P, s, Qt = np.linalg.svd(G, full_matrices=False)
        return (P * np.sin(5 * s)) @ Qt

    assert np.linalg.norm(mapped(p.G + E) - mapped(p.G)) <= 5 * (1 + 1e-3) * np.linalg.norm(E)  # 1e-3: second order


@pytest.mark.parametrize("shape", [(8, 8), (8, 32)])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_the_classical_iteration_in_float32_stays_within_its_bound(shape, steps):
    G = planted.draw("linear(4)", *shape, np.random.default_rng(0)).G
    G /= np.linalg.norm(G)
    results, sizes = [], []
    for dtype in (np.float32, np.float64):
        X = G.astype(dtype)
        for _ in range(steps):
            sizes.append(np.linalg.norm(X))
            X = dtype(1.5) * X - dtype(0.5) * (X @ X.T) @ X
        results.append(X.astype(np.float64))
    sizes.append(np.linalg.norm(X))
    bound = bounds.newton_schulz(1.5**steps, shape[1], U32, steps, bounds.step(CLASSICAL, 1.0))
    error = np.linalg.norm(results[0] - results[1])
    assert 0 < error <= bounds.HIGHER_ORDERS * bound * max(sizes)


def test_equal_blocks_attain_the_blockwise_bound_and_others_stay_below():
    U = polar.polar(np.random.default_rng(0).standard_normal((4, 4))).U
    for tp in (1, 2, 4, 8):
        assert np.linalg.norm(np.vstack([U] * tp), 2) == pytest.approx(bounds.blockwise(tp))
    G = planted.draw("geometric(100)", 16, 8, np.random.default_rng(11)).G
    for tp, axis in ((2, 0), (4, 0), (8, 0), (2, 1), (4, 1), (8, 1)):
        blocks = [polar.polar(block).U for block in np.split(G, tp, axis=axis)]
        assert np.linalg.norm(np.concatenate(blocks, axis=axis), 2) <= bounds.blockwise(tp) + 16 * U64


# --- noise ------------------------------------------------------------------------------------------------------------

NOISY = [
    ("linear(4)", (6, 6)),
    ("geometric(100)", (5, 9)),
    ("clustered(10, 2)", (9, 5)),
    ("flat", (1, 7)),
    ("flat", (1, 1)),
]


def distances(p, tau, draws, seed=0):
    """Return the relative distance of the polar factor of G + noise to that of G, for so many draws."""
    noise = tau * np.random.default_rng(seed).standard_normal((draws, *p.G.shape))
    P, _, Qt = np.linalg.svd(p.G + noise, full_matrices=False)
    return np.linalg.norm(P @ Qt - p.polar, axis=(-2, -1)) / math.sqrt(min(p.G.shape))


@pytest.mark.parametrize(("spectrum", "shape"), NOISY)
def test_amplified_noise_is_the_sum_of_the_squares_of_the_derivatives_of_the_polar_factor(spectrum, shape):
    p = planted.draw(spectrum, *shape, np.random.default_rng(3))
    step = 1e-5 * p.s[-1]
    E = step * np.eye(p.G.size).reshape(-1, *shape)  # one entry after the other
    moved = polar.filled(p.G + E).U - polar.filled(p.G - E).U
    expected = np.linalg.norm(moved) / (2 * step) / math.sqrt(min(shape))
    error = 1e-10 * p.G.size + 1e2 * U64 * p.s[0] / step  # (step / s_min)^2 a derivative, and rounding over the step
    assert bounds.noise_amplification(p.s, shape, 1.0).distance == pytest.approx(expected, rel=error)


@pytest.mark.parametrize(
    ("spectrum", "shape"), [("linear(4)", (16, 16)), ("geometric(10)", (12, 36)), ("power", (24, 8))]
)
def test_amplified_noise_agrees_with_an_average_to_three_digits(spectrum, shape):
    p = planted.draw(spectrum, *shape, np.random.default_rng(0))
    tau = 1e-4 * p.s[-1]
    squares = distances(p, tau, draws=20000) ** 2
    found = bounds.noise_amplification(p.s, shape, tau)
    uncertain = squares.std() / math.sqrt(len(squares)) / squares.mean() / 2  # of the root of the mean
    assert uncertain < 6e-4
    assert math.sqrt(squares.mean()) == pytest.approx(found.distance, rel=4 * uncertain)
    assert found.noise == pytest.approx(tau * math.sqrt(p.G.size) / np.linalg.norm(p.G))
    assert found.distance == pytest.approx(found.factor * found.noise)


@pytest.mark.parametrize(
    ("kappa", "shape", "factor"),
    [
        (10, (256, 512), 1.746),
        (100, (256, 512), 8.403),
        (10, (256, 1024), 1.965),
        (100, (256, 1024), 9.794),
        (100, (256, 256), 4.470),
    ],
)
def test_the_factors_of_log_spaced_spectra(kappa, shape, factor):
    s = np.geomspace(1, 1 / kappa, min(shape))
    assert round(bounds.noise_amplification(s, shape, 1e-3).factor, 3) == factor


@pytest.mark.parametrize("shape", [(16, 16), (16, 48)])
def test_amplified_noise_is_a_first_order_formula_with_a_range(shape):
    p = planted.draw("geometric(10)", *shape, np.random.default_rng(0))
    excess = math.sqrt(max(1, shape[1] - shape[0]))
    ratios = []
    for tau in (0.1, 1.0, 10.0):
        squares = distances(p, tau * p.s[-1] / excess, draws=2000) ** 2
        ratios.append(
            bounds.noise_amplification(p.s, shape, tau * p.s[-1] / excess).distance / math.sqrt(squares.mean())
        )
    assert ratios[0] == pytest.approx(1, abs=0.01 + 0.01)  # 1 % and the uncertainty of the average
    assert 1.05 < ratios[1] < 2 < ratios[2]


@given(st.floats(1e-8, 1e8), st.floats(1e-6, 1.0))
def test_amplified_noise_has_no_unit_no_orientation_and_a_factor_without_tau(scale, tau):
    s = np.array([3.0, 1.0, 0.5])
    found = bounds.noise_amplification(s, (3, 7), tau)
    np.testing.assert_allclose(bounds.noise_amplification(scale * s, (7, 3), scale * tau), found, rtol=1e-12)
    assert bounds.noise_amplification(s, (3, 7), 0.0) == (0.0, 0.0, found.factor)
    assert bounds.noise_amplification(s, (3, 3), tau).distance < found.distance


def test_a_tiny_singular_value_cancels_nothing():
    found = bounds.noise_amplification([1.0, 1.0, 1e-12], (3, 3), 1.0)  # 2 (2/4 + 2/1 + 2/1) over three directions
    assert found.distance == pytest.approx(math.sqrt(3.0), rel=1e-11)


# --- invariances and rates --------------------------------------------------------------------------------------------


@given(st.integers(1, 1000), st.floats(1e-17, 1e-4))
def test_gemm_is_at_least_linear_and_composes(k, eps):
    assert bounds.gemm(k, eps) >= k * eps
    assert bounds.gemm(2 * k, eps) >= (1 + bounds.gemm(k, eps)) ** 2 - 1 - 8 * U64  # gamma_j + gamma_k + their product


def test_bounds_scale_as_they_should():
    assert bounds.polar(2e-3, 4e-3, 3, 4, 5) == pytest.approx(1e3 * bounds.polar(2.0, 4.0, 3, 4, 5))
    ratio = bounds.newton_schulz(3.0, 64, U32, 5) / bounds.newton_schulz(1.5, 64, U64, 5)
    assert ratio == pytest.approx(2 * U32 / U64, rel=1e-4)  # first order in eps: gamma_64 is 64 u (1 + 4e-6)
    assert bounds.step((3.4445, -4.7750, 2.0315), 0.0) == 3.4445


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds.unit_roundoff("fp12"), "dtype is 'fp12', needed one of fp64, fp32"),
        (lambda: bounds.gemm(256, 2.0**-8), "k eps = 1, needed"),
        (lambda: bounds.gemm(-1, U32), "needed k >= 0"),
        (lambda: bounds.polar(0.0, 1.0, 1, 2, 2), "smallest is 0 .* needed both above 0"),
        (lambda: bounds.polar(1.0, math.nan, 1, 2, 2), "smallest_perturbed nan, needed both above 0"),
        (lambda: bounds.polar(1.0, 1.0, 3, 2, 4), r"rank is 3, needed 1 to 2 for shape \(2, 4\)"),
        (lambda: bounds.newton_schulz(-1.0, 4, U32), "slope -1, .* needed none negative"),
        (lambda: bounds.blockwise(0), "tp is 0, needed at least 1"),
        (
            lambda: bounds.noise_amplification([1.0], (2, 3), 0.1),
            r"spectrum has shape \(1,\), needed \(2,\) for a matrix",
        ),
        (lambda: bounds.noise_amplification([[1.0]], (1, 1), 0.1), r"spectrum has shape \(1, 1\), needed \(1,\)"),
        (lambda: bounds.noise_amplification([], (0, 3), 0.1), r"needed \(0,\) for a matrix of shape \(0, 3\)"),
        (lambda: bounds.noise_amplification([1.0, 0.0], (2, 3), 0.1), "lies within 0 and 1, needed positive finite"),
        (lambda: bounds.noise_amplification([1.0, math.nan], (2, 3), 0.1), "needed positive finite values"),
        (lambda: bounds.noise_amplification([1.0, 1.0], (2, 3), -1.0), "tau is -1, needed a finite number"),
        (lambda: bounds.noise_amplification([1.0, 1.0], (2, 3), math.inf), "tau is inf, needed a finite number"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
