"""Layouts as functions of the whole matrix: it is cut, ranks of this process do their part, and it is put together."""

from typing import TYPE_CHECKING

from muon_lab.nearest import unknown
from muon_lab.studies import methods
from muon_lab.studies.study import LeftOut

if TYPE_CHECKING:
    from torch import Tensor

    from muon_lab.parallel.collectives import Collectives
    from muon_lab.parallel.grid import Placement
    from muon_lab.polar import Orthogonalizer

#: The values of the axis `layout`.
LAYOUTS = ("duplicated", "distributed", "gram", "owner", "blockwise", "periodic")

#: Layouts that iterate on sums of Gram matrices, and so need a polynomial in its plain form.
SUMMED = ("distributed", "gram")

#: How an axis is cut: as evenly as it goes, in equal parts rounded up, or half of it on the first rank.
CUTS = ("even", "chunked", "half")


#: The most ranks that are threads of one process.
MOST = 1024


def check(layout: str, method: str, steps: int | None, tp: int) -> None:
    """Refuse a layout that there is not, and leave out one that the method does not go with.

    Raises
    ------
    ValueError
        For an unknown layout, or more ranks than one process should have as threads.
    LeftOut
        For an exact method, or another form, in a layout that sums Gram matrices.
    """
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    if tp > MOST and layout != "blockwise":
        raise ValueError(f"tp must be at most {MOST} for the layout {layout}, whose ranks are threads here, not {tp}")
    if layout in SUMMED and (method in methods.EXACT or methods.parse(method, steps).form != "plain"):
        raise LeftOut(f"{layout} sums the Gram matrices of a schedule in its plain form, which {method!r} is not")


def placed(cut: str, length: int, tp: int, dim: int) -> "Placement":
    """Return the placement of an axis; raises ``ValueError`` for an unknown way to cut.

    Examples
    --------
    >>> [placed(cut, 9, 4, 0).sizes for cut in CUTS]
    [(3, 2, 2, 2), (3, 3, 3, 0), (5, 2, 1, 1)]
    """
    from muon_lab.parallel.grid import Placement, chunked, even

    if cut not in CUTS:
        raise unknown("cut", cut, CUTS)
    if cut == "half" and tp > 1:
        return Placement(dim, (length - length // 2, *even(length // 2, tp - 1, dim).sizes))
    return chunked(length, tp, dim) if cut == "chunked" else even(length, tp, dim)


def whole(
    layout: str,
    method: str,
    steps: int | None,
    dtype: str,
    placement: "Placement",
    roundoff: float = 0.0,
) -> "Orthogonalizer":
    """Return a layout, `periodic` excepted, as a function of the whole matrix or batch; bits are those of real ranks.

    Examples
    --------
    >>> import torch
    >>> rows = placed("even", 2, 2, 0)
    >>> whole("owner", "svd", None, "float64", rows)(torch.tensor([[3.0], [4.0]]).double()).T
    tensor([[0.6000, 0.8000]], dtype=torch.float64)
    """
    from muon_lab.parallel import layouts

    single = methods.build(method, steps, dtype, roundoff)
    if layout == "blockwise":
        return layouts.blockwise(single, dim=placement.dim, sizes=placement.sizes)
    return lambda G: _together(layout, method, steps, dtype, placement, single, G)


def _together(
    layout: str,
    method: str,
    steps: int | None,
    dtype: str,
    placement: "Placement",
    single: "Orthogonalizer",
    G: "Tensor",
) -> "Tensor":
    """Run a layout on a world of threads and join what comes of it."""
    import torch

    from muon_lab.arithmetic import Exact
    from muon_lab.parallel import layouts, worlds

    def rank(world: "Collectives") -> "Tensor":
        shard = placement.shard(G, world.rank)
        if layout == "duplicated":
            return layouts.duplicated(single, world, placement)(shard)
        if layout == "owner":
            return layouts.owner(single, world, [placement])([shard])[0]
        summed = layouts.distributed if layout == "distributed" else layouts.gram
        found = methods.parse(method, steps)
        arithmetic = Exact(methods.dtype_named(dtype))
        return summed(found.schedule, world, placement, arithmetic, found.start)(shard)

    return torch.cat(worlds.run(rank, placement.tp), placement.axis)
