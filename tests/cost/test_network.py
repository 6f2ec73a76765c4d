"""Seconds of collectives: against the rounds themselves, NCCL's worked examples, and torch's port of its model."""

import math

import pytest

from muon_lab.cost import network
from muon_lab.cost.network import GB, US, Link
from muon_lab.parallel import algorithms, calls
from muon_lab.parallel.calls import Call

LINK = Link(0.25, 8.0, 64.0)


def rounds(link, messages):
    """Return the seconds of rounds, each as long as its longest message; a message is bytes sent and bytes added."""
    return sum(
        link.latency + max(sent for sent, _ in one) / link.bandwidth + max(r for _, r in one) / link.reduction
        for one in messages
    )


def ring(ranks, part, reduced):
    return [[(part, part if reduced else 0)] * ranks for _ in range(ranks - 1)]


def doubling(ranks, whole, reduced, halving):
    """Halves are exchanged at distance p/2, p/4 …; doubling goes the other way."""
    parts = [whole / 2**step for step in range(1, ranks.bit_length())]
    return [[(part, part if reduced else 0)] for part in (parts if halving else reversed(parts))]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_model_is_the_time_of_its_rounds(ranks):
    part = 96
    whole = part * ranks
    reduce, gather = (
        calls.all_reduce((whole,), "uint8", ranks),
        calls.all_gather((part,), "uint8", ranks),
    )
    scatter = calls.reduce_scatter((part,), "uint8", (1,) * ranks)
    expected = {
        ("ring", reduce): ring(ranks, part, True) + ring(ranks, part, False),
        ("ring", gather): ring(ranks, part, False),
        ("ring", scatter): ring(ranks, part, True),
        ("pairwise", gather): ring(ranks, part, False),
        ("pairwise", calls.all_to_all((), "uint8", (part,) * ranks, (part,) * ranks)): ring(ranks, part, False),
        ("halving_doubling", reduce): doubling(ranks, whole, True, True) + doubling(ranks, whole, False, False),
        ("halving_doubling", gather): doubling(ranks, whole, False, False),
        ("halving_doubling", scatter): doubling(ranks, whole, True, True),
        ("recursive_doubling", reduce): [[(whole, whole)]] * (ranks.bit_length() - 1),
        ("tree", calls.broadcast((whole,), "uint8", ranks)): [[(whole, 0)]] * (ranks.bit_length() - 1),
        ("tree", reduce): [[(whole, whole)]] * (ranks.bit_length() - 1) + [[(whole, 0)]] * (ranks.bit_length() - 1),
    }
    for (algorithm, call), messages in expected.items():
        assert network.seconds(call, LINK, algorithm) == pytest.approx(rounds(LINK, messages), rel=1e-14), algorithm


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_without_latency_it_is_the_bytes_of_the_busiest_rank(verb, algorithm):
    call = {
        "all_reduce": calls.all_reduce((64,), "float32", 8),
        "all_gather": calls.all_gather((8,), "float32", 8),
        "reduce_scatter": calls.reduce_scatter((8,), "float32", (1,) * 8),
    }[verb]
    sent = max(algorithms.sent(call, rank, algorithm) for rank in range(8))
    assert network.seconds(call, Link(0.0, 2.0), algorithm) == sent / 2.0


def test_unequal_parts_on_a_ring():
    call = calls.all_gather_v((), "uint8", (30, 0, 10), 0)
    free, waiting = (network.seconds(call, LINK, pipelined=pipelined) for pipelined in (True, False))
    assert free == 2 * 0.25 + 40 / 8
    assert waiting == 2 * (0.25 + 30 / 8)


def test_a_chain_in_the_best_number_of_pieces_is_no_slower_than_in_any_other():
    best = network.chain(4096, 6, LINK)
    assert best == pytest.approx(min(network.chain(4096, 6, LINK, pieces) for pieces in range(1, 400)), rel=1e-4)
    assert network.chain(4096, 6, LINK, 1) == pytest.approx(5 * (0.25 + 512))


def test_halves_need_a_power_of_two():
    with pytest.raises(ValueError, match="power of two ranks, not 6"):
        network.seconds(calls.all_reduce((6,), "float32", 6), LINK, "halving_doubling")
    with pytest.raises(ValueError, match="did you mean 'ring'"):
        network.seconds(calls.all_reduce((6,), "float32", 6), LINK, "rings")


