"""Which Muon is this: what is planted is read back, peers are told apart, and what does not show is not claimed."""

import functools
import json
import math
import sys

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muon_lab import optim, polar
from muon_lab.arithmetic import Rounded
from muon_lab.optim.step import DECAYS, FORMS, SCALES
from muon_lab.studies.fingerprint import (
    Setting,
    Subject,
    candidates,
    divisions,
    examination,
    examine,
    load,
    mixture,
    probes,
    subject,
)
from muon_lab.studies.fingerprint.candidates import EXACT
from muon_lab.studies.fingerprint.image import Match
from muon_lab.studies.fingerprint.momentum import found_buffer

KELLER = (3.4445, -4.7750, 2.0315)

#: Directions in bfloat16 of two implementations, five steps apart, differ by at most a few times 2^-8 times the
#: amplification of the schedules at hand, which is about 5.
BF16 = 6 * 5 * 2.0**-8


@functools.cache
def torchs():
    """Return the card of torch.optim.Muon."""
    return examine(Subject(torch.optim.Muon))


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    """Leave out run-time checks of shapes, nine tenths of the time, except for the one card that is made here."""
    torchs()
    assert optim.MOP is not None  # loaded with its checks, as what the card needs: others test with these modules
    loaded = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patch.setattr(jaxtyping, "jaxtyped", lambda *, typechecker: lambda function: function)  # of nested functions
        yield
    assert not {name for name in set(sys.modules) - loaded if name.startswith("muon_lab")}


def tf32(X):
    """Round to 11 significant bits, ties to even."""
    bits = X.view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & -0x2000).view(torch.float32)


class Written(torch.optim.Optimizer):
    """A Muon written out, with one choice of everything that a fingerprint must tell apart."""

    def __init__(self, params, lr=0.1, weight_decay=0.0, **choices):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        plain = {"rule": "plain", "mu": 0.9, "form": "average", "eps": 1e-7, "place": "clamp", "safety": 1.0}
        plain |= {"format": torch.float32}
        self.choices = {**plain, "decay": "decoupled", "triples": [KELLER] * 5, "scale": lambda m, n: 1.0, **choices}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"], group["weight_decay"])

    def update(self, p, lr, weight_decay):
        choice, state = self.choices, self.state[p]
        mu, t = choice["mu"], state["step"] = choice["mu"], state.get("step", 0) + 1
        fresh = 1 - mu if choice["form"] == "average" else 1.0
        M = state["momentum_buffer"] = mu * state.get("momentum_buffer", torch.zeros_like(p)) + fresh * p.grad
        C = {
            "plain": lambda: M,
            "nesterov": lambda: mu * M + fresh * p.grad,
            "added": lambda: M + p.grad,
            "corrected": lambda: mu * M / (1 - mu ** (t + 1)) + (1 - mu) * p.grad / (1 - mu**t),
            "newest": lambda: M + p.grad * (t == 2),
        }[choice["rule"]]()
        size = choice["scale"](*p.shape)
        U = size * self.direction(C)
        rate = {
            "decoupled": lr,
            "adjusted": lr * size,
            "independent": 1.0,
            "palm": lr * lr,
            "cautious": lr,
            "after": lr,
        }
        rate = rate[choice["decay"]] * weight_decay
        if choice["decay"] == "after":
            p.copy_((1 - rate) * (p - lr * U))
        elif choice["decay"] == "cautious":
            p.copy_(p - rate * p * (U * p > 0) - lr * U)
        else:
            p.copy_((1 - rate) * p - lr * U)

    def direction(self, C):
        norm, eps = self.choices["safety"] * C.norm(), self.choices["eps"]
        X = (
            C
            / {"clamp": norm.clamp(min=eps), "add": norm + eps, "root": (norm**2 + eps**2).sqrt()}[
                self.choices["place"]
            ]
        )
        X = X.T if C.shape[0] > C.shape[1] else X
        kept = tf32 if self.choices["format"] == "tf32" else lambda X: X.to(self.choices["format"])
        X = kept(X.contiguous())
        for a, b, c in self.choices["triples"]:
            A = kept(X @ X.T)
            X = kept(a * X + kept(b * A + c * kept(A @ A)) @ X)
        return (X.T if C.shape[0] > C.shape[1] else X).to(C.dtype)


