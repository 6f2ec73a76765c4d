"""What goes wrong for people who build and run these optimizers, each case cut down from a public report.

The numbers are those of algebra. Where a report's defect is easily written down, the test shows that it gives another
number, so that it would be noticed.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from cases import polar_factor, through_svd, with_singular_values

from muon_lab import optim, polar
from muon_lab.arithmetic import Exact, Rounded
from muon_lab.measure import bounds
from muon_lab.optim import matrices, routing

U32, U64, HALF, BF16 = (bounds.unit_roundoff(name) for name in ("fp32", "fp64", "fp16", "bf16"))
SIMPLE = polar.schedules.get("simple", 5)
#: What five steps of `simple` do to singular values above 0.003 of the norm.
BAND = (0.68, 1.21)
ALL = {"muon": optim.Muon, "mop": optim.MOP, "muon exact": partial(optim.Muon, direction=polar.svd())}
every_rule = pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())


def parameter(W, dtype=torch.float32):
    return torch.nn.Parameter(torch.as_tensor(np.asarray(W), dtype=dtype).clone())


def stepped(make, p, *gradients):
    """Take a step for each gradient, and return the optimizer."""
    optimizer = make([p])
    for G in gradients:
        p.grad = None if G is None else torch.as_tensor(np.asarray(G)).to(p.dtype)
        optimizer.step()
    return optimizer


def first_update(make, G, dtype=torch.float32):
    """Return minus the first step from zero weights, without momentum, at rate 1."""
    p = parameter(np.zeros(np.shape(G)), dtype)
    stepped(partial(make, lr=1.0, momentum=0.0), p, G)
    return -p.detach().double().numpy()


def distance(A, B):
    return np.linalg.norm(A - B) / np.linalg.norm(B)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-15, -11, -9, -7, 0, 7, 15])
def test_s01_small_gradients_are_orthogonalized_like_others(exponent):
    """NVIDIA-NeMo/Emerging-Optimizers#229: a floor of 1e-7 under the norm."""
    G = with_singular_values(64, 64, np.geomspace(1, 0.05, 64), seed=1)
    G /= np.linalg.norm(G)
    make = partial(optim.Muon, direction=("simple", 5), scale="none")
    found = first_update(make, G * 10.0**exponent)
    assert distance(found, through_svd(G, SIMPLE.map)) < U32 * SIMPLE.slope
    floored = with_a_floor(torch.tensor(G * 10.0**exponent, dtype=torch.float32)).numpy()
    assert (distance(floored, found) > 0.01) == (exponent <= -9)


def with_a_floor(G):
    """Return what the iteration makes of a matrix that is divided by no norm below 1e-7: the defect."""
    X = G / G.norm().clamp(min=1e-7)
    for a, b, c in SIMPLE.coefficients:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X


RULES_WITH_SECOND_MOMENTS = {
    **ALL,
    "muon exact spectral": partial(optim.Muon, direction=polar.svd(), scale="shape_scaling"),
    "mop spectral": partial(optim.MOP, scale="spectral"),
    **{name: partial(optim.Muon, adapt=name) for name in ("adamuon", "normuon", "namo")},
}


@pytest.mark.parametrize("make", RULES_WITH_SECOND_MOMENTS.values(), ids=RULES_WITH_SECOND_MOMENTS.keys())
def test_s02_a_zero_gradient_leaves_decay_alone(make):
    """NVIDIA-NeMo/Emerging-Optimizers#254, HomebrewML/HeavyBall#73: 0/0, or a step along the factor of zero, I."""
    frozen = [parameter(np.ones(shape), torch.float64) for shape in ((1, 1), (3, 3), (4, 6), (6, 4))]
    moving = parameter(np.ones((3, 3)), torch.float64)
    o = make([*frozen, moving], lr=0.1, weight_decay=0.5)
    factor = torch.ones((), dtype=torch.float64)
    for _ in range(30):
        for p in frozen:
            p.grad = torch.zeros_like(p)
        moving.grad = torch.ones_like(moving)
        o.step()
        factor = (1 - 0.1 * 0.5) * factor
        assert all(torch.equal(p.detach(), factor.expand_as(p)) for p in frozen)
    assert torch.isfinite(moving).all()
    assert not torch.equal(moving.detach(), factor.expand_as(moving))


