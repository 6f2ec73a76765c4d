r"""Is an update rule independent of how a matrix is cut? The same gradients, given to the rule on one rank and on many.

Losses can't tell: training amplifies rounding, and hides differences that matter. So the gradients of one run are kept
and given, with the same weights at the start, to the rule on one rank, to the rule in a layout, and to the rule on one
rank in float64. With :math:`\Delta` the change of a matrix in a step,

.. math::

    deviation = \max \frac{\|\Delta_p - \Delta_1\|_F}{\|\Delta_1\|_F}, \qquad
    rounding = \max \frac{\|\Delta_1 - \Delta_1^{64}\|_F}{\|\Delta_1^{64}\|_F},

over steps and matrices. A rule is independent of the number of ranks if it deviates no more than `TIMES` as far as
rounding: no layout that sums in another order can be asked for more. Where rounding decides, as it does at first steps
of SOAP and REKLS, a rule is independent only if it does not deviate at all.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muon_lab.optim import routing
from muon_lab.optim.matrices import View
from muon_lab.optim.optimizer import MatrixOptimizer
from muon_lab.studies.descent import OTHER, Maker, Problem

#: How many times the rounding of one rank a deviation may be.
TIMES = 4

#: Rounding above this decides the update.
DECISIVE = 1e-2

#: From a maker of optimizers to what it is on one rank or in a layout, in a dtype.
Variant = Callable[[torch.dtype], Maker]


class Verdict(NamedTuple):
    """Whether a rule is independent of the number of ranks, and the two numbers that say so."""

    invariant: bool
    deviation: float
    rounding: float


class Kept(NamedTuple):
    """Names, views and first weights of the hidden matrices of a run, and their gradients in every step."""

    names: tuple[str, ...]
    views: tuple[View | None, ...]
    weights: tuple[Tensor, ...]
    gradients: tuple[tuple[Tensor, ...], ...]


def kept(problem: Problem, maker: Maker, steps: int) -> Kept:
    """Train for some steps and return the gradients of the hidden matrices.

    Examples
    --------
    >>> from functools import partial
    >>> from muon_lab import optim
    >>> from muon_lab.studies.descent import PROBLEMS
    >>> run = kept(PROBLEMS["quadratic"](0), partial(optim.Muon, lr=0.01), steps=2)
    >>> run.names, len(run.gradients), torch.equal(*(gradients[0] for gradients in run.gradients))
    (('W',), 2, False)
    """
    routes = routing.split(problem.network, views=problem.views, show=None)
    groups = routes.groups("matrix")
    others = {label: lambda rest: torch.optim.AdamW(rest, **OTHER) for label in routes.labels() if label != "matrix"}
    named = [(name, weight, group.get("view")) for group in groups for name, weight in group["params"]]
    optimizer = routes.optimizer(matrix=maker, **others)
    first = tuple(weight.detach().clone() for _, weight, _ in named)
    gradients = []
    for _, batch in zip(range(steps), problem.batches, strict=False):
        optimizer.zero_grad()
        problem.network.loss(*batch).backward()  # type: ignore[operator]
        gradients.append(tuple(weight.grad.detach().clone() for _, weight, _ in named))
        optimizer.step()
    names, _, views = zip(*named, strict=True)
    return Kept(names, views, first, tuple(gradients))


def changes(run: Kept, variant: Variant, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return how each matrix moves in each step, the gradients being those of a run, in float64."""
    weights = [nn.Parameter(weight.to(dtype, copy=True)) for weight in run.weights]
    groups: dict[View | None, list[tuple[str, Tensor]]] = {}
    for name, view, weight in zip(run.names, run.views, weights, strict=True):
        groups.setdefault(view, []).append((name, weight))
    optimizer = variant(dtype)(
        [{"params": named} | ({} if view is None else {"view": view}) for view, named in groups.items()]
    )
    assert isinstance(optimizer, MatrixOptimizer)
    moved = []
    for gradients in run.gradients:
        before = [weight.detach().clone() for weight in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.to(dtype)
        optimizer.step()
        moved.append([(weight.detach().double() - old.double()) for weight, old in zip(weights, before, strict=True)])
    return moved


def distance(moved: Sequence[Sequence[Tensor]], truth: Sequence[Sequence[Tensor]]) -> float:
    """Return the largest relative distance of a change to the true one; that of nothing to nothing is zero.

    What is not finite is infinitely far from everything, itself included.

    Examples
    --------
    >>> one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    >>> distance([[one, zero]], [[2 * one, zero]]), distance([[one]], [[zero]]), distance([[one / zero]], [[one]])
    (0.5, inf, inf)
    """
    worst = 0.0
    for changed, true in zip(moved, truth, strict=True):
        for A, B in zip(changed, true, strict=True):
            off = float((A - B).norm())
            if off:  # not a number is true, and larger than nothing
                size = float(B.norm())
                worst = max(worst, off / size if size and isfinite(off / size) else torch.inf)
    return worst


def verdict(run: Kept, single: Variant, layout: Variant) -> Verdict:
    """Return whether a rule in a layout is the rule on one rank.

    Parameters
    ----------
    run : Kept
        What both are given.
    single, layout : callable
        From a dtype to what makes the optimizer, on one rank and in the layout.

    Examples
    --------
    >>> from functools import partial
    >>> from muon_lab import optim
    >>> from muon_lab.studies.descent import PROBLEMS
    >>> one, other = (partial(optim.Muon, lr=0.01, scale=scale) for scale in ("spectral", "shape_scaling"))
    >>> run = kept(PROBLEMS["quadratic"](0), one, steps=2)
    >>> verdict(run, lambda dtype: one, lambda dtype: one)[:2], verdict(run, lambda dtype: one, lambda dtype: other)[0]
    ((True, 0.0), False)
    """
    alone, many, truth = (
        changes(run, variant, dtype)
        for variant, dtype in ((single, torch.float32), (layout, torch.float32), (single, torch.float64))
    )
    deviation, rounding = distance(many, alone), distance(alone, truth)
    allowed = TIMES * rounding if rounding <= DECISIVE else 0.0
    return Verdict(deviation <= allowed, deviation, rounding)
