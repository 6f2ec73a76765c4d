"""Exact blocks with random-matrix theory laid over, and every tensor-parallel layout against one rank."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"tp_error": "experiments/tp_error/table.parquet"}

CAPTION = r"""
Above: every rank orthogonalizes its own block exactly; $B$ is the assembled update, $U$ the polar factor of the whole
matrix $G$. Bars: what the Marchenko-Pastur law and free convolution expect of a Gaussian matrix, by the ratio of its
axes; filled dots: Gaussian matrices with 96 rows; open: planted ones of condition 100, and momenta of a small GPT after
200 steps. Middle: how much larger the sum of the blocks' nuclear norms is than that of the whole. Below: the distance
of every layout, with five `quintic` steps, to the same steps on one rank. Points are medians over matrices, lines reach
from the lower to the upper quartile; points of one tp stand side by side. `gram` is iterated in the dtype of the panel:
in bfloat16 it needs float32 for that.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.tp_error(tables["tp_error"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
