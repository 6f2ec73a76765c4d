"""The distance to the polar factor lies between the bounds, whatever was done to X; and what was done is read back."""

import math

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_lab.measure import bounds, certificate
from muon_lab.measure.certificate import CEILING, Certificate, _Products, certify
from muon_lab.measure.enclosures import inverse_root
from muon_lab.oracle import multiprecision, polar
from muon_lab.problems import planted, streams

U32, U64 = bounds.unit_roundoff("fp32"), bounds.unit_roundoff("fp64")
SHAPES = [(5, 5), (4, 7), (7, 4), (1, 6), (6, 1)]
DELTAS = [1e-2, 1e-4, 1e-6]
HIGHER_ORDER = 4.0  # times delta: second-order terms of what is read, relative to the first
FLOOR = 1e3 * U64  # a few dozen roundings in matrices of a few dozen entries of size 1


def tensor(A):
    return torch.tensor(np.asarray(A, dtype=np.float64))


def turned(P, delta, side, generator):
    """Return P turned by exp(delta K) from the left or the right, K skew of norm 1, and K."""
    n = P.shape[0] if side == "left" else P.shape[1]
    K = generator.standard_normal((n, n))
    K = (K - K.T) / max(np.linalg.norm(K - K.T), 1e-300)
    R = scipy.linalg.expm(delta * K)
    return (R @ P if side == "left" else P @ R), K


def shrunk(p, delta, generator):
    """Return the factor with singular values 1 + delta times a normal number each."""
    return (p.U * (1 + delta * generator.standard_normal(len(p.s)))) @ p.V.T


def truth(X, G, roundoff=polar.ROUNDOFF):
    """Return the relative and the spectral distance, and what the oracle may be off by (of the relative one)."""
    found = polar.polar(G, roundoff=roundoff)
    rank = int(found.rank)
    E = np.asarray(X, np.float64) - found.U
    distance, spectral = np.linalg.norm(E) / (math.sqrt(rank) or 1.0), np.linalg.norm(E, 2)
    unsure = 8 * max(G.shape) * U64 * np.linalg.norm(X)
    if rank:
        unsure += bounds.polar_by_svd(found.s[0], found.s[rank - 1], rank, *G.shape, U64)
    return distance, spectral, unsure


def assert_enclosed(found, X, G, roundoff=polar.ROUNDOFF):
    distance, spectral, unsure = truth(X, G, roundoff)
    assert all(math.isfinite(float(value)) for value in found)
    assert found.lower - unsure <= distance <= found.upper + unsure
    assert found.spectral_lower - unsure <= spectral <= found.spectral_upper + unsure
    assert found.lower <= found.estimate <= found.upper
    s = np.linalg.svd(G / (np.abs(G).max() or 1.0), compute_uv=False)
    assert found.smallest <= s[-1] / (np.linalg.norm(s) or 1.0) + 8 * max(G.shape) * U64
    return distance


def iterated(G, steps=5, a=3.4445, b=-4.7750, c=2.0315, dtype=np.float64):
    """Return five steps of the quintic polynomial of K. Jordan et al., as plain as it gets."""
    X = (G / np.linalg.norm(G)).astype(dtype)
    X = X if X.shape[0] <= X.shape[1] else X.T
    for _ in range(steps):
        A = X @ X.T
        X = dtype(a) * X + (dtype(b) * A + dtype(c) * A @ A) @ X
    return X if X.shape == G.shape else X.T


# --- reads what was planted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_factor_itself_is_at_distance_zero(shape):
    p = planted.draw("geometric(10)", *shape, np.random.default_rng(0))
    found = certify(tensor(p.polar), tensor(p.G))
    assert_enclosed(found, p.polar, p.G)
    assert found.lower == 0
    assert found.upper < 1e4 * U64  # κ = 10 times a thousand roundings
    assert max(found.orthogonality, found.asymmetry, found.tilt) < FLOOR
    assert 0.7 * p.s[-1] < found.smallest * np.linalg.norm(p.s) <= p.s[-1] * (1 + FLOOR)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_radial_error_is_read_by_orthogonality_alone(shape, delta):
    p, generator = planted.draw("geometric(10)", *shape, np.random.default_rng(0)), np.random.default_rng(1)
    X = shrunk(p, delta, generator)
    found = certify(tensor(X), tensor(p.G))
    distance = assert_enclosed(found, X, p.G)
    assert float(found.orthogonality) == pytest.approx(2 * distance, rel=HIGHER_ORDER * delta, abs=FLOOR)
    assert max(found.asymmetry, found.tilt) < FLOOR
    assert found.upper - found.lower < 1e4 * U64
    assert float(found.estimate) == pytest.approx(distance, abs=1e4 * U64)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
