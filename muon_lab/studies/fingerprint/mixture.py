r"""How much of an earlier gradient is in a step: solved by comparing steps with steps, whatever rule makes them.

At step t an optimizer acts on a mixture :math:`C_t = \sum_k w_{tk} G_k` of the gradients so far. Replace :math:`G_1` by
:math:`\tau G_1` and add :math:`x G_1` to :math:`G_2`: the mixture, and with it the step, is the same as before exactly
if :math:`x = (1 - \tau)\, w_{21} / w_{22}`. So a ratio of weights is the zero of a one-dimensional search in which the
optimizer itself is the only function: neither its polynomial nor its number format need be known, nor that of its
second moments, whose first values stay the same with the first direction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from muon_lab.studies.fingerprint import probes
from muon_lab.studies.fingerprint.subject import Subject

#: By what an early gradient is shrunk: a power of two, so that nothing is rounded.
SHRUNK = 2.0**-6

#: The shape of these gradients.
SHAPE = (8, 12)

#: The middle of the values of x that are tried, and half widths of the scans around the best one, of so many points.
CENTRE, SCANS, SCANNED = 0.5, (1.0, 0.125, 0.03), 17

#: A guess this near to the target, relative to its norm, spares the scans.
NEAR = 0.1

#: Half widths of the windows in which x is then solved for.
WINDOWS = (0.1, 0.01, 0.001)

#: Points of a window, and how much farther from the target than the nearest a solution may be.
POINTS, CLOSE = 9, 1.3

#: Coefficients of a parabola.
FITTED = 3


@dataclass(frozen=True)
class Ratio:
    """A ratio of weights, how uncertain it is, and how badly it explains the step.

    Attributes
    ----------
    value, error : float
        The ratio, and three standard deviations of it by the scatter of the responses.
    misfit : float
        The distance of the step from its best explanation, relative to its norm.
    scatter : float
        What that distance would be from rounding alone.
    """

    value: float
    error: float
    misfit: float
    scatter: float

    @property
    def explains(self) -> bool:
        """Whether some mixture gives the step, to rounding."""
        return self.misfit <= 4 * self.scatter + FLOOR

    def agrees(self, expected: float) -> bool:
        """Say whether it can be the expected number: roundings may all push the same way, by their scatter."""
        return abs(self.value - expected) <= self.error + self.scatter + FLOOR


#: Differences of directions this small are curvature that the fit of a window leaves.
FLOOR = 1e-5


@dataclass(frozen=True)
class Ratios:
    """Weights of past gradients: of the first in the second step, of the second and first in the third."""

    second: Ratio
    third: Ratio
    third_first: Ratio

    @property
    def scatter(self) -> float:
        """The largest relative scatter of directions, by rounding."""
        return max(self.second.scatter, self.third.scatter, self.third_first.scatter)


def ratios(subject: Subject, guesses: Sequence[tuple[float, float, float]] = ()) -> Ratios:
    """Return how much of the past is in the second and third step.

    Parameters
    ----------
    subject : Subject
        The optimizer.
    guesses : sequence of (float, float, float)
        Ratios of weights from which the searches begin too: where an update jumps, a scan alone may miss the place.
    """
    G1, G2, G3 = (probes.gaussian(*SHAPE, seed) for seed in (1, 2, 3))
    kept = 1 - SHRUNK
    second = solved(
        _last(subject, G1, G2),
        lambda x: _last(subject, SHRUNK * G1, G2 + x * G1),
        [kept * r21 for r21, _, _ in guesses],
    )
    along = solved(
        _last(subject, SHRUNK * G2, G2, G3),
        lambda x: _last(subject, SHRUNK**2 * G2, SHRUNK * G2, G3 + x * G2),
        [kept * (r32 + SHRUNK * r31) for _, r32, r31 in guesses],
    )
    rest = solved(
        _last(subject, G1, G2, G3),
        lambda x: _last(subject, SHRUNK * G1, G2 + second.value * G1, G3 + x * G1),
        [kept * (r31 - r32 * r21) for r21, r32, r31 in guesses],
    )
    # along = kept (r32 + SHRUNK r31) and rest = kept (r31 - r32 r21)
    r21 = second.value / kept
    r32 = (along.value - SHRUNK * rest.value) / kept / (1 + SHRUNK * r21)
    r31 = rest.value / kept + r32 * r21
    error = rest.error + along.error + second.error
    return Ratios(
        replace(second, value=r21, error=second.error / kept),
        replace(along, value=r32, error=(along.error + SHRUNK * rest.error) / kept),
        replace(rest, value=r31, error=error / kept),
    )


def distance(subject: Subject, r21: float, r32: float, r31: float) -> float:
    """Return how far steps are from their explanations by given ratios.

    A coarse format rounds two mixtures that are equal to a few roundings of float32 to nearly the same numbers: at the
    right ratios far less is left than its roundings scatter.
    """
    G1, G2, G3 = (probes.gaussian(*SHAPE, seed) for seed in (1, 2, 3))
    kept = 1 - SHRUNK
    second, third = G2 + kept * r21 * G1, G3 + kept * (r31 - r32 * r21) * G1
    pairs = (
        ((G1, G2), (SHRUNK * G1, second)),
        ((G1, G2, G3), (SHRUNK * G1, second, third)),
    )
    return max(float(np.linalg.norm(_last(subject, *a) - _last(subject, *b))) for a, b in pairs)


def solved(
    target: NDArray[np.float64], response: Callable[[float], NDArray[np.float64]], guesses: Sequence[float] = ()
) -> Ratio:
    """Return the x at which a response is nearest to a target: scanned, then by least squares in windows.

    A wide window averages the roundings of a coarse format, a narrow one does not see the curvature: of the solutions
    that come nearest, the one with the smallest error is taken.
    """

    def distance(x: float) -> float:
        apart = float(np.linalg.norm(response(x) - target))
        return apart if np.isfinite(apart) else np.inf

    nearest, best = min(((distance(x), x) for x in guesses), default=(np.inf, CENTRE))
    for width in SCANS if nearest > NEAR * np.linalg.norm(target) else ():
        scanned = [float(x) for x in best + width * np.linspace(-1, 1, SCANNED)]
        nearest, best = min((nearest, best), *((distance(x), x) for x in scanned))
    found: list[Ratio] = []
    for width in WINDOWS:
        points = best + width * np.linspace(-1, 1, POINTS)
        solution = _nearest_point(points, np.stack([response(float(x)) for x in points]), target)
        solution = replace(solution, misfit=distance(solution.value))
        found.append(solution)
        if solution.misfit < nearest:
            best, nearest = solution.value, solution.misfit
    close = [solution for solution in found if solution.misfit <= CLOSE * min(each.misfit for each in found)]
    return min(close, key=lambda solution: solution.error)


def _nearest_point(points: NDArray[np.float64], responses: NDArray[np.float64], target: NDArray[np.float64]) -> Ratio:
    """Return the solution of a parabola through the responses, entry by entry, as far as they are finite."""
    centre, width = points.mean(), (points.max() - points.min()) / 2
    finite = np.isfinite(responses).all(axis=1)
    if finite.sum() <= FITTED or not np.isfinite(target).all():
        return Ratio(float(centre), float("inf"), float("inf"), 0.0)
    responses, t = responses[finite], (points[finite] - centre) / width
    basis = np.stack([np.ones_like(t), t, t * t], axis=1)
    fit, _, _, _ = np.linalg.lstsq(basis, responses, rcond=None)
    scatter = np.linalg.norm(responses - basis @ fit) / np.sqrt(len(t) - FITTED)
    at = 0.0
    for _ in range(8):  # Gauss-Newton on |fit(t) - target|
        value, slope = fit[0] + at * fit[1] + at * at * fit[2], fit[1] + 2 * at * fit[2]
        at += float(slope @ (target - value)) / max(float(slope @ slope), 1e-300)
        at = float(np.clip(at, -4, 4))
    value, slope = fit[0] + at * fit[1] + at * at * fit[2], fit[1] + 2 * at * fit[2]
    steep = max(float(np.linalg.norm(slope)) / width, 1e-300)
    alone = scatter / np.sqrt(len(target))  # of one entry
    misfit = float(np.linalg.norm(target - value))
    return Ratio(float(centre + width * at), float(3 * np.sqrt(2) * alone / steep), misfit, float(scatter))


def _last(subject: Subject, *gradients: Float[Tensor, "m n"]) -> NDArray[np.float64]:
    """Return the last update in float64, of norm 1 and flat."""
    U = subject.tried(gradients)[-1]
    return (U / torch.linalg.vector_norm(U)).flatten().numpy()
