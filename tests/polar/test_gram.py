"""The Gram form against the plain loop, its work against a count of its products, its restarts against measurement."""

import numpy as np
import pytest
import torch
from cases import distance, through_svd, with_singular_values

from muon_lab import polar
from muon_lab.arithmetic import Counted, Exact, Rounded, Symmetric
from muon_lab.polar import flops, restarts, schedules

FIVE = ("simple", "quintic", "polar_express", "cubic5")
U64, U32 = 2.0**-53, 2.0**-24


def tensor(A, dtype=torch.float64):
    return torch.tensor(np.asarray(A), dtype=dtype)


# --- the same polynomial ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("positions", [(), (2,), (3,), (1, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("arithmetic", [Exact(), Symmetric(edge=4)])
def test_the_image_of_singular_values_is_that_of_the_schedule(name, positions, arithmetic):
    """Rounding of R, u, becomes u·slope² where a small eigenvalue has grown to 1."""
    G = with_singular_values(12, 30, np.geomspace(1, 0.02, 12))
    schedule = schedules.get(name, 5)
    X = polar.gram_newton_schulz(schedule, arithmetic, positions)(tensor(G))
    assert distance(X, through_svd(G, schedule.map)) < 10 * U64 * schedule.slope**2


@pytest.mark.parametrize(
    "shape", [(3, 7), (7, 3), (2, 5, 9), (2, 9, 5), (2, 3, 4, 6), (1, 4), (4, 1), (0, 3), (2, 0, 4), (2, 3, 0, 5)]
)
def test_shapes_dtypes_and_strides_are_those_of_the_plain_loop(shape):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    schedule = schedules.get("quintic")
    plain, gram = polar.newton_schulz(schedule), polar.gram_newton_schulz(schedule)
    before = G.clone()
    found = gram(G)
    assert (found.shape, found.dtype, found.is_contiguous()) == (G.shape, G.dtype, True)
    assert torch.allclose(found, plain(G), rtol=0, atol=1e3 * U32)
    assert torch.equal(G, before)
    assert torch.equal(gram(G.mT.contiguous().mT), found)
    assert torch.equal(gram(G.mT).mT, found)
    if G.numel():
        found[:] = 7.0
        assert torch.equal(G, before)


