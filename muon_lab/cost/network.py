r"""Seconds of a collective, from what is asked and what it runs on.

Two models. The α–β model has, for each algorithm, the messages and bytes that follow each other: with a the latency of
a message, b the seconds a byte, g those of adding one, N the bytes of the whole tensor, p ranks and :math:`L =
\lceil \log_2 p \rceil`,

====================  ==================================================================================
ring                  all_reduce :math:`2 (p-1) a + 2 \frac{p-1}{p} N b + \frac{p-1}{p} N g`, all_gather and
                      reduce_scatter half of it, broadcast a chain of k pieces
                      :math:`(p - 2 + k)(a + N b / k)`
tree                  broadcast :math:`L (a + N b)`, all_reduce twice that and :math:`L N g`
recursive doubling    all_reduce :math:`L (a + N b + N g)`
halving and doubling  all_reduce :math:`2 L a + 2 \frac{p-1}{p} N b + \frac{p-1}{p} N g`
pairwise              all_to_all, all_gather, reduce_scatter :math:`(p-1) a + \frac{p-1}{p} N b`
hierarchical          in domains of d ranks on fast links, d lanes between the p/d domains on slow ones
====================  ==================================================================================

Parts of unequal length :math:`s_r` go round a ring in :math:`(p-1) a + (S - \min s) b` if messages follow each other
at once, in :math:`(p-1)(a + b \max s)` if all wait for the longest.

The other is the model by which NCCL itself chooses (`nccl`): a base latency, a latency a step, and a bandwidth, for
each algorithm and protocol, fitted to its hardware. Left out of it are bandwidths per channel, which bind nowhere on
the hardware below, and NVLink SHARP, which halves the traffic of an all_reduce where it is used.

References
----------
Thakur, Rabenseifner and Gropp (2005), *Optimization of collective communication operations in MPICH*; NVIDIA/nccl
2.30.7, ``src/graph/tuning.cc`` and ``src/graph/topo.h``; NVIDIA/nccl-tests, ``doc/PERFORMANCE.md``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf, sqrt
from pathlib import Path
from typing import NamedTuple, TypeAlias

from muon_lab.cost import reading
from muon_lab.nearest import unknown
from muon_lab.parallel.calls import Call

US, GB = 1e-6, 1e9

#: Whole or not.
Number: TypeAlias = int | float


@dataclass(frozen=True)
class Link:
    """What one rank sends over, one way.

    Parameters
    ----------
    latency : float
        Seconds a message.
    bandwidth : float
        Bytes a second that a collective really gets.
    reduction : float
        Bytes a second that are added; infinite where memory is far faster than the link.

    Raises
    ------
    ValueError
        For a negative latency, or a bandwidth that is not positive.

    Examples
    --------
    >>> Link(0.5, 8.0).seconds(messages=2, sent=16)
    3.0
    """

    latency: Number
    bandwidth: Number
    reduction: Number = inf

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0 or not self.reduction > 0:
            raise ValueError(
                f"a link needs a latency of at least 0 and positive bandwidths, not {self.latency} s, "
                f"{self.bandwidth} and {self.reduction} byte/s"
            )

    def seconds(self, messages: Number, sent: Number, reduced: Number = 0.0) -> float:
        """Return the time of messages and bytes that follow each other."""
        return messages * self.latency + sent / self.bandwidth + reduced / self.reduction


def seconds(call: Call, link: Link, algorithm: str = "ring", *, pipelined: bool = True) -> float:
    """Return the seconds of a call on equal links, by an algorithm of the α–β model.

    Parameters
    ----------
    call : Call
        What is asked.
    link : Link
        Between any two ranks.
    algorithm : str
        One of `ALGORITHMS`.
    pipelined : bool
        Whether messages of unequal length follow each other at once on a ring, or wait for the longest.

    Raises
    ------
    ValueError
        For an unknown algorithm, or one by halves among a number of ranks that is no power of two.

    Examples
    --------
    >>> from muon_lab.parallel import calls
    >>> gather = calls.all_gather((25_000_000,), "bfloat16", size=8)
    >>> seconds(gather, Link(10e-6, 50e9))  # 7 messages of 50 MB
    0.00707
    """
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    if call.size == 1 or call.verb == "split":
        return 0.0
    if call.verb == "barrier":
        return link.seconds(_levels(call.size), 0.0)
    return ALGORITHMS[algorithm](call, link, pipelined)


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _halves(call: Call) -> int:
    if call.size & (call.size - 1):
        raise ValueError(f"halving and doubling needs a power of two ranks, not {call.size}")
    return _levels(call.size)


def _whole(call: Call) -> int:
    """Return the bytes of the whole tensor."""
    return sum(call.parts)


def _others(call: Call) -> Number:
    """Return the bytes that pass a rank when each part goes to everyone, or to its place: all but the least part."""
    if call.verb in ("all_reduce", "broadcast"):
        return _whole(call) * (call.size - 1) / call.size
    if call.verb == "all_to_all":  # out and in share no link; what a rank keeps is not known to others
        row = call.elements * call.itemsize
        return max(_whole(call), sum(call.received) * row) * (call.size - 1) / call.size
    return _whole(call) - min(call.parts)


def _rounds(call: Call, link: Link, pipelined: bool) -> float:
    """All gather, or reduce and scatter, in p - 1 rounds of one part."""
    messages = call.size - 1
    sent = _others(call) if pipelined else messages * max(call.parts)
    return link.seconds(messages, sent, sent if call.verb == "reduce_scatter" else 0.0)


def _ring(call: Call, link: Link, pipelined: bool) -> float:
    if call.verb == "all_reduce":
        return link.seconds(2 * (call.size - 1), 2 * _others(call), _others(call))
    if call.verb == "broadcast":
        return chain(_whole(call), call.size, link)
    if call.verb == "all_to_all":
        return link.seconds(call.size - 1, _others(call))
    return _rounds(call, link, pipelined)


def chain(sent: Number, ranks: int, link: Link, pieces: int | None = None) -> float:
    r"""Return the seconds of a broadcast down a chain, in the best number of pieces unless it is given.

    :math:`(p - 2 + k)(a + N b / k)` is least at :math:`k = \sqrt{(p - 2) N b / a}`.

    Examples
    --------
    >>> [chain(64, 4, Link(0.5, 8.0), pieces) for pieces in (1, 4, None)]
    [25.5, 15.0, 14.666666666666666]
    """
    if ranks == 1:
        return 0.0
    if pieces is None:
        transfer = (ranks - 2) * sent / link.bandwidth
        best = sqrt(transfer / link.latency) if link.latency else sent
        pieces = max(1, min(round(best), int(sent) or 1))
    return (ranks - 2 + pieces) * link.seconds(1, sent / pieces)


def _tree(call: Call, link: Link, pipelined: bool) -> float:
    levels, whole = _levels(call.size), _whole(call)
    down = link.seconds(levels, levels * whole)
    if call.verb == "broadcast":
        return down
    if call.verb == "all_reduce":
        return 2 * down + levels * whole / link.reduction
    if call.verb == "all_to_all":
        return _pairwise(call, link, pipelined)
    collected = link.seconds(levels, whole - call.parts[0])  # to the root, or from there
    return collected + down + (levels * whole / link.reduction if call.verb == "reduce_scatter" else 0.0)


def _recursive_doubling(call: Call, link: Link, pipelined: bool) -> float:
    if call.verb != "all_reduce":
        return _halving_doubling(call, link, pipelined)
    rounds = _halves(call)
    return link.seconds(rounds, rounds * _whole(call), rounds * _whole(call))


def _halving_doubling(call: Call, link: Link, pipelined: bool) -> float:
    rounds = _halves(call)
    if call.verb == "all_to_all":
        return _pairwise(call, link, pipelined)
    twice = 2 if call.verb in ("all_reduce", "broadcast") else 1
    reduced = _others(call) if call.verb in ("all_reduce", "reduce_scatter") else 0.0
    return link.seconds(twice * rounds, twice * _others(call), reduced)


def _pairwise(call: Call, link: Link, pipelined: bool) -> float:
    if call.verb == "broadcast":  # by the root alone
        return link.seconds(call.size - 1, (call.size - 1) * _whole(call))
    if call.verb == "all_to_all":
        return link.seconds(call.size - 1, _others(call))
    return _ring(call, link, pipelined)


#: Seconds of a call on a link, and whether messages of unequal length follow each other at once.
ALGORITHMS: Mapping[str, Callable[[Call, Link, bool], float]] = {
    "ring": _ring,
    "tree": _tree,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
    "pairwise": _pairwise,
}


def hierarchical(call: Call, inside: Link, outside: Link, domain: int, algorithm: str = "ring") -> float:
    r"""Return the seconds of a call in two stages: between domains on one link a rank, and within them on another.

    With d ranks in a domain and q domains: an all_reduce reduces and scatters within, all-reduces N/d bytes between,
    and gathers within; an all_gather gathers between (each of d lanes N/d bytes), then within; a reduce_scatter goes
    the other way; a broadcast crosses first; an all_to_all sends :math:`(q - 1)/q` of what it has over the outer link.

    Raises
    ------
    ValueError
        If domains of that size do not make up the group.

    Examples
    --------
    >>> from muon_lab.parallel import calls
    >>> reduced = calls.all_reduce((4_000_000,), "float32", size=16)
    >>> round(1e6 * hierarchical(reduced, Link(0, 400e9), Link(0, 50e9), domain=8))  # 35 + 40 + 35
    110
    """
    if not 1 <= domain <= call.size or call.size % domain:
        raise ValueError(f"domains of {domain} ranks do not make up a group of {call.size}")
    if domain in (1, call.size):
        return seconds(call, inside if domain == call.size else outside, algorithm)
    lanes = call.size // domain
    whole = _whole(call)
    if call.verb == "broadcast":
        return sum(
            seconds(replace(call, size=ranks, root=0), link, algorithm)
            for ranks, link in ((lanes, outside), (domain, inside))
        )
    if call.verb == "all_to_all":
        share = max(whole, sum(call.received) * call.elements * call.itemsize) / call.size
        near = inside.seconds(domain - 1, (domain - 1) * share)
        return near + outside.seconds(call.size - domain, (call.size - domain) * share)
    within = _even("all_gather", whole, domain)
    scattered = _even("reduce_scatter", whole, domain)
    between = _even(call.verb, whole / domain, lanes)
    stages = {
        "all_reduce": ((scattered, inside), (between, outside), (within, inside)),
        "reduce_scatter": ((scattered, inside), (between, outside)),
    }.get(call.verb, ((between, outside), (within, inside)))
    return sum(seconds(made, link, algorithm) for made, link in stages)


def _even(verb: str, whole: Number, ranks: int) -> Call:
    """Return a call that moves so many bytes in all, in equal parts."""
    if verb == "all_reduce":
        return Call(verb, ranks, "uint8", (round(whole),), (1,), "sum")
    return Call("all_gather" if verb == "all_gather_v" else verb, ranks, "uint8", (round(whole / ranks),), (1,) * ranks)


# --- NCCL's model ---------------------------------------------------------------------------------------------------

PROTOCOLS = ("LL", "LL128", "Simple")

#: Microseconds before anything moves, for each protocol.
BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}

#: Microseconds a step, for each protocol.
STEP = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "network": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
}

#: The most that LL gets in one node, GB/s; across two nodes and more, what the host's processor (Intel) allows.
LL_MOST = {"ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
LL_ACROSS = (39.0, 20.4)

#: What a tree gets of its bandwidth at 64 B, 128 B … 512 MiB, for each protocol.
TREE = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
)

#: Microseconds to post a message to a network card, three times as many under Simple.
POST = 1.0

#: By how much the latency of a long ring all_reduce with Simple grows across nodes.
PLATEAU = 1.4


class Tuned(NamedTuple):
    """What NCCL's model says of an algorithm and a protocol."""

    algorithm: str
    protocol: str
    latency: float
    bandwidth: float
    sent: Number

    @property
    def seconds(self) -> float:
        """The time, :math:`lat + N / bw`."""
        return self.latency + self.sent / self.bandwidth


