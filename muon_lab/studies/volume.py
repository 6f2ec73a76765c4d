r"""What does a tensor-parallel layout send and compute, for one matrix or for every layer of a model?

Closed forms of `parallel.volume`, which equal a ledger's totals as integers: nothing is started. Three numbers of bytes
are never mixed: *logical* are those of the tensors that a rank hands over, *sent* those that a named algorithm makes it
send; what sockets carry is measured elsewhere. All are means over ranks for one matrix and one step of the optimizer:
`owner` has as many matrices as ranks, one each.

A model stands for its layers that tensor parallelism cuts, experts left out: they are whole where they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from muon_lab.nearest import unknown
from muon_lab.studies.study import Case, Column, LeftOut, Metrics, Study

if TYPE_CHECKING:
    from muon_lab.parallel.calls import Call
    from muon_lab.parallel.grid import Placement
    from muon_lab.parallel.volume import Line

LAYOUTS = ("duplicated", "distributed", "gram", "owner", "blockwise", "periodic", "factors")

#: The most ranks: those of all pairs are looked at.
MOST = 1024

#: Coefficients of one step with a fifth power; which they are makes no difference to volume.
QUINTIC = (15 / 8, -10 / 8, 3 / 8)


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    layout: tuple[str, ...] = ("duplicated", "distributed", "gram", "owner", "blockwise")
    """duplicated, distributed, gram, owner, blockwise, periodic (with duplicated), or factors (SOAP, REKLS)."""
    model: tuple[str, ...] = ("none",)
    """A model of cost.inventory, for all of its layers that are cut; none for one matrix."""
    rows: tuple[int, ...] = (4096,)
    """Rows of the one matrix."""
    cols: tuple[int, ...] = (1024,)
    """Columns of the one matrix."""
    dim: tuple[int, ...] = (0,)
    """The partitioned axis of the one matrix: 0 cuts rows, 1 cuts columns."""
    tp: tuple[int, ...] = (2, 4, 8)
    """Number of tensor-parallel ranks; shards are cut as evenly as it goes."""
    dtype: tuple[str, ...] = ("float32",)
    """The dtype of the shards."""
    wire: tuple[str, ...] = ("same",)
    """The dtype in which distributed sums Gram matrices; same is that of the shards."""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule, each with a fifth power."""
    period: tuple[int, ...] = (5,)
    """periodic: one step of the optimizer in so many takes the whole matrix."""
    algorithm: tuple[str, ...] = ("ring",)
    """The family of algorithms: ring, pairwise, tree, halving_doubling or gloo (see parallel.algorithms)."""


COLUMNS = (
    Column("count", "count", "matrices of this kind in the model"),
    Column("calls", "1", "calls that a rank makes for a matrix"),
    Column("logical_bytes", "B", "bytes of the tensors that a rank hands over for a matrix"),
    Column("sent_bytes", "B", "bytes that a rank sends for a matrix by the algorithm"),
    Column("sent_most", "B", "the same of the rank that sends most"),
    Column("norm_bytes", "B", "of sent_bytes, those for the norm of the whole matrix"),
    Column("flops", "flop", "multiplications and additions of a rank for a matrix; none for factors"),
    Column("flops_most", "flop", "the same of the rank that has most; for owner, of a whole matrix"),
    Column("sent_ratio", "1", "sent_bytes over those of duplicated"),
    Column("flops_ratio", "1", "flops over those of duplicated"),
    Column("aspect", "1", "long over short axis"),
    Column("beats_duplicated", "1", "the aspect ratio above which it sends less than duplicated, by rings"),
    Column("beats_owner", "1", "the aspect ratio above which it sends less than owner, by rings"),
    Column("model_bytes", "B", "sent_bytes of all matrices of this kind"),
    Column("model_flops", "flop", "flops of all matrices of this kind"),
)


