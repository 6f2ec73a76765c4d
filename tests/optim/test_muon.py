"""Muon, MOP and their second moments: published trajectories, the float64 oracle, torch's own, and each other."""

import json
import math
from functools import partial
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_lab import optim, oracle, polar
from muon_lab.arithmetic import Exact, Rounded
from muon_lab.measure import bounds
from muon_lab.optim import matrices, second_moments
from muon_lab.optim.step import DECAYS, FORMS, SCALES
from muon_lab.oracle.optimizers import AdaptiveMuon, trajectory
from muon_lab.oracle.optimizers import Muon as Rule

U64, U32, BF16 = (bounds.unit_roundoff(name) for name in ("fp64", "fp32", "bf16"))
GOLDEN = Path(__file__).parent.parent / "golden"


def problem(m, n, steps=5, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((m, n)), list(generator.standard_normal((steps, m, n)))


def walked(make, W, gradients, dtype=torch.float64):
    """Return the weights after each gradient, as float64 arrays."""
    p = torch.nn.Parameter(torch.tensor(W, dtype=dtype))
    optimizer, weights = make([p]), []
    for G in gradients:
        p.grad = torch.tensor(G, dtype=dtype)
        optimizer.step()
        weights.append(p.detach().double().numpy().copy())
    return weights


def farthest(found, expected, W):
    """Return the largest distance over the steps, relative to the distance moved."""
    return max(np.linalg.norm(a - b) / np.linalg.norm(b - W) for a, b in zip(found, expected, strict=True))


# --- matches published implementations --------------------------------------------------------------------------------


def golden():
    names = ("trajectories", "trajectories_torch")
    rows = [row for name in names for row in json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))["rows"]]
    arrays = {}
    for name in names:
        with np.load(GOLDEN / f"{name}.npz") as stored:
            arrays.update(stored)
    return [row for row in rows if row["optimizer"] in ("muon", "mop", "torch.optim.Muon")], arrays


ROWS, ARRAYS = golden()


def optimizer_of(row, **changes):
    """Return what makes the optimizer of a row, whose settings are in the peer's terms."""
    settings = {name: row[name] for name in ("lr", "momentum", "nesterov", "weight_decay")}
    settings["decay"] = row.get("weight_decay_method", "decoupled")
    if row["optimizer"] == "mop":
        return partial(optim.MOP, **{**settings, "scale": row["scale"], **changes})
    if row["optimizer"] == "muon":
        settings |= {"scale": row["scale"], "extra": row.get("extra_scale_factor", 1.0)}
        return partial(optim.Muon, **{**settings, "direction": (row["coefficients"], row["steps"]), **changes})
    assert (row["ns_coefficients"], row["ns_steps"]) == ([3.4445, -4.775, 2.0315], 5)
    settings["scale"] = {"original": "shape_scaling"}.get(row["adjust_lr_fn"], row["adjust_lr_fn"])
    return partial(optim.Muon, **{**settings, "direction": ("simple", 5), **changes})


def disagreement(make, row, steps=6):
    W = ARRAYS[row["w0"]]
    found = walked(make, W, ARRAYS[row["grads"]][:steps])
    pairs = zip(found, ARRAYS[row["key"]][:steps], strict=True)
    return max(np.linalg.norm(a - peer) / np.linalg.norm(a - W) for a, peer in pairs)


def test_all_recorded_trajectories_of_muon_and_mop_are_there():
    kinds = [row["optimizer"] for row in ROWS]
    assert [kinds.count(kind) for kind in ("muon", "mop", "torch.optim.Muon")] == [30, 6, 12]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["key"])
def test_agrees_with_the_published_implementation(row):
    """Ten times what a float64 recomputation of the same formula differed by: the peer computes in float32 or less.

    And not only within that: what is left is the peer's rounding, so that the recorded number is read back.
    """
    found = disagreement(optimizer_of(row), row)
    assert found < 10 * row["float64_agreement"]
    assert found == pytest.approx(row["float64_agreement"], rel=0.06)  # of its two digits


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["key"])
def test_another_choice_does_not_agree(row):
    others = [
        {"nesterov": not row["nesterov"]},
        {"scale": "none", "extra": 3.0},
        {"weight_decay": row["weight_decay"] + 0.5},
    ]
    found = [disagreement(optimizer_of(row, **change), row, steps=3) for change in others]
    assert min(found) > 10 * row["float64_agreement"]


# --- equals the oracle within what rounding can do --------------------------------------------------------------------

