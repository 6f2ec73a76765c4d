"""The SVD orthogonalizer is the polar factor where it is unique, and decided where it isn't."""

import numpy as np
import pytest
import torch
from cases import SHAPES, distance, polar_factor, with_singular_values

from muon_lab import polar

EPS64 = float(np.finfo(np.float64).eps)


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
