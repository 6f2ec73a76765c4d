r"""What each tensor-parallel layout asks of its group and of its ranks: calls, bytes and flops before anything runs.

For a matrix (or batch) of a shape, a placement and a rank, each layout has a function to the calls that the rank makes,
in order; `Volume` adds their bytes up, `flops` has the multiplications and additions of its products. With p ranks,
s the length of the cut axis, k that of the other, :math:`s_r` the rank's part and b bytes an entry, ring algorithms
send, per matrix and by rank r,

.. math::

    \text{duplicated: } (s - s_{r+1})\, k\, b, \qquad
    \text{owner: } \Big(\sum_{j \ne r} s_r k\, [j \text{ owns}] + (s - s_r) k\, [r \text{ owns}]\Big) b, \qquad
    \text{blockwise: } 0,

and one all_reduce of N bytes :math:`2 (p - 1) / p\, N` where p divides its entries: `distributed` has one of 24 bytes
and one of :math:`k^2 b` a step, `gram` one of :math:`4 k^2`. A matrix that is cut along its short axis is cut anew: two
all_to_all, of :math:`s_r (k - t_r) b` and :math:`t_r (s - s_r) b`, t the parts of the long axis.

Nothing here imports torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from muon_lab.parallel import algorithms, calls
from muon_lab.parallel.calls import Call
from muon_lab.parallel.grid import Placement, even
from muon_lab.polar import flops as products

Coefficients = products.Coefficients
Shape = Sequence[int]


@dataclass(frozen=True)
class Volume:
    """Calls of a rank, and their bytes by a named family of algorithms.

    Examples
    --------
    Megabytes that a rank sends for a 4096×1024 matrix in float32, rows over 8 ranks, 5 steps:

    >>> rows, shape = even(4096, 8, dim=0), (4096, 1024)
    >>> eight = owner([shape] * 8, [rows] * 8, rank=0)
    >>> Volume(duplicated(shape, rows, 0), 0).sent / 2**20, Volume(eight, 0).sent / 8 / 2**20
    (14.0, 3.5)
    >>> Volume(gram(shape, rows, 0), 0).sent / 2**20, Volume(distributed(shape, rows, 0, steps=5)[1:], 0).sent / 2**20
    (7.0, 35.0)
    """

    made: tuple[Call, ...]
    rank: int
    algorithm: str = "ring"

    @property
    def calls(self) -> int:
        """Number of calls."""
        return len(self.made)

    @property
    def logical(self) -> int:
        """Bytes of all tensors handed over."""
        return sum(call.logical(self.rank) for call in self.made)

    @property
    def sent(self) -> int:
        """Bytes that the rank sends."""
        return sum(algorithms.sent(call, self.rank, self.algorithm) for call in self.made)


def duplicated(shape: Shape, placement: Placement, rank: int, dtype: str = "float32") -> tuple[Call, ...]:
    """Return the calls of `layouts.duplicated`: one gather.

    Examples
    --------
    >>> [str(call) for call in duplicated((10, 4), even(10, 4, dim=0), rank=0)]
    ['all_gather_v of float32 rows (4,), 3+3+2+2 of them']
    """
    rest = list(placement.shape(shape, rank))
    del rest[placement.axis]
    if len(set(placement.sizes)) == 1:
        return (calls.all_gather((placement.sizes[0], *rest), dtype, placement.tp),)
    return (calls.all_gather_v(rest, dtype, placement.sizes, rank),)


def distributed(
    shape: Shape, placement: Placement, rank: int, dtype: str = "float32", *, steps: int, wire: str | None = None
) -> tuple[Call, ...]:
    """Return the calls of `layouts.distributed`: the norm, a Gram matrix a step, and two to cut the matrix anew.

    `dtype` is that of the shards, `wire` that in which Gram matrices travel, the same unless the arithmetic has one of
    its own.

    Examples
    --------
    >>> [str(call) for call in distributed((4, 8), even(4, 2, dim=0), rank=0, steps=1)]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['all_to_all of float32 rows ()', 'all_reduce(sum) of float64 (3, 1, 1)', 'all_reduce(sum) of float32 (4, 4)',
     'all_to_all of float32 rows ()']
    """
    if not prod(shape):
        return ()
    batch, k = _flat(shape), min(shape[-2:])
    norm = calls.all_reduce((3, *batch, 1, 1), "float64", placement.tp)
    summed = calls.all_reduce((*batch, k, k), dtype if wire is None else wire, placement.tp)
    return _recut(shape, placement, rank, dtype, (norm,) + (summed,) * steps)


def gram(shape: Shape, placement: Placement, rank: int, dtype: str = "float32") -> tuple[Call, ...]:
    """Return the calls of `layouts.gram`: one Gram matrix, and two to cut the matrix anew.

    Examples
    --------
    >>> [str(call) for call in gram((8, 4), even(8, 2, dim=0), rank=0, dtype="bfloat16")]
    ['all_reduce(sum) of float32 (4, 4)']
    """
    if not prod(shape):
        return ()
    k = min(shape[-2:])
    wide = "float64" if dtype == "float64" else "float32"
    return _recut(shape, placement, rank, dtype, (calls.all_reduce((*_flat(shape), k, k), wide, placement.tp),))


def blockwise(shape: Shape, placement: Placement, rank: int, dtype: str = "float32") -> tuple[Call, ...]:
    """Return the calls of `layouts.blockwise`: none."""
    placement.check(shape)
    return ()


def owner(
    shapes: Sequence[Shape],
    placements: Sequence[Placement],
    rank: int,
    dtype: str = "float32",
    owners: Sequence[int] | None = None,
) -> tuple[Call, ...]:
    """Return the calls of `layouts.owner` for a list of matrices: one all_to_all to the owners, one back.

    Examples
    --------
    >>> rows = even(4, 2, dim=0)
    >>> [call.rows for call in owner([(4, 3), (4, 5)], [rows, rows], rank=0)]
    [(6, 10), (6, 6)]
    """
    if not shapes:
        return ()
    ranks = range(placements[0].tp)
    owned = [index % len(ranks) for index in range(len(shapes))] if owners is None else owners
    held = [
        [prod(placement.shape(shape, source)) for source in ranks]
        for shape, placement in zip(shapes, placements, strict=True)
    ]
    mine = [sum(held[i][rank] for i, at in enumerate(owned) if at == place) for place in ranks]
    theirs = [sum(held[i][place] for i, at in enumerate(owned) if at == rank) for place in ranks]
    return (calls.all_to_all((), dtype, mine, theirs), calls.all_to_all((), dtype, theirs, mine))


def periodic(blocks: Sequence[Call], whole: Sequence[Call], period: int, steps: int) -> tuple[Call, ...]:
    """Return the calls of `layouts.periodic` in the first so many optimizer steps, given those of the two layouts.

    Examples
    --------
    >>> rows = even(8, 2, dim=0)
    >>> len(periodic(blockwise((8, 4), rows, 0), duplicated((8, 4), rows, 0), period=5, steps=11))
    3
    """
    return tuple(call for step in range(steps) for call in (blocks if step % period else whole))


def flops(layout: str, shape: Shape, placement: Placement, rank: int, coefficients: Sequence[Coefficients]) -> float:
    r"""Return the multiplications and additions of a rank's products for one matrix, or batch of them.

    The whole matrix takes `polar.flops.plain`, which is also what an owner does for it. On a shard of length
    :math:`s_r` along the long axis and :math:`k` along the other, `distributed` takes :math:`4 k^2 s_r + 2 k^3` a
    quintic step, where a rank without a part takes as long as for one entry, and `gram` :math:`4 k^2 s_r` and the
    products of the Gram form.

    Raises
    ------
    ValueError
        For a layout that has no number of its own.

    Examples
    --------
    >>> five, rows = [(15 / 8, -10 / 8, 3 / 8)] * 5, even(8, 4, dim=0)
    >>> {layout: flops(layout, (8, 4), rows, 0, five) for layout in WORK}  # K = 5, k = 4, s = 8, p = 4
    {'duplicated': 3200.0, 'owner': 3200.0, 'distributed': 1280.0, 'gram': 2304.0, 'blockwise': 400.0}
    """
    if layout not in WORK:
        raise ValueError(f"layout must be one of {', '.join(WORK)}, not {layout!r}")
    placement.check(shape)
    return prod(shape[:-2]) * WORK[layout](shape, placement, rank, coefficients)


def _whole(shape: Shape, placement: Placement, rank: int, coefficients: Iterable[Coefficients]) -> float:
    return products.plain(coefficients, shape[-2], shape[-1])


def _blockwise(shape: Shape, placement: Placement, rank: int, coefficients: Iterable[Coefficients]) -> float:
    return products.plain(coefficients, *placement.shape(shape, rank)[-2:])


def _distributed(shape: Shape, placement: Placement, rank: int, coefficients: Iterable[Coefficients]) -> float:
    k, s = min(shape[-2:]), long_axis(shape, placement).sizes[rank]
    return sum(4.0 * k * k * s + (2.0 * k**3 if c else 0.0) for _, _, c in coefficients) if prod(shape) else 0.0


def _gram(shape: Shape, placement: Placement, rank: int, coefficients: Sequence[Coefficients]) -> float:
    """Return the k×k products of the Gram form, and two with the shard."""
    k, s = min(shape[-2:]), long_axis(shape, placement).sizes[rank]
    return products.gram(coefficients, k, k) + 4.0 * k * k * (s - k) if prod(shape) else 0.0


#: Flops of a rank for one matrix; for `owner`, of the rank that owns it.
WORK: Mapping[str, Callable[[Shape, Placement, int, Sequence[Coefficients]], float]] = {
    "duplicated": _whole,
    "owner": _whole,
    "distributed": _distributed,
    "gram": _gram,
    "blockwise": _blockwise,
}


def long_axis(shape: Shape, placement: Placement) -> Placement:
    """Return the placement if it cuts the long axis of a matrix, else an even one that does.

    One rank, which cuts nothing, takes a matrix as one process does: a square one by its columns.

    Examples
    --------
    >>> long_axis((2, 8), Placement(0, (1, 1))), long_axis((8, 8), Placement(0, (5, 3)))
    (Placement(dim=1, sizes=(4, 4)), Placement(dim=0, sizes=(5, 3)))
    """
    if placement.tp == 1:
        return Placement(int(shape[-2] <= shape[-1]), (max(shape[-2:]),))
    other = shape[-1 if placement.dim == 0 else -2]
    return placement if placement.length >= other else even(other, placement.tp, 1 - placement.dim)


def _flat(shape: Shape) -> tuple[int, ...]:
    """Return the batch axis of what an iteration works on: none, or one."""
    return (prod(shape[:-2]),) if len(shape) > 2 else ()


def _recut(shape: Shape, placement: Placement, rank: int, dtype: str, made: tuple[Call, ...]) -> tuple[Call, ...]:
    """Return calls, between those that cut the matrix along its long axis and back where that is needed."""
    placement.check(shape)
    cut = long_axis(shape, placement)
    if cut == placement or placement.tp == 1:
        return made
    batch = prod(shape[:-2])
    leaving = [batch * placement.sizes[rank] * size for size in cut.sizes]
    arriving = [batch * size * cut.sizes[rank] for size in placement.sizes]
    return (
        calls.all_to_all((), dtype, leaving, arriving),
        *made,
        calls.all_to_all((), dtype, arriving, leaving),
    )
