"""Layer-wise data parallelism: the weights of one process, bit for bit, whatever the ranks, owners and gradients."""

import math
import re
import threading
from dataclasses import dataclass, replace
from functools import cache, partial

import jaxtyping
import pytest
import torch
from parallel import layerwise_programs as programs
from torch import nn

from muon_lab import optim, parallel, polar
from muon_lab.arithmetic import Exact
from muon_lab.cost import flops
from muon_lab.optim import routing
from muon_lab.optim.matrices import STACKED
from muon_lab.parallel import balance, traffic, volume, worlds
from muon_lab.parallel.grid import Grid, even
from muon_lab.parallel.ledger import Ledger
from muon_lab.parallel.rendezvous import alone
from muon_lab.parallel.replicas import checkpoints, ownership, teams
from muon_lab.parallel.replicas.agreement import norms
from muon_lab.parallel.replicas.elementwise import ElementwiseOptimizer
from muon_lab.parallel.replicas.layerwise import LayerwiseOptimizer

#: Both gathers and both reductions, each in two of the modes.
TWO = (programs.MODES[0], programs.MODES[3])

CASES = [
    *[("muon", ranks, TWO) for ranks in (1, 2, 4, 5, 6, 7, 8)],
    ("muon", 3, programs.MODES),
    *[(name, ranks, TWO) for name in ("mop", "adamw", "joint") for ranks in (2, 8)],
    *[(name, ranks, TWO) for name, ranks in (("soap", 3), ("rekls", 2))],
]


@pytest.mark.world
@pytest.mark.parametrize(("name", "ranks", "modes"), CASES, ids=[f"{name}-{ranks}" for name, ranks, _ in CASES])
def test_weights_are_those_of_one_process_bit_for_bit(name, ranks, modes):
    expected, _ = programs.alone(name)
    for found in worlds.run(partial(programs.trained, name, modes), ranks):
        assert all(programs.same(weights, expected) for weights in found)


def test_the_comparison_sees_a_single_bit():
    """Negative control."""
    expected, _ = programs.alone("muon")
    wrong = [W.clone() for W in expected]
    wrong[3].view(torch.int32)[0, 0] ^= 1
    assert not programs.same(wrong, expected)


@pytest.mark.world
@pytest.mark.slow
def test_weights_are_those_of_one_process_over_sockets():
    """Among four ranks, three and one of them, and two and two."""
    names = ("joint",)
    expected = {name: programs.alone(name)[0] for name in names}
    for by_size in worlds.run(partial(programs.in_groups, names, TWO), 4, "gloo"):
        assert len(by_size) == 3
        for found in by_size:
            assert all(programs.same(weights, expected[name]) for name in names for weights in found[name])


@pytest.mark.world
@pytest.mark.parametrize(
    "owners",
    [
        lambda costs, ranks: [i % ranks for i in range(len(costs))],
        lambda costs, ranks: [0] * len(costs),
        (2, 2, 0, 1, 2),
        {"w3": 0, "w1": 1, "w0": 2, "w2": 2, "w4": 1},
    ],
    ids=["in turn", "all on one", "listed", "named"],
)
def test_who_owns_what_changes_nothing(owners):
    expected, _ = programs.alone("muon")
    for found in worlds.run(partial(programs.trained, "muon", TWO, owners=owners), 3):
        assert all(programs.same(weights, expected) for weights in found)


def test_policies_balance_flops_where_the_optimizer_is_one_of_matrices():
    """A tall matrix has fewer of them than its entries say: 512·24² is little more than 64³."""
    shapes = ((512, 24), *[(64, 64)] * 3)
    named = programs.parameters([(shape, "float32") for shape in shapes])
    owners = {}

    def program(world):
        for name in (None, *balance.POLICIES):
            owners[name] = LayerwiseOptimizer(optim.Muon(named, lr=0.1), world, name).owners
        adamw = LayerwiseOptimizer(torch.optim.AdamW(named), world).owners
        inverse = LayerwiseOptimizer(optim.Muon(named, lr=0.1), world, price=lambda m, n: 1e9 / (m * n)).owners
        return owners, adamw, inverse

    owners, adamw, inverse = worlds.run(program, 2)[0]
    assert owners[None] == owners["lpt_flops"] == dict(zip(("w0", "w1", "w2", "w3"), (0, 1, 1, 0), strict=True))
    assert list(owners["lpt_elements"].values()) == list(adamw.values()) == [0, 1, 1, 1]
    assert list(inverse.values()) == [1, 0, 1, 0]
    seconds = balance.priced(shapes, lambda m, n: flops.newton_schulz(max(m, n), min(m, n), 5))
    found, by_elements = (balance.assigned(list(owners[k].values()), seconds, 2) for k in (None, "lpt_elements"))
    assert (round(found.ratio, 3), round(by_elements.ratio, 3)) == (1.062, 1.593)


def test_what_is_stepped_costs_what_its_optimizer_finds_in_it():
    """Views are asked, stacks count, and what is stepped entry by entry costs its elements, or as much in the unit."""
    named = programs.parameters([((6, 4), "float32"), ((3, 4, 2), "float32"), ((50, 4), "float32")])
    muon = optim.Muon(
        [{"params": named[:1], "view": optim.fused(3, 3)}, {"params": named[1:2], "view": STACKED}], lr=0.1
    )
    inner = routing.Joint({"matrix": muon, "other": torch.optim.AdamW(named[2:])})
    costs = []
    for price in (None, lambda m, n: 3 * m * n * min(m, n)):
        policy = lambda found, ranks: costs.append(found) or [0] * len(found)  # noqa: E731
        LayerwiseOptimizer(inner, alone(), policy, price=price)
    assert costs == [[2 * 3 * 4 * 3, 3 * 4 * 2 * 2, 200], [6 * 3 * 4 * 3, 9 * 4 * 2 * 2, 600]]


# --- every layer once -------------------------------------------------------------------------------------------------