@pytest.mark.parametrize("size", [1.0, 3e7, 1e15])
@pytest.mark.parametrize(("arithmetic", "tolerance"), [(Exact(torch.float16), 2e-2), (Rounded("bf16"), 6e-2)])
def test_s03_matrices_are_normalised_before_they_are_cast(size, arithmetic, tolerance):
    """deepspeedai/DeepSpeed#8533: entries above 65504 became infinite in float16."""
    G = with_singular_values(16, 24, np.geomspace(size, size / 100, 16), seed=3)
    make = partial(optim.Muon, direction=polar.newton_schulz(SIMPLE, arithmetic), scale="none")
    found = first_update(make, G)
    assert np.isfinite(found).all()
    assert distance(found, through_svd(G, SIMPLE.map)) < tolerance
    assert size == 1.0 or torch.tensor(G).half().isinf().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [None, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("arithmetic", [Exact(), Rounded("bf16")])
def test_s04_momentum_is_what_its_formula_says_after_a_step(dtype, kept, nesterov, steps, arithmetic):
    """pytorch/pytorch#190597: a cast that copies nothing, then a division in place, of the state itself."""
    G = torch.diag(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    p = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    direction = polar.newton_schulz(SIMPLE, arithmetic)
    groups = [{"params": [p], "state_dtype": kept}]
    o = optim.Muon(groups, lr=0.1, momentum=0.5, nesterov=nesterov, direction=direction)
    for _ in range(steps):
        p.grad = G.to(dtype)
        o.step()
        assert torch.equal(p.grad, G.to(dtype))
    M = o.state[p]["momentum_buffer"]
    assert M.dtype == (kept or torch.float32)
    assert torch.equal(M, ((1 - 0.5**steps) * G).to(M.dtype))  # exact in both: 3 and 4 times 1/2 or 7/8
    assert float(M.norm()) == pytest.approx((1 - 0.5**steps) * 5, rel=4 * BF16)


def test_s05_average_and_sum():
    """NVIDIA-NeMo/Emerging-Optimizers#166, KellerJordan/Muon#52: one direction, and one tenth of the nuclear norm."""
    gradients = [with_singular_values(6, 4, [3, 2, 1, 0.5], seed=50 + t) for t in range(4)]
    ends = {}
    for form in ("average", "sum"):
        for scale in ("spectral", "nuclear_norm"):
            p = parameter(np.zeros((6, 4)), torch.float64)
            make = partial(optim.Muon, lr=1.0, momentum=0.9, form=form, scale=scale, direction=polar.svd())
            stepped(partial(make, nesterov=scale == "spectral"), p, *gradients)
            ends[form, scale] = p.detach().numpy()
    slack = bounds.svd(6, 4, 64 * U64) * 4 * bounds.polar(0.05, 0.05, 4, 6, 4)  # four directions, none below 0.05
    assert distance(ends["average", "spectral"], ends["sum", "spectral"]) < slack
    assert distance(10 * ends["average", "nuclear_norm"], ends["sum", "nuclear_norm"]) < slack


def test_s05_the_first_candidate_of_nesterov():
    """(1 - mu)(1 + mu) G in the form of an average."""
    seen = []
    p = parameter(np.zeros((2, 2)), torch.float64)
    G = np.diag([2.0, 1.0])
    stepped(partial(optim.Muon, lr=0.1, momentum=0.9, nesterov=True, direction=lambda C: seen.append(C) or C), p, G)
    np.testing.assert_allclose(seen[0][0].numpy(), (1 - 0.9) * (1 + 0.9) * G, rtol=4 * U64)


#: (out, in): shape_scaling, spectral, unit_rms_norm.
FACTORS = {
    (32, 8): (2.0, math.sqrt(32), 2.0),
    (8, 32): (1.0, math.sqrt(32), 0.5),
    (1024, 4): (16.0, 32.0, 16.0),
    (1, 64): (1.0, 8.0, 0.125),
    (64, 1): (8.0, 8.0, 8.0),
}


@pytest.mark.parametrize("shape", FACTORS)
def test_s06_one_factor_for_the_shape_and_never_two(shape):
    """kozistr/pytorch_optimizer#371, google-deepmind/optax#1249."""
    G = np.random.default_rng(6).standard_normal(shape)
    make = partial(optim.Muon, direction=polar.svd())
    plain = first_update(partial(make, scale="none"), G, torch.float64)
    assert np.sqrt(np.square(plain).mean()) == pytest.approx(1 / math.sqrt(max(shape)), rel=1e3 * U64)
    for mode, factor in zip(("shape_scaling", "spectral", "unit_rms_norm"), FACTORS[shape], strict=True):
        np.testing.assert_allclose(
            first_update(partial(make, scale=mode), G, torch.float64), factor * plain, rtol=8 * U64
        )
    matched = first_update(partial(make, scale="match_rms_adamw"), G, torch.float64)
    assert np.sqrt(np.square(matched).mean()) == pytest.approx(0.2, rel=1e3 * U64)
    by_schedule = first_update(partial(optim.Muon, direction=("simple", 5), scale="match_rms_adamw"), G)
    assert 0.2 * BAND[0] < np.sqrt(np.square(by_schedule).mean()) < 0.2 * BAND[1]


@pytest.mark.parametrize("shape", FACTORS)
@pytest.mark.parametrize("scale", ["shape_scaling", "unit_rms_norm"])
def test_s06_a_weight_stored_transposed_gets_the_transposed_update(shape, scale):
    """google-deepmind/optax#1435: out/in of weights stored (in, out)."""
    G = torch.tensor(np.random.default_rng(6).standard_normal(shape))
    plain, stored = (torch.nn.Parameter(torch.zeros_like(X)) for X in (G, G.T.contiguous()))
    plain.grad, stored.grad = G, G.T.contiguous()
    optim.Muon([plain], lr=1.0, scale=scale).step()
    optim.Muon([{"params": [stored], "view": matrices.TRANSPOSED}], lr=1.0, scale=scale).step()
    assert torch.equal(stored.detach(), plain.detach().T)
    undeclared = torch.nn.Parameter(torch.zeros_like(stored))
    undeclared.grad = stored.grad
    optim.Muon([undeclared], lr=1.0, scale=scale).step()
    assert shape[0] == shape[1] or not torch.allclose(undeclared, stored)


KERNELS = {
    (256, 1, 3, 3): (16 / 3, 3.2),
    (64, 32, 3, 3): (1.0, 0.2 * math.sqrt(288)),
    (16, 16, 3, 1): (1.0, 0.2 * math.sqrt(48)),
    (192, 3, 16, 16): (1.0, 0.2 * math.sqrt(768)),
}


@pytest.mark.parametrize("shape", KERNELS)
def test_s07_a_convolution_is_flattened_and_so_is_its_factor(shape):
    """ultralytics/ultralytics#25846, huggingface/pytorch-image-models#2791: the factor of 3x3 instead of out x in*9."""
    G = torch.tensor(np.random.default_rng(7).standard_normal(shape))
    norms = []
    for mode in ("none", "shape_scaling", "match_rms_adamw"):
        p = torch.nn.Parameter(torch.zeros_like(G))
        p.grad = G
        groups = [{"params": [p], "view": matrices.FLATTENED}]
        optim.Muon(groups, lr=1.0, scale=mode, direction=polar.svd()).step()
        assert p.shape == shape
        norms.append(float(p.detach().norm()))
    rank = min(shape[0], math.prod(shape[1:]))
    assert norms[0] == pytest.approx(math.sqrt(rank), rel=1e3 * U64)
    assert [norm / norms[0] for norm in norms[1:]] == pytest.approx(KERNELS[shape], rel=8 * U64)


def test_s07_without_a_declaration_a_convolution_is_refused():
    with pytest.raises(ValueError, match=r"has shape \(8, 4, 3, 3\) and no view"):
        optim.Muon([parameter(np.zeros((8, 4, 3, 3)))], lr=0.1)


def test_s08_strides_of_gradients_do_not_matter():
    """ultralytics/ultralytics#26013: `view` of a gradient in channels-last order."""
    dense = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(8))
    row = torch.randn(4, 1, 2, 2, generator=torch.Generator().manual_seed(9))
    strided = torch.empty(8, 6, 4, 4)[::2, ::2, ::2, ::2].copy_(dense)
    for same in (
        (dense, dense.to(memory_format=torch.channels_last), strided),
        (row.expand(4, 3, 2, 2).clone(), row.expand(4, 3, 2, 2)),
    ):
        found = []
        for G in same:
            p = torch.nn.Parameter(torch.ones(4, 3, 2, 2))
            p.grad = G
            optim.Muon([{"params": [p], "view": matrices.FLATTENED}], lr=0.1).step()
            found.append(p.detach())
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_s08_columns_may_be_permuted_and_zeros_appended():
    G = np.random.default_rng(8).standard_normal((4, 12))
    order = np.random.default_rng(9).permutation(12)
    make = partial(optim.Muon, direction=("simple", 5), scale="none")
    slack = U32 * SIMPLE.slope
    U = first_update(make, G)
    assert distance(first_update(make, G[:, order]), U[:, order]) < slack
    padded = first_update(make, np.pad(G, ((0, 0), (0, 5))))
    assert distance(padded[:, :12], U) < slack
    assert not padded[:, 12:].any()


def test_s09_experts_are_matrices_of_their_own():
    """AI-Hypercomputer/maxtext#4798: one matrix of all experts."""
    E = np.stack([with_singular_values(6, 4, [1, 0.8, 0.6, 0.4], seed=90 + e) * 10.0**-e for e in range(3)])

    def updated(gradients, scale="none"):
        p = parameter(np.zeros((3, 6, 4)), torch.float64)
        p.grad = torch.tensor(gradients)
        optim.Muon([{"params": [p], "view": matrices.STACKED}], lr=1.0, scale=scale, direction=polar.svd()).step()
        return -p.detach().numpy()

    U = updated(E)
    slack = bounds.svd(6, 4, 64 * U64) * bounds.polar(0.4, 0.4, 4, 6, 4)
    assert np.linalg.norm(U - np.stack([polar_factor(X) for X in E])) < 3 * slack
    np.testing.assert_allclose(updated(E, "spectral"), math.sqrt(6) * U, rtol=8 * U64)
    E[2] = 0  # no tokens
    without = updated(E)
    assert np.array_equal(without[:2], U[:2])
    assert not without[2].any()


def test_s10_declared_row_sizes_with_a_gate():
    """NVIDIA/Megatron-LM#4731: four blocks where three were expected."""
    G = with_singular_values(20, 6, np.geomspace(2, 0.2, 6), seed=10)
    p = parameter(np.zeros((20, 6)), torch.float64)
    p.grad = torch.tensor(G)
    optim.Muon([{"params": [p], "view": optim.fused(8, 8, 2, 2)}], lr=1.0, scale="none", direction=polar.svd()).step()
    blocks = np.split(G, [8, 16, 18])
    expected = np.concatenate([polar_factor(block) for block in blocks])
    smallest = min(np.linalg.svd(block, compute_uv=False)[-1] for block in blocks)
    slack = 4 * bounds.svd(20, 6, 64 * U64) * bounds.polar(smallest, smallest, 2, 8, 6) * 2
    assert np.linalg.norm(-p.detach().numpy() - expected) < slack
    assert float(p.detach().norm()) ** 2 == pytest.approx(6 + 6 + 2 + 2, rel=1e3 * U64)
    with pytest.raises(ValueError, match=r"attn.qkv has 20 rows \(shape \(20, 6\)\), needed 8 \+ 2 \+ 2 = 12"):
        optim.Muon([{"params": [("attn.qkv", p)], "view": optim.fused(8, 2, 2)}], lr=1.0)


# --- the meaning of a step --------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_s17_a_skipped_step_leaves_no_trace(make, bad):
    """deepspeedai/DeepSpeed#8432: the momentum was poisoned before the overflow was seen."""
    gradients = [with_singular_values(3, 4, [3, 2, 1], seed=t) for t in range(3)]
    spoiled = gradients[1].copy()
    spoiled[0, 0] = bad
    W = np.eye(3, 4)
    straight, interrupted = parameter(W), parameter(W)
    make = partial(make, lr=0.1, weight_decay=0.1, nesterov=True)
    a = stepped(make, straight, *gradients)
    b = stepped(make, interrupted, gradients[0], spoiled, *gradients[1:])
    assert torch.equal(straight, interrupted)
    assert torch.equal(a.state[straight]["momentum_buffer"], b.state[interrupted]["momentum_buffer"])


def test_s18_accumulated_gradients_are_one_gradient():
    """deepspeedai/DeepSpeed#8443: the optimizer ran for each micro-batch."""
    calls = []

    def direction(C):
        calls.append(len(C))
        return polar.svd()(C)

    X = torch.randn(8, 3, generator=torch.Generator().manual_seed(18))
    ends = []
    for micro in (8, 2):
        W = parameter(np.eye(4, 3))
        o = optim.Muon([W], lr=0.1, direction=direction)
        calls.clear()
        for _ in range(3):
            o.zero_grad()
            for batch in X.split(micro):
                ((batch @ W.T).square().sum() / len(X)).backward()
            o.step()
        assert sum(calls) == 3
        ends.append(W.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)
    g1, g2 = np.diag([1.0, 1.0]), np.diag([1.0, -0.95])
    for gradients, expected in (([(g1 + g2) / 2], np.eye(2)), ([g1, g2], np.diag([1.0, -1.0]))):
        p = parameter(np.zeros((2, 2)), torch.float64)
        o = optim.Muon([p], lr=1.0, momentum=0.9, scale="none", direction=polar.svd())
        for G in gradients:
            before = p.detach().clone()
            p.grad = torch.tensor(G)
            o.step()
        np.testing.assert_allclose((before - p.detach()).numpy(), expected, atol=1e3 * U64)


@pytest.mark.parametrize("largest", [1e3, 1.0, 2e-8, 1e-20])
def test_s19_clipping_gradients_is_nothing_to_the_first_step(largest):
    """NVIDIA/Megatron-LM#5394, deepspeedai/DeepSpeed#8439."""
    gradients = [with_singular_values(16, 16, np.geomspace(1, 0.05, 16), seed=19 + i) for i in range(2)]

    def first(make, clip):
        params = [parameter(np.zeros((16, 16))) for _ in gradients]
        for p, G in zip(params, gradients, strict=True):
            p.grad = torch.tensor(G, dtype=torch.float32)
        factor = min(1.0, largest / float(torch.nn.utils.get_total_norm([p.grad for p in params])))
        if clip:
            torch.nn.utils.clip_grad_norm_(params, largest)
        make(params, lr=1.0).step()
        return factor, [p.detach() for p in params]

    for make in (optim.Muon, partial(optim.MOP, scale="spectral")):
        (_, clipped), (_, free) = (first(make, clip) for clip in (True, False))
        for a, b in zip(clipped, free, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.norm()))
    (factor, clipped), (_, free) = (first(optim.MOP, clip) for clip in (True, False))  # the step shrinks with them
    for a, b in zip(clipped, free, strict=True):
        torch.testing.assert_close(a, factor * b, rtol=0, atol=1e-5 * factor * float(b.norm()))


