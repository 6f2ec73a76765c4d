"""What is computed and not approximated: the polar factor where it is unique, and decided answers where it isn't."""

import math

import numpy as np
import pytest
import torch
from cases import SHAPES, distance, polar_factor, with_singular_values
from hypothesis import given
from hypothesis import strategies as st

from muon_lab import oracle, polar
from muon_lab.measure import bounds
from muon_lab.polar import direct

EPS64 = float(np.finfo(np.float64).eps)

#: Roundings of a computed decomposition for each singular direction: in norm, G - U H is √k times a few u. Of 8,000
#: random decompositions most have 3 and the largest, of a single row, 12.
FEW = 16

METHODS = {
    "svd": polar.svd(),
    "gram_eigh": polar.gram_eigh(),
    "qdwh": polar.qdwh(),
    "halley": polar.halley(),
    "newton": polar.scaled_newton(),
}
ITERATIONS = ("qdwh", "halley", "newton")
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def backward(G, dtype):
    """Return what ||G - U H|| may be."""
    return FEW * math.sqrt(min(G.shape)) * bounds.unit_roundoff(str(dtype)) * np.linalg.norm(G)


def product(found):
    """Return U H, or H U for a wide matrix, in float64."""
    U, H = found.U.double().numpy(), found.H.double().numpy()
    return H @ U if U.shape[-2] < U.shape[-1] else U @ H


def is_partial_isometry(U, rank, dtype):
    s = np.linalg.svd(U.double().numpy(), compute_uv=False)
    expected = np.r_[np.ones(rank), np.zeros(len(s) - rank)]
    return np.linalg.norm(s - expected) < FEW * max(U.shape) * bounds.unit_roundoff(str(dtype))


# --- the singular value decomposition ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_gives_the_polar_factor(shape):
    G = np.random.default_rng(5).standard_normal(shape)
    condition = np.linalg.cond(G)
    assert distance(polar.svd()(torch.tensor(G)), polar_factor(G)) < 10 * condition * EPS64


@pytest.mark.parametrize("rank", [1, 3])
def test_null_space_stays_empty(rank):
    sigma = np.r_[np.geomspace(1, 0.1, rank), np.zeros(5 - rank)]
    G = with_singular_values(5, 8, sigma, seed=2)
    s = np.linalg.svd(polar.svd()(torch.tensor(G)).numpy(), compute_uv=False)
    assert s == pytest.approx(np.r_[np.ones(rank), np.zeros(5 - rank)], abs=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1e-155, 1e155, 1e300])
def test_scale_does_not_matter_in_float64(scale):
    G = with_singular_values(6, 9, np.geomspace(1, 0.1, 6), seed=4)
    assert distance(polar.svd()(torch.tensor(G * scale)), polar_factor(G)) < 1e-12


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter_in_float32(scale):
    G = with_singular_values(6, 9, np.geomspace(1, 0.1, 6), seed=4)
    X = polar.svd()(torch.tensor(G * scale, dtype=torch.float32))
    assert distance(X, polar_factor(G)) < 100 * np.finfo(np.float32).eps


def test_repeated_singular_values_are_no_obstacle():
    H = np.array([[1.0]])
    for _ in range(3):
        H = np.block([[H, H], [H, -H]])
    assert np.abs(polar.svd()(torch.tensor(3.7 * H)).numpy() - H / np.sqrt(8)).max() < 1e-12


def test_batch_members_are_independent():
    G = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    G[1] = 0
    X = polar.svd()(G)
    assert not X[1].any()
    assert torch.allclose(X[2], polar.svd()(G[2]), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("m", "n", "rank"), [(16, 24, 4), (24, 16, 4), (64, 64, 16), (256, 32, 8)])
def test_a_low_rank_product_computed_in_float32_keeps_its_rank(m, n, rank):
    """Its other directions are rounding noise of size 1e-8 to 1e-7, and must not become full-size updates."""
    rng = np.random.default_rng(m)
    A, B = (torch.tensor(rng.standard_normal(shape), dtype=torch.float32) for shape in ((m, rank), (rank, n)))
    s = torch.linalg.svdvals(polar.svd()(A @ B).double()).numpy()
    assert s[:rank] == pytest.approx(np.ones(rank), abs=1e-5)
    assert np.abs(s[rank:]).max() < 1e-5


