r"""What divides the direction: nothing, or a second moment of its entries, of its rows, or of the gradient.

Two gradients of blocks of rank one, a faint :math:`x y_1^T` and then :math:`x y_2^T`, give directions
:math:`\hat x \hat y_1^T` and :math:`\hat x \hat y_2^T` under any polynomial. An average of squares leaves

.. math:: |u_j| \propto |\hat y_{2j}| \,/\, \sqrt{\beta_2\, \hat y_{1j}^2 + \hat y_{2j}^2},

linear in :math:`\beta_2` once squared and inverted. A second moment of the gradient's norm shows in the size alone: a
gradient G, then c G, moves :math:`(r + c) / \sqrt{\beta_2 + c^2}` times as far, with r the weight of the first in
the second step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.studies.fingerprint import probes
from muon_lab.studies.fingerprint.card import Finding
from muon_lab.studies.fingerprint.character import Character
from muon_lab.studies.fingerprint.decimals import shortest
from muon_lab.studies.fingerprint.mixture import FLOOR, SHAPE
from muon_lab.studies.fingerprint.momentum import Momentum
from muon_lab.studies.fingerprint.subject import Subject

#: The ratio of the first gradient to the second where the first only fills second moments.
FAINT = 2.0**-10

#: A fit of the columns' profile that is this good, relative, is one: bfloat16 directions leave 0.005.
PROFILE = 0.03

#: Coefficients are known no better than this.
BETA2 = 1e-5

#: An error that is worth saying.
SURE = 1e-3

#: Pairs of right factors, and sizes of gradients of rank one.
SHIFTS, SIZES = ((5, 8), (3, 9)), (1.0, 1.1, 1.3, 1.7)

#: Ratios of the second gradient to the first, and the random gradients with which they are taken.
STEPS, SEEDS = (0.25, 1.0, 4.0), (1, 2, 3, 4)


@dataclass(frozen=True)
class Gain:
    """A ratio of sizes, and its error."""

    value: float
    error: float


@dataclass(frozen=True)
class Division:
    """What divides the direction.

    Attributes
    ----------
    kind : str
        As `Character`'s.
    beta2 : float
        The coefficient of the average, 0 where there is none.
    adapt : str, optional
        Its name in `optim.Muon`, None if nothing divides or it is none of those.
    said : str
        In words.
    known : bool
        Whether the words say all of it.
    """

    kind: str
    beta2: float
    adapt: str | None
    said: str
    known: bool = True

    @property
    def entries(self) -> bool:
        """Whether a first step shows signs only."""
        return self.kind == "entries"

    @property
    def tall(self) -> bool:
        """Whether planted gradients must be tall, to have equal norms along what is divided."""
        return self.kind == "rows"

    def divided(self, D: Float[Tensor, "m n"], before: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Return the update that a direction gives; ``before`` is the direction of a faint first step.

        Divided rows or columns are brought to the norm of the direction; divided entries are known up to a factor.

        Examples
        --------
        >>> D, before = torch.tensor([[3.0, 1.0]]), torch.tensor([[4.0, 0.0]])
        >>> Division("entries", 1.0, None, "").divided(D, before)
        tensor([[0.6000, 1.0000]])
        """
        if self.kind == "spectral":
            return D
        if self.entries:
            return D / (self.beta2 * before.square() + D.square()).sqrt()
        by_rows = self.kind == "rows" or (self.kind == "long" and D.shape[0] >= D.shape[1])
        U = D / torch.linalg.vector_norm(D, dim=-1 if by_rows else -2, keepdim=True)
        return U * (torch.linalg.vector_norm(D) / torch.linalg.vector_norm(U))

    def finding(self) -> Finding:
        """Return what goes on the card."""
        value = {"name": self.adapt or "none", "beta2": self.beta2} if self.known else None
        return Finding(self.said, value)


def division(subject: Subject, first: Character, found: Momentum) -> Division:
    """Return what divides the direction of an optimizer whose kind and whose momentum are measured."""
    kind, mixed = first.kind or "spectral", found.mixed
    tolerance = 2 * (found.ratios.second.error + found.ratios.scatter) + FLOOR
    gains = {c: _gain(subject, c, mixed, first.degree or 0) for c in STEPS}
    if kind == "spectral":
        return _by_norm(gains, mixed, tolerance)
    profile = _profile(subject, kind, mixed)
    if profile is None:
        return Division(kind, 0.0, None, f"unknown: {first.said}, and not by the root of an average of squares", False)
    beta2, error = profile
    gain, named = gains[1.0], _named(subject)
    by_size, doubt = gain.value**-2 - 1, 2 * gain.error * gain.value**-3
    if kind == "entries" and abs(by_size - beta2) <= error + doubt + tolerance:
        beta2, error = (by_size, max(doubt, BETA2)) if doubt < error else (beta2, error)
        beta2 = _rounded(beta2, error, named)
        said = f"adamuon: entries, by the root of an average with beta2 = {_give_or_take(beta2, error)}"
        return Division(kind, beta2, "adamuon", said)
    beta2, kept = _rounded(beta2, error, named), abs(gain.value - 1) <= tolerance + gain.error
    shown = _give_or_take(beta2, error)
    if kind == "long" and kept:
        said = f"normuon: rows of tall and columns of wide updates, by an average with beta2 = {shown}"
        return Division(kind, beta2, "normuon", said)
    corrected = ", with bias correction or a restored norm" if kept else ""
    said = f"{first.said}, by the root of an average with beta2 = {shown}{corrected}; not a rule of optim.Muon"
    return Division(kind, beta2, "normuon" if kind == "rows" else None, said, False)


