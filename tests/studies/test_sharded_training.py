"""Training in layouts: what is the same to the bit, what is another rule, and how that is told apart."""

import math
from functools import partial

import pytest
import torch

from muon_lab import optim, polar, studies
from muon_lab.optim import matrices
from muon_lab.parallel import layouts
from muon_lab.studies import convergence, replay, sharded_training
from muon_lab.studies.descent import PROBLEMS
from muon_lab.studies.running import run_case
from muon_lab.studies.sharded_training import Clock
from muon_lab.studies.study import LeftOut

STUDY = studies.get("sharded_training")
SMALL = {"problem": "quadratic", "updates": 10, "tp": 3}


def settled(**point):
    (case,) = STUDY.settle({name: values[0] for name, values in STUDY.defaults.items()} | SMALL | point, None)
    return case


def row(**point):
    found = run_case("sharded_training", settled(**point))
    assert (found["outcome"], found["note"]) == ("ok", None)
    return found


# --- losses and verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [("muon", "duplicated"), ("muon", "owner"), ("mop", "duplicated"), ("soap", "duplicated"), ("rekls", "duplicated")],
)
def test_whole_matrices_train_as_on_one_rank_to_the_bit(optimizer, layout):
    found = row(optimizer=optimizer, layout=layout)
    assert (found["tp_invariant"], found["deviation"], found["loss_gap"], found["training_gap"]) == (1, 0, 0, 0)


@pytest.mark.parametrize("layout", ["distributed", "gram"])
def test_sums_are_the_rule_of_one_rank_but_for_rounding(layout):
    found = row(layout=layout)
    assert found["tp_invariant"] == 1
    assert 0 < found["deviation"] <= replay.TIMES * found["rounding"]
    assert found["rounding"] < replay.DECISIVE


@pytest.mark.parametrize("optimizer", sharded_training.OPTIMIZERS)
def test_blocks_are_another_rule_for_every_optimizer(optimizer):
    found = row(optimizer=optimizer, layout="blockwise")
    assert found["tp_invariant"] == 0
    assert found["deviation"] > 0.1
    assert found["loss_gap"] != 0
    alone = row(optimizer=optimizer, layout="blockwise", tp=1)
    assert (alone["tp_invariant"], alone["deviation"], alone["loss_gap"]) == (1, 0, 0)


def test_periodic_is_another_rule_unless_all_its_steps_are_whole():
    found = row(layout="periodic", period=2)
    assert found["tp_invariant"] == 0
    whole = row(layout="periodic", period=1)
    assert (whole["tp_invariant"], whole["loss_gap"]) == (1, 0)
    assert row(layout="periodic", period=100)["loss_gap"] == pytest.approx(
        row(layout="blockwise")["loss_gap"], abs=0.05
    )


# --- what a rule in a layout is ---------------------------------------------------------------------------------------


def directions(case, clock, C):
    group = {"params": [("W", torch.nn.Parameter(torch.zeros(C.shape)))], "view": matrices.STACKED}
    return sharded_training.maker(case, torch.float32, clock)([group]).direction(C)


def test_blocks_are_cut_along_rows_and_corrected_where_asked():
    C = torch.randn(1, 12, 5, generator=torch.Generator().manual_seed(0))
    blocks = layouts.blockwise(polar.newton_schulz(polar.schedules.get("quintic", 5)), dim=0, tp=3)(C)
    assert torch.equal(directions(settled(layout="blockwise"), Clock(), C), blocks)
    corrected = directions(settled(layout="blockwise", step_size="corrected"), Clock(), C)
    assert torch.equal(corrected, blocks * math.sqrt(5 / (3 * 4)))
    clock, periodic = Clock(), []
    for _ in range(6):
        periodic.append(directions(settled(layout="periodic"), clock, C))
        clock.tick()
    whole = polar.newton_schulz(polar.schedules.get("quintic", 5))(C)
    for step, update in enumerate(periodic):
        assert torch.equal(update, whole if step % 5 == 0 else blocks), step


def test_the_clock_of_a_run_counts_its_steps():
    case = settled(layout="periodic", period=3)
    seen = []

    class Watching(Clock):
        def tick(self):
            seen.append(self.step)
            super().tick()

    clock = Watching()
    from muon_lab.studies.descent import descend

    maker = sharded_training.maker(case, torch.float32, clock)
    descend(sharded_training.problem(case), maker, 12, after=lambda _: clock.tick())
    assert seen == list(range(12))


def test_the_gpt_is_cut_as_megatron_does():
    """Rows of queries, keys, values and up; columns of both output projections, which are rows of the transposed."""
    case = settled(problem="gpt_small")
    routes = optim.routing.split(
        sharded_training.problem(case).network, views=sharded_training.problem(case).views, show=None
    )
    seen = {
        name.rpartition("blocks.")[2][2:]: (group.get("view") or matrices.FLATTENED).shapes(weight.shape)
        for group in routes.groups("matrix")
        for name, weight in group["params"]
    }
    assert seen == {
        "attention.qkv.weight": ((1, 64, 64),) * 3,
        "attention.out.weight": ((1, 64, 64),),
        "mlp.up.weight": ((1, 256, 64),),
        "mlp.down.weight": ((1, 256, 64),),
    }
    assert len(convergence.SHAPES["gpt_small"]) == 8


