r"""Which layout for which layer of a model on a cluster, who owns what, and what the optimizer's step costs.

Each class of equal matrices is priced in every layout that leaves its update as it is, and gets the quickest. A rank's
seconds for it are

.. math:: t = \frac{flops}{rate} + t_{tp} + t_{dp},

its products, what its layout asks of the tensor-parallel group, and its part of the gather of new weights. Matrices are
owned, whole or as shards, by one of the ranks that replicate them (layer-wise data parallelism), and dealt by the
largest first on the cost of their layout. Classes are priced, never single matrices; only the dealing looks at each.

What a number is of: per layer, the rank that has most of that class, in the pipeline stage that has most; in totals,
the rank that has most of everything, in the slowest stage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from operator import mul
from typing import Any, NamedTuple, TypeAlias

from muon_lab.cost import flops, inventory, network, own, volume
from muon_lab.cost.inventory import Held, Model
from muon_lab.cost.network import Cluster
from muon_lab.nearest import unknown
from muon_lab.parallel import balance, calls
from muon_lab.parallel.calls import ITEMSIZE, Call
from muon_lab.parallel.grid import Grid, Placement, even
from muon_lab.parallel.volume import Volume

#: Layouts of shards that give the update of the whole matrix in the format of the rate, and what else is shown beside.
CHOSEN = ("duplicated", "distributed", "owner")
BESIDE = ("gram", "blockwise", "periodic")

#: Layouts of shards, and those in which all replicas take part alike, so that nobody owns a matrix.
SHARDED, SHARED = (*CHOSEN, *BESIDE), ("split", "replicated", "elementwise")

#: Why a layout is shown and not chosen.
REASONS = {
    "gram": "its products are in float32, whose rate is not the one given",
    "blockwise": "another update",
    "periodic": "another update in all steps but one of its period",
}

ALONE = "quicker for this layer alone, and slower for the stage"

#: Bytes an entry that a rank keeps of what it owns: master weights and one momentum, or two moments, in float32.
MUON_STATE, ADAM_STATE = 8, 12

#: Steps between two of a whole matrix, in the periodic layout (Megatron-LM has none; MuonBP, 2025, uses 5).
PERIOD = 5

#: Tokens a GPU and step where none are given: 4096 sequences of 4096 on 256 GPUs (Megatron-Bridge, Kimi K2 on GB300).
TOKENS = 65_536

#: What the model's own products are assumed to reach of the rate of large ones.
UTILIZATION = 0.5


@dataclass(frozen=True)
class Setting:
    """How the optimizer works, and what is assumed of the training step around it.

    Parameters
    ----------
    steps, degree : int
        Newton-Schulz steps, of degree 5 or 3.
    kernel : {"gemm", "syrk"}
        Whether products with a symmetric result are halved.
    weight, gradient, wire : str
        Dtypes of the weights that are gathered, of gradients, and of what layouts send.
    gather : {"exact", "padded"}
        Parts of the weights as long as they are, or as long as the longest.
    overlap : bool
        Whether the gather of weights is hidden behind the next forward pass, a third of the step.
    rate : float, optional
        Flops a second of a rank's products; that of the cluster by default.
    tokens : int, optional
        Tokens a step; 65,536 a rank by default.
    step : float, optional
        Seconds of a training step without the optimizer; estimated from tokens by default.
    """

    steps: int = 5
    degree: int = 5
    kernel: str = "gemm"
    weight: str = "bfloat16"
    gradient: str = "float32"
    wire: str = "bfloat16"
    gather: str = "exact"
    overlap: bool = True
    rate: float | None = None
    tokens: int | None = None
    step: float | None = None

    def __post_init__(self) -> None:
        for name, known in (("kernel", flops.KERNELS), ("gather", volume.GATHERS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        for name in ("weight", "gradient", "wire"):
            if getattr(self, name) not in calls.FLOATS:
                raise unknown(f"dtype of {name}", getattr(self, name), calls.FLOATS)
        if self.degree not in (3, 5):
            raise ValueError(f"degree of a step must be 3 or 5, not {self.degree}")
        for name in ("steps", "rate", "tokens", "step"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")


@dataclass(frozen=True)
class Choice:
    """A layout of a class of matrices, and what a rank takes for it.

    Attributes
    ----------
    layout : str
        Of shards: one of `CHOSEN` and `BESIDE`. Of whole matrices: "layerwise"; "split" where all replicas cut each
        matrix and sum its Gram matrices (distributed); "replicated" where every replica does the same; "local" where
        there is but one. "elementwise" for what AdamW has.
    flops : float
        Of its products.
    sent : int
        Bytes that it sends, without the gradients that a reduce_scatter brings.
    memory : int
        Bytes of weights, gradients and optimizer state.
    compute, exchange, gather : float
        Seconds of products, of what a layout sends, and for new weights (or whole gradients).
    reason : str
        Why it cannot be chosen; "" if it can.
    """

    layout: str
    flops: float
    sent: int
    memory: int
    compute: float
    exchange: float
    gather: float
    reason: str = ""

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        return self.compute + self.exchange + self.gather

    def row(self) -> dict[str, Any]:
        """Return it for JSON."""
        content = {"layout": self.layout, "bytes": self.sent, "flops": self.flops, "seconds": self.seconds}
        content |= {"memory": self.memory, "compute_seconds": self.compute, "exchange_seconds": self.exchange}
        content["gather_seconds"] = self.gather
        return content | ({"not_chosen": self.reason} if self.reason else {})


@dataclass(frozen=True)
class Planned:
    """A class of matrices with its layout and the others."""

    held: Held
    stage: int
    chosen: Choice
    others: tuple[Choice, ...]

    def row(self) -> dict[str, Any]:
        """Return it for JSON."""
        layer = self.held.layer
        content = {"name": layer.name, "role": layer.role, "shape": list(layer.shape), "count": layer.count}
        content |= {"held": self.held.count, "shard": list(self.held.shard), "replicas": self.held.replicas}
        return content | self.chosen.row() | {"alternatives": [other.row() for other in self.others]}


@dataclass(frozen=True)
class Deal:
    """Who owns what, in one group of a stage.

    Attributes
    ----------
    stage : int
        The pipeline stage.
    group : str
        "dense" or "expert".
    names : tuple of str
        Of the class of each matrix.
    owners : tuple of int
        The replica that owns each.
    classes : tuple of str
        The classes that are dealt.
    owned : tuple of tuple of int
        How many of a class each replica owns.
    loads, flops, exchange : tuple of float
        Seconds of a rank of each replica, its flops, and the seconds of what its layouts send.
    entries : tuple of int
        Entries of weights that a rank of each replica owns.
    stride : int
        How many ranks lie between neighbours.
    """

    stage: int
    group: str
    names: tuple[str, ...] = field(repr=False)
    owners: tuple[int, ...] = field(repr=False)
    classes: tuple[str, ...]
    owned: tuple[tuple[int, ...], ...] = field(repr=False)
    loads: tuple[float, ...] = field(repr=False)
    flops: tuple[float, ...] = field(repr=False)
    exchange: tuple[float, ...] = field(repr=False)
    entries: tuple[int, ...] = field(repr=False)
    stride: int

    @property
    def busiest(self) -> int:
        """The replica that takes longest."""
        return max(range(len(self.loads)), key=self.loads.__getitem__)

    def row(self) -> dict[str, Any]:
        """Return it for JSON: replicas that own alike stand together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, column in enumerate(zip(*self.owned, strict=True)):
            alike.setdefault(column, []).append(rank)
        return {
            "stage": self.stage,
            "group": self.group,
            "replicas": len(self.loads),
            "policy": "lpt_flops",
            "seconds_max_over_mean": _spread(self.loads),
            "flops_max_over_mean": _spread(self.flops),
            "entries_max_over_mean": _spread(self.entries),
            "idle": sum(1 for load in self.loads if not load),
            "owned": [
                {"replicas": ranks, "matrices": _counted(self.classes, column)} for column, ranks in alike.items()
            ],
        }