def test_scale_does_not_matter_and_zero_stays():
    G = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    gram = polar.gram_newton_schulz(schedules.get("quintic"))
    for exponent in (-90, 90):
        assert torch.equal(gram(G * 2.0**exponent), gram(G))
    assert torch.equal(gram(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_null_directions_stay_null():
    G = with_singular_values(8, 20, [1.0, 0.5, 0.3, 0.2, 0, 0, 0, 0])
    X = polar.gram_newton_schulz(schedules.get("quintic"))(tensor(G))
    s = np.linalg.svd(X.numpy(), compute_uv=False)
    assert (s[:4] > 0.9).all()
    assert (s[4:] < 100 * U64 * schedules.get("quintic").slope).all()


def test_bad_requests():
    quintic = schedules.get("quintic")
    for positions in ([0], [5], [-1]):
        with pytest.raises(ValueError, match="there are 1 to 4"):
            polar.gram_newton_schulz(quintic, restarts=positions)
    with pytest.raises(ValueError, match="'schatten4'"):
        polar.gram_newton_schulz(quintic, start="schatten")
    for bad in (torch.ones(3), torch.ones(3, 4, dtype=torch.int64), torch.tensor([[1.0, float("nan")]])):
        with pytest.raises(ValueError, match="matrix to orthogonalize"):
            polar.gram_newton_schulz(quintic)(bad)


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [Exact(), Symmetric(edge=3)])
@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("positions", [(), (3,), (1, 3), (1, 2, 3, 4)])
def test_flops_are_those_of_the_products_that_ran(inner, name, positions):
    m, n = 12, 20
    schedule = schedules.get(name, 5)
    share = inner.share(m) if isinstance(inner, Symmetric) else 1.0
    for orthogonalizer, expected in (
        (polar.newton_schulz, lambda: flops.plain(schedule.coefficients, n, m, share)),
        (polar.gram_newton_schulz, lambda: flops.gram(schedule.coefficients, n, m, positions, share)),
    ):
        counted = Counted(inner)
        extra = {} if orthogonalizer is polar.newton_schulz else {"restarts": positions}
        orthogonalizer(schedule, counted, **extra)(torch.ones(n, m))
        assert counted.flops == pytest.approx(expected(), rel=1e-12)


def test_flops_are_those_of_the_published_count():
    five = schedules.get("quintic").coefficients
    for rho, none, one in ((1, 1.27, 1.20), (2, 0.84, 0.88), (4, 0.56, 0.67), (8, 0.39, 0.54)):
        plain = flops.plain(five, 10, 10 * rho)
        assert flops.gram(five, 10, 10 * rho) / plain == pytest.approx(none, abs=0.006)
        assert flops.gram(five, 10, 10 * rho, [3]) / plain == pytest.approx(one, abs=0.006)


# --- restarts ---------------------------------------------------------------------------------------------------------

M = 192
SPECTRA = {"log 1..1e-3": np.geomspace(1, 1e-3, M), "log 1..1e-2": np.geomspace(1, 1e-2, M)}
POSITIONS = [(), (1,), (2,), (3,), (4,), (1, 3), (2, 4)]


def measured(name, format, sigma, positions):
    """Return the deviation from the exact image: of the stored input, since its rounding is nobody's fault."""
    schedule = schedules.get(name, 5)
    found = []
    for seed in range(3):
        G = with_singular_values(len(sigma), 2 * len(sigma), sigma, seed=seed)
        start = tensor(G, torch.float32)
        start = (start / start.norm()).to({"fp16": torch.float16, "bf16": torch.bfloat16}[format]).float()
        image = through_svd(
            start.double().numpy(), lambda s: schedule.map(s / np.linalg.norm(sigma) * np.linalg.norm(sigma))
        )
        X = polar.gram_newton_schulz(schedule, Rounded(format), positions)(start)
        found.append(float(np.linalg.norm(X.double().numpy() - image) / np.linalg.norm(image)))
    return float(np.median(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simple", "quintic", "polar_express"])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_model_predicts_what_restarts_do_in_half_precision(name, spectrum):
    """Within a factor of 6, and the single restart that it chooses is the best one, to 1.3."""
    sigma, half = SPECTRA[spectrum], 2.0**-11
    found = {p: measured(name, "fp16", sigma, p) for p in POSITIONS}
    told = {p: restarts.deviation(schedules.get(name, 5), p, half, sigma) for p in POSITIONS}
    for p in POSITIONS:
        assert 1 / 6 < found[p] / told[p] < 6, (p, found[p], told[p])
    singles = [p for p in POSITIONS if len(p) == 1]
    chosen = restarts.best(schedules.get(name, 5), 1, half, sigma)
    assert found[chosen] <= 1.3 * min(found[p] for p in singles)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_published_default_of_two_loses_to_three(spectrum):
    sigma = SPECTRA[spectrum]
    assert measured("polar_express", "fp16", sigma, (2,)) > 1.8 * measured("polar_express", "fp16", sigma, (3,))


def test_bfloat16_diverges_without_restart_and_not_with_the_chosen_ones():
    sigma = SPECTRA["log 1..1e-3"]
    schedule = schedules.get("polar_express", 5)
    chosen = restarts.fewest(schedule, 2.0**-8, M, condition=1e3)
    assert measured("polar_express", "bf16", sigma, ()) > 1.0
    assert measured("polar_express", "bf16", sigma, chosen) < 0.15


def test_float32_is_stable_without_restart_for_five_steps():
    for name in ("simple", "quintic", "polar_express"):
        schedule = schedules.get(name, 5)
        assert restarts.fewest(schedule, U32, M) == ()
        G = with_singular_values(M, 3 * M, SPECTRA["log 1..1e-3"])
        X = polar.gram_newton_schulz(schedule)(tensor(G, torch.float32))
        assert distance(X, through_svd(G, schedule.map)) < restarts.TOLERANCE
    assert restarts.fewest(schedules.get("deepseekv4"), U32, M) != ()


def test_an_infinite_deviation_is_told_as_such():
    assert restarts.deviation(schedules.get("deepseekv4"), (), 2.0**-8, SPECTRA["log 1..1e-3"]) == np.inf
    with pytest.raises(ValueError, match="positive singular value"):
        restarts.deviation(schedules.get("quintic"), (), U32, [0.0, 0.0])
    with pytest.raises(ValueError, match="5 restarts in 5 steps"):
        restarts.best(schedules.get("quintic"), 5, U32, [1.0])
