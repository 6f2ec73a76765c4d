r"""The polar factor, a composed schedule and the literal Newton-Schulz loop in as many digits as asked for.

Slow and obvious, for matrices of a dozen rows at most. The numbers given are taken as exact: a float stands for the
binary fraction that it is, a string like "0.1" for the decimal. Work is done with `GUARD` more digits than asked for,
in a context that is left again: the ambient precision of mpmath stays what it was.

References
----------
Golub & Reinsch, *Numerische Mathematik* 14 (1970), behind ``mpmath.svd_r``.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from mpmath import mp

#: Digits beyond those asked for, which absorb the rounding of a few thousand operations.
GUARD = 10

#: One step ``x -> a x + b x^3 + c x^5``; each of a, b, c a float, a string, a Fraction or an mpf.
Coefficients = Iterable[Sequence[Any]]


class Polar(NamedTuple):
    """A polar decomposition in mpmath matrices.

    Attributes
    ----------
    U : mpmath matrix of shape (m, n)
        The partial isometry on the range of G.
    H : mpmath matrix of shape (n, n)
        The right Hermitian factor, in the unit of G.
    s : mpmath matrix of shape (min(m, n), 1)
        The singular values, descending, in the unit of G.
    """

    U: Any
    H: Any
    s: Any


def polar(G: Any, digits: int) -> Polar:
    r"""Return the polar decomposition of one matrix to about `digits` digits.

    The rank is the number of singular values above ``max(m, n) 10^-digits s_max``.

    Parameters
    ----------
    G : rows of numbers, array of shape (m, n), or mpmath matrix
        Any real numbers that mpmath reads, strings included.
    digits : int
        Decimal digits, at least 1.

    Raises
    ------
    ValueError
        If G is not a matrix of finite real numbers, or `digits` is below 1.

    Examples
    --------
    >>> from mpmath import mp
    >>> U, H, s = polar([[1, 2], [0, 1]], digits=30)
    >>> mp.nstr(s[0], 20)  # 1 + sqrt(2)
    '2.4142135623730950488'
    >>> mp.nstr(U[0, 1], 20)  # 1 / sqrt(2)
    '0.7071067811865475244'
    """
    with _working("polar", digits):
        A = _matrix("polar", G)
        P, s, Qt = mp.svd_r(A, full_matrices=False)
        kept = [i for i in range(s.rows) if s[i] > max(A.rows, A.cols) * mp.mpf(10) ** -digits * s[0]]
        U = mp.zeros(A.rows, A.cols)
        for i in kept:
            U += P[:, i] * Qt[i, :]
        H = mp.zeros(A.cols, A.cols)
        for i in range(s.rows):
            H += s[i] * (Qt[i, :].T * Qt[i, :])
        return Polar(U, H, s)


def compose(coefficients: Coefficients, x: Any, digits: int) -> Any:
    r"""Apply odd polynomials :math:`x \mapsto a x + b x^3 + c x^5` one after another to one number.

    Parameters
    ----------
    coefficients : iterable of (a, b, c)
        In the order of application.
    x : number or string
        The argument, without unit.
    digits : int
        Decimal digits of the working precision, at least 1.

    Returns
    -------
    mpf
        The value; x itself for no coefficients.

    Raises
    ------
    ValueError
        If a step has not three coefficients, or `digits` is below 1.

    Examples
    --------
    >>> from mpmath import mp
    >>> mp.nstr(compose([("1.875", "-1.25", "0.375")] * 2, "0.5", digits=40), 25)
    '0.9811176165986807973240502'
    """
    with _working("compose", digits):
        value = mp.mpf(mp.convert(x))
        for a, b, c in _steps("compose", coefficients):
            value = a * value + b * value**3 + c * value**5
        return value


def newton_schulz(G: Any, coefficients: Coefficients, digits: int) -> Any:
    r"""Run the literal iteration :math:`X \leftarrow a X + (b A + c A^2) X` with :math:`A = X X^T`.

    It starts from :math:`X_0 = G/\|G\|_F`. A tall matrix is transposed first and back at the end, and a zero
    matrix stays zero.

    Parameters
    ----------
    G : rows of numbers, array of shape (m, n), or mpmath matrix
        As for `polar`.
    coefficients : iterable of (a, b, c)
        In the order of application.
    digits : int
        Decimal digits of the working precision, at least 1.

    Returns
    -------
    mpmath matrix of shape (m, n)
        Without unit.

    Raises
    ------
    ValueError
        As for `polar` and `compose`.

    Examples
    --------
    >>> to_numpy(newton_schulz([[3.0], [4.0]], [(1.5, -0.5, 0.0)], digits=20)).T
    array([[0.6, 0.8]])
    """
    with _working("newton_schulz", digits):
        X = _matrix("newton_schulz", G)
        steps = _steps("newton_schulz", coefficients)
        norm = mp.sqrt(mp.fsum(x**2 for x in X))
        if norm == 0:
            return X
        X = X / norm
        tall = X.rows > X.cols
        X = X.T if tall else X
        for a, b, c in steps:
            A = X * X.T
            X = a * X + (b * A + c * (A * A)) * X
        return X.T if tall else X


def to_numpy(A: Any) -> Float[np.ndarray, "m n"]:
    """Round an mpmath matrix (a column for `Polar.s`) to float64.

    Examples
    --------
    >>> from mpmath import mp
    >>> to_numpy(mp.eye(2))
    array([[1., 0.],
           [0., 1.]])
    """
    return np.array([[float(A[i, j]) for j in range(A.cols)] for i in range(A.rows)]).reshape(A.rows, A.cols)


def _working(caller: str, digits: int) -> Any:
    """Return the context manager of the working precision."""
    if digits < 1:
        raise ValueError(f"{caller}: digits is {digits}, needed at least 1")
    return mp.workdps(digits + GUARD)


def _matrix(caller: str, G: Any) -> Any:
    """Return G as an mpmath matrix of exact numbers, or say what is wrong with it."""
    try:
        rows = [list(row) for row in (G.tolist() if hasattr(G, "tolist") else G)]  # mpmath matrices have it too
        lengths = sorted({len(row) for row in rows})
        A = mp.matrix(rows) if len(lengths) == 1 and lengths[0] > 0 else None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{caller}: G of type {type(G).__name__} cannot be read as rows of numbers ({error})"
        ) from error
    if A is None:
        raise ValueError(f"{caller}: the rows of G have lengths {lengths}, needed one common length of at least 1")
    bad = sum(not (isinstance(x, mp.mpf) and mp.isfinite(x)) for x in A)
    if bad:
        raise ValueError(
            f"{caller}: {bad} of the {A.rows * A.cols} entries of G are not finite real numbers, needed all"
        )
    return A


def _steps(caller: str, coefficients: Coefficients) -> list[tuple[Any, Any, Any]]:
    """Return the coefficients in working precision."""
    steps = [tuple(mp.convert(c) for c in step) for step in coefficients]
    wrong = next((i for i, step in enumerate(steps) if len(step) != 3), None)
    if wrong is not None:
        raise ValueError(
            f"{caller}: step {wrong} of coefficients has {len(steps[wrong])} numbers, needed three (a, b, c)"
        )
    return [(a, b, c) for a, b, c in steps]
