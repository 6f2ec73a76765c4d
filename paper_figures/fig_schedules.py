"""What every published schedule does to one singular value, and how far the worst one is from 1 after k steps."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"schedules": "experiments/schedules/table.parquet"}

#: The number of steps of each schedule's own source (`muon_lab.polar.schedules.get(name).steps`); `cubic`, whose 12
#: are more than the table has, takes 10.
STEPS = {
    "simple": 5,
    "quintic": 5,
    "polar_express": 8,
    "cans": 5,
    "aol": 4,
    "deepseekv4": 10,
    "cubic5": 5,
    "cubic": 10,
    "taylor": 9,
}

CAPTION = r"""
Left: the image $p(\sigma)$ of a singular value under every schedule at its own number of steps (beside its name). A
dot is one $\sigma$; the band reaches from the smallest to the largest image on $[\sigma, 1]$. `aol` turns values close
to 1 negative without the preconditioning that it is made for, so that its band leaves the panel below. Right: the
largest distance from 1 on $[10^{-3}, 1]$ after $k$ steps; a ring marks the number of steps on the left, and a curve
that leaves through the floor goes on to rounding level. `deepseekv4` (dashed) begins as `simple`.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.schedules(tables["schedules"], STEPS)


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
