r"""Tolerances and bounds as expressions: what rounding, perturbation and blocking can do at most.

Symbols
-------
u : unit roundoff, half the distance from 1 to the next number (`unit_roundoff`); every ``eps`` below is one.
:math:`\gamma_k` : :math:`k u / (1 - k u)`, the relative error of k roundings in a row (`gemm`).

References
----------
Higham, *Accuracy and Stability of Numerical Algorithms* (2002), sections 2.1, 3.1, 3.5.
Li, *New perturbation bounds for the unitary polar factor*, SIAM J. Matrix Anal. Appl. 16 (1995).
Anderson et al., *LAPACK Users' Guide* (1999), section 4.9.
Kenney & Laub, *Polar decomposition and matrix sign function condition estimates*, SIAM J. Sci. Stat. Comput. 12 (1991),
for the derivative of the polar factor.
"""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

#: Significand bits, the implicit one included (IEEE 754-2019 table 3.5; OCP Microscaling Formats 1.0, section 5.3).
SIGNIFICAND_BITS: Final = {
    "fp64": 53,
    "fp32": 24,
    "tf32": 11,
    "fp16": 11,
    "bf16": 8,
    "e4m3": 4,
    "e5m2": 3,
    "e3m2": 3,
    "e2m3": 4,
    "e2m1": 2,
}

#: Factor on a first-order bound that covers the dropped higher orders: enough as long as the bound itself is below 1/2.
HIGHER_ORDERS: Final = 2.0

#: Factor for a handful of roundings that an expression does not count one by one (norms, final casts, transposes).
UNCOUNTED: Final = 8.0

_ALIASES: Final = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def unit_roundoff(dtype: str) -> float:
    """Return u = 2^-p of a format with p significand bits, rounding to nearest.

    Parameters
    ----------
    dtype : str
        A key of `SIGNIFICAND_BITS`, or the name of a torch or NumPy dtype (``float32``, ``torch.bfloat16``).

    Raises
    ------
    ValueError
        If the format is not known.

    Examples
    --------
    >>> unit_roundoff("bf16"), unit_roundoff("torch.float32") == 2.0**-24
    (0.00390625, True)
    """
    name = dtype.removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in SIGNIFICAND_BITS:
        raise ValueError(
            f"unit_roundoff: dtype is {dtype!r}, needed one of {', '.join((*SIGNIFICAND_BITS, *_ALIASES))}"
        )
    return 2.0 ** -SIGNIFICAND_BITS[name]


def gemm(k: int, eps: float) -> float:
    r"""Return :math:`\gamma_k`: a product with inner dimension k has :math:`|fl(AB) - AB| \le \gamma_k |A| |B|`.

    Entry by entry, for any order of summation (Higham 2002, section 3.5). In norms :math:`\||A||B|\|_F` may be as large
    as :math:`\|A\|_F \|B\|_F`.

    Parameters
    ----------
    k : int
        Length of the inner products.
    eps : float
        Unit roundoff of the accumulation.

    Raises
    ------
    ValueError
        If ``k eps`` is not below 1: no digit is left, and the bound with it.

    Examples
    --------
    >>> gemm(64, 2.0**-24)
    3.8147118175957395e-06
    """
    if k < 0 or not 0 <= k * eps < 1:
        raise ValueError(f"gemm: k = {k} and eps = {eps:g} give k eps = {k * eps:g}, needed k >= 0 and 0 <= k eps < 1")
    return k * eps / (1 - k * eps)


def rounded_gemm(k: int, operand: float, accumulate: float, result: float) -> float:
    r"""Return the bound of a mixed-precision product: :math:`|fl(AB) - AB| \le c |A| |B|`.

    Each operand entry is rounded once (1 + u_o), products and sums collect :math:`\gamma_k`, and the result is stored
    (1 + u_r), so :math:`c = (1 + u_o)^2 (1 + \gamma_k) (1 + u_r) - 1`. It holds as long as nothing under- or overflows.

    Parameters
    ----------
    k : int
        Length of the inner products.
    operand, accumulate, result : float
        Unit roundoffs of the three formats; 0 for a step that does not round.

    Raises
    ------
    ValueError
        As for `gemm`.

    Examples
    --------
    >>> round(rounded_gemm(64, 2.0**-8, 2.0**-24, 2.0**-8), 6)  # bf16 in and out, fp32 inside: about 3 u
    0.011768
    """
    return (1 + operand) ** 2 * (1 + gemm(k, accumulate)) * (1 + result) - 1


