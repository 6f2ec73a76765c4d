r"""Who should own which layer, what does data parallelism move for it, and what of that hides behind compute?

Closed forms: nothing is started. Ranks deal the matrices of a model out among themselves by a policy of
`parallel.balance`; each orthogonalizes its own, and two resources, the processor and the link, share out the step
(`parallel.timeline`): forward, backward, gradients to their owners, the update, new weights to all.

What is counted
---------------
- *Matrices* are those of `cost.inventory` without embeddings, head and routers, which AdamW updates element by
  element whatever the policy. Queries, keys and values are as the model's own code keeps them.
- *Experts.* With ``ep`` ranks to a group of experts, a rank has 1/ep of them. ``together``: ranks with the same experts
  deal out all that they have, dense matrices too, so that each of ep such groups updates those for itself; that their
  gradients are summed over these groups first is not counted. ``apart``, as Megatron-LM does it: dense matrices are
  dealt out over all ranks, experts over the 1/ep of them that have the same.
- *Order* of the matrices for round robin: ``kinds``, all of one kind after all of another, or ``blocks``, block after
  block, as optimizers find them.
- *Flops* are those of `cost.flops`. Forward takes two a parameter and token, backward four, experts by their active
  share; elementwise work and attention scores count nothing.
- *Teams* of the hybrid policy run the distributed layout on neighbours. They wait for what they tell each other, so it
  is part of the update. A giant is taken to lie on its team in parts, state and weights. `LayerwiseOptimizer` keeps it
  whole on the first of the team: there that rank holds more than ``memory`` says, and hands out candidates and takes
  directions back, (p - 1)/p of the matrix in float32 each way on top of ``team_bytes`` and ``team_seconds``.
- *Seconds* are those of a cluster of `cost.network`, or of the α–β model on a link of one's own. All ranks wait for the
  slowest one at the end of the update.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from muon_lab.nearest import unknown
from muon_lab.studies.study import Case, Column, LeftOut, Metrics, Study

if TYPE_CHECKING:
    from muon_lab.cost.inventory import Layer
    from muon_lab.parallel.balance import Assignment
    from muon_lab.parallel.calls import Call
    from muon_lab.parallel.timeline import Step

Number: TypeAlias = float | int

POLICIES = ("round_robin", "ping_pong", "lpt_elements", "lpt_flops", "lpt_buckets", "hybrid")

#: Policies that take a cap on what a rank holds.
CAPPED = ("lpt_elements", "lpt_flops", "lpt_buckets", "hybrid")

#: Methods that a team can share, by the layout that it runs.
SHARED = {"newton_schulz": "distributed", "cubic": "distributed", "gram": "gram"}

ORDERS, EXPERTS, OVERLAPS = ("kinds", "blocks"), ("together", "apart"), ("none", "gather", "both")


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    model: tuple[str, ...] = ("llama-3-70b", "kimi-k2")
    """A model of cost.inventory."""
    ranks: tuple[int, ...] = (64, 256)
    """Data-parallel ranks among which dense matrices are dealt out."""
    ep: tuple[int, ...] = (1,)
    """Ranks to a group of experts; a rank has 1/ep of them."""
    experts: tuple[str, ...] = ("together",)
    """Whether experts and dense matrices are dealt out together, among ranks with the same experts, or apart."""
    policy: tuple[str, ...] = ("round_robin", "ping_pong", "lpt_elements", "lpt_flops", "hybrid")
    """round_robin, ping_pong, lpt_elements, lpt_flops, lpt_buckets (bucket by bucket) or hybrid."""
    order: tuple[str, ...] = ("kinds",)
    """The order of the matrices: kinds (kind after kind) or blocks (block after block)."""
    method: tuple[str, ...] = ("newton_schulz",)
    """What is counted for a matrix: a method of cost.flops; seconds only for those made of products."""
    steps: tuple[int, ...] = (5,)
    """Steps of the method."""
    kernel: tuple[str, ...] = ("gemm",)
    """gemm, or syrk for products that compute half of a symmetric result."""
    cap: tuple[float, ...] = (0.0,)
    """The most elements of a bucket that a rank may hold, times the mean; 0 for no cap (LPT and hybrid)."""
    buckets: tuple[int, ...] = (8,)
    """Buckets of neighbouring blocks: what travels together."""
    gather: tuple[str, ...] = ("exact",)
    """New weights in shares as long as they are (exact), or all as long as the longest of a bucket (padded)."""
    reduce: tuple[str, ...] = ("reduce_scatter",)
    """Gradients to their owners (reduce_scatter), or to all ranks (all_reduce)."""
    weight: tuple[str, ...] = ("bfloat16",)
    """The dtype in which weights travel."""
    gradient: tuple[str, ...] = ("float32",)
    """The dtype in which gradients travel."""
    overlap: tuple[str, ...] = ("both",)
    """none, gather (new weights are waited for in the next forward), or both (backward reduces its buckets too)."""
    tokens: tuple[int, ...] = (8192,)
    """Tokens of a rank and step."""
    link: tuple[str, ...] = ("h200-nvlink",)
    """A cluster of cost.network, or own for latency_us and bandwidth_gb."""
    latency_us: tuple[float, ...] = (10.0,)
    """Own link: microseconds a message on a ring."""
    bandwidth_gb: tuple[float, ...] = (50.0,)
    """Own link: gigabytes a second, one way."""
    tflops: tuple[float, ...] = (0.0,)
    """Products of a rank, 1e12 a second; 0 for what is known of the cluster."""


COLUMNS = (
    Column("matrices", "count", "matrices that a rank and those it shares them with update"),
    Column("ratio", "1", "makespan over ideal load: flops of the busiest rank over those of the mean, undivided"),
    Column("makespan", "flop", "flops of the busiest rank"),
    Column("ideal", "flop", "flops of all matrices over ranks"),
    Column("largest", "1", "the largest matrix over the ideal load: whole layers go no lower than that or 1"),
    Column("memory", "1", "elements that the fullest rank owns over the mean, giants lying on their teams in parts"),
    Column("divided", "count", "matrices that teams share"),
    Column("team", "count", "ranks of the largest team"),
    Column("reduce_bytes", "B", "bytes that a rank sends of gradients on a ring, mean over ranks"),
    Column("gather_bytes", "B", "bytes that a rank sends of weights on a ring, mean over ranks"),
    Column("padding_bytes", "B", "of both, those of padding"),
    Column("team_bytes", "B", "bytes that the busiest member sends to its teams in the distributed layout"),
    Column("zero1_bytes", "B", "bytes that a rank sends for the same elements with element-wise sharding (ZeRO-1)"),
    Column("muon_bytes", "B", "bytes that it would send more to have whole momenta for Muon (float32)"),
    Column("compute_seconds", "s", "forward and backward"),
    Column("update_seconds", "s", "the update of the slowest rank, teams included"),
    Column("team_seconds", "s", "what of that its teams talk"),
    Column("link_seconds", "s", "gradients and weights on the link"),
    Column("serial_seconds", "s", "a step in which nothing overlaps"),
    Column("step_seconds", "s", "a step as asked for"),
    Column("exposed_seconds", "s", "what of link_seconds lengthens the step"),
    Column("hidden_seconds", "s", "the rest of link_seconds"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid."""
    from muon_lab.cost import flops, inventory, network, volume
    from muon_lab.parallel import calls

    known: Mapping[str, Sequence[str]] = {
        "model": inventory.names(),
        "policy": POLICIES,
        "order": ORDERS,
        "experts": EXPERTS,
        "method": tuple(flops.METHODS),
        "kernel": tuple(flops.KERNELS),
        "gather": volume.GATHERS,
        "reduce": volume.REDUCTIONS,
        "weight": calls.FLOATS,
        "gradient": calls.FLOATS,
        "overlap": OVERLAPS,
        "link": ("own", *network.presets()),
    }
    for name, values in known.items():
        if point[name] not in values:
            raise unknown(name, point[name], values)
    _check_numbers(point)
    if point["policy"] == "hybrid" and point["method"] not in SHARED:
        raise LeftOut(f"teams share {', '.join(SHARED)}, but not {point['method']}")
    case = {**point, **_unused(point)}
    _check_experts(case)
    if case["policy"] in CAPPED and case["cap"]:
        try:
            _groups(case)
        except ValueError as error:
            raise LeftOut(str(error)) from None
    yield case