SCHEDULES = ("quintic", "polar_express", "simple", "cubic5")


def table(name):
    return polar.schedules.get(name, 5)


def slack(rule, before, G, after, adapt=None):
    r"""Bound what rounding may do to one step in float64 from the oracle's state.

    The candidate C is off by e, a few roundings of its terms, which turns its direction by L e: for a schedule L is
    its slope over \|C\|, for the polar factor the perturbation bound at the smallest singular value. The direction
    itself is computed to 10 u times the slope, or to the backward error of a decomposition times L.
    """
    m, n = G.shape
    C, factor = candidate(rule, before, G)
    norm, root = np.linalg.norm(C), math.sqrt(min(m, n))
    e = 8 * U64 * (np.linalg.norm(before.M) + np.linalg.norm(G) + rule.weight_decay * np.linalg.norm(before.W))
    D = rule.direction(C)
    if rule.coefficients is None:
        s = np.linalg.svd(C, compute_uv=False)
        turned = bounds.polar(s[-1], s[-1], min(m, n), m, n) * (e + bounds.svd(m, n, 64 * U64) * norm)
    else:
        slope = math.prod(a for a, _, _ in rule.coefficients)
        turned = slope * (e / norm + 10 * U64 * root)
    U, spread = (D, turned) if adapt is None else divided(adapt, D, C, after.V, turned)
    if rule.scale == "nuclear_norm":
        spread = factor * spread + (turned * norm + e * root + bounds.gemm(m * n, U64) * norm * root) * np.linalg.norm(
            U
        )
    else:
        spread = factor * spread
    rate = rule.lr * rule.extra
    rounded = 8 * U64 * (np.linalg.norm(before.W) + rate * factor * np.linalg.norm(U))
    return rate * spread + rounded


def candidate(rule, before, G):
    """Return the candidate of the oracle's step, and the factor of its direction."""
    G = G + rule.weight_decay * before.W if rule.decay == "l2" else G
    _, C = oracle.optimizers.step.momentum(before.M, G, rule.momentum, rule.form, rule.nesterov)
    return C, abs(oracle.optimizers.step.scale(rule.scale, C, rule.direction(C)))


def divided(adapt, D, C, V, turned):
    """Return the update that the oracle makes of a direction, and what an error of the direction makes of it.

    The root of V is at least sqrt(1 - beta2) |D|, so that dividing by it turns an error of an entry into at most
    (1 + 1 / (1 - beta2)) times itself over the root.
    """
    eps, worst = adapt.eps, 1 + 1 / (1 - adapt.beta2)
    if isinstance(adapt, second_moments.AdaMuon):
        return D / (np.sqrt(V) + eps), worst * turned * np.linalg.norm(1 / (np.sqrt(V) + eps))
    if isinstance(adapt, second_moments.NAMO):
        ratio = np.linalg.norm(C) / (math.sqrt(V.item()) + eps)
        return ratio * D, ratio * (turned + 16 * U64 * np.linalg.norm(D))
    rows = D / np.sqrt(np.maximum(V, eps))
    ratio = np.linalg.norm(D) / np.linalg.norm(rows)
    return ratio * rows, 2 * worst * ratio * turned * np.linalg.norm(
        np.broadcast_to(1 / np.sqrt(np.maximum(V, eps)), D.shape)
    )


SETTINGS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-3, 0.1),
        "momentum": st.floats(0, 0.98),
        "nesterov": st.booleans(),
        "form": st.sampled_from(FORMS),
        "scale": st.sampled_from(SCALES),
        "extra": st.floats(0.1, 2),
        "weight_decay": st.floats(0, 1),
        "decay": st.sampled_from(DECAYS),
    }
)
SIDES = st.integers(1, 7)


def with_table(chosen, name):
    return Rule(**chosen, coefficients=table(name).coefficients)


def steps_apart(make, rule, chosen, W, gradients, adapt=None):
    """Yield how far a step from each of the oracle's states ends from the oracle's, and the bound."""
    muon = getattr(rule, "muon", rule)
    states = trajectory(rule, W, gradients)
    for before, after, G in zip([rule.start(W), *states], states, gradients, strict=False):
        p = torch.nn.Parameter(torch.tensor(before.W))
        optimizer = make([p], **chosen)
        kept = {"momentum_buffer": torch.tensor(before.M)}
        if adapt is not None:
            like_weight = "moment2_buffer" in optimizer.like_weight
            kept["moment2_buffer"] = torch.tensor(before.V if like_weight else before.V[None])
        optimizer.state[p] = kept
        p.grad = torch.tensor(G)
        optimizer.step()
        yield np.linalg.norm(p.detach().numpy() - after.W), slack(muon, before, G, after, adapt)
        np.testing.assert_allclose(
            kept["momentum_buffer"].numpy(),
            after.M,
            rtol=0,
            atol=8 * U64 * (np.abs(G) + np.abs(before.M) + np.abs(W)).max(),
        )


