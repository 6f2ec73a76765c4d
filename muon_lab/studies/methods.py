"""Names of the axes `method` and `dtype`, and the orthogonalizers that they stand for."""

from typing import TYPE_CHECKING

from muon_lab.nearest import unknown
from muon_lab.polar import schedules

if TYPE_CHECKING:
    import torch

    from muon_lab.polar import Orthogonalizer

#: The exact polar factor by SVD; every other method is the name of a schedule.
EXACT = "svd"

DTYPES = ("float64", "float32", "bfloat16", "float16")


def known() -> tuple[str, ...]:
    """Return the values of the axis `method`."""
    return (*schedules.known(), EXACT)


def settle(method: str, steps: int) -> int | None:
    """Check a method and its number of steps; None where steps do not matter. Raises ``ValueError``."""
    if method not in known():
        raise unknown("method", method, known())
    if method == EXACT:
        return None
    return schedules.get(method, steps).steps


def check_dtype(dtype: str) -> None:
    """Raise ``ValueError`` for an unknown dtype."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)


def dtype_named(dtype: str) -> "torch.dtype":
    """Return the torch dtype of a name."""
    import torch

    return getattr(torch, dtype)


def build(method: str, steps: int | None, dtype: str, roundoff: float | None = None) -> "Orthogonalizer":
    """Return the orthogonalizer of a settled case, which keeps its numbers in the given dtype.

    The roundoff is that of the data, for the exact method to tell its range from rounding.
    """
    from muon_lab import polar
    from muon_lab.arithmetic import Exact

    if method == EXACT:
        return polar.svd(roundoff)
    return polar.newton_schulz(schedules.get(method, steps), Exact(dtype_named(dtype)))
