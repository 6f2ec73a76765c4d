"""Element-wise data parallelism: slices of one flat buffer, and why matrices do not go through it."""

import math
from functools import partial

import pytest
import torch
from parallel import layerwise_programs as programs
from torch import nn

from muon_lab import optim, parallel
from muon_lab.oracle.polar import polar as factor
from muon_lab.parallel import traffic, worlds
from muon_lab.parallel.ledger import Ledger
from muon_lab.parallel.rendezvous import alone
from muon_lab.parallel.replicas.buckets import Flat, flats
from muon_lab.parallel.replicas.elementwise import ELEMENTWISE, ElementwiseOptimizer
from muon_lab.parallel.replicas.layerwise import LayerwiseOptimizer

SHAPES = programs.OPTIMIZERS["adamw"][1]


def shares(make, world, steps=3, **options):
    """Return weights and whole state after steps with the ranks' own gradients."""
    named = programs.parameters(SHAPES)
    optimizer = ElementwiseOptimizer(make(named), world, **options)
    for step in range(steps):
        for _, p in named:
            p.grad = programs.share(step, world.rank, world.size, p)
        optimizer.step()
    return programs.weights(named), optimizer.state_dict(), optimizer.report


def reference(make, steps=3):
    """Return weights and state of one process with the means."""
    named = programs.parameters(SHAPES)
    optimizer = make(named)
    for step in range(steps):
        for _, p in named:
            p.grad = programs.mean(step, p.shape, p.dtype)
        optimizer.step()
    return programs.weights(named), optimizer.state_dict()


@pytest.mark.world
@pytest.mark.parametrize("ranks", range(1, 9))
def test_sgd_with_powers_of_two_has_the_weights_of_one_process_bit_for_bit(ranks):
    """Whole numbers times powers of two: nothing is rounded, so it does not matter how vector loops are cut."""

    def make(named):
        with torch.no_grad():
            for _, p in named:
                p.copy_((p * 4).round())
        return torch.optim.SGD(named, lr=0.5, momentum=0.5)

    expected, state = reference(make, steps=2)
    for weights, found, _ in worlds.run(partial(shares, make, steps=2), ranks):
        assert programs.same(weights, expected)
        assert programs.same_state(found, state)


#: Rates that keep weights near 1, for each optimizer that is said to treat every entry by itself.
RATES = {torch.optim.Adadelta: 1.0}


@pytest.mark.world
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_all_of_torchs_have_the_weights_of_one_process_but_for_rounding(kind):
    r"""Weights of up to 2 that move by at most 0.1 a step in 3 steps: each step rounds the weight once, which may fall
    otherwise where a product is fused with a sum, and the quotient of moments a few times, relative to the step."""
    make = partial(kind, lr=RATES.get(kind, 0.05))
    expected, state = reference(make)
    results = worlds.run(partial(shares, make), 3)
    for weights, found, _ in results:
        assert programs.same(weights, results[0][0])  # on all ranks the same, bit for bit
        for W, wanted in zip(weights, expected, strict=True):
            unit = torch.finfo(W.dtype).eps / 2
            size = max(1.0, wanted.abs().max().item()) if W.numel() else 1.0
            assert (W - wanted).abs().sum() <= 3 * (2 + 8) * unit * size * W.numel()
        assert programs.entries(found).keys() == programs.entries(state).keys()
        assert all(X.shape == programs.entries(state)[key].shape for key, X in programs.entries(found).items())


@pytest.mark.slow
@pytest.mark.world
def test_weights_over_sockets_are_those_of_threads_bit_for_bit():
    threads = worlds.run(partial(programs.sliced, "adamw"), 3)
    processes = worlds.run(partial(programs.sliced, "adamw"), 3, "gloo")
    for (a, _), (b, _) in zip(threads, processes, strict=True):
        assert programs.same(a, b)


@pytest.mark.world
def test_a_parameter_without_gradient_anywhere_is_left_alone_and_one_without_on_some_ranks_is_not():
    def program(world):
        named = [(f"w{i}", nn.Parameter(torch.full((5,), 8.0))) for i in range(3)]
        optimizer = ElementwiseOptimizer(torch.optim.SGD(named, lr=1.0, weight_decay=0.5, momentum=0.5), world)
        named[1][1].grad = torch.full((5,), 3.0) if world.rank == 2 else None
        optimizer.step()
        return [p.tolist() for _, p in named], optimizer.report.updated, set(optimizer.state_dict()["state"])

    for weights, updated, state in worlds.run(program, 3):
        assert weights == [[8.0] * 5, [8.0 - 1.0 - 4.0] * 5, [8.0] * 5]
        assert updated == ("w1",)
        assert state == {1}


