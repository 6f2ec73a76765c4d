r"""Runs of SOAP on drawn gradients beside a twin one rounding away, and what is measured of one step of them.

An update does not depend on the weight, so the weight stays zero: what a step subtracts from it is the update to the
last bit, not what is left of it beside a larger weight.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import Exact, Rounded
from muon_lab.eigen import track
from muon_lab.eigen.track import Tracked
from muon_lab.measure import eigen as measured
from muon_lab.optim.soap import EigensolverWarning, Rule, SOAPState
from muon_lab.oracle import eigen as oracle
from muon_lab.studies.preconditioner import PLAIN, settings
from muon_lab.studies.study import Case, Metrics

#: How far the seeds of what lasts and of the twin's rounding lie from that of the gradients: torch's generator reads 32
#: bits of a seed.
LASTING, ROUNDING = 2**30, 2**31

#: A run and its twin, in this order, along the batch axis of everything.
PAIR = 2


class Snapshot(NamedTuple):
    """One step of a run and of its twin."""

    rule: Rule
    before: SOAPState
    G: Float[Tensor, "2 m n"]
    U: Float[Tensor, "2 m n"]
    after: SOAPState
    #: Sums of the updates so far, in float64.
    moved: Float[Tensor, "2 m n"]


class Run:
    """A run that goes as far as it is asked for, and remembers its steps."""

    def __init__(self, case: Case) -> None:
        self._steps: list[Snapshot] = []
        self._coming = steps(case)
        self._over = False

    def at(self, step: int) -> Snapshot | int:
        """Return a step, counted from 1; the number of the first that is not finite if that comes before."""
        while len(self._steps) < step and not self._over:
            snapshot = next(self._coming)
            self._over = not finite(snapshot)
            self._steps += [] if self._over else [snapshot]
        return self._steps[step - 1] if len(self._steps) >= step else len(self._steps) + 1


def run(case: Case) -> Run:
    """Return the run that the step of a case belongs to."""
    return _run(*((name, case[name]) for name in case if name != "step"))


@lru_cache(maxsize=2)  # neighbouring cases of a grid are steps of one run
def _run(*identity: tuple[str, object]) -> Run:
    return Run(dict(identity))


def steps(case: Case) -> Iterator[Snapshot]:
    """Yield the steps of a run, without an end."""
    rule = Rule(lr=1.0, **settings(case), arithmetic=Exact() if case["format"] == PLAIN else Rounded(case["format"]))
    zero = torch.zeros(PAIR, case["rows"], case["cols"])
    state, moved = rule.begin(zero), zero.double()
    for G in gradients(case):
        before, (W, state) = state, _advanced(rule, zero, G, state)
        moved = moved - W.double()
        yield Snapshot(rule, before, G, -W, state, moved)


def gradients(case: Case) -> Iterator[Float[Tensor, "2 m n"]]:
    r"""Yield gradients in float32, and their twins: every entry moved to one of its two neighbours by chance."""
    shape, p = (case["rows"], case["cols"]), case["persistent"]
    generator = torch.Generator().manual_seed(case["seed"])
    lasting = torch.randn(shape, generator=torch.Generator().manual_seed(case["seed"] + LASTING))
    chance = torch.Generator().manual_seed(case["seed"] + ROUNDING)
    step = 0
    while True:
        step += 1
        G = math.sqrt(p) * lasting + math.sqrt(1 - p) * torch.randn(shape, generator=generator)
        G = case["spike"] * G if step == case["spike_step"] else G
        upwards = torch.rand(shape, generator=chance) < 0.5
        yield torch.stack([G, G.nextafter(torch.where(upwards, math.inf, -math.inf))])


def finite(snapshot: Snapshot) -> bool:
    """Return whether updates and factors are all finite: a factor that overflows leaves the bases as they were."""
    return all(bool(X.isfinite().all()) for X in (snapshot.U, snapshot.after.L, snapshot.after.R))


@dataclass(frozen=True)
class OtherSolver(Rule):
    """The rule with decompositions by LAPACK's QR algorithm in the place of divide and conquer."""

    def basis(self, K: Float[Tensor, "count n n"], Q: Float[Tensor, "count n n"], first: bool) -> Tracked:
        """Return the new bases of a factor, and how they were found."""
        if not (first or self.eigenbasis == "eigh"):
            return super().basis(K, Q, first)
        found = [scipy.linalg.eigh(((A + A.T) / 2).numpy(), driver="ev") for A in K]
        values, columns = (torch.stack([torch.from_numpy(pair[i]) for pair in found]) for i in (0, 1))
        return Tracked(track.descending(values, columns), torch.full(K.shape[:1], track.Outcome.SOLVED.value))