def stepped(layers, ranks, kind=LayerwiseOptimizer):
    """Return how often all ranks together have stepped each layer, whether weights are those of one process."""
    results = worlds.run(partial(programs.counted, layers, kind), ranks)
    totals = {f"w{i}": sum(counts.get(f"w{i}", 0) for counts, _ in results) for i in range(layers)}
    _, expected = programs.counted(layers, LayerwiseOptimizer, alone())
    return totals, all(programs.same(weights, expected) for _, weights in results)


@pytest.mark.world
@pytest.mark.parametrize("layers", [0, 1, 3, 4, 5, 7])
def test_every_layer_is_stepped_exactly_once_on_however_many_ranks(layers):
    for ranks in (1, 2, 3, 4, 8):
        totals, equal = stepped(layers, ranks)
        assert totals == dict.fromkeys(totals, 2), ranks  # two steps
        assert equal, ranks


class Greedy(LayerwiseOptimizer):
    """Every rank steps everything that it has gradients of."""

    def _owns(self, number):
        return True


@pytest.mark.world
def test_counting_finds_layers_that_are_stepped_twice():
    """Negative control."""
    totals, _ = stepped(3, 2, Greedy)
    assert totals == {"w0": 4, "w1": 4, "w2": 4}


# --- gradients that are missing or bad --------------------------------------------------------------------------------


def with_missing(missing, world, steps=2):
    """Return weights, state and report when a mapping of name to ranks says where gradients are missing."""
    make, shapes = programs.OPTIMIZERS["joint"]
    named = programs.parameters(shapes)
    optimizer = LayerwiseOptimizer(make(named), world)
    for step in range(steps):
        for name, p in named:
            G = programs.share(step, world.rank, world.size, p)
            p.grad = None if world.rank in missing.get(name, ()) else G
        optimizer.step()
    return programs.weights(named), optimizer.state_dict(), optimizer.report


@pytest.mark.world
def test_a_parameter_without_gradient_anywhere_is_left_alone():
    missing = {"w0": (0, 1, 2), "w5": (0, 1, 2)}
    shapes = programs.OPTIMIZERS["joint"][1]
    wanted = tuple(f"w{i}" for i in range(len(shapes)) if f"w{i}" not in missing)
    expected, state = programs.alone("joint", wanted=wanted)
    for weights, found, report in worlds.run(partial(with_missing, missing), 3):
        assert programs.same(weights, expected)
        assert programs.same_state(found, state)
        assert report.taken
        assert not {"w0", "w5"} & set(report.updated)


@pytest.mark.world
@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
def test_a_gradient_that_is_missing_on_some_ranks_counts_as_zero_there(reduce):
    def program(world):
        named = programs.parameters([((2, 2), "float32")] * 3)
        optimizer = LayerwiseOptimizer(torch.optim.SGD(named, lr=1.0), world, reduce=reduce)
        for number, (_, p) in enumerate(named):
            with torch.no_grad():
                p.zero_()
            p.grad = torch.full((2, 2), 4.0) if (world.rank + number) % 4 == 0 else None  # rank 1 has none at all
        optimizer.step()
        return [p.tolist() for _, p in named], optimizer.report.norm

    for weights, norm in worlds.run(program, 4):
        assert weights == [[[-1.0, -1.0]] * 2] * 3
        assert norm == math.sqrt(12)


@pytest.mark.world
def test_ranks_make_the_same_calls_whatever_they_have_gradients_of():
    program = partial(programs.ledgered, "joint", "exact", "reduce_scatter")
    some = worlds.run(partial(program, missing=("w0", "w1", "w2", "w3", "w6")), 3)
    complete = worlds.run(program, 3)
    calls = [[record.call.agreed for record in ledger.records] for ledger, _ in some + complete]
    assert all(made == calls[0] for made in calls)


def spoiled(name, value, where, world):
    """Return weights and state of a good, a spoiled and a good step; and the report of the spoiled one."""
    make, shapes = programs.OPTIMIZERS[name]
    named = programs.parameters(shapes)
    optimizer = LayerwiseOptimizer(make(named), world, reduce="reduce_scatter")
    report = None
    for step, bad in ((0, False), (9, True), (1, False)):
        for key, p in named:
            p.grad = programs.share(step, world.rank, world.size, p)
            if bad and (key, world.rank) == where:
                p.grad.view(-1)[0] = value
        optimizer.step()
        report = optimizer.report if bad else report
    return programs.weights(named), optimizer.state_dict(), report


