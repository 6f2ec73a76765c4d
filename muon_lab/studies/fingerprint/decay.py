r"""Weight decay: in which form, how much, whether before or after the update, and whether masked.

The weights after one step from W, less those after the same step from zero, are :math:`(1 - \delta) W` in every
decoupled form; how :math:`\delta` follows the learning rate and the shape tells which. A mask shows as two values among
the entries. With decay in the gradient the update itself changes, and :math:`G + \lambda W` given as a gradient to
weights of zero does the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from muon_lab.studies.fingerprint import probes
from muon_lab.studies.fingerprint.card import Finding
from muon_lab.studies.fingerprint.decimals import shortest
from muon_lab.studies.fingerprint.divisions import Division
from muon_lab.studies.fingerprint.mixture import solved
from muon_lab.studies.fingerprint.scales import Scale
from muon_lab.studies.fingerprint.subject import Raised, Subject

#: A learning rate, and the decay that is put into a group without any to see its form.
RATE, TRIED = 4.0, 0.125

#: Shapes whose factors differ in most modes.
SHAPES: Final = ((8, 8), (32, 8), (8, 32))

#: Roundings of float32 weights that a decay is read with.
READ = 16 * torch.finfo(torch.float32).eps

#: Shares of weights that are this close, relative, are one.
LEVEL = 0.01

#: The shape where decay in the gradient is looked for, and how much of the configured decay is nothing.
LARGE, NOTHING = (16, 24), 0.01

#: How often the interval is narrowed in which signs agree.
LEVELS = 3

#: The learning rate at which decay in the gradient is looked for: an update far above the rounding of the weights.
FAST = 2.0**6

FORMS = {
    "decoupled": "W (1 - lr λ)",
    "independent": "W (1 - λ)",
    "palm": "W (1 - lr² λ)",
    "l2": "G + λ W, in the gradient",
    "adjusted": "W (1 - lr s λ) with the factor s of the shape",
}


@dataclass(frozen=True)
class Decay:
    """What is known of the decay.

    Attributes
    ----------
    form : str, optional
        One of `FORMS`.
    value : float, optional
        The coefficient as configured, 0 if there is none.
    masked : bool
        Whether only entries decay at which update and weight have one sign.
    after : bool
        Whether it acts on the updated weight.
    said : str
        In words.
    """

    form: str | None
    value: float | None
    masked: bool
    after: bool
    said: str

    def finding(self) -> Finding:
        """Return what goes on the card."""
        if self.value is None:
            return Finding(self.said)
        value: dict[str, Any] = {"form": self.form, "value": self.value, "masked": self.masked, "after": self.after}
        return Finding(self.said, value)


def decay(subject: Subject, division: Division, scale: Scale, scatter: float) -> Decay:
    """Return what is known of the decay of an optimizer."""
    try:
        return _known(subject, division, scale, scatter)
    except Raised as refusal:
        return Decay(None, None, False, False, f"unknown: from large weights the step raises {refusal}")


def _known(subject: Subject, division: Division, scale: Scale, scatter: float) -> Decay:
    found = _measured(subject, division, scale, scatter, None)
    if found is not None:
        return found
    if "weight_decay" not in subject.settings():
        return Decay(None, 0.0, False, False, "none")
    form = _measured(subject, division, scale, scatter, TRIED)
    if form is None:
        return Decay(None, 0.0, False, False, "none, whatever its setting weight_decay says")
    said = f"none; if weight_decay were {TRIED:g}: {form.said}"
    return Decay(form.form, 0.0, form.masked, form.after, said)


def _measured(
    subject: Subject, division: Division, scale: Scale, scatter: float, coefficient: float | None
) -> Decay | None:
    """Return the decay with a coefficient put into the group, None if weights play no part in the step."""
    W, G = _weights(*SHAPES[0]), probes.gaussian(*SHAPES[0], 8)
    kept, alone = _kept(subject, W, G, RATE, coefficient)
    taken = 1 - kept / W
    delta = taken.flatten()[taken.abs().argmax()]
    decayed = (taken - delta).abs() <= LEVEL * delta.abs()
    if float((kept - W).norm()) <= READ * float(W.norm()):
        return _in_gradient(subject, division, coefficient, scatter)
    if decayed.all():
        return _decoupled(subject, scale, coefficient, "", False)
    if (decayed | (taken.abs() <= LEVEL * delta.abs())).all():
        masks = {"update": -alone * W > 0, "gradient": G * W > 0}
        where = next((name for name, mask in masks.items() if torch.equal(decayed, mask)), None)
        mask = f", only where {where} and weight have one sign" if where else ", only at some entries"
        return _decoupled(subject, scale, coefficient, mask, True)
    unknown = Decay(None, None, False, False, "unknown: weights act on the step, but as no known form of decay")
    return _in_gradient(subject, division, coefficient, scatter) or unknown


def _decoupled(subject: Subject, scale: Scale, coefficient: float | None, mask: str, masked: bool) -> Decay:
    """Return a decay of weights: its form by how it follows learning rate and shape."""
    deltas = {shape: _delta(subject, shape, RATE, coefficient) for shape in SHAPES}
    delta, error = deltas[SHAPES[0]]
    power = math.log2(_delta(subject, SHAPES[0], 2 * RATE, coefficient)[0] / delta)
    form = next(
        (name for name, p in (("independent", 0), ("decoupled", 1), ("palm", 2)) if abs(power - p) < 0.02), None
    )
    if form is None:
        return Decay(None, None, masked, False, f"unknown: it grows with power {power:.3g} of the learning rate{mask}")
    value = delta / RATE ** {"independent": 0, "decoupled": 1, "palm": 2}[form]
    ratios = [deltas[shape][0] / delta for shape in SHAPES]
    scales = [scale.of(*shape) / scale.of(*SHAPES[0]) for shape in SHAPES]
    if any(abs(ratio - 1) > 0.02 for ratio in ratios):
        if form != "decoupled" or any(abs(a / b - 1) > 0.02 for a, b in zip(ratios, scales, strict=True)):
            seen = ", ".join(f"{m}x{n} {ratio:.3g}" for (m, n), ratio in zip(SHAPES, ratios, strict=True))
            return Decay(None, None, masked, False, f"unknown: it depends on the shape, relative to 8x8: {seen}{mask}")
        form, value = "adjusted", value / scale.of(*SHAPES[0])
    value = shortest(value, 4 * error / delta * value)
    after = _after(subject, coefficient)
    place = ", after the update" if after else ""
    return Decay(form, value, masked, after, f"{form}, λ = {value:g}: {FORMS[form]}{place}{mask}")


def _in_gradient(subject: Subject, division: Division, coefficient: float | None, scatter: float) -> Decay | None:
    """Return decay in the gradient, None if that does not explain the step."""
    guess = float(subject.settings().get("weight_decay") or 0.0) if coefficient is None else coefficient
    if guess <= 0:
        return None
    W, G = probes.gaussian(*LARGE, 7) / guess, probes.gaussian(*LARGE, 8)
    (moved,) = subject.run(W, [G], rate=FAST, decay=coefficient).weights
    target = ((W.double() - moved.double()) / FAST).flatten().numpy()
    size = float(np.linalg.norm(target))

    def response(x: float) -> NDArray[np.float64]:
        return subject.updates([G + x * guess * W])[0].flatten().numpy() / size

    read = READ * float(W.norm()) / FAST / size
    if division.entries:
        value, error, misfit = _by_signs(target / size, response)
        fits = misfit <= 4 * scatter + read
    else:
        found = solved(target / size, response)
        value, error = found.value, 3 * found.error + read
        fits = found.misfit <= 4 * (max(found.scatter, scatter) + read)
    if not fits or abs(value) <= max(error, NOTHING):
        return None
    value = shortest(value * guess, error * guess)
    return Decay("l2", value, False, False, f"l2, λ = {value:g}: {FORMS['l2']}")


def _by_signs(
    target: NDArray[np.float64], response: Callable[[float], NDArray[np.float64]]
) -> tuple[float, float, float]:
    """Return the middle and half of the interval of x where signs are nearest to a target, and the misfit there."""
    middle, half = 1.0, 1.5
    for _ in range(LEVELS):
        points = middle + half * np.linspace(-1, 1, 21)
        signs = [response(float(x)) for x in points]
        apart = [float(np.linalg.norm(each / np.linalg.norm(each) - target)) for each in signs]
        best = points[np.array(apart) <= min(apart) + READ]
        middle, half = float(best.mean()), float(np.ptp(best)) / 2 + half / 20
    return middle, half, min(apart)


def _kept(
    subject: Subject, W: Float[Tensor, "m n"], G: Float[Tensor, "m n"], rate: float, coefficient: float | None
) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m n"]]:
    """Return what one step leaves of the weights, and where it leads from zero, in float64."""
    (moved,) = subject.run(W, [G], rate=rate, decay=coefficient).weights
    (alone,) = subject.run(torch.zeros_like(W), [G], rate=rate, decay=coefficient).weights
    return moved.double() - alone.double(), alone.double()


def _weights(m: int, n: int) -> Float[Tensor, "{m} {n}"]:
    """Return weights of random signs and sizes in [64, 128], far above an update."""
    drawn = probes.gaussian(m, n, 7)
    return 64 * drawn.sign() * (1 + drawn.abs() / drawn.abs().max())


def _delta(subject: Subject, shape: tuple[int, int], rate: float, coefficient: float | None) -> tuple[float, float]:
    """Return the share of the weights that a step takes away where it takes the most, and the error of it."""
    W, G = _weights(*shape), probes.gaussian(*shape, 8)
    kept, _ = _kept(subject, W, G, rate, coefficient)
    taken = W.double() - kept
    chosen = taken.abs() > 0.5 * (taken / W).abs().max() * W.abs()
    w = torch.where(chosen, W.double(), 0.0)
    return float((taken * w).sum() / (w * w).sum()), READ


def _after(subject: Subject, coefficient: float | None) -> bool:
    """Say whether decay acts on the update too, which from weights of zero then is shorter."""
    G = probes.gaussian(*SHAPES[0], 8)
    zero = torch.zeros_like(G)
    (with_decay,) = subject.run(zero, [G], rate=RATE, decay=coefficient).weights
    (without,) = subject.run(zero, [G], rate=RATE, decay=0.0).weights
    return float((with_decay - without).norm()) > READ * float(without.norm())
