"""Trajectories of one matrix: special cases, published results, many digits, invariances, refusals."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import distance, orthonormal
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

from muon_lab.measure import bounds
from muon_lab.oracle import multiprecision, optimizers, polar
from muon_lab.oracle.optimizers import SOAP, AdamW, AdaptiveMuon, Muon, advance, mop, rekls, trajectory
from muon_lab.oracle.optimizers.step import DECAYS, SCALES
from muon_lab.polar import schedules

U64 = bounds.unit_roundoff("fp64")
GOLDEN = Path(__file__).parent.parent / "golden"
QUINTIC = schedules.get("quintic", 5).coefficients

#: Every rule once, with every form and mode among them. SOAP's eps is far above the rounding of a first step.
RULES = {
    "adamw": AdamW(0.02, weight_decay=0.1),
    "adamw nesterov l2": AdamW(0.02, nesterov=True, weight_decay=0.1, decay="l2"),
    "adamw uncorrected": AdamW(0.02, correct_bias=False),
    "muon quintic palm": Muon(0.02, 0.9, QUINTIC, nesterov=True, scale="unit_rms_norm", weight_decay=0.1, decay="palm"),
    "muon sum": Muon(
        0.02, 0.9, schedules.get("polar_express", 8).coefficients, form="sum", weight_decay=0.1, decay="independent"
    ),
    "muon exact l2": Muon(0.02, nesterov=True, scale="match_rms_adamw", extra=0.5, weight_decay=0.1, decay="l2"),
    "muon shape": Muon(0.02, coefficients=[(1.5, -0.5, 0.0)], nesterov=True, form="sum", scale="shape_scaling"),
    "mop": mop(0.02, weight_decay=0.1),
    "polargrad": Muon(0.02, coefficients=QUINTIC, scale="nuclear_norm", nesterov=True),
    "adamuon": AdaptiveMuon(Muon(0.02, coefficients=QUINTIC, weight_decay=0.1), "adamuon"),
    "normuon": AdaptiveMuon(Muon(0.02, nesterov=True), "normuon"),
    "namo": AdaptiveMuon(Muon(0.02, scale="none"), "namo"),
    "soap": SOAP(0.02, eps=1e-2, weight_decay=0.1),
    "soap permuted": SOAP(0.02, eps=1e-2, second_moment="permuted", nesterov=True),
    "soap rotated": SOAP(0.02, eps=1e-2, second_moment="rotated", weight_decay=0.1, decay="l2"),
    "soap iteration": SOAP(0.02, eps=1e-2, eigenbasis="iteration"),
    "soap iteration permuted": SOAP(0.02, eps=1e-2, eigenbasis="iteration", power_steps=2, second_moment="permuted"),
    "soap iteration rotated": SOAP(0.02, eps=1e-2, eigenbasis="iteration", kl=True, second_moment="rotated"),
    "soap skip": SOAP(0.02, eps=1e-2, frequency=2, first_step="skip", max_rms=0.2, correct_bias=False),
    "soap lagged": SOAP(
        0.02, eps=1e-2, frequency=2, first_step="skip", order="lagged", correct_shampoo_bias=False, weight_decay=0.1
    ),
    "rekls": rekls(0.02, eps=0.05, weight_decay=0.1),
    "rekls permuted": rekls(0.02, eps=0.05, second_moment="permuted"),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def problem(m, n, steps=5, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((m, n)), list(generator.standard_normal((steps, m, n)))


def same(a, b):
    """Say whether two states agree bit for bit."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def moved(states, W):
    """Return the largest distance from the start."""
    return max(np.linalg.norm(state.W - W) for state in states)


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (4, 6), (6, 4)])
@every_rule
def test_a_zero_gradient_leaves_decay_alone_and_a_hundred_of_them_stay_finite(rule, shape):
    W, _ = problem(*shape)
    muon = getattr(rule, "muon", rule)
    if muon.decay == "l2":
        rule = muon = replace(rule, decay="decoupled")
    factor = {"decoupled": 1 - 0.02 * muon.weight_decay, "independent": 1 - muon.weight_decay}.get(
        muon.decay, 1 - 0.02 * 0.02 * muon.weight_decay
    )
    expected, skipped = W, isinstance(rule, SOAP) and rule.first_step == "skip"
    for t, state in enumerate(trajectory(rule, W, [np.zeros(shape)] * 100)):
        expected = expected if skipped and t == 0 else factor * expected
        assert np.array_equal(state.W, expected)


@pytest.mark.parametrize(("decay", "factor"), [("decoupled", 0.9), ("independent", 0.5), ("palm", 0.98), ("l2", None)])
def test_decay_forms_have_their_factors(decay, factor):
    W = np.linspace(0.5, 1.5, 6).reshape(2, 3)
    states = trajectory(Muon(0.2, scale="none", weight_decay=0.5, decay=decay), W, [np.zeros((2, 3))] * 5)
    if factor is None:  # the weight itself is orthogonalized
        np.testing.assert_allclose(states[0].W, W - 0.2 * polar.polar(W).U, rtol=8 * U64)
    else:
        np.testing.assert_allclose(states[-1].W, factor**5 * W, rtol=32 * U64)


