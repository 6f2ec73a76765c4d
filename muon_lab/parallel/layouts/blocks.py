"""Layouts in which a rank takes its shard for a matrix of its own: always, or between steps of the whole matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.grid import Placement, even
from muon_lab.parallel.layouts.resharding import check
from muon_lab.parallel.layouts.shards import OnShards, Whole, seen
from muon_lab.polar import Orthogonalizer


@overload
def blockwise(orthogonalize: Orthogonalizer, collectives: Collectives, placement: Placement) -> Orthogonalizer: ...


@overload
def blockwise(
    orthogonalize: Orthogonalizer, *, dim: int, tp: int | None = None, sizes: tuple[int, ...] | None = None
) -> Orthogonalizer: ...


def blockwise(
    orthogonalize: Orthogonalizer,
    collectives: Collectives | None = None,
    placement: Placement | None = None,
    *,
    dim: int | None = None,
    tp: int | None = None,
    sizes: tuple[int, ...] | None = None,
) -> Orthogonalizer:
    r"""Return the orthogonalizer in which every rank orthogonalizes its own shard and nobody talks.

    The assembled update :math:`B = [O(G_1); \dots; O(G_T)]` is not the polar factor of G. For exact block factors of
    full rank,

    .. math:: \|B\|_2 \le \sqrt{T}, \qquad \|B\|_F^2 = \sum_b \min(\text{shape of block } b),

    and B depends on the number of ranks.

    With `collectives` and `placement` it is what a rank does with its shard; with `dim` and one of `tp` and `sizes` it
    is the same for the whole matrix in one process. Either way `optim.Muon` takes the factor of the whole shape.
    Megatron-LM takes that of the shard's shape, as if the shard were all there is: there the direction is
    `orthogonalize` itself.

    Parameters
    ----------
    orthogonalize : callable
        Applied to every shard on its own.
    collectives : Collectives
        The ranks that hold the matrix, which stay silent.
    placement : Placement
        What each rank holds.
    dim : {0, 1}
        The partitioned axis of the matrix (of the last two axes, if there are more): 0 rows, 1 columns.
    tp : int, optional
        Number of ranks; the axis is cut as evenly as it goes, with empty shards if it is too short.
    sizes : tuple of int, optional
        The exact shard sizes instead of `tp`.

    Returns
    -------
    callable
        From a shard, or from the whole ``(*batch, m, n)``, to the same shape.

    Raises
    ------
    ValueError
        For another axis, if both ways of asking are mixed, if not exactly one of `tp` and `sizes` is given, or if the
        sizes do not add up to the axis or the shard has another length than its rank holds.

    References
    ----------
    Megatron-LM, ``tp_mode="blockwise"``; NVIDIA/Megatron-LM#6380 on why it is not the default.

    Examples
    --------
    >>> import torch
    >>> from muon_lab import polar
    >>> G = torch.tensor([[1.0], [7.0]])
    >>> blockwise(polar.svd(), dim=0, tp=2)(G).T
    tensor([[1., 1.]])
    >>> polar.svd()(G).T
    tensor([[0.1414, 0.9899]])
    """
    if collectives is not None and placement is not None:
        if (dim, tp, sizes) != (None, None, None):
            raise ValueError(
                "blockwise needs either collectives and a placement, or dim with tp or sizes, but got both"
            )
        return _alone(orthogonalize, collectives, placement)
    if dim is None or collectives is not None or placement is not None:
        raise ValueError("blockwise needs collectives and a placement, or dim with tp or sizes, but got one of two")
    if (tp is None) == (sizes is None):
        raise ValueError(f"blockwise needs either tp or sizes, but got tp={tp!r} and sizes={sizes!r}")
    asked = even(0, tp, dim) if sizes is None and tp is not None else Placement(dim, tuple(sizes or ()))

    def assembled(G: Tensor) -> Float[Tensor, "*batch m n"]:
        if G.ndim < 2:
            raise ValueError(f"the matrix to cut into shards needs at least 2 axes, but has shape {tuple(G.shape)}")
        axis = dim - 2
        length = G.shape[axis]
        cut = asked if sizes is not None else even(length, asked.tp, dim)
        cut.check(G.shape)
        return torch.cat([_one(orthogonalize, shard) for shard in torch.split(G, list(cut.sizes), axis)], axis)

    return assembled


def _alone(orthogonalize: Orthogonalizer, collectives: Collectives, placement: Placement) -> Orthogonalizer:
    check(placement, collectives)
    return _Alone(collectives, placement, orthogonalize)


@dataclass(frozen=True)
class _Alone(OnShards):
    """What a rank does with its shard without the others."""

    orthogonalize: Orthogonalizer

    def __call__(self, shard: Tensor) -> Float[Tensor, "*batch m n"]:
        self.whole_shape(shard.shape)
        return _one(self.orthogonalize, shard)


def _one(orthogonalize: Orthogonalizer, shard: Tensor) -> Float[Tensor, "*batch m n"]:
    """Orthogonalize a shard, if there is anything in it."""
    return orthogonalize(shard) if shard.numel() else shard.clone()


def correction(shape: Sequence[int], placement: Placement) -> float:
    r"""Return the factor of the step size with which `blockwise` moves a weight as far as the whole matrix does.

    For exact factors of blocks of full rank it is exact in the Frobenius norm, that is in the root mean square,

    .. math:: \sqrt{\min(m, n) \,/\, \textstyle\sum_b \min(\text{shape of block } b)},

    1 where a short axis is cut, and :math:`1 / \sqrt T` where T blocks of a long axis are still wide. Layouts that take
    the whole matrix need none.

    Parameters
    ----------
    shape : sequence of int
        Of the whole matrix; leading axes are a batch.
    placement : Placement
        What each rank holds.

    Raises
    ------
    ValueError
        If the placement does not cut the shape.

    Examples
    --------
    >>> correction((4, 16), even(16, 4, dim=1)), correction((4, 16), even(4, 4, dim=0))
    (0.5, 1.0)
    """
    blocks = sum(min(placement.shape(shape, rank)[-2:]) for rank in range(placement.tp))
    return math.sqrt(min(shape[-2:]) / blocks) if blocks else 1.0


@dataclass(frozen=True)
class Periodic(Whole):
    """The layout that `periodic` returns."""

    blocks: Orthogonalizer
    whole: Orthogonalizer
    period: int
    scales: tuple[float, float]

    @property
    def ranks(self) -> Collectives | None:
        """The ranks that hold the matrix, if the layouts say so."""
        return seen(self.whole).ranks

    @property
    def together(self) -> bool:
        """Whether matrices of one shape should come in one stack, as the whole-matrix layout asks."""
        return seen(self.whole).together

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole matrix, given that of this rank's shard."""
        return seen(self.whole).whole_shape(shape)

    def summed(self, X: Float[Tensor, "*batch p q"], axis: int | None = None) -> Float[Tensor, "*batch p q"]:
        """Return sums over whole matrices, given those over shards."""
        return seen(self.whole).summed(X, axis)

    def turn(self, step: int) -> bool:
        """Return whether a step, counted from 0, is one of the whole matrix."""
        return step % self.period == 0

    def __call__(self, shard: Float[Tensor, "*batch m n"], step: int) -> Float[Tensor, "*batch m n"]:
        """Return this rank's shard of the update in a step, which all ranks count alike."""
        orthogonalize, scale = (self.whole, self.scales[1]) if self.turn(step) else (self.blocks, self.scales[0])
        update = orthogonalize(shard)
        return update if scale == 1.0 else update * scale


