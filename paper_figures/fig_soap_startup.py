"""The first steps of SOAP and REKLS: how large they are, how far rounding decides them, and what helps."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"soap_startup": "experiments/soap_startup/table.parquet"}

#: What the panels show: the optimizer and the shape of the weight.
PROBLEMS = (("soap", "32x32"), ("soap_iteration", "32x64"), ("soap_iteration", "128x16"), ("rekls", "64x32"))

#: The remedies, in the order of the legend.
REMEDIES = ("none", "skip", "clip", "eps", "rotated", "skip+rotated", "eps+start+skip+rotated")

CAPTION = r"""
Upper row: the root mean square of the entries of the update, the learning rate left out, over the first steps on
independent Gaussian gradients; lower row: the distance between the updates of two runs whose gradients differ in the
last bit of every entry. Medians over five draws; a thin line reaches up to the largest. Steps that a remedy leaves out
are not drawn. `none`: as published; `skip`: the first gradient makes the bases and nothing else; `clip`: the RMS is
limited to 1; `eps`: $\epsilon = 10^{-3}$ in the place of $10^{-8}$; `rotated`: second moments follow the bases; `start`
(REKLS): the first Kullback-Leibler correction divides by 1 in the place of $\epsilon$.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    rows = tables["soap_startup"].filter(spike=1.0, persistent=0.0, format="fp32")
    problem = pl.any_horizontal(
        (pl.col("optimizer") == optimizer) & (pl.col("shape") == shape) for optimizer, shape in PROBLEMS
    )
    return panels.preconditioner(rows.filter(problem, pl.col("remedy").is_in(REMEDIES)))


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
