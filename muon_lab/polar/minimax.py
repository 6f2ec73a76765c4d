r"""Where optimal schedules come from: the best odd polynomial on an interval, composed greedily over steps.

Among odd polynomials of degree 2q + 1 the one that minimises

.. math:: E = \max_{l \le x \le u} |1 - p(x)|

takes the values :math:`1 - E, 1 + E, 1 - E, \dots` in turn at q + 2 points of [l, u] (`fit`), and is the only one that
does (Chebyshev). It maps [l, u] onto [1 - E, 1 + E], on which the next step is fitted; no composition of as many steps
has a smaller error on [l, 1] (the main theorem of Amsel et al.). `rows` adds what published generators add to that.

What is computed here is computed with many digits, rounded once, and proven: the range of a composition on an interval
is found step by step from end points and critical points, in interval arithmetic (`image`).

Symbols
-------
l, u : the interval of a step; the first has u = 1, the next ones l = p(l) and u = 2 - l.
E : the largest error of a step on its interval.

References
----------
Amsel, Persson, Musco & Gower, *The Polar Express* (arXiv 2505.16932), and the repository NoahAmsel/PolarExpress.
Grishina, Smirnov & Rakhuba, *Accelerating Newton-Schulz iteration ... via Chebyshev-type polynomials*
(arXiv 2506.10935): degree 3 in closed form.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from mpmath import libmp, mp
from mpmath.ctx_iv import MPIntervalContext

from muon_lab.polar.schedules import Design, Schedule

Row = tuple[Any, Any, Any]

#: Decimal digits of a fit: the 17 of a float64, and as many again as a composition of a dozen steps can lose.
DIGITS = 50

#: Digits beyond those asked for, which absorb the rounding of the solution of a 4 × 4 system.
GUARD = 10

#: An interval narrower than this, relative to u, has no fit of its own in the published generators: the Taylor
#: polynomial there, scaled to u, is as good in float64.
FLAT = "5e-6"

#: Exchanges after which the search gives up. They converge quadratically: six do for any interval down to 1e-30.
EXCHANGES = 100

#: 1/sqrt(y) to second order about y = 1, times x: (15 x - 10 x^3 + 3 x^5) / 8.
TAYLOR = (15, -10, 3)


@dataclass(frozen=True)
class Fit:
    """The best odd polynomial on an interval.

    Attributes
    ----------
    degree : {3, 5}
        Of the polynomial.
    lower, upper : mpf
        The interval.
    coefficients : tuple of three mpf
        (a, b, c), with c = 0 for degree 3.
    error : mpf
        E, the largest error on the interval.
    points : tuple of mpf
        Where it is taken, ascending, with errors E, -E, E, ... of 1 - p.
    digits : int
        How many digits of all this are right.
    """

    degree: int
    lower: Any
    upper: Any
    coefficients: Row
    error: Any
    points: tuple[Any, ...]
    digits: int


class Equioscillation(NamedTuple):
    """What the errors of a fit are, seen from outside.

    Attributes
    ----------
    errors : tuple of mpf
        1 - p at the points of the fit.
    alternating : bool
        Whether their signs change from point to point.
    spread : mpf
        The largest magnitude over the smallest, minus 1.
    worst : mpf
        The largest error on a grid, the points included.
    """

    errors: tuple[Any, ...]
    alternating: bool
    spread: Any
    worst: Any


class Image(NamedTuple):
    """The range of a composition: two intervals, in which its smallest and its largest value lie."""

    low: Any
    high: Any


def fit(lower: Any, upper: Any, degree: int = 5, digits: int = DIGITS) -> Fit:
    r"""Return the best odd polynomial of degree 3 or 5 for the constant 1 on [lower, upper].

    Degree 3 in closed form: with :math:`\alpha = \sqrt{3/(u^2 + lu + l^2)}`, :math:`t = lu(l + u)\alpha^3` and
    :math:`\beta = 4/(2 + t)`,

    .. math:: p(x) = \tfrac32 \alpha\beta x - \tfrac12 \alpha^3\beta x^3, \qquad E = \frac{2 - t}{2 + t},

    with the inner point :math:`1/\alpha`. Degree 5 by exchange (Remez): the polynomial whose errors at four points are
    equal and alternate, then its critical points instead of the inner two, until nothing moves.

    Parameters
    ----------
    lower, upper : number or decimal text
        The interval, 0 < lower < upper; a text such as "1e-3" stands for the decimal, a float for the binary fraction.
    degree : {3, 5}
        Of the polynomial.
    digits : int
        Decimal digits of the result.

    Raises
    ------
    ValueError
        For an interval that is none or has no end, and for another degree.

    Examples
    --------
    >>> best = fit("1e-3", 1)
    >>> [mp.nstr(x, 8) for x in best.coefficients], mp.nstr(best.error, 5)
    (['8.4703288', '-25.108075', '18.629276'], '0.99153')
    """
    if degree not in (3, 5):
        raise ValueError(f"fit: degree is {degree}, needed 3 or 5")
    with mp.workdps(digits + GUARD):
        low, high = _number(lower), _number(upper)
        if not 0 < low < high < mp.inf:
            raise ValueError(f"fit: the interval is [{lower}, {upper}], needed 0 < lower < upper, both finite")
        flatness = (high + low) / (high - low)
    # E and the distances of the points from one another fall as powers of the width, and digits with them
    with mp.workdps(digits + GUARD + int(5 * mp.log10(flatness))):
        coefficients, error, inner = _cubic(low, high) if degree == 3 else _quintic(low, high, digits)
        return Fit(degree, low, high, coefficients, error, (low, *inner, high), digits)


def _cubic(low: Any, high: Any) -> tuple[Row, Any, tuple[Any, ...]]:
    """Return coefficients, error and inner point of the best cubic, in working precision."""
    alpha = mp.sqrt(3 / (high**2 + low * high + low**2))
    t = low * high * (low + high) * alpha**3
    beta = 4 / (2 + t)
    return (3 * alpha * beta / 2, -(alpha**3) * beta / 2, mp.zero), (2 - t) / (2 + t), (1 / alpha,)


def _quintic(low: Any, high: Any, digits: int) -> tuple[Row, Any, tuple[Any, ...]]:
    """Return coefficients, error and inner points of the best quintic, in working precision."""
    # the error is stationary in the inner points: what they are off by enters it, and the coefficients, squared
    settled = (high - low) * mp.mpf(10) ** -(digits // 2 + GUARD)
    inner = ((3 * low + high) / 4, (low + 3 * high) / 4)  # exact in the limit of a narrow interval
    for _ in range(EXCHANGES):
        system = mp.matrix([[x, x**3, x**5, (-1) ** i] for i, x in enumerate((low, *inner, high))])
        a, b, c, error = mp.lu_solve(system, mp.ones(4, 1))
        root = mp.sqrt(9 * b**2 - 20 * a * c)
        before, inner = inner, (mp.sqrt((-3 * b - root) / (10 * c)), mp.sqrt((-3 * b + root) / (10 * c)))
        if max(abs(x - y) for x, y in zip(before, inner, strict=True)) < settled:
            return (a, b, c), error, inner
    raise ArithmeticError(f"fit: the points in [{mp.nstr(low, 5)}, {mp.nstr(high, 5)}] move after {EXCHANGES} steps")


def equioscillation(best: Fit, grid: int = 2001) -> Equioscillation:
    """Look at a fit from outside: its errors at its points, and the worst of a grid; Chebyshev's theorem does the rest.

    A polynomial with q coefficients whose errors alternate with equal magnitude at q + 1 points, none larger between
    them, is the best there is.

    Parameters
    ----------
    best : Fit
        Of which the coefficients, the interval and the points are used.
    grid : int
        Number of evenly spaced points.

    Examples
    --------
    >>> seen = equioscillation(fit(0.1, 1))
    >>> seen.alternating, bool(seen.spread < 1e-40), bool(seen.worst <= fit(0.1, 1).error * (1 + seen.spread))
    (True, True, True)
    """
    with mp.workdps(2 * (best.digits + GUARD)):
        errors = tuple(1 - value(best.coefficients, x) for x in best.points)
        sizes = [abs(error) for error in errors]
        step = (best.upper - best.lower) / (grid - 1)
        between = (abs(1 - value(best.coefficients, best.lower + i * step)) for i in range(grid))
        return Equioscillation(
            errors,
            all(x * y < 0 for x, y in pairwise(errors)),
            max(sizes) / min(sizes) - 1 if min(sizes) else mp.inf,
            max(*sizes, *between),
        )


def value(coefficients: Sequence[Any], x: Any) -> Any:
    """Return a x + b x^3 + c x^5, in the arithmetic of what it is given.

    Examples
    --------
    >>> value((1.5, -0.5, 0.0), 2.0)
    -1.0
    """
    a, b, c = coefficients
    square = x * x
    return x * (a + square * (b + square * c))


def rows(design: Design, digits: int = DIGITS) -> tuple[Row, ...]:
    r"""Return the table of a design in mpf: the best polynomial of every step, and what the design changes in it.

    - *cushion*: the step is fitted on [max(l, cushion u), u]. If that is not [l, u], it is scaled so that its image of
      [l, u] is centred at 1: by 2/(p(l) + p(u)) for degree 5. (A cubic is largest inside the interval, and that value
      stands for p(u) here; the published generator takes p(u) there too.)
    - *ceiling*: it is scaled so that its largest value on the interval is the ceiling, which is then the next u.
    - *safety*: x is divided by 1 + safety. Within the composition this is done in every step but the last, and the next
      interval starts at what then becomes of l; afterwards it is done to the finished table.
    - A quintic for an interval narrower than 5e-6 u is the Taylor quintic of x/u.

    Parameters
    ----------
    design : Design
        Its numbers are read as decimals: 0.001 is 1/1000.
    digits : int
        Decimal digits of the result.

    Examples
    --------
    >>> for row in rows(Design(1e-3, 2, cushion=0.02, safety=0.02)):
    ...     print([mp.nstr(x, 7) for x in row])
    ['8.156555', '-22.48329', '15.87877']
    ['4.123789', '-2.980846', '0.5520601']
    """
    with mp.workdps(digits + GUARD):
        low, high = _decimal(design.lower), mp.one
        safe = 1 + _decimal(design.safety)
        table = []
        for step in range(design.steps):
            row = _step(design, low, high)
            if design.applied == "within" and step < design.steps - 1:
                row = _argument_over(safe, row)
            table.append(row)
            low = value(row, low)
            high = 2 - low if design.ceiling is None else _decimal(design.ceiling)
        afterwards = {"within": 0, "after": design.steps - 1, "after_all": design.steps}[design.applied]
        table[:afterwards] = [_argument_over(safe, row) for row in table[:afterwards]]
        return tuple(table if design.decimals is None else [_rounded(row, design.decimals) for row in table])


def _step(design: Design, low: Any, high: Any) -> Row:
    """Return the polynomial of one step for an interval."""
    start = max(low, _decimal(design.cushion) * high)
    if design.degree == 5 and start >= (1 - mp.mpf(FLAT)) * high:
        best = _argument_over(high, [mp.mpf(k) / 8 for k in TAYLOR])
    else:
        best = fit(start, high, design.degree, mp.dps).coefficients
    largest = value(best, high if design.degree == 5 else mp.sqrt(-best[0] / (3 * best[1])))
    if design.ceiling is not None:
        return _scaled(_decimal(design.ceiling) / largest, best)
    return _scaled(2 / (value(best, low) + largest), best) if start > low else best


def _scaled(factor: Any, row: Sequence[Any]) -> Row:
    a, b, c = row
    return factor * a, factor * b, factor * c


def _argument_over(divisor: Any, row: Sequence[Any]) -> Row:
    """Return the coefficients of p(x / divisor)."""
    a, b, c = row
    return a / divisor, b / divisor**3, c / divisor**5


def _rounded(row: Sequence[Any], decimals: int) -> Row:
    unit = mp.mpf(10) ** decimals
    a, b, c = (mp.nint(x * unit) / unit for x in row)
    return a, b, c


def _number(given: Any) -> Any:
    """Return an end of an interval in mpf."""
    try:
        return mp.mpf(mp.convert(given))
    except (TypeError, ValueError):
        raise ValueError(f"the ends of an interval must be numbers or decimal texts, not {given!r}") from None


def _decimal(number: float) -> Any:
    """Return the decimal that a float is written as."""
    return mp.mpf(repr(number))


def image(coefficients: Iterable[Sequence[Any]], lower: Any, upper: Any = 1, digits: int = DIGITS) -> Image:
    r"""Enclose the smallest and the largest value of a composition on [lower, upper].

    A continuous map takes an interval onto an interval, so the range of a composition is the last of a chain: its ends
    are values at the end points of the one before, or at critical points
    :math:`x^2 = (-3b \pm \sqrt{9b^2 - 20ac})/(10c)` inside it. Everything is rounded outwards.

    Parameters
    ----------
    coefficients : iterable of (a, b, c)
        In the order of application: floats or mpf, which are taken as exact.
    lower, upper : number or decimal text
        The interval.
    digits : int
        Decimal digits of the arithmetic.

    Returns
    -------
    Image
        Two mpmath intervals, low and high: the range is at least [low.b, high.a] and at most [low.a, high.b].

    Examples
    --------
    >>> low, high = image([(1.5, -0.5, 0.0)] * 3, "0.1")
    >>> f"{float(low.mid):.6f} {float(high.mid):.6f}"
    '0.328356 1.000000'
    """
    iv = MPIntervalContext()
    iv.dps = digits + GUARD
    low, high = iv.mpf(lower), iv.mpf(upper)
    for row in coefficients:
        low, high = _range(iv, [iv.mpf(x) for x in row], low, high)
    return Image(low, high)


def _range(iv: Any, row: list[Any], low: Any, high: Any) -> tuple[Any, Any]:
    """Enclose the ends of the image of an interval, whose ends are enclosed themselves, under one polynomial."""
    ends = [value(row, low), value(row, high)]
    turns = [x for x in _critical(iv, *row) if low.a <= x.b and x.a <= high.b]
    inside = ends + [value(row, x) for x in turns if low.b <= x.a and x.b <= high.a]
    perhaps = ends + [value(row, x) for x in turns]
    return (
        iv.mpf([min(y.a for y in perhaps), min(y.b for y in inside)]),
        iv.mpf([max(y.a for y in inside), max(y.b for y in perhaps)]),
    )


def _critical(iv: Any, a: Any, b: Any, c: Any) -> list[Any]:
    """Enclose the critical points of a x + b x^3 + c x^5; a double one that rounding hides comes twice."""
    if c == 0:
        squares = [] if b == 0 else [-a / (3 * b)]
    else:
        under = 9 * b**2 - 20 * a * c
        root = iv.sqrt(iv.mpf([max(under.a, iv.zero), under.b])) if under.b >= 0 else None
        squares = [] if root is None else [(-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)]
    points = [iv.sqrt(iv.mpf([max(y.a, iv.zero), y.b])) for y in squares if y.b > 0]
    return [*points, *(-x for x in points)]


def worst(coefficients: Iterable[Sequence[Any]], lower: Any, upper: Any = 1) -> float:
    """Return the largest |1 - p| of a composition on [lower, upper]: a proven bound, rounded up to a float64.

    Raises
    ------
    ValueError
        If the interval is empty.

    Examples
    --------
    >>> f"{worst(rows(Design(1e-3, 5)), '1e-3'):.6f}"
    '0.113448'
    """
    if not _number(lower) <= _number(upper):
        raise ValueError(f"worst: the interval is [{lower}, {upper}], needed lower <= upper")
    low, high = image(coefficients, lower, upper)
    return max(libmp.to_float((y.b)._mpi_[1], rnd=libmp.round_ceiling) for y in (1 - low, high - 1))


@lru_cache
def schedule(design: Design) -> Schedule:
    """Return the schedule of a design, every coefficient rounded once to float64.

    Its design carries the proven largest error of these very coefficients, and the schedule has no other length.

    Without ``safety`` the design has no headroom: its steps are made for nothing above 1, and a singular value that is
    lifted beyond (`Schedule.reach`) runs away. Rounding alone does that to a matrix of nearly rank 1, with lower = 1e-3
    in bfloat16 and with lower = 1e-5 in float32; ``safety=0.01`` is enough for bfloat16.

    Parameters
    ----------
    design : Design
        A value for `worst` is not looked at.

    Raises
    ------
    ValueError
        If the rounded coefficients leave 1 further behind than 0 is, or do not stay bounded: without safety the image
        of 1 comes so close to a repelling point that float64 cannot tell the two apart.

    Examples
    --------
    >>> made = schedule(Design(1e-2, 3))
    >>> f"{made.design.worst:.5f}"
    '0.26944'
    >>> [round(a, 4) for a, b, c in made.rows]
    [8.0934, 3.6366, 2.6613]
    """
    table = tuple((_nearest(a), _nearest(b), _nearest(c)) for a, b, c in rows(design))
    furthest = worst(table, repr(design.lower))
    if not furthest <= 1:
        raise ValueError(
            f"float64 coefficients cannot hold {design.name} with {design.steps} steps, which end {furthest:.3g} away "
            f"from 1 where less than 1 is needed: add safety, such as safety=0.01"
        )
    made = replace(design, worst=furthest)
    return Schedule(
        design.name,
        table,
        design.steps,
        "refuse",
        (design.lower, 1.0),
        f"minimax of degree {design.degree} in every step, after Amsel et al. (arXiv 2505.16932) and Grishina et al. "
        f"(arXiv 2506.10935)",
        made,
    )


def _nearest(x: Any) -> float:
    """Round an mpf to the nearest float64."""
    return libmp.to_float(x._mpf_, rnd=libmp.round_nearest)
