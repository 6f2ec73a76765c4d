"""Moments in eigenbases: special cases, the oracle, what becomes of them under a change of bases, limits."""

import math

import numpy as np
import pytest
import torch
from cases import orthonormal
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.arithmetic import Rounded
from muon_lab.eigen.precondition import (
    Adam,
    Bases,
    Moments,
    back,
    limited,
    permuted,
    project,
    rotated,
    turned,
)
from muon_lab.eigen.track import sorted_columns
from muon_lab.measure import bounds
from muon_lab.oracle.optimizers import AdamW, trajectory

U64 = bounds.unit_roundoff("fp64")
SHAPES = [(4, 4), (3, 5), (5, 3), (1, 4), (1, 1)]
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 99)


def matrix(m, n, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal((m, n)))


def bases(m, n, seed=0):
    return Bases(torch.tensor(orthonormal(m, m, seed)), torch.tensor(orthonormal(n, n, seed + 1)))


def identity(m, n):
    return Bases(torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64))


def close(a, b, shape, size=1.0):
    torch.testing.assert_close(a, b, rtol=0, atol=bounds.svd(*shape, 16 * U64) * float(size))


def labels(shape, seed):
    """Return orders and signs of rows and columns."""
    generator = np.random.default_rng(seed)
    orders = [torch.tensor(generator.permutation(k)) for k in shape]
    signs = [torch.tensor(generator.choice([-1.0, 1.0], k)) for k in shape]
    return orders, signs


# --- reduces to -------------------------------------------------------------------------------------------------------


@given(shapes, seeds)
def test_projecting_and_back_is_the_identity(shape, seed):
    G, Q = matrix(*shape, seed), bases(*shape, seed)
    close(back(project(G, Q), Q), G, shape, G.norm())
    close(project(back(G, Q), Q), G, shape, G.norm())


@given(shapes, seeds)
def test_bases_that_stay_leave_the_second_moment_alone_and_turn_nothing(shape, seed):
    X, Q = matrix(*shape, seed), bases(*shape, seed)
    close(rotated(X.square(), Q, Q), X.square(), shape, X.square().sum())
    close(turned(X, Q, Q), X, shape, X.norm())


