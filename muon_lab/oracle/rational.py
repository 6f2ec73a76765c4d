r"""The rational iterations for the polar factor on one singular value, in as many digits as asked for.

Zolotarev's function of type (3, 2), the best odd approximation of the sign on :math:`[-1, -l] \cup [l, 1]`, gives the
weights of QDWH from elliptic functions; the closed form that programs use is another way to the same numbers. With
:math:`K' = K(l')` and the modulus :math:`l' = \sqrt{1 - l^2}`

.. math:: f(x) = M x \frac{x^2 + c_2}{x^2 + c_1}, \qquad
          c_i = l^2 \frac{\mathrm{sn}^2(i K' / 3;\, l')}{\mathrm{cn}^2(i K' / 3;\, l')}, \qquad f(1) = 1.

References
----------
Zolotarev (1877); Nakatsukasa and Freund, *Computing fundamental matrix decompositions accurately via the matrix sign
function in two iterations*, SIAM Review 58 (2016), section 3, of which this is r = 1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from mpmath import mp

#: Digits beyond those asked for; the elliptic modulus loses twice the digits of l.
GUARD = 10


class Weights(NamedTuple):
    r"""The map :math:`x \mapsto x (a + b x^2) / (1 + c x^2)`, in mpmath numbers."""

    a: Any
    b: Any
    c: Any

    def image(self, x: Any) -> Any:
        """Return the image of a number."""
        return x * (self.a + self.b * x**2) / (1 + self.c * x**2)


def weights(lower: Any, digits: int) -> Weights:
    """Return the weights whose map lifts [l, 1] best.

    Parameters
    ----------
    lower : number or string
        l, above 0 and below 1.
    digits : int
        Decimal digits, at least 1.

    Raises
    ------
    ValueError
        If lower is not above 0 and below 1, or digits is below 1.

    Examples
    --------
    >>> [mp.nstr(weight, 10) for weight in weights("1e-3", 30)]
    ['251.9921051', '15749.2592', '16000.2513']
    """
    with _working("weights", digits):
        low = _lower("weights", lower)
    with mp.workdps(digits + GUARD + 2 * int(-mp.log10(low))):
        square = 1 - low**2
        third = mp.ellipk(square) / 3
        sn, cn = ([mp.ellipfun(name, i * third, m=square) for i in (1, 2)] for name in ("sn", "cn"))
        c1, c2 = ((low * s / c) ** 2 for s, c in zip(sn, cn, strict=True))
        M = (1 + c1) / (1 + c2)
        return Weights(M * c2 / c1, M / c1, 1 / c1)


def qdwh(lower: Any, tolerance: Any, digits: int) -> list[Any]:
    """Return the images of l under Halley's iteration with `weights`, until 1 is reached up to a tolerance.

    Parameters
    ----------
    lower : number or string
        l, above 0 and below 1.
    tolerance : number or string
        How far below 1 the last image may be.
    digits : int
        Decimal digits, at least 1.

    Raises
    ------
    ValueError
        As for `weights`.

    Examples
    --------
    >>> len(qdwh("1e-3", "1e-15", 40))
    4
    """
    return _images("qdwh", lower, tolerance, digits, lambda x: weights(x, digits).image(x))


def halley(lower: Any, tolerance: Any, digits: int) -> list[Any]:
    """Return the images of l under Halley's iteration, (3, 1, 3). Parameters and errors are those of `qdwh`.

    Examples
    --------
    >>> len(halley("1e-3", "1e-15", 40))
    9
    """
    return _images("halley", lower, tolerance, digits, lambda x: x * (3 + x**2) / (1 + 3 * x**2))


def newton(lower: Any, tolerance: Any, digits: int) -> list[Any]:
    r"""Return what Newton's iteration makes of l, with the scaling that is best for the two ends of an interval.

    Both ends of [l, 1] have one image, :math:`(\sqrt \kappa + 1 / \sqrt \kappa) / 2` with κ = 1 / l, and the new
    interval reaches from 1 to it. Its inverse is returned, the next l. Parameters and errors are those of `qdwh`.

    Examples
    --------
    >>> len(newton("1e-3", "1e-15", 40))
    6
    """
    return _images("newton", lower, tolerance, digits, lambda x: 2 * mp.sqrt(x) / (1 + x))


def _images(caller: str, lower: Any, tolerance: Any, digits: int, step: Callable[[Any], Any]) -> list[Any]:
    """Return the images of l, step after step."""
    with _working(caller, digits):
        images = [_lower(caller, lower)]
        while 1 - images[-1] > mp.mpf(tolerance):
            images.append(step(images[-1]))
        return images[1:]


def _working(caller: str, digits: int) -> Any:
    """Return the context manager of the working precision."""
    if digits < 1:
        raise ValueError(f"{caller}: digits is {digits}, needed at least 1")
    return mp.workdps(digits + GUARD)


def _lower(caller: str, lower: Any) -> Any:
    """Return l in working precision."""
    low = mp.mpf(mp.convert(lower))
    if not 0 < low < 1:
        raise ValueError(f"{caller}: lower is {lower}, needed above 0 and below 1")
    return low
