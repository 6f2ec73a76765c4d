"""What tensor-parallel layouts make a rank send, and from which shape on sums of Gram matrices pay."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"tp_volume": "experiments/tp_volume/table.parquet"}

CAPTION = r"""
Above: what a rank sends for one matrix and step, by ring algorithms, in three layers of Llama 3 70B; five steps of a
schedule with fifth powers, `owner` as a mean over as many matrices as ranks, `periodic` over five steps of the
optimizer. Below: the same over what `duplicated` sends, for all layers of eight models that tensor parallelism cuts,
against the ratio of their axes. Dashed: the short axis is the one that is cut, so that sums of Gram matrices need an
exchange before and after. Rings: the ratio from which on a layout sends less than `duplicated`. In bfloat16 shards
take half the bytes, but `gram` sums in float32. `factors` gathers the states of SOAP and REKLS.
"""

LAYERS = (("llama-3-70b", "attn.q"), ("llama-3-70b", "mlp.up"), ("llama-3-70b", "attn.k"))


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.volume(tables["tp_volume"], LAYERS)


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
