r"""Which layout for which layer of a model on a cluster, who owns what, and what the optimizer's step costs.

Each class of equal matrices is priced in every layout that leaves its update as it is, and gets the quickest. A rank's
seconds for it are

.. math:: t = \frac{flops}{rate} + products \cdot t_0 + \frac{bytes}{stream} + t_{tp} + t_{dp},

its products with what each takes beside its flops, elementwise work at the rate of the rank's memory, what its layout
asks of the tensor-parallel group, and its part of the gather of new weights. Matrices are owned, whole or as shards, by
one of the ranks that replicate them (layer-wise data parallelism), or shared by a team of those (`ownership`). Classes
are priced, never single matrices; only the dealing looks at each.

What a number is of: per layer, the rank that has most of that class, in the pipeline stage that has most; in totals,
the rank that has most of everything, in the slowest stage.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import inf, prod
from typing import Any, NamedTuple, TypeAlias

from muon_lab.cost import flops, inventory, network, own, volume
from muon_lab.cost.inventory import Held, Model
from muon_lab.cost.network import Cluster, Number
from muon_lab.cost.ownership import POLICIES, Kind, Owners, dealt, spread
from muon_lab.nearest import unknown
from muon_lab.parallel import balance, calls
from muon_lab.parallel.calls import ITEMSIZE, Call
from muon_lab.parallel.grid import Grid, Placement, even
from muon_lab.parallel.volume import Volume

#: Layouts of shards that give the update of the whole matrix, those that form Gram matrices in float32, and others.
CHOSEN = ("duplicated", "distributed", "owner")
PRECISE = ("gram",)
BESIDE = ("blockwise", "periodic")

#: Layouts in which all replicas take part alike, so that nobody owns a matrix.
SHARED = ("replicated", "elementwise")

#: Why a layout is shown and not chosen.
REASONS = {
    "gram": "its products are in float32, and nobody gave a rate of those",
    "blockwise": "another update: each rank orthogonalizes its shard as if that were all",
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
        Flops a second of a rank's large products; that of the cluster by default.
    tokens : int, optional
        Tokens a step; 65,536 a rank by default.
    step : float, optional
        Seconds of a training step without the optimizer; estimated from tokens by default.
    owners : {"hybrid", "whole"}
        Whether replicas may share matrices that are too long for one of them, or own whole ones only.
    cap : float, optional
        No replica owns more entries than so many times the mean.
    overhead : float, optional
        Seconds of a product beside its flops; that of the cluster by default.
    products : str
        Dtype of the products whose rate is given. The Gram form multiplies in float32: of another rate its time does
        not follow, and it is shown without one.
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
    owners: str = "hybrid"
    cap: float | None = None
    overhead: float | None = None
    products: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, known in (("kernel", flops.KERNELS), ("gather", volume.GATHERS), ("owners", POLICIES)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        for name in ("weight", "gradient", "wire", "products"):
            if getattr(self, name) not in calls.FLOATS:
                raise unknown(f"dtype of {name}", getattr(self, name), calls.FLOATS)
        if self.degree not in (3, 5):
            raise ValueError(f"degree of a step must be 3 or 5, not {self.degree}")
        for name in ("steps", "rate", "tokens", "step"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.overhead is not None and not 0 <= self.overhead < inf:
            raise ValueError(f"overhead of a product must be at least 0 s, not {self.overhead}")
        if self.cap is not None and not 1 <= self.cap < inf:
            raise ValueError(f"cap must be at least 1 times the mean, not {self.cap}")


@dataclass(frozen=True)
class Choice:
    """A layout of a class of matrices, and what a rank takes for it.

    Attributes
    ----------
    layout : str
        Of shards: one of `CHOSEN` and `BESIDE`. Of whole matrices: "layerwise"; "split" where a team of replicas cuts
        each matrix and sums its Gram matrices (distributed); "replicated" where every replica does the same; "local"
        where there is but one. "elementwise" for what AdamW has.
    flops : float
        Of its products.
    sent : int
        Bytes that it sends, without the gradients that a reduce_scatter brings.
    memory : int
        Bytes of weights, gradients and optimizer state.
    compute, exchange, gather : float
        Seconds of products (infinite where no rate is known), of what a layout sends, and for new weights (or whole
        gradients).
    reason : str
        Why it cannot be chosen; "" if it can.
    elementwise : float
        Seconds of elementwise work: momentum, master weights, weights.
    team : int
        How many replicas share a matrix.
    """

    layout: str
    flops: float
    sent: int
    memory: int
    compute: float
    exchange: float
    gather: float
    reason: str = ""
    elementwise: float = 0.0
    team: int = 1

    @property
    def seconds(self) -> float:
        """All of it, one after the other; infinite where no rate is known."""
        return self.compute + self.exchange + self.elementwise + self.gather

    def row(self) -> dict[str, Any]:
        """Return it for JSON."""
        known = {"seconds": self.seconds, "compute_seconds": self.compute}
        content = {"layout": self.layout, "bytes": self.sent, "flops": self.flops}
        content |= {name: value if value < inf else None for name, value in known.items()}
        content |= {"memory": self.memory, "exchange_seconds": self.exchange}
        content |= {"elementwise_seconds": self.elementwise, "gather_seconds": self.gather, "team": self.team}
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
    """Who owns what in one group of a stage, and what follows for a rank of each replica.

    Attributes
    ----------
    stage : int
        The pipeline stage.
    group : str
        "dense" or "expert".
    owners : Owners
        Of each matrix.
    loads : tuple of Load
        What the busiest rank of each replica takes.
    stride : int
        How many ranks lie between neighbours.
    """

    stage: int
    group: str
    owners: Owners
    loads: tuple["Load", ...] = field(repr=False)
    stride: int

    def row(self) -> dict[str, Any]:
        """Return it for JSON."""
        seconds = [load.seconds for load in self.loads]
        return {
            "stage": self.stage,
            "group": self.group,
            **self.owners.row(),
            "seconds_max_over_mean": spread(seconds),
            "flops_max_over_mean": spread([load.flops for load in self.loads]),
            "idle": sum(1 for each in seconds if not each),
            "why": self.why,
        }

    @property
    def why(self) -> str:
        """One sentence on whether matrices are shared."""
        most, whole = 1e3 * self.owners.makespan, self.owners.whole
        if self.owners.policy == "whole":
            return "whole matrices only, as asked"
        if not self.owners.shared:
            return "whole matrices only: sharing any would make the busiest replica no quicker"
        teams = ", ".join(f"{name} by {team}" for name, team in self.owners.shared.items())
        before = "would leave no room under the cap" if whole is None else f"would take {1e3 * whole:.4g} ms"
        return f"replicas share matrices ({teams}): the busiest then takes {most:.4g} ms, and whole matrices {before}"


class Load(NamedTuple):
    """What a rank takes for what it owns: flops, seconds, and bytes that its layouts send."""

    flops: Number = 0.0
    compute: Number = 0.0
    exchange: Number = 0.0
    elementwise: Number = 0.0
    sent: Number = 0.0

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        return self.compute + self.exchange + self.elementwise

    def plus(self, other: "Load", times: Number = 1.0) -> "Load":
        """Add another one so many times.

        Examples
        --------
        >>> Load(1.0, 2.0).plus(Load(10.0, 0.5), times=2).flops
        21.0
        """
        return Load(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


#: The classes of a stage with the layout of each.
Picked: TypeAlias = Sequence[tuple[Held, Choice]]


@dataclass(frozen=True)
class Stage:
    """A pipeline stage whose layouts and owners are settled, what its busiest rank takes, and bytes of its fullest."""

    number: int
    picked: tuple[tuple[Held, Choice], ...]
    deals: tuple[Deal, ...]
    seconds: Mapping[str, float]
    memory: int


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
    402
    """
    model = own.read(model) if isinstance(model, str) else model
    cluster = named(cluster) if isinstance(cluster, str) else cluster
    setting = Setting() if setting is None else setting
    rate = setting.rate or cluster.rate
    if not rate:
        raise ValueError(
            f"cluster {cluster.name!r} has no rate of products: give one, --tflops on the command line, 'tflops' in a "
            "cluster's .toml file, or rate of a Setting"
        )
    pricing = _Pricing(cluster, grid, setting, rate)
    stages = _stages(pricing, [inventory.held(model, grid, stage, expert_tp) for stage in range(grid.pp)])
    slowest = max(stages, key=lambda stage: stage.seconds["optimizer_seconds"])
    totals = _totals(model, pricing, slowest, max(stage.memory for stage in stages))
    layers = _planned(pricing, stages)
    assumed = _assumptions(pricing, model, totals, (layer.held for layer in layers))
    return Plan(model, cluster, grid, setting, layers, slowest.deals, totals, assumed)


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
        Planned(part, stage.number, chosen, pricing.others(part, chosen)) for stage, part, chosen in most.values()
    )


