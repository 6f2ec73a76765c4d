"""What every matrix optimizer does: whole steps, stacks, dtypes, state and checkpoints."""

import copy
import io
import pickle
import tracemalloc
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from muon_lab import optim, polar
from muon_lab.arithmetic import Rounded
from muon_lab.measure import bounds
from muon_lab.optim import matrices, optimizer
from muon_lab.optim.optimizer import MatrixOptimizer, finite, stacks

U32, U64 = bounds.unit_roundoff("fp32"), bounds.unit_roundoff("fp64")
NAN, INF = float("nan"), float("inf")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def parameters(*shapes, dtype=torch.float32, seed=0):
    g = generator(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def with_gradients(params, seed):
    g = generator(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def run(make, params, steps, first=0):
    o = make(params)
    for t in range(first, first + steps):
        with_gradients(params, 100 + t)
        o.step()
    return o


def muon(params, **settings):
    return optim.Muon(params, **{"lr": 0.1, "nesterov": True, "weight_decay": 0.1, **settings})


def snapshot(o):
    """Return all weights and state, by value."""
    weights = [p.detach().clone() for group in o.param_groups for p in group["params"]]
    state = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in o.state[p].items()}
        for group in o.param_groups
        for p in group["params"]
        if p in o.state
    ]
    return weights, state


def same(a, b):
    (weights, state), (others, other_state) = a, b
    return (
        all(torch.equal(x, y) for x, y in zip(weights, others, strict=True))
        and [s.keys() for s in state] == [s.keys() for s in other_state]
        and all(
            torch.equal(s[k], o[k]) if isinstance(s[k], torch.Tensor) else s[k] == o[k]
            for s, o in zip(state, other_state, strict=True)
            for k in s
        )
    )


# --- a step is taken whole or not at all ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("adapt", [None, "adamuon", "normuon", "namo"])
def test_one_bad_entry_anywhere_changes_nothing_anywhere(bad, where, adapt):
    params = parameters((4, 3), (4, 3), (5, 2))
    o = run(lambda ps: muon([{"params": ps[:2]}, {"params": ps[2:]}], adapt=adapt), params, 2)
    before = snapshot(o)
    with_gradients(params, 7)
    params[where].grad[1, 1] = bad
    o.step()
    assert same(snapshot(o), before)
    assert not o.report.taken
    assert o.report.nonfinite == (f"parameter {where % 2} of group {where // 2}",)
    with_gradients(params, 7)
    o.step()
    assert o.report.taken
    assert not same(snapshot(o), before)


def test_before_the_first_step_too():
    params = parameters((4, 3))
    o = muon(params)
    params[0].grad = torch.full((4, 3), NAN)
    o.step()
    assert not o.state
    assert o.report.nonfinite == ("parameter 0 of group 0",)


def test_names_are_reported_where_there_are_names():
    layer = torch.nn.utils.skip_init(torch.nn.Linear, 3, 2, bias=False)
    torch.nn.init.zeros_(layer.weight)
    o = muon(layer.named_parameters())
    layer.weight.grad = torch.full((2, 3), INF)
    o.step()
    assert o.report.nonfinite == ("weight",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 3e38}, "parameter 1 of group 0: the step leaves the range of torch.float32"),
        ({"lr": 1e200}, "parameter 0 of group 0: the step leaves the range of torch.float32"),
        ({"form": "sum", "nesterov": True}, "parameter 1 of group 0: the matrix to orthogonalize must be finite"),
        ({"adapt": "namo"}, "parameter 1 of group 0: the step leaves the range of torch.float32"),
    ],
    ids=["weight", "rate", "candidate", "second moment"],
)
def test_a_step_that_leaves_the_range_is_refused_and_changes_nothing(settings, message):
    """Parameters are named in the order of the group, and the first is fine in all cases but one."""
    params = parameters((2, 3), (4, 4))
    params[0].data.zero_()
    params[1].data.fill_(3e38)
    o = muon(params, **{"nesterov": False, "scale": "none", "momentum": 0.9, "weight_decay": 0.0, **settings})
    params[0].grad, params[1].grad = torch.zeros(2, 3), torch.full((4, 4), -3e38)
    if settings.get("lr") == 1e200:
        params[0].grad.fill_(1.0)
    before = snapshot(o)
    with pytest.raises(ValueError, match=message):
        o.step()
    assert same(snapshot(o), before)
    assert not o.state


