"""Parameters that travel together: how they lie in a flat buffer, as pure data.

A bucket holds parameters of one dtype, sorted by owner: those of rank 0 come first, then those of rank 1, … Each rank's
share is as long as what it owns ("exact"), or as long as the longest one ("padded"). A `Flat` is one buffer of
everything, cut evenly wherever that falls. Nothing here imports torch.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from muon_lab.parallel.calls import ITEMSIZE


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype, by their numbers, with their owners.

    Parameters
    ----------
    members : tuple of int
        Numbers of the parameters.
    sizes : tuple of int
        Elements of each.
    owners : tuple of int
        The owner of each.
    ranks : int
        How many ranks there are.
    dtype : str
        Name in torch.

    Examples
    --------
    >>> bucket = Bucket(members=(3, 4, 5), sizes=(6, 2, 3), owners=(1, 0, 1), ranks=3, dtype="float32")
    >>> bucket.shares, bucket.width, bucket.order
    ((2, 9, 0), 9, (4, 3, 5))
    """

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    ranks: int
    dtype: str

    @property
    def shares(self) -> tuple[int, ...]:
        """Elements that each rank owns."""
        totals = [0] * self.ranks
        for size, owner in zip(self.sizes, self.owners, strict=True):
            totals[owner] += size
        return tuple(totals)

    @property
    def width(self) -> int:
        """Elements of the largest share."""
        return max(self.shares)

    @property
    def order(self) -> tuple[int, ...]:
        """The members as they lie in the buffer."""
        return tuple(member for rank in range(self.ranks) for member in self.of(rank))

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the members that a rank owns."""
        return tuple(member for member, owner in zip(self.members, self.owners, strict=True) if owner == rank)

    def only(self, wanted: Collection[int]) -> "Bucket":
        """Return the bucket without members that are not wanted."""
        kept = [row for row in zip(self.members, self.sizes, self.owners, strict=True) if row[0] in wanted]
        members, sizes, owners = zip(*kept, strict=True) if kept else ((), (), ())
        return Bucket(members, sizes, owners, self.ranks, self.dtype)


def cut(
    sizes: Sequence[int],
    dtypes: Sequence[str],
    owners: Sequence[int],
    ranks: int,
    order: Iterable[int] | None = None,
    limit: int | None = None,
) -> list[Bucket]:
    """Return the buckets of parameters, in the order in which they begin.

    Parameters
    ----------
    sizes, dtypes, owners : sequences
        Elements, dtype and owner of each parameter.
    ranks : int
        How many there are.
    order : iterable of int, optional
        In which parameters are walked through; as they come by default.
    limit : int, optional
        A bucket closes when it has so many bytes; without it there is one for each dtype.

    Examples
    --------
    >>> sizes, dtypes = (4, 2, 3, 5), ("float32", "float64", "float32", "float32")
    >>> [bucket.members for bucket in cut(sizes, dtypes, (0, 1, 1, 0), ranks=2)]
    [(0, 2, 3), (1,)]
    >>> [bucket.members for bucket in cut(sizes, dtypes, (0, 1, 1, 0), ranks=2, limit=24)]
    [(0, 2), (1,), (3,)]
    """
    buckets: list[list[int]] = []
    unfilled: dict[str, list[int]] = {}
    for number in range(len(sizes)) if order is None else order:
        dtype = dtypes[number]
        if dtype not in unfilled:
            unfilled[dtype] = []
            buckets.append(unfilled[dtype])
        unfilled[dtype].append(number)
        if limit is not None and ITEMSIZE[dtype] * sum(sizes[i] for i in unfilled[dtype]) >= limit:
            del unfilled[dtype]
    return [
        Bucket(tuple(members), tuple(sizes[i] for i in members), tuple(owners[i] for i in members), ranks, dtype)
        for members in buckets
        for dtype in [dtypes[members[0]]]
    ]


class Piece(NamedTuple):
    """Entries of a parameter, flat, from a begin to an end."""

    member: int
    begin: int
    end: int


@dataclass(frozen=True)
class Flat:
    """Parameters of one dtype end to end in one buffer, cut into equal shards, the last of which may end in padding.

    Parameters
    ----------
    members, sizes : tuple of int
        Numbers of the parameters, and elements of each.
    ranks : int
        How many shards.
    dtype : str
        Name in torch.

    Examples
    --------
    >>> flat = Flat(members=(0, 1), sizes=(6, 3), ranks=4, dtype="float32")
    >>> flat.shard, flat.padding, flat.pieces(1), flat.pieces(3)
    (3, 3, (Piece(member=0, begin=3, end=6),), ())
    """

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: int
    dtype: str

    @property
    def shard(self) -> int:
        """Elements of a shard."""
        return -(-sum(self.sizes) // self.ranks)

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no parameter."""
        return self.shard * self.ranks - sum(self.sizes)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return what lies in the shard of a rank; an empty parameter lies, as an empty piece, in that of rank 0."""
        begin, end = rank * self.shard, (rank + 1) * self.shard
        ends = accumulate(self.sizes)
        rows = ((m, stop - size, size) for m, size, stop in zip(self.members, self.sizes, ends, strict=True))
        cuts = (Piece(m, max(0, begin - start), min(size, end - start)) for m, start, size in rows)
        empty = {m for m, size in zip(self.members, self.sizes, strict=True) if not size and not rank}
        return tuple(
            piece if piece.begin < piece.end else Piece(piece.member, 0, 0)
            for piece in cuts
            if piece.begin < piece.end or piece.member in empty
        )

    def straddling(self) -> tuple[int, ...]:
        """Return the parameters that lie on more than one rank: no rank could step these as matrices.

        Examples
        --------
        >>> Flat(members=(0, 1, 2), sizes=(4, 4, 4), ranks=2, dtype="float32").straddling()
        (1,)
        """
        holders = [piece.member for rank in range(self.ranks) for piece in self.pieces(rank)]
        return tuple(member for member in self.members if holders.count(member) > 1)


def flats(sizes: Sequence[int], dtypes: Sequence[str], ranks: int) -> list[Flat]:
    """Return one buffer for each dtype.

    Examples
    --------
    >>> [flat.members for flat in flats((4, 2, 3), ("float32", "float64", "float32"), ranks=2)]
    [(0, 2), (1,)]
    """
    return [Flat(b.members, b.sizes, ranks, b.dtype) for b in cut(sizes, dtypes, (0,) * len(sizes), ranks)]