@pytest.mark.parametrize("g", [3.0, -1e-3])
def test_one_number_gives_its_sign(g):
    for rule in (Muon(0.5), Muon(0.5, form="sum", nesterov=True), AdamW(0.5, eps=1e-300), SOAP(0.5, eps=1e-300)):
        assert trajectory(rule, [[0.0]], [[[g]]])[0].W[0, 0] == pytest.approx(-0.5 * np.sign(g), rel=4 * U64)
    assert trajectory(mop(0.5, 0.75), [[0.0]], [[[g]]])[0].W[0, 0] == pytest.approx(-0.5 * 0.25 * g, rel=4 * U64)


def test_mop_with_gradients_of_rank_one_and_one_direction_is_momentum_descent():
    W, _ = problem(3, 4)
    direction = np.outer([1.0, -2.0, 0.5], [1.0, 0.0, 3.0, -1.0])
    sizes, M, expected = [1.0, -2.0, 0.25], 0.0, W
    for size, state in zip(sizes, trajectory(mop(0.1, 0.5), W, [s * direction for s in sizes]), strict=True):
        M = 0.5 * M + 0.5 * size
        expected = expected - 0.1 * M * direction
        np.testing.assert_allclose(state.W, expected, rtol=0, atol=64 * U64 * np.linalg.norm(direction))


def test_mop_leaves_the_null_space_of_its_momentum_alone():
    W, _ = problem(4, 5)
    G = np.outer([1.0, 2.0, 0.0, 1.0], [1.0, 0.0, -1.0, 1.0, 2.0])
    change = trajectory(mop(1.0, scale="none"), W, [G])[0].W - W
    np.testing.assert_allclose(change, -G / np.linalg.norm(G), rtol=0, atol=64 * U64)
    noisy = G.astype(np.float32) * np.float32(1 + 2**-20)  # its rounding is told from a direction by the roundoff
    assert int(polar.polar(trajectory(Muon(1.0, 0.0, roundoff=2.0**-24), W, [noisy])[0].W - W).rank) == 1


@pytest.mark.parametrize(
    ("shape", "spectral", "unit", "shaped"),
    [
        ((32, 8), 5.657, 2, 2),
        ((8, 32), 5.657, 0.5, 1),
        ((1024, 4), 32, 16, 16),
        ((1, 64), 8, 0.125, 1),
        ((64, 1), 8, 8, 8),
    ],
)
def test_scales_are_those_of_the_table(shape, spectral, unit, shaped):
    W, G = np.zeros(shape), np.random.default_rng(6).standard_normal(shape)
    plain = trajectory(Muon(1.0, scale="none"), W, [G])[0].W
    expected = {"spectral": spectral, "unit_rms_norm": unit, "shape_scaling": shaped, "match_rms_adamw": 0.2 * spectral}
    for mode, factor in expected.items():
        change = trajectory(Muon(1.0, scale=mode), W, [G])[0].W
        assert np.linalg.norm(change) / np.linalg.norm(plain) == pytest.approx(factor, abs=5e-4)
    rms = np.sqrt(np.square(trajectory(Muon(1.0, scale="match_rms_adamw", extra=3.0), W, [G])[0].W).mean())
    assert rms == pytest.approx(0.6, rel=bounds.svd(*shape, 8 * U64))


def test_soap_of_one_number_is_adamw_bit_for_bit():
    W, gradients = problem(1, 1, steps=9)
    expected = trajectory(AdamW(0.02, (0.9, 0.95), 1e-8, 0.1, nesterov=True), W, gradients)
    for kl in (False, True):
        states = trajectory(SOAP(0.02, weight_decay=0.1, nesterov=True, kl=kl), W, gradients)
        for a, b in zip(states, expected, strict=True):
            assert np.array_equal(a.W, b.W)
            assert np.array_equal(a.V, b.V)


@pytest.mark.parametrize(("second_moment", "follows"), [("unchanged", False), ("permuted", True), ("rotated", True)])
def test_soap_with_diagonal_gradients_is_adamw_as_long_as_second_moments_follow_the_order(second_moment, follows):
    W = np.ones((2, 2))
    gradients = [np.diag([1.0, 2.0]), np.diag([9.0, 1.0]), np.diag([0.5, 0.25])]  # the second swaps the order
    rule = SOAP(0.02, eps=1e-3, second_moment=second_moment)
    states = trajectory(rule, W, gradients)
    expected = trajectory(AdamW(0.02, rule.betas, rule.eps), W, gradients)
    assert np.array_equal(states[0].W, expected[0].W)
    agree = [np.allclose(a.W, b.W, rtol=16 * U64, atol=0) for a, b in zip(states, expected, strict=True)]
    assert agree == [True, follows, follows]


def test_the_lagged_order_only_makes_bases_at_first():
    G1, G2 = np.diag([2.0, 1.0]), np.array([[1.0, 1.0], [0.0, 1.0]])
    rule = SOAP(1.0, (0.95, 0.95), eps=1e-12, first_step="skip", order="lagged", weight_decay=0.5)
    first, second = trajectory(rule, np.ones((2, 2)), [G1, G2])
    assert (first.step, first.seen, second.step, second.seen) == (0, 1, 1, 2)
    assert np.array_equal(first.W, np.ones((2, 2)))  # no decay either
    assert not first.M.any()
    np.testing.assert_allclose(0.5 - second.W, [[1.0, 1.0], [0.0, 1.0]], rtol=0, atol=1e-11)


