r"""Multiplications and additions of an update, in closed form: every method, every layout, per rank.

For an m×n matrix with m the short side, K steps, and general products ("gemm") or half of each product with a symmetric
result ("syrk", as triangular kernels do):

===================  ====================================  ===================================
method               gemm                                  syrk
===================  ====================================  ===================================
quintic steps        :math:`K (4 m^2 n + 2 m^3)`           :math:`K (3 m^2 n + m^3)`
cubic steps          :math:`4 K m^2 n`                     :math:`3 K m^2 n`
Gram form            :math:`4 m^2 n + (8 K - 6) m^3`       :math:`3 m^2 n + (4 K - 3) m^3`
SVD                  :math:`6 m^2 n + 20 m^3`
eigenvectors         :math:`4 m^2 n + 11 m^3`
===================  ====================================  ===================================

Decompositions have no such choice, and their counts are those of dense algorithms: seconds follow from other rates.
What elementwise work there is (momentum, norm, scale) counts nothing.

References
----------
Golub and Van Loan, *Matrix Computations* (2013), sections 5.2, 8.3 and figure 8.6.1, for decompositions; Nakatsukasa
and Higham (2013) for QDWH; NVIDIA-NeMo/Emerging-Optimizers for the products that its triangular kernels halve.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from muon_lab.nearest import unknown
from muon_lab.parallel import volume
from muon_lab.parallel.grid import Placement
from muon_lab.polar import flops as products

#: The share of a product with a symmetric result that is multiplied.
KERNELS: Mapping[str, float] = {"gemm": 1.0, "syrk": 0.5}

#: Steps of a polynomial, by which of its products there are: X Xᵀ and B X, and A² of a quintic step.
QUINTIC, CUBIC = (1.0, 1.0, 1.0), (1.0, 1.0, 0.0)

#: Layouts that leave the update of a whole matrix in place, and the one that does not.
LAYOUTS = (*volume.WORK, "periodic")


class Work(NamedTuple):
    """Flops by what takes them: products run near the rate of a machine, decompositions far below it."""

    products: float
    decompositions: float

    @property
    def total(self) -> float:
        """Both."""
        return self.products + self.decompositions


def newton_schulz(m: int, n: int, steps: int, kernel: str = "gemm") -> float:
    r"""Return the flops of quintic Newton-Schulz steps: :math:`K (4 m^2 n + 2 m^3)`, m the short side.

    Raises
    ------
    ValueError
        For an unknown kernel, or a negative number of steps.

    Examples
    --------
    >>> newton_schulz(2048, 7168, 5) / 1e9, newton_schulz(2048, 7168, 5, "syrk") / newton_schulz(2048, 7168, 5)
    (687.19476736, 0.71875)
    """
    return products.plain([QUINTIC] * _steps(steps), m, n, _share(kernel))


def cubic(m: int, n: int, steps: int, kernel: str = "gemm") -> float:
    r"""Return the flops of cubic steps, which need no square: :math:`4 K m^2 n`.

    Examples
    --------
    >>> cubic(2, 3, 5), cubic(2, 3, 5, "syrk")
    (240.0, 180.0)
    """
    return products.plain([CUBIC] * _steps(steps), m, n, _share(kernel))


def gram(m: int, n: int, steps: int, restarts: Sequence[int] = (), kernel: str = "gemm") -> float:
    r"""Return the flops of quintic steps in Gram form, :math:`4 m^2 n + (8 K - 6) m^3` without restarts.

    Examples
    --------
    >>> gram(1, 4, 5), gram(1, 4, 5, restarts=(3,)), gram(1, 4, 5, kernel="syrk")
    (50.0, 60.0, 29.0)
    """
    return products.gram([QUINTIC] * _steps(steps), m, n, restarts, _share(kernel))


def svd(m: int, n: int) -> float:
    r"""Return the flops of a thin SVD, :math:`6 m^2 n + 20 m^3`, without the product of its factors.

    Examples
    --------
    >>> svd(2, 3)
    232.0
    """
    m, n = sorted((m, n))
    return 6.0 * m * m * n + 20.0 * m**3


def gram_eigh(m: int, n: int) -> float:
    r"""Return the flops of a polar factor from the eigenvectors of the Gram matrix, :math:`4 m^2 n + 11 m^3`.

    Examples
    --------
    >>> gram_eigh(2, 3)
    136.0
    """
    m, n = sorted((m, n))
    return 4.0 * m * m * n + 9.0 * m**3 + 2.0 * m**3


def eigh(k: int) -> float:
    r"""Return the flops of all eigenvectors of a symmetric k×k matrix, :math:`9 k^3`.

    Examples
    --------
    >>> eigh(10)
    9000.0
    """
    return 9.0 * k**3


def qdwh(m: int, n: int, *, qr: int = 2, cholesky: int = 2, product: int = 1, checks: int = 0) -> float:
    r"""Return the flops of QDWH on the triangular factor of a QLP decomposition, by the form of its steps.

    .. math:: 6 m^2 n + 6 m^3 + \left(\tfrac{26}{3} q + \tfrac{13}{3} c + 4 p + 2 t\right) m^3

    with q steps by a QR decomposition of :math:`2 m \times m`, c by Cholesky, p by products alone, and t times a look
    at how far the result is from orthogonal.

    Examples
    --------
    >>> qdwh(3, 5) == 6 * 45 + 27 * (6 + 2 * 26 / 3 + 2 * 13 / 3 + 4)
    True
    """
    m, n = sorted((m, n))
    return 6.0 * m * m * n + m**3 * (6.0 + 26 / 3 * qr + 13 / 3 * cholesky + 4.0 * product + 2.0 * checks)


def soap(
    m: int,
    n: int,
    *,
    frequency: int = 1,
    eigenbasis: str = "eigh",
    power_steps: int = 1,
    kl: bool = False,
    kernel: str = "gemm",
) -> Work:
    r"""Return the flops of a step of SOAP in the mean over a period of refreshes.

    A product of an m×n matrix with both bases takes :math:`P = 2 m n (m + n)`, the two factors of a gradient as much
    (twice as much with the Kullback-Leibler correction). A step takes the factors, the way there and the way back; a
    refresh two more P for the first moment, and for each side of length k :math:`9 k^3`, or
    :math:`(2 + 8/3) k^3` a power step and :math:`2 k^3` for the values.

    Raises
    ------
    ValueError
        For an unknown eigenbasis or kernel, or a frequency below 1.

    Examples
    --------
    >>> soap(2, 3)
    Work(products=300.0, decompositions=315.0)
    >>> soap(2, 3, frequency=10, eigenbasis="iteration").total < soap(2, 3).total / 2
    True
    """
    if eigenbasis not in ("eigh", "iteration"):
        raise unknown("eigenbasis", eigenbasis, ("eigh", "iteration"))
    if frequency < 1 or power_steps < 1:
        raise ValueError(f"frequency and power_steps of soap must be at least 1, not {frequency} and {power_steps}")
    pair, cubes = 2.0 * m * n * (m + n), float(m**3 + n**3)
    factors = pair * (_share(kernel) + kl)
    refresh = 2 * pair
    if eigenbasis == "eigh":
        decomposed = eigh(m) + eigh(n)
    else:
        refresh += 2 * cubes * (power_steps + 1)
        decomposed = 8 / 3 * cubes * power_steps
    return Work(factors + 2 * pair + refresh / frequency, decomposed / frequency)


def rekls(m: int, n: int, kernel: str = "gemm") -> Work:
    """Return the flops of a step of REKLS: SOAP with corrected factors, whose bases are decomposed at every step.

    Examples
    --------
    >>> rekls(2, 3)
    Work(products=360.0, decompositions=315.0)
    """
    return soap(m, n, kl=True, kernel=kernel)


#: From m, n, steps and kernel to the work of one matrix; exact methods take no steps.
METHODS: Mapping[str, Callable[[int, int, int, str], Work]] = {
    "newton_schulz": lambda m, n, steps, kernel: Work(newton_schulz(m, n, steps, kernel), 0.0),
    "gram": lambda m, n, steps, kernel: Work(gram(m, n, steps, (), kernel), 0.0),
    "cubic": lambda m, n, steps, kernel: Work(cubic(m, n, steps, kernel), 0.0),
    "qdwh": lambda m, n, steps, kernel: Work(0.0, qdwh(m, n)),
    "svd": lambda m, n, steps, kernel: Work(0.0, svd(m, n)),
    "gram_eigh": lambda m, n, steps, kernel: Work(0.0, gram_eigh(m, n)),
    "soap": lambda m, n, steps, kernel: soap(m, n, kernel=kernel),
    "rekls": lambda m, n, steps, kernel: rekls(m, n, kernel),
}


def method(name: str, m: int, n: int, steps: int = 5, kernel: str = "gemm") -> Work:
    """Return the flops of a method by name.

    Raises
    ------
    ValueError
        For an unknown name or kernel; says which is nearest.

    Examples
    --------
    >>> method("cubic", 2, 3, steps=1).total
    48.0
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name](m, n, steps, kernel)


