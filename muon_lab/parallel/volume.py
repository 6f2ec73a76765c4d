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

On average over ranks that is a line in the ratio of the axes, so that two layouts send equally much at one ratio:
`line` and `break_even`.

Nothing here imports torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, prod
from typing import NamedTuple

from muon_lab.parallel import algorithms, calls
from muon_lab.parallel.calls import Call
from muon_lab.parallel.grid import Placement, even
from muon_lab.polar import flops as products

Coefficients = products.Coefficients
Shape = Sequence[int]

#: Bytes of the norm that `distributed` sums: squares in three ranges, in float64.
NORM = 24


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
    one = calls.all_reduce((*batch, k, k), dtype if wire is None else wire, placement.tp)
    return _recut(shape, placement, rank, dtype, (norm,) + (one,) * steps)


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
    return _recut(
        shape, placement, rank, dtype, (calls.all_reduce((*_flat(shape), k, k), summed(dtype), placement.tp),)
    )


def summed(dtype: str) -> str:
    """Return the dtype in which `gram` sums, given that of the shards.

    Examples
    --------
    >>> summed("bfloat16"), summed("float64")
    ('float32', 'float64')
    """
    return "float64" if dtype == "float64" else "float32"


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


#: What a rank of `factors.gathered` keeps a part of, unless told otherwise: moments, cut like the weight, and rows of
#: factors and bases.
SHARDED = ("M", "V", "L", "R", "Q_L", "Q_R")


def factors(
    shape: Shape, placement: Placement, rank: int, dtype: str = "float32", sharded: Sequence[str] = SHARDED
) -> tuple[Call, ...]:
    r"""Return the calls of `factors.gathered`: one gather of the gradient and of all state that is kept in parts.

    For an m×n matrix, everything being sharded, that is the bytes of :math:`3mn + 2m^2 + 2n^2` entries; with factors
    alone, as in Emerging-Optimizers, of :math:`mn + m^2 + n^2`.

    Parameters
    ----------
    shape, placement, rank, dtype
        As for `duplicated`; the dtype is that in which the optimizer works.
    sharded : sequence of str
        Entries of the state of which a rank keeps a part, out of `SHARDED`.

    Raises
    ------
    ValueError
        For an entry that there is not.

    Examples
    --------
    >>> [str(call) for call in factors((8, 4), even(8, 2, dim=0), rank=0, sharded=("L", "R"))]
    ['all_gather of float32 (56,)']
    """
    ranks, (m, n) = range(placement.tp), shape[-2:]
    left, right = even(m, placement.tp, 0).sizes, even(n, placement.tp, 0).sizes
    held = []
    for source in ranks:
        like_weight = prod(placement.shape((m, n), source))
        entries = {name: like_weight for name in ("M", "V")}
        entries |= {name: left[source] * m for name in ("L", "Q_L")}
        entries |= {name: right[source] * n for name in ("R", "Q_R")}
        for name in sharded:
            if name not in entries:
                raise ValueError(f"sharded state must be some of {', '.join(SHARDED)}, not {name!r}")
        held.append(prod(shape[:-2]) * (like_weight + sum(entries[name] for name in sharded)))
    if len(set(held)) == 1:
        return (calls.all_gather((held[0],), dtype, placement.tp),)
    return (calls.all_gather_v((), dtype, held, rank),)


class Line(NamedTuple):
    r"""Bytes that a rank sends on average, :math:`fixed + slope \cdot \rho`, exactly."""

    fixed: Fraction
    slope: Fraction

    def at(self, ratio: Fraction | int) -> Fraction:
        """Return the bytes at a ratio of long to short axis."""
        return self.fixed + self.slope * ratio


def line(
    layout: str,
    short: int,
    tp: int,
    dtype: str = "float32",
    *,
    steps: int,
    wire: str | None = None,
    across: bool = False,
) -> Line:
    r"""Return the bytes that a rank sends on average for a matrix, by the ratio :math:`\rho` of its axes.

    With k the short axis and the others as above, times :math:`(p - 1) / p`,

    .. math::

        \text{duplicated: } \rho k^2 b, \quad \text{owner: } \tfrac{2}{p} \rho k^2 b, \quad
        \text{distributed: } 2 (K k^2 w + 24), \quad \text{gram: } 8 k^2,

    w the bytes of an entry of the summed Gram matrices; where the short axis is cut, the last two send as much as
    `owner` beside it. In `gram` an entry has 4 bytes, for shards of float64 8.

    Parameters
    ----------
    layout : str
        One of `WORK`.
    short : int
        Length of the short axis.
    tp : int
        Number of ranks; where the short axis is cut, a divisor of both.
    dtype, wire : str
        Of the shards, and of Gram matrices under way in `distributed`; the same by default.
    steps : int
        Steps of the schedule.
    across : bool
        Whether the short axis is the one that is cut.

    Raises
    ------
    ValueError
        For a layout that has no number of its own.

    Examples
    --------
    >>> line("distributed", 1024, 8, steps=5).at(4) / 2**20 - 35  # 42 bytes for the norm
    Fraction(21, 524288)
    >>> line("gram", 64, 2, steps=5, across=True)
    Line(fixed=Fraction(16384, 1), slope=Fraction(8192, 1))
    """
    if layout not in WORK:
        raise ValueError(f"layout must be one of {', '.join(WORK)}, not {layout!r}")
    b, square = calls.ITEMSIZE[dtype], short * short
    w = calls.ITEMSIZE[dtype if wire is None else wire]
    sent = Fraction(tp - 1, tp)
    moved = Fraction(2 * b * square, tp) if across else Fraction(0)
    lines: dict[str, tuple[int | Fraction, int | Fraction]] = {
        "duplicated": (0, b * square),
        "owner": (0, Fraction(2 * b * square, tp)),
        "distributed": (2 * (steps * w * square + NORM), moved),
        "gram": (2 * calls.ITEMSIZE[summed(dtype)] * square, moved),
        "blockwise": (0, 0),
    }
    fixed, slope = lines[layout]
    return Line(sent * fixed, sent * slope)


def break_even(one: Line, other: Line) -> float:
    r"""Return the ratio of long to short axis above which one layout sends less than another; infinity if none does.

    For shards and Gram matrices of equal dtype `distributed` sends less than `duplicated` above
    :math:`\rho = 2K + 48 / (k^2 b)`, and less than `owner` above p/2 times that.

    Examples
    --------
    >>> distributed, gathered, owned = (line(name, 1024, 8, steps=5) for name in ("distributed", "duplicated", "owner"))
    >>> round(break_even(distributed, gathered), 3), round(break_even(distributed, owned), 3)
    (10.0, 40.0)
    >>> break_even(gathered, owned), break_even(owned, gathered)
    (inf, 0.0)
    """
    if one.slope == other.slope:
        return 0.0 if one.fixed < other.fixed else inf
    if one.slope > other.slope:
        return inf
    return max(0.0, float((one.fixed - other.fixed) / (other.slope - one.slope)))


def flops(layout: str, shape: Shape, placement: Placement, rank: int, coefficients: Sequence[Coefficients]) -> float:
    r"""Return the multiplications and additions of a rank's products for one matrix, or batch of them.

    The whole matrix takes `polar.flops.plain`, which is also what an owner does for it. On a shard of length
    :math:`s_r` along the long axis and :math:`k` along the other, `distributed` takes :math:`4 k^2 s_r + 2 k^3` a
    quintic step, and `gram` :math:`4 k^2 s_r` and the products of the Gram form.

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
