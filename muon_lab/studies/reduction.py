r"""What does summing Gram matrices in few bits do, and what does summing them in float32 save?

`distributed` sums the Gram matrices of shards, :math:`R = \sum_r X_r X_r^T`, in every step. Before a sum in bfloat16
each part is rounded, and on its way over p ranks the sum is rounded again at every hop:

========  ==================================================================  =========================================
sums      what is rounded                                                     bytes on the way
========  ==================================================================  =========================================
hops      every part, and the sum at every hop: an all_reduce                 :math:`2 (p-1)/p\, k^2 b`
once      every part, and the sum once: each rank adds its rows of R in       the same (all_to_all, then all_gather)
          float64
wide      the sum once: parts travel and are added in the next wider dtype    twice as many
========  ==================================================================  =========================================

All three end in R in the dtype of the iteration, of which a single rank rounds each entry once too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from muon_lab.nearest import unknown
from muon_lab.studies import assembled, methods, sources
from muon_lab.studies.study import Case, Column, Ended, Metrics, Study, svd_flops

if TYPE_CHECKING:
    import torch

    from muon_lab.parallel.collectives import Collectives
    from muon_lab.parallel.grid import Placement
    from muon_lab.parallel.sharded import Sharded

SUMS = ("hops", "once", "wide")

#: The dtype in which `wide` adds.
WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}

#: As `orders.ORDERS`, without importing torch.
ORDERS = ("ring", "rank", "tree")


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    source: tuple[str, ...] = ("gaussian",)
    """`recorded[:PATTERN]`, a named spectrum such as gaussian, or `file[:PATTERN]` with --matrices."""
    rows: tuple[int, ...] = (64,)
    """Rows of planted matrices."""
    cols: tuple[int, ...] = (256,)
    """Columns of planted matrices."""
    seed: tuple[int, ...] = (0,)
    """Draws of planted matrices."""
    tp: tuple[int, ...] = (1, 2, 4, 8)
    """Number of ranks over which the long axis is cut."""
    sums: tuple[str, ...] = SUMS
    """hops, once or wide."""
    order: tuple[str, ...] = ("ring",)
    """The order of the sum: ring (that of gloo), rank or tree (hops and wide)."""
    method: tuple[str, ...] = ("quintic",)
    """A schedule."""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule."""
    dtype: tuple[str, ...] = ("bfloat16",)
    """The dtype in which the iteration keeps its numbers: bfloat16, float16 or float32."""


COLUMNS = (
    Column("gram_error", "1", "‖R − XXᵀ‖/‖XXᵀ‖ for the Gram matrix of the first step"),
    Column("gram_single", "1", "the same of a single rank"),
    Column("update_error", "1", "‖B − U‖/‖U‖, U what the same steps give in float64"),
    Column("update_single", "1", "the same of a single rank"),
    Column("gram_ratio", "1", "gram_error over gram_single"),
    Column("update_ratio", "1", "update_error over update_single"),
    Column("layout_relative", "1", "‖B − B₁‖/‖B₁‖, B₁ the update of a single rank"),
    Column("sent_bytes", "B", "bytes that a rank sends for one sum by rings"),
)