def card(**choices):
    return examine(Subject(Written, choices))


def values(found):
    return {name: finding.value for name, finding in found.findings.items()}


# --- what is planted is read back -------------------------------------------------------------------------------------


PLACES = {"clamp": "max(‖C‖, eps)", "add": "‖C‖ + eps", "root": "√(‖C‖² + eps²)"}


@pytest.mark.parametrize(
    ("rule", "mu", "form", "decay", "place"),
    [
        ("plain", 0.9, "sum", "decoupled", "clamp"),
        ("nesterov", 0.8, "average", "independent", "add"),
        ("corrected", 0.95, "average", "palm", None),  # the weight of a first gradient is not one of optim.Muon
        ("added", 0.7, "average", "cautious", "root"),
        ("nesterov", 0.5, "sum", "after", "clamp"),
        ("plain", 0.997, "average", "adjusted", "root"),
    ],
)
def test_momentum_decay_scale_and_eps_are_read_back(rule, mu, form, decay, place):
    scale = lambda m, n: math.sqrt(max(1, m / n))  # noqa: E731
    planted = {"rule": rule, "mu": mu, "form": form, "decay": decay, "weight_decay": 0.03, "scale": scale}
    found = card(**planted, place=place or "clamp", eps=2e-6)
    shown = values(found)
    assert (shown["momentum"], shown["nesterov"], shown["form"]) == (mu, rule, form)
    method = decay if decay in ("independent", "palm", "adjusted") else "decoupled"
    decayed = {"form": method, "value": 0.03, "masked": decay == "cautious", "after": decay == "after"}
    assert shown["weight_decay"] == decayed
    assert shown["scale"] == {"mode": "shape_scaling", "extra": 1.0} or place is None
    if place is not None:
        assert shown["small_gradients"]["place"] == PLACES[place]
        assert shown["small_gradients"]["eps"] == pytest.approx(2e-6, rel=0.1)  # eps is said to one digit
    assert shown["schedule"] == "simple, 5 steps"
    assert shown["iteration"] == "fp32"
    assert shown["kind"] == "spectral"
    assert shown["size"] == 0
    assert shown["transposed"]["ratio"] == pytest.approx(math.sqrt(12 / 8), rel=1e-5)
    assert shown["transposed"]["apart"] < 1e-5
    assert shown["zero_gradient"] == "nothing"
    assert shown["not_finite"] == dict.fromkeys(("NaN", "infinity"), "weights are not finite from then on")
    # in float32 a norm of 2^64 has an infinite square, and 1 / inf is 0
    assert shown["large_gradients"]["beyond"] == "nothing moves"
    fresh = 1 - mu if form == "average" else 1.0
    weight = {"plain": fresh, "nesterov": fresh * (1 + mu), "corrected": 1 - mu + mu / (1 + mu), "added": fresh + 1}[
        rule
    ]
    assert 2.0**62 < weight * shown["large_gradients"]["norm"] < 2.0**66
    ours = rule in ("plain", "nesterov") and decay in ("decoupled", "independent", "palm")
    assert (found.largest < 1e-5) == ours  # two orders of operations in float32, amplified


def test_without_momentum_nothing_is_said_about_it():
    found = card(mu=0.0, rule="nesterov").findings
    assert found["momentum"].value == 0
    assert not found["nesterov"].known
    assert not found["form"].known


def test_a_mixture_that_no_rule_makes_is_unknown():
    found = card(rule="newest").findings
    assert not found["momentum"].known
    assert "no known rule" in found["momentum"].said


def test_a_safety_factor_is_read_back():
    found = card(safety=1.02, eps=1e-12, triples=polar.schedules.get("polar_express_1.02_5").rows)
    assert values(found)["schedule"] == "polar_express_1.02_5, 5 steps"
    assert values(found)["start"] == {"start": "frobenius", "safety": 1.02}
    assert found.largest < 1e-5  # two orders of operations in float32, amplified