def test_a_failing_direction_leaves_nothing_half_done():
    calls = []

    def fails_on_the_second(C):
        calls.append(C.shape)
        if len(calls) == 2:
            raise ValueError("no direction")
        return C

    params = parameters((4, 3), (5, 2))
    o = muon(params, direction=fails_on_the_second)
    with_gradients(params, 0)
    before = snapshot(o)
    with pytest.raises(ValueError, match="no direction"):
        o.step()
    assert same(snapshot(o), before)
    assert not o.state


def test_finiteness_is_told_for_every_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        big = torch.full((3, 2), torch.finfo(dtype).max, dtype=dtype)
        tensors = [big, torch.zeros(0, 2, dtype=dtype), big.clone(), -big, big.clone()]
        tensors[2][1, 1] = NAN
        tensors[4][2, 0] = -INF
        assert finite(tensors) == [True, True, False, True, False]
    assert finite([]) == []


# --- what it reads it does not change ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("adapt", [None, "adamuon", "normuon", "namo"])
@pytest.mark.parametrize("decay", ["decoupled", "l2"])
def test_gradients_stay_as_they_are(dtype, adapt, decay):
    decay = "palm" if adapt == "namo" else decay
    params = parameters((4, 3), (4, 3), dtype=dtype)
    o = muon(params, adapt=adapt, decay=decay)
    for t in range(2):
        with_gradients(params, t)
        kept = [p.grad.clone() for p in params]
        o.step()
        assert all(torch.equal(p.grad, G) for p, G in zip(params, kept, strict=True))


def test_a_direction_that_writes_into_its_argument_is_the_only_way_to_spoil_momentum():
    """Negative control of the test on aliasing: what a direction gets is the momentum itself, without Nesterov."""
    params = parameters((4, 3))
    spoiled = run(lambda ps: muon(ps, nesterov=False, direction=lambda C: C.div_(2)), params, 1)
    G = params[0].grad
    assert not torch.equal(spoiled.state[params[0]]["momentum_buffer"], 0.05 * G)


def test_parameters_without_gradient_are_left_alone():
    params = parameters((4, 3), (4, 3))
    o = muon(params)
    params[0].grad = torch.ones(4, 3)
    before = params[1].detach().clone()
    o.step()
    assert torch.equal(params[1], before)
    assert params[1] not in o.state
    o.zero_grad()
    kept = snapshot(o)
    o.step()
    assert same(snapshot(o), kept)


def test_a_view_of_a_larger_weight_is_written_alone():
    big = torch.arange(54.0).reshape(6, 9)
    p = torch.nn.Parameter(big[1::2, 1::2])
    inside = torch.zeros(6, 9, dtype=torch.bool)
    inside[1::2, 1::2] = True
    before = big.clone()
    p.grad = torch.randn(3, 4, generator=generator())
    muon([p]).step()
    assert torch.equal(big[~inside], before[~inside])
    assert not torch.equal(big[inside], before[inside])


# --- closures, schedulers, hooks --------------------------------------------------------------------------------------


def test_the_closure_is_called_once_with_gradients_and_its_loss_returned():
    (p,) = parameters((3, 2))
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        p.grad = None
        loss = p.square().sum()
        loss.backward()
        return loss

    o = muon([p])
    with torch.no_grad():
        loss = o.step(closure)
    assert calls == [True]
    assert loss.requires_grad
    assert p.requires_grad


