"""Rational iterations: weights and counts against the oracle, accuracy to condition 1e15, and plans that were wrong."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from cases import distance, with_singular_values

from muon_lab import polar
from muon_lab.measure import bounds
from muon_lab.oracle import multiprecision
from muon_lab.oracle import rational as slow
from muon_lab.polar import direct, rational

U64 = bounds.unit_roundoff("fp64")
U32 = bounds.unit_roundoff("fp32")

#: Roundings for each singular direction, as in test_direct.
FEW = 16

ITERATIONS = {"qdwh": polar.qdwh(), "halley": polar.halley(), "newton": polar.scaled_newton()}
each_iteration = pytest.mark.parametrize("method", ITERATIONS.values(), ids=ITERATIONS)


def quality(found, G):
    """Return ||U^T U - I||_F and ||G - U H||_F / ||G||_F, in float64."""
    U, H, G = (A.double().numpy() for A in (found.U, found.H, G))
    if U.shape[0] < U.shape[1]:
        U, G = U.T, G.T
    return np.linalg.norm(U.T @ U - np.eye(U.shape[1])), np.linalg.norm(G - U @ H) / np.linalg.norm(G)


def taken(steps, X):
    """Return the matrix after steps in given forms, without any of the care that `qdwh` takes."""
    for weights, form in steps:
        X = form.take(X, weights, None)
    return X


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [1.01, 10.0, 1e3, 1e8, 1e16, 1e20])
def test_the_closed_form_gives_the_weights_of_the_elliptic_functions(kappa):
    """Rounded exponents, 1/3 and 4/3, are multiplied by the logarithm."""
    exact = slow.weights(1 / kappa, 30)
    for ours, theirs in zip(rational.dynamical(1 / kappa), exact, strict=True):
        assert abs(ours / theirs - 1) < (bounds.UNCOUNTED + 2 * math.log(kappa)) * U64


def test_weights_are_those_that_were_published():
    expected = [(251.992, 15749.3, 16000.3), (6.63684, 7.94348, 13.5803), (3.05752, 1.05834, 3.11586), (3, 1, 3)]
    for weights, row in zip(rational.plan(1e-3), expected, strict=True):
        assert [f"{w:.6g}" for w in weights] == [f"{w:.6g}" for w in row]
    first = {
        1e1: (11.8484, 29.4221, 40.2705),
        1e2: (54.3243, 710.870, 764.194),
        1e16: (1.16961e11, 3.41995e21, 3.41995e21),
    }
    for kappa, row in first.items():
        assert [f"{w:.6g}" for w in rational.dynamical(1 / kappa)] == [f"{w:.6g}" for w in row]


@pytest.mark.parametrize("lower", [0.5, 1e-2, 1e-6])
def test_no_weights_lift_the_interval_better(lower):
    """The least image is attained at l and once inside, and any other map into [0, 1] of the kind has a smaller one."""
    x = np.geomspace(lower, 1, 20_001)

    def least(a, b):
        images = x * (a + b * x * x) / (1 + (a + b - 1) * x * x)
        return images.min() if images.max() <= 1 + 1e-12 else -np.inf

    a, b, _ = rational.dynamical(lower)
    assert least(a, b) == pytest.approx(rational.dynamical(lower).image(lower), rel=1e-6)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert least(factor * a, (factor * a - 1) ** 2 / 4) < least(a, b)
        assert least(a, factor * b) < least(a, b)


COUNTS = {
    1e1: (4, 5, 5),
    1e2: (4, 7, 6),
    1e3: (4, 9, 6),
    1e5: (5, 14, 7),
    1e8: (5, 20, 8),
    1e10: (5, 24, 8),
    1e12: (5, 28, 8),
    1e16: (6, 37, 9),
}


@pytest.mark.parametrize(("kappa", "counts"), COUNTS.items())
def test_steps_are_as_many_as_in_forty_digits(kappa, counts):
    oracle = [len(images(1 / kappa, "1e-15", 40)) for images in (slow.qdwh, slow.halley, slow.newton)]
    assert oracle == list(counts)
    interval, newton = rational.Interval(1 / kappa, 1.0), 0
    while interval.high - interval.low > rational.tolerance(torch.float64):
        interval, newton = interval.newton(rational.optimal(interval, torch.eye(1), torch.eye(1))), newton + 1
    plans = [rational.plan(1 / kappa, weights=weights) for weights in (rational.dynamical, rational.unweighted)]
    assert [*map(len, plans), newton] == list(counts)


@pytest.mark.parametrize(("kappa", "by_qr"), [(1e1, 0), (1e2, 1), (1e5, 1), (1e8, 2), (1e12, 2), (1e16, 2)])
def test_large_weights_are_as_many_as_published(kappa, by_qr):
    forms = [rational.form_for(weights, torch.float64) for weights in rational.plan(1 / kappa)]
    assert forms.count(rational.QR) == by_qr
    assert forms.count(rational.CHOLESKY) == len(forms) - by_qr


def test_a_scaled_step_is_the_step_of_a_scaled_number():
    weights = rational.dynamical(1e-2)
    for x in (0.01, 0.3, 1.0):
        assert weights.of(8.0).image(8.0 * x) == pytest.approx(weights.image(x), rel=8 * U64)


@pytest.mark.parametrize("zeta", [0.5, 1.0, 3.0])
def test_an_interval_is_mapped_onto_what_its_numbers_are_mapped_to(zeta):
    for low, high in ((0.1, 1.0), (0.1, 0.2), (2.0, 5.0)):
        x = zeta * np.linspace(low, high, 10_001)
        images = (x + 1 / x) / 2
        assert rational.Interval(low, high).newton(zeta) == pytest.approx((images.min(), images.max()), rel=1e-7)


# --- counts and quality on matrices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16)])
@pytest.mark.parametrize("kappa", COUNTS)
def test_iterations_on_a_matrix_are_those_of_its_condition(shape, kappa):
    """The bounds are a factor of 2 to 4 off, which QDWH does not notice and the others pay one step for."""
    G = torch.tensor(with_singular_values(*shape, np.geomspace(1, 1 / kappa, 16), seed=3))
    qdwh, halley, newton = COUNTS[kappa]
    assert int(polar.qdwh().decompose(G).iterations) == qdwh
    if kappa < 1e14:  # beyond, the cutoff for the rank is what the others plan for
        assert halley <= int(polar.halley().decompose(G).iterations) <= halley + 1
        assert newton <= int(polar.scaled_newton().decompose(G).iterations) <= newton + 1
    else:
        assert int(polar.scaled_newton().decompose(G).iterations) <= 9


@each_iteration
@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (16, 60), (60, 16)])
@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e4, 1e8, 1e12, 1e14, 1e15])
def test_both_errors_are_of_the_order_of_rounding_at_any_condition(method, shape, kappa):
    k = min(shape)
    G = torch.tensor(with_singular_values(*shape, np.geomspace(1, 1 / kappa, k), seed=1))
    found = method.filled(G)
    orthogonality, backward = quality(found, G)
    assert orthogonality < FEW * math.sqrt(k) * U64
    assert backward < FEW * math.sqrt(k) * U64
    assert found.converged
    assert np.linalg.eigvalsh(found.H.numpy())[0] > -FEW * math.sqrt(k) * U64 * np.linalg.norm(G)


@each_iteration
@pytest.mark.parametrize("shape", [(24, 24), (16, 60), (60, 16)])
@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e3, 1e5, 1e6])
def test_both_errors_are_of_the_order_of_rounding_in_float32(method, shape, kappa):
    k = min(shape)
    G = torch.tensor(with_singular_values(*shape, np.geomspace(1, 1 / kappa, k), seed=1), dtype=torch.float32)
    found = method.decompose(G)
    orthogonality, backward = quality(found, G)
    assert orthogonality < FEW * math.sqrt(k) * U32
    assert backward < FEW * math.sqrt(k) * U32
    assert found.converged
    assert int(found.rank) == k


@pytest.mark.parametrize("kappa", [1e2, 1e4, 1e6])
def test_a_square_matrix_in_float32_has_the_factor_of_float64(kappa):
    """The steps that amplify are taken in float64, from unrounded data: no trace of kappa u."""
    G = torch.tensor(with_singular_values(32, 32, np.geomspace(1, 1 / kappa, 32), seed=1), dtype=torch.float32)
    truth = polar.qdwh()(G.double()).numpy()
    assert distance(polar.qdwh()(G).double(), truth) < FEW * math.sqrt(32) * U32
    by_qr = distance(polar.qdwh(form=rational.QR)(G).double(), truth)
    assert by_qr > FEW * math.sqrt(32) * U32 or kappa < 1e4  # negative control: float32 throughout


@each_iteration
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
@pytest.mark.parametrize("kappa", [1e1, 1e6, 1e11])
def test_the_factors_agree_with_forty_digits(method, shape, kappa):
    G = with_singular_values(*shape, np.geomspace(1, 1 / kappa, min(shape)), seed=7)
    U, H, s = multiprecision.polar(G, 40)
    found = method.decompose(torch.tensor(G))
    error = FEW * math.sqrt(min(shape)) * U64 * np.linalg.norm(G)
    L = bounds.polar(float(s[len(s) - 1]), float(s[len(s) - 1]), min(shape), *shape)
    assert np.linalg.norm(found.U.numpy() - multiprecision.to_numpy(U)) < L * error
    right = found.H.numpy() if shape[0] >= shape[1] else found.U.numpy().T @ found.H.numpy() @ found.U.numpy()
    assert np.linalg.norm(right - multiprecision.to_numpy(H)) < 4 * error


def kahan(n, c):
    s = math.sqrt(1 - c * c)
    return np.diag(s ** np.arange(n)) @ (np.eye(n) - c * np.triu(np.ones((n, n)), 1))


RNG = np.random.default_rng(0)
HARD = {
    "vandermonde": np.vander(np.linspace(0, 1, 24)),
    "vandermonde, transposed": np.vander(np.linspace(-1, 1, 30)).T,
    "kahan": kahan(40, 0.9),
    "hilbert": scipy.linalg.hilbert(16),
    "triangle of minus ones": np.eye(40) - np.tril(np.ones((40, 40)), -1),
    "graded rows": np.diag(10.0 ** np.linspace(0, -15, 40)) @ RNG.standard_normal((40, 40)),
    "graded rows, rising": np.diag(10.0 ** np.linspace(-15, 0, 40)) @ RNG.standard_normal((40, 40)),
    "graded columns": RNG.standard_normal((40, 40)) @ np.diag(10.0 ** np.linspace(0, -15, 40)),
    "graded both ways": np.diag(10.0 ** RNG.uniform(-10, 0, 40))
    @ RNG.standard_normal((40, 40))
    * 10.0 ** RNG.uniform(-9, 0, 40),
}


@pytest.mark.parametrize("name", [*ITERATIONS, "one_infinity", "qr"])
@pytest.mark.parametrize("G", HARD.values(), ids=HARD)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_matrices_that_need_pivoting_are_no_worse(name, G, dtype):
    others = {"one_infinity": polar.scaled_newton(scaling=rational.one_infinity), "qr": polar.qdwh(form=rational.QR)}
    method = (ITERATIONS | others)[name]
    G = torch.tensor(G, dtype=dtype)
    found = method.filled(G)
    orthogonality, backward = quality(found, G)
    assert orthogonality < direct.orthonormality(G)
    assert backward < FEW * math.sqrt(len(G)) * bounds.unit_roundoff(str(dtype))
    decomposed = method.decompose(G)
    assert int(decomposed.rank) == int(polar.svd().decompose(G).rank)
    assert decomposed.converged


def backward_error_of_plain_steps(G, lower, form=None):
    """Return ||G - U H|| / ||G|| of steps on the matrix itself, by an unpivoted QR decomposition or in a given form."""
    G = torch.tensor(G)
    steps = [(weights, form or rational.form_for(weights, G.dtype)) for weights in rational.plan(lower)]
    U = taken(steps, G / torch.linalg.matrix_norm(G))
    H = direct.symmetric(U.mT @ G)
    return float(torch.linalg.matrix_norm(G - U @ H) / torch.linalg.matrix_norm(G))


def test_without_a_qlp_decomposition_they_would_be_worse():
    """Negative control."""
    assert backward_error_of_plain_steps(HARD["vandermonde"], 1e-18) > 1e4 * U64
    assert backward_error_of_plain_steps(HARD["graded rows"], 1e-18) < FEW * math.sqrt(40) * U64


def test_cholesky_on_the_matrix_itself_loses_within_what_its_weights_allow():
    """Negative control of the limit on c: the error, below c u, grows with the condition; that by QR does not."""
    kappas, errors = np.array([1e4, 1e5, 1e6, 1e7, 1e8]), []
    for kappa in kappas:
        G = with_singular_values(32, 32, np.geomspace(1, 1 / kappa, 32), seed=1)
        assert backward_error_of_plain_steps(G, 0.1 / kappa, rational.QR) < FEW * math.sqrt(32) * U64
        errors.append(backward_error_of_plain_steps(G, 0.1 / kappa, rational.CHOLESKY))
        assert errors[-1] < rational.dynamical(0.1 / kappa).c * U64
    assert errors[0] > FEW * math.sqrt(32) * U64
    assert 0.8 < np.polyfit(np.log(kappas), np.log(errors), 1)[0] < 1.2


def test_cholesky_on_the_triangle_hides_it_but_for_the_hardest():
    errors = {
        name: quality(polar.qdwh(form=rational.CHOLESKY).filled(torch.tensor(G)), torch.tensor(G))[1]
        for name, G in HARD.items()
    }
    assert max(errors, key=errors.get) == "vandermonde"
    assert errors["vandermonde"] > 5 * FEW * math.sqrt(24) * U64
    assert errors["graded both ways"] < FEW * math.sqrt(40) * U64


@pytest.mark.parametrize("kappa", [10.0, 1e4, 1e8, 1e12])
def test_both_scalings_of_newton_take_the_same_way(kappa):
    G = torch.tensor(with_singular_values(20, 20, np.geomspace(1, 1 / kappa, 20), seed=2))
    optimal = polar.scaled_newton().decompose(G)
    norms = polar.scaled_newton(scaling=rational.one_infinity).decompose(G)
    assert abs(int(optimal.iterations) - int(norms.iterations)) <= 1
    # either is the factor of a neighbour of G, and kappa times as far from the other
    assert distance(norms.U, optimal.U.numpy()) < FEW * math.sqrt(20) * kappa * U64


# --- bounds and claims ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(30, 30), (30, 70), (70, 30)])
@pytest.mark.parametrize("kappa", [1.0, 10.0, 1e3, 1e5])
def test_the_computed_bound_is_one(dtype, shape, kappa):
    for sigma in (np.geomspace(1, 1 / kappa, 30), np.r_[np.ones(29), 1 / kappa], np.r_[1, np.full(29, 1 / kappa)]):
        G = torch.tensor(with_singular_values(*shape, sigma, seed=5), dtype=dtype)
        s = np.linalg.svd(G.double().numpy(), compute_uv=False)
        for method in ITERATIONS.values():
            lower = float(method.decompose(G).lower)
            # above by the error of the decomposition, and below by what the two norms can be, the fourth root of k each
            assert lower <= s[-1] / s[0] + sum(shape) * bounds.unit_roundoff(str(dtype))
            assert lower > 0.5 * s[-1] / s[0] / math.sqrt(30)


def test_a_bound_that_is_too_small_costs_a_step_at_most():
    for lower in 10.0 ** -np.arange(1, 14):
        assert len(rational.plan(lower * 1e-3)) <= len(rational.plan(lower)) + 1


@pytest.mark.parametrize("sigma", [1e-4, 1e-6, 1e-9])
def test_a_bound_that_is_too_large_leaves_a_direction_where_the_scalar_map_says(sigma):
    """And the usual test, what a step changes, passes it as converged: that is why it isn't used."""
    steps = [(weights, rational.QR) for weights in rational.plan(1e-3)]
    G = torch.diag(torch.tensor([1.0, 0.5, sigma], dtype=torch.float64))
    image = sigma
    for weights, _ in steps:
        image = weights.image(image)
    assert image == pytest.approx(15 * sigma / 1e-3, rel=0.05) or sigma > 1e-5
    before, after = taken(steps[:-1], G), taken(steps, G)
    assert float(after[2, 2]) == pytest.approx(image, rel=1e-9)
    assert image < 1 - 1e-3
    assert (float(torch.linalg.matrix_norm(after - before)) < (40 * U64) ** (1 / 3)) == (sigma < 1e-8)


