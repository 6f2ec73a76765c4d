"""A planted error has the size it was planted with, and touches nothing else."""

import numpy as np
import pytest
import torch

from muon_lab import polar
from muon_lab.measure.polar import errors
from muon_lab.oracle.polar import polar as decomposed
from muon_lab.studies import convergence
from muon_lab.studies.disturbed import MULTIPLIERS, Disturbed

SHAPES = ((8, 12), (12, 8), (7, 7), (5, 9), (2, 6))


def candidates(m, n, count=3):
    return torch.tensor(np.random.default_rng(m + 100 * n).standard_normal((count, m, n)), dtype=torch.float64)


def roundoff(m, n):
    """A few products and decompositions of that size in float64, each n roundoffs."""
    return 100 * max(m, n) * 2.0**-53


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("kind", MULTIPLIERS)
def test_the_polar_error_is_what_was_planted(kind, size, shape):
    C = candidates(*shape)
    X = Disturbed(polar.svd(), kind, size, seed=1)(C)
    for one, other in zip(C, X, strict=True):
        assert errors(other, decomposed(one.numpy())).relative == pytest.approx(size, abs=roundoff(*shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_turn_keeps_orthogonality_and_size_and_the_control_does_not(shape):
    C, exact = candidates(*shape), roundoff(*shape)
    for kind, kept in (("turn", True), ("radial", False), ("scale", False)):
        for one, other in zip(C, Disturbed(polar.svd(), kind, 0.5, seed=2)(C), strict=True):
            found = errors(other, decomposed(one.numpy()))
            assert (found.orthogonality < exact) is kept
            assert (abs(found.fro_ratio - 1) < exact) is kept
            if kind == "turn":
                assert found.cosine == pytest.approx(1 - 0.5**2 / 2, abs=exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_radial_error_keeps_singular_vectors_and_the_mean_singular_value(shape):
    """X Uᵀ shares its eigenvectors with C Uᵀ, which commutation says; half the values go up and half down."""
    C, size = candidates(*shape), 0.25
    U = polar.svd()(C)
    X = Disturbed(polar.svd(), "radial", size, seed=3)(C)
    if shape[0] <= shape[1]:
        left, right = X @ U.mT, C @ U.mT
    else:
        left, right = U.mT @ X, U.mT @ C
    assert ((left @ right - right @ left).norm(dim=(-2, -1)) < roundoff(*shape) * C.norm(dim=(-2, -1))).all()
    k = min(shape)
    values = torch.linalg.svdvals(X)
    assert values.mean(dim=-1) == pytest.approx(np.ones(3), abs=roundoff(*shape))
    moved = size * (k / (2 * (k // 2))) ** 0.5
    expected = [*[1 + moved] * (k // 2), *[1.0] * (k % 2), *[1 - moved] * (k // 2)]
    np.testing.assert_allclose(values, [expected] * 3, atol=roundoff(*shape), rtol=0)


def test_scaling_by_a_power_of_two_is_exact():
    C = candidates(8, 12).float()
    assert torch.equal(Disturbed(polar.svd(), "scale", 1.0, seed=0)(C), 2 * polar.svd()(C))


@pytest.mark.parametrize("kind", ["radial", "turn"])
def test_fixed_errors_repeat_and_fresh_ones_do_not_and_a_seed_repeats_a_run(kind):
    C = candidates(8, 12)
    fixed, fresh, again, other = (
        Disturbed(polar.svd(), kind, 0.5, seed=seed, fixed=fixed)
        for seed, fixed in ((4, True), (4, False), (4, False), (5, False))
    )
    first = fixed(C)
    assert torch.equal(first, fixed(C))
    one, two = fresh(C), fresh(C)
    assert not torch.equal(one, two)
    assert torch.equal(again(C), one)
    assert torch.equal(again(C), two)
    assert not torch.equal(other(C), one)


def test_no_global_generator_moves():
    before = torch.random.get_rng_state()
    Disturbed(polar.svd(), "turn", 0.5, seed=0)(candidates(4, 4))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kind", MULTIPLIERS)
def test_a_zero_candidate_stays_zero(kind):
    assert not Disturbed(polar.svd(), kind, 0.5, seed=0)(torch.zeros(2, 4, 6)).any()


@pytest.mark.parametrize(("shape", "size"), [((1, 5), 0.5), ((4, 4), 2.01), ((3, 3), 1.7)])
def test_a_rotation_that_does_not_exist_is_refused(shape, size):
    """One row cannot turn; three have one plane, whose half turn is at √(8/3) = 1.63."""
    with pytest.raises(ValueError, match="needed a distance that a rotation can have"):
        Disturbed(polar.svd(), "turn", size, seed=0)(candidates(*shape))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind is 'twist', needed one of radial, turn, scale"):
        Disturbed(polar.svd(), "twist", 0.5, seed=0)


def test_the_study_knows_the_kinds():
    assert set(convergence.PLANTED) == {"none", *MULTIPLIERS}
