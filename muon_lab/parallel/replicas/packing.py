"""Tensors into flat buffers and back, as `buckets` says that they lie."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel.replicas.buckets import Bucket


def flattened(
    tensors: Sequence[Tensor], dtype: str, device: torch.device, length: int | None = None
) -> Shaped[Tensor, " elements"]:
    """Return tensors end to end in new memory, with zeros behind them up to a length.

    Examples
    --------
    >>> flattened([torch.eye(2)], "float32", torch.device("cpu"), length=5), flattened([], "int8", torch.device("cpu"))
    (tensor([1., 0., 0., 1., 0.]), tensor([], dtype=torch.int8))
    """
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    missing = 0 if length is None else length - sum(len(part) for part in parts)
    padding = torch.zeros(missing, dtype=getattr(torch, dtype), device=device)
    return torch.cat([*parts, padding]) if parts else padding


def share(
    bucket: Bucket, rank: int, tensors: Sequence[Tensor] | Mapping[int, Tensor], device: torch.device, padded: bool
) -> Shaped[Tensor, " elements"]:
    """Return what one rank owns of a bucket, out of tensors by number."""
    owned = [tensors[member] for member in bucket.of(rank)]
    return flattened(owned, bucket.dtype, device, bucket.width if padded else None)


def whole(
    bucket: Bucket, tensors: Sequence[Tensor] | Mapping[int, Tensor], device: torch.device, padded: bool
) -> Shaped[Tensor, " elements"]:
    """Return the whole buffer of a bucket: the shares of all ranks."""
    return torch.cat([share(bucket, rank, tensors, device, padded) for rank in range(bucket.ranks)])


def parts(bucket: Bucket, flat: Shaped[Tensor, "*elements"], rank: int | None = None) -> dict[int, Tensor]:
    """Return the members of a bucket as flat views of one rank's share, of a buffer, or of padded shares, a row a rank.

    Examples
    --------
    >>> bucket = Bucket((3, 4, 5), (2, 1, 3), (1, 0, 1), ranks=2, dtype="float32")
    >>> tensors = {3: torch.ones(2), 4: torch.zeros(1), 5: torch.full((3,), 7.0)}
    >>> parts(bucket, whole(bucket, tensors, torch.device("cpu"), padded=True).view(2, 5))[5]
    tensor([7., 7., 7.])
    """
    if rank is None and flat.ndim == 2:
        return {k: v for place in range(bucket.ranks) for k, v in parts(bucket, flat[place], place).items()}
    members, length = (bucket.order, sum(bucket.sizes)) if rank is None else (bucket.of(rank), bucket.shares[rank])
    size = dict(zip(bucket.members, bucket.sizes, strict=True))
    return dict(zip(members, flat[:length].split([size[member] for member in members]), strict=True))
