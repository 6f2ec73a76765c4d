r"""What does a schedule do to one singular value?

An odd polynomial acts on singular values alone, so this is all there is to know of a schedule in exact arithmetic: its
image of σ, and the largest and smallest image on [σ, 1].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from muon_lab.polar import schedules
from muon_lab.studies.study import Case, Column, Metrics, Study


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    method: tuple[str, ...] = ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "taylor")
    """A schedule."""
    steps: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    """Number of steps."""
    sigma: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """A singular value, relative to the Frobenius norm of its matrix: above 0, at most 1."""


COLUMNS = (
    Column("image", "1", "p(σ)"),
    Column("error", "1", "|1 − p(σ)|"),
    Column("worst", "1", "the largest |1 − p| on [σ, 1], on a grid of 40,001 points"),
    Column("low", "1", "the smallest p on [σ, 1]"),
    Column("high", "1", "the largest p on [σ, 1]"),
    Column("slope", "1", "p'(0), the gain of a tiny singular value"),
)


def settle(point: Mapping[str, Any], file: object) -> Iterator[Case]:
    """Yield the case of one point of the grid."""
    sigma = float(point["sigma"])
    if not 0 < sigma <= 1:
        raise ValueError(f"sigma must lie above 0 and at most at 1, not {sigma!r}")
    schedule = schedules.get(point["method"], point["steps"])
    yield {"method": schedule.name, "steps": schedule.steps, "sigma": sigma}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    schedule = schedules.get(case["method"], case["steps"])
    image = schedule.map(case["sigma"])
    low, high = schedule.band(case["sigma"])
    return {
        "image": image,
        "error": abs(1 - image),
        "worst": max(abs(1 - low), abs(1 - high)),
        "low": low,
        "high": high,
        "slope": schedule.slope,
    }


STUDY = Study(
    name="schedules",
    question="What does a schedule do to one singular value, in exact arithmetic?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="worst",
    group=("method", "steps"),
    settle=settle,
    measure=measure,
    work=lambda case: 40_001 * 7.0 * case["steps"],
)
