"""Random-matrix theory against other quadratures, against exact identities, and against matrices that were drawn."""

import math

import numpy as np
import pytest
from cases import polar_factor
from mpmath import mp

from muon_lab.oracle import marchenko_pastur

#: Square, rows cut: as published by those who drew matrices, and the limit of single rows.
SQUARE = {2: 0.469, 4: 0.516, 8: 0.534}


def even(length, parts):
    return [length // parts + (part < length % parts) for part in range(parts)]


def drawn(rows, cols, dim, sizes, seed):
    """Return error, cosine, norm ratio and nuclear ratio of one Gaussian matrix, by SVDs."""
    G = np.random.default_rng(seed).standard_normal((rows, cols))
    shards = np.split(G, np.cumsum(sizes)[:-1], axis=dim)
    B, U = np.concatenate([polar_factor(shard) for shard in shards], axis=dim), polar_factor(G)
    nuclear = sum(np.linalg.norm(shard, "nuc") for shard in shards if shard.size) / np.linalg.norm(G, "nuc")
    size, whole = np.linalg.norm(B), np.linalg.norm(U)
    return np.linalg.norm(B - U) / whole, np.vdot(B, U) / size / whole, size / whole, nuclear


# --- what is known ----------------------------------------------------------------------------------------------------


def test_square_matrices_have_the_published_constants_and_their_limit():
    for tp, error in SQUARE.items():
        for dim in (0, 1):
            found = marchenko_pastur.blockwise(256, 256, dim, even(256, tp))
            assert round(found.relative, 3) == error
    errors = [marchenko_pastur.blockwise(2**k, 2**k, 0, [1] * 2**k).relative for k in (8, 10, 12)]
    limit = math.sqrt(2 - 16 / (3 * math.pi))
    gaps = [limit - error for error in errors]
    assert [near / far for near, far in zip(gaps[1:], gaps[:-1], strict=True)] == pytest.approx([0.25] * 2, rel=0.02)
    assert gaps[-1] < 1e-3  # and 1/T is how it is reached


def test_one_block_is_the_whole():
    for shape in ((8, 8), (8, 24), (24, 8)):
        for dim in (0, 1):
            found = marchenko_pastur.blockwise(*shape, dim, [0, shape[dim], 0])
            assert found == (0.0, 1.0, 1.0, 1.0)
    for ratio in (0.1, 0.5, 1.0, 3.0):  # the quadrature itself: √x / (x + t) integrates to 1, or to λ below 1
        assert marchenko_pastur.alignment(ratio, ratio) == pytest.approx(min(1, ratio), rel=1e-12)


def test_wide_blocks_of_a_long_axis_are_too_large_by_exactly_root_tp():
    """B Bᵀ = T for any matrix of full rank: here of one that is far from Gaussian."""
    G = np.random.default_rng(0).standard_normal((6, 48)) * np.geomspace(1, 1e-3, 6)[:, None]
    for tp in (1, 2, 4, 8):
        found = marchenko_pastur.blockwise(6, 48, 1, even(48, tp))
        assert found.fro_ratio == math.sqrt(tp)
        assert found.correction == 1 / math.sqrt(tp)
        B = np.concatenate([polar_factor(shard) for shard in np.split(G, tp, axis=1)], axis=1)
        assert np.allclose(B @ B.T, tp * np.eye(6), rtol=0, atol=1e-11)
    nine = marchenko_pastur.blockwise(6, 48, 1, even(48, 16))  # 3 columns each: tall
    assert nine.fro_ratio == math.sqrt(16 * 3 / 6)


def test_transposing_changes_nothing():
    for sizes in ([10, 6], [4, 4, 4, 4], [13, 1, 2]):
        assert marchenko_pastur.blockwise(16, 40, 0, sizes) == marchenko_pastur.blockwise(40, 16, 1, sizes)


# --- another quadrature -----------------------------------------------------------------------------------------------


def density(ratio):
    """Return the law as it is usually written, against x, and where it lives."""
    low, high = (1 - mp.sqrt(ratio)) ** 2, (1 + mp.sqrt(ratio)) ** 2
    return lambda x: mp.sqrt((high - x) * (x - low)) / (2 * mp.pi * x), low, high


@pytest.mark.parametrize("ratio", [0.25, 1.0, 2.0])
def test_half_moments_agree_with_mpmath(ratio):
    with mp.workdps(20):
        law, low, high = density(mp.mpf(ratio))
        expected = mp.quad(lambda x: mp.sqrt(x) * law(x), [low, (low + high) / 2, high])
    assert marchenko_pastur.half_moment(ratio) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(("block", "ratio"), [(0.5, 1.0), (0.125, 0.5), (1.0, 2.0), (0.25, 4.0)])
def test_alignments_agree_with_mpmath(block, ratio):
    """With h from its definition, the mean of 1/(x + t) by the law of the whole, and both laws against x."""
    with mp.workdps(15):
        (law, low, high), (whole, start, end) = density(mp.mpf(block)), density(mp.mpf(ratio))

        def resolvent(t):
            h = mp.quad(lambda x: whole(x) / (x + t), [start, end], maxdegree=5) + max(0, 1 - ratio) / t
            w = t + (ratio - mp.mpf(block)) / (1 + h)
            return mp.quad(lambda x: mp.sqrt(x) * law(x) / (x + w), [low, high], maxdegree=5)

        expected = mp.quad(lambda v: 2 * resolvent(v * v), [0, 1, mp.inf], maxdegree=4) / mp.pi
    assert marchenko_pastur.alignment(block, ratio) == pytest.approx(float(expected), rel=1e-6)


# --- matrices that were drawn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "cols", "dim", "sizes"),
    [
        (192, 192, 0, even(192, 2)),
        (192, 192, 1, even(192, 8)),
        (96, 192, 0, even(96, 4)),
        (96, 192, 1, even(192, 4)),
        (64, 256, 1, even(256, 8)),
        (192, 96, 0, [96, 64, 32, 0]),  # uneven, wide, square and tall blocks
    ],
)
def test_gaussian_matrices_are_as_expected(rows, cols, dim, sizes):
    """Within four standard errors of the mean of five draws, and what a finite size adds: the order of its inverse."""
    draws = np.array([drawn(rows, cols, dim, sizes, seed) for seed in range(5)])
    expected = np.array(marchenko_pastur.blockwise(rows, cols, dim, sizes))
    allowed = 4 * draws.std(axis=0, ddof=1) / math.sqrt(len(draws)) + 1 / min(rows, cols)
    assert (np.abs(draws.mean(axis=0) - expected) <= allowed).all(), (draws.mean(axis=0), expected, allowed)
    another = 4 if len(sizes) == 2 else 2
    other = np.array(marchenko_pastur.blockwise(rows, cols, dim, even((rows, cols)[dim], another)))
    assert (np.abs(draws.mean(axis=0) - other) > allowed)[:2].all()  # another number of blocks would be seen


def test_gradients_are_no_gaussian_matrices():
    """A matrix whose shards share their leading directions is far off: the theory is no bound."""
    rng = np.random.default_rng(0)
    G = 10 * np.outer(rng.standard_normal(64), rng.standard_normal(64)) + rng.standard_normal((64, 64))
    for tp in (2, 8):
        B = np.concatenate([polar_factor(shard) for shard in np.split(G, tp)])
        assert np.linalg.norm(B, 2) > 0.99 * math.sqrt(tp)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4, 2, [4]), "dim 0 or 1, not 4×4 and 2"),
        ((0, 4, 0, []), "a shape with entries"),
        ((4, 6, 1, [4]), r"add up to the 6 entries of axis 1, not \(4,\)"),
        ((4, 6, 0, [5, -1]), r"add up to the 4 entries of axis 0, not \(5, -1\)"),
    ],
)
def test_what_is_no_cut_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        marchenko_pastur.blockwise(*arguments)
