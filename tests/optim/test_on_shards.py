"""Muon and MOP on the shards of matrices: the weights of one rank on the whole, by every layout and setting."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from muon_lab import optim, polar
from muon_lab.arithmetic import Counted, Exact
from muon_lab.measure import bounds
from muon_lab.optim import matrices, second_moments
from muon_lab.optim.routing import Joint
from muon_lab.optim.step import SCALES
from muon_lab.parallel import calls, factors, layouts, volume, worlds
from muon_lab.parallel.grid import Placement, even
from muon_lab.parallel.ledger import Ledger
from muon_lab.polar import batches

SCHEDULE = polar.schedules.get("polar_express", 5)
ITERATED = polar.newton_schulz(SCHEDULE)
U32, U64 = (bounds.unit_roundoff(name) for name in ("fp32", "fp64"))
STEPS = 2

#: Parameters of an optimizer: a matrix, and a stack of two.
KINDS = ((), (2,))

#: Factors that are no sum over entries: a layout with the direction's bits has the weights' bits.
SHAPED = tuple(scale for scale in SCALES if scale != "nuclear_norm")


def ragged(length, ranks, dim):
    """Return a cut with two parts, the first and the last, and none between."""
    sizes = [0] * ranks
    sizes[-1] = length // 3
    sizes[0] += length - length // 3
    return Placement(dim, tuple(sizes))


def everywhere(ranks):
    """Return whole shapes and cuts: tall and wide, each along each axis, by turns evenly and with empty parts."""
    return [
        (shape, (even, ragged)[(turn + dim + ranks) % 2](shape[dim], ranks, dim))
        for turn, shape in enumerate([(12, 5), (5, 12)])
        for dim in (0, 1)
    ]


def values(shape, steps=STEPS, kinds=KINDS, seed=0):
    """Return first weights, and the gradients of every step."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [[torch.randn((*kind, *shape), generator=generator) for kind in kinds] for _ in range(steps + 1)]
    return drawn[0], drawn[1:]


def trained(make, W, gradients):
    """Return the weights after all steps, and the optimizer, whose parameters are the tensors given."""
    parameters = [torch.nn.Parameter(X.clone()) for X in W]
    kinds = ({"view": None, "ndim": 2}, {"view": matrices.STACKED, "ndim": 3})
    groups = [{"params": [p for p in parameters if p.ndim == kind["ndim"]], "view": kind["view"]} for kind in kinds]
    optimizer = make([group for group in groups if group["params"]], lr=0.1)
    walk(optimizer, parameters, gradients)
    return [p.detach() for p in parameters], optimizer


def walk(optimizer, parameters, gradients):
    for step in gradients:
        for p, G in zip(parameters, step, strict=True):
            p.grad = G.clone()
        optimizer.step()


def on_shards(make, layout, cut, W, gradients):
    """Return whole weights joined from ranks whose optimizers `make` makes with a layout as their direction."""

    def rank(world):
        mine = [[cut.shard(X, world.rank) for X in step] for step in (W, *gradients)]
        return trained(partial(make, direction=layout(world, cut)), mine[0], mine[1:])[0]

    return joined(worlds.run(rank, cut.tp), cut)


def joined(by_rank, cut):
    return [torch.cat(parts, cut.axis) for parts in zip(*by_rank, strict=True)]


def duplicated(world, cut):
    return layouts.duplicated(ITERATED, world, cut)


def blockwise(world, cut):
    return layouts.blockwise(ITERATED, world, cut)


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def distance(found, expected):
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True)))


def summed_bound(W, expected, relative):
    """Return how far weights may lie apart if each update is off by a relative error, and rounded into the weight.

    A step moves by no more than the sum of the sizes of the weights before and after, and rounds size U and W.
    """
    largest = math.sqrt(sum(float(X.square().sum()) for X in (*W, *expected)))
    return STEPS * largest * (relative + 4 * U32)