def test_the_step_of_one_gradient_without_memory_is_a_sign():
    G = matrix(3, 4)
    for nesterov in (False, True):
        adam = Adam((0.0, 0.0), eps=1e-300, nesterov=nesterov)
        U = adam.quotient(adam.averaged(Moments(torch.zeros_like(G), torch.zeros_like(G)), G), G, t=1)
        torch.testing.assert_close(U, G.sign(), rtol=4 * U64, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_empty_moments_stay_empty(shape):
    X, Q = torch.zeros(shape, dtype=torch.float64), identity(*shape)
    for found in (project(X, Q), back(X, Q), turned(X, Q, Q), rotated(X, Q, Q), limited(X, 1.0)):
        assert found.shape == shape


# --- matches the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("correct_bias", [False, True])
def test_adam_is_that_of_the_oracle_bit_for_bit(nesterov, correct_bias):
    generator = np.random.default_rng(0)
    gradients = list(generator.standard_normal((8, 3, 4)))
    rule = AdamW(1.0, (0.9, 0.95), 1e-3, nesterov=nesterov, correct_bias=correct_bias)
    adam = Adam(rule.betas, rule.eps, nesterov, correct_bias)
    W = torch.zeros(3, 4, dtype=torch.float64)
    moments = Moments(W, W)
    for t, (G, state) in enumerate(zip(gradients, trajectory(rule, W.numpy(), gradients), strict=True), 1):
        moments = adam.averaged(moments, torch.tensor(G))
        W = W - adam.quotient(moments, torch.tensor(G), t)
        assert np.array_equal(moments.V.numpy(), state.V)
        assert np.array_equal(W.numpy(), state.W)


# --- invariances ------------------------------------------------------------------------------------------------------


@given(shapes, seeds)
def test_the_first_moment_is_one_matrix_in_any_bases(shape, seed):
    M, old, new = matrix(*shape, seed), bases(*shape, seed), bases(*shape, seed + 50)
    close(back(turned(M, old, new), new), back(M, old), shape, 4 * M.norm())


@given(shapes, seeds)
def test_the_second_moment_follows_new_labels_exactly(shape, seed):
    V, old = matrix(*shape, seed).square(), bases(*shape, seed)
    orders, signs = labels(shape, seed)
    new = Bases(*(sorted_columns(Q, order) * s for Q, order, s in zip(old, orders, signs, strict=True)))
    expected = V[orders[0]][:, orders[1]]
    assert torch.equal(permuted(V, *orders), expected)
    close(rotated(V, old, new), expected, shape, V.sum())


@given(shapes, seeds)
def test_rotated_second_moments_are_the_variances_of_uncorrelated_entries(shape, seed):
    """The diagonal of (S x T)^T diag(V) (S x T), the covariance written out."""
    V, old, new = matrix(*shape, seed).square(), bases(*shape, seed), bases(*shape, seed + 50)
    S, T = (before.mT @ after for before, after in zip(old, new, strict=True))
    whole = torch.kron(S, T)
    expected = (whole.mT @ torch.diag(V.flatten()) @ whole).diagonal().reshape(shape)
    found = rotated(V, old, new)
    close(found, expected, shape, 4 * V.sum())
    assert (found >= 0).all()
    assert float(found.sum()) == pytest.approx(float(V.sum()), rel=bounds.svd(*shape, 16 * U64))


@given(shapes, seeds)
def test_s24_a_relabelled_basis_takes_the_same_step_if_its_moments_are_relabelled_too(shape, seed):
    adam, G, Q = Adam((0.9, 0.95), 1e-3), matrix(*shape, seed), bases(*shape, seed)
    moments = Moments(matrix(*shape, seed + 1), matrix(*shape, seed + 2).square())
    orders, signs = labels(shape, seed)
    relabelled = Bases(*(sorted_columns(P, order) * s for P, order, s in zip(Q, orders, signs, strict=True)))
    outer = signs[0].unsqueeze(1) * signs[1]

    def step(moments, Q):
        projected = project(G, Q)
        return back(adam.quotient(adam.averaged(moments, projected), projected, t=5), Q)

    there = step(moments, Q)
    carried = Moments(permuted(moments.M, *orders) * outer, permuted(moments.V, *orders))
    close(step(carried, relabelled), there, shape, 1e3 * there.norm())  # over eps
    moved = any((order != torch.arange(len(order))).any() for order in orders)
    wrong = float((step(carried._replace(V=moments.V), relabelled) - there).norm() / there.norm())
    assert wrong > 1e-3 if moved else wrong < 1e3 * bounds.svd(*shape, 16 * U64)


def test_s24_the_reported_defect_in_numbers():
    """Columns sorted and second moments not: steps of 0.1 and 10 in place of 1 and 1."""
    G, V = torch.tensor([[1.0], [10.0]]).double(), torch.tensor([[1.0], [100.0]]).double()
    swap = torch.tensor([1, 0])
    Q = identity(2, 1)
    swapped = Q._replace(Q_L=sorted_columns(Q.Q_L, swap))
    rows, columns = swap, torch.tensor([0])

    def step(Q, V):
        return back(project(G, Q) / V.sqrt(), Q).flatten().tolist()

    assert step(Q, V) == step(swapped, permuted(V, rows, columns)) == [1.0, 1.0]
    assert step(swapped, V) == [0.1, 10.0]


@pytest.mark.parametrize("limit", [0.1, 1.0, 1e3])
def test_the_limit_holds_for_each_matrix_of_a_batch_alone(limit):
    U = torch.stack([matrix(3, 4), 100 * matrix(3, 4, 1), torch.zeros(3, 4, dtype=torch.float64)])
    for before, after in zip(U, limited(U, limit), strict=True):
        rms = math.sqrt(before.square().mean())
        torch.testing.assert_close(after, before * min(1.0, limit / (rms + 1e-7)), rtol=8 * U64, atol=0)
        assert math.sqrt(after.square().mean()) < limit


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_projected_like_its_members_to_rounding(shape):
    G = torch.stack([matrix(*shape, seed) for seed in range(3)])
    Q = [bases(*shape, seed) for seed in range(3)]
    stacked = Bases(*(torch.stack(list(sides)) for sides in zip(*Q, strict=True)))
    for i in range(3):
        close(project(G, stacked)[i], project(G[i], Q[i]), shape, G[i].norm())
        close(rotated(G.square(), stacked, stacked)[i], G[i].square(), shape, G[i].square().sum())


def test_projections_may_be_in_another_arithmetic():
    G, Q = matrix(8, 8).float(), Bases(*(P.float() for P in bases(8, 8)))
    error = float((project(G, Q, Rounded("tf32")) - project(G, Q)).norm() / G.norm())
    u = bounds.unit_roundoff("tf32")
    assert u / 16 < error < 8 * u
