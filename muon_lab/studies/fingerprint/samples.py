r"""What came back of planted gradients, beside what any map of singular values would have given.

A planted gradient shows the map value by value. An optimizer that divides entries by the root of their second moment
shows only signs at first, so there a faint gradient with equal singular values comes first, with the same singular
vectors. The `aol` start changes singular vectors, which planted gradients do not show: it is looked at on matrices with
random ones, entry by entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from muon_lab.polar import starts
from muon_lab.polar.engine import Orthogonalizer
from muon_lab.studies.fingerprint import probes
from muon_lab.studies.fingerprint.divisions import FAINT, Division
from muon_lab.studies.fingerprint.subject import Raised, Subject

Array = NDArray[np.float64]

#: From normalised singular values, one row a probe, to their images.
Map = Callable[[Array], Array]

#: A value counts in proportion to itself, down to this part of the largest.
SMALL = 0.05

#: What is left of a value may be so many times what is left in the median, to count for the factor.
OUTLYING = 10.0

#: The shape of gradients with random singular vectors, and their number.
DENSE, COUNT = (8, 12), 6

#: Decades by which the singular values of each such gradient spread more than those of the one before.
STEEPER = 0.7


@dataclass(frozen=True, eq=False)
class Planted:
    """Gradients with planted singular values."""

    division: Division
    gradients: list[Tensor]
    before: Tensor
    sigma: Array
    sigma_before: Array

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the gradients."""
        m, n = self.before.shape
        return m, n

    def inner(self, seen: Map) -> Array:
        """Return the inner product of each gradient, of norm 1, with its direction."""
        return (self.sigma * seen(self.sigma)).sum(axis=1)

    def read(self, U: Float[Tensor, "m n"]) -> Array:
        """Return the singular values of an update, with signs."""
        return probes.read(U, probes.SHORT)

    def predicted(self, seen: Map) -> Array:
        """Return the images; for divided entries relative to those of the gradient before."""
        p = seen(self.sigma)
        if not self.division.entries:
            return p
        with np.errstate(over="ignore", invalid="ignore"):
            signs = p / np.sqrt(self.division.beta2 * seen(self.sigma_before) ** 2 + p * p)
        return signs * np.sqrt(max(self.shape))  # a row of a planted gradient has entries of one magnitude