# --- the weights of one rank ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["duplicated", "owner"])
def test_gathered_shards_have_the_bits_of_one_rank(layout, ranks):
    for turn, (shape, cut) in enumerate(everywhere(ranks)):
        W, gradients = values(shape)
        for number, scale in enumerate(SHAPED[turn::3]):  # each of them twice or more, over cuts and numbers of ranks
            make = partial(optim.Muon, scale=scale, nesterov=bool(number), weight_decay=0.1 * (turn % 2), extra=0.7)
            expected, _ = trained(partial(make, direction=ITERATED), W, gradients)
            found = on_shards(make, lambda *where: getattr(layouts, layout)(ITERATED, *where), cut, W, gradients)
            assert equal(found, expected), (shape, cut, scale)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_mop_on_shards_differs_by_the_order_of_one_sum(ranks):
    """Sums in float64 in two orders are each off by gemm(mn) of the sum of sizes, and rounded to float32 each.

    The sum of sizes is at most root min(m, n) times the norm of C, which is at most its nuclear norm.
    """
    for turn, (shape, cut) in enumerate(everywhere(ranks)):
        W, gradients = values(shape)
        make = partial(optim.MOP, nesterov=bool(turn % 2), weight_decay=0.1)
        expected, _ = trained(make, W, gradients)
        found = on_shards(make, lambda *where: layouts.duplicated(polar.svd(), *where), cut, W, gradients)
        size = 2 * bounds.gemm(shape[0] * shape[1], U64) * math.sqrt(min(shape)) + 2 * U32
        assert distance(found, expected) <= summed_bound(W, expected, size), cut


@pytest.mark.parametrize("make", [partial(optim.Muon, momentum=0.0, scale="nuclear_norm"), optim.MOP])
def test_whole_numbers_have_the_bits_of_one_rank(make):
    """Signs of whole numbers, whose inner product is a whole number: no order of sums matters, nothing is rounded."""
    make = partial(make, momentum=0.0)
    W, gradients = values((12, 5))
    gradients = [[(7 * G).round() for G in step] for step in gradients]
    expected, _ = trained(partial(make, direction=torch.sign), W, gradients)
    for cut in (even(12, 3, 0), ragged(5, 3, 1)):
        for layout in (layouts.duplicated, layouts.blockwise, layouts.owner):
            assert equal(on_shards(make, partial(layout, torch.sign), cut, W, gradients), expected)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("layout", "single"),
    [(layouts.distributed, ITERATED), (layouts.gram, polar.gram_newton_schulz(SCHEDULE, restarts=()))],
)
def test_summed_shards_are_as_exact_as_one_rank(layout, single, ranks):
    """Within 4 of what rounding does on one rank, and 4 units of rounding of the way and the weight: luck is small."""
    for shape, cut in everywhere(ranks):
        W, gradients = values(shape)
        make = partial(optim.Muon, scale="match_rms_adamw", nesterov=True, weight_decay=0.1)
        one = partial(make, direction=single)
        alone, _ = trained(one, W, gradients)
        truth, _ = trained(one, [X.double() for X in W], [[X.double() for X in step] for step in gradients])
        found = on_shards(make, partial(layout, SCHEDULE), cut, W, gradients)
        assert distance(found, truth) <= 4 * (distance(alone, truth) + summed_bound(W, alone, U32) / STEPS), cut


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_blocks_have_the_factor_of_the_whole_shape(ranks):
    for turn, (shape, cut) in enumerate(everywhere(ranks)):
        W, gradients = values(shape)
        blocks = layouts.blockwise(ITERATED, dim=cut.dim, sizes=cut.sizes)
        for scale in SCALES[turn % 2 :: 2]:
            make = partial(optim.Muon, scale=scale, weight_decay=0.1)
            expected, _ = trained(partial(make, direction=blocks), W, gradients)
            found = on_shards(make, blockwise, cut, W, gradients)
            if scale in SHAPED:
                assert equal(found, expected), (cut, scale)
            else:  # no term of the sum is as large as mn times the sum, of nuclear norms of blocks
                size = 2 * bounds.gemm(shape[0] * shape[1], U64) * shape[0] * shape[1] + 2 * U32
                assert distance(found, expected) <= summed_bound(W, expected, size), cut


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale != "none"])
def test_a_layout_that_hides_what_it_knows_has_the_factor_of_the_shard(scale):
    """What is read back is the ratio of the two factors: that an error of the factor is seen, and how large it is."""
    shape, cut = (256, 64), even(256, 8, 0)
    W, gradients = values(shape, steps=1, kinds=((),))
    make = partial(optim.Muon, momentum=0.0, scale=scale)
    expected, _ = trained(partial(make, direction=polar.svd()), W, gradients)

    def hidden(world, cut):
        layout = layouts.duplicated(polar.svd(), world, cut)
        return lambda C: layout(C)

    found = on_shards(make, hidden, cut, W, gradients)
    part = cut.shape(shape, 0)
    if scale == "nuclear_norm":  # each shard has its own inner product
        ratio = [
            optim.step.scale(scale, *(cut.shard(X, 0) for X in (gradients[0][0], polar.svd()(gradients[0][0])))),
            optim.step.scale(scale, gradients[0][0], polar.svd()(gradients[0][0])),
        ]
    else:
        ratio = [optim.step.scale(scale, *(torch.ones(each),) * 2) for each in (part, shape)]
    ratio = float(ratio[0] / ratio[1])
    assert abs(ratio - 1) > 0.25
    moved = [cut.shard(X[0] - W[0], 0) for X in (found, expected)]
    assert float(moved[0].norm() / moved[1].norm()) == pytest.approx(ratio, rel=1e-5)