def settle(point: Mapping[str, Any], file: sources.File | None) -> Iterator[Case]:
    """Yield the cases of one point of the grid."""
    for name, known in (("sums", SUMS), ("order", ORDERS), ("dtype", tuple(WIDER))):
        if point[name] not in known:
            raise unknown(name, point[name], known)
    assembled.placed("even", 0, point["tp"], 0)  # raises for a tp that is none
    steps = methods.settle(point["method"], point["steps"])
    assembled.check("distributed", point["method"], steps, point["tp"])
    how = {name: point[name] for name in ("tp", "sums", "method", "dtype")}
    how["order"] = None if point["sums"] == "once" else point["order"]
    for case in sources.settle(point["source"], point["rows"], point["cols"], point["seed"], file):
        yield {**case, **how, "steps": steps}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import torch

    from muon_lab import polar
    from muon_lab.parallel.algorithms import total
    from muon_lab.parallel.calls import all_reduce

    G = torch.tensor(sources.matrix(case), dtype=torch.float32)
    G = G if G.shape[0] <= G.shape[1] else G.mT.contiguous()
    schedule = methods.parse(case["method"], case["steps"]).schedule
    truth = polar.newton_schulz(schedule)(G.double())
    R, B = summed(case, G, case["tp"])
    single_R, single_B = summed(case | {"sums": "hops"}, G, 1)
    if not (torch.isfinite(B).all() and torch.isfinite(single_B).all()):
        raise Ended("nonfinite", "the update is not finite")
    X = methods.cast(G, case["dtype"]).double()
    errors = {
        "gram_error": _distance(R, X @ X.mT),
        "gram_single": _distance(single_R, X @ X.mT),
        "update_error": _distance(B, truth),
        "update_single": _distance(single_B, truth),
    }
    dtype = WIDER[case["dtype"]] if case["sums"] == "wide" else case["dtype"]
    return {
        **errors,
        "gram_ratio": _ratio(errors["gram_error"], errors["gram_single"]),
        "update_ratio": _ratio(errors["update_error"], errors["update_single"]),
        "layout_relative": _distance(B, single_B.double()),
        "sent_bytes": total(all_reduce(R.shape, dtype, case["tp"])) / case["tp"],
    }


def summed(case: Case, G: "torch.Tensor", tp: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the Gram matrix of the first step and the update of a wide matrix whose columns are cut over ranks."""
    import torch

    from muon_lab.parallel import worlds

    cut = assembled.placed("even", G.shape[-1], tp, 1)
    order = case["order"] or "float64"
    results = worlds.run(partial(_rank, case, G, cut), tp, order=order)
    return results[0][0], torch.cat([update for _, update in results], -1)


def _rank(case: Case, G: "torch.Tensor", cut: "Placement", world: "Collectives") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return what one rank has of both."""
    from muon_lab import polar
    from muon_lab.parallel.sharded import filled

    shard = cut.shard(G, world.rank)
    policy = _policy(case, world, shard.shape[-1])
    schedule = methods.parse(case["method"], case["steps"]).schedule
    X = methods.cast(G, case["dtype"])
    R = policy.gram(cut.shard(X, world.rank))
    return R, policy.there(polar.newton_schulz(schedule, policy)(filled(shard, shard.shape[-2])))


def _policy(case: Case, world: "Collectives", columns: int) -> "Sharded":
    """Return the arithmetic of a shard."""
    from muon_lab.arithmetic import Exact
    from muon_lab.parallel.sharded import Sharded

    inner = Exact(methods.dtype_named(case["dtype"]))
    if case["sums"] != "wide":
        return Sharded(inner, world, columns)
    wider = methods.dtype_named(WIDER[case["dtype"]])

    class Wide(Sharded):
        def gram(self, X: "torch.Tensor") -> "torch.Tensor":
            part = Exact(wider).gram(self.there(X).to(wider))
            return self.collectives.all_reduce(part).wait().to(X.dtype)

    return Wide(inner, world, columns)


def _distance(X: "torch.Tensor", truth: "torch.Tensor") -> float:
    size = float(truth.norm())
    return float((X.double() - truth).norm()) / size if size else float(X.double().norm())


def _ratio(error: float, single: float) -> float | None:
    return error / single if single else None


STUDY = Study(
    name="reduction",
    question="What does summing Gram matrices in few bits do, and what does summing them in float32 save?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="gram_ratio",
    group=("sums", "tp", "dtype", "source"),
    settle=settle,
    measure=measure,
    work=lambda case: 4 * svd_flops(case["rows"], case["cols"]),
    facts=sources.FACTS,
)
