"""The study of number formats finds what is known of them."""

import numpy as np
import pytest
import torch
from cases import polar_factor, through_svd

from muon_lab import polar, studies
from muon_lab.arithmetic import Rounded, Wide, linear
from muon_lab.oracle.polar import polar as decomposed
from muon_lab.polar import schedules
from muon_lab.studies import effects, sources, stability
from muon_lab.studies.running import run_case
from muon_lab.studies.study import Ended
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


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in schedules.known() if "(" not in name])
def test_no_published_schedule_lets_a_singular_value_escape_without_coarse_rounding(name, format):
    """The control: what escapes under MXFP8 does so because of MXFP8."""
    steps = schedules.get(name).steps
    found = row("products", spectrum="gaussian", shape="32x64", format=format, method=name, steps=steps)
    assert (found["outcome"], found["escaped_step"]) == ("ok", None)


def test_the_step_at_which_a_singular_value_escapes_is_found():
    """Recomputed: the iterates' singular values against the fixed point that the test finds by bisection."""
    found = row("products", spectrum="gaussian", shape="64x128", method="quintic", steps=5)
    (case,) = sources.settle("gaussian", 64, 128, 0, None)
    X = torch.tensor(sources.matrix(case), dtype=torch.float32)
    quintic = schedules.get("quintic")
    largest = [np.linalg.norm(one.double().numpy(), 2) for one in polar.iterates(quintic, Rounded("mxfp8_e4m3"))(X)]
    assert found["sigma_in"] == pytest.approx(largest[0], rel=1e-6)
    beyond = [step for step in range(1, 5) if largest[step] > bisected(*quintic.coefficients[step]) * (1 + 1e-9)]
    assert found["escaped_step"] == beyond[0] == 3
    assert row("products", spectrum="gaussian", shape="64x128", method="taylor", steps=9)["escaped_step"] is None


