r"""Which polynomial: the image of planted singular values, compared with every known map.

A map is accepted if what is left is no more than the optimizer's own roundings, whose size is known from how its
responses scatter (`mixture`), and if it has no pattern: values that lie close together must not err together. What
remains then belongs to the number format in which the lab's own engine leaves as much. If no known map is accepted, one
triple at every step is fitted; if that is not accepted either, the map is unknown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares, minimize_scalar

from muon_lab import polar
from muon_lab.arithmetic import Exact, Rounded
from muon_lab.polar.engine import Orthogonalizer
from muon_lab.polar.schedules import Schedule
from muon_lab.studies.fingerprint import candidates, probes, samples
from muon_lab.studies.fingerprint.candidates import EXACT, IDENTITY, Candidate
from muon_lab.studies.fingerprint.decimals import shortest
from muon_lab.studies.fingerprint.divisions import Division
from muon_lab.studies.fingerprint.samples import Array, Dense, Planted, Samples
from muon_lab.studies.fingerprint.subject import Raised, Subject

#: The formats in which an iteration may be kept; tf32 has float16's digits and float32's range.
FORMATS = (("fp32", "fp64"), ("fp16", "bf16"))

#: A residual this many times what a format leaves, or that part of it, still is that format's.
BAND = 5.0

#: The residual of planted values may be so many times the scatter of responses to random gradients.
NOISE = 3.0

#: Entries of gradients with random singular vectors scatter so many times more; how much less a start must leave.
RANDOM, HIDDEN = 30.0, 0.5

#: The part of entries that counts.
KEPT = 0.9

#: What leaves more than this explains nothing, however much the optimizer's responses scatter.
MOST = 0.1

#: Neighbouring values that are averaged to find a pattern, and how far their mean squares may exceed chance.
NEIGHBOURS, PATTERN = 8, 4.0

#: Two maps that differ by less than so many standard errors of a mean are too alike to tell.
ALIKE = 4.0

#: What the log-likelihood must gain before a factor of the argument is believed.
GAIN = 10.0

#: Factors of the argument that are looked for: safety factors of published normalisations are at most 1.1.
FACTORS = (0.8, 1.25)

#: A factor this close to 1 is 1: eps in the division leaves so much.
ONE = 1e-5

#: The starts that planted values show.
PLAIN = ("frobenius", "schatten4", "spectral")

#: How many of the best maps are tried with a factor, and looked at for likeness.
TRIED, LOOKED = 8, 64

#: Singular values below those of the other probes, and how far an image may be from its prediction there.
DEEP, DEEP_ERROR = 10.0 ** -np.linspace(0, 5.6, probes.SHORT), 0.1

#: From here on an image is summed up by its range.
UPPER = 0.01

#: Formats that round as coarsely as maps differ; which maps are looked at again, and which are alike then.
COARSE, NEARLY, AS_GOOD = ("fp16", "tf32", "bf16"), 2.0, 1.25

#: Triples from which the fit of an unknown one begins, and the most steps for it.
BEGINNINGS = ((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5), (1.875, -1.25, 0.375), (1.5, -0.5, 0.0), (3.0, -3.2, 1.2))
REPEATED = 10

#: Evaluations of a first fit, how many of those are fitted on, and evaluations for that.
BRIEF, KEPT_FITS, LENGTHY = 20, 8, 120

#: By what gradients are multiplied to leave every eps behind where parameters are float64.
FAR = 2.0**40

#: Roundings are those of the lab's own engine if it leaves this part of what the map leaves.
COMMON = 0.1

#: The rounding of weights in float32, how many of them are none, and the least that is left of anything.
READ, SAME, LEAST = 2.0**-24, 16.0, 1e-17


@dataclass(frozen=True, eq=False)
class Match:
    """A map with its start, and how well it explains what came back.

    Attributes
    ----------
    candidate : Candidate
        The map.
    start : str
        One of `polar.starts.known`.
    safety : float
        By what the norm is multiplied before the division.
    left : array, optional
        The relative differences, one row a probe.
    entrywise : bool
        Whether they are those of entries, some of which are close to zero.
    """

    candidate: Candidate
    start: str = "frobenius"
    safety: float = 1.0
    left: Array | None = None
    entrywise: bool = False

    @property
    def residual(self) -> float:
        """The root mean square of what is left; of entries without the largest, where one close to zero has jumped."""
        if self.left is None:
            return float("inf")
        squares = np.sort(self.left.flatten() ** 2)
        return float(np.sqrt(np.mean(squares[: round(KEPT * len(squares))] if self.entrywise else squares)))

    def seen(self, sigma: Array) -> Array:
        """Return the image of rows of normalised singular values under start, safety factor and map."""
        return self.candidate.map(sigma * started(sigma, self.start) / self.safety)

    @property
    def schedule(self) -> Schedule | None:
        """The polynomials, with the safety factor in the first; None for the exact factor."""
        schedule = self.candidate.schedule
        if schedule is None or self.safety == 1.0:
            return schedule
        (a, b, c), *others = schedule.coefficients
        s = self.safety
        return candidates.table([(a / s, b / s**3, c / s**5), *others], schedule.steps)

    def orthogonalizer(self, form: str) -> Orthogonalizer | None:
        """Return the lab's own one in a format; None where it has none."""
        wide = {"fp64": torch.float64, "fp32": torch.float32}
        if self.schedule is None:
            return polar.svd() if form in wide and self.candidate is EXACT else None
        arithmetic = Exact(wide[form]) if form in wide else Rounded(form)
        return polar.newton_schulz(self.schedule, arithmetic, self.start)


