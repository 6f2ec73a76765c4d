"""What studies say is true of matrices whose answer is known."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import distance, polar_factor, through_svd

from muon_lab import polar, studies
from muon_lab.polar import schedules
from muon_lab.problems import streams
from muon_lab.studies import sources
from muon_lab.studies.running import run_case
from muon_lab.studies.study import Ended
from muon_lab.sweep import table


def row(study, **point):
    """Return the only row of one point of a study's grid; the axes left out have their first default."""
    found = studies.get(study)
    (case,) = found.settle({name: values[0] for name, values in found.defaults.items()} | point, None)
    return run_case(study, case)


# --- orthogonalization ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("method", ["simple", "quintic", "polar_express", "cans"])
def test_truncation_rounding_and_distance_are_what_they_say(method, dtype):
    measured = row("orthogonalization", spectrum="geometric(100)", shape="32x64", method=method, dtype=dtype)
    assert measured["outcome"] == "ok"
    (case,) = sources.settle("geometric(100)", 32, 64, 0, None)
    G = sources.matrix(case)
    steps = schedules.get(method, 5)
    X = polar.newton_schulz(steps)(torch.tensor(G, dtype=getattr(torch, dtype))).double().numpy()
    image = through_svd(G, steps.map)  # NumPy, in the test's own words
    assert measured["truncation"] == pytest.approx(distance(image, polar_factor(G)), rel=1e-9)
    assert measured["rounding"] == pytest.approx(np.linalg.norm(X - image) / np.sqrt(32), rel=1e-6, abs=1e-13)
    assert measured["relative"] == pytest.approx(distance(X, polar_factor(G)), rel=1e-9)
    assert measured["condition"] == pytest.approx(100)
    assert measured["rank"] == 32


def test_truncation_is_what_the_singular_values_say():
    """For a planted spectrum, ‖p(G) − U‖/‖U‖ is the root mean square of 1 − p(σ/‖σ‖)."""
    measured = row("orthogonalization", spectrum="geometric(10)", shape="16x24", method="simple", dtype="float64")
    sigma = np.geomspace(1, 0.1, 16)
    expected = np.sqrt(np.mean((1 - schedules.get("simple").map(sigma / np.linalg.norm(sigma))) ** 2))
    assert measured["truncation"] == pytest.approx(expected, rel=1e-9)
    assert measured["relative"] == pytest.approx(expected, rel=1e-9)