@pytest.mark.world
@pytest.mark.parametrize("name", ["muon", "adamw", "joint"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(name, value):
    expected, state = programs.alone(name, steps=2)
    for weights, found, report in worlds.run(partial(spoiled, name, value, ("w3", 1)), 3):
        assert report.nonfinite == ("w3",)
        assert math.isnan(report.norm)
        assert programs.same(weights, expected)
        assert programs.same_state(found, state)


@pytest.mark.world
@pytest.mark.parametrize("name", ["muon", "adamw", "joint"])
def test_a_step_that_one_rank_cannot_take_is_taken_by_none(name, monkeypatch):
    expected, state = programs.alone(name, steps=2)

    def program(world):
        make, shapes = programs.OPTIMIZERS[name]
        named = programs.parameters(shapes)
        inner = make(named)
        optimizer = LayerwiseOptimizer(inner, world)
        taken, step = inner.step, 0

        def failing():
            taken()
            if world.rank == 1 and step == 9:
                raise ArithmeticError("planted")

        inner.step = failing
        message = ""
        for step in (0, 9, 1):
            for _, p in named:
                p.grad = programs.share(step, world.rank, world.size, p)
            try:
                optimizer.step()
            except (ArithmeticError, ValueError) as error:
                message = f"{type(error).__name__}: {error}"
        return programs.weights(named), optimizer.state_dict(), message

    for rank, (weights, found, message) in enumerate(worlds.run(program, 3)):
        told = "ValueError: rank 1 could not take its step, so no rank did: ArithmeticError: planted"
        assert message == ("ArithmeticError: planted" if rank == 1 else told)
        assert programs.same(weights, expected)
        assert programs.same_state(found, state)


def test_gradients_stay_those_of_the_own_backward():
    def program(world):
        named = programs.parameters(programs.MATRICES)
        optimizer = LayerwiseOptimizer(optim.Muon(named, lr=0.1), world, reduce="reduce_scatter", clip=1e-3)
        before = [programs.share(0, world.rank, world.size, p) for _, p in named]
        for (_, p), G in zip(named, before, strict=True):
            p.grad = G.clone()
        optimizer.step()
        return programs.same([p.grad for _, p in named], before)

    assert worlds.run(program, 3) == [True] * 3


@pytest.mark.parametrize("kind", [LayerwiseOptimizer, ElementwiseOptimizer])
def test_sparse_gradients_count_as_what_they_are(kind):
    """On one rank alone, too: no rank is left waiting."""

    def program(world):
        W = nn.Parameter(torch.zeros(2, 2))
        optimizer = kind(torch.optim.SGD([W], lr=1.0), world)
        W.grad = (2 * torch.eye(2)).to_sparse() if world.rank else torch.ones(2, 2)
        optimizer.step()
        return W.tolist()

    assert worlds.run(program, 2) == [[[-1.5, -0.5], [-0.5, -1.5]]] * 2


@pytest.mark.parametrize("mode", TWO)
def test_parameters_may_lie_in_any_order_of_strides_and_some_may_be_frozen(mode):
    def program(world):
        W = torch.arange(12.0).reshape(3, 4)
        X = torch.arange(48.0).reshape(2, 3, 2, 4)
        named = [W.clone().T, X.to(memory_format=torch.channels_last), W.clone(), W]
        named = [(f"w{i}", nn.Parameter(p, requires_grad=i != 2)) for i, p in enumerate(named)]
        assert not any(p.is_contiguous() for _, p in named[:2])
        optimizer = LayerwiseOptimizer(torch.optim.SGD(named, lr=1.0), world, gather=mode[0], reduce=mode[1])
        before = programs.weights(named)
        for _, p in named:
            if p.requires_grad:
                p.grad = (1 + world.rank) * p.detach().clone()  # with the strides of p
        optimizer.step()
        return [torch.equal(p, -0.5 * w if p.requires_grad else w) for (_, p), w in zip(named, before, strict=True)]

    assert worlds.run(program, 2) == [[True] * 4] * 2


@pytest.mark.parametrize("kind", [LayerwiseOptimizer, ElementwiseOptimizer])
@pytest.mark.parametrize("what", ["rate", "parameter"])
def test_groups_that_change_on_one_rank_are_found_out_by_all(kind, what):
    def program(world):
        W = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        inner = torch.optim.SGD(W, lr=torch.tensor(0.5))
        optimizer = kind(inner, world)
        for p in W:
            p.grad = torch.ones(3)
        inner.param_groups[0]["lr"] = 0.5  # on all ranks: a number is what the tensor was
        optimizer.step()
        if world.rank == 1 and what == "rate":
            inner.param_groups[0]["lr"] = 0.25
        if world.rank == 1 and what == "parameter":
            inner.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
        try:
            optimizer.step()
        except ValueError as error:
            return [p.tolist() for p in W], str(error)

    for rank, (weights, message) in enumerate(worlds.run(program, 2)):
        assert weights == [[0.5] * 3] * 2  # the first step alone
        other = what == "parameter" and rank == 1
        assert ("finds other parameters in its groups" if other else "groups differ between ranks 0, 1") in message


# --- giants -----------------------------------------------------------------------------------------------------------

#: A tall one, a wide one, two small ones, and one of two matrices; costs are such that three are divided.
GIANTS, PRICES = ((13, 5), (4, 9), (3, 3), (2, 5), (8, 6)), (60.0, 36.0, 1.0, 2.0, 50.0)


def divided(ranks):
    return balance.hybrid(PRICES, ranks, divided=lambda job, members: PRICES[job] / members)


def fused(named):
    """Return Muon, which finds two matrices in the last parameter."""
    groups = [{"params": named[:-1]}, {"params": named[-1:], "view": optim.fused(5, 3)}]
    return optim.Muon(groups, lr=0.1, nesterov=True, direction=("polar_express", 5))


def with_giants(owners, world, dtype="float32", fail=()):
    """Return weights, state and records of two steps, a try in which some rank fails coming before the last.

    Who fails does so when it steps a parameter for the first time, so that owners of giants fail before their teams.
    """
    named = programs.parameters([(shape, dtype) for shape in GIANTS])
    inner, ledger = fused(named), Ledger(world)
    optimizer = LayerwiseOptimizer(inner, ledger, owners(world.size), reduce="reduce_scatter")
    ledger.records.clear()
    taken = inner.step

    def failing():
        raise ArithmeticError("planted")

    message = ""
    for step, bad in ((0, False), *([(9, True)] if fail else []), (1, False)):
        inner.step = failing if bad and world.rank in fail else taken
        for _, p in named:
            p.grad = programs.share(step, world.rank, world.size, p)
        try:
            optimizer.step()
        except (ArithmeticError, ValueError) as error:
            message = str(error)
    return programs.weights(named), optimizer.state_dict(), ledger.records, message


@cache
def by_one(dtype):
    """Return weights and state of one process."""
    return with_giants(lambda ranks: [0] * len(GIANTS), alone(), dtype)[:2]


def off(weights):
    """Return how far weights are from those of one process in float64."""
    exact, _ = by_one("float64")
    return math.hypot(*((a.double() - b).norm().item() for a, b in zip(weights, exact, strict=True)))


@pytest.mark.world
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_teams_make_the_steps_of_one_process_but_for_rounding(ranks):
    """Other orders of sums: off by no more than a few times what float32 itself is off from float64."""
    found = worlds.run(partial(with_giants, divided), ranks)
    assert {team.job for team in divided(ranks).teams} == {0, 1, 4}
    _, state = by_one("float32")
    for weights, whole, _, _ in found:
        assert programs.same(weights, found[0][0])
        assert off(weights) <= 4 * off(by_one("float32")[0])
        entries, expected = programs.entries(whole), programs.entries(state)
        assert {key: X.shape for key, X in entries.items()} == {key: X.shape for key, X in expected.items()}
        assert programs.same_state(whole, state)  # momentum never meets the teams


def test_teams_that_orthogonalize_their_parts_alone_are_far_off(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(teams, "_layout", lambda direction, ranks, cut: direction)
    weights, *_ = worlds.run(partial(with_giants, divided), 2)[0]
    assert off(weights) > 1e3 * off(by_one("float32")[0])


@dataclass(frozen=True)
class Started:
    """A direction that says all that it is made of."""

    schedule: polar.Schedule
    arithmetic: Exact
    start: str

    def __call__(self, C):
        return polar.newton_schulz(self.schedule, self.arithmetic, self.start)(C)


def test_teams_begin_as_their_direction_does():
    """Two steps from the exact norm end elsewhere than two from the Frobenius norm do: by far more than rounding."""
    direction = Started(polar.schedules.get("quintic", 2), Exact(), "spectral")

    def program(other, world):
        W = nn.Parameter(torch.zeros(13, 5, dtype=torch.float64))
        inner = optim.Muon([W], lr=1.0, direction=other or direction, scale="none")
        teams = balance.hybrid([8.0], world.size)
        assert len(teams.teams) == (world.size > 1)
        optimizer = LayerwiseOptimizer(inner, world, teams)
        W.grad = torch.randn(13, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        optimizer.step()
        return W.detach()

    one, plain = program(None, alone()), program(replace(direction, start="frobenius"), alone())
    assert torch.linalg.norm(one - plain) > 0.1 * torch.linalg.norm(one)
    for W in worlds.run(partial(program, None), 2):
        assert torch.linalg.norm(W - one) <= 1e-12 * torch.linalg.norm(one)


@pytest.mark.world
def test_members_of_a_team_run_the_distributed_layout_on_their_parts():
    """What is recorded of them are its calls, once a step for each matrix: nobody orthogonalizes a giant whole."""
    for rank, (_, _, records, _) in enumerate(worlds.run(partial(with_giants, divided), 4)):
        for number, shapes in ((0, [(13, 5)]), (1, [(4, 9)]), (4, [(5, 6), (3, 6)])):
            made = [r.call for r in records if r.column("layer") == number]
            summed = [call for call in made if call.verb == "all_reduce"]
            cuts = [(1, *shape) for shape in shapes]
            parts = [even(max(shape), 4, dim=0 if shape[0] >= shape[1] else 1) for shape in shapes]
            plan = [volume.distributed(c, part, rank, steps=5) for c, part in zip(cuts, parts, strict=True)]
            assert summed == [call for calls in plan for call in calls] * 2
            assert sum(call.verb == "all_to_all" for call in made) == 2 * 2 * len(shapes)  # there and back


@pytest.mark.world
@pytest.mark.slow
def test_teams_over_sockets_make_the_bits_of_threads():
    program = partial(with_giants, divided)
    for threads, sockets in zip(worlds.run(program, 3), worlds.run(program, 3, "gloo"), strict=True):
        assert programs.same(threads[0], sockets[0])


@pytest.mark.world
@pytest.mark.parametrize("fail", [(0,), (1,), (0, 1)])
def test_a_team_whose_owner_fails_is_not_left_waiting(fail):
    clean = worlds.run(partial(with_giants, divided), 2)
    for (weights, state, _, _), (found, other, _, message) in zip(
        clean, worlds.run(partial(with_giants, divided, fail=fail), 2), strict=True
    ):
        assert "planted" in message
        assert programs.same(found, weights)
        assert programs.same_state(other, state)


def test_teams_that_cannot_be_are_refused():
    owners, named = balance.hybrid([8.0, 1.0], 2), [(name, parameter()) for name in "vw"]
    with pytest.raises(ValueError, match=r"owners divide v among ranks 0, 1, needed ranks of 0\.\.0"):
        LayerwiseOptimizer(optim.Muon(named, lr=0.1), alone(), owners)

    def program(world):
        for make in (torch.optim.AdamW, optim.MOP, partial(optim.Muon, direction=lambda C: C)):
            inner = make([(name, parameter()) for name in "vw"], lr=0.1)
            with pytest.raises(ValueError, match=r"owners divide v among ranks 0, 1, but \w+ steps it whole: needed M"):
                LayerwiseOptimizer(inner, world, owners)
            LayerwiseOptimizer(inner, world, owners.owners)  # whole, by the first of the team
        return True

    assert worlds.run(program, 2) == [True, True]


# --- means ------------------------------------------------------------------------------------------------------------


@pytest.mark.world
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("mode", TWO)
def test_means_are_exact_up_to_one_rounding_a_rank(ranks, mode):
    r"""A sum of p addends in any order is off by at most (p - 1) u of the sum of magnitudes, the division by u more."""
    G = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))

    def program(world):
        named = [(f"w{i}", nn.Parameter(torch.zeros(8))) for i in range(3)]
        optimizer = LayerwiseOptimizer(torch.optim.SGD(named, lr=1.0), world, gather=mode[0], reduce=mode[1])
        for (_, p), part in zip(named, G[world.rank].split(8), strict=True):
            p.grad = part.clone()
        optimizer.step()
        return torch.cat([p.detach() for _, p in named])

    results = worlds.run(program, ranks)
    exact = -G[:ranks].double().mean(0)
    unit = 2.0**-24
    magnitudes = G[:ranks].double().abs().sum(0) / ranks
    assert all(torch.equal(found, results[0]) for found in results)
    assert ((results[0].double() - exact).abs() <= ranks * unit * (1 + ranks * unit) * magnitudes).all()


@pytest.mark.world
@pytest.mark.parametrize("mode", TWO)
def test_gradients_in_bfloat16_may_be_summed_in_float32(mode):
    """256 + 1 + 1 is 258, whose third is 86; in bfloat16 so is 1 + 1 + 256, but 256 + 1 is 256."""

    def program(sums, world):
        named = [
            ("w0", nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))),
            ("w1", nn.Parameter(torch.zeros(2).double())),
        ]
        ledger = Ledger(world)
        optimizer = LayerwiseOptimizer(
            torch.optim.SGD(named, lr=1.0), ledger, gather=mode[0], reduce=mode[1], sums=sums
        )
        ledger.records.clear()
        for _, p in named:
            places = torch.arange(len(p)) + world.rank
            p.grad = torch.where(places % 3 == 0, 256.0, 1.0).to(p.dtype)
        optimizer.step()
        made = tuple(record.call for record in ledger.records if record.column("phase") == "gradients")
        return [p.tolist() for _, p in named], made, tuple(optimizer.owners.values())

    options = {"gather": mode[0], "reduce": mode[1], "sums": "float32"}
    for rank, ((weights, made, owners), (narrow, _, _)) in enumerate(
        zip(worlds.run(partial(program, torch.float32), 3), worlds.run(partial(program, None), 3), strict=True)
    ):
        assert weights == [[-86.0] * 5, [-86.0] * 2]
        assert narrow[0] != weights[0]
        assert narrow[1] == weights[1]
        assert made == traffic.layerwise([5, 2], ["bfloat16", "float64"], owners, 3, rank, **options).gradients