def test_small_directions_that_float32_determines_are_kept():
    """The usual cutoff max(m, n)·ε·σ₁ = 3e-5 would drop half of them."""
    G = torch.tensor(with_singular_values(96, 288, np.geomspace(1, 1e-6, 96), seed=3), dtype=torch.float32)
    X = polar.svd()(G).double().numpy()
    assert np.linalg.matrix_rank(X) == 96
    assert distance(X, polar_factor(G.double().numpy())) < 1e-6


# --- one protocol: reduces to -----------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 0, 5), (0, 2, 2)])
def test_empty_gives_empty(method, shape):
    G = torch.zeros(shape)
    k = min(shape[-2:])
    found = method.decompose(G)
    assert method(G).shape == found.U.shape == shape
    assert found.H.shape == (*shape[:-2], k, k)
    assert found.rank.shape == found.converged.shape == shape[:-2]
    assert found.converged.all()


@each_method
def test_zero_gives_zero(method):
    found = method.decompose(torch.zeros(2, 3, 5))
    assert not found.U.any()
    assert not found.H.any()
    assert found.rank.tolist() == [0, 0]
    assert found.converged.all()


@each_method
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1)])
def test_a_vector_is_normalised(method, shape):
    G = -torch.arange(1.0, max(shape) + 1, dtype=torch.float64).reshape(shape)
    found = method.decompose(G)
    norm = float(torch.linalg.vector_norm(G))
    assert distance(found.U, G.numpy() / norm) < FEW * EPS64
    assert float(found.H) == pytest.approx(norm, rel=FEW * EPS64)


@each_method
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (20, 8)])
def test_orthonormal_comes_back_in_one_step(method, sign, shape):
    G = torch.tensor(sign * with_singular_values(*shape, np.ones(8), seed=2))
    found = method.decompose(G)
    assert distance(found.U, G.numpy()) < backward(G, G.dtype) / math.sqrt(8)
    assert distance(found.H, np.eye(8)) < backward(G, G.dtype) / math.sqrt(8)
    assert int(found.iterations) <= 1


@each_method
def test_repeated_singular_values(method):
    H = np.array([[1.0]])
    for _ in range(3):
        H = np.block([[H, H], [H, -H]])
    assert distance(method(torch.tensor(3.7 * H)), H / math.sqrt(8)) < FEW * math.sqrt(8) * EPS64


# --- one protocol: matches the oracle ---------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_factors_are_those_of_the_oracle(method, shape, dtype):
    G = torch.tensor(np.random.default_rng(5).standard_normal(shape), dtype=dtype)
    truth = oracle.polar.polar(G.double().numpy(), roundoff=bounds.unit_roundoff(str(dtype)))
    m, n = shape
    smallest, rank = truth.s[-1], int(truth.rank)
    error = backward(G.double().numpy(), dtype)
    if isinstance(method.method, direct.GramEigh):
        error *= truth.s[0] / smallest  # kappa^2 u, of which one kappa is in the bound
    tolerance = bounds.polar(smallest, smallest, rank, m, n) * error
    tolerance += bounds.polar_by_svd(truth.s[0], smallest, rank, m, n, bounds.unit_roundoff("fp64"))
    found = method.decompose(G)
    assert np.linalg.norm(found.U.double().numpy() - truth.U) < tolerance
    H = found.H.double().numpy()
    right = H if m >= n else found.U.double().numpy().T @ H @ found.U.double().numpy()
    assert np.linalg.norm(right - truth.H) < 4 * error + 2 * np.linalg.norm(truth.H) * EPS64 * max(shape)
    assert int(found.rank) == rank
    assert torch.equal(found.H, found.H.mT)


