"""What a tensor-parallel layout sends for the error that it has."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {
    "tp_error": "experiments/tp_error/table.parquet",
    "tp_volume": "experiments/tp_volume/table.parquet",
}

CAPTION = r"""
The distance of the assembled update $B$ to the exact polar factor $U$ of the whole matrix, against the bytes that a
rank sends over those of the matrix; five `quintic` steps in float32, medians over matrices with quartiles. A path
leads from 2 over 4 to 8 ranks. All layouts but `blockwise` and `periodic` give the update of one rank, so that their
error is that of the schedule. Ring algorithms; `owner` is the mean over as many matrices as ranks, `periodic` over a
period of five steps whose blocks have the step size corrected to the norm of the whole.
"""

#: Ratios of the axes that are shown.
ASPECTS = (1.0, 4.0)


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    errors = tables["tp_error"].with_columns(pl.col("source").cast(pl.String))
    aspect = pl.max_horizontal("rows", "cols") / pl.min_horizontal("rows", "cols")
    kept = errors.filter(aspect.is_in(ASPECTS), pl.col("source").is_in(["gaussian", "recorded"]))
    return panels.layout_work(kept, tables["tp_volume"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
