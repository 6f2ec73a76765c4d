r"""Polar factors by rational iterations: Halley's with dynamical weights (QDWH) and without, and Newton's, scaled.

.. math:: X \leftarrow X (a I + b X^T X)(I + c X^T X)^{-1}, \qquad X \leftarrow \tfrac12 (\zeta X + (\zeta X)^{-T})

An odd rational function acts on the singular values alone, so all that a plan needs is where they lie: within [l, 1]
after division by a bound :math:`\alpha \ge \|X\|_2`. A step maps l, the next one is planned with its image, and the
number of steps is known before the first.

Stopping
--------
After k steps all singular values are within :math:`[l_k, 1]`, so :math:`\|X_k - U\|_2 \le 1 - l_k` in exact arithmetic;
the iteration ends when that is at most 10 u. Nothing needs to be measured, as l is a bound and not a guess.

The usual test is what a step changes: with :math:`f(1 - e) \ge 1 - e^3 / 4` for (3, 1, 3) a change of
:math:`(40 u)^{1/3}` is enough for Halley, and of :math:`(20 u)^{1/2}` for Newton. It has a hole: a direction of size
1e-9 changes by 2e-9 and passes as converged. So where l is only claimed (``lower``), the Gram matrix of the result is
taken, which sees every direction, and unless that is the identity the iteration goes on with the bound that is sure.
Newton's test is :math:`\|X - X^{-T}\|_F`, with the same property: it is above :math:`|\sigma - 1|` for every σ, and at
:math:`(20 u)^{1/2}` one more step is the last.

The lower bound
---------------
No decomposition into singular values is needed. A triangular R with the singular values of X, to (m + n) u α, comes
from a QR decomposition; in float32, to :math:`(m + n) u_{64} \alpha^2` for their squares, from the Cholesky
decomposition of the Gram matrix in float64. With :math:`W = R^{-1} R^{-T}` (2/3 m³ flops)

.. math:: \sigma_{\min}^{-2} = \|W\|_2 \le \min(\|W\|_F, \|W\|_\infty), \qquad
          \alpha^2 = \min(\|R^T R\|_F, \|R^T R\|_\infty).

Where this does not clear the cutoff for the rank, the cutoff takes its place: what lies below does not count. A bound
that is too small costs an iteration at most: 1e-5 and 1e-13 take five, 1e-14 and 1e-20 six. One that is too large
leaves directions behind, as the map is nearly linear below l: four steps planned for l = 1e-3 take a much smaller σ to
15 σ / l.

Rank
----
An iteration does not know the null space: rounding leaves something of size u there, and weights that lift l to 1 lift
that too. Unless the bound clears the cutoff, the eigenvectors V of :math:`H = U^T X` (in float64) tell range from
rounding by the rule of `svd`, and U becomes the polar factor of :math:`U V_r` times :math:`V_r^T`. H is exact to second
order for that purpose: an error E of U enters the quadratic form of a null vector v as :math:`v^T E^T X v`, and Xv is
nothing.

Stability
---------
Steps by QR of :math:`(\sqrt c X; I)` are backward stable with pivoting, which torch has not. Without, the backward
error is 1e-11 for a Vandermonde matrix of 24 points, and 1e-15 for most others. The remedy is a QLP decomposition,
:math:`X = P L Q^T` by two QR decompositions: steps on L have at most 1e-15 for all that was tried.

References
----------
Nakatsukasa, Bai and Gygi, *Optimizing Halley's iteration for computing the matrix polar decomposition*, SIAM J. Matrix
Anal. Appl. 31 (2010), for the weights; Nakatsukasa and Higham, *Stable and efficient spectral divide and conquer
algorithms*, SIAM J. Sci. Comput. 35 (2013), for c > 100 and for stability.
Byers and Xu, *A new scaling for Newton's iteration for the polar decomposition and its backward stability*, SIAM J.
Matrix Anal. Appl. 30 (2008); Higham, *Computing the polar decomposition - with applications*, SIAM J. Sci. Stat.
Comput. 7 (1986), and *Functions of Matrices* (2008), chapter 8.
Stewart, *The QLP approximation to the singular value decomposition*, SIAM J. Sci. Comput. 20 (1999).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import Exact
from muon_lab.polar.direct import (
    TOLERATED,
    Direct,
    Factor,
    above_rounding,
    orthonormality,
    rounding,
    symmetric,
    upright,
)

#: The largest c at which I + c X^T X is factored by Cholesky in the precision of X: the step's error is up to c u.
SAFE = 100.0

#: The largest condition number at which X R^{-1} is formed in the precision of X, with an error of up to κ u.
WELL_CONDITIONED = 16.0


# --- steps ------------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    r"""One step :math:`x \mapsto x (a + b x^2) / (1 + c x^2)`."""

    a: float
    b: float
    c: float

    def image(self, x: float) -> float:
        """Return the image of a singular value, at most a x."""
        return x * (self.a + self.b * x * x) / (1 + self.c * x * x)

    def of(self, alpha: float) -> "Weights":
        """Return the weights of the same step for alpha x: the matrix itself needs no division, which would round."""
        return Weights(self.a / alpha, self.b / alpha**3, self.c / alpha**2)


#: Newton-Schulz, the cheapest last step: 1 - f(1 - e) < 3/2 e^2, and nothing is factored.
CUBIC = Weights(1.5, -0.5, 0.0)


def dynamical(lower: float) -> Weights:
    r"""Return the weights that lift [l, 1] best: of all maps of their kind into [0, 1], with the largest least image.

    With :math:`d = (4 (1 - l^2) / l^4)^{1/3}` and :math:`h = \sqrt{1 + d}`

    .. math:: a = h + \tfrac12 \sqrt{8 - 4 d + 8 (2 - l^2) / (l^2 h)}, \qquad b = (a - 1)^2 / 4, \qquad c = a + b - 1,

    about :math:`2.5\, l^{-2/3}`, :math:`1.6\, l^{-4/3}` and as much for small l; (3, 1, 3) for l = 1.

    Examples
    --------
    >>> [f"{weight:.6g}" for weight in dynamical(1e-3)]
    ['251.992', '15749.3', '16000.3']
    >>> dynamical(1.0) == unweighted(1.0)
    True
    """
    square = lower * lower
    d = (4 * (1 - square)) ** (1 / 3) / lower ** (4 / 3)
    h = math.sqrt(1 + d)
    a = h + math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * h)) / 2
    b = (a - 1) ** 2 / 4
    return Weights(a, b, a + b - 1)


def unweighted(lower: float) -> Weights:
    """Return (3, 1, 3), Halley's iteration, whatever the bound.

    Examples
    --------
    >>> print(f"{unweighted(0.5).image(0.5):.4f}")
    0.9286
    """
    return Weights(3.0, 1.0, 3.0)


def plan(lower: float, roundoff: float = 2.0**-53, weights: Callable[[float], Weights] = dynamical) -> list[Weights]:
    r"""Return the steps that bring singular values from [l, 1] to within 10 u of 1.

    Parameters
    ----------
    lower : float
        l, from 1e-100 to 1.
    roundoff : float
        u, of the computation.
    weights : callable
        From l to the next step.

    Raises
    ------
    ValueError
        If lower is out of range.

    Examples
    --------
    >>> [len(plan(1 / kappa)) for kappa in (1e1, 1e3, 1e5, 1e12, 1e16)]
    [4, 4, 5, 5, 6]
    >>> [len(plan(1 / kappa, 2.0**-24)) for kappa in (1e1, 1e3, 1e5)]  # float32
    [3, 4, 4]
    >>> [len(plan(1 / kappa, weights=unweighted)) for kappa in (1e1, 1e3, 1e5, 1e16)]
    [5, 9, 14, 37]
    """
    _check_lower(lower)
    steps = []
    while 1 - lower > TOLERATED * roundoff:
        steps.append(weights(lower))
        lower = steps[-1].image(lower)
    return steps


def _check_lower(lower: float) -> None:
    """Raise ``ValueError`` unless l is a bound that can be squared and planned with."""
    if not 1e-100 <= lower <= 1:
        raise ValueError(f"lower must be at least 1e-100 and at most 1, not {lower}")


def tolerance(dtype: torch.dtype) -> float:
    """Return 10 u, by which singular values may be short of 1 at the end.

    Examples
    --------
    >>> tolerance(torch.float64) == 10 * 2.0**-53
    True
    """
    return TOLERATED * torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Form:
    """A way to take a step.

    Attributes
    ----------
    name : str
        What is factored.
    take : callable
        From X (n rows, m columns), the weights, and the Gram matrix of X or None, to the next X.
    flops : callable
        From m and n to the flops of a step.
    dtype : torch.dtype, optional
        In which the step is taken; that of the computation by default.
    """

    name: str
    take: Callable[[Tensor, Weights, Tensor | None], Tensor]
    flops: Callable[[int, int], float]
    dtype: torch.dtype | None = None


def _by_qr(X: Float[Tensor, "n m"], weights: Weights, A: Tensor | None) -> Float[Tensor, "n m"]:
    r"""Take a step by :math:`(\sqrt c X; I) = (Q_1; Q_2) R`: :math:`(b / c) X + (a - b / c) / \sqrt c\, Q_1 Q_2^T`."""
    a, b, c = weights
    n, m = X.shape
    stacked = X.new_zeros(m, n + m).mT  # column by column, as LAPACK wants it
    torch.mul(X, math.sqrt(c), out=stacked[:n])
    stacked[n:].diagonal().fill_(1.0)
    Q, _ = torch.linalg.qr(stacked)
    return torch.addmm(X, Q[:n], Q[n:].mT, beta=b / c, alpha=(a - b / c) / math.sqrt(c))


def _by_cholesky(X: Float[Tensor, "n m"], weights: Weights, A: Tensor | None) -> Float[Tensor, "n m"]:
    r"""Take a step by :math:`I + c X^T X = L L^T`: :math:`(b / c) X + (a - b / c) X L^{-T} L^{-1}`."""
    a, b, c = weights
    Z = (X.mT @ X if A is None else A.to(X.dtype)) * c
    Z.diagonal().add_(1.0)
    L = torch.linalg.cholesky(Z)
    Y = torch.linalg.solve_triangular(L.mT, X, upper=True, left=False)
    Y = torch.linalg.solve_triangular(L, Y, upper=False, left=False)
    return Y.mul_(a - b / c).add_(X, alpha=b / c)


def _by_product(X: Float[Tensor, "n m"], weights: Weights, A: Tensor | None) -> Float[Tensor, "n m"]:
    """Take a step that has no denominator."""
    return torch.addmm(X, X, X.mT @ X if A is None else A.to(X.dtype), beta=weights.a, alpha=weights.b)


def product_flops(m: int, n: int) -> float:
    """Return 2 m² n: the flops of a Gram matrix, or of a product with a square matrix.

    Examples
    --------
    >>> product_flops(2, 4)
    32.0
    """
    return 2.0 * m * m * n


def triangle_flops(m: int, n: int) -> float:
    """Return 2 m² n - 2/3 m³: the flops of the R of a QR decomposition, and as many again of its Q.

    Examples
    --------
    >>> triangle_flops(3, 3)
    36.0
    """
    return 2.0 * m * m * n - 2.0 * m**3 / 3


def qlp_flops(m: int, n: int) -> float:
    """Return the flops of a QLP decomposition, and of the two products that take a factor of L back to X.

    Examples
    --------
    >>> qlp_flops(3, 3) == 4 * triangle_flops(3, 3) + 2 * product_flops(3, 3)
    True
    """
    return 2 * triangle_flops(m, n) + 2 * triangle_flops(m, m) + product_flops(m, m) + product_flops(m, n)


def newton_flops(m: int) -> float:
    """Return 2 m³: the flops of a Newton step, an inverse.

    Examples
    --------
    >>> newton_flops(10)
    2000.0
    """
    return 2.0 * m**3


#: 6 m² n + 8/3 m³ flops, for any c.
QR: Final = Form("QR", _by_qr, lambda m, n: 2 * triangle_flops(m, n + m) + product_flops(m, n))
#: 4 m² n + m³ / 3 flops, with an error of c u.
CHOLESKY: Final = Form("Cholesky", _by_cholesky, lambda m, n: 2 * product_flops(m, n) + m**3 / 3)
#: 4 m² n flops, for c = 0.
PRODUCT: Final = Form("product", _by_product, lambda m, n: 2 * product_flops(m, n))
WIDE_QR: Final = Form("QR in float64", _by_qr, QR.flops, torch.float64)
WIDE_CHOLESKY: Final = Form("Cholesky in float64", _by_cholesky, CHOLESKY.flops, torch.float64)


def form_for(weights: Weights, dtype: torch.dtype) -> Form:
    """Return the cheapest form in which a step has an error of at most `SAFE` u.

    Examples
    --------
    >>> [form_for(dynamical(lower), torch.float64).name for lower in (0.1, 0.01)]
    ['Cholesky', 'QR']
    >>> [form_for(dynamical(lower), torch.float32).name for lower in (0.1, 0.01, 1e-9)]
    ['Cholesky', 'Cholesky in float64', 'QR in float64']
    """
    if weights.c <= SAFE:
        return CHOLESKY
    if dtype == torch.float64:
        return QR
    return WIDE_CHOLESKY if weights.c * torch.finfo(torch.float64).eps <= SAFE * torch.finfo(dtype).eps else WIDE_QR


# --- Halley -----------------------------------------------------------------------------------------------------------


def qdwh(
    roundoff: float | None = None,
    dtype: torch.dtype | None = None,
    lower: float | None = None,
    form: Form | None = None,
) -> Direct:
    r"""Return the orthogonalizer that takes the polar factor by dynamically weighted Halley steps (QDWH).

    At most six steps in float64 and five in float32, whatever the condition number, and a backward error of a few u. A
    rectangular matrix is reduced to a square one first. The form of a step follows from its c: Cholesky up to 100,
    beyond it QR in float64, or Cholesky in float64 where the computation is in float32, which loses nothing as long as
    :math:`c\, u_{64}` is below 100 u. The last step is one of Newton-Schulz where that is enough.

    Parameters
    ----------
    roundoff : float, optional
        As for `svd`, whose rule for the rank holds here.
    dtype : torch.dtype, optional
        In which to compute; by default that of the data, but at least float32.
    lower : float, optional
        A lower bound on the smallest singular value, relative to the Frobenius norm, to plan with if it is above the
        computed one. For square matrices in float32 that one is then left out, which saves a tenth of the time. It is a
        claim: the result is tested, and the iteration goes on if it fails.
    form : Form, optional
        `QR` or `CHOLESKY`, to take all steps in it, on L of a QLP decomposition in either precision. Cholesky has an
        error of up to c u there too, though little shows: a backward error of 1e-13 at worst in all that was tried.

    Returns
    -------
    Direct
        From ``(*batch, m, n)`` to the same shape and dtype, one matrix after the other.

    Raises
    ------
    ValueError
        As for `Direct`, or if lower is below 1e-100 or above 1.

    Examples
    --------
    >>> import torch
    >>> found = qdwh().decompose(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1e-3, 0.0]], dtype=torch.float64))
    >>> found.U.round(decimals=4) + 0.0
    tensor([[ 0.7075,  0.7068,  0.0000],
            [-0.7068,  0.7075,  0.0000]], dtype=torch.float64)
    >>> found.iterations, found.converged, (found.matrix[1] * 1e3).round(decimals=9) + 0.0
    (tensor(4), tensor(True), tensor([0., 1., 0.], dtype=torch.float64))
    """
    return Direct(Halley(dynamical, lower, form), roundoff, dtype)


def halley(roundoff: float | None = None, dtype: torch.dtype | None = None, lower: float | None = None) -> Direct:
    """Return the orthogonalizer that takes the polar factor by unweighted Halley steps: what the weights of QDWH save.

    The number of steps grows with the logarithm of the condition number, to 37 at 1e16. As c = 3, they are taken by
    Cholesky. Parameters, result and errors are those of `qdwh`.

    Examples
    --------
    >>> import torch
    >>> G = torch.diag(torch.tensor([1.0, 1e-5], dtype=torch.float64))
    >>> halley().decompose(G).iterations, qdwh().decompose(G).iterations
    (tensor(14), tensor(5))
    """
    return Direct(Halley(unweighted, lower, None), roundoff, dtype)


class _Start(NamedTuple):
    """A square matrix whose polar factor gives that of the input, and whose singular values are in alpha [lower, 1]."""

    Y: Tensor
    A: Tensor | None
    """The Gram matrix of Y, if known."""
    alpha: float
    lower: float
    """0 if nothing is known."""
    error: float
    """By how much, relative to alpha, the singular values of the input may differ."""
    restored: Callable[[Tensor], Tensor]
    """From the factor of Y to that of the input."""
    flops: float


class _Run(NamedTuple):
    """What an iteration arrived at."""

    Y: Tensor
    lower: float
    """The bound that follows from where it arrived; 0 if it was not measured."""
    iterations: int
    flops: float


class _Found(NamedTuple):
    """The factor of one matrix, upright, in which rounding may count as a direction."""

    U: Tensor
    full: bool
    """Whether it is sure that it does not."""
    lower: float
    iterations: int
    flops: float


@dataclass(frozen=True)
class Halley:
    """The method of `qdwh` and of `halley`."""

    weights: Callable[[float], Weights]
    lower: float | None
    form: Form | None

    def __post_init__(self) -> None:
        if self.lower is not None:
            _check_lower(self.lower)

    def __call__(self, X: Float[Tensor, "batch m n"], roundoff: float | None) -> Factor:
        """Return the factors."""
        return _each(self._solve, X, roundoff)

    def _solve(self, X: Float[Tensor, "n m"], roundoff: float | None) -> _Found:
        start = self._started(X, roundoff is None)
        cutoff = _cutoff(X, start.alpha, roundoff)
        known = start.lower - start.error
        sure = max(known, cutoff.least)
        claimed = 0.0 if self.lower is None else self.lower * float(Exact().norm(X)) / start.alpha
        planned = max(sure, min(claimed, 1.0))
        run = self._iterated(start, planned, sure, X.dtype)
        full = max(known, run.lower) > cutoff.most
        return _Found(start.restored(run.Y), full, planned, run.iterations, start.flops + run.flops)

    def _started(self, X: Float[Tensor, "n m"], fill: bool) -> _Start:
        if fill or X.dtype == torch.float64 or self.form is not None:
            return _start_by_qr(X, fill)
        if self.lower is not None and X.shape[0] == X.shape[1]:
            return _Start(X, None, float(Exact().norm(X)), 0.0, 0.0, _unchanged, 0.0)
        return _start_by_gram(X)

    def _iterated(self, start: _Start, lower: float, sure: float, dtype: torch.dtype) -> _Run:
        """Take the planned steps; if the plan rests on a claim that turns out wrong, go on with the sure bound."""
        Y, A, alpha, m = start.Y, start.A, start.alpha, start.Y.shape[0]
        gain, iterations, flops = 1.0, 0, 0.0
        while True:
            while 1 - lower > tolerance(dtype):
                weights, form = self._next(lower, dtype)
                Y, A = form.take(Y.to(form.dtype or dtype), weights.of(alpha), A).to(dtype), None
                lower, sure, alpha = weights.image(lower), weights.image(sure), 1.0
                gain, iterations, flops = gain * weights.a, iterations + 1, flops + form.flops(m, m)
            Y, A, alpha = Y.to(dtype) / alpha, None, 1.0
            if 1 - sure <= tolerance(dtype):
                return _Run(Y, 0.0, iterations, flops)
            defect, flops = _defect(Y), flops + product_flops(m, m)
            if defect <= orthonormality(Y):
                return _Run(Y, (1 - defect) / gain, iterations, flops)
            lower = sure

    def _next(self, lower: float, dtype: torch.dtype) -> tuple[Weights, Form]:
        """Return the next step and its form."""
        if self.form is None and 1.5 * (1 - lower) ** 2 <= tolerance(dtype):
            return CUBIC, PRODUCT
        weights = self.weights(lower)
        return weights, self.form or form_for(weights, dtype)


# --- Newton -----------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """Where singular values lie."""

    low: float
    high: float

    def newton(self, zeta: float) -> "Interval":
        r"""Return the image under :math:`x \mapsto (\zeta x + 1 / (\zeta x)) / 2`, which is least, 1, at 1 / ζ.

        Examples
        --------
        >>> Interval(0.25, 1.0).newton(2.0)
        Interval(low=1.0, high=1.25)
        """
        ends = [(zeta * x + 1 / (zeta * x)) / 2 for x in self]
        return Interval(1.0 if zeta * self.low <= 1 <= zeta * self.high else min(ends), max(ends))


#: From the interval of the singular values, X and its inverse to ζ.
Scaling = Callable[[Interval, Tensor, Tensor], float]


def optimal(interval: Interval, X: Float[Tensor, "m m"], inverse: Float[Tensor, "m m"]) -> float:
    r"""Return :math:`1 / \sqrt{\sigma_{\min} \sigma_{\max}}` from bounds: the scaling with the least image.

    Examples
    --------
    >>> optimal(Interval(0.0625, 1.0), torch.eye(1), torch.eye(1))
    4.0
    """
    return 1 / math.sqrt(interval.low * interval.high)


def one_infinity(interval: Interval, X: Float[Tensor, "m m"], inverse: Float[Tensor, "m m"]) -> float:
    r"""Return Higham's :math:`(\|X^{-1}\|_1 \|X^{-1}\|_\infty / \|X\|_1 \|X\|_\infty)^{1/4}`, without a bound.

    Examples
    --------
    >>> X = torch.diag(torch.tensor([1.0, 0.0625]))
    >>> one_infinity(Interval(0.0625, 1.0), X, torch.linalg.inv(X))
    4.0
    """
    one, infinity, inverse_one, inverse_infinity = (
        float(A.abs().sum(axis).max()) for A in (X, inverse) for axis in (0, 1)
    )
    return (inverse_one * inverse_infinity / (one * infinity)) ** 0.25


def scaled_newton(
    roundoff: float | None = None, dtype: torch.dtype | None = None, scaling: Scaling = optimal
) -> Direct:
    r"""Return the orthogonalizer that takes the polar factor by Newton's iteration with scaling.

    At most nine steps in float64, each of them an inverse, on the triangular factor of a QLP decomposition, whatever
    the shape. There it is as accurate as QDWH. Its weakness is the inverse: of G itself, it leaves a backward error of
    2e-13 for a Vandermonde matrix of 24 points, and a singular matrix has none. Diagonal entries of L below
    :math:`u \|L\|_F` are set to that size, a change within rounding; the direction that it makes up is dropped
    afterwards, as in `svd`. And it is slow: twice the time of QDWH.

    Parameters
    ----------
    roundoff : float, optional
        As for `svd`, whose rule for the rank holds here.
    dtype : torch.dtype, optional
        In which to compute; by default that of the data, but at least float32.
    scaling : callable
        `optimal` or `one_infinity`.

    Returns
    -------
    Direct
        From ``(*batch, m, n)`` to the same shape and dtype, one matrix after the other.

    Raises
    ------
    ValueError
        As for `Direct`.

    Examples
    --------
    >>> import torch
    >>> G = torch.diag(torch.tensor([1.0, 1e-8], dtype=torch.float64))
    >>> scaled_newton().decompose(G).iterations
    tensor(8)
    """
    return Direct(Newton(scaling), roundoff, dtype)


@dataclass(frozen=True)
class Newton:
    """The method of `scaled_newton`."""

    scaling: Scaling

    def __call__(self, X: Float[Tensor, "batch m n"], roundoff: float | None) -> Factor:
        """Return the factors."""
        return _each(self._solve, X, roundoff)

    def _solve(self, X: Float[Tensor, "n m"], roundoff: float | None) -> _Found:
        start = _start_by_qr(X, fill=True)
        planned = max(start.lower, math.sqrt(torch.finfo(X.dtype).tiny))  # less is not seen: its square overflows
        Y, interval, near, iterations = start.Y / start.alpha, Interval(planned, 1.0), False, 0
        while not near and max(interval.high - 1, 1 - interval.low) > tolerance(Y.dtype):
            inverse = torch.linalg.inv(Y)
            near = float(torch.linalg.matrix_norm(Y - inverse.mT)) ** 2 <= 2 * tolerance(Y.dtype)
            zeta = 1.0 if near else self.scaling(interval, Y, inverse)
            Y = (zeta * Y + inverse.mT / zeta) / 2
            interval, iterations = interval.newton(zeta), iterations + 1
        full = start.lower - start.error > _cutoff(X, start.alpha, roundoff).most
        flops = start.flops + iterations * newton_flops(Y.shape[0])
        return _Found(start.restored(Y), full, planned, iterations, flops)


# --- where an iteration starts ----------------------------------------------------------------------------------------


def _start_by_qr(X: Float[Tensor, "n m"], fill: bool) -> _Start:
    """Start from the triangle of a QLP decomposition, made invertible if all directions are asked for."""
    n, m = X.shape
    P, R = torch.linalg.qr(X)
    Q, upper = torch.linalg.qr(R.mT)
    if fill:
        upper = _with_a_diagonal(upper)
    L = upper.mT
    alpha, lower = _bounds(L @ upper, upper)
    error = (n + m) * torch.finfo(X.dtype).eps / 2
    flops = qlp_flops(m, n) + product_flops(m, m) + 2 * m**3 / 3
    return _Start(L, None, alpha, lower, error, lambda V: P @ (V @ Q.mT), flops)


def _with_a_diagonal(R: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """Return R with diagonal entries of at least u ‖R‖: a change within rounding that leaves an inverse to be had."""
    least = torch.linalg.matrix_norm(R) * torch.finfo(R.dtype).eps / 2
    diagonal = R.diagonal()
    change = torch.where(diagonal.abs() < least, torch.where(diagonal < 0, -least, least) - diagonal, 0.0)
    return R + torch.diag(change)


def _start_by_gram(X: Float[Tensor, "n m"]) -> _Start:
    """Start from the Cholesky factor R of the Gram matrix in float64, or from X if that is square.

    X R^{-1} takes the place of Q, orthonormal to κ² u of float64; where that is not enough, Q and R come from a QR
    decomposition after all.
    """
    n, m = X.shape
    wide = X.double()
    A = wide.mT @ wide
    R, failed = torch.linalg.cholesky_ex(A, upper=True)
    alpha, lower = _bounds(A, None if failed else R)
    error = (n + m) * torch.finfo(A.dtype).eps / 2
    lower = math.sqrt(max(0.0, lower**2 - error))
    flops = product_flops(m, n) + m**3
    if n == m:
        return _Start(X, A, alpha, lower, 0.0, _unchanged, flops)
    if error >= lower**2 * torch.finfo(X.dtype).eps / 2:
        P, R = torch.linalg.qr(X)
        return _Start(R, None, alpha, lower, 0.0, P.matmul, flops + 2 * triangle_flops(m, n) + product_flops(m, n))
    precise = X if lower * WELL_CONDITIONED >= 1 else wide

    def restored(V: Tensor) -> Tensor:
        T = torch.linalg.solve_triangular(R.to(precise.dtype), V.to(precise.dtype), upper=True)
        return (T.mT @ precise.mT).mT.to(X.dtype)

    return _Start(R, A, alpha, lower, 0.0, restored, flops + m**3 + product_flops(m, n))


def _bounds(A: Float[Tensor, "m m"], R: Float[Tensor, "m m"] | None) -> tuple[float, float]:
    r"""Return :math:`\alpha \ge \sigma_1` from A, and from R a bound on :math:`\sigma_{\min} / \alpha`, or 0."""
    alpha = math.sqrt(_spectral_bound(A))
    if R is None or not R.diagonal().all():
        return alpha, 0.0
    inverse = _spectral_bound(torch.cholesky_inverse(R, upper=True))
    return alpha, 1 / (alpha * math.sqrt(inverse)) if math.isfinite(inverse) else 0.0


def _spectral_bound(S: Float[Tensor, "m m"]) -> float:
    """Return a bound on the largest eigenvalue of a symmetric matrix."""
    return min(float(torch.linalg.matrix_norm(S)), float(S.abs().sum(0).max()))


def _unchanged(V: Tensor) -> Tensor:
    return V


# --- a batch, and the rank --------------------------------------------------------------------------------------------


def _each(
    solve: Callable[[Tensor, float | None], _Found], X: Float[Tensor, "batch m n"], roundoff: float | None
) -> Factor:
    """Solve one matrix after the other, upright, and leave out what is rounding."""
    tall = upright(X)
    found = [solve(matrix, roundoff) if matrix.any() else _nothing(matrix) for matrix in tall]
    ranged = [_ranged(one, matrix, roundoff) for one, matrix in zip(found, tall, strict=True)]
    U = torch.stack([one.U for one in ranged])

    def hermitian() -> Tensor:
        return symmetric(torch.stack([one.U for one in found]).mT @ tall)

    def told(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=X.device)

    return Factor(
        U if tall is X else U.mT,
        hermitian,
        told([one.rank for one in ranged], torch.int64),
        told([one.iterations for one in found], torch.int64),
        told([one.lower for one in found], torch.float64),
        told([one.flops + other.flops for one, other in zip(found, ranged, strict=True)], torch.float64),
    )


class _Ranged(NamedTuple):
    """A factor without the directions that do not count."""

    U: Tensor
    rank: int
    flops: float


def _ranged(found: _Found, X: Float[Tensor, "n m"], roundoff: float | None) -> _Ranged:
    """Keep the range alone, by the eigenvectors of H in float64, unless it is sure that all is range."""
    n, m = X.shape
    if found.full:
        return _Ranged(found.U, m * int(X.any()), 0.0)
    U = found.U.double()
    eigenvalues, V = torch.linalg.eigh(symmetric(U.mT @ X.double()))
    kept = above_rounding(eigenvalues.flip(-1), m, n, roundoff)
    flops = product_flops(m, n) + 9.0 * m**3
    if kept.all():
        return _Ranged(found.U, m, flops)
    V = V.flip(-1)[:, kept]
    W, rank = U @ V, V.shape[1]
    while _defect(W) > orthonormality(W):  # near the cutoff H tells range from rounding to a digit or two
        W, flops = _by_product(W, CUBIC, None), flops + PRODUCT.flops(rank, n) + product_flops(rank, n)
    return _Ranged((W @ V.mT).to(X.dtype), rank, flops + 4.0 * n * m * rank)


def _nothing(X: Float[Tensor, "n m"]) -> _Found:
    """Return the factor of a zero matrix."""
    return _Found(torch.zeros_like(X), True, math.nan, 0, 0.0)


def _defect(Y: Float[Tensor, "n m"]) -> float:
    r"""Return :math:`\|Y^T Y - I\|_F`."""
    A = Y.mT @ Y
    A.diagonal().sub_(1.0)
    return float(torch.linalg.matrix_norm(A))


class _Cutoff(NamedTuple):
    """Bounds on the cutoff for the rank, relative to alpha."""

    least: float
    most: float


def _cutoff(X: Float[Tensor, "n m"], alpha: float, roundoff: float | None) -> _Cutoff:
    r"""Return bounds on the cutoff of `svd`, in which :math:`\sigma_1` is within :math:`[\|X\|_F / \sqrt m, \alpha]`.

    If all directions are asked for, those count that rounding leaves, u ‖X‖ over m.
    """
    n, m = X.shape
    norm = float(Exact().norm(X)) / alpha
    if roundoff is None:
        return _Cutoff(torch.finfo(X.dtype).eps / (2 * m) * norm, -1.0)
    eps, data = torch.finfo(torch.float64).eps, rounding(m, n, roundoff) * norm
    return _Cutoff(max(data, n * eps * norm / math.sqrt(m)), max(data, n * eps))