def layout(
    name: str,
    shape: Sequence[int],
    placement: Placement,
    rank: int,
    steps: int,
    kernel: str = "gemm",
    *,
    period: int = 1,
    degree: int = 5,
) -> float:
    r"""Return the flops of a rank for one matrix in a tensor-parallel layout; for `owner`, of the matrix's owner.

    Only one product of a plain step has no symmetric result, B X, and one of a Gram form as a whole: :math:`2 k^2 s` on
    a matrix or shard of sides k and s. "syrk" halves all others.

    Parameters
    ----------
    name : str
        One of `LAYOUTS`; "periodic" is blockwise but for one step in `period`, which is duplicated.
    shape : sequence of int
        Of the whole matrix; leading axes are a batch.
    placement : Placement
        What each rank holds.
    rank, steps : int
        Whose flops, and of how many polynomial steps.
    kernel : {"gemm", "syrk"}
        Of products with a symmetric result.
    period, degree : int
        Of the periodic layout, and of a step: 5 or 3.

    Raises
    ------
    ValueError
        For an unknown name or kernel, or a shape that the placement does not cut.

    Examples
    --------
    >>> from muon_lab.parallel.grid import even
    >>> rows = even(14336, 8, dim=0)
    >>> [round(layout(name, (14336, 4096), rows, 0, 5) / 1e12, 2) for name in LAYOUTS]
    [5.5, 5.5, 1.29, 2.46, 0.32, 5.5]
    """
    if name not in LAYOUTS:
        raise unknown("layout", name, LAYOUTS)
    if degree not in (3, 5) or period < 1:
        raise ValueError(f"degree must be 3 or 5 and period at least 1, not {degree} and {period}")
    if name == "periodic":
        rest = (shape, placement, rank, steps, kernel)
        whole, blocks = (layout(part, *rest, degree=degree) for part in ("duplicated", "blockwise"))
        return (whole + (period - 1) * blocks) / period
    coefficients = [QUINTIC if degree == 5 else CUBIC] * _steps(steps)
    full = volume.flops(name, shape, placement, rank, coefficients)
    general = _general(name, shape, placement, rank) * (1 if name == "gram" else steps)
    return general + _share(kernel) * (full - general)