def test_published_distance_of_five_classic_steps_is_found():
    """KJ5 on a Gaussian 256×1024 has polar error 0.153, YOU5 0.017 (exact arithmetic)."""
    measured = table(
        "orthogonalization",
        spectrum="gaussian",
        shape="256x1024",
        method=("simple", "quintic"),
        dtype="float64",
        steps=5,
    )
    assert measured["relative"].to_list() == pytest.approx([0.153, 0.017], abs=5e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_input_cast_alone_costs_what_a_half_precision_svd_is_off_by(dtype):
    measured = row("orthogonalization", spectrum="geometric(100)", shape="32x64", method="svd", dtype=dtype)
    assert measured["relative"] == pytest.approx(measured["input_error"], rel=0.05)
    assert measured["input_error"] > {"float16": 1e-3, "bfloat16": 1e-2}[dtype]
    assert measured["truncation"] == 0.0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("spectrum", ["deficient", "rank_one(0)"])
def test_the_null_space_stays_empty_whatever_it_is_cast_to(dtype, spectrum):
    """What a cast leaves there is rounding, and must not be blown up to full size."""
    roundoff = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    measured = row("orthogonalization", spectrum=spectrum, shape="32x64", method="svd", dtype=dtype)
    assert measured["relative"] < 100 * roundoff
    assert measured["input_error"] < 100 * roundoff
    split = row("blockwise", source=spectrum, rows=32, cols=64, dim=0, tp=1, method="svd", dtype=dtype)
    assert split["relative"] == pytest.approx(measured["relative"], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_noise_of_a_recorded_gradient_stays_noise(dtype):
    found = table(
        "orthogonalization", spectrum="recorded:gradient/200/blocks.0.attention.qkv", method="svd", dtype=dtype
    )
    assert found["relative"].item() < {"float32": 1e-5, "bfloat16": 0.25}[dtype]


def test_exact_method_is_exact_on_recorded_gradients():
    worst = table("orthogonalization", spectrum="recorded", method="svd", dtype="float64")["relative"].max()
    assert worst < 1e-6


def test_first_layer_gradient_has_as_many_directions_as_its_batch_has_distinct_bytes():
    first = table("orthogonalization", spectrum="recorded:gradient/200/blocks.0.attention.qkv", method="svd")
    last = table("orthogonalization", spectrum="recorded:gradient/200/blocks.3.attention.qkv", method="svd")
    assert (first["rank"].item(), last["rank"].item()) == (50, 96)  # that batch has 50 distinct bytes


def test_a_direction_turned_around_is_read_from_the_gap():
    measured = row("orthogonalization", spectrum="rank_one(1e-3)", shape="16x24", method="aol", steps=4)
    assert measured["gap"] > 1  # an ascent direction
    assert measured["definiteness"] > 0.5
    assert "turns the leading singular direction around" in measured["note"]


@pytest.mark.parametrize("method", ["quintic", "svd"])
def test_zero_gives_zero_and_every_number_is_finite(method):
    measured = row("orthogonalization", spectrum="zero", shape="4x6", method=method)
    assert measured["outcome"] == "ok"
    assert (measured["relative"], measured["sigma_max"], measured["rank"]) == (0, 0, 0)


def test_failures_are_outcomes_and_name_the_step(monkeypatch):
    wild = replace(schedules.get("simple", 9), rows=((3e4, 0.0, 2e4),))
    monkeypatch.setattr(schedules, "get", lambda name, steps=None: wild)
    measured = row("orthogonalization", spectrum="flat", shape="4x4", method="simple", dtype="float32")
    assert (measured["outcome"], measured["relative"]) == ("nonfinite", None)
    assert measured["note"].startswith(f"step {measured['failed_step']} is not finite")
    milder = replace(schedules.get("simple"), steps=1)
    monkeypatch.setattr(schedules, "get", lambda name, steps=None: milder)
    measured = row("orthogonalization", spectrum="flat", shape="4x4", method="simple", dtype="float32")
    assert measured["outcome"] == "diverged"
    assert measured["sigma_max"] > 10


# --- blockwise --------------------------------------------------------------------------------------------------------


def test_deepspeeds_number_is_found():
    """One random 256×256 gradient, five classic steps, two ranks: 0.5273 (deepspeedai/DeepSpeed#8437)."""
    measured = table("blockwise", source="gaussian", rows=256, cols=256, seed=(0, 1), dim=0, tp=(2, 4), method="simple")
    # their number has the full Newton-Schulz result as reference, so it is layout_relative
    values = dict(zip(measured["tp"], measured["layout_relative"], strict=True))
    assert values[2] == pytest.approx(0.527, abs=0.015)
    assert values[4] == pytest.approx(0.579, abs=0.015)


@pytest.mark.parametrize(("tp", "error"), [(2, 0.470), (4, 0.517), (8, 0.535)])
def test_square_gaussian_error_is_a_constant_of_tp(tp, error):
    measured = table("blockwise", source="gaussian", rows=256, cols=256, seed=(0, 1, 2), tp=tp)
    assert measured["relative"].mean() == pytest.approx(error, abs=3 * 0.0018)


@pytest.mark.parametrize("dim", [0, 1])
def test_one_rank_is_the_whole_matrix(dim):
    measured = row("blockwise", source="gaussian", dim=dim, tp=1)
    assert measured["relative"] <= 1e-12
    assert measured["layout_relative"] == 0
    assert measured["sigma_max"] == pytest.approx(1)


def test_wide_blocks_of_a_long_side_are_too_large_by_exactly_root_tp():
    measured = table("blockwise", source="gaussian", rows=32, cols=256, dim=1, tp=(2, 4, 8))
    for found in measured.iter_rows(named=True):
        for name in ("sigma_max", "sigma_min", "fro_ratio"):
            assert found[name] == pytest.approx(math.sqrt(found["tp"]), rel=1e-12)


def test_more_ranks_than_rows_leave_empty_shards():
    measured = row("blockwise", source="gaussian", rows=3, cols=5, dim=0, tp=8)
    assert measured["outcome"] == "ok"


# --- canary: is the orthogonalizer called at all? ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["simple", "quintic", "polar_express", "cans", "deepseekv4", "taylor", "svd"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_thousandfold_gradient_gives_the_same_update_in_every_configuration(method, tp, monkeypatch):
    from muon_lab.parallel import layouts
    from muon_lab.polar import schedules
    from muon_lab.studies import methods

    steps = None if method == "svd" else schedules.get(method).steps
    calls = []
    exact = methods.build(method, steps, "float32")

    def counted(G):
        calls.append(G.shape)
        return exact(G)

    orthogonalize = layouts.blockwise(counted, dim=0, tp=tp)
    G = torch.tensor(streams.committed()["gradient/200/blocks.3.mlp.up"].numpy())
    update = orthogonalize(G)
    assert torch.allclose(orthogonalize(1000 * G), update, rtol=0, atol=1e-4 * float(update.abs().max()))
    assert len(calls) == 2 * tp  # one call a shard
    assert float((1000 * G - G).norm() / G.norm()) == pytest.approx(999)  # what plain SGD would do


# --- speed ------------------------------------------------------------------------------------------------------------


def test_the_reference_beside_itself_has_ratio_one_within_the_spread():
    measured = row("speed", shape="64x64", method="simple", peer="lab", repeats=15)
    assert measured["outcome"] == "ok"
    assert measured["ratio_low"] <= measured["ratio"] <= measured["ratio_high"]
    assert 0.2 < measured["ratio"] < 5  # the same function twice, taking turns on a noisy machine
    assert measured["relative"] == measured["reference_relative"]
    assert measured["gemm_gflops"] > 0


def test_times_become_ratios_rates_and_shares_as_they_say(monkeypatch):
    """With the clock replaced: candidate 4, 6, 8 ms, reference 2 ms, products 1 ms in every round."""
    from muon_lab.studies import speed

    monkeypatch.setattr(speed, "interleaved", lambda tasks, rounds: 1e-3 * np.array([[4, 2, 1], [6, 2, 1], [8, 2, 1]]))
    measured = row("speed", shape="64x64", method="simple", peer="lab", repeats=3)
    work = 5 * 6 * 64**3  # as much as 15 products of 64³
    assert (measured["ratio"], measured["ratio_low"], measured["ratio_high"]) == (3.0, 2.5, 3.5)
    assert (measured["milliseconds"], measured["reference_milliseconds"]) == pytest.approx((6.0, 2.0))
    assert measured["gemm_gflops"] == pytest.approx(15 * 2 * 64**3 / 1e-3 / 1e9)
    products = 15 * 2 * 64**3
    assert measured["share"] == pytest.approx(work / products / 6)
    assert measured["reference_share"] == pytest.approx(work / products / 2)


def test_a_case_runs_with_the_threads_of_its_axis(monkeypatch):
    seen = []
    study = studies.get("speed")
    monkeypatch.setattr(
        studies, "get", lambda name: replace(study, measure=lambda case: seen.append(torch.get_num_threads()) or {})
    )
    before = torch.get_num_threads()
    for count in (1, 2):
        run_case("speed", {"threads": count})
    run_case("speed", {})
    assert seen == [1, 2, 1]
    assert torch.get_num_threads() == before


def test_tasks_take_turns():
    from muon_lab.studies.speed import interleaved

    order = []
    seconds = interleaved((lambda: order.append("a"), lambda: order.append("b")), 3)
    assert order == ["a", "b"] * 4
    assert seconds.shape == (3, 2)


def test_flops_are_counted_by_hand_for_a_tiny_matrix():
    """2×3: X Xᵀ and B X take 24 each, A² takes 16; the Gram form of one step the same, by Q X instead of B X."""
    from muon_lab.studies import methods

    assert methods.work("simple", 1, 2, 3) == methods.work("simple", 1, 3, 2) == 24 + 16 + 24
    assert methods.work("cubic", 2, 2, 3) == 2 * (24 + 24)
    assert methods.work("gram:simple", 1, 2, 3) == 64
    assert methods.work("qdwh", None, 2, 3) is None


@pytest.mark.parametrize("peer", ["torch", "pytorch_optimizer", "pytorch_optimizer_gram"])
def test_peers_agree_with_the_lab(peer):
    pytest.importorskip("torch.optim._muon" if peer == "torch" else "pytorch_optimizer")
    dtype = "bfloat16" if peer == "torch" else "float32"
    measured = row("speed", shape="32x64", method="simple", dtype=dtype, peer=peer, repeats=1)
    assert measured["outcome"] == "ok"
    assert measured["relative"] == pytest.approx(measured["reference_relative"], rel=0.1 if peer == "torch" else 1e-3)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_is_strict_json_whatever_happens(monkeypatch):
    study = studies.get("schedules")
    (case,) = study.settle({"method": "simple", "steps": 5, "sigma": 0.5}, None)

    def outcome(measure):
        return replace(study, measure=measure).row(case)

    def ended(case):
        raise Ended("not_converged", "no", {"image": math.inf})

    for measure in (lambda case: {"image": math.nan}, lambda case: 1 / 0, ended):
        found = outcome(measure)
        json.dumps(found, allow_nan=False)
        assert found["image"] is None
    assert outcome(lambda case: 1 / 0)["note"] == "ZeroDivisionError: division by zero"
    assert outcome(ended)["outcome"] == "not_converged"


def test_a_study_runs_from_json_lines_with_the_numerics_alone():
    """No polars, tyro, tqdm or matplotlib: as on a bare GPU machine."""
    study = studies.get("blockwise")
    point = {name: values[0] for name, values in study.defaults.items()}
    cases = list(study.settle(point | {"source": "gaussian", "rows": 8, "cols": 16, "tp": 2}, None))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['polars', 'tyro', 'tqdm', 'matplotlib', 'beartype']));"
        "from muon_lab.studies.__main__ import main; sys.exit(main(['blockwise']))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(cases[0]), capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    here = run_case("blockwise", cases[0])
    assert found["key"] == here["key"]
    assert found["relative"] == pytest.approx(here["relative"], rel=1e-9)


