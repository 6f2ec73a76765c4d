"""Many matrices at once are what they are one by one."""

import pytest
import torch
from cases import SHAPES

from muon_lab import polar
from muon_lab.polar import batches, schedules

U32 = 2.0**-24
QUINTIC = schedules.get("quintic")


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


class Recorded:
    """An orthogonalizer that remembers what it was called for."""

    def __init__(self):
        self.asked, self.called = [], []

    def choose(self, shape):
        self.asked.append(tuple(shape))

        def orthogonalize(G):
            self.called.append(tuple(G.shape))
            return polar.newton_schulz(QUINTIC)(G)

        return orthogonalize


@pytest.mark.parametrize("choose", [lambda shape: polar.auto(shape, 5), lambda shape: polar.qdwh()])
def test_batches_are_what_they_are_one_by_one(choose):
    """To rounding: the products of a batch sum in another order, and 500 is the slope that rounding meets."""
    matrices = drawn(*SHAPES, *reversed(SHAPES), *SHAPES)
    found = polar.together(choose, matrices)
    assert [X.shape for X in found] == [G.shape for G in matrices]
    for X, G in zip(found, matrices, strict=True):
        alone = choose(tuple(G.shape))(G)
        assert X.dtype == G.dtype
        assert float((X - alone).norm() / alone.norm()) < 500 * U32


def test_alone_the_bits_are_the_same():
    matrices = drawn(*SHAPES, *SHAPES)
    for X, G in zip(polar.together(lambda shape: polar.auto(shape, 5), matrices, alone=0), matrices, strict=True):
        assert torch.equal(X, polar.auto(G.shape, 5)(G))


def test_every_result_is_in_the_place_of_its_matrix():
    """Multiples of one direction have one factor: signs tell them apart."""
    signs = [1.0, -1.0, -1.0, 1.0, -1.0]
    matrices = [sign * size * torch.eye(2, 3) for size, sign in enumerate(signs, start=1)]
    matrices.insert(2, torch.eye(3, 2))
    found = polar.together(lambda shape: polar.svd(), matrices)
    assert torch.equal(found.pop(2), torch.eye(3, 2))
    assert [float(X[0, 0]) for X in found] == signs


def test_mixed_dtypes_stay_apart_and_mixed_scales_too():
    (single,), (double,), (half,) = (drawn((4, 6), dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16))
    recorded = Recorded()
    found = polar.together(recorded.choose, [single, double, half, 1e20 * single, torch.zeros(4, 6)])
    assert [X.dtype for X in found] == [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float32]
    assert sorted(recorded.called) == [(3, 4, 6), (4, 6), (4, 6)]
    assert torch.equal(found[4], torch.zeros(4, 6))
    assert float((found[3] - found[0]).norm() / found[0].norm()) < 500 * U32  # 1e20 is no power of two


def test_nothing_gives_nothing():
    assert polar.together(lambda shape: polar.svd(), []) == []
    (found,) = polar.together(lambda shape: polar.auto(shape, 5), [torch.zeros(0, 3)])
    assert found.shape == (0, 3)


def test_batches_hold_so_many_entries_and_large_matrices_go_alone():
    recorded = Recorded()
    polar.together(recorded.choose, drawn(*[(2, 4)] * 7, *[(4, 8)] * 2), alone=8, entries=24)
    assert recorded.asked == [(2, 4), (4, 8)]
    assert recorded.called == [(3, 2, 4), (3, 2, 4), (2, 4), (4, 8), (4, 8)]
    large = Recorded()
    polar.together(large.choose, drawn(*[(1, batches.ALONE)] * 2, *[(1, batches.ALONE + 1)] * 2))
    assert large.called == [(2, 1, batches.ALONE), (1, batches.ALONE + 1), (1, batches.ALONE + 1)]


def test_batches_of_batches():
    matrices = drawn((2, 3, 4), (3, 4), (2, 3, 4))
    found = polar.together(lambda shape: polar.newton_schulz(QUINTIC), matrices)
    for X, G in zip(found, matrices, strict=True):
        assert X.shape == G.shape
        assert float((X - polar.newton_schulz(QUINTIC)(G)).abs().max()) < 500 * U32


def test_the_input_stays():
    matrices = drawn((3, 4), (3, 4), (5, 2))
    before = [G.clone() for G in matrices]
    for X in polar.together(lambda shape: polar.auto(shape, 5), matrices):
        X.fill_(7.0)
    assert all(torch.equal(G, old) for G, old in zip(matrices, before, strict=True))


BAD = {
    "no matrix": (torch.ones(3), "matrix 1 (of 4, counted from 0): the matrix to orthogonalize needs at least 2 axes"),
    "whole numbers": (torch.ones(2, 3, dtype=torch.int64), "matrix 1 (of 4, counted from 0): the matrix to orthogonal"),
    "not finite, in a batch": (torch.full((2, 3), torch.inf), "must be finite, but 6 of its 6 entries are not"),
    "not finite, alone": (torch.tensor([[1.0, torch.nan]]), "must be finite, but 1 of its 2 entries are not"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("choose", [lambda shape: polar.auto(shape, 5), lambda shape: polar.svd()])
def test_a_bad_matrix_is_named(name, choose):
    bad, sentence = BAD[name]
    with pytest.raises(ValueError) as caught:
        polar.together(choose, [torch.ones(2, 3), bad, torch.ones(2, 3), torch.eye(2, 3)])
    assert str(caught.value).startswith("matrix 1 (of 4, counted from 0): ")
    assert sentence in str(caught.value)


def test_an_error_of_all_of_them_names_none():
    def refuse(G):
        raise ValueError("not today")

    with pytest.raises(ValueError, match=r"\Anot today\Z"):
        polar.together(lambda shape: refuse, [torch.ones(2, 3)] * 2)
