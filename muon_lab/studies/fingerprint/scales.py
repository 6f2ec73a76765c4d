r"""How far a step goes: the factor for the shape, an extra factor, and what transposing does.

A planted gradient with four equal singular values has rows, columns and entries of one size each, so whatever divides
the direction leaves it as it is. The sizes of its updates for several shapes stand in the ratios of the shape factor
alone. Its absolute value comes from probes with many singular values.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from muon_lab.optim import step
from muon_lab.studies.fingerprint import probes
from muon_lab.studies.fingerprint.card import Finding
from muon_lab.studies.fingerprint.character import Character
from muon_lab.studies.fingerprint.decimals import shortest
from muon_lab.studies.fingerprint.divisions import Division
from muon_lab.studies.fingerprint.image import Image
from muon_lab.studies.fingerprint.momentum import Momentum
from muon_lab.studies.fingerprint.samples import Array
from muon_lab.studies.fingerprint.subject import Subject

#: Shapes with long sides that are powers of four: entries are powers of two, rounded by no format.
SHAPES: Final = ((4, 4), (16, 16), (16, 4), (4, 16), (64, 16), (16, 64), (64, 4), (4, 64))

#: Singular values of the gradients for them.
VALUES: Final = (0.5,) * 4

#: Ratios of sizes that are this close are equal, with so many scatters added; but never if they are so far apart.
EQUAL, ROUNDED, DIFFERENT = 1e-3, 16.0, 0.2


@dataclass(frozen=True)
class Scale:
    """How far a step goes.

    Attributes
    ----------
    mode : str, optional
        One of `step.SCALES`, if one has the measured ratios.
    extra : float, optional
        The extra factor; of scale and weight of the gradient together if the form of the momentum is unknown.
    sizes : dict
        For each shape the size of the update in its one singular value, relative to the first.
    same : tuple of (str, float)
        Other modes with the extra factors that make them equal to this one for every shape.
    """

    mode: str | None
    extra: float | None
    sizes: dict[tuple[int, int], float]
    same: tuple[tuple[str, float], ...] = ()

    def of(self, m: int, n: int) -> float:
        """Return the factor for a shape; 1 if the mode is unknown or not one of the shape."""
        if self.mode is None or self.mode == "nuclear_norm":
            return 1.0
        return _factor(self.mode, (m, n)) * (self.extra or 1.0)

    def finding(self) -> Finding:
        """Return what goes on the card."""
        if self.mode is None:
            seen = ", ".join(f"{m}x{n} {size:.3g}" for (m, n), size in self.sizes.items())
            return Finding(f"unknown: sizes of updates relative to 4x4: {seen}")
        formula = FORMULAS[self.mode]
        if self.extra is None:
            return Finding(f"{self.mode}: {formula}, times an unknown factor", {"mode": self.mode, "extra": None})
        times = "" if self.extra == 1 else f" times {self.extra:g}"
        same = "".join(f", the same as {mode} times {extra:g}" for mode, extra in self.same)
        return Finding(f"{self.mode}: {formula}{times}{same}", {"mode": self.mode, "extra": self.extra})


FORMULAS = {
    "none": "1 for every shape",
    "spectral": "√max(m, n)",
    "match_rms_adamw": "0.2 √max(m, n)",
    "unit_rms_norm": "√(m/n)",
    "shape_scaling": "√max(1, m/n)",
    "nuclear_norm": "the nuclear norm of the momentum",
}


def scale(subject: Subject, first: Character, found: Momentum, division: Division, image: Image) -> Scale:
    """Return how far the steps of an optimizer go."""
    raw = {shape: _size(subject, *shape, division) for shape in SHAPES}
    sizes = {shape: size / raw[SHAPES[0]] for shape, size in raw.items()}
    slack = min(EQUAL + ROUNDED * found.ratios.scatter, DIFFERENT)
    absolute, weight = _absolute(found, division, image), found.weight()
    extras: dict[str, float | None] = {}
    if first.degree == 1:
        by_norm = absolute / (probes.NORM * image.inner)
        if _equal(sizes.values(), slack) and _equal(by_norm, slack):
            extras["nuclear_norm"] = None if weight is None else _mean(by_norm / weight, image.left)
    elif first.degree == 0:
        if division.entries:  # the first update has no map in it
            absolute = np.array([raw[SHAPES[0]] * math.sqrt(1 - division.beta2)])
        shape = SHAPES[0] if division.entries else image.taken.shape
        residual = 0.0 if division.entries else image.left
        for mode in step.SCALES:
            if mode != "nuclear_norm" and _proportional(mode, sizes, slack):
                extras[mode] = _mean(absolute / _factor(mode, shape), residual)
    if (division.adapt == "namo" and weight is None) or not (division.known and image.accepted):
        extras = dict.fromkeys(extras)
    if not extras:
        return Scale(None, None, sizes)
    mode = min(extras, key=lambda name: abs(math.log(extras[name] or 1.0)))
    same = tuple((name, extra) for name, extra in extras.items() if extra is not None and name != mode)
    return Scale(mode, extras[mode], sizes, same)


def transposed(subject: Subject) -> Finding:
    """Return what becomes of a transposed gradient."""
    G = probes.gaussian(8, 12, 4)
    (U,), (V,) = subject.updates([G]), subject.updates([G.mT.contiguous()])
    ratio = float(V.norm() / U.norm())
    apart = float((V.mT / V.norm() - U / U.norm()).norm())
    same = "is the transposed direction" if apart <= 2.0**-4 else "is another direction"
    value = {"apart": apart, "ratio": ratio}
    return Finding(f"the update of a transposed gradient {same} (apart {apart:.1e}), {ratio:.4g} times as long", value)


def _size(subject: Subject, m: int, n: int, division: Division) -> float:
    """Return the singular value of the update of a planted gradient; the size of an entry if entries are divided."""
    (U,) = subject.tried([probes.NORM * probes.planted(VALUES, m, n)])
    return float(U.abs().max()) if division.entries else abs(float(probes.read(U, len(VALUES)).mean()))


def _equal(values: Iterable[float], slack: float) -> bool:
    array = np.array(list(values))
    return bool(np.isfinite(array).all() and np.ptp(array) <= slack * abs(array).max())


def _proportional(mode: str, sizes: Mapping[tuple[int, int], float], slack: float) -> bool:
    """Say whether sizes have the ratios of a mode."""
    return _equal((size / _factor(mode, shape) for shape, size in sizes.items()), slack)


def _factor(mode: str, shape: tuple[int, int]) -> float:
    """Return the factor of a mode for a shape."""
    X = torch.ones(shape)
    return float(step.scale(mode, X, X))


def _absolute(found: Momentum, division: Division, image: Image) -> Array:
    """Return by what the directions of the planted probes are multiplied, second moments aside."""
    first = math.sqrt(1 - division.beta2)  # the root of a first average over that of what is averaged
    if division.entries:
        return image.sizes * first
    if division.adapt == "namo":
        return image.sizes * first / (found.weight() or 1.0)
    return image.sizes


def _mean(factors: Array, residual: float) -> float:
    """Return the mean as short as its error allows: that of the scatter, or half of what the map leaves."""
    mean = float(factors.mean())
    return shortest(mean, max(4 * float(factors.std()) / math.sqrt(len(factors)), (residual / 2 + 1e-5) * mean))
