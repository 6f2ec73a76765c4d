"""Closed forms against the products that run, counted one by one."""

import numpy as np
import pytest
import torch
from cases import with_singular_values

from muon_lab import optim, polar
from muon_lab.arithmetic import Counted
from muon_lab.cost import flops
from muon_lab.parallel.grid import even
from muon_lab.polar import rational, schedules

SHAPES = [(3, 5), (5, 3), (4, 4), (1, 6)]
#: What a triangular kernel halves.
SYMMETRIC = ("gram", "square", "commuting")


def counted(run):
    """Return the flops of the products that a function of an arithmetic makes, general and halved."""
    arithmetic = Counted()
    run(arithmetic)
    halved = sum(one.flops * (0.5 if one.kind in SYMMETRIC else 1) for one in arithmetic.products)
    return arithmetic.flops, halved


def matrix(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_and_cubic(shape, steps):
    for name, form in (("polar_express", flops.newton_schulz), ("cubic", flops.cubic)):
        schedule = schedules.get(name, steps)
        assert all(bool(c) == (form is flops.newton_schulz) for _, _, c in schedule.coefficients)
        made = counted(lambda arithmetic, schedule=schedule: polar.newton_schulz(schedule, arithmetic)(matrix(shape)))
        assert made == (form(*shape, steps), form(*shape, steps, "syrk"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("restarts", [(), (2,), (1, 3)])
def test_gram_form(shape, restarts):
    schedule = schedules.get("polar_express", 5)
    made = counted(lambda one: polar.gram_newton_schulz(schedule, one, restarts)(matrix(shape)))
    assert made == (flops.gram(*shape, 5, restarts), flops.gram(*shape, 5, restarts, "syrk"))


@pytest.mark.parametrize("shape", SHAPES)
def test_decompositions_are_what_the_decomposition_says_it_cost(shape):
    G = matrix(shape)
    assert float(polar.svd().decompose(G).flops) == flops.svd(*shape)
    assert float(polar.gram_eigh().decompose(G).flops) == flops.gram_eigh(*shape)


@pytest.mark.parametrize(("shape", "condition"), [((8, 12), 1e1), ((12, 8), 1e4), ((9, 9), 2.0)])
def test_qdwh_is_what_its_steps_cost(shape, condition):
    G = torch.as_tensor(with_singular_values(*shape, np.geomspace(1, 1 / condition, min(shape))))
    found = polar.qdwh().decompose(G)
    lower, forms = float(found.lower), []
    while 1 - lower > rational.tolerance(torch.float64) and len(forms) < int(found.iterations):
        last = 1.5 * (1 - lower) ** 2 <= rational.tolerance(torch.float64)
        weights = rational.CUBIC if last else rational.dynamical(lower)
        forms.append("product" if last else rational.form_for(weights, torch.float64).name)
        lower = weights.image(lower)
    steps = {"qr": forms.count("QR"), "cholesky": forms.count("Cholesky"), "product": forms.count("product")}
    assert sum(steps.values()) == int(found.iterations)
    assert float(found.flops) == pytest.approx(flops.qdwh(*shape, **steps), rel=1e-14)


def optimized(kind, shape, updates, **options):
    """Return the flops of an optimizer's products over some updates."""
    arithmetic, per_update = Counted(), []
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = kind([weight], lr=0.1, arithmetic=arithmetic, **options)
    for _ in range(updates):
        arithmetic.products.clear()
        weight.grad = matrix(shape)
        optimizer.step()
        per_update.append(arithmetic.flops)
    return per_update


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kl", [False, True])
def test_soap_step(shape, kl):
    made = optimized(optim.SOAP, shape, 3, kl=kl)
    assert made[1:] == [flops.soap(*shape, kl=kl).products] * 2


@pytest.mark.parametrize(("frequency", "power_steps"), [(1, 1), (3, 2)])
def test_soap_step_with_an_iteration_in_the_mean(frequency, power_steps):
    options = {"frequency": frequency, "eigenbasis": "iteration", "power_steps": power_steps}
    made = optimized(optim.SOAP, (3, 5), 1 + 2 * frequency, **options)[1:]
    assert sum(made) / len(made) == pytest.approx(flops.soap(3, 5, **options).products, rel=1e-14)


def test_rekls_step():
    assert optimized(optim.REKLS, (3, 5), 4)[2:] == [flops.rekls(3, 5).products] * 2


def test_decompositions_of_soap_are_those_of_both_factors():
    assert flops.soap(3, 5).decompositions == flops.eigh(3) + flops.eigh(5)
    assert flops.soap(3, 5, frequency=4).decompositions == flops.soap(3, 5).decompositions / 4


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (2, 16, 24)])
@pytest.mark.parametrize("dim", [0, 1])
def test_layouts_with_triangular_kernels(shape, dim):
    cut = even(shape[dim - 2], 4, dim)
    k, n, batch = 16, 24, 2 if len(shape) == 3 else 1
    s = 24 / 4
    assert flops.layout("duplicated", shape, cut, 0, 5, "syrk") == batch * flops.newton_schulz(k, n, 5, "syrk")
    assert flops.layout("distributed", shape, cut, 0, 5, "syrk") == batch * 5 * (3 * k * k * s + k**3)
    assert flops.layout("gram", shape, cut, 0, 5, "syrk") == batch * (3 * k * k * s + (4 * 5 - 3) * k**3)
    own = cut.shape(shape, 0)[-2:]
    assert flops.layout("blockwise", shape, cut, 0, 5, "syrk") == batch * flops.newton_schulz(*own, 5, "syrk")
    parts = [flops.layout(name, shape, cut, 0, 5) for name in ("duplicated", "blockwise")]
    assert flops.layout("periodic", shape, cut, 0, 5, period=5) == (parts[0] + 4 * parts[1]) / 5


@pytest.mark.parametrize(
    ("shape", "duplicated", "distributed"),
    [((14336, 4096), 5.5, 1.3), ((2048, 7168), 0.69, 3.9), ((16384, 512), 0.087, 0.012)],
)
def test_published_modes_on_eight_ranks_in_teraflops(shape, duplicated, distributed):
    cut = even(shape[0], 8, 0)
    assert flops.layout("duplicated", shape, cut, 0, 5) / 1e12 == pytest.approx(duplicated, rel=0.02)
    assert flops.published(shape, cut, 0, 5) / 1e12 == pytest.approx(distributed, rel=0.05)


def test_a_forgotten_product_would_show():
    """The cubic form is what one square a step less makes."""
    assert flops.newton_schulz(3, 5, 4) - flops.cubic(3, 5, 4) == 4 * 2 * 27


@pytest.mark.parametrize(
    "call",
    [
        lambda: flops.newton_schulz(2, 3, 5, "gem"),
        lambda: flops.newton_schulz(2, 3, -1),
        lambda: flops.method("newton", 2, 3),
        lambda: flops.layout("duplicate", (2, 4), even(2, 2, 0), 0, 5),
        lambda: flops.layout("gram", (2, 4), even(2, 2, 0), 0, 5, degree=4),
        lambda: flops.soap(2, 3, eigenbasis="qr"),
        lambda: flops.soap(2, 3, frequency=0),
    ],
)
def test_what_does_not_exist_is_refused(call):
    with pytest.raises(ValueError, match=r"did you mean|must"):
        call()


def test_every_method_has_a_number():
    assert all(flops.method(name, 4, 6).total > 0 for name in flops.METHODS)
