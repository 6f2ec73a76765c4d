"""Bytes sent by each algorithm, against the slow reference: the algorithm itself, message by message.

The reference moves sets of (part, origin) around, counts what crosses, and ends where the verb says it must.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.parallel import algorithms, calls
from muon_lab.parallel.algorithms import FAMILIES, sent, total


class Network:
    """Ranks that hold pieces, and a meter on each rank's way out."""

    def __init__(self, holdings, sizes):
        self.at = [set(holding) for holding in holdings]
        self.sizes = sizes
        self.sent = Counter()

    def send(self, source, target, parts, reduced=False):
        """Move parts: everything that the source knows of them; of a sum, any number of addends is one part."""
        parts = list(parts)
        pieces = {piece for piece in self.at[source] if piece[0] in parts}
        self.sent[source] += sum(self.sizes[part] for part in parts)
        if not reduced:
            assert {part for part, _ in pieces} == set(parts), "sent what it does not have"
        self.at[target] |= pieces

    def step(self, messages, reduced=False):
        """Send messages at the same time: each from what was there before."""
        before = [set(holding) for holding in self.at]
        after = [set(holding) for holding in self.at]
        for source, target, parts in messages:
            self.at = [set(holding) for holding in before]
            self.send(source, target, parts, reduced)
            after[target] |= self.at[target]
        self.at = after


def own(p):
    return [{(rank, rank)} for rank in range(p)]


def everything(p):
    return [{(part, rank) for part in range(p)} for rank in range(p)]


def ring_all_gather(p, sizes, turn=1):
    net = Network(own(p), sizes)
    for hop in range(p - 1):
        net.step([(rank, (rank + turn) % p, [(rank - turn * hop) % p]) for rank in range(p)])
    return net


def ring_reduce_scatter(p, sizes):
    """Rank r ends with part r: it has started on its way at rank r + 1, and gone to the right."""
    net = Network(everything(p), sizes)
    for hop in range(p - 1):
        net.step([(rank, (rank + 1) % p, [(rank - 1 - hop) % p]) for rank in range(p)], reduced=True)
    return net


def pairwise(p, sizes, start, reduced):
    net = Network(start, sizes)
    messages = [(a, b, [b] if reduced else [a]) for a in range(p) for b in range(p) if a != b]
    net.step(messages, reduced)
    return net


def doubling_all_gather(p, sizes, net=None):
    net = net or Network(own(p), sizes)
    width = 1
    while width < p:
        net.step([(rank, rank ^ width, {part for part, _ in net.at[rank]}) for rank in range(p)])
        width *= 2
    return net


