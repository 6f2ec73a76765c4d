"""Blockwise orthogonalization: its exact formulas, its limits, its refusals."""

import math

import numpy as np
import pytest
import torch
from cases import distance, polar_factor, with_singular_values

from muon_lab import polar
from muon_lab.parallel import grid, layouts


def blockwise(G, **kwargs):
    return layouts.blockwise(polar.svd(), **kwargs)(torch.as_tensor(G)).numpy()


@pytest.mark.parametrize("dim", [0, 1])
def test_one_rank_is_the_whole_matrix_bit_for_bit(dim):
    G = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    orthogonalize = polar.newton_schulz(polar.schedules.get("simple"))
    assert torch.equal(layouts.blockwise(orthogonalize, dim=dim, tp=1)(G), orthogonalize(G))


@pytest.mark.parametrize(("t", "expected"), [(1.0, 0.4142), (10.0, 0.9005), (1000.0, 0.9990)])
def test_stacked_identities_have_the_closed_form(t, expected):
    G = np.vstack([np.eye(3), t * np.eye(3)])
    full = G / math.sqrt(1 + t * t)
    exact = math.sqrt((1 - 1 / math.sqrt(1 + t * t)) ** 2 + (1 - t / math.sqrt(1 + t * t)) ** 2)
    B = blockwise(G, dim=0, tp=2)
    assert distance(B, full) == pytest.approx(exact, abs=1e-9)
    assert exact == pytest.approx(expected, abs=5e-5)
    assert np.linalg.norm(B, 2) == pytest.approx(math.sqrt(2), abs=1e-12)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 7, 8, 16, 20])
def test_spectral_and_frobenius_norms_are_bounded_exactly(tp, dim):
    G = with_singular_values(16, 9, np.geomspace(1, 0.01, 9), seed=11)
    B = blockwise(G, dim=dim, tp=tp)
    shards = np.array_split(G, tp, axis=dim)
    assert B.shape == G.shape
    assert np.linalg.norm(B, 2) <= math.sqrt(tp) + 1e-12
    assert np.linalg.norm(B) ** 2 == pytest.approx(sum(min(s.shape) for s in shards), abs=1e-9)
    reference = np.concatenate([polar_factor(s) if s.size else s for s in shards], axis=dim)
    assert np.abs(B - reference).max() < 1e-9


def test_orthogonal_blocks_have_no_error():
    """Blocks whose row spaces are orthogonal to each other do not need each other."""
    G = np.zeros((6, 8))
    G[:3, :4] = np.random.default_rng(0).standard_normal((3, 4))
    G[3:, 4:] = np.random.default_rng(1).standard_normal((3, 4))
    assert distance(blockwise(G, dim=0, tp=2), polar_factor(G)) < 1e-12


def test_uneven_and_empty_shards_are_cut_where_asked():
    G = np.random.default_rng(3).standard_normal((6, 10))
    B = blockwise(G, dim=1, sizes=(7, 0, 3))
    assert np.abs(B[:, :7] - polar_factor(G[:, :7])).max() < 1e-12
    assert np.abs(B[:, 7:] - polar_factor(G[:, 7:])).max() < 1e-12


@pytest.mark.parametrize("dim", [0, 1])
def test_leading_axes_are_a_batch(dim):
    G = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    orthogonalize = layouts.blockwise(polar.svd(), dim=dim, tp=2)
    assert torch.allclose(orthogonalize(G)[1, 2], orthogonalize(G[1, 2]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "tp"), [(18, 8), (2, 4), (7, 1), (0, 3), (128, 8)])
def test_even_placements_are_numpys(length, tp):
    assert grid.even(length, tp, 0).sizes == tuple(len(part) for part in np.array_split(np.arange(length), tp))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dim": 2, "tp": 2}, "dim of a placement must be 0 .rows. or 1 .columns., not 2"),
        ({"dim": 0, "tp": 0}, "whole number of at least 1, not 0"),
        ({"dim": 0}, "either tp or sizes"),
        ({"dim": 0, "tp": 2, "sizes": (3, 3)}, "either tp or sizes"),
        ({"dim": 0, "sizes": (3, 4)}, "add up to 7, but axis 0 of the matrix has 6"),
        ({"dim": 0, "sizes": (-1, 7)}, "non-negative"),
    ],
)
def test_bad_cuts_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        blockwise(np.ones((6, 6)), **kwargs)


@pytest.mark.parametrize(("shape", "dim"), [((6, 24), 0), ((6, 24), 1), ((24, 6), 0), ((2, 5, 5), 1)])
def test_the_correction_makes_blocks_as_large_as_the_whole(shape, dim):
    """Exact factors of full rank: ‖B‖² is a sum of short sides."""
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    length = shape[dim - 2]
    for cut in (grid.even(length, 4, dim), grid.Placement(dim, (1, 0, length - 1))):
        B = layouts.blockwise(polar.svd(), dim=dim, sizes=cut.sizes)(G)
        size = torch.linalg.matrix_norm(B) * layouts.correction(shape, cut)
        assert torch.allclose(size, torch.linalg.matrix_norm(polar.svd()(G)), rtol=1e-12, atol=0)