@every_rule
@pytest.mark.parametrize(("decay", "factor"), [("decoupled", 0.9), ("independent", 0.5), ("palm", 0.98)])
def test_s20_decay_is_seen(make, decay, factor):
    """tinygrad/tinygrad#17709: the decayed value was dropped, and the test too coarse to see it."""
    W = np.linspace(0.5, 1.5, 6).reshape(2, 3)
    p = parameter(W, torch.float64)
    stepped(partial(make, lr=0.2, weight_decay=0.5, decay=decay), p, *[np.zeros((2, 3))] * 5)
    np.testing.assert_allclose(p.detach().numpy(), factor**5 * W, rtol=16 * U64)


def test_s20_l2_goes_through_momentum_and_direction():
    W = with_singular_values(3, 4, [2, 1.5, 1], seed=20)
    p = parameter(W, torch.float64)
    stepped(
        partial(optim.Muon, lr=0.2, weight_decay=0.5, decay="l2", scale="none", direction=polar.svd()),
        p,
        np.zeros((3, 4)),
    )
    np.testing.assert_allclose(p.detach().numpy(), W - 0.2 * polar_factor(W), atol=64 * 4 * U64)


@pytest.mark.parametrize("direction", [("quintic", 5), ("polar_express", 8), polar.svd(), polar.qdwh()])
def test_s21_the_canary(direction):
    """deepspeedai/DeepSpeed#8441: nobody called the orthogonalizer, and the loss still fell."""
    G = with_singular_values(6, 4, [5, 1, 0.3, 0.1], seed=21)
    make = partial(optim.Muon, direction=direction, scale="none")
    once, thousandfold = (first_update(make, c * G, torch.float64) for c in (1.0, 1000.0))
    assert distance(thousandfold, once) < 1e-9
    values = np.linalg.svd(once, compute_uv=False)
    assert ((values > 0.6) & (values < 1.25)).all()
    sgd = first_update(partial(optim.Muon, direction=lambda C: C, scale="none"), G, torch.float64)
    assert not ((np.linalg.svd(sgd, compute_uv=False) > 0.6) & (np.linalg.svd(sgd, compute_uv=False) < 1.25)).all()