def svd(m: int, n: int, eps: float) -> float:
    r"""Return p(m, n) eps, the backward error of a singular value decomposition relative to :math:`\|G\|_2`.

    Computed singular values and vectors are those of G + E with :math:`\|E\|_2 \le p(m, n) \, eps \|G\|_2`, p a modest
    function (LAPACK Users' Guide, section 4.9); taken here as max(m, n), as in the usual tolerance for the rank.

    Examples
    --------
    >>> svd(8, 16, 0.5) / 0.5
    16.0
    """
    return max(m, n) * eps


def polar(smallest: float, smallest_perturbed: float, rank: int, m: int, n: int) -> float:
    r"""Return the factor L in :math:`\|U(G + E) - U(G)\|_F \le L \|E\|_F` for matrices of equal rank r.

    .. math:: L = \frac{2}{\sigma_r + \tilde\sigma_r} + \frac{c}{\max(\sigma_r, \tilde\sigma_r)},
              \qquad c = [r < m] + [r < n].

    Derivation. Let :math:`G = U_1 \Sigma V_1^T`, :math:`\tilde G = \tilde U_1 \tilde\Sigma \tilde V_1^T` be the reduced
    decompositions, and Z the block :math:`\tilde U_1^T U_1 - \tilde V_1^T V_1` of the difference of the factors. Taking
    blocks of :math:`E` from both sides gives :math:`\tilde\Sigma Z + Z \Sigma = (U_1^T E \tilde V_1)^T - \tilde U_1^T E
    V_1`, hence :math:`\|Z\|_F \le 2 \|E\|_F / (\sigma_r + \tilde\sigma_r)`. The difference has one more block for each
    side on which the range is not everything; it is the sine of the angle between the two ranges, at most
    :math:`\|E\|_F / \max(\sigma_r, \tilde\sigma_r)` (Wedin's argument). Li (1995) has c = 0 for square and c = 1 for
    rectangular matrices of full rank.

    Parameters
    ----------
    smallest, smallest_perturbed : float
        The smallest non-zero singular values of G and of G + E, in the unit of G.
    rank : int
        The rank of both.
    m, n : int
        The shape.

    Returns
    -------
    float
        In the inverse unit of G.

    Raises
    ------
    ValueError
        If a singular value is not positive, or the rank is not within 1 ... min(m, n).

    Examples
    --------
    >>> polar(0.5, 0.5, rank=4, m=4, n=4), polar(0.5, 0.5, rank=4, m=4, n=8), polar(0.5, 0.5, rank=3, m=4, n=8)
    (2.0, 4.0, 6.0)
    """
    if not 1 <= rank <= min(m, n):
        raise ValueError(f"polar: rank is {rank}, needed 1 to {min(m, n)} for shape ({m}, {n})")
    if not (smallest > 0 and smallest_perturbed > 0):
        raise ValueError(
            f"polar: smallest is {smallest:g} and smallest_perturbed {smallest_perturbed:g}, needed both above 0"
        )
    return 2 / (smallest + smallest_perturbed) + ((rank < m) + (rank < n)) / max(smallest, smallest_perturbed)


def polar_by_svd(largest: float, smallest: float, rank: int, m: int, n: int, eps: float) -> float:
    r"""Return a bound on :math:`\|\hat U - U\|_F` for a polar factor computed by a singular value decomposition.

    The backward error (`svd`) has :math:`\|E\|_F \le \sqrt{\min(m, n)} \, p \, eps \, \sigma_1`, which `polar` passes
    on; the vectors themselves depart from orthonormality by :math:`\sqrt r \, p \, eps`, and so does their product.
    `UNCOUNTED` covers the constants in p, and that cutting G + E back to rank r moves it by as much again.

    Parameters
    ----------
    largest, smallest : float
        The largest and the smallest non-zero singular value of G.
    rank : int
        The rank of G.
    m, n : int
        The shape.
    eps : float
        Unit roundoff of the decomposition.

    Raises
    ------
    ValueError
        As for `polar`.

    Examples
    --------
    >>> polar_by_svd(1.0, 1e-3, 4, 4, 8, 2.0**-53) < 1e-10
    True
    """
    amplified = polar(smallest, smallest, rank, m, n) * math.sqrt(min(m, n)) * largest
    return UNCOUNTED * svd(m, n, eps) * (amplified + math.sqrt(rank))


