r"""How near does a method come to the exact polar factor, and what does that cost in flops and in time?

One row is one point of a work-precision diagram: an error, the flops that it took, over those of five plain quintic
steps, and its time, over that of the reference of `speed` on the same matrix in the same run. A polynomial method goes
through as many points as it has numbers of steps; a method that computes the factor is one point.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muon_lab.studies import methods, orthogonalization, sources, speed
from muon_lab.studies.study import Case, Column, Ended, Metrics, Study, svd_flops

if TYPE_CHECKING:
    from torch import Tensor

#: The unit of flops: a schedule in the plain loop, and its steps. As many as those of `speed.REFERENCE`.
FIVE = ("quintic", 5)


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    spectrum: tuple[str, ...] = ("gaussian", "geometric(100)")
    """A named spectrum such as geometric(1e3), `recorded[:PATTERN]`, or `file[:PATTERN]` with --matrices."""
    shape: tuple[str, ...] = ("256x512",)
    """ROWSxCOLS of planted matrices."""
    seed: tuple[int, ...] = (0,)
    """Draws of planted matrices."""
    threads: tuple[int, ...] = (1,)
    """CPU threads."""
    dtype: tuple[str, ...] = ("float32",)
    """The dtype in which the iteration keeps its numbers: float64, float32, bfloat16, float16."""
    method: tuple[str, ...] = ("simple", "quintic", "auto:quintic", "polar_express", "svd", "qdwh")
    """[FORM:][START[-DROP]:]SCHEDULE, or svd, qdwh, newton, halley, gram_eigh (see studies.methods)."""
    steps: tuple[int, ...] = (3, 5, 8)
    """Steps of the schedule; exact methods have none."""
    repeats: tuple[int, ...] = (5,)
    """Measured rounds; one round before them does not count."""


COLUMNS = (
    *speed.RATIO_COLUMNS,
    *speed.RATE_COLUMNS,
    Column("relative", "1", "‖X − U‖/‖U‖, X the result and U the exact polar factor"),
    Column("cosine", "1", "⟨X, U⟩/(‖X‖‖U‖)"),
    Column("orthogonality", "1", "‖XXᵀ − UUᵀ‖/√r on the short side, r the rank"),
    Column(
        "flops", "flop", "multiplications and additions; auto halves symmetric products, the others take them whole"
    ),
    Column("flops_ratio", "1", "the same over five plain quintic steps"),
)


def settle(point: Mapping[str, Any], file: sources.File | None) -> Iterator[Case]:
    """Yield the cases of one point of the grid."""
    speed.check_counts(point)
    for case in orthogonalization.settle(point, file):
        yield {**case, "threads": point["threads"], "repeats": point["repeats"]}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import torch

    from muon_lab.measure.polar import errors

    G = torch.tensor(sources.matrix(case), dtype=methods.data_dtype(case["dtype"]))
    orthogonalize = methods.build(case["method"], case["steps"], case["dtype"], sources.roundoff(case))
    X = orthogonalize(G).double()
    if not torch.isfinite(X).all():
        raise Ended("nonfinite", "the result is not finite")
    found, work = errors(X, sources.truth(case)), flops(case, G)
    metrics = {
        "relative": found.relative,
        "cosine": found.cosine,
        "orthogonality": found.orthogonality,
        "flops": work,
        "flops_ratio": work / (methods.work(*FIVE, case["rows"], case["cols"]) or 1.0),
    }
    if found.sigma_max > orthogonalization.ESCAPED:
        raise Ended("diverged", f"a singular value of {found.sigma_max:.3g}", metrics)
    return {**metrics, **speed.paced(lambda: orthogonalize(G), G, work, case["repeats"])}


def flops(case: Case, G: "Tensor") -> float:
    """Return the flops of a case: closed forms for polynomials, what an exact method says of itself on this matrix."""
    known = methods.work(case["method"], case["steps"], case["rows"], case["cols"], case["dtype"])
    if known is not None:
        return known
    exact = methods.direct(case["method"], case["dtype"], methods.noise(sources.roundoff(case), case["dtype"]))
    return float(exact.decompose(methods.cast(G, case["dtype"])).flops)


STUDY = Study(
    name="work_precision",
    question="How near does a method come to the exact polar factor, and what does that cost in flops and in time?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="relative",
    group=("spectrum", "method", "steps", "dtype", "shape"),
    settle=settle,
    measure=measure,
    work=lambda case: svd_flops(case["rows"], case["cols"]) + speed.work(case),  # the oracle, and what takes turns
    facts=("rows", "cols", *sources.FACTS),
    timed=True,
)