class Loads(NamedTuple):
    """What every rank does for a number of matrices, or of steps, that share it."""

    sent: list[int]
    logical: list[int]
    norm: list[int]
    calls: list[int]
    flops: list[float]
    share: int

    def mean(self, name: str) -> float:
        """Return a mean over ranks, for one matrix and step."""
        values = getattr(self, name)
        return sum(values) / (len(values) * self.share)

    def most(self, name: str) -> float:
        """Return the largest of a rank, for one matrix and step."""
        return max(getattr(self, name)) / self.share


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the cases of one point of the grid: of a model one a kind of matrix."""
    from muon_lab.parallel import algorithms, calls, grid

    for name, known in (("layout", LAYOUTS), ("dtype", calls.FLOATS), ("algorithm", algorithms.FAMILIES)):
        if point[name] not in known:
            raise unknown(name, point[name], known)
    if point["wire"] not in ("same", *calls.FLOATS):
        raise unknown("wire", point["wire"], ("same", *calls.FLOATS))
    for name in ("rows", "cols", "steps", "period"):
        if point[name] < 1:
            raise ValueError(f"{name} must be at least 1, not {point[name]}")
    grid.even(0, point["tp"], point["dim"])  # raises for a dim or a tp that is none
    if point["tp"] > MOST:
        raise ValueError(f"tp must be at most {MOST}, not {point['tp']}")
    if point["algorithm"] == "halving_doubling" and point["tp"] & (point["tp"] - 1):
        raise LeftOut(f"halving and doubling needs a power of two ranks, not tp={point['tp']}")
    unused = {
        "steps": point["layout"] == "factors",
        "wire": point["layout"] != "distributed",
        "period": point["layout"] != "periodic",
    }
    case = {**point, **{name: None for name, idle in unused.items() if idle}}
    if point["model"] == "none":
        yield case | {"model": None, "layer": None, "_count": 1}
        return
    from muon_lab.cost import inventory

    for layer in inventory.get(point["model"]).matrices:
        if layer.cut is not None and not layer.expert:
            rows, cols = layer.shape
            yield case | {"layer": layer.name, "rows": rows, "cols": cols, "dim": layer.cut, "_count": layer.count}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    loads, whole = of_layout(case, case["layout"]), of_layout(case, "duplicated")
    count, short = case["_count"], min(case["rows"], case["cols"])
    sent, flops = loads.mean("sent"), loads.mean("flops") if loads.flops else None
    return {
        "count": count,
        "calls": loads.mean("calls"),
        "logical_bytes": loads.mean("logical"),
        "sent_bytes": sent,
        "sent_most": loads.most("sent"),
        "norm_bytes": loads.mean("norm"),
        "flops": flops,
        "flops_most": _busiest(case, loads, whole) if loads.flops else None,
        "sent_ratio": sent / whole.mean("sent") if any(whole.sent) else None,
        "flops_ratio": None if flops is None else flops / whole.mean("flops"),
        "aspect": max(case["rows"], case["cols"]) / short,
        **_break_evens(case, short),
        "model_bytes": count * sent,
        "model_flops": None if flops is None else count * flops,
    }


def of_layout(case: Case, layout: str) -> Loads:
    """Return what every rank does: owner for as many matrices as ranks, periodic in as many steps as a period has."""
    from muon_lab.cost.volume import layout as equal
    from muon_lab.parallel import volume
    from muon_lab.parallel.grid import even

    shape, tp, dtype = (case["rows"], case["cols"]), case["tp"], case["dtype"]
    cut = even(shape[case["dim"]], tp, case["dim"])
    share = {"owner": tp, "periodic": case["period"]}.get(layout, 1)

    def made(rank: int) -> "tuple[Call, ...]":
        if layout == "owner":
            return equal("owner", shape, cut, rank, dtype, count=tp)
        if layout == "periodic":
            return volume.periodic((), volume.duplicated(shape, cut, rank, dtype), share, share)
        if layout == "factors":  # SOAP and REKLS work in at least float32
            return volume.factors(shape, cut, rank, volume.summed(dtype))
        extra = {"steps": case["steps"], "wire": _wire(case)} if layout == "distributed" else {}
        return getattr(volume, layout)(shape, cut, rank, dtype, **extra)

    volumes = [volume.Volume(made(rank), rank, case["algorithm"]) for rank in range(tp)]
    norms = [replace(one, made=tuple(filter(_of_norm, one.made))) for one in volumes]
    return Loads(
        [one.sent for one in volumes],
        [one.logical for one in volumes],
        [one.sent for one in norms],
        [one.calls for one in volumes],
        _flops(case, layout, shape, cut),
        share,
    )


def _of_norm(call: "Call") -> bool:
    """Return whether a call sums the squares of a norm, in three ranges."""
    return call.op == "sum" and call.dtype == "float64" and call.shape[:1] == (3,) and call.shape[-2:] == (1, 1)


def _wire(case: Case) -> str | None:
    return None if case["wire"] in (None, "same") else case["wire"]


def _flops(case: Case, layout: str, shape: Sequence[int], cut: "Placement") -> list[float]:
    """Return the flops of every rank; nothing for factors, where those of decompositions dominate."""
    from muon_lab.parallel import volume

    if case["layout"] == "factors":
        return []
    coefficients = [QUINTIC] * case["steps"]

    def by_rank(name: str) -> list[float]:
        return [volume.flops(name, shape, cut, rank, coefficients) for rank in range(cut.tp)]

    if layout == "periodic":
        both = zip(by_rank("duplicated"), by_rank("blockwise"), strict=True)
        return [whole + (case["period"] - 1) * block for whole, block in both]
    return by_rank(layout)


def _busiest(case: Case, loads: Loads, whole: Loads) -> float:
    """Return the flops of the rank that has most in one step: an owner has a whole matrix, as has all of periodic."""
    return whole.most("flops") if case["layout"] in ("owner", "periodic") else loads.most("flops")


def _break_evens(case: Case, short: int) -> dict[str, float | None]:
    """Return the ratios of axes at which others send as much; nothing where their line is not that of rings."""
    from muon_lab.parallel import volume

    if case["algorithm"] != "ring" or case["layout"] not in volume.WORK:
        return {}
    across = case["tp"] > 1 and (case["rows"], case["cols"])[case["dim"]] < max(case["rows"], case["cols"])

    def line(layout: str) -> "Line":
        extra = {"steps": case["steps"], "wire": _wire(case), "across": across}
        return volume.line(layout, short, case["tp"], case["dtype"], **extra)

    found = {
        f"beats_{other}": volume.break_even(line(case["layout"]), line(other)) for other in ("duplicated", "owner")
    }
    return {name: ratio if isfinite(ratio) else None for name, ratio in found.items()}


STUDY = Study(
    name="volume",
    question="What does a tensor-parallel layout send and compute, for a matrix or for a model?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="sent_bytes",
    group=("model", "layout", "tp", "dtype", "steps"),
    settle=settle,
    measure=measure,
    work=lambda case: 1e3 * case["tp"] ** 2,
    facts=("layer",),
)
