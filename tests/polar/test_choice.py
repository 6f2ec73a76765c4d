"""What `auto` chooses, that it does what it says, and that it says what it does."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from cases import distance, through_svd, with_singular_values

from muon_lab import polar
from muon_lab.arithmetic import Counted, Exact, Rounded, Symmetric
from muon_lab.polar import choice, flops, restarts

U32 = 2.0**-24
FIVE = ("simple", "quintic", "polar_express", "cubic5", "minimax(lower=1e-3)")


# --- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("side", [128, 256, 512, 1024, 4096])
def test_square_matrices_take_the_plain_loop(name, side):
    chosen = polar.auto((side, side), 5, schedule=name)
    assert (chosen.form, chosen.restarts, chosen.deviation) == ("plain", (), 0.0)


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("shape", [(512, 1024), (1024, 4096), (4096, 1024), (3, 7, 512, 2048), (128, 1024)])
def test_from_aspect_two_on_the_gram_form_is_taken_in_float32(name, shape):
    chosen = polar.auto(shape, 5, schedule=name)
    assert chosen.form == "gram"
    assert chosen.deviation <= restarts.TOLERANCE
    assert chosen.flops < (1 - choice.WORTH) * chosen.plain_flops


@pytest.mark.parametrize("arithmetic", [Exact(torch.bfloat16), Rounded("bf16"), Exact(torch.float16)])
def test_in_half_precision_the_plain_loop_stays(arithmetic):
    assert polar.auto((1024, 8192), 5, arithmetic).form == "plain"


def test_the_dtype_of_the_data_decides_where_the_arithmetic_has_none():
    assert polar.auto((256, 2048), 5, dtype=torch.bfloat16).form == "plain"
    assert polar.auto((256, 2048), 5, Exact(torch.float32), dtype=torch.bfloat16).form == "gram"


def test_the_plain_loop_is_taken_where_no_tolerance_is_left():
    assert polar.auto((256, 2048), 5, tolerance=0.0).form == "plain"
    loose, tight = (polar.auto((256, 2048), 5, Exact(torch.float16), tolerance=t) for t in (1.0, 1e-2))
    assert (loose.form, tight.form) == ("gram", "gram")
    assert (loose.restarts, tight.restarts) == ((), (3,))
    assert tight.deviation <= 1e-2 < loose.deviation <= 1.0


def test_many_steps_restart_in_float32():
    chosen = polar.auto((128, 1024), schedule="deepseekv4")
    assert chosen.form == "gram"
    assert chosen.restarts
    assert restarts.deviation(chosen.schedule, (), U32, np.geomspace(1, 1e-3, 128)) > restarts.TOLERANCE


def test_exact_products_become_symmetric_and_others_stay():
    assert polar.auto((8, 8), 5).arithmetic == Symmetric()
    assert polar.auto((8, 8), 5, Exact(torch.float64)).arithmetic == Symmetric(torch.float64)
    for arithmetic in (Rounded("bf16"), Symmetric(edge=32)):
        assert polar.auto((8, 8), 5, arithmetic).arithmetic == arithmetic


# --- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FIVE, "deepseekv4"])
@pytest.mark.parametrize("shape", [(24, 24), (24, 48), (96, 24), (2, 24, 96)])
@pytest.mark.parametrize("arithmetic", [Symmetric(edge=7), Symmetric(torch.float64, edge=12), Symmetric()])
def test_predicted_flops_are_those_of_the_products_that_run(name, shape, arithmetic):
    steps = None if name == "deepseekv4" else 5
    chosen = polar.auto(shape, steps, arithmetic, schedule=name)
    counted = Counted(chosen.arithmetic)
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    replace(chosen, arithmetic=counted)(G)
    assert counted.flops == pytest.approx(chosen.flops * (shape[0] if len(shape) == 3 else 1), rel=1e-12)
    assert chosen.plain_flops == flops.plain(chosen.schedule.coefficients, *shape[-2:])


@pytest.mark.parametrize("shape", [(512, 512), (512, 1024)])
def test_predicted_flops_hold_for_the_blocks_of_default_size(shape):
    chosen = polar.auto(shape, 5)
    counted = Counted(chosen.arithmetic)
    replace(chosen, arithmetic=counted)(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert counted.flops == pytest.approx(chosen.flops, rel=1e-12)
    assert chosen.flops < (0.9 if shape[0] == shape[1] else 0.75) * chosen.plain_flops


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("shape", [(32, 32), (32, 64), (128, 32), (2, 32, 128)])
def test_the_result_is_that_of_the_plain_loop_to_the_predicted_rounding(name, shape):
    """The prediction is for condition 1e3, and within a factor of 6; rounding of X itself meets slopes up to 1e3."""
    batch = np.stack([with_singular_values(*shape[-2:], np.geomspace(1, 1e-3, 32), seed) for seed in range(2)])
    G = torch.tensor(batch if len(shape) == 3 else batch[0], dtype=torch.float32)
    chosen = polar.auto(shape, 5, schedule=name)
    assert (chosen.form == "gram") == (shape[-1] != shape[-2])
    found, plain = chosen(G), polar.newton_schulz(chosen.schedule)(G)
    limit = 6 * chosen.deviation + chosen.schedule.slope * U32
    assert float((found - plain).norm() / plain.norm()) < limit < 0.01
    exact = through_svd(G.reshape(-1, *shape[-2:])[0].double().numpy(), chosen.schedule.map)
    assert distance(found.reshape(-1, *shape[-2:])[0].double().numpy(), exact) < limit


def test_a_choice_is_an_orthogonalizer_for_other_shapes_too():
    chosen = polar.auto((8, 64), 5)
    G = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert chosen.form == "gram"
    assert torch.allclose(chosen(G), polar.newton_schulz(chosen.schedule)(G), rtol=0, atol=1e3 * U32)


# --- what it says -----------------------------------------------------------------------------------------------------


def test_the_choice_is_reported():
    assert str(polar.auto((1024, 1024), 5)).startswith("quintic, 5 steps, plain form, Symmetric(")
    many = polar.auto((128, 1024), schedule="deepseekv4")
    assert f"gram form, restarts before {', '.join(map(str, many.restarts))}, Symmetric(" in str(many)
    wide = polar.auto((1024, 4096), 5)
    assert str(wide).endswith(f"{wide.flops / wide.plain_flops:.2f} of the plain loop's flops")
    with pytest.raises(FrozenInstanceError):
        wide.form = "plain"


def test_at_aspect_four_less_than_half_of_the_flops_are_left():
    """(3ρ + 17)/(20ρ + 10) would be 0.32 with exact halves; blocks of 256 rows leave 0.38."""
    chosen = polar.auto((1024, 4096), 5)
    assert chosen.flops / chosen.plain_flops == pytest.approx(0.38, abs=0.005)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"shape": (7,)}, r"of a shape with at least 2 axes, not \(7,\)"),
        ({"shape": ()}, r"of a shape with at least 2 axes, not \(\)"),
        ({"shape": (-3, 64)}, r"of a shape whose axes are counts, not \(-3, 64\)"),
        (
            {"shape": (7, 7), "dtype": torch.int32},
            r"real floating-point dtype such as torch\.float32, not torch\.int32",
        ),
        ({"shape": (7, 7), "tolerance": float("nan")}, "tolerance must be a number, not nan"),
        ({"shape": (7, 7), "schedule": "quintik"}, "did you mean 'quintic'"),
        ({"shape": (7, 7), "steps": 0}, "positive integer"),
    ],
)
def test_bad_requests(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        polar.auto(**given)