def _check_numbers(point: Mapping[str, Any]) -> None:
    for name in ("ranks", "ep", "steps", "buckets", "tokens"):
        if point[name] < 1:
            raise ValueError(f"{name} must be at least 1, not {point[name]}")
    for name in ("latency_us", "tflops"):
        if not 0 <= point[name] < float("inf"):
            raise ValueError(f"{name} must be finite and at least 0, not {point[name]}")
    if not point["bandwidth_gb"] > 0:
        raise ValueError(f"bandwidth_gb must be above 0, not {point['bandwidth_gb']}")
    if point["bandwidth_gb"] == float("inf"):
        raise ValueError("bandwidth_gb must be finite, not inf")
    if not (point["cap"] == 0 or point["cap"] >= 1):
        raise ValueError(f"cap must be 0 for none, or at least 1, not {point['cap']}")


def _unused(point: Mapping[str, Any]) -> Case:
    """Return None for each axis that cannot matter."""
    idle = {
        "cap": point["policy"] not in CAPPED,
        "experts": point["ep"] == 1,
        "latency_us": point["link"] != "own",
        "bandwidth_gb": point["link"] != "own",
    }
    return {name: None for name, unused in idle.items() if unused}


def _check_experts(case: Case) -> None:
    from muon_lab.cost import inventory

    model = inventory.get(case["model"])
    numbers = {layer.per_block for layer in model.layers if layer.expert}
    if case["ep"] > 1 and not numbers:
        raise LeftOut(f"{case['model']} has no experts, so ep=1 alone")
    if any(number % case["ep"] for number in numbers):
        raise LeftOut(f"ep={case['ep']} does not divide the {max(numbers)} experts of {case['model']}")
    if case["experts"] == "apart" and case["ranks"] % case["ep"]:
        raise LeftOut(f"ep={case['ep']} does not divide {case['ranks']} ranks")
    if case["buckets"] > model.blocks:
        raise LeftOut(f"{case['model']} has {model.blocks} blocks, too few for {case['buckets']} buckets")


