"""Measured numbers as people write them."""

import math
from collections.abc import Sequence


def shortest(value: float, error: float, named: Sequence[float] = ()) -> float:
    """Return the decimal of fewest digits within an error of a value; the value itself if that needs 15 digits.

    Numbers that somebody has named go before it: the nearest of them, if it is within the error.

    Examples
    --------
    >>> shortest(0.94999993, 1e-6), shortest(0.0312, 1e-4), shortest(-2.0, 0.0), shortest(0.955, 0.01, [0.9, 0.95])
    (0.95, 0.0312, -2.0, 0.95)
    """
    if not math.isfinite(value):
        return value
    nearest = min(named, key=lambda each: abs(each - value), default=math.inf)
    if abs(nearest - value) <= error:
        return nearest
    for digits in range(1, 16):
        rounded = float(f"{value:.{digits}g}")
        if abs(rounded - value) <= error:
            return rounded
    return value
