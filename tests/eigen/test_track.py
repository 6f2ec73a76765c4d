"""Eigenbases that are followed, and solvers that fail: decided answers, oracles, injected failures, refusals."""

import math

import numpy as np
import pytest
import torch
from cases import orthonormal
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.arithmetic import Rounded
from muon_lab.eigen import track
from muon_lab.eigen.track import Outcome, eigenbasis, orthogonal_iteration, tolerance
from muon_lab.measure import bounds
from muon_lab.oracle import eigen

U32, U64 = bounds.unit_roundoff("fp32"), bounds.unit_roundoff("fp64")
ROUNDOFF = {torch.float32: U32, torch.float64: U64}
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
SPECTRA = {
    "distinct": [5.0, 3.0, 2.0, 0.5, 0.1],
    "signs": [2.0, 1.0, 0.0, -1.0, -3.0],
    "graded": [1e4, 1e2, 1.0, 1e-2, 1e-4],
}

#: Covers the constant in the backward error of the solver and that both, it and the oracle's, have one.
BOTH = 16


def planted(values, seed=0, dtype=torch.float64):
    """Return a symmetric matrix with given values and the basis that was put into it."""
    values = np.asarray(values, float)
    Q = orthonormal(values.size, values.size, seed)
    K = (Q * values) @ Q.T
    return torch.tensor((K + K.T) / 2, dtype=dtype), torch.tensor(Q, dtype=dtype)


def deviation(K, basis):
    """Return what the two checks see, in units of the tolerance."""
    K, values, Q = K.double(), basis.values.double(), basis.Q.double()
    orthonormality = torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(K.shape[-1]))
    residual = torch.linalg.matrix_norm(K @ Q - Q * values.unsqueeze(-2)) / torch.linalg.matrix_norm(K)
    return float(orthonormality.max()), float(residual.max())


class Solver:
    """A stand-in for torch's eigensolver that spoils some results and counts its calls."""

    def __init__(self, spoil, dtypes=(torch.float32,)):
        self.spoil, self.dtypes, self.calls, self.true = spoil, dtypes, [], torch.linalg.eigh

    def __call__(self, A):
        self.calls.append((A.dtype, len(A)))
        found = self.true(A)
        return self.spoil(A, *found) if A.dtype in self.dtypes else found


def raises(A, values, Q):
    raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")


def library_raises(A, values, Q):
    raise RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED")


def not_a_number(A, values, Q):
    return values, torch.full_like(Q, math.nan)


def value_not_a_number(A, values, Q):
    return torch.where(torch.arange(values.shape[-1]) == 1, math.nan, values), Q


def repeats_a_column(A, values, Q):
    """Every residual is right and the columns do not span the space."""
    return values[..., [0, 0, *range(2, values.shape[-1])]], Q[..., [0, 0, *range(2, Q.shape[-1])]]


def another_basis(A, values, Q):
    """Orthonormal, and of another matrix."""
    return values, torch.tensor(orthonormal(A.shape[-1], A.shape[-1], 99), dtype=A.dtype).expand(A.shape)


def values_in_another_order(A, values, Q):
    return values.roll(1, -1), Q


FAILURES = [raises, library_raises, not_a_number, value_not_a_number]
FAILURES += [repeats_a_column, another_basis, values_in_another_order]
every_failure = pytest.mark.parametrize("spoil", FAILURES)


# --- reduces to -------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("n", [0, 1, 4, 17])
@pytest.mark.parametrize("c", [0.0, 1.0, -3.5])
def test_a_multiple_of_the_identity_has_the_identity_as_its_basis(n, c, dtype):
    (values, Q), outcome = eigenbasis(c * torch.eye(n, dtype=dtype))
    assert torch.equal(values, torch.full((n,), c, dtype=dtype))
    assert torch.equal(Q, torch.eye(n, dtype=dtype))
    assert outcome == Outcome.SOLVED


def test_a_diagonal_matrix_is_sorted_and_equal_values_stay_in_order():
    (values, Q), _ = eigenbasis(torch.diag(torch.tensor([1.0, -2.0, 7.0, 1.0])))
    assert values.tolist() == [7.0, 1.0, 1.0, -2.0]
    assert torch.equal(Q, torch.eye(4)[:, [2, 0, 3, 1]])


