"""SOAP on parameters: special cases, published results, the oracle, field cases, failing solvers, refusals."""

import copy
import json
import math
import warnings
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import distance, orthonormal
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_lab import optim, oracle
from muon_lab.arithmetic import Exact, Rounded
from muon_lab.measure import bounds
from muon_lab.optim.matrices import STACKED, fused
from muon_lab.optim.soap import EigensolverWarning, Rule, SOAPState
from muon_lab.oracle.optimizers import rekls, trajectory

U32, U64 = bounds.unit_roundoff("fp32"), bounds.unit_roundoff("fp64")
GOLDEN = Path(__file__).parent.parent / "golden"
TENSORS = ("M", "V", "L", "R", "Q_L", "Q_R", "Lambda_L", "Lambda_R")

#: How far rounding may be amplified: by spectra of Gaussian matrices of a few rows (their smallest singular values and
#: gaps lie above 1e-2 of the largest) and over six steps. 1,500 rules drawn as below stay under 440.
AMPLIFIED = 1e4


def problem(m, n, steps=5, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((m, n)), list(generator.standard_normal((steps, m, n)))


def parameter(W, dtype=torch.float64):
    return torch.nn.Parameter(torch.tensor(np.asarray(W), dtype=dtype))


def feed(optimizer, parameters, gradients):
    """Take one step with these gradients."""
    for p, G in zip(parameters, gradients, strict=True):
        p.grad = None if G is None else torch.as_tensor(G).to(p.dtype, copy=True)
    optimizer.step()


def weights(optimizer, p, gradients):
    """Return the weight after each gradient."""
    found = []
    for G in gradients:
        feed(optimizer, [p], [G])
        found.append(p.detach().clone())
    return found


def walk(rule, W, gradients, dtype=torch.float64):
    """Return the weights and the last state of SOAP with the hyperparameters of an oracle's rule."""
    p = parameter(W, dtype)
    optimizer = optim.SOAP([p], **asdict(rule))
    return weights(optimizer, p, gradients), optimizer.state[p]


def snapshot(optimizer):
    """Return a copy of all parameters and all state."""
    return [
        (p.detach().clone(), {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state.get(p, {}).items()})
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def same(a, b):
    """Say whether two snapshots agree bit for bit."""
    return all(
        torch.equal(p, q) and s.keys() == t.keys() and all(torch.equal(*map(torch.as_tensor, (s[k], t[k]))) for k in s)
        for (p, s), (q, t) in zip(a, b, strict=True)
    )


CHOICES = {
    "soap": {},
    "permuted": {"second_moment": "permuted", "nesterov": True},
    "rotated l2": {"second_moment": "rotated", "weight_decay": 0.1, "decay": "l2"},
    "iteration": {"eigenbasis": "iteration"},
    "iteration permuted": {"eigenbasis": "iteration", "power_steps": 2, "second_moment": "permuted"},
    "iteration rotated": {"eigenbasis": "iteration", "kl": True, "second_moment": "rotated"},
    "skip": {"frequency": 2, "first_step": "skip", "max_rms": 0.2, "correct_bias": False},
    "lagged": {"frequency": 2, "first_step": "skip", "order": "lagged", "correct_shampoo_bias": False},
    "rekls": {"kl": True, "weight_decay": 0.1},
    "rekls from one": {"kl": True, "start": 1.0},
}
every_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [{}, {"kl": True}, {"second_moment": "rotated"}, {"eigenbasis": "iteration"}])
@pytest.mark.parametrize("g", [1.0, 1e-3, 1e3])
def test_one_number_is_adam_to_rounding(choice, g):
    W, gradients = problem(1, 1, steps=12)
    gradients = [g * G for G in gradients]
    p, q = parameter(W), parameter(W)
    soap = optim.SOAP([p], lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **choice)
    adam = torch.optim.AdamW([q], lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for a, b in zip(weights(soap, p, gradients), weights(adam, q, gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=12 * 16 * U64)  # 12 steps of 16 roundings


@pytest.mark.parametrize(("decay", "factor"), [("decoupled", 0.9), ("independent", 0.5), ("palm", 0.98)])
@every_choice
def test_s20_zero_gradients_only_decay(choice, decay, factor):
    W, _ = problem(3, 4)
    p = parameter(W)
    choice = {**choice, "weight_decay": 0.5, "decay": decay}
    optimizer = optim.SOAP([p], lr=0.2, eps=0.05, **choice)
    expected = p.detach().clone()
    for t, after in enumerate(weights(optimizer, p, [np.zeros((3, 4))] * 5)):
        expected = expected if choice.get("first_step") == "skip" and t == 0 else factor * expected
        torch.testing.assert_close(after, expected, rtol=0, atol=0)
    assert not any(optimizer.state[p][name].any() for name in ("M", "V", "L", "R"))


def test_a_hundred_zero_gradients_with_a_usual_eps_change_nothing():
    p = parameter(problem(3, 4)[0], torch.float32)
    optimizer = optim.SOAP([p], lr=0.1, kl=True)
    before = p.detach().clone()
    assert all(torch.equal(after, before) for after in weights(optimizer, p, [np.zeros((3, 4))] * 100))


@pytest.mark.parametrize(("second_moment", "follows"), [("unchanged", False), ("permuted", True), ("rotated", True)])
def test_diagonal_gradients_are_adam_as_long_as_second_moments_follow_the_order(second_moment, follows):
    W = np.ones((2, 2))
    gradients = [np.diag([1.0, 2.0]), np.diag([9.0, 1.0]), np.diag([0.5, 0.25])]  # the second swaps the order
    p, q = parameter(W), parameter(W)
    found = weights(optim.SOAP([p], lr=0.02, eps=1e-3, second_moment=second_moment), p, gradients)
    expected = weights(torch.optim.AdamW([q], 0.02, (0.9, 0.95), 1e-3, weight_decay=0.0), q, gradients)
    agree = [torch.allclose(a, b, rtol=32 * U64, atol=0) for a, b in zip(found, expected, strict=True)]
    assert agree == [True, follows, follows]


def test_s26_the_first_two_steps_in_both_orders():
    G1, G2 = np.diag([2.0, 1.0]), np.array([[1.0, 1.0], [0.0, 1.0]])
    p = parameter(np.ones((2, 2)))
    lagged = optim.SOAP([p], 1.0, (0.95, 0.95), eps=1e-12, first_step="skip", order="lagged", weight_decay=0.5)
    first, second = weights(lagged, p, [G1, G2])
    assert torch.equal(first, torch.ones(2, 2, dtype=torch.float64))  # no decay either
    assert (lagged.state[p]["step"], lagged.state[p]["seen"]) == (1, 2)
    np.testing.assert_allclose(0.5 - second, [[1.0, 1.0], [0.0, 1.0]], rtol=0, atol=1e-11)
    p = parameter(np.zeros((2, 2)))
    first, second = weights(optim.SOAP([p], 1.0, (0.95, 0.95), eps=1e-12), p, [G1, G2])
    np.testing.assert_allclose(first, -np.eye(2), rtol=0, atol=1e-11)  # the polar factor of G1
    np.testing.assert_allclose(first - second, [[0.802, 0.279], [0.063, 1.173]], rtol=0, atol=5e-4)


def test_s21_the_first_step_is_no_gradient_descent():
    """Its singular values are the learning rate, whatever the scale of the gradient: to rounding over eps."""
    W, (G,) = problem(4, 4, steps=1)
    steps = []
    for scale in (1.0, 1000.0):
        p = parameter(W)
        steps.append(weights(optim.SOAP([p], 0.1, eps=1e-7), p, [scale * G])[0].numpy() - W)
    rounding = 64 * U64 * 1000 * np.linalg.norm(G) / 1e-7  # a few dozen roundings of the larger one, over eps
    np.testing.assert_allclose(np.linalg.svd(steps[0], compute_uv=False), 0.1, rtol=rounding)
    np.testing.assert_allclose(steps[1], steps[0], rtol=0, atol=0.1 * rounding)


def test_skipping_leaves_the_weight_the_moments_and_the_count_alone():
    W, gradients = problem(3, 4, steps=2)
    p = parameter(W)
    optimizer = optim.SOAP([p], 1.0, eps=1e-2, first_step="skip", weight_decay=0.5)
    first = weights(optimizer, p, gradients[:1])[0]
    state = optimizer.state[p]
    assert np.array_equal(first.numpy(), W)
    assert (state["step"], state["seen"]) == (0, 1)
    assert not state["M"].any()
    assert state["L"].any()
    weights(optimizer, p, gradients[1:])
    assert (state["step"], state["seen"]) == (1, 2)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@every_choice
def test_an_empty_matrix_stays_empty(shape, choice):
    p = parameter(np.zeros(shape))
    assert [W.shape for W in weights(optim.SOAP([p], 0.1, **choice), p, [np.zeros(shape)] * 3)] == [shape] * 3


@pytest.mark.parametrize("shape", [(1, 5), (5, 1)])
def test_a_vector_shaped_matrix_moves_along_its_gradient_at_first(shape):
    W, (G,) = problem(*shape, steps=1)
    p = parameter(W)
    after = weights(optim.SOAP([p], 1.0, eps=1e-12), p, [G])[0]
    np.testing.assert_allclose(W - after.numpy(), G / np.linalg.norm(G), rtol=0, atol=1e-3)  # rounding over eps


# --- matches published implementations --------------------------------------------------------------------------------


ROWS = [
    row
    for row in json.loads((GOLDEN / "trajectories.json").read_text("utf-8"))["rows"]
    if row["optimizer"] in ("soap", "rekls")
]
with np.load(GOLDEN / "trajectories.npz") as stored:
    ARRAYS = {name: stored[name] for row in ROWS for name in (row["key"], row["w0"], row["grads"])}


def optimizer_of(row, parameters):
    """Return the optimizer with the hyperparameters of a row, which are in the peer's terms."""
    common = {name: row[name] for name in ("lr", "betas", "shampoo_beta", "eps", "weight_decay", "second_moment")}
    common["decay"] = row["weight_decay_method"]
    if row["optimizer"] == "rekls":
        return optim.REKLS(parameters, **common)
    basis = "eigh" if row["use_eigh"] else "iteration"
    return optim.SOAP(
        parameters, **common, eigenbasis=basis, kl=row["use_kl_shampoo"], correct_bias=row["correct_bias"]
    )


def disagreement(row, dtype, **changes):
    """Return the largest distance over the steps, relative to the distance moved."""
    W = torch.tensor(ARRAYS[row["w0"]])
    p = parameter(W, dtype)
    optimizer = optimizer_of(row, [p])
    if changes:  # SOAP has what REKLS refuses
        optimizer = optim.SOAP([optimizer.param_groups[0] | changes], row["lr"])
    pairs = zip(weights(optimizer, p, ARRAYS[row["grads"]]), torch.tensor(ARRAYS[row["key"]]), strict=True)
    return max(float((found.double() - peer).norm() / (peer - W).norm()) for found, peer in pairs)


def test_all_recorded_trajectories_are_there():
    assert len(ROWS) == 16
    assert {row["second_moment"] for row in ROWS} == {"unchanged", "permuted"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["key"])
def test_agrees_with_the_published_implementation(row, dtype):
    """Ten times what a float64 recomputation of the same formula differed by: the peer's arithmetic is float32."""
    assert disagreement(row, dtype) < 10 * row["float64_agreement"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["key"])
def test_one_choice_away_does_not_agree(row):
    changes = [{"nesterov": True}, {"frequency": 2}, {"eps": 1.5 * row["eps"]}, {"second_moment": "rotated"}]
    assert min(disagreement(row, torch.float64, **change) for change in changes) > 10 * row["float64_agreement"]


# --- matches the oracle -----------------------------------------------------------------------------------------------


@st.composite
def rules(draw, shape):
    """Draw the settings of a rule that is determined in float64 for this shape: see the oracle on what is not."""
    square = shape[0] == shape[1]
    order = draw(st.sampled_from(oracle.optimizers.soap.ORDERS)) if square else "current"
    fates = oracle.optimizers.soap.SECOND_MOMENTS if square else ("unchanged", "rotated")
    fate = draw(st.sampled_from(fates))
    fraction = st.sampled_from([0.0, 0.5, 0.9, 0.95])
    return dict(
        lr=draw(st.sampled_from([0.02, 0.3])),
        betas=(draw(fraction), draw(fraction)),
        # A rotated second moment remembers directions that a factor without memory has forgotten: they lie in its null
        # space, the basis of which is the solver's choice.
        shampoo_beta=draw(fraction) if square or fate != "rotated" else 0.95,
        eps=draw(st.sampled_from([0.05, 0.2])),
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        decay=draw(st.sampled_from(("decoupled", "independent", "palm", "l2") if square else ("decoupled", "palm"))),
        nesterov=draw(st.booleans()),
        correct_bias=draw(st.booleans()),
        correct_shampoo_bias=draw(st.booleans()),
        eigenbasis=draw(st.sampled_from(("eigh", "iteration"))) if square else "eigh",
        power_steps=draw(st.integers(1, 3)),
        frequency=draw(st.integers(1, 3)) if square else 1,
        second_moment=fate,
        first_step="skip" if order == "lagged" else draw(st.sampled_from(("apply", "skip"))),
        order=order,
        kl=draw(st.booleans()),
        max_rms=draw(st.sampled_from([None, 0.2, 2.0])),
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (4, 4), (6, 6), (3, 5), (6, 4), (1, 4), (2, 7)])
@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 99))
def test_agrees_with_the_oracle_whatever_the_hyperparameters(shape, data, seed):
    rule = oracle.optimizers.SOAP(**data.draw(rules(shape)))
    W, gradients = problem(*shape, steps=6, seed=seed)
    atol = AMPLIFIED * U64 * max(np.linalg.norm(G) for G in gradients) / rule.eps
    found, _ = walk(rule, W, gradients)
    for a, b in zip(found, trajectory(rule, W, gradients), strict=True):
        np.testing.assert_allclose(a.numpy(), b.W, rtol=0, atol=atol)


