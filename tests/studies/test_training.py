"""Training in emulated products: the recorded run when nothing is rounded, the same data for all, losses that agree."""

import math
from dataclasses import replace

import pytest
import torch

from muon_lab.arithmetic import linear
from muon_lab.arithmetic.linear import Products
from muon_lab.problems import models, streams
from muon_lab.studies import training
from muon_lab.studies.training import Run, compare, train

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
MODEL = models.GPTConfig(width=32, depth=1, heads=2, context=32)
STEPS = 20
SHORT = 3
#: What a cosine in float64 is off by: two norms and a quotient.
TWO_NORMS = 4 * torch.finfo(torch.float64).eps


def tiny(products, steps=STEPS, **settings):
    """Train a model so small that what checks shapes takes most of the time."""
    return train(products, steps=steps, model=MODEL, batch=4, **settings)


@pytest.fixture(scope="module")
def exact():
    return tiny(None, probe=(0, STEPS))


# Reduces to


def test_the_exact_arm_is_the_run_whose_gradients_are_recorded(exact):
    recording = streams.Recording(MODEL, batch=4, steps=(1, STEPS), layers=("*.up",), omit=())
    losses = streams.recorded(recording, cache=None).provenance["losses"]
    assert {step: exact.losses[int(step) - 1] for step in losses} == losses


def test_products_without_formats_train_like_exact_ones_bit_for_bit(exact):
    assert tiny(Products(), probe=(0, STEPS)) == exact


def test_exact_gradients_agree_with_themselves(exact):
    for agreements in exact.gradients.values():
        assert agreements.exact == pytest.approx((1.0, 1.0), rel=TWO_NORMS)


def test_bfloat16_gradients_agree_with_themselves_and_exact_ones_with_neither():
    half = tiny(linear.BF16, steps=1, probe=(0,)).gradients[0]
    exact = tiny(None, steps=1, probe=(0,)).gradients[0]
    assert half.bf16 == pytest.approx((1.0, 1.0), rel=TWO_NORMS)
    assert half.exact.cosine == pytest.approx(exact.bf16.cosine, rel=TWO_NORMS)  # an angle has two sides
    assert half.exact.cosine**2 == pytest.approx(half.exact.gain * exact.bf16.gain, rel=4 * TWO_NORMS)
    assert 1e-7 < 1 - half.exact.cosine < 1e-4


# Deterministic, and the same for all


@pytest.mark.slow
def test_runs_repeat_bit_for_bit_and_depend_on_the_seed():
    first, again, other = (tiny(linear.uniform(E4M3), steps=SHORT, probe=(0, SHORT), seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.losses[0] != other.losses[0]


def test_probes_do_not_disturb_the_training(exact):
    assert replace(exact, gradients={}) == tiny(None)
    assert [*exact.gradients] == [0, STEPS]


def test_arms_start_from_the_same_weights_and_the_same_batch(exact):
    arm = tiny(Products(gradients="mxfp4_e2m1"), steps=SHORT)
    assert arm.losses[0] == exact.losses[0]  # forward products are exact, and the first loss is before any update
    assert arm.losses[1] != exact.losses[1]


# What low precision does


@pytest.mark.slow
def test_mxfp8_trains_like_float32(exact):
    e4m3 = tiny(linear.uniform(E4M3), probe=[STEPS])
    assert e4m3.losses != exact.losses
    learned = exact.losses[0] - exact.validation
    assert learned > 1
    # every product is off by some per cent, in random directions: far less of what is learned is lost
    assert abs(compare(e4m3, exact).loss_gap) < learned / 50
    assert abs(compare(e4m3, exact).training_gap) < learned / 50
    assert 0.98 < e4m3.gradients[STEPS].exact.cosine < 1


def test_gradients_in_e5m2_are_noisier_than_in_e4m3(exact):
    """One fraction bit less is twice the error, and 1 - cosine goes with its square."""
    lost = {}
    for format in (E4M3, E5M2):
        (agreements,) = tiny(Products(gradients=format), steps=1, probe=[0]).gradients.values()
        lost[format] = 1 - agreements.exact.cosine
        assert agreements.exact.gain == pytest.approx(1, abs=0.01)  # noise, no bias
    assert 2 < lost[E5M2] / lost[E4M3] < 8  # 4, with a factor of 2 for saturation, subnormals and the sample


def test_gradients_without_scales_vanish():
    """Negative control: a mean over 128 tokens leaves dY far below the smallest number of plain FP8."""
    (agreements,) = tiny(Products(gradients="fp8_e4m3"), steps=1, probe=[0]).gradients.values()
    assert abs(agreements.exact.gain) < 0.5


def test_the_first_step_that_is_not_finite_is_named_and_updates_nothing():
    for products in (None, linear.uniform(E4M3)):
        run = tiny(products, steps=5, lr=1e30, probe=(0, 5))
        assert run.nonfinite == 2
        assert len(run.losses) == 1
        assert run.validation is None
        assert [*run.gradients] == [0]
        assert compare(run, run) == (None, None)


# The measures


def test_agreement_reads_planted_bias_and_planted_noise():
    g, noise = torch.randn(2, 10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise -= g * torch.dot(noise, g) / torch.dot(g, g)
    noise *= 0.1 * g.norm() / noise.norm()
    rounding = 20 * torch.finfo(torch.float64).eps
    assert training.agree(0.75 * g, g) == pytest.approx((1.0, 0.75), rel=rounding)
    assert training.agree(g + noise, g) == pytest.approx((1 / math.hypot(1, 0.1), 1.0), rel=rounding)
    assert training.agree(-g, g) == pytest.approx((-1.0, -1.0), rel=rounding)
    assert training.agree(g * math.nan, g) == (None, None)


def test_the_gradient_is_that_of_all_hidden_matrices_and_leaves_the_network_alone():
    network = models.GPT(MODEL, torch.Generator().manual_seed(0))
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(7))
    batch = (tokens[:, :-1], tokens[:, 1:])
    g = training.gradient(network, batch)
    assert all(weight.grad is None for weight in network.parameters())
    network.loss(*batch).backward()
    parts = g.split([weight.numel() for weight in models.matrices(network).values()])
    for weight, part in zip(models.matrices(network).values(), parts, strict=True):
        assert torch.equal(weight.grad.flatten(), part)


def test_the_training_gap_is_over_the_last_tenth():
    arm = Run(tuple(float(i) for i in range(20)), 1.0, None, {})
    assert compare(arm, replace(arm, losses=(0.0,) * 20)) == (0.0, 18.5)
    assert compare(replace(arm, validation=None), arm) == (None, 0.0)


# Refuses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be"),
        ({"steps": 3, "lr": -1.0}, "lr must be"),
        ({"steps": 3, "probe": (0, 4)}, r"train: probe must have integers from 0 to steps=3, got \[0, 4\]"),
    ],
)
def test_settings_that_make_no_run_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny(None, **settings)


def test_runs_of_different_lengths_are_not_compared():
    with pytest.raises(ValueError, match="equal steps, got 1 and 2"):
        compare(Run((1.0,), 1.0, None, {}), Run((1.0, 1.0), 1.0, None, {}))
