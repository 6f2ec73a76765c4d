"""What is said to be certain of a symmetric matrix is true of it, and what does not hold is not said."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.measure.bounds import unit_roundoff
from muon_lab.measure.enclosures import conjugate_gradients, inverse, inverse_root, norm, positive, spectral
from muon_lab.problems import planted

U64 = unit_roundoff("fp64")


def symmetric(eigenvalues, seed=0):
    """Return a matrix of given eigenvalues."""
    values = np.asarray(eigenvalues, dtype=np.float64)
    Q = planted.haar(len(values), len(values), np.random.default_rng(seed))
    return torch.tensor((Q * values) @ Q.T)


values = st.lists(st.floats(-1, 1), min_size=1, max_size=12).map(np.array)


@given(values, st.integers(0, 99))
def test_the_spectral_norm_is_enclosed_and_the_enclosure_is_as_narrow_as_promised(eigenvalues, seed):
    low, high = spectral(symmetric(eigenvalues, seed))
    largest, m = np.abs(eigenvalues).max(), len(eigenvalues)
    made = 8 * m * U64 * np.linalg.norm(eigenvalues)  # by putting the matrix together
    assert low <= largest + made
    assert largest <= high + made
    assert high <= m ** (1 / 16) * (1 + 1e-9) * (largest + made)
    assert low >= 0.5 * largest - made


def test_the_spectral_norm_of_a_multiple_of_an_orthogonal_matrix_is_its_worst_case():
    low, high = spectral(3 * torch.eye(16, dtype=torch.float64))
    assert float(low) == pytest.approx(3)
    assert float(high) == pytest.approx(3 * 16 ** (1 / 16))


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-150, 1e150])
def test_the_spectral_norm_has_no_unit(scale):
    low, high = spectral(scale * symmetric([1.0, -0.5, 0.2]))
    assert float(low) == pytest.approx(scale, rel=1e-3, abs=0)
    assert float(high) == pytest.approx(scale, rel=1e-3, abs=0)


@given(st.floats(-15, 0), st.integers(2, 12), st.integers(0, 99))
def test_the_smallest_eigenvalue_is_certified_from_below_and_nearly_reached(decades, m, seed):
    A = symmetric(np.geomspace(1, 10**decades, m), seed)
    found, least = inverse(A), float(torch.linalg.eigvalsh(A)[0])
    unsure = 8 * m * U64  # of the eigenvalue just computed, for a norm of one
    assert found.least <= least + unsure
    if found.least > 0:
        assert norm(torch.eye(m) - A @ found.matrix) <= found.residual < 1
        assert found.least >= (1 - found.residual) * m ** (-1 / 16) * (least - unsure) * (1 - 1e-9)
    else:
        assert least < 1e3 * m**2 * U64  # so close to singular that rounding could be all of it


@pytest.mark.parametrize("smallest", [0.0, -1e-17, -1e-9, -1.0])
def test_what_is_not_positive_definite_is_never_certified(smallest):
    A = symmetric([1.0, 0.5, 0.25, smallest])
    assert not positive(A)
    assert inverse(A).least == 0
    assert not inverse(A).matrix.any()


def test_positive_needs_room_for_the_rounding_of_its_own_factorization():
    assert positive(torch.diag(torch.tensor([1.0, 1e-14], dtype=torch.float64)))
    assert not positive(torch.diag(torch.tensor([1.0, 2 * U64], dtype=torch.float64)))


@pytest.mark.parametrize("steps", [None, 12])
def test_the_inverse_root_of_planted_eigenvalues(steps):
    s = np.geomspace(1, 1e-3, 7)
    found = inverse_root(symmetric(s**2, seed=5), torch.tensor(1e-12), steps)
    assert float(norm(found - symmetric(1 / s, seed=5))) < 1e3 * 8 * U64 * 1e3**3  # κ(C) times ‖C^(-1/2)‖, and 1e3
    assert torch.equal(found, found.mT)


def test_each_step_of_the_inverse_root_cubes_the_error():
    C, exact = symmetric([1.2**2, 0.9**2, 1.05**2], seed=1), symmetric([1 / 1.2, 1 / 0.9, 1 / 1.05], seed=1)
    errors = [float(norm(inverse_root(C, torch.tensor(0.0), steps) - exact)) for steps in (1, 2)]
    assert 1e-4 < errors[0] < 1e-2
    assert 0.1 < math.log(errors[1]) / math.log(errors[0]) / 3 < 1.5


def test_directions_below_the_noise_are_left_alone():
    C = symmetric([1.0, 0.25, 1e-18], seed=2)
    assert float(norm(inverse_root(C, torch.tensor(1e-16)) - symmetric([1.0, 2.0, 1.0], seed=2))) < 1e-8  # sqrt(u)


def test_conjugate_gradients_end_at_the_solution():
    m = 5
    M, K = symmetric(np.linspace(1, 3, m)), torch.tensor(np.triu(np.arange(25.0).reshape(m, m), 1))
    K = K - K.mT
    N = M @ K - (M @ K).mT
    off = [float(norm(conjugate_gradients(M, N, steps) - K) / norm(K)) for steps in (1, 4, 14)]
    assert off[0] > off[1] > off[2]
    assert off[2] < 1e3 * U64  # ten unknowns, and some more
    assert torch.equal(conjugate_gradients(M, N, 3), -conjugate_gradients(M, N, 3).mT)
    assert not conjugate_gradients(M, 0 * N, 3).any()


def test_a_batch_is_its_matrices():
    A = torch.stack([symmetric([1.0, 0.5, 0.1]), symmetric([1.0, -0.5, 0.1], 1), torch.zeros(3, 3).double()])
    assert [float(x) > 0 for x in inverse(A).least] == [True, False, False]
    assert positive(A).tolist() == [True, False, False]
    torch.testing.assert_close(spectral(A)[1], torch.stack([spectral(a)[1] for a in A]))
