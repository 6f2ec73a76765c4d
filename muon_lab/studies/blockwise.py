r"""How far is blockwise orthogonalization, or another layout, from orthogonalizing the whole matrix?

Every tensor-parallel rank orthogonalizes its own shard, :math:`B = [O(G_1), \dots, O(G_T)]`, and the assembled update
is compared with the exact polar factor U of the whole G. Even with exact block factors
:math:`\|B\|_2` can reach :math:`\sqrt T`, and B changes with the number of ranks. For Gaussian matrices random-matrix
theory says how much (`oracle.marchenko_pastur`).

Other layouts, on ranks of this process, have the same columns; B is then their update. That of `periodic` is the mean
over a period of its steps for a gradient that stays, blocks corrected to the norm of the whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muon_lab.studies import assembled, methods, sources
from muon_lab.studies.study import Case, Column, Ended, Metrics, Study, svd_flops

if TYPE_CHECKING:
    from torch import Tensor

    from muon_lab.parallel.grid import Placement

#: Layouts that take shards for matrices of their own.
BLOCKS = ("blockwise", "periodic")


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
    layout: tuple[str, ...] = ("blockwise",)
    """blockwise, duplicated, distributed, gram, owner, or periodic (with duplicated)."""
    dim: tuple[int, ...] = (0, 1)
    """The partitioned axis: 0 cuts rows, 1 cuts columns."""
    tp: tuple[int, ...] = (1, 2, 4, 8)
    """Number of tensor-parallel ranks."""
    cut: tuple[str, ...] = ("even",)
    """even, as evenly as it goes; chunked, equal parts rounded up; half, half of the axis on the first rank."""
    method: tuple[str, ...] = ("svd",)
    """What every rank applies to its shard: a schedule, or svd."""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule; svd has none."""
    dtype: tuple[str, ...] = ("float64",)
    """The dtype in which the iteration keeps its numbers: float64, float32, bfloat16, float16."""
    period: tuple[int, ...] = (5,)
    """periodic: one step in so many takes the whole matrix."""


COLUMNS = (
    Column("relative", "1", "‖B − U‖/‖U‖, B the assembled update and U the exact polar factor of the whole matrix"),
    Column("cosine", "1", "⟨B, U⟩/(‖B‖‖U‖)"),
    Column("sigma_max", "1", "largest singular value of B"),
    Column("sigma_min", "1", "r-th singular value of B, r the rank of the whole matrix"),
    Column("fro_ratio", "1", "‖B‖/‖U‖"),
    Column("bound", "1", "√tp where blocks are taken, which sigma_max cannot exceed when the block factors are exact"),
    Column("layout_relative", "1", "‖B − O(G)‖/‖O(G)‖: the same method applied to the whole, so the layout alone"),
    Column("orthogonality", "1", "‖BBᵀ − UUᵀ‖/√r on the short side"),
    Column("residual", "1", "‖G − SB‖/‖G‖, S the symmetric part of GBᵀ"),
    Column("definiteness", "1", "the most negative eigenvalue of S, relative to ‖G‖₂"),
    Column("gap", "1", "1 − ⟨B, G⟩/‖G‖_*, negative where B is too large"),
    Column("excess", "1", "how far the largest singular value of B exceeds 1"),
    Column("nuclear_ratio", "1", "Σ‖shard‖_*/‖G‖_*, from 1 to √tp"),
    Column("correction", "1", "the factor that brings exact blocks of full rank to the norm of the whole"),
    Column("expected_relative", "1", "what theory expects of relative, for Gaussian matrices and exact blocks"),
    Column("expected_cosine", "1", "the same of cosine"),
    Column("expected_nuclear", "1", "the same of nuclear_ratio"),
)