@pytest.mark.parametrize("shape", [(), (5,), (0,)])
def test_s22_vectors_and_numbers_are_refused_by_name_before_anything_happens(shape):
    """KellerJordan/Muon#45, deepspeedai/DeepSpeed#7509."""
    fine, wrong = parameter(np.ones((2, 2))), parameter(np.ones(shape))
    for make in ALL.values():
        with pytest.raises(ValueError, match=r"layer\.gain has shape"):
            make([("layer.weight", fine), ("layer.gain", wrong)], lr=0.1)
    o = optim.Muon([("layer.weight", fine)], lr=0.1)
    with pytest.raises(ValueError, match=r"layer\.gain has shape"):
        o.add_param_group({"params": [("layer.gain", wrong)]})
    fine.grad = torch.ones(2, 2)
    o.step()


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_s22_one_row_is_a_matrix(shape):
    G = np.array([3.0, 4.0]).reshape(shape)
    exact = first_update(partial(optim.Muon, direction=polar.svd(), scale="none"), G, torch.float64)
    np.testing.assert_allclose(exact, G / 5, rtol=16 * U64)
    schedule = first_update(partial(optim.Muon, direction=("simple", 5), scale="none"), G, torch.float64)
    np.testing.assert_allclose(schedule, SIMPLE.map(np.ones(1))[0] * G / 5, rtol=1e3 * U64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stepped_before", [False, True])
def test_s23_state_of_another_dtype_or_none_yet(dtype, saved, stepped_before):
    """deepspeedai/DeepSpeed#8433, zichongli5/NorMuon#10: a dtype error in the step, or state that had no place."""
    G = [torch.randn(3, 4, generator=torch.Generator().manual_seed(t)).to(dtype) for t in range(3)]
    make = partial(optim.Muon, lr=0.1, momentum=0.5, scale="none", direction=polar.svd())
    first, second = (torch.nn.Parameter(torch.ones(3, 4, dtype=dtype)) for _ in range(2))
    a, b = make([{"params": [first], "state_dtype": saved}]), make([second])
    first.grad = G[0]
    a.step()
    if stepped_before:
        second.grad = G[2]
        b.step()
    b.load_state_dict(a.state_dict())
    M = b.state[second]["momentum_buffer"].clone()
    assert M.dtype == torch.float32
    assert torch.equal(M, a.state[first]["momentum_buffer"].float())
    second.data.copy_(first.data)
    for p, o in ((first, a), (second, b)):
        p.grad = G[1]
        o.step()
    candidate = 0.5 * M + 0.5 * G[1].float()  # both had the same one: rounding of the new state comes after it
    assert torch.equal(b.state[second]["momentum_buffer"], candidate)
    assert torch.equal(a.state[first]["momentum_buffer"], candidate.to(saved))
    assert torch.equal(first, second)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_s31_a_tensor_as_rate_is_the_number(make, dtype):
    """pytorch/pytorch#130467, InternLM/xtuner#1661: bit for bit, with decay."""
    G = [with_singular_values(3, 4, [3, 2, 1], seed=t) for t in range(2)]
    ends = []
    for lr in (0.1, torch.tensor(0.1), torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64)):
        p = parameter(np.eye(3, 4), dtype)
        stepped(partial(make, lr=lr, weight_decay=0.3), p, *G)
        ends.append(p.detach())
    assert all(torch.equal(ends[0], other) for other in ends[1:])


