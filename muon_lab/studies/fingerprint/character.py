r"""What kind of rule it is, before any number is fitted.

A block of rank one, :math:`x y^T`, repeated along a diagonal, has equal singular values: whatever polynomial acts on
them, an orthogonalizer returns :math:`x y^T` times a number. An optimizer that divides rows by their norms returns
sign(x) :math:`y^T`, one that divides every entry sign(x) sign(y)ᵀ, and one that divides rows by the roots of their
norms, as the `aol` start does, sign(x) :math:`|x|^{1/2} y^T`. So two exponents tell.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.studies.fingerprint import probes
from muon_lab.studies.fingerprint.card import Finding
from muon_lab.studies.fingerprint.subject import Subject

#: Shapes of the blocks: square, tall and wide.
SHAPES = ((4, 4), (8, 4), (4, 8))

#: How far from 0, 1/2 or 1 a measured exponent may be: float16 loses the smallest entries of a rank-one gradient.
EXPONENT = 0.1

#: The second singular value of what is still of rank one: bfloat16 keeps factors of powers of two exactly.
LEADING = 1e-3

#: The cosine of parallel vectors among amplified roundings; sizes over which they are averaged where numbers are drawn.
PARALLEL, SIZES = 0.99, (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 1.9)

#: Powers of the gradient's size with which an update may grow, to this.
POWER = 1e-3

#: What the exponents of rows and columns for square, tall and wide mean: a kind, and whether the start is `aol`.
KINDS = {
    ((1.0, 1.0),) * 3: ("spectral", False),
    ((0.5, 1.0), (1.0, 0.5), (0.5, 1.0)): ("spectral", True),
    ((0.0, 0.0),) * 3: ("entries", False),
    ((0.0, 1.0), (0.0, 1.0), (1.0, 0.0)): ("long", False),
    ((0.0, 1.0), (0.0, 0.5), (0.5, 0.0)): ("long", True),
    ((0.0, 1.0),) * 3: ("rows", False),
    ((1.0, 0.0),) * 3: ("columns", False),
}

SAID = {
    "spectral": "acts on singular values alone, in the first step",
    "entries": "the first update has entries of one magnitude",
    "long": "rows of a tall and columns of a wide update are divided by their norms",
    "rows": "rows of the update are divided by their norms, whatever its shape",
    "columns": "columns of the update are divided by their norms, whatever its shape",
}


@dataclass(frozen=True)
class Character:
    """What the first step alone tells.

    Attributes
    ----------
    kind : str, optional
        One of `SAID`; None if it is none of them.
    aol : bool
        Whether rows are divided by the roots of their norms first.
    said : str
        In words.
    degree : int, optional
        With which power of the gradient the first update grows: 0 or 1; None if it is neither.
    random : bool
        Whether a step draws random numbers.
    linear : bool
        Whether the update is proportional to the learning rate.
    """

    kind: str | None
    aol: bool
    said: str
    degree: int | None
    random: bool
    linear: bool


def character(subject: Subject) -> Character:
    """Return what the first step alone tells of an optimizer."""
    G = probes.gaussian(8, 12, 0)
    (U,), (double,) = subject.updates([G]), subject.updates([2 * G])
    drew = subject.run(G, [G]).drew
    slow = -subject.run(torch.zeros_like(G), [G], rate=0.25).weights[0].double()
    growth = _growth(U, double)
    degree = next((power for power in (0, 1) if abs(growth - power) <= POWER), None)
    kind, aol, said = _kind(subject, G, U, drew)
    return Character(kind, aol, said, degree, drew, _near(4 * slow, U))


def findings(found: Character) -> dict[str, Finding]:
    """Return what goes on the card."""
    size = {0: "does not depend on the size of the gradient", 1: "grows with the size of the gradient"}
    notes = "; it draws random numbers" if found.random else ""
    notes += "" if found.linear else "; the update is not proportional to the learning rate"
    said = "unknown: it neither keeps its size nor grows in proportion when the gradient is doubled"
    return {
        "kind": Finding(found.said + notes, found.kind),
        "size": Finding(said if found.degree is None else size[found.degree], found.degree),
    }


def _growth(U: Float[Tensor, "m n"], double: Float[Tensor, "m n"]) -> float:
    """Return the power with which an update grows with its gradient; NaN where there is none."""
    return float((double.norm() / U.norm()).log2())


def _near(found: Float[Tensor, "m n"], expected: Float[Tensor, "m n"]) -> bool:
    """Say whether two updates are the same up to a few roundings of float32 weights."""
    return bool((found - expected).norm() <= 8 * torch.finfo(torch.float32).eps * expected.norm())


def _kind(
    subject: Subject, G: Float[Tensor, "m n"], U: Float[Tensor, "m n"], random: bool
) -> tuple[str | None, bool, str]:
    """Return the kind, whether the start is `aol`, and both in words."""
    if not torch.isfinite(U).all():
        return None, False, "unknown: the first update of a random gradient is not finite"
    if not U.any():
        return None, False, "unknown: the first step moves nothing"
    kind, aol = KINDS.get(tuple(_exponents(subject, m, n, random) for m, n in SHAPES), (None, False))  # type: ignore[arg-type]
    if kind is None:
        return None, False, "unknown: what becomes of blocks of rank one is no multiple and no known division of them"
    if kind == "entries" and torch.equal(U.sign(), G.double().sign()):
        return None, False, "unknown: the first update is the sign of the gradient, as with Adam"
    return kind, aol, SAID[kind]


def _exponents(subject: Subject, m: int, n: int, random: bool) -> tuple[float, float] | None:
    """Return the exponents of the rows and of the columns that a gradient of rank one comes back with."""
    x, y = probes.factor(m), probes.factor(n, shift=5)
    G = probes.blocks(x, y)
    whole = sum((subject.tried([size * G])[0] for size in (SIZES if random else (1.0,))), torch.zeros(G.shape))
    U = whole[:m, :n]
    if not torch.isfinite(whole).all() or not U.all():
        return None
    left, s, right = torch.linalg.svd(U)
    if random or s[1] > LEADING * s[0]:  # noise of rounding, amplified into all other directions
        rows, columns = _likest(x, left[:, 0]), _likest(y, right[0])
        return None if rows is None or columns is None else (rows, columns)
    alike = U.sign() * G[:m, :n].sign()
    outside = float(whole.norm() - probes.BLOCKS**0.5 * U.norm())
    if outside > LEADING * float(whole.norm()) or not (alike == alike[0, 0]).all():
        return None
    found = (_slope(x, left[:, 0]), _slope(y, right[0]))
    nearest = (_half(found[0]), _half(found[1]))
    return nearest if max(abs(found[0] - nearest[0]), abs(found[1] - nearest[1])) <= EXPONENT else None


def _half(exponent: float) -> float:
    return round(2 * exponent) / 2


def _likest(before: Float[Tensor, " count"], after: Float[Tensor, " count"]) -> float | None:
    """Return the exponent of 0, 1/2 and 1 whose vector is parallel to a noisy one, None if none is."""
    cosines = {}
    for exponent in (0.0, 0.5, 1.0):
        power = before.double().sign() * before.double().abs() ** exponent
        cosines[abs(float((power * after).sum() / power.norm()))] = exponent
    return cosines[max(cosines)] if max(cosines) >= PARALLEL else None


def _slope(before: Float[Tensor, " count"], after: Float[Tensor, " count"]) -> float:
    """Return the exponent in |after| ~ |before|^exponent, by least squares of logarithms."""
    a, b = before.double().abs().log2(), after.abs().log2()
    a = a - a.mean()
    return float((a * b).sum() / (a * a).sum())
