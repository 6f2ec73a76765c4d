r"""What random-matrix theory says of orthogonalizing the blocks of a Gaussian matrix instead of the whole.

G (m, n) has independent Gaussian entries and is cut along one axis into blocks. With exact polar factors, B of the
blocks put together and U of the whole, as m and n grow in proportion the numbers below tend to constants, with
fluctuations of the order of 1/m.

Let n be the axis that is not cut, :math:`\lambda = m / n` and :math:`\lambda_b = m_b / n` for a block of :math:`m_b`
rows, entries of variance 1/n. Then :math:`G^T G` has the Marchenko-Pastur law (free Poisson law of rate λ): with
:math:`x = 1 + \lambda + 2 \sqrt\lambda \cos\theta`

.. math:: d\mu_\lambda = \frac{2 \lambda}{\pi} \frac{\sin^2 \theta}{x}\, d\theta, \quad 0 \le \theta \le \pi,
          \qquad \text{and a part } 1 - \lambda \text{ at } 0 \text{ if } \lambda < 1.

Norms and nuclear norms follow at once, :math:`\|G\|_* = n \int \sqrt x\, d\mu_\lambda` and
:math:`\|B\|_F^2 = \sum_b \min(m_b, n)`. The inner product of B and U is a sum over blocks of
:math:`\mathrm{tr}\big((G_b^T G_b)^{1/2} (G^T G)^{-1/2}\big)`. There :math:`A = G_b^T G_b` and the rest
:math:`C = G^T G - A` are free, so that given A the resolvent of the sum is one of A at another point (subordination):

.. math::

    \mathbf{E}\,[(A + C + t)^{-1} \mid A] = (A + w(t))^{-1}, \qquad w = t + \frac{\lambda - \lambda_b}{1 + h}, \qquad
    \frac{1}{h} = t + \frac{\lambda}{1 + h},

.. math:: \frac1n \langle B_b, U_b \rangle \to \frac1\pi \int_0^\infty \frac{dt}{\sqrt t}
          \int \frac{\sqrt x}{x + w(t)}\, d\mu_{\lambda_b}(x).

As blocks become single rows, :math:`\sqrt x / (x + w)` is :math:`1 / (1 + w)` and the cosine becomes
:math:`\int \sqrt x\, d\mu_\lambda / \lambda`: for square matrices :math:`8 / (3 \pi)`, and the error
:math:`\sqrt{2 - 16 / (3 \pi)}`.

References
----------
V. Marchenko and L. Pastur (1967); P. Biane, *Processes with free increments*, Math. Z. 227 (1998), for subordination.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

#: Points of the quadratures: double exponential (Takahasi and Mori, 1974), whose error at this step is rounding for
#: integrands with singular ends.
POINTS, REACH = 400, 3.4


class Expected(NamedTuple):
    r"""What is expected of the update B, relative to the polar factor U of the whole.

    Attributes
    ----------
    relative : float
        :math:`\|B - U\|_F / \|U\|_F`.
    cosine : float
        :math:`\langle B, U \rangle / (\|B\|_F \|U\|_F)`.
    fro_ratio : float
        :math:`\|B\|_F / \|U\|_F`; exact for every matrix whose blocks have full rank.
    nuclear_ratio : float
        :math:`\sum_b \|G_b\|_* / \|G\|_*`.
    """

    relative: float
    cosine: float
    fro_ratio: float
    nuclear_ratio: float

    @property
    def correction(self) -> float:
        """The factor of the step size with which B moves a weight as far as U does, in the root mean square."""
        return 1 / self.fro_ratio


def blockwise(rows: int, cols: int, dim: int, sizes: Sequence[int]) -> Expected:
    r"""Return what is expected of a Gaussian matrix that is cut into blocks.

    Parameters
    ----------
    rows, cols : int
        The shape, of which only the ratio matters where it is large.
    dim : {0, 1}
        The axis that is cut: 0 rows, 1 columns.
    sizes : sequence of int
        Rows or columns of each block; empty ones do not count.

    Raises
    ------
    ValueError
        For a shape without entries, another axis, or sizes that do not add up to it.

    Examples
    --------
    >>> [round(blockwise(256, 256, 0, [256 // tp] * tp).relative, 3) for tp in (1, 2, 4, 8)]
    [0.0, 0.469, 0.516, 0.534]
    >>> round(blockwise(2**14, 2**14, 0, [1] * 2**14).relative, 4), round(math.sqrt(2 - 16 / (3 * math.pi)), 4)
    (0.5499, 0.5499)
    >>> wide = blockwise(64, 512, 1, [128] * 4)  # blocks of a long axis that are still wide: B Bᵀ = 4
    >>> wide.fro_ratio, wide.correction, round(wide.nuclear_ratio, 3)
    (2.0, 0.5, 1.896)
    """
    if dim not in (0, 1) or min(rows, cols) < 1:
        raise ValueError(f"blockwise needs a shape with entries and dim 0 or 1, not {rows}×{cols} and {dim!r}")
    m, n = (rows, cols) if dim == 0 else (cols, rows)
    if min(sizes, default=-1) < 0 or sum(sizes) != m:
        raise ValueError(f"sizes of the blocks must add up to the {m} entries of axis {dim}, not {tuple(sizes)}")
    short, blocks = min(m, n), [size for size in sizes if size]
    norm = sum(min(size, n) for size in blocks)
    inner = n * sum(alignment(size / n, m / n) for size in blocks)
    nuclear = sum(half_moment(size / n) for size in blocks) / half_moment(m / n)
    if len(blocks) == 1:
        inner = float(short)
    return Expected(
        relative=math.sqrt(max(0.0, (norm + short - 2 * inner) / short)),
        cosine=inner / math.sqrt(norm * short),
        fro_ratio=math.sqrt(norm / short),
        nuclear_ratio=nuclear,
    )


def half_moment(ratio: float) -> float:
    r"""Return :math:`\int \sqrt x\, d\mu_\lambda`: the mean singular value of an m×n matrix over n, with m/n = λ.

    Examples
    --------
    >>> round(half_moment(1.0), 12) == round(8 / (3 * math.pi), 12)
    True
    """
    x, weight = _law(ratio)
    return float(weight @ np.sqrt(x))


@lru_cache
def alignment(block: float, ratio: float) -> float:
    r"""Return what a block contributes to :math:`\langle B, U \rangle / n`, for rates :math:`\lambda_b` and λ.

    Examples
    --------
    >>> round(alignment(0.25, 0.25), 9)  # the block is all: λ
    0.25
    """
    x, weight = _law(block)
    v, step = _half_line()  # t = v², dt / √t = 2 dv
    t = v * v
    low = t + ratio - 1
    root = np.sqrt(low * low + 4 * t)
    larger = np.abs(low) + root
    h = np.where(low > 0, 2 / larger, larger / (2 * t))
    w = t + (ratio - block) / (1 + h)
    inner = (np.sqrt(x) / (x + w[:, None])) @ weight
    return float(2 / math.pi * step @ inner)


@lru_cache
def _law(ratio: float) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Return points and weights of the law, its part at zero left out: the density against θ."""
    u, step = _exponential()  # θ = π u, u in (0, 1)
    near, far = np.cos(np.pi * u / 2), np.sin(np.pi * u / 2)
    root = math.sqrt(ratio)
    x = (1 - root) ** 2 + 4 * root * near * near  # 1 + λ + 2 √λ cos θ, without cancellation
    sine = 2 * near * far
    return x, 2 * ratio * sine * sine / x * step


@lru_cache
def _exponential() -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Return points in (0, 1) and weights that add up to 1."""
    y = np.linspace(-REACH, REACH, POINTS)
    s = np.pi / 2 * np.sinh(y)
    u = 1 / (1 + np.exp(-2 * s))
    return u, (y[1] - y[0]) * np.pi * np.cosh(y) * u * (1 - u)


@lru_cache
def _half_line() -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Return points in (0, ∞) and weights."""
    y = np.linspace(-1.5 * REACH, 1.5 * REACH, POINTS)
    v = np.exp(np.pi / 2 * np.sinh(y))
    return v, (y[1] - y[0]) * np.pi / 2 * np.cosh(y) * v
