r"""Which optimizer converges in how many steps, and does an error of the direction matter?

The hidden matrices of a problem go to the optimizer in question, everything else to one AdamW with fixed settings
(`descent.OTHER`); learning rates are constant, weight decay is zero. All optimizers of a seed have the same start and
the same batches in the same order. Settings that no axis has:

========= ============================================================================================================
adamw     betas 0.9 and 0.95
muon      momentum 0.95 as an average, no Nesterov
mop       the same with the exact direction, and the nuclear norm as its scale, times `MOP_FACTOR`
soap      betas 0.9 and 0.95, factors 0.95; bases by orthogonal iteration at every tenth step; the first step is skipped
rekls     the same with a decomposition at every step and the Kullback-Leibler correction; the first step is skipped
========= ============================================================================================================

The direction of `muon` can have a planted error: see `disturbed` for its kinds. With a method that is exact it is the
only error, so that polar error, orthogonality error and scale are varied one at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muon_lab.nearest import unknown
from muon_lab.studies import methods
from muon_lab.studies.study import Case, Column, Ended, LeftOut, Metrics, Study, svd_flops

if TYPE_CHECKING:
    from muon_lab.studies.descent import Descent, Maker, Watched

OPTIMIZERS = ("adamw", "muon", "mop", "soap", "rekls")

#: As `step.SCALES`, without importing torch.
SCALES = ("none", "spectral", "match_rms_adamw", "unit_rms_norm", "shape_scaling", "nuclear_norm")

#: Errors of the direction and their sizes' ranges; ``none`` has no size.
PLANTED: Mapping[str, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "radial": (0.0, 1.0),
    "turn": (0.0, 1.9),
    "scale": (-0.99, 99.0),
}

#: Whether an error is drawn anew at every step, or the same at all of them.
PERSISTENCE = ("fresh", "fixed")

#: The factor of MOP's steps: it brings their best learning rate into the range of the others', as a nuclear norm has
#: the unit of the gradient.
MOP_FACTOR = 20.0

#: Steps from refresh to refresh of SOAP's bases.
FREQUENCY = 10


def _blocks(width: int, depth: int) -> list[tuple[int, int]]:
    """Return the shapes of the hidden matrices of the GPT."""
    return depth * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


#: Shapes of the hidden matrices of every problem, without importing torch.
SHAPES: Mapping[str, Sequence[tuple[int, int]]] = {
    "gpt": _blocks(96, 4),
    "gpt_small": _blocks(64, 2),
    "gpt_noisy": _blocks(64, 2),
    "gpt_quiet": _blocks(64, 2),
    "quadratic": [(48, 64)],
    "factorization": [(48, 8), (64, 8)],
}

#: Bytes of text a step: windows of a context each.
BYTES: Mapping[str, int] = {"gpt": 8 * 128, "gpt_small": 24 * 64, "gpt_noisy": 8 * 64, "gpt_quiet": 72 * 64}

#: Bytes of validation text that a loss is judged on, about.
JUDGED = 8192

#: Flops of loss and gradient: six a parameter and byte of text (products forward, and twice as many backward); three
#: products of the quadratic and as many of the factorization.
GRADIENT: Mapping[str, float] = {
    "gpt": 6.0 * 492_384 * BYTES["gpt"],
    "gpt_small": 6.0 * 131_392 * BYTES["gpt_small"],
    "gpt_noisy": 6.0 * 131_392 * BYTES["gpt_noisy"],
    "gpt_quiet": 6.0 * 131_392 * BYTES["gpt_quiet"],
    "quadratic": 2 * 2.0 * 48 * 64 * (48 + 64),
    "factorization": 3 * 2.0 * 48 * 64 * 8,
}

#: Up to this many times the loss at the start a run counts as one that holds.
HOLDS = 1.0


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    problem: tuple[str, ...] = ("gpt_small", "quadratic", "factorization")
    """gpt, gpt_small, gpt_noisy, gpt_quiet, quadratic or factorization (see studies.descent)."""
    optimizer: tuple[str, ...] = OPTIMIZERS
    """adamw, muon, mop, soap or rekls, of the hidden matrices."""
    method: tuple[str, ...] = ("quintic",)
    """The direction: a schedule, svd … (see studies.methods; muon)."""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule (muon)."""
    scale: tuple[str, ...] = ("match_rms_adamw",)
    """The factor of the direction: a mode of optim.step (muon)."""
    planted: tuple[str, ...] = ("none",)
    """The planted error of the direction: none, radial, turn or scale (muon)."""
    size: tuple[float, ...] = (0.0,)
    """Its relative size (muon)."""
    persistence: tuple[str, ...] = ("fresh",)
    """Whether it is drawn anew at every step: fresh or fixed (radial and turn)."""
    lr: tuple[float, ...] = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
    """The learning rate of the hidden matrices."""
    updates: tuple[int, ...] = (150,)
    """Steps of training."""
    seed: tuple[int, ...] = (0,)
    """Seeds the start, the batches and the planted error."""