def test_without_closure_nothing_is_returned():
    assert muon(parameters((2, 2))).step() is None


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor([0.1])], ids=["float", "tensor", "one entry"])
@pytest.mark.parametrize("make", [lambda o: StepLR(o, 2, 0.5), lambda o: LambdaLR(o, lambda t: 1 / (1 + t))])
def test_schedulers_act_at_the_next_step(lr, make):
    params, others = parameters((4, 3)), parameters((4, 3))
    o, by_hand = muon(params, lr=lr), muon(others, lr=0.1)
    scheduler = make(o)
    for t in range(4):
        by_hand.param_groups[0]["lr"] = float(torch.as_tensor(o.param_groups[0]["lr"]).double())
        for ps, each in ((params, o), (others, by_hand)):
            with_gradients(ps, t)
            each.step()
        scheduler.step()
    torch.testing.assert_close(params[0], others[0], rtol=0, atol=16 * U32 * float(params[0].detach().abs().max()))
    assert float(torch.as_tensor(o.param_groups[0]["lr"])) < 0.1


def test_a_plateau_lowers_the_rate():
    o = muon(parameters((2, 2)))
    scheduler = ReduceLROnPlateau(o, patience=0)
    for _ in range(3):
        scheduler.step(1.0)
    assert o.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("lr", [-1.0, NAN, torch.ones(2)])
def test_a_rate_that_turned_bad_is_refused_at_the_step(lr):
    params = parameters((2, 2))
    o = run(muon, params, 1)
    o.param_groups[0]["lr"] = lr
    before = snapshot(o)
    with pytest.raises(ValueError, match="Muon: lr"):
        o.step()
    assert same(snapshot(o), before)


def test_hooks_are_called_and_zero_grad_clears():
    params = parameters((2, 2))
    o, seen = muon(params), []
    o.register_step_pre_hook(lambda *_: seen.append("before"))
    o.register_step_post_hook(lambda *_: seen.append("after"))
    with_gradients(params, 0)
    o.step()
    assert seen == ["before", "after"]
    o.zero_grad()
    assert params[0].grad is None


# --- stacks -----------------------------------------------------------------------------------------------------------


def test_equal_shapes_go_through_one_call():
    shapes = []

    def direction(C):
        shapes.append(tuple(C.shape))
        return C

    params = parameters((4, 3), (4, 3), (3, 4), (4, 3), (6, 3))
    groups = [{"params": params[:4]}, {"params": params[4:], "view": matrices.fused(4, 2)}]
    run(lambda _: muon(groups, direction=direction), params, 1)
    assert sorted(shapes) == [(1, 2, 3), (1, 3, 4), (1, 4, 3), (3, 4, 3)]


def test_large_matrices_on_a_cpu_go_alone_and_stacks_are_bounded(monkeypatch):
    o = muon(parameters(*[(4, 3)] * 5))
    with_gradients(o.param_groups[0]["params"], 0)
    pieces = [piece for owned in o.present() for piece in o._pieces(owned)]
    assert [len(stack) for stack in stacks(pieces)] == [5]
    monkeypatch.setattr(optimizer.batches, "ENTRIES", 24)
    assert [len(stack) for stack in stacks(pieces)] == [2, 2, 1]
    monkeypatch.setattr(optimizer.batches, "ALONE", 11)
    assert [len(stack) for stack in stacks(pieces)] == [1] * 5


@pytest.mark.parametrize("adapt", [None, "adamuon", "normuon", "namo"])
def test_company_does_not_matter(adapt):
    """A product of a batch may sum in another order: u times the slope of the schedule, a few times."""
    shapes = [(6, 4)] * 4
    together, alone = parameters(*shapes), parameters(*shapes)
    o = muon(together, adapt=adapt)
    singles = [muon([p], adapt=adapt) for p in alone]
    for t in range(3):
        with_gradients(together, t)
        with_gradients(alone, t)
        o.step()
        for single in singles:
            single.step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=U32 * 4 * polar.schedules.get("quintic", 5).slope)