def _worked(load: Load, share: Number) -> Load:
    """Return a load with so much of its products."""
    return load._replace(flops=load.flops * share, compute=load.compute * share)


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

    def others(self, part: Held, chosen: Choice) -> tuple[Choice, ...]:
        """Return the layouts that were not chosen, from the quickest on."""
        found = sorted(self.candidates(part), key=_order)
        return tuple(
            replace(one, reason=ALONE) if not one.reason and one.seconds < chosen.seconds else one
            for one in found
            if one.layout != chosen.layout
        )

    def candidates(self, part: Held) -> tuple[Choice, ...]:
        """Return all layouts of a class."""
        if part.layer.excluded:
            return (self.elementwise(part),)
        if part.placement is None:
            if part.replicas == 1:
                return (self.whole(part, "local"),)
            return (self.whole(part, "layerwise"), self.split(part), self.whole(part, "replicated"))
        return tuple(self.cut(part, name) for name in (*CHOSEN, *PRECISE, *BESIDE))

    def elementwise(self, part: Held) -> Choice:
        """Return what AdamW's weights take, element-wise sharded."""
        gather = volume.elementwise(part.parameters, part.replicas, weight=self.setting.weight)[1:]
        owned = -(-part.parameters // part.replicas)
        memory = part.parameters * self.kept + owned * ADAM_STATE
        seconds = self.streamed(owned, self.kept + 2 * ADAM_STATE)
        sent, gathered = Volume(gather, 0).sent, self.priced(part, gather)
        return Choice("elementwise", 0.0, sent, memory, 0.0, 0.0, gathered, elementwise=seconds)

    def whole(self, part: Held, name: str, team: int = 1) -> Choice:
        """Return what matrices take that each replica has whole, and that are shared by teams of so many if split."""
        each = self.per_matrix(part, name, team)
        most = part.count if name == "replicated" else -(-part.count * team // part.replicas)
        gather, state = self.gathered(part), most * part.parameters // part.count // team
        if name == "replicated":  # everyone needs whole gradients, and nobody new weights
            gather = (calls.all_gather((-(-part.parameters // part.replicas),), self.setting.gradient, part.replicas),)
        return self.choice(part, name, Load().plus(each, most), gather, state, team)

    def split(self, part: Held) -> Choice:
        """Return what matrices take in teams of the best size, if nothing else is dealt."""
        sizes = (team for team in range(2, part.replicas + 1) if part.replicas % team == 0)
        return min((self.whole(part, "split", team) for team in sizes), key=_order)

    def cut(self, part: Held, name: str) -> Choice:
        """Return what shards take in a layout; replicas deal them out, and each orthogonalizes its own."""
        assert part.placement is not None
        most = -(-part.count // part.replicas)
        load = Load().plus(self.per_matrix(part, name), most)
        if name == "owner":  # of so many matrices each rank of the group has some
            load = _worked(load, -(-most // part.placement.tp) / most)
        return self.choice(part, name, load, self.gathered(part), most * prod(part.shard))

    def choice(self, part: Held, name: str, load: Load, gather: tuple[Call, ...], owned: int, team: int = 1) -> Choice:
        """Return a choice of which a rank takes a load and owns so many entries."""
        return Choice(
            name,
            load.flops,
            round(load.sent) + Volume(gather, 0).sent,
            part.parameters * self.kept + owned * MUON_STATE,
            load.compute,
            load.exchange,
            self.priced(part, gather),
            "" if self.rated(name) and name not in BESIDE else REASONS[name],
            load.elementwise,
            team,
        )

    def per_matrix(self, part: Held, name: str, team: int = 1) -> Load:
        """Return what a rank takes for one matrix: of a team that shares it, or of a tensor-parallel group.

        In the owner layout, work is that of the matrix's owner in the group.
        """
        shape, cut, wire, steps = part.layer.shape, part.placement, self.setting.wire, self.setting.steps
        made: tuple[Call, ...] = ()
        stride, times, layout = self.stride(part), 1.0, name
        if cut is None and team > 1:
            cut, layout = even(max(shape), team, int(shape[0] < shape[1])), "distributed"
            made = volume.layout(layout, shape, cut, 0, wire, steps=steps)
        elif cut is not None:
            batch = -(-part.count // part.replicas) if name == "owner" else 1
            made = volume.layout(name, shape, cut, 0, wire, count=batch, steps=steps)
            stride, times = 1, 1 / batch if name == "owner" else 1 / (PERIOD if name == "periodic" else 1)
        work = self.layout_work(shape, cut, layout) if cut is not None else self.work(part)
        rate = self.rate if self.rated(layout) else 0.0
        launches = flops.count(layout if cut is not None else "duplicated", steps, self.setting.degree)
        return Load(
            work,
            work / rate + launches * self.overhead if rate else inf,
            times * sum((self.cluster.seconds(call, stride) for call in made), 0.0),
            self.streamed(prod(part.shard) / team, self.passed),
            times * Volume(made, 0).sent,
        )

    def rated(self, layout: str) -> bool:
        """Tell whether the rate is one of the products of a layout."""
        return layout not in PRECISE or self.setting.products == "float32"

    def work(self, part: Held) -> float:
        """Return the flops of a whole matrix."""
        count = flops.newton_schulz if self.setting.degree == 5 else flops.cubic
        return count(*part.layer.shape, self.setting.steps, self.setting.kernel)

    def layout_work(self, shape: Sequence[int], cut: Placement, name: str) -> float:
        """Return the flops of a rank for one matrix of which it has a shard."""
        how = {"period": PERIOD, "degree": self.setting.degree}
        return flops.layout(name, shape, cut, 0, self.setting.steps, self.setting.kernel, **how)

    @property
    def overhead(self) -> float:
        """Seconds of a product beside its flops."""
        given = self.setting.overhead
        return self.cluster.overhead if given is None else given

    @property
    def kept(self) -> int:
        """Bytes an entry of a weight and its gradient."""
        return ITEMSIZE[self.setting.weight] + ITEMSIZE[self.setting.gradient]

    @property
    def passed(self) -> int:
        """Bytes an entry that elementwise work of the owner reads and writes: see `_assumptions`."""
        return self.kept + 2 * MUON_STATE + 2 * ITEMSIZE[self.setting.wire]

    def streamed(self, entries: Number, bytes_each: int) -> float:
        """Return the seconds of elementwise work on so many entries."""
        return entries * bytes_each / self.cluster.stream if self.cluster.stream else 0.0

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

    def dealt(self, stage: int, group: str, picked: Picked) -> Deal | None:
        """Deal the matrices that have an owner or a team each, the dearest first."""
        mine = [(part, one) for part, one in picked if _group(part) == group and one.layout not in SHARED]
        if not mine:
            return None
        kinds = [
            Kind(part.layer.name, part.count, prod(part.shard), self.costs(part, one.layout)) for part, one in mine
        ]
        owners = dealt(kinds, mine[0][0].replicas, policy=self.setting.owners, cap=self.setting.cap)
        each = [self.per_matrix(part, one.layout, team) for (part, one), team in zip(mine, owners.teams, strict=True)]
        within = [one.layout == "owner" for _, one in mine]
        columns = list(zip(*owners.owned, strict=True))
        known = {column: self.load(each, within, column) for column in set(columns)}
        loads = [known[column] for column in columns]
        return Deal(stage, group, owners, tuple(loads), self.stride(mine[0][0]))

    def costs(self, part: Held, name: str) -> Callable[[int], float]:
        """Return what each member of a team takes for one matrix, in the mean over its tensor-parallel group."""

        @cache
        def seconds(team: int) -> float:
            each = self.per_matrix(part, name, team if part.placement is None else 1)
            return (_worked(each, 1 / part.placement.tp) if name == "owner" and part.placement else each).seconds

        return seconds

    def load(self, each: Sequence[Load], within: Sequence[bool], counts: Sequence[int]) -> Load:
        """Return what the busiest rank of a replica takes for what it owns: so many of each class.

        Matrices in the owner layout (`within`) are dealt out once more, to the tensor-parallel ranks.
        """
        total, inner = Load(), list[Load]()
        for one, dealt_within, count in zip(each, within, counts, strict=True):
            inner += [one] * count if dealt_within else []
            total = total.plus(_worked(one, 0.0) if dealt_within else one, count)
        if not inner:
            return total
        shared = balance.lpt_flops([one.compute for one in inner], self.grid.tp)
        busiest = max(range(self.grid.tp), key=shared.loads.__getitem__)
        work = sum(one.flops for one, rank in zip(inner, shared.owners, strict=True) if rank == busiest)
        return total.plus(Load(work, shared.makespan))

    def moved(self, deal: Deal, gather: str, replica: int = 0) -> tuple[Call, ...]:
        """Return the gather of the weights of a group from their owners."""
        entries = deal.owners.entries
        return volume.weights(entries, replica, self.setting.weight, gather) if len(entries) > 1 else ()

    def gathering(self, deals: Sequence[Deal], gather: str) -> float:
        """Return the seconds of the gathers of all groups."""
        return sum(
            (self.cluster.seconds(call, deal.stride) for deal in deals for call in self.moved(deal, gather)), 0.0
        )

    def settled(self, stage: int, parts: Sequence[Held]) -> Stage:
        """Return a stage with an owner, or a team, for every matrix."""
        best = [(part, min(self.candidates(part), key=_order)) for part in parts]
        start = [(part, self.whole(part, "layerwise") if one.layout == "split" else one) for part, one in best]
        made = [self.dealt(stage, group, start) for group in _GROUPS]
        deals = tuple(deal for deal in made if deal is not None)
        teams = {(deal.group, name): team for deal in deals for name, team in deal.owners.shared.items()}
        picked = [
            (part, self.whole(part, "split", teams[_group(part), part.layer.name]))
            if (_group(part), part.layer.name) in teams
            else (part, one)
            for part, one in start
        ]
        return self.stage(stage, picked, deals)

    def stage(self, stage: int, picked: Picked, deals: tuple[Deal, ...]) -> Stage:
        """Return what the busiest rank of a stage takes, and the fullest."""
        everyone = [one for _, one in picked if one.layout in SHARED]
        base = Load(
            sum(one.flops for one in everyone),
            sum(one.compute for one in everyone),
            sum(one.exchange for one in everyone),
            sum(one.elementwise for one in everyone),
            sum(one.sent for one in everyone),
        )
        ranks = range(self.grid.dp * self.grid.tp)
        busiest = max(ranks, key=lambda rank: sum(deal.loads[rank // deal.stride].seconds for deal in deals))
        for deal in deals:
            replica = busiest // deal.stride
            base = base.plus(deal.loads[replica])
            moved = Volume(self.moved(deal, self.setting.gather, replica), replica).sent
            base = base.plus(Load(sent=moved))
        gather = self.gathering(deals, self.setting.gather) + sum((one.gather for one in everyone), 0.0)
        fixed = sum(part.parameters * self.kept for part, one in picked if one.layout not in SHARED)
        fixed += sum(one.memory for one in everyone)
        state = max(sum(deal.owners.entries[rank // deal.stride] for deal in deals) for rank in ranks) * MUON_STATE
        seconds = {
            "optimizer_seconds": base.seconds + gather,
            "compute_seconds": base.compute,
            "exchange_seconds": base.exchange,
            "elementwise_seconds": base.elementwise,
            "gather_seconds": gather,
            "flops": base.flops,
            "bytes": round(base.sent),
        }
        return Stage(stage, tuple(picked), deals, seconds, fixed + state)

    def reduced(self, parts: Sequence[Held], how: str) -> float:
        """Return the seconds of bringing gradients to owners, or to everyone."""
        total = 0.0
        for replicas in {part.replicas for part in parts if part.replicas > 1}:
            alike = [part for part in parts if part.replicas == replicas]
            owned = even(sum(part.parameters for part in alike), replicas, 0).sizes
            total += self.priced(alike[0], volume.gradients(owned, self.setting.gradient, how))
        return total


def _totals(model: Model, pricing: _Pricing, stage: Stage, memory: int) -> dict[str, Any]:
    parts, seconds = [part for part, _ in stage.picked], stage.seconds
    grid, setting = pricing.grid, pricing.setting
    step = setting.step or _step(model, pricing)
    hidden = step / 3 if setting.overlap else 0.0
    exposed = seconds["exchange_seconds"] + max(0.0, seconds["gather_seconds"] - hidden)
    visible = seconds["compute_seconds"] + seconds["elementwise_seconds"] + exposed
    matrices = [part for part in parts if not part.layer.excluded]
    local = sum(part.parameters for part in matrices)
    dense = [part for part in matrices if part.replicas > 1]
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
            "replicated_seconds": _replicated(pricing, stage),
            **{f"{how}_gather_seconds": pricing.gathering(stage.deals, how) for how in volume.GATHERS},
            "zero1_momentum_bytes": sum(_served(part) for part in dense),
            "model_flops_per_gpu": 6 * (model.active or model.parameters) * _tokens(pricing) / grid.size,
        },
    }


def _replicated(pricing: _Pricing, stage: Stage) -> float:
    """Return the seconds of a rank if every replica updates everything that it has."""
    total = 0.0
    for part, one in stage.picked:
        if part.layer.excluded:
            continue
        each = pricing.per_matrix(part, one.layout)
        if one.layout == "owner" and part.placement is not None:
            each = _worked(each, 1 / part.placement.tp)
        total += part.count * each.seconds
    return total


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
    """Estimate the seconds of a training step without its optimizer: six flops a parameter and token.

    The model's products run at the cluster's rate, whatever is assumed of the optimizer's.
    """
    active = model.active or float(model.parameters)
    rate = pricing.cluster.rate or pricing.rate
    return 6 * active * _tokens(pricing) / (pricing.grid.size * UTILIZATION * rate)


def _assumptions(pricing: _Pricing, model: Model, totals: Mapping[str, Any], held: Iterable[Held]) -> tuple[str, ...]:
    setting, cluster = pricing.setting, pricing.cluster
    lines = [
        f"cluster: {cluster.source}",
        f"a product of f flops takes f / {pricing.rate / 1e12:.4g} TFLOP/s and {1e6 * pricing.overhead:.3g} µs more; "
        f"{setting.steps} steps of degree {setting.degree}, {setting.kernel} kernels, one matrix at a time",
        f"links carry {cluster.inside.bandwidth / 1e9:.4g} GB/s in domains of {cluster.domain} ranks and "
        f"{cluster.outside.bandwidth / 1e9:.4g} GB/s a rank beyond, and nothing else at the time",
        f"weights in {setting.weight}, gradients in {setting.gradient}, layouts send {setting.wire}, one call a matrix "
        "(owner: two for all); a float32 Gram matrix in gram",
        "per layer: the rank with most of that class; totals: the busiest rank of the slowest stage, memory of the "
        "fullest rank of all stages",
        "bytes and seconds leave out gradients, which every optimizer needs",
        f"memory: weights, gradients, {MUON_STATE} bytes of state an owned entry ({ADAM_STATE} for AdamW)",
    ]
    if cluster.stream:
        lines.append(
            f"elementwise work moves {pricing.passed} bytes an owned entry ({pricing.kept + 2 * ADAM_STATE} for AdamW) "
            f"at {cluster.stream / 1e12:.3g} TB/s: gradient, momentum, master weight, update and weight"
        )
    else:
        lines.append("elementwise work takes no time, since nothing is known of the memory's rate")
    if setting.step is None:
        lines.append(
            f"a step of {_tokens(pricing)} tokens takes six flops a token and parameter"
            f"{' that is active' if model.active else ''} at half of "
            f"{(cluster.rate or pricing.rate) / 1e12:.4g} TFLOP/s"
        )
    if not totals["fits"]:
        lines.append(f"does not fit: {totals['memory'] / 1e9:.4g} GB a rank, of {cluster.memory / 1e9:.4g} GB")
    lines += _broken(held)
    hides = "is hidden behind the next forward pass, a third of the step" if setting.overlap else "hides behind nothing"
    return (*lines, f"the gather of weights {hides}", *(f"model: {note}" for note in model.notes))


def _broken(held: Iterable[Held]) -> list[str]:
    """Return a line if tensor parallelism cuts heads into parts."""
    found = [part for part in held if part.broken]
    if not found:
        return []
    told = ", ".join(f"{part.layer.name} into {part.shard[part.layer.cut or 0]}" for part in found)
    return [
        f"heads are cut ({told} of heads of {found[0].layer.unit}), which training code may refuse or avoid by copies"
    ]
