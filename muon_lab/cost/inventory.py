"""The matrices of real models, as data: name, shape, how many, where in depth, and what parallelism does to them.

A model is a short list of classes of equal matrices; nothing here ever loops over single ones. Shapes are those of
``torch.nn.Linear.weight``: rows are outputs. The configurations come from public repositories and papers, which stand
beside them in ``models.json``; the shapes follow from them (`architecture`), and a list of shapes that was made apart
is kept as a check. Multi-token-prediction layers are left out.

Parallelism cuts a model in four ways (`held`): pipeline stages take blocks of neighbouring layers, as evenly as it
goes; tensor parallelism cuts the rows of a layer or its columns (Megatron-LM's column- and row-parallel layers);
expert parallelism gives every rank an equal part of the experts; data parallelism replicates what is left.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Any

from muon_lab.nearest import unknown
from muon_lab.parallel.grid import Grid, Placement, even

ROLES = ("attention", "indexer", "mlp", "expert", "shared", "router", "embedding", "head", "position", "other")

#: What matrix optimizers leave to AdamW (Jordan et al., 2024; Megatron-LM ``is_embedding_or_output_parameter``).
EXCLUDED = ("embedding", "head", "position")

#: How a group of matrices with the same inputs may be kept: as the model's own code does, apart, or as one.
VARIANTS = ("stored", "split", "fused")


@dataclass(frozen=True)
class Layer:
    """A class of equal matrices.

    Parameters
    ----------
    name : str
        Such as "attn.q".
    role : str
        One of `ROLES`.
    shape : (int, int)
        Outputs and inputs.
    blocks : tuple of int
        The transformer blocks that have such a matrix; its place in depth for whatever stands outside of them.
    per_block : int
        How many in each, such as the number of experts.
    cut : {0, 1}, optional
        The axis that tensor parallelism cuts: 0 for column-parallel layers, 1 for row-parallel ones; None for none.
    joins : str
        The name of the matrix that this one and its neighbours with the same `joins` may be kept as, "" for none.
    unit : int
        Rows (or columns) of the cut axis that belong together, such as those of an attention head.

    Raises
    ------
    ValueError
        If one of them is out of its range.

    Examples
    --------
    >>> up = Layer("experts.up", "expert", (2048, 7168), blocks=(1, 2, 3), per_block=384, cut=0)
    >>> up.count, up.parameters, up.excluded
    (1152, 16911433728, False)
    """

    name: str
    role: str
    shape: tuple[int, int]
    blocks: tuple[int, ...] = (0,)
    per_block: int = 1
    cut: int | None = None
    joins: str = ""
    unit: int = 1

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise unknown("role", self.role, ROLES)
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise ValueError(f"shape of layer {self.name!r} must be two positive lengths, not {self.shape}")
        if self.per_block < 1 or not self.blocks or min(self.blocks) < 0:
            raise ValueError(
                f"layer {self.name!r} needs blocks counted from 0 and at least one matrix in each, not "
                f"{self.per_block} in {self.blocks}"
            )
        if self.cut not in (None, 0, 1):
            raise ValueError(f"cut of layer {self.name!r} must be 0 (rows), 1 (columns) or None, not {self.cut!r}")

    @property
    def count(self) -> int:
        """Number of matrices."""
        return len(self.blocks) * self.per_block

    @property
    def parameters(self) -> int:
        """Entries of all of them."""
        return self.count * prod(self.shape)

    @property
    def expert(self) -> bool:
        """Whether expert parallelism spreads them."""
        return self.role == "expert"

    @property
    def excluded(self) -> bool:
        """Whether matrix optimizers leave them to AdamW."""
        return self.role in EXCLUDED


@dataclass(frozen=True)
class Model:
    """All matrices of a model, and what else it has.

    Parameters
    ----------
    name : str
        As in `names`, or the user's own.
    layers : tuple of Layer
        Embeddings included.
    blocks : int
        Number of transformer blocks.
    vectors : int
        Entries of norms and biases.
    source : tuple of str
        Where the configuration comes from.
    active : float, optional
        Parameters that take part in one token, as published or counted; None for all.
    notes : tuple of str
        What a reader of the numbers should know.

    Examples
    --------
    >>> model = get("kimi-k2")
    >>> model.count, round(model.parameters / 1e9, 1)
    (69668, 1026.4)
    """

    name: str
    layers: tuple[Layer, ...]
    blocks: int
    vectors: int = 0
    source: tuple[str, ...] = ()
    active: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def matrices(self) -> tuple[Layer, ...]:
        """What a matrix optimizer updates: all but embeddings and head."""
        return tuple(layer for layer in self.layers if not layer.excluded)

    @property
    def count(self) -> int:
        """Number of matrices without embeddings and head."""
        return sum(layer.count for layer in self.matrices)

    @property
    def matrix_parameters(self) -> int:
        """Entries of the matrices without embeddings and head."""
        return sum(layer.parameters for layer in self.matrices)

    @property
    def parameters(self) -> int:
        """Entries of everything."""
        return sum(layer.parameters for layer in self.layers) + self.vectors

    def layer(self, name: str) -> Layer:
        """Return a class of matrices.

        Raises
        ------
        ValueError
            If there is none of that name; says which is nearest.

        Examples
        --------
        >>> get("llama-3-8b").layer("mlp.down").shape
        (4096, 14336)
        """
        found = {layer.name: layer for layer in self.layers}
        if name not in found:
            raise unknown(f"layer of {self.name}", name, found)
        return found[name]

    def without(self, *roles: str) -> "Model":
        """Return the model less the layers of some roles.

        Examples
        --------
        >>> get("qwen3-30b-a3b").without("router").count
        18624
        """
        return replace(self, layers=tuple(layer for layer in self.layers if layer.role not in roles))


def names() -> tuple[str, ...]:
    """Return the models that are known by name.

    Examples
    --------
    >>> len(names()), names()[0]
    (17, 'kimi-k2')
    """
    return tuple(_content())


def get(name: str, *, qkv: str = "stored", gate_up: str = "stored") -> Model:
    """Return a model by name.

    Parameters
    ----------
    name : str
        One of `names`.
    qkv, gate_up : {"stored", "split", "fused"}
        Whether queries, keys and values are one matrix, or gate and up-projection: "stored" is what the model's own
        code does. The latent projections of multi-head latent attention stay apart.

    Raises
    ------
    ValueError
        For an unknown name or variant; says which is nearest.

    Examples
    --------
    >>> [layer.name for layer in get("qwen3-8b", qkv="fused", gate_up="fused").matrices]
    ['attn.qkv', 'attn.o', 'mlp.gate_up', 'mlp.down']
    >>> get("gpt2").count, get("gpt2", qkv="split").count
    (48, 72)
    """
    if name not in _content():
        raise unknown("model", name, names())
    from muon_lab.cost import architecture

    entry = _content()[name]
    model = architecture.model(entry["config"], name)
    active = entry["published_active_billions"]
    model = replace(model, source=tuple(entry["source"]), active=active * 1e9 if active else model.active)
    return variant(model, qkv=qkv, gate_up=gate_up, fused=architecture.fused(entry["config"]))


def variant(model: Model, *, qkv: str = "stored", gate_up: str = "stored", fused: Collection[str] = ()) -> Model:
    """Return a model whose parts are apart, with those that should be one joined.

    `fused` names the groups, "qkv" and "gate_up", that the model's own code keeps as one matrix.

    Examples
    --------
    >>> parts = tuple(Layer(part, "mlp", (6, 4), cut=0, joins="mlp.gate_up") for part in ("mlp.gate", "mlp.up"))
    >>> variant(Model("two", parts, blocks=1), gate_up="fused").layers[0].shape
    (12, 4)
    """
    joined = {}
    for argument, given in (("qkv", qkv), ("gate_up", gate_up)):
        if given not in VARIANTS:
            raise unknown(f"variant {argument}", given, VARIANTS)
        joined[argument] = given == "fused" or (given == "stored" and argument in fused)
    return _joined(model, lambda group: joined.get(group.rpartition(".")[2], False))


def _joined(model: Model, wanted: Callable[[str], bool]) -> Model:
    """Join the rows of neighbours with the same `joins`, if they stand in the same blocks."""
    layers: dict[tuple[str, tuple[int, ...], int, int], Layer] = {}
    for layer in model.layers:
        group = layer.joins if layer.joins and wanted(layer.joins) else ""
        key = (group or layer.name, layer.blocks, layer.per_block, layer.shape[1])
        if group and key in layers:
            rows = layers[key].shape[0] + layer.shape[0]
            layers[key] = replace(layers[key], shape=(rows, layer.shape[1]))
        else:
            layers[key] = replace(layer, name=group, joins="") if group else layer
    return replace(model, layers=tuple(layers.values()))


@dataclass(frozen=True)
class Held:
    """What one rank has of a class of matrices.

    Attributes
    ----------
    layer : Layer
        The class.
    count : int
        How many of its matrices the rank has, or has shards of.
    placement : Placement, optional
        How their shards lie on the tensor-parallel ranks; None if each rank has whole ones.
    replicas : int
        Number of ranks over which owners can be spread. They have the very same matrices or shards; whole dense
        matrices also lie on all tensor-parallel ranks, each of which updates them (as in Megatron-LM).
    """

    layer: Layer
    count: int
    placement: Placement | None
    replicas: int

    @property
    def shard(self) -> tuple[int, int]:
        """The shape of what the first rank has of one matrix."""
        m, n = self.layer.shape if self.placement is None else self.placement.shape(self.layer.shape, 0)
        return m, n

    @property
    def parameters(self) -> int:
        """Entries that the first rank has."""
        return self.count * prod(self.shard)

    @property
    def broken(self) -> bool:
        """Whether shards hold parts of heads."""
        return self.placement is not None and any(size % self.layer.unit for size in self.placement.sizes)


def held(model: Model, grid: Grid, stage: int = 0, expert_tp: int = 1) -> tuple[Held, ...]:
    r"""Return what a rank of a pipeline stage has: all ranks of a stage have alike, of different experts.

    Dense layers are cut over the T tensor-parallel ranks and replicated D times. Experts are spread over the E ranks of
    their group and, with ``expert_tp=1``, whole: each is replicated :math:`D T / E` times. With ``expert_tp=T`` they
    are cut as dense layers are, and replicated :math:`D / E` times. Embeddings stand in the first stage, a head in the
    last; both are cut along their rows, evenly or not.

    Raises
    ------
    ValueError
        If there is no such stage, or more stages than blocks; if T does not divide an axis that it cuts, or E the
        number of experts or of ranks that may hold different ones; if `expert_tp` is neither 1 nor T.

    Examples
    --------
    >>> experts = [part for part in held(get("kimi-k2"), Grid(dp=64, pp=4, ep=64), stage=1) if part.layer.expert]
    >>> [(part.layer.name, part.count, part.replicas) for part in experts]
    [('experts.gate', 90, 1), ('experts.up', 90, 1), ('experts.down', 90, 1)]
    """
    if expert_tp not in (1, grid.tp):
        raise ValueError(f"expert_tp must be 1 or tp={grid.tp}, not {expert_tp}")
    here = stage_blocks(model.blocks, grid.pp, stage)
    check_tp(model, grid.tp, expert_tp)
    check_ep(model, grid.ep, grid.dp * grid.tp, expert_tp)
    found = []
    for layer in model.layers:
        blocks = _in_stage(layer, here, model.blocks)
        if not blocks:
            continue
        count = blocks * layer.per_block
        tp = expert_tp if layer.expert else grid.tp
        placement = None if layer.cut is None or tp == 1 else even(layer.shape[layer.cut], tp, layer.cut)
        replicas = grid.dp * grid.tp // (grid.ep * tp) if layer.expert else grid.dp
        found.append(Held(layer, count // grid.ep if layer.expert else count, placement, replicas))
    return tuple(found)


def stage_blocks(blocks: int, pp: int, stage: int) -> range:
    """Return the blocks of a pipeline stage: neighbours, as evenly as it goes, the first stages holding one more.

    Raises
    ------
    ValueError
        If there is no such stage, or a stage would be empty.

    Examples
    --------
    >>> [len(stage_blocks(61, 4, stage)) for stage in range(4)]
    [16, 15, 15, 15]
    """
    if pp > blocks:
        raise ValueError(f"pp={pp} stages need a block each, but the model has {blocks}")
    if not 0 <= stage < pp:
        raise ValueError(f"stage must lie in 0..{pp - 1}, not be {stage}")
    part = even(blocks, pp, 0).part(stage)
    return range(part.start, part.stop)


def _in_stage(layer: Layer, here: range, blocks: int) -> int:
    """Return how many of a layer's blocks lie in a stage; what lies past the last block counts to it."""
    return sum(1 for block in layer.blocks if min(block, blocks - 1) in here)