# --- second moments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapt", ["adamuon", "normuon", "namo"])
@pytest.mark.parametrize("layout", ["duplicated", "blockwise"])
def test_second_moments_are_those_of_the_whole(layout, adapt):
    """Sums of at most mn squares and roots of them, in two orders: four relative errors of gemm(mn) an update."""
    for shape, cut in everywhere(3 if layout == "duplicated" else 2):
        W, gradients = values(shape)
        make = partial(optim.Muon, adapt=adapt, weight_decay=0.1, nesterov=True)
        single = ITERATED if layout == "duplicated" else layouts.blockwise(ITERATED, dim=cut.dim, sizes=cut.sizes)
        expected, _ = trained(partial(make, direction=single), W, gradients)
        found = on_shards(make, partial(getattr(layouts, layout), ITERATED), cut, W, gradients)
        if adapt == "adamuon":
            assert equal(found, expected)
        allowed = summed_bound(W, expected, 4 * bounds.gemm(shape[0] * shape[1], U32))
        assert distance(found, expected) <= allowed, cut


def test_norms_of_shards_are_not_those_of_the_whole(monkeypatch):
    """The control of the test before: second moments that are told nothing."""
    monkeypatch.setattr(second_moments, "on_shards", lambda adapt, shards: adapt)
    W, gradients = values((12, 5))
    for adapt, cut in (("normuon", even(5, 2, 1)), ("normuon", even(12, 3, 0)), ("namo", even(12, 2, 0))):
        make = partial(optim.Muon, adapt=adapt)
        expected, _ = trained(partial(make, direction=ITERATED), W, gradients)
        found = on_shards(make, duplicated, cut, W, gradients)
        assert distance(found, expected) > 1e-2 * distance(expected, W), (adapt, cut)


def test_a_second_moment_of_ones_own_is_refused_on_shards():
    class Own:
        like_weight, raw_gradient = False, False

        def begin(self, W):
            return W.new_zeros(len(W), 1, 1)

        def advance(self, V, D, G, C):
            return V, D

        def __repr__(self):
            return "Own()"

    def rank(world):
        shard = torch.nn.Parameter(torch.zeros(2, 2))
        optim.Muon([shard], lr=0.1, adapt=Own())
        optim.Muon([shard], lr=0.1, adapt=Own(), direction=duplicated(world, even(4, 2, 0)))

    with pytest.raises(worlds.RankRaised, match=r"adapt is Own\(\) for shards, needed AdaMuon, NorMuon or NAMO"):
        worlds.run(rank, 2)


