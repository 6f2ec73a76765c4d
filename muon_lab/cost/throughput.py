r"""The published throughput of Muon, taken apart: what was counted, and what the optimizer can have cost.

A public article (April 2026, Megatron Bridge 26.02, MXFP8 on GB300) gives TFLOP/s a GPU for AdamW, and for Muon as a
sum of the model's and the optimizer's. What the sum adds is in no public code. Here it is counted in six ways: products
of five quintic steps, :math:`5\,(4 g^2 o + 2 g^3)` a matrix, where the order g of the Gram matrix is

====== ===========================================================================================
short  the shorter side, as the iteration runs
rows   the rows, as if nothing was transposed
long   the longer side
====== ===========================================================================================

and o the other one, with gate and up-projection as one matrix (``fused``) or as two (``split``). Flops become TFLOP/s a
GPU through the time of a step, which the model's own throughput gives:

.. math:: T = \frac{\text{tokens} \cdot \text{flops a token}}{\text{GPUs} \cdot \text{TFLOP/s of the model}}, \qquad
          \text{flops a token} = 6\, N_{active} + 6\, L\, h\, s\, (d_{qk} + d_v) / 2,

six for a product forward and two backward, an embedding not counted and attention causal: half of its s×s scores.

The prediction goes the other way: a step grows by the products as they run, at an assumed rate, and by communication
that nothing hides.

References
----------
NVIDIA (2026), article on emerging optimizers in Megatron, 22 April; NVIDIA-NeMo/Megatron-Bridge ``flop_utils.py`` and
its recipes for batch and sequence; NVIDIA/Megatron-LM ``num_floating_point_operations``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from muon_lab.cost import flops, inventory, network
from muon_lab.cost.inventory import Layer, Model
from muon_lab.cost.plan import Setting, plan
from muon_lab.nearest import unknown
from muon_lab.parallel.grid import Grid

#: Which side of a matrix is taken as the order of its Gram matrix.
ORDERS = ("short", "rows", "long")

#: Gate and up-projection as one matrix, or as two.
GATE_UP = ("fused", "split")

STEPS = 5


@dataclass(frozen=True)
class Published:
    """What the article says of a model, and the recipe that it ran.

    Attributes
    ----------
    grid : Grid
        Parallelism.
    batch, sequence : int
        Sequences a step, and tokens in each.
    adamw, model, optimizer : float
        TFLOP/s a GPU: of AdamW; of Muon, counted for the model and for the optimizer.
    heads, scores, values : int
        Attention heads, and the dimensions of a head that enter a score and that a value has.
    """

    name: str
    grid: Grid
    batch: int
    adamw: float
    model: float
    optimizer: float
    heads: int
    scores: int
    values: int
    experts: int
    sequence: int = 4096

    @property
    def slowdown(self) -> float:
        """The share of the model's throughput that Muon costs.

        Examples
        --------
        >>> [f"{each.slowdown:.1%}" for each in ARTICLE.values()]
        ['2.1%', '3.8%']
        """
        return 1 - self.model / self.adamw

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.sequence


#: By the name of the model in `inventory`.
ARTICLE: Mapping[str, Published] = {
    "kimi-k2": Published("kimi-k2", Grid(dp=64, pp=4, ep=64), 4096, 1051.0, 1029.0, 51.0, 64, 192, 128, 8),
    "qwen3-30b-a3b": Published("qwen3-30b-a3b", Grid(dp=8, ep=8), 512, 713.0, 686.0, 35.0, 32, 128, 128, 8),
}


def published(name: str) -> Published:
    """Return what the article says of a model.

    Raises
    ------
    ValueError
        If it says nothing; names the models of which it does.
    """
    if name not in ARTICLE:
        raise unknown("model of the article", name, ARTICLE)
    return ARTICLE[name]


def flops_per_token(entry: Published) -> float:
    """Return the flops of a token forward and backward.

    Examples
    --------
    >>> [f"{flops_per_token(entry):.3e}" for entry in ARTICLE.values()]
    ['2.055e+11', '2.308e+10']
    """
    model = inventory.get(entry.name)
    active = sum(
        layer.parameters * (entry.experts / layer.per_block if layer.expert else 1.0)
        for layer in model.layers
        if layer.role != "embedding"
    )
    return 6 * active + 6 * model.blocks * entry.heads * entry.sequence * (entry.scores + entry.values) / 2


def step_seconds(entry: Published, rate: float) -> float:
    """Return the seconds of a training step from the TFLOP/s that a GPU reaches for the model.

    Examples
    --------
    >>> kimi = ARTICLE["kimi-k2"]
    >>> [round(step_seconds(kimi, rate), 1) for rate in (kimi.adamw, kimi.model)]
    [12.8, 13.1]
    """
    return flops_per_token(entry) * entry.tokens / (entry.grid.size * rate * 1e12)


def order(layer: Layer, name: str) -> tuple[int, int]:
    """Return the order of the Gram matrix of a layer and the other side, in one of `ORDERS`.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name not in ORDERS:
        raise unknown("order of the Gram matrix", name, ORDERS)
    m, n = layer.shape
    return {"rows": (m, n), "short": (min(m, n), max(m, n)), "long": (max(m, n), min(m, n))}[name]


