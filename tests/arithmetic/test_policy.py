"""Exact arithmetic: safe norms, exact scaling, fused products."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.arithmetic import Arithmetic, Counted, Exact, Rounded, Symmetric, check_arithmetic, policy, unit
from muon_lab.arithmetic.policy import power_of_two


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (1, 1)])
def test_norm_is_frobenius_per_matrix(dtype, shape):
    X = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = np.linalg.norm(X.double().numpy(), axis=(-2, -1), keepdims=True)
    assert Exact().norm(X).dtype == torch.float64
    assert np.allclose(Exact().norm(X).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-20, 1.0, 1e19, 1e30, 3e38])
def test_norm_survives_every_scale_of_float32(scale):
    X = torch.full((4, 4), scale, dtype=torch.float32)
    assert float(Exact().norm(X)) == pytest.approx(4 * float(X[0, 0].double()), rel=1e-6)
    assert torch.allclose(unit(X, Exact().norm(X)), torch.full((4, 4), 0.25))


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e200, 1e300])
def test_norm_survives_every_scale_of_float64(scale):
    X = torch.full((4, 4), scale, dtype=torch.float64)
    assert float(Exact().norm(X)) == pytest.approx(4 * scale, rel=1e-12)
    assert torch.allclose(unit(X, Exact().norm(X)), torch.full((4, 4), 0.25, dtype=torch.float64))


def test_the_norm_of_nothing_is_zero():
    assert Exact().norm(torch.zeros(2, 0, 5)).tolist() == [[[0.0]], [[0.0]]]


@given(st.floats(min_value=1e-37, max_value=1e37))
def test_power_of_two_is_one_and_brings_its_argument_near_one(size):
    scale = power_of_two(torch.tensor([[size]], dtype=torch.float64), 126).item()
    assert np.frexp(scale)[0] == 0.5
    assert 0.5 <= size * scale < 1


def test_zero_stays_zero_and_non_finite_is_seen():
    Z = torch.zeros(2, 3)
    assert torch.equal(unit(Z, Exact().norm(Z)), Z)
    for bad in (torch.inf, -torch.inf, torch.nan):
        X = torch.ones(2, 3)
        X[1, 1] = bad
        assert not torch.isfinite(Exact().norm(X)).any()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_with_fused_addition_are_the_plain_ones(batch):
    generator = torch.Generator().manual_seed(0)
    A, B, C = (torch.randint(-4, 5, (*batch, m, n), generator=generator).double() for m, n in ((4, 4), (4, 6), (4, 6)))
    exact = Exact()
    A = A + A.mT
    assert torch.equal(exact.gram(B), B @ B.mT)
    assert torch.equal(exact.square(A, alpha=2.0, beta=3.0), 2 * A @ A + 3 * A)
    assert torch.equal(exact.matmul(A, B, alpha=2.0, beta=-1.0, C=C), 2 * (A @ B) - C)
    assert torch.equal(exact.matmul(A, B, alpha=2.0), 2 * (A @ B))
    assert torch.equal(exact.matmul(A, B), A @ B)


# --- what an arithmetic is --------------------------------------------------------------------------------------------


class Half:
    """An arithmetic that lacks two methods."""

    norm = store = gram = square = matmul = Exact.gram


def test_methods_are_those_of_the_protocol():
    told = {name for name, value in vars(Arithmetic).items() if callable(value) and not name.startswith("_")}
    assert set(policy.METHODS) == told


@pytest.mark.parametrize("arithmetic", [Exact(), Rounded("bf16"), Symmetric(), Counted()])
def test_an_arithmetic_passes(arithmetic):
    check_arithmetic(arithmetic)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("mxfp8", r"^the policy must be .*, not the text 'mxfp8': did you mean Rounded\('mxfp8'\)\?$"),
        (Exact, r"^the policy must be .*, not the class Exact: did you mean Exact\(\.\.\.\)\?$"),
        (dict, "not the class dict$"),
        (None, "not None$"),
        ([Exact()], "not a list of them$"),
        (Half(), "this Half has no roundoff and no commuting$"),
    ],
)
def test_what_is_no_arithmetic_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_arithmetic(given, "the policy")


def test_nothing_is_wrapped_twice_for_the_compiler():
    assert "@as_written\n@as_written" not in inspect.getsource(policy)
