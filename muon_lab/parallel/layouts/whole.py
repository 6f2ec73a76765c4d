"""Layouts that bring shards together, on every rank or on one, and orthogonalize the whole matrix: bit-equal to one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.grid import Placement
from muon_lab.parallel.layouts import resharding
from muon_lab.parallel.layouts.shards import OnShards
from muon_lab.polar import Orthogonalizer


def duplicated(orthogonalize: Orthogonalizer, collectives: Collectives, placement: Placement) -> Orthogonalizer:
    """Return the layout in which every rank gathers the whole matrix, orthogonalizes it and keeps its own shard.

    Parameters
    ----------
    orthogonalize : callable
        Applied to the whole matrix; the result is its very bits.
    collectives : Collectives
        The ranks that hold the matrix.
    placement : Placement
        What each rank holds: uneven or empty parts are gathered as they are.

    Returns
    -------
    callable
        From a shard ``(*batch, m, n)`` to the same shape and dtype.

    Raises
    ------
    ValueError
        If there is not one size a rank; when called, if the shard has another length than its rank holds.

    References
    ----------
    Megatron-LM, ``tp_mode="duplicated"``.

    Examples
    --------
    >>> from muon_lab import polar
    >>> from muon_lab.parallel import worlds
    >>> from muon_lab.parallel.grid import even
    >>> rows = even(2, 2, dim=0)
    >>> def update(world):
    ...     return duplicated(polar.svd(), world, rows)(torch.tensor([[1.0 + 6 * world.rank]]))
    >>> torch.cat(worlds.run(update, ranks=2)).T
    tensor([[0.1414, 0.9899]])
    """
    resharding.check(placement, collectives)
    return _Duplicated(collectives, placement, orthogonalize)


@dataclass(frozen=True)
class _Duplicated(OnShards):
    """What a rank does with its shard of a matrix that all orthogonalize."""

    orthogonalize: Orthogonalizer

    def __call__(self, shard: Tensor) -> Float[Tensor, "*batch m n"]:
        self.whole_shape(shard.shape)
        whole = resharding.gathered(shard, self.collectives.tagged(phase="gather"), self.placement)
        return self.placement.shard(self.orthogonalize(whole), self.collectives.rank).contiguous()


@overload
def owner(orthogonalize: Orthogonalizer, collectives: Collectives, placements: Placement) -> Orthogonalizer: ...


@overload
def owner(
    orthogonalize: Orthogonalizer,
    collectives: Collectives,
    placements: Sequence[Placement],
    owners: Sequence[int] | None = None,
) -> "OwnerOfList": ...


def owner(
    orthogonalize: Orthogonalizer,
    collectives: Collectives,
    placements: Placement | Sequence[Placement],
    owners: Sequence[int] | None = None,
) -> "Orthogonalizer | OwnerOfList":
    r"""Return the layout in which each of many matrices is orthogonalized by one rank, which gathers and returns it.

    Two all_to_all for all matrices: those of a list, or those of a stack (the direction of an optimizer, say). If
    matrices are spread evenly, a rank sends 2/p of the bytes of `duplicated` and
    takes 1/p of its flops. A matrix that its owner refuses breaks off the call on all ranks.

    Parameters
    ----------
    orthogonalize : callable
        Applied to whole matrices, one by one; the result is its very bits.
    collectives : Collectives
        The ranks that hold the matrices.
    placements : Placement or sequence of Placement
        What each rank holds: of every matrix of a stack, or of each of a list.
    owners : sequence of int, optional
        Which place of the group owns each matrix of a list; by default in turn, as in a stack.

    Returns
    -------
    callable
        From a stack of shards ``(*batch, m, n)``, or from a list of shards, one a matrix and all of one dtype, to the
        same shapes and dtype.

    Raises
    ------
    ValueError
        If there is not one size a rank or one owner a matrix, or for owners of a stack; when called, for another
        number of shards, mixed dtypes,
        or a shard of another length than its rank holds.

    References
    ----------
    microsoft/dion, which gathers by all_to_all the matrices of a group of parameters onto their owners.

    Examples
    --------
    >>> from muon_lab import polar
    >>> from muon_lab.parallel import worlds
    >>> from muon_lab.parallel.grid import even
    >>> rows = even(2, 2, dim=0)
    >>> def update(world):
    ...     shards = [torch.tensor([[1.0 + 6 * world.rank]]), torch.tensor([[3.0 + world.rank]])]
    ...     return torch.cat(owner(polar.svd(), world, [rows, rows])(shards))
    >>> torch.cat(worlds.run(update, ranks=2), dim=1)
    tensor([[0.1414, 0.9899],
            [0.6000, 0.8000]])
    """
    if isinstance(placements, Placement):
        if owners is not None:
            raise ValueError(f"owners are {tuple(owners)}, needed none for a stack, or one placement for each matrix")
        resharding.check(placements, collectives)
        return OwnerOfStack(collectives, placements, orthogonalize)
    for placement in placements:
        resharding.check(placement, collectives)
    owned = in_turn(len(placements), collectives.size) if owners is None else tuple(owners)
    if len(owned) != len(placements) or not all(rank in range(collectives.size) for rank in owned):
        raise ValueError(
            f"owners of {len(placements)} matrices must be as many places of the group, 0..{collectives.size - 1}, "
            f"not {owned}"
        )
    return OwnerOfList(orthogonalize, collectives, tuple(placements), owned)


@dataclass(frozen=True)
class OwnerOfStack(OnShards):
    """What a rank does with its shards of a stack of matrices, owned in turn from the first rank on.

    So matrices of one shape are dealt out evenly; a shape that occurs once belongs to the first rank.
    """

    orthogonalize: Orthogonalizer

    @property
    def together(self) -> bool:
        """Whether matrices of one shape should come in one stack: then each has its owner."""
        return True

    def __call__(self, shard: Tensor) -> Float[Tensor, "*batch m n"]:
        """Return this rank's shard of the direction of each matrix."""
        self.whole_shape(shard.shape)
        shards = (shard[None] if shard.ndim == 2 else shard.flatten(0, -3)).split(1)
        if not shard.shape[:-2].numel():
            return shard.clone()
        each = owner(self.orthogonalize, self.collectives, [self.placement] * len(shards))
        return torch.cat(each(shards)).reshape(shard.shape)


