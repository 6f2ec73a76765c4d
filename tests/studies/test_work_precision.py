"""Work-precision rows: errors as NumPy finds them, flops as they are counted, times as ratios of turns."""

import json

import numpy as np
import pytest
import torch
from cases import distance, polar_factor

from muon_lab import polar, studies
from muon_lab.polar import schedules
from muon_lab.studies import methods, sources, speed, work_precision
from muon_lab.studies.running import run_case
from muon_lab.sweep import table

STUDY = studies.get("work_precision")


def case(**point):
    (found,) = STUDY.settle({name: values[0] for name, values in STUDY.defaults.items()} | point, None)
    return found


def row(**point):
    return run_case("work_precision", case(**{"repeats": 1} | point))


def five_quintic(m, n):
    """Two products of m×m by m×n and one of m×m by m×m, five times."""
    return 5 * (4 * m * m * n + 2 * m**3)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("method", ["quintic", "auto:quintic", "schatten4-1:simple", "minimax(lower=1e-2)"])
def test_errors_are_those_of_the_result(method, dtype):
    measured = row(spectrum="geometric(100)", shape="24x64", method=method, dtype=dtype, steps=5)
    (settled,) = sources.settle("geometric(100)", 24, 64, 0, None)
    G = sources.matrix(settled)
    X = methods.build(method, 5, dtype)(torch.tensor(G, dtype=getattr(torch, dtype))).double().numpy()
    U = polar_factor(G)
    assert measured["outcome"] == "ok"
    assert measured["relative"] == pytest.approx(distance(X, U), rel=1e-9)
    assert measured["cosine"] == pytest.approx(np.vdot(X, U) / np.linalg.norm(X) / np.linalg.norm(U), rel=1e-12)
    gram = np.linalg.norm(X @ X.T - np.eye(24)) / np.sqrt(24)
    assert measured["orthogonality"] == pytest.approx(gram, rel=1e-6)


@pytest.mark.parametrize("method", methods.EXACT)
def test_exact_methods_are_exact_and_count_their_own_flops(method):
    point = {"spectrum": "geometric(10)", "shape": "16x40", "method": method}
    measured = row(dtype="float64", **point)
    assert measured["relative"] < 1e-12
    assert row(dtype="float32", **point)["relative"] < 1e-5
    maker = {"newton": polar.scaled_newton}.get(method) or getattr(polar, method)
    own = float(maker().decompose(torch.tensor(sources.matrix(case(**point)))).flops)
    assert measured["flops"] == own > 0
    assert measured["flops_ratio"] == pytest.approx(own / five_quintic(16, 40))
    assert measured["steps"] is None


def test_flops_of_schedules_are_in_units_of_five_plain_quintic_steps():
    for steps, unit in ((1, 0.2), (5, 1.0), (8, 1.6)):
        measured = row(shape="12x20", method="polar_express", steps=steps)
        assert measured["flops"] == five_quintic(12, 20) * steps / 5
        assert measured["flops_ratio"] == pytest.approx(unit)
    cubic = row(shape="20x12", method="cubic", steps=5)
    assert cubic["flops"] == 5 * 4 * 12 * 12 * 20
    assert row(shape="16x256", method="auto:quintic", steps=5)["flops_ratio"] < 0.5


def test_flops_of_auto_are_those_of_the_dtype():
    """In bfloat16 it keeps the plain loop."""
    ratios = {
        dtype: row(shape="16x256", method="auto:quintic", dtype=dtype)["flops_ratio"]
        for dtype in ("float32", "bfloat16")
    }
    assert ratios["float32"] < ratios["bfloat16"] == pytest.approx(case()["steps"] / 5)


