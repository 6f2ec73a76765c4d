"""Factors of Muon's direction: another loss, or another unit of the learning rate?"""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from muon_lab.figures import panels

TABLES = {"scale_modes": "experiments/scale_modes/table.parquet"}

CAPTION = r"""
The loss of a small GPT after 150 steps of Muon, five quintic steps each, under six factors of the direction of an
$m\times n$ matrix: none, $\sqrt{\max(1, m/n)}$ (shape scaling), $\sqrt{m/n}$ (unit RMS norm), $\sqrt{\max(m,n)}$
(spectral), $0.2\sqrt{\max(m,n)}$ (match RMS AdamW), and the nuclear norm of the candidate. Left: against the learning
rate, which has another unit under every factor. Right: against the root mean square of the change of a weight in a
step, median over matrices. Medians over three seeds, lines from the lowest to the highest.
"""


def draw(tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw the figure from its tables."""
    return panels.convergence(tables["scale_modes"])


if __name__ == "__main__":
    import make

    raise SystemExit(make.main(["--only", Path(__file__).stem]))