@dataclass(frozen=True)
class OwnerOfList:
    """What a rank does with its shards of a list of matrices, each with its placement and owner."""

    orthogonalize: Orthogonalizer
    collectives: Collectives
    placements: tuple[Placement, ...]
    owned: tuple[int, ...]

    def __call__(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's shard of the direction of each matrix."""
        placements, ranks, me = self.placements, range(self.collectives.size), self.collectives.rank
        _one_dtype(shards, placements)
        if not shards:
            return []
        of = [[index for index, rank in enumerate(self.owned) if rank == place] for place in ranks]
        gathering, returning = (self.collectives.tagged(phase=phase) for phase in ("gather", "return"))
        dtype = shards[0].dtype
        shapes = [placement.whole(X.shape, me) for X, placement in zip(shards, placements, strict=True)]
        parts = [[placements[i].shape(shapes[i], rank) for i in of[me]] for rank in ranks]
        arrived = resharding.exchanged([[shards[i] for i in of[rank]] for rank in ranks], parts, gathering, dtype)
        updates = [
            self.orthogonalize(torch.cat([arrived[rank][at] for rank in ranks], placements[i].axis).contiguous())
            for at, i in enumerate(of[me])
        ]
        outgoing = [[placements[i].shard(U, rank) for i, U in zip(of[me], updates, strict=True)] for rank in ranks]
        own = [[tuple(shards[i].shape) for i in of[rank]] for rank in ranks]
        back = resharding.exchanged(outgoing, own, returning, dtype)
        found = {i: X for rank in ranks for i, X in zip(of[rank], back[rank], strict=True)}
        return [found[i].contiguous() for i in range(len(shards))]


def in_turn(matrices: int, ranks: int) -> tuple[int, ...]:
    """Return the owner of each matrix, dealt out one by one.

    Examples
    --------
    >>> in_turn(5, 2)
    (0, 1, 0, 1, 0)
    """
    return tuple(index % ranks for index in range(matrices))


def _one_dtype(shards: Sequence[Tensor], placements: Sequence[Placement]) -> None:
    if len(shards) != len(placements):
        raise ValueError(f"owner needs {len(placements)} shards, one a placement, not {len(shards)}")
    if len({X.dtype for X in shards}) > 1:
        raise ValueError(f"owner needs shards of one dtype, not {', '.join(sorted({str(X.dtype) for X in shards}))}")
