"""Names of the axes `method` and `dtype`, and the orthogonalizers that they stand for."""

from typing import TYPE_CHECKING

from muon_lab.nearest import unknown
from muon_lab.polar import schedules
from muon_lab.problems.loaded import DTYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from muon_lab.polar import Orthogonalizer

#: The exact polar factor by SVD; every other method is the name of a schedule.
EXACT = "svd"

#: What a cast may have left in the null space: one rounding an entry, of which a lopsided matrix can put up to three
#: times the average into one direction. (Data that were computed carry more, see `polar.svd`.)
CAST_ROUNDINGS = 3


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


def data_dtype(dtype: str) -> "torch.dtype":
    """Return the dtype in which a matrix is given to an iteration in some dtype: at least float32, as gradients are."""
    import torch

    return torch.float64 if dtype == "float64" else torch.float32


def cast(G: "Tensor", dtype: str) -> "Tensor":
    """Return a matrix normalised, then rounded to a dtype."""
    from muon_lab.arithmetic import Exact, unit

    return unit(G, Exact().norm(G)).to(dtype_named(dtype))


def noise(roundoff: float, dtype: str) -> float:
    """Return the roundoff by which to judge the rank of data that had one roundoff and were then cast to a dtype."""
    from muon_lab.measure import bounds
    from muon_lab.polar.direct import ROUNDINGS

    return max(roundoff, CAST_ROUNDINGS / ROUNDINGS * bounds.unit_roundoff(dtype))


def build(method: str, steps: int | None, dtype: str, roundoff: float = 0.0) -> "Orthogonalizer":
    """Return the orthogonalizer of a settled case, which keeps its numbers in the given dtype.

    The exact method takes the polar factor of the normalised matrix rounded to that dtype; the roundoff of the data
    from which it comes tells it range from rounding.
    """
    from muon_lab import polar
    from muon_lab.arithmetic import Exact

    if method != EXACT:
        return polar.newton_schulz(schedules.get(method, steps), Exact(dtype_named(dtype)))
    exact = polar.svd(noise(roundoff, dtype))
    return lambda G: exact(cast(G, dtype)).to(G.dtype)
