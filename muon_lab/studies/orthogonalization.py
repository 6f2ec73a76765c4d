r"""How far is an orthogonalized matrix from its polar factor, and what part of the distance is which?

.. math:: \underbrace{X - U}_{relative} = \underbrace{(p(G) - U)}_{truncation} + \underbrace{(X - p(G))}_{rounding}

with p(G) the exact image of the schedule's polynomial, through an SVD in float64. What the cast of the input alone does
to the polar factor stands beside it (`input_error`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muon_lab.studies import methods, sources
from muon_lab.studies.study import Case, Column, Ended, Metrics, Study, svd_flops

if TYPE_CHECKING:
    from torch import Tensor

#: An update with a singular value this large has escaped: in exact arithmetic no published schedule exceeds 2.
ESCAPED = 10.0


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    spectrum: tuple[str, ...] = ("gaussian", "geometric(10)", "geometric(1e3)", "power(1)")
    """A named spectrum such as geometric(1e3), `recorded[:PATTERN]`, or `file[:PATTERN]` with --matrices."""
    shape: tuple[str, ...] = ("128x512",)
    """ROWSxCOLS of planted matrices."""
    seed: tuple[int, ...] = (0,)
    """Draws of planted matrices."""
    dtype: tuple[str, ...] = ("float32",)
    """The dtype in which the iteration keeps its numbers: float64, float32, bfloat16, float16."""
    method: tuple[str, ...] = ("simple", "quintic", "polar_express", "svd")
    """[FORM:][START[-DROP]:]SCHEDULE, or svd, qdwh, newton, halley, gram_eigh (see studies.methods)."""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule; exact methods have none."""


COLUMNS = (
    Column("relative", "1", "‖X − U‖/‖U‖, X the result and U the exact polar factor"),
    Column("cosine", "1", "⟨X, U⟩/(‖X‖‖U‖)"),
    Column("orthogonality", "1", "‖XXᵀ − UUᵀ‖/√r on the short side, r the rank"),
    Column("residual", "1", "‖G − SX‖/‖G‖, S the symmetric part of GXᵀ"),
    Column("definiteness", "1", "the most negative eigenvalue of S, relative to ‖G‖₂"),
    Column("gap", "1", "1 − ⟨X, G⟩/‖G‖_*: what is missing of the nuclear norm"),
    Column("excess", "1", "how far the largest singular value of X exceeds 1"),
    Column("sigma_max", "1", "largest singular value of X"),
    Column("sigma_min", "1", "r-th singular value of X"),
    Column("fro_ratio", "1", "‖X‖/‖U‖"),
    Column("truncation", "1", "‖p(G) − U‖/‖U‖: the schedule in exact arithmetic"),
    Column("rounding", "1", "‖X − p(G)‖/‖U‖: what the arithmetic added"),
    Column("input_error", "1", "‖U' − U‖/‖U‖, U' the polar factor of the matrix rounded to the dtype"),
    Column("condition", "1", "σ₁/σ_r of G"),
    Column("rank", "count", "r, the singular values of G above the rounding of its data"),
    Column("failed_step", "count", "first step whose iterate is not finite"),
)


def shape_of(text: str) -> tuple[int, int]:
    """Read ``ROWSxCOLS``.

    Examples
    --------
    >>> shape_of("128x512")
    (128, 512)
    """
    rows, times, cols = text.lower().partition("x")
    if not (times and rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
        raise ValueError(f"shape must be ROWSxCOLS with positive numbers, such as 128x512, not {text!r}")
    return int(rows), int(cols)


def settle(point: Mapping[str, Any], file: sources.File | None) -> Iterator[Case]:
    """Yield the cases of one point of the grid."""
    rows, cols = shape_of(point["shape"])
    methods.check_dtype(point["dtype"])
    steps = methods.settle(point["method"], point["steps"])
    for case in sources.settle(point["spectrum"], rows, cols, point["seed"], file):
        shape = {"spectrum": case["source"], "shape": f"{case['rows']}x{case['cols']}"}
        yield {**case, **shape, "dtype": point["dtype"], "method": point["method"], "steps": steps}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import numpy as np
    import torch

    from muon_lab.measure.polar import errors
    from muon_lab.oracle import polar as oracle

    G, U = sources.matrix(case), sources.truth(case)
    X = torch.tensor(G, dtype=methods.data_dtype(case["dtype"]))
    rounded, noise = methods.cast(X, case["dtype"]), methods.noise(sources.roundoff(case), case["dtype"])
    size = float(np.linalg.norm(U.U)) or 1.0

    def apart(A: Any, B: Any) -> float:
        return float(np.linalg.norm(A - B)) / size

    cast = apart(oracle.polar(rounded.double().numpy(), roundoff=noise).U, U.U)
    facts: dict[str, float | int | None] = {
        "input_error": cast,
        "condition": float(U.s[0] / U.s[U.rank - 1]) if U.rank else None,
        "rank": int(U.rank),
    }
    image = methods.image(case["method"], case["steps"], G, U.U)
    for step, iterate in enumerate(_iterates(case)(X)):
        if not torch.isfinite(iterate).all():
            raise Ended("nonfinite", f"step {step} is not finite", {**facts, "failed_step": step})
        result = iterate.double()
    metrics = {
        **errors(result, U)._asdict(),
        **facts,
        "truncation": apart(image, U.U),
        "rounding": apart(result.numpy(), image),
    }
    if metrics["sigma_max"] > ESCAPED:
        raise Ended("diverged", f"a singular value of {metrics['sigma_max']:.3g}", metrics)
    return metrics


def _iterates(case: Case) -> "Callable[[Tensor], Iterator[Tensor]]":
    """Return what gives the result of a method, after its iterates where it has any to show."""
    from muon_lab import polar
    from muon_lab.arithmetic import Exact

    if case["method"] not in methods.EXACT:
        found = methods.parse(case["method"], case["steps"])
        if found.form == "plain":
            return polar.iterates(found.schedule, Exact(methods.dtype_named(case["dtype"])), found.start)
    orthogonalize = methods.build(case["method"], case["steps"], case["dtype"], sources.roundoff(case))
    return lambda X: iter((orthogonalize(X),))


STUDY = Study(
    name="orthogonalization",
    question="How far is an orthogonalized matrix from its exact polar factor?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="relative",
    group=("spectrum", "method", "steps", "dtype"),
    settle=settle,
    measure=measure,
    work=lambda case: 4 * svd_flops(case["rows"], case["cols"]),  # the oracle, the cast, the schedule and the result
    facts=("rows", "cols", *sources.FACTS),
)