def test_the_form_of_a_decay_that_is_switched_off_is_shown():
    found = card(decay="palm").findings["weight_decay"]
    assert found.value["value"] == 0
    assert "if weight_decay were" in found.said
    assert "palm" in found.said


def test_a_triple_that_is_in_no_list_is_fitted():
    found = card(triples=[(2.2, -1.9, 0.7)] * 6, mu=0.5)
    assert found.findings["schedule"].said == "(2.2, -1.9, 0.7) at every one of 6 steps"
    assert found.largest < 1e-5


def test_a_table_that_is_in_no_list_is_unknown_and_described():
    rows = [*polar.schedules.get("quintic").rows[:3], (2.9, -3.2, 1.3), (1.9, -1.3, 0.4)]
    found = card(triples=rows)
    assert not found.findings["schedule"].known
    assert not found.findings["iteration"].known
    assert "its image runs from" in found.findings["schedule"].said
    assert "the schedule is the nearest known one" in found.remarks


def test_a_table_a_percent_off_a_known_one_is_not_taken_for_it():
    rows = [(1.01 * a, b, c) for a, b, c in polar.schedules.get("quintic").rows]
    assert not card(triples=rows).findings["schedule"].known


def test_the_last_rows_of_a_table_are_told_from_the_first():
    rows = polar.schedules.get("quintic").rows
    assert values(card(triples=rows[-4:]))["schedule"] == "the last 4 steps of quintic"
    assert values(card(triples=rows[:4]))["schedule"] == "quintic, 4 steps"


def test_an_unknown_scale_is_shown_as_measured():
    found = card(scale=lambda m, n: (m * n) ** 0.25).findings["scale"]
    assert not found.known
    assert "16x16 2," in found.said


def test_a_gradient_that_a_step_overwrites_is_noticed():
    class Overwriting(Written):
        def update(self, p, lr, weight_decay):
            super().update(p, lr, weight_decay)
            p.grad.zero_()

    assert values(card())["side_effects"] == []
    assert values(examine(Subject(Overwriting)))["side_effects"] == ["gradient"]


# --- every combination of the lab's own options -----------------------------------------------------------------------


NAMES = ("simple", "quintic", "polar_express", "cubic5", "deepseekv4", "polar_express_1.02_5", "modula6", "taylor")
STARTS = ("frobenius", "schatten4", "spectral", "aol")

#: Settings that are hard to tell: what a second moment of entries hides, sizes of directions that are divided or grow
#: with the gradient, a schedule whose first rows are another's, no momentum, and decay in the gradient.
HARD = (
    ("taylor", "aol", 0.9, True, "average", "spectral", 1.0, "decoupled", 0.0, "adamuon"),
    ("svd", "frobenius", 0.95, False, "sum", "unit_rms_norm", 0.437, "palm", 0.03, "adamuon"),
    ("modula6", "schatten4", 0.997, True, "sum", "nuclear_norm", 0.437, "palm", 0.03, "adamuon"),
    ("deepseekv4", "spectral", 0.0, True, "sum", "match_rms_adamw", 1.0, "l2", 0.03, "normuon"),
    ("polar_express", "aol", 0.3, True, "average", "none", 0.437, "independent", 0.03, "namo"),
)


def hard(test):
    """Add the hard settings to those that are drawn."""
    names = ("name", "start", "momentum", "nesterov", "form", "scale", "extra", "decay", "weight_decay", "adapt")
    for setting in HARD:
        test = example(**dict(zip(names, setting, strict=True)))(test)
    return test