def halving_reduce_scatter(p, sizes):
    net, width = Network(everything(p), sizes), p // 2
    while width:
        halves = [(rank, rank ^ width) for rank in range(p)]
        net.step([(a, b, [part for part in range(p) if part // width == b // width]) for a, b in halves], reduced=True)
        width //= 2
    return net


def tree_broadcast(p, size, root):
    net = Network([{(0, root)} if rank == root else set() for rank in range(p)], [size])
    reached = 1
    while reached < p:
        far = [(place, place + reached) for place in range(reached) if place + reached < p]
        net.step([((a + root) % p, (b + root) % p, [0]) for a, b in far])
        reached *= 2
    return net


def reduces(net, p):
    return all({origin for part, origin in net.at[rank] if part == rank} == set(range(p)) for rank in range(p))


def gathers(net, p):
    return all({part for part, _ in holding} == set(range(p)) for holding in net.at)


SIZES = st.integers(2, 9).flatmap(lambda p: st.lists(st.integers(0, 5), min_size=p, max_size=p))


@given(SIZES)
def test_gathering_and_scattering_by_ring_and_in_pairs(rows):
    p, sizes = len(rows), [12 * row for row in rows]
    gather, scatter = calls.all_gather_v((3,), "float32", rows, 0), calls.reduce_scatter((3,), "float32", rows)
    for call, family, net, ends in [
        (gather, "ring", ring_all_gather(p, sizes), gathers),
        (gather, "pairwise", pairwise(p, sizes, own(p), False), gathers),
        (scatter, "ring", ring_reduce_scatter(p, sizes), reduces),
        (scatter, "pairwise", pairwise(p, sizes, everything(p), True), reduces),
    ]:
        assert ends(net, p)
        assert [sent(call, rank, family) for rank in range(p)] == [net.sent[rank] for rank in range(p)]
        assert total(call, family) == (p - 1) * sum(sizes)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_gathering_and_scattering_by_doubling_and_halving(p):
    rows = [(5 * rank + 3) % 7 for rank in range(p)]
    sizes = [2 * row for row in rows]
    gather, scatter = calls.all_gather_v((), "bfloat16", rows, 0), calls.reduce_scatter((), "bfloat16", rows)
    for call, net, ends in [
        (gather, doubling_all_gather(p, sizes), gathers),
        (scatter, halving_reduce_scatter(p, sizes), reduces),
    ]:
        assert ends(net, p)
        assert [sent(call, rank, "halving_doubling") for rank in range(p)] == [net.sent[rank] for rank in range(p)]


@pytest.mark.parametrize("elements", [1, 7, 64, 1001])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(p, elements):
    call = calls.all_reduce((elements,), "float32", p)
    parts = algorithms.chunks(call)
    for family, halves in {
        "pairwise": (pairwise(p, parts, everything(p), True), pairwise(p, parts, own(p), False)),
        "halving_doubling": (halving_reduce_scatter(p, parts), doubling_all_gather(p, parts)),
    }.items():
        net = [sum(half.sent[rank] for half in halves) for rank in range(p)]
        assert [sent(call, rank, family) for rank in range(p)] == net
    halves = ring_reduce_scatter(p, parts), ring_all_gather(p, parts, turn=-1)
    net = [sum(half.sent[rank] for half in halves) for rank in range(p)]
    assert [sent(call, rank, "ring") for rank in range(p)] == net
    for family in FAMILIES:
        assert total(call, family) == 2 * (p - 1) * 4 * elements


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("root", [0, 1])
def test_broadcasts(p, root):
    root = root % p
    call = calls.broadcast((5,), "float64", p, root)
    net = tree_broadcast(p, 40, root)
    assert all(net.at)
    for family in ("tree", "gloo"):
        assert [sent(call, rank, family) for rank in range(p)] == [net.sent[rank] for rank in range(p)]
    assert [sent(call, rank, "pairwise") for rank in range(p)] == [(p - 1) * 40 * (rank == root) for rank in range(p)]
    last = (root - 1) % p
    assert [sent(call, rank, "ring") for rank in range(p)] == [40 * (rank != last) for rank in range(p)]
    assert sent(call, root, "tree") == 40 * (p - 1).bit_length()


@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_broadcast_by_scatter_and_gather(p):
    call = calls.broadcast((5 * p,), "float32", p, root=1)
    parts = [20] * p
    net, width = Network([set() for _ in range(p)], parts), p // 2
    net.at[0] = {(part, 0) for part in range(p)}
    while width:
        net.step([(place, place + width, range(place + width, place + 2 * width)) for place in range(0, p, 2 * width)])
        width //= 2
    net.at = [{(place, 0)} for place in range(p)]
    doubling_all_gather(p, parts, net)
    assert gathers(net, p)
    assert [sent(call, (place + 1) % p, "halving_doubling") for place in range(p)] == [net.sent[p_] for p_ in range(p)]


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_trees_gather_and_scatter_what_lies_below(p):
    """Up the tree goes what was gathered, once a rank; down goes the whole, or what is still to be delivered."""
    rows = [rank + 1 for rank in range(p)]
    gather, scatter = calls.all_gather_v((), "uint8", rows, 0), calls.reduce_scatter((), "uint8", rows)
    parent = [0, *(rank - (1 << (rank.bit_length() - 1)) for rank in range(1, p))]
    below = [{rank} for rank in range(p)]
    for rank in reversed(range(1, p)):
        below[parent[rank]] |= below[rank]
    for rank in range(p):
        children = [child for child in range(1, p) if parent[child] == rank]
        up = sum(rows[other] for other in below[rank]) if rank else 0
        down = sum(sum(rows[other] for other in below[child]) for child in children)
        assert sent(gather, rank, "tree") == up + len(children) * sum(rows)
        assert sent(scatter, rank, "tree") == (sum(rows) if rank else 0) + down


def test_gloo_gathers_unequal_rows_by_one_tree_an_owner_and_reduces_before_it_scatters():
    rows = [3, 0, 1, 2]
    gather = calls.all_gather_v((4,), "float32", rows, 0)
    nets = [tree_broadcast(4, 16 * row, owner) for owner, row in enumerate(rows)]
    assert [sent(gather, rank, "gloo") for rank in range(4)] == [
        sum(net.sent[rank] for net in nets) for rank in range(4)
    ]
    assert total(gather, "gloo") == total(gather, "ring") == 3 * 16 * 6
    scatter = calls.reduce_scatter((64,), "float32", [4, 4, 4, 4])
    assert total(scatter, "gloo") == 2 * total(scatter, "ring")


@given(st.integers(0, 10**7), st.sampled_from([1, 2, 4, 8]), st.integers(1, 16))
def test_gloo_chunks_cover_the_tensor(elements, itemsize, ranks):
    chunks = algorithms.gloo_chunks(elements, itemsize, ranks)
    assert len(chunks) == ranks
    assert sum(chunks) == elements
    assert min(chunks) >= 0
    assert sorted(chunks, reverse=True) == list(chunks)


def test_all_to_all_sends_all_but_the_own_rows():
    call = calls.all_to_all((2,), "int64", [3, 1, 2], [3, 0, 0])
    assert [sent(call, rank) for rank in range(3)] == [48, 80, 64]


def test_one_rank_sends_nothing_and_a_barrier_carries_nothing():
    for family in FAMILIES:
        assert sent(calls.all_reduce((100,), "float32", 1), 0, family) == 0
        assert sent(calls.barrier(8), 3, family) == 0


def test_published_volumes_of_a_4096_by_1024_matrix():
    """float32, tp 8, 5 steps, MiB a rank: gathered once 14, Gram matrices of all steps 35, owners 3.5, one Gram 7."""
    mib = 2**20
    gram, rows = calls.all_reduce((1024, 1024), "float32", 8), [512] * 8
    assert sent(calls.all_gather_v((1024,), "float32", rows, 0), 0) == 14 * mib
    assert 5 * sent(gram, 0) == 35 * mib
    assert sent(gram, 0) == 7 * mib
    there_and_back = 2 * sent(calls.all_to_all((1024,), "float32", [512] * 8, [512] * 8), 0)
    assert there_and_back / 8 == 3.5 * mib  # for 8 matrices, one an owner


@pytest.mark.parametrize(
    ("call", "rank", "family", "message"),
    [
        (calls.all_reduce((4,), "float32", 4), 0, "star", "algorithm must be one of ring, pairwise, tree"),
        (calls.all_reduce((4,), "float32", 4), 4, "ring", r"must lie in 0\.\.3, not be 4"),
        (calls.all_reduce((4,), "float32", 6), 0, "halving_doubling", "power of two ranks, not 6"),
    ],
)
def test_bad_questions_are_refused(call, rank, family, message):
    with pytest.raises(ValueError, match=message):
        sent(call, rank, family)


def test_no_torch_is_needed():
    import subprocess
    import sys

    program = "import sys; from muon_lab.parallel import algorithms, calls, grid; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