@given(SETTINGS, st.sampled_from(SCHEDULES), SIDES, SIDES, st.integers(0, 99))
def test_a_step_is_the_oracles_with_a_schedule(chosen, name, m, n, seed):
    make = partial(optim.Muon, direction=polar.newton_schulz(table(name)))
    for distance, bound in steps_apart(make, with_table(chosen, name), chosen, *problem(m, n, 4, seed)):
        assert distance <= bound


@given(SETTINGS, SIDES, SIDES, st.integers(0, 99))
def test_a_step_is_the_oracles_with_the_exact_direction(chosen, m, n, seed):
    make = partial(optim.Muon, direction=polar.svd())
    for distance, bound in steps_apart(make, Rule(**chosen), chosen, *problem(m, n, 4, seed)):
        assert distance <= bound


@given(SETTINGS, st.sampled_from(sorted(second_moments.BY_NAME)), SIDES, SIDES, st.integers(0, 99))
def test_a_step_is_the_oracles_with_a_second_moment(chosen, name, m, n, seed):
    chosen = {**chosen, "decay": "palm"} if name == "namo" and chosen["decay"] == "l2" else chosen
    adapt = type(second_moments.get(name))(beta2=0.9, eps=1e-3)
    rule = AdaptiveMuon(with_table(chosen, "quintic"), name, beta2=0.9, eps=1e-3)
    make = partial(optim.Muon, direction=polar.newton_schulz(table("quintic")), adapt=adapt)
    for distance, bound in steps_apart(make, rule, chosen, *problem(m, n, 4, seed), adapt):
        assert distance <= bound


@pytest.mark.parametrize("adapt", [None, *second_moments.BY_NAME.values()], ids=lambda adapt: type(adapt).__name__)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_the_bound_is_close_enough_to_notice(shape, adapt):
    """Negative control: a rate that is off by 1e-7 is outside, at every step."""
    chosen = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    rule = with_table(chosen, "quintic")
    if adapt is not None:
        name = {value: key for key, value in second_moments.BY_NAME.items()}[adapt]
        rule = AdaptiveMuon(rule, name, adapt.beta2, adapt.eps)
    make = partial(optim.Muon, direction=polar.newton_schulz(table("quintic")), adapt=adapt)
    for factor, inside in ((1.0, True), (1 + 1e-7, False)):
        other = {**chosen, "lr": factor * 0.02}
        for distance, bound in steps_apart(make, rule, other, *problem(*shape, 3), adapt):
            assert (distance <= bound) == inside


# --- equals torch's own -----------------------------------------------------------------------------------------------

TORCH = [(nesterov, mode) for nesterov in (False, True) for mode in ("original", "match_rms_adamw")]
MODES = {"original": "shape_scaling", "match_rms_adamw": "match_rms_adamw"}


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (12, 12)])
@pytest.mark.parametrize(("nesterov", "mode"), TORCH)
def test_in_bfloat16_it_is_torchs(shape, nesterov, mode):
    """Both round every product to bfloat16: 3e-2 of the distance moved."""
    W, gradients = problem(*shape, steps=3)
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "nesterov": nesterov}
    emulated = polar.newton_schulz(polar.schedules.get("simple", 5), Rounded("bf16"))
    ours = walked(partial(optim.Muon, **settings, scale=MODES[mode], direction=emulated), W, gradients, torch.float32)
    theirs = walked(partial(torch.optim.Muon, **settings, adjust_lr_fn=mode), W, gradients, torch.float32)
    assert farthest(ours, theirs, W) < 3e-2
    off = partial(optim.Muon, **settings, scale=MODES[mode], direction=emulated, extra=1.1)
    assert farthest(walked(off, W, gradients, torch.float32), theirs, W) > 3e-2