@pytest.mark.slow
@settings(max_examples=3)
@given(
    name=st.sampled_from(("svd", *NAMES)),
    start=st.sampled_from(STARTS),
    momentum=st.sampled_from((0.0, 0.3, 0.9, 0.95, 0.997)),
    nesterov=st.booleans(),
    form=st.sampled_from(FORMS),
    scale=st.sampled_from(SCALES),
    extra=st.sampled_from((1.0, 0.437)),
    decay=st.sampled_from(DECAYS),
    weight_decay=st.sampled_from((0.0, 0.03)),
    adapt=st.sampled_from((None, None, "normuon", "namo", "adamuon")),
)
@hard
def test_any_setting_of_the_lab_is_recovered_bit_for_bit(
    name, start, momentum, nesterov, form, scale, extra, decay, weight_decay, adapt
):
    """What cannot show is left out: starts of an exact factor, which is homogeneous, look-ahead and form of no
    momentum, and the form of no decay. Scales that are multiples of each other are both on the card.
    """
    schedule = None if name == "svd" else polar.schedules.get(name)
    direction = polar.svd() if schedule is None else schedule
    if schedule is not None and start != "frobenius":
        direction = polar.newton_schulz(schedule, start=start)
    decay = "decoupled" if adapt == "namo" and decay == "l2" else decay
    plain = {"momentum": momentum, "nesterov": nesterov, "form": form, "scale": scale, "extra": extra, "decay": decay}
    found = examine(
        Subject(optim.Muon, {"lr": 0.1, "weight_decay": weight_decay, "direction": direction, "adapt": adapt, **plain})
    )
    shown = values(found)
    assert found.largest == 0
    assert not found.remarks
    assert shown["schedule"] == ("the exact polar factor" if schedule is None else f"{name}, {schedule.steps} steps")
    assert shown["iteration"] == "fp32"
    assert scale in found.findings["scale"].said
    assert shown["momentum"] == momentum
    assert shown["divided_by"]["name"] == (adapt or "none")
    assert shown["weight_decay"]["value"] == weight_decay
    assert shown["small_gradients"] is None or adapt == "namo" or shown["small_gradients"]["place"] == "none"
    assert shown["not_finite"] == {"NaN": "nothing changes", "infinity": "nothing changes"}
    if momentum:
        assert (shown["nesterov"], shown["form"]) == ("nesterov" if nesterov else "plain", form)
    if schedule is not None:
        assert shown["start"]["start"] == start
    if weight_decay:
        assert shown["weight_decay"]["form"] == decay