def test_a_rotation_is_read_by_asymmetry_alone(shape, delta):
    p = planted.draw("geometric(10)", *shape, np.random.default_rng(0))
    wide = shape[0] <= shape[1]
    X, K = turned(p.polar, delta, "left" if wide else "right", np.random.default_rng(1))
    H = (p.U * p.s) @ p.U.T if wide else p.hermitian
    found = certify(tensor(X), tensor(p.G))
    distance = assert_enclosed(found, X, p.G)
    expected = delta * np.linalg.norm(H @ K + K @ H) / 2 / np.linalg.norm(p.s)
    assert float(found.asymmetry) == pytest.approx(expected, rel=HIGHER_ORDER * delta, abs=FLOOR)
    assert max(found.orthogonality, found.tilt) < FLOOR
    # part 5 leaves a few delta ‖N‖ / (h + λ), for κ = 10; the estimate is of second order too
    assert found.upper - found.lower < 40 * delta * distance + 1e4 * U64
    assert float(found.estimate) == pytest.approx(distance, rel=10 * delta**2, abs=1e4 * U64)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (1, 6), (6, 1)])
def test_a_tilt_out_of_the_row_space_is_read_by_tilt(shape, delta):
    p = planted.draw("geometric(10)", *shape, np.random.default_rng(0))
    p = p if shape[0] <= shape[1] else planted.Planted(p.G.T, p.V, p.s, p.U)
    m = len(p.s)
    outside = scipy.linalg.null_space(p.V.T).T[:1]  # a row orthogonal to the row space
    direction = np.random.default_rng(2).standard_normal((m, 1)) @ outside
    direction *= delta / np.linalg.norm(direction)
    K = p.polar.T @ direction
    X = p.polar @ scipy.linalg.expm(K - K.T)  # P + direction, to first order
    found = certify(tensor(X), tensor(p.G))
    distance = assert_enclosed(found, X, p.G)
    assert distance == pytest.approx(delta / math.sqrt(m), rel=HIGHER_ORDER * delta)
    expected = np.linalg.norm((p.U * p.s) @ p.U.T @ direction) / np.linalg.norm(p.s)
    assert float(found.tilt) == pytest.approx(expected, rel=HIGHER_ORDER * delta, abs=FLOOR)
    assert found.asymmetry < HIGHER_ORDER * delta**2 + FLOOR
    assert found.orthogonality < FLOOR
    assert found.upper - found.lower < 40 * delta * distance + 1e4 * U64
    assert float(found.estimate) == pytest.approx(distance, rel=10 * delta**2, abs=1e4 * U64)


def test_a_flipped_direction_escapes_orthogonality_and_asymmetry_and_is_not_certified():
    p = planted.draw("geometric(10)", 4, 7, np.random.default_rng(0))
    X = (p.U * [1, 1, 1, -1]) @ p.V.T
    found = certify(tensor(X), tensor(p.G))
    assert max(found.orthogonality, found.asymmetry, found.tilt) < FLOOR
    assert float(found.estimate) == pytest.approx(1.0)  # ‖X - P‖ = 2, over two
    assert found.lower < 1 < found.upper  # as all three residuals vanish, only M says that X is not P
    assert found.smallest > 0  # of G, which has full rank all the same