@every_dtype
def test_a_zero_matrix_leaves_an_iteration_at_an_orthonormal_basis(dtype):
    (values, Q), outcome = orthogonal_iteration(torch.zeros(3, 3, dtype=dtype), torch.eye(3, dtype=dtype))
    assert not values.any()
    assert torch.equal(Q, torch.eye(3, dtype=dtype))
    assert outcome == Outcome.SOLVED


def test_an_eigenbasis_stays_where_it_is_under_iteration():
    K, _ = planted([5.0, 3.0, 2.0, 0.5])
    basis = eigenbasis(K).basis
    after = orthogonal_iteration(K, basis.Q, steps=3).basis
    torch.testing.assert_close(after.Q, basis.Q, rtol=0, atol=3 * BOTH * 4 * U64 * 10)  # 10 is the condition
    torch.testing.assert_close(after.values, basis.values, rtol=0, atol=5 * BOTH * 4 * U64)


def test_the_sign_is_that_of_the_first_largest_entry():
    Q = torch.tensor([[0.5, -0.5, 0.1], [-0.5, 0.5, -0.9]])
    assert torch.equal(track.signed(Q), torch.tensor([[0.5, 0.5, -0.1], [-0.5, -0.5, 0.9]]))


# --- matches the oracle -----------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_the_oracle_on_the_same_numbers(spectrum, seed, dtype):
    K, _ = planted(SPECTRA[spectrum], seed, dtype)
    truth = eigen.eigenbasis(K.numpy())
    (values, Q), outcome = eigenbasis(K)
    assert outcome == Outcome.SOLVED
    error = BOTH * bounds.svd(5, 5, ROUNDOFF[dtype])
    size = np.abs(truth.values).max()
    np.testing.assert_allclose(values.numpy(), truth.values, rtol=0, atol=error * size)
    gaps = np.abs(np.subtract.outer(truth.values, truth.values) + np.diag(np.full(5, np.inf))).min(0)
    atol = np.maximum(error * size / gaps, error)
    assert (np.linalg.norm(Q.numpy() - truth.Q, axis=0) <= atol).all()


@every_dtype
@pytest.mark.parametrize("steps", [1, 3])
def test_iteration_agrees_with_the_oracle_on_the_same_numbers(steps, dtype):
    K, _ = planted([5.0, 3.0, 2.0, 0.5, 0.1], seed=1, dtype=dtype)
    start = torch.tensor(orthonormal(5, 5, 7), dtype=dtype)
    (values, Q), _ = orthogonal_iteration(K, start, steps)
    truth = eigen.orthogonal_iteration(K.numpy(), start.numpy().astype(float), steps)
    condition = 50.0  # a QR factor turns by the error over the smallest singular value of K Q
    np.testing.assert_allclose(Q.numpy(), truth, rtol=0, atol=steps * condition * BOTH * 5 * ROUNDOFF[dtype])
    quotients = np.diag(truth.T @ K.numpy().astype(float) @ truth)
    np.testing.assert_allclose(values.numpy(), quotients, rtol=0, atol=steps * condition * BOTH * 25 * ROUNDOFF[dtype])


@pytest.mark.parametrize("n", [2, 12, 64])
def test_the_second_difference_matrix_has_sines_for_eigenvectors(n):
    K = 2 * torch.eye(n, dtype=torch.float64) - torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)
    K = K - torch.diag(torch.ones(n - 1, dtype=torch.float64), -1)
    k = torch.arange(n, 0, -1, dtype=torch.float64)
    (values, _), _ = eigenbasis(K)
    torch.testing.assert_close(values, 2 - 2 * torch.cos(math.pi * k / (n + 1)), rtol=0, atol=4 * BOTH * n * U64)


def test_s25_a_gram_matrix_of_low_rank_is_solved_with_its_small_negative_values_as_they_are():
    A = torch.tensor(np.random.default_rng(25).standard_normal((256, 7)).astype(np.float32))
    K = A @ A.T
    basis, outcome = eigenbasis(K)
    assert outcome == Outcome.SOLVED
    assert int((basis.values < 0).sum()) > 50
    assert float(basis.values.min()) > -1e-3 * float(basis.values.max())
    assert float((basis.Q.mT @ basis.Q - torch.eye(256)).abs().max()) < 1e-5
    assert deviation(K, basis)[1] < 1e-5


# --- notices bad results ----------------------------------------------------------------------------------------------