@every_rule
@pytest.mark.parametrize("tensor", [False, True])
def test_s31_rates_compile_nothing_anew_and_a_compiled_training_step_has_the_same_bits(make, tensor):
    """pytorch/pytorch#163093: a scheduler that writes floats had every rate compiled."""
    from torch._dynamo.testing import CompileCounter

    def trained(compiled):
        weights = [parameter(with_singular_values(3, 4, [3, 2, 1], seed=t)) for t in range(3)]
        o = make(weights, lr=torch.tensor(0.1) if tensor else 0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1.0 / (1 + t))

        def train(X):
            o.zero_grad()
            (X @ weights[0].mT @ (weights[1] * weights[2])).square().sum().backward()
            o.step()

        counter, seen = CompileCounter(), []
        call = torch.compile(train, backend=counter) if compiled else train
        for t in range(7):
            call(torch.randn(5, 4, generator=torch.Generator().manual_seed(t)))
            scheduler.step()
            seen.append(counter.frame_count)
        return weights, seen

    torch.compiler.reset()
    eager, _ = trained(compiled=False)
    same, graphs = trained(compiled=True)
    torch.compiler.reset()
    assert all(torch.equal(p, q) for p, q in zip(eager, same, strict=True))
    assert graphs[0] > 0
    assert graphs[2:] == graphs[2:3] * 5, f"new graphs after the second step: {graphs}"