def _named(subject: Subject) -> tuple[float, ...]:
    """Return the numbers between 0 and 1 among the settings, one of which may be the coefficient."""
    entries = [value if isinstance(value, list | tuple) else (value,) for value in subject.settings().values()]
    return tuple(each for entry in entries for each in entry if isinstance(each, float) and 0 < each < 1)


def _rounded(beta2: float, error: float, named: Sequence[float] = ()) -> float:
    """Return a measured coefficient as people write it, in [0, 1): rounding leaves one of 0 slightly below it."""
    beta2 = max(beta2, 0.0)
    rounded = shortest(beta2, error, named)
    return rounded if 0 <= rounded < 1 else beta2


def _give_or_take(value: float, error: float) -> str:
    """Return a coefficient in words, with its error if it is not known to four digits."""
    return f"{value:g} ± {error:.1g}" if error > SURE else f"{value:g}"


def _gain(subject: Subject, c: float, r: float, degree: int) -> Gain:
    """Return how much farther c G moves after G than G alone, beyond what momentum and size of the gradient explain."""
    ratios = []
    for seed in SEEDS:
        G = probes.gaussian(*SHAPE, seed)
        first, second = subject.tried([G, c * G])
        ratios.append(float(second.norm() / first.norm()) / abs(r + c) ** degree)
    return Gain(float(np.mean(ratios)), 4 * float(np.std(ratios)) / np.sqrt(len(ratios)))


def _by_norm(gains: dict[float, Gain], r: float, tolerance: float) -> Division:
    """Return what the sizes of second steps say of an optimizer whose directions are divided by nothing."""
    if all(abs(gain.value - 1) <= tolerance for gain in gains.values()):
        return Division("spectral", 0.0, None, "nothing")
    beta2 = ((1 + r) / gains[1.0].value) ** 2 - 1
    expected = {c: (r + c) / np.sqrt(beta2 + c * c) if beta2 + c * c > 0 else np.inf for c in gains}
    if 0 <= beta2 < 1 and all(abs(gains[c].value / expected[c] - 1) <= tolerance for c in gains):
        beta2 = _rounded(beta2, max(2 * (1 + beta2) * gains[1.0].error, BETA2))
        said = f"namo: the size, by the root of an average of squared gradient norms with beta2 = {beta2:g}"
        return Division("spectral", beta2, "namo", said)
    sizes = ", ".join(f"{gains[c].value:.4g} for {c:g} G" for c in gains)
    return Division("spectral", 0.0, None, f"unknown: after a gradient G the size of a step is {sizes}", False)


def _profile(subject: Subject, kind: str, r: float) -> tuple[float, float] | None:
    """Return the coefficient of an average of squares and its error, None if the columns' profile is not that of one.

    The map of the one singular value rounds differently for different sizes of a gradient: hence the median of several.
    """
    found = [_one_profile(subject, kind, r, shifts, size) for shifts in SHIFTS for size in SIZES]
    fits = [each for each in found if each is not None]
    if len(fits) < len(found):
        return None
    values = np.array([value for value, _ in fits])
    middle = float(np.median(values))
    left = float(np.median([left for _, left in fits]))
    error = max(4 * float(np.median(np.abs(values - middle))), 2 * left, BETA2)
    return (middle, error) if -error <= middle < 1 else None


def _one_profile(
    subject: Subject, kind: str, r: float, shifts: tuple[int, int], size: float
) -> tuple[float, float] | None:
    """Return the coefficient from two gradients of rank one, and what it leaves; None if no average of squares fits."""
    x, y1, y2 = probes.factor(2).sign(), *(probes.factor(16, shift).clamp(-2, 2) for shift in shifts)
    now, before = size * probes.blocks(x, y2), FAINT * size * probes.blocks(x, y1)
    gradients = [before, now - r * before]
    if kind == "rows":
        gradients = [G.mT.contiguous() for G in gradients]
    U = subject.tried(gradients)[-1]
    u = torch.linalg.vector_norm(U.mT if kind == "rows" else U, dim=0).numpy()[: len(y1)]
    a, b = ((y / y.norm()).double().square().numpy() for y in (y1, y2))
    if not np.isfinite(u).all() or not u.all():
        return None
    target = b / u**2
    basis = np.stack([a, b], axis=1) / target[:, None]
    (of_first, of_second), _, _, _ = np.linalg.lstsq(basis, np.ones_like(target), rcond=None)
    left = float(np.sqrt(np.mean((basis @ (of_first, of_second) - 1) ** 2)))
    return None if left > PROFILE or of_second <= 0 else (float(of_first / of_second), left)