def by_torchs_formulas(W, gradients, lr, mu, weight_decay, nesterov, mode):
    """Return the weights by the formulas of torch.optim.Muon, in one dtype throughout, one operation at a time."""
    buffer, weights = torch.zeros_like(W), []
    for G in gradients:
        buffer = buffer.lerp(G, 1 - mu)
        X = G.lerp(buffer, mu) if nesterov else buffer
        X = (X.T if len(X) > len(X[0]) else X) / X.norm().clamp(min=1e-7)
        for _ in range(5):
            A = X @ X.T
            X = 3.4445 * X + (-4.775 * A + 2.0315 * A @ A) @ X
        X = X.T if len(G) > len(G[0]) else X
        ratio = math.sqrt(max(1, len(G) / len(G[0]))) if mode == "original" else 0.2 * math.sqrt(max(G.shape))
        W = W * (1 - lr * weight_decay) - lr * ratio * X
        weights.append(W.double().numpy())
    return weights


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (12, 12)])
@pytest.mark.parametrize(("nesterov", "mode"), TORCH)
def test_in_float32_it_is_torchs_formulas(shape, nesterov, mode):
    """Candidates differ by 2u, which the slope amplifies; the longest side bounds the roundings of a product."""
    W, gradients = problem(*shape)
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "nesterov": nesterov}
    direction = polar.newton_schulz(polar.schedules.get("simple", 5))
    ours = walked(partial(optim.Muon, **settings, scale=MODES[mode], direction=direction), W, gradients, torch.float32)
    single = [torch.tensor(G, dtype=torch.float32) for G in (W, *gradients)]
    theirs = by_torchs_formulas(single[0], single[1:], 0.02, 0.95, 0.1, nesterov, mode)
    slope = polar.schedules.get("simple", 5).slope
    assert farthest(ours, theirs, W) < slope * bounds.gemm(max(shape), U32)


# --- equals each other ------------------------------------------------------------------------------------------------


@given(st.integers(2, 6), st.integers(2, 6), st.booleans(), st.integers(0, 99))
def test_mop_is_muon_with_the_exact_direction_up_to_scale(m, n, nesterov, seed):
    """One step from zero: the same line. With the same scale: the same bits, over all steps."""
    W, gradients = problem(m, n, 3, seed)
    muon = partial(optim.Muon, lr=0.1, nesterov=nesterov, weight_decay=0.1, direction=polar.svd())
    mop = partial(optim.MOP, lr=0.1, nesterov=nesterov, weight_decay=0.1)
    for scale in SCALES:
        pair = (walked(partial(make, scale=scale), W, gradients) for make in (muon, mop))
        assert all(np.array_equal(a, b) for a, b in zip(*pair, strict=True))
    zero = np.zeros((m, n))
    a, b = walked(muon, zero, gradients[:1])[0], walked(mop, zero, gradients[:1])[0]
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    assert cosine == pytest.approx(1, abs=m * n * U64)


