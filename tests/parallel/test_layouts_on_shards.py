"""Every layout on ranks of threads, and of processes: its bits, its calls, its bytes, its flops, its refusals."""

import json
import math
import subprocess
import sys
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from cases import with_singular_values
from jaxtyping import TypeCheckError

from muon_lab import polar
from muon_lab.arithmetic import Counted, Exact, Rounded
from muon_lab.measure import bounds
from muon_lab.parallel import layouts, volume, worlds
from muon_lab.parallel.grid import Placement, even
from muon_lab.parallel.layouts import resharding
from muon_lab.parallel.ledger import Ledger
from muon_lab.parallel.sharded import Sharded
from muon_lab.parallel.worlds import RankRaised

SCHEDULE = polar.schedules.get("polar_express", 5)
RANKS = (1, 2, 3, 4, 5, 8)
#: Tall and wide, so that both axes are once the long one; square; a batch of experts; a part too short for some ranks.
SHAPES = [(24, 10), (10, 24), (9, 9), (2, 12, 5), (2, 3, 5, 12), (3, 17)]


def matrix(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ragged(length, ranks, dim):
    """Return a cut with two parts, the first and the last, and none between."""
    sizes = [0] * ranks
    sizes[-1] = length // 2
    sizes[0] += length - length // 2
    return Placement(dim, tuple(sizes))


def cuts(length, ranks, dim):
    return {even(length, ranks, dim), ragged(length, ranks, dim)}


def joined(parts, placement):
    return torch.cat(list(parts), placement.axis)


def on_ranks(layout, G, placement, algorithm="ring"):
    """Return the whole result, the ledgers, and the flops by rank of a layout called with collectives and placement."""

    return worlds.run(partial(one_rank, layout, G, placement, algorithm), placement.tp)


def one_rank(layout, G, placement, algorithm, world):
    ledger, counted = Ledger(world, algorithm), Counted()
    shard = placement.shard(G, world.rank)
    update = LAYOUTS[layout](counted, ledger, placement)(shard)
    assert update.shape == shard.shape
    assert update.dtype == shard.dtype
    assert update.is_contiguous()
    return (
        update,
        tuple(record.call for record in ledger.records),
        ledger.sent_bytes,
        sum(product.flops for product in counted.products),
    )


def whole_by_owner(counted, ledger, placement):
    update = layouts.owner(polar.newton_schulz(SCHEDULE, counted), ledger, [placement], owners=[placement.tp - 1])
    return lambda shard: update([shard])[0]


LAYOUTS = {
    "duplicated": lambda counted, *where: layouts.duplicated(polar.newton_schulz(SCHEDULE, counted), *where),
    "owner": whole_by_owner,
    "distributed": lambda counted, *where: layouts.distributed(SCHEDULE, *where, counted),
    "gram": lambda counted, *where: layouts.gram(SCHEDULE, *where, counted),
    "blockwise": lambda counted, *where: layouts.blockwise(polar.newton_schulz(SCHEDULE, counted), *where),
}


def asked(layout, shape, placement, rank, dtype="float32"):
    """Return the calls that the closed forms say."""
    if layout == "owner":
        return volume.owner([shape], [placement], rank, dtype, owners=[placement.tp - 1])
    extra = {"steps": SCHEDULE.steps} if layout == "distributed" else {}
    return getattr(volume, layout)(shape, placement, rank, dtype, **extra)


def everywhere(ranks):
    """Return each shape with each axis cut, evenly or not by turns."""
    return [
        (shape, (even, ragged)[(turn + dim) % 2](shape[dim - 2], ranks, dim))
        for turn, shape in enumerate(SHAPES)
        for dim in (0, 1)
    ]


@lru_cache
def everything(layout, ranks):
    """Return what a layout does with float32 matrices everywhere, computed once."""
    return [(shape, cut, on_ranks(layout, matrix(shape), cut)) for shape, cut in everywhere(ranks)]


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", ["duplicated", "owner"])
def test_gathered_layouts_have_the_bits_of_one_process(layout, ranks):
    for shape, cut, results in everything(layout, ranks):
        whole = polar.newton_schulz(SCHEDULE)(matrix(shape))
        assert torch.equal(joined([result[0] for result in results], cut), whole), cut


@pytest.mark.parametrize("ranks", RANKS)
def test_blockwise_has_the_bits_of_its_simulation_on_the_whole_matrix(ranks):
    for shape, cut, results in everything("blockwise", ranks):
        simulated = layouts.blockwise(polar.newton_schulz(SCHEDULE), dim=cut.dim, sizes=cut.sizes)(matrix(shape))
        assert torch.equal(joined([result[0] for result in results], cut), simulated), cut


@pytest.mark.parametrize("layout", ["duplicated", "distributed", "owner", "blockwise"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_has_the_bits_of_one_process(layout, shape):
    for dim in (0, 1):
        ((update, *_),) = on_ranks(layout, matrix(shape), even(shape[dim - 2], 1, dim))
        assert torch.equal(update, polar.newton_schulz(SCHEDULE)(matrix(shape)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_dtypes_are_kept(layout, dtype):
    G, cut = matrix((12, 5), dtype=dtype), even(12, 3, 0)
    update = joined([result[0] for result in on_ranks(layout, G, cut)], cut)
    assert update.dtype == dtype
    assert bool(torch.isfinite(update).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gram_of_narrow_shards_is_that_of_float32_rounded_once(dtype):
    G, cut = matrix((24, 10), dtype=dtype), even(24, 3, 0)
    narrow, wide = (
        joined([result[0] for result in on_ranks("gram", shards, cut)], cut) for shards in (G, G.to(torch.float32))
    )
    assert torch.equal(narrow, wide.to(dtype))
    assert not torch.equal(narrow.to(torch.float32), wide)


# --- rounding ---------------------------------------------------------------------------------------------------------


def slope(schedule):
    """Return the largest slope of the schedule and of each tail of it, over the values that reach it."""
    steepest, reach = 0.0, np.linspace(0, 1, 20001)
    for start in range(schedule.steps):
        x, slopes = reach, np.ones_like(reach)
        for a, b, c in schedule.coefficients[start:]:
            slopes, x = slopes * (a + 3 * b * x**2 + 5 * c * x**4), a * x + b * x**3 + c * x**5
        steepest = max(steepest, float(np.abs(slopes).max()))
        a, b, c = schedule.coefficients[start]
        reach = np.linspace(0, float(np.abs(a * reach + b * reach**3 + c * reach**5).max()), 20001)
    return steepest


def error_bound(schedule, shape):
    """Return the bound on the Frobenius distance of two float64 runs, whose sums are in any two orders."""
    x, radius = np.linspace(0, 1, 20001), 1.0
    for a, b, c in schedule.coefficients:
        x = a * x + b * x**3 + c * x**5
        radius = max(radius, float(np.abs(x).max()))
    local = max(bounds.step(step, radius) for step in schedule.coefficients)
    one = bounds.newton_schulz(slope(schedule), max(shape), bounds.unit_roundoff("fp64"), schedule.steps, local)
    return 2 * one * radius * math.sqrt(min(shape)) * bounds.UNCOUNTED


@pytest.mark.parametrize("ranks", RANKS)
def test_distributed_differs_from_one_process_by_the_order_of_sums(ranks):
    for shape, cut in everywhere(ranks):
        G = matrix(shape, dtype=torch.float64)
        found = joined([result[0] for result in on_ranks("distributed", G, cut)], cut)
        whole, allowed = polar.newton_schulz(SCHEDULE)(G), error_bound(SCHEDULE, shape[-2:])
        assert torch.linalg.matrix_norm(found - whole).max() <= allowed, cut
        short = polar.newton_schulz(polar.schedules.get("polar_express", 4))(G)
        assert torch.linalg.matrix_norm(short - whole).min() > 1000 * allowed  # which a step less would not pass


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("layout", "single"), [("distributed", polar.newton_schulz), ("gram", polar.gram_newton_schulz)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_summed_layouts_are_as_exact_as_one_process(layout, single, dtype, ranks):
    """Within 4 of the single-process error, and 4 units of rounding of the result: small errors are luck."""
    G = torch.tensor(with_singular_values(24, 10, np.geomspace(1, 0.1, 10), seed=5)).to(dtype)
    truth = torch.tensor(exact(G))
    alone = torch.linalg.matrix_norm(single(SCHEDULE)(G).double() - truth)
    floor = torch.finfo(dtype).eps * torch.linalg.matrix_norm(truth)
    for cut in (even(24, ranks, 0), even(10, ranks, 1)):
        update = joined([result[0] for result in on_ranks(layout, G, cut)], cut).double()
        assert torch.linalg.matrix_norm(update - truth) <= 4 * (alone + floor), cut


def exact(G):
    u, s, vt = np.linalg.svd(G.double().numpy(), full_matrices=False)
    return (u * SCHEDULE.map(s / np.linalg.norm(s))) @ vt


def test_whole_numbers_are_summed_without_error():
    G = (torch.arange(60) % 7 - 3.0).reshape(5, 12)
    for ranks in RANKS:
        cut = even(12, ranks, 1)
        for found in worlds.run(lambda world, cut=cut: Sharded(Exact(), world).gram(cut.shard(G, world.rank)), ranks):
            assert torch.equal(found, G @ G.mT)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_a_matrix_does_not_matter(layout, scale):
    """A power of two near the scale moves no bit but where a Gram matrix is taken before it: there, only rounding."""
    power = 2.0 ** round(math.log2(scale))
    G, cut = matrix((12, 5)), even(12, 3, 0)
    near, far = ([result[0] for result in on_ranks(layout, G * factor, cut)] for factor in (1.0, power))
    # gram: the norm is that of float32 sums in one case, of float64 sums in the other
    allowed = 100 * torch.finfo(torch.float32).eps if layout == "gram" else 0.0
    assert (joined(near, cut) - joined(far, cut)).abs().max() <= allowed


@pytest.mark.parametrize("scale", [1e-250, 1.0, 1e250])
def test_norms_over_ranks_neither_overflow_nor_vanish(scale):
    parts = [
        torch.tensor([[3.0, 4.0]], dtype=torch.float64) * scale,
        torch.tensor([[12.0]], dtype=torch.float64) * scale,
    ]
    found = worlds.run(lambda world: Sharded(Exact(), world).norm(parts[world.rank]).item(), 2)
    assert found == [pytest.approx(13 * scale, rel=8 * bounds.unit_roundoff("fp64"), abs=0)] * 2


def test_norms_of_very_different_shards_add_up():
    for small in (2.0**-399, 2.0**-401, 2.0**-700):
        parts = [torch.tensor([[small * 3]], dtype=torch.float64), torch.tensor([[small * 4]], dtype=torch.float64)]
        found = worlds.run(lambda world, parts=parts: Sharded(Exact(), world).norm(parts[world.rank]).item(), 2)
        assert found == [pytest.approx(5 * small, rel=8 * bounds.unit_roundoff("fp64"), abs=0)] * 2


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_zero_gives_zero(layout):
    for shape, cut in (((6, 3), even(6, 2, 0)), ((2, 3, 6), even(3, 2, 0))):
        for update, *_ in on_ranks(layout, torch.zeros(shape), cut):
            assert not update.any()


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 4)])
def test_nothing_gives_nothing(layout, shape):
    for dim in (0, 1):
        cut = even(shape[dim - 2], 2, dim)
        assert joined([result[0] for result in on_ranks(layout, torch.zeros(shape), cut)], cut).shape == shape


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_each_expert_has_its_own_norm(layout):
    """The norm over a whole batch, as in NVIDIA-NeMo/Emerging-Optimizers, is off by 60 % for the smallest of these."""
    G, cut = matrix((3, 16, 6)), even(16, 2, 0)
    scaled = G * torch.tensor([1.0, 2.0**-7, 2.0**-14]).reshape(3, 1, 1)
    for equal, scales in zip(on_ranks(layout, G, cut), on_ranks(layout, scaled, cut), strict=True):
        assert torch.equal(equal[0], scales[0])


def test_partial_sums_in_float32_are_less_rounded():
    """Gram matrices of bfloat16 products, summed over 8 ranks in bfloat16 and in float32."""
    G, cut = matrix((64, 8)), even(64, 8, 0)
    arithmetic = Exact(torch.bfloat16)

    def gram(world, accumulate):
        return Sharded(arithmetic, world, accumulate=accumulate).gram(cut.shard(G, world.rank).mT.bfloat16())

    truth = sum(cut.shard(G, rank).bfloat16().double().mT @ cut.shard(G, rank).bfloat16().double() for rank in range(8))
    narrow, wide = (worlds.run(partial(gram, accumulate=sums), 8)[0].double() for sums in (None, torch.float32))
    assert torch.linalg.matrix_norm(wide - truth) < torch.linalg.matrix_norm(narrow - truth)


def test_an_emulated_format_runs_on_shards():
    """A rounded Gram matrix of a shard differs from a shard of a rounded one: 4 roundings of bfloat16 a rank."""
    G, cut = matrix((24, 6)), even(24, 3, 0)
    single = polar.newton_schulz(SCHEDULE, Rounded("bf16"))(G)

    def update(world):
        return layouts.distributed(SCHEDULE, world, cut, Rounded("bf16"))(cut.shard(G, world.rank))

    truth = polar.newton_schulz(SCHEDULE)(G.double())
    found = joined(worlds.run(update, 3), cut)
    assert torch.linalg.matrix_norm(found - truth) <= 4 * torch.linalg.matrix_norm(single - truth)


@pytest.mark.parametrize("start", ["schatten4", "aol", "spectral"])
@pytest.mark.parametrize("layout", [layouts.distributed, layouts.gram])
def test_starts_are_those_of_one_process(layout, start):
    G, cut = matrix((24, 5), dtype=torch.float64), even(24, 3, 0)
    found = worlds.run(lambda world: layout(SCHEDULE, world, cut, start=start)(cut.shard(G, world.rank)), 3)
    whole = polar.newton_schulz(SCHEDULE, start=start)(G)
    assert torch.linalg.matrix_norm(joined(found, cut) - whole) <= error_bound(SCHEDULE, (24, 5))
    assert torch.linalg.matrix_norm(polar.newton_schulz(SCHEDULE)(G) - whole) > 1e-3  # the start is no idle argument


# --- lists of matrices ------------------------------------------------------------------------------------------------

MIXED = [((9, 4), 0), ((4, 9), 0), ((5, 5), 1), ((2, 6, 3), 0), ((1, 7), 0)]


def owned(owners, world):
    cut = [even(shape[dim - 2], world.size, dim) for shape, dim in MIXED]
    whole = [matrix(shape, seed) for seed, (shape, _) in enumerate(MIXED)]
    ledger = Ledger(world)
    shards = [placement.shard(G, world.rank) for placement, G in zip(cut, whole, strict=True)]
    updates = layouts.owner(polar.newton_schulz(SCHEDULE), ledger, cut, owners)(shards)
    return updates, tuple(record.call for record in ledger.records), ledger.sent_bytes


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("owners", [None, (0, 0, 0, 0, 0)])
def test_a_list_of_unlike_matrices_comes_back_whole(ranks, owners):
    results = worlds.run(partial(owned, owners), ranks)
    cut = [even(shape[dim - 2], ranks, dim) for shape, dim in MIXED]
    for index, (shape, _) in enumerate(MIXED):
        found = joined([updates[index] for updates, *_ in results], cut[index])
        assert torch.equal(found, polar.newton_schulz(SCHEDULE)(matrix(shape, index)))
    for rank, (_, made, sent) in enumerate(results):
        assert made == volume.owner([shape for shape, _ in MIXED], cut, rank, owners=owners)
        assert sent == volume.Volume(made, rank).sent


def test_an_owner_sends_two_parts_in_p_of_what_all_gather_sends():
    for ranks in (2, 4, 8):
        rows = even(64, ranks, 0)
        once = volume.Volume(volume.duplicated((64, 16), rows, 0), 0).sent
        listed = volume.Volume(volume.owner([(64, 16)] * ranks, [rows] * ranks, 0), 0).sent
        assert listed * ranks == 2 * ranks * once  # for p matrices, 2/p of p gathers


def test_a_list_of_nothing_is_no_call():
    assert worlds.run(lambda world: layouts.owner(polar.svd(), world, [])([]), 2) == [[], []]


# --- bytes and flops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_calls_and_flops_are_the_closed_forms(layout, ranks):
    for shape, cut, results in everything(layout, ranks):
        for rank, (_, made, sent, flops) in enumerate(results):
            assert made == asked(layout, shape, cut, rank), (shape, cut, rank)
            assert sent == volume.Volume(made, rank).sent
            works = layout != "owner" or rank == ranks - 1
            assert flops == works * volume.flops(layout, shape, cut, rank, SCHEDULE.coefficients), (shape, cut, rank)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bytes_on_a_ring_are_whole_numbers_by_hand(ranks, dtype):
    """Cut of 64 rows of 16 entries over p ranks: p divides everything, so that each rank sends the same."""
    G, cut, b = matrix((64, 16), dtype=dtype), even(64, ranks, 0), dtype.itemsize
    s, k, p, steps = 64, 16, ranks, SCHEDULE.steps
    by_hand = {
        "duplicated": (p - 1) * s * k * b // p,
        "gram": 2 * (p - 1) * k * k * max(4, b) // p,
        "blockwise": 0,
    }
    for layout, expected in by_hand.items():
        assert [result[2] for result in on_ranks(layout, G, cut)] == [expected] * p
    grams = steps * 2 * (p - 1) * k * k * b // p
    total = sum(result[2] for result in on_ranks("distributed", G, cut))
    assert total == p * grams + 2 * (p - 1) * 24  # the norm: three doubles, all reduced
    owners = sum(result[2] for result in on_ranks("owner", G, cut))
    assert owners == 2 * (p - 1) * s * k * b // p  # one matrix: parts to the owner, parts back


def test_a_wrong_closed_form_would_be_seen():
    cut = even(64, 4, 0)
    made = on_ranks("distributed", matrix((64, 16)), cut)[0][1]
    assert made != volume.distributed((64, 16), cut, 0, steps=SCHEDULE.steps + 1)
    assert made != volume.distributed((64, 16), cut, 0, "bfloat16", steps=SCHEDULE.steps)


@pytest.mark.parametrize(("accumulate", "wire"), [(None, "bfloat16"), (torch.float32, "float32")])
def test_gram_matrices_travel_in_the_dtype_of_the_products_or_of_the_sums(accumulate, wire):
    cut = even(12, 3, 0)

    def made(world):
        ledger = Ledger(world)
        update = layouts.distributed(SCHEDULE, ledger, cut, Exact(torch.bfloat16), accumulate=accumulate)
        assert update(cut.shard(matrix((12, 5)), world.rank)).dtype == torch.float32
        return tuple(record.call for record in ledger.records)

    for rank, found in enumerate(worlds.run(made, 3)):
        assert found == volume.distributed((12, 5), cut, rank, steps=SCHEDULE.steps, wire=wire)


def test_the_published_example_in_mebibytes():
    """A matrix of 4096×1024 in float32 over 8 ranks, 5 steps: 14, 35, 3.5, 7, 0."""
    rows, shape = even(4096, 8, 0), (4096, 1024)
    found = {
        "duplicated": volume.Volume(volume.duplicated(shape, rows, 0), 0).sent,
        "distributed": volume.Volume(volume.distributed(shape, rows, 0, steps=5), 0).sent,
        "owner": volume.Volume(volume.owner([shape] * 8, [rows] * 8, 0), 0).sent // 8,
        "gram": volume.Volume(volume.gram(shape, rows, 0), 0).sent,
        "blockwise": volume.Volume(volume.blockwise(shape, rows, 0), 0).sent,
    }
    norm = found.pop("distributed") - 35 * 2**20
    assert {layout: sent / 2**20 for layout, sent in found.items()} == {
        "duplicated": 14.0,
        "owner": 3.5,
        "gram": 7.0,
        "blockwise": 0.0,
    }
    assert 0 < norm <= 2 * 24


def test_volumes_import_no_torch():
    code = "import json, sys; from muon_lab.parallel import volume; print(json.dumps('torch' in sys.modules))"
    assert json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) is False


def test_gram_is_one_call_whatever_the_steps():
    cut = even(12, 3, 0)
    for name, steps in (("simple", 1), ("polar_express", 8)):
        schedule = polar.schedules.get(name, steps)

        def made(world, schedule=schedule):
            ledger = Ledger(world)
            layouts.gram(schedule, ledger, cut)(cut.shard(matrix((12, 5)), world.rank))
            return ledger.calls

        assert worlds.run(made, 3) == [1, 1, 1]


def test_the_short_axis_costs_no_more_products_than_the_long_one():
    short, long = even(8, 4, 0), even(32, 4, 1)
    flops = [[result[3] for result in on_ranks("distributed", matrix((8, 32)), cut)] for cut in (short, long)]
    assert flops[0] == flops[1]


# --- periodic ---------------------------------------------------------------------------------------------------------


def test_periodic_takes_the_whole_matrix_every_so_many_steps():
    G, cut, orthogonalize = matrix((8, 5)), even(8, 2, 0), polar.newton_schulz(SCHEDULE)

    def steps(world):
        ledger = Ledger(world)
        blocks, whole = (make(orthogonalize, ledger, cut) for make in (layouts.blockwise, layouts.duplicated))
        update = layouts.periodic(blocks, whole, period=3, scales=(0.5, 2.0))
        return [update(cut.shard(G, world.rank), step) for step in range(7)], [record.call for record in ledger.records]

    results = worlds.run(steps, 2)
    blocks = layouts.blockwise(orthogonalize, dim=0, tp=2)(G) * 0.5
    for step in range(7):
        expected = orthogonalize(G) * 2.0 if step in (0, 3, 6) else blocks
        assert torch.equal(joined([updates[step] for updates, _ in results], cut), expected)
    whole = volume.duplicated((8, 5), cut, 0)
    assert tuple(results[0][1]) == volume.periodic((), whole, period=3, steps=7)


@pytest.mark.parametrize("period", [0, -1, True, 1.5])
def test_a_period_is_a_whole_number(period):
    with pytest.raises((ValueError, TypeCheckError)):
        layouts.periodic(polar.svd(), polar.svd(), period)


# --- what moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.float8_e4m3fn])
def test_recutting_twice_changes_nothing(ranks, dtype):
    G = (torch.arange(2 * 7 * 5) % 11).reshape(2, 7, 5).float().to(dtype)
    for rows in cuts(7, ranks, 0):
        for columns in cuts(5, ranks, 1):

            def there_and_back(world, rows=rows, columns=columns):
                other = resharding.recut(rows.shard(G, world.rank), world, rows, columns)
                return other, resharding.recut(other, world, columns, rows)

            for rank, (other, back) in enumerate(worlds.run(there_and_back, ranks)):
                assert torch.equal(other.float(), columns.shard(G, rank).float())
                assert torch.equal(back.float(), rows.shard(G, rank).float())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["duplicated", "distributed", "gram"])
def test_all_ranks_refuse_what_is_not_finite_on_one(layout):
    G, cut = matrix((6, 3)), even(6, 2, 0)
    G[0, 0] = math.nan

    def refused(world):
        try:
            LAYOUTS[layout](Exact(), world, cut)(cut.shard(G, world.rank))
        except ValueError as error:
            return str(error)

    for said in worlds.run(refused, 2):
        assert said.startswith("the matrix to orthogonalize must be finite, but")


def test_an_owner_that_refuses_ends_the_call_on_all_ranks():
    G, cut = matrix((6, 3)), even(6, 2, 0)
    G[0, 0] = math.nan
    with pytest.raises(RankRaised, match=r"must be finite, but 1 of its 18"):
        worlds.run(lambda world: whole_by_owner(Exact(), world, cut)(cut.shard(G, world.rank)), 2, timeout=10)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_placement_has_a_part_a_rank_and_a_shard_fits_it(layout):
    def raised(fn):
        try:
            fn()
        except ValueError as error:
            return str(error)

    def wrong(world):
        return (
            raised(lambda: LAYOUTS[layout](Exact(), world, even(6, 3, 0))),
            raised(lambda: LAYOUTS[layout](Exact(), world, even(6, 2, 0))(torch.ones(2, 4))),
        )

    for ranks, length in worlds.run(wrong, 2):
        assert ranks == "a placement among 2 ranks needs 2 sizes, but has 3: (2, 2, 2)"
        assert "holds 3 entries of axis 0, but its shard has shape (2, 4)" in length


def test_bad_arguments_are_refused():
    cut = even(4, 1, 0)

    def wrong(world):
        with pytest.raises(ValueError, match=r"owners of 1 matrices must be as many places of the group, 0..0"):
            layouts.owner(polar.svd(), world, [cut], owners=[1])
        with pytest.raises(ValueError, match=r"needs 1 shards, one a placement, not 2"):
            layouts.owner(polar.svd(), world, [cut])([torch.ones(4, 1)] * 2)
        with pytest.raises(ValueError, match=r"one dtype, not torch.float32, torch.float64"):
            layouts.owner(polar.svd(), world, [cut] * 2)([torch.ones(4, 1), torch.ones(4, 1).double()])
        with pytest.raises(
            ValueError, match=r"either collectives and a placement, or dim with tp or sizes, but got both"
        ):
            layouts.blockwise(polar.svd(), world, cut, dim=0, tp=2)

    worlds.run(wrong, 1)
    with pytest.raises(ValueError, match=r"got one of two"):
        layouts.blockwise(polar.svd(), tp=2)
    with pytest.raises(ValueError, match=r"layout must be one of duplicated, owner"):
        volume.flops("periodic", (4, 4), cut, 0, SCHEDULE.coefficients)


# --- processes --------------------------------------------------------------------------------------------------------


def every_layout(world):
    """Run all layouts in one world: the short axis, unevenly."""
    G, cut = matrix((7, 12)), even(7, world.size, 0)
    return [one_rank(layout, G, cut, "gloo", world) for layout in LAYOUTS]


@pytest.mark.world
@pytest.mark.parametrize("ranks", [2, 8])
def test_processes_give_the_bits_the_calls_and_the_bytes_of_threads(ranks):
    for threads, gloo in zip(worlds.run(every_layout, ranks), worlds.run(every_layout, ranks, "gloo"), strict=True):
        for one, other in zip(threads, gloo, strict=True):
            assert torch.equal(one[0], other[0])
            assert one[1:] == other[1:]