def test_optimizers_of_shards_see_the_shards():
    """SOAP on a matrix cut into blocks is SOAP on each block as a parameter of its own."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.nn.Parameter(torch.zeros(7, 4))
    parts = [torch.nn.Parameter(torch.zeros(rows, 4)) for rows in (3, 2, 2)]
    maker = sharded_training.maker(settled(optimizer="soap", layout="blockwise"), torch.float32, Clock())
    one, many = (
        maker([{"params": [("W", whole)]}]),
        partial(optim.SOAP, lr=0.01, first_step="skip", frequency=10)(parts),
    )
    for _ in range(3):
        whole.grad = torch.randn(7, 4, generator=generator)
        for part, gradient in zip(parts, whole.grad.split([3, 2, 2]), strict=True):
            part.grad = gradient.clone()
        one.step()
        many.step()
    assert torch.equal(whole.detach(), torch.cat([part.detach() for part in parts]))


# --- replay -----------------------------------------------------------------------------------------------------------


def test_a_planted_difference_is_read_back():
    """A learning rate off by δ is a deviation of δ."""
    single = partial(optim.Muon, lr=0.01)
    run = replay.kept(PROBLEMS["quadratic"](0), single, 3)
    for delta in (1e-2, 1e-4):
        found = replay.verdict(run, lambda _: single, lambda _, delta=delta: partial(optim.Muon, lr=0.01 * (1 + delta)))
        assert found.deviation == pytest.approx(delta, rel=0.2, abs=3e-6)  # weights of 0.1 round a change of 0.01
        assert found.invariant == (delta <= 4 * found.rounding)


def test_where_rounding_decides_only_equal_bits_are_independent():
    run = replay.kept(PROBLEMS["quadratic"](0), partial(optim.SOAP, lr=0.01), 2)
    noisy = partial(optim.SOAP, lr=0.01)  # the first step is rounding at full size
    other = partial(optim.SOAP, lr=0.01 * (1 + 1e-3))
    same = replay.verdict(run, lambda _: noisy, lambda _: noisy)
    assert same.rounding > replay.DECISIVE
    assert same.invariant
    assert not replay.verdict(run, lambda _: noisy, lambda _: other).invariant


def test_what_is_not_finite_is_independent_of_nothing():
    """The larger of a number and nan depends on their order: a broken layout must not pass for the rule of one rank."""
    single = partial(optim.Muon, lr=0.01)
    run = replay.kept(PROBLEMS["quadratic"](0), single, 1)

    class Broken(optim.Muon):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["params"][0].data.fill_(torch.nan)

    found = replay.verdict(run, lambda _: single, lambda _: partial(Broken, lr=0.01))
    assert (found.invariant, found.deviation) == (False, math.inf)
    both = replay.verdict(run, lambda _: partial(Broken, lr=0.01), lambda _: partial(Broken, lr=0.01))
    assert (both.invariant, both.deviation, both.rounding) == (False, math.inf, math.inf)


def test_gradients_of_a_run_are_those_of_its_weights():
    case = settled()
    maker = sharded_training.maker(case, torch.float32, Clock())
    run = replay.kept(sharded_training.problem(case), maker, 3)
    moved = replay.changes(run, lambda dtype: maker, torch.float32)
    problem = sharded_training.problem(case)
    weight = run.weights[0].double()
    for step in range(3):
        problem.network.W.data.copy_(weight)
        problem.network.W.grad = None
        problem.network.loss().backward()
        assert torch.allclose(problem.network.W.grad, run.gradients[step][0], rtol=1e-4, atol=1e-6)
        weight = weight + moved[step][0]


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_left_out_or_refused():
    for point in (
        {"optimizer": "mop", "layout": "gram"},
        {"optimizer": "soap", "layout": "distributed"},
        {"optimizer": "rekls", "layout": "periodic"},
        {"method": "svd", "layout": "distributed"},
    ):
        with pytest.raises(LeftOut):
            settled(**point)
    for point, message in (
        ({"optimizer": "moun"}, "did you mean 'muon'"),
        ({"layout": "block"}, "did you mean 'blockwise'"),
        ({"step_size": "right"}, "unknown step_size"),
        ({"lr": 0.0}, "lr must lie above 0"),
        ({"updates": 5}, "updates must be at least 10"),
        ({"tp": 0}, "at least 1, not 0"),
        ({"tp": 100_000}, "tp must be at most 1024 for the layout duplicated, whose ranks are threads here"),
    ):
        with pytest.raises(ValueError, match=message):
            settled(**point)
    assert settled(layout="owner")["step_size"] is None
    assert settled(optimizer="soap", layout="blockwise")["method"] is None


def test_a_run_that_breaks_is_an_outcome():
    found = run_case("sharded_training", settled(lr=900.0))
    assert found["outcome"] in ("diverged", "nonfinite")
    assert found["tp_invariant"] is None
