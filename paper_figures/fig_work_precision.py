"""What an orthogonalization costs for the error that it leaves: in flops and in time."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"work_precision": "experiments/work_precision/table.parquet"}

CAPTION = r"""
The distance of an orthogonalized float32 matrix from the exact polar factor $U$, against flops (first and third row)
and time (second and fourth row, one thread, medians with quartiles over rounds). The unit is five quintic steps in the
plain loop, timed on the same matrix in turns with the method. A curve is a schedule with 2, 3, 4, 5, 6 and 8 steps from
left to right; a design (`minimax`) is made anew for every number of steps. Solid: the plain loop. Dotted: the same
polynomials in the form that `polar.auto` takes, with symmetric products at half their flops. Single squares: methods
that compute the factor; flops are what they count themselves, with symmetric products as general ones.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.work_precision(tables["work_precision"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
