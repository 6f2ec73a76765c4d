r"""Momentum: its coefficient, whether it looks ahead, and whether the buffer is an average or a sum.

Four rules are told apart by the ratios of weights of `mixture`, with :math:`\mu` for the coefficient:

============= =========================================================== ============================
`plain`       C = M                                                       :math:`\mu^{t-k}`
`nesterov`    :math:`C = \mu M + (1 - \mu) G`, or :math:`\mu M + G`       :math:`\mu^{t-k+1}/(1+\mu)`
`added`       C = M + G with M an average, as in HeavyBall                :math:`\mu^{t-k} (1 - \mu) / (2 - \mu)`
`corrected`   as optax 0.2.8: M over :math:`1 - \mu^{t+1}`, and           :math:`\mu^{t-k+1} (1 - \mu^t) / ((1 -
              G over :math:`1 - \mu^t`                                    \mu^{t+1}) + \mu (1 - \mu^t))`
============= =========================================================== ============================

for the weight of :math:`G_k` in step t relative to that of :math:`G_t`. Average and sum have the same ratios: only the
state tells them apart, a tensor in the shape of the weight that is a linear function of the gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

from muon_lab.studies.fingerprint import probes
from muon_lab.studies.fingerprint.card import Finding
from muon_lab.studies.fingerprint.decimals import shortest
from muon_lab.studies.fingerprint.mixture import SHAPE, Ratio, Ratios, distance, ratios
from muon_lab.studies.fingerprint.subject import Subject

#: A state that is linear in the gradients to this, relative, is a momentum: float32 buffers are to 1e-7.
LINEAR = 1e-5

#: Rules fit that leave no more than so many times what the best one leaves, at the ratios that they say.
DECIDES = 2.0

#: A coefficient below this leaves no momentum that a step in bfloat16 shows.
NONE = 1e-6

_RATIO: Final[Mapping[str, Callable[[float, int, int], float]]] = {
    "plain": lambda mu, t, k: mu ** (t - k),
    "nesterov": lambda mu, t, k: mu ** (t - k + 1) / (1 + mu),
    "added": lambda mu, t, k: mu ** (t - k) * (1 - mu) / (2 - mu),
    "corrected": lambda mu, t, k: mu ** (t - k + 1) * (1 - mu**t) / (1 - mu ** (t + 1) + mu * (1 - mu**t)),
}

SAID = {
    "plain": "no look-ahead",
    "nesterov": "Nesterov's look-ahead",
    "added": "the gradient is added to its average",
    "corrected": "Nesterov's look-ahead with bias correction of both terms, as in optax",
}


@dataclass(frozen=True)
class Buffer:
    """A state that is linear in the gradients: its name, the weight of a new gradient, what it keeps of itself."""

    name: str
    first: float
    fresh: float
    kept: float

    @property
    def form(self) -> str | None:
        """Whether it is an average, a sum, or neither (a first gradient taken whole, say)."""
        if not _close(self.first, self.fresh):
            return None
        if _close(self.fresh, 1.0):
            return "sum"
        return "average" if _close(self.fresh, 1 - self.kept) else None


@dataclass(frozen=True)
class Momentum:
    """What is known of the momentum.

    Attributes
    ----------
    mu : float, optional
        The coefficient.
    rules : tuple of str
        Those of the rules above that fit, the best first.
    form : str, optional
        `average` or `sum`.
    ratios : Ratios
        As measured.
    buffer : Buffer, optional
        The state that tells the form.
    nearest : (float, bool)
        Coefficient and look-ahead that come nearest to the ratios, known or not.
    """

    mu: float | None
    rules: tuple[str, ...]
    form: str | None
    ratios: Ratios
    buffer: Buffer | None
    nearest: tuple[float, bool]

    @property
    def rule(self) -> str | None:
        """The rule, if one alone fits."""
        return self.rules[0] if len(self.rules) == 1 else None

    @property
    def mixed(self) -> float:
        """The weight of the first gradient in the second step, relative to that of the second."""
        if self.mu is None or not self.rules:
            return self.ratios.second.value
        return _RATIO[self.rules[0]](self.mu, 2, 1)

    def weight(self) -> float | None:
        """Return the weight of the first gradient in the first candidate; None if the form is unknown."""
        if self.mu == 0:
            return 1.0
        if self.mu is None or self.form is None or self.rule in (None, "corrected"):
            return None
        fresh = 1 - self.mu if self.form == "average" else 1.0
        return {"plain": fresh, "nesterov": fresh * (1 + self.mu), "added": fresh + 1}[self.rule]


def momentum(subject: Subject) -> Momentum:
    """Return what is known of the momentum of an optimizer."""
    buffer = found_buffer(subject)
    guesses = [] if buffer is None else [_triple(rule, buffer.kept) for rule in _RATIO]
    measured = ratios(subject, guesses)
    explained = all(each.explains for each in (measured.second, measured.third, measured.third_first))
    found: dict[str, float] = {}
    form = buffer.form if buffer is not None else None
    for rule in _RATIO if explained else ():
        fitting = [mu for mu in _coefficients(rule, measured, buffer) if _fits(rule, mu, measured)]
        if fitting:
            found[rule] = fitting[0]
    if found and (max(found.values()) <= NONE or (buffer is None and measured.second.agrees(0.0))):
        found = {"plain": 0.0}
    if "nesterov" in found and (form == "sum" or abs(found["nesterov"] - 0.5) <= LINEAR):
        found.pop("added", None)  # at 1/2 they are one rule
    if not found:
        return Momentum(None, (), form, measured, buffer, _nearest(measured, buffer))
    if len(found) > 1:
        apart = {rule: distance(subject, *_triple(rule, mu)) for rule, mu in found.items()}
        found = {rule: mu for rule, mu in found.items() if apart[rule] <= DECIDES * min(apart.values())}
    rules = sorted(found, key=lambda rule: _misfit(rule, found[rule], measured))
    mu = _rounded(found[rules[0]], measured, buffer, rules[0])
    ours = next((rule for rule in rules if rule in ("plain", "nesterov")), None)
    nearest = _nearest(measured, buffer) if ours is None else (mu, ours == "nesterov")
    return Momentum(mu, tuple(rules), form, measured, buffer, nearest)


def findings(found: Momentum) -> dict[str, Finding]:
    """Return what goes on the card."""
    seen = ", ".join(
        f"{each.value:.4g} ± {each.error:.1g}"
        for each in (found.ratios.second, found.ratios.third, found.ratios.third_first)
    )
    if found.mu is None:
        said = f"unknown: no known rule gives the weights of past gradients, w21/w22, w32/w33, w31/w33 = {seen}"
        return {"momentum": Finding(said), "nesterov": Finding("unknown"), "form": _form(found)}
    if found.mu == 0:
        look = Finding("does not show without momentum")
        return {"momentum": Finding("none: earlier gradients leave no trace", 0.0), "nesterov": look, "form": look}
    unclear = "" if found.rule else ": too alike to tell"
    measured = f"the second step has {found.ratios.second.value:.4g} of the first gradient"
    return {
        "momentum": Finding(f"{found.mu:g}; {measured}", found.mu),
        "nesterov": Finding(" or ".join(SAID[rule] for rule in found.rules) + unclear, found.rule),
        "form": _form(found),
    }


def found_buffer(subject: Subject) -> Buffer | None:
    """Return the first state that is linear in the gradients, the one named for momentum if there are several."""
    G1, G2 = (probes.gaussian(*SHAPE, seed) for seed in (1, 2))
    one, two, both = (_state(subject, *gradients) for gradients in ((G1,), (2 * G1,), (G1, G2)))
    found = []
    for name, M in one.items():
        if name not in two or name not in both or not M.any():
            continue
        first = float((M * G1).sum() / (G1 * G1).sum())
        basis = torch.stack([M.flatten(), G2.flatten().double()], dim=1)
        kept, fresh = torch.linalg.lstsq(basis, both[name].flatten()[:, None]).solution.flatten().tolist()
        distances = ((M, first * G1), (two[name], 2 * M), (both[name], kept * M + fresh * G2))
        remembers = abs(kept) > LINEAR  # the last gradient alone is no momentum
        if remembers and all(float((a - b).norm()) <= LINEAR * float(a.norm()) for a, b in distances):
            found.append(Buffer(name, first, fresh, kept))
    return next((each for each in found if "momentum" in each.name), found[0] if found else None)


def _state(subject: Subject, *gradients: Float[Tensor, "m n"]) -> dict[str, Float[Tensor, "m n"]]:
    """Return the states in the shape of the weight, in float64, after steps from weights of zero."""
    state = dict(tensors("", subject.run(torch.zeros(SHAPE), gradients, rate=1.0, zeroed=True).state))
    return {name: value.double().reshape(SHAPE) for name, value in state.items() if value.squeeze().shape == SHAPE}


def tensors(name: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of a state, however deep, with their names."""
    if isinstance(state, Tensor) and state.is_floating_point():
        yield name, state
    elif isinstance(state, Mapping | list | tuple):
        entries = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in entries:
            yield from tensors(f"{name}.{key}" if name else str(key), value)