def bisected(a, b, c, low=1.0, high=2.0):
    """Return where a x + b x³ + c x⁵ crosses x, from below, between two numbers."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if a + b * middle**2 + c * middle**4 < 1 else (low, middle)
    return low


@pytest.mark.parametrize("name", [name for name in schedules.known() if "(" not in name])
def test_a_step_enlarges_what_lies_above_its_runaway_point_and_nothing_just_below(name):
    for a, b, c in schedules.get(name).coefficients:
        point = effects.runaway(a, b, c)
        above = point * np.linspace(1.001, 3, 50)
        assert (np.abs(a * above + b * above**3 + c * above**5) > above).all()
        below = 0.999 * point
        assert abs(a * below + b * below**3 + c * below**5) < below


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


@pytest.mark.parametrize(
    ("format", "top"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0), ("e2m1", 6.0), ("fp16", np.inf), ("bf16", np.inf)]
)
def test_scalar_formats_that_clamp_say_what_they_clamped(format, top):
    """The share above the largest number, counted by hand; formats that overflow clamp nothing."""
    G = np.random.default_rng(0).standard_normal((16, 48)) * 1e4
    found = effects.gradient({"format": format, "scale_mode": None}, G, decomposed(G))
    assert found["saturated"] == np.mean(np.abs(G.astype(np.float32)) > top)
    assert (found["saturated"] > 0.9) == (format in ("fp8_e4m3", "e2m1"))


def test_saturated_and_flushed_shares_are_counted_on_a_block_made_by_hand():
    """One block: 480 is cut to 448 by floor, 1e-4 vanishes below 2^-9·½."""
    G = np.zeros((1, 32))
    G[0, :4] = [480.0, 448.0, 1.0, 1e-4]
    found = effects.gradient({"format": "mxfp8_e4m3", "scale_mode": "floor"}, G, decomposed(G))
    assert (found["saturated"], found["flushed"], found["coarse"]) == (1 / 32, 1 / 32, 1 / 32)
    assert found["error"] == pytest.approx(32 / np.linalg.norm(G), rel=1e-6)


# --- scale, zero, overflow --------------------------------------------------------------------------------------------

#: Formats with float32's exponents: a power of two changes nothing, as long as nothing leaves float32.
SCALE_FREE = ("bf16", "mxfp8_e4m3", "mxfp4_e2m1", "fp32")
WHOLE = {"method": "quintic", "steps": 5, "beta": 0.5, "rounding": "nearest"}


def effect(what, G, format="mxfp8_e4m3", **axes):
    case = {"format": format, "scale_mode": None, "start": "zero", **WHOLE, **axes}
    return effects.EFFECTS[what](case, G, decomposed(G))


def some_matrix():
    return np.random.default_rng(3).standard_normal((32, 64)).astype(np.float32).astype(float)


@pytest.mark.parametrize("format", SCALE_FREE)
@pytest.mark.parametrize("what", effects.EFFECTS)
@pytest.mark.parametrize("power", [-80, 80])
def test_the_scale_of_a_matrix_does_not_matter_where_the_format_has_the_exponents_for_it(what, format, power):
    """Bit for bit: powers of two go through every sum. Of a factor the square must fit, so it gets 2^±40."""
    G = some_matrix()
    scaled = effect(what, np.ldexp(G, power // 2 if what == "factor" else power), format)
    assert scaled == effect(what, G, format)


def test_nvfp4_follows_the_scale_of_a_matrix():
    """Its factor for the whole tensor is no power of two, so that quotients are rounded in other places."""
    for scale in (1e-25, 1e25):
        assert effect("gradient", scale * some_matrix(), "nvfp4")["error"] == pytest.approx(
            effect("gradient", some_matrix(), "nvfp4")["error"], rel=1e-3
        )


ZERO = {
    "products": {"error": 0, "relative": 0, "truncation": 0, "rounding": 0, "remainder": 0, "cosine": 1, "sigma_in": 0},
    "gradient": {"error": 0, "gain": 1, "saturated": 0, "flushed": 0, "coarse": 0, "worst_row": 0},
    "momentum": {"error": 0, "gain": 1},
    "factor": {"error": 0, "asymmetry": 0, "negative": 0, "lowest": 0},
    "polar": {"error": 0, "bound": 0, "relative": 0, "cosine": 1},
}


@pytest.mark.parametrize("format", ["fp32", "fp16", "fp8_e4m3", "mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize(("what", "start"), [*((what, "zero") for what in effects.EFFECTS), ("momentum", "gradient")])
def test_a_zero_matrix_has_decided_answers_and_no_notes(what, start, format):
    found = row(what, spectrum="zero", shape="8x40", format=format, start=start, beta=0.5)
    assert (found["outcome"], found["note"]) == ("ok", None)
    names = {"rounding": "rounding_error"}
    assert {name: found[names.get(name, name)] for name in ZERO[what]} == ZERO[what]


@pytest.mark.parametrize("what", ["gradient", "momentum", "factor", "polar"])
def test_what_a_format_cannot_hold_is_lost_or_not_finite_and_never_silent(what):
    """fp16 ends at 65504 and at 2^-24: a matrix of 1e6 overflows, one of 1e-9 vanishes, and so do their factors."""
    with pytest.raises(Ended, match="is not finite") as caught:
        effect(what, 1e6 * some_matrix(), "fp16")
    assert caught.value.outcome == "nonfinite"
    lost = effect(what, 1e-9 * some_matrix(), "fp16")
    assert lost["error"] == 1
    assert lost.get("gain", 0) == lost.get("negative", 0) == lost.get("lowest", 0) == lost.get("asymmetry", 0) == 0


def test_the_step_at_which_an_average_overflows_is_named():
    """0.1 of 2e5 is 2e4; after n steps the average has (1 - 0.9^n) of 2e5, which passes 65520 between 3 and 4."""
    with pytest.raises(Ended, match="step 4 is not finite") as caught:
        effect("momentum", np.full((1, 32), 2e5), "fp16", beta=0.9)
    assert caught.value.metrics == {"failed_step": 4}


@pytest.mark.parametrize("what", effects.EFFECTS)
def test_a_matrix_beyond_float32_is_not_finite(what):
    with pytest.raises(Ended, match="the matrix in float32 is not finite"):
        effect(what, 1e50 * some_matrix())


def test_a_factor_beyond_float32_is_not_finite_and_one_below_it_is_noted():
    with pytest.raises(Ended, match="the factor in float32 is not finite"):
        effect("factor", 1e25 * some_matrix())
    with pytest.warns(UserWarning, match="the factor vanishes in float32"):
        assert effect("factor", 1e-25 * some_matrix())["error"] == 1


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


def test_nvfp4_arrives_from_zero_alone():
    """From zero the average is one fixed pattern that the scales follow; from elsewhere it stalls like the others.

    Six unrelated gradients, random and reordered ones, left one of 256×512 at 0.27 to 0.32.
    """
    matrix = {"spectrum": "gaussian", "shape": "16x128", "format": "nvfp4"}
    gains = {start: row("momentum", **matrix, start=start)["gain"] for start in ("zero", "gradient")}
    # of the pattern nothing changes; the scale, a float32, is rounded once in each of 400 steps
    assert gains["zero"] == pytest.approx(row("gradient", **matrix)["gain"], abs=400 * 2.0**-24)
    assert gains["gradient"] == pytest.approx(0.295, abs=0.05)


def test_an_exact_average_forgets_where_it_started():
    """What is left of the start after 20 time constants is exp(-20); float32 stalls within 20 roundings of G."""
    for start in ("zero", "gradient"):
        found = row("momentum", spectrum="gaussian", shape="16x32", format="fp32", start=start, beta=0.5)
        assert found["error"] < 20 * 2.0**-24
        assert found["gain"] == pytest.approx(1, abs=20 * 2.0**-24)


def test_the_other_start_is_the_gradient_in_another_order():
    X = torch.arange(64.0).reshape(4, 16)
    begin = effects._start({"start": "gradient"}, X)
    assert torch.equal(begin.flatten().sort().values, X.flatten())
    assert not torch.equal(begin, X)
    assert torch.equal(begin, effects._start({"start": "gradient"}, X))  # the same every time


def test_a_quantized_kronecker_factor_is_indefinite():
    found = row("factor", spectrum="geometric(1225)", shape="256x512")  # condition 1.5e6 of the factor
    assert found["negative"] == pytest.approx(76, abs=12)
    assert found["lowest"] == pytest.approx(-8e-3, rel=0.3)


@pytest.mark.parametrize("spectrum", ["gaussian", "geometric(100)", "geometric(1e3)"])
def test_a_factor_in_float32_is_definite(spectrum):
    """The control: the smallest eigenvalue, 1e-6 of the largest, is far above float32's rounding of 6e-8."""
    found = row("factor", spectrum=spectrum, shape="256x512", format="fp32")
    assert found["negative"] == 0
    assert 0 < found["error"] < 2.0**-24
    half = row("factor", spectrum=spectrum, shape="256x512", format="bf16")
    assert (half["negative"] > 0) == (spectrum != "gaussian")


