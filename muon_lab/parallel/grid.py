"""Who holds what: the placement of a matrix on ranks, and ranks on a grid, as pure data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Placement:
    """A matrix cut along one of its two axes.

    Parameters
    ----------
    dim : {0, 1}
        The partitioned axis: 0 cuts rows (column-parallel layers, ``(out, in)``), 1 cuts columns (row-parallel).
    sizes : tuple of int
        How many rows or columns each rank holds, in rank order; zero is allowed.

    Raises
    ------
    ValueError
        For another axis, no rank at all, or a size that is no whole number of at least 0.

    Examples
    --------
    >>> even(18, 8, dim=0)
    Placement(dim=0, sizes=(3, 3, 2, 2, 2, 2, 2, 2))
    >>> placement = Placement(dim=1, sizes=(4, 0, 3))
    >>> placement.starts, placement.shape((5, 7), rank=2)
    ((0, 4, 4), (5, 3))
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dim not in (0, 1) or isinstance(self.dim, bool):
            raise ValueError(f"dim of a placement must be 0 (rows) or 1 (columns), not {self.dim!r}")
        if not self.sizes or not _are_whole(self.sizes) or min(self.sizes) < 0:
            raise ValueError(
                f"sizes of a placement must be one non-negative length a rank, a whole number, not {self.sizes!r}"
            )

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def length(self) -> int:
        """Length of the whole axis."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each rank's part begins."""
        return (0, *accumulate(self.sizes[:-1]))

    @property
    def axis(self) -> int:
        """The partitioned axis counted from the end, so that leading axes are a batch."""
        return self.dim - 2

    def check(self, shape: Sequence[int]) -> None:
        """Refuse the shape of a whole matrix (or batch) that these sizes do not cut.

        Raises
        ------
        ValueError
            For less than two axes, or if the sizes do not add up to the axis.
        """
        if len(shape) < 2:
            raise ValueError(f"the matrix to cut into shards needs at least 2 axes, but has shape {tuple(shape)}")
        if shape[self.axis] != self.length:
            raise ValueError(
                f"shard sizes {self.sizes} add up to {self.length}, but axis {self.dim} of the matrix has "
                f"{shape[self.axis]} entries"
            )

    def part(self, rank: int) -> slice:
        """Return which rows or columns a rank holds."""
        start = self.starts[rank]
        return slice(start, start + self.sizes[rank])

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard of a matrix (or batch) of a shape."""
        self.check(whole)
        shard = list(whole)
        shard[self.axis] = self.sizes[rank]
        return tuple(shard)

    def whole(self, shard: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of the whole matrix (or batch), given that of a rank's shard.

        Raises
        ------
        ValueError
            If the shard has another length along the axis than this rank should hold.

        Examples
        --------
        >>> Placement(dim=0, sizes=(3, 3, 3, 1)).whole((1, 6), rank=3)  # not 4, which 1 row on each of 4 ranks would be
        (10, 6)
        """
        if len(shard) < 2 or shard[self.axis] != self.sizes[rank]:
            raise ValueError(
                f"rank {rank} of placement {self.sizes} holds {self.sizes[rank]} entries of axis {self.dim}, but its "
                f"shard has shape {tuple(shard)}"
            )
        entire = list(shard)
        entire[self.axis] = self.length
        return tuple(entire)

    def shard(self, X: Any, rank: int) -> Any:
        """Return a rank's part of a matrix or batch, as a view: an array or tensor with the last two axes the matrix.

        Examples
        --------
        >>> import numpy as np
        >>> Placement(dim=1, sizes=(1, 2)).shard(np.arange(6).reshape(2, 3), rank=1).tolist()
        [[1, 2], [4, 5]]
        """
        self.check(X.shape)
        return X[..., self.part(rank), :] if self.dim == 0 else X[..., self.part(rank)]


def even(length: int, tp: int, dim: int) -> Placement:
    """Cut an axis as evenly as it goes: the first ``length % tp`` ranks hold one more.

    Raises
    ------
    ValueError
        If tp is below 1, or the length is no whole number.
    """
    share, rest = divmod(_length(length), _whole_number(tp))
    return Placement(dim, tuple(share + (rank < rest) for rank in range(tp)))


def chunked(length: int, tp: int, dim: int) -> Placement:
    """Cut an axis as `torch.chunk` and DTensor do: equal parts, rounded up, until nothing is left for the last ranks.

    Raises
    ------
    ValueError
        If tp is below 1, or the length is no whole number.

    Examples
    --------
    >>> chunked(10, 4, dim=0).sizes, even(10, 4, dim=0).sizes
    ((3, 3, 3, 1), (3, 3, 2, 2))
    >>> chunked(6, 5, dim=0).sizes
    (2, 2, 2, 0, 0)
    """
    share = -(-_length(length) // _whole_number(tp))
    return Placement(dim, tuple(max(0, min(share, length - rank * share)) for rank in range(tp)))


def _are_whole(numbers: Iterable[object]) -> bool:
    """Say whether all are whole numbers, by the few types they have: a planner asks this of thousands of ranks."""
    kinds: set[type] = {type(number) for number in numbers}
    return all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in kinds)