@pytest.mark.parametrize("choice", [c for c in CHOICES.values() if "start" not in c])
def test_every_part_of_the_state_is_that_of_the_oracle(choice):
    rule = oracle.optimizers.SOAP(0.02, eps=0.05, **choice)
    W, gradients = problem(4, 4)
    truth = trajectory(rule, W, gradients)[-1]
    _, state = walk(rule, W, gradients)
    assert (state["step"], state["seen"]) == (truth.step, truth.seen)
    for name in TENSORS:
        expected = getattr(truth, name)
        found = state[name].numpy().reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=0, atol=AMPLIFIED * U64 * np.abs(expected).max(), err_msg=name)


def test_start_values_are_those_of_the_first_correction():
    """As the oracle with them put into its state."""
    W, gradients = problem(3, 5)
    rule = rekls(0.02, eps=0.05)
    state = rule.start(W)
    state = state._replace(Lambda_L=np.full(3, 2.0), Lambda_R=np.full(5, 2.0))
    p = parameter(W)
    found = weights(optim.REKLS([p], 0.02, eps=0.05, start=2.0), p, gradients)
    for G, after in zip(gradients, found, strict=True):
        state = oracle.optimizers.advance(rule, state, G)
        atol = AMPLIFIED * U64 * np.linalg.norm(G) / rule.eps
        np.testing.assert_allclose(after.numpy(), state.W, rtol=0, atol=atol)
    plain = trajectory(rule, W, gradients)[-1].W
    assert distance(found[-1].numpy() - W, plain - W) > 1e-2  # and they matter