@dataclass(frozen=True)
class Image:
    """What is known of the map.

    Attributes
    ----------
    match : Match
        The best one.
    accepted : bool
        Whether it explains what came back.
    taken : Samples
        The probes on which it was found.
    came : array
        What came back of them, one row a probe.
    sizes, inner : array
        The factor of each of them: what came back over what the map gives; and the inner product of each of them, of
        norm 1, with its direction.
    left : float
        The relative difference that these sizes leave.
    alike : tuple of str
        Other maps that the samples cannot tell from it.
    form : str, optional
        The format of the iteration with float32 parameters.
    wide : str, optional
        The same with float64 parameters.
    refused : str, optional
        What the optimizer says to float64 parameters.
    """

    match: Match
    accepted: bool
    taken: Samples
    came: Array
    sizes: Array
    inner: Array
    left: float
    alike: tuple[str, ...] = ()
    form: str | None = None
    wide: str | None = None
    refused: str | None = None

    def outline(self) -> str:
        """Return slope and range of the image in words, relative to its mean over values of at least `UPPER`."""
        if not isinstance(self.taken, Planted) or self.taken.division.entries:
            return "its image is hidden by what divides it"
        sigma, image = self.taken.sigma.flatten(), self.came.flatten()
        upper, steepest = sigma >= UPPER, np.argmin(sigma)
        unit = float(np.abs(image[upper]).mean())
        low, high = image[upper].min() / unit, image[upper].max() / unit
        slope = image[steepest] / sigma[steepest] / unit
        return (
            f"over σ from {UPPER:g} to 1 its image runs from {low:.3g} to {high:.3g} of its mean, "
            f"and at σ = {sigma[steepest]:.1g} it is {slope:.4g} σ"
        )


def started(sigma: Array, start: str) -> Array:
    """Return by what a start multiplies rows of singular values of norm 1; `aol` has acted on them already.

    Examples
    --------
    >>> flat = np.full((1, 16), 0.25)
    >>> float(started(flat, "schatten4").round(6)[0, 0]), float(started(flat, "spectral")[0, 0])
    (2.0, 4.0)
    """
    if start == "schatten4":
        return (sigma**4).sum(axis=1, keepdims=True) ** -0.25
    return 1 / sigma.max(axis=1, keepdims=True) if start == "spectral" else np.ones((len(sigma), 1))


def image(subject: Subject, division: Division, aol: bool, mixed: float, scatter: float) -> Image:
    """Return what is known of the map of an optimizer.

    Parameters
    ----------
    subject : Subject
        The optimizer.
    division : Division
        What divides its direction.
    aol : bool
        Whether the start is `aol`.
    mixed : float
        The weight of the first gradient in the second step, relative to that of the second.
    scatter : float
        The relative scatter of its directions from rounding.

    Raises
    ------
    Raised
        If a step does.
    """
    tried = (*candidates.known(), *candidates.own(subject.settings()))
    allowed = min(NOISE * (scatter + READ), MOST)
    looks = (_looked(subject, way, allowed, mixed, tried) for way in _ways(division, aol))
    first = next(looks)
    found, left = next((look for look in chain([first], looks) if look[0].accepted), first)
    return _with_float64(found, left, subject, mixed) if found.accepted else found