def count(name: str, steps: int, degree: int = 5) -> int:
    r"""Return how many products a rank makes for one matrix in a layout: 3K, 2K with cubic steps, 4K - 1 in Gram form.

    Raises
    ------
    ValueError
        For an unknown name.

    Examples
    --------
    >>> count("duplicated", 5), count("duplicated", 5, degree=3), count("gram", 5)
    (15, 10, 19)
    """
    if name not in LAYOUTS:
        raise unknown("layout", name, LAYOUTS)
    coefficients = [QUINTIC if degree == 5 else CUBIC] * _steps(steps)
    form = products.gram if name == "gram" else products.plain
    return round(form(coefficients, 1, 1) / 2) if steps else 0  # two flops each, of 1×1 matrices


def published(shape: Sequence[int], placement: Placement, rank: int, steps: int, kernel: str = "gemm") -> float:
    r"""Return the flops of a rank in the published distributed form, :math:`K (4 k^2 s / p + 2 k^3)`.

    k is the side that is not cut, whether it is the short one or not: `layout` cuts a matrix anew where it is long.

    Examples
    --------
    >>> from muon_lab.parallel.grid import even
    >>> published((2048, 7168), even(2048, 8, dim=0), 0, 5) / newton_schulz(2048, 7168, 5)  # more than duplicated
    5.7421875
    """
    placement.check(shape)
    k, s = shape[-1 if placement.dim == 0 else -2], placement.sizes[rank]
    return prod(shape[:-2]) * of_order(k, s, steps, kernel)


def of_order(k: int, other: int, steps: int, kernel: str = "gemm") -> float:
    r"""Return the flops of quintic steps on a Gram matrix of order k, whether that is the short side or not.

    Examples
    --------
    >>> of_order(2, 3, 5) == newton_schulz(2, 3, 5), of_order(3, 2, 5) / of_order(2, 3, 5)
    (True, 1.96875)
    """
    share = _share(kernel)
    return _steps(steps) * (2.0 * k * k * other * (1 + share) + 2.0 * k**3 * share)


def _general(name: str, shape: Sequence[int], placement: Placement, rank: int) -> float:
    """Return the flops of the one product without a symmetric result."""
    if name in ("distributed", "gram"):
        k, s = min(shape[-2:]), volume.long_axis(shape, placement).sizes[rank]
    else:
        own = placement.shape(shape, rank) if name == "blockwise" else shape
        k, s = sorted(own[-2:])
    return 2.0 * prod(shape[:-2]) * k * k * s


def _share(kernel: str) -> float:
    if kernel not in KERNELS:
        raise unknown("kernel", kernel, KERNELS)
    return KERNELS[kernel]


def _steps(steps: int) -> int:
    if steps < 0:
        raise ValueError(f"steps must not be negative, but are {steps}")
    return steps
