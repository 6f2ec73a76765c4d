"""Emulated products: what is rounded, along which axis, how it is summed, and what the engine makes of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import distance, through_svd, with_singular_values

from muon_lab import polar
from muon_lab.arithmetic import Exact, Rounded, TensorCore, Wide, quantize, roundtrip
from muon_lab.polar import schedules

GOLDEN = Path(__file__).parent.parent / "golden"


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- reduces to -------------------------------------------------------------------------------------------------------


def test_rounding_to_the_dtype_of_the_data_is_exact_arithmetic():
    G = randn(12, 20)
    schedule = schedules.get("quintic")
    expected = polar.newton_schulz(schedule)(G)
    assert torch.allclose(polar.newton_schulz(schedule, Rounded("fp32"))(G), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_product_is_the_rounded_float32_product_of_rounded_operands(format, batch):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[format]
    A, B, C = randn(*batch, 5, 7), randn(*batch, 7, 6, seed=1), randn(*batch, 5, 6, seed=2)

    def rounded(X):
        return X.to(dtype).float()

    found = Rounded(format).matmul(A, B, alpha=0.5, beta=-2.0, C=C)
    assert torch.equal(found, rounded(0.5 * (rounded(A) @ rounded(B)) - 2.0 * C))
    assert torch.equal(Rounded(format).gram(A), rounded(rounded(A) @ rounded(A).mT))


# --- blocks run along the summed axis ---------------------------------------------------------------------------------


def test_blocks_run_along_the_axis_that_is_summed_over():
    """Rows of A and columns of B scaled over 2^-24..1: blocks across them would flush the small ones to zero."""
    scales = torch.logspace(-24, 0, 32, base=2)
    A, B = randn(32, 96) * scales[:, None], randn(96, 32, seed=1) * scales
    found = Rounded("mxfp8_e4m3").matmul(A, B)
    left, right = (quantize(X, "mxfp8_e4m3", axis=axis).dequantize().double() for X, axis in ((A, -1), (B, -2)))
    assert distance(found, (left @ right).numpy()) < 1e-6
    exact = (A.double() @ B.double()).numpy()
    assert distance(found[0], exact[0]) < 0.1
    wrong = roundtrip(A, "mxfp8_e4m3", axis=-2) @ roundtrip(B, "mxfp8_e4m3", axis=-1)
    assert distance(wrong[0], exact[0]) == 1.0


def test_a_gram_matrix_of_quantized_operands_is_symmetric():
    A = Rounded("mxfp8_e4m3", accumulator=Wide(torch.float64)).gram(randn(40, 70))
    assert torch.equal(A, A.mT)


def test_inputs_are_not_changed():
    A, B, C = randn(8, 8), randn(8, 8, seed=1), randn(8, 8, seed=2)
    before = A.clone(), B.clone(), C.clone()
    Rounded("bf16").matmul(A, B, alpha=2.0, beta=3.0, C=C)
    Rounded("mxfp8_e4m3").square(A, alpha=2.0, beta=3.0)
    for X, old in zip((A, B, C), before, strict=True):
        assert torch.equal(X, old)


# --- accumulation -----------------------------------------------------------------------------------------------------


def quantized_pair(kind, k):
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn if kind == "gaussian" else torch.rand
    return roundtrip(draw(16, k, generator=generator), "fp8_e4m3"), roundtrip(
        draw(k, 16, generator=generator), "fp8_e4m3"
    )


@pytest.mark.parametrize(
    ("kind", "k", "error"),
    [("gaussian", 1024, 5.7e-4), ("gaussian", 4096, 1.4e-3), ("uniform", 1024, 1.5e-2), ("uniform", 4096, 7.5e-2)],
)
def test_a_hopper_accumulator_loses_what_was_measured(kind, k, error):
    """Published model, 32×32 outputs: the same to 20 % on other draws; on one-signed data it is a bias downwards."""
    A, B = quantized_pair(kind, k)
    exact = (A.double() @ B.double()).numpy()
    found = TensorCore(13).product(A, B).double().numpy()
    assert distance(found, exact) == pytest.approx(error, rel=0.2)
    if kind == "uniform":
        assert (found < exact).all()


def test_a_blackwell_accumulator_is_as_good_as_float32():
    A, B = quantized_pair("gaussian", 1024)
    exact = (A.double() @ B.double()).numpy()
    assert distance(TensorCore(25).product(A, B).double().numpy(), exact) < 2e-7
    assert distance(Wide().product(A, B).double().numpy(), exact) < 2e-7


def test_a_tensor_core_truncates_each_product_of_a_group_to_the_largest():
    """1 + 63/64·2^-13: aligned to 1 with 13 bits the small product vanishes, with 25 it stays."""
    A = torch.tensor([[1.0, 2.0**-7]])
    B = torch.tensor([[1.0], [2.0**-7 * 63 / 64]])
    assert TensorCore(13).product(A, B).item() == 1.0
    assert TensorCore(25).product(A, B).item() == 1.0 + 2.0**-14 * 63 / 64
    assert TensorCore(13, group=1).product(A, B).item() == 1.0
    assert TensorCore(13).product(torch.zeros(1, 4), torch.ones(4, 1)).item() == 0.0


# --- the same engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "tolerance"), [("fp16", 2e-2), ("bf16", 6e-2), ("tf32", 2e-2)])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e15])
def test_newton_schulz_in_half_precision_stays_near_the_exact_result(format, tolerance, scale):
    G = with_singular_values(16, 24, np.geomspace(1, 0.01, 16), seed=3) * scale
    X = polar.newton_schulz(schedules.get("simple"), Rounded(format))(torch.tensor(G, dtype=torch.float32))
    assert torch.isfinite(X).all()
    assert distance(X, through_svd(G, schedules.get("simple").map)) < tolerance


def test_emulated_bf16_is_the_native_one_up_to_its_last_bits():
    """torch multiplies bfloat16 with float32 sums too: what differs is the order of the sums."""
    G = randn(24, 40)
    schedule = schedules.get("simple")
    native = polar.newton_schulz(schedule, Exact(torch.bfloat16))(G)
    emulated = polar.newton_schulz(schedule, Rounded("bf16"))(G)
    assert distance(emulated, native.double().numpy()) < 5 * 2.0**-8


def test_torch_optim_muon_steps_are_reproduced_in_bf16():
    """Golden trajectory of torch.optim.Muon (torch 2.13.0): its direction is our bf16 iteration."""
    rows = json.loads((GOLDEN / "trajectories_torch.json").read_text())["rows"]
    assert rows
    orthogonalize = polar.newton_schulz(schedules.get("simple"), Rounded("bf16"))
    with np.load(GOLDEN / "trajectories_torch.npz") as arrays:
        for row in rows:
            W = torch.tensor(arrays[row["w0"]], dtype=torch.float32)
            M = torch.zeros_like(W)
            for step, G in enumerate(torch.tensor(arrays[row["grads"]], dtype=torch.float32)):
                M = row["momentum"] * M + (1 - row["momentum"]) * G
                direction = (1 - row["momentum"]) * G + row["momentum"] * M if row["nesterov"] else M
                factor = max(1.0, W.shape[0] / W.shape[1]) ** 0.5
                if row["adjust_lr_fn"] == "match_rms_adamw":
                    factor = 0.2 * max(W.shape) ** 0.5
                W = W * (1 - row["lr"] * row["weight_decay"]) - row["lr"] * factor * orthogonalize(direction)
                expected = arrays[row["key"]][step]
                moved = np.linalg.norm(expected - arrays[row["w0"]])
                assert np.linalg.norm(W.double().numpy() - expected) < 3e-2 * moved, (row["key"], step)


def test_polar_express_escapes_under_mxfp8_and_taylor_does_not():
    G = randn(64, 128)
    assert not torch.isfinite(polar.newton_schulz(schedules.get("polar_express"), Rounded("mxfp8_e4m3"))(G)).all()
    X = polar.newton_schulz(schedules.get("taylor"), Rounded("mxfp8_e4m3"))(G)
    assert float(torch.linalg.svdvals(X.double()).max()) < 1.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mxfp8_e4m4",), "unknown format 'mxfp8_e4m4': did you mean 'mxfp8_e4m3'"),
        (("bf16", "e4m3"), "results can be stored in fp64, fp32, bf16, fp16, not in 'e4m3'"),
        (("bf16", None, "rceill"), "unknown scale mode 'rceill': did you mean 'rceil'"),
    ],
)
def test_bad_policies_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rounded(*arguments)