def test_every_equality_of_the_theorem_holds_for_errors_of_any_size():
    generator = np.random.default_rng(0)
    for m, n in ((4, 4), (3, 7)):
        G, X = generator.standard_normal((2, m, n))
        Q = generator.standard_normal((m, m))
        q = Q @ Q.T + np.eye(m)  # any symmetric positive definite matrix, however bad
        P, T, W = polar.polar(G).U, np.linalg.inv(q), q @ X
        H = (lambda s, V: (V * np.sqrt(s)) @ V.T)(*np.linalg.eigh(G @ G.T))
        Psi, B, F = np.eye(m) - W @ W.T, W @ G.T, P @ W.T - np.eye(m)
        M, N, J = (B + B.T) / 2, B - B.T, G - B.T @ W
        root = scipy.linalg.sqrtm(T)
        close = {"rtol": 1e-9, "atol": 1e-9 * np.linalg.norm(q) ** 2 * np.linalg.norm(X) ** 2}
        parts = np.linalg.norm(X - W) ** 2 + np.linalg.norm(root @ (W - P)) ** 2 - np.trace((T - np.eye(m)) @ Psi)
        np.testing.assert_allclose(np.linalg.norm(X - P) ** 2, parts, **close)
        within = np.linalg.norm(F) ** 2 + np.linalg.norm(W - W @ P.T @ P) ** 2
        np.testing.assert_allclose(np.linalg.norm(W - P) ** 2, within, **close)
        np.testing.assert_allclose(H @ F + F @ B, -N - P @ J.T, **close)
        np.testing.assert_allclose(J @ W.T, B.T @ Psi, **close)
        np.testing.assert_allclose(P, (np.eye(m) + F) @ np.linalg.solve(B.T, G), **close)
        K = generator.standard_normal((m, m))
        K -= K.T
        Delta, R = F + K, N - M @ K - K @ M
        right = -R - H @ F @ K - (N @ K - K @ N) / 2 - P @ J.T
        np.testing.assert_allclose(H @ Delta + Delta @ B, right, **close)


# --- holds ------------------------------------------------------------------------------------------------------------

exponents = st.floats(-12, 1)


@st.composite
def problems(draw):
    """Return X and G: a spectrum of up to 16 decades, some of it zero, and errors of any kind and size."""
    m, n = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    s = np.sort(10.0 ** -(draw(st.sampled_from([0, 1, 3, 8, 16])) * generator.random(min(m, n))))[::-1]
    s = s * (np.arange(len(s)) < len(s) - draw(st.sampled_from([0, 0, 0, 0, 1, 8])))
    p = planted.planted(s.copy(), m, n, generator)
    X = p.polar if draw(st.booleans()) else shrunk(p, min(10 ** draw(exponents), 3.0), generator)
    if draw(st.booleans()):
        X, _ = turned(X, 10 ** draw(exponents), "left", generator)
    if draw(st.booleans()):
        X, _ = turned(X, 10 ** draw(exponents), "right", generator)
    if draw(st.booleans()):
        X = X + 10 ** draw(exponents) * generator.standard_normal((m, n))
    return X, np.ldexp(p.G, draw(st.integers(-60, 60)))


@settings(max_examples=100)
@given(problems(), st.sampled_from([None, 1, 4, 12]), st.sampled_from([torch.float64, torch.float32]))
def test_the_distance_lies_between_the_bounds(problem, steps, dtype):
    X, G = problem
    assert_enclosed(certify(tensor(X), tensor(G), steps=steps, dtype=dtype), X, G)


@settings(max_examples=50)
@given(
    problems(), st.sampled_from(["identity", "short", "long", "skewed", "opposite", "indefinite"]), st.integers(0, 99)
)
def test_it_holds_whatever_is_taken_for_the_inverse_root(problem, kind, seed):
    """The root is not believed: W is measured, and a q that is not positive definite is found out."""

    def wrong(C, noise, steps):
        q, m = inverse_root(C, noise, steps), C.shape[-1]
        E = torch.tensor(np.random.default_rng(seed).standard_normal((m, m)))
        return {
            "identity": torch.eye(m, dtype=torch.float64),
            "short": 0.9 * q,
            "long": 1.1 * q,
            "skewed": q + 0.1 * (E + E.mT) * q.abs().max(),
            "opposite": -q,
            "indefinite": q - (1 + q[..., :1, :1]) * torch.eye(m, dtype=torch.float64),
        }[kind]

    X, G = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "inverse_root", wrong)
        found = certify(tensor(X), tensor(G))
    assert_enclosed(found, X, G)
    if kind == "opposite":
        assert found.upper >= 1  # W = -P is orthonormal, and no more than that


