"""The study of number formats finds what is known of them."""

import numpy as np
import pytest
import torch
from cases import polar_factor, through_svd

from muon_lab import polar, studies
from muon_lab.arithmetic import Rounded, Wide
from muon_lab.oracle.polar import polar as decomposed
from muon_lab.polar import schedules
from muon_lab.studies import effects, sources
from muon_lab.studies.running import run_case
from muon_lab.sweep import grid, table
from muon_lab.sweep.grid import Experiment


def row(what, **point):
    study = studies.get("stability")
    defaults = {name: values[0] for name, values in study.defaults.items()}
    (case,) = study.settle(defaults | {"what": what, "format": "mxfp8_e4m3"} | point, None)
    return run_case("stability", case)


# --- products ---------------------------------------------------------------------------------------------------------


def test_five_steps_under_mxfp8_lose_what_was_measured():
    """quintic ×5 on a Gaussian 256×512: about 0.21 with scales rounded up, 0.24 down; several draws, ±0.03."""
    for mode, expected in (("rceil", 0.21), ("floor", 0.235)):
        found = table(
            "stability", spectrum="gaussian", format="mxfp8_e4m3", scale_mode=mode, method="quintic", seed=range(3)
        )
        assert found["error"].mean() == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1"])
def test_polar_express_diverges_under_mx_and_the_step_is_named(format):
    found = row("products", format=format, spectrum="gaussian", method="polar_express", steps=8)
    assert found["outcome"] == "nonfinite"
    assert 1 <= found["failed_step"] <= 8
    assert found["note"].startswith(f"step {found['failed_step']} is not finite")
    assert found["error"] is None


def test_a_contracting_schedule_holds_under_mxfp8():
    found = row("products", spectrum="gaussian", shape="256x1024", method="taylor", steps=9)
    assert found["relative"] == pytest.approx(0.052, abs=0.01)
    assert found["sigma_max"] < 1.1


def test_the_parts_of_the_budget_add_up_as_vectors():
    """Recomputed in the test's own words: X − U is the sum of the three parts and of what is left of them."""
    found = row("products", spectrum="geometric(100)", shape="64x128", method="taylor", steps=9)
    (case,) = sources.settle("geometric(100)", 64, 128, 0, None)
    G, U = sources.matrix(case), polar_factor(sources.matrix(case))
    X, taylor = torch.tensor(G, dtype=torch.float32), schedules.get("taylor")
    image = through_svd(G, taylor.map)
    final = polar.newton_schulz(taylor, Rounded("mxfp8_e4m3"))(X).double().numpy()
    alone = polar.newton_schulz(taylor, Rounded("mxfp8_e4m3", "fp64", "rceil", Wide(torch.float64)))(X.double()).numpy()
    size = np.sqrt(64)
    assert found["relative"] == pytest.approx(np.linalg.norm(final - U) / size, rel=1e-5)
    assert found["truncation"] == pytest.approx(np.linalg.norm(image - U) / size, rel=1e-5)
    assert found["quantization"] == pytest.approx(np.linalg.norm(alone - image) / size, rel=1e-4)
    single = polar.newton_schulz(taylor)(X).double().numpy()
    double = polar.newton_schulz(taylor)(X.double()).numpy()
    assert found["remainder"] == pytest.approx(np.linalg.norm(final - alone - single + double) / size, rel=0.1)
    assert found["rounding_error"] < 1e-5


def test_each_part_is_what_it_is_called():
    exact = row("products", spectrum="geometric(10)", shape="32x64", format="fp64", method="simple")
    assert exact["rounding_error"] < 1e-12
    assert exact["error"] < 1e-6  # the matrix is given in float32
    assert exact["relative"] == pytest.approx(exact["truncation"], rel=1e-6)
    half = row("products", spectrum="geometric(10)", shape="32x64", format="bf16", method="simple")
    assert half["quantization"] is None
    assert half["truncation"] == pytest.approx(exact["truncation"])
    assert half["rounding_error"] == pytest.approx(half["error"] * half["sigma_max"], rel=0.5)


# --- the matrix itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "mode", "error", "saturated", "gain"),
    [
        ("mxfp8_e4m3", "rceil", 2.65e-2, 0.0, 0.9993),
        ("mxfp8_e4m3", "floor", 2.94e-2, 0.0086, 0.9972),
        ("mxfp8_e4m3", "ceil", 2.65e-2, 0.0, 0.9993),
        ("mxfp8_e4m3", "even", 2.76e-2, 0.0054, 0.9984),
        ("mxfp8_e5m2", "floor", 5.40e-2, 0.0086, None),
        ("mxfp6_e2m3", "floor", 2.84e-2, 0.0038, None),
        ("mxfp4_e2m1", "floor", 0.1149, 0.024, None),
        ("mxfp4_e2m1", "even", 0.1117, None, None),
    ],
)
def test_published_errors_of_gaussian_data_are_found(format, mode, error, saturated, gain):
    found = row("gradient", spectrum="gaussian", shape="512x1024", format=format, scale_mode=mode)
    assert found["error"] == pytest.approx(error, rel=0.02)
    if saturated is not None:
        assert found["saturated"] == pytest.approx(saturated, rel=0.1)
    if gain is not None:
        assert found["gain"] == pytest.approx(gain, abs=3e-4)


