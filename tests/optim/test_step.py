"""The pieces of a step against the float64 oracle's, in batches, and what they refuse."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.measure import bounds
from muon_lab.optim import step
from muon_lab.oracle.optimizers import step as oracle

U64 = bounds.unit_roundoff("fp64")
shapes = st.tuples(st.integers(1, 5), st.integers(1, 5))
rates = st.floats(0, 1)
fractions = st.floats(0, 0.99)


def matrices(shape, seed, count=2):
    return list(np.random.default_rng(seed).standard_normal((count, *shape)))


def tensors(*arrays):
    return tuple(torch.tensor(A) for A in arrays)


@given(shapes, st.integers(0, 99), rates, rates, st.sampled_from(step.DECAYS))
def test_decay_is_the_oracles(shape, seed, lr, weight_decay, method):
    W, G = matrices(shape, seed)
    found = step.decayed(*tensors(W, G), lr, weight_decay, method)
    for X, expected in zip(found, oracle.decayed(W, G, lr, weight_decay, method), strict=True):
        np.testing.assert_allclose(X.numpy(), expected, rtol=0, atol=4 * U64 * (np.abs(W) + np.abs(G)).max())


@given(shapes, st.integers(0, 99), fractions, st.sampled_from(step.FORMS), st.booleans())
def test_momentum_is_the_oracles(shape, seed, mu, form, nesterov):
    M, G = matrices(shape, seed)
    found = step.momentum(*tensors(M, G), mu, form, nesterov)
    for X, expected in zip(found, oracle.momentum(M, G, mu, form, nesterov), strict=True):
        np.testing.assert_allclose(X.numpy(), expected, rtol=0, atol=8 * U64 * (np.abs(M) + np.abs(G)).max())


@given(shapes, st.integers(0, 99), st.sampled_from(step.SCALES))
def test_scale_is_the_oracles_for_each_matrix_of_a_batch(shape, seed, mode):
    C, D = np.stack(matrices(shape, seed, 3)), np.stack(matrices(shape, seed + 1, 3))
    found = step.scale(mode, *tensors(C, D))
    expected = [oracle.scale(mode, c, d) for c, d in zip(C, D, strict=True)]
    found = found.flatten().tolist() if mode == "nuclear_norm" else [found] * 3
    size = np.abs(C * D).sum(axis=(1, 2)).max() + 1
    np.testing.assert_allclose(found, expected, rtol=4 * U64, atol=bounds.gemm(C[0].size, U64) * size)


def test_the_names_are_the_oracles():
    assert (step.DECAYS, step.FORMS, step.SCALES) == (oracle.DECAYS, oracle.MOMENTA, oracle.SCALES)


@pytest.mark.parametrize("mode", step.SCALES)
def test_an_empty_matrix_has_the_factor_zero(mode):
    assert float(step.scale(mode, torch.zeros(0, 3), torch.zeros(0, 3))) == 0.0


@given(shapes, st.integers(0, 99), fractions, st.booleans())
def test_the_two_forms_differ_by_a_factor_at_every_step(shape, seed, mu, nesterov):
    """The theorem of the module: C of `average` is 1 - mu times C of `sum`."""
    gradients = tensors(*matrices(shape, seed, 4))
    average = total = torch.zeros(shape, dtype=torch.float64)
    size = 0.0
    for G in gradients:
        average, C = step.momentum(average, G, mu, "average", nesterov)
        total, S = step.momentum(total, G, mu, "sum", nesterov)
        size += float(G.abs().max())
        torch.testing.assert_close(C, (1 - mu) * S, rtol=0, atol=16 * U64 * size)


def test_nothing_is_changed_in_place():
    W, G = tensors(*matrices((3, 4), 0))
    before = W.clone(), G.clone()
    for method in step.DECAYS:
        step.decayed(W, G, 0.1, 0.5, method)
    for form in step.FORMS:
        step.momentum(W, G, 0.9, form, True)
    step.moved(W, G, 0.1)
    assert torch.equal(W, before[0])
    assert torch.equal(G, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [0.1, 3e-4, 0.02, 1.0, 0.0])
def test_a_tensor_stands_for_the_decimal_that_was_meant(dtype, value):
    rounded = torch.tensor(value, dtype=dtype)
    found = step.number("lr", rounded)
    assert found == value or dtype == torch.float16
    assert torch.tensor(found, dtype=dtype) == rounded  # nothing is lost
    assert step.number("lr", rounded.reshape(1)) == found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step.check_rate("lr", -0.1), "lr is -0.1, needed a finite number of at least 0"),
        (lambda: step.check_rate("lr", math.nan), "lr is nan"),
        (lambda: step.check_rate("lr", math.inf), "lr is inf"),
        (lambda: step.check_rate("lr", torch.ones(2)), r"lr has shape \(2,\) and dtype torch.float32"),
        (lambda: step.check_rate("lr", torch.tensor(1j)), "needed one real number"),
        (lambda: step.check_rate("lr", "0.1"), "lr is '0.1', needed one real number"),
        (lambda: step.check_rate("lr", True), "lr is True"),
        (lambda: step.check_fraction("momentum", 1.0), r"momentum is 1.0, needed a number in \[0, 1\)"),
        (lambda: step.check_fraction("momentum", -0.1), "momentum is -0.1"),
        (lambda: step.check_positive("eps", 0.0), "eps is 0.0, needed a finite number above 0"),
        (lambda: step.check_name("scale", "spectrall", step.SCALES), "did you mean 'spectral'"),
    ],
)
def test_bad_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
