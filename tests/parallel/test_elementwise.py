"""Element-wise data parallelism: slices of one flat buffer, and why matrices do not go through it."""

import math
from functools import partial

import pytest
import torch
from parallel import layerwise_programs as programs
from torch import nn

from muon_lab import optim, parallel
from muon_lab.optim import routing
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
    joint = programs.joint(programs.parameters(SHAPES))
    found = parallel.distribute(joint, alone())
    assert [type(part) for part in found.parts.values()] == [LayerwiseOptimizer, ElementwiseOptimizer]
    assert type(parallel.distribute(joint, alone(), reduce="none")) is LayerwiseOptimizer


def test_distribute_hands_options_on_to_the_kind_that_takes_them():
    model = nn.utils.skip_init(nn.Linear, 2, 2, bias=False)
    hidden = {"owners": "lpt_flops", "model": model, "defer": True, "overlap": True, "bucket": 8}
    layered = parallel.distribute(optim.Muon(model.parameters(), lr=0.1), alone(), sums=torch.float32, **hidden)
    model.weight.grad = torch.eye(2)
    nn.init.eye_(model.weight)
    layered.step()
    layered.close()
    adamw = torch.optim.AdamW(model.parameters())
    assert type(parallel.distribute(adamw, alone(), clip=1.0, defer=False)) is ElementwiseOptimizer
    with pytest.raises(ValueError, match="given defer for AdamW, whose slices take clip, also, whole, sums alone"):
        parallel.distribute(adamw, alone(), defer=True)
    with pytest.raises(ValueError, match="unknown option of distribute 'owner': did you mean 'owners'"):
        parallel.distribute(adamw, alone(), owner=[0])
    with pytest.raises(ValueError, match=r"sums is torch\.float16, needed torch\.float32"):
        parallel.distribute(adamw, alone(), sums=torch.float16)


def test_slices_too_may_be_summed_in_float32():
    """256 + 1 + 1 is 258, whose third is 86; in bfloat16 256 + 1 is 256."""

    def program(sums, world):
        W = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        optimizer = ElementwiseOptimizer(torch.optim.SGD([W], lr=1.0), world, sums=sums)
        W.grad = torch.where((torch.arange(6) + world.rank) % 3 == 0, 256.0, 1.0).bfloat16()
        optimizer.step()
        return W.tolist()

    assert worlds.run(partial(program, torch.float32), 3) == [[-86.0] * 6] * 3
    assert worlds.run(partial(program, None), 3)[0] != [-86.0] * 6


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


# --- several optimizers joined ----------------------------------------------------------------------------------------