@dataclass(frozen=True, eq=False)
class Dense:
    """Gradients with random singular vectors, with or without the start `aol` between them and the map."""

    division: Division
    gradients: list[Tensor]
    before: Tensor
    bases: list[tuple[Array, Array, Array]]
    base_before: tuple[Array, Array, Array]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the gradients."""
        return DENSE

    def inner(self, seen: Map) -> Array:
        """Return the inner product of each gradient, of norm 1, with its direction."""
        pairs = zip(self._directions(seen), self.gradients, strict=True)
        return np.array([float((D * G).sum() / G.norm()) for D, G in pairs])

    def read(self, U: Float[Tensor, "m n"]) -> Array:
        """Return the entries of an update."""
        return U.flatten().double().numpy()

    def predicted(self, seen: Map) -> Array:
        """Return the entries of the update that a map gives."""
        left, sigma, right = self.base_before
        with np.errstate(over="ignore", invalid="ignore"):
            before = torch.from_numpy((left * seen(sigma[None])[0]) @ right)
        return np.stack([self.read(self.division.divided(D, before)) for D in self._directions(seen)])

    def _directions(self, seen: Map) -> list[Float[Tensor, "m n"]]:
        images = seen(np.stack([sigma for _, sigma, _ in self.bases]))
        with np.errstate(over="ignore", invalid="ignore"):
            return [
                torch.from_numpy((left * p) @ right) for p, (left, _, right) in zip(images, self.bases, strict=True)
            ]


#: Probes of one kind: the gradients, how an update is read, and what a map of singular values would give.
Samples = Planted | Dense


def observed(
    samples: Samples, subject: Subject, mixed: float, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> Array:
    """Return what an optimizer gives, one row a probe: its first update, or the one after a faint first.

    Where some steps raise, as with a schedule that diverges, their rows are NaN.

    Raises
    ------
    Raised
        If steps with every probe do.
    """
    faint = size * FAINT * samples.before
    rows: list[Array | None] = []
    refusal = None
    for G in samples.gradients:
        steps = [faint, size * G - mixed * faint] if samples.division.entries else [size * G]
        try:
            rows.append(samples.read(subject.updates(steps, dtype)[-1]))
        except Raised as error:
            rows.append(None)
            refusal = error
    whole = next((row for row in rows if row is not None), None)
    if whole is None:
        assert refusal is not None
        raise refusal
    return np.stack([np.full_like(whole, np.nan) if row is None else row for row in rows])


def finite(samples: Samples, came: Array) -> tuple[Samples, Array]:
    """Return the probes of which something finite came back, and that; all of them if none did."""
    rows = np.flatnonzero(np.isfinite(came).all(axis=1))
    if not len(rows) or len(rows) == len(came):
        return samples, came
    gradients = [samples.gradients[row] for row in rows]
    if isinstance(samples, Planted):
        return replace(samples, gradients=gradients, sigma=samples.sigma[rows]), came[rows]
    return replace(samples, gradients=gradients, bases=[samples.bases[row] for row in rows]), came[rows]


def simulated(samples: Samples, orthogonalize: Orthogonalizer) -> Array:
    """Return what an orthogonalizer gives, one row a probe, up to a factor for each."""
    return directed(samples, orthogonalize)[0]


def directed(samples: Samples, orthogonalize: Orthogonalizer) -> tuple[Array, Array]:
    """Return what an orthogonalizer gives as `simulated`, and as `inner` the products with its directions."""
    before, *directions = orthogonalize(torch.stack([samples.before, *samples.gradients])).double().unbind()
    rows = np.stack([samples.read(samples.division.divided(D, before)) for D in directions])
    pairs = zip(directions, samples.gradients, strict=True)
    return rows, np.array([float((D * G).sum() / G.norm()) for D, G in pairs])


def misfit(came: Array, expected: Array) -> tuple[Array, Array]:
    """Return the factor of each row that brings an expectation nearest, and the relative differences that are left.

    Examples
    --------
    >>> factors, left = misfit(np.array([[2.0, 4.0]]), np.array([[1.0, 2.0]]))
    >>> factors.tolist(), left.tolist()
    ([2.0], [[0.0, 0.0]])
    """
    size = np.abs(expected)
    fine = np.isfinite(size).all() and np.isfinite(came).all() and size.any(axis=1).all()
    if not fine:
        return np.zeros(len(came)), np.full_like(came, np.inf)
    weight = 1 / (size + SMALL * size.max(axis=1, keepdims=True))
    a, b = weight * expected, weight * came
    chosen = np.ones_like(a)
    for _ in range(2):  # the second time without what jumps, as entries close to zero do behind a division
        factor = (chosen * a * b).sum(axis=1) / (chosen * a * a).sum(axis=1)
        if not factor.all():
            return factor, np.full_like(came, np.inf)
        left = b / factor[:, None] - a
        chosen = np.abs(left) <= OUTLYING * np.median(np.abs(left), axis=1, keepdims=True)
    return factor, left


def planted(division: Division, spectra: Sequence[Array] | None = None) -> Planted:
    """Return probes with planted singular values; those of `probes.spectra` by default."""
    shape = (probes.LONG, probes.SHORT) if division.tall else (probes.SHORT, probes.LONG)
    flat = np.full(probes.SHORT, probes.SHORT**-0.5)
    wanted = probes.spectra() if spectra is None else spectra
    gradients = [probes.planted(probes.NORM * s, *shape) for s in wanted]
    before = probes.planted(probes.NORM * flat, *shape)
    sigma = np.stack([probes.read(G, probes.SHORT) for G in gradients])  # of what float32 made of them
    return Planted(division, gradients, before, sigma / np.linalg.norm(sigma, axis=1, keepdims=True), flat[None])


def dense(division: Division, aol: bool) -> Dense:
    """Return probes with random singular vectors and spread singular values."""
    made = [_random(seed) for seed in range(COUNT)]
    (before, base), *others = [(G, _decomposed(G, aol)) for G in made]
    return Dense(division, [G for G, _ in others], before, [base for _, base in others], base)


def _random(seed: int) -> Float[Tensor, "m n"]:
    """Return a wide matrix of random singular vectors, the steeper the larger the seed."""
    left, right = (torch.linalg.qr(probes.gaussian(n, DENSE[0], seed + 10))[0] for n in DENSE)
    s = torch.tensor(10.0 ** (-STEEPER * seed * np.linspace(0, 1, DENSE[0])), dtype=torch.float32)
    return left * s @ right.mT * (probes.NORM / s.norm())


def _decomposed(G: Float[Tensor, "m n"], aol: bool) -> tuple[Array, Array, Array]:
    """Return the decomposition of what a map acts on."""
    X = G.double() / G.double().norm()
    left, sigma, right = torch.linalg.svd(X * starts.aol(X @ X.mT) if aol else X, full_matrices=False)
    return left.numpy(), sigma.numpy(), right.numpy()