def test_skipping_in_the_current_order_counts_adam_from_the_second_gradient():
    W, (G1, G2) = problem(3, 4, steps=2)
    rule = SOAP(1.0, eps=1e-2, first_step="skip")
    first, second = trajectory(rule, W, [G1, G2])
    assert (first.step, first.seen, second.step, second.seen) == (0, 1, 1, 2)
    assert np.array_equal(first.W, W)
    projected = second.Q_L.T @ G2 @ second.Q_R
    update = (
        second.Q_L @ (projected / (np.abs(projected) + 1e-2)) @ second.Q_R.T
    )  # a first Adam step, in both gradients
    np.testing.assert_allclose(W - second.W, update, rtol=0, atol=bounds.svd(3, 4, 64 * U64))
    assert np.linalg.norm(first.Q_L - second.Q_L) > 0.01


@pytest.mark.parametrize("shape", [(4, 4), (3, 5)])
def test_the_first_soap_step_is_the_polar_factor_in_exact_arithmetic(shape):
    W, (G,) = problem(*shape, steps=1)
    state = optimizers.multiprecision.trajectory(SOAP(1.0, eps=1e-30), W, [G], digits=60)[0]
    np.testing.assert_allclose(W - multiprecision.to_numpy(state["W"]), polar.polar(G).U, rtol=0, atol=64 * U64)


def test_rekls_is_soap_with_both_switches():
    W, gradients = problem(4, 3)
    soap = SOAP(0.1, eps=0.05, eigenbasis="eigh", kl=True, frequency=1)
    assert all(
        same(a, b)
        for a, b in zip(trajectory(rekls(0.1, eps=0.05), W, gradients), trajectory(soap, W, gradients), strict=True)
    )


def test_second_moments_of_muon_without_memory():
    W, (G,) = problem(5, 3, steps=1)
    muon = Muon(1.0, 0.0, scale="none")
    U = polar.polar(G).U
    change = {name: W - trajectory(AdaptiveMuon(muon, name, beta2=0.0), W, [G])[0].W for name in ("adamuon", "normuon")}
    np.testing.assert_allclose(change["adamuon"], np.sign(U), rtol=0, atol=2e-8 / np.abs(U).min())  # eps is 1e-8
    rows = U / np.linalg.norm(U, axis=1, keepdims=True)
    np.testing.assert_allclose(change["normuon"], rows * np.sqrt(3 / 5), rtol=0, atol=64 * U64)
    namo = W - trajectory(AdaptiveMuon(muon, "namo", beta2=0.0), W, [G])[0].W
    np.testing.assert_allclose(namo, U, rtol=0, atol=1e-8)
    wide = W.T - trajectory(AdaptiveMuon(muon, "normuon", beta2=0.0), W.T, [G.T])[0].W
    np.testing.assert_allclose(wide, change["normuon"].T, rtol=0, atol=64 * U64)  # columns where columns are many


@every_rule
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_matrix_stays_empty(rule, shape):
    states = trajectory(rule, np.zeros(shape), [np.zeros(shape)] * 3)
    assert [state.W.shape for state in states] == [shape] * 3


# --- matches published implementations --------------------------------------------------------------------------------


def golden():
    names = ("trajectories", "trajectories_torch")
    rows = [row for name in names for row in json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))["rows"]]
    arrays = {}
    for name in names:
        with np.load(GOLDEN / f"{name}.npz") as stored:
            arrays.update(stored)
    return rows, arrays


ROWS, ARRAYS = golden()


def rule_of(row):
    """Return the rule with the hyperparameters of a row, which are in the peer's terms."""
    kind, lr, decay = row["optimizer"], row["lr"], row["weight_decay"]
    method = row.get("weight_decay_method", "decoupled")
    if kind == "adamw":
        return AdamW(lr, tuple(row["betas"]), row["eps"], decay)
    if kind == "mop":
        return mop(lr, row["momentum"], row["nesterov"], row["scale"], weight_decay=decay, decay=method)
    if kind == "muon":
        table = schedules.get(row["coefficients"], row["steps"]).coefficients
        extra = row.get("extra_scale_factor", 1.0)
        return Muon(lr, row["momentum"], table, row["nesterov"], "average", row["scale"], extra, decay, method)
    if kind == "torch.optim.Muon":
        table = [row["ns_coefficients"]] * row["ns_steps"]
        mode = {"original": "shape_scaling"}.get(row["adjust_lr_fn"], row["adjust_lr_fn"])
        return Muon(lr, row["momentum"], table, row["nesterov"], scale=mode, weight_decay=decay)
    common = (lr, tuple(row["betas"]), row["shampoo_beta"], row["eps"], decay, method)
    if kind == "rekls":
        return rekls(*common, row["second_moment"])
    basis = "eigh" if row["use_eigh"] else "iteration"
    kl, correct, fate = row["use_kl_shampoo"], row["correct_bias"], row["second_moment"]
    return SOAP(*common, eigenbasis=basis, kl=kl, correct_bias=correct, second_moment=fate)


