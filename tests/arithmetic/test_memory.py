"""Memory of emulated products, counted: every storage that torch makes, from its birth to its death."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muon_lab.arithmetic import Rounded, blocks, formats, roundtrip
from muon_lab.arithmetic.formats import BlockFormat


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


#: Scratch of a piece, bytes an entry: half-precision casts; magic numbers in float32; for NVFP4 those in both
#: precisions, quotients and values in float64, in pieces half as long.
SCRATCH = {"bf16": 2, "tf32": 4, "mxfp8_e4m3": 4, "nvfp4": (4 + 3 * 8) / 2}


@pytest.mark.parametrize("operation", ["matmul", "square", "gram"])
@pytest.mark.parametrize(
    ("format", "stored", "n"),
    [
        ("bf16", None, 1024),
        ("tf32", None, 1024),
        ("mxfp8_e4m3", None, 1024),
        ("mxfp8_e4m3", "bf16", 1024),
        ("mxfp8_e4m3", "bf16", 2048),
        ("nvfp4", None, 1024),
    ],
)
def test_a_product_needs_its_rounded_operands_its_result_and_scratch_for_a_piece(format, stored, n, operation):
    """At 1024² a float32 matrix takes 4 MiB and a piece of 2¹⁹ entries as many bytes of scratch as the table says.

    In units of A alone, which ``square`` is given: bf16 2.25 (3.25 with a second operand), MXFP8 3.5 (2.5 for ``gram``,
    which rounds once; 3.75 if results are stored in bf16, rounded in place), NVFP4 4.75. At 2048² scratch weighs a
    quarter of that: 2.06, 3.125 and 3.44. A matrix that is no larger than a piece costs most: 2.5, 4 and 10 times A.
    """
    A, B = torch.randn(2, n, n, generator=torch.Generator().manual_seed(0))
    arithmetic = Rounded(format, stored)
    run = {"matmul": lambda: arithmetic.matmul(A, B), "gram": lambda: arithmetic.gram(A)}
    run["square"] = lambda: arithmetic.square(A, alpha=2.0, beta=0.5)
    with Peak() as peak:
        run[operation]()
        first = peak.most
        run[operation]()
    both = operation == "matmul" or (operation == "square" and isinstance(formats.get(format), BlockFormat))
    scratch = (SCRATCH[format] + (0 if stored is None else SCRATCH[stored])) * blocks.PIECE
    assert peak.most == first == (1 + both + 1) * A.nbytes + scratch


def test_results_are_rounded_in_their_own_memory():
    """In a scalar format that torch cannot cast to, too: two operands, the result, and scratch, no second result."""
    A = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    for stored in ("bf16", "fp8_e4m3", "tf32"):
        arithmetic = Rounded("mxfp8_e4m3", stored)
        arithmetic.square(A)  # scratch is there
        with Peak() as peak:
            arithmetic.square(A)
        assert A.nbytes <= peak.most < 1.5 * A.nbytes


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