def check_tp(model: Model, tp: int, expert_tp: int = 1, ranks: int = 0) -> None:
    """Refuse a T that does not divide every axis that it cuts; the one that is told instead divides all of them.

    Parameters
    ----------
    model : Model
        Whose axes; embeddings and heads are cut evenly or not.
    tp, expert_tp : int
        Experts are cut too if `expert_tp` is more than 1.
    ranks : int
        How many of a stage there are, which what is told divides as well; 0 if that is open.

    Raises
    ------
    ValueError
        If it does not; names the first layer, and the nearest T that will do.

    Examples
    --------
    >>> check_tp(get("kimi-k2"), 7)
    Traceback (most recent call last):
    ...
    ValueError: tp=7 does not divide the 12288 rows of 'attn.q_b' of kimi-k2, but tp=8 divides all that is cut
    """
    for layer, length in _lengths(model, expert_tp):
        if length % tp:
            common = gcd(ranks, *(other for _, other in _lengths(model, expert_tp)))
            axis = "columns" if layer.cut else "rows"
            raise ValueError(
                f"tp={tp} does not divide the {length} {axis} of {layer.name!r} of {model.name}, "
                f"but tp={_divisor(common, tp)} divides all that is cut"
            )


def check_ep(model: Model, ep: int, ranks: int, expert_tp: int = 1) -> None:
    """Refuse an E that does not divide the experts of a block, or the places of a stage for whole experts.

    Parameters
    ----------
    model : Model
        Whose experts.
    ep, ranks, expert_tp : int
        A stage of D·T ranks has D·T places for experts, a T-th of that if experts are cut.

    Raises
    ------
    ValueError
        If it does not; names the nearest E that will do.

    Examples
    --------
    >>> check_ep(get("glm-4.5"), 64, ranks=64)
    Traceback (most recent call last):
    ...
    ValueError: ep=64 does not divide the 160 experts of 'experts.gate' of glm-4.5, but ep=32 divides them and dp·tp=64
    """
    experts, places = [layer for layer in model.layers if layer.expert], ranks // expert_tp
    told = f"dp·tp={places}" if expert_tp == 1 else f"dp={places}"
    near = _divisor(gcd(places, *(layer.per_block for layer in experts)), ep)
    for layer in experts:
        if layer.per_block % ep:
            raise ValueError(
                f"ep={ep} does not divide the {layer.per_block} experts of {layer.name!r} of {model.name}, "
                f"but ep={near} divides them and {told}"
            )
    if places % ep:
        raise ValueError(f"ep={ep} does not divide {told}, among which experts are spread, but ep={near} does")


def _lengths(model: Model, expert_tp: int) -> Iterator[tuple[Layer, int]]:
    """Yield the layers that must be cut into equal parts, with the length of the axis."""
    for layer in model.layers:
        if layer.cut is not None and not layer.excluded and (not layer.expert or expert_tp > 1):
            yield layer, layer.shape[layer.cut]


def _divisor(number: int, near: int) -> int:
    """Return the divisor of a number that is nearest to another, the smaller one of two."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - near), d))


@cache
def _content() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(Path(__file__).with_name("models.json").read_text("utf-8"))
