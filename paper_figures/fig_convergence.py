"""Five optimizers on the same problems, each at its best learning rate of one grid."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"convergence": "experiments/convergence/table.parquet"}

CAPTION = r"""
Upper row: the loss of five optimizers, each at the learning rate of the grid with the lowest median at the end; lower
row: the loss after the last step against the learning rate. `gpt small`: a GPT of 131,392 parameters on English text,
1,536 bytes a step, judged on validation text; `gpt noisy` and `gpt quiet`: the same with 512 and with 4,608 bytes a
step, the latter for three of the optimizers; `quadratic` and `factorization`: planted matrix problems whose optimum is
0. Lines are medians over three seeds, bands and bars reach
from the lowest to the highest.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.convergence(tables["convergence"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
