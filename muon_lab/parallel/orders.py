"""Sums in a chosen order: floating-point addition is not associative, and backends differ in nothing but the order.

The order decides the bits. ``ring`` is that of gloo's all_reduce, element by element, so that threads of one process
give the bits of processes. The others are for comparison: ``rank`` adds in rank order, ``tree`` in pairs, ``float64``
adds in float64 and rounds once.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel.algorithms import gloo_chunks

Combine = Callable[[Tensor, Tensor], Tensor]

COMBINE: Mapping[str, Combine] = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce(tensors: Sequence[Tensor], op: str = "sum", order: str = "ring") -> Shaped[Tensor, "..."]:
    """Combine equal tensors, one a rank, into a new one; a mean is still to be divided.

    Raises
    ------
    ValueError
        For an unknown order.

    Examples
    --------
    >>> parts = [torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24)]
    >>> [reduce(parts, order=order).item() == 1 for order in ("rank", "ring", "tree", "float64")]
    [True, False, True, False]
    """
    if order not in ORDERS:
        raise ValueError(f"order of a reduction must be one of {', '.join(ORDERS)}, not {order!r}")
    return ORDERS[order]([tensor.reshape(-1) for tensor in tensors], COMBINE[op]).reshape(tensors[0].shape)


def _rank(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    result = parts[0].clone()
    for part in parts[1:]:
        result = combine(result, part)
    return result


def _ring(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    """Chunk c starts with what rank c-1 has of it, and takes in rank c-2, c-3 … c on its way."""
    result, start, ranks = parts[0].clone(), 0, len(parts)
    for chunk, length in enumerate(gloo_chunks(result.numel(), result.element_size(), ranks)):
        if length:
            along = [parts[(chunk - hop) % ranks][start : start + length] for hop in range(1, ranks + 1)]
            result[start : start + length] = _rank(along, combine)
        start += length
    return result


def _tree(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    if len(parts) == 1:
        return parts[0].clone()
    half = 1 << (len(parts) - 1).bit_length() - 1
    return combine(_tree(parts[:half], combine), _tree(parts[half:], combine))


def _float64(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    wide = torch.float64 if parts[0].is_floating_point() else torch.int64
    return _rank([part.to(wide) for part in parts], combine).to(parts[0].dtype)


ORDERS: Mapping[str, Callable[[Sequence[Tensor], Combine], Tensor]] = {
    "ring": _ring,
    "rank": _rank,
    "tree": _tree,
    "float64": _float64,
}
