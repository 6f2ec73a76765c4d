"""One figure a study: a table in, a figure out."""

from collections.abc import Callable

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures.convergence import convergence
from muon_lab.figures.designs import designs
from muon_lab.figures.error_budget import error_budget
from muon_lab.figures.layerwise import layerwise_balance, overlap
from muon_lab.figures.layout_error import blockwise
from muon_lab.figures.layout_time import layout_time
from muon_lab.figures.layout_work import layout_work
from muon_lab.figures.preconditioner import preconditioner
from muon_lab.figures.ratios import emulation, speed, step_cost
from muon_lab.figures.reduction_order import reduction
from muon_lab.figures.scalar_maps import schedules
from muon_lab.figures.sharded_training import sharded_training
from muon_lab.figures.stability import stability
from muon_lab.figures.step_error import orthogonalization
from muon_lab.figures.throughput import throughput
from muon_lab.figures.tp_error import tp_error
from muon_lab.figures.tp_volume import volume
from muon_lab.figures.work_precision import work_precision
from muon_lab.nearest import unknown

__all__ = [
    "blockwise",
    "convergence",
    "designs",
    "draw",
    "emulation",
    "error_budget",
    "layerwise_balance",
    "layout_time",
    "layout_work",
    "names",
    "orthogonalization",
    "overlap",
    "preconditioner",
    "reduction",
    "schedules",
    "sharded_training",
    "speed",
    "stability",
    "step_cost",
    "throughput",
    "tp_error",
    "volume",
    "work_precision",
]

_STUDIES: dict[str, Callable[[pl.DataFrame], Figure]] = {
    "orthogonalization": orthogonalization,
    "blockwise": blockwise,
    "volume": volume,
    "sharded_training": sharded_training,
    "reduction": reduction,
    "layerwise": layerwise_balance,
    "stability": stability,
    "convergence": convergence,
    "preconditioner": preconditioner,
    "schedules": schedules,
    "designs": designs,
    "speed": speed,
    "work_precision": work_precision,
    "emulation": emulation,
    "step_cost": step_cost,
    "throughput": throughput,
    "layout_time": layout_time,
}


def names() -> tuple[str, ...]:
    """Return the studies that have a figure.

    Examples
    --------
    >>> names()[:5]
    ('orthogonalization', 'blockwise', 'volume', 'sharded_training', 'reduction')
    """
    return tuple(_STUDIES)


def draw(study: str, table: pl.DataFrame) -> Figure:
    """Draw the table of a study.

    Parameters
    ----------
    study : str
        One of `names`.
    table : polars.DataFrame
        One row a case, as the sweep writes it.

    Raises
    ------
    ValueError
        For an unknown study, a table without the study's columns, or one in which nothing was measured.

    Examples
    --------
    >>> table = pl.DataFrame({"method": "taylor", "steps": [1, 2], "sigma": 0.1, "outcome": "ok",
    ...                       "image": [0.186, 0.342], "worst": [0.814, 0.658], "low": [0.186, 0.342], "high": 1.0})
    >>> [axes.get_title() for axes in draw("schedules", table).axes]
    ['taylor, 2', '']
    """
    if study not in _STUDIES:
        raise unknown("study", study, _STUDIES)
    return _STUDIES[study](table)