def test_a_reflection_is_no_inverse_root_even_where_everything_else_agrees(monkeypatch):
    """With q = diag(1, -1) the flipped row of X becomes that of W, near P; the quadratic form of part 1 is negative."""
    cosine, sine = math.cos(0.5), math.sin(0.5)
    X, G = tensor([[1, 0, 0], [0, -cosine, -sine]]), torch.eye(2, 3)
    monkeypatch.setattr(certificate, "inverse_root", lambda *_: torch.diag(tensor([1, -1])))
    assert_enclosed(certify(X, G), X.numpy(), G.numpy())


@given(problems(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_it_holds_for_what_low_precision_holds(problem, dtype):
    X, G = problem
    X, G = tensor(X).clamp(-100, 100).to(dtype), tensor(G / (np.abs(G).max() or 1.0)).to(dtype)
    assert_enclosed(certify(X, G), X.double().numpy(), G.double().numpy())


@pytest.mark.parametrize("kappa", [10, 1e4, 1e8, 1e12])
@pytest.mark.parametrize("shape", [(6, 6), (5, 9)])
def test_it_holds_and_closes_for_a_polynomial_of_a_nearly_singular_matrix(shape, kappa):
    p = planted.draw(f"geometric({kappa})", *shape, np.random.default_rng(0))
    X = iterated(p.G)
    found = certify(tensor(X), tensor(p.G))
    distance = assert_enclosed(found, X, p.G)
    if kappa <= 1e4:
        assert found.upper - found.lower < 1e-6 * distance
    if kappa <= 1e8:  # beyond, X falls below the rounding of its own Gram matrix
        assert float(found.estimate) == pytest.approx(distance, rel=1e-2)


def test_a_distance_of_a_millionth_is_known_to_six_digits():
    """The oracle works to 40 digits here; of the millionth, one part in a thousand is of second order."""
    generator = np.random.default_rng(0)
    p = planted.draw("linear(4)", 3, 4, generator)
    X = p.polar + 1e-6 * generator.standard_normal((3, 4))
    U = multiprecision.polar(p.G, digits=40).U
    with mpmath.workdps(40):
        distance = float(mpmath.mnorm(mpmath.matrix(X.tolist()) - U, "f") / mpmath.sqrt(3))
    found = certify(tensor(X), tensor(p.G))
    assert found.lower <= distance <= found.upper
    assert found.upper - found.lower < 1e-4 * distance  # 40 delta as above, plus rounding of 1e-11
    assert float(found.estimate) == pytest.approx(distance, rel=1e-6)


@pytest.mark.parametrize(
    ("spectrum", "shape", "width"),
    [("gaussian", (64, 256), 1e-6), ("gaussian", (64, 64), 1e-6), ("geometric(100)", (64, 128), 1e-6)],
)
def test_five_steps_are_certified_closely(spectrum, shape, width):
    p = planted.draw(spectrum, *shape, np.random.default_rng(0))
    for steps in (None, 12):
        X = iterated(p.G)
        found = certify(tensor(X), tensor(p.G), steps=steps)
        assert (found.upper - found.lower) / assert_enclosed(found, X, p.G) < width
        X = iterated(p.G, dtype=np.float32)
        found = certify(torch.tensor(X), tensor(p.G), steps=steps)
        assert (found.upper - found.lower) / assert_enclosed(found, X, p.G) < 1e-3


@pytest.mark.parametrize("name", ["gradient/200/blocks.3.mlp.up", "gradient/200/blocks.3.attention.out"])
def test_five_steps_on_a_recorded_gradient_are_certified_closely(name):
    G = streams.committed()[name]
    X = iterated(np.asarray(G, np.float64))
    found = certify(tensor(X), torch.as_tensor(G), roundoff=U32)
    distance = assert_enclosed(found, X, np.asarray(G, np.float64), roundoff=U32)
    assert found.upper - found.lower < 1e-3 * distance
    assert found.smallest > 0


# --- degenerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("steps", [None, 8])
def test_a_deficient_matrix_is_never_certified_and_the_bounds_hold_for_either_factor(shape, steps):
    p = planted.draw("deficient(0.5)", *shape, np.random.default_rng(0))
    for X in (iterated(p.G), polar.filled(p.G).U, p.polar):
        found = certify(tensor(X), tensor(p.G), steps=steps)
        distance = assert_enclosed(found, X, p.G)
        assert found.smallest == 0
        assert found.upper > 1  # nothing is claimed of the null space
        filled = np.linalg.norm(X - polar.filled(p.G).U) / math.sqrt(min(shape))
        assert found.lower <= filled <= found.upper
        if steps is None:
            assert float(found.estimate) == pytest.approx(distance, rel=1e-2, abs=1e-6)  # within the range of G


def test_directions_below_the_rounding_of_the_data_leave_the_rank_undecided():
    p = planted.draw("one_small(1e7)", 5, 8, np.random.default_rng(0))
    assert certify(tensor(p.polar), tensor(p.G)).upper < 1e-6
    undecided = certify(tensor(p.polar), tensor(p.G), roundoff=U32)
    assert undecided.smallest == 0
    assert_enclosed(undecided, p.polar, p.G, roundoff=U32)
    assert undecided.lower <= truth(p.polar, p.G)[0] <= undecided.upper  # and if the direction counts


def test_what_is_far_from_any_isometry_is_known_to_be_far():
    p = planted.draw("deficient(0.5)", 4, 6, np.random.default_rng(0))
    for X, least in ((3 * p.polar, 0.1), (0.7 * p.polar, 0.1), (100 * p.polar, 40.0), (1e-3 * p.polar, 0.99)):
        found = certify(tensor(X), tensor(p.G))
        assert found.smallest == 0
        assert found.lower >= least
        assert_enclosed(found, X, p.G)


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (5, 2)])
def test_zero_matrices_have_decided_answers(shape):
    zero, X = torch.zeros(shape), torch.zeros(shape)
    found = certify(X, zero)
    assert found.lower == found.upper == found.estimate == found.spectral_lower == found.spectral_upper == 0
    assert found.asymmetry == found.tilt == found.smallest == 0
    X[0, 0] = 3.0
    found = certify(X, zero)
    assert found.lower == found.upper == found.estimate == 3  # P = 0, as for the relative error of measure.polar
    assert float(found.spectral_lower) == pytest.approx(3, rel=1e-3)
    assert float(found.spectral_upper) == pytest.approx(3, rel=1e-3)
    G = torch.eye(*shape)
    found = certify(torch.zeros(shape), G)
    assert found.lower <= 1 <= found.upper
    assert found.upper - found.lower < FLOOR


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 2, 3)])
def test_an_empty_matrix_has_no_error(shape):
    found = certify(torch.zeros(shape), torch.zeros(shape))
    assert all(value.shape == shape[:-2] and not value.any() for value in found)


