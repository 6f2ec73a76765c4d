r"""How long does an orthogonalization take, beside a named reference on the same matrix in the same run?

Candidate, reference and a plain matrix product take turns, so that a change of the machine's pace meets all three;
every repeat gives one ratio. The reference is ``newton_schulz(simple, 5 steps)`` in float32, one matrix at a time.

.. math:: share = \frac{flops\ of\ the\ iteration / seconds}{flops\ of\ a\ product / its\ seconds}
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muon_lab.studies import methods, peers
from muon_lab.studies.orthogonalization import shape_of
from muon_lab.studies.study import Case, Column, Metrics, Study

if TYPE_CHECKING:
    from torch import Tensor

#: The named reference of every ratio.
REFERENCE = ("lab", "simple", 5, "float32")


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    shape: tuple[str, ...] = ("256x256", "256x1024", "512x512")
    """ROWSxCOLS of the matrix."""
    threads: tuple[int, ...] = (1,)
    """CPU threads."""
    dtype: tuple[str, ...] = ("float32",)
    """The dtype in which the iteration keeps its numbers: float64, float32, bfloat16, float16."""
    method: tuple[str, ...] = ("simple", "svd")
    """As in the study orthogonalization: a schedule, ``auto:SCHEDULE``, qdwh …"""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule; exact methods have none."""
    peer: tuple[str, ...] = ("lab", "torch", "pytorch_optimizer", "pytorch_optimizer_gram")
    """Whose implementation."""
    repeats: tuple[int, ...] = (7,)
    """Measured rounds; one round before them does not count."""


#: What is told of a candidate and a reference that took turns; see `ratios`.
RATIO_COLUMNS = (
    Column("ratio", "1", "seconds of the candidate over seconds of the reference, median over rounds"),
    Column("ratio_low", "1", "lower quartile over rounds"),
    Column("ratio_high", "1", "upper quartile over rounds"),
    Column("milliseconds", "ms", "median time of the candidate"),
    Column("reference_milliseconds", "ms", "median time of the reference"),
)

#: What is told beside them where both are orthogonalizations; see `paced`.
RATE_COLUMNS = (
    Column("gemm_gflops", "Gflop/s", "median rate of square float32 products, as many flops as the reference"),
    Column("share", "1", "rate of the candidate's flops (as `methods.work` counts them) over gemm_gflops"),
    Column("reference_share", "1", "the same for the reference"),
)

COLUMNS = (
    *RATIO_COLUMNS,
    *RATE_COLUMNS,
    Column("relative", "1", "‖X − U‖/‖U‖ of the candidate's result"),
    Column("reference_relative", "1", "the same for the reference"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid."""
    rows, cols = shape_of(point["shape"])
    check_counts(point)
    methods.check_dtype(point["dtype"])
    steps = methods.settle(point["method"], point["steps"])
    peers.settle(point["peer"], point["method"], point["dtype"])
    yield {**point, "shape": f"{rows}x{cols}", "steps": steps}


def work(case: Case) -> float:
    """Estimate the flops of a case: about three iterations a round."""
    return (case["repeats"] + 1) * 3.0 * (methods.work(*REFERENCE[1:3], *shape_of(case["shape"])) or 0.0)


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import numpy as np
    import torch

    from muon_lab.measure.polar import errors
    from muon_lab.oracle.polar import polar

    rows, cols = shape_of(case["shape"])
    G = torch.tensor(np.random.default_rng(0).standard_normal((rows, cols)), dtype=torch.float32)
    candidate = peers.build(case["peer"], case["method"], case["steps"], case["dtype"])
    reference = peers.build(*REFERENCE)
    own_flops = methods.work(case["method"], case["steps"], rows, cols, case["dtype"])
    truth = polar(G.double().numpy())
    return {
        **paced(lambda: candidate(G), G, own_flops, case["repeats"]),
        "relative": errors(candidate(G).double(), truth).relative,
        "reference_relative": errors(reference(G).double(), truth).relative,
    }


def check_counts(point: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless there is a thread and a round."""
    for name in ("threads", "repeats"):
        if point[name] < 1:
            raise ValueError(f"{name} must be at least 1, not {point[name]}")


def paced(candidate: Callable[[], object], G: "Tensor", flops: float | None, rounds: int) -> dict[str, float | None]:
    """Return the numbers of `RATIO_COLUMNS` and `RATE_COLUMNS` for a candidate beside the reference on a matrix G.

    `flops` are those of the candidate; None leaves its share open.
    """
    import numpy as np
    import torch

    rows, cols = G.shape
    X, reference = G.float(), peers.build(*REFERENCE)
    side = round((min(rows, cols) ** 2 * max(rows, cols)) ** (1 / 3))
    side = max(1, side - side % 64 if side > 64 else side)  # whole vectors, as layers of models have
    A = torch.tensor(np.random.default_rng(1).standard_normal((side, side)), dtype=torch.float32)
    base_flops = methods.work(*REFERENCE[1:3], rows, cols) or 0.0
    products = max(1, round(base_flops / (2 * side**3)))  # as much work as the reference, so as steady a clock

    def gemm() -> None:
        for _ in range(products):
            torch.mm(A, A)

    seconds = interleaved((candidate, lambda: reference(X), gemm), rounds)
    own, base, plain = np.median(seconds, axis=0)
    rate = products * 2 * side**3 / plain
    return {
        **ratios(seconds),
        "gemm_gflops": float(rate / 1e9),
        "share": None if flops is None else float(flops / own / rate),
        "reference_share": float(base_flops / base / rate),
    }


def ratios(seconds: Any) -> dict[str, float]:
    """Return the numbers of `RATIO_COLUMNS` from the seconds of a candidate and a reference in every round."""
    import numpy as np

    low, middle, high = np.quantile(seconds[:, 0] / seconds[:, 1], (0.25, 0.5, 0.75))
    own, base = 1e3 * np.median(seconds[:, :2], axis=0)
    return {
        "ratio": float(middle),
        "ratio_low": float(low),
        "ratio_high": float(high),
        "milliseconds": float(own),
        "reference_milliseconds": float(base),
    }


def interleaved(tasks: tuple[Callable[[], object], ...], rounds: int) -> Any:
    """Return the seconds of every task in every round, the tasks taking turns, after one round that doesn't count."""
    import time

    import numpy as np

    seconds = np.zeros((rounds + 1, len(tasks)))
    for turn in range(rounds + 1):
        for index, task in enumerate(tasks):
            start = time.perf_counter()
            task()
            seconds[turn, index] = time.perf_counter() - start
    return seconds[1:]


STUDY = Study(
    name="speed",
    question="How long does an orthogonalization take, beside the plain float32 loop in the same run?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="ratio",
    group=("shape", "peer", "method", "dtype"),
    settle=settle,
    measure=measure,
    work=work,
    timed=True,
)