@pytest.mark.world
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any():
    def program(spoil, world):
        named = programs.parameters(SHAPES)
        optimizer = ElementwiseOptimizer(torch.optim.AdamW(named, lr=0.1), world)
        reports = []
        for step, bad in ((0, False), *([(9, True)] if spoil else []), (1, False)):
            for key, p in named:
                p.grad = programs.share(step, world.rank, world.size, p)
                if bad and world.rank == 2 and key == "w3":
                    p.grad[5, 3] = math.inf
            optimizer.step()
            reports.append(optimizer.report.nonfinite)
        return programs.weights(named), optimizer.state_dict(), reports

    clean = worlds.run(partial(program, False), 3)
    for (weights, state, _), (found, other, reports) in zip(clean, worlds.run(partial(program, True), 3), strict=True):
        assert reports == [(), ("w3",), ()]
        assert programs.same(found, weights)
        assert programs.same_state(other, state)


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_norm_is_that_of_the_whole_mean(ranks):
    squares = sum((programs.mean(0, shape, torch.float64) ** 2).sum().item() for shape, _ in SHAPES)
    norms = {r.norm for _, r in worlds.run(partial(programs.sliced, "adamw", steps=1, clip=1.0), ranks)}
    assert len(norms) == 1
    assert abs(norms.pop() - math.sqrt(squares)) <= 4 * math.ulp(math.sqrt(squares))


@pytest.mark.world
def test_clipping_divides_by_the_norm():
    def program(world):
        W = nn.Parameter(torch.zeros(4))
        optimizer = ElementwiseOptimizer(torch.optim.SGD([W], lr=1.0), world, clip=1.0)
        W.grad = torch.full((4,), 8.0 * world.rank)  # the mean is 4, its norm 8
        optimizer.step()
        return W.tolist()

    assert worlds.run(program, 2) == [[-0.5] * 4] * 2


@pytest.mark.world
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_a_checkpoint_of_two_ranks_goes_on_on_one_two_and_three(kind):
    """Bit for bit with as many ranks; with others to the rounding of the loops, as in the test above."""
    make = partial(kind, lr=0.05) if kind is not torch.optim.SGD else partial(kind, lr=0.05, momentum=0.9)

    def go_on(before, state, world):
        named = programs.parameters(SHAPES)
        with torch.no_grad():
            for (_, p), W in zip(named, before, strict=True):
                p.copy_(W)
        optimizer = ElementwiseOptimizer(make(named), world)
        optimizer.load_state_dict(state)
        loaded = optimizer.state_dict()
        for _, p in named:
            p.grad = programs.share(2, world.rank, world.size, p)
        optimizer.step()
        return programs.weights(named), loaded

    before, state, _ = worlds.run(partial(shares, make, steps=2), 2)[0]
    through, _, _ = worlds.run(partial(shares, make, steps=3), 2)[0]
    for ranks in (1, 2, 3):
        for weights, loaded in worlds.run(partial(go_on, before, state), ranks):
            assert programs.same_state(loaded, state)
            assert ranks != 2 or programs.same(weights, through)
            for W, wanted in zip(weights, through, strict=True):
                unit = torch.finfo(W.dtype).eps / 2
                assert (W - wanted).abs().sum() <= (2 + 8) * unit * 4 * W.numel()


def test_a_state_is_loaded_by_the_optimizer_alone():
    make = partial(torch.optim.AdamW, lr=0.1)
    _, state, _ = worlds.run(partial(shares, make), 3)[1]
    inner = make(programs.parameters(SHAPES))
    inner.load_state_dict(state)
    assert programs.same_state(inner.state_dict(), state)
    assert programs.same_state(ElementwiseOptimizer(inner, alone()).state_dict(), state)  # wrapped in mid-training


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_calls_are_those_of_the_closed_form(ranks):
    def program(world):
        named = programs.parameters(SHAPES)
        ledger = Ledger(world)
        optimizer = ElementwiseOptimizer(torch.optim.AdamW(named), ledger)
        ledger.records.clear()
        for _, p in named:
            p.grad = programs.share(0, world.rank, world.size, p)
        optimizer.step()
        return ledger.records

    sizes, dtypes = [math.prod(shape) for shape, _ in SHAPES], [dtype for _, dtype in SHAPES]
    plan = traffic.elementwise(sizes, dtypes, ranks)
    for records in worlds.run(program, ranks):
        for phase in ("gradients", "agreement", "parameters"):
            made = tuple(record.call for record in records if dict(record.tags)["phase"] == phase)
            assert made == getattr(plan, phase)