def newton_schulz(model: Model, name: str = "short", kernel: str = "gemm") -> float:
    """Return the flops of an update of all matrices of a model but its routers.

    Examples
    --------
    >>> f"{newton_schulz(inventory.get('kimi-k2', gate_up='fused')):.2e}"
    '8.82e+16'
    """
    matrices = model.without("router").matrices
    return sum(layer.count * flops.of_order(*order(layer, name), STEPS, kernel) for layer in matrices)


def counted(entry: Published, name: str, gate_up: str, kernel: str = "gemm") -> float:
    """Return the optimizer's TFLOP/s a GPU, by one convention.

    Examples
    --------
    >>> for entry in ARTICLE.values():
    ...     print(entry.optimizer, [round(counted(entry, *how), 1) for how in CONVENTIONS])
    51.0 [26.3, 14.5, 62.9, 51.0, 96.3]
    35.0 [14.7, 8.1, 25.9, 19.3, 33.8]
    """
    if gate_up not in GATE_UP:
        raise unknown("gate_up", gate_up, GATE_UP)
    work = newton_schulz(inventory.get(entry.name, gate_up=gate_up), name, kernel)
    return work / step_seconds(entry, entry.model) / entry.grid.size / 1e12


#: The five conventions that are told; split with the longer side overshoots both models by far.
CONVENTIONS = (("short", "fused"), ("short", "split"), ("rows", "fused"), ("rows", "split"), ("long", "fused"))


@dataclass(frozen=True)
class Predicted:
    """What a step of Muon costs more than one of AdamW, if its products run at a rate.

    Attributes
    ----------
    products : float
        Seconds of the products on the busiest GPU.
    exposed : float
        Seconds of communication that nothing hides.
    slowdown : float
        The share of the model's throughput that is lost.
    """

    products: float
    exposed: float
    slowdown: float


@cache
def predicted(
    entry: Published, rate: float, *, overlap: bool = True, kernel: str = "gemm", overhead: float = 0.0
) -> Predicted:
    """Predict the slowdown, gate and up-projection fused, owners dealt by the plan for GB300 NVL72.

    Elementwise work counts nothing: AdamW has as much.

    Parameters
    ----------
    rate : float
        TFLOP/s of the iteration's large products on a GPU.
    overlap : bool
        Whether the gather of weights hides behind the next forward pass.
    kernel : {"gemm", "syrk"}
        Of products with a symmetric result.
    overhead : float
        Seconds that each product takes beside its flops.

    Raises
    ------
    ValueError
        If the rate is not positive, or the overhead negative.

    Examples
    --------
    >>> qwen = ARTICLE["qwen3-30b-a3b"]
    >>> [f"{predicted(qwen, rate).slowdown:.1%}" for rate in (390.0, 2500.0)]
    ['3.8%', '0.6%']
    """
    if not rate > 0:
        raise ValueError(f"rate of products must be positive TFLOP/s, not {rate!r}")
    adamw = step_seconds(entry, entry.adamw)
    setting = Setting(steps=STEPS, kernel=kernel, overlap=overlap, rate=rate * 1e12, step=adamw, overhead=overhead)
    model = inventory.get(entry.name, gate_up="fused").without("router")
    totals = plan(model, network.preset("gb300-nvl72"), entry.grid, setting).totals
    seconds, exposed = totals["compute_seconds"], totals["exposed_seconds"]
    return Predicted(seconds, exposed, 1 - adamw / (adamw + seconds + exposed))


def implied_rate(entry: Published) -> float:
    """Return the TFLOP/s of the products as they run, if they alone make Muon's step longer than AdamW's.

    Examples
    --------
    >>> [round(implied_rate(entry), -1) for entry in ARTICLE.values()]
    [1260.0, 390.0]
    """
    return _flops(entry) / longer(entry) / 1e12


def longer(entry: Published) -> float:
    """Return by how many seconds Muon's step is longer than AdamW's.

    Examples
    --------
    >>> [round(longer(entry), 2) for entry in ARTICLE.values()]
    [0.27, 0.33]
    """
    return step_seconds(entry, entry.model) - step_seconds(entry, entry.adamw)


class Affine(NamedTuple):
    """A rate of large products, in TFLOP/s, and what each product takes beside its flops, in seconds."""

    rate: float
    overhead: float


def explained() -> Affine:
    r"""Return the rate and overhead with which products alone explain both slowdowns.

    A GPU's F flops in P products take :math:`F / R + P t_0`. Two models make two equations, which always have an
    answer; what speaks for it is only that both numbers are possible.

    Examples
    --------
    >>> rate, overhead = explained()
    >>> round(rate, -1), round(1e6 * overhead, 1)
    (1400.0, 10.3)
    """
    (f, p), (g, q) = ((_flops(entry), _products(entry)) for entry in ARTICLE.values())
    s, t = map(longer, ARTICLE.values())
    determinant = f * q - g * p
    return Affine(determinant / (s * q - t * p) / 1e12, (f * t - g * s) / determinant)


def _flops(entry: Published) -> float:
    """Return the flops of a GPU's products as they run, in the mean."""
    return newton_schulz(inventory.get(entry.name, gate_up="fused")) / entry.grid.size


def _products(entry: Published) -> float:
    """Return how many products a GPU makes, in the mean."""
    matrices = inventory.get(entry.name, gate_up="fused").without("router").count
    return flops.count("duplicated", STEPS) * matrices / entry.grid.size