def test_equal_gradients_on_a_power_of_two_of_ranks_have_themselves_as_mean():
    def program(world):
        W = nn.Parameter(torch.zeros(37))
        optimizer = LayerwiseOptimizer(torch.optim.SGD([W], lr=1.0), world)
        W.grad = torch.randn(37, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        return torch.equal(W.detach(), -W.grad)

    assert worlds.run(program, 4) == [True] * 4


def test_gradients_that_are_means_already_are_used_as_they_are():
    expected, _ = programs.alone("muon")

    def program(world):
        named = programs.parameters(programs.MATRICES)
        optimizer = LayerwiseOptimizer(
            optim.Muon(named, lr=0.1, weight_decay=0.1, nesterov=True), Ledger(world), reduce="none"
        )
        for step in range(2):
            for _, p in named:
                p.grad = programs.mean(step, p.shape, p.dtype)
            optimizer.step()
        phases = {dict(record.tags).get("phase") for record in optimizer.group.records}
        named[0][1].grad = None if world.rank else named[0][1].grad
        with pytest.raises(ValueError, match="w0 has a gradient on some ranks only"):
            optimizer.step()
        return programs.weights(named), phases

    for weights, phases in worlds.run(program, 2):
        assert programs.same(weights, expected)
        assert "gradients" not in phases


# --- clipping ---------------------------------------------------------------------------------------------------------


def clipped(clip, name, world, owners=None, steps=1):
    make, shapes = programs.OPTIMIZERS[name]
    named = programs.parameters(shapes)
    optimizer = LayerwiseOptimizer(make(named), world, owners, clip=clip)
    for step in range(steps):
        for _, p in named:
            p.grad = programs.share(step, world.rank, world.size, p)
        optimizer.step()
    return programs.weights(named), optimizer.report.norm


@pytest.mark.world
def test_the_norm_is_that_of_the_whole_mean_bit_for_bit_on_all_ranks():
    shapes = programs.OPTIMIZERS["adamw"][1]
    squares = sum((programs.mean(0, *kind).double() ** 2).sum().item() for kind in typed(shapes))
    for ranks in (1, 2, 3, 8):
        found = {norm for _, norm in worlds.run(partial(clipped, 1.0, "adamw"), ranks)}
        assert len(found) == 1
        assert abs(found.pop() - math.sqrt(squares)) <= 4 * math.ulp(math.sqrt(squares))


@pytest.mark.world
def test_the_norm_does_not_depend_on_owners_by_a_bit():
    results = worlds.run(partial(clipped, 1.0, "muon"), 3) + worlds.run(partial(clipped, 1.0, "muon"), 8)
    assert len({norm for _, norm in results}) == 1


def typed(shapes):
    return [(shape, getattr(torch, dtype)) for shape, dtype in shapes]


@pytest.mark.world
@pytest.mark.parametrize("clip", [1e-4, 0.5, 3.0])
def test_clipping_scales_the_whole_gradient(clip):
    """With torch's own on the mean, up to the 1e-6 that it adds to the norm and a rounding or two of the gradient."""

    def program(world):
        named = programs.parameters([((6, 4), "float32"), ((7,), "float32")])
        before = [p.detach().clone() for _, p in named]
        optimizer = LayerwiseOptimizer(torch.optim.SGD(named, lr=1.0), world, clip=clip)
        for _, p in named:
            p.grad = programs.share(0, world.rank, world.size, p)
        optimizer.step()
        return [(W.double() - p.detach().double()) for (_, p), W in zip(named, before, strict=True)], before

    means = [programs.mean(0, shape, torch.float32).double() for shape in ((6, 4), (7,))]
    norm = math.sqrt(sum((G**2).sum().item() for G in means))
    unit = 2.0**-24
    for moved, before in worlds.run(program, 3):
        for U, G, W in zip(moved, means, before, strict=True):
            wanted = G * min(1.0, clip / norm)
            assert ((U - wanted).abs() <= 2 * unit * wanted.abs() + unit * (W.abs() + wanted.abs())).all()


@pytest.mark.world
@pytest.mark.parametrize("clip", [1e-12, 1e-3])
def test_muon_does_not_see_its_first_gradient_clipped(clip):
    """Its direction has no scale (what is compared is rounding of a gradient in float32, or bfloat16)."""
    free = worlds.run(partial(clipped, None, "muon"), 2)[0][0]
    tight = worlds.run(partial(clipped, clip, "muon"), 2)[0][0]
    for a, b, (_, dtype) in zip(free, tight, programs.MATRICES, strict=True):
        scale = 0.1 * math.sqrt(6)  # lr · spectral: the entry of an orthogonal factor is at most 1
        assert (a.double() - b.double()).abs().max() <= scale * (1e-5 if dtype != "bfloat16" else 2**-5)


GRID = Grid(dp=2, tp=2)


def on_a_grid(kind, clip, spoil, world, also=True, whole=("b",), steps=1):
    """Step the halves of a matrix and a vector that all have whole; return what moved, the means, and the report."""
    dp, tp = (world.split(GRID.groups(axis)) for axis in ("dp", "tp"))
    at = GRID.coordinates(world.rank)
    W, b = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))
    inner = torch.optim.SGD([("W", W), ("b", b)], lr=1.0)
    beside = {"also": tp, "whole": whole} if also else {}
    optimizer = kind(inner, dp, clip=clip, **beside)
    W.grad = 10.0**at.tp * (mean(0, (3, 4), torch.float32) + (2 * at.dp - 1))
    b.grad = mean(1, (5,), torch.float32) + 2 * (2 * at.dp - 1)
    if world.rank == spoil:
        W.grad[0, 0] = math.inf
    optimizer.step()
    return W.detach(), b.detach(), optimizer.report