def test_negative_eigenvalues_are_counted_where_they_are_planted():
    """A definite factor whose diagonal E4M3 rounds down to 1 and 1.125, and the rest up to 1.125: indefinite."""
    L = np.array([[1.06, 1.10], [1.10, 1.18]])
    assert np.linalg.eigvalsh(L)[0] > 0
    found = effect("factor", np.linalg.cholesky(L), "fp8_e4m3")
    low, high = np.linalg.eigvalsh(np.array([[1.0, 1.125], [1.125, 1.125]]))
    assert found["negative"] == 1
    assert found["lowest"] == pytest.approx(low / high, rel=1e-14)


def test_eigenvalues_that_are_zero_are_not_counted_as_negative():
    """Of a matrix of rank 1 in numbers that every format holds; LAPACK gives its zeros random signs."""
    G = np.outer(2.0 ** np.arange(8), np.ones(32)) / 64
    found = effect("factor", G, "fp64")
    assert found["error"] == 0
    assert found["negative"] == 0


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
    for name in ("gradient_cosine", "gradient_gain", "end_cosine", "end_gain"):
        # bfloat16 itself is off by 2e-6 in the cosine and 2e-4 in the gain, and the arm by 6e-4 and 5e-3
        assert found[f"{name}_bf16"] != found[name]
        assert found[f"{name}_bf16"] == pytest.approx(found[name], abs=1e-3)


