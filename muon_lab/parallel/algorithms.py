r"""Bytes that a rank sends in a collective, by a named algorithm: pure functions of what is asked, exact to the byte.

With N the bytes of the whole tensor and p ranks, per rank on average:

=================  ===================  ===========  ==============  =================  ============
family             all_reduce           all_gather   reduce_scatter  broadcast          all_to_all
=================  ===================  ===========  ==============  =================  ============
ring               2 (p-1)/p N          (p-1)/p N    (p-1)/p N       (p-1)/p N          (p-1)/p N
pairwise           2 (p-1)/p N          (p-1)/p N    (p-1)/p N       (p-1)/p N          (p-1)/p N
tree               2 (p-1)/p N          more         more            (p-1)/p N          pairwise
halving_doubling   2 (p-1)/p N          (p-1)/p N    (p-1)/p N       below 2 (p-1)/p N  pairwise
gloo               2 (p-1)/p N          (p-1)/p N    2 (p-1)/p N     (p-1)/p N          (p-1)/p N
=================  ===================  ===========  ==============  =================  ============

They differ in who sends how much: the root of a tree sends :math:`\lceil \log_2 p \rceil N`. What gloo does is a family
of its own: its reduce_scatter is an all_reduce whose other parts are thrown away, and rows of unequal number are
gathered by one broadcast tree an owner.

References
----------
R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", 2005, for
halving and doubling; facebookincubator/gloo, ``gloo/allreduce.cc``, ``gloo/broadcast.cc``; pytorch/pytorch#149869.
"""

from collections.abc import Callable, Mapping, Sequence

from muon_lab.parallel.calls import Call
from muon_lab.parallel.grid import even

#: gloo cuts what it reduces into segments of at most so many bytes.
GLOO_SEGMENT = 1 << 20


def sent(call: Call, rank: int, algorithm: str = "ring") -> int:
    """Return the bytes that the rank in a place of the group sends, headers and checks not counted.

    Raises
    ------
    ValueError
        For an unknown algorithm, a place that the group does not have, or halving and doubling among a number of ranks
        that is no power of two.

    Examples
    --------
    >>> from muon_lab.parallel import calls
    >>> gather = calls.all_gather((512, 1024), "float32", size=8)
    >>> sent(gather, rank=0) / 2**20
    14.0
    >>> whole = calls.broadcast((4,), "float32", size=4)
    >>> [[sent(whole, rank, family) for rank in range(4)] for family in ("tree", "ring")]
    [[32, 16, 0, 0], [16, 16, 16, 0]]
    """
    if algorithm not in FAMILIES:
        raise ValueError(f"algorithm must be one of {', '.join(FAMILIES)}, not {algorithm!r}")
    if not 0 <= rank < call.size:
        raise ValueError(f"rank of a call among {call.size} must lie in 0..{call.size - 1}, not be {rank}")
    return 0 if call.verb == "barrier" or call.size == 1 else FAMILIES[algorithm][call.verb](call, rank)


def total(call: Call, algorithm: str = "ring") -> int:
    """Return the bytes that all ranks together send, if all make this very call (in all_to_all: send alike)."""
    return sum(sent(call, rank, algorithm) for rank in range(call.size))


def chunks(call: Call) -> tuple[int, ...]:
    """Return the bytes of the chunks into which a reduced tensor is cut, one a rank, as evenly as it goes."""
    return tuple(size * call.itemsize for size in even(call.elements, call.size, 0).sizes)