def _length(length: int) -> int:
    if not _are_whole([length]):
        raise ValueError(f"length of the axis to cut must be a whole number, not {length!r}")
    return length


def _whole_number(tp: int) -> int:
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise ValueError(f"tp, the number of tensor-parallel ranks, must be a whole number of at least 1, not {tp!r}")
    return tp


#: The coordinates that differ within a group of an axis: dp is ep and expert_dp together.
_MOVING = {
    "dp": ("dp", "ep", "expert_dp"),
    "tp": ("tp", "ep", "expert_dp"),
    "pp": ("pp",),
    "ep": ("dp", "ep"),
    "expert_dp": ("dp", "expert_dp"),
}


class Coordinates(NamedTuple):
    """Where a rank stands on a grid."""

    dp: int
    tp: int
    pp: int
    ep: int
    expert_dp: int


@dataclass(frozen=True)
class Grid:
    r"""Ranks on a data x tensor x pipeline grid: tensor neighbours are next to each other, pipeline stages far apart.

    .. math:: rank = tp + T\,(dp + D \cdot pp)

    Expert parallelism adds no ranks: it cuts the data-parallel axis into blocks of `ep` ranks that hold different
    experts, so that an expert is replicated ``dp / ep`` times ("expert_dp"). An ep that does not divide dp cuts the
    data- and tensor-parallel ranks of a stage together, tensor neighbours first: they hold different, whole experts,
    each of which is replicated ``dp * tp / ep`` times.

    Parameters
    ----------
    dp, tp, pp : int
        Lengths of the axes.
    ep : int
        Length of the expert axis, a divisor of dp or of dp * tp.

    Raises
    ------
    ValueError
        For a length below 1, or an ep that does not divide dp * tp.

    References
    ----------
    Megatron-LM, ``parallel_state.initialize_model_parallel``, order "tp-cp-ep-dp-pp"; a `DeviceMesh` of shape
    ``(pp, dp, tp)`` numbers ranks alike.

    Examples
    --------
    >>> grid = Grid(dp=2, tp=2)
    >>> grid.groups("tp"), grid.groups("dp")
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    >>> grid.coordinates(2)
    Coordinates(dp=1, tp=0, pp=0, ep=0, expert_dp=1)
    >>> Grid(dp=4, ep=2).groups("ep"), Grid(dp=4, ep=2).groups("expert_dp")
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    >>> Grid(dp=2, tp=4, ep=4).groups("ep"), Grid(dp=2, tp=4, ep=4).groups("expert_dp")
    (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "ep"):
            length = getattr(self, name)
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise ValueError(f"{name} of a grid must be a whole number of at least 1, not {length!r}")
        ranks = self.dp * self.tp
        if ranks % self.ep:
            near = min((d for d in range(1, ranks + 1) if ranks % d == 0), key=lambda d: (abs(d - self.ep), d))
            told = f"dp={ranks}" if self.tp == 1 else f"dp·tp={self.dp}·{self.tp}={ranks}"
            raise ValueError(f"ep of a grid must divide {told}, but is {self.ep}, and {near} is the nearest that does")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    @property
    def _across(self) -> bool:
        """Whether the expert axis goes across tensor-parallel ranks."""
        return self.dp % self.ep != 0

    def rank(self, *, dp: int = 0, tp: int = 0, pp: int = 0) -> int:
        """Return the rank at given coordinates.

        Raises
        ------
        ValueError
            If a coordinate lies outside the grid.
        """
        for name, at in (("dp", dp), ("tp", tp), ("pp", pp)):
            if not 0 <= at < getattr(self, name):
                raise ValueError(f"{name} of a rank must lie in 0..{getattr(self, name) - 1}, not be {at}")
        return tp + self.tp * (dp + self.dp * pp)

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank stands.

        Raises
        ------
        ValueError
            If there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank of a grid of {self.size} must lie in 0..{self.size - 1}, not be {rank}")
        above, tp = divmod(rank, self.tp)
        pp, dp = divmod(above, self.dp)
        expert_dp, ep = divmod(tp + self.tp * dp if self._across else dp, self.ep)
        return Coordinates(dp, tp, pp, ep, expert_dp)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ in one coordinate only: a partition of all ranks.

        Raises
        ------
        ValueError
            For an axis that a grid does not have.
        """
        if axis not in Coordinates._fields:
            raise ValueError(f"axis of a grid must be one of {', '.join(Coordinates._fields)}, not {axis!r}")
        moving = (*_MOVING[axis], "tp") if self._across and axis in ("ep", "expert_dp") else _MOVING[axis]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = self.coordinates(rank)._asdict()
            fixed = tuple(value for name, value in at.items() if name not in moving)
            groups.setdefault(fixed, []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the group of an axis that a rank belongs to."""
        self.coordinates(rank)
        return next(group for group in self.groups(axis) if rank in group)