@pytest.mark.world
@pytest.mark.parametrize("ranks", [2, 4])
def test_serving_muon_sends_the_momentum_too(ranks):
    """Done for real: shards of momentum are gathered, every rank orthogonalizes everything; bytes are as foretold."""
    shapes = ((6, 4), (4, 6), (4, 4))
    G = [[programs.mean(step, shape, torch.float32) for shape in shapes] for step in range(2)]

    def program(world):
        ledger, flat = Ledger(world), Flat((0, 1, 2), tuple(math.prod(s) for s in shapes), world.size, "float32")
        W, M = torch.zeros(sum(flat.sizes)), torch.zeros(flat.shard)
        orthogonalize = optim.directions.get(("quintic", 5))
        for step in range(2):
            buffer = torch.cat([*(X.flatten() for X in G[step]), torch.zeros(flat.padding)])
            M = 0.5 * M + 0.5 * ledger.reduce_scatter(buffer, "mean").wait()
            whole = ledger.all_gather(M).wait().flatten()[: sum(flat.sizes)].split(flat.sizes)
            U = torch.cat([orthogonalize(X.view(1, *s)).flatten() for X, s in zip(whole, shapes, strict=True)])
            begin = world.rank * flat.shard
            new = torch.cat([W - 0.5 * U, torch.zeros(flat.padding)])[begin : begin + flat.shard]
            W = ledger.all_gather(new).wait().flatten()[: sum(flat.sizes)]
        return W, ledger.records

    W = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    muon = optim.Muon(W, lr=0.5, momentum=0.5, scale="none")
    for step in range(2):
        for p, X in zip(W, G[step], strict=True):
            p.grad = X
        muon.step()
    sizes = [math.prod(shape) for shape in shapes]
    plan = traffic.elementwise(sizes, ["float32"] * 3, ranks, momentum="float32")
    for found, records in worlds.run(program, ranks):
        assert (found - torch.cat([p.detach().flatten() for p in W])).abs().max() <= 1e-5
        made = [record.call for record in records]
        assert made == [*plan.gradients, *plan.momentum, *plan.parameters] * 2


def test_half_of_a_matrix_is_orthogonalized_to_something_else():
    """What a flat cut makes of a matrix whose gradients were reduced to their shards only, for every cut."""
    generator = torch.Generator().manual_seed(12)
    G0, G1 = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mean = (G0 + G1) / 2
    whole = torch.from_numpy(factor(mean.numpy()).U)
    for cut in range(1, 15):
        first, second = G0.clone(), G1.clone()
        first.view(-1)[:cut], second.view(-1)[cut:] = mean.view(-1)[:cut], mean.view(-1)[cut:]
        halves = [torch.from_numpy(factor(G.numpy()).U).flatten() for G in (first, second)]
        mixed = torch.cat([halves[0][:cut], halves[1][cut:]]).view(3, 5)
        assert torch.linalg.norm(mixed - whole) > 0.01 * torch.linalg.norm(whole)


def test_matrices_that_lie_on_two_ranks_are_named():
    sizes, dtypes = (10, 10, 10), ("float32",) * 3
    assert [flats(sizes, dtypes, ranks)[0].straddling() for ranks in (1, 2, 3, 5)] == [(), (1,), (), (0, 1, 2)]


# --- which of the two -------------------------------------------------------------------------------------------------


def test_distribute_picks_by_kind():
    W = [nn.Parameter(torch.ones(2, 2))]
    for kind in ELEMENTWISE:
        assert type(parallel.distribute(kind(W, lr=0.1), alone())) is ElementwiseOptimizer
    for kind in (optim.Muon, optim.MOP, optim.SOAP, optim.REKLS, torch.optim.Muon, torch.optim.Adafactor):
        wrapped = parallel.distribute(kind(W, lr=0.1), alone(), clip=2.0)
        assert type(wrapped) is LayerwiseOptimizer
        assert wrapped.clip == 2.0
    assert type(parallel.distribute(programs.joint(programs.parameters(SHAPES)), alone())) is LayerwiseOptimizer


def test_an_optimizer_says_of_itself_that_it_is_elementwise():
    class Own(torch.optim.SGD):
        pass

    class Said(Own):
        elementwise = True

    W = [nn.Parameter(torch.ones(2, 2))]
    assert type(parallel.distribute(Own(W, lr=0.1), alone())) is LayerwiseOptimizer
    assert type(parallel.distribute(Said(W, lr=0.1), alone())) is ElementwiseOptimizer


@pytest.mark.parametrize("kind", [optim.Muon, optim.SOAP, torch.optim.Muon])
def test_matrix_optimizers_are_refused(kind):
    with pytest.raises(ValueError, match=rf"was given {kind.__name__}, needed an optimizer that treats every entry"):
        ElementwiseOptimizer(kind([nn.Parameter(torch.ones(2, 2))], lr=0.1), alone())