def test_a_parameter_that_missed_a_step_shares_no_count():
    """Counts are part of what makes pieces alike."""

    class Counting(MatrixOptimizer):
        def begin(self, W, settings):
            return {"seen": 0}

        def advance(self, W, G, state, settings):
            return W - state["seen"], {"seen": state["seen"] + 1}

    params = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    o = Counting(params, {"lr": 0.1})
    for present in ((0, 1), (0,), (0, 1)):
        for i, p in enumerate(params):
            p.grad = torch.ones(2, 2) if i in present else None
        o.step()
    assert [o.state[p]["seen"] for p in params] == [3, 2]
    assert [float(p.detach()[0, 0]) for p in params] == [-3.0, -1.0]


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "kept"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_state_is_kept_in_float32_or_as_asked_and_weights_are_rounded_once(dtype, state_dtype, kept):
    params = parameters((4, 3), dtype=dtype)
    W = params[0].detach().double()
    o = run(lambda ps: muon([{"params": ps, "state_dtype": state_dtype}], weight_decay=0.0), params, 1)
    assert o.state[params[0]]["momentum_buffer"].dtype == kept
    assert params[0].dtype == dtype
    wide = torch.nn.Parameter(W.to(torch.float64 if dtype == torch.float64 else torch.float32))
    wide.grad = params[0].grad.to(wide.dtype)
    muon([wide], weight_decay=0.0).step()
    assert torch.equal(params[0].detach(), wide.detach().to(dtype))


def test_a_bfloat16_average_stalls_where_a_float32_one_does_not():
    """Why state is float32: under a gradient of 1 a step adds 0.01 (1 - M), soon less than half a spacing, 2^-9."""
    found = []
    for state_dtype in (None, torch.bfloat16):
        p = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
        o = muon([{"params": [p], "state_dtype": state_dtype}], lr=0.0, momentum=0.99, direction=lambda C: C)
        p.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        for _ in range(300):
            o.step()
        found.append(float(o.state[p]["momentum_buffer"]))
    assert found[0] == pytest.approx(1 - 0.99**300, rel=300 * U32)
    assert found[1] == pytest.approx(1 - 2**-9 / 0.01, abs=2**-8)
    assert found[0] - found[1] > 0.1


def test_mixed_dtypes_in_one_group():
    params = [*parameters((4, 3)), *parameters((4, 3), dtype=torch.bfloat16), *parameters((4, 3), dtype=torch.float64)]
    o = run(muon, params, 2)
    assert [o.state[p]["momentum_buffer"].dtype for p in params] == [torch.float32, torch.float32, torch.float64]


# --- memory -----------------------------------------------------------------------------------------------------------

#: Bytes of state by the documentation, for a 6x4 and a stack of three 3x5 matrices.
DOCUMENTED = {
    None: 4 * (24 + 45),
    "adamuon": 8 * (24 + 45),
    "normuon": 4 * (24 + 45) + 4 * (6 + 3 * 5),
    "namo": 4 * (24 + 45) + 4 * (1 + 3),
}


@pytest.mark.parametrize("adapt", DOCUMENTED)
def test_the_state_is_as_large_as_documented(adapt):
    params = parameters((6, 4), (3, 3, 5))
    o = muon([{"params": params[:1]}, {"params": params[1:], "view": matrices.STACKED}], adapt=adapt)
    assert o.state_bytes() == DOCUMENTED[adapt]
    assert not o.state
    with_gradients(params, 0)
    o.step()
    tensors = [v for state in o.state.values() for v in state.values()]
    assert sum(v.untyped_storage().nbytes() for v in tensors) == DOCUMENTED[adapt]
    assert len({v.untyped_storage().data_ptr() for v in tensors}) == len(tensors)


def test_the_state_stays_where_it_is():
    params = parameters((6, 4), (6, 4))
    o = run(muon, params, 1)
    places = [o.state[p]["momentum_buffer"].data_ptr() for p in params]
    with_gradients(params, 1)
    o.step()
    assert [o.state[p]["momentum_buffer"].data_ptr() for p in params] == places


def test_asking_for_its_size_allocates_nothing():
    (p,) = parameters((64, 64))
    o = muon([p], adapt="adamuon")
    tracemalloc.start()
    assert o.state_bytes() == 8 * 64 * 64
    tracemalloc.stop()
    assert p not in o.state


