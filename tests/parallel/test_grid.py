"""Placements and grids: pure data, checked against NumPy, torch.chunk and an obvious numbering."""

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.parallel.grid import Grid, Placement, chunked, even

LENGTHS = [(10, 4), (2, 4), (7, 1), (0, 3), (6, 5), (128, 8)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("length", "tp"), LENGTHS)
def test_chunks_are_those_of_torch(length, tp, dim):
    shape = [5, 5]
    shape[dim] = length
    X = torch.arange(5 * length).reshape(shape)
    placement = chunked(length, tp, dim)
    parts = list(X.chunk(tp, dim)) if length else []
    for rank in range(tp):
        want = parts[rank] if rank < len(parts) else X.narrow(dim, 0, 0)
        assert torch.equal(placement.shard(X, rank), want)
        assert placement.shape(X.shape, rank) == tuple(want.shape)
        assert placement.whole(want.shape, rank) == tuple(X.shape)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([0, 1]))
def test_shards_put_together_are_the_matrix(sizes, dim):
    placement = Placement(dim, tuple(sizes))
    shape = [2, 4, 4]
    shape[1 + dim] = placement.length
    X = np.arange(np.prod(shape)).reshape(shape)
    shards = [placement.shard(X, rank) for rank in range(placement.tp)]
    assert np.array_equal(np.concatenate(shards, axis=placement.axis), X)
    assert all(shard.base is not None for shard in shards)  # views
    assert [placement.part(rank).start for rank in range(placement.tp)] == list(placement.starts)


def test_even_and_chunked_differ_where_lengths_do_not_divide():
    assert even(10, 4, 0).sizes == (3, 3, 2, 2)
    assert chunked(10, 4, 0).sizes == (3, 3, 3, 1)
    assert even(8, 4, 0) == chunked(8, 4, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Placement(2, (1,)), "dim of a placement must be 0 .rows. or 1 .columns., not 2"),
        (lambda: Placement(0, ()), "one non-negative length a rank"),
        (lambda: Placement(0, (1.5, 2)), r"a whole number, not \(1\.5, 2\)"),
        (lambda: even(10.0, 2, 0), r"length of the axis to cut must be a whole number, not 10\.0"),
        (lambda: chunked("10", 2, 0), "length of the axis to cut must be a whole number, not '10'"),
        (lambda: chunked(5, 0, 0), "whole number of at least 1, not 0"),
        (lambda: Placement(0, (3, 4)).check((6, 6)), "add up to 7, but axis 0 of the matrix has 6"),
        (lambda: Placement(0, (3,)).check((3,)), "needs at least 2 axes"),
        (lambda: Placement(0, (3, 3, 1)).whole((3, 6), rank=2), r"holds 1 entries of axis 0, but .* shape \(3, 6\)"),
        (lambda: Grid(dp=0), "dp of a grid must be a whole number of at least 1, not 0"),
        (lambda: Grid(dp=4, ep=3), "ep of a grid must divide dp=4, but is 3"),
        (lambda: Grid(dp=2).rank(dp=2), r"dp of a rank must lie in 0\.\.1, not be 2"),
        (lambda: Grid(dp=2).coordinates(2), r"must lie in 0\.\.1, not be 2"),
        (lambda: Grid().groups("cp"), "one of dp, tp, pp, ep, expert_dp, not 'cp'"),
    ],
)
def test_bad_placements_and_grids_are_refused(call, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        call()


GRIDS = [Grid(), Grid(dp=4), Grid(tp=3), Grid(dp=2, tp=3, pp=2), Grid(dp=8, tp=2, ep=4), Grid(dp=6, pp=2, ep=3)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_are_numbered_as_in_a_mesh(grid):
    mesh = np.arange(grid.size).reshape(grid.pp, grid.dp, grid.tp)
    for pp, dp, tp in np.ndindex(mesh.shape):
        at = grid.coordinates(int(mesh[pp, dp, tp]))
        assert (at.pp, at.dp, at.tp) == (pp, dp, tp)
        assert at.dp == at.ep + grid.ep * at.expert_dp
        assert grid.rank(dp=dp, tp=tp, pp=pp) == mesh[pp, dp, tp]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_are_lines_of_the_mesh_and_partition_the_ranks(grid):
    mesh = np.arange(grid.size).reshape(grid.pp, grid.dp // grid.ep, grid.ep, grid.tp)
    axes = {"tp": (3,), "ep": (2,), "expert_dp": (1,), "dp": (1, 2), "pp": (0,)}
    for name, moving in axes.items():
        length = int(np.prod([mesh.shape[axis] for axis in moving]))
        lines = np.moveaxis(mesh, moving, range(-len(moving), 0)).reshape(-1, length)
        assert sorted(grid.groups(name)) == sorted(tuple(line) for line in lines.tolist())
        for rank in range(grid.size):
            assert rank in grid.group(name, rank)
