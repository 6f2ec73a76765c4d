"""The verbs, one suite for every backend: each result equals its definition, on every rank, bit for bit."""

from functools import cache, partial

import pytest
import torch
from parallel import programs

from muon_lab.parallel import calls, orders, worlds
from muon_lab.parallel.grid import Grid

MOVED = tuple(calls.ITEMSIZE)
MOVING = ("all_gather", "all_gather_v", "broadcast", "all_to_all")
FORMS = ("plain", "transposed", "strided", "expanded", "empty")
CASES = (
    [(verb, dtype, "plain") for verb in MOVING for dtype in MOVED]
    + [(f"all_reduce:{op}", dtype, "plain") for op, dtypes in calls.REDUCTIONS.items() for dtype in dtypes]
    + [
        (verb, dtype, "plain")
        for verb in ("reduce_scatter", "reduce_scatter:uneven")
        for dtype in ("float32", "bfloat16")
    ]
    + [(verb, "float32", form) for verb in (*MOVING, "all_reduce", "reduce_scatter") for form in FORMS[1:]]
    + [(verb, "bfloat16", "scalar") for verb in ("all_reduce", "all_gather", "broadcast")]
    + [(verb, "float32", "no rows") for verb in ("all_reduce", "all_gather", "all_gather_v", "broadcast")]
)
WORLDS = [("threads", 1), ("threads", 3), ("threads", 8), ("gloo", 1), ("gloo", 2), ("gloo", 4)]


@cache
def results(backend, ranks):
    return worlds.run(partial(programs.verbs, CASES), ranks, backend)


@pytest.mark.world
@pytest.mark.parametrize(("backend", "ranks"), WORLDS)
@pytest.mark.parametrize("verb", sorted({case[0] for case in CASES}))
def test_every_rank_gets_what_the_verb_is_defined_as(verb, backend, ranks):
    for index, case in enumerate(CASES):
        if case[0] == verb:
            for rank, got in enumerate(results(backend, ranks)):
                want = programs.expected(case, rank, ranks)
                x = got[index]
                assert (x.dtype, x.shape) == (want.dtype, want.shape), (case, rank)
                assert x.is_contiguous()
                assert not x.requires_grad
                same = torch.equal(raw(x), raw(want))
                assert same, (case, rank, x, want)


def raw(x):
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).view(torch.uint8)


def test_the_suite_sees_a_wrong_result():
    """Negative control: one rank's contribution less, and the definition notices."""
    case = ("all_reduce", "float32", "plain")
    assert not torch.equal(programs.expected(case, 0, 3), programs.expected(case, 0, 4)[: 2 * 3])


@pytest.mark.world
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_threads_in_ring_order_give_the_bits_of_gloo(ranks):
    cases = [
        (verb, elements, dtype)
        for dtype in ("float32", "float64", "bfloat16", "float16")
        for elements in (ranks, 7 * ranks, 40 * 41 * ranks)
        for verb in ("all_reduce", "mean", "reduce_scatter", "uneven")
    ]
    cases += [("all_reduce", 3_000_001 if ranks == 3 else 600_007, dtype) for dtype in ("float32", "bfloat16")]
    program = partial(programs.sums, cases)
    threads, gloo = worlds.run(program, ranks), worlds.run(program, ranks, "gloo", checked=False)
    for ours, theirs in zip(threads, gloo, strict=True):
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(ours, theirs, strict=True))
    if ranks > 2:  # two addends commute
        other = worlds.run(program, ranks, order="rank")
        assert not all(torch.equal(a, b) for a, b in zip(threads[0], other[0], strict=True))


@pytest.mark.world
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_groups_of_a_grid_talk_among_themselves(backend):
    grid = Grid(dp=2, tp=2, pp=2) if backend == "threads" else Grid(dp=2, tp=2)
    for rank, (along, (single, own)) in enumerate(worlds.run(partial(programs.on_grid, grid), grid.size, backend)):
        for axis, (ranks, place, total) in along.items():
            assert ranks == grid.group(axis, rank)
            assert ranks[place] == rank
            assert total == sum(ranks)
        assert single == (rank,)
        assert own == rank


@pytest.mark.world
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_two_groups_of_the_same_ranks_are_two(backend):
    checked = backend == "threads"  # checked processes begin calls together
    assert worlds.run(programs.twice_the_same_groups, 2, backend, checked=checked) == [(1.0, 10.0)] * 2


@pytest.mark.world
@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("kind", programs.MISMATCHES)
def test_asking_for_different_things_is_an_error_on_every_rank(kind, backend):
    with pytest.raises(worlds.RankRaised, match=r"ranks? 0|sends 1 rows to rank") as caught:
        worlds.run(partial(programs.mismatched, kind), 2, backend, timeout=20.0)
    assert isinstance(caught.value.__cause__, calls.Mismatch)
    assert caught.value.ranks == (0, 1)


@pytest.mark.world
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_different_partitions_are_an_error(backend):
    with pytest.raises(worlds.RankRaised) as caught:
        worlds.run(programs.different_groups, 2, backend)
    assert "rank 0 made split into (0,), (1,); rank 1 made split into (0, 1)" in str(caught.value)


@pytest.mark.world
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_what_no_backend_could_do_is_refused_before_anyone_waits(backend):
    for messages in worlds.run(programs.refusals, 2, backend):
        assert set(messages) == set(programs.REFUSED)
        assert "cannot take the sum of float8_e4m3fn, only of float64" in messages["sum of fp8"]
        assert "op of all_reduce must be one of sum, mean, max, min, not 'product'" in messages["op"]
        assert "needs 1 rows of rank" in messages["own size"]
        assert "needs one number of rows a rank, not (1, 1, 1)" in messages["number of sizes"]
        assert "root of a broadcast among 2 ranks must lie in 0..1, not be 2" in messages["root"]


@pytest.mark.parametrize("order", orders.ORDERS)
def test_orders_of_summation_agree_where_sums_are_exact(order):
    parts = [programs.numbers(rank, (5, 7)) for rank in range(5)]
    assert torch.equal(orders.reduce(parts, order=order), torch.stack(parts).sum(0))
    assert torch.equal(orders.reduce(parts, "max", order), torch.stack(parts).amax(0))


def test_the_ring_order_is_what_its_definition_says_element_by_element():
    """The slow reference: for each element, its chunk, and along the ring from there."""
    parts = [programs.gaussian(rank, 37, "bfloat16") for rank in range(4)]
    got = orders.reduce(parts)
    chunk = 10  # 37 entries of 2 bytes: 8 segments of 74/8, rounded up to 10 bytes, two a chunk
    for element in range(37):
        home = element // chunk
        total = parts[(home - 1) % 4][element]
        for hop in (2, 3, 4):
            total = parts[(home - hop) % 4][element] + total
        assert got[element] == total


def test_summing_in_float64_rounds_once():
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert orders.reduce(parts, order="float64").item() == 258
    assert orders.reduce(parts, order="rank").item() == 256  # 257 is halfway between 256 and 258, and ties go to even


def test_names_of_older_versions_are_found():
    from types import SimpleNamespace

    from muon_lab.parallel.process_groups import renamed

    new, old = SimpleNamespace(all_gather_single=max), SimpleNamespace(all_gather_into_tensor=min)
    names = ("all_gather_single", "all_gather_into_tensor")
    assert (renamed(new, *names), renamed(old, *names)) == (max, min)
    with pytest.raises(ValueError, match="none of all_gather_single, all_gather_into_tensor"):
        renamed(SimpleNamespace(), *names)