# --- checkpoints ------------------------------------------------------------------------------------------------------


def stored(o):
    """Return the dictionary as it comes back from a file, unpickled with weights only."""
    file = io.BytesIO()
    torch.save(o.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


VIEWS = {"matrix": (None, (6, 4)), "fused": (matrices.fused(3, 2, 1), (6, 4)), "stacked": (matrices.STACKED, (2, 3, 4))}


@pytest.mark.parametrize(("view", "shape"), VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("adapt", [None, "adamuon", "normuon", "namo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stepped", [False, True], ids=["before the first step", "after"])
def test_a_resumed_run_is_the_uninterrupted_one(view, shape, adapt, dtype, stepped):
    def make(ps):
        return muon([{"params": ps, "view": view}], adapt=adapt)

    straight = parameters(shape, dtype=dtype)
    run(make, straight, 5)
    params = parameters(shape, dtype=dtype)
    first = run(make, params, 2)
    saved = stored(first)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    second = make(resumed)
    if stepped:
        keep = resumed[0].detach().clone()
        with_gradients(resumed, 55)
        second.step()
        resumed[0].data.copy_(keep)
    second.load_state_dict(saved)
    again = stored(second)
    assert again["state"].keys() == saved["state"].keys()
    assert again["param_groups"] == saved["param_groups"]
    for key, value in saved["state"][0].items():
        assert torch.equal(again["state"][0][key], value)
        assert again["state"][0][key].dtype == value.dtype == torch.float32
    for t in range(2, 5):
        with_gradients(resumed, 100 + t)
        second.step()
    assert torch.equal(resumed[0], straight[0])


def test_a_loaded_optimizer_shares_no_memory_with_what_it_was_loaded_from():
    params, others = parameters((4, 3)), parameters((4, 3))
    first = run(muon, params, 1)
    second = muon(others)
    second.load_state_dict(first.state_dict())
    kept = first.state[params[0]]["momentum_buffer"].clone()
    with_gradients(others, 3)
    second.step()
    assert torch.equal(first.state[params[0]]["momentum_buffer"], kept)


@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [None, torch.bfloat16])
def test_state_of_another_dtype_is_converted(saved_dtype, kept):
    params, others = parameters((4, 3)), parameters((4, 3))
    first = run(lambda ps: muon([{"params": ps, "state_dtype": saved_dtype}]), params, 1)
    second = muon([{"params": others, "state_dtype": kept}])
    second.load_state_dict(stored(first))
    M = second.state[others[0]]["momentum_buffer"]
    assert M.dtype == (kept or torch.float32)
    assert torch.equal(M, first.state[params[0]]["momentum_buffer"].to(M.dtype))
    with_gradients(others, 0)
    second.step()


def test_state_of_torchs_muon_is_loaded():
    """The same name and meaning of the buffer; settings that torch's has not stay ours."""
    params, others = parameters((4, 3)), parameters((4, 3))
    torchs = run(lambda ps: torch.optim.Muon(ps, lr=0.3), params, 2)
    ours = muon(others, scale="shape_scaling")
    ours.load_state_dict(stored(torchs))
    assert torch.equal(ours.state[others[0]]["momentum_buffer"], torchs.state[params[0]]["momentum_buffer"])
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["scale"]) == (0.3, "shape_scaling")
    with_gradients(others, 0)
    ours.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: muon(parameters((4, 3)), adapt="normuon"), r"made with adapt None, needed NorMuon\(beta2"),
        (lambda: muon(parameters((4, 3)), direction=("quintic", 4)), "with direction .*steps=5.*, needed .*steps=4"),
        (lambda: muon(parameters((4, 3)), direction=polar.svd()), "with direction Automatic.*, needed Direct.*SVD"),
        (lambda: optim.SOAP(parameters((4, 3)), lr=0.1), "parameter 0 of group 0: the loaded state has .*, needed"),
        (lambda: muon(parameters((3, 4))), r"parameter 0 of group 0: .*\(4, 3\).*, needed .*\(3, 4\)"),
        (lambda: muon([{"params": parameters((4, 3)), "view": matrices.fused(2, 2)}]), "the loaded state has the view"),
        (lambda: muon(parameters((4, 3), (4, 3))), "parameter"),
        (lambda: muon([{"params": parameters((4, 3))}, {"params": parameters((4, 3))}]), "1 groups, needed 2"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_changed(make, message):
    saved = stored(run(muon, parameters((4, 3)), 1))
    o = make()
    before = snapshot(o)
    with pytest.raises(ValueError, match=message):
        o.load_state_dict(saved)
    assert same(snapshot(o), before)


IN_WORDS = {
    "bf16": polar.newton_schulz(polar.schedules.get("simple", 5), Rounded("bf16")),
    "fp16": polar.newton_schulz(polar.schedules.get("simple", 5), Rounded("fp16")),
    "six steps": polar.newton_schulz(polar.schedules.get("simple", 6), Rounded("bf16")),
    "halley": polar.qdwh(),
}


def test_a_checkpoint_knows_the_direction_it_was_made_with():
    """Orthogonalizers are functions: they are told apart by what they enclose, and equal ones made anew are equal."""
    saved = {name: stored(run(partial(muon, direction=each), parameters((4, 3)), 1)) for name, each in IN_WORDS.items()}
    words = {name: packed["param_groups"][0]["direction"] for name, packed in saved.items()}
    assert len(set(words.values())) == len(words)
    assert not any("0x" in each for each in words.values())
    again = polar.newton_schulz(polar.schedules.get("simple", 5), Rounded("bf16"))
    muon(parameters((4, 3)), direction=again).load_state_dict(saved["bf16"])
    with pytest.raises(ValueError, match=r"made with direction .*fp16.*, needed .*bf16"):
        muon(parameters((4, 3)), direction=again).load_state_dict(saved["fp16"])


def test_a_function_that_counts_its_calls_is_still_the_same():
    def counted(calls):
        def direction(C):
            calls.append(C.shape)
            return direction and C

        return direction

    assert optimizer.said(counted([])) == optimizer.said(counted([1])) == optimizer.said(counted([1]))


def test_a_checkpoint_without_these_words_is_loaded():
    """As it was written before there were any, or by someone who means to go on with another direction."""
    params, others = parameters((4, 3)), parameters((4, 3))
    saved = stored(run(muon, params, 1))
    for name in ("direction", "adapt"):
        assert isinstance(saved["param_groups"][0].pop(name), str)
    o = muon(others, direction=polar.svd())
    o.load_state_dict(saved)
    assert torch.equal(o.state[others[0]]["momentum_buffer"], saved["state"][0]["momentum_buffer"])
    assert "direction" not in o.param_groups[0]
    saved["param_groups"][0]["nesterov"] = "false"
    with pytest.raises(ValueError, match="Muon: nesterov is 'false', needed True or False"):
        o.load_state_dict(saved)


@pytest.mark.parametrize("given", [{}, {"state": {}}])
def test_what_is_no_checkpoint_is_refused(given):
    with pytest.raises(ValueError, match=r"the loaded state has .*, needed 'state' and 'param_groups'"):
        muon(parameters((4, 3))).load_state_dict(given)


def test_users_hooks_see_what_is_loaded():
    params = parameters((4, 3))
    saved = stored(run(muon, params, 1))
    saved["state"][0]["surplus"] = 1
    o = muon(parameters((4, 3)))
    with pytest.raises(ValueError, match="surplus"):
        o.load_state_dict(saved)

    def without(_, state):
        return {**state, "state": {0: {k: v for k, v in state["state"][0].items() if k != "surplus"}}}

    o.register_load_state_dict_pre_hook(without)
    o.load_state_dict(saved)
    assert set(o.state[o.param_groups[0]["params"][0]]) == {"momentum_buffer"}


def test_a_copy_is_a_whole_optimizer():
    params = parameters((4, 3))
    o = run(lambda ps: muon(ps, direction=("polar_express", 5), adapt="normuon"), params, 1)
    for other in (copy.deepcopy(o), pickle.loads(pickle.dumps(o))):
        (q,) = other.param_groups[0]["params"]
        assert q is not params[0]
        q.grad = torch.ones(4, 3)
        other.step()
    p = params[0]
    p.grad = torch.ones(4, 3)
    o.step()
    assert torch.equal(p, q)


# --- refuses ----------------------------------------------------------------------------------------------------------


def test_a_sparse_gradient_is_refused():
    table = torch.nn.utils.skip_init(torch.nn.Embedding, 5, 3, sparse=True)
    torch.nn.init.ones_(table.weight)
    o = muon([("table", table.weight)])
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="table has a gradient that is sparse"):
        o.step()
    assert not o.state