@pytest.mark.parametrize("direction", [polar.svd(), polar.newton_schulz(table("quintic"))], ids=["exact", "quintic"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_average_and_sum_agree_where_the_theorem_says(direction, decay, nesterov):
    """Constant momentum and a factor without unit.

    Candidates agree to rounding, so each may be one slack off at every step. With l2 a distance of weights is one of
    gradients, and grows at each step at most by the rate, the factor and the turning of the direction.
    """
    W, gradients = problem(5, 7, 4)
    chosen = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "nesterov": nesterov, "decay": decay}
    average, total = (
        walked(partial(optim.Muon, **chosen, form=form, direction=direction), W, gradients) for form in FORMS
    )
    rule = Rule(**chosen) if isinstance(direction, type(polar.svd())) else with_table(chosen, "quintic")
    states, bound = trajectory(rule, W, gradients), 0.0
    for before, after, G in zip([rule.start(W), *states], states, gradients, strict=False):
        C, factor = candidate(rule, before, G)
        s = np.linalg.svd(C, compute_uv=False)
        turning = bounds.polar(s[-1], s[-1], 5, 5, 7) if rule.coefficients is None else table("quintic").slope / s[0]
        growth = 1 + 0.1 * factor * turning * 0.05 * (decay == "l2")
        bound = growth * bound + 2 * slack(rule, before, G, after)
    assert np.linalg.norm(average[-1] - total[-1]) <= bound < 1e-6
    assert not np.array_equal(average[-1], total[-1])


def test_average_and_sum_part_where_it_does_not():
    """With the nuclear norm as factor, `sum` moves 1 / (1 - mu) times as far; a momentum that changes turns them."""
    W, gradients = problem(5, 7, 3)
    make = partial(optim.Muon, lr=0.1, momentum=0.75, direction=polar.svd(), scale="nuclear_norm")
    near, far = (walked(partial(make, form=form), W, gradients)[-1] for form in FORMS)
    np.testing.assert_allclose(far - W, 4 * (near - W), rtol=0, atol=1e3 * U64 * np.linalg.norm(far))
    turned = []
    for form in FORMS:
        p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        optimizer = optim.Muon([p], lr=1.0, momentum=0.5, form=form, scale="none", direction=polar.svd())
        for mu, G in ((0.5, [[1.0, 0.0], [0.0, 1.0]]), (0.9, [[0.0, -1.0], [1.0, 0.0]])):
            optimizer.param_groups[0]["momentum"] = mu
            p.grad, before = torch.tensor(G, dtype=torch.float64), p.detach().clone()
            optimizer.step()
        D = before - p.detach()
        turned.append(math.degrees(math.atan2(D[1, 0], D[0, 0])))
    assert turned == pytest.approx([math.degrees(math.atan2(0.1, 0.45)), math.degrees(math.atan2(1.0, 0.9))])


def test_a_shorthand_is_what_it_stands_for():
    W, gradients = problem(6, 20)
    quintic = polar.schedules.get("quintic", 5)
    named = [
        walked(partial(optim.Muon, lr=0.1, direction=d), W, gradients)[-1] for d in ("quintic", ("quintic", 5), quintic)
    ]
    assert all(np.array_equal(named[0], other) for other in named)
    chosen = polar.auto((6, 20), schedule=quintic, dtype=torch.float64)
    assert np.array_equal(walked(partial(optim.Muon, lr=0.1, direction=chosen), W, gradients)[-1], named[0])


def test_the_matrices_of_gpt2_small_take_two_thirds_of_the_flops_of_the_plain_loop_at_most():
    """12 layers of 768 wide. What is not counted, one pass or two of each weight, is a few per cent."""
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    chosen = [optim.directions.get(("quintic", 5)).choice(shape, torch.float32) for shape in shapes]
    assert sum(choice.flops for choice in chosen) < sum(choice.plain_flops for choice in chosen) / 1.5


@pytest.mark.parametrize("name", sorted(second_moments.BY_NAME))
def test_a_second_moment_by_name_is_its_value(name):
    W, gradients = problem(4, 6)
    value = second_moments.get(name)
    pair = [walked(partial(optim.Muon, lr=0.1, adapt=adapt), W, gradients)[-1] for adapt in (name, value)]
    assert np.array_equal(*pair)
    other = type(value)(beta2=0.5)
    assert not np.array_equal(walked(partial(optim.Muon, lr=0.1, adapt=other), W, gradients)[-1], pair[0])


def test_the_norm_of_normuon_is_that_of_the_direction_and_not_scaled_twice():
    """From zero weights: RMS 0.2 after matching AdamW, for an orthogonal direction."""
    _, gradients = problem(6, 20, 1)
    make = partial(optim.Muon, lr=1.0, scale="match_rms_adamw", direction=polar.svd(), adapt="normuon")
    W = walked(make, np.zeros((6, 20)), gradients)[0]
    assert math.sqrt(np.square(W).mean()) == pytest.approx(0.2, rel=64 * U64)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapt", [None, "adamuon", "normuon", "namo"])
@pytest.mark.parametrize("scale", SCALES)
def test_the_parts_of_a_parameter_are_optimized_as_parameters_of_their_own(scale, adapt):
    """Bit for bit: a fused weight against its blocks, experts against matrices, a convolution against a matrix."""
    generator = torch.Generator().manual_seed(0)
    fused = optim.fused(6, 4, 4)
    cases = [
        (fused, (14, 5)),
        (matrices.STACKED, (3, 6, 5)),
        (matrices.FLATTENED, (6, 5, 2, 2)),
        (matrices.TRANSPOSED, (5, 6)),
    ]
    for view, shape in cases:
        whole = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parts = [torch.nn.Parameter(X.clone()) for stack in view.parts(whole.detach()) for X in stack]
        settings = {"lr": 0.1, "nesterov": True, "weight_decay": 0.1, "scale": scale, "adapt": adapt}
        together = optim.Muon([{"params": [whole], "view": view}], **settings)
        apart = [optim.Muon([part], **settings) for part in parts]
        for _ in range(3):
            whole.grad = torch.randn(shape, generator=generator)
            for part, G in zip(parts, [X for stack in view.parts(whole.grad) for X in stack], strict=True):
                part.grad = G.clone()
            together.step()
            for each in apart:
                each.step()
        found = [X for stack in view.parts(whole.detach()) for X in stack]
        for X, part in zip(found, parts, strict=True):
            torch.testing.assert_close(X, part.detach(), rtol=0, atol=3e3 * U32)  # a batched product may sum otherwise


# --- refuses ----------------------------------------------------------------------------------------------------------


def parameter(*shape):
    return torch.nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "Muon: lr is -0.1"),
        ({"lr": float("nan")}, "Muon: lr is nan"),
        ({"lr": torch.ones(2)}, r"Muon: lr has shape \(2,\)"),
        ({"momentum": 1.0}, r"Muon: momentum is 1.0, needed a number in \[0, 1\)"),
        ({"weight_decay": -1.0}, "Muon: weight_decay is -1.0"),
        ({"extra": float("inf")}, "Muon: extra is inf"),
        ({"scale": "spectrall"}, "unknown scale 'spectrall': did you mean 'spectral'"),
        ({"decay": "decouple"}, "unknown decay 'decouple': did you mean 'decoupled'"),
        ({"form": "ema"}, "unknown momentum form 'ema'"),
        ({"direction": "quntic"}, "did you mean 'quintic'"),
        ({"direction": ("cubic5", 6)}, "cubic5"),
        ({"adapt": "adamoun"}, "unknown second moment 'adamoun': did you mean 'adamuon'"),
        ({"adapt": "namo", "decay": "l2"}, "needed another decay"),
        ({"capturable": True}, "Muon: capturable is True, needed without: it is not supported"),
        ({"differentiable": True}, "differentiable is True"),
        ({"foreach": True}, "foreach is True"),
        ({"fused": True}, "fused is True"),
        ({"maximize": True}, "maximize is True"),
        ({"ns_steps": 5}, "Muon has no option 'ns_steps'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        optim.Muon([parameter(2, 3)], **{"lr": 0.1, **settings})


def test_options_that_ask_for_nothing_are_accepted():
    optim.Muon([parameter(2, 3)], lr=0.1, foreach=None, capturable=False)
    optim.MOP([parameter(2, 3)], lr=0.1, differentiable=False)


@pytest.mark.parametrize("value", [second_moments.AdaMuon, second_moments.NorMuon, second_moments.NAMO])
def test_a_second_moment_refuses_what_makes_no_average(value):
    with pytest.raises(ValueError, match=r"beta2 is 1.0, needed a number in \[0, 1\)"):
        value(beta2=1.0)
    with pytest.raises(ValueError, match=r"eps is 0\.0"):
        value(eps=0.0)


def test_a_group_may_have_settings_of_its_own():
    """And they are checked, when it is added."""
    optimizer = optim.Muon([{"params": [parameter(2, 3)], "momentum": 0.5}, {"params": [parameter(2, 3)]}], lr=0.1)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.95]
    with pytest.raises(ValueError, match=r"Muon: momentum is 2\.0"):
        optimizer.add_param_group({"params": [parameter(2, 3)], "momentum": 2.0})
    with pytest.raises(ValueError, match="Muon: foreach is True"):
        optimizer.add_param_group({"params": [parameter(2, 3)], "foreach": True})
    assert len(optimizer.param_groups) == 2