# --- stacks, owners and periods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["duplicated", "owner", "distributed"])
def test_ranks_with_unequal_shards_make_the_same_stacks(layout, monkeypatch):
    """A matrix of 40 entries would go alone on the rank that has all of it, and in company on the other."""
    monkeypatch.setattr(batches, "ALONE", 39)
    W, gradients = values((8, 5), kinds=((),) * 4)
    cut = Placement(0, (8, 0))
    make = partial(optim.Muon, scale="spectral")
    expected, _ = trained(partial(make, direction=ITERATED), W, gradients)
    what = SCHEDULE if layout == "distributed" else ITERATED
    found = on_shards(make, partial(getattr(layouts, layout), what), cut, W, gradients)
    assert distance(found, expected) <= (summed_bound(W, expected, 1e-5) if layout == "distributed" else 0)


def test_owners_share_the_matrices_of_an_optimizer(monkeypatch):
    monkeypatch.setattr(batches, "ALONE", 1)  # all would go alone, to the first rank
    W, gradients = values((6, 4), steps=1, kinds=((),) * 4)
    cut, met = even(6, 2, 0), []

    def counted(C):
        met.append(tuple(C.shape))
        return ITERATED(C)

    def rank(world):
        ledger = Ledger(world)
        mine = [[cut.shard(X, world.rank) for X in step] for step in (W, *gradients)]
        trained(partial(optim.Muon, direction=layouts.owner(counted, ledger, cut)), mine[0], mine[1:])
        return [record.call for record in ledger.records]

    made = worlds.run(rank, 2)
    assert met == [(1, 6, 4)] * 4
    for place in (0, 1):
        assert made[place][1:-1] == list(volume.owner([(6, 4)] * 4, [cut] * 4, place))


def test_owner_of_a_list_is_no_direction():
    def rank(world):
        rows = even(4, 2, 0)
        with pytest.raises(ValueError, match=r"owners are \(0,\), needed none for a stack"):
            layouts.owner(ITERATED, world, rows, owners=[0])
        optim.Muon([torch.zeros(2, 2)], lr=0.1, direction=layouts.owner(ITERATED, world, [rows]))

    with pytest.raises(worlds.RankRaised, match="owner of a list of 1 matrices, needed that of a stack"):
        worlds.run(rank, 2)


def periods(world, cut):
    blocks, whole = (make(ITERATED, world, cut) for make in (layouts.blockwise, layouts.duplicated))
    return layouts.periodic(blocks, whole, period=3, scales=(0.5, 1.0))


def test_periods_are_counted_in_the_state():
    for shape, cut in everywhere(2):
        W, gradients = values(shape, steps=5)
        simulated = layouts.periodic(
            layouts.blockwise(ITERATED, dim=cut.dim, sizes=cut.sizes), ITERATED, period=3, scales=(0.5, 1.0)
        )
        make = partial(optim.Muon, scale="spectral", weight_decay=0.1)
        expected, optimizer = trained(partial(make, direction=simulated), W, gradients)
        assert [state["step"] for state in optimizer.state.values()] == [5] * len(KINDS)
        assert equal(on_shards(make, periods, cut, W, gradients), expected)
        assert not equal(trained(partial(make, direction=ITERATED), W, gradients)[0], expected)


def test_a_period_goes_on_from_a_checkpoint():
    W, gradients = values((12, 5), steps=5)
    cut = even(12, 2, 0)

    def rank(world):
        mine = [[cut.shard(X, world.rank) for X in step] for step in (W, *gradients)]
        make = partial(optim.Muon, direction=periods(world, cut))
        half, first = trained(make, mine[0], mine[1:3])
        _, second = trained(make, half, [])
        second.load_state_dict(first.state_dict())
        parameters = [p for group in second.param_groups for p in group["params"]]
        walk(second, parameters, mine[3:])
        forgotten, _ = trained(make, half, mine[3:])
        return [p.detach() for p in parameters], trained(make, mine[0], mine[1:])[0], forgotten

    for resumed, through, forgotten in worlds.run(rank, 2):
        assert equal(resumed, through)
        assert not equal(forgotten, through)


def test_both_layouts_of_a_period_have_one_placement():
    def rank(world):
        blocks, whole = layouts.blockwise(ITERATED, world, even(4, 2, 0)), duplicated(world, even(4, 2, 1))
        layouts.periodic(blocks, whole, period=2)

    with pytest.raises(worlds.RankRaised, match=r"placements of blocks and whole are .* needed one"):
        worlds.run(rank, 2)