def test_a_refused_group_is_not_added():
    o = muon(parameters((2, 3)))
    for params, message in (
        (parameters((3,)), r"parameter 0 of group 1 has shape \(3,\)"),
        (parameters(()), r"has shape \(\)"),
        (parameters((2, 3, 4)), "and no view"),
        ([torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))], "complex64"),
    ):
        with pytest.raises(ValueError, match=message):
            o.add_param_group({"params": params})
    assert len(o.param_groups) == 1
    o.add_param_group({"params": parameters((2, 3, 4)), "view": matrices.STACKED})
    assert len(o.param_groups) == 2


def test_a_parameter_twice_in_a_group_is_refused():
    (p,) = parameters((2, 3))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="each of them once"):
        muon([p, p])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentm": 0.0}, "'momentm': did you mean 'momentum'"),
        ({"weight_decy": 1.0}, "'weight_decy': did you mean 'weight_decay'"),
        ({"direction": ("cubic", 1)}, "a group has 'direction', needed as an argument of Muon"),
        ({"adapt": None}, "a group has 'adapt', needed as an argument of Muon"),
        ({"nesterov": "false"}, "Muon: nesterov is 'false', needed True or False"),
        ({"nesterov": 0}, "Muon: nesterov is 0, needed True or False"),
        ({"view": "stacked"}, "parameter 0 of group 0 has the view 'stacked', needed a View"),
        ({"view": {"batch": (0,)}}, "parameter 0 of group 0 has the view {'batch'"),
    ],
)
def test_a_group_setting_that_nothing_would_look_at_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        muon([{"params": parameters((2, 3)), **settings}])