@each_method
@pytest.mark.parametrize("shape", [(12, 12), (12, 40), (40, 12)])
@pytest.mark.parametrize("kappa", [1.0, 1e1, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_product_is_the_input_and_the_factors_are_what_they_are_called(method, shape, kappa, dtype):
    G = torch.tensor(with_singular_values(*shape, np.geomspace(1, 1 / kappa, 12), seed=4), dtype=dtype)
    found = method.decompose(G)
    gram = isinstance(method.method, direct.GramEigh)
    u = bounds.unit_roundoff(str(dtype)) + (kappa**2 * bounds.unit_roundoff("fp64") if gram else 0.0)
    allowed = FEW * math.sqrt(12) * u * np.linalg.norm(G.double())
    assert np.linalg.norm(product(found) - G.double().numpy()) < allowed
    assert np.linalg.norm(found.matrix.double().numpy() - G.double().numpy()) < allowed
    assert np.linalg.eigvalsh(found.H.double().numpy())[0] > -allowed
    s = np.linalg.svd(found.U.double().numpy(), compute_uv=False)
    assert np.linalg.norm(s - 1) < FEW * max(shape) * u
    assert bool(found.converged) or gram
    assert torch.equal(found.U, method(G))


def test_the_error_of_the_gram_matrix_grows_with_the_square_of_the_condition():
    """Negative control of the bound above, and the documented limit."""
    kappas = np.array([1e2, 1e3, 1e4, 1e5])
    defects = []
    for kappa in kappas:
        G = torch.tensor(with_singular_values(24, 24, np.geomspace(1, 1 / kappa, 24), seed=6))
        U = polar.gram_eigh()(G).numpy()
        defects.append(np.linalg.norm(U.T @ U - np.eye(24)))
    slope = np.polyfit(np.log(kappas), np.log(defects), 1)[0]
    assert 1.7 < slope < 2.3
    assert not polar.gram_eigh().decompose(G).converged


@pytest.mark.parametrize("relative", [3.0, 1 / 3])
def test_the_gram_matrix_loses_a_direction_at_its_documented_size(relative):
    smallest = relative * math.sqrt(30 * EPS64)
    G = torch.diag(torch.tensor([1.0, smallest], dtype=torch.float64)) @ torch.eye(2, 30, dtype=torch.float64)
    assert int(polar.gram_eigh().decompose(G).rank) == (2 if relative > 1 else 1)
    assert int(polar.svd().decompose(G).rank) == 2


# --- one protocol: rank -----------------------------------------------------------------------------------------------


def low_rank(m, n, rank, dtype):
    rng = np.random.default_rng(m + n + rank)
    A, B = (torch.tensor(rng.standard_normal(shape), dtype=dtype) for shape in ((m, rank), (rank, n)))
    return A @ B


DEFICIENT = {
    "ones": torch.ones(6, 6),
    "one zero column": torch.tensor(np.random.default_rng(1).standard_normal((8, 8)) * (np.arange(8) < 7)),
    "diagonal": torch.diag(torch.tensor([2.0, 0.0, 1.0, 0.0])),
    "shift": torch.diag(torch.ones(9, dtype=torch.float64), 1),
    "low rank, square": low_rank(24, 24, 4, torch.float32),
    "low rank, wide": low_rank(16, 48, 4, torch.float32),
    "low rank, tall": low_rank(48, 16, 4, torch.float32),
    "low rank, float64": low_rank(20, 30, 7, torch.float64),
    "bfloat16": low_rank(24, 24, 4, torch.float32).bfloat16(),
}


@each_method
@pytest.mark.parametrize("G", DEFICIENT.values(), ids=DEFICIENT)
def test_the_null_space_stays_empty(method, G):
    """Rounding at 1e-8 of the norm is not a direction, and an iteration that lifts 1e-8 to 1 must not keep it."""
    truth = oracle.polar.polar(G.double().numpy(), roundoff=bounds.unit_roundoff(str(G.dtype)))
    found = method.decompose(G)
    assert int(found.rank) == int(truth.rank) < min(G.shape)
    assert is_partial_isometry(found.U, int(truth.rank), G.dtype)
    smallest = truth.s[int(truth.rank) - 1]
    error = backward(G.double().numpy(), G.dtype)
    L = bounds.polar(smallest, smallest, int(truth.rank), *G.shape)
    assert np.linalg.norm(found.U.double().numpy() - truth.U) < 2 * L * error
    assert bool(found.converged) or isinstance(method.method, direct.GramEigh)


@each_method
def test_an_assumed_roundoff_moves_the_cutoff(method):
    G = torch.tensor(with_singular_values(10, 10, np.geomspace(1, 1e-5, 10), seed=1))
    ranks = [
        int(type(method)(method.method, roundoff, method.dtype).decompose(G).rank) for roundoff in (2.0**-53, 1e-4)
    ]
    cutoff = direct.rounding(10, 10, 1e-4) * float(torch.linalg.matrix_norm(G))
    assert ranks == [10, int((np.geomspace(1, 1e-5, 10) > cutoff).sum())]
    assert 0 < ranks[1] < 10


@pytest.mark.parametrize("name", ["svd", *ITERATIONS])
@pytest.mark.parametrize("G", [*DEFICIENT.values(), torch.diag(torch.logspace(0, -39, 40).double())], ids=str)
def test_filled_leaves_nothing_out(name, G):
    found = METHODS[name].filled(G)
    assert is_partial_isometry(found.U, min(G.shape), G.dtype)
    assert np.linalg.norm(product(found) - G.double().numpy()) < backward(G.double().numpy(), found.H.dtype) + float(
        bounds.unit_roundoff(str(G.dtype)) * math.sqrt(min(G.shape)) * torch.linalg.matrix_norm(G.double())
    )
    assert found.converged


def test_filling_zero_is_told_to_fail_where_it_does():
    found = {name: METHODS[name].filled(torch.zeros(3, 3)) for name in ("svd", *ITERATIONS)}
    assert torch.equal(found["svd"].U, torch.eye(3))
    assert found["svd"].converged
    for name in ITERATIONS:
        assert not found[name].U.any()
        assert not found[name].converged


# --- one protocol: invariances ----------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 3), (2, 3, 4, 4)])
def test_shape_and_dtype_are_those_of_the_input(method, dtype, shape):
    G = torch.tensor(np.random.default_rng(3).standard_normal(shape)).to(dtype)
    before = G.clone()
    U = method(G)
    assert U.shape == G.shape
    assert U.dtype == dtype
    assert U.is_contiguous()
    assert torch.equal(G, before)
    assert method.decompose(G).H.dtype == (method.dtype or (dtype if dtype == torch.float64 else torch.float32))


@each_method
def test_strides_do_not_change_a_bit(method):
    G = torch.tensor(np.random.default_rng(3).standard_normal((6, 9)))
    U = method(G)
    strided = torch.zeros(12, 18, dtype=torch.float64)[::2, ::2].copy_(G)
    assert torch.equal(method(strided), U)
    assert torch.equal(method(G.mT.contiguous().mT), U)
    expanded = G.expand(3, 6, 9)
    assert torch.equal(method(expanded)[2], method(expanded.contiguous())[2])


@each_method
def test_transposing_commutes(method):
    G = torch.tensor(with_singular_values(6, 9, np.geomspace(1, 0.1, 6), seed=4))
    found, turned = method.decompose(G), method.decompose(G.mT)
    assert distance(turned.U.mT, found.U.numpy()) < 100 * FEW * EPS64  # kappa^2, for the Gram matrix
    assert distance(turned.H, found.H.numpy()) < 100 * FEW * EPS64


@each_method
@pytest.mark.parametrize("exponent", [-126, -100, -1, 1, 60, 120])
def test_a_power_of_two_does_not_change_a_bit(method, exponent):
    G = torch.tensor(np.random.default_rng(0).integers(-8, 9, (6, 10)), dtype=torch.float32)
    scale = 2.0**exponent
    found, scaled = method.decompose(G), method.decompose((G.double() * scale).float())
    assert torch.equal(scaled.U, found.U)
    assert torch.equal(scaled.H.double(), (found.H.double() * scale).to(found.H.dtype).double())


@each_method
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter_to_a_number_that_is_no_power_of_two(method, scale):
    G = with_singular_values(6, 9, np.geomspace(1, 0.1, 6), seed=4)
    U = method(torch.tensor(G * scale, dtype=torch.float32))
    assert distance(U, polar_factor(G)) < 10 * FEW * np.finfo(np.float32).eps


@each_method
@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_the_matrices_of_a_batch_do_not_know_of_each_other(method, batch):
    G = torch.tensor(np.random.default_rng(1).standard_normal((*batch, 4, 6)))
    found = method.decompose(G)
    for index in np.ndindex(batch):
        alone = method.decompose(G[index])
        assert torch.equal(found.U[index], alone.U)
        assert torch.equal(found.H[index], alone.H)
        assert found.iterations[index] == alone.iterations
        assert found.flops[index] == alone.flops
    changed = G.clone()
    changed[(0,) * len(batch)] = 0.0
    assert torch.equal(method(changed)[(-1,) * len(batch)], found.U[(-1,) * len(batch)])
    assert not method(changed)[(0,) * len(batch)].any()


@pytest.mark.parametrize("name", METHODS)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(5, 5), (3, 8), (8, 3)]))
def test_rotations_commute(name, seed, shape):
    rng = np.random.default_rng(seed)
    m, n = shape
    G = with_singular_values(m, n, np.sort(rng.uniform(0.1, 1, min(shape)))[::-1], seed=seed % 1000)
    P, Q = (np.linalg.qr(rng.standard_normal((k, k)))[0] for k in shape)
    turned = METHODS[name](torch.tensor(P @ G @ Q)).numpy()
    # the turn itself rounds, and the factor passes on 2 / 0.1 of that; kappa^2 = 100 for the Gram matrix
    assert distance(turned, P @ METHODS[name](torch.tensor(G)).numpy() @ Q) < 100 * FEW * math.sqrt(max(shape)) * EPS64