@pytest.mark.parametrize("tiny", [0.0, 1e-320, 1e-20, -1e-320])
def test_an_estimate_divides_by_nothing_smaller_than_rounding(tiny):
    G = torch.tensor([[1, 0, 0, 0], [0, 1, -1e-10, 0], [0, 1e-10, tiny, 1e-10]], dtype=torch.float64)
    X = torch.eye(3, 4, dtype=torch.float64)  # M = diag(1, 1, tiny), and the third row is not without anything
    assert_enclosed(certify(X, G), X.numpy(), G.numpy())


def test_an_update_at_the_end_of_the_numbers_stays_a_number():
    found = certify(torch.full((2, 3), 1e300, dtype=torch.float64), torch.eye(2, 3))
    assert all(math.isfinite(float(value)) for value in found)
    assert float(found.lower) == pytest.approx(math.sqrt(3) * 1e300)
    assert float(found.upper) == pytest.approx(math.sqrt(3) * 1e300)


@pytest.mark.parametrize("size", [1e3, 2 * CEILING, 1e30, 1e150, 1e-30, 1e-200])
def test_an_update_of_absurd_size_gets_the_triangle_inequality(size):
    p = planted.draw("linear(4)", 3, 5, np.random.default_rng(0))
    X = size * np.random.default_rng(1).standard_normal((3, 5))
    for dtype in (torch.float64, torch.float32):
        found = certify(tensor(X), tensor(p.G), dtype=dtype)
        assert_enclosed(found, X, p.G)
        assert float(found.upper) == pytest.approx(np.linalg.norm(X) / math.sqrt(3), rel=1e-9, abs=1.1)