@pytest.mark.parametrize("kl", [False, True])
def test_float32_is_off_by_its_rounding_over_eps(kl):
    rule = oracle.optimizers.SOAP(0.02, eps=0.05, kl=kl)
    for seed in range(5):
        W, gradients = problem(6, 6, seed=seed)
        found, _ = walk(rule, W.astype(np.float32), [G.astype(np.float32) for G in gradients], torch.float32)
        truth = trajectory(rule, W.astype(np.float32), [G.astype(np.float32) for G in gradients])[-1].W
        error = float(np.linalg.norm(found[-1].double().numpy() - truth))
        assert error < AMPLIFIED * U32 * max(np.linalg.norm(G) for G in gradients)


def largest_update(shape, seeds, **choice):
    """Return the largest RMS of an update over three steps, in float32 and with the usual eps."""
    largest = 0.0
    for seed in range(seeds):
        W, gradients = problem(*shape, steps=3, seed=seed)
        p = parameter(W, torch.float32)
        places = [p.detach().clone(), *weights(optim.SOAP([p], 1.0, **choice), p, gradients)]
        moves = [b - a for a, b in pairwise(places)]
        largest = max(largest, *(float(move.square().mean().sqrt()) for move in moves))
    return largest


def test_the_second_step_is_a_spike_unless_second_moments_rotate_or_the_first_is_skipped():
    shape, seeds = (32, 64), 5
    assert largest_update(shape, seeds) > 20
    assert largest_update(shape, seeds, eigenbasis="iteration") > 20
    assert largest_update(shape, seeds, second_moment="rotated") < 1.5
    assert largest_update(shape, seeds, first_step="skip") < 10
    assert largest_update(shape, seeds, max_rms=0.3) < 0.3 + 1e-5