# --- refusals and steps left out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("layout", [duplicated, blockwise])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(layout, joint):
    W, gradients = values((12, 5), steps=3)
    cut = even(12, 3, 0)
    bad = [G.clone() for G in gradients[1]]
    bad[1][-1, 2] = math.inf  # of the last rank

    def rank(world):
        mine = [[cut.shard(X, world.rank) for X in step] for step in (W, gradients[0], bad, gradients[2])]
        seen = []

        def make(groups, lr):
            optimizer = optim.Muon(groups, lr, direction=layout(world, cut))
            seen.append(optimizer)
            return Joint({"matrix": optimizer}) if joint else optimizer

        return trained(make, mine[0], mine[1:3])[0], seen[0].report.nonfinite, trained(make, mine[0], mine[1:])[0]

    results = worlds.run(rank, 3)
    assert [len(report) for _, report, _ in results] == [1] * 3
    single = ITERATED if layout is duplicated else layouts.blockwise(ITERATED, dim=0, sizes=cut.sizes)
    for at, steps in ((0, gradients[:1]), (2, [gradients[0], gradients[2]])):
        expected, _ = trained(partial(optim.Muon, direction=single), W, steps)
        assert equal(joined([result[at] for result in results], cut), expected)


def test_a_matrix_that_is_no_shard_of_the_placement_is_refused_with_its_name():
    def rank(world):
        direction = duplicated(world, Placement(0, (3, 1)))
        good, other = torch.zeros(3 - 2 * world.rank, 4), torch.zeros(2, 4)
        optimizer = optim.Muon([("good", torch.nn.Parameter(good))], lr=0.1, direction=direction)
        message = (
            rf"^other: rank {world.rank} of placement \(3, 1\) holds {3 - 2 * world.rank} entries of axis 0, but its "
            r"shard has shape \(2, 2, 4\)$"
        )
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(
                {"params": [("other", torch.nn.Parameter(torch.stack([other] * 2)))], "view": matrices.STACKED}
            )
        return len(optimizer.param_groups)

    assert worlds.run(rank, 2) == [1, 1]


# --- what moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sums"),
    [
        ({"scale": "spectral"}, []),
        ({"scale": "nuclear_norm"}, [(3, 1, 1)]),
        ({"adapt": "adamuon"}, []),
        ({"adapt": "normuon"}, [(3, 1, 1)] * 2),
        ({"adapt": "namo"}, [(3, 1, 1)] * 2),
        ({"adapt": "normuon", "dim": 1}, [(3, 12, 1), (3, 1, 1), (3, 1, 1)]),
    ],
)
def test_the_ledger_has_what_factors_and_agreement_add(settings, sums):
    settings = {"dim": 0, **settings}
    shape, dim = (12, 6), settings.pop("dim")
    cut = even(shape[dim], 3, dim)
    W, gradients = values(shape, steps=1, kinds=((),) * 3)

    def rank(world):
        ledger = Ledger(world)
        mine = [[cut.shard(X, world.rank) for X in step] for step in (W, *gradients)]
        trained(partial(optim.Muon, direction=duplicated(ledger, cut), **settings), mine[0], mine[1:])
        return [record.call for record in ledger.records], ledger.sent_bytes

    for place, (made, sent) in enumerate(worlds.run(rank, 3)):
        expected = [
            calls.all_reduce((3, 3), "float32", 3, "max"),
            *volume.duplicated((3, *shape), cut, place),
            *(calls.all_reduce(each, "float64", 3, "sum") for each in sums),
            calls.all_reduce((1,), "float32", 3, "max"),  # whether the step stays in range everywhere
        ]
        assert made == expected
        assert sent == volume.Volume(tuple(expected), place).sent


def test_a_checkpoint_says_its_layout_without_its_ranks():
    """So that a run goes on in another process, or with a ledger around the ranks."""

    def rank(world):
        shard = torch.nn.Parameter(torch.ones(2, 3))
        direction, counted = (duplicated(each, even(4, 2, 0)) for each in (world, Ledger(world)))
        first, second = (optim.Muon([shard], lr=0.1, adapt="namo", direction=each) for each in (direction, counted))
        second.load_state_dict(first.state_dict())
        return repr(direction) == repr(counted), replace(direction, collectives=counted.collectives) == counted

    assert worlds.run(rank, 2) == [(True, True)] * 2


