"""Where the error of an orthogonalization in a low-precision format comes from: truncation, rounding, quantization."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"mxfp8_stability": "experiments/mxfp8_stability/table.parquet"}

#: The spectra of the columns, mildest first; and the rounding of scales, as it makes little difference.
SPECTRA = ("gaussian", "geometric(100)", "geometric(10000)", "recorded")
SCALE_MODE = "rceil"

CAPTION = r"""
The distance $X - U$ of an orthogonalized matrix from the exact polar factor $U$ is a sum of four matrices, whose norms
are shown relative to $\|U\|$: truncation (the schedule in exact arithmetic), rounding (float32 alone, or the format
itself where results are stored in it, as in fp16 and bf16), quantization (operands in the format, all else in
float64), and the remainder, by which they act on one another. The circle is the norm of the sum. Matrices add as
vectors, so their norms do not add up to it: the grey bar reaches over all values that it could take, given the four
norms. It is short where one part is the error and long where two parts might cancel. Medians over matrices; the
shaded strip holds cases that diverged or, from the numbered step on, are not finite. MX scales are rounded up.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    table = tables["mxfp8_stability"]
    rounded_up = pl.col("scale_mode").is_null() | (pl.col("scale_mode") == SCALE_MODE)
    return panels.error_budget(table.filter(rounded_up, pl.col("spectrum").is_in(SPECTRA)))


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