# --- invariances ------------------------------------------------------------------------------------------------------


@every_choice
def test_equal_shapes_are_stepped_together_like_one_by_one(choice):
    """Decompositions are the same bits; products of a stack are summed in another order than those of one matrix."""
    problems = [problem(4, 4, seed=seed) for seed in range(3)]
    together = [parameter(W) for W, _ in problems]
    optimizer = optim.SOAP(together, 0.1, eps=0.05, **choice)
    for gradients in zip(*(gradients for _, gradients in problems), strict=True):
        feed(optimizer, together, gradients)
    for p, (W, gradients) in zip(together, problems, strict=True):
        q = parameter(W)
        alone = weights(optim.SOAP([q], 0.1, eps=0.05, **choice), q, gradients)[-1]
        atol = AMPLIFIED * U64 * max(np.linalg.norm(G) for G in gradients) / 0.05
        torch.testing.assert_close(p.detach(), alone, rtol=0, atol=atol)


def test_matrices_of_another_age_are_not_stepped_together():
    """One misses a gradient: its averages are its own."""
    W, gradients = problem(3, 3, steps=4)
    early, late = parameter(W), parameter(W)
    optimizer = optim.SOAP([early, late], 0.1, eps=0.05)
    feed(optimizer, [early, late], [gradients[0], None])
    assert late not in optimizer.state
    for G in gradients[1:]:
        feed(optimizer, [early, late], [G, G])
    q = parameter(W)
    alone = weights(optim.SOAP([q], 0.1, eps=0.05), q, gradients[1:])[-1]
    torch.testing.assert_close(late.detach(), alone, rtol=0, atol=AMPLIFIED * U64 * 4 / 0.05)
    assert optimizer.state[late]["step"] == 3
    assert optimizer.state[early]["step"] == 4


def test_experts_and_fused_rows_are_matrices_of_their_own():
    W, gradients = problem(6, 4, steps=4)
    expected = []
    for part in (slice(0, 4), slice(4, 6)):
        q = parameter(W[part])
        expected.append(weights(optim.SOAP([q], 0.1, eps=0.05), q, [G[part] for G in gradients])[-1])
    p = parameter(W)
    optimizer = optim.SOAP([{"params": [p], "view": fused(4, 2)}], 0.1, eps=0.05)
    found = weights(optimizer, p, gradients)[-1]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=AMPLIFIED * U64 * 5 / 0.05)
    assert {optimizer.state[p][name].shape for name in ("L.0", "L.1")} == {(1, 4, 4), (1, 2, 2)}
    experts = parameter(W.reshape(2, 3, 4))
    optimizer = optim.SOAP([{"params": [experts], "view": STACKED}], 0.1, eps=0.05)
    found = weights(optimizer, experts, [G.reshape(2, 3, 4) for G in gradients])[-1]
    for i in range(2):
        q = parameter(W.reshape(2, 3, 4)[i])
        alone = weights(optim.SOAP([q], 0.1, eps=0.05), q, [G.reshape(2, 3, 4)[i] for G in gradients])[-1]
        torch.testing.assert_close(found[i], alone, rtol=0, atol=AMPLIFIED * U64 * 5 / 0.05)
    assert optimizer.state[experts]["Q_R"].shape == (2, 4, 4)