#: The classes of a stage with the layout of each.
Picked: TypeAlias = Sequence[tuple[Held, Choice]]


@dataclass(frozen=True)
class Stage:
    """A pipeline stage whose layouts and owners are settled, and what its busiest rank takes."""

    number: int
    picked: tuple[tuple[Held, Choice], ...]
    deals: tuple[Deal, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """What a step of the optimizer takes, layer by layer and in all."""

    model: Model
    cluster: Cluster
    grid: Grid
    setting: Setting
    layers: tuple[Planned, ...]
    deals: tuple[Deal, ...]
    totals: Mapping[str, Any]
    assumptions: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Return it as one JSON object without infinities."""
        return {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "grid": {**asdict(self.grid), "gpus": self.grid.size},
            "setting": asdict(self.setting),
            "layers": [layer.row() for layer in self.layers],
            "totals": dict(self.totals),
            "ownership": [deal.row() for deal in self.deals],
            "assumptions": list(self.assumptions),
        }


def plan(
    model: Model | str, cluster: Cluster | str, grid: Grid, setting: Setting | None = None, *, expert_tp: int = 1
) -> Plan:
    """Plan the optimizer's step.

    Parameters
    ----------
    model, cluster : Model and Cluster, or their names or files
        As `own.read` and `network.preset` know them; a cluster's file ends in ``.toml``.
    grid : Grid
        Data, tensor, pipeline and expert parallelism.
    setting : Setting, optional
        How the optimizer works.
    expert_tp : int
        1 for whole experts, or ``grid.tp``.

    Raises
    ------
    ValueError
        For an unknown name, parallelism that does not divide the model, or a cluster without a rate of products where
        the setting gives none.

    Examples
    --------
    >>> found = plan("qwen3-30b-a3b", "gb300-nvl72", Grid(dp=8, ep=8))
    >>> [(layer.held.layer.name, layer.chosen.layout) for layer in found.layers if layer.held.layer.expert]
    [('experts.gate', 'local'), ('experts.up', 'local'), ('experts.down', 'local')]
    >>> round(1e3 * found.totals["optimizer_seconds"])
    40
    """
    model = own.read(model) if isinstance(model, str) else model
    cluster = named(cluster) if isinstance(cluster, str) else cluster
    setting = Setting() if setting is None else setting
    rate = setting.rate or cluster.rate
    if not rate:
        raise ValueError(f"cluster {cluster.name!r} has no rate of products, so a rate must be given")
    pricing = _Pricing(cluster, grid, setting, rate)
    stages = _stages(pricing, [inventory.held(model, grid, stage, expert_tp) for stage in range(grid.pp)])
    slowest = max(stages, key=lambda stage: stage.seconds["optimizer_seconds"])
    totals = _totals(model, pricing, slowest)
    layers = _planned(pricing, stages)
    return Plan(model, cluster, grid, setting, layers, slowest.deals, totals, _assumptions(pricing, model, totals))


def named(cluster: str) -> Cluster:
    """Return a cluster by the name of a preset, or from a TOML file."""
    return network.read(cluster) if cluster.endswith(".toml") else network.preset(cluster)


_GROUPS = ("dense", "expert")


def _group(part: Held) -> str:
    if part.layer.excluded:
        return "rest"
    return "expert" if part.layer.expert else "dense"


def _stages(pricing: "_Pricing", held: Sequence[tuple[Held, ...]]) -> tuple[Stage, ...]:
    """Settle each stage; stages that have the same are settled once."""
    known: dict[tuple[tuple[str, int], ...], Stage] = {}
    for stage, parts in enumerate(held):
        key = tuple((part.layer.name, part.count) for part in parts)
        if key not in known:
            known[key] = pricing.settled(stage, parts)
    return tuple(known.values())


def _planned(pricing: "_Pricing", stages: Sequence[Stage]) -> tuple[Planned, ...]:
    """Show every class in the stage that has most of it."""
    most: dict[str, tuple[Stage, Held, Choice]] = {}
    for stage in stages:
        for part, chosen in stage.picked:
            if part.layer.name not in most or part.count > most[part.layer.name][1].count:
                most[part.layer.name] = (stage, part, chosen)
    return tuple(
        Planned(part, stage.number, chosen, pricing.others(part, chosen.layout))
        for stage, part, chosen in most.values()
    )


class _Cost(NamedTuple):
    """What one matrix takes."""

    seconds: float
    flops: float
    exchange: float


def _order(choice: Choice) -> tuple[bool, float, int]:
    """Order layouts: those that may be chosen, the quickest, and of equals the one that sends least."""
    return bool(choice.reason), choice.seconds, choice.sent


@dataclass(frozen=True)
class _Pricing:
    """Prices of layouts on a cluster."""

    cluster: Cluster
    grid: Grid
    setting: Setting
    rate: float

    def others(self, part: Held, chosen: str) -> tuple[Choice, ...]:
        """Return the layouts that were not chosen, from the quickest on."""
        found = sorted(self.candidates(part), key=_order)
        limit = next(one.seconds for one in found if one.layout == chosen)
        return tuple(
            replace(one, reason=ALONE) if not one.reason and one.seconds < limit else one
            for one in found
            if one.layout != chosen
        )

    def candidates(self, part: Held) -> tuple[Choice, ...]:
        """Return all layouts of a class."""
        if part.layer.excluded:
            return (self.elementwise(part),)
        if part.placement is None:
            names = ("local",) if part.replicas == 1 else ("layerwise", "split", "replicated")
            return tuple(self.whole(part, name) for name in names)
        return tuple(self.cut(part, name) for name in (*CHOSEN, *BESIDE))

    def elementwise(self, part: Held) -> Choice:
        """Return what AdamW's weights take, element-wise sharded."""
        gather = volume.elementwise(part.parameters, part.replicas, weight=self.setting.weight)[1:]
        memory = part.parameters * self.kept + part.parameters // part.replicas * ADAM_STATE
        return Choice("elementwise", 0.0, Volume(gather, 0).sent, memory, 0.0, 0.0, self.priced(part, gather))

    def whole(self, part: Held, name: str) -> Choice:
        """Return what matrices take that each replica has whole."""
        most, shape = -(-part.count // part.replicas), part.layer.shape
        work, exchange, asked = most * self.work(part), 0.0, tuple[Call, ...]()
        gather, state = self.gathered(part), most
        if name == "replicated":  # everyone needs whole gradients, and nobody new weights
            work, state = part.count * self.work(part), part.count
            gather = (calls.all_gather((-(-part.parameters // part.replicas),), self.setting.gradient, part.replicas),)
        if name == "split":
            cut = even(max(shape), part.replicas, int(shape[0] < shape[1]))
            work = part.count * self.layout_work(shape, cut, "distributed")
            asked = volume.layout("distributed", shape, cut, 0, self.setting.wire, steps=self.setting.steps)
            exchange = part.count * self.priced(part, asked)
        sent = part.count * Volume(asked, 0).sent + Volume(gather, 0).sent
        return Choice(name, work, sent, self.memory(part, state), work / self.rate, exchange, self.priced(part, gather))

    def cut(self, part: Held, name: str) -> Choice:
        """Return what shards take in a layout; replicas deal them out, and each orthogonalizes its own."""
        assert part.placement is not None
        most, shape, cut = -(-part.count // part.replicas), part.layer.shape, part.placement
        wire = self.setting.wire
        batch = most if name == "owner" else 1
        together = volume.layout(name, shape, cut, 0, wire, count=batch, steps=self.setting.steps)
        times = 1.0 if name == "owner" else most / (PERIOD if name == "periodic" else 1)
        exchange = times * sum(self.cluster.seconds(call, stride=1) for call in together)
        sent = round(times * Volume(together, 0).sent)
        work = (-(-most // cut.tp) if name == "owner" else most) * self.layout_work(shape, cut, name)
        gather = self.gathered(part)
        return Choice(
            name,
            work,
            sent + Volume(gather, 0).sent,
            self.memory(part, most),
            work / self.rate,
            exchange,
            self.priced(part, gather),
            REASONS.get(name, ""),
        )

    def work(self, part: Held) -> float:
        """Return the flops of a whole matrix."""
        count = flops.newton_schulz if self.setting.degree == 5 else flops.cubic
        return count(*part.layer.shape, self.setting.steps, self.setting.kernel)

    def layout_work(self, shape: Sequence[int], cut: Placement, name: str) -> float:
        """Return the flops of a rank for one matrix of which it has a shard."""
        how = {"period": PERIOD, "degree": self.setting.degree}
        return flops.layout(name, shape, cut, 0, self.setting.steps, self.setting.kernel, **how)

    def mean_work(self, part: Held, name: str) -> float:
        """Return the flops of a rank for one matrix, in the mean over the ranks of its tensor-parallel group."""
        if part.placement is None:
            return self.work(part)
        return self.layout_work(part.layer.shape, part.placement, name) / (part.placement.tp if name == "owner" else 1)

    @property
    def kept(self) -> int:
        """Bytes an entry of a weight and its gradient."""
        return ITEMSIZE[self.setting.weight] + ITEMSIZE[self.setting.gradient]

    def memory(self, part: Held, owned: int) -> int:
        """Return the bytes of weights and gradients of a class, and of the state of the matrices that are owned."""
        return part.parameters * self.kept + owned * prod(part.shard) * MUON_STATE

    def gathered(self, part: Held) -> tuple[Call, ...]:
        """Return the gather of the new weights of a class, if replicas own alike."""
        owned = [count * prod(part.shard) for count in even(part.count, part.replicas, 0).sizes]
        return volume.weights(owned, 0, self.setting.weight, self.setting.gather) if part.replicas > 1 else ()

    def priced(self, part: Held, made: Iterable[Call]) -> float:
        """Return the seconds of calls among the replicas of a class."""
        return sum((self.cluster.seconds(call, self.stride(part)) for call in made), 0.0)

    def stride(self, part: Held) -> int:
        """Return how many ranks lie between neighbours among the replicas."""
        return max(1, self.grid.dp * self.grid.tp // part.replicas)

    def owned(self, picked: Picked, group: str) -> list[tuple[Held, Choice]]:
        """Return the classes of a group of which each matrix has one owner."""
        return [(part, one) for part, one in picked if _group(part) == group and one.layout not in SHARED]

    def dealt(self, stage: int, group: str, picked: Picked) -> Deal | None:
        """Deal the matrices that have one owner each, the dearest first."""
        mine = self.owned(picked, group)
        if not mine:
            return None
        replicas, stride = mine[0][0].replicas, self.stride(mine[0][0])
        per_matrix = [self.per_matrix(part, one) for part, one in mine]
        sizes = [prod(part.shard) for part, _ in mine]
        index = [place for place, (part, _) in enumerate(mine) for _ in range(part.count)]
        costs, entries = [per_matrix[place].seconds for place in index], [sizes[place] for place in index]
        owners = balance.lpt_flops(costs, replicas, entries).owners
        owned = [[0] * replicas for _ in mine]
        for place, owner in zip(index, owners, strict=True):
            owned[place][owner] += 1

        def summed(each: Sequence[float]) -> tuple[float, ...]:
            return tuple(sum(map(mul, each, column), 0.0) for column in zip(*owned, strict=True))

        return Deal(
            stage,
            group,
            tuple(mine[place][0].layer.name for place in index),
            owners,
            tuple(part.layer.name for part, _ in mine),
            tuple(map(tuple, owned)),
            summed([cost.seconds for cost in per_matrix]),
            summed([cost.flops for cost in per_matrix]),
            summed([cost.exchange for cost in per_matrix]),
            tuple(sum(map(mul, sizes, column)) for column in zip(*owned, strict=True)),
            stride,
        )

    def per_matrix(self, part: Held, chosen: Choice) -> _Cost:
        """Return what a rank takes for one matrix that it owns, in the mean over its tensor-parallel group."""
        exchange = chosen.exchange / -(-part.count // part.replicas)
        work = self.mean_work(part, chosen.layout)
        return _Cost(work / self.rate + exchange, work, exchange)

    def moved(self, deal: Deal, gather: str) -> tuple[Call, ...]:
        """Return the gather of the weights of a group from their owners."""
        return volume.weights(deal.entries, 0, self.setting.weight, gather) if len(deal.entries) > 1 else ()

    def gathering(self, deals: Sequence[Deal], gather: str) -> float:
        """Return the seconds of the gathers of all groups."""
        return sum(
            (self.cluster.seconds(call, deal.stride) for deal in deals for call in self.moved(deal, gather)), 0.0
        )

    def settled(self, stage: int, parts: Sequence[Held]) -> Stage:
        """Return a stage with owners for all matrices, but those classes split whose splitting shortens the whole."""
        best = [(part, min(self.candidates(part), key=_order)) for part in parts]
        start = [(part, self.whole(part, "layerwise") if one.layout == "split" else one) for part, one in best]
        found = self.stage(stage, start)
        for place, (part, one) in enumerate(best):
            if one.layout == "split":
                other = self.stage(stage, [*found.picked[:place], (part, one), *found.picked[place + 1 :]])
                found = min(found, other, key=lambda each: each.seconds["optimizer_seconds"])
        return found

    def stage(self, stage: int, picked: Picked) -> Stage:
        """Return a stage in given layouts: the seconds, flops and bytes of its busiest rank."""
        made = [self.dealt(stage, group, picked) for group in _GROUPS]
        deals = tuple(deal for deal in made if deal is not None)
        everyone = [one for _, one in picked if one.layout in SHARED]
        work = sum((one.flops for one in everyone), 0.0) + sum(deal.flops[deal.busiest] for deal in deals)
        exchange = sum((one.exchange for one in everyone), 0.0) + sum(deal.exchange[deal.busiest] for deal in deals)
        gather = self.gathering(deals, self.setting.gather) + sum((one.gather for one in everyone), 0.0)
        sent = sum(one.sent for one in everyone)
        sent += sum(Volume(self.moved(deal, self.setting.gather), 0).sent for deal in deals)
        sent += sum(one.sent - Volume(self.gathered(part), 0).sent for part, one in picked if one.layout in SHARDED)
        seconds = {
            "optimizer_seconds": work / self.rate + exchange + gather,
            "compute_seconds": work / self.rate,
            "exchange_seconds": exchange,
            "gather_seconds": gather,
            "flops": work,
            "bytes": sent,
        }
        return Stage(stage, tuple(picked), deals, seconds)

    def reduced(self, parts: Sequence[Held], how: str) -> float:
        """Return the seconds of bringing gradients to owners, or to everyone."""
        total = 0.0
        for replicas in {part.replicas for part in parts if part.replicas > 1}:
            alike = [part for part in parts if part.replicas == replicas]
            owned = even(sum(part.parameters for part in alike), replicas, 0).sizes
            total += self.priced(alike[0], volume.gradients(owned, self.setting.gradient, how))
        return total


def _totals(model: Model, pricing: _Pricing, stage: Stage) -> dict[str, Any]:
    parts, seconds = [part for part, _ in stage.picked], stage.seconds
    grid, setting = pricing.grid, pricing.setting
    step = setting.step or _step(model, pricing)
    hidden = step / 3 if setting.overlap else 0.0
    exposed = seconds["exchange_seconds"] + max(0.0, seconds["gather_seconds"] - hidden)
    visible = seconds["compute_seconds"] + exposed
    memory = sum(one.memory for _, one in stage.picked)
    matrices = [part for part in parts if not part.layer.excluded]
    local = sum(part.parameters for part in matrices)
    dense = [part for part in matrices if part.replicas > 1]
    everything = sum(
        part.count * pricing.mean_work(part, "owner" if one.layout == "split" else one.layout)
        for part, one in stage.picked
        if not part.layer.excluded
    )
    return {
        "matrices": model.count,
        "parameters": model.parameters,
        "stage": stage.number,
        "stage_matrices": sum(part.count for part in matrices),
        **seconds,
        "communication_seconds": seconds["exchange_seconds"] + seconds["gather_seconds"],
        "exposed_seconds": exposed,
        "visible_seconds": visible,
        "step_seconds": step,
        "share_of_step": visible / (step + visible),
        "gradient_seconds": {how: pricing.reduced(parts, how) for how in volume.REDUCTIONS},
        "memory": memory,
        "memory_of_rank": pricing.cluster.memory or None,
        "fits": not pricing.cluster.memory or memory <= pricing.cluster.memory,
        "workspace": max((_workspace(part) for part in matrices), default=0),
        "local_parameters": local,
        "alternatives": {
            "replicated_seconds": everything / pricing.rate + seconds["exchange_seconds"],
            **{f"{how}_gather_seconds": pricing.gathering(stage.deals, how) for how in volume.GATHERS},
            "zero1_momentum_bytes": sum(_served(part) for part in dense),
            "model_flops_per_gpu": 6 * (model.active or model.parameters) * _tokens(pricing) / grid.size,
        },
    }


def _served(part: Held) -> int:
    """Return the bytes a rank sends more if element-wise sharding is to give every rank whole momenta."""
    return Volume(volume.serving_muon(part.parameters, part.replicas), 0).sent


def _workspace(part: Held) -> int:
    """Return bytes of an iterate, a product of its shape and two Gram matrices, in bfloat16, for one whole matrix."""
    m, n = sorted(part.layer.shape)
    return 2 * (2 * m * n + 2 * m * m)


def _tokens(pricing: _Pricing) -> int:
    return pricing.setting.tokens or TOKENS * pricing.grid.size


def _step(model: Model, pricing: _Pricing) -> float:
    """Estimate the seconds of a training step without its optimizer: six flops a parameter and token."""
    active = model.active or float(model.parameters)
    return 6 * active * _tokens(pricing) / (pricing.grid.size * UTILIZATION * pricing.rate)


def _assumptions(pricing: _Pricing, model: Model, totals: Mapping[str, Any]) -> tuple[str, ...]:
    setting, cluster = pricing.setting, pricing.cluster
    lines = [
        f"cluster: {cluster.source}",
        f"products at {pricing.rate / 1e12:.4g} TFLOP/s whatever their size; {setting.steps} steps of degree "
        f"{setting.degree}, {setting.kernel} kernels",
        f"links carry {cluster.inside.bandwidth / 1e9:.4g} GB/s in domains of {cluster.domain} ranks and "
        f"{cluster.outside.bandwidth / 1e9:.4g} GB/s a rank beyond, and nothing else at the time",
        f"weights in {setting.weight}, gradients in {setting.gradient}, layouts send {setting.wire}, one call a matrix "
        "(owner: two for all); a float32 Gram matrix in gram",
        "per layer: the rank with most of that class; totals: the busiest rank of the slowest stage",
        "bytes and seconds leave out gradients, which every optimizer needs; elementwise work takes no time",
        f"memory: weights, gradients, {MUON_STATE} bytes of state an owned entry ({ADAM_STATE} for AdamW)",
    ]
    if setting.step is None:
        lines.append(
            f"a step of {_tokens(pricing)} tokens takes six flops a token and parameter"
            f"{' that is active' if model.active else ''} at half the rate of products"
        )
    if not totals["fits"]:
        lines.append(f"does not fit: {totals['memory'] / 1e9:.4g} GB a rank, of {cluster.memory / 1e9:.4g} GB")
    hides = "is hidden behind the next forward pass, a third of the step" if setting.overlap else "hides behind nothing"
    return (*lines, f"the gather of weights {hides}", *(f"model: {note}" for note in model.notes))


def _counted(names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def _spread(values: Sequence[int] | Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0
