"""What an error of Muon's direction costs in training: truncated schedules, and errors planted one kind at a time."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"polar_error_matters": "experiments/polar_error_matters/table.parquet"}

CAPTION = r"""
The loss of a small GPT after 150 steps of Muon at one learning rate, against the polar error (left) and the
orthogonality error (right) of its directions, medians over matrices and steps. Schedules: stopped after one to eight
steps. Planted on the exact direction: singular values spread by $\pm\delta$, a turn that leaves the direction
orthogonal, and a scale of one half and of two, the errors anew in each step or the same in all. Medians over three
seeds, lines from the lowest to the highest; the grey band is the exact direction.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.convergence(tables["polar_error_matters"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
