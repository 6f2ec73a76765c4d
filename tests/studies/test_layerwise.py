"""Layer-wise data parallelism in closed form: bytes against real ledgers, seconds by hand, published ratios."""

import subprocess
import sys
from functools import partial
from math import prod

import pytest
import torch

from muon_lab import studies
from muon_lab.cost import flops, inventory, network
from muon_lab.parallel import LayerwiseOptimizer, balance, worlds
from muon_lab.parallel.grid import even
from muon_lab.parallel.ledger import Ledger
from muon_lab.studies import layerwise
from muon_lab.studies.running import run_case
from muon_lab.studies.study import LeftOut

STUDY = studies.get("layerwise")


def point(**axes):
    return {name: values[0] for name, values in STUDY.defaults.items()} | {"model": "gpt2", "ranks": 8} | axes


def row(**axes):
    (case,) = STUDY.settle(point(**axes), None)
    found = run_case("layerwise", case)
    assert (found["outcome"], (found["note"] or "")[:300]) == ("ok", "")
    return found


def matrices(model, ep=1):
    layers = inventory.get(model).without("router").matrices
    return [layer for layer in layers for _ in range(layer.count // (ep if layer.expert else 1))]


# --- published ratios -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "ratio"),
    [
        ({"model": "llama-3-70b", "ranks": 64, "policy": "round_robin"}, 1.093),
        ({"model": "llama-3-70b", "ranks": 64, "policy": "lpt_flops"}, 1.011),
        ({"model": "kimi-k2", "ranks": 256, "policy": "round_robin"}, 1.101),
        ({"model": "kimi-k2", "ranks": 256, "policy": "lpt_flops"}, 1.001),
        ({"model": "kimi-k2", "ranks": 256, "ep": 32, "policy": "lpt_flops"}, 2.333),
        ({"model": "qwen3-30b-a3b", "ranks": 256, "ep": 8, "policy": "lpt_elements"}, 1.420),
    ],
)
def test_published_ratios_come_out(axes, ratio):
    assert round(row(**axes)["ratio"], 3) == ratio


def test_hybrid_brings_the_worst_case_under_115_percent():
    found = row(model="kimi-k2", ranks=256, ep=32, policy="hybrid")
    assert found["ratio"] < 1.15 < found["largest"]
    assert (found["divided"], found["team"]) == (64, 4)


def test_the_command_runs_without_ranks_or_torch():
    code = (
        "import sys; from muon_lab import studies; s = studies.get('layerwise');"
        "(case,) = s.settle({k: v[0] for k, v in s.defaults.items()} | {'policy': 'hybrid'}, None);"
        "assert s.row(case)['outcome'] == 'ok'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", layerwise.POLICIES)
def test_exact_sizes_move_the_same_whatever_the_policy(policy):
    """A ring moves each byte once to each of the others: (p - 1)/p of everything a rank, on average."""
    N = sum(prod(layer.shape) for layer in matrices("gpt2"))
    found = row(policy=policy, ranks=6, weight="bfloat16", gradient="float32")
    assert found["reduce_bytes"] == 5 * N * 4 / 6
    assert found["gather_bytes"] == 5 * N * 2 / 6
    assert found["padding_bytes"] == 0
    part = -(-N // 6)
    assert found["zero1_bytes"] == 5 * part * (4 + 2)
    assert found["muon_bytes"] == 5 * part * 4
    everyone = row(policy=policy, ranks=6, reduce="all_reduce")
    assert everyone["reduce_bytes"] == 2 * found["reduce_bytes"]


def test_padded_shares_are_as_long_as_the_longest_of_their_bucket():
    layers = matrices("gpt2")
    place = layerwise._bucket_of(12, 5)
    numbers = [block for layer in inventory.get("gpt2").matrices for block in layer.blocks]
    owners = [number % 8 for number in range(len(layers))]
    widths = []
    for bucket in range(5):
        held = [0] * 8
        for owner, layer, block in zip(owners, layers, numbers, strict=True):
            held[owner] += prod(layer.shape) * (place[block] == bucket)
        widths.append(max(held))
    padded, exact = (row(policy="round_robin", buckets=5, gather=gather) for gather in ("padded", "exact"))
    assert padded["gather_bytes"] == 7 * sum(widths) * 2
    assert padded["reduce_bytes"] == 7 * sum(widths) * 4
    moved = [found["gather_bytes"] + found["reduce_bytes"] for found in (padded, exact)]
    assert padded["padding_bytes"] == moved[0] - moved[1]
    everyone = row(policy="round_robin", buckets=5, gather="padded", reduce="all_reduce")
    assert (
        everyone["padding_bytes"] == padded["gather_bytes"] - exact["gather_bytes"]
    )  # nothing to pad in an all_reduce


def _real(gather, reduce, world):
    """Take a step of a real optimizer, and return its calls by bucket: gradients, then weights."""
    ledger = Ledger(world)
    shapes = [(6, 4), (4, 4), (2, 8), (4, 6), (3, 3)]
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])
    optimizer = LayerwiseOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        ledger,
        owners=[0, 1, 0, 1, 1],
        gather=gather,
        reduce=reduce,
        model=model,
        bucket=160,
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shares = [bucket.shares for bucket in optimizer.buckets]
    return shares, [(record.column("phase"), record.call) for record in ledger.records]