@every_rule
@pytest.mark.parametrize("adapt", [None, "adamuon", "normuon", "namo"])
def test_s31_a_rate_of_zero_moves_the_state_alone(make, adapt):
    settings = {} if make is optim.MOP or adapt is None else {"adapt": adapt}
    G, W = np.diag([2.0, 1.0]), np.array([[1.0, -0.0], [0.3, 1.0]])
    p = parameter(W)
    o = stepped(partial(make, lr=0.0, weight_decay=0.5, momentum=0.95, **settings), p, G)
    assert torch.equal(p.detach(), parameter(W).detach())
    assert float(o.state[p]["momentum_buffer"].norm()) == pytest.approx(0.05 * math.sqrt(5), rel=4 * U32)
    if settings:
        assert o.state[p]["moment2_buffer"].any()


def test_s31_a_new_rate_acts_at_the_next_step_in_all_groups():
    layer = torch.nn.utils.skip_init(torch.nn.Linear, 3, 4)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.ones_(layer.bias)
    routes = routing.split(layer, show=None)
    o = routes.optimizer(matrix=partial(optim.Muon, lr=0.1), other=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(o, lambda t: 0.0 if t else 1.0)
    for expected in (True, False):
        before = [p.detach().clone() for p in layer.parameters()]
        for p in layer.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(31))
        o.step()
        scheduler.step()
        assert [not torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True)] == [expected] * 2


@every_rule
@pytest.mark.parametrize("lr", [-0.1, float("nan"), torch.ones(2)])
def test_s31_rates_that_are_none_are_refused(make, lr):
    with pytest.raises(ValueError, match="lr"):
        make([parameter(np.ones((2, 2)))], lr=lr)


@every_rule
def test_s32_the_closure_runs_once_with_gradients(make):
    """nikhilvyas/SOAP#7, HomebrewML/HeavyBall#10: backward failed inside no_grad."""
    p, calls = parameter(np.eye(2)), []

    def closure():
        calls.append(1)
        p.grad = None
        loss = p.square().sum()
        loss.backward()
        return loss

    loss = make([p], lr=0.1).step(closure)
    assert (len(calls), float(loss.detach())) == (1, 2.0)
    assert not torch.equal(p.detach(), torch.eye(2))


@every_rule
def test_s32_complex_is_refused_when_it_is_made(make):
    """pytorch/pytorch#116494: X Xᵀ for X Xᴴ makes the iteration explode."""
    with pytest.raises(ValueError, match=r"layer\.weight has dtype torch\.complex64"):
        make([("layer.weight", torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))], lr=0.1)