class Amplification(NamedTuple):
    r"""What noise in a matrix does to its polar factor, in root mean square Frobenius norms.

    Attributes
    ----------
    noise : float
        :math:`\tau \sqrt{m n} / \|G\|_F`, relative to the matrix.
    distance : float
        Relative to the polar factor.
    factor : float
        The distance over the noise, which does not depend on tau.
    """

    noise: float
    distance: float
    factor: float


def noise_amplification(spectrum: ArrayLike, shape: tuple[int, int], tau: float) -> Amplification:
    r"""Return how independent noise of variance tau^2 in every entry of G reaches its polar factor, to first order.

    .. math:: E \|U(G + N) - U(G)\|_F^2 = \tau^2 \left[ \sum_{i \ne j} \frac{2}{(\sigma_i + \sigma_j)^2}
              + |m - n| \sum_i \frac{1}{\sigma_i^2} \right] + O(\tau^4)

    Derivation, for m <= n. With :math:`G = U \Sigma V_1^T`, let :math:`F = U^T N V_1` and, for an orthonormal basis
    :math:`V_2` of the rest, :math:`C = U^T N V_2`: rotations, so their entries are independent of variance tau^2 too.
    The factor moves by :math:`U (K V_1^T + \Sigma^{-1} C V_2^T)`, with K the skew solution of
    :math:`\Sigma K + K \Sigma = F - F^T`. An entry :math:`K_{ij} = (F_{ij} - F_{ji}) / (\sigma_i + \sigma_j)` has
    variance :math:`2 \tau^2 / (\sigma_i + \sigma_j)^2`, and n - m columns of C are divided by :math:`\sigma_i`.

    It holds while tau is small against the smallest singular value. Measured by averages over noise: within 1 % for
    :math:`\tau \le \sigma_{\min} / 10` on square matrices and for :math:`\tau \sqrt{|m - n|} \le \sigma_{\min} / 10` on
    others. Beyond that it is too large (by a seventh where the latter ratio is 1), as no distance exceeds 2.

    Parameters
    ----------
    spectrum : array_like of shape (min(m, n),)
        The singular values of G, all positive: the polar factor of a singular matrix jumps.
    shape : (int, int)
        m, n.
    tau : float
        The standard deviation of an entry of the noise, in the unit of G.

    Returns
    -------
    Amplification
        Noise, distance, and the factor between them.

    Raises
    ------
    ValueError
        If the spectrum does not have min(m, n) positive finite values, or tau is negative or not finite.

    Examples
    --------
    >>> found = noise_amplification([2.0, 2.0, 2.0], (3, 7), tau=2e-3)
    >>> round(found.noise, 6), round(found.distance, 6)  # 1e-3 sqrt(7); 1e-3 sqrt(6 / 2 / 3 + 4)
    (0.002646, 0.002236)
    >>> round(found.factor, 4)  # sqrt(5 / 7)
    0.8452
    """
    s, (m, n) = np.asarray(spectrum, dtype=np.float64), shape
    if s.shape != (min(m, n),) or min(m, n) < 1:
        raise ValueError(
            f"noise_amplification: spectrum has shape {s.shape}, needed ({min(m, n)},) for a matrix of shape {(m, n)}"
        )
    if not (np.isfinite(s).all() and (s > 0).all()):
        raise ValueError(
            f"noise_amplification: spectrum lies within {s.min():g} and {s.max():g}, needed positive finite values"
        )
    if not 0 <= tau < math.inf:
        raise ValueError(f"noise_amplification: tau is {tau:g}, needed a finite number of at least 0")
    largest = float(s.max())
    s = s / largest
    with np.errstate(over="ignore", divide="ignore"):  # a spectrum of more than 150 decades: infinite
        squares = abs(m - n) * float(np.square(1 / s).sum())
        for i, x in enumerate(s):
            squares += float(np.square(math.sqrt(2) / (x + np.delete(s, i))).sum())
    noise, distance = math.sqrt(m * n) / float(np.linalg.norm(s)), math.sqrt(squares / len(s))
    return Amplification(tau / largest * noise, tau / largest * distance, distance / noise)