mean = programs.mean
KINDS = [LayerwiseOptimizer, ElementwiseOptimizer]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_one_matrix_are_clipped_by_one_factor(kind):
    """Bit for bit: shards of very unequal gradients, and a vector that both have whole and that counts once."""
    W, b = mean(0, (3, 4), torch.float32), mean(1, (5,), torch.float32)
    squares = 101 * W.double().square().sum().item() + b.double().square().sum().item()
    results = worlds.run(partial(on_a_grid, kind, 1.0, None), 4)
    (norm,) = {report.norm for _, _, report in results}
    assert abs(norm - math.sqrt(squares)) <= 4 * math.ulp(norm)
    for rank, (moved, vector, _) in enumerate(results):
        assert torch.equal(moved, -(10.0 ** GRID.coordinates(rank).tp * W) * (1 / norm))
        assert torch.equal(vector, -b * (1 / norm))
    twice = worlds.run(partial(on_a_grid, kind, 1.0, None, whole=()), 4)[0][2].norm
    assert abs(twice**2 - norm**2 - b.double().square().sum().item()) <= 1e-12 * norm**2
    apart = {report.norm for _, _, report in worlds.run(partial(on_a_grid, kind, 1.0, None, also=False), 4)}
    assert max(apart) > 8 * min(apart)  # what each would have clipped by alone