@every_failure
def test_s25_a_bad_result_in_float32_is_noticed_and_solved_once_in_float64(monkeypatch, spoil):
    K, _ = planted([5.0, 3.0, 2.0, 0.5], dtype=torch.float32)
    expected = eigenbasis(K.double()).basis
    solver = Solver(spoil)
    monkeypatch.setattr(torch.linalg, "eigh", solver)
    (values, Q), outcome = eigenbasis(K)
    assert outcome == Outcome.RETRIED
    assert solver.calls == [(torch.float32, 1), (torch.float64, 1)]
    assert torch.equal(values, expected.values.float())
    assert torch.equal(Q, expected.Q.float())


@every_failure
@every_dtype
def test_s25_without_any_good_result_the_previous_basis_stays_and_says_so(monkeypatch, spoil, dtype):
    K, _ = planted([5.0, 3.0, 2.0, 0.5], dtype=dtype)
    previous = torch.tensor(orthonormal(4, 4, 5), dtype=dtype)
    solver = Solver(spoil, (torch.float32, torch.float64))
    monkeypatch.setattr(torch.linalg, "eigh", solver)
    (values, Q), outcome = eigenbasis(K, previous)
    assert outcome == Outcome.KEPT
    assert [d for d, _ in solver.calls] == [dtype, torch.float64][: 1 if dtype == torch.float64 else 2]
    assert torch.equal(Q, previous)
    torch.testing.assert_close(values, torch.diag(previous.T @ K @ previous), rtol=0, atol=BOTH * 20 * ROUNDOFF[dtype])
    assert torch.equal(eigenbasis(K).basis.Q, torch.eye(4, dtype=dtype))  # the identity, where there was none


@every_failure
def test_a_bad_result_in_a_batch_leaves_the_others_alone(monkeypatch, spoil):
    K = torch.stack([planted([5.0, 3.0, 2.0, 0.5], seed, torch.float32)[0] for seed in range(5)])
    alone = [eigenbasis(A).basis for A in K]
    victim = K[3] * track.power_of_two(track.largest(K[3]), 126).float()

    def spoil_one(A, values, Q):
        at = [i for i in range(len(A)) if torch.allclose(A[i], victim)]
        if at and spoil in (raises, library_raises):
            spoil(A, values, Q)
        for i in at:
            values[i], Q[i] = spoil(A[i], values[i], Q[i])
        return values, Q

    monkeypatch.setattr(torch.linalg, "eigh", Solver(spoil_one))
    (values, Q), outcome = eigenbasis(K.reshape(5, 1, 4, 4))
    assert outcome.flatten().tolist() == [0, 0, 0, Outcome.RETRIED, 0]
    for i in (0, 1, 2, 4):
        assert torch.equal(values[i, 0], alone[i].values)
        assert torch.equal(Q[i, 0], alone[i].Q)
    assert max(deviation(K[3], track.Eigenbasis(values[3, 0], Q[3, 0]))) < BOTH * 4 * U32


@every_dtype
@pytest.mark.parametrize("n", [4, 16, 64])
@pytest.mark.parametrize(("share", "noticed"), [(0.5, False), (2.0, True)])
def test_planted_errors_are_noticed_from_the_tolerance_on(monkeypatch, n, dtype, share, noticed):
    """One column too long, and a turn of the last two: half the tolerance passes and twice does not."""
    K, _ = planted(np.linspace(2, 1, n), dtype=dtype)
    K = K * (math.sqrt(n) / torch.linalg.matrix_norm(K))
    limit = share * tolerance(n, dtype)

    def longer(A, values, Q):
        return values, torch.cat([Q[..., :-1], Q[..., -1:] * (1 + limit / 2)], -1)

    def turned(A, values, Q):
        first, last = Q[..., :1], Q[..., -1:]
        angle = limit * float(torch.linalg.matrix_norm(A).max()) / (math.sqrt(2) * float(values[0, -1] - values[0, 0]))
        return values, torch.cat([first + angle * last, Q[..., 1:-1], last - angle * first], -1)

    for spoil in (longer, turned):
        monkeypatch.undo()
        monkeypatch.setattr(torch.linalg, "eigh", Solver(spoil, (dtype,)))
        bad = Outcome.RETRIED if dtype == torch.float32 else Outcome.KEPT
        assert eigenbasis(K).outcome == (bad if noticed else Outcome.SOLVED), spoil