def joined(world, steps=3, before=None, spoil=None, fail=None, clip=None):
    """Return weights, state, entries of state that this rank holds, and reports, after steps of Muon and AdamW."""
    named = programs.parameters(SHAPES)
    inner = programs.joint(named)
    optimizer = parallel.distribute(inner, world, clip=clip)
    begin = 0
    if before is not None:
        begin, weights, state = before
        with torch.no_grad():
            for (_, p), W in zip(named, weights, strict=True):
                p.copy_(W)
        optimizer.load_state_dict(state)
    reports, step = [], 0
    if world.rank == fail:
        inner.optimizers["other"].register_step_post_hook(lambda *_: 1 // (9 - step))
    for step in (*range(begin, steps - 1), *(() if (spoil, fail) == (None, None) else (9,)), steps - 1):
        for key, p in named:
            p.grad = programs.share(step, world.rank, world.size, p)
            if step == 9 and (key, world.rank) == spoil:
                p.grad.view(-1)[0] = math.nan
        try:
            optimizer.step()
            reports.append(optimizer.report)
        except (ZeroDivisionError, ValueError) as error:
            reports.append(str(error))
    held = {
        label: sum(X.numel() for X in programs.entries(list(part.optimizer.state.values())).values() if X.ndim)
        for label, part in optimizer.parts.items()
    }
    return programs.weights(named), optimizer.state_dict(), held, reports


def near(weights, expected, matrices):
    """Whether matrices are the same bit for bit, and the rest but for the rounding of vector loops."""
    for (shape, dtype), W, wanted in zip(SHAPES, weights, expected, strict=True):
        unit = torch.finfo(getattr(torch, dtype)).eps / 2
        exact = (len(shape) == 2 and W.numel()) if matrices else False
        if exact and not torch.equal(W, wanted):
            return False
        if not exact and (W - wanted).abs().sum() > 3 * (2 + 8) * unit * 4 * W.numel():
            return False
    return True


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_joined_optimizers_take_the_steps_of_one_process(ranks):
    """Each by its kind: matrices whole, bit for bit; of the rest, every rank has an equal slice."""
    expected, _ = programs.alone("joint", steps=3)
    results = worlds.run(joined, ranks)
    others = sum(math.prod(shape) for shape, _ in SHAPES if not (len(shape) == 2 and math.prod(shape)))
    for weights, state, held, reports in results:
        assert near(weights, expected, matrices=True)
        assert programs.same(weights, results[0][0])
        assert programs.same_state(state, results[0][1])
        assert held["other"] <= 2 * (others / ranks + 2)  # two moments; the last shards of two dtypes end in padding
        assert reports[-1].updated == tuple(f"w{i}" for i in (0, 1, 2, 3, 4, 5, 6, 7, 8))


@pytest.mark.world
def test_joined_optimizers_step_together_or_not_at_all():
    clean = worlds.run(joined, 2)
    for trouble in ({"spoil": ("w5", 1)}, {"spoil": ("w0", 0)}, {"fail": 1}):
        for (weights, state, _, _), (found, other, _, reports) in zip(
            clean, worlds.run(partial(joined, **trouble), 2), strict=True
        ):
            assert programs.same(found, weights)
            assert programs.same_state(other, state)
            if "fail" in trouble:
                assert "division" in reports[2]
            else:
                assert reports[2].nonfinite == (trouble["spoil"][0],)


@pytest.mark.world
def test_joined_optimizers_are_clipped_by_the_norm_of_all():
    squares = sum((programs.mean(2, shape, torch.float64) ** 2).sum().item() for shape, _ in SHAPES)
    norms = {reports[-1].norm for *_, reports in worlds.run(partial(joined, clip=1.0), 3)}
    assert len(norms) == 1
    assert abs(norms.pop() - math.sqrt(squares)) <= 4 * math.ulp(math.sqrt(squares))


@pytest.mark.world
def test_a_checkpoint_of_joined_optimizers_goes_on_on_other_numbers_of_ranks():
    weights, state, *_ = worlds.run(partial(joined, steps=2), 2)[1]
    _, alone_ = programs.alone("joint", steps=2)
    assert {key: X.shape for key, X in programs.entries(state).items()} == {
        key: X.shape for key, X in programs.entries(alone_).items()
    }
    through, *_ = worlds.run(joined, 2)[0]
    for ranks in (1, 2, 3):
        for found, *_ in worlds.run(partial(joined, before=(2, weights, state)), ranks):
            assert programs.same(found, through) if ranks == 2 else near(found, through, matrices=True)
    whole = programs.joint(programs.parameters(SHAPES))
    whole.load_state_dict(state)
    assert programs.same_state(whole.state_dict(), state)


def test_a_state_that_does_not_fit_a_part_changes_none():
    optimizer = parallel.distribute(programs.joint(programs.parameters(SHAPES)), alone())
    _, state = programs.alone("joint", steps=2)
    optimizer.load_state_dict(state)
    _, other = programs.alone("joint", steps=3)
    with pytest.raises(ValueError, match="parameter group that doesn't match the size"):
        optimizer.load_state_dict(
            {"matrix": other["matrix"], "other": torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict()}
        )
    assert programs.same_state(optimizer.state_dict(), state)
    with pytest.raises(ValueError, match=r"the loaded state is of \['matrix'\], needed \['matrix', 'other'\]"):
        optimizer.load_state_dict({"matrix": state["matrix"]})


def test_options_of_layers_reach_the_layers_of_joined_optimizers():
    """Deferred, overlapped, accumulated, waited for: the weights of steps that wait."""

    def program(hidden, world):
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(programs.mean(number, p.shape, p.dtype) / 8)
        inner = routing.split(model, show=None).optimizer(
            matrix=partial(optim.Muon, lr=0.1), other=partial(torch.optim.SGD, lr=0.5)
        )
        optimizer = parallel.distribute(inner, world, model=model, bucket=8, defer=hidden, overlap=hidden)
        for step in range(3):
            optimizer.zero_grad()
            x = programs.mean(step + world.rank, (5, 3), torch.float32)
            with optimizer.accumulate():
                model(x).square().sum().backward()
            model(-x).sum().backward()
            optimizer.step()
        optimizer.wait(model[0].parameters())
        optimizer.wait()
        optimizer.close()
        return [p.detach().clone() for p in model.parameters()], optimizer.owners

    with torch.random.fork_rng(devices=[]):
        serial, hidden = program(False, alone()), program(True, alone())
    assert programs.same(serial[0], hidden[0])
    assert set(serial[1]) == {"0.weight", "2.weight"}