def test_the_arithmetic_of_a_direction_is_its_own_business():
    W, gradients = problem(6, 9)
    half = polar.newton_schulz(polar.schedules.get("quintic"), Exact(torch.float16))
    found = walked(partial(optim.Muon, lr=0.1, direction=half), W, gradients, torch.float32)
    exact = walked(partial(optim.Muon, lr=0.1), W, gradients, torch.float32)
    assert 1e-5 < farthest(found, exact, W) < 2e-2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(optim.Muon, adapt=optim.NorMuon), "adapt is <class .*needed None, a name or a value"),
        (partial(optim.Muon, adapt=3), "adapt is 3, needed None, a name or a value"),
        (partial(optim.MOP, form="sum"), "MOP has no option 'form'"),
        (partial(optim.MOP, adapt="normuon"), "MOP has no option 'adapt'"),
    ],
)
def test_second_moments_and_options_of_another_rule_are_refused(monkeypatch, make, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)


@pytest.mark.parametrize("direction", [lambda C: C[0], lambda C: C[..., :1]])
def test_a_direction_of_another_shape_is_refused_with_the_name_of_its_parameter(direction):
    """The first would broadcast, and step all matrices along the first."""
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"parameter.*the direction has shape .*, needed \(1, 2, 3\)"):
        optim.Muon([p], lr=0.1, direction=direction).step()
    assert torch.equal(p, torch.ones(2, 3))