@pytest.mark.parametrize("name", ["blockwise", "orthogonalization"])
def test_a_case_and_the_point_it_comes_from_are_the_same_row_everywhere(name):
    from muon_lab.studies.__main__ import read

    study = studies.get(name)
    point = {axis: values[0] for axis, values in study.defaults.items()}
    sourced = "source" if name == "blockwise" else "spectrum"
    for source in ("gaussian", "recorded:momentum/20/*"):
        cases = list(study.settle(point | {sourced: source, "method": "svd"}, None))
        again = [found for case in cases for found in read(study, 1, json.dumps(case))]
        assert [study.key(case) for case in again] == [study.key(case) for case in cases]
        from_point = list(read(study, 1, json.dumps(point | {sourced: source, "method": "svd"})))
        assert from_point == cases


@pytest.mark.parametrize(
    ("argument", "lines", "sentence"),
    [
        ("blockwize", "", "did you mean 'blockwise'?"),
        ("blockwise", "not json", "line 1 of the cases is not JSON"),
        ("blockwise", "[1]", "must be an object, not list"),
        ("blockwise", '{"tpp": 2}', "unknown field 'tpp'; did you mean 'tp'?"),
        ("blockwise", '{"tp": 2}', "line 1 lacks the axis 'source'"),
        ("schedules", '{"method": "quntic", "steps": 5, "sigma": 0.5}', "line 1: unknown schedule 'quntic'"),
        ("schedules", '{"method": "simple", "steps": "x", "sigma": 0.5}', "line 1: "),
    ],
)
def test_bad_lines_are_refused_before_anything_runs(argument, lines, sentence, monkeypatch, capsys):
    import io

    from muon_lab.studies.__main__ import main

    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main([argument]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err


def test_recorded_sources_are_the_committed_stream():
    assert [sources._roundoff(dtype) for dtype in ("float32", "bfloat16", "float16")] == [2**-24, 2**-8, 2**-11]
    (case,) = sources.settle("recorded:momentum/20/blocks.0.mlp.up", 1, 1, 0, None)
    expected = streams.committed()["momentum/20/blocks.0.mlp.up"].double().numpy()
    assert np.array_equal(sources.matrix(case), expected)
    assert (case["rows"], case["cols"], case["seed"]) == (384, 96, None)
    assert sources.roundoff(case) == 2.0**-24
