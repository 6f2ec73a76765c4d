r"""How far is blockwise orthogonalization from orthogonalizing the whole matrix?

Every tensor-parallel rank orthogonalizes its own shard, :math:`B = [O(G_1), \dots, O(G_T)]`, and the assembled update
is compared with the exact polar factor U of the whole G. Even with exact block factors
:math:`\|B\|_2` can reach :math:`\sqrt T`, and B changes with the number of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from muon_lab.studies import methods, sources
from muon_lab.studies.study import Case, Column, Ended, Metrics, Study, svd_flops


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    source: tuple[str, ...] = ("recorded",)
    """`recorded[:PATTERN]`, a named spectrum such as gaussian, or `file[:PATTERN]` with --matrices."""
    rows: tuple[int, ...] = (128,)
    """Rows of planted matrices."""
    cols: tuple[int, ...] = (512,)
    """Columns of planted matrices."""
    seed: tuple[int, ...] = (0,)
    """Draws of planted matrices."""
    dim: tuple[int, ...] = (0, 1)
    """The partitioned axis: 0 cuts rows, 1 cuts columns."""
    tp: tuple[int, ...] = (1, 2, 4, 8)
    """Number of tensor-parallel ranks; shards are cut as evenly as it goes."""
    method: tuple[str, ...] = ("svd",)
    """What every rank applies to its shard: a schedule, or svd."""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule; svd has none."""
    dtype: tuple[str, ...] = ("float64",)
    """The dtype in which the iteration keeps its numbers: float64, float32, bfloat16, float16."""


COLUMNS = (
    Column("relative", "1", "‖B − U‖/‖U‖, B the assembled update and U the exact polar factor of the whole matrix"),
    Column("cosine", "1", "⟨B, U⟩/(‖B‖‖U‖)"),
    Column("sigma_max", "1", "largest singular value of B"),
    Column("sigma_min", "1", "r-th singular value of B, r the rank of the whole matrix"),
    Column("fro_ratio", "1", "‖B‖/‖U‖"),
    Column("bound", "1", "√tp, which sigma_max cannot exceed when the block factors are exact"),
    Column("layout_relative", "1", "‖B − O(G)‖/‖O(G)‖: the same method applied to the whole, so the layout alone"),
    Column("orthogonality", "1", "‖BBᵀ − UUᵀ‖/√r on the short side"),
    Column("residual", "1", "‖G − SB‖/‖G‖, S the symmetric part of GBᵀ"),
    Column("definiteness", "1", "the most negative eigenvalue of S, relative to ‖G‖₂"),
    Column("gap", "1", "1 − ⟨B, G⟩/‖G‖_*, negative where B is too large"),
    Column("excess", "1", "how far the largest singular value of B exceeds 1"),
)


def settle(point: Mapping[str, Any], file: sources.File | None) -> Iterator[Case]:
    """Yield the cases of one point of the grid."""
    from muon_lab.parallel import grid

    grid.even(0, point["tp"], point["dim"])  # raises for a dim or a tp that is none
    methods.check_dtype(point["dtype"])
    steps = methods.settle(point["method"], point["steps"])
    layout = {name: point[name] for name in ("dim", "tp", "method")}
    for case in sources.settle(point["source"], point["rows"], point["cols"], point["seed"], file):
        yield {**case, **layout, "steps": steps, "dtype": point["dtype"]}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import torch

    from muon_lab.measure import bounds
    from muon_lab.measure.polar import errors
    from muon_lab.parallel import layouts

    G = torch.tensor(sources.matrix(case), dtype=methods.data_dtype(case["dtype"]))
    orthogonalize = methods.build(case["method"], case["steps"], case["dtype"], sources.roundoff(case))
    whole = orthogonalize(G).double()
    B = layouts.blockwise(orthogonalize, dim=case["dim"], tp=case["tp"])(G).double()
    if not (torch.isfinite(B).all() and torch.isfinite(whole).all()):
        raise Ended("nonfinite", "the update is not finite")
    return {
        **errors(B, sources.truth(case))._asdict(),
        "bound": bounds.blockwise(case["tp"]),
        "layout_relative": float((B - whole).norm() / whole.norm()) if whole.any() else float(B.norm()),
    }


STUDY = Study(
    name="blockwise",
    question="How far is blockwise orthogonalization from orthogonalizing the whole matrix?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="relative",
    group=("dim", "tp", "method", "source"),
    settle=settle,
    measure=measure,
    work=lambda case: 4 * svd_flops(case["rows"], case["cols"]),  # the oracle, the whole, the shards and the result
    facts=sources.FACTS,
)