# --- invariances ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-1000, -130, -1, 7, 130, 1000])
def test_a_power_of_two_in_the_matrix_changes_no_bit(exponent):
    p = planted.draw("geometric(100)", 4, 6, np.random.default_rng(0))
    X = iterated(p.G)
    expected, found = certify(tensor(X), tensor(p.G)), certify(tensor(X), tensor(np.ldexp(p.G, exponent)))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e37])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_scale_of_the_matrix_does_not_matter(scale, dtype):
    p = planted.draw("geometric(10)", 4, 6, np.random.default_rng(0))
    X, G = torch.tensor(iterated(p.G)).float(), tensor(scale * p.G).float()
    found, expected = certify(X, G, dtype=dtype), certify(X, tensor(p.G).float(), dtype=dtype)
    for name in ("orthogonality", "lower", "upper", "estimate"):
        assert float(getattr(found, name)) == pytest.approx(float(getattr(expected, name)), rel=1e-3)


@pytest.mark.parametrize("shape", [(4, 7), (1, 6)])
def test_a_tall_pair_is_its_transpose(shape):
    p = planted.draw("geometric(10)", *shape, np.random.default_rng(0))
    X = p.polar + 1e-3 * np.random.default_rng(1).standard_normal(shape)
    wide = certify(tensor(X), tensor(p.G))
    tall = certify(tensor(X).mT.contiguous().clone(), tensor(p.G).mT)
    for a, b in zip(wide, tall, strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-9, abs=FLOOR)