@given(st.integers(0, 29))
def test_s24_a_relabelled_basis_takes_the_same_step_if_its_moments_are_relabelled_too(seed):
    generator = np.random.default_rng(seed)
    W, gradients = problem(4, 5, steps=3, seed=seed)
    p = parameter(W)
    optimizer = optim.SOAP([p], 0.1, eps=1e-2)
    weights(optimizer, p, gradients[:2])
    rule, kept = optimizer.rule(optimizer.param_groups[0]), optimizer.state[p]
    state = SOAPState(**{**kept, **{name: kept[name].reshape(1, 4, 5) for name in ("M", "V")}})
    X, G = p.detach().unsqueeze(0), torch.tensor(gradients[2]).unsqueeze(0)
    a, b = (torch.tensor(generator.permutation(k)) for k in (4, 5))
    s, t = (torch.tensor(generator.choice([-1.0, 1.0], k)) for k in (4, 5))
    relabelled = state._replace(
        Q_L=state.Q_L[:, :, a] * s,
        Q_R=state.Q_R[:, :, b] * t,
        M=state.M[:, a][:, :, b] * s.unsqueeze(1) * t,
        V=state.V[:, a][:, :, b],
    )
    there = rule.updated(X, G, state)[0]
    torch.testing.assert_close(rule.updated(X, G, relabelled)[0], there, rtol=0, atol=bounds.svd(4, 5, 64 * U64))
    if not (torch.equal(a, torch.arange(4)) and torch.equal(b, torch.arange(5))):
        assert distance(rule.updated(X, G, relabelled._replace(V=state.V))[0], there.numpy()) > 1e-4


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("when", [0, 2])
@every_choice
def test_s17_a_gradient_that_is_not_finite_changes_nothing_anywhere(bad, when, choice):
    (W, gradients), (X, others) = problem(3, 3), problem(4, 2, seed=1)

    def start():
        parameters = [parameter(W), parameter(X)]
        return parameters, optim.SOAP(parameters, 0.1, eps=0.05, **choice)

    (clean, reference), (broken, optimizer) = start(), start()
    for t, pair in enumerate(zip(gradients, others, strict=True)):
        if t == when:
            poison = pair[1].copy()
            poison[1, 1] = bad
            before = snapshot(optimizer)
            feed(optimizer, broken, [pair[0], poison])
            assert same(snapshot(optimizer), before)
            assert not optimizer.report.taken
        feed(optimizer, broken, pair)
        feed(reference, clean, pair)
    assert same(snapshot(optimizer), snapshot(reference))


