"""The published throughput of Muon: what was counted, and what it can have cost."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"throughput": "experiments/throughput/table.parquet"}

CAPTION = r"""
Left: TFLOP/s a GPU of Muon's orthogonalization in two published runs, by the side that is taken as the order of the
Gram matrix, and by gate and up-projection as one matrix or as two; dashed: the numbers of the article. Only the shorter
side is what runs. Right: the share of the model's throughput that Muon costs, predicted from the products as they run,
against the rate of these products on a GPU; lower line: flops and hidden communication alone, band: up to 10 µs a
product and exposed communication; dashed: the article.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.draw("throughput", tables["throughput"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