@pytest.mark.parametrize("kind", ["full", "rank 1", "graded"])
@every_dtype
@pytest.mark.parametrize("n", [1, 2, 5, 32, 96])
def test_honest_results_stay_well_below_the_tolerance(n, dtype, kind):
    for seed in range(3):
        A = torch.tensor(np.random.default_rng(seed).standard_normal((n, 1 if kind == "rank 1" else n)), dtype=dtype)
        K = A @ A.T
        if kind == "graded":
            d = torch.logspace(0, -6, n, dtype=dtype)
            K = d.unsqueeze(-1) * K * d
        found = eigenbasis(K)
        assert found.outcome == Outcome.SOLVED
        assert max(deviation(K, found.basis)) < tolerance(n, dtype) / 2


@pytest.mark.parametrize("spoil", ["raises", "not a number", "stretched", "of another matrix"])
def test_a_bad_decomposition_in_an_iteration_is_noticed(monkeypatch, spoil):
    K, start = planted([5.0, 3.0, 2.0, 0.5], dtype=torch.float32)
    start = torch.tensor(orthonormal(4, 4, 3), dtype=torch.float32)
    expected = orthogonal_iteration(K.double(), start.double(), 2).basis
    true, calls, broken = torch.linalg.qr, [], [torch.float32]

    def qr(A):
        calls.append(A.dtype)
        Q, R = true(A)
        if A.dtype not in broken:
            return Q, R
        if spoil == "raises":
            raise RuntimeError("cusolver error")
        return {
            "not a number": (Q * math.nan, R),
            "stretched": (1.01 * Q, R / 1.01),
            "of another matrix": (torch.eye(4).expand(Q.shape), R),
        }[spoil]

    monkeypatch.setattr(torch.linalg, "qr", qr)
    (values, Q), outcome = orthogonal_iteration(K, start, 2)
    assert outcome == Outcome.RETRIED
    assert calls.count(torch.float64) == 2  # one retry of two steps
    assert torch.equal(Q, expected.Q.float())
    assert torch.equal(values, expected.values.float())
    broken.append(torch.float64)
    (values, Q), outcome = orthogonal_iteration(K, start, 2)
    assert outcome == Outcome.KEPT
    assert torch.equal(Q, start)


def test_running_out_of_memory_is_not_a_bad_result(monkeypatch):
    def full(A, values, Q):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.linalg, "eigh", Solver(full))
    with pytest.raises(torch.OutOfMemoryError):
        eigenbasis(torch.eye(3))


# --- invariances ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.integers(-60, 60))
def test_a_power_of_two_scales_the_values_and_leaves_the_basis_bit_for_bit(seed, exponent):
    K, _ = planted([5.0, 3.0, 2.0, 0.5, -0.1], seed, torch.float32)
    factor = 2.0**exponent
    start = torch.tensor(orthonormal(5, 5, seed + 1), dtype=torch.float32)
    for find in (eigenbasis, lambda A: orthogonal_iteration(A, start, 2)):
        here, there = find(K).basis, find(K * factor).basis
        assert torch.equal(there.Q, here.Q)
        assert torch.equal(there.values, here.values * factor)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e30, 1e37])
def test_extreme_scales_are_solved_and_checked(scale):
    K, _ = planted([5.0, 3.0, 2.0, 0.5], dtype=torch.float32)
    found = eigenbasis(K * scale)
    assert found.outcome == Outcome.SOLVED
    torch.testing.assert_close(found.basis.values / scale, eigenbasis(K).basis.values, rtol=16 * U32, atol=16 * U32)


@every_dtype
def test_a_batch_is_solved_like_its_members_bit_for_bit(dtype):
    """LAPACK is called for each."""
    K = torch.stack([planted([5.0, 3.0, 2.0, 0.5, 0.1], seed, dtype)[0] for seed in range(6)])
    batch, outcome = eigenbasis(K.reshape(2, 3, 5, 5))
    assert outcome.shape == (2, 3)
    for i, A in enumerate(K):
        alone = eigenbasis(A).basis
        assert torch.equal(batch.values.reshape(6, 5)[i], alone.values)
        assert torch.equal(batch.Q.reshape(6, 5, 5)[i], alone.Q)