def gloo_chunks(elements: int, itemsize: int, ranks: int) -> tuple[int, ...]:
    r"""Return the entries of the chunks into which gloo's ring cuts a reduced tensor, one a rank.

    With T bytes, at least two segments a rank and none above 1 MiB, chunk c is :math:`segments / p` segments long; the
    last chunks may be short or empty.

    Examples
    --------
    >>> gloo_chunks(7, 4, ranks=2), gloo_chunks(7, 4, ranks=8), gloo_chunks(3_000_001, 4, ranks=2)
    ((4, 3), (2, 2, 2, 1, 0, 0, 0, 0), (1500006, 1499995))
    """
    size, largest = elements * itemsize, itemsize * max(1, GLOO_SEGMENT // itemsize)
    segments = _up(max(-(-size // largest), 2 * ranks), ranks)
    chunk = segments // ranks * _up(-(-size // segments), itemsize) // itemsize
    return tuple(max(0, min(chunk, elements - rank * chunk)) for rank in range(ranks))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _ring(parts: Sequence[int], rank: int) -> int:
    """All reduce on a ring: reduce every chunk but the own one on to the left, then pass on all but the left one's."""
    return 2 * sum(parts) - parts[rank] - parts[rank - 1]


def _ring_all_reduce(call: Call, rank: int) -> int:
    return _ring(chunks(call), rank)


def _gloo_all_reduce(call: Call, rank: int) -> int:
    cut = gloo_chunks(call.elements * sum(call.rows), call.itemsize, call.size)
    return _ring([size * call.itemsize for size in cut], rank)


def _ring_all_gather(call: Call, rank: int) -> int:
    return sum(call.parts) - call.parts[(rank + 1) % call.size]


def _all_but_own(call: Call, rank: int) -> int:
    """Ring reduce_scatter, direct reduce_scatter, direct all_to_all: what others keep leaves this rank once."""
    return sum(call.parts) - call.parts[rank]


def _chain_broadcast(call: Call, rank: int) -> int:
    return call.parts[0] if (rank + 1) % call.size != call.root else 0


def _direct_all_reduce(call: Call, rank: int) -> int:
    parts = chunks(call)
    return sum(parts) + (call.size - 2) * parts[rank]


def _direct_all_gather(call: Call, rank: int) -> int:
    return (call.size - 1) * call.parts[rank]


def _direct_broadcast(call: Call, rank: int) -> int:
    return (call.size - 1) * call.parts[0] if rank == call.root else 0


def _children(place: int, size: int) -> list[int]:
    """Return whom a place of a binomial tree sends to: in round i the first 2**i places send, each 2**i further on."""
    return [place + (1 << i) for i in range(place.bit_length(), size.bit_length()) if place + (1 << i) < size]


def _below(place: int, size: int) -> list[int]:
    """Return a place of the tree and all below it."""
    return [place] + [below for child in _children(place, size) for below in _below(child, size)]


def _tree_broadcast(call: Call, rank: int) -> int:
    return call.parts[0] * len(_children((rank - call.root) % call.size, call.size))


def _tree_all_reduce(call: Call, rank: int) -> int:
    """Reduce to rank 0, broadcast from there."""
    return call.parts[0] * ((rank != 0) + len(_children(rank, call.size)))


def _tree_all_gather(call: Call, rank: int) -> int:
    """Gather at rank 0, broadcast from there."""
    up = sum(call.parts[below] for below in _below(rank, call.size)) if rank else 0
    return up + sum(call.parts) * len(_children(rank, call.size))


def _tree_reduce_scatter(call: Call, rank: int) -> int:
    """Reduce to rank 0, scatter from there."""
    down = sum(call.parts[below] for child in _children(rank, call.size) for below in _below(child, call.size))
    return (sum(call.parts) if rank else 0) + down


def _tree_gather_by_owner(call: Call, rank: int) -> int:
    """One broadcast tree an owner."""
    return sum(
        part * len(_children((rank - owner) % call.size, call.size)) for owner, part in enumerate(call.parts) if part
    )


def _block(rank: int, width: int) -> range:
    return range(rank - rank % width, rank - rank % width + width)


def _widths(call: Call) -> list[int]:
    if call.size & (call.size - 1):
        raise ValueError(f"halving and doubling needs a power of two ranks, not {call.size}")
    return [1 << i for i in range(call.size.bit_length() - 1)]


def _doubling(parts: Sequence[int], rank: int, widths: Sequence[int]) -> int:
    """Exchange all that is there with partners 1, 2, 4 … away."""
    return sum(sum(parts[at] for at in _block(rank, width)) for width in widths)


def _halving(parts: Sequence[int], rank: int, widths: Sequence[int]) -> int:
    """Send the partner p/2, p/4 … 1 away the half that its side keeps."""
    return sum(sum(parts[at] for at in _block(rank ^ width, width)) for width in widths)


def _doubling_all_gather(call: Call, rank: int) -> int:
    return _doubling(call.parts, rank, _widths(call))


def _halving_reduce_scatter(call: Call, rank: int) -> int:
    return _halving(call.parts, rank, _widths(call))


def _halving_doubling_all_reduce(call: Call, rank: int) -> int:
    parts, widths = chunks(call), _widths(call)
    return _halving(parts, rank, widths) + _doubling(parts, rank, widths)


def _scatter_broadcast(call: Call, rank: int) -> int:
    """Scatter down a binomial tree of halves, then gather by doubling; places are counted from the root."""
    parts, widths, place = chunks(call), _widths(call), (rank - call.root) % call.size
    scattered = sum(
        sum(parts[at] for at in _block(place + width, width)) for width in widths if place % (2 * width) == 0
    )
    return scattered + _doubling(parts, place, widths)


#: Which algorithm each family runs for each verb.
FAMILIES: Mapping[str, Mapping[str, Callable[[Call, int], int]]] = {
    "ring": {
        "all_reduce": _ring_all_reduce,
        "all_gather": _ring_all_gather,
        "all_gather_v": _ring_all_gather,
        "reduce_scatter": _all_but_own,
        "broadcast": _chain_broadcast,
        "all_to_all": _all_but_own,
    },
    "pairwise": {
        "all_reduce": _direct_all_reduce,
        "all_gather": _direct_all_gather,
        "all_gather_v": _direct_all_gather,
        "reduce_scatter": _all_but_own,
        "broadcast": _direct_broadcast,
        "all_to_all": _all_but_own,
    },
    "tree": {
        "all_reduce": _tree_all_reduce,
        "all_gather": _tree_all_gather,
        "all_gather_v": _tree_all_gather,
        "reduce_scatter": _tree_reduce_scatter,
        "broadcast": _tree_broadcast,
        "all_to_all": _all_but_own,
    },
    "halving_doubling": {
        "all_reduce": _halving_doubling_all_reduce,
        "all_gather": _doubling_all_gather,
        "all_gather_v": _doubling_all_gather,
        "reduce_scatter": _halving_reduce_scatter,
        "broadcast": _scatter_broadcast,
        "all_to_all": _all_but_own,
    },
    "gloo": {
        "all_reduce": _gloo_all_reduce,
        "all_gather": _ring_all_gather,
        "all_gather_v": _tree_gather_by_owner,
        "reduce_scatter": _gloo_all_reduce,
        "broadcast": _tree_broadcast,
        "all_to_all": _all_but_own,
    },
}