def disagreement(rule, row):
    """Return the largest distance over the steps, relative to the distance moved."""
    W = ARRAYS[row["w0"]]
    pairs = zip(trajectory(rule, W, ARRAYS[row["grads"]]), ARRAYS[row["key"]], strict=True)
    return max(np.linalg.norm(state.W - peer) / np.linalg.norm(state.W - W) for state, peer in pairs)


def test_all_recorded_trajectories_are_there():
    assert len({row["key"] for row in ROWS}) == len(ROWS) == 67
    kinds = {row["optimizer"] for row in ROWS}
    assert kinds == {"muon", "mop", "soap", "rekls", "adamw", "torch.optim.Muon"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["key"])
def test_agrees_with_the_published_implementation(row):
    """Ten times what a float64 recomputation of the same formula differed by: the peer's arithmetic is float32."""
    assert disagreement(rule_of(row), row) < 10 * row["float64_agreement"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["key"])
def test_the_recorded_disagreement_is_read_back_to_its_two_digits(row):
    """What is left is the peer's rounding, so two exact recomputations read the same number."""
    assert f"{disagreement(rule_of(row), row):.2g}" == f"{row['float64_agreement']:.2g}"


def another_rule(rule):
    """Return rules one choice away."""
    if isinstance(rule, AdamW):
        return [replace(rule, weight_decay=0.11), replace(rule, correct_bias=False), replace(rule, nesterov=True)]
    if isinstance(rule, Muon):
        changes = [replace(rule, nesterov=not rule.nesterov), replace(rule, scale="none", extra=3.0)]
        return changes + ([replace(rule, form="sum")] if rule.scale == "nuclear_norm" else [])
    fates = {"unchanged", "permuted", "rotated"} - {rule.second_moment}
    basis = {"eigh": "iteration", "iteration": "eigh"}[rule.eigenbasis]
    changes = [replace(rule, second_moment=fate) for fate in sorted(fates)]
    changes += [replace(rule, kl=not rule.kl), replace(rule, eigenbasis=basis), replace(rule, frequency=2)]
    return [*changes, replace(rule, nesterov=True), replace(rule, eps=1.5 * rule.eps)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["key"])
