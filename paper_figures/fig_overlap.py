"""What of the communication of layer-wise data parallelism hides behind compute, by buckets and by link."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"overlap": "experiments/overlap/table.parquet"}

CAPTION = r"""
A step of Llama 3 70B on 64 data-parallel ranks with 8192 tokens each, on three clusters: gradients in float32 to the
owners of their matrices, weights in bfloat16 to all. Top: the step over one without a link against the number of
buckets. Shares of exact sizes hide the better the more buckets there are (curves of all policies coincide); shares
padded to the largest of a bucket grow with their number, and leave the panel. Of less than full overlap, exact sizes
alone are drawn. Bottom: seconds on the link, exposed and hidden, with the number of buckets (right of the bar) at which
the step is shortest. Closed forms: NCCL's own model of the links, and processor and link as two resources.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.overlap(tables["overlap"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