#: Columns of the loss after every tenth of the steps but the last.
CURVE = tuple(f"loss_{percent}" for percent in range(10, 100, 10))

COLUMNS = (
    Column("loss", "nat/byte or 1", "loss after the last step: on validation text, or of the whole matrix problem"),
    Column("best_loss", "nat/byte or 1", "the lowest of the losses after each tenth of the steps"),
    Column("training_loss", "nat/byte or 1", "mean loss over the last tenth of the steps, before their updates"),
    Column("loss_0", "nat/byte or 1", "loss at the start"),
    *(Column(name, "nat/byte or 1", f"loss after {name.removeprefix('loss_')} % of the steps") for name in CURVE),
    Column("update_rms", "1", "root mean square of the change of a hidden matrix in a step"),
    Column("update_spectral", "1", "largest singular value of that change"),
    Column("alignment", "1", "cosine of that change, negative, to the exact polar factor of the averaged gradient"),
    Column("relative", "1", "‖X − U‖/‖U‖, X the direction and U the exact one of the same candidate"),
    Column("orthogonality", "1", "‖XXᵀ − UUᵀ‖/√r on the short side"),
    Column("fro_ratio", "1", "‖X‖/‖U‖"),
    Column("flops", "flop", "products and decompositions of the optimizer in a step, on average"),
    Column("gradient_flops", "flop", "products of loss and gradient in a step"),
    Column("step_ratio", "1", "seconds of the optimizer's step over those of loss and gradient, medians of the run"),
    Column("failed_step", "count", "first step that is not finite"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid; None for what does not matter, whose values must be right too."""
    known = {
        "problem": SHAPES,
        "optimizer": OPTIMIZERS,
        "scale": SCALES,
        "planted": PLANTED,
        "persistence": PERSISTENCE,
    }
    for name, names in known.items():
        if point[name] not in names:
            raise unknown(name, point[name], names)
    steps, lr, size = methods.settle(point["method"], point["steps"]), float(point["lr"]), float(point["size"])
    if not 0 < lr < 1e3:
        raise ValueError(f"lr must lie above 0 and below 1000, not {lr!r}")
    if point["updates"] < 10:
        raise ValueError(f"updates must be at least 10, not {point['updates']}")
    if point["seed"] < 0:
        raise ValueError(f"seed must be at least 0, not {point['seed']}")
    case = {**point, "steps": steps, "lr": lr, "size": size}
    if point["optimizer"] != "muon":
        yield case | dict.fromkeys(("method", "steps", "scale", "planted", "size", "persistence"))
        return
    low, high = PLANTED[point["planted"]]
    if point["planted"] == "none":
        yield case | {"size": None, "persistence": None}
        return
    if not low <= size <= high:
        raise LeftOut(f"size must lie from {low} to {high} for planted {point['planted']!r}, not at {size!r}")
    yield case | {"persistence": None if point["planted"] == "scale" else point["persistence"]}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    from muon_lab.studies.descent import PROBLEMS, descend

    maker, watched = made(case)
    run = descend(PROBLEMS[case["problem"]](case["seed"]), maker, case["updates"], watched)
    metrics = _metrics(case, run)
    if run.failed is not None:
        raise Ended("nonfinite", f"step {run.failed} is not finite", metrics)
    if run.curve[-1] > HOLDS * run.start:
        raise Ended("diverged", f"the loss went from {run.start:.3g} to {run.curve[-1]:.3g}", metrics)
    return metrics


def _metrics(case: Case, run: "Descent") -> dict[str, float | int | None]:
    whole = run.failed is None
    last = -(-len(run.losses) // 10)
    curve = dict(zip((*CURVE, "loss"), run.curve, strict=False))
    logged = {"update_rms": "rms", "update_spectral": "spectral"}
    names = {name: name for name in ("alignment", "relative", "orthogonality", "fro_ratio")} | logged
    return {
        **curve,
        "loss_0": run.start,
        "best_loss": min(run.curve, default=None),
        "training_loss": sum(run.losses[-last:]) / last if whole else None,
        **{column: _middle([getattr(look, name) for look in run.looks]) for column, name in names.items()},
        "flops": sum(step_flops(case, *shape) for shape in SHAPES[case["problem"]]),
        "gradient_flops": GRADIENT[case["problem"]],
        "step_ratio": run.step_seconds / run.gradient_seconds,
        "failed_step": run.failed,
    }


def _middle(values: Sequence[float | None]) -> float | None:
    """Return the median of what was logged, None if nothing was."""
    from statistics import median

    found = [value for value in values if value is not None]
    return median(found) if found else None


def made(case: Case) -> tuple["Maker", "Watched | None"]:
    """Return what makes the optimizer of the hidden matrices, and its orthogonalizer if it has one."""
    from functools import partial

    import torch

    from muon_lab import optim, polar
    from muon_lab.studies.descent import OTHER, Watched

    lr = case["lr"]
    makers: dict[str, Maker] = {
        "adamw": partial(torch.optim.AdamW, **{**OTHER, "lr": lr}),
        "soap": partial(optim.SOAP, lr=lr, eigenbasis="iteration", frequency=FREQUENCY, first_step="skip"),
        "rekls": partial(optim.REKLS, lr=lr, first_step="skip"),
    }
    if case["optimizer"] in makers:
        return makers[case["optimizer"]], None
    if case["optimizer"] == "mop":
        watched = Watched(polar.svd())
        return partial(optim.MOP, lr=lr, extra=MOP_FACTOR, direction=watched), watched
    watched = Watched(_direction(case))
    return partial(optim.Muon, lr=lr, scale=case["scale"], direction=watched), watched


def _direction(case: Case) -> Any:
    """Return the orthogonalizer of Muon, with the planted error if there is one."""
    from muon_lab.studies.disturbed import Disturbed

    plain = methods.build(case["method"], case["steps"], "float32")
    if case["planted"] == "none":
        return plain
    return Disturbed(plain, case["planted"], case["size"], case["seed"], fixed=case["persistence"] == "fixed")


def step_flops(case: Case, m: int, n: int) -> float:
    """Return the flops of an optimizer's step on an m×n matrix: products and decompositions, nothing elementwise.

    Decompositions of a k×k factor by published counts: 9 k³ for eigenvectors and -values, 8/3 k³ for an orthogonal
    basis by reflections (Golub & Van Loan 2013, sections 8.3 and 5.2).

    Examples
    --------
    >>> step_flops({"optimizer": "muon", "method": "cubic", "steps": 1}, 2, 3)
    48.0
    """
    pair = 2.0 * m * n * (m + n)  # G Gᵀ and GᵀG, or one product of G with a basis on either side
    cubes = m**3 + n**3
    optimizer = case["optimizer"]
    if optimizer == "adamw":
        return 0.0
    if optimizer == "muon":
        return methods.work(case["method"], case["steps"], m, n) or svd_flops(m, n)
    if optimizer == "mop":
        return svd_flops(m, n)
    if optimizer == "soap":  # factors, there and back; at a refresh the momentum out and in, a product and a basis
        return 3 * pair + (2 * pair + (2 + 8 / 3) * cubes) / FREQUENCY
    return 4 * pair + 2 * pair + 9 * cubes  # corrected factors take two products each


def _work(case: Case) -> float:
    """Estimate the flops of a case, its losses on validation text included, forward alone."""
    per_step = GRADIENT[case["problem"]] + sum(step_flops(case, *shape) for shape in SHAPES[case["problem"]])
    text = BYTES.get(case["problem"])
    judged = 11 * JUDGED / text / 3 * GRADIENT[case["problem"]] if text else 0.0
    return case["updates"] * per_step + judged


STUDY = Study(
    name="convergence",
    question="Which optimizer converges in how many steps, and does an error of the direction matter?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="loss",
    group=("problem", "optimizer", "planted", "method", "lr", "size"),
    settle=settle,
    measure=measure,
    work=_work,
    timed=True,
)