def nccl(
    verb: str,
    sent: Number,
    ranks: int,
    *,
    generation: str,
    inside: Number,
    outside: Number = 0.0,
    nodes: int = 1,
    hardware: str = "nvlink",
) -> tuple[Tuned, ...]:
    r"""Return all that NCCL would choose from, the quickest first.

    :math:`t = lat + N / bw`, for a ring with :math:`bw = B p / n`, n steps (:math:`2 (p-1)`, :math:`p-1`, or p), B the
    bus bandwidth (halved and capped under LL, ×0.92 under LL128), and :math:`lat = base + (n - x) h + x h'`, x of the
    steps between nodes. A tree, for all_reduce alone, has :math:`bw = B / 2` (B ×0.92; LL of it 1/3.8, LL128 7/9 in one
    node and 15/16 across), times a measured factor for each length, and
    :math:`lat = base + 2 ((p / nodes - 1) h + \lfloor \log_2 nodes \rfloor h')`. LL128 is counted on two nodes at most.

    Parameters
    ----------
    verb : str
        all_reduce, all_gather, reduce_scatter or broadcast.
    sent : float
        Bytes of the whole tensor.
    ranks, nodes : int
        Number of ranks, and of NVLink domains (nodes, without NVLink between them) that they lie in.
    generation : {"ampere", "hopper", "blackwell"}
        Of the GPUs.
    inside, outside : float
        Bus bandwidth in a node, and between nodes: bytes a second on all rings together, of which each crosses by the
        network card of another rank.
    hardware : {"nvlink", "pcie", "network"}
        Within a node.

    Raises
    ------
    ValueError
        For an unknown name, or without a bandwidth of the network where one is needed.

    Examples
    --------
    >>> def latencies(ranks):
    ...     found = nccl("all_reduce", 8, ranks, generation="blackwell", inside=722e9)
    ...     return {one.protocol: round(one.latency * 1e6) for one in found if one.algorithm == "ring"}
    >>> [latencies(ranks)[protocol] for ranks in (8, 72) for protocol in ("LL", "Simple")]
    [15, 56, 92, 491]
    """
    if generation not in LL_MOST:
        raise unknown("generation", generation, LL_MOST)
    if hardware not in STEP:
        raise unknown("hardware", hardware, STEP)
    if verb not in _RING_STEPS:
        raise unknown("verb of NCCL's model", verb, _RING_STEPS)
    if nodes > 1 and outside <= 0:
        raise ValueError(f"{nodes} nodes need a bandwidth of the network, which is {outside}")
    bus = inside if nodes == 1 else min(inside, outside)
    most = (LL_MOST[generation] if nodes == 1 else LL_ACROSS[nodes > 2]) * GB
    found = []
    for index, protocol in enumerate(PROTOCOLS):
        if protocol == "LL128" and nodes > 2:
            continue
        for algorithm in ("ring", "tree") if verb == "all_reduce" else ("ring",):
            latency = _latency(algorithm, index, verb, ranks, nodes, hardware) * US
            bandwidth = _bandwidth(algorithm, index, verb, ranks, nodes, bus, most)
            if algorithm == "tree":
                size = max(int(sent) >> 6, 1).bit_length() - 1
                bandwidth *= TREE[index][size] if size < len(TREE[index]) else 1.0
            found.append(Tuned(algorithm, protocol, latency, bandwidth, sent))
    return tuple(sorted(found, key=lambda one: one.seconds))


