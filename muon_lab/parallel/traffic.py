r"""What one step of data parallelism asks of its group: calls and bytes before anything runs.

Exactly those calls that `LayerwiseOptimizer` and `ElementwiseOptimizer` make, if every parameter has a gradient. With N
entries of which the rank owns :math:`N_r`, g and w bytes an entry, a rank sends by ring algorithms

====================================== ===========================================================
layer-wise, all_reduce, exact          :math:`2 \frac{p-1}{p} N g + (N - N_{r+1}) w`
layer-wise, reduce_scatter, exact      :math:`(N - N_r) g + (N - N_{r+1}) w`
layer-wise, reduce_scatter, padded     :math:`(p - 1) \max_r N_r\, (g + w)`
element-wise                           :math:`\frac{p-1}{p} N (g + w)`
element-wise, serving a matrix rule    :math:`\frac{p-1}{p} N (g + w + 4)`, momentum in float32
====================================== ===========================================================

The last one makes momentum whole on every rank, and every rank then orthogonalizes everything: p times the products.
Where each rank keeps whole weights that it can update itself, the gather of parameters (w) falls away.

Nothing here imports torch.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from muon_lab.nearest import unknown
from muon_lab.parallel import algorithms, calls
from muon_lab.parallel.calls import ITEMSIZE, Call
from muon_lab.parallel.replicas import buckets
from muon_lab.parallel.replicas.buckets import Flat

#: Weights in parts as long as they are or as long as the longest; gradients to their owners or to everyone.
GATHERS = ("exact", "padded")
REDUCTIONS = ("reduce_scatter", "all_reduce")


class Traffic(NamedTuple):
    """The calls of one step of one rank, in order, by what they are for.

    Examples
    --------
    >>> step = layerwise([1024] * 4, ["bfloat16"] * 4, owners=[0, 1, 2, 3], ranks=4, rank=0, reduce="reduce_scatter")
    >>> sent(step.gradients, 0), sent(step.parameters, 0)
    (6144, 6144)
    """

    gradients: tuple[Call, ...]
    agreement: tuple[Call, ...]
    parameters: tuple[Call, ...]
    momentum: tuple[Call, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        """All calls, with the one that confirms a step before the parameters go."""
        return (*self.gradients, *self.momentum, *self.agreement, *self.parameters)


def sent(made: Iterable[Call], rank: int, algorithm: str = "ring") -> int:
    """Return the bytes that a rank sends in calls by a named family of algorithms."""
    return sum(algorithms.sent(call, rank, algorithm) for call in made)


def weights(owned: Sequence[int], rank: int, dtype: str = "bfloat16", how: str = "exact") -> tuple[Call, ...]:
    """Return the call that gives every rank the weights that their owners updated.

    Parameters
    ----------
    owned : sequence of int
        Entries that each rank owns; those of a bucket if weights travel in buckets.
    rank : int
        Whose call.
    dtype : str
        Of the weights.
    how : {"exact", "padded"}
        Parts as long as they are, or equal ones as long as the longest.

    Raises
    ------
    ValueError
        For an unknown way.

    Examples
    --------
    >>> owned = (4, 0, 2)
    >>> [sent(weights(owned, 0, how=how), 0) for how in GATHERS]
    [12, 16]
    """
    if how not in GATHERS:
        raise unknown("gather", how, GATHERS)
    if how == "padded":
        return (calls.all_gather((max(owned),), dtype, len(owned)),)
    return (calls.all_gather_v((), dtype, owned, rank),)


def gradients(
    owned: Sequence[int], dtype: str = "float32", how: str = "reduce_scatter", op: str = "mean", *, padded: bool = False
) -> tuple[Call, ...]:
    """Return the call that brings gradients to the owners of their matrices, or to everyone.

    Raises
    ------
    ValueError
        For an unknown way.

    Examples
    --------
    >>> [sent(gradients((4, 0, 2), how=how), 0) for how in REDUCTIONS]
    [8, 32]
    """
    if how not in REDUCTIONS:
        raise unknown("reduction", how, REDUCTIONS)
    if how == "all_reduce":
        return (calls.all_reduce((sum(owned),), dtype, len(owned), op),)
    sizes = (max(owned),) * len(owned) if padded else owned
    return (calls.reduce_scatter((), dtype, sizes, op=op),)


def layerwise(
    sizes: Sequence[int],
    dtypes: Sequence[str],
    owners: Sequence[int],
    ranks: int,
    rank: int,
    *,
    gather: str = "exact",
    reduce: str = "all_reduce",
    order: Iterable[int] | None = None,
    bucket: int | None = None,
    sums: str | None = None,
) -> Traffic:
    """Return the calls of a step of `LayerwiseOptimizer`; what teams tell each other comes on top of it.

    Parameters
    ----------
    sizes, dtypes, owners : sequences
        Elements, dtype and owner of each parameter.
    ranks, rank : int
        How many, and which.
    gather, reduce, bucket, sums
        As for `LayerwiseOptimizer`, the last one by name.
    order : iterable of int, optional
        That of the parameters in the model.

    Examples
    --------
    >>> step = layerwise([6, 2, 3], ["float32"] * 3, owners=[1, 0, 1], ranks=2, rank=0)
    >>> [str(call) for call in step.gradients + step.parameters]
    ['all_reduce(mean) of float32 (11,)', 'all_gather_v of float32 rows (), 2+9 of them']
    """
    cut = buckets.cut(sizes, dtypes, owners, ranks, order, bucket)
    reduced: list[Call] = []
    for each in reversed(cut) if reduce != "none" else ():
        dtype = max(each.dtype, sums or each.dtype, key=ITEMSIZE.__getitem__)
        reduced += gradients(each.shares, dtype, reduce, padded=gather == "padded")
    gathered = [call for each in cut for call in weights(each.shares, rank, each.dtype, gather)]
    return Traffic(tuple(reduced), _agreement((3, len(sizes) + 1), ranks), tuple(gathered))


def elementwise(sizes: Sequence[int], dtypes: Sequence[str], ranks: int, *, momentum: str | None = None) -> Traffic:
    """Return the calls of a step of `ElementwiseOptimizer`, and those that it would need for a matrix optimizer.

    Parameters
    ----------
    sizes, dtypes : sequences
        Elements and dtype of each parameter.
    ranks : int
        How many.
    momentum : str, optional
        The dtype of the momentum that is made whole on every rank before it is orthogonalized.

    Examples
    --------
    >>> step = elementwise([600, 200], ["bfloat16"] * 2, ranks=4, momentum="float32")
    >>> sent(step.gradients, 0), sent(step.momentum, 0), sent(step.parameters, 0)
    (1200, 2400, 1200)
    """
    cut = buckets.flats(sizes, dtypes, ranks)
    reduced = tuple(calls.reduce_scatter((), f.dtype, (f.shard,) * ranks, f.shard * ranks, "mean") for f in cut)
    agreed = _agreement((1, 2 * len(sizes) + ranks + 2), ranks)
    return Traffic(reduced, agreed, _shards(cut, None), () if momentum is None else _shards(cut, momentum))


def _shards(cut: Sequence[Flat], dtype: str | None) -> tuple[Call, ...]:
    return tuple(calls.all_gather((flat.shard,), dtype or flat.dtype, flat.ranks) for flat in cut)


def _agreement(shape: tuple[int, int], ranks: int) -> tuple[Call, ...]:
    """Return the call before a step, and the one that confirms it."""
    return calls.all_reduce(shape, "float64", ranks), calls.all_gather((1,), "int64", ranks)