def _form(found: Momentum) -> Finding:
    if found.buffer is None:
        return Finding("does not show: no state in the shape of the weight is linear in the gradients")
    where = f"{found.buffer.name} adds {found.buffer.fresh:.4g} of a gradient and keeps {found.buffer.kept:.4g}"
    return Finding(f"{found.form or 'unknown'}: {where}", found.form)


def _triple(rule: str, mu: float) -> tuple[float, float, float]:
    """Return the ratios that `mixture.Ratios` has, by a rule."""
    ratio = _RATIO[rule]
    return ratio(mu, 2, 1), ratio(mu, 3, 2), ratio(mu, 3, 1)


def _pairs(rule: str, mu: float, measured: Ratios) -> list[tuple[Ratio, float]]:
    found = (measured.second, measured.third, measured.third_first)
    return list(zip(found, _triple(rule, mu), strict=True))


def _fits(rule: str, mu: float, measured: Ratios) -> bool:
    return all(each.agrees(value) for each, value in _pairs(rule, mu, measured))


def _misfit(rule: str, mu: float, measured: Ratios) -> float:
    return max(abs(each.value - value) / max(each.error, LINEAR) for each, value in _pairs(rule, mu, measured))


def _solved(rule: str, measured: Ratios) -> float | None:
    """Return the coefficient in [0, 1) that gives a rule's ratio in the second step; None if none does."""
    r21 = measured.second.value
    if r21 <= NONE:
        return 0.0
    ratio = _RATIO[rule]
    grid = np.linspace(0.0, 1 - 1e-9, 201)
    above = np.array([ratio(mu, 2, 1) for mu in grid]) > r21
    crossings = np.flatnonzero(above[1:] != above[:-1])
    solutions = [float(brentq(lambda mu: ratio(mu, 2, 1) - r21, grid[i], grid[i + 1])) for i in crossings]
    return min(solutions, key=lambda mu: _misfit(rule, mu, measured), default=None)


