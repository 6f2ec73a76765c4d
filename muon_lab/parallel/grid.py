"""Who holds what: the placement of a matrix on ranks, as pure data."""

from dataclasses import dataclass


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
        For another axis, no rank at all, or a negative size.

    Examples
    --------
    >>> even(18, 8, dim=0)
    Placement(dim=0, sizes=(3, 3, 2, 2, 2, 2, 2, 2))
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dim not in (0, 1) or isinstance(self.dim, bool):
            raise ValueError(f"dim of a placement must be 0 (rows) or 1 (columns), not {self.dim!r}")
        if not self.sizes or min(self.sizes) < 0:
            raise ValueError(f"sizes of a placement must be one non-negative length a rank, not {self.sizes!r}")


def even(length: int, tp: int, dim: int) -> Placement:
    """Cut an axis as evenly as it goes: the first ``length % tp`` ranks hold one more.

    Raises
    ------
    ValueError
        If tp is below 1.
    """
    if not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp, the number of tensor-parallel ranks, must be a whole number of at least 1, not {tp!r}")
    share, rest = divmod(length, tp)
    return Placement(dim, tuple(share + (rank < rest) for rank in range(tp)))
