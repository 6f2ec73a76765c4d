"""Shards on the move: from one cut of a matrix to another, and from all ranks to those that own a matrix."""

from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.grid import Placement


def check(placement: Placement, collectives: Collectives) -> None:
    """Raise ``ValueError`` unless a placement has a part for each rank of the group."""
    if placement.tp != collectives.size:
        raise ValueError(
            f"a placement among {collectives.size} ranks needs {collectives.size} sizes, but has {placement.tp}: "
            f"{placement.sizes}"
        )


def gathered(
    shard: Shaped[Tensor, "*shard"], collectives: Collectives, placement: Placement
) -> Shaped[Tensor, "*whole"]:
    """Return the whole matrix on every rank, contiguous: the parts of all, of whatever sizes.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> rows = Placement(0, (1, 0, 2))
    >>> whole = torch.arange(6).reshape(3, 2)
    >>> worlds.run(lambda world: gathered(rows.shard(whole, world.rank), world, rows).tolist(), ranks=3)[1]
    [[0, 1], [2, 3], [4, 5]]
    """
    rows = shard.movedim(placement.axis, 0)
    if len(set(placement.sizes)) == 1:
        joined = collectives.all_gather(rows).wait().flatten(0, 1)
    else:
        joined = collectives.all_gather_v(rows, placement.sizes).wait()
    return joined.movedim(0, placement.axis).contiguous()


def exchanged(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Sequence[int]]],
    collectives: Collectives,
    dtype: torch.dtype,
) -> list[list[Tensor]]:
    """Send each rank some tensors and return those that come from each, whose shapes are known.

    All of one dtype, in one all_to_all. A rank without tensors takes part.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> def swap(world):
    ...     mine = [torch.full((world.rank + 1,), world.rank)]
    ...     sent, come = ([[], mine], [[], [(2,)]]) if world.rank == 0 else ([mine, []], [[(1,)], []])
    ...     return [[tensor.tolist() for tensor in tensors] for tensors in exchanged(sent, come, world, torch.int64)]
    >>> worlds.run(swap, ranks=2)
    [[[], [[1, 1]]], [[[0]], []]]
    """
    flat = [torch.empty(0, dtype=dtype, device=collectives.device)]
    flat += [tensor.reshape(-1) for tensors in outgoing for tensor in tensors]
    lengths = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    expected = [[torch.Size(shape).numel() for shape in shapes] for shapes in incoming]
    arrived = collectives.all_to_all(torch.cat(flat), lengths, [sum(counts) for counts in expected]).wait()
    pieces = iter(arrived.split([count for counts in expected for count in counts]))
    return [[next(pieces).reshape(tuple(shape)) for shape in shapes] for shapes in incoming]


def recut(
    shard: Shaped[Tensor, "*shard"], collectives: Collectives, placement: Placement, target: Placement
) -> Shaped[Tensor, "*other"]:
    """Return this rank's part of a matrix by a cut along the other axis: one all_to_all.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> rows, columns = Placement(0, (2, 1)), Placement(1, (1, 3))
    >>> whole = torch.arange(12).reshape(3, 4)
    >>> worlds.run(lambda world: recut(rows.shard(whole, world.rank), world, rows, columns).tolist(), ranks=2)
    [[[0], [4], [8]], [[1, 2, 3], [5, 6, 7], [9, 10, 11]]]
    """
    ranks, me = range(collectives.size), collectives.rank
    whole = placement.whole(shard.shape, me)
    outgoing = [[target.shard(shard, rank)] for rank in ranks]
    incoming = [[_meeting(whole, placement, rank, target, me)] for rank in ranks]
    return torch.cat([blocks[0] for blocks in exchanged(outgoing, incoming, collectives, shard.dtype)], placement.axis)


def _meeting(whole: Sequence[int], placement: Placement, source: int, target: Placement, rank: int) -> tuple[int, ...]:
    """Return the shape of what one rank holds by one cut and another by the other."""
    shape = list(placement.shape(whole, source))
    shape[target.axis] = target.sizes[rank]
    return tuple(shape)