def test_float64_data_may_be_computed_in_float32_and_the_other_way_round():
    G = torch.tensor(with_singular_values(8, 12, np.geomspace(1, 1e-3, 8), seed=4) * 1e100)
    for make in (polar.qdwh, polar.halley, polar.scaled_newton, polar.svd):
        low, high = make(dtype=torch.float32)(G), make(dtype=torch.float64)(G)
        assert low.dtype == high.dtype == torch.float64
        assert distance(high, polar_factor(G / 1e100)) < 1e3 * FEW * EPS64
        assert EPS64 * 1e3 < distance(low, polar_factor(G / 1e100)) < 1e3 * FEW * np.finfo(np.float32).eps
    noisy = torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64))
    assert int(polar.qdwh(dtype=torch.float32).decompose(noisy).rank) == 1  # float32 keeps no such number beside a 1
    assert int(polar.qdwh().decompose(noisy).rank) == 2


# --- one protocol: cost, and what is refused --------------------------------------------------------------------------


def test_a_decomposition_costs_what_the_book_says():
    for shape in ((20, 50), (50, 20)):
        G = torch.tensor(np.random.default_rng(2).standard_normal((3, *shape)))
        assert polar.svd().decompose(G).flops.tolist() == [6 * 50 * 20**2 + 20 * 20**3] * 3
        assert polar.gram_eigh().decompose(G).flops.tolist() == [4 * 50 * 20**2 + 11 * 20**3] * 3
        assert not polar.svd().decompose(G).iterations.any()
        assert polar.svd().decompose(G).lower.isnan().all()