@pytest.mark.world
@pytest.mark.parametrize("gather", ["exact", "padded"])
@pytest.mark.parametrize("reduce", ["reduce_scatter", "all_reduce"])
def test_a_step_is_priced_by_the_calls_that_the_real_optimizer_makes(gather, reduce):
    shares, calls = worlds.run(partial(_real, gather, reduce), ranks=2)[0]
    assert len(shares) > 1
    priced = []

    def price(call):
        priced.append(call)
        return 1.0

    layerwise.step(
        [0.0] * len(shares),
        [0.0] * len(shares),
        [0.0, 0.0],
        [shares],
        [price],
        weight="float32",
        gather=gather,
        reduce=reduce,
    )
    gradients = [call for phase, call in calls if phase == "gradients"]
    weights = [call for phase, call in calls if phase == "parameters"]
    assert priced == [*gradients[::-1], *weights]  # backward fills buckets from the last


# --- experts ----------------------------------------------------------------------------------------------------------


def test_experts_apart_are_dealt_out_over_the_ranks_that_have_them():
    (case,) = STUDY.settle(point(model="qwen3-30b-a3b", ranks=16, ep=8, experts="apart", policy="round_robin"), None)
    dense, experts = layerwise._groups(case)
    assert (dense.assignment.ranks, dense.stride) == (16, 1)
    assert (experts.assignment.ranks, experts.stride) == (2, 8)
    loads = [dense.assignment.loads[rank] + experts.assignment.loads[rank // 8] for rank in range(16)]
    found = run_case("layerwise", case)
    assert found["makespan"] == max(loads)
    assert found["ideal"] == pytest.approx(sum(loads) / 16, rel=1e-14)
    N = [sum(prod(layer.shape) for layer in group.layers) for group in (dense, experts)]
    assert found["gather_bytes"] == pytest.approx((15 * N[0] / 16 + N[1] / 2) * 2, rel=1e-14)


def test_experts_that_nobody_shares_are_not_sent():
    apart = row(model="qwen3-30b-a3b", ranks=8, ep=8, experts="apart")
    dense = sum(prod(layer.shape) for layer in matrices("qwen3-30b-a3b", 8) if not layer.expert)
    assert apart["gather_bytes"] == 7 * dense * 2 / 8


# --- seconds ----------------------------------------------------------------------------------------------------------

OWN = {"link": "own", "latency_us": 0.0, "bandwidth_gb": 10.0, "tflops": 100.0}


def test_seconds_by_hand():
    """One bucket, two ranks: half of all gradients and half of all weights pass a link of 10 GB/s."""
    layers = matrices("gpt2")
    N = sum(prod(layer.shape) for layer in layers)
    work = [flops.newton_schulz(*layer.shape, 5) for layer in layers]
    found = row(ranks=2, buckets=1, tokens=100, overlap="none", policy="round_robin", **OWN)
    head = 50257 * 768  # tied to the embedding, and read as the head
    assert found["compute_seconds"] == pytest.approx(6 * 100 * (N + head) / 1e14, rel=1e-12)
    assert found["update_seconds"] == pytest.approx(max(sum(work[::2]), sum(work[1::2])) / 1e14, rel=1e-12)
    assert found["link_seconds"] == pytest.approx((N / 2) * (4 + 2) / 1e10, rel=1e-12)
    total = found["compute_seconds"] + found["update_seconds"] + found["link_seconds"]
    assert found["step_seconds"] == pytest.approx(total, rel=1e-12)
    assert found["serial_seconds"] == pytest.approx(total, rel=1e-12)
    assert found["exposed_seconds"] == pytest.approx(found["link_seconds"], rel=1e-9)


def test_experts_compute_by_their_active_share():
    """Six flops a token and active parameter; what is published of those includes the embedding, which computes not."""
    model = inventory.get("qwen3-30b-a3b")
    found = row(model="qwen3-30b-a3b", ranks=8, tokens=10, **OWN)
    embedding = model.layer("embedding").parameters
    expected = 60 * (model.active - embedding - model.vectors) / 1e14
    assert found["compute_seconds"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("overlap", layerwise.OVERLAPS)
@pytest.mark.parametrize("gather", ["exact", "padded"])
@pytest.mark.parametrize("bandwidth", [1.0, 20.0, 1e6])
def test_exposed_and_hidden_time_make_up_the_links(overlap, gather, bandwidth):
    found = row(ranks=4, buckets=6, overlap=overlap, gather=gather, **OWN | {"bandwidth_gb": bandwidth})
    least = found["compute_seconds"] + found["update_seconds"]
    assert found["exposed_seconds"] + found["hidden_seconds"] == pytest.approx(found["link_seconds"], rel=1e-12)
    assert found["step_seconds"] == pytest.approx(least + found["exposed_seconds"], rel=1e-9)
    assert found["hidden_seconds"] >= 0
    assert found["step_seconds"] <= found["serial_seconds"] * (1 + 1e-12)
    if overlap == "none":
        assert found["hidden_seconds"] == pytest.approx(0, abs=1e-9 * found["step_seconds"])


def test_more_overlap_hides_more_and_one_bucket_hides_nothing():
    for buckets in (1, 6):
        hidden = [row(ranks=4, buckets=buckets, overlap=how, **OWN)["hidden_seconds"] for how in layerwise.OVERLAPS]
        if buckets == 1:
            assert hidden == pytest.approx([0, 0, 0], abs=1e-12)
        else:
            assert hidden[0] < hidden[1] < hidden[2]


def test_teams_take_part_in_the_update_and_pay_for_what_they_tell():
    """gpt2 on 64 ranks: each team of two sums five Gram matrices of 768² in bfloat16 and the norm, on a ring."""
    found = row(ranks=64, policy="hybrid", **OWN)
    (case,) = STUDY.settle(point(ranks=64, policy="hybrid", **OWN), None)
    (group,) = layerwise._groups(case)
    assert {len(team.members) for team in group.assignment.teams} == {found["team"]} == {2}
    per_rank = [0] * 64
    for team in group.assignment.teams:
        assert min(group.layers[team.job].shape) == 768
        for rank in team.members:
            per_rank[rank] += 1
    assert found["team_bytes"] == max(per_rank) * (5 * 768 * 768 * 2 + 24)
    loads = [
        load / 1e14 + teams * (5 * 768 * 768 * 2 + 24) / 1e10
        for load, teams in zip(group.assignment.loads, per_rank, strict=True)
    ]
    assert found["update_seconds"] == pytest.approx(max(loads), rel=1e-12)
    assert found["divided"] == len(group.assignment.teams)


def test_members_do_what_the_distributed_layout_does():
    case = point(policy="hybrid", steps=5, kernel="syrk")
    for shape in ((7168, 18432), (18432, 7168)):
        cut = even(18432, 4, int(shape[1] == 18432))
        assert layerwise._share(case, shape, 4) == flops.layout("distributed", shape, cut, 0, 5, "syrk")
        assert layerwise._share(case, shape, 1) == flops.newton_schulz(*shape, 5, "syrk")


def test_a_prediction_from_owners_costs_bytes_and_a_link():
    """Two ranks of measured costs: the slower one is waited for, and its share of the link too."""
    costs, sizes = [3.0, 1.0, 1.0], [10, 6, 4]
    found = balance.assigned([0, 1, 1], costs, 2, sizes)
    link = network.Link(latency=0.5, bandwidth=4.0)
    step = layerwise.step(
        [2.0, 2.0],
        [4.0, 4.0],
        found.loads,
        [[found.shares([0]), found.shares([1, 2])]],
        [lambda call: network.seconds(call, link)],
        weight="float32",
    )
    assert step.reduce == step.gather == (10.5, 10.5)  # 40 bytes go from one rank to the other
    assert step.update == 3.0
    assert step.seconds() == 12 + 3 + 4 * 10.5


def test_a_preset_without_a_rate_gives_bytes_but_no_seconds():
    found = row(link="pcie5")
    assert found["gather_bytes"] > 0
    assert found["step_seconds"] is None
    assert row(link="pcie5", tflops=100.0)["step_seconds"] > 0
    assert row(method="svd")["step_seconds"] is None
    assert row(method="svd")["ratio"] >= 1


# --- axes -------------------------------------------------------------------------------------------------------------


def test_what_cannot_matter_is_none():
    (case,) = STUDY.settle(point(policy="round_robin", cap=1.3), None)
    assert (case["cap"], case["experts"], case["latency_us"], case["bandwidth_gb"]) == (None,) * 4
    (case,) = STUDY.settle(point(policy="lpt_flops", cap=1.3, link="own", model="qwen3-30b-a3b", ep=8), None)
    assert (case["cap"], case["experts"], case["latency_us"], case["bandwidth_gb"]) == (1.3, "together", 10.0, 50.0)


def test_a_cap_holds():
    free, capped = (row(model="qwen3-30b-a3b", ranks=256, ep=8, policy="lpt_flops", cap=cap) for cap in (0.0, 1.2))
    assert capped["memory"] <= 1.2 < free["memory"]
    assert capped["ratio"] > free["ratio"]


def test_round_robin_sees_the_order_of_matrices():
    kinds, blocks = (
        row(model="llama-3-70b", ranks=64, policy="round_robin", order=order) for order in layerwise.ORDERS
    )
    assert (round(kinds["ratio"], 3), round(blocks["ratio"], 3)) == (1.093, 1.226)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"ep": 8}, "gpt2 has no experts, so ep=1 alone"),
        ({"model": "kimi-k2", "ep": 7}, "ep=7 does not divide the 384 experts of kimi-k2"),
        ({"model": "kimi-k2", "ep": 32, "ranks": 8, "experts": "apart"}, "ep=32 does not divide 8 ranks"),
        ({"buckets": 13}, "gpt2 has 12 blocks, too few for 13 buckets"),
        ({"policy": "hybrid", "method": "svd"}, "teams share newton_schulz, cubic, gram, but not svd"),
        ({"policy": "lpt_flops", "ranks": 64, "cap": 1.3}, "cap is 1.3 times a mean of"),
    ],
)
def test_what_cannot_be_asked_is_left_out(axes, reason):
    with pytest.raises(LeftOut, match=reason):
        list(STUDY.settle(point(**axes), None))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"policy": "lpt"}, "unknown policy 'lpt': did you mean 'lpt_elements'"),
        ({"model": "kimi"}, "unknown model 'kimi': did you mean 'kimi-k2'"),
        ({"link": "nvlink"}, "unknown link 'nvlink': did you mean 'h200-nvlink'"),
        ({"overlap": "all"}, "unknown overlap 'all'"),
        ({"ranks": 0}, "ranks must be at least 1, not 0"),
        ({"cap": 0.5}, r"cap must be 0 for none, or at least 1, not 0\.5"),
        ({"bandwidth_gb": 0.0}, r"bandwidth_gb must be above 0, not 0\.0"),
        ({"tflops": -1.0}, r"tflops must be finite and at least 0, not -1\.0"),
    ],
)
def test_what_makes_no_sense_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        list(STUDY.settle(point(**axes), None))
