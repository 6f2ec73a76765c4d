"""From a question to a table: ``python -m muon_lab.sweep``, and the same for notebooks.

Examples
--------
>>> from muon_lab import sweep
>>> rows = sweep.table("schedules", method=("quintic",), steps=(4, 5), sigma=0.01)
>>> for steps, low, high in rows.select("steps", "low", "high").rows():
...     print(f"{steps} steps: [{low:.3f}, {high:.3f}]")
4 steps: [0.918, 1.147]
5 steps: [0.978, 1.032]
"""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.sweep import executors, grid, provenance, store, tables
    from muon_lab.sweep.grid import Experiment
    from muon_lab.sweep.run import run, table

__all__ = ["Experiment", "executors", "grid", "provenance", "run", "store", "table", "tables"]
__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "Experiment": "grid",
        "run": "run",
        "table": "run",
        **{name: name for name in ("executors", "grid", "provenance", "store", "tables")},
    },
)