def metrics(snapshot: Snapshot) -> Metrics:
    """Return what is measured of one step."""
    U, twin = snapshot.U.double()
    alone, wide = (_each(snapshot.before, change) for change in (lambda X: X[:1], lambda X: X[:1].double()))
    exact, other = replace(snapshot.rule, arithmetic=Exact()), OtherSolver(**_fields(snapshot.rule))
    same = {
        "step_error": _update(exact, snapshot.G[:1].double(), wide),
        "solver_error": _update(other, snapshot.G[:1], alone),
    }
    G = snapshot.G[0].double()
    return {
        "rms": float(U.square().mean().sqrt()),
        "largest": float(U.abs().max()),
        "cosine": _ratio((U * G).sum(), U.norm() * G.norm()),
        "disagreement": _ratio((U - twin).norm(), U.norm()),
        "parted": _ratio((snapshot.moved[0] - snapshot.moved[1]).norm(), snapshot.moved[0].norm()),
        **{name: _ratio((U - again).norm(), again.norm()) for name, again in same.items()},
        **_bases(snapshot),
        **_values(snapshot),
    }


def _bases(snapshot: Snapshot) -> Metrics:
    """Return how the bases have turned, if there were any before, and how far they are from eigenbases."""
    pairs = ((snapshot.after.L[0], snapshot.after.Q_L[0]), (snapshot.after.R[0], snapshot.after.Q_R[0]))
    off = {"off_diagonal": max(oracle.off_diagonal(K.double().numpy(), Q.double().numpy()) for K, Q in pairs)}
    if snapshot.before.seen == 0:
        return off
    drifts = [
        measured.drift(old[0], new[0]) for old, new in zip(snapshot.before.bases, snapshot.after.bases, strict=True)
    ]
    turns = [drift.turn / math.sqrt(len(K)) for drift, (K, _) in zip(drifts, pairs, strict=True)]
    displaced = sum(drift.displaced for drift in drifts)
    return {"turn_left": turns[0], "turn_right": turns[1], "displaced": displaced, **off}


def _values(snapshot: Snapshot) -> Metrics:
    """Return the largest values, how many the floor replaces, and how often a solver failed."""
    left, right = snapshot.after.Lambda_L[0], snapshot.after.Lambda_R[0]
    floored = sum(int((values < snapshot.rule.eps).sum()) for values in (left, right))
    troubles = int(snapshot.after.retried[0].sum() + snapshot.after.kept[0].sum())
    tops = {"top_left": float(left.max()), "top_right": float(right.max())}
    return {**tops, "floored": floored if snapshot.rule.kl else None, "troubles": troubles}


def _update(rule: Rule, G: Float[Tensor, "1 m n"], state: SOAPState) -> Float[Tensor, "m n"]:
    """Return the update of one step in float64."""
    return -_advanced(rule, torch.zeros_like(G), G, state)[0][0].double()


def _advanced(
    rule: Rule, W: Float[Tensor, "count m n"], G: Float[Tensor, "count m n"], state: SOAPState
) -> tuple[Float[Tensor, "count m n"], SOAPState]:
    """Take a step; failures of a solver are counted in the state, and not told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EigensolverWarning)
        return rule.advance(W, G, state)


def _each(state: SOAPState, change: Callable[[Tensor], Tensor]) -> SOAPState:
    """Return a state with all its tensors changed."""
    changed: dict[str, Any] = {
        name: change(value) if isinstance(value, Tensor) else value for name, value in state._asdict().items()
    }
    return SOAPState(**changed)


def _fields(rule: Rule) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in fields(rule)}


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    """Return a quotient, None where there is nothing to divide by."""
    return float(part / whole) if whole > 0 else None