def test_ranks_with_unequal_parts_choose_the_same_owners():
    """By what each parameter costs where it is largest."""

    def owners(world):
        dp, tp = (world.split(GRID.groups(axis)) for axis in ("dp", "tp"))
        rows = 3 - GRID.coordinates(world.rank).tp
        named = [(f"w{i}", nn.Parameter(torch.zeros(rows, n))) for i, n in enumerate((2, 2, 2, 4))]
        return LayerwiseOptimizer(torch.optim.SGD(named, lr=1.0), dp, also=tp).owners

    found = worlds.run(owners, 4)
    assert found == found[:1] * 4
    assert set(found[0].values()) == {0, 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [1, 2])
def test_a_gradient_that_is_not_finite_in_one_part_stops_the_step_of_all(kind, spoil):
    for W, b, report in worlds.run(partial(on_a_grid, kind, None, spoil), 4):
        assert report.nonfinite == ("W",)
        assert not W.any()
        assert not b.any()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rate", "groups differ between ranks"),
        ("step", "rank 3 could not take its step, so no rank did: ArithmeticError: planted"),
        ("whole", "weights differ between ranks .*: w1"),
        ("clip", "options differ between ranks .*: clip"),
        ("part", "weights differ between ranks 1, 3: w0"),
    ],
)
def test_what_differs_or_fails_on_one_part_is_known_to_all(what, message):
    def program(world):
        dp, tp = (world.split(GRID.groups(axis)) for axis in ("dp", "tp"))
        named = programs.parameters([((2, 2), "float32"), ((3,), "float32")], seed=0)
        odd = GRID.coordinates(world.rank).tp == 1
        if (odd and what == "whole") or (world.rank == 3 and what == "part"):
            with torch.no_grad():
                named[what == "whole"][1].add_(1.0)
        inner = torch.optim.SGD(named, lr=0.5 if odd and what == "rate" else 1.0)
        before, error = programs.weights(named), ""
        try:
            optimizer = LayerwiseOptimizer(
                inner, dp, [0, 1], clip=2.0 if odd and what == "clip" else 1.0, also=tp, whole=["w1"]
            )
            for _, p in named:
                p.grad = torch.ones_like(p)
            if world.rank == 3 and what == "step":
                inner.register_step_post_hook(lambda *_: (_ for _ in ()).throw(ArithmeticError("planted")))
            optimizer.step()
        except (ValueError, ArithmeticError) as caught:
            error = f"{caught}"
        return programs.same(programs.weights(named), before), error

    for rank, (unchanged, error) in enumerate(worlds.run(program, 4)):
        assert unchanged
        assert re.search("planted" if what == "step" and rank == 3 else message, error), (rank, error)


def test_norms_are_read_back():
    G = torch.arange(12.0).reshape(3, 4)
    assert norms([G, 2 * G.T, G.bfloat16()]) == [math.sqrt(506), 2 * math.sqrt(506), math.sqrt(506)]
    huge = torch.full((4,), 1e300, dtype=torch.float64)
    assert abs(norms([huge])[0] / 2e300 - 1) < 1e-15
    assert norms([torch.full((4,), 5e-324, dtype=torch.float64)]) == [1e-323]


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.world
@pytest.mark.parametrize("name", programs.OPTIMIZERS)
def test_a_checkpoint_of_two_ranks_goes_on_bit_for_bit_on_one_two_and_three(name):
    expected, _ = programs.alone(name, steps=4)
    _, state = programs.alone(name, steps=2)
    results = worlds.run(partial(programs.saved, name), 2)
    for _, whole, _ in results:
        assert programs.same_state(whole, state)  # of all layers, and what one process would have saved
        assert whole.keys() == state.keys()
    before, whole, _ = results[0]
    for ranks in (1, 2, 3):
        for weights in worlds.run(partial(programs.resumed, name, before, whole), ranks):
            assert programs.same(weights, expected)
    locals_ = [local for _, _, local in results]
    assert programs.same_state(checkpoints.merged(locals_), whole)


