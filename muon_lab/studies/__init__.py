"""One question a module: axes in, one row out.

Every study runs with the numerical libraries alone: ``python -m muon_lab.studies NAME < cases.jsonl > rows.jsonl``.

Examples
--------
>>> from muon_lab import studies
>>> blockwise = studies.get("blockwise")
>>> point = {name: values[0] for name, values in blockwise.defaults.items()}
>>> (case,) = blockwise.settle({**point, "source": "gaussian", "rows": 16, "cols": 64, "dim": 0, "tp": 4}, None)
>>> row = blockwise.row(case)
>>> row["outcome"], row["bound"], 0 < row["relative"] < 1
('ok', 2.0, True)
"""

from importlib import import_module

from muon_lab.nearest import unknown
from muon_lab.studies.study import Study

#: The studies by name, in the order in which they are listed.
NAMES = (
    "orthogonalization",
    "blockwise",
    "volume",
    "sharded_training",
    "reduction",
    "layerwise",
    "stability",
    "convergence",
    "preconditioner",
    "schedules",
    "designs",
    "speed",
    "work_precision",
    "emulation",
    "step_cost",
    "throughput",
    "layout_time",
)

__all__ = ["NAMES", "Study", "get"]


def get(name: str) -> Study:
    """Return a study by name; raises ``ValueError`` naming the nearest one if there is none."""
    if name not in NAMES:
        raise unknown("study", name, NAMES)
    return import_module(f"muon_lab.studies.{name}").STUDY