def test_times_become_ratios_and_shares(monkeypatch):
    """With the clock replaced: candidate 4, 6, 8 ms, reference 2 ms, products 1 ms in every round."""
    monkeypatch.setattr(speed, "interleaved", lambda tasks, rounds: 1e-3 * np.array([[4, 2, 1], [6, 2, 1], [8, 2, 1]]))
    measured = row(shape="64x64", method="simple", steps=10)
    assert [measured[name] for name in ("ratio_low", "ratio", "ratio_high")] == pytest.approx([2.5, 3.0, 3.5])
    assert (measured["milliseconds"], measured["reference_milliseconds"]) == pytest.approx((6.0, 2.0))
    assert measured["gemm_gflops"] == pytest.approx(five_quintic(64, 64) / 1e-3 / 1e9)
    assert (measured["share"], measured["reference_share"]) == pytest.approx((2 / 6, 1 / 2))


def test_what_takes_turns_is_the_method_and_the_reference(monkeypatch):
    results = []
    monkeypatch.setattr(
        speed,
        "interleaved",
        lambda tasks, rounds: results.extend(task() for task in tasks) or np.ones((rounds, len(tasks))),
    )
    point = {"spectrum": "gaussian", "shape": "8x20", "method": "gram:quintic", "dtype": "float64", "steps": 4}
    row(**point)
    G = torch.tensor(sources.matrix(case(**point)))
    candidate, reference, _ = results
    assert torch.equal(candidate, methods.build("gram:quintic", 4, "float64")(G))
    assert torch.equal(reference, polar.newton_schulz(schedules.get("simple", 5))(G.float()))


def test_the_reference_costs_as_many_flops_as_the_unit():
    _, name, steps, dtype = speed.REFERENCE
    assert methods.work(name, steps, 24, 64, dtype) == methods.work(*work_precision.FIVE, 24, 64)


def test_more_work_is_more_precision_for_a_design():
    found = table(
        "work_precision", spectrum="geometric(10)", shape="16x32", method="minimax(lower=0.03)", steps=(2, 4, 6)
    )
    assert found["flops"].is_sorted()
    assert found["relative"].is_sorted(descending=True)
    assert found["relative"].to_list()[-1] < 1e-5


def test_sources_are_those_of_the_other_studies():
    cases = list(STUDY.settle(case() | {"spectrum": "recorded:gradient/200/blocks.3.mlp.*"}, None))
    assert {(one["spectrum"], one["shape"], one["seed"]) for one in cases} == {
        ("recorded", "384x96", None),
        ("recorded", "96x384", None),
    }
    measured = run_case("work_precision", cases[0] | {"method": "qdwh", "steps": None, "repeats": 1})
    assert measured["relative"] < 1e-3
    assert measured["matrix"] == cases[0]["matrix"]


def test_failures_are_outcomes(monkeypatch):
    build = methods.build
    for result, outcome, relative in ((torch.inf, "nonfinite", False), (100.0, "diverged", True)):
        monkeypatch.setattr(methods, "build", lambda *given, value=result: lambda G: torch.full_like(G, value))
        measured = row(shape="4x6")
        assert measured["outcome"] == outcome
        assert (measured["relative"] is not None) == relative
        assert measured["ratio"] is None
        json.dumps(measured, allow_nan=False)
    monkeypatch.setattr(methods, "build", build)
    assert row(shape="4x6")["outcome"] == "ok"


@pytest.mark.parametrize("spectrum", ["zero", "rank_one(0)", "flat"])
@pytest.mark.parametrize("method", ["quintic", "auto:quintic", "qdwh", "gram_eigh"])
def test_decided_cases_are_rows(spectrum, method):
    measured = row(spectrum=spectrum, shape="6x9", method=method)
    assert measured["outcome"] == "ok"
    assert (measured["flops"] > 0) == ((spectrum, method) != ("zero", "qdwh"))  # which has nothing to iterate on


@pytest.mark.parametrize(
    ("point", "sentence"),
    [
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"repeats": 0}, "repeats must be at least 1, not 0"),
        ({"shape": "12"}, "shape must be ROWSxCOLS"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"method": "quintik"}, "did you mean 'quintic'"),
        ({"spectrum": "gausian"}, "did you mean 'gaussian'"),
    ],
)
def test_wrong_values_are_refused(point, sentence):
    with pytest.raises(ValueError, match=sentence):
        case(**point)
