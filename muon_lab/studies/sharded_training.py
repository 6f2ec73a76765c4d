r"""What does a tensor-parallel layout do to training, and is the update rule still independent of the number of ranks?

The hidden matrices of the small GPT are cut as Megatron-LM does: queries, keys, values and the up-projection along
their rows, the output projections along their columns, which are seen transposed here so that every cut is one of rows.
Each of queries, keys and values is a matrix. `duplicated` and `owner`, which is the same to the bit, and sums of Gram
matrices run on ranks of this process; `blockwise` takes shards for matrices of their own, with the factor of the whole
shape, and with the step size corrected to the norm of whole updates where asked; `periodic` does so between steps of
the whole matrix. SOAP and REKLS are `duplicated` by gathered factors, and `blockwise` as optimizers of the shards.

Losses are compared with those of one rank from the same start on the same batches; whether the rule is that of one
rank at all is asked with equal gradients (`replay`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from muon_lab.nearest import unknown
from muon_lab.studies import assembled, convergence, methods
from muon_lab.studies.study import Case, Column, Ended, LeftOut, Metrics, Study

if TYPE_CHECKING:
    import torch

    from muon_lab.optim.matrices import View
    from muon_lab.parallel.grid import Placement
    from muon_lab.polar import Orthogonalizer
    from muon_lab.studies.descent import Descent, Maker, Problem

OPTIMIZERS = ("muon", "mop", "soap", "rekls")

#: Those with a direction: an orthogonalizer.
DIRECTED = ("muon", "mop")

#: Layouts of those without.
FACTORED = ("duplicated", "blockwise")

#: The step size of blocks: that of whole updates, or corrected to their norm.
STEP_SIZES = ("plain", "corrected")

#: Layouts that take shards for matrices of their own.
BLOCKS = ("blockwise", "periodic")

#: Steps whose gradients are given to the rule on one rank and on many.
REPLAYED = 4


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    problem: tuple[str, ...] = ("gpt_small",)
    """gpt, gpt_small, gpt_noisy, quadratic or factorization (see studies.descent)."""
    optimizer: tuple[str, ...] = ("muon",)
    """muon, mop, soap or rekls, of the hidden matrices."""
    layout: tuple[str, ...] = ("duplicated", "distributed", "gram", "blockwise", "periodic")
    """duplicated, distributed, gram, owner, blockwise or periodic; duplicated or blockwise for soap and rekls."""
    tp: tuple[int, ...] = (1, 2, 4)
    """Number of tensor-parallel ranks."""
    step_size: tuple[str, ...] = ("plain", "corrected")
    """plain or corrected: whether the step size of blocks makes up for their norm (blockwise and periodic)."""
    period: tuple[int, ...] = (5,)
    """periodic: one step in so many takes the whole matrix."""
    method: tuple[str, ...] = ("quintic",)
    """The direction of muon: a schedule, svd … (see studies.methods)."""
    steps: tuple[int, ...] = (5,)
    """Steps of the schedule (muon)."""
    lr: tuple[float, ...] = (0.01,)
    """The learning rate of the hidden matrices."""
    updates: tuple[int, ...] = (60,)
    """Steps of training."""
    seed: tuple[int, ...] = (0,)
    """Seeds the start and the batches."""


COLUMNS = (
    Column("loss", "nat/byte or 1", "loss after the last step: on validation text, or of the whole matrix problem"),
    Column("loss_gap", "nat/byte or 1", "loss less that of one rank"),
    Column(
        "training_gap", "nat/byte or 1", "training loss less that of one rank, means over the last tenth of the steps"
    ),
    Column("loss_0", "nat/byte or 1", "loss at the start"),
    *(
        Column(name, "nat/byte or 1", f"loss after {name.removeprefix('loss_')} % of the steps")
        for name in convergence.CURVE
    ),
    Column("tp_invariant", "count", "1 if the rule is that of one rank but for rounding, else 0"),
    Column(
        "deviation", "1", "largest relative distance of a matrix's change to that on one rank, given equal gradients"
    ),
    Column("rounding", "1", "the same of one rank in float32 to one in float64"),
    Column("update_rms", "1", "root mean square of the change of a hidden matrix in a step"),
    Column("update_spectral", "1", "largest singular value of that change"),
    Column("alignment", "1", "cosine of that change, negative, to the exact polar factor of the averaged gradient"),
    Column("failed_step", "count", "first step that is not finite"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid; None for what does not matter, whose values must be right too."""
    known = {"problem": convergence.SHAPES, "optimizer": OPTIMIZERS, "step_size": STEP_SIZES}
    for name, names in known.items():
        if point[name] not in names:
            raise unknown(name, point[name], names)
    lr, optimizer, layout = float(point["lr"]), point["optimizer"], point["layout"]
    if not 0 < lr < 1e3:
        raise ValueError(f"lr must lie above 0 and below 1000, not {lr!r}")
    if point["updates"] < 10 or point["period"] < 1:
        raise ValueError(f"updates must be at least 10 and period 1, not {point['updates']} and {point['period']}")
    assembled.placed("even", 0, point["tp"], 0)  # raises for a tp that is none
    steps = methods.settle(point["method"], point["steps"])
    method, steps = (point["method"], steps) if optimizer == "muon" else ("svd", None)
    assembled.check(layout, method, steps, point["tp"])
    if optimizer not in DIRECTED and layout not in FACTORED:
        raise LeftOut(f"{optimizer} has the layouts {', '.join(FACTORED)}, and not {layout}")
    unused = {
        "period": layout != "periodic",
        "step_size": layout not in BLOCKS or optimizer not in DIRECTED,
        "method": optimizer != "muon",
    }
    case = {**point, "lr": lr, "method": method, "steps": steps}
    yield case | {name: None for name, idle in unused.items() if idle}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import torch

    from muon_lab.studies import replay
    from muon_lab.studies.descent import descend

    clock = Clock()
    run = descend(problem(case), maker(case, torch.float32, clock), case["updates"], after=lambda _: clock.tick())
    whole = _whole(tuple(sorted((name, case[name]) for name in WHOLE)))
    metrics = _metrics(run, whole)
    if run.failed is not None:
        raise Ended("nonfinite", f"step {run.failed} is not finite", metrics)
    if run.curve[-1] > convergence.HOLDS * run.start:
        raise Ended("diverged", f"the loss went from {run.start:.3g} to {run.curve[-1]:.3g}", metrics)
    single = case | {"tp": 1}
    kept = replay.kept(problem(case), maker(single, torch.float32, Clock()), REPLAYED)
    blocks = Clock(step=1)  # of periodic, a step that is none of the whole matrix
    verdict = replay.verdict(
        kept, lambda dtype: maker(single, dtype, Clock()), lambda dtype: maker(case, dtype, blocks)
    )
    return {
        **metrics,
        "tp_invariant": int(verdict.invariant),
        "deviation": verdict.deviation,
        "rounding": verdict.rounding,
    }