def test_what_torch_keeps_in_groups_is_accepted():
    """Groups of another optimizer, with what its schedulers have left there."""
    o = muon(parameters((2, 3)))
    for make in (
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=4),
        partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1),
        partial(torch.optim.swa_utils.SWALR, swa_lr=0.05),
    ):
        make(o)
    (group,) = o.param_groups
    again = muon([group | {"foreach": False}])
    assert set(group) < set(again.param_groups[0])
    assert {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"} < set(group)


@pytest.mark.parametrize("kept", [torch.int32, torch.complex64, torch.float8_e4m3fn, "float32"])
def test_a_state_dtype_that_is_none_is_refused(kept):
    with pytest.raises(ValueError, match="state_dtype is"):
        muon([{"params": parameters((2, 3)), "state_dtype": kept}])


def test_an_empty_matrix_is_no_trouble():
    params = parameters((0, 3), (3, 0), (2, 3))
    o = run(muon, params, 2)
    assert [tuple(o.state[p]["momentum_buffer"].shape) for p in params] == [(0, 3), (3, 0), (2, 3)]
    for adapt in ("adamuon", "normuon", "namo"):
        run(lambda ps, adapt=adapt: muon(ps, adapt=adapt), parameters((0, 3), (3, 0)), 2)


def test_no_global_generator_and_no_grad_mode_is_touched():
    (p,) = parameters((3, 3))
    with torch.enable_grad():
        run(muon, [p], 1)
        assert torch.is_grad_enabled()
    assert p.grad_fn is None
