"""Tensor-parallel layouts: functions from orthogonalizer to orthogonalizer."""

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.parallel.grid import Placement, even
from muon_lab.polar import Orthogonalizer


def blockwise(
    orthogonalize: Orthogonalizer, *, dim: int, tp: int | None = None, sizes: tuple[int, ...] | None = None
) -> Orthogonalizer:
    r"""Return the orthogonalizer in which every rank orthogonalizes its own shard and nobody talks.

    The assembled update :math:`B = [O(G_1); \dots; O(G_T)]` is not the polar factor of G. For exact block factors of
    full rank,

    .. math:: \|B\|_2 \le \sqrt{T}, \qquad \|B\|_F^2 = \sum_b \min(\text{shape of block } b),

    and B depends on the number of ranks.

    Parameters
    ----------
    orthogonalize : callable
        Applied to every shard on its own.
    dim : {0, 1}
        The partitioned axis of the matrix (of the last two axes, if there are more): 0 rows, 1 columns.
    tp : int, optional
        Number of ranks; the axis is cut as evenly as it goes, with empty shards if it is too short.
    sizes : tuple of int, optional
        The exact shard sizes instead of `tp`.

    Returns
    -------
    callable
        From ``(*batch, m, n)`` to the same shape.

    Raises
    ------
    ValueError
        For another axis, if not exactly one of `tp` and `sizes` is given, or if the sizes do not add up to the axis.

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
    if (tp is None) == (sizes is None):
        raise ValueError(f"blockwise needs either tp or sizes, but got tp={tp!r} and sizes={sizes!r}")
    asked = even(0, tp, dim) if sizes is None and tp is not None else Placement(dim, tuple(sizes or ()))

    def assembled(G: Tensor) -> Float[Tensor, "*batch m n"]:
        if G.ndim < 2:
            raise ValueError(f"the matrix to cut into shards needs at least 2 axes, but has shape {tuple(G.shape)}")
        axis = dim - 2
        length = G.shape[axis]
        placement = asked if sizes is not None else even(length, len(asked.sizes), dim)
        if sum(placement.sizes) != length:
            raise ValueError(
                f"shard sizes {placement.sizes} add up to {sum(placement.sizes)}, but axis {dim} of the matrix has "
                f"{length} entries"
            )
        return torch.cat([orthogonalize(shard) for shard in torch.split(G, list(placement.sizes), axis)], axis)

    return assembled