def test_a_rule_one_choice_away_does_not_agree(row):
    ratios = [disagreement(other, row) / row["float64_agreement"] for other in another_rule(rule_of(row))]
    assert min(ratios) > 10, ratios


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_that_of_torch_in_float64(weight_decay):
    W, gradients = problem(4, 6, steps=20)
    p = torch.nn.Parameter(torch.tensor(W))
    peer = torch.optim.AdamW([p], lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    for G, state in zip(gradients, trajectory(AdamW(0.02, (0.9, 0.95), 1e-8, weight_decay), W, gradients), strict=True):
        p.grad = torch.tensor(G)
        peer.step()
        np.testing.assert_allclose(p.detach().numpy(), state.W, rtol=0, atol=20 * 16 * U64)  # 20 steps of 16 roundings


# --- matches many digits ----------------------------------------------------------------------------------------------

#: What float64 may lose of its sixteen digits over five steps of small matrices whose spectra have no close values.
AGREEMENT = 1e-12


@pytest.mark.parametrize("shape", [(3, 3), (3, 4), (4, 3), (1, 2)])
@every_rule
def test_agrees_with_forty_digits(rule, shape):
    W, gradients = problem(*shape)
    states = trajectory(rule, W, gradients)
    exact = optimizers.multiprecision.trajectory(rule, W, gradients, digits=40)
    for state, digits in zip(states, exact, strict=True):
        assert set(state._fields) == set(digits)
        for name, value in state._asdict().items():
            if isinstance(value, int):
                assert value == digits[name]
                continue
            expected = multiprecision.to_numpy(digits[name]).reshape(value.shape)
            size = np.linalg.norm(expected - W if name == "W" else expected)
            assert np.linalg.norm(value - expected) <= AGREEMENT * size, name


@pytest.mark.parametrize("rule", [RULES["muon quintic palm"], RULES["mop"], RULES["adamw"], RULES["rekls"]])
def test_thirty_digits_are_the_first_of_fifty(rule):
    W, gradients = problem(3, 4)
    few, many = (optimizers.multiprecision.trajectory(rule, W, gradients, digits)[-1]["W"] for digits in (30, 50))
    with mp.workdps(60):
        assert max(abs(x) for x in few - many) < mp.mpf(10) ** -30


def test_the_ambient_precision_stays():
    before = mp.dps
    optimizers.multiprecision.trajectory(RULES["mop"], [[1]], [[[2]]], digits=70)
    assert mp.dps == before


def turned_null_space(state, rank):
    """Return a state with another basis of the directions in which R is zero."""
    Q_R = state.Q_R.copy()
    Q_R[:, rank:] = Q_R[:, rank:] @ orthonormal(Q_R.shape[1] - rank, Q_R.shape[1] - rank, seed=7)
    return state._replace(Q_R=Q_R)


@pytest.mark.parametrize(
    ("choice", "decides"),
    [
        ({}, False),
        ({"kl": True}, False),
        ({"second_moment": "rotated"}, False),
        ({"frequency": 3}, True),
        ({"first_step": "skip", "frequency": 2}, True),
        ({"first_step": "skip", "order": "lagged"}, True),
        ({"weight_decay": 0.1, "decay": "l2"}, True),
        ({"eigenbasis": "iteration"}, True),
        ({"second_moment": "permuted"}, True),
    ],
)
def test_a_null_space_of_two_dimensions_decides_where_something_outside_the_factor_is_projected(choice, decides):
    """Any basis of it is right, and LAPACK returns one: these trajectories no second implementation can reproduce."""
    rule = SOAP(0.1, eps=0.05, **choice)

    def apart(seed):
        W, (G1, G2) = problem(2, 5, steps=2, seed=seed)
        changes = []
        for turn in (lambda state, rank: state, turned_null_space):
            state = turn(rule.refreshed(rule.accumulated(rule.start(W), G1)), 2)
            state = rule.updated(state, G1) if rule.first_step == "apply" else state
            changes.append(advance(rule, state, G2).W - W)
        return distance(*changes)

    worst = max(apart(seed) for seed in range(10))
    assert worst > 1e-3 if decides else worst < AMPLIFIED * U64 / rule.eps


def test_the_first_step_of_soap_is_rounding_over_eps():
    """In exact arithmetic the projected gradient is diagonal; rounding off the diagonal is divided by eps."""
    W, (G,) = problem(4, 4, steps=1)
    errors, scales = [], [1e-2, 1e-4, 1e-6, 1e-8]
    for eps in scales:
        rule = SOAP(1.0, eps=eps)
        exact = optimizers.multiprecision.trajectory(rule, W, [G], digits=40)[0]["W"]
        errors.append(np.linalg.norm(trajectory(rule, W, [G])[0].W - multiprecision.to_numpy(exact)))
    slope = np.polyfit(np.log(scales), np.log(errors), 1)[0]
    assert slope == pytest.approx(-1, abs=0.1)
    assert errors[-1] < 64 * U64 * np.linalg.norm(G) / scales[-1]
    assert errors[-1] > 1e3 * AGREEMENT


def test_rekls_with_a_small_eps_is_not_determined_in_float64_for_a_rectangular_matrix():
    """At the first step the factors are 1/eps too large, and their zero values rounding of the size of eps."""

    def loss(shape, seed):
        W, gradients = problem(*shape, seed=seed)
        exact = optimizers.multiprecision.trajectory(rekls(0.02), W, gradients, digits=60)[-1]["W"]
        return distance(trajectory(rekls(0.02), W, gradients)[-1].W - W, multiprecision.to_numpy(exact) - W)

    assert max(loss((3, 3), seed) for seed in range(5)) < 1e-5
    assert max(loss((3, 4), seed) for seed in range(5)) > 1e-4


# --- invariances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, None])
@every_rule
def test_a_gradient_that_is_not_finite_changes_nothing(rule, bad):
    W, gradients = problem(3, 4)
    broken = None
    if bad is not None:
        broken = gradients[0].copy()
        broken[1, 2] = bad
    clean = trajectory(rule, W, gradients)
    states = trajectory(rule, W, [broken, *gradients[:2], broken, broken, *gradients[2:]])
    assert same(states[0], rule.start(W))
    assert states[4] is states[3] is states[2]
    assert all(same(a, b) for a, b in zip(clean, [*states[1:3], *states[5:]], strict=True))


@every_rule
def test_arguments_are_left_alone_and_a_run_can_be_taken_up_again(rule):
    W, gradients = problem(4, 3, steps=6)
    copies = W.copy(), [G.copy() for G in gradients]
    states = trajectory(rule, W, gradients)
    assert np.array_equal(W, copies[0])
    assert all(np.array_equal(a, b) for a, b in zip(gradients, copies[1], strict=True))
    state = states[2]
    for G, expected in zip(gradients[3:], states[3:], strict=True):
        state = advance(rule, state, G)
        assert same(state, expected)


@every_rule
def test_no_learning_rate_leaves_the_weight_and_moves_the_rest(rule):
    W, gradients = problem(3, 3)
    idle = replace(rule, muon=replace(rule.muon, lr=0.0)) if isinstance(rule, AdaptiveMuon) else replace(rule, lr=0.0)
    if getattr(idle, "muon", idle).decay == "independent":
        idle = replace(idle, weight_decay=0.0)
    states = trajectory(idle, W, gradients)
    assert all(np.array_equal(state.W, W) for state in states)
    assert not np.array_equal(states[0].M, states[1].M)


def test_momentum_after_one_step_is_its_share_of_the_gradient_bit_for_bit():
    G = np.diag([3.0, 4.0, 0.0, 0.0])
    for nesterov in (False, True):
        assert np.array_equal(trajectory(Muon(0.1, 0.5, nesterov=nesterov), np.eye(4), [G])[0].M, 0.5 * G)
        assert np.array_equal(trajectory(Muon(0.1, 0.5, nesterov=nesterov, form="sum"), np.eye(4), [G])[0].M, G)


@pytest.mark.parametrize("nesterov", [False, True])
def test_average_and_sum_part_only_where_scale_matters(nesterov):
    W, gradients = problem(6, 4)
    for coefficients in (None, QUINTIC):
        pair = [
            trajectory(Muon(0.1, 0.9, coefficients, nesterov, form), W, gradients)[-1].W for form in ("average", "sum")
        ]
        assert distance(pair[0], pair[1]) < bounds.svd(6, 4, 64 * U64)
    steps = [
        trajectory(Muon(0.1, 0.9, None, nesterov, form, "nuclear_norm"), W, gradients)[-1].W - W
        for form in ("average", "sum")
    ]
    np.testing.assert_allclose(
        steps[1], 10 * steps[0], rtol=0, atol=bounds.svd(6, 4, 64 * U64) * np.abs(steps[1]).max()
    )


def test_a_scheduled_momentum_turns_average_and_sum_apart():
    rotation = np.array([[0.0, -1.0], [1.0, 0.0]])
    for form, degrees in (("average", 12.53), ("sum", 48.01)):
        rule = Muon(1.0, 0.5, form=form, scale="none")
        state = advance(rule, rule.start(np.zeros((2, 2))), np.eye(2))
        change = state.W - advance(replace(rule, momentum=0.9), state, rotation).W
        assert math.degrees(math.atan2(change[1, 0], change[0, 0])) == pytest.approx(degrees, abs=0.01)


@given(st.integers(-60, 60))
def test_the_scale_of_gradients_is_nothing_to_muon_and_everything_to_mop(exponent):
    W, gradients = problem(4, 6)
    scaled = [np.ldexp(G, exponent) for G in gradients]
    for rule in (Muon(0.1, nesterov=True), Muon(0.1, coefficients=QUINTIC)):
        assert np.array_equal(trajectory(rule, W, gradients)[-1].W, trajectory(rule, W, scaled)[-1].W)
    zero = np.zeros((4, 6))
    assert np.array_equal(
        np.ldexp(trajectory(mop(1.0), zero, gradients)[-1].W, exponent), trajectory(mop(1.0), zero, scaled)[-1].W
    )
    adam = AdamW(0.1, eps=1e-3)
    relative = replace(adam, eps=math.ldexp(adam.eps, exponent))
    assert np.array_equal(trajectory(adam, W, gradients)[-1].W, trajectory(relative, W, scaled)[-1].W)


#: How far rounding may be amplified: by spectra of Gaussian matrices of a few rows (their smallest singular values and
#: gaps lie above 1e-2 of the largest), by the slope 493 of the quintic schedule and over a few steps.
AMPLIFIED = 1e4


@given(st.sampled_from([(4, 4), (3, 5), (5, 3)]), st.integers(0, 19))
def test_spectral_rules_commute_with_rotations_and_transposition(shape, seed):
    W, gradients = problem(*shape, steps=3, seed=seed)
    P, Q = orthonormal(shape[0], shape[0], seed), orthonormal(shape[1], shape[1], seed + 1)
    for rule in (Muon(0.1, nesterov=True), Muon(0.1, coefficients=QUINTIC), mop(0.1)):
        there = trajectory(rule, W, gradients)[-1].W
        turned = trajectory(rule, P @ W @ Q, [P @ G @ Q for G in gradients])[-1].W
        atol = AMPLIFIED * U64 * max(1.0, *(np.linalg.norm(G) for G in gradients))
        np.testing.assert_allclose(turned, P @ there @ Q, rtol=0, atol=atol)
        flipped = trajectory(rule, W.T, [G.T for G in gradients])[-1].W
        np.testing.assert_allclose(flipped, there.T, rtol=0, atol=atol)


@pytest.mark.parametrize("second_moment", ["unchanged", "permuted", "rotated"])
@pytest.mark.parametrize("kl", [False, True])
@given(seed=st.integers(0, 9))
def test_soap_commutes_with_rotations_and_transposition(second_moment, kl, seed):
    W, gradients = problem(4, 4, steps=4, seed=seed)
    P, Q = orthonormal(4, 4, seed), orthonormal(4, 4, seed + 1)
    rule = SOAP(0.1, eps=0.05, kl=kl, second_moment=second_moment)
    there = trajectory(rule, W, gradients)[-1].W
    atol = AMPLIFIED * U64 * max(np.linalg.norm(G) for G in gradients) / rule.eps
    turned = trajectory(rule, P @ W @ Q, [P @ G @ Q for G in gradients])[-1].W
    np.testing.assert_allclose(turned, P @ there @ Q, rtol=0, atol=atol)
    flipped = trajectory(rule, W.T, [G.T for G in gradients])[-1].W
    np.testing.assert_allclose(flipped, there.T, rtol=0, atol=atol)
    adam = trajectory(AdamW(0.1, eps=0.05), P @ W @ Q, [P @ G @ Q for G in gradients])[-1].W
    assert distance(adam, P @ trajectory(AdamW(0.1, eps=0.05), W, gradients)[-1].W @ Q) > 1e-3  # which AdamW does not


@given(st.integers(0, 29))
def test_a_relabelled_basis_takes_the_same_step_if_its_moments_are_relabelled_too(seed):
    generator = np.random.default_rng(seed)
    W, gradients = problem(4, 5, steps=3, seed=seed)
    rule = SOAP(0.1, eps=1e-2)
    state, G = trajectory(rule, W, gradients[:2])[-1], gradients[2]
    p, q = generator.permutation(4), generator.permutation(5)
    s, t = generator.choice([-1.0, 1.0], 4), generator.choice([-1.0, 1.0], 5)
    relabelled = state._replace(
        Q_L=state.Q_L[:, p] * s,
        Q_R=state.Q_R[:, q] * t,
        M=state.M[p][:, q] * np.outer(s, t),
        V=state.V[p][:, q],
    )
    there = rule.updated(state, G).W
    np.testing.assert_allclose(rule.updated(relabelled, G).W, there, rtol=0, atol=bounds.svd(4, 5, 64 * U64))
    if not (np.array_equal(p, range(4)) and np.array_equal(q, range(5))):
        assert distance(rule.updated(relabelled._replace(V=state.V), G).W, there) > 1e-4


@given(st.integers(0, 29))
def test_rotated_second_moments_keep_their_sum_and_follow_a_permutation(seed):
    W, gradients = problem(4, 5, steps=4, seed=seed)
    rule = SOAP(0.1, eps=1e-2, second_moment="rotated")
    before = trajectory(rule, W, gradients)[-1]
    after = rule.refreshed(before._replace(L=np.cov(gradients[0]), R=np.cov(gradients[1].T)))
    assert after.V.sum() == pytest.approx(before.V.sum(), rel=bounds.svd(4, 5, 16 * U64))
    assert (after.V >= 0).all()
    p = np.random.default_rng(seed).permutation(4)
    settled = rule.refreshed(before)  # now the bases are those of the factors
    shuffled = settled._replace(Q_L=settled.Q_L[:, p], M=settled.M[p], V=settled.V[p])
    np.testing.assert_allclose(rule.refreshed(shuffled).V, settled.V, rtol=0, atol=1e-9 * settled.V.max())


def test_factors_with_the_correction_are_those_of_explicit_inverses():
    W, gradients = problem(3, 3)
    rule = rekls(0.02, eps=0.05)
    states = [rule.start(W), *trajectory(rule, W, gradients)]
    for t, (old, new, G) in enumerate(zip(states, states[1:], gradients, strict=False), 1):
        beta = 1 - 0.05 / (1 - 0.95**t)
        whole_L, whole_R = (
            (Q * np.maximum(v, 0.05)) @ Q.T for v, Q in ((old.Lambda_L, old.Q_L), (old.Lambda_R, old.Q_R))
        )
        L = beta * old.L + (1 - beta) / 3 * G @ np.linalg.solve(whole_R, G.T)
        R = beta * old.R + (1 - beta) / 3 * G.T @ np.linalg.solve(whole_L, G)
        np.testing.assert_allclose(new.L, L, rtol=0, atol=AMPLIFIED * U64 * np.linalg.norm(L))
        np.testing.assert_allclose(new.R, R, rtol=0, atol=AMPLIFIED * U64 * np.linalg.norm(R))


def test_the_corrected_factors_start_one_over_eps_too_large():
    W, gradients = problem(6, 4)
    first = trajectory(rekls(0.02, eps=1e-8), W, gradients)[0]
    np.testing.assert_allclose(first.L, gradients[0] @ gradients[0].T / (4 * 1e-8), rtol=1e-12)
    np.testing.assert_allclose(first.R, gradients[0].T @ gradients[0] / (6 * 1e-8), rtol=1e-12)


def test_the_first_gradient_has_all_the_weight_in_corrected_factors():
    W, gradients = problem(3, 4)
    G = gradients[0]
    assert np.array_equal(trajectory(SOAP(0.1), W, gradients)[0].L, G @ G.T)
    plain = trajectory(SOAP(0.1, correct_shampoo_bias=False), W, gradients)[0].R
    np.testing.assert_allclose(plain, 0.05 * G.T @ G, rtol=0, atol=16 * U64 * np.linalg.norm(G) ** 2)


@pytest.mark.parametrize(
    ("choice", "log"),
    [
        ({"frequency": 3}, [1, 3, 6, 9, 12]),
        ({"frequency": 1}, list(range(1, 13))),
        ({"frequency": 3, "first_step": "skip"}, [1, 4, 7, 10]),  # one gradient was not a step
        ({"frequency": 3, "first_step": "skip", "order": "lagged"}, [1, 4, 7, 10]),
    ],
)
def test_bases_are_refreshed_at_multiples_of_the_frequency(choice, log):
    W, gradients = problem(3, 4, steps=12)
    rule = SOAP(0.02, eps=1e-2, **choice)
    states = [rule.start(W), *trajectory(rule, W, gradients)]
    refreshed = [t for t in range(1, 13) if not np.array_equal(states[t].Q_L, states[t - 1].Q_L)]
    assert refreshed == log
    resumed = states[5]
    for G in gradients[5:]:
        resumed = advance(rule, resumed, G)
    assert same(resumed, states[-1])


def test_the_first_moment_stays_what_it_is_when_the_bases_turn():
    W, gradients = problem(4, 3)
    for fate in ("unchanged", "permuted", "rotated"):
        state = trajectory(SOAP(0.02, eps=1e-2, second_moment=fate), W, gradients)[-1]
        M = sum(0.1 * 0.9 ** (4 - i) * G for i, G in enumerate(gradients))
        np.testing.assert_allclose(state.Q_L @ state.M @ state.Q_R.T, M, rtol=0, atol=bounds.svd(4, 3, 64 * U64))


@pytest.mark.parametrize("limit", [0.05, 0.3, 1e3])
def test_the_limit_holds_and_keeps_the_direction(limit):
    W, gradients = problem(5, 4)
    free, held = (SOAP(1.0, eps=1e-2, max_rms=r) for r in (None, limit))
    for state, G in zip(trajectory(free, W, gradients), gradients[1:], strict=False):
        a, b = advance(free, state, G).W - state.W, advance(held, state, G).W - state.W
        rms = np.sqrt(np.square(a).mean())
        expected = a * min(1.0, limit / (rms + 1e-7))
        np.testing.assert_allclose(b, expected, rtol=0, atol=32 * U64 * np.abs(W).max())


# --- rates ------------------------------------------------------------------------------------------------------------


def test_a_cubically_convergent_schedule_approaches_the_exact_rule_cubically():
    W, gradients = problem(4, 4, steps=1)
    taylor = (15 / 8, -10 / 8, 3 / 8)  # the error of a singular value near 1 is cubed
    exact = trajectory(Muon(1.0, scale="none"), W, gradients)[0].W
    errors = [
        np.linalg.norm(trajectory(Muon(1.0, coefficients=[taylor] * k, scale="none"), W, gradients)[0].W - exact)
        for k in range(2, 12)
    ]
    near = [e for e in errors if 1e-13 < e < 0.3]
    assert len(near) >= 3
    orders = [math.log(c / b) / math.log(b / a) for a, b, c in zip(near, near[1:], near[2:], strict=False)]
    assert orders[-1] == pytest.approx(3, abs=0.3)


# --- refuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Muon(-0.1), "Muon: lr is -0.1"),
        (lambda: Muon(float("nan")), "Muon: lr is nan"),
        (lambda: Muon(0.1, momentum=1.0), "Muon: momentum is 1.0"),
        (lambda: Muon(0.1, coefficients=[(1.5, -0.5)]), "step 0 of coefficients has 2 numbers"),
        (lambda: Muon(0.1, scale="spectrall"), "unknown scale 'spectrall': did you mean 'spectral'"),
        (lambda: Muon(0.1, form="ema"), "unknown momentum form 'ema'"),
        (lambda: Muon(0.1, decay="decouple"), "unknown decay 'decouple': did you mean 'decoupled'"),
        (lambda: AdamW(0.1, betas=(0.9, 1.0)), "AdamW: beta2 is 1.0"),
        (lambda: AdamW(0.1, eps=0.0), "AdamW: eps is 0.0"),
        (lambda: AdamW(0.1, weight_decay=float("inf")), "AdamW: weight_decay is inf"),
        (lambda: AdaptiveMuon(Muon(0.1), "adamoun"), "unknown second moment 'adamoun': did you mean 'adamuon'"),
        (lambda: AdaptiveMuon(Muon(0.1, decay="l2"), "namo"), "needed another decay for 'namo'"),
        (lambda: SOAP(0.1, frequency=0), "SOAP: frequency is 0"),
        (lambda: SOAP(0.1, max_rms=0.0), "SOAP: max_rms is 0.0"),
        (lambda: SOAP(0.1, second_moment="rotate"), "unknown second moment 'rotate': did you mean 'rotated'"),
        (lambda: SOAP(0.1, eigenbasis="qr"), "unknown eigenbasis 'qr'"),
        (lambda: SOAP(0.1, order="lagged"), "needed 'skip': there is no basis yet"),
        (lambda: trajectory(Muon(0.1), np.zeros(3), []), r"W has shape \(3,\)"),
        (lambda: trajectory(Muon(0.1), np.zeros((2, 2)) * 1j, []), "W has shape .* and dtype complex128"),
        (lambda: trajectory(Muon(0.1), [[np.nan]], []), "W has entries that are not finite"),
        (lambda: trajectory(Muon(0.1), [[1.0]], [[[1.0, 2.0]]]), r"G has shape \(1, 2\), needed that of W, \(1, 1\)"),
        (lambda: trajectory(Muon(0.1), [[1.0]], [np.zeros((1, 1, 1))]), r"G has shape \(1, 1, 1\)"),
        (lambda: trajectory(AdamW(0.1), [[1.0]], [[[1e200]]]), "leaves the range of float64"),
        (lambda: trajectory(SOAP(0.1), [[1.0]], [[[1e200]]]), "not finite"),
        (lambda: optimizers.multiprecision.trajectory(Muon(0.1), [[1]], [], 0), "digits is 0"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_unknown_rule_is_refused_by_the_many_digits():
    with pytest.raises(TypeError, match="rule is of type int, needed one of AdamW, Muon, AdaptiveMuon, SOAP"):
        optimizers.multiprecision.trajectory(3, [[1]], [], 20)


def test_every_form_and_mode_is_among_the_rules():
    rules = [getattr(rule, "muon", rule) for rule in RULES.values()]
    assert {rule.decay for rule in rules} == set(DECAYS)
    assert {rule.scale for rule in rules if isinstance(rule, Muon)} == set(SCALES)
