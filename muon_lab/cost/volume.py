r"""Bytes of an update, in closed form: what ranks ask of each other in every layout and in data parallelism.

Tensor parallelism is that of `muon_lab.parallel.volume`, here for whole classes of equal matrices (`layout`) and in the
form that published software has (`published`). Data parallelism moves gradients and weights. With N entries, D ranks,
:math:`s_r` of them owned by rank r, g and b bytes an entry of a gradient and a weight, a rank sends on a ring

==============================  =====================================================================
layer-wise, exact sizes         :math:`(N - s_{r+1})\, b` for weights
layer-wise, padded shards       :math:`(D - 1) \max_r s_r\, b`
gradients to their owners       :math:`(N - s_r)\, g`
gradients to everyone           :math:`2 (D - 1) / D\, N g`
element-wise (ZeRO-1)           :math:`(D - 1) / D\, N' (g + b)`, N' the next multiple of D
ZeRO-1 that serves Muon         :math:`(D - 1) / D\, N' (g + b + m)`, m bytes an entry of the momentum
==============================  =====================================================================

`muon_lab.parallel.traffic` has the calls of its optimizers, bucket by bucket and from a list of parameters; here they
follow from what each rank owns in all. Every form is a tuple of `Call`, so that `Volume` counts it to the byte and
`network` prices it. Nothing here imports torch, and nothing loops over single matrices.

References
----------
Megatron-LM, ``layer_wise_optimizer.py``; Rajbhandari et al. (2020), *ZeRO*; NVIDIA-NeMo/Emerging-Optimizers,
``newton_schulz_tp``.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from muon_lab.cost import flops
from muon_lab.cost.inventory import Model, held
from muon_lab.nearest import unknown
from muon_lab.parallel import calls
from muon_lab.parallel import volume as tensor_parallel
from muon_lab.parallel.calls import Call
from muon_lab.parallel.grid import Grid, Placement, even
from muon_lab.parallel.traffic import GATHERS, REDUCTIONS, gradients, weights
from muon_lab.parallel.volume import Volume

__all__ = [
    "GATHERS",
    "REDUCTIONS",
    "Comparison",
    "Volume",
    "compared",
    "elementwise",
    "gradients",
    "layerwise",
    "layout",
    "published",
    "serving_muon",
    "straddling",
    "weights",
]


def layout(
    name: str,
    shape: Sequence[int],
    placement: Placement,
    rank: int,
    dtype: str = "float32",
    *,
    count: int = 1,
    steps: int = 5,
    wire: str | None = None,
) -> tuple[Call, ...]:
    r"""Return the calls of a rank for a number of equal matrices, orthogonalized together.

    They are one batch: `duplicated`, `distributed` and `gram` make as many calls as for a single matrix. `owner` deals
    them round in turn and makes two calls, whatever their number. In `periodic`, a step that is not blockwise is
    duplicated.

    Raises
    ------
    ValueError
        For an unknown name, or a shape that the placement does not cut.

    Examples
    --------
    >>> rows = even(4096, 8, dim=0)
    >>> [Volume(layout(name, (4096, 1024), rows, 0, "bfloat16", count=8), 0).sent // 2**20 for name in
    ...  ("duplicated", "distributed", "gram", "owner", "blockwise")]
    [56, 140, 56, 14, 0]
    """
    if name not in flops.LAYOUTS:
        raise unknown("layout", name, flops.LAYOUTS)
    if name == "owner":
        return _dealt(shape, placement, rank, dtype, count)
    batch = tuple(shape) if count == 1 else (count, *shape)
    if name == "distributed":
        return tensor_parallel.distributed(batch, placement, rank, dtype, steps=steps, wire=wire)
    forms = {
        "duplicated": tensor_parallel.duplicated,
        "periodic": tensor_parallel.duplicated,
        "gram": tensor_parallel.gram,
        "blockwise": tensor_parallel.blockwise,
    }
    return forms[name](batch, placement, rank, dtype)


def _dealt(shape: Sequence[int], placement: Placement, rank: int, dtype: str, count: int) -> tuple[Call, ...]:
    """Return the two calls of `owner` for equal matrices, as `parallel.volume.owner` has them for a list."""
    parts = [prod(placement.shape(shape, place)) for place in range(placement.tp)]
    owned = even(count, placement.tp, 0).sizes
    mine = [number * parts[rank] for number in owned]
    theirs = [owned[rank] * part for part in parts]
    return (calls.all_to_all((), dtype, mine, theirs), calls.all_to_all((), dtype, theirs, mine))


def published(
    shape: Sequence[int], placement: Placement, dtype: str = "bfloat16", *, steps: int = 5, packed: bool = False
) -> tuple[Call, ...]:
    r"""Return the calls of distributed Newton-Schulz as published: the norm, then Gram matrices of the uncut side.

    It never cuts a matrix anew: the Gram matrix is that of the long side if the short one is cut. `packed` sends
    :math:`k (k + 1) / 2` entries of it, as nobody does yet.

    Examples
    --------
    >>> shared = even(2048, 8, dim=0)
    >>> [Volume(published((2048, 7168), shared, packed=packed), 0).sent // 2**20 for packed in (False, True)]
    [857, 428]
    """
    placement.check(shape)
    k = shape[-1 if placement.dim == 0 else -2]
    entries = (*shape[:-2], k * (k + 1) // 2) if packed else (*shape[:-2], k, k)
    norm = calls.all_reduce((), "float32", placement.tp)
    return (norm,) + (calls.all_reduce(entries, dtype, placement.tp),) * steps


class Comparison(NamedTuple):
    """What the published tensor-parallel modes cost a rank and step, over all matrices that are cut and no experts."""

    matrices: int
    duplicated: int
    distributed: int
    packed: int
    duplicated_flops: float
    distributed_flops: float
    blockwise_flops: float
    #: In how many matrices the distributed mode moves fewer bytes.
    distributed_wins: int


def compared(model: Model, tp: int = 8, *, steps: int = 5, dtype: str = "bfloat16") -> Comparison:
    """Compare the published modes on a model: ring bytes sent by the first rank, norms left out, and its flops.

    Examples
    --------
    >>> from muon_lab.cost import inventory
    >>> llama = compared(inventory.get("llama-3-70b"))
    >>> round(llama.duplicated / 2**30, 1), round(llama.distributed / 2**30, 1), llama.distributed_wins
    (111.6, 612.5, 0)
    """
    moved, worked = [0] * 3, [0.0] * 3
    matrices = wins = 0
    for part in held(model, Grid(tp=tp)):
        if part.placement is None or part.layer.excluded or part.layer.expert:
            continue
        shape, cut = part.layer.shape, part.placement
        sent = [
            Volume(made, 0).sent
            for made in (
                layout("duplicated", shape, cut, 0, dtype),
                published(shape, cut, dtype, steps=steps)[1:],
                published(shape, cut, dtype, steps=steps, packed=True)[1:],
            )
        ]
        works = [flops.layout(name, shape, cut, 0, steps) for name in ("duplicated", "blockwise")]
        works.insert(1, flops.published(shape, cut, 0, steps))
        moved = [old + part.count * new for old, new in zip(moved, sent, strict=True)]
        worked = [old + part.count * new for old, new in zip(worked, works, strict=True)]
        matrices += part.count
        wins += part.count * (sent[1] < sent[0])
    return Comparison(matrices, moved[0], moved[1], moved[2], worked[0], worked[1], worked[2], wins)


def layerwise(
    owned: Sequence[int],
    rank: int,
    *,
    weight: str = "bfloat16",
    gradient: str = "float32",
    gather: str = "exact",
    reduction: str = "reduce_scatter",
) -> tuple[Call, ...]:
    """Return the calls of a step of layer-wise data parallelism: gradients in, weights out.

    Padded shards are padded both ways.

    Examples
    --------
    >>> [str(call) for call in layerwise((4, 0, 2), rank=0)]
    ['reduce_scatter(mean) of float32 rows (), 4+0+2 of them', 'all_gather_v of bfloat16 rows (), 4+0+2 of them']
    """
    into = gradients(owned, gradient, reduction, padded=gather == "padded")
    return into + weights(owned, rank, weight, gather)


def elementwise(
    entries: int, dp: int, *, weight: str = "bfloat16", gradient: str = "float32", align: int = 1
) -> tuple[Call, ...]:
    """Return the calls of a step of element-wise data parallelism: one flat buffer, of which each rank owns a D-th.

    `align` makes each part a multiple of so many entries.

    Examples
    --------
    >>> [str(call) for call in elementwise(10, 4)]
    ['reduce_scatter(mean) of float32 rows (), 3+3+3+3 of them', 'all_gather of bfloat16 (3,)']
    """
    part = _part(entries, dp, align)
    return (calls.reduce_scatter((), gradient, (part,) * dp, op="mean"), calls.all_gather((part,), weight, dp))


def serving_muon(entries: int, dp: int, *, momentum: str = "float32", align: int = 1) -> tuple[Call, ...]:
    """Return what element-wise sharding has to move more if the update needs whole matrices: all momenta, everywhere.

    Each rank then orthogonalizes all matrices, or its part of them.

    Examples
    --------
    >>> Volume(serving_muon(1000, 4), 0).sent / Volume(elementwise(1000, 4)[1:], 0).sent
    2.0
    """
    return (calls.all_gather((_part(entries, dp, align),), momentum, dp),)


def straddling(sizes: Iterable[int], dp: int, align: int = 1) -> int:
    """Return how many matrices of a flat buffer, one after the other, lie on more than one of its D parts.

    Examples
    --------
    >>> straddling([4, 4, 4], dp=2), straddling([4, 4, 4], dp=3)
    (1, 0)
    """
    lengths = list(sizes)
    part = _part(sum(lengths), dp, align)
    ends = list(accumulate(lengths))
    return sum(1 for size, end in zip(lengths, ends, strict=True) if size and (end - size) // part != (end - 1) // part)


def _part(entries: int, dp: int, align: int) -> int:
    if dp < 1 or align < 1 or entries < 0:
        raise ValueError(f"a flat buffer needs dp and align of at least 1, not {dp} and {align} for {entries} entries")
    return -(-entries // (dp * align)) * align