def _rounded(mu: float, measured: Ratios, buffer: Buffer | None, rule: str) -> float:
    """Return the shortest decimal that the measurement allows."""
    if buffer is not None and mu == buffer.kept:
        return shortest(mu, LINEAR * max(1 - mu, LINEAR))
    slope = abs(_RATIO[rule](mu + 1e-6, 2, 1) - _RATIO[rule](mu, 2, 1)) / 1e-6
    return shortest(mu, measured.second.error / max(slope, 1e-3))


def _nearest(measured: Ratios, buffer: Buffer | None) -> tuple[float, bool]:
    """Return the coefficient and look-ahead that come nearest, though no rule fits."""
    tried = [
        (_misfit(rule, mu, measured), mu, rule == "nesterov")
        for rule in ("plain", "nesterov")
        for mu in _coefficients(rule, measured, buffer)
        if 0 <= mu < 1
    ]
    _, mu, looks = min(tried, default=(0.0, 0.0, False))
    return float(f"{mu:.4g}"), looks


def _coefficients(rule: str, measured: Ratios, buffer: Buffer | None) -> list[float]:
    """Return the coefficients to try: what the buffer keeps, and what the second step asks for."""
    solved = _solved(rule, measured)
    return [*([] if buffer is None else [buffer.kept]), *([] if solved is None else [solved])]


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= LINEAR * max(abs(a), abs(b))