def test_a_gradient_whose_square_overflows_is_refused_by_name_and_changes_nothing():
    W, gradients = problem(3, 3)
    p = parameter(W, torch.float32)
    optimizer = optim.SOAP([("layer.weight", p)], 0.1, eps=0.05)
    feed(optimizer, [p], gradients[:1])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"layer\.weight: the step leaves the range of torch\.float32"):
        feed(optimizer, [p], [1e25 * gradients[1]])
    assert same(snapshot(optimizer), before)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_a_scaled_problem_with_a_scaled_eps_takes_the_same_steps(scale):
    """Adam's own invariance, as far as squares stay within float64."""
    W, gradients = problem(4, 4)
    p, q = parameter(W), parameter(W)
    here = weights(optim.SOAP([p], 0.1, eps=0.05), p, gradients)
    there = weights(optim.SOAP([q], 0.1, eps=0.05 * scale), q, [scale * G for G in gradients])
    atol = AMPLIFIED * U64 * 5 / 0.05
    torch.testing.assert_close(here[-1], there[-1], rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("second_moment", ["unchanged", "permuted", "rotated"])
@pytest.mark.parametrize("kl", [False, True])
@given(seed=st.integers(0, 9))
def test_rotations_and_transposition_of_the_problem_do_not_matter(second_moment, kl, seed):
    W, gradients = problem(4, 4, steps=4, seed=seed)
    P, Q = orthonormal(4, 4, seed), orthonormal(4, 4, seed + 1)

    def last(W, gradients):
        p = parameter(W)
        return weights(optim.SOAP([p], 0.1, eps=0.05, kl=kl, second_moment=second_moment), p, gradients)[-1].numpy()

    there = last(W, gradients)
    atol = AMPLIFIED * U64 * max(np.linalg.norm(G) for G in gradients) / 0.05
    np.testing.assert_allclose(last(P @ W @ Q, [P @ G @ Q for G in gradients]), P @ there @ Q, rtol=0, atol=atol)
    np.testing.assert_allclose(last(W.T, [G.T for G in gradients]), there.T, rtol=0, atol=atol)


@pytest.mark.parametrize("limit", [0.05, 0.3, 1e3])
def test_the_limit_holds_for_every_matrix_alone_and_keeps_the_direction(limit):
    W, gradients = problem(5, 4)
    p, q = parameter(W), parameter(W)
    free, held = optim.SOAP([p], 1.0, eps=1e-2), optim.SOAP([q], 1.0, eps=1e-2, max_rms=limit)
    for G in gradients:
        p.data.copy_(q.data)
        before = q.detach().clone()
        feed(free, [p], [G])
        feed(held, [q], [G])
        change = p.detach() - before
        expected = change * min(1.0, limit / (float(change.square().mean().sqrt()) + 1e-7))
        torch.testing.assert_close(q.detach() - before, expected, rtol=0, atol=64 * U64 * float(before.abs().max() + 1))


# --- how it is used ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@every_choice
def test_s27_a_resumed_run_is_the_straight_run_bit_for_bit(choice, dtype, frequency):
    W, gradients = problem(3, 4, steps=12)
    choice = {**choice, "frequency": frequency}
    p = parameter(W, dtype)
    optimizer = optim.SOAP([p], 0.05, eps=0.05, **choice)
    weights(optimizer, p, gradients[:4])
    q = torch.nn.Parameter(p.detach().clone())
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = optim.SOAP([q], 0.9)  # other settings, and no state yet
    resumed.load_state_dict(saved)
    assert same(snapshot(resumed), snapshot(optimizer))
    weights(optimizer, p, gradients[4:])
    weights(resumed, q, gradients[4:])
    assert same(snapshot(resumed), snapshot(optimizer))


@pytest.mark.parametrize(
    ("choice", "log"),
    [
        ({"frequency": 3}, [1, 3, 6, 9, 12]),
        ({"frequency": 1}, list(range(1, 13))),
        ({"frequency": 3, "first_step": "skip"}, [1, 4, 7, 10]),  # one gradient was not a step
        ({"frequency": 3, "first_step": "skip", "order": "lagged"}, [1, 4, 7, 10]),
        ({"frequency": 3, "eigenbasis": "iteration"}, [1, 3, 6, 9, 12]),
    ],
)
def test_s27_bases_are_made_anew_at_multiples_of_the_frequency(choice, log):
    W, gradients = problem(3, 4, steps=12)
    p = parameter(W)
    optimizer, found = optim.SOAP([p], 0.02, eps=1e-2, **choice), []
    old = torch.eye(3, dtype=torch.float64)
    for t, G in enumerate(gradients, 1):
        feed(optimizer, [p], [G])
        new = optimizer.state[p]["Q_L"][0].clone()
        if not torch.equal(new, old):
            found.append(t)
        old = new
    assert found == log


def test_the_first_basis_never_comes_from_an_iteration(monkeypatch):
    calls = []
    true = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: calls.append(len(A)) or true(A))
    W, gradients = problem(3, 4, steps=4)
    p = parameter(W)
    weights(optim.SOAP([p], 0.1, eps=0.05, eigenbasis="iteration"), p, gradients)
    assert len(calls) == 2  # L and R, once


def test_s31_a_tensor_as_learning_rate_gives_the_same_bits():
    W, gradients = problem(3, 4)
    for dtype in (torch.float32, torch.float64):
        p, q = parameter(W, dtype), parameter(W, dtype)
        number, tensor = optim.SOAP([p], 0.1, eps=0.05), optim.SOAP([q], torch.tensor(0.1), eps=0.05)
        for a, b in zip(weights(number, p, gradients), weights(tensor, q, gradients), strict=True):
            assert torch.equal(a, b)


@every_choice
def test_s31_no_learning_rate_leaves_the_weight_and_moves_the_rest(choice):
    W, gradients = problem(3, 3)
    p = parameter(W)
    optimizer = optim.SOAP([p], 0.0, eps=0.05, **choice)
    found = weights(optimizer, p, gradients[:2])
    assert all(np.array_equal(after.numpy(), W) for after in found)
    assert optimizer.state[p]["M"].any()
    assert optimizer.state[p]["seen"] == 2
    optimizer.param_groups[0]["lr"] = 0.1
    assert not np.array_equal(weights(optimizer, p, gradients[2:3])[0].numpy(), W)


def test_s18_accumulated_gradients_are_one_step():
    W, gradients = problem(3, 3, steps=4)
    p, q = parameter(W), parameter(W)
    accumulated = optim.SOAP([p], 0.1, eps=0.05)
    (p * sum(map(torch.tensor, gradients))).sum().backward()
    accumulated.step()
    for G in gradients:
        (q * torch.tensor(G)).sum().backward()
    whole = optim.SOAP([q], 0.1, eps=0.05)
    whole.step()
    assert whole.state[q]["seen"] == 1
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=AMPLIFIED * U64 * 8 / 0.05)


def test_s32_the_closure_is_called_once_with_gradients_and_complex_is_refused():
    p = parameter(np.ones((2, 2)))
    optimizer, calls = optim.SOAP([p], 0.1), []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 4.0
    assert calls == [True]
    with pytest.raises(ValueError, match="complex"):
        optim.SOAP([("odd", torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))], 0.1)