@pytest.mark.parametrize(("form", "format"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", "tf32")])
def test_the_format_of_the_iteration_is_told(form, format):
    """With a momentum of 1/2 optax's rule is near to Nesterov's, by less than the roundings of these formats."""
    found = values(card(format=format, rule="nesterov", mu=0.5, triples=polar.schedules.get("quintic").rows))
    assert found["schedule"] == "quintic, 5 steps"
    assert found["iteration"] == form
    assert (found["momentum"], found["nesterov"]) == (0.5, "nesterov")


def test_what_is_equal_under_other_names_is_listed():
    found = examine(Subject(optim.Muon, {"lr": 0.1, "direction": ("deepseekv4", 5), "scale": "spectral", "extra": 0.5}))
    assert found.findings["schedule"].said == "simple, 5 steps, the same as deepseekv4, 5 steps"
    assert found.findings["scale"].said.endswith("the same as match_rms_adamw times 2.5")
    assert found.largest == 0


def test_a_step_that_raises_for_some_gradients_leaves_a_card_of_the_others():
    """A schedule that diverges does so for some singular values and not for others."""

    class Fragile(Written):
        def direction(self, C):
            if torch.linalg.matrix_norm(C, 2) > 0.8 * C.norm():
                raise FloatingPointError("diverges")
            return super().direction(C)

    found = values(examine(Subject(Fragile)))
    assert found["schedule"] == "simple, 5 steps"
    assert (found["momentum"], found["nesterov"], found["form"]) == (0.9, "plain", "average")


def test_mop_is_the_exact_factor_by_the_nuclear_norm():
    found = examine(Subject(optim.MOP, {"lr": 0.1, "weight_decay": 0.1, "decay": "independent"}))
    assert values(found)["schedule"] == "the exact polar factor"
    assert values(found)["scale"] == {"mode": "nuclear_norm", "extra": 1.0}
    assert values(found)["size"] == 1
    assert found.largest == 0


# --- peers ------------------------------------------------------------------------------------------------------------


def test_torch():
    found = torchs()
    shown = values(found)
    assert shown["schedule"] == "simple, 5 steps"
    assert shown["iteration"] == "bf16"
    assert shown["start"] == {"start": "frobenius", "safety": 1.0}
    assert shown["scale"] == {"mode": "shape_scaling", "extra": 1.0}
    assert (shown["momentum"], shown["nesterov"], shown["form"]) == (0.95, "nesterov", "average")
    assert shown["weight_decay"] == {"form": "decoupled", "value": 0.1, "masked": False, "after": False}
    assert shown["small_gradients"]["place"] == "max(‖C‖, eps)"
    assert shown["small_gradients"]["eps"] == pytest.approx(1e-7, rel=0.1)
    assert shown["zero_gradient"] == "nothing"
    assert set(shown["not_finite"].values()) == {"weights are not finite from then on"}
    assert found.largest < BF16
    assert "which does not reproduce it" not in str(found)


@pytest.mark.parametrize(
    ("kwargs", "schedule", "mode", "momentum"),
    [
        ({"ns_steps": 6, "adjust_lr_fn": "match_rms_adamw"}, "simple, 6 steps", "match_rms_adamw", 0.95),
        (
            {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7, "nesterov": False, "momentum": 0.8, "eps": 1e-5},
            "the triple of its own settings, 7 steps",
            "shape_scaling",
            0.8,
        ),
    ],
)
def test_torch_with_other_arguments(kwargs, schedule, mode, momentum):
    found = examine(Subject(torch.optim.Muon, kwargs))
    shown = values(found)
    assert (shown["schedule"], shown["momentum"]) == (schedule, momentum)
    assert shown["scale"] == {"mode": mode, "extra": 1.0}
    assert shown["nesterov"] == ("nesterov" if kwargs.get("nesterov", True) else "plain")
    assert shown["small_gradients"]["eps"] == pytest.approx(kwargs.get("eps", 1e-7), rel=0.1)
    assert found.largest < BF16


def test_a_momentum_that_torch_overwrites_is_noticed_where_it_does():
    """pytorch/pytorch#194664: with bfloat16 parameters and without look-ahead the buffer is normalised in place."""
    p = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 64.0)
    optimizer = torch.optim.Muon([p], nesterov=False)
    optimizer.step()
    overwritten = float(optimizer.state[p]["momentum_buffer"].norm()) < 2
    found = values(examine(Subject(torch.optim.Muon, {"nesterov": False})))["side_effects"]
    assert ("momentum" in found) == overwritten


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("Muon", {}, {"schedule": "simple, 5 steps", "iteration": "bf16", "side_effects": ["gradient"]}),
        ("Muon", {"ns_coeffs": "quintic"}, {"schedule": "quintic, 5 steps", "iteration": "bf16"}),
        (
            "Muon",
            {"ns_coeffs": "polar_express", "ns_method": "gram_newton_schulz", "use_adjusted_lr": True},
            {
                "schedule": "polar_express_1.01, 5 steps",
                "iteration": "fp16",
                "scale": {"mode": "match_rms_adamw", "extra": 1.0},
            },
        ),
        (
            "Muon",
            {"weight_decay": 0.1, "weight_decouple": False},
            {"weight_decay": {"form": "l2", "value": 0.1, "masked": False, "after": False}},
        ),
        (
            "SCION",
            {},
            {"schedule": "simple, 5 steps", "scale": {"mode": "unit_rms_norm", "extra": 1.0}, "momentum": 0.9},
        ),
    ],
)
def test_pytorch_optimizer(name, kwargs, expected):
    package = pytest.importorskip("pytorch_optimizer")
    found = examine(Subject(getattr(package, name), kwargs))
    assert found.adapter == ("groups" if name == "Muon" else "parameters")
    assert {aspect: values(found)[aspect] for aspect in expected} == expected
    assert found.largest < BF16


