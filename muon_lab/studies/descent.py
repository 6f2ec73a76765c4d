r"""Problems to descend on, and the loop that descends: every optimizer sees the same start and the same batches.

============== =====================================================================================================
gpt            the small GPT on English text, eight windows of 128 bytes a step; judged on validation text
gpt_small      the same with width 64, two blocks and a context of 64, 24 windows a step
gpt_noisy      gpt_small with a third of the text a step, eight windows
gpt_quiet      gpt_small with three times the text a step, 72 windows
quadratic      :math:`\langle W - T, A (W - T) B\rangle / \langle T, A T B\rangle`, A and B of condition 100, W from 0
factorization  :math:`\|X Y^T - M\|_F^2 / \|M\|_F^2`, M of rank 8 with condition 10, X and Y from small noise
============== =====================================================================================================

The last two have planted optima, and the loss there is 0. Hidden matrices go to the optimizer in question; embedding,
head and norms, which the last two do not have, always to one AdamW with the settings `OTHER`.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from muon_lab.measure.polar import errors
from muon_lab.optim import matrices, routing
from muon_lab.oracle.polar import polar
from muon_lab.polar import Orthogonalizer
from muon_lab.problems import models, planted, spectra, streams, text
from muon_lab.studies import training

#: AdamW of everything that is no hidden matrix, in every run; the settings are those of a `streams.Recording`.
OTHER: Mapping[str, Any] = {
    "lr": streams.Recording.lr,
    "betas": streams.Recording.betas,
    "weight_decay": 0.0,
}

#: A GPT of which a step takes a quarter of the time, on half as many bytes again: with fewer the noise of the batches
#: hides what optimizers do.
SMALL, SMALL_BATCH, NOISY_BATCH, QUIET_BATCH = models.GPTConfig(width=64, depth=2, context=64), 24, 8, 72

#: Rows and columns of the planted matrix problems, and the rank of the factorization.
ROWS, COLS, RANK = 48, 64, 8
#: Root mean square of the optimum of the quadratic, and of the entries from which the factorization starts: of the size
#: of the GPT's weights, so that one grid of learning rates fits all problems.
OPTIMUM, START = 0.1, 0.05

#: The loss is judged after every tenth of the steps, the updates are looked at after some of these.
MARKS, PROBES = 10, (1, 5, 10)

#: Coefficient of the averaged gradient, to whose polar factor updates are compared: that of Muon's momentum.
AVERAGE = 0.95

Maker: TypeAlias = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, eq=False)
class Problem:
    """Something to descend on.

    Attributes
    ----------
    network : Module
        With a method `loss` of a batch.
    batches : iterator of tuple
        The arguments of `loss`, one tuple a step.
    objective : callable
        What is judged: the loss on validation text, or the loss itself.
    views : mapping of pattern to View
        As for `routing.split`.
    """

    network: nn.Module
    batches: Iterator[tuple[Tensor, ...]]
    objective: Callable[[], Float[Tensor, ""]]
    views: Mapping[str, matrices.View] = field(default_factory=dict)


class Quadratic(nn.Module):
    """A quadratic form of a matrix, with planted factors and optimum, divided by its value at zero.

    Examples
    --------
    >>> problem = Quadratic(seed=0)
    >>> problem.loss().item() == 1.0
    True
    >>> _ = problem.W.data.copy_(problem.T)
    >>> problem.loss().item()
    0.0
    """

    A: Tensor
    B: Tensor
    T: Tensor

    def __init__(self, seed: int, condition: float = 100.0) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        profile = spectra.parse(f"geometric({condition:g})")
        for name, size in (("A", ROWS), ("B", COLS)):
            Q = planted.haar(size, size, generator)
            self.register_buffer(name, _single((Q * profile.values(size, size, generator)) @ Q.T))
        self.register_buffer("T", _single(OPTIMUM * generator.standard_normal((ROWS, COLS))))
        self.W = nn.Parameter(torch.zeros(ROWS, COLS))

    def loss(self) -> Float[Tensor, ""]:
        """Return the value at W over the value at zero."""
        return self._form(self.W - self.T) / self._form(self.T)

    def _form(self, D: Float[Tensor, "m n"]) -> Float[Tensor, ""]:
        return (D * (self.A @ D @ self.B)).sum()


class Factorization(nn.Module):
    """The distance of a product of two tall matrices to a planted matrix of their rank, squared and relative.

    Examples
    --------
    >>> problem = Factorization(seed=0)
    >>> 0.9 < problem.loss().item() < 1.1
    True
    """

    M: Tensor

    def __init__(self, seed: int, condition: float = 10.0) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        s = spectra.parse(f"geometric({condition:g})").values(RANK, RANK, generator)
        left, right = planted.haar(ROWS, RANK, generator), planted.haar(COLS, RANK, generator)
        self.register_buffer("M", _single((left * s) @ right.T))
        self.X, self.Y = (
            nn.Parameter(_single(START * generator.standard_normal((size, RANK)))) for size in (ROWS, COLS)
        )

    def loss(self) -> Float[Tensor, ""]:
        """Return the squared distance over that of zero."""
        return ((self.X @ self.Y.mT - self.M).square().sum()) / self.M.square().sum()


def _single(X: Float[np.ndarray, "*shape"]) -> Float[Tensor, "*shape"]:
    return torch.tensor(X, dtype=torch.float32)


def language(config: models.GPTConfig, batch: int, seed: int) -> Problem:
    """Return a small GPT on English text, judged on the validation part of it."""
    corpus, generator = text.corpus(), torch.Generator().manual_seed(seed)
    network = models.GPT(config, generator)
    batches = text.batches(corpus.train, batch, config.context, generator)
    return Problem(network, batches, partial(training.validation, network, corpus))


def planted_problem(network: Quadratic | Factorization) -> Problem:
    """Return a matrix problem: the whole loss in every step, and all parameters matrices."""
    return Problem(network, repeat(()), network.loss, {"*": matrices.FLATTENED})


PROBLEMS: Mapping[str, Callable[[int], Problem]] = {
    "gpt": lambda seed: language(training.MODEL, streams.Recording.batch, seed),
    "gpt_small": lambda seed: language(SMALL, SMALL_BATCH, seed),
    "gpt_noisy": lambda seed: language(SMALL, NOISY_BATCH, seed),
    "gpt_quiet": lambda seed: language(SMALL, QUIET_BATCH, seed),
    "quadratic": lambda seed: planted_problem(Quadratic(seed)),
    "factorization": lambda seed: planted_problem(Factorization(seed)),
}


class Watched:
    """An orthogonalizer that keeps what went in and what came out since it was last asked.

    Examples
    --------
    >>> from muon_lab import polar
    >>> watched = Watched(polar.svd())
    >>> _ = watched(torch.eye(2)[None])
    >>> len(watched.taken()), len(watched.taken())
    (1, 0)
    """

    def __init__(self, direction: Orthogonalizer) -> None:
        self.direction = direction
        self._calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, C: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
        """Return the direction."""
        X = self.direction(C)
        self._calls.append((C, X))
        return X

    def taken(self) -> list[tuple[Tensor, Tensor]]:
        """Return candidates and directions, and forget them."""
        calls, self._calls = self._calls, []
        return calls


class Look(NamedTuple):
    """What a step did to the hidden matrices: medians over them; None without an orthogonalizer.

    `rms`, `spectral` and `alignment` are of the change of the weights: its root mean square, its largest singular
    value, and the cosine of its negative to the exact polar factor of the averaged gradient. The others are of the
    direction X, relative to the exact direction U of the same candidate.
    """

    rms: float
    spectral: float
    alignment: float
    relative: float | None = None
    orthogonality: float | None = None
    fro_ratio: float | None = None


@dataclass(frozen=True)
class Descent:
    """What became of a run.

    Attributes
    ----------
    start : float
        The objective at the start.
    curve : tuple of float
        The objective after every tenth of the steps, as far as it is finite.
    losses : tuple of float
        The loss of every step, before its update.
    looks : tuple of Look
        What the steps at `PROBES` did.
    failed : int, optional
        The step, counted from 1, whose loss, gradient or update was not finite: it is the last.
    gradient_seconds, step_seconds : float
        Median time of loss and gradient, and of the optimizer's step.
    """

    start: float
    curve: tuple[float, ...]
    losses: tuple[float, ...]
    looks: tuple[Look, ...]
    failed: int | None
    gradient_seconds: float
    step_seconds: float


def descend(
    problem: Problem,
    matrix: Maker,
    updates: int,
    watched: Watched | None = None,
    after: Callable[[torch.optim.Optimizer], None] | None = None,
) -> Descent:
    """Descend for a number of steps.

    Parameters
    ----------
    problem : Problem
        Left where the descent ended.
    matrix : callable
        Makes the optimizer of the hidden matrices, of groups of named parameters.
    updates : int
        Steps, at least as many as there are `MARKS`.
    watched : Watched, optional
        The orthogonalizer of that optimizer.
    after : callable, optional
        Called with that optimizer after every step.

    Raises
    ------
    ValueError
        If there are too few steps.

    Examples
    --------
    >>> from muon_lab import optim
    >>> run = descend(PROBLEMS["quadratic"](0), partial(optim.Muon, lr=0.01, scale="match_rms_adamw"), 20)
    >>> run.start, run.curve[-1] < run.curve[0] < 1.0
    (1.0, True)
    """
    if updates < MARKS:
        raise ValueError(f"descend: updates is {updates}, needed at least {MARKS}")
    optimizer, hidden = _routed(problem, matrix)
    averages = [torch.zeros_like(weight) for weight in hidden]
    marks = {round(part * updates / MARKS): part for part in range(1, MARKS + 1)}
    run = Record(start=_judged(problem))
    for step, batch in zip(range(1, updates + 1), problem.batches, strict=False):
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = problem.network.loss(*batch)  # type: ignore[operator]
        loss.backward()
        gradient_seconds = time.perf_counter() - begun
        before = [weight.detach().clone() for weight in hidden] if marks.get(step) in PROBES else []
        step_seconds = _step(optimizer) if loss.isfinite() else None
        if step_seconds is None:
            return run.ended(step)
        run.losses.append(loss.item())
        run.seconds.append((gradient_seconds, step_seconds))
        if after is not None:
            after(optimizer.optimizers["matrix"])
        for average, weight in zip(averages, hidden, strict=True):
            average.lerp_(weight.grad, 1 - AVERAGE)  # type: ignore[arg-type]
        calls = [] if watched is None else watched.taken()
        if before:
            run.looks.append(look(before, hidden, averages, calls))
        if step in marks:
            judged = _judged(problem)
            if not math.isfinite(judged):
                return run.ended(step)
            run.curve.append(judged)
    return run.ended(None)


@dataclass
class Record:
    """A run as it grows."""

    start: float
    curve: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)

    def ended(self, failed: int | None) -> Descent:
        """Return the run, after the step that failed if there is one."""
        gradient, step = np.median(self.seconds, axis=0).tolist() if self.seconds else (math.nan, math.nan)
        return Descent(self.start, tuple(self.curve), tuple(self.losses), tuple(self.looks), failed, gradient, step)


def look(
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    averages: Sequence[Tensor],
    calls: Iterable[tuple[Tensor, Tensor]],
) -> Look:
    """Return what a step did, from the weights before and after it, averaged gradients, and directions with candidates.

    Examples
    --------
    >>> W, G = torch.eye(2), torch.diag(torch.tensor([3.0, 2.0]))
    >>> found = look([W], [W - 0.5 * W], [G], [(G[None], 2 * W[None])])
    >>> found.spectral, round(found.alignment, 12), found.relative, round(found.orthogonality, 12), found.fro_ratio
    (0.5, 1.0, 1.0, 3.0, 2.0)
    """
    moves = [_double(old) - _double(new) for old, new in zip(before, after, strict=True)]
    aligned = [errors(move, polar(_double(G))) for move, G in zip(moves, averages, strict=True)]
    rms = [float(np.sqrt(np.mean(move**2))) for move in moves]
    stacks = [zip(_double(C), _double(X), strict=True) for C, X in calls]
    directed = [errors(X, polar(C)) for stack in stacks for C, X in stack]
    of_direction = [
        _median([getattr(error, name) for error in directed]) if directed else None
        for name in ("relative", "orthogonality", "fro_ratio")
    ]
    spectral, alignment = ([getattr(error, name) for error in aligned] for name in ("sigma_max", "cosine"))
    return Look(_median(rms), _median(spectral), _median(alignment), *of_direction)


def _routed(problem: Problem, matrix: Maker) -> tuple[routing.Joint, list[Tensor]]:
    """Return the optimizer of everything, and the hidden matrices."""
    routes = routing.split(problem.network, views=problem.views, show=None)
    makers: dict[str, Maker] = {"matrix": matrix, "other": partial(torch.optim.AdamW, **OTHER)}
    hidden = [weight for group in routes.groups("matrix") for _, weight in group["params"]]
    return routes.optimizer(**{label: makers[label] for label in routes.labels()}), hidden


def _step(optimizer: routing.Joint) -> float | None:
    """Return how many seconds a step took, or None if a gradient or an update was not finite: then nothing changed."""
    begun = time.perf_counter()
    try:
        optimizer.step()
    except ValueError:  # the step leaves the range of its dtype
        return None
    return time.perf_counter() - begun if optimizer.report.taken else None


def _judged(problem: Problem) -> float:
    with torch.no_grad():
        return problem.objective().item()


def _double(X: Tensor) -> Float[np.ndarray, "*shape"]:
    return X.detach().double().numpy()


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
