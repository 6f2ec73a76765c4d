"""Starts against what their definition says, computed on singular values and rows by NumPy."""

import numpy as np
import pytest
import torch
from cases import distance, through_svd, with_singular_values

from muon_lab import polar
from muon_lab.polar import schedules, starts

U64 = 2.0**-53


def tensor(A):
    return torch.tensor(np.asarray(A), dtype=torch.float64)


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize(("start", "size"), [("frobenius", 2), ("schatten4", 4), ("spectral", np.inf)])
def test_a_start_divides_by_its_norm(form, start, size):
    """Schatten p-norms of the singular values: p = 2, 4, ∞."""
    sigma = np.geomspace(3.0, 0.1, 9)
    G = with_singular_values(9, 16, sigma)
    schedule = schedules.get("quintic", 4)
    make = {"plain": polar.newton_schulz, "gram": polar.gram_newton_schulz}[form]
    X = make(schedule, start=start)(tensor(G))
    ratio = np.linalg.norm(sigma) / np.linalg.norm(sigma, size)
    assert distance(X, through_svd(G, lambda unit: schedule.map(ratio * unit))) < 1e4 * U64


@pytest.mark.filterwarnings("ignore::muon_lab.polar.ScheduleWarning")
@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("shape", [(9, 16), (16, 9)])
def test_aol_scales_rows_of_the_short_side(form, shape):
    G = np.random.default_rng(0).standard_normal(shape)
    wide = G if shape[0] < shape[1] else G.T
    scaled = wide / np.sqrt(np.abs(wide @ wide.T).sum(axis=1, keepdims=True))
    assert np.linalg.norm(scaled, 2) <= 1.0
    schedule = schedules.get("aol")
    make = {"plain": polar.newton_schulz, "gram": polar.gram_newton_schulz}[form]
    X = make(schedule, start="aol")(tensor(G))
    expected = through_svd(scaled, lambda unit: schedule.map(np.linalg.norm(scaled) * unit))
    assert distance(X, expected if shape[0] < shape[1] else expected.T) < 1e4 * U64


@pytest.mark.filterwarnings("ignore::muon_lab.polar.ScheduleWarning")
@pytest.mark.parametrize("start", starts.known())
def test_rows_of_zeros_stay_and_a_batch_is_scaled_one_by_one(start):
    G = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G[0, 2], G[1] = 0.0, 0.0
    G[2] *= 1e20
    run = polar.newton_schulz(schedules.get("quintic"), start=start)
    found = run(G)
    assert torch.equal(found[1], torch.zeros(4, 6, dtype=torch.float64))
    assert (found[0, 2] == 0).all()
    for one, alone in zip(found, G, strict=True):
        assert torch.allclose(one, run(alone), rtol=0, atol=1e4 * U64)


def test_an_unknown_start_names_the_known_ones():
    with pytest.raises(ValueError, match="frobenius"):
        polar.newton_schulz(schedules.get("quintic"), start="frob")