def settle(point: Mapping[str, Any], file: sources.File | None) -> Iterator[Case]:
    """Yield the cases of one point of the grid."""
    assembled.placed(point["cut"], 0, point["tp"], point["dim"])  # raises for a cut, a dim or a tp that is none
    methods.check_dtype(point["dtype"])
    if point["period"] < 1:
        raise ValueError(f"period must be at least 1, not {point['period']}")
    steps = methods.settle(point["method"], point["steps"])
    assembled.check(point["layout"], point["method"], steps, point["tp"])
    layout = {name: point[name] for name in ("layout", "dim", "tp", "cut", "method", "dtype")}
    layout["period"] = point["period"] if point["layout"] == "periodic" else None
    for case in sources.settle(point["source"], point["rows"], point["cols"], point["seed"], file):
        yield {**case, **layout, "steps": steps}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import torch

    from muon_lab.measure import bounds
    from muon_lab.measure.polar import errors
    from muon_lab.parallel import layouts

    G = torch.tensor(sources.matrix(case), dtype=methods.data_dtype(case["dtype"]))
    cut = assembled.placed(case["cut"], G.shape[case["dim"]], case["tp"], case["dim"])
    whole = methods.build(case["method"], case["steps"], case["dtype"], sources.roundoff(case))(G).double()
    B = _update(case, cut, G).double()
    if not (torch.isfinite(B).all() and torch.isfinite(whole).all()):
        raise Ended("nonfinite", "the update is not finite")
    return {
        **errors(B, sources.truth(case))._asdict(),
        "bound": bounds.blockwise(case["tp"]) if case["layout"] in BLOCKS else 1.0,
        "layout_relative": float((B - whole).norm() / whole.norm()) if whole.any() else float(B.norm()),
        "nuclear_ratio": _nuclear_ratio(case, cut),
        "correction": layouts.correction(tuple(G.shape), cut) if case["layout"] in BLOCKS else 1.0,
        **_expected(case, cut),
    }


def _update(case: Case, cut: "Placement", G: "Tensor") -> "Tensor":
    """Return the assembled update: of periodic the mean over a period."""
    from muon_lab.parallel import layouts

    how = (case["method"], case["steps"], case["dtype"], cut, sources.roundoff(case))
    if case["layout"] != "periodic":
        return assembled.whole(case["layout"], *how)(G)
    rest = (case["period"] - 1) * layouts.correction(tuple(G.shape), cut)
    return (assembled.whole("duplicated", *how)(G) + rest * assembled.whole("blockwise", *how)(G)) / case["period"]


def _nuclear_ratio(case: Case, cut: "Placement") -> float:
    """Return what the shards' nuclear norms add up to, over that of the whole; 1 for a zero matrix."""
    import numpy as np

    G = sources.matrix(case)
    norms = [float(np.linalg.norm(cut.shard(G, rank), "nuc")) for rank in range(cut.tp) if cut.sizes[rank]]
    whole = float(np.linalg.norm(G, "nuc"))
    return sum(norms) / whole if whole else 1.0


def _expected(case: Case, cut: "Placement") -> Metrics:
    """Return what theory expects, where it does."""
    if case["source"] != "gaussian" or case["layout"] != "blockwise" or case["method"] not in methods.EXACT:
        return {}
    from muon_lab.oracle import marchenko_pastur

    expected = marchenko_pastur.blockwise(case["rows"], case["cols"], case["dim"], cut.sizes)
    return {
        "expected_relative": expected.relative,
        "expected_cosine": expected.cosine,
        "expected_nuclear": expected.nuclear_ratio,
    }


STUDY = Study(
    name="blockwise",
    question="How far is blockwise orthogonalization from orthogonalizing the whole matrix?",
    version=2,
    axes=Axes,
    columns=COLUMNS,
    headline="relative",
    group=("dim", "tp", "layout", "method", "source"),
    settle=settle,
    measure=measure,
    work=lambda case: 4 * svd_flops(case["rows"], case["cols"]),  # the oracle, the whole, the shards and the result
    facts=sources.FACTS,
)