def test_two_stages_are_the_sum_of_theirs():
    fast, slow = Link(0.5, 32.0), Link(2.0, 4.0)
    part = {
        "scatter": network.seconds(calls.reduce_scatter((16,), "uint8", (1,) * 4), fast),
        "between": network.seconds(calls.all_reduce((16,), "uint8", 2), slow),
        "gather": network.seconds(calls.all_gather((16,), "uint8", 4), fast),
    }
    whole = calls.all_reduce((64,), "uint8", 8)
    assert network.hierarchical(whole, fast, slow, 4) == sum(part.values())
    gathered = network.hierarchical(calls.all_gather((8,), "uint8", 8), fast, slow, 4)
    assert gathered == network.seconds(calls.all_gather((8,), "uint8", 2), slow) + part["gather"]
    assert network.hierarchical(whole, fast, slow, 8) == network.seconds(whole, fast)
    assert network.hierarchical(whole, fast, slow, 1) == network.seconds(whole, slow)
    dealt = calls.all_to_all((), "uint8", (8,) * 8, (8,) * 8)
    assert network.hierarchical(dealt, fast, slow, 4) == fast.seconds(3, 24) + slow.seconds(4, 32)
    with pytest.raises(ValueError, match="domains of 3 ranks do not make up a group of 8"):
        network.hierarchical(whole, fast, slow, 3)


def test_one_rank_takes_no_time():
    assert network.seconds(calls.all_reduce((6,), "float32", 1), LINK) == 0.0
    assert network.preset("gb300-nvl72").seconds(calls.all_gather((6,), "float32", 1)) == 0.0


@pytest.mark.parametrize(
    ("ranks", "protocol", "microseconds"), [(8, "LL", 15), (72, "LL", 92), (8, "Simple", 56), (72, "Simple", 491)]
)
def test_worked_examples_of_the_latency_of_a_ring(ranks, protocol, microseconds):
    found = network.nccl("all_reduce", 0, ranks, generation="hopper", inside=371 * GB)
    (ring_,) = [one for one in found if (one.algorithm, one.protocol) == ("ring", protocol)]
    assert round(ring_.latency / US) == microseconds


def test_bus_bandwidth_of_long_messages_is_that_of_the_link():
    """nccl-tests' factors: 2 (p-1)/p for all_reduce, (p-1)/p for the others."""
    for verb, factor in (("all_reduce", 14 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8)):
        best = network.nccl(verb, 1e15, 8, generation="hopper", inside=371 * GB)[0]
        assert 1e15 / best.seconds * factor == pytest.approx(371 * GB, rel=1e-6)
        assert (best.algorithm, best.protocol) == ("ring", "Simple")