def step(coefficients: Iterable[float], radius: float) -> float:
    r"""Return :math:`\sum_i (2 i + 1) |c_i| \rho^{2 i}`: how one odd polynomial step passes on its products' errors.

    The step is :math:`X' = a X + (b A + c A^2) X` with :math:`A = X X^T` and :math:`\|X\|_2 \le \rho`. If every product
    returns :math:`fl(AB)` with :math:`\|fl(AB) - AB\|_F \le \epsilon \|A\|_2 \|B\|_F`, and sums round by less, then to
    first order A carries :math:`\epsilon \rho`, A^2 :math:`3 \epsilon \rho^3`, B X :math:`(2 |b| \rho^2 + 4 |c| \rho^4)
    \epsilon` (all times :math:`\|X\|_F`), and with the sums X' carries at most the value returned times
    :math:`\epsilon \|X\|_F`.

    Parameters
    ----------
    coefficients : iterable of float
        a, b, c, ... in rising degree.
    radius : float
        :math:`\rho`, a bound on the singular values of X.

    Examples
    --------
    >>> step((1.5, -0.5, 0.0), 1.0)
    3.0
    """
    return sum((2 * i + 1) * abs(c) * radius ** (2 * i) for i, c in enumerate(coefficients))


def newton_schulz(slope: float, k: int, eps: float, steps: int = 1, local: float = 1.0) -> float:
    r"""Return a first-order bound on the rounding error of an odd polynomial iteration of T steps.

    .. math:: \frac{\|\hat X_T - X_T\|_F}{\max_t \|X_t\|_F} \le T L \ell \epsilon, \quad \epsilon = \sqrt{k} \, \gamma_k

    Derivation. An odd map acts on singular values, :math:`F(X) = U f(\Sigma) V^T`. In the singular bases its derivative
    multiplies the symmetric part of a perturbation by :math:`(f(\sigma_i) - f(\sigma_j)) / (\sigma_i - \sigma_j)`, the
    skew part by the same with plus signs, and the part outside by :math:`f(\sigma_i) / \sigma_i`. As f is odd they all
    are divided differences on :math:`[-\sigma_1, \sigma_1]`, so by the mean value theorem none exceeds the largest
    :math:`|f'|` there: in the Frobenius norm the map amplifies no error by more than its largest slope. Each step adds
    :math:`\ell \epsilon \|X_t\|_F` (`step`), which the steps after it amplify by at most L. The product's
    :math:`\epsilon` follows from :math:`\||A|\|_2 \le \sqrt{r} \|A\|_2` and `gemm`, with r and every inner length at
    most k.

    It is a worst case: roundings that behave as independent grow with :math:`\sqrt{k}` and not :math:`k^{3/2}`.

    Parameters
    ----------
    slope : float
        L, at least the largest :math:`|f'|` over the range of singular values of the whole map and of every tail of it.
    k : int
        The longest inner product, the longer side of the matrix.
    eps : float
        Unit roundoff of the products.
    steps : int
        T.
    local : float
        :math:`\ell`, the largest `step` of the schedule.

    Raises
    ------
    ValueError
        As for `gemm`, or if slope, steps or local is negative.

    Examples
    --------
    >>> round(newton_schulz(slope=1.5, k=4, eps=2.0**-53, steps=1, local=3.0) / 2.0**-53, 6)  # 1.5 * 3 * 2 * 4
    36.0
    """
    if min(slope, steps, local) < 0:
        raise ValueError(
            f"newton_schulz: slope {slope:g}, steps {steps} and local {local:g} given, needed none negative"
        )
    return steps * slope * local * math.sqrt(k) * gemm(k, eps)


def blockwise(tp: int) -> float:
    r"""Return :math:`\sqrt{tp}`, the largest spectral norm of an update made of tp blocks of norm at most 1.

    For blocks side by side :math:`\|B\|_2^2 = \|\sum_i B_i B_i^T\|_2 \le \sum_i \|B_i\|_2^2 \le tp`; equal blocks
    attain it. The same holds for blocks on top of each other.

    Raises
    ------
    ValueError
        If tp is below 1.

    Examples
    --------
    >>> blockwise(4)
    2.0
    """
    if tp < 1:
        raise ValueError(f"blockwise: tp is {tp}, needed at least 1")
    return math.sqrt(tp)