def test_saturated_and_flushed_shares_are_counted_on_a_block_made_by_hand():
    """One block: 480 is cut to 448 by floor, 1e-4 vanishes below 2^-9·½."""
    G = np.zeros((1, 32))
    G[0, :4] = [480.0, 448.0, 1.0, 1e-4]
    found = effects.gradient({"format": "mxfp8_e4m3", "scale_mode": "floor"}, G, decomposed(G))
    assert (found["saturated"], found["flushed"], found["coarse"]) == (1 / 32, 1 / 32, 1 / 32)
    assert found["error"] == pytest.approx(32 / np.linalg.norm(G), rel=1e-6)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "beta", "share"),
    [("mxfp8_e4m3", 0.9, 0.715), ("mxfp8_e4m3", 0.95, 0.540), ("mxfp8_e5m2", 0.95, 0.376), ("bf16", 0.95, 0.949)],
)
def test_an_average_rounded_to_nearest_stalls_where_it_was_seen_to(format, beta, share):
    found = row("momentum", spectrum="gaussian", shape="64x128", format=format, beta=beta)
    assert found["gain"] == pytest.approx(share, abs=0.01)


def test_stochastic_rounding_lets_the_average_arrive():
    found = row("momentum", spectrum="gaussian", shape="64x128", beta=0.95, rounding="stochastic")
    assert found["gain"] == pytest.approx(1.0, abs=0.003)


def test_a_quantized_kronecker_factor_is_indefinite():
    found = row("factor", spectrum="geometric(1225)", shape="256x512")  # condition 1.5e6 of the factor
    assert found["negative"] == pytest.approx(76, abs=12)
    assert found["lowest"] == pytest.approx(-8e-3, rel=0.3)
    exact = row("factor", spectrum="geometric(100)", shape="64x128", format="fp32")
    assert (exact["negative"], exact["error"]) == (0, 0)


@pytest.mark.parametrize(("spectrum", "error"), [("geometric(100)", 0.21), ("geometric(1e4)", 0.85)])
def test_the_polar_factor_of_a_quantized_matrix_is_as_far_as_was_measured(spectrum, error):
    found = row("polar", spectrum=spectrum)
    assert found["relative"] == pytest.approx(error, rel=0.03)
    assert found["relative"] < found["bound"]


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_compares_with_the_float32_and_the_bfloat16_run_of_its_seed():
    found = row("training", updates=3)
    assert found["outcome"] == "ok"
    assert (found["spectrum"], found["rows"], found["method"]) == (None, None, None)
    assert 4 < found["loss"] < 6  # nats a byte: three steps from the start
    assert 0 < abs(found["loss_gap"]) < 0.05
    assert found["loss_gap_bf16"] == pytest.approx(found["loss_gap"], abs=0.01)
    assert found["gradient_cosine"] == pytest.approx(0.9994, abs=3e-4)
    assert found["gradient_gain"] == pytest.approx(0.995, abs=3e-3)


@pytest.mark.slow
def test_scales_rounded_down_shrink_the_gradient_of_training():
    found = {mode: row("training", updates=1, scale_mode=mode)["gradient_gain"] for mode in ("rceil", "floor")}
    assert found["floor"] < found["rceil"] - 0.005


@pytest.mark.slow
def test_operands_are_switched_on_alone():
    cosines = {
        operands: row("training", updates=1, operands=operands)["gradient_cosine"]
        for operands in ("all", "weights", "activations", "gradients", "e5m2_gradients")
    }
    assert (
        cosines["e5m2_gradients"]
        < cosines["all"]
        < min(cosines[name] for name in ("weights", "activations", "gradients"))
    )


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_axes_that_do_not_matter_make_no_cases():
    axes = {
        "what": ("gradient",),
        "spectrum": ("gaussian",),
        "format": ("bf16", "mxfp8_e4m3"),
        "scale_mode": ("rceil", "floor"),
    }
    planned = grid.plan(Experiment("s", "stability", axes | {"beta": (0.9, 0.95), "method": ("simple", "taylor")}))
    found = [(case["format"], case["scale_mode"]) for case in planned.cases.values()]
    assert found == [("bf16", None), ("mxfp8_e4m3", "rceil"), ("mxfp8_e4m3", "floor")]


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("what", "product", "unknown what 'product': did you mean 'products'"),
        ("format", "mxfp8", "unknown format 'mxfp8': did you mean 'mxfp8_e"),
        ("scale_mode", "round", "unknown scale mode 'round'"),
        ("rounding", "up", "unknown rounding 'up'"),
        ("operands", "weight", "unknown operands 'weight': did you mean 'weights'"),
        ("updates", 0, "updates must be at least 1, not 0"),
        ("beta", 1.0, r"beta must lie in \[0, 1\), not 1.0"),
        ("method", "svd", "unknown schedule 'svd'"),
    ],
)
def test_wrong_values_are_refused(axis, value, message):
    with pytest.raises(ValueError, match=message):
        row(**{"what": "products", axis: value})


def test_formats_that_are_scales_are_left_out():
    with pytest.raises(ValueError, match="'e8m0' is a scale"):
        grid.plan(Experiment("s", "stability", {"format": ("e8m0",), "what": ("gradient",)}))


@pytest.mark.parametrize("what", effects.EFFECTS)
def test_the_matrix_is_not_changed(what):
    G = np.diag([4.0, 3.0, 2.0, 1.0])
    before = G.copy()
    case = {"format": "bf16", "scale_mode": None, "method": "simple", "steps": 2, "beta": 0.5, "rounding": "nearest"}
    effects.EFFECTS[what](case, G, decomposed(G))
    assert np.array_equal(G, before)