def _looked(
    subject: Subject, way: tuple[Samples, tuple[str, ...]], allowed: float, mixed: float, tried: Sequence[Candidate]
) -> tuple[Image, dict[str, float]]:
    """Return what probes of one kind tell, and the residuals of formats that were looked up for it."""
    kind, names = way
    division = kind.division
    taken, came = samples.finite(kind, samples.observed(kind, subject, mixed))
    match, others, near = _best(taken, came, tried, names)
    explained = _explained(match, taken, allowed)
    if isinstance(taken, Planted) and not explained:
        fitted = _triple(taken, came)
        if _explained(fitted, taken, allowed):
            match, others, explained = fitted, [], True
    form = None if explained else _reproducing(match, taken, came)
    accepted = explained or form is not None
    if accepted and division.entries:
        by_aol = _by_aol(subject, division, mixed, tried, match)
        accepted = by_aol if isinstance(taken, Dense) else not by_aol
    left: dict[str, float] = {}
    if accepted:
        if isinstance(taken, Planted) and others:
            match, others = _deeper(match, others, subject, division, mixed)
        form = form or _format(match, taken, left)
        if form == "fp16" and not _underflows(subject, division):
            form = "tf32"
        if form in COARSE and match in near:
            form, best, others = _as_rounded(near, form, taken, came)
            left, match = left if best is match else {}, best
    alike = tuple(dict.fromkeys(_said(other, match) for other in others))
    return Image(match, accepted, taken, came, *_sizes(match, form, taken, came), alike, form), left


def _ways(division: Division, aol: bool) -> list[tuple[Samples, tuple[str, ...]]]:
    """Return the kinds of probes that can show the map, with the starts that they show.

    Behind a division of entries nothing has told whether the start is `aol`, after which planted values look exact.
    """
    changed: tuple[Samples, tuple[str, ...]] = (samples.dense(division, aol=True), ("aol",))
    if aol:
        return [changed]
    ways: list[tuple[Samples, tuple[str, ...]]] = [(samples.planted(division), PLAIN)]
    return [*ways, changed] if division.entries else ways


def _by_aol(subject: Subject, division: Division, mixed: float, tried: Sequence[Candidate], match: Match) -> bool:
    """Say whether gradients with random singular vectors show the start `aol` behind a division of entries.

    A match with planted values is compared as it is; one with that start with the best of all without.
    """
    plain, changed = (samples.dense(division, aol) for aol in (False, True))
    came = samples.observed(plain, subject, mixed)
    if not np.isfinite(came).all():
        return False
    other = _best(plain, came, tried, PLAIN)[0] if match.start == "aol" else _measured(match, plain, came)
    return _best(changed, came, tried, ("aol",))[0].residual < HIDDEN * other.residual


# --- which map --------------------------------------------------------------------------------------------------------


def _best(
    taken: Samples, came: Array, tried: Sequence[Candidate], names: Sequence[str]
) -> tuple[Match, list[Match], list[Match]]:
    """Return the best match, those with maps too alike to tell from it, and all that are nearly as good."""
    matches = [
        _measured(Match(each, start), taken, came)
        for start in names
        for each in tried
        if each.schedule is not None or start != "aol"  # the lab has no exact factor after that start
    ]
    ranked = sorted(matches, key=lambda match: match.residual)
    best = ranked[0]
    for match in ranked[:TRIED] if isinstance(taken, Planted) else ():
        closer = _with_safety(match, taken, came)
        if closer.safety != 1.0 and _gained(best, closer) * came.size > GAIN:
            best = closer
    near = [match for match in ranked[:TRIED] if match.residual <= NEARLY * ranked[0].residual]
    if best.safety != 1.0 or not np.isfinite(best.residual):
        return best, [], [best, *near]
    tellable = ALIKE * max(best.residual, READ) / np.sqrt(came.size)
    close = {id(match) for match in ranked[:LOOKED] if _apart(match, best, taken) <= tellable}
    alike = [match for match in matches if id(match) in close]  # in the order in which they are known
    best = next((match for match in alike if _apart(match, best, taken) <= 1e-3 * tellable), best)
    best = next((match for match in alike if match.candidate in (EXACT, IDENTITY)), best)
    return best, [match for match in alike if _apart(match, best, taken) > 1e-3 * tellable], near


def _gained(worse: Match, better: Match) -> float:
    """Return by how much the log-likelihood of a value is larger under one match than under another."""
    return math.log(max(worse.residual, READ)) - math.log(max(better.residual, READ))


def _said(other: Match, best: Match) -> str:
    """Return the name of a map that is like another, with its start where that differs."""
    return other.candidate.said + ("" if other.start == best.start else f" after the start {other.start}")