@pytest.mark.parametrize("name", ["AdaMuon", "NorMuon"])
def test_a_second_moment_of_another_kind_is_not_taken_for_one_of_the_labs(name):
    package = pytest.importorskip("pytorch_optimizer")
    found = examine(Subject(getattr(package, name)))
    assert not found.findings["divided_by"].known
    assert values(found)["schedule"] == "simple, 5 steps"
    assert "what divides the direction is not a rule of optim.Muon" in found.remarks
    assert "nearest setting, which does not reproduce it" in str(found)


class RowsFirst(Written):
    """Rows are brought to norm 1, and then it iterates."""

    def direction(self, C):
        return super().direction(C / C.norm(dim=1, keepdim=True).clamp_min(1e-12))


def test_rows_that_are_normalised_first_are_a_card_and_no_complaint():
    """Nothing is averaged: the coefficient that is fitted is 0, give or take a rounding."""
    found = examine(Subject(RowsFirst, {"mu": 0.0, "format": torch.bfloat16}))
    assert found.findings["divided_by"].said.startswith("rows")
    assert found.setting is not None
    assert "nearest setting, which does not reproduce it" in str(found)


def test_a_setting_that_cannot_be_built_is_none(monkeypatch):
    """Whatever was measured, a setting out of range is no error about the optimizer."""
    plain = Setting({"lr": 0.1, "extra": -2.0}, Match(EXACT), "fp32", None)
    monkeypatch.setattr(examination, "_setting", lambda *_: plain)
    found = card()
    assert found.setting is None
    assert found.findings["schedule"].known
    assert "no setting of optim.Muon is of this kind" in str(found)


@pytest.mark.parametrize(("measured", "said"), [(-3e-17, 0.0), (-1e-3, 0.0), (0.9999999, 0.9999999), (0.94999, 0.95)])
def test_a_measured_coefficient_is_one_of_an_average(measured, said):
    assert divisions._rounded(measured, 1e-3) == said


# --- others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor, torch.optim.SGD])
def test_what_is_no_muon_has_no_setting(cls):
    found = examine(Subject(cls, {"lr": 0.1}))
    assert found.setting is None
    assert found.largest is None
    assert "no setting of optim.Muon is of this kind" in str(found)


class Stochastic(Written):
    def direction(self, C):
        X = super().direction(C)
        return X + 2.0**-9 * X * torch.rand_like(X)


def test_a_step_that_draws_numbers_is_said_to_and_leaves_the_generator_alone():
    first, second = (examine(Subject(Stochastic)) for _ in range(2))
    assert "draws random numbers" in first.findings["kind"].said
    assert first.data() == second.data()


def test_examining_is_deterministic():
    one, other = (json.dumps(card().data(), allow_nan=False) for _ in range(2))
    assert one == other


# --- the setting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "safety", "adapt", "start"),
    [
        ("fp32", 1.0, None, "frobenius"),
        ("bf16", 1.02, ("adamuon", 0.9), "frobenius"),
        ("float32", 1.0, ("normuon", 0.95), "schatten4"),
    ],
)
def test_the_printed_lines_build_the_setting(form, safety, adapt, start):
    known = {each.argument: each for each in candidates.known()}
    match = Match(known["cans", 5], start, safety)
    setting = Setting({"lr": 0.1, "momentum": 0.9, "nesterov": True}, match, form, adapt)
    W = probes.gaussian(6, 4, 1)
    built = [torch.nn.Parameter(W.clone()) for _ in range(2)]
    *before, call = str(setting).split("\n\n")
    names = {"params": [built[0]]}
    exec("\n".join(before), names)
    optimizers = [eval(call, names), setting.build([built[1]])]
    for p, optimizer in zip(built, optimizers, strict=True):
        p.grad = probes.gaussian(6, 4, 2)
        optimizer.step()
    assert torch.equal(*built)
    assert not torch.equal(built[0], W)


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_a_search_finds_where_two_curves_meet():
    directions_ = np.random.default_rng(0).standard_normal((3, 40))

    def response(x):
        return np.tanh(directions_[0] + x * directions_[1] + x * x * directions_[2])

    found = mixture.solved(response(0.3217), response)
    assert abs(found.value - 0.3217) <= found.error + mixture.FLOOR
    assert found.explains
    assert not mixture.solved(response(0.3217) + 0.1 * directions_[2], response).explains