@pytest.mark.parametrize(("shape", "numbers"), [((3, 4), 2 * 12 + 2 * 9 + 2 * 16 + 3 + 4 + 4), ((1, 1), 2 + 4 + 2 + 4)])
def test_the_memory_of_the_state_is_as_documented(shape, numbers):
    p = parameter(np.ones(shape), torch.bfloat16)
    optimizer = optim.SOAP([p], 0.1)
    assert optimizer.state_bytes() == 4 * numbers
    feed(optimizer, [p], [np.ones(shape)])
    held = [value for value in optimizer.state[p].values() if torch.is_tensor(value)]
    assert sum(value.numel() * value.itemsize for value in held) == 4 * numbers


def test_a_bfloat16_weight_is_stepped_in_float32_and_rounded_once():
    W, gradients = problem(4, 4)
    p = parameter(W, torch.bfloat16)
    q = torch.nn.Parameter(p.detach().float())
    gradients = [torch.tensor(G).bfloat16() for G in gradients]
    low, high = optim.SOAP([p], 0.1, eps=0.05), optim.SOAP([q], 0.1, eps=0.05)
    for G in gradients:
        feed(low, [p], [G])
        feed(high, [q], [G])
        assert torch.equal(p.detach(), q.detach().bfloat16())
        q.data.copy_(p.data)


def test_copies_go_on_alike():
    W, gradients = problem(3, 4)
    p = parameter(W)
    optimizer = optim.SOAP([p], 0.1, eps=0.05, arithmetic=Rounded("tf32"))
    weights(optimizer, p, gradients[:2])
    twin = copy.deepcopy(optimizer)
    (q,) = twin.param_groups[0]["params"]
    assert torch.equal(weights(optimizer, p, gradients[2:])[-1], weights(twin, q, gradients[2:])[-1])


def test_groups_have_settings_of_their_own():
    W, gradients = problem(3, 3)
    p, q, alone = parameter(W), parameter(W), parameter(W)
    optimizer = optim.SOAP([{"params": [p]}, {"params": [q], "kl": True, "frequency": 2}], 0.1, eps=0.05)
    for G in gradients:
        feed(optimizer, [p, q], [G, G])
    expected = weights(optim.SOAP([alone], 0.1, eps=0.05, kl=True, frequency=2), alone, gradients)[-1]
    assert torch.equal(q.detach(), expected)
    assert not torch.equal(p.detach(), q.detach())


def test_products_in_another_arithmetic_reach_the_step():
    W, gradients = problem(6, 6)
    steps = []
    for arithmetic in (Rounded("tf32"), Rounded("bf16"), None):
        p = parameter(W, torch.float32)
        given = {} if arithmetic is None else {"arithmetic": arithmetic}
        steps.append(weights(optim.SOAP([p], 1.0, eps=0.05, **given), p, gradients[:2])[-1].double())
    tf32, bf16 = (float((step - steps[2]).norm() / (steps[2] - torch.tensor(W)).norm()) for step in steps[:2])
    assert 1e-5 < tf32 < bf16


# --- solvers that fail ------------------------------------------------------------------------------------------------


class Failing:
    """A stand-in for torch's eigensolver that fails in the dtypes given, for the matrices of the size given."""

    def __init__(self, how, size, dtypes):
        self.how, self.size, self.dtypes, self.true, self.wide = how, size, dtypes, torch.linalg.eigh, 0

    def __call__(self, A):
        self.wide += A.dtype == torch.float64
        if A.shape[-1] != self.size or A.dtype not in self.dtypes:
            return self.true(A)
        if self.how == "raises":
            raise torch.linalg.LinAlgError("the input matrix is ill-conditioned or has too many repeated eigenvalues")
        values, Q = self.true(A)
        return values, Q * {"nan": math.nan, "stretched": 1.01}[self.how]


@pytest.mark.parametrize("how", ["raises", "nan", "stretched"])
def test_s25_a_failing_solver_falls_back_to_float64_with_a_warning(monkeypatch, how):
    W, gradients = problem(3, 4)
    p, q = parameter(W, torch.float32), parameter(W, torch.float32)
    optimizer, honest = (optim.SOAP([("layer.weight", r)], 0.1, eps=0.05, first_step="skip") for r in (p, q))
    expected = weights(honest, q, gradients)[-1]
    solver = Failing(how, 4, [torch.float32])
    monkeypatch.setattr(torch.linalg, "eigh", solver)
    with pytest.warns(EigensolverWarning, match="torch.float32 for 1 of 2 factors: 1 solved in float64, 0 kept"):
        found = weights(optimizer, p, gradients)[-1]
    assert solver.wide == 5  # one retry a step
    assert optimizer.troubles() == {"layer.weight": (5, 0)}
    assert optimizer.state[p]["retried"].tolist() == [[0.0, 5.0]]
    assert optimizer.state[p]["Q_R"].dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=AMPLIFIED * U32 * 5)


@pytest.mark.parametrize("how", ["raises", "nan", "stretched"])
@pytest.mark.parametrize("second_moment", ["unchanged", "rotated"])
def test_s25_without_any_solver_the_previous_basis_stays_with_a_warning(monkeypatch, how, second_moment):
    W, gradients = problem(3, 4)
    p = parameter(W, torch.float32)
    optimizer = optim.SOAP([p], 0.1, eps=0.05, second_moment=second_moment)
    weights(optimizer, p, gradients[:2])
    before = optimizer.state[p]["Q_R"].clone()
    monkeypatch.setattr(torch.linalg, "eigh", Failing(how, 4, [torch.float32, torch.float64]))
    with pytest.warns(EigensolverWarning, match="0 solved in float64, 1 kept their previous basis"):
        after = weights(optimizer, p, gradients[2:3])[0]
    assert torch.equal(optimizer.state[p]["Q_R"], before)
    assert bool(after.isfinite().all())
    assert optimizer.troubles() == {"parameter 0 of group 0": (0, 1)}
    assert optimizer.report.taken


