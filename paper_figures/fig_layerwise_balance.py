"""Who owns which layer: how long ranks wait for the busiest one, and how unevenly they hold momentum."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"layerwise": "experiments/layerwise_balance/table.parquet"}

CAPTION = r"""
Layer-wise data parallelism: matrices dealt out over ranks by their owners' policy. Top: flops of five Newton-Schulz
steps on the busiest rank over those of the mean; bottom: elements of the fullest rank over the mean; both as distances
to 1, which all below 1.001 share. LPT (longest processing time first) gives the costliest matrix left to the rank with
least to do; round robin and ping-pong count matrices, the latter from the smallest to the largest and back. Hybrid
divides giants among teams, which all multiply the $m\times m$ matrices of a team's job themselves. Grey: the largest
matrix by itself, below which no assignment of whole layers goes. Kimi K2 with one group of all experts, and with 32
groups of 12 experts a layer: dense matrices dealt out over all ranks and experts over the ranks that have the same
(apart), or both over as many ranks that have the same experts (together).
"""

MODELS = ("llama-3-70b", "kimi-k2")


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    table = tables["layerwise"]
    return panels.layerwise_balance(table.filter(pl.col("model").cast(pl.String).is_in(MODELS)))


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