@pytest.mark.parametrize("steps", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_is_its_matrices(steps, dtype):
    generator = np.random.default_rng(0)
    drawn = [planted.draw(name, 4, 6, generator) for name in ("linear(4)", "deficient(0.5)", "zero", "geometric(10)")]
    X = torch.stack([tensor(iterated(p.G + (p.G == 0))) for p in drawn] * 2).reshape(2, 4, 4, 6)
    X[1] += 0.1 * torch.tensor(generator.standard_normal((4, 4, 6)))
    X[1, 3] *= 1e9
    G = torch.stack([tensor(p.G) for p in drawn] * 2).reshape(2, 4, 4, 6)
    found = certify(X, G, steps=steps, dtype=dtype)
    assert all(value.shape == (2, 4) and value.dtype == torch.float64 for value in found)
    for i in np.ndindex(2, 4):
        single = certify(X[i], G[i], steps=steps, dtype=dtype)
        for name, a, b in zip(Certificate._fields, found, single, strict=True):
            off = 64 * torch.finfo(dtype).eps  # other sums
            if name in ("asymmetry", "tilt") and steps:
                off *= 3**steps  # a direction that X does not have is tripled in every step
            assert float(a[i]) == pytest.approx(float(b), rel=off, abs=off)
        assert_enclosed(single, X[i].numpy(), G[i].numpy())


def test_the_inputs_stay_and_nothing_needs_to_be_contiguous():
    p = planted.draw("linear(4)", 4, 6, np.random.default_rng(0))
    X, G = tensor(p.polar), tensor(p.G)
    kept = X.clone(), G.clone()
    plain, strided = certify(X, G), certify(X.mT.contiguous().mT, G.repeat(1, 2)[:, :6])
    assert torch.equal(X, kept[0])
    assert torch.equal(G, kept[1])
    assert float(plain.lower) == pytest.approx(float(strided.lower), abs=FLOOR)
    expanded = certify(X.expand(3, 4, 6), G.expand(3, 4, 6))
    assert float(expanded.upper[2]) == pytest.approx(float(plain.upper), abs=FLOOR)


# --- costs of less precision, less work -------------------------------------------------------------------------------


def test_the_bounds_open_with_the_rounding_of_the_products_and_never_lie():
    p = planted.draw("linear(4)", 24, 96, np.random.default_rng(0))
    X = iterated(p.G)
    tf32 = bounds.unit_roundoff("tf32")
    cases = [{}, {"dtype": torch.float32}, {"dtype": torch.float32, "operand": tf32}]
    found = [certify(tensor(X), tensor(p.G), **case) for case in cases]
    for one in found:
        assert_enclosed(one, X, p.G)
    widths = [float(one.upper - one.lower) for one in found]
    assert widths[0] < 1e-9 < widths[1] < widths[2]


@pytest.mark.parametrize("operand", [0.0, bounds.unit_roundoff("bf16")])
@pytest.mark.parametrize("n", [1, 64, 1000])
def test_the_errors_of_products_stay_within_their_bounds(n, operand):
    def rounded(A):
        return A.bfloat16().float() if operand else A

    generator = torch.Generator().manual_seed(n)
    A, B = (torch.rand(4, n, generator=generator) for _ in range(2))  # all of one sign
    exact = A.double() @ B.double().mT
    products = _Products(torch.float32, operand)
    error = float((products.gram(rounded(A), rounded(B)) - exact).norm() / (A.norm() * B.norm()))
    assert error <= products.gram_error(n)
    if operand:
        assert error > _Products(torch.float32, 0.0).gram_error(n)
    q = A[:, :4] if n >= 4 else A.expand(4, 4)
    error = float((products.left(rounded(q), rounded(B)) - q.double() @ B.double()).norm() / (q.norm() * B.norm()))
    assert error <= products.left_error(4)
    if operand:
        assert error > _Products(torch.float32, 0.0).left_error(4)


def test_products_of_rounded_operands_stay_within_the_bounds_for_their_roundoff(monkeypatch):
    """A device that rounds operands to bfloat16 behind one's back: told of it the bounds hold, untold they lie."""

    def rounded(A):
        return A.bfloat16().to(A.dtype)

    monkeypatch.setattr(_Products, "gram", lambda _, A, B: (rounded(A) @ rounded(B).mT).double())
    monkeypatch.setattr(_Products, "left", lambda _, q, A: rounded(q.float()) @ rounded(A))
    G = torch.tensor([[1.0] * 32 + [1.0037] * 32])  # all rounded to 1
    X = G / G.norm()
    distance, _, _ = truth(X.double().numpy(), G.double().numpy())
    told = certify(X, G, dtype=torch.float32, operand=bounds.unit_roundoff("bf16"))
    assert told.lower <= distance <= told.upper
    untold = certify(X, G, dtype=torch.float32)
    assert not untold.lower <= distance <= untold.upper


def test_more_steps_close_the_bounds_up_to_those_of_eigenvectors():
    p = planted.draw("linear(4)", 12, 20, np.random.default_rng(0))
    X = iterated(p.G) + 1e-4 * np.random.default_rng(1).standard_normal((12, 20))
    widths = [float(c.upper - c.lower) for c in (certify(tensor(X), tensor(p.G), steps=k) for k in (1, 3, 6, 12))]
    exact = certify(tensor(X), tensor(p.G))
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx(float(exact.upper - exact.lower), rel=0.05)


def test_a_rotation_in_a_nearly_singular_matrix_is_charged_by_where_it_is():
    """Divided by the smallest singular value, this rotation would be charged a thousandfold."""
    p = planted.draw("one_small(1e4)", 6, 6, np.random.default_rng(0))
    K = np.zeros((6, 6))
    K[0, 1], K[1, 0] = 1e-6, -1e-6  # between two large directions
    X = p.U @ scipy.linalg.expm(K) @ p.U.T @ p.polar
    found = certify(tensor(X), tensor(p.G))
    distance = assert_enclosed(found, X, p.G)
    coarse = float(found.asymmetry) * np.linalg.norm(p.s) / p.s[-1] / math.sqrt(6)
    assert coarse > 1e3 * distance
    assert found.upper < 1.1 * distance


# --- refuses ----------------------------------------------------------------------------------------------------------

ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("X", "G", "options", "message"),
    [
        (ONE[0], ONE, {}, r"X is of torch.float32, shape \(3,\), needed a tensor"),
        (ONE, ONE.long(), {}, "G is of torch.int64, shape .* needed a tensor .* of real floating-point numbers"),
        (ONE, ONE * 1j, {}, "G is of torch.complex64"),
        (ONE, ONE.mT, {}, r"X has shape \(2, 3\) on cpu and G \(3, 2\) on cpu, needed one shape on one device"),
        (ONE * math.inf, ONE, {}, "6 of the 6 entries of X are not finite"),
        (ONE, ONE * math.nan, {}, "6 of the 6 entries of G are not finite"),
        (ONE, ONE, {"dtype": torch.bfloat16}, "dtype is torch.bfloat16, needed torch.float64 or torch.float32"),
        (ONE, ONE, {"steps": 0}, "steps is 0, needed at least 1, or None"),
    ],
)
def test_bad_input_is_named(X, G, options, message):
    with pytest.raises(ValueError, match=message):
        certify(X, G, **options)