@pytest.mark.world
def test_a_checkpoint_of_one_rank_alone_forgets_layers():
    """Negative control: what happens to those who save on rank 0 only (KellerJordan/Muon issue 46)."""
    expected, _ = programs.alone("muon", steps=4)
    before, _, local = worlds.run(partial(programs.saved, "muon"), 2)[0]
    weights = worlds.run(partial(programs.resumed, "muon", before, local), 2)[0]
    assert 0 < sum(not torch.equal(a, b) for a, b in zip(weights, expected, strict=True)) < len(expected)
    with pytest.raises(ValueError, match="held by two ranks"):
        checkpoints.merged([local, local])


@pytest.mark.world
@pytest.mark.slow
def test_checkpoints_go_over_sockets():
    _, state = programs.alone("joint", steps=2)
    assert all(
        programs.same_state(whole, state) for _, whole, _ in worlds.run(partial(programs.saved, "joint"), 2, "gloo")
    )


def test_a_whole_state_is_loaded_by_the_optimizer_alone_and_back():
    _, whole, _ = worlds.run(partial(programs.saved, "soap"), 3)[2]
    make, shapes = programs.OPTIMIZERS["soap"]
    named = programs.parameters(shapes)
    inner = make(named)
    inner.load_state_dict(whole)
    assert programs.same_state(inner.state_dict(), whole)
    optimizer = LayerwiseOptimizer(inner, alone())  # wrapped in the middle of training
    assert programs.same_state(optimizer.state_dict(), whole)


def test_a_rank_keeps_no_state_of_what_others_own():
    def program(world):
        named = programs.parameters(programs.MATRICES)
        inner = torch.optim.AdamW(named)
        for _, p in named:
            p.grad = programs.mean(0, p.shape, p.dtype)
        inner.step()
        optimizer = LayerwiseOptimizer(inner, world)
        return {named[k][0] for k in optimizer.local_state_dict()["state"]} == set(optimizer.owned)

    assert worlds.run(program, 2) == [True, True]


def test_a_state_that_does_not_fit_is_refused():
    _, state = programs.alone("muon")
    make, _ = programs.OPTIMIZERS["muon"]
    optimizer = LayerwiseOptimizer(make(programs.parameters(programs.MATRICES[:3])), alone())
    with pytest.raises(ValueError, match="the loaded state has 5 parameters, needed 3"):
        optimizer.load_state_dict(state)


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("mode", programs.MODES)
def test_calls_are_those_of_the_closed_form(ranks, mode):
    gather, reduce = mode
    _, shapes = programs.OPTIMIZERS["joint"]
    order = [0, 1, 2, 3, 4, 5, 6, 7, 8]  # Joint's groups come in this order too
    sizes, dtypes = [math.prod(shape) for shape, _ in shapes], [dtype for _, dtype in shapes]
    for rank, (ledger, owners) in enumerate(worlds.run(partial(programs.ledgered, "joint", gather, reduce), ranks)):
        plan = traffic.layerwise(sizes, dtypes, owners, ranks, rank, gather=gather, reduce=reduce, order=order)
        made = {phase: [] for phase in ("gradients", "agreement", "parameters")}
        for record in ledger.records:
            made[dict(record.tags)["phase"]].append(record.call)
        assert {phase: tuple(calls) for phase, calls in made.items()} == {p: getattr(plan, p) for p in made}
        assert sum(record.sent("ring") for record in ledger.records) == traffic.sent(plan.calls, rank)


def test_exact_shares_send_what_others_lack_and_padding_costs_the_rest():
    """One rank owns 7 of 8 parts: padded shares are 7 parts of each of 4 ranks, of which three quarters are sent."""
    sizes, owners = [100] * 8, [0] * 7 + [2]
    exact, padded = (
        traffic.layerwise(sizes, ["float32"] * 8, owners, 4, 3, gather=gather) for gather in ("exact", "padded")
    )
    assert traffic.sent(exact.parameters, 3) == 4 * (800 - 700)  # all but what the next rank, 0, has itself
    assert traffic.sent(padded.parameters, 3) == 4 * 3 * 700
    even = traffic.layerwise([100] * 8, ["float32"] * 8, [0, 1, 2, 3] * 2, 4, 3, gather="padded")
    assert traffic.sent(even.parameters, 3) == 4 * 600  # a multiple of the ranks has no padding at all


# --- an ordinary optimizer --------------------------------------------------------------------------------------------


@pytest.mark.world
def test_schedulers_and_closures_work():
    def train(optimizer, W, target):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

        def closure():
            optimizer.zero_grad()
            loss = (W * target).sum()
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure).item())
            scheduler.step()
        return losses, W.detach().clone(), optimizer.param_groups[0]["lr"]

    def program(world):
        W = nn.Parameter(torch.zeros(2, 2))
        target = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 + world.rank)
        return train(LayerwiseOptimizer(torch.optim.SGD([W], lr=1.0), world), W, target)

    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * 1.5 * -(1 + 0.5 + 0.25)
    for losses, W, lr in worlds.run(program, 2):
        assert torch.equal(W, weights)
        assert lr == 0.125
        assert losses[0] == 0


def test_the_whole_is_one_of_torchs_optimizers():
    W = nn.Parameter(torch.ones(2, 2))
    inner = optim.Muon([W], lr=0.1)
    optimizer = parallel.LayerwiseOptimizer(inner, alone())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    W.grad = torch.ones(2, 2)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["after"]
    optimizer.zero_grad()
    assert W.grad is None


