"""What did the published throughput of Muon count, and what can the optimizer have cost?

A case is a model of the article and one way to count the flops of its optimizer; beside it stands the prediction of the
slowdown at an assumed rate of the products. See `cost.throughput`. Nothing runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from muon_lab.cost import throughput
from muon_lab.nearest import unknown
from muon_lab.studies.study import Case, Column, Metrics, Study


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    model: tuple[str, ...] = tuple(throughput.ARTICLE)
    """A model of the article: kimi-k2 or qwen3-30b-a3b."""
    order: tuple[str, ...] = throughput.ORDERS
    """The side that is the order of the Gram matrix: short, rows or long."""
    gate_up: tuple[str, ...] = throughput.GATE_UP
    """Gate and up-projection as one matrix or two: fused or split."""
    kernel: tuple[str, ...] = ("gemm",)
    """gemm, or syrk: symmetric products at half their flops."""
    rate: tuple[float, ...] = (400.0, 800.0, 1250.0, 2500.0)
    """Assumed TFLOP/s a GPU of the iteration's products, for the prediction."""
    product_us: tuple[float, ...] = (0.0, 10.0)
    """Assumed microseconds of each product beside its flops, for the prediction."""
    overlap: tuple[str, ...] = ("hidden", "exposed")
    """Whether the gather of weights hides behind the next forward pass, for the prediction."""


COLUMNS = (
    Column("optimizer_tflops", "TFLOP/s", "a GPU's, counted in this way"),
    Column("published_tflops", "TFLOP/s", "the optimizer's in the article"),
    Column("over_published", "1", "counted over published"),
    Column("step_seconds", "s", "a training step under Muon, from the model's published throughput"),
    Column("products_seconds", "s", "the products as they run, on the busiest GPU, at the assumed rate and overhead"),
    Column("exposed_seconds", "s", "communication that nothing hides"),
    Column("slowdown", "1", "predicted share of the model's throughput that Muon costs"),
    Column("published_slowdown", "1", "the same in the article"),
    Column("implied_tflops", "TFLOP/s", "the rate at which the products alone explain the published slowdown"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid."""
    known = {
        "model": throughput.ARTICLE,
        "order": throughput.ORDERS,
        "gate_up": throughput.GATE_UP,
        "kernel": ("gemm", "syrk"),
        "overlap": ("hidden", "exposed"),
    }
    for name, names in known.items():
        if point[name] not in names:
            raise unknown(name.replace("_", " "), point[name], names)
    if not 0 < point["rate"] < 1e6:
        raise ValueError(f"rate must lie above 0 and below 1e6 TFLOP/s, not {point['rate']!r}")
    if not 0 <= point["product_us"] < 1e6:
        raise ValueError(f"product_us must be at least 0 and below 1e6, not {point['product_us']!r}")
    yield {**point, "rate": float(point["rate"]), "product_us": float(point["product_us"])}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    entry = throughput.published(case["model"])
    counted = throughput.counted(entry, case["order"], case["gate_up"], case["kernel"])
    overlap = case["overlap"] == "hidden"
    how = {"kernel": case["kernel"], "overhead": case["product_us"] * 1e-6}
    predicted = throughput.predicted(entry, case["rate"], overlap=overlap, **how)
    return {
        "optimizer_tflops": counted,
        "published_tflops": float(entry.optimizer),
        "over_published": counted / entry.optimizer,
        "step_seconds": throughput.step_seconds(entry, entry.model),
        "products_seconds": predicted.products,
        "exposed_seconds": predicted.exposed,
        "slowdown": predicted.slowdown,
        "published_slowdown": entry.slowdown,
        "implied_tflops": throughput.implied_rate(entry),
    }


STUDY = Study(
    name="throughput",
    question="What did the published throughput of Muon count, and what can the optimizer have cost?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="over_published",
    group=("model", "order", "gate_up", "rate", "product_us"),
    settle=settle,
    measure=measure,
    work=lambda case: 1e6,
)