@pytest.mark.slow
def test_the_bfloat16_arm_is_the_bfloat16_baseline_and_the_float32_arm_the_other():
    """Operands and results: the gap to itself is 0, bit for bit, and its gradient its own."""
    rounding = stability.PARAMETERS * 2.0**-53  # the sums have at most so many terms
    own, exact = (row("training", updates=2, format=format) for format in ("bf16", "fp32"))
    assert own["loss_gap_bf16"] == exact["loss_gap"] == 0
    assert own["loss_gap"] == -exact["loss_gap_bf16"] != 0
    for name in ("gradient_cosine", "gradient_gain", "end_cosine", "end_gain"):
        assert own[f"{name}_bf16"] == pytest.approx(1, abs=rounding)
        assert exact[name] == pytest.approx(1, abs=rounding)
        assert abs(own[name] - 1) > 1e-7
        assert abs(exact[f"{name}_bf16"] - 1) > 1e-7


def test_results_are_stored_in_a_format_where_all_operands_are_rounded_to_it():
    products = {
        operands: stability._products({"operands": operands, "format": "bf16", "scale_mode": None})
        for operands in ("all", "weights", "e5m2_gradients")
    }
    assert products["all"] == linear.BF16
    assert products["weights"] == linear.Products(weights="bf16")
    assert products["e5m2_gradients"] == linear.Products("bf16", "bf16", "mxfp8_e5m2", stored="bf16")
    blocks = {"operands": "all", "format": "mxfp8_e4m3", "scale_mode": "floor"}
    assert stability._products(blocks) == linear.uniform("mxfp8_e4m3", scale_mode="floor")


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
        ("start", "one", "unknown start 'one'"),
        ("method", "svd", "unknown schedule 'svd'"),
        ("spectrum", "gausian", "unknown source 'gausian': did you mean 'gaussian'"),
        ("shape", "64", "shape must be ROWSxCOLS"),
    ],
)
@pytest.mark.parametrize("what", stability.WHATS)
def test_wrong_values_are_refused_also_where_they_do_not_matter(axis, value, message, what):
    with pytest.raises(ValueError, match=message):
        row(**{"what": what, axis: value})


@pytest.mark.parametrize("what", stability.WHATS)
def test_a_number_of_steps_that_a_schedule_does_not_have_is_wrong_only_where_it_takes_them(what):
    given = {name: values[0] for name, values in studies.get("stability").defaults.items()}
    given |= {"what": what, "method": "cubic5", "steps": 4}
    if what == "products":
        with pytest.raises(ValueError, match="exactly 5 steps"):
            list(stability.settle(given, None))
    else:
        (case,) = stability.settle(given, None)
        assert (case["method"], case["steps"]) == (None, None)


def test_the_same_arm_is_not_measured_twice():
    arms = {"what": ("training",), "format": ("mxfp8_e5m2", "mxfp8_e4m3"), "operands": ("all", "e5m2_gradients")}
    planned = grid.plan(Experiment("s", "stability", arms))
    found = [(case["format"], case["operands"]) for case in planned.cases.values()]
    assert found == [("mxfp8_e5m2", "all"), ("mxfp8_e4m3", "all"), ("mxfp8_e4m3", "e5m2_gradients")]
    assert planned.notes == ("left out: operands 'e5m2_gradients' in format 'mxfp8_e5m2' are the arm 'all'",)


def test_the_start_matters_for_an_average_alone():
    for what in stability.WHATS:
        planned = grid.plan(
            Experiment("s", "stability", {"what": (what,), "spectrum": ("flat",), "start": ("zero", "gradient")})
        )
        starts = {case["start"] for case in planned.cases.values()}
        assert starts == ({"zero", "gradient"} if what == "momentum" else {None})


def test_formats_that_are_scales_are_left_out():
    with pytest.raises(ValueError, match="'e8m0' is a scale"):
        grid.plan(Experiment("s", "stability", {"format": ("e8m0",), "what": ("gradient",)}))


@pytest.mark.parametrize("what", effects.EFFECTS)
def test_the_matrix_is_not_changed(what):
    G = np.diag([4.0, 3.0, 2.0, 1.0])
    before = G.copy()
    effect(what, G, "bf16")
    assert np.array_equal(G, before)
