"""Measured numbers as people write them."""

import math


def shortest(value: float, error: float) -> float:
    """Return the decimal of fewest digits within an error of a value; the value itself if that needs 15 digits.

    Examples
    --------
    >>> shortest(0.94999993, 1e-6), shortest(0.0312, 1e-4), shortest(-2.0, 0.0)
    (0.95, 0.0312, -2.0)
    """
    if not math.isfinite(value):
        return value
    for digits in range(1, 16):
        rounded = float(f"{value:.{digits}g}")
        if abs(rounded - value) <= error:
            return rounded
    return value
