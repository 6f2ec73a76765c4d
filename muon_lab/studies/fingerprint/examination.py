"""The examination, aspect by aspect: each probe is read with what the ones before it have shown."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.studies.fingerprint import candidates, character, decay, divisions, image, limits, momentum, scales
from muon_lab.studies.fingerprint.candidates import EXACT, IDENTITY
from muon_lab.studies.fingerprint.card import Card, Finding
from muon_lab.studies.fingerprint.decay import Decay
from muon_lab.studies.fingerprint.divisions import Division
from muon_lab.studies.fingerprint.image import Image
from muon_lab.studies.fingerprint.momentum import Momentum
from muon_lab.studies.fingerprint.scales import Scale
from muon_lab.studies.fingerprint.setting import Setting
from muon_lab.studies.fingerprint.subject import Raised, Subject

#: Shapes and length of the trajectories on which the nearest setting is compared.
SHAPES, STEPS = ((12, 12), (16, 8), (8, 16)), 6

#: The size of their first weights, that of GPT-2's.
WEIGHTS = 0.02

#: How the card says a number format.
FORMATS = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "tf32": "tf32", "bf16": "bfloat16"}

#: The second moment of optim.Muon that comes nearest to a division of each kind.
NEAREST: Final[dict[str, str | None]] = {
    "spectral": None,
    "entries": "adamuon",
    "long": "normuon",
    "rows": "normuon",
    "columns": "normuon",
}

STARTS = {
    "frobenius": "the Frobenius norm",
    "schatten4": "the Schatten-4 norm",
    "spectral": "the spectral norm",
    "aol": "the Frobenius norm, then its short side's vectors by the roots of their norms in the Gram matrix (aol)",
}


def examine(subject: Subject) -> Card:
    """Return the card of an optimizer.

    Parameters
    ----------
    subject : Subject
        A class with the arguments of its constructor.

    Raises
    ------
    ValueError
        If the optimizer cannot be made, or cannot take a step on a float32 matrix; one sentence.

    Examples
    --------
    >>> card = examine(Subject(torch.optim.AdamW))
    >>> card.setting is None, card.findings["kind"].said
    (True, 'unknown: the first update is the sign of the gradient, as with Adam')
    """
    try:
        return _examined(subject)
    except Raised as refusal:
        raise ValueError(f"{subject.name} takes no step on a float32 matrix: {refusal}") from refusal


def _examined(subject: Subject) -> Card:
    first = character.character(subject)
    found = character.findings(first)
    if first.kind is None:
        return _card(subject, found)
    moved = momentum.momentum(subject)
    division = divisions.division(subject, first, moved)
    mapped = image.image(subject, division, first.aol, moved.mixed, moved.ratios.scatter)
    if mapped.match.candidate is IDENTITY:
        return _card(subject, {**found, "schedule": Finding(IDENTITY.said, "none"), **momentum.findings(moved)})
    scale = scales.scale(subject, first, moved, division, mapped)
    decayed = decay.decay(subject, division, scale, moved.ratios.scatter)
    found |= {
        "schedule": _schedule(mapped),
        "iteration": _iteration(mapped),
        "start": _start(mapped),
        "divided_by": division.finding(),
        "scale": scale.finding(),
        "transposed": scales.transposed(subject),
        **momentum.findings(moved),
        "weight_decay": decayed.finding(),
        **limits.limits(subject, first.degree or 0, moved, division, mapped),
    }
    setting = _setting(subject, moved, division, mapped, scale, decayed)
    settings = [setting]
    if scale.extra is None:
        names = {division.adapt, NEAREST[division.kind]} - {None}
        adapted = [replace(setting, adapt=(name, division.beta2)) for name in names if name]
        wanted = [each for each in (replace(setting, adapt=None), *adapted) if _builds(each)]
        settings = [_resized(subject, each) for each in wanted]
    possible = [each for each in settings if _builds(each)]
    if not possible:
        return _card(subject, found)
    setting = min(possible, key=lambda each: _difference(subject, each, *SHAPES[0]))
    remarks = tuple(remark for remark in _remarks(found, moved, division, mapped, scale, decayed) if remark)
    return _card(subject, found, setting, remarks)


def _card(
    subject: Subject, found: dict[str, Finding], setting: Setting | None = None, remarks: tuple[str, ...] = ()
) -> Card:
    difference = {} if setting is None else {f"{m}x{n}": _difference(subject, setting, m, n) for m, n in SHAPES}
    return Card(subject.name, dict(subject.kwargs), subject.way(), found, setting, difference, remarks)


# --- what goes on the card --------------------------------------------------------------------------------------------


def _schedule(mapped: Image) -> Finding:
    said = mapped.match.candidate.said
    if not mapped.accepted:
        return Finding(
            f"unknown: {mapped.outline()}; the nearest known map, {said}, leaves {mapped.match.residual:.1e} of it"
        )
    if mapped.alike:
        return Finding(f"{said}, or {', '.join(mapped.alike)}: too alike to tell")
    same = candidates.same(mapped.match.candidate)
    return Finding(f"{said}, the same as {' and as '.join(same)}" if same else said, said)


def _iteration(mapped: Image) -> Finding:
    if not mapped.accepted:
        return Finding("unknown without the schedule")
    if mapped.form is None:
        return Finding(f"unknown: its roundings leave {mapped.match.residual:.1e}, and no known format does")
    said = FORMATS[mapped.form]
    if mapped.refused is not None:
        return Finding(f"{said}; float64 parameters are refused: {mapped.refused}", mapped.form)
    wide = FORMATS[mapped.wide] if mapped.wide else "a format that does not show"
    return Finding(f"{said}; with float64 parameters {wide}", mapped.form)


def _start(mapped: Image) -> Finding:
    if not mapped.accepted:
        return Finding("unknown without the schedule")
    if mapped.match.candidate is EXACT:
        return Finding("does not show with an exact factor")
    times = "" if mapped.match.safety == 1 else f" times {mapped.match.safety:g}"
    value = {"start": mapped.match.start, "safety": mapped.match.safety}
    return Finding(f"divided by {STARTS[mapped.match.start]}{times}", value)


def _remarks(
    found: dict[str, Finding], moved: Momentum, division: Division, mapped: Image, scale: Scale, decayed: Decay
) -> list[str]:
    """Return what the setting leaves out, empty where it leaves out nothing."""
    small, bad = found["small_gradients"].value, found["not_finite"].value
    exact = isinstance(small, dict) and (small["place"] == "none" or division.adapt == "namo")
    unlike = decayed.form == "adjusted" or decayed.masked or decayed.after or decayed.value is None
    return [
        "" if mapped.accepted else "the schedule is the nearest known one",
        "" if mapped.form or not mapped.accepted else "its number format is not known",
        "" if division.known else "what divides the direction is not a rule of optim.Muon",
        ""
        if moved.rules and moved.rules[0] != "corrected"
        else "the weights of past gradients are the nearest possible",
        "" if scale.extra is not None else "the size is fitted to the random trajectory",
        "this decay is not one of optim.Muon" if unlike and decayed.value != 0 else "",
        "" if exact else "small gradients are not left small by optim.Muon, which has no eps",
        "" if set(bad.values()) == {"nothing changes"} else "optim.Muon does not step on gradients that are not finite",
    ]


# --- the nearest setting ----------------------------------------------------------------------------------------------


def _setting(
    subject: Subject, moved: Momentum, division: Division, mapped: Image, scale: Scale, decayed: Decay
) -> Setting:
    mu, looks = moved.nearest
    plain: dict[str, Any] = {"lr": float(subject.settings().get("lr", 1.0)), "momentum": mu, "nesterov": looks}
    if decayed.value:
        plain["weight_decay"] = decayed.value
        if decayed.form in ("independent", "palm", "l2"):
            plain["decay"] = decayed.form
    if moved.form == "sum" and mu:
        plain["form"] = "sum"
    plain["scale"] = scale.mode or "none"
    if scale.extra not in (None, 1.0):
        plain["extra"] = scale.extra
    form = mapped.form if mapped.form in ("fp16", "bf16", "tf32") else "float32" if mapped.wide == "fp32" else "fp32"
    return Setting(plain, mapped.match, form, (division.adapt, division.beta2) if division.adapt else None)


def _builds(setting: Setting) -> bool:
    """Say whether a setting is one of `optim.Muon`: what was measured may be out of its range."""
    try:
        setting.build([torch.nn.Parameter(torch.zeros(2, 2))])
    except ValueError:
        return False
    return True


def _resized(subject: Subject, setting: Setting) -> Setting:
    """Return a setting whose extra factor makes the random trajectory of a square matrix as long as it was."""
    try:
        W, theirs, ours = _ends(subject, setting, *SHAPES[0])
    except Raised:
        return setting
    gone, came = theirs - W, ours - W
    extra = float((gone * came).sum() / (came * came).sum())
    return replace(setting, plain={**setting.plain, "extra": float(f"{extra:.4g}")})


def _difference(subject: Subject, setting: Setting, m: int, n: int) -> float:
    """Return how far weights are apart after a random trajectory, relative to the way gone; infinite if one raises."""
    try:
        W, theirs, ours = _ends(subject, setting, m, n)
    except Raised:
        return float("inf")
    return float((theirs - ours).norm() / (theirs - W).norm())


def _ends(
    subject: Subject, setting: Setting, m: int, n: int
) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m n"], Float[Tensor, "m n"]]:
    """Return the first weights, and the last ones under both optimizers, in float64."""
    drawn = np.random.default_rng([m, n]).standard_normal((STEPS + 1, m, n))
    W, *gradients = (torch.tensor(X, dtype=torch.float32) for X in (WEIGHTS * drawn[0], *drawn[1:]))
    build: Callable[..., torch.optim.Optimizer] = lambda cls, params, kwargs: setting.build(params)  # noqa: E731
    own = Subject(torch.optim.Optimizer, {}, build)
    ends = [each.run(W, gradients).weights[-1].double() for each in (subject, own)]
    return W.double(), ends[0], ends[1]
