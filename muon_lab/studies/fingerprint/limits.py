r"""Where a step stops being what it is: small, large and zero gradients, those that are not finite, and side effects.

A gradient is multiplied by powers of two over the range of float32. Where the update shrinks with it, three places of
an eps are compared, X / max(‖C‖, eps), X / (‖C‖ + eps) and :math:`X / \sqrt{\|C\|^2 + eps^2}`, each through the
polynomial that has been found, for the candidate C of the momentum.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from muon_lab.studies.fingerprint import probes
from muon_lab.studies.fingerprint.card import Finding
from muon_lab.studies.fingerprint.decimals import shortest
from muon_lab.studies.fingerprint.divisions import Division
from muon_lab.studies.fingerprint.image import Image, started
from muon_lab.studies.fingerprint.mixture import SHAPE
from muon_lab.studies.fingerprint.momentum import Momentum, tensors
from muon_lab.studies.fingerprint.subject import Raised, Subject

Array = NDArray[np.float64]

#: Exponents of two by which a gradient of norm 1 is multiplied: the range of float32, and the steps through it.
LOWEST, HIGHEST, STRIDE = -120, 120, 6

#: An update is the same if its size is, to this and to the roundings of the optimizer.
SAME = 0.02

#: How many powers of two below the last unchanged gradient are looked at closely.
CLOSE = 16

#: A share of the usual update below this may be underflow.
LOST = 1e-4

#: A candidate of this norm overflows float16 if it is cast before it is divided.
EARLY = 2.0**20

#: How many sizes must show less than this share of the usual update.
FEW, HALF = 3, 0.5

#: How far logarithms of sizes may be from what an eps explains, and how much worse the next place must be.
FITS, WORSE = 0.1, 2.0

#: Equal large singular values of the gradient, and small ones beside them, in units of those at which the map bends.
ONES, SMALL = 4, np.array([0.2, 0.15, 0.1, 0.07])

#: The slope that is taken for an exact factor, which has none.
STEEP = 20.0

PLACES: Final[Mapping[str, Callable[[Array, float], Array]]] = {
    "max(‖C‖, eps)": lambda norm, eps: np.minimum(1.0, norm / eps),
    "‖C‖ + eps": lambda norm, eps: norm / (norm + eps),
    "√(‖C‖² + eps²)": lambda norm, eps: norm / np.sqrt(norm**2 + eps**2),
}


@dataclass(frozen=True)
class Range:
    """The gradients between which an update is what it is, and what happens outside.

    Attributes
    ----------
    low, high : float
        Norms of gradients.
    below, above : str
        What becomes of the smallest and the largest gradients of float32.
    """

    low: float
    high: float
    below: str
    above: str


@dataclass(frozen=True)
class Series:
    """Gradients of one direction and all sizes, read at small singular values, where no saturation hides a division."""

    subject: Subject
    degree: int
    tall: bool
    values: Array

    def update(self, exponent: int) -> Array | None:
        """Return the singular values of the update of a gradient of norm 2^exponent; None if the step raises."""
        G = probes.planted(self.values, *((16, 8) if self.tall else (8, 16)))
        try:
            (U,) = self.subject.updates([G * 2.0**exponent])
        except Raised:
            return None
        return probes.read(U, len(self.values)) / 2.0 ** (self.degree * exponent)

    def same(self, exponent: int, usual: Array, slack: float) -> bool:
        """Say whether an update is the usual one."""
        U = self.update(exponent)
        return U is not None and bool(np.isfinite(U).all() and (np.abs(U / usual - 1) <= slack).all())


def limits(subject: Subject, degree: int, found: Momentum, division: Division, image: Image) -> dict[str, Finding]:
    """Return what goes on the card about gradients of extreme size and about side effects."""
    series = Series(subject, degree, division.tall, _values(image))
    around = _range(series, SAME + 4 * found.ratios.scatter)
    lost = Finding("unknown: small singular values of a gradient of usual size leave no trace")
    return {
        "small_gradients": lost if around is None else _small(series, around, found, division, image),
        "large_gradients": lost if around is None else _large(around),
        "zero_gradient": _zero(subject),
        "not_finite": _not_finite(subject),
        "side_effects": _side_effects(subject, found),
    }


def _values(image: Image) -> Array:
    """Return singular values of norm 1 of which all but the first are in the linear part of the map."""
    schedule = image.match.schedule
    slope = STEEP if schedule is None or not image.accepted else abs(schedule.slope)
    values = np.append(np.ones(ONES), SMALL / slope)
    return values / np.linalg.norm(values)


def _range(series: Series, slack: float) -> Range | None:
    """Return the norms of gradients between which the update is that of a gradient of norm `probes.NORM`, if any."""
    start = round(math.log2(probes.NORM))
    usual = series.update(start)
    if usual is None or not usual.all() or not np.isfinite(usual).all():
        return None
    low = next((e for e in range(start, LOWEST, -STRIDE) if not series.same(e, usual, slack)), None)
    high = next((e for e in range(start, HIGHEST, STRIDE) if not series.same(e, usual, slack)), None)
    lowest = (
        LOWEST if low is None else next(e for e in range(low + 1, low + STRIDE + 1) if series.same(e, usual, slack))
    )
    highest = (
        HIGHEST
        if high is None
        else next(e for e in range(high - 1, high - STRIDE - 1, -1) if series.same(e, usual, slack))
    )
    return Range(2.0**lowest, 2.0**highest, _extreme(series, LOWEST, usual), _extreme(series, HIGHEST, usual))


def _extreme(series: Series, exponent: int, usual: Array) -> str:
    """Say what becomes of a gradient of extreme size."""
    U = series.update(exponent)
    if U is None:
        return "the step raises"
    if not np.isfinite(U).all():
        return "weights are not finite"
    ratio = float(np.linalg.norm(U) / np.linalg.norm(usual))
    if ratio == 0:
        return "nothing moves"
    return "it is the same" if abs(ratio - 1) <= SAME else f"it is {ratio:.1e} of the usual size"


def _small(series: Series, around: Range, found: Momentum, division: Division, image: Image) -> Finding:
    """Return what divides small gradients."""
    if around.low <= 2.0**LOWEST:
        return Finding(f"the same at all sizes tried, from a norm of {around.low:.0e}", {"place": "none", "eps": 0.0})
    said = f"the same down to a norm of {around.low:.0e}; at 2^{LOWEST} {around.below}"
    lowest = round(math.log2(around.low))
    exponents = np.arange(lowest - CLOSE, lowest + CLOSE // 2)
    updates = [series.update(int(e)) for e in exponents]
    if not image.accepted or division.entries or any(U is None for U in updates):
        return Finding(f"unknown: {said}")
    weight = found.weight()
    norms = (weight or 1.0) * 2.0 ** exponents.astype(float)
    seen = np.abs(np.stack([U for U in updates if U is not None]))
    early = image.form == "fp16" and (weight or 1.0) * around.high < EARLY
    used = _usable(seen, norms if early else None, series.values, image)
    used[:, :ONES] = False  # where the map bends, its roundings are larger than what tells one place from another
    if (used & (seen < HALF * seen[-1])).any(axis=1).sum() < FEW:
        return Finding(f"unknown: {said}, before an eps could show")
    behind = division.adapt == "namo"
    fits = {place: _fit(PLACES[place], norms, seen, used, series.values, image, behind) for place in PLACES}
    place = min(fits, key=lambda name: fits[name][1])
    eps, misfit = fits[place]
    others = min(other for name, (_, other) in fits.items() if name != place)
    if misfit > FITS or others < WORSE * misfit:
        return Finding(f"unknown: {said}; no known place of an eps explains it")
    if behind:  # V = (1 - beta2) ||G||^2 after the first step
        eps, place = eps * math.sqrt(1 - division.beta2) / (weight or 1.0), place.replace("‖C‖", "√V")
    elif weight is None:
        place = place.replace("C", "G")
    eps = shortest(eps, 0.1 * eps)
    return Finding(f"divided by {place} with eps = {eps:g}: {said}", {"place": place, "eps": eps})


def _large(around: Range) -> Finding:
    """Return what becomes of large gradients."""
    value = {"norm": around.high, "beyond": around.above}
    if around.high >= 2.0**HIGHEST:
        return Finding(f"the same at all sizes tried, to a norm of {around.high:.0e}", value)
    return Finding(f"the same up to a norm of {around.high:.0e}; at 2^{HIGHEST} {around.above}", value)


def _usable(seen: Array, norms: Array | None, values: Array, image: Image) -> NDArray[np.bool_]:
    """Say which singular values of which updates are not lost to underflow, which in float16 begins early.

    The norms are those of candidates that are cast before they are divided.
    """
    usable: NDArray[np.bool_] = np.isfinite(seen) & (seen > LOST * seen[-1])
    if image.form != "fp16":
        return usable
    normal = float(torch.finfo(torch.float16).tiny) * math.sqrt(16)  # entries of a planted gradient are s / 4
    entered = _entered(values, image)
    steep = seen[-1] / entered  # how an update follows what enters, where it is small
    usable &= seen / steep > normal
    return usable if norms is None else usable & (np.outer(norms, values) > normal)


def _fit(
    place: Callable[[Array, float], Array],
    norms: Array,
    seen: Array,
    used: NDArray[np.bool_],
    values: Array,
    image: Image,
    behind: bool,
) -> tuple[float, float]:
    """Return the eps at one place that explains updates of small gradients best, and how far their logarithms are off.

    A division behind the map shrinks all of the update alike.
    """
    entered = _entered(values, image)
    unit = seen[-1] / np.abs(image.match.candidate.map(entered))

    def misfit(log: float) -> float:
        shares = place(norms, 10.0**log)
        mapped = image.match.candidate.map(entered if behind else np.outer(shares, entered))
        expected = unit * np.abs(shares[:, None] * mapped if behind else mapped)
        ratios = np.log(seen[used] / np.maximum(expected[used], 1e-300))
        return float(np.sqrt(np.mean(ratios**2)))

    grid = np.arange(math.floor(math.log10(norms[0])), math.ceil(math.log10(norms[-1])) + 0.1, 0.25)
    best = min(grid, key=misfit)
    answer = minimize_scalar(misfit, bounds=(best - 0.25, best + 0.25), method="bounded", options={"xatol": 1e-4})
    return 10.0 ** float(answer.x), float(answer.fun)


def _entered(values: Array, image: Image) -> Array:
    """Return the singular values with which a gradient of usual size enters the map."""
    if image.match.start == "aol":
        return np.ones(len(values))
    return (values[None] * started(values[None], image.match.start) / image.match.safety)[0]


def _zero(subject: Subject) -> Finding:
    """Return what the first step makes of a gradient of zeros."""
    try:
        (U,) = subject.updates([torch.zeros(SHAPE)])
    except Raised as refusal:
        return Finding(f"the step raises {refusal}", "raises")
    if not torch.isfinite(U).all():
        return Finding("weights are not finite after a first gradient of zeros", "not finite")
    if U.any():
        return Finding(f"moves weights by {float(U.norm()):.2g} lr", "moves")
    return Finding("moves nothing", "nothing")


def _not_finite(subject: Subject) -> Finding:
    """Return what a NaN and an infinity in a later gradient do."""
    said = {name: _after_bad(subject, bad) for name, bad in (("NaN", math.nan), ("infinity", math.inf))}
    text = "; ".join(f"{name}: {what}" for name, what in said.items())
    return Finding(text if len(set(said.values())) > 1 else f"NaN or infinity: {said['NaN']}", said)


def _after_bad(subject: Subject, bad: float) -> str:
    """Say what one bad entry does."""
    good = probes.gaussian(*SHAPE, 5)
    broken, W = good.clone(), torch.ones(SHAPE)
    broken[0, 0] = bad
    try:
        run = subject.run(W, [good, broken, good], rate=1.0)
    except Raised as refusal:
        return f"the step raises {refusal}"
    before, now, later = run.weights
    if not torch.isfinite(now).all() or not torch.isfinite(later).all():
        return "weights are not finite from then on"
    (_, without) = subject.run(W, [good, good], rate=1.0).weights
    if torch.equal(now, before):
        return "nothing changes" if torch.equal(later, without) else "weights stay, but the state changes"
    return "weights move, and stay finite"


def _side_effects(subject: Subject, found: Momentum) -> Finding:
    """Return what a step does beside its purpose: to the gradient, and to the momentum with bfloat16 parameters."""
    said = {}
    G, W = probes.gaussian(*SHAPE, 6), torch.ones(SHAPE)
    run = subject.run(W, [G, G])
    if not torch.equal(run.gradients[0], G):
        said["gradient"] = "overwrites the gradient"
    if run.dropped:
        said["dropped"] = "leaves the parameter without gradient"
    if found.buffer is not None:
        try:
            narrow = subject.run(torch.zeros(SHAPE, dtype=torch.bfloat16), [G.bfloat16()], rate=1.0, zeroed=True)
        except Raised as refusal:
            said["bfloat16"] = f"bfloat16 parameters: the step raises {refusal}"
        else:
            M = dict(tensors("", narrow.state)).get(found.buffer.name)
            expected = found.buffer.first * G.bfloat16().float()
            if M is not None and float((M.float().reshape(SHAPE) - expected).norm()) > 2.0**-6 * float(expected.norm()):
                said["momentum"] = "with bfloat16 parameters a step overwrites its own momentum"
    return Finding("; ".join(said.values()) or "none seen", list(said))
