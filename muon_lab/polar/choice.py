r"""Which form of an orthogonalization to take: plain or Gram, with which restarts, with general or symmetric products.

All forms apply the same polynomial; they differ in flops and in what rounding does. The cheapest is taken whose
predicted deviation from exact arithmetic is within a tolerance (`restarts`), and the choice says what it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import Arithmetic, Exact, Symmetric, check_arithmetic
from muon_lab.polar import flops, restarts, schedules
from muon_lab.polar.engine import check_schedule, newton_schulz
from muon_lab.polar.gram import gram_newton_schulz
from muon_lab.polar.schedules import Schedule

#: The plain loop is kept unless the Gram form saves this share of its flops: smaller products run a bit slower.
WORTH = 0.05


@dataclass(frozen=True)
class Choice:
    """An orthogonalizer, and what was chosen for which reason.

    Parameters
    ----------
    schedule : Schedule
        The polynomials.
    arithmetic : Arithmetic
        How its products are taken.
    form : "plain" or "gram"
        Which loop.
    restarts : tuple of int
        Steps before which the Gram form starts anew.
    flops : float
        Multiplications and additions for one matrix.
    plain_flops : float
        The same of the plain loop with general products.
    deviation : float
        Predicted distance of the Gram form to exact arithmetic, relative; 0 for the plain loop, which is the measure.
    """

    schedule: Schedule
    arithmetic: Arithmetic
    form: str
    restarts: tuple[int, ...]
    flops: float
    plain_flops: float
    deviation: float

    def __call__(self, G: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
        """Return the approximate polar factor of each matrix, of any shape; the choice fits that it was made for."""
        if self.form == "plain":
            return newton_schulz(self.schedule, self.arithmetic)(G)
        return gram_newton_schulz(self.schedule, self.arithmetic, self.restarts)(G)

    def __str__(self) -> str:
        again = f", restarts before {', '.join(map(str, self.restarts))}" if self.restarts else ""
        return (
            f"{self.schedule.name}, {self.schedule.steps} steps, {self.form} form{again}, {self.arithmetic}: "
            f"{self.flops / self.plain_flops:.2f} of the plain loop's flops"
        )


def auto(
    shape: Sequence[int],
    steps: int | None = None,
    arithmetic: Arithmetic = Exact(),  # noqa: B008 (a value)
    *,
    schedule: str | Schedule = "quintic",
    dtype: torch.dtype = torch.float32,
    tolerance: float = restarts.TOLERANCE,
) -> Choice:
    r"""Choose the form of an orthogonalization for matrices of a shape, by flops and predicted rounding.

    `Exact` products become `Symmetric` ones, which copy half of each symmetric result. The Gram form takes the fewest
    restarts that the model of `restarts` asks for. It is not taken in an arithmetic in which no restarts meet the
    tolerance: the plain loop is stable there.

    Parameters
    ----------
    shape : sequence of int
        Of the matrix; axes before the last two are a batch.
    steps : int, optional
        Steps of the schedule; the source's own number by default.
    arithmetic : Arithmetic
        How numbers are kept and multiplied.
    schedule : str or Schedule
        A name for `schedules.get`, or a schedule of its own steps.
    dtype : torch.dtype
        Of the data.
    tolerance : float
        Deviation from exact arithmetic that the Gram form may have, relative to the norm of the result, on a
        log-spaced spectrum of condition 1e3.

    Raises
    ------
    ValueError
        For a shape of fewer than two axes or with an edge that is not a count, for what is not an arithmetic, not a
        schedule, or no real floating-point dtype, for a tolerance that is no number, and as `schedules.get`.

    Examples
    --------
    >>> from muon_lab.arithmetic import Rounded
    >>> print(auto((1024, 4096), 5))
    quintic, 5 steps, gram form, Symmetric(dtype=None, edge=256): 0.38 of the plain loop's flops
    >>> print(auto((1024, 1024), 5))
    quintic, 5 steps, plain form, Symmetric(dtype=None, edge=256): 0.75 of the plain loop's flops
    >>> auto((1024, 4096), 5, Rounded("bf16")).form
    'plain'
    """
    _check(shape, dtype, tolerance)
    check_arithmetic(arithmetic)
    chosen = schedules.get(schedule, steps) if isinstance(schedule, str) else schedule
    check_schedule(chosen)
    if type(arithmetic) is Exact:
        arithmetic = Symmetric(arithmetic.dtype)
    rows, cols = sorted(shape[-2:])
    share = arithmetic.share(rows) if isinstance(arithmetic, Symmetric) else 1.0
    general = flops.plain(chosen.coefficients, rows, cols)
    plain = flops.plain(chosen.coefficients, rows, cols, share)
    roundoff = arithmetic.roundoff(dtype)
    positions = restarts.fewest(chosen, roundoff, rows, tolerance)
    spectrum = np.geomspace(1.0, 1.0 / restarts.CONDITION, max(rows, 1))
    predicted = restarts.deviation(chosen, positions, roundoff, spectrum)
    gram = flops.gram(chosen.coefficients, rows, cols, positions, share)
    if predicted > tolerance or gram > (1 - WORTH) * plain:
        return Choice(chosen, arithmetic, "plain", (), plain, general, 0.0)
    return Choice(chosen, arithmetic, "gram", positions, gram, general, predicted)


def _check(shape: Sequence[int], dtype: torch.dtype, tolerance: float) -> None:
    """Raise ``ValueError`` for a shape, a dtype or a tolerance that is none."""
    if not isinstance(shape, Sequence) or len(shape) < 2:
        raise ValueError(f"a form is chosen for matrices, of a shape with at least 2 axes, not {shape!r}")
    if not all(isinstance(edge, Integral) and edge >= 0 for edge in shape):
        raise ValueError(f"a form is chosen for matrices, of a shape whose axes are counts, not {tuple(shape)}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a real floating-point dtype such as torch.float32, not {dtype!r}")
    if not isinstance(tolerance, Real) or math.isnan(tolerance):
        raise ValueError(f"tolerance must be a number, not {tolerance!r}")