def _as_rounded(near: list[Match], form: str, taken: Samples, came: Array) -> tuple[str, Match, list[Match]]:
    """Return format, best match and its likes where roundings are as large as differences of maps: in that format.

    Roundings of a coarse format are not independent, and those of the lab's own engine have much in common with them.
    Where they have all in common for another map or format, it is that.
    """
    near = [match for i, match in enumerate(near) if all(_apart(match, other, taken) for other in near[:i])]
    emulated = {match: _emulated(match, form, taken, came) for match in near}
    best = min(near, key=lambda match: emulated[match])
    if emulated[best] > COMMON * best.residual:
        for match in near:
            same = next(
                (each for each in COARSE if _emulated(match, each, taken, came) <= COMMON * match.residual), None
            )
            if same is not None:
                return same, match, []
    alike = [match for match in near if emulated[match] <= AS_GOOD * max(emulated[best], READ)]
    return form, best, [match for match in alike if _apart(match, best, taken) > READ]


def _emulated(match: Match, form: str, taken: Samples, came: Array) -> float:
    """Return what the lab's own engine leaves of what came back, in a format; infinite where it has no such form."""
    orthogonalize = match.orthogonalizer(form)
    if orthogonalize is None:
        return float("inf")
    _, left = samples.misfit(came, samples.simulated(taken, orthogonalize))
    return replace(match, left=left, entrywise=not isinstance(taken, Planted)).residual


def _reproducing(match: Match, taken: Samples, came: Array) -> str | None:
    """Return the format in which the lab's own engine gives what came back, roundings and all; None if none does.

    It tells a map that amplifies roundings beyond what random gradients show from one that is another.
    """
    for form in ("fp32", *COARSE) if np.isfinite(match.residual) else ():
        if _emulated(match, form, taken, came) <= max(SAME * READ, COMMON * match.residual):
            return form
    return None


def _sizes(match: Match, form: str | None, taken: Samples, came: Array) -> tuple[Array, Array, float]:
    """Return sizes, inner products and what is left as `Image` has them, by the engine in a format if it is nearer."""
    measured = _measured(match, taken, came)
    sizes, _ = samples.misfit(came, taken.predicted(match.seen))
    orthogonalize = None if form is None else match.orthogonalizer(form)
    if orthogonalize is not None:
        rows, inner = samples.directed(taken, orthogonalize)
        factors, left = samples.misfit(came, rows)
        emulated = replace(match, left=left, entrywise=measured.entrywise).residual
        if emulated < measured.residual:
            return factors, inner, emulated
    return sizes, taken.inner(match.seen), measured.residual


def _measured(match: Match, taken: Samples, came: Array) -> Match:
    """Return a match with what it leaves; infinite if a factor is not positive."""
    left = samples.misfit(came, taken.predicted(match.seen))[1]
    return replace(match, left=left, entrywise=not isinstance(taken, Planted))


def _apart(one: Match, other: Match, taken: Samples) -> float:
    """Return the root mean square by which two maps differ on the probes, factors aside."""
    return replace(_measured(one, taken, taken.predicted(other.seen)), entrywise=False).residual


def _with_safety(match: Match, taken: Samples, came: Array) -> Match:
    """Return a match with the safety factor that makes it best, if that is not 1."""
    if match.candidate.schedule is None:
        return match

    def residual(factor: float) -> float:
        return min(_measured(replace(match, safety=1 / factor), taken, came).residual, 1e6)

    answer = minimize_scalar(residual, bounds=FACTORS, method="bounded", options={"xatol": 1e-6})
    if abs(answer.x - 1) <= ONE:
        return match
    error = max(ALIKE * float(answer.fun) / np.sqrt(came.size), ONE)
    return _measured(replace(match, safety=shortest(1 / answer.x, error)), taken, came)


