"""Bytes in closed form: the published table, the layouts of equal matrices, and data parallelism against a ledger."""

from functools import partial

import pytest
import torch

from muon_lab.cost import inventory, volume
from muon_lab.cost.volume import Volume
from muon_lab.parallel import traffic, worlds
from muon_lab.parallel import volume as layouts
from muon_lab.parallel.grid import Placement, even
from muon_lab.parallel.ledger import Ledger

#: TP = 8, five steps, two bytes an entry: GiB duplicated, distributed, packed; Tflop of each; matrices where the
#: distributed mode moves less, and all that are cut.
PUBLISHED = {
    "gpt2-xl": ((2.40, 8.01, 4.01), (55, 14, 3), (0, 192)),
    "llama-3-8b": ((11.4, 61.3, 30.6), (666, 225, 32), (0, 224)),
    "llama-3-70b": ((111.6, 612.5, 306.3), (13223, 4481, 645), (0, 560)),
    "qwen3-30b-a3b": ((1.48, 13.1, 6.6), (42, 21, 1), (0, 192)),
    "moonlight-16b-a3b": ((1.40, 9.3, 4.7), (45, 16, 1), (0, 162)),
    "deepseek-v3": ((23.2, 206.9, 103.5), (1658, 1107, 64), (122, 366)),
    "kimi-k2": ((13.5, 206.9, 103.5), (973, 1025, 22), (61, 366)),
    "glm-4.5": ((24.8, 275.2, 137.6), (1598, 1059, 55), (0, 644)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_of_eight_tensor_parallel_ranks(name):
    moved, worked, (wins, matrices) = PUBLISHED[name]
    found = volume.compared(inventory.get(name))
    for told, bytes_ in zip(moved, (found.duplicated, found.distributed, found.packed), strict=True):
        digits = len(str(told).partition(".")[2])
        assert abs(bytes_ / 2**30 - told) <= 0.5 * 10**-digits + 0.005  # both sides of a half are rounded somewhere
    works = (found.duplicated_flops, found.distributed_flops, found.blockwise_flops)
    assert [round(work / 1e12) for work in works] == list(worked)
    assert (found.distributed_wins, found.matrices) == (wins, matrices)


def test_where_distributed_moves_less():
    """At equal width only beyond s/k = 2 K, or K if Gram matrices are packed."""
    for ratio, less, less_packed in ((4, False, False), (8, False, True), (12, True, True)):
        cut, shape = even(ratio * 64, 8, 0), (ratio * 64, 64)
        whole = Volume(volume.layout("duplicated", shape, cut, 0, "bfloat16"), 0).sent
        sent = [Volume(volume.published(shape, cut, packed=packed)[1:], 0).sent for packed in (False, True)]
        assert [one < whole for one in sent] == [less, less_packed]


@pytest.mark.parametrize("cut", [even(8, 4, 0), even(10, 4, 0), Placement(0, (5, 0, 3)), even(6, 3, 1)])
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_owner_of_equal_matrices_is_owner_of_a_list(cut, count):
    shape = (cut.length, 6) if cut.dim == 0 else (5, cut.length)
    for rank in range(cut.tp):
        made = volume.layout("owner", shape, cut, rank, "bfloat16", count=count)
        assert made == layouts.owner([shape] * count, [cut] * count, rank, "bfloat16")


def test_other_layouts_are_those_of_a_batch():
    cut = even(12, 3, 1)
    for rank in range(3):
        batch = volume.layout("distributed", (5, 12), cut, rank, count=7, steps=4)
        assert batch == layouts.distributed((7, 5, 12), cut, rank, steps=4)
        assert volume.layout("blockwise", (5, 12), cut, rank, count=7) == ()
        assert volume.layout("gram", (5, 12), cut, rank) == layouts.gram((5, 12), cut, rank)


def step(owned, gather, reduction, world):
    """Move gradients and weights of flat parameters as a layer-wise optimizer does; return what was counted."""
    ledger = Ledger(world)
    gradient = torch.ones(sum(owned))
    padded = [max(owned)] * len(owned)
    if reduction == "all_reduce":
        ledger.all_reduce(gradient, "mean").wait()
    elif gather == "padded":
        ledger.reduce_scatter(torch.ones(sum(padded)), "mean", padded).wait()
    else:
        ledger.reduce_scatter(gradient, "mean", owned).wait()
    mine = torch.ones(owned[world.rank], dtype=torch.bfloat16)
    if gather == "padded":
        ledger.all_gather(torch.nn.functional.pad(mine, (0, max(owned) - len(mine)))).wait()
    else:
        ledger.all_gather_v(mine, owned).wait()
    return tuple(record.call for record in ledger.records), ledger.sent_bytes


@pytest.mark.parametrize("gather", volume.GATHERS)
@pytest.mark.parametrize("reduction", volume.REDUCTIONS)
@pytest.mark.parametrize("owned", [(4, 4, 4), (7, 0, 2), (0, 0, 5)])
def test_layer_wise_is_what_a_ledger_counts(owned, gather, reduction):
    counted = worlds.run(partial(step, owned, gather, reduction), 3)
    for rank, (made, sent) in enumerate(counted):
        expected = volume.layerwise(owned, rank, gather=gather, reduction=reduction)
        assert made == expected
        assert sent == Volume(expected, rank).sent


@pytest.mark.parametrize("gather", volume.GATHERS)
@pytest.mark.parametrize("reduction", volume.REDUCTIONS)
def test_layer_wise_is_what_the_optimizer_asks_for_in_one_bucket(gather, reduction):
    sizes, owners = [6, 2, 3, 5, 1], [1, 0, 1, 3, 0]
    owned = tuple(sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(4))
    for rank in range(4):
        step = traffic.layerwise(sizes, ["bfloat16"] * 5, owners, 4, rank, gather=gather, reduce=reduction)
        expected = volume.layerwise(owned, rank, gradient="bfloat16", gather=gather, reduction=reduction)
        assert step.gradients + step.parameters == expected


def test_element_wise_is_what_the_optimizer_asks_for():
    step = traffic.elementwise([6, 2, 3], ["bfloat16"] * 3, 4, momentum="float32")
    assert step.gradients + step.parameters == volume.elementwise(11, 4, gradient="bfloat16")
    assert step.momentum == volume.serving_muon(11, 4)


def test_layer_wise_bytes_are_the_formula():
    owned, total = (7, 0, 2, 3), 12
    for rank in range(4):
        into, out = volume.layerwise(owned, rank)
        assert Volume((out,), rank).sent == (total - owned[(rank + 1) % 4]) * 2
        assert Volume((into,), rank).sent == (total - owned[rank]) * 4
        padded = volume.weights(owned, rank, how="padded")
        assert Volume(padded, rank).sent == 3 * 7 * 2
    everywhere = volume.gradients((4,) * 4, how="all_reduce")
    assert Volume(everywhere, 0).sent == 2 * 3 * 16 * 4 // 4


@pytest.mark.parametrize(("entries", "dp", "align"), [(12, 4, 1), (13, 4, 1), (13, 4, 8), (0, 3, 1)])
def test_element_wise_bytes_are_those_of_an_even_buffer(entries, dp, align):
    part = -(-entries // (dp * align)) * align
    for rank in range(dp):
        made = volume.elementwise(entries, dp, align=align)
        assert Volume(made, rank).sent == (dp - 1) * part * (4 + 2)
        assert Volume(volume.serving_muon(entries, dp, align=align), rank).sent == (dp - 1) * part * 4


def test_straddling_is_what_a_walk_over_entries_finds():
    sizes = [3, 1, 4, 1, 5, 9, 2, 6, 5, 0, 3]
    for dp in range(1, 8):
        part = -(-sum(sizes) // dp)
        owner = [entry // part for entry in range(sum(sizes))]
        start, cut = 0, 0
        for size in sizes:
            cut += len(set(owner[start : start + size])) > 1
            start += size
        assert volume.straddling(sizes, dp) == cut


def test_a_wrong_rank_would_show():
    """Uneven owners make ranks send differently: the bytes of one are not those of another."""
    owned = (7, 0, 2)
    sent = [Volume(volume.weights(owned, rank), rank).sent for rank in range(3)]
    assert len(set(sent)) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: volume.layout("onwer", (4, 4), even(4, 2, 0), 0),
        lambda: volume.weights((1, 2), 0, how="exac"),
        lambda: volume.gradients((1, 2), how="reduce"),
        lambda: volume.elementwise(5, 0),
        lambda: volume.published((5, 4), even(4, 2, 0)),
    ],
)
def test_what_does_not_exist_is_refused(call):
    with pytest.raises(ValueError, match=r"did you mean|needs|add up"):
        call()