def test_agreeing_twice_is_agreeing():
    """An optimizer on shards agrees by itself; who asks for it again pays another call, no more."""
    W, gradients = values((12, 5))
    cut = even(12, 2, 0)

    def rank(world):
        mine = [[cut.shard(X, world.rank) for X in step] for step in (W, *gradients)]

        def make(groups, lr):
            optimizer = optim.Muon(groups, lr, direction=duplicated(world, cut))
            factors.agreed(optimizer, world)
            return optimizer

        return trained(make, mine[0], mine[1:])[0]

    expected, _ = trained(partial(optim.Muon, direction=ITERATED), W, gradients)
    assert equal(joined(worlds.run(rank, 2), cut), expected)


@pytest.mark.parametrize("spoilt", ["matrix", "other"])
def test_a_joint_on_shards_leaves_out_a_step_for_any_gradient_of_any_rank(spoilt):
    """Also for one of a parameter that is not on shards: the other ranks would wait in the layout."""
    cut = even(4, 2, 0)

    def rank(world):
        W, E = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(5))
        matrix = optim.Muon([W], lr=0.1, direction=duplicated(world, cut))
        joint = optim.routing.Joint({"matrix": matrix, "other": torch.optim.AdamW([E], lr=0.1)})
        W.grad, E.grad = torch.ones(2, 3), torch.ones(5)
        if world.rank == 1:
            {"matrix": W, "other": E}[spoilt].grad[0] = torch.nan
        joint.step()
        return joint.report.taken, bool((W == 1).all() and (E == 1).all())

    assert worlds.run(rank, 2, timeout=20) == [(False, True)] * 2


def test_a_step_out_of_range_on_one_rank_is_refused_on_all():
    cut = even(4, 2, 0)

    def rank(world):
        size = 6e4 if world.rank else 1.0
        W = torch.nn.Parameter(torch.full((2, 3), size, dtype=torch.float16))
        W.grad = -torch.ones_like(W)
        with pytest.raises(ValueError, match=r"step leaves the range of (torch\.float16|its dtype on another)"):
            optim.Muon([W], lr=1e5, weight_decay=0.0, direction=duplicated(world, cut)).step()
        return bool((size == W).all())

    assert worlds.run(rank, 2, timeout=20) == [True, True]


def test_owners_share_the_matrices_of_a_periodic_layout_too(monkeypatch):
    monkeypatch.setattr(batches, "ALONE", 1)
    W, gradients = values((6, 4), steps=1, kinds=((),) * 4)
    cut = even(6, 2, 0)

    def rank(world):
        met = []

        def counted(C):
            met.append(len(C))
            return ITERATED(C)

        whole = layouts.owner(counted, world, cut)
        direction = layouts.periodic(layouts.blockwise(ITERATED, world, cut), whole, 2)
        mine = [[cut.shard(X, world.rank) for X in step] for step in (W, *gradients)]
        trained(partial(optim.Muon, direction=direction), mine[0], mine[1:])
        return sum(met)

    assert worlds.run(rank, 2) == [2, 2]


def test_words_of_a_checkpoint_do_not_grow_and_numbers_of_numpy_are_numbers():
    p = torch.nn.Parameter(torch.eye(3))
    counting = polar.newton_schulz(polar.schedules.get("quintic", 2), Counted(Exact()))
    optimizer = optim.Muon([p], lr=0.1, direction=counting)
    before = optimizer.state_dict()["param_groups"][0]["direction"]
    p.grad = torch.eye(3)
    optimizer.step()
    assert counting.arithmetic.products
    assert optimizer.state_dict()["param_groups"][0]["direction"] == before
    exact, numpys = (optim.Muon([p], lr=0.1, adapt=optim.NorMuon(beta2=beta)) for beta in (0.9, np.float64(0.9)))
    exact.load_state_dict(numpys.state_dict())