@pytest.mark.parametrize("weights", [rational.dynamical, rational.unweighted])
@pytest.mark.parametrize("kappa", [1e2, 1e6, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wrong_claim_is_found_out_and_the_factor_is_right(weights, kappa, dtype):
    G = torch.tensor(with_singular_values(12, 12, np.geomspace(1, 1 / kappa, 12), seed=3), dtype=dtype)
    honest = direct.Direct(rational.Halley(weights, None, None)).decompose(G)
    for claim in (1.0, 1e-1):
        method = direct.Direct(rational.Halley(weights, claim, None))
        found = method.decompose(G)
        assert int(found.iterations) > len(rational.plan(claim, bounds.unit_roundoff(str(dtype)), weights))
        assert torch.equal(found.rank, honest.rank)
        assert found.converged
        _, backward = quality(found, G)
        cutoff = direct.rounding(12, 12, bounds.unit_roundoff(str(dtype)))
        assert backward < FEW * math.sqrt(12) * bounds.unit_roundoff(str(dtype)) + (cutoff if kappa > 1e8 else 0.0)


def test_a_right_claim_is_taken_at_its_word():
    G = torch.tensor(with_singular_values(32, 32, np.geomspace(1, 1e-2, 32), seed=3), dtype=torch.float32)
    norm = float(torch.linalg.matrix_norm(G))
    found = polar.qdwh(lower=0.99e-2 / norm).decompose(G)
    assert float(found.lower) == pytest.approx(0.99e-2 / norm, rel=1e-6)
    assert int(found.iterations) == len(rational.plan(0.99e-2 / norm, U32))
    assert found.converged
    assert found.flops < polar.qdwh().decompose(G).flops
    claimed, computed = polar.qdwh(lower=1e-12).decompose(G), polar.qdwh().decompose(G)
    assert int(claimed.iterations) <= int(computed.iterations) + 1  # nothing below the cutoff is planned for


def test_a_claim_does_not_hide_a_null_space():
    for dtype in (torch.float64, torch.float32):
        G = torch.tensor(RNG.standard_normal((20, 5)) @ RNG.standard_normal((5, 20)), dtype=dtype)
        for claim in (1e-3, 1.0):
            found = polar.qdwh(lower=claim).decompose(G)
            assert int(found.rank) == 5
            assert found.converged


def test_a_claim_does_not_decide_the_rank():
    """Close above the noise a claim is right and all is lifted to 1; the last direction still is below the cutoff."""
    sigma = np.r_[np.geomspace(1, 1e-3, 15), 2e-15]
    G = torch.tensor(with_singular_values(16, 16, sigma, seed=4))
    claim = 1.8e-15 / float(torch.linalg.matrix_norm(G))
    assert direct.rounding(16, 16, U64) < claim < sigma[-1] < 16 * 2 * U64
    found = polar.qdwh(lower=claim).decompose(G)
    assert float(found.lower) > float(polar.qdwh().decompose(G).lower)
    assert int(found.rank) == int(polar.svd().decompose(G).rank) == 15


# --- cost -------------------------------------------------------------------------------------------------------------


def test_flops_are_the_sum_of_what_is_documented():
    m, n = 12, 30
    for shape in ((n, m), (m, n)):
        G = torch.tensor(with_singular_values(*shape, np.geomspace(1, 1e-5, m), seed=3))
        bound = 2 * m**3 + 2 * m**3 / 3
        found = polar.qdwh().decompose(G)
        steps = rational.QR.flops(m, m) + 3 * rational.CHOLESKY.flops(m, m) + rational.PRODUCT.flops(m, m)
        assert int(found.iterations) == 5
        assert float(found.flops) == pytest.approx(rational.qlp_flops(m, n) + bound + steps, rel=8 * U64)
        found = polar.halley().decompose(G)
        steps = (int(found.iterations) - 1) * rational.CHOLESKY.flops(m, m) + rational.PRODUCT.flops(m, m)
        assert float(found.flops) == pytest.approx(rational.qlp_flops(m, n) + bound + steps, rel=8 * U64)
        found = polar.scaled_newton().decompose(G)
        steps = int(found.iterations) * rational.newton_flops(m)
        assert float(found.flops) == pytest.approx(rational.qlp_flops(m, n) + bound + steps, rel=8 * U64)


def test_flops_in_float32_have_a_gram_matrix_for_a_decomposition():
    m, n = 12, 30
    for shape, start in (((n, m), 2 * 2 * m * m * n + 2 * m**3), ((m, m), 2 * m**3 + m**3)):
        G = torch.tensor(with_singular_values(*shape, np.geomspace(1, 0.2, m), seed=3), dtype=torch.float32)
        found = polar.qdwh().decompose(G)
        steps = 2 * rational.CHOLESKY.flops(m, m) + rational.PRODUCT.flops(m, m)
        assert int(found.iterations) == 3
        assert float(found.flops) == pytest.approx(start + steps, rel=8 * U64)


def test_flops_of_the_forms_are_polynomials_in_m_and_n():
    m, n = 6, 9
    assert rational.QR.flops(m, n) == pytest.approx(6 * m * m * n + 8 / 3 * m**3)
    assert rational.CHOLESKY.flops(m, n) == pytest.approx(4 * m * m * n + m**3 / 3)
    assert rational.PRODUCT.flops(m, n) == 4 * m * m * n


def test_a_projection_on_the_range_is_paid_for():
    full = torch.tensor(with_singular_values(10, 10, np.geomspace(1, 1e-15, 10), seed=3))
    found = polar.qdwh().decompose(full)
    assert int(found.rank) < 10
    assert float(found.flops) - float(polar.qdwh().filled(full).flops) > 9 * 10**3 - rational.QR.flops(10, 10)


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lower", [0.0, -1.0, 1.5, 1e-200])
def test_a_bound_out_of_range_is_refused(lower):
    for call in (lambda: polar.qdwh(lower=lower), lambda: polar.halley(lower=lower), lambda: rational.plan(lower)):
        with pytest.raises(ValueError, match=f"lower must be at least 1e-100 and at most 1, not {lower}"):
            call()
