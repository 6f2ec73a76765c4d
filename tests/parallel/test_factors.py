"""SOAP and REKLS on shards against one rank: bits, bytes, memory, refusals."""

import math
from functools import partial

import pytest
import torch

from muon_lab import optim
from muon_lab.optim.soap import Rule
from muon_lab.parallel import factors, volume, worlds
from muon_lab.parallel.grid import Placement, even
from muon_lab.parallel.ledger import Ledger

RULES = {
    "soap": Rule(0.1, first_step="skip", weight_decay=0.1),
    "iterated": Rule(0.1, eigenbasis="iteration", frequency=2, second_moment="permuted", nesterov=True),
    "rotated": Rule(0.1, second_moment="rotated", max_rms=0.5, order="lagged", first_step="skip"),
    "rekls": Rule(0.1, kl=True, start=1.0, decay="l2", weight_decay=0.3),
}
SHAPES = [(1, 6, 4), (2, 3, 8), (1, 5, 5)]


def gradients(shape, steps=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def alone(rule, shape):
    W = torch.ones(shape)
    state = rule.begin(W)
    for G in gradients(shape):
        W, state = rule.advance(W, G, state)
    return W, state


def on_rank(rule, shape, cut, sharded, world):
    """Return weights, the parts of the state, the whole of it, and the calls of the steps."""
    ledger = Ledger(world)
    own = factors.gathered(rule, ledger, cut, sharded)
    W = torch.ones(cut.shape(shape, world.rank))
    state = own.begin(W)
    for G in gradients(shape):
        W, state = own.advance(W, cut.shard(G, world.rank), state)
    calls = tuple(record.call for record in ledger.records)
    sent = ledger.sent_bytes
    return W, state, own.whole(state, shape), calls, sent


def cuts(length, ranks, dim):
    lone = (0,) * (ranks - 1) + (length,)
    return (even(length, ranks, dim), Placement(dim, lone))


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", RULES)
def test_weights_and_state_are_those_of_one_rank_to_the_bit(name, ranks):
    rule = RULES[name]
    for turn, shape in enumerate(SHAPES):
        expected, state = alone(rule, shape)
        dim = turn % 2
        cut = cuts(shape[1 + dim], ranks, dim)[turn == 1]
        results = worlds.run(partial(on_rank, rule, shape, cut, volume.SHARDED), ranks)
        assert torch.equal(torch.cat([W for W, *_ in results], cut.axis), expected), cut
        for _, _, whole, *_ in results:
            for entry in state._fields:
                found, one = getattr(whole, entry), getattr(state, entry)
                assert torch.equal(found, one) if isinstance(one, torch.Tensor) else found == one, entry


@pytest.mark.world
def test_processes_give_the_bits_of_threads():
    program = partial(on_rank, RULES["rekls"], (1, 6, 4), even(6, 2, 0), volume.SHARDED)
    for threads, gloo in zip(worlds.run(program, 2), worlds.run(program, 2, "gloo"), strict=True):
        assert torch.equal(threads[0], gloo[0])
        assert threads[3:] == gloo[3:]


def test_the_optimizer_on_shards_is_the_optimizer():
    """`SOAP` with its rule replaced, as a rank would: its own steps, state and refusals stay."""
    shape, cut = (6, 4), even(6, 2, 0)

    def trained(world=None):
        class Sharded(optim.REKLS):
            def rule(self, settings):
                rule = super().rule(settings)
                return rule if world is None else factors.gathered(rule, world, cut)

        rank = slice(None) if world is None else cut.part(world.rank)
        W = torch.nn.Parameter(torch.ones(shape)[rank].clone())
        optimizer = Sharded([W], lr=0.1, first_step="skip", weight_decay=0.1)
        for G in gradients(shape):
            W.grad = G[rank].clone()
            optimizer.step()
        return W.detach(), optimizer.state_bytes()

    expected, everything = trained()
    halves = worlds.run(trained, 2)
    assert torch.equal(torch.cat([W for W, _ in halves]), expected)
    numbers = 2 * 24 + 2 * 36 + 2 * 16
    whole = 6 + 4 + 4  # values and counts
    assert everything == 4 * (numbers + whole)
    assert [held for _, held in halves] == [4 * (numbers // 2 + whole)] * 2


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [volume.SHARDED, ("L", "R"), ()])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_calls_and_bytes_are_the_closed_forms(ranks, sharded):
    for turn, shape in enumerate(SHAPES):
        for cut in cuts(shape[1 + turn % 2], ranks, turn % 2):
            for rank, (*_, made, sent) in enumerate(
                worlds.run(partial(on_rank, RULES["soap"], shape, cut, sharded), ranks)
            ):
                one = volume.factors(shape, cut, rank, sharded=sharded)
                assert made == one * len(gradients(shape))
                assert sent == volume.Volume(made, rank).sent


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_a_ring_by_hand(ranks):
    m, n, p = 8, 4, ranks
    by_hand = {
        volume.SHARDED: 3 * m * n + 2 * m * m + 2 * n * n,
        ("L", "R"): m * n + m * m + n * n,
        (): m * n,
    }
    for sharded, entries in by_hand.items():
        made = volume.factors((m, n), even(m, p, 0), 0, sharded=sharded)
        assert volume.Volume(made, 0).sent * p == (p - 1) * entries * 4


def test_decay_in_the_gradient_takes_the_weights_along():
    """They are mn entries more, and without them the result would be another."""
    shape, cut = (1, 6, 4), even(6, 2, 0)
    plain = Rule(0.1, decay="l2", first_step="skip")
    counts = [worlds.run(partial(on_rank, rule, shape, cut, ()), 2)[0][4] for rule in (plain, RULES["rekls"])]
    assert counts == [4 * 24 * 4 // 2, 4 * 2 * 24 * 4 // 2]


def test_a_part_that_is_not_gathered_would_be_seen():
    """The negative control: one rank that forgets half of L gives another weight."""
    rule, shape = RULES["soap"], (1, 6, 4)
    expected, _ = alone(rule, shape)
    W = torch.ones(shape)
    state = rule.begin(W)
    for G in gradients(shape):
        W, state = rule.advance(W, G, state)
        L = state.L.clone()
        L[:, 3:] = 0
        state = state._replace(L=L)
    assert not torch.equal(W, expected)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_all_ranks_refuse_a_gradient_that_is_not_finite_on_one():
    cut = even(6, 2, 0)

    def refused(world):
        own = factors.gathered(RULES["soap"], world, cut)
        W = torch.ones(1, 3, 4)
        G = torch.full((1, 3, 4), math.inf if world.rank else 1.0)
        with pytest.raises(ValueError, match="must be finite on every rank"):
            own.advance(W, G, own.begin(W))
        return True

    assert worlds.run(refused, 2) == [True, True]


def on_shards(world, gradients, agree=True):
    """Step REKLS on the halves of a matrix, whose rule gathers; return this rank's half and the reports."""
    cut = even(6, 2, 0)

    class Sharded(optim.REKLS):
        def rule(self, settings):
            return factors.gathered(super().rule(settings), world, cut)

    W = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = Sharded([W], lr=0.1, first_step="skip")
    if agree:
        factors.agreed(optimizer, world)
    taken = []
    for G in gradients[world.rank]:
        W.grad = None if G is None else G.clone()
        optimizer.step()
        taken.append(optimizer.report.taken)
    return W.detach(), taken


def test_s17_a_step_that_one_rank_leaves_out_is_left_out_by_all():
    """Without an agreement one rank skips the gather for which the others wait."""
    halves = [
        [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * r + t)) for t in range(3)] for r in (0, 1)
    ]
    spoilt = [list(gradients) for gradients in halves]
    spoilt[1].insert(1, torch.full((3, 4), math.nan))
    spoilt[0].insert(1, torch.ones(3, 4))
    straight = worlds.run(partial(on_shards, gradients=halves), 2)
    interrupted = worlds.run(partial(on_shards, gradients=spoilt), 2)
    for (expected, _), (found, taken) in zip(straight, interrupted, strict=True):
        assert torch.equal(found, expected)
        assert taken == [True, False, True, True]
    with pytest.raises(worlds.RankStuck, match="rank 0 waits in all_gather"):
        worlds.run(partial(on_shards, gradients=[[G[1]] for G in spoilt], agree=False), 2)


def test_a_gradient_on_some_ranks_alone_and_closures_are_refused_by_all():
    with pytest.raises(worlds.RankRaised, match="1 of the 1 parameters have a gradient on some ranks only"):
        worlds.run(partial(on_shards, gradients=[[torch.ones(3, 4)], [None]]), 2)

    def closed(world):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        handle = factors.agreed(optimizer, world)
        for step in (lambda: optimizer.step(lambda: 0.0), lambda: optimizer.step(closure=lambda: 0.0)):
            with pytest.raises(ValueError, match="takes no closure"):
                step()
        optimizer.step()
        handle.remove()
        return optimizer.step(lambda: 0.5)

    assert worlds.run(closed, 2) == [0.5, 0.5]


def test_bad_arguments_are_refused():
    def wrong(world):
        with pytest.raises(ValueError, match="needs 1 sizes, but has 2"):
            factors.gathered(RULES["soap"], world, even(6, 2, 0))
        with pytest.raises(ValueError, match="must be some of M, V, L, R, Q_L, Q_R, not 'P'"):
            factors.gathered(RULES["soap"], world, even(6, 1, 0), sharded=["P"])
        with pytest.raises(ValueError, match="holds 6 entries of axis 0, but its shard has shape"):
            factors.gathered(RULES["soap"], world, even(6, 1, 0)).begin(torch.ones(1, 4, 4))

    worlds.run(wrong, 1)
    with pytest.raises(ValueError, match="must be some of"):
        volume.factors((6, 4), even(6, 2, 0), 0, sharded=("P",))