@every_dtype
def test_an_iteration_in_a_batch_is_that_of_its_members_to_rounding(dtype):
    """Products of a batch are summed in another order than those of one matrix."""
    K = torch.stack([planted([5.0, 3.0, 2.0, 0.5, 0.1], seed, dtype)[0] for seed in range(6)])
    start = torch.stack([torch.tensor(orthonormal(5, 5, seed), dtype=dtype) for seed in range(6)])
    batch = orthogonal_iteration(K, start).basis
    for i in range(6):
        atol = 50 * BOTH * 5 * ROUNDOFF[dtype]  # the condition of K
        torch.testing.assert_close(batch.Q[i], orthogonal_iteration(K[i], start[i]).basis.Q, rtol=0, atol=atol)


def test_the_symmetric_part_counts_and_strides_do_not():
    K, _ = planted([4.0, 2.0, 1.0])
    skew = torch.tensor([[0.0, 1.0, -2.0], [-1.0, 0.0, 0.5], [2.0, -0.5, 0.0]], dtype=torch.float64)
    found = eigenbasis(K + skew).basis
    torch.testing.assert_close(found.values, eigenbasis(K).basis.values, rtol=0, atol=4 * BOTH * 3 * U64)
    strided = torch.zeros(6, 6, dtype=torch.float64)
    strided[::2, ::2] = K
    assert torch.equal(eigenbasis(strided[::2, ::2]).basis.Q, eigenbasis(K).basis.Q)


def test_arguments_are_left_alone():
    K, start = planted([4.0, 2.0, 1.0])
    copies = K.clone(), start.clone()
    eigenbasis(K, start)
    orthogonal_iteration(K, start, 2)
    assert torch.equal(K, copies[0])
    assert torch.equal(start, copies[1])


# --- rates ------------------------------------------------------------------------------------------------------------


def test_an_iteration_decouples_neighbours_by_the_ratio_of_their_values():
    K, Q = planted([8.0, 4.0, 1.0, 0.25])
    ratio = 1 / 2  # the slowest pair
    P = torch.tensor(orthonormal(4, 4, 11))
    left = []
    for _ in range(40):
        P = orthogonal_iteration(K, P).basis.Q
        left.append(float(torch.linalg.matrix_norm((Q.mT @ P).abs() - torch.eye(4))))
    near = [(t, math.log2(e)) for t, e in enumerate(left) if 1e-10 < e < 1e-3]
    slope = np.polyfit(*zip(*near, strict=True), 1)[0]
    assert len(near) > 10
    assert slope == pytest.approx(math.log2(ratio), abs=0.02)


def test_products_in_tf32_put_its_roundoff_into_rayleigh_quotients():
    """Small values of a graded matrix lose their sign and size, those at the top do not."""
    K, Q = planted([2.5e6, 1e4, 4.0, 0.1], seed=3, dtype=torch.float32)
    exact, coarse = (track.rayleigh(K, Q, a) for a in (track.EXACT, Rounded("tf32")))
    noise = bounds.unit_roundoff("tf32") * 2.5e6
    assert float((exact - coarse).abs().max()) < 4 * noise
    assert float((exact - coarse).abs().max()) > noise / 64
    assert float((coarse[0] / exact[0] - 1).abs()) < 4 * bounds.unit_roundoff("tf32")


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: eigenbasis(torch.ones(3)), r"eigenbasis: K has shape \(3,\)"),
        (lambda: eigenbasis(torch.ones(2, 3)), r"K has shape \(2, 3\)"),
        (lambda: eigenbasis(torch.eye(2, dtype=torch.bfloat16)), "dtype torch.bfloat16, needed .* float32 or float64"),
        (lambda: eigenbasis(torch.full((2, 2), math.nan)), "4 of the 4 entries of K are not finite"),
        (lambda: eigenbasis(torch.tensor([[1.0, math.inf], [0.0, 1.0]])), "1 of the 4 entries of K are not finite"),
        (lambda: eigenbasis(torch.eye(2), torch.eye(3)), r"previous basis has shape \(3, 3\)"),
        (lambda: eigenbasis(torch.eye(2), torch.eye(2).double()), "dtype torch.float64, needed those of K"),
        (lambda: orthogonal_iteration(torch.eye(2), torch.eye(2), steps=0), "steps is 0"),
        (lambda: orthogonal_iteration(torch.eye(2) * math.nan, torch.eye(2)), "orthogonal_iteration: 4 of the 4"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