@pytest.mark.world
def test_micro_batches_make_one_step():
    """Four micro-batches or one batch: equal weights, and as many orthogonalizations."""
    calls = []

    def direction(C):
        calls.append(len(C))
        return C

    def program(pieces, world):
        generator = torch.Generator().manual_seed(world.rank)
        X = torch.randint(-3, 4, (8, 4), generator=generator).float()
        W = nn.Parameter(torch.zeros(4, 4))
        optimizer = LayerwiseOptimizer(optim.Muon([W], lr=0.125, direction=direction, scale="none"), world)
        for _ in range(3):
            optimizer.zero_grad()
            for part in X.split(8 // pieces):
                (part @ W).pow(2).sum().add((part @ W).sum()).backward()
            optimizer.step()
        return W.detach().clone()

    whole = worlds.run(partial(program, 1), 2)
    once = len(calls)
    parts = worlds.run(partial(program, 4), 2)
    assert once == len(calls) - once == 3
    for a, b in zip(whole, parts, strict=True):
        assert torch.linalg.norm(a - b) <= 1e-6 * torch.linalg.norm(a)


# --- what is refused --------------------------------------------------------------------------------------------------


def parameter():
    return nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"owners": [0, 0]}, "owners are 2 ranks, needed one for each of 1 parameters"),
        ({"owners": [1]}, r"owner of w is 1, needed a rank of 0\.\.0"),
        ({"owners": {}}, "owners name no rank for w"),
        ({"owners": {"v": 0, "w": 0}}, "unknown parameter in owners 'v': did you mean 'w'"),
        ({"gather": "exakt"}, "unknown gather 'exakt': did you mean 'exact'"),
        ({"reduce": "scatter"}, "unknown reduce 'scatter': did you mean 'reduce_scatter'"),
        ({"clip": 0.0}, "clip is 0.0, needed a finite norm above 0"),
        ({"clip": float("nan")}, "clip is nan"),
        ({"clip": "1"}, "clip is '1', needed a finite norm above 0"),
        ({"bucket": "1MB"}, "bucket is '1MB', needed a number of bytes above 0"),
        ({"owners": "lpt_flop"}, "unknown policy of owners 'lpt_flop': did you mean 'lpt_flops'"),
        ({"owners": 3}, "owners is 3, needed a policy, its name, or one rank for each parameter"),
        ({"price": {}}, r"price has nothing for shape \(2, 2\)"),
        ({"whole": ["w"]}, "whole names parameters and also is None"),
        ({"also": alone(), "whole": ["v"]}, "unknown parameter in whole 'v': did you mean 'w'"),
        ({"also": 1}, "also is a int, needed Collectives"),
        ({"sums": torch.bfloat16}, r"sums is torch\.bfloat16, needed torch\.float32, torch\.float64 or None"),
        ({"bucket": 0}, "bucket is 0, needed a number of bytes above 0"),
        ({"defer": True}, "defer is True and model None"),
        ({"overlap": True, "reduce": "none"}, "overlap is True and reduce 'none'"),
    ],
)
def test_bad_options_are_refused(options, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        LayerwiseOptimizer(optim.Muon([("w", parameter())], lr=1.0), alone(), **options)


def test_what_is_no_optimizer_and_no_group_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="LayerwiseOptimizer was given a Identity, needed an optimizer of torch"):
        parallel.distribute(nn.Identity(), alone())
    with pytest.raises(ValueError, match="group is a NoneType, needed Collectives"):
        parallel.distribute(torch.optim.SGD([parameter()], lr=1.0), None)


def test_optimizers_that_cannot_be_cut_into_layers_are_refused():
    with pytest.raises(ValueError, match="was given LBFGS, needed an optimizer that steps each parameter by itself"):
        LayerwiseOptimizer(torch.optim.LBFGS([parameter()]), alone())
    wrapped = LayerwiseOptimizer(torch.optim.SGD([parameter()], lr=1.0), alone())
    with pytest.raises(ValueError, match="needed an optimizer that is not wrapped"):
        LayerwiseOptimizer(wrapped, alone())
    with pytest.raises(ValueError, match="needed before the optimizer is wrapped"):
        wrapped.add_param_group({"params": [parameter()]})
    with pytest.raises(ValueError, match="cannot be copied or pickled"):
        wrapped.__getstate__()


def test_parameters_on_two_devices_are_refused():
    named = [("v", parameter()), ("w", nn.Parameter(torch.ones(2, 2, device="meta")))]
    with pytest.raises(ValueError, match="w is on meta, needed on cpu with the other parameters"):
        LayerwiseOptimizer(torch.optim.SGD(named, lr=1.0), alone())


def test_weights_that_are_none_of_the_optimizers_are_not_waited_for():
    optimizer = LayerwiseOptimizer(torch.optim.SGD([parameter()], lr=1.0), alone())
    with pytest.raises(ValueError, match="parameter 0 to wait for is none of this optimizer's"):
        optimizer.wait([parameter()])


@pytest.mark.world
@pytest.mark.parametrize(
    ("differing", "message"),
    [
        ("owners", "options differ between ranks 0, 1: owners"),
        ("clip", "options differ between ranks 0, 1: clip"),
        ("order", "options differ between ranks 0, 1: order"),
        ("weights", "weights differ between ranks 0, 1: w1"),
        ("shape", r"options differ between ranks 0, 1: w0 \(shape or dtype\)"),
        ("count", "options differ between ranks 0, 1: their number"),
    ],
)
def test_ranks_that_were_given_different_things_are_told(differing, message):
    def program(world):
        odd = world.rank == 1
        named = programs.parameters(
            [((3, 2) if odd and differing == "shape" else (2, 3), "float32"), ((2, 2), "float32")]
        )
        if odd and differing == "weights":
            with torch.no_grad():
                named[1][1].view(-1).view(torch.int32)[3] ^= 1
        if odd and differing == "count":
            named = named[:1]
        owners = [1, 0] if odd and differing == "owners" else [0, 1][: len(named)]
        clip = 2.0 if odd and differing == "clip" else None
        model = nn.ParameterList([p for _, p in named[::-1]]) if odd and differing == "order" else None
        with pytest.raises(ValueError, match=message):
            LayerwiseOptimizer(torch.optim.SGD(named, lr=1.0), world, owners, clip=clip, model=model)
        return True

    assert worlds.run(program, 2) == [True, True]


def test_ownership_by_default_is_within_the_largest_parameter_of_even():
    """Of all assignments, largest first leaves no rank with more than the mean and the largest."""
    costs = [7, 7, 6, 5, 5, 4, 4, 3, 1, 1]
    owners = ownership.assigned(None, [str(i) for i in range(10)], costs, 3)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sum(loads) == sum(costs)
    assert max(loads) <= -(-sum(costs) // 3)


def test_hooks_and_threads_are_gone_afterwards():
    before = threading.active_count()
    worlds.run(partial(programs.trained, "muon", (("exact", "all_reduce"),)), 4)
    assert threading.active_count() <= before
