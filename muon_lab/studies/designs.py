r"""Which schedule is best where every product has low-precision operands?

The direction of a result is judged, :math:`\sqrt{1 - \cos^2}`, beside its distance to the polar factor: what a learning
rate can make good is not counted. The last steps may be taken in bfloat16 (`fine`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from muon_lab.arithmetic import formats
from muon_lab.nearest import unknown
from muon_lab.polar import flops, schedules
from muon_lab.studies import sources
from muon_lab.studies.orthogonalization import ESCAPED, shape_of
from muon_lab.studies.stability import QUINTIC
from muon_lab.studies.study import Case, Column, Ended, LeftOut, Metrics, Study, svd_flops


@dataclass(frozen=True)
class Axes:
    """The axes, in grid order."""

    spectrum: tuple[str, ...] = ("gaussian", "geometric(100)", "recorded:gradient/200/*")
    """A named spectrum such as geometric(1e3), `recorded[:PATTERN]`, or `file[:PATTERN]` with --matrices."""
    shape: tuple[str, ...] = ("128x512",)
    """ROWSxCOLS of planted matrices."""
    seed: tuple[int, ...] = (0,)
    """Draws of planted matrices."""
    format: tuple[str, ...] = ("mxfp8_e4m3",)
    """The number format of both operands of every product."""
    scale_mode: tuple[str, ...] = ("rceil",)
    """How scales of MX blocks are rounded: rceil, ceil, floor, even."""
    fine: tuple[int, ...] = (0,)
    """How many steps at the end are taken in bfloat16."""
    method: tuple[str, ...] = ("simple", "quintic", "polar_express", "taylor", "mxfp8_flat")
    """A schedule: anything that polar.schedules.get takes."""
    steps: tuple[int, ...] = (5, 6, 8)
    """Steps of the schedule; a method that does not have so many is left out."""


COLUMNS = (
    Column("direction", "1", "√(1 − cos²): distance of U to the line through X, relative; 1 if X points away"),
    Column("relative", "1", "‖X − U‖/‖U‖"),
    Column("cosine", "1", "⟨X, U⟩/(‖X‖‖U‖)"),
    Column("orthogonality", "1", "‖XXᵀ − UUᵀ‖/√r on the short side, r the rank"),
    Column("sigma_max", "1", "largest singular value of X"),
    Column("fro_ratio", "1", "‖X‖/‖U‖"),
    Column("failed_step", "count", "first step whose iterate is not finite"),
)


def settle(point: Mapping[str, Any], file: sources.File | None) -> Iterator[Case]:
    """Yield the cases of one point of the grid."""
    from muon_lab.arithmetic.scales import MODES

    rows, cols = shape_of(point["shape"])
    format = formats.get(point["format"])
    if point["scale_mode"] not in MODES:
        raise unknown("scale mode", point["scale_mode"], MODES)
    schedule = schedules.get(point["method"])
    try:
        schedule = schedules.get(point["method"], point["steps"])
    except ValueError as error:
        if point["steps"] < 1:
            raise
        raise LeftOut(str(error)) from None
    if not 0 <= point["fine"] <= point["steps"]:
        raise ValueError(f"fine must lie between 0 and the number of steps, {point['steps']}, not {point['fine']}")
    scaled = isinstance(format, formats.BlockFormat) and not format.global_scale
    own = {
        "format": format.name,
        "scale_mode": point["scale_mode"] if scaled else None,
        "fine": point["fine"],
        "method": schedule.name if "(" in point["method"] else point["method"],
        "steps": schedule.steps,
    }
    for case in sources.settle(point["spectrum"], rows, cols, point["seed"], file):
        yield {**case, "spectrum": case["source"], "shape": f"{case['rows']}x{case['cols']}", **own}


def measure(case: Case) -> Metrics:
    """Return the metrics of one case."""
    import torch

    from muon_lab import polar
    from muon_lab.arithmetic import Rounded
    from muon_lab.measure.polar import errors
    from muon_lab.polar.tuning import direction_error

    truth = sources.truth(case)
    schedule = schedules.get(case["method"], case["steps"])
    coarse, fine = Rounded(case["format"], scale_mode=case["scale_mode"] or "rceil"), Rounded("bf16")
    policies = [coarse] * (schedule.steps - case["fine"]) + [fine] * case["fine"]
    X = torch.tensor(sources.matrix(case), dtype=torch.float32)
    for step, iterate in enumerate(polar.iterates(schedule, policies)(X)):
        if not torch.isfinite(iterate).all():
            raise Ended("nonfinite", f"step {step} is not finite", {"direction": 1.0, "failed_step": step})
        result = iterate.double()
    found = errors(result, truth)._asdict()
    metrics = {column.name: found.get(column.name) for column in COLUMNS}
    metrics |= {"direction": direction_error(result, torch.tensor(truth.U))}
    if found["sigma_max"] > ESCAPED:
        raise Ended("diverged", f"a singular value of {found['sigma_max']:.3g}", metrics)
    return metrics


def _work(case: Case) -> float:
    """Estimate the flops of a case: every step, and the decompositions that judge it."""
    rows, cols = case["rows"], case["cols"]
    return case["steps"] * flops.plain([QUINTIC], rows, cols) + 3 * svd_flops(rows, cols)


STUDY = Study(
    name="designs",
    question="Which schedule is best where every product has low-precision operands?",
    version=1,
    axes=Axes,
    columns=COLUMNS,
    headline="direction",
    group=("spectrum", "format", "fine", "steps", "method"),
    settle=settle,
    measure=measure,
    work=_work,
    facts=("rows", "cols", *sources.FACTS),
)
