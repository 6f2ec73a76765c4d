"""How far blockwise orthogonalization is from orthogonalizing the whole matrix, on recorded and on planted matrices."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"blockwise_error": "experiments/blockwise_error/table.parquet"}

CAPTION = r"""
Every tensor-parallel rank orthogonalizes its own shard; $B$ is the assembled update, $U$ the exact polar factor of the
whole matrix. Above: their distance. Below: the largest singular value of $B$, with the value $\sqrt{tp}$ that exact
block factors cannot exceed; the ticks are its values. Points are medians over matrices and lines reach from the lower
to the upper quartile; points of one tp stand side by side. Recorded: gradients and momenta of a small GPT in training;
planted: Gaussian matrices. `svd` is exact on every shard; `quintic` is the five-step schedule.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.blockwise(tables["blockwise_error"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
