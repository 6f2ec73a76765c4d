"""What low-precision number formats do to the parts of Muon: products, gradient, momentum, Kronecker factor."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"mxfp8_stability": "experiments/mxfp8_stability/table.parquet"}

CAPTION = r"""
First row: the distance of an orthogonalization whose products have operands in a format from the same in float64, by
schedule and number of steps; medians over matrices with their quartiles. The shaded strip holds the cases that failed:
a triangle has a singular value above 10 at the end, a number is the first step whose iterate is not finite (the
earliest of the matrices); where some matrices fail and others do not, there is a dot as well. Second row: the gradient
itself in the format: its relative error, elements clamped to the largest of their block, elements that became zero.
Third row: the share of a constant gradient that a momentum stored in the format reaches, from zero and from an
unrelated gradient of equal size, with a marker for each decay; rounded to nearest it stalls, and stochastic rounding
lets it arrive unless the scales are rounded down and the largest elements clamped. `nvfp4` arrives from zero, as one
fixed pattern that its global scale follows, and stalls from elsewhere like the others. Fourth row: the eigenvalues of
the factor $G G^T$ or $G^T G$, whichever is smaller, stored in the format (`fp32` is the control: none is negative); and
the distance between the exact polar factors of the matrix and of the matrix in the format, against its first-order
bound. Recorded: gradients of a small GPT in training; planted: spectra with the condition in parentheses.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.stability(tables["mxfp8_stability"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