@pytest.mark.parametrize("generation", ["hopper", "blackwell"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("sent", [64, 4096, 2**20, 2**28])
def test_torch_has_the_same_model_of_one_node(generation, ranks, sent, monkeypatch):
    """Where torch takes 15/16 (LL128 on a ring) or all (LL, LL128 on a tree) of a bandwidth, NCCL takes 0.92 of it."""
    port = pytest.importorskip("torch._inductor.comm_analysis")
    if not hasattr(port, "_nccl_algo_time"):
        pytest.skip("this torch has another model")
    inside = {"hopper": 370.0, "blackwell": 720.0}[generation]
    monkeypatch.setattr(port, "get_gpu_type", lambda: port.NVIDIA_GPU_TYPE[generation.upper()])
    monkeypatch.setattr(port, "get_intra_node_bw", lambda: inside)
    monkeypatch.setattr(port, "_has_nvlink", lambda: True)
    monkeypatch.setattr(port.torch.cuda, "is_available", lambda: False)
    slower = {("ring", "LL128"): 15 / 16 / 0.92, ("tree", "LL"): 1 / 0.92, ("tree", "LL128"): 1 / 0.92}
    for verb in ("all_reduce", "all_gather", "reduce_scatter"):
        for one in network.nccl(verb, sent, ranks, generation=generation, inside=inside * GB):
            keys = (
                port.NCCL_COLL[verb.upper()],
                port.NCCL_ALGO[one.algorithm.upper()],
                port.NCCL_PROTO[one.protocol.upper()],
            )
            theirs = port._nccl_algo_time(sent, ranks, *keys)
            empty = port._nccl_algo_time(0, ranks, *keys)
            assert one.latency / US == pytest.approx(empty, rel=1e-12)
            factor = slower.get((one.algorithm, one.protocol), 1.0)
            assert one.seconds / US == pytest.approx(empty + (theirs - empty) * factor, rel=1e-12)


def test_across_nodes_a_ring_pays_for_crossing():
    one = {"generation": "hopper", "inside": 371 * GB, "outside": 400 * GB}
    near = {x[:2]: x for x in network.nccl("all_reduce", 2**20, 16, **one)}
    far = {x[:2]: x for x in network.nccl("all_reduce", 2**20, 16, nodes=2, **one)}
    assert far["ring", "LL"].latency / US == pytest.approx(6.6 + (30 - 4) * 1.0 + 4 * 2.7)
    assert far["ring", "Simple"].latency / US == pytest.approx(1.4 * (8.4 + (30 - 4) * 3.4 + 4 * 14.0))
    assert far["tree", "LL128"].latency / US == pytest.approx(14.0 + 2 * (7 * 1.25 + 8.5))
    assert near["ring", "LL"].latency < far["ring", "LL"].latency
    many = network.nccl("all_reduce", 2**20, 32, nodes=4, **one)
    assert "LL128" not in {found.protocol for found in many}
    with pytest.raises(ValueError, match="2 nodes need a bandwidth of the network"):
        network.nccl("all_reduce", 8, 16, generation="hopper", inside=GB, nodes=2)
    with pytest.raises(ValueError, match="did you mean 'hopper'"):
        network.nccl("all_reduce", 8, 16, generation="hoper", inside=GB)
    with pytest.raises(ValueError, match="unknown verb"):
        network.nccl("all_to_all", 8, 16, generation="hopper", inside=GB)


@pytest.mark.parametrize("name", network.presets())
def test_presets_have_sources_and_price_every_verb(name):
    cluster = network.preset(name)
    assert len(cluster.source) > 60
    made = [
        calls.all_reduce((2**20,), "bfloat16", 16),
        calls.all_gather((2**16,), "bfloat16", 16),
        calls.all_gather_v((), "bfloat16", tuple(range(16)), 3),
        calls.reduce_scatter((2**16,), "float32", (1,) * 16),
        calls.broadcast((2**20,), "bfloat16", 16),
        calls.all_to_all((), "bfloat16", (2**16,) * 16, (2**16,) * 16),
    ]
    times = [cluster.seconds(call, stride) for call in made for stride in (1, 8)]
    assert all(0 < time < math.inf for time in times)


def test_the_loopback_preset_goes_through_what_was_measured():
    """gloo's all_reduce between two processes, microseconds: ends of the fit exactly, what lies between within two."""
    cluster = network.preset("gloo-loopback")
    for sent, measured in ((4, 259), (2**14, 514), (2**18, 724), (2**20, 1380), (2**22, 5036), (2**24, 16987)):
        found = cluster.seconds(Call("all_reduce", 2, "uint8", (sent,), (1,), "sum")) / US
        assert found == pytest.approx(measured, rel=1e-3) if sent in (4, 2**24) else 1 / 2 < found / measured < 2


def test_more_bandwidth_is_never_slower():
    gather = calls.all_gather((2**26,), "bfloat16", 8)
    times = [network.preset(name).seconds(gather) for name in ("gb300-nvl72", "h200-nvlink", "ib-xdr800", "ib-ndr400")]
    assert times == sorted(times)


OWN = """
name = "lab"
domain = 4
tflops = 100
[inside]
latency_us = 4
bandwidth_gb = 200
[outside]
latency_us = 20
bandwidth_gb = 12.5
"""


def test_a_cluster_of_ones_own(tmp_path):
    (tmp_path / "lab.toml").write_text(OWN)
    cluster = network.read(tmp_path / "lab.toml")
    assert (cluster.name, cluster.domain, cluster.rate, cluster.overhead) == ("lab", 4, 1e14, 0.0)
    (tmp_path / "lab.toml").write_text("product_us = 7\nmemory_gb_s = 900\n" + OWN)
    more = network.read(tmp_path / "lab.toml")
    assert (more.overhead, more.stream) == (pytest.approx(7e-6), 9e11)
    call = calls.all_reduce((2**20,), "bfloat16", 8)
    assert cluster.seconds(call) == network.hierarchical(call, cluster.inside, cluster.outside, 4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("latency_us = 4\n", "", "'latency_us' must be a positive number, not None"),
        ("bandwidth_gb = 200", 'bandwidth_gb = "200"', "must be a positive number, not '200'"),
        ("domain = 4", "domian = 4", "unknown key 'domian': did you mean 'domain'"),
        ("[inside]", "[insied]", "unknown key 'insied': did you mean 'inside'"),
        ("domain = 4", 'generation = "hoper"', "did you mean 'hopper'"),
        ("domain = 4", "domain = 0", "'domain' must be a whole number of at least 1, not 0"),
        ("[inside]", "[inside", "is not valid TOML"),
    ],
)
def test_a_cluster_with_a_mistake_is_refused_in_one_sentence(old, new, message, tmp_path):
    (tmp_path / "lab.toml").write_text(OWN.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"lab\.toml") as refused:
        network.read(tmp_path / "lab.toml")
    assert message in str(refused.value)


def test_an_unknown_cluster_has_a_nearest_one():
    with pytest.raises(ValueError, match="did you mean 'gb300-nvl72'"):
        network.preset("gb300")