def _explained(match: Match, taken: Samples, allowed: float) -> bool:
    """Say whether what is left is small enough and without a pattern."""
    times = 1.0 if isinstance(taken, Planted) else RANDOM
    if match.left is None or not match.residual <= min(allowed * times, MOST):
        return False
    if not isinstance(taken, Planted):
        return _format(match, taken, {}) is not None
    if match.residual <= SAME * READ:
        return True
    ordered = match.left.flatten()[np.argsort(taken.sigma.flatten(), kind="stable")]
    means = ordered[: len(ordered) // NEIGHBOURS * NEIGHBOURS].reshape(-1, NEIGHBOURS).mean(axis=1)
    return bool(np.mean(means**2) * NEIGHBOURS <= PATTERN * match.residual**2)


def _deeper(
    best: Match, others: list[Match], subject: Subject, division: Division, mixed: float
) -> tuple[Match, list[Match]]:
    """Return the best match and its likes after a look at smaller singular values."""
    deep = samples.planted(division, [DEEP / np.linalg.norm(DEEP)])
    came = samples.observed(deep, subject, mixed)

    def fits(match: Match) -> bool:
        left = _measured(match, deep, came).left
        return left is not None and bool(np.abs(left).max() <= DEEP_ERROR)

    kept = [match for match in (best, *others) if fits(match)]
    return (kept[0], kept[1:]) if kept else (best, others)


def _triple(taken: Planted, came: Array) -> Match:
    """Return the best match of one triple at every step, with coefficients as short as their errors allow."""

    def left(rows: Array, steps: int) -> Array:
        found = _measured(_repeated(rows, steps), taken, came).left
        assert found is not None
        return np.nan_to_num(found.flatten(), posinf=1e3, neginf=-1e3).clip(-1e3, 1e3)

    def fitted(beginning: Sequence[float] | Array, steps: int, most: int) -> tuple[Match, Any, int]:
        answer = least_squares(left, beginning, args=(steps,), method="lm", max_nfev=most)
        return _measured(_repeated(answer.x, steps), taken, came), answer, steps

    rough = [fitted(beginning, steps, BRIEF) for steps in range(1, REPEATED + 1) for beginning in BEGINNINGS]
    rough = sorted(rough, key=lambda fit: fit[0].residual)[:KEPT_FITS]
    best, answer, steps = min((fitted(fit[1].x, fit[2], LENGTHY) for fit in rough), key=lambda fit: fit[0].residual)
    if not np.isfinite(best.residual):
        return Match(EXACT)
    jacobian, x = answer.jac, answer.x
    errors = ALIKE * max(best.residual, READ) * np.sqrt(np.diag(np.linalg.pinv(jacobian.T @ jacobian)))
    short = _repeated(np.array([shortest(float(a), float(e)) for a, e in zip(x, errors, strict=True)]), steps)
    short = _measured(short, taken, came)
    return short if _gained(short, best) * came.size <= GAIN else best


def _repeated(rows: Array, steps: int) -> Match:
    a, b, c = (float(x) for x in rows)
    said = f"({a:.6g}, {b:.6g}, {c:.6g}) at every one of {steps} steps"
    return Match(Candidate(said, candidates.table([(a, b, c)], steps)))


# --- in which format --------------------------------------------------------------------------------------------------


def _with_float64(found: Image, left: dict[str, float], subject: Subject, mixed: float) -> Image:
    """Return what is known with the format of the iteration for float64 parameters."""
    taken = found.taken
    try:
        for size in (FAR, 1.0):  # float16 before the division would overflow with the first
            came = samples.observed(taken, subject, mixed, torch.float64, size)
            if np.isfinite(came).all():
                break
    except Raised as refusal:
        return replace(found, refused=str(refusal))
    wide = _format(_measured(found.match, taken, came), taken, left, 0.0)
    if wide == "fp32" and taken.division.entries:
        wide = None  # the eps of a second moment leaves as much
    coarse = wide in COARSE and found.form in COARSE  # no iteration is kept in one for float32 and another for float64
    return replace(found, wide=found.form if coarse else wide)


def _format(match: Match, taken: Samples, left: dict[str, float], read: float = READ) -> str | None:
    """Return the format whose rounding leaves such a residual, None if none does; weights are read to a roundoff.

    What each format leaves is looked up and noted in a dictionary: the emulation of coarse ones takes its time.
    """
    residual = max(match.residual, read, LEAST)
    for forms in FORMATS:
        for form in forms:
            if form not in left:
                left[form] = _left(match, taken, form)
        expected = {form: max(left[form], read, LEAST) for form in forms}
        near = min(expected, key=lambda form: abs(math.log(expected[form] / residual)))
        if 1 / BAND <= residual / expected[near] <= BAND:
            return near
    return None


def _left(match: Match, taken: Samples, form: str) -> float:
    """Return the residual that the lab's own engine leaves in a format; infinite where it has no such form."""
    orthogonalize = match.orthogonalizer(form)
    if orthogonalize is None:
        return float("inf")
    dtype = torch.float64 if form == "fp64" else torch.float32
    came = samples.simulated(taken, lambda G: orthogonalize(G.to(dtype)))
    return _measured(match, taken, came).residual


def _underflows(subject: Subject, division: Division) -> bool:
    """Say whether a singular value of 1e-9 beside one of 1 is lost, as it is in float16."""
    shape = (probes.LONG, probes.SHORT) if division.tall else (probes.SHORT, probes.LONG)
    (U,) = subject.updates([probes.planted([probes.NORM, 1e-9 * probes.NORM], *shape)])
    return bool(probes.read(U, 2)[1] == 0)
