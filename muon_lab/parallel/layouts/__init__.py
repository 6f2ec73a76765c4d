r"""Tensor-parallel layouts: what a rank does with its shard so that the ranks together orthogonalize a matrix.

With K steps, the cut axis of length s and the other of length k, b bytes an entry and p ranks, a rank sends

===========  ==========================================  ==========================  ===============================
layout       bytes by ring algorithms                    result                      flops, in quintic steps
===========  ==========================================  ==========================  ===============================
duplicated   (p-1)/p s k b                               that of one rank, bit-equal all of one rank's, on every rank
distributed  2 (p-1)/p (K k² b + 24)                     to rounding                 K (4 k² s/p + 2 k³)
gram         2 (p-1)/p 4 k²                              to rounding                 4 k² s/p + (8 K - 6) k³
owner        2 (p-1)/p² s k b, mean over ranks           that of one rank, bit-equal 1/p of one rank's, mean
blockwise    0                                           another update              those of the shard
periodic     1/period of the other layout's              another update              a mix of both
===========  ==========================================  ==========================  ===============================

`volume` has them to the byte, for every shape and algorithm.

A layout sees shards, and knows of the whole (`OnShards`): handed to `optim.Muon` or `optim.MOP` as the direction of
shards, it gives factors the shape of the whole matrix, and sums over ranks what is a sum over its entries. Updates of
`blockwise` are larger than whole ones where a long axis is cut, by 1 over `correction`. Leading axes are a batch, such
as experts; each matrix of it has its own norm. Dtype and shape of a shard are kept.
"""

from muon_lab.parallel.layouts.blocks import Periodic, blockwise, correction, periodic
from muon_lab.parallel.layouts.shards import ALONE, OnShards, Whole, seen
from muon_lab.parallel.layouts.summed import distributed, gram
from muon_lab.parallel.layouts.whole import OwnerOfList, duplicated, owner

__all__ = [
    "ALONE",
    "OnShards",
    "OwnerOfList",
    "Periodic",
    "Whole",
    "blockwise",
    "correction",
    "distributed",
    "duplicated",
    "gram",
    "owner",
    "periodic",
    "seen",
]
