"""The study of optimizers descends as the loop written out by hand does, and logs what it did."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from muon_lab import optim, polar, studies
from muon_lab.optim import step
from muon_lab.oracle.polar import polar as decomposed
from muon_lab.problems import text
from muon_lab.studies import convergence, descent, training
from muon_lab.studies.running import run_case
from muon_lab.studies.study import LeftOut

STUDY = studies.get("convergence")
POINT = {name: values[0] for name, values in STUDY.defaults.items()} | {"problem": "quadratic", "updates": 20}

#: What differs from run to run.
TIMES = ("seconds", "step_ratio")


def settled(**point):
    (case,) = STUDY.settle(POINT | point, None)
    return case


def row(**point):
    return run_case("convergence", settled(**point))


def without_times(found):
    return {name: value for name, value in found.items() if name not in TIMES}


# --- the problems -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", convergence.SHAPES)
def test_the_shapes_that_are_counted_are_those_of_the_problem(problem):
    found = descent.PROBLEMS[problem](0)
    hidden = {tuple(weight.shape) for group in routed(found).groups("matrix") for _, weight in group["params"]}
    assert hidden == set(convergence.SHAPES[problem])
    assert len(routed(found).groups("matrix")[0]["params"]) == len(convergence.SHAPES[problem])
    if problem in convergence.BYTES:
        numbers = sum(weight.numel() for weight in found.network.parameters())
        assert 6.0 * numbers * convergence.BYTES[problem] == convergence.GRADIENT[problem]
        inputs, _ = next(found.batches)
        assert inputs.numel() == convergence.BYTES[problem]
    assert set(descent.PROBLEMS) == set(convergence.SHAPES)


def routed(problem):
    return optim.routing.split(problem.network, views=problem.views, show=None)


def test_the_quadratic_is_its_formula_and_its_gradient_vanishes_at_the_optimum():
    network = descent.Quadratic(seed=3)
    W = torch.tensor(np.random.default_rng(0).standard_normal(network.W.shape), dtype=torch.float32)
    network.W.data.copy_(W)
    A, B, T, W = (X.double().numpy() for X in (network.A, network.B, network.T, W))
    expected = np.trace((W - T).T @ A @ (W - T) @ B) / np.trace(T.T @ A @ T @ B)
    assert network.loss().item() == pytest.approx(expected, rel=1e3 * 2.0**-24)  # sums of 3,072 rounded terms
    assert np.linalg.cond(A) == pytest.approx(100, rel=1e-3)
    network.W.data.copy_(network.T)
    network.loss().backward()
    assert not network.W.grad.any()


def test_the_factorization_has_a_planted_optimum():
    network = descent.Factorization(seed=3)
    left, s, right = np.linalg.svd(network.M.double().numpy())
    assert s[descent.RANK] < 1e-6
    assert s[0] / s[descent.RANK - 1] == pytest.approx(10, rel=1e-5)
    root = np.sqrt(s[: descent.RANK])
    network.X.data.copy_(torch.tensor(left[:, : descent.RANK] * root))
    network.Y.data.copy_(torch.tensor(right[: descent.RANK].T * root))
    assert network.loss().item() < (10 * 2.0**-24) ** 2 * descent.RANK * 100


def test_a_seed_draws_another_problem():
    assert not torch.equal(descent.Quadratic(0).T, descent.Quadratic(1).T)
    assert torch.equal(descent.Quadratic(1).T, descent.Quadratic(1).T)


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_the_loop_is_the_one_written_out_on_a_matrix_problem():
    """Muon with the exact direction, from its formula: an average, its polar factor, 0.2 √max(m, n)."""
    found = row(optimizer="muon", method="svd", lr=0.02)
    network, M = descent.Quadratic(0), torch.zeros(descent.ROWS, descent.COLS)
    curve = []
    for count in range(1, 21):
        network.W.grad = None
        network.loss().backward()
        M = 0.95 * M + 0.05 * network.W.grad
        U = torch.tensor(decomposed(M.double().numpy()).U)
        network.W.data -= (0.02 * 0.2 * math.sqrt(descent.COLS) * U).float()
        if count % 2 == 0:
            curve.append(network.loss().item())
    losses = [found[name] for name in (*convergence.CURVE, "loss")]
    assert losses == pytest.approx(curve, rel=1e-4)  # twenty steps whose small singular values differ in rounding
    assert found["loss_0"] == 1.0
    assert found["best_loss"] == min(losses)


def test_the_gpt_is_trained_as_by_hand_with_adamw_on_everything():
    """With the rate and the decay of what is no hidden matrix, AdamW of the hidden ones makes one AdamW of all."""
    found = row(problem="gpt_small", optimizer="adamw", lr=descent.OTHER["lr"], updates=10, seed=2)
    generator = torch.Generator().manual_seed(2)
    network = descent.models.GPT(descent.SMALL, generator)
    optimizer = torch.optim.AdamW(network.parameters(), **descent.OTHER)
    corpus = text.corpus()
    batches = text.batches(corpus.train, 24, 64, generator)
    losses = []
    for _, batch in zip(range(10), batches, strict=False):
        optimizer.zero_grad()
        loss = network.loss(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found["training_loss"] == losses[-1]
    assert found["loss"] == training.validation(network, corpus).item()


@pytest.mark.parametrize("optimizer", convergence.OPTIMIZERS)
def test_every_optimizer_descends_and_the_row_repeats_but_for_its_times(optimizer):
    found = row(optimizer=optimizer, lr=0.01)
    assert (found["outcome"], found["note"]) == ("ok", None)
    assert found["loss"] < 0.95 * found["loss_0"]
    assert found["step_ratio"] > 0
    assert without_times(row(optimizer=optimizer, lr=0.01)) == without_times(found)


def test_weights_and_batches_do_not_depend_on_the_optimizer():
    starts = {row(problem="factorization", optimizer=optimizer)["loss_0"] for optimizer in convergence.OPTIMIZERS}
    assert len(starts) == 1


def test_a_doubled_direction_at_half_the_rate_is_the_same_run():
    """Bit for bit: a global scale is a learning rate."""
    plain = row(optimizer="muon", method="svd", lr=0.02)
    doubled = row(optimizer="muon", method="svd", lr=0.01, planted="scale", size=1.0)
    for name in ("loss", "training_loss", "update_rms", "alignment", *convergence.CURVE):
        assert doubled[name] == plain[name]
    assert doubled["relative"] == pytest.approx(1.0, abs=100 * 2.0**-24)
    assert row(optimizer="muon", method="svd", lr=0.01)["loss"] != plain["loss"]


# --- what is logged ---------------------------------------------------------------------------------------------------


def test_the_update_of_an_exact_muon_has_the_size_that_its_scale_says():
    found = row(optimizer="muon", method="svd", lr=0.02)
    rounding = 2.0**-24 * descent.OPTIMUM * 10 / found["update_rms"]  # of weights of about that size, relative
    assert found["update_rms"] == pytest.approx(0.2 * 0.02 * math.sqrt(64 * 48 / (64 * 48)), rel=rounding)
    assert found["update_spectral"] == pytest.approx(0.2 * 0.02 * math.sqrt(64), rel=100 * rounding)
    assert found["alignment"] == pytest.approx(1.0, abs=rounding)
    assert found["relative"] < 100 * 2.0**-24  # a roundoff of the candidate, enlarged where singular values are small


@pytest.mark.parametrize("kind", ["radial", "turn", "scale"])
def test_a_planted_error_is_read_back(kind):
    found = row(optimizer="muon", method="svd", planted=kind, size=0.5)
    assert found["relative"] == pytest.approx(0.5, abs=100 * 2.0**-24)
    assert (found["orthogonality"] < 100 * 2.0**-24) == (kind == "turn")


def test_the_error_of_a_schedule_is_logged_and_others_have_none():
    three, five = (row(optimizer="muon", method="simple", steps=steps)["relative"] for steps in (3, 5))
    assert three > five > 0.05
    assert row(optimizer="mop")["relative"] < 1e-6
    assert row(optimizer="soap")["relative"] is None
    assert row(optimizer="soap")["alignment"] < 0.99


def test_a_look_reads_a_planted_change():
    G = torch.tensor(np.random.default_rng(1).standard_normal((4, 6)))
    U = torch.tensor(decomposed(G.numpy()).U)
    W = torch.zeros(4, 6, dtype=torch.float64)
    found = descent.look([W], [W - 0.5 * U], [G], [])
    assert found.rms == pytest.approx(0.5 * math.sqrt(4 / 24), rel=1e-14)
    assert found.spectral == pytest.approx(0.5, rel=1e-14)
    assert found.alignment == pytest.approx(1.0, abs=1e-14)
    assert descent.look([W], [W + 0.5 * U], [G], []).alignment == pytest.approx(-1.0, abs=1e-14)
    assert found.relative is None


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_rate_that_is_too_large_diverges_with_its_losses():
    found = row(optimizer="muon", lr=10.0)
    assert found["outcome"] == "diverged"
    assert found["loss"] > found["loss_0"]
    assert "the loss went from 1" in found["note"]


@pytest.mark.parametrize("entry", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_ends_the_run_at_its_step_and_changes_nothing(entry):
    class Broken(descent.Quadratic):
        seen = 0

        def loss(self):
            self.seen += 1
            return super().loss() * (entry if self.seen == 15 else 1.0)

    network = Broken(0)
    problem = descent.Problem(network, descent.repeat(()), lambda: torch.tensor(1.0), {"*": optim.View()})
    run = descent.descend(problem, partial(optim.Muon, lr=0.01), 20)
    assert run.failed == 15
    assert len(run.losses) == 14
    assert len(run.curve) == 7
    assert network.W.isfinite().all()
    whole = descent.descend(descent.planted_problem(descent.Quadratic(0)), partial(optim.Muon, lr=0.01), 20)
    assert whole.failed is None


def test_a_run_that_fails_is_a_row_with_its_step():
    found = row(optimizer="mop", lr=900.0, updates=100)
    assert found["outcome"] in ("nonfinite", "diverged")
    assert found["outcome"] == "diverged" or found["failed_step"] >= 1
    assert found["loss"] is None or found["loss"] > 1


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_what_does_not_matter_is_none_so_that_a_product_has_no_double():
    assert settled(optimizer="soap", planted="turn", size=0.5) == settled(optimizer="soap", method="svd", steps=9)
    assert settled(optimizer="muon", size=0.5, persistence="fixed") == settled(optimizer="muon")
    scaled = {"optimizer": "muon", "planted": "scale", "size": 0.5}
    assert settled(**scaled, persistence="fixed") == settled(**scaled)
    assert settled(optimizer="muon", method="svd", steps=3) == settled(optimizer="muon", method="svd", steps=5)
    assert settled(optimizer="muon", planted="turn", size=0.5) != settled(optimizer="muon", planted="radial", size=0.5)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"problem": "cubic"}, "unknown problem 'cubic'"),
        ({"optimizer": "muom"}, "did you mean 'muon'"),
        ({"method": "quintik"}, "did you mean 'quintic'"),
        ({"scale": "spectra"}, "did you mean 'spectral'"),
        ({"planted": "twist"}, "unknown planted 'twist'"),
        ({"persistence": "often"}, "unknown persistence 'often'"),
        ({"lr": 0.0}, "lr must lie above 0"),
        ({"lr": float("nan")}, "lr must lie above 0"),
        ({"updates": 9}, "updates must be at least 10, not 9"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
    ],
)
def test_wrong_values_are_refused(point, words):
    with pytest.raises(ValueError, match=words):
        settled(**point)


def test_sizes_that_a_kind_cannot_have_are_left_out():
    for kind, size in (("turn", 2.0), ("radial", -0.1), ("scale", -1.0)):
        with pytest.raises(LeftOut, match="size must lie from"):
            settled(optimizer="muon", planted=kind, size=size)


def test_the_scales_are_those_of_the_step():
    assert convergence.SCALES == step.SCALES


def test_flops_count_products_and_decompositions():
    """By hand, for 2×3: a pair of products with both bases is 2·6·5 = 60, the cubes are 8 + 27 = 35."""
    assert convergence.step_flops({"optimizer": "adamw"}, 2, 3) == 0
    assert convergence.step_flops({"optimizer": "rekls"}, 2, 3) == 6 * 60 + 9 * 35
    assert convergence.step_flops({"optimizer": "soap"}, 2, 3) == pytest.approx(3 * 60 + (2 * 60 + 14 / 3 * 35) / 10)
    plain = {"optimizer": "muon", "method": "quintic", "steps": 5}
    assert convergence.step_flops(plain, 2, 3) == 5 * (4 * 4 * 3 + 2 * 8)
    exact = {"optimizer": "muon", "method": "svd", "steps": None}
    assert convergence.step_flops(exact, 2, 3) == convergence.step_flops({"optimizer": "mop"}, 2, 3) == 6 * 12 + 20 * 8


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="needed at least 10"):
        descent.descend(descent.PROBLEMS["quadratic"](0), partial(optim.Muon, lr=0.1), 9)


def test_a_watched_direction_is_the_direction():
    C = torch.eye(3)[None]
    assert torch.equal(descent.Watched(polar.svd())(C), polar.svd()(C))
