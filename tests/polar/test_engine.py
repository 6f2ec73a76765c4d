"""The iteration engine against the exact result of its schedule, and against published software."""

import json
import math
import pickle
import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import SHAPES, distance, through_svd, with_singular_values
from hypothesis import given
from hypothesis import strategies as st

from muon_lab import polar
from muon_lab.arithmetic import Exact, Rounded
from muon_lab.polar import engine, schedules
from muon_lab.polar.schedules import ScheduleWarning

GOLDEN = Path(__file__).parent.parent / "golden"
EPS32 = float(np.finfo(np.float32).eps)
EPS64 = float(np.finfo(np.float64).eps)


def run(G, name="simple", steps=None, arithmetic=Exact(), dtype=torch.float64):  # noqa: B008 (a value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScheduleWarning)
        schedule = schedules.get(name, steps)
    return polar.newton_schulz(schedule, arithmetic)(torch.as_tensor(np.asarray(G), dtype=dtype))


# --- reduces to -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules.known())
def test_one_by_one_is_the_scalar_map_at_one(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScheduleWarning)  # aol turns 1 around, and says so
        assert run([[-3.0]], name).item() == pytest.approx(-schedules.get(name).map(1.0), rel=1e-12)


@pytest.mark.parametrize("n", [64, 256])
def test_orthogonal_input_gives_phi_of_one_over_root_n(n):
    Q = with_singular_values(n, n, np.ones(n), seed=1)
    expected = schedules.get("simple").map(1 / math.sqrt(n))
    assert expected == pytest.approx({64: 0.688, 256: 1.071}[n], abs=1e-3)
    assert distance(run(Q), expected * Q) < 100 * EPS64


def test_diagonal_input_is_the_scalar_map_entry_by_entry():
    d = np.array([5.0, 2.0, 0.5])
    image = schedules.get("quintic").map(d / np.linalg.norm(d))
    assert np.allclose(run(np.diag(d), "quintic").numpy(), np.diag(image), rtol=0, atol=100 * EPS64)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 0, 5), (0, 2, 2)])
def test_empty_gives_empty(shape):
    assert run(np.zeros(shape)).shape == shape


# --- matches the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", schedules.known())
def test_float64_equals_the_schedule_through_an_svd(name, shape):
    G = np.random.default_rng(3).standard_normal(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScheduleWarning)  # one-row matrices are of rank 1
        X = run(G, name)
    schedule = schedules.get(name)
    # each step rounds its products; an error made early grows with the slope of the steps after it
    assert distance(X, through_svd(G, schedule.map)) < 10 * schedule.slope * EPS64


@pytest.mark.parametrize("row", json.loads((GOLDEN / "newton_schulz.json").read_text())["rows"], ids=lambda r: r["key"])
def test_agrees_with_emerging_optimizers(row):
    """The peer computed in float32, this test in float64: what separates them is the peer's rounding.

    The coefficients of `cans` amplify it to 4e-3. With 12 steps `quintic` is two steps past the start of its third
    round, where the result is small and the slope 3.9e6: a plain float32 loop is up to 2.7e-5 away from float64.
    """
    with np.load(GOLDEN / "newton_schulz.npz") as arrays:
        G, expected = arrays[row["input"]], arrays[row["key"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScheduleWarning)
        X = run(G, row["coefficients"], row["steps"])
    amplified = {"cans": 1e-2, "quintic": 3e-5 if row["steps"] == 12 else 1e-5}
    assert distance(X, expected) < amplified.get(row["coefficients"], 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-2), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("scale", [1.0, 1e7, 1e15])
def test_half_precision_is_normalised_before_the_cast(dtype, tolerance, scale):
    G = with_singular_values(16, 24, np.geomspace(1, 0.01, 16), seed=3) * scale
    X = run(G, arithmetic=Exact(dtype), dtype=torch.float32)
    assert X.dtype == torch.float32
    assert torch.isfinite(X).all()
    assert distance(X, through_svd(G, schedules.get("simple").map)) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_result_has_the_dtype_of_the_input(dtype):
    G = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]], dtype=dtype)
    assert polar.newton_schulz(schedules.get("simple"))(G).dtype == dtype
    assert polar.svd()(G).dtype == dtype