def test_a_state_that_is_not_linear_in_the_gradients_is_no_buffer():
    assert found_buffer(Subject(torch.optim.RMSprop)) is None
    adam = found_buffer(Subject(torch.optim.Adam))
    assert (adam.name, adam.form) == ("exp_avg", "average")
    assert adam.kept == pytest.approx(0.9, rel=1e-6)


def test_planted_singular_values_survive_the_iteration_one_by_one():
    """A planted gradient in bfloat16 gives what its singular values give alone, to the roundings of each."""
    s = np.array([1.0, 0.3, 1e-2, 1e-4])
    G = probes.planted(s, 16, 32)
    schedule = polar.schedules.get("quintic")
    image = probes.read(polar.newton_schulz(schedule, Rounded("bf16"))(G), 4)
    expected = schedule.map(s / np.linalg.norm(s))
    assert np.abs(image / expected - 1).max() < 5 * 6 * 2.0**-8  # five steps of six roundings each, all one way


def test_extremes_are_findings_and_no_exceptions():
    class Picky(Written):
        def update(self, p, lr, weight_decay):
            if not 1e-20 < float(p.grad.norm()) < 1e20:
                raise FloatingPointError("such a gradient")
            super().update(p, lr, weight_decay)

    found = examine(Subject(Picky))
    assert values(found)["zero_gradient"] == "raises"
    assert "raises FloatingPointError: such a gradient" in found.findings["not_finite"].said
    assert "the step raises" in found.findings["large_gradients"].said


# --- what cannot be examined ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("Muon", "'Muon' is no dotted path"),
        ("nowhere.Muon", "there is no module 'nowhere'"),
        ("torch.optim.Moun", "did you mean torch.optim.Muon?"),
        ("torch.nn.Linear", "torch.nn.Linear is no subclass of torch.optim.Optimizer"),
        ("torch.optim.lr_scheduler.StepLR", "is no subclass"),
    ],
)
def test_what_is_no_optimizer_is_refused(path, sentence):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
        load(path)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("cls", "kwargs", "sentence"),
    [
        (torch.optim.Muon, {"lr": -1.0}, "refuses to be made with lr=-1.0: ValueError: Learning rate"),
        (torch.optim.Muon, {"spelled": 1}, "refuses to be made with spelled=1: TypeError"),
        (optim.Muon, {}, "refuses to be made with its defaults: TypeError"),
        (torch.optim.LBFGS, {}, "takes no step on a float32 matrix: TypeError"),
        (torch.optim.SparseAdam, {}, "takes no step on a float32 matrix: RuntimeError"),
    ],
)
def test_what_cannot_be_made_or_stepped_is_refused_in_one_sentence(cls, kwargs, sentence):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refusal:
        examine(Subject(cls, kwargs))
    assert sentence in str(refusal.value)


def test_groups_and_adapters_hand_over_parameters():
    class Flagged(Written):
        def __init__(self, param_groups):
            assert all(group.pop("use_muon") for group in param_groups)
            super().__init__(param_groups)

    assert Subject(Flagged, {"lr": 0.5}).way() == "groups"
    assert Subject(Flagged, {"lr": 0.5}).settings()["lr"] == 0.5

    def halved(cls, parameters, kwargs):
        return cls(parameters, lr=kwargs["lr"] / 2)

    assert Subject(Written, {"lr": 1.0}, halved).settings()["lr"] == 0.5
    assert Subject(Written, {"lr": 1.0}, halved).way() == "halved"
    with pytest.raises(ValueError, match="unknown adapter 'group'"):
        subject.adapter_named("group")
    assert subject.adapter_named("muon_lab.polar.svd") is polar.svd