# --- who owns what ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Matrices, and the ranks that deal them out among themselves.

    Attributes
    ----------
    layers : tuple of Layer
        The kind of each matrix, in order.
    buckets : tuple of tuple of int
        The matrices of each bucket, by number.
    assignment : Assignment
        Who owns which.
    stride : int
        How many ranks apart neighbours of the group are.
    """

    layers: "tuple[Layer, ...]"
    buckets: tuple[tuple[int, ...], ...]
    assignment: "Assignment"
    stride: int = 1


class Matrix(NamedTuple):
    """A matrix: its kind, and the block that it stands in."""

    layer: "Layer"
    block: int


def _matrices(case: Case) -> list[Matrix]:
    """Return the matrices that one rank has, in order."""
    from muon_lab.cost import inventory

    model = inventory.get(case["model"]).without("router")

    def share(layer: "Layer") -> int:
        return layer.per_block // (case["ep"] if layer.expert else 1)

    found = [Matrix(layer, block) for layer in model.matrices for block in layer.blocks for _ in range(share(layer))]
    return sorted(found, key=lambda matrix: matrix.block) if case["order"] == "blocks" else found


def _groups(case: Case) -> list[Group]:
    """Return the groups that deal matrices out: one, or one for dense matrices and one for experts."""
    matrices = _matrices(case)
    if case["experts"] != "apart":
        return [_group(case, matrices, case["ranks"], case["ep"])]
    dense = [matrix for matrix in matrices if not matrix.layer.expert]
    experts = [matrix for matrix in matrices if matrix.layer.expert]
    return [
        _group(case, dense, case["ranks"], 1),
        _group(case, experts, case["ranks"] // case["ep"], case["ep"]),
    ]


def _group(case: Case, matrices: Sequence[Matrix], ranks: int, stride: int) -> Group:
    from math import prod

    from muon_lab.cost import flops
    from muon_lab.parallel import balance

    layers, buckets = tuple(matrix.layer for matrix in matrices), _buckets(case, matrices)
    shapes = [layer.shape for layer in layers]
    costs = balance.priced(shapes, lambda m, n: flops.method(case["method"], m, n, case["steps"], case["kernel"]).total)
    options: dict[str, Any] = {"cap": case["cap"]} if case["cap"] else {}
    if case["policy"] == "hybrid":
        share = cache(lambda shape, members: _share(case, shape, members))
        options["divided"] = lambda job, members: share(shapes[job], members)
    if case["policy"] == "lpt_buckets":
        options["buckets"] = buckets[::-1]  # as backward fills them
    policy = balance.POLICIES["lpt_flops" if case["policy"] == "lpt_buckets" else case["policy"]]
    return Group(layers, buckets, policy(costs, ranks, [prod(shape) for shape in shapes], **options), stride)


def _buckets(case: Case, matrices: Sequence[Matrix]) -> tuple[tuple[int, ...], ...]:
    """Return the matrices of each bucket: neighbouring blocks, as evenly as it goes."""
    from muon_lab.cost import inventory

    place = _bucket_of(inventory.get(case["model"]).blocks, case["buckets"])
    found: list[list[int]] = [[] for _ in range(case["buckets"])]
    for number, matrix in enumerate(matrices):
        found[place[matrix.block]].append(number)
    return tuple(map(tuple, found))


def _bucket_of(blocks: int, buckets: int) -> list[int]:
    from muon_lab.parallel.grid import even

    return [bucket for bucket, length in enumerate(even(blocks, buckets, 0).sizes) for _ in range(length)]


# --- giants -----------------------------------------------------------------------------------------------------------


def _share(case: Case, shape: tuple[int, int], members: int) -> float:
    """Return the flops of each member of a team for one matrix, cut along its long side."""
    from muon_lab.cost import flops

    degree = 3 if case["method"] == "cubic" else 5
    layout = SHARED[case["method"]]
    return flops.layout(layout, shape, _cut(shape, members), 0, case["steps"], case["kernel"], degree=degree)


def _talk(case: Case, shape: tuple[int, int], members: int) -> "tuple[Call, ...]":
    """Return the calls of each member of a team for one matrix; products travel in bfloat16."""
    from muon_lab.parallel import volume

    if SHARED[case["method"]] == "gram":
        return volume.gram(shape, _cut(shape, members), 0, "bfloat16")
    return volume.distributed(shape, _cut(shape, members), 0, "bfloat16", steps=case["steps"])


def _cut(shape: tuple[int, int], members: int) -> Any:
    from muon_lab.parallel.grid import even

    return even(max(shape), members, 0 if shape[0] >= shape[1] else 1)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    groups = _groups(case)
    loads = _over_ranks(case, groups, lambda group: group.assignment.loads)
    held = _over_ranks(case, groups, lambda group: group.assignment.elements)
    ideal = sum(group.assignment.ideal for group in groups)
    teams = [(group, team) for group in groups for team in group.assignment.teams]
    return {
        "matrices": sum(len(group.layers) for group in groups),
        "ratio": max(loads) / ideal,
        "makespan": max(loads),
        "ideal": ideal,
        "largest": max(_largest(case, group) for group in groups) / ideal,
        "memory": max(held) * len(held) / sum(held),
        "divided": len(teams),
        "team": max((len(team.members) for _, team in teams), default=1),
        **_bytes(case, groups),
        **_seconds(case, groups, loads),
    }


def _over_ranks(case: Case, groups: Sequence[Group], what: Callable[[Group], Sequence[Number]]) -> list[Number]:
    """Return what each rank has of all groups; experts are those of place 0 .. ranks/ep - 1, ep ranks having each."""
    values = [(group.stride if case["experts"] == "apart" else 1, what(group)) for group in groups]
    return [sum(own[rank // stride] for stride, own in values) for rank in range(case["ranks"])]


def _largest(case: Case, group: Group) -> float:
    from muon_lab.cost import flops

    shapes = {layer.shape for layer in group.layers}
    return max(flops.method(case["method"], *shape, case["steps"], case["kernel"]).total for shape in shapes)


def _bytes(case: Case, groups: Sequence[Group]) -> dict[str, Number]:
    """Return bytes that a rank sends, in the mean over ranks: the same number of all in every group."""
    from muon_lab.cost import volume
    from muon_lab.parallel import algorithms

    def mean(made: "tuple[Call, ...]") -> float:
        (call,) = made
        return algorithms.total(call) / call.size

    padded = case["gather"] == "padded"
    found = dict.fromkeys(("reduce_bytes", "gather_bytes", "padding_bytes", "zero1_bytes", "muon_bytes"), 0.0)
    for group in groups:
        ranks, owned = group.assignment.ranks, group.assignment.elements
        exact_in = mean(volume.gradients(owned, case["gradient"], case["reduce"]))
        exact_out = mean(volume.weights(owned, 0, case["weight"]))
        into, out = exact_in, exact_out
        if padded:
            widest = (sum(max(group.assignment.shares(bucket)) for bucket in group.buckets),) * ranks
            into = mean(volume.gradients(widest, case["gradient"], case["reduce"])) if _scattered(case) else exact_in
            out = mean(volume.weights(widest, 0, case["weight"]))
        parts = volume.elementwise(sum(owned), ranks, weight=case["weight"], gradient=case["gradient"])
        found["reduce_bytes"] += into
        found["gather_bytes"] += out
        found["padding_bytes"] += into - exact_in + out - exact_out
        found["zero1_bytes"] += sum(mean((part,)) for part in parts)
        found["muon_bytes"] += mean(volume.serving_muon(sum(owned), ranks))
    return found | {"team_bytes": max(_of_teams(case, groups, lambda call, _: algorithms.sent(call, 0)))}


def _scattered(case: Case) -> bool:
    return bool(case["reduce"] == "reduce_scatter")


def _of_teams(case: Case, groups: Sequence[Group], price: "Callable[[Call, int], Number]") -> list[Number]:
    """Return what each rank pays for the calls of its teams."""
    known: dict[tuple[tuple[int, int], int, int], Number] = {}

    def of_group(group: Group) -> list[Number]:
        paid: list[Number] = [0] * group.assignment.ranks
        for team in group.assignment.teams:
            key = group.layers[team.job].shape, len(team.members), group.stride
            if key not in known:
                known[key] = sum(price(call, group.stride) for call in _talk(case, *key[:2]))
            for rank in team.members:
                paid[rank] += known[key]
        return paid

    return _over_ranks(case, groups, of_group)


# --- seconds ----------------------------------------------------------------------------------------------------------


def step(
    forward: Sequence[Number],
    backward: Sequence[Number],
    update: Sequence[Number],
    shares: Sequence[Sequence[tuple[int, ...]]],
    prices: "Sequence[Callable[[Call], Number]]",
    *,
    weight: str = "bfloat16",
    gradient: str = "float32",
    gather: str = "exact",
    reduce: str = "reduce_scatter",
    agree: Number = 0.0,
    confirm: Number = 0.0,
) -> "Step":
    """Return what a step of layer-wise data parallelism takes, to be asked for its seconds with and without overlap.

    Parameters
    ----------
    forward, backward : sequence of float
        Seconds of the modules of each bucket, in the order of forward.
    update : sequence of float
        Seconds of the update of each rank: loads of an assignment by costs in seconds. All wait for the largest.
    shares : sequence, a group, of sequence, a bucket, of tuple of int
        Elements that each rank of the group owns: `Assignment.shares` of the bucket's matrices.
    prices : sequence of callable
        From a call of a group to seconds: a cluster, `network.seconds` on a link, or seconds measured.
    weight, gradient : str
        The dtypes in which they travel.
    gather : {"exact", "padded"}
        How long shares are.
    reduce : {"reduce_scatter", "all_reduce"}
        To whom gradients go.
    agree, confirm : float
        Seconds of small calls before and after the update.

    Examples
    --------
    Two buckets on two ranks, a link of one byte a second, and an update of 5 seconds on the busier rank:

    >>> from muon_lab.cost.network import Link, seconds
    >>> link = Link(latency=0.0, bandwidth=1.0)
    >>> price = lambda call: seconds(call, link)
    >>> found = step([4, 4], [8, 8], [5, 3], [[(2, 0), (1, 1)]], [price], gradient="bfloat16")
    >>> found.reduce, found.gather, found.update
    ((4.0, 2.0), (4.0, 2.0), 5.0)
    >>> found.seconds(), found.seconds(defer=True), found.seconds(defer=True, overlap=True)
    (41.0, 39.0, 37.0)
    """
    from muon_lab.cost import volume
    from muon_lab.parallel.timeline import Step

    def carried(made: "Callable[[tuple[int, ...]], tuple[Call, ...]]") -> tuple[float, ...]:
        found = [0.0] * len(forward)
        for group, price in zip(shares, prices, strict=True):
            for place, owned in enumerate(group):
                found[place] += sum(price(call) for call in made(owned)) if any(owned) else 0.0
        return tuple(found)

    into = carried(lambda owned: volume.gradients(owned, gradient, reduce, padded=gather == "padded"))
    out = carried(lambda owned: volume.weights(owned, 0, weight, gather))
    return Step(tuple(map(float, forward)), tuple(map(float, backward)), into, out, float(max(update)), agree, confirm)


def _seconds(case: Case, groups: Sequence[Group], loads: Sequence[Number]) -> dict[str, Number]:
    """Return times of a step; nothing where no rate is known, or where a method is more than products."""
    from muon_lab.cost import flops, network

    cluster = None if case["link"] == "own" else network.preset(case["link"])
    rate = 1e12 * case["tflops"] or (cluster.rate if cluster else 0.0)
    if not rate or flops.method(case["method"], 2, 2, case["steps"]).decompositions:
        return {}
    own = None if cluster else network.Link(1e-6 * case["latency_us"], 1e9 * case["bandwidth_gb"])

    def price(call: "Call", stride: int) -> float:
        return cluster.seconds(call, stride) if cluster else network.seconds(call, own)  # type: ignore[arg-type]

    talk = _of_teams(case, groups, price)
    update = [load / rate + told for load, told in zip(loads, talk, strict=True)]
    forward = [2.0 * case["tokens"] * active / rate for active in _active(case)]
    found = step(
        forward,
        [2 * seconds for seconds in forward],
        update,
        [[group.assignment.shares(bucket) for bucket in group.buckets] for group in groups],
        [lambda call, group=group: price(call, group.stride) for group in groups],  # type: ignore[misc]
        **{name: case[name] for name in ("weight", "gradient", "gather", "reduce")},
    )
    return _of_step(found, case["overlap"]) | {"team_seconds": talk[update.index(max(update))]}


def _of_step(found: "Step", overlap: str) -> dict[str, Number]:
    compute, carried = sum(found.forward) + sum(found.backward), sum(found.reduce) + sum(found.gather)
    taken = found.seconds(defer=overlap != "none", overlap=overlap == "both")
    exposed = min(max(taken - compute - found.update, 0.0), carried)  # but for the last bits, it lies between
    return {
        "compute_seconds": compute,
        "update_seconds": found.update,
        "link_seconds": carried,
        "serial_seconds": compute + found.update + carried,
        "step_seconds": taken,
        "exposed_seconds": exposed,
        "hidden_seconds": carried - exposed,
    }


def _active(case: Case) -> list[float]:
    """Return the parameters of each bucket that take part in a token."""
    from math import prod

    from muon_lab.cost import inventory

    model = inventory.get(case["model"])
    place, found = _bucket_of(model.blocks, case["buckets"]), [0.0] * case["buckets"]
    experts = sum(layer.parameters for layer in model.layers if layer.expert)
    share = (model.active - (model.parameters - experts)) / experts if experts and model.active else 1.0
    tied = not any(layer.role == "head" for layer in model.layers)
    for layer in model.layers:
        if layer.role == "embedding" and tied:  # read once more, as the head
            found[-1] += prod(layer.shape)
        elif layer.role not in ("embedding", "position"):
            one = prod(layer.shape) * layer.per_block * (share if layer.expert else 1.0)
            for block in layer.blocks:
                found[place[min(block, model.blocks - 1)]] += one
    return found


STUDY = Study(
    name="layerwise",
    question="Who should own which layer, what does data parallelism move, and what of that hides behind compute?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="ratio",
    group=("model", "ranks", "ep", "policy", "order", "gather", "link", "overlap"),
    settle=settle,
    measure=measure,
    work=lambda case: 1e8,
)