def periodic(
    blocks: Orthogonalizer, whole: Orthogonalizer, period: int, scales: tuple[float, float] = (1.0, 1.0)
) -> Periodic:
    r"""Return the layout that takes shards for themselves, and every so many steps the whole matrix.

    Bytes are 1/period of those of the whole-matrix layout. The two kinds of step have different norms, and want
    different sizes: :math:`\|B\|_F^2 = \sum_b \min(\text{shape of block } b)`, against
    :math:`\min(m, n)` of the whole.

    Parameters
    ----------
    blocks, whole : callable
        What a rank does with its shard in the two kinds of step: `blockwise`, and any other layout.
    period : int
        Steps 0, period, 2 period … take the whole matrix; with 1 all do.
    scales : tuple of float
        What the result of `blocks` and that of `whole` is multiplied by; ``(correction(shape, placement), 1.0)`` makes
        both kinds of step equally large.

    Returns
    -------
    Periodic
        A callable from shard and step to the shard of the update. As direction of `optim.Muon` it is told the step,
        which each parameter counts in its state.

    Raises
    ------
    ValueError
        If the period is below 1, or the two layouts have different placements.

    References
    ----------
    A. Khaled et al., *MuonBP: Faster Muon via Block-Periodic Orthogonalization*, 2025.

    Examples
    --------
    >>> import torch
    >>> from muon_lab import polar
    >>> from muon_lab.parallel import layouts, worlds
    >>> rows = even(2, 2, dim=0)
    >>> def steps(world):
    ...     blocks = layouts.blockwise(polar.svd(), world, rows)
    ...     update = periodic(blocks, layouts.duplicated(polar.svd(), world, rows), period=2, scales=(0.5, 1.0))
    ...     return [round(update(torch.tensor([[1.0 + 6 * world.rank]]), step).item(), 4) for step in range(3)]
    >>> worlds.run(steps, ranks=2)
    [[0.1414, 0.5, 0.1414], [0.9899, 0.5, 0.9899]]
    """
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(f"period of whole-matrix steps must be a whole number of at least 1, not {period!r}")
    if isinstance(blocks, OnShards) and isinstance(whole, OnShards) and blocks.placement != whole.placement:
        raise ValueError(f"placements of blocks and whole are {blocks.placement} and {whole.placement}, needed one")
    return Periodic(blocks, whole, period, scales)
