r"""Multiplications and additions of an orthogonalization, by the products that it takes.

A product of m×k and k×n matrices counts 2mkn. `share` is the share of a product with a symmetric result that is really
multiplied: 1 with general products, little more than 1/2 with symmetric ones (`arithmetic.Symmetric.share`).
"""

from collections.abc import Iterable, Sequence

Coefficients = tuple[float, float, float]


def plain(coefficients: Iterable[Coefficients], rows: int, cols: int, share: float = 1.0) -> float:
    r"""Return the flops of the plain loop: :math:`4 m^2 n + 2 m^3` a quintic step, :math:`4 m^2 n` a cubic one.

    Examples
    --------
    >>> plain([(15 / 8, -10 / 8, 3 / 8)], 2, 3)
    64.0
    """
    m, n = sorted((rows, cols))
    return sum(2.0 * m * m * n * (1 + share) + (2.0 * m**3 * share if c else 0.0) for _, _, c in coefficients)


def gram(
    coefficients: Sequence[Coefficients], rows: int, cols: int, restarts: Iterable[int] = (), share: float = 1.0
) -> float:
    r"""Return the flops of the Gram form: :math:`4 m^2 n` a segment, and up to four m×m products a step.

    Segments lie between restarts. A quintic step squares R, multiplies Q by the step's factor (not the first of a
    segment, where Q is 1) and R by it twice (not the last of a segment, after which R is formed anew or not needed).

    Examples
    --------
    >>> five = [(15 / 8, -10 / 8, 3 / 8)] * 5
    >>> [gram(five, 1, 4, restarts) / 1 for restarts in ((), (3,))]  # 4ρ + 34, 8ρ + 28 at ρ = 4
    [50.0, 60.0]
    """
    m, n = sorted((rows, cols))
    starts = sorted({0, *restarts})
    segments = [coefficients[start:stop] for start, stop in zip(starts, [*starts[1:], len(coefficients)], strict=True)]
    total = 0.0
    for segment in segments:
        total += 2.0 * m * m * n * (1 + share)
        squares = sum(1 for _, _, c in segment if c)
        total += 2.0 * m**3 * share * (squares + 3 * (len(segment) - 1))
    return total
