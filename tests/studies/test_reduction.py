"""Sums of Gram matrices in few bits: written out by hand, in their order, and what is exact stays exact."""

import pytest
import torch

from muon_lab import polar, studies
from muon_lab.arithmetic import Exact
from muon_lab.measure import bounds
from muon_lab.parallel import layouts, worlds
from muon_lab.parallel.grid import even
from muon_lab.studies import methods, reduction, sources
from muon_lab.studies.running import run_case
from muon_lab.studies.study import LeftOut

STUDY = studies.get("reduction")
SMALL = {"rows": 16, "cols": 64}


def settled(**point):
    (case,) = STUDY.settle({name: values[0] for name, values in STUDY.defaults.items()} | SMALL | point, None)
    return case


def row(**point):
    found = run_case("reduction", settled(**point))
    assert (found["outcome"], found["note"]) == ("ok", None)
    return found


def parts(case, tp):
    """Return the Gram matrices of shards of the normalised matrix in bfloat16, in float64 and without rounding."""
    X = methods.cast(torch.tensor(sources.matrix(case), dtype=torch.float32), "bfloat16").double()
    return [shard @ shard.mT for shard in X.split([X.shape[1] // tp] * tp, dim=1)]


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_sums_are_rounded_where_they_say():
    """Rank order, four ranks: parts and every hop, parts and the end, the end alone."""
    case = settled(tp=4, order="rank")
    exact = parts(case, 4)
    rounded = [part.bfloat16() for part in exact]
    hops = rounded[0]
    for part in rounded[1:]:
        hops = (hops.float() + part.float()).bfloat16()
    expected = {
        "hops": hops,
        "once": sum(part.double() for part in rounded).bfloat16(),
        "wide": sum(exact).float().bfloat16(),
    }
    G = torch.tensor(sources.matrix(case), dtype=torch.float32)
    found = {sums: reduction.summed(settled(tp=4, order="rank", sums=sums), G, 4)[0] for sums in reduction.SUMS}
    for sums, R in found.items():
        assert R.dtype == torch.bfloat16
        # products are accumulated in another order than here: an entry may fall on the other side of a rounding
        assert float((R.double() - expected[sums].double()).norm()) <= 2.0**-9 * float(R.double().norm())
        assert (expected[sums] != R).double().mean() < 0.1
    assert not torch.equal(found["hops"], found["once"])


def test_hops_are_the_layout_distributed():
    case = settled(tp=4)
    G = torch.tensor(sources.matrix(case), dtype=torch.float32)
    schedule, cut = polar.schedules.get("quintic", 5), even(64, 4, 1)
    _, update = reduction.summed(case, G, 4)

    def distributed(world):
        return layouts.distributed(schedule, world, cut, Exact(torch.bfloat16))(cut.shard(G, world.rank))

    assert torch.equal(torch.cat(worlds.run(distributed, 4), 1), update)


def test_whole_numbers_have_no_error_to_sum():
    """Entries in -2..2 whose sums stay below 256: bfloat16 holds them all."""
    G = (torch.arange(4 * 16) % 5 - 2.0).reshape(4, 16)
    cut = even(16, 4, 1)
    for case in (settled(sums=sums, tp=4) for sums in reduction.SUMS):

        def gram(world, case=case):
            return reduction._policy(case, world, 4).gram(cut.shard(G, world.rank).bfloat16())

        for R in worlds.run(gram, 4):
            assert torch.equal(R.float(), G @ G.mT)


# --- what it shows ----------------------------------------------------------------------------------------------------


def test_hops_lose_more_with_every_rank_and_wide_sums_do_not():
    hops, once, wide = (
        [row(rows=32, cols=256, tp=tp, sums=sums)["gram_ratio"] for tp in (1, 4, 16)] for sums in reduction.SUMS
    )
    assert hops[0] == once[0] == 1
    assert 1 < hops[1] < hops[2]
    assert hops[2] > 1.3 * once[2]
    assert max(once) < 1.6  # a part's rounding beside the last one: √2 if they were alike
    assert wide == pytest.approx([1, 1, 1], rel=0.05)


def test_one_rank_in_bfloat16_rounds_each_entry_once():
    found = row(tp=1)
    assert found["gram_error"] <= bounds.unit_roundoff("bfloat16")
    assert found["layout_relative"] == 0
    assert found["sent_bytes"] == 0


def test_bytes_double_where_sums_are_wide():
    for dtype, size in (("bfloat16", 2), ("float16", 2), ("float32", 4)):
        for sums, times in (("hops", 1), ("once", 1), ("wide", 2)):
            assert row(tp=4, sums=sums, dtype=dtype)["sent_bytes"] == times * 2 * 3 / 4 * 16 * 16 * size


def test_tall_matrices_are_wide_ones_turned():
    assert row(rows=64, cols=16, tp=4)["outcome"] == "ok"


def test_what_is_wrong_is_refused():
    assert settled(sums="once")["order"] is None
    for point, message in (
        ({"sums": "hop"}, "did you mean 'hops'"),
        ({"order": "rings"}, "did you mean 'ring'"),
        ({"dtype": "float64"}, "unknown dtype 'float64'"),
        ({"tp": 0}, "at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=message):
            settled(**point)
    with pytest.raises(LeftOut, match="plain form"):
        settled(method="svd")
