"""The study of step costs compares what it says."""

import numpy as np
import polars as pl
import pytest
import torch

from muon_lab import studies
from muon_lab.figures import panels
from muon_lab.studies import step_cost
from muon_lab.studies.running import run_case
from muon_lab.sweep import grid
from muon_lab.sweep.grid import Experiment


def row(optimizer, **point):
    study = studies.get("step_cost")
    defaults = {name: values[0] for name, values in study.defaults.items()}
    tiny = {"model": "tiny", "layers": 1, "repeats": 1}
    (case,) = study.settle(defaults | tiny | {"optimizer": optimizer} | point, None)
    return run_case("step_cost", case)


def test_the_plain_loop_is_the_labs_muon_written_out():
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(shape, generator=generator) for shape in step_cost.LAYERS["tiny"]]
    weights, others = ([torch.nn.Parameter(torch.zeros_like(G)) for G in gradients] for _ in range(2))
    for W, G in zip(others, gradients, strict=True):
        W.grad = G
    plain, optimizer = step_cost._plain_loop(weights, gradients), step_cost._maker("muon")(others)
    for _ in range(3):
        plain()
        optimizer.step()
    for W, other in zip(weights, others, strict=True):
        scale = other.detach().abs().max()
        torch.testing.assert_close(W, other, rtol=0, atol=float(2**12 * 2.0**-24 * scale))  # iterations may differ


def test_errors_are_those_of_the_directions():
    """Five quintic steps are off by percents, the exact factor by rounding; a scale is no error."""
    muon, mop = row("muon"), row("mop")
    assert muon["relative"] == pytest.approx(muon["reference_relative"], rel=1e-3)
    assert 0.003 < muon["relative"] < 0.3
    assert mop["relative"] < 1e-5
    assert row("torch.optim.Muon")["relative"] > muon["relative"]
    assert row("rekls")["relative"] is None


def test_memory_is_as_documented():
    """Muon keeps 4 bytes a weight, AdamW 8 and a count for each matrix."""
    entries = sum(m * n for m, n in step_cost.LAYERS["tiny"])
    assert row("muon")["state_bytes"] == row("muon")["parameter_bytes"] == 4 * entries
    assert row("torch.optim.AdamW")["state_bytes"] == 8 * entries + 4 * len(step_cost.LAYERS["tiny"])
    soap = sum(2 * m * n + 2 * m * m + 2 * n * n + m + n + 4 for m, n in step_cost.LAYERS["tiny"])
    assert row("soap")["state_bytes"] == 4 * soap


def test_an_optimizer_that_writes_into_gradients_spoils_no_comparison(monkeypatch):
    class Spoiling(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for W in self.param_groups[0]["params"]:
                W.grad.zero_()

    alone = row("muon")["reference_relative"]
    monkeypatch.setattr(step_cost, "_maker", lambda name: lambda weights: Spoiling(weights, lr=1.0))
    assert row("muon")["reference_relative"] == alone


def test_a_missing_peer_is_left_out_and_an_unknown_optimizer_is_named(monkeypatch):
    monkeypatch.setattr(step_cost, "find_spec", lambda name: None)
    plan = grid.plan(Experiment("e", "step_cost", {"optimizer": ("muon", "pytorch_optimizer.Muon")}))
    assert len(plan.cases) == 1
    assert "pytorch_optimizer.Muon' is missing" in plan.notes[0]
    with pytest.raises(ValueError, match="did you mean 'muon'"):
        row("moun")


def test_the_figure_has_a_rung_an_optimizer():
    table = pl.DataFrame(
        {
            "model": "gpt2",
            "layers": 12,
            "threads": 1,
            "optimizer": ["muon", "torch.optim.Muon"],
            "repeats": 5,
            "outcome": "ok",
            "ratio": [0.5, 20.0],
            "ratio_low": [0.4, 19.0],
            "ratio_high": [0.6, 21.0],
        }
    )
    (axes,) = panels.draw("step_cost", table).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["muon", "torch.optim.Muon"]
    assert axes.get_title() == "gpt2, 12 layers, 1 thread"
    assert np.isclose(axes.get_xlim()[1], 21.0 * 1.15)
