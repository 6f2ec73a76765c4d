"""Times of emulated arithmetic: who is timed against what, and that the work is really done."""

import numpy as np
import pytest

from muon_lab import studies
from muon_lab.studies import emulation
from muon_lab.studies.running import run_case
from muon_lab.sweep import grid
from muon_lab.sweep.grid import Experiment


def row(**point):
    study = studies.get("emulation")
    defaults = {name: values[0] for name, values in study.defaults.items()}
    (case,) = study.settle(defaults | {"peer": "lab", "repeats": 1} | point, None)
    return run_case("emulation", case)


@pytest.mark.parametrize(("format", "error"), [("bf16", 1.7e-3), ("mxfp8_e4m3", 2.65e-2)])
def test_what_is_timed_has_the_error_of_its_format(format, error):
    found = row(operation="roundtrip", format=format, size=256)
    assert found["error"] == pytest.approx(error, rel=0.05)
    assert found["ratio"] > 0
    product = row(operation="product", format=format, size=256)
    assert product["error"] == pytest.approx(np.sqrt(2) * error, rel=0.35)  # two operands; bf16 stores its result too


def test_the_native_product_is_the_same_product():
    found = row(operation="product", format="bf16", size=64, peer="torch")
    assert found["error"] == pytest.approx(row(operation="product", format="bf16", size=64)["error"], rel=0.1)


def test_ratios_are_quartiles_of_rounds(monkeypatch):
    monkeypatch.setattr(emulation, "interleaved", lambda tasks, rounds: 1e-3 * np.array([[2, 1], [3, 1], [4, 1]]))
    found = row(operation="roundtrip", size=32)
    assert [found[name] for name in ("ratio_low", "ratio", "ratio_high")] == pytest.approx([2.5, 3.0, 3.5])
    assert (found["milliseconds"], found["reference_milliseconds"]) == pytest.approx((3.0, 1.0))


def test_peers_that_are_missing_or_unfit_are_named(monkeypatch):
    monkeypatch.setattr(emulation, "find_spec", lambda name: None)
    notes = grid.plan(Experiment("e", "emulation", {})).notes
    assert "left out: peer 'torchao' is missing: pip install torchao adds it" in notes
    assert "left out: peer 'torch' is timed for native products in bf16 alone" in notes


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("operation", "copy", "unknown operation 'copy'"),
        ("peer", "jax", "unknown peer 'jax'"),
        ("size", 0, "size must be at least 1, not 0"),
        ("format", "mxfp9", "unknown format 'mxfp9'"),
    ],
)
def test_wrong_values_are_refused(axis, value, message):
    with pytest.raises(ValueError, match=message):
        row(**{axis: value})
