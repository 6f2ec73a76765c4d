"""Products of which half is multiplied, against products of which all is."""

import pytest
import torch

from muon_lab.arithmetic import Arithmetic, Counted, Exact, Rounded, Symmetric, Wide

U = 2.0**-53


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def commuting(*batch, m):
    """Return two symmetric matrices that are polynomials in a third, and the third."""
    A = randn(*batch, m, m)
    A = (A + A.mT) / m
    A2 = A @ A
    return A, (A2 + A2.mT) / 2 + A, A


@pytest.mark.parametrize(
    "policy", [Exact(), Symmetric(edge=5), Symmetric(edge=100), Rounded("fp64", accumulator=Wide(torch.float64))]
)
@pytest.mark.parametrize("m", [1, 4, 12, 17])
@pytest.mark.parametrize("batch", [(), (3,), (0,)])
def test_symmetric_results_are_the_products(policy, m, batch):
    X = randn(*batch, m, 20)
    A, B, C = commuting(*batch, m=m)
    before = [Y.clone() for Y in (X, A, B, C)]
    found = {
        "gram": (policy.gram(X), X @ X.mT),
        "square": (policy.square(A, alpha=0.5, beta=-2.0), 0.5 * A @ A - 2.0 * A),
        "scaled": (policy.commuting(A, B, alpha=0.5), 0.5 * A @ B),
        "fused": (policy.commuting(A, B, alpha=0.5, beta=3.0, C=C), 0.5 * A @ B + 3.0 * C),
    }
    for name, (result, expected) in found.items():
        assert torch.allclose(
            result, expected, rtol=0, atol=1000 * U * max(1.0, float(expected.abs().max() if result.numel() else 0))
        ), name
        if isinstance(policy, Rounded) and name in ("scaled", "fused"):  # in half precision asymmetry grows
            assert torch.equal(result, result.mT), name
        if isinstance(policy, Symmetric) and m >= 2 * policy.edge:
            half = m // 2 if m // policy.edge == 2 else m // (m // policy.edge)
            assert torch.equal(result[..., :half, half:], result[..., half:, :half].mT), name
    assert all(torch.equal(Y, old) for Y, old in zip((X, A, B, C), before, strict=True))


def test_the_share_is_that_of_the_blocks():
    assert [Symmetric(edge=256).share(m) for m in (100, 511, 512, 1024)] == [1.0, 1.0, 0.75, 0.625]
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Symmetric(edge=0)


def test_policies_are_arithmetics_and_know_their_roundoff():
    for policy in (Exact(), Symmetric(), Counted(), Rounded("bf16")):
        assert isinstance(policy, Arithmetic)
    assert Exact().roundoff(torch.float32) == 2.0**-24
    assert Symmetric(torch.float16).roundoff(torch.float32) == 2.0**-11
    assert Rounded("mxfp8_e4m3").roundoff(torch.float32) == 2.0**-4
    assert Rounded("fp32", stored="bf16").roundoff(torch.float32) == 2.0**-8
    assert Counted(Rounded("tf32")).roundoff(torch.float32) == 2.0**-11


def test_counting_changes_nothing():
    A, B, C = commuting(m=6)
    counted = Counted()
    assert torch.equal(counted.commuting(A, B, beta=2.0, C=C), Exact().commuting(A, B, beta=2.0, C=C))
    assert torch.equal(counted.gram(A), Exact().gram(A))
    assert torch.equal(counted.square(A), Exact().square(A))
    assert torch.equal(counted.matmul(A, B), Exact().matmul(A, B))
    assert torch.equal(counted.norm(A), Exact().norm(A))
    assert [product.kind for product in counted.products] == ["commuting", "gram", "square", "matmul"]
    assert counted.flops == 4 * 2 * 6**3