def test_a_run_without_failures_is_silent():
    W, gradients = problem(24, 8, steps=10)
    p = parameter(W, torch.float32)
    optimizer = optim.REKLS([p], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(bool(after.isfinite().all()) for after in weights(optimizer, p, gradients))
    assert optimizer.troubles() == {}


# --- refuses ----------------------------------------------------------------------------------------------------------


def make(shape=(2, 2), **settings):
    return optim.SOAP([("block.weight", torch.nn.Parameter(torch.ones(shape)))], **{"lr": 0.1, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "SOAP: lr is -0.1"),
        ({"lr": math.nan}, "SOAP: lr is nan"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\)"),
        ({"betas": (0.9, 1.0)}, "SOAP: beta2 is 1.0"),
        ({"betas": (-0.1, 0.9)}, "SOAP: beta1 is -0.1"),
        ({"betas": [0.9]}, r"SOAP: betas are \[0.9\], needed two numbers"),
        ({"shampoo_beta": 1.0}, "SOAP: shampoo_beta is 1.0"),
        ({"eps": 0.0}, "SOAP: eps is 0.0"),
        ({"weight_decay": math.inf}, "SOAP: weight_decay is inf"),
        ({"start": -1.0}, "SOAP: start is -1.0"),
        ({"frequency": 0}, "SOAP: frequency is 0"),
        ({"power_steps": True}, "SOAP: power_steps is True, needed an integer"),
        ({"max_rms": 0.0}, "SOAP: max_rms is 0.0"),
        ({"decay": "decouple"}, "unknown decay 'decouple': did you mean 'decoupled'"),
        ({"second_moment": "rotate"}, "unknown second moment 'rotate': did you mean 'rotated'"),
        ({"eigenbasis": "qr"}, "unknown eigenbasis 'qr'"),
        ({"first_step": "now"}, "unknown first step 'now'"),
        ({"order": "lagged"}, "needed 'skip': there is no basis yet"),
        ({"shape": ()}, r"block.weight has shape \(\)"),
        ({"shape": (3,)}, r"block.weight has shape \(3,\)"),
        ({"shape": (2, 3, 4)}, r"block.weight has shape \(2, 3, 4\) and no view"),
        ({"maximize": True}, "SOAP: maximize is True"),
        ({"preconditioner": 1}, "SOAP has no option 'preconditioner'"),
    ],
)
def test_s22_bad_input_is_refused_when_the_optimizer_is_made(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_group_has_no_arithmetic_of_its_own_and_a_checkpoint_knows_which_it_was():
    p = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="a group has 'arithmetic', needed as an argument of SOAP"):
        optim.SOAP([{"params": [p], "arithmetic": Exact()}], 0.1)
    saved = optim.SOAP([p], 0.1, arithmetic=Rounded("bf16")).state_dict()
    with pytest.raises(ValueError, match=r"made with arithmetic Rounded\(operands='bf16'.*, needed Exact"):
        optim.SOAP([p], 0.1).load_state_dict(saved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": 0.9}, "SOAP: betas are 0.9, needed two numbers"),
        ({"betas": None}, "SOAP: betas are None, needed two numbers"),
        ({"kl": "false"}, "SOAP: kl is 'false', needed True or False"),
        ({"correct_bias": 1}, "SOAP: correct_bias is 1, needed True or False"),
        ({"kll": True}, "'kll': did you mean 'kl'"),
    ],
)
def test_settings_of_a_group_are_checked_alike(settings, message):
    with pytest.raises(ValueError, match=message):
        optim.SOAP([{"params": [torch.nn.Parameter(torch.ones(2, 2))], **settings}], 0.1)


def test_a_setting_that_was_spoilt_later_is_refused_and_changes_nothing():
    W, gradients = problem(2, 2)
    p = parameter(W)
    optimizer = optim.SOAP([p], 0.1)
    before = snapshot(optimizer)
    for name, value in (("eps", -1.0), ("frequency", 0), ("second_moment", "rotate")):
        held = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"{value}"):
            feed(optimizer, [p], gradients[:1])
        optimizer.param_groups[0][name] = held
    assert same(snapshot(optimizer), before)


def test_the_rule_has_the_names_and_the_defaults_of_the_oracle():
    ours, theirs = asdict(Rule(0.1)), asdict(oracle.optimizers.SOAP(0.1))
    assert {name: ours[name] for name in theirs} == theirs
    assert set(ours) - set(theirs) == {"start", "arithmetic"}
    p = parameter(np.ones((1, 1)))
    group = optim.SOAP([p], 0.1).param_groups[0]
    assert {name: group[name] for name in theirs} == theirs
    assert replace(Rule(0.1), lr=0.2) == Rule(0.2)