# --- invariances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-140, -126, -100, -60, -1, 1, 60, 100, 120])
def test_a_power_of_two_does_not_change_a_bit(exponent):
    G = torch.tensor(np.random.default_rng(0).integers(-8, 9, (6, 10)), dtype=torch.float32)
    scaled = torch.ldexp(G.double(), torch.tensor(exponent)).float()
    assert torch.isfinite(scaled).all()
    orthogonalize = polar.newton_schulz(schedules.get("quintic"))
    assert torch.equal(orthogonalize(scaled), orthogonalize(G))


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e-7, 1e7, 1e15, 1e30])
@pytest.mark.parametrize("name", ["simple", "quintic", "polar_express", "deepseekv4"])
def test_scale_does_not_matter_in_float32(name, scale):
    G = with_singular_values(32, 48, np.geomspace(1, 0.05, 32), seed=1)
    reference, X = run(G, name, dtype=torch.float32), run(G * scale, name, dtype=torch.float32)
    assert distance(X, reference.double().numpy()) < 10 * schedules.get(name).slope * EPS32


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_scale_does_not_matter_in_float64(scale):
    G = with_singular_values(16, 24, np.geomspace(1, 0.05, 16), seed=1)
    assert distance(run(G * scale, "quintic"), run(G, "quintic").numpy()) < 1e-11


def test_half_precision_data_are_multiplied_in_half_precision_unless_told_otherwise():
    G = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    schedule = schedules.get("simple")
    assert {X.dtype for X in polar.iterates(schedule)(G)} == {torch.bfloat16}
    assert {X.dtype for X in polar.iterates(schedule, Exact(torch.float32))(G)} == {torch.float32}


def test_the_norm_needs_no_double_copy_and_is_right_for_large_matrices():
    X = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    assert float(Exact().norm(X)) == pytest.approx(float(np.linalg.norm(X.double().numpy())), rel=1e-6)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**31))
def test_commutes_with_rotations_and_signs(m, n, seed):
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((m, n))
    Q, P = (np.linalg.qr(rng.standard_normal((k, k)))[0] for k in (m, n))
    X = run(G, "taylor").numpy()
    slope = schedules.get("taylor").slope
    assert distance(run(Q @ G @ P, "taylor"), Q @ X @ P) < 100 * slope * EPS64
    assert np.array_equal(run(-G, "taylor"), -X)
    assert np.array_equal(run(G.T, "taylor"), X.T) or m == n
    assert distance(run(G.T, "taylor"), X.T) < 100 * slope * EPS64


def views(G):
    big = torch.zeros(2 * G.shape[0], 2 * G.shape[1], dtype=G.dtype)
    big[1::2, 1::2] = G
    yield G.mT.contiguous().mT
    yield big[1::2, 1::2]
    yield torch.stack([G, G], -1)[..., 1]