#: From ranks (or nodes) to the steps of a ring.
_RING_STEPS: Mapping[str, Callable[[int], int]] = {
    "all_reduce": lambda p: 2 * (p - 1),
    "all_gather": lambda p: p - 1,
    "reduce_scatter": lambda p: p - 1,
    "broadcast": lambda p: p,
}


def _latency(algorithm: str, protocol: int, verb: str, ranks: int, nodes: int, hardware: str) -> float:
    """Return microseconds."""
    base, within, across = (table[algorithm][protocol] for table in (BASE, STEP[hardware], STEP["network"]))
    if algorithm == "tree":
        return base + 2 * ((ranks // nodes - 1) * within + (nodes.bit_length() - 1) * across)
    steps = _RING_STEPS[verb](ranks)
    if nodes == 1:
        return base + steps * within
    crossing = 2 * nodes if verb == "all_reduce" else _RING_STEPS[verb](nodes)
    within = max(within, POST * (3 if PROTOCOLS[protocol] == "Simple" else 1))
    latency = base + (steps - crossing) * within + crossing * across
    return latency * (PLATEAU if verb == "all_reduce" and PROTOCOLS[protocol] == "Simple" else 1)


def _bandwidth(algorithm: str, protocol: int, verb: str, ranks: int, nodes: int, bus: Number, most: Number) -> float:
    """Return bytes of the whole tensor a second."""
    name = PROTOCOLS[protocol]
    if algorithm == "ring":
        bus = {"LL": min(most, bus / 2), "LL128": bus * 0.92, "Simple": bus}[name]
        return bus * ranks / _RING_STEPS[verb](ranks)
    bus *= 0.92
    return {"LL": min(most, bus / 3.8), "LL128": bus * (7 / 9 if nodes == 1 else 15 / 16), "Simple": bus}[name] / 2


# --- Clusters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """What a job runs on.

    Parameters
    ----------
    name : str
        As in `presets`, or the user's own.
    source : str
        Where the numbers come from.
    domain : int
        Number of ranks that share the inner links.
    inside, outside : Link
        In a domain, and between domains.
    generation : str
        The GPUs whose NCCL model gives the time of a collective; "" for the α–β model of a ring.
    hardware : str
        What the inner links are, as `nccl` names them.
    rate : float
        Flops a second of large products in bfloat16, as measured or assumed; 0 if nothing is known.
    memory : float
        Bytes of a rank, 0 if unknown.
    overhead : float
        Seconds that a product takes beside its flops, however small it is. A product of f flops runs at
        :math:`R f / (f + R t_0)`, half the rate R where f is the flops of the overhead (Hockney's form).
    stream : float
        Bytes a second of a rank's own memory, by which elementwise work is priced; 0 if unknown.

    References
    ----------
    Hockney and Jesshope (1981), *Parallel Computers*, for the rate by an asymptote and the length of half of it.

    Examples
    --------
    >>> cluster = preset("gb300-nvl72")
    >>> cluster.domain, round(cluster.inside.bandwidth / 1e9)
    (72, 722)
    """

    name: str
    source: str
    domain: int
    inside: Link
    outside: Link
    generation: str = ""
    hardware: str = "nvlink"
    rate: float = 0.0
    memory: float = 0.0
    overhead: float = 0.0
    stream: float = 0.0

    def near(self, size: int, stride: int) -> int:
        """Return how many ranks of a group share a domain, given the distance of neighbours in ranks.

        Domains are filled with whole groups where those fit; else the largest number counts that divides the group.

        Examples
        --------
        >>> cluster = preset("gb300-nvl72")
        >>> cluster.near(64, 1), cluster.near(256, 1), cluster.near(4, 64), cluster.near(8, 16)
        (64, 64, 1, 4)
        """
        most = max(1, self.domain // stride)
        return max(part for part in range(1, min(size, most) + 1) if size % part == 0)

    def seconds(self, call: Call, stride: int = 1) -> float:
        """Return the seconds of a call of a group whose neighbours are so many ranks apart.

        An all_to_all is priced by the α–β model, which NCCL's own does not cover.

        Examples
        --------
        >>> from muon_lab.parallel import calls
        >>> gather = calls.all_gather((2**27,), "bfloat16", size=8)
        >>> [round(1e3 * preset(name).seconds(gather), 1) for name in ("gb300-nvl72", "h200-nvlink", "ib-ndr400")]
        [2.6, 5.1, 37.7]
        """
        if call.size == 1 or call.verb == "split":
            return 0.0
        near = self.near(call.size, stride)
        if call.verb == "all_gather_v" and not sum(call.parts):
            return 0.0
        verb = "all_gather" if call.verb == "all_gather_v" else call.verb
        if not self.generation or verb not in _RING_STEPS:
            return hierarchical(call, self.inside, self.outside, near)
        return nccl(
            verb,
            _whole(call),
            call.size,
            generation=self.generation,
            inside=self.inside.bandwidth if near > 1 else self.outside.bandwidth,
            outside=near * self.outside.bandwidth,
            nodes=call.size // near,
            hardware=self.hardware,
        )[0].seconds


#: Simple's latency a step, by which the α–β model prices long messages.
_NVLINK, _PCIE, _NETWORK = (STEP[kind]["ring"][2] * US for kind in ("nvlink", "pcie", "network"))

_NDR = Link(_NETWORK, 50 * GB)
_XDR = Link(_NETWORK, 100 * GB)

#: Measured: a single-GPU H200 machine, bf16 8192³ products, 770 to 800 TFLOP/s.
_H200 = 785e12

#: Dense bf16 2.5 PFLOP/s; that large products reach the share of it that they do on an H200 (785 of 989) is assumed.
_GB300 = 2500e12 * 785 / 989

#: Seconds of a product beside its flops. An assumption: launches take some microseconds and small products fill no GPU;
#: the published throughput of Muon asks for about as much (experiments/throughput).
_OVERHEAD = 10e-6

#: Bytes a second of HBM, nominal: NVIDIA's data sheets of the H200 and of the GB300 NVL72.
_HBM3E, _HBM3E_12 = 4.8e12, 8e12


_PRESETS = (
    Cluster(
        "h200-nvlink",
        "8 GPUs: 18 NVLink4 a GPU, 450 GB/s nominal one way (NVIDIA H200-SXM system file of MLPerf inference v4.1), of "
        "which NCCL 2.30.7 counts 18 × 20.6 GB/s (src/graph/topo.h); beyond them 400 Gb/s a GPU (same file). Rate: one "
        "measurement of bf16 8192³ products on one H200; 989 TFLOP/s and 4.8 TB/s nominal (NVIDIA H200 data sheet)",
        8,
        Link(_NVLINK, 18 * 20.6 * GB),
        _NDR,
        "hopper",
        rate=_H200,
        memory=141 * GB,
        overhead=_OVERHEAD,
        stream=_HBM3E,
    ),
    Cluster(
        "gb300-nvl72",
        "72 GPUs in one domain: 1.8 TB/s both ways a GPU, 130 TB/s a rack (NVIDIA enterprise reference architecture), "
        "of which NCCL 2.30.7 counts 18 × 40.1 GB/s one way (src/graph/topo.h); beyond them one ConnectX-8 of 800 Gb/s "
        "a GPU. Rate: 2.5 PFLOP/s dense bf16 (Verda, a web article) times the share that an H200 reaches, assumed; "
        "8 TB/s of HBM, nominal (NVIDIA GB300 NVL72 data sheet)",
        72,
        Link(_NVLINK, 18 * 40.1 * GB),
        _XDR,
        "blackwell",
        rate=_GB300,
        memory=288 * GB,
        overhead=_OVERHEAD,
        stream=_HBM3E_12,
    ),
    Cluster(
        "ib-ndr400",
        "one GPU a domain, 400 Gb/s InfiniBand each (NVIDIA H200-SXM system file of MLPerf inference v4.1); network "
        "row of NCCL 2.30.7's tuner. Rate as of h200-nvlink",
        1,
        _NDR,
        _NDR,
        "hopper",
        "network",
        rate=_H200,
        memory=141 * GB,
        overhead=_OVERHEAD,
        stream=_HBM3E,
    ),
    Cluster(
        "ib-xdr800",
        "one GPU a domain, 800 Gb/s ConnectX-8 each (NVIDIA enterprise reference architecture: 4 in a tray of 4 GPUs); "
        "network row of NCCL 2.30.7's tuner. Rate as of gb300-nvl72",
        1,
        _XDR,
        _XDR,
        "blackwell",
        "network",
        rate=_GB300,
        memory=288 * GB,
        overhead=_OVERHEAD,
        stream=_HBM3E_12,
    ),
    Cluster(
        "pcie5",
        "8 GPUs on PCIe 5 x16: 64 GB/s nominal one way; NCCL 2.30.7 counts 12 GB/s of Gen3 x16 (src/graph/topo.h), "
        "four times that here; beyond them 400 Gb/s a GPU. No compute rate: it depends on the GPU",
        8,
        Link(_PCIE, 48 * GB),
        _NDR,
        "hopper",
        "pcie",
    ),
    Cluster(
        "gloo-loopback",
        "gloo of torch 2.13 between two processes of a loaded 2-core machine, all_reduce of 4 B (259 µs) and of 16 MiB "
        "(16,987 µs), best of several: for tests of the model, and a model of no network. No compute rate",
        1,
        Link(259e-6 / 2, 2**24 / (16_987e-6 - 259e-6)),
        Link(259e-6 / 2, 2**24 / (16_987e-6 - 259e-6)),
    ),
)


def presets() -> tuple[str, ...]:
    """Return the clusters that are known by name.

    Examples
    --------
    >>> presets()
    ('h200-nvlink', 'gb300-nvl72', 'ib-ndr400', 'ib-xdr800', 'pcie5', 'gloo-loopback')
    """
    return tuple(_known())


def preset(name: str) -> Cluster:
    """Return a cluster by name.

    Raises
    ------
    ValueError
        For an unknown name; says which is nearest.
    """
    if name not in _known():
        raise unknown("cluster", name, presets())
    return _known()[name]


@cache
def _known() -> Mapping[str, Cluster]:
    return {cluster.name: cluster for cluster in _PRESETS}


def read(path: str | Path) -> Cluster:
    """Read the user's own cluster from a TOML file.

    Keys: ``name``, ``source``, ``domain``, ``generation`` (ampere, hopper, blackwell; without it the α–β model is
    used), ``hardware`` (nvlink, pcie, network), ``tflops`` of large products and ``product_us`` that each takes beside
    its flops, ``memory_gb``, ``memory_gb_s``, and tables ``[inside]`` and ``[outside]`` with ``latency_us`` and
    ``bandwidth_gb``, gigabytes a second one way. Only ``[inside]`` is needed.

    Raises
    ------
    ValueError
        If there is no such file, it is not TOML, or a key is missing, unknown or of another kind.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "lab.toml"
    ...     written = file.write_text("[inside]\\nlatency_us = 5\\nbandwidth_gb = 25")
    ...     read(file).inside
    Link(latency=4.9999999999999996e-06, bandwidth=25000000000.0, reduction=inf)
    """
    path, content = Path(path), reading.toml(Path(path))
    where = str(path)
    numbers = {"tflops": 1e12, "memory_gb": GB, "product_us": US, "memory_gb_s": GB}
    reading.only(content, where, ("name", "source", "domain", "generation", "hardware", *numbers, "inside", "outside"))
    found = {key: reading.positive(content, key, where) * unit for key, unit in numbers.items() if key in content}
    generation = reading.text(content, "generation", where, "")
    hardware = reading.text(content, "hardware", where, "nvlink")
    for key, value, names in (("generation", generation, ("", *LL_MOST)), ("hardware", hardware, STEP)):
        if value not in names:
            raise ValueError(f"{where}: {unknown(key, value, [name for name in names if name])}")
    inside = _link(content, "inside", where)
    return Cluster(
        reading.text(content, "name", where, path.stem),
        reading.text(content, "source", where, where),
        reading.whole(content, "domain", where, 1),
        inside,
        _link(content, "outside", where) if "outside" in content else inside,
        generation,
        hardware,
        rate=found.get("tflops", 0.0),
        memory=found.get("memory_gb", 0.0),
        overhead=found.get("product_us", 0.0),
        stream=found.get("memory_gb_s", 0.0),
    )


def _link(content: reading.Table, key: str, where: str) -> Link:
    table = content.get(key)
    if not isinstance(table, dict):
        raise ValueError(f"{where}: {key!r} must be a table with latency_us and bandwidth_gb, written [{key}]")
    at = f"{where} [{key}]"
    reading.only(table, at, ("latency_us", "bandwidth_gb"))
    return Link(reading.positive(table, "latency_us", at) * US, reading.positive(table, "bandwidth_gb", at) * GB)