#: What a run on one rank depends on, and what makes one of it.
WHOLE = ("problem", "optimizer", "method", "steps", "lr", "updates", "seed")
ALONE: dict[str, Any] = {"layout": "duplicated", "tp": 1, "step_size": None, "period": None}


@lru_cache(maxsize=4)  # neighbouring cases of a grid share it
def _whole(settings: tuple[tuple[str, Any], ...]) -> "Descent":
    """Return the run on one rank."""
    import torch

    from muon_lab.studies.descent import descend

    case = dict(settings) | ALONE
    return descend(problem(case), maker(case, torch.float32, Clock()), case["updates"])


def _metrics(run: "Descent", whole: "Descent") -> dict[str, float | int | None]:
    ended = run.failed is None and whole.failed is None
    last = -(-len(run.losses) // 10)
    looks = {"update_rms": "rms", "update_spectral": "spectral", "alignment": "alignment"}
    return {
        **dict(zip((*convergence.CURVE, "loss"), run.curve, strict=False)),
        "loss_0": run.start,
        "loss_gap": run.curve[-1] - whole.curve[-1] if ended else None,
        "training_gap": (sum(run.losses[-last:]) - sum(whole.losses[-last:])) / last if ended else None,
        **{column: _middle([getattr(look, name) for look in run.looks]) for column, name in looks.items()},
        "failed_step": run.failed,
    }


def _middle(values: list[float]) -> float | None:
    from statistics import median

    return median(values) if values else None


@dataclass
class Clock:
    """The number of the step, counted from 0, which `periodic` needs."""

    step: int = 0

    def tick(self) -> None:
        """Go on to the next step."""
        self.step += 1


def problem(case: Case) -> "Problem":
    """Return the problem of a case, its hidden matrices seen so that all are cut along their rows."""
    from dataclasses import replace

    from muon_lab.optim import matrices
    from muon_lab.studies.descent import PROBLEMS

    found = PROBLEMS[case["problem"]](case["seed"])
    if case["problem"] not in convergence.BYTES:
        return found
    width = convergence.SHAPES[case["problem"]][1][0]
    views = {
        "*.qkv.weight": matrices.fused(width, width, width),
        "*.out.weight": matrices.TRANSPOSED,
        "*.down.weight": matrices.TRANSPOSED,
    }
    return replace(found, views=views)


def maker(case: Case, dtype: "torch.dtype", clock: Clock) -> "Maker":
    """Return what makes the optimizer of the hidden matrices in a layout, which computes in a dtype."""
    from functools import partial

    from muon_lab import optim

    lr, name = case["lr"], str(dtype).removeprefix("torch.")
    if case["optimizer"] == "muon":
        return partial(optim.Muon, lr=lr, scale="match_rms_adamw", direction=_direction(case, name, clock))
    if case["optimizer"] == "mop":
        return partial(optim.MOP, lr=lr, extra=convergence.MOP_FACTOR, direction=_direction(case, name, clock))
    rules: dict[str, Maker] = {
        "soap": partial(_on_ranks(optim.SOAP, case["tp"]), lr=lr, first_step="skip", frequency=convergence.FREQUENCY),
        "rekls": partial(_on_ranks(optim.REKLS, case["tp"]), lr=lr, first_step="skip", start=1.0),
    }
    if case["layout"] == "duplicated":
        return rules[case["optimizer"]]
    alone: dict[str, Maker] = {
        "soap": partial(optim.SOAP, lr=lr, first_step="skip", frequency=convergence.FREQUENCY),
        "rekls": partial(optim.REKLS, lr=lr, first_step="skip", start=1.0),
    }
    return lambda groups: alone[case["optimizer"]](_of_shards(groups, case["tp"]))


def _direction(case: Case, dtype: str, clock: Clock) -> "Orthogonalizer":
    """Return the orthogonalizer of whole matrices that is the layout."""
    from muon_lab.parallel import layouts

    layout, tp = case["layout"], case["tp"]
    method, steps = case["method"] or "svd", case["steps"]

    def on_rows(kind: str) -> "Orthogonalizer":
        return lambda C: assembled.whole(kind, method, steps, dtype, _rows(C, tp))(C)

    def blocks(C: "torch.Tensor") -> "torch.Tensor":
        update = on_rows("blockwise")(C)
        return update * layouts.correction(tuple(C.shape), _rows(C, tp)) if case["step_size"] == "corrected" else update

    if layout == "blockwise":
        return blocks
    if layout == "periodic":
        return lambda C: blocks(C) if clock.step % case["period"] else on_rows("duplicated")(C)
    return on_rows(layout)


def _rows(C: "torch.Tensor", tp: int) -> "Placement":
    return assembled.placed("even", C.shape[-2], tp, 0)


def _on_ranks(kind: Any, tp: int) -> Any:
    """Return an optimizer, SOAP or REKLS, whose steps are taken by ranks that keep their state in parts."""
    import torch

    from muon_lab.parallel import factors, worlds
    from muon_lab.parallel.collectives import Collectives

    @dataclass(frozen=True)
    class OnRanks:
        rule: Any

        def begin(self, W: torch.Tensor) -> Any:
            return self.rule.begin(W)

        def advance(self, W: torch.Tensor, G: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
            cut = _rows(W, tp)

            def rank(world: Collectives) -> tuple[torch.Tensor, Any]:
                own = factors.gathered(self.rule, world, cut)
                shard, after = own.advance(cut.shard(W, world.rank), cut.shard(G, world.rank), own.parts(state))
                return shard, own.whole(after, W.shape)

            results = worlds.run(rank, tp)
            return torch.cat([shard for shard, _ in results], cut.axis), results[0][1]

    class Ranked(kind):  # type: ignore[misc]
        def rule(self, settings: Mapping[str, Any]) -> Any:
            return OnRanks(super().rule(settings))

    return Ranked


def _of_shards(groups: list[dict[str, Any]], tp: int) -> list[dict[str, Any]]:
    """Return groups whose matrices are the shards: every rank has an optimizer of its own for them."""
    return [
        {**group, "params": [(name, weight)], "view": _cut(group.get("view"), weight, tp)}
        for group in groups
        for name, weight in group["params"]
    ]


def _cut(view: "View | None", weight: "torch.Tensor", tp: int) -> "View":
    """Return the view of a weight with each of its matrices cut along its rows."""
    from dataclasses import replace

    from muon_lab.optim.matrices import FLATTENED

    view = FLATTENED if view is None else view
    rows = [m for _, m, _ in view.shapes(weight.shape)]
    shards = [size for m in rows for size in assembled.placed("even", m, tp, 0).sizes if size]
    return replace(view, blocks=tuple(shards))


def work(case: Case) -> float:
    """Estimate the flops of a case: loss and gradient, and those of one rank beside it."""
    return 2.0 * case["updates"] * convergence.GRADIENT[case["problem"]]


STUDY = Study(
    name="sharded_training",
    question="What does a tensor-parallel layout do to training, and is the update rule independent of tp?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="loss_gap",
    group=("layout", "tp", "step_size", "optimizer", "problem"),
    settle=settle,
    measure=measure,
    work=work,
)