@pytest.mark.parametrize("shape", [(4, 13), (13, 4), (6, 6)])
@pytest.mark.parametrize("method", ["newton_schulz", "svd"])
def test_strides_do_not_matter_and_nothing_is_written_through_a_view(shape, method):
    orthogonalize = polar.svd() if method == "svd" else polar.newton_schulz(schedules.get("simple"))
    G = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = orthogonalize(G.clone())
    for view in views(G):
        before = view.clone()
        assert torch.allclose(orthogonalize(view), expected, rtol=0, atol=1e-6)
        assert torch.equal(view, before)
    expanded = torch.randn(1, 5, generator=torch.Generator().manual_seed(2)).expand(3, 5)
    assert torch.allclose(orthogonalize(expanded), orthogonalize(expanded.clone()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", [(3,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
def test_a_batch_is_a_loop_and_its_members_are_independent(batch, shape):
    orthogonalize = polar.newton_schulz(schedules.get("quintic"))
    scales = 10.0 ** -torch.arange(math.prod(batch), dtype=torch.float64).reshape(*batch, 1, 1)
    G = torch.randn(*batch, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * scales
    X = orthogonalize(G)
    for index in np.ndindex(batch):
        assert torch.allclose(X[index], orthogonalize(G[index]), rtol=0, atol=1e-12)
    changed = G.clone()
    changed[tuple(-1 for _ in batch)] = 0.0
    Y = orthogonalize(changed)
    assert torch.equal(Y[tuple(-1 for _ in batch)], torch.zeros(shape, dtype=torch.float64))
    assert torch.equal(Y[tuple(0 for _ in batch)], X[tuple(0 for _ in batch)])


def test_zero_padding_stays_zero_and_changes_nothing():
    G = np.random.default_rng(8).standard_normal((4, 12))
    X = run(np.pad(G, ((0, 3), (0, 5)))).numpy()
    assert not X[4:].any()
    assert not X[:, 12:].any()
    assert distance(X[:4, :12], run(G).numpy()) < 1e-12


# --- refuses and warns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("G", "message"),
    [
        (torch.zeros(3), "at least 2 axes, but has shape \\(3,\\)"),
        (torch.zeros(2, 2, dtype=torch.int32), "real floating point, but is torch.int32"),
        (torch.zeros(2, 2, dtype=torch.complex64), "real floating point, but is torch.complex64"),
        (torch.tensor([[1.0, torch.nan], [torch.inf, 1.0]]), "2 of its 4 entries are not"),
    ],
)
@pytest.mark.parametrize("make", [polar.svd, lambda: polar.newton_schulz(schedules.get("simple"))])
def test_bad_input_is_refused(G, message, make):
    with pytest.raises(ValueError, match=message):
        make()(G)


def test_a_name_is_no_schedule_and_an_array_no_tensor():
    code = (
        "import numpy as np; from muon_lab import polar\n"
        "for call in (lambda: polar.newton_schulz('quintic'), lambda: polar.svd()(np.eye(2))):\n"
        "    try: call()\n"
        "    except ValueError as error: print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "schedule must be a Schedule, such as schedules.get('quintic'), not 'quintic'" in answer.stdout
    assert "must be a torch tensor, not ndarray" in answer.stdout


def test_aol_warns_on_nearly_rank_one_input_and_only_there():
    orthogonalize = polar.newton_schulz(schedules.get("aol"))
    u, v = np.ones((8, 1)) / math.sqrt(8), np.ones((1, 12)) / math.sqrt(12)
    noise = np.random.default_rng(0).standard_normal((8, 12))
    near = u @ v + 0.05 * noise / np.linalg.norm(noise)
    with pytest.warns(ScheduleWarning, match="'aol' turns the leading singular direction around"):
        X = orthogonalize(torch.tensor(near))
    assert float((X.numpy() * (u @ v)).sum()) < 0  # an ascent direction, as the warning says
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        orthogonalize(torch.tensor(noise))
        orthogonalize(torch.zeros(3, 4))
        orthogonalize(torch.tensor(np.stack([noise, noise])))
    with pytest.warns(ScheduleWarning):
        orthogonalize(torch.tensor(np.stack([noise, near])))


def test_iterates_end_in_what_newton_schulz_returns():
    G = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    schedule = schedules.get("quintic")
    iterates = list(polar.iterates(schedule)(G))
    assert len(iterates) == schedule.steps + 1
    assert torch.allclose(iterates[0], G / G.norm())
    assert torch.equal(iterates[-1], polar.newton_schulz(schedule)(G))


# --- an arithmetic a step ---------------------------------------------------------------------------------------------


def test_a_sequence_has_an_arithmetic_for_each_step():
    """Three steps with MXFP8 operands, two in bfloat16: the second half by hand from where the first ends."""
    G = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    schedule = schedules.get("taylor", 5)
    coarse, fine = Rounded("mxfp8_e4m3"), Rounded("bf16")
    found = polar.newton_schulz(schedule, [coarse] * 3 + [fine] * 2)(G)
    *_, X = polar.iterates(schedules.get("taylor", 3), coarse)(G)

    def bf16(Y):
        return Y.bfloat16().float()

    X = bf16(X)
    for a, b, c in schedule.coefficients[3:]:
        A = bf16(X @ X.mT)
        X = bf16((bf16((A @ A).mul(c).add(A, alpha=b)) @ X).add(X, alpha=a))
    assert torch.equal(found, X)
    assert torch.equal(polar.newton_schulz(schedule, [fine] * 5)(G), polar.newton_schulz(schedule, fine)(G))
    with pytest.raises(ValueError, match="5 are needed, 2 were given"):
        polar.newton_schulz(schedule, [fine] * 2)


# --- beyond the reach -------------------------------------------------------------------------------------------------


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


HALF = Exact(torch.bfloat16)
ESCAPES = [
    ("cans", 5, HALF, normal(64, 1) @ normal(1, 96, seed=1)),
    ("minimax(lower=1e-3)", 5, HALF, normal(64, 1) @ normal(1, 96, seed=1)),
    ("polar_express_raw", 8, HALF, normal(1, 64)),
    ("minimax(lower=1e-5)", 10, Exact(), normal(64, 1)),
    ("polar_express", 8, Rounded("fp8_e4m3"), normal(1, 64)),
]


@pytest.mark.parametrize(("name", "steps", "arithmetic", "G"), ESCAPES, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("form", [polar.newton_schulz, polar.gram_newton_schulz])
def test_rank_one_beyond_the_reach_of_a_schedule_warns(name, steps, arithmetic, G, form):
    orthogonalize = form(schedules.get(name, steps), arithmetic)
    with pytest.warns(ScheduleWarning, match="may let the leading singular value run away, up to NaN: it starts above"):
        orthogonalize(G)
    with pytest.warns(ScheduleWarning):
        orthogonalize(torch.stack([normal(*G.shape, seed=3) if min(G.shape) > 1 else G, G]))


@pytest.mark.parametrize("start", ["frobenius", "schatten4", "aol"])
@pytest.mark.parametrize("name", ["cans", "minimax(lower=1e-3)"])
def test_matrices_far_from_rank_one_do_not_warn(name, start):
    """Also where a start brings a norm of every matrix to 1: the leading singular value stays below."""
    orthogonalize = polar.newton_schulz(schedules.get(name, 5), HALF, start)
    leading = torch.tensor(with_singular_values(24, 32, np.sqrt([0.9] + [0.1 / 23] * 23)))
    for G in (normal(24, 32), normal(3, 16, 16), torch.zeros(4, 4), *([leading] if start == "frobenius" else [])):
        orthogonalize(G)  # a warning is an error here


@pytest.mark.parametrize("name", ["quintic", "simple", "deepseekv4", "taylor"])
@pytest.mark.parametrize("arithmetic", [Exact(), HALF, Rounded("bf16"), Rounded("mxfp8_e4m3")])
def test_schedules_with_headroom_do_not_warn_of_any_matrix(name, arithmetic):
    for G in (normal(1, 64), normal(16, 1) @ normal(1, 24)):
        polar.newton_schulz(schedules.get(name), arithmetic)(G)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.9999])
def test_the_leading_eigenvalue_is_compared_as_by_a_decomposition(share):
    """Bounds by norms of powers decide as the eigenvalue does, on both sides of it."""
    sigma = np.sqrt([share] + [(1 - share) / 15] * 15)
    A = torch.tensor(with_singular_values(16, 16, sigma, seed=2))
    A = torch.stack([A @ A.mT, A @ A.mT / 4])
    exact = float(torch.linalg.eigvalsh(A).max())
    assert exact == pytest.approx(share, rel=1e-12)
    for limit in (1e-3, 0.5, 1 - 1e-3, 1 - 1e-9, 1 + 1e-9, 1 + 1e-3, 2):
        assert engine._exceeds(A, limit * exact) == (limit < 1)


# --- a value ----------------------------------------------------------------------------------------------------------


def test_an_orthogonalizer_is_a_value_that_can_be_sent():
    quintic, G = schedules.get("quintic"), normal(5, 8)
    one = polar.newton_schulz(quintic, Rounded("bf16"), start="schatten4")
    assert isinstance(one, polar.NewtonSchulz)
    assert (one.schedule, one.arithmetic, one.start) == (quintic, Rounded("bf16"), "schatten4")
    found = one(G)
    assert one == polar.newton_schulz(quintic, Rounded("bf16"), start="schatten4")
    assert hash(one) == hash(polar.newton_schulz(quintic, Rounded("bf16"), start="schatten4"))
    assert one != polar.newton_schulz(quintic, Rounded("bf16"))
    sent = pickle.loads(pickle.dumps(one))
    assert sent == one
    assert torch.equal(sent(G), found)
    with pytest.raises(FrozenInstanceError):
        one.start = "frobenius"
    mixed = polar.newton_schulz(quintic, [Rounded("fp8_e4m3")] * 3 + [Exact()] * 2)
    assert mixed.arithmetic == (Rounded("fp8_e4m3"),) * 3 + (Exact(),) * 2
    assert mixed == pickle.loads(pickle.dumps(mixed))


# --- what is not asked for so -----------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_in_one_sentence():
    """In a process of its own, without the type checks of the tests."""
    code = """
import torch
from muon_lab import polar
from muon_lab.arithmetic import Exact, Rounded
from muon_lab.polar import schedules, tuning
s, G = schedules.get("quintic"), torch.ones(2, 3)
class Mine:
    norm = store = gram = square = matmul = Exact.gram
target = tuning.target(G)
start = tuning.measured(s, Exact(), [target])
for call in (
    lambda: polar.newton_schulz(s, "mxfp8"),
    lambda: polar.newton_schulz(s, None),
    lambda: polar.iterates(s, Exact),
    lambda: polar.newton_schulz(s, Mine()),
    lambda: polar.newton_schulz(s, [Exact()] * 4 + ["bf16"]),
    lambda: polar.gram_newton_schulz(s, [Exact()] * 5),
    lambda: polar.gram_newton_schulz(s, restarts=2),
    lambda: polar.auto((4, 4), 5, "bf16"),
    lambda: polar.auto((32.5, 64), 5),
    lambda: polar.auto(7, 5),
    lambda: polar.auto((4, 4), 5, dtype="float32"),
    lambda: polar.auto((4, 4), 5, dtype=torch.int32),
    lambda: polar.auto((4, 4), 5, tolerance="x"),
    lambda: polar.auto((4, 4), schedule=3),
    lambda: polar.qdwh(roundoff="x"),
    lambda: tuning.search(5, Exact(), [G]),
    lambda: tuning.search(5, "bf16", [target]),
    lambda: tuning.refine(start, "bf16", [target]),
    lambda: tuning.refine(start, Exact(), [G]),
    lambda: tuning.refine(start, Exact(), [target], evaluations=2.5),
):
    try:
        call()
        print("accepted")
    except ValueError as error:
        print(error)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == [
        "arithmetic must be a value such as Exact(), not the text 'mxfp8': did you mean Rounded('mxfp8')?",
        "arithmetic must be a value such as Exact(), not None",
        "arithmetic must be a value such as Exact(), not the class Exact: did you mean Exact(...)?",
        "arithmetic must be a value such as Exact(), but this Mine has no roundoff and no commuting",
        "arithmetic of step 4 must be a value such as Exact(), not the text 'bf16': did you mean Rounded('bf16')?",
        "arithmetic must be a value such as Exact(), not a list of them",
        "restarts must be a sequence of steps such as [2], not 2",
        "arithmetic must be a value such as Exact(), not the text 'bf16': did you mean Rounded('bf16')?",
        "a form is chosen for matrices, of a shape whose axes are counts, not (32.5, 64)",
        "a form is chosen for matrices, of a shape with at least 2 axes, not 7",
        "dtype must be a real floating-point dtype such as torch.float32, not 'float32'",
        "dtype must be a real floating-point dtype such as torch.float32, not torch.int32",
        "tolerance must be a number, not 'x'",
        "schedule must be a Schedule, such as schedules.get('quintic'), not 3",
        "roundoff must be at least 0 and below 1, not 'x'",
        "targets must come from tuning.target, but number 0 is a Tensor",
        "arithmetic must be a value such as Exact(), not the text 'bf16': did you mean Rounded('bf16')?",
        "arithmetic must be a value such as Exact(), not the text 'bf16': did you mean Rounded('bf16')?",
        "targets must come from tuning.target, but number 0 is a Tensor",
        "evaluations of a refined schedule must be a positive integer, not 2.5",
    ]