@each_method
@pytest.mark.parametrize(
    ("G", "message"),
    [
        (torch.zeros(3), "at least 2 axes, but has shape \\(3,\\)"),
        (torch.zeros(2, 2, dtype=torch.int32), "real floating point, but is torch.int32"),
        (torch.zeros(2, 2, dtype=torch.complex64), "real floating point, but is torch.complex64"),
        (torch.tensor([[1.0, torch.nan], [torch.inf, 1.0]]), "2 of its 4 entries are not"),
    ],
)
def test_bad_input_is_refused(method, G, message):
    for call in (method, method.decompose):
        with pytest.raises(ValueError, match=message):
            call(G)


@pytest.mark.parametrize("make", [polar.svd, polar.gram_eigh, polar.qdwh, polar.halley, polar.scaled_newton])
def test_bad_arguments_are_refused(make):
    with pytest.raises(ValueError, match=r"dtype must be torch\.float32 or torch\.float64, not torch\.float16"):
        make(dtype=torch.float16)
    with pytest.raises(ValueError, match=r"roundoff must be at least 0 and below 1, not 1\.0"):
        make(roundoff=1.0)


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match="gram_eigh cannot fill the null space"):
        polar.gram_eigh().filled(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"entries above 3\.4e\+38, beyond torch\.float32"):
        polar.qdwh().decompose(torch.full((4, 16), 3e38))
    assert polar.qdwh()(torch.full((4, 16), 3e38)).isfinite().all()
