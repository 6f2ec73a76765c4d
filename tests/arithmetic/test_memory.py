"""Memory of emulated products, counted: every storage that torch makes, from its birth to its death."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muon_lab.arithmetic import Rounded, roundtrip


class Peak(TorchDispatchMode):
    """The most bytes alive at once of storages that were made under it."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known | self.alive.keys():
                self._born(x.untyped_storage())
        return result

    def _born(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self.alive[key] = weakref.finalize(storage, self._dead, key, size)
        self.now += size
        self.most = max(self.most, self.now)

    def _dead(self, key, size):
        self.alive.pop(key)
        self.now -= size


def test_the_counter_sees_what_is_alive_at_once():
    with Peak() as peak:
        a = torch.empty(1000)
        b = a + 1
        del a
        c = b * 2
        c.mul_(3)
    assert (peak.most, peak.now) == (8000, 8000)


@pytest.mark.parametrize(("format", "n"), [("bf16", 1024), ("mxfp8_e4m3", 1024), ("nvfp4", 2048)])
def test_a_product_needs_at_most_three_times_its_operands(format, n):
    """Rounded operands, the result, and scratch for a piece, whose size does not grow (float64 ones for NVFP4)."""
    A, B = torch.randn(2, n, n, generator=torch.Generator().manual_seed(0))
    arithmetic = Rounded(format)
    with Peak() as peak:
        arithmetic.matmul(A, B)
        first = peak.most
        for _ in range(3):
            arithmetic.matmul(A, B)
    operands = 2 * A.nbytes
    assert operands <= first <= 3 * operands  # two rounded operands at the least
    assert peak.most == first


def test_threads_do_not_share_memory():
    """Two threads multiply with one value at a time; each gets its own product."""
    from concurrent.futures import ThreadPoolExecutor

    arithmetic = Rounded("bf16")
    matrices = [torch.full((64, 64), float(k)) for k in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda X: [arithmetic.matmul(X, X) for _ in range(50)], matrices))
    for X, products in zip(matrices, found, strict=True):
        expected = roundtrip(X @ X, "bf16")
        assert all(torch.equal(product, expected) for product in products)
