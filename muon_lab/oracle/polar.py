r"""The polar factor and every odd function of singular values, by a float64 singular value decomposition.

.. math:: G = U H, \qquad G = P \Sigma Q^T, \qquad U = P_r Q_r^T, \qquad H = Q \Sigma Q^T = (G^T G)^{1/2}

Symbols
-------
r : the rank, the number of singular values above what an error of the decomposition, or the rounding with which G was
    stored, can make (see `polar`).
U : the partial isometry on the range of G, so the null space stays empty and a zero matrix has a zero factor.

References
----------
Higham, *Functions of Matrices* (2008), chapter 8; for float64 data the tolerance is that of
``numpy.linalg.matrix_rank``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

#: Unit roundoff of float64.
ROUNDOFF = 2.0**-53

#: How far above the expected spectral norm of the data's rounding a direction must stand: data that were computed carry
#: more than one rounding an entry.
ROUNDINGS = 8


class Polar(NamedTuple):
    """A polar decomposition, batched over leading axes.

    Attributes
    ----------
    U : array of shape (*batch, m, n)
        The polar factor.
    H : array of shape (*batch, n, n)
        The right Hermitian factor, exactly symmetric, in the unit of G.
    s : array of shape (*batch, min(m, n))
        The singular values of G, descending, in the unit of G.
    """

    U: Float[np.ndarray, "*batch m n"]
    H: Float[np.ndarray, "*batch n n"]
    s: Float[np.ndarray, "*batch r"]

    @property
    def rank(self) -> Int[np.ndarray, "*batch"]:
        """The number of directions that U has, its squared Frobenius norm; a 0-d array for one matrix."""
        return np.asarray(np.rint(np.square(self.U).sum(axis=(-2, -1))), np.int64)

    @property
    def matrix(self) -> Float[np.ndarray, "*batch m n"]:
        """The product U H, which is G to rounding."""
        return self.U @ self.H


def polar(G: ArrayLike, *, roundoff: float = ROUNDOFF) -> Polar:
    r"""Return the polar decomposition whose factor is the partial isometry on the range of G.

    A direction counts if its singular value exceeds both :math:`\max(m, n)\, \varepsilon_{64}\, s_1`, the error of the
    decomposition, and :math:`8 u \|G\|_F (\sqrt m + \sqrt n) / \sqrt{mn}`, eight times the expected spectral norm of
    independent rounding errors of the data. A gradient of the first layer of a language model, say, has at most as many
    directions as its batch has distinct tokens; in float32 the others are rounding, of 1e-7, and no part of the truth.

    Parameters
    ----------
    G : array_like of shape (*batch, m, n)
        Real and finite, of any scale: it is divided by a power of two first, so that 1e-300 and 1e300 both work.
        Integers are converted to float64.
    roundoff : float
        Unit roundoff u of the numbers in which G was stored before it came here: 2^-24 for float32.

    Returns
    -------
    Polar
        U (m, n), H (n, n) and s (min(m, n)); U is zero where G is.

    Raises
    ------
    ValueError
        If G has fewer than two axes, is complex or not numeric, has an entry that is not finite, or has a singular
        value that float64 cannot hold.

    Examples
    --------
    >>> U, H, s = polar([[0.0, 2.0], [-3.0, 0.0]])
    >>> U.round(12) + 0.0
    array([[ 0.,  1.],
           [-1.,  0.]])
    >>> s
    array([3., 2.])
    >>> polar(np.ones((4, 4))).U[0]  # rank one: the other three directions stay empty
    array([0.25, 0.25, 0.25, 0.25])
    """
    P, s, Qt, exponent = _svd("polar", G)
    kept = _above(s, P.shape[-2], Qt.shape[-1], roundoff)
    return _assemble("polar", (P * kept[..., None, :]) @ Qt, s, Qt, exponent)


def filled(G: ArrayLike) -> Polar:
    """Return the polar decomposition whose null space is filled: U = P Q^T from the whole thin decomposition.

    U has orthonormal rows or columns for every G. Outside the range of G it is whatever basis LAPACK returns; for a
    zero matrix it is the identity. H and s are those of `polar`.

    Parameters
    ----------
    G : array_like of shape (*batch, m, n)
        As for `polar`.

    Raises
    ------
    ValueError
        As for `polar`.

    Examples
    --------
    >>> filled(np.zeros((2, 2))).U
    array([[1., 0.],
           [0., 1.]])
    """
    P, s, Qt, exponent = _svd("filled", G)
    return _assemble("filled", P @ Qt, s, Qt, exponent)


def singular_value_map(
    G: ArrayLike, function: Callable[[Float[np.ndarray, "*batch r"]], Float[np.ndarray, "*batch r"]]
) -> Float[np.ndarray, "*batch m n"]:
    r"""Return :math:`P f(\Sigma / \|\Sigma\|_F) Q^T`: what a polynomial schedule gives in exact arithmetic.

    An odd polynomial in X, X X^T X, ... acts on the singular values alone, so the scalar map f is the whole iteration.

    Parameters
    ----------
    G : array_like of shape (*batch, m, n)
        As for `polar`.
    function : callable
        The odd scalar map f, applied to an array of numbers in [0, 1]. ``f(0) = 0`` is expected.

    Returns
    -------
    array of shape (*batch, m, n)
        Without unit; zero where the matrix is zero.

    Raises
    ------
    ValueError
        As for `polar`.

    Examples
    --------
    >>> singular_value_map([[3e300, 0.0], [0.0, 4e300]], lambda s: s**3).round(3)
    array([[0.216, 0.   ],
           [0.   , 0.512]])
    """
    P, s, Qt, _ = _svd("singular_value_map", G)
    norm = np.linalg.norm(s, axis=-1, keepdims=True)
    nonzero = norm > 0
    f = np.where(nonzero, function(s / np.where(nonzero, norm, 1.0)), 0.0)
    return (P * f[..., None, :]) @ Qt


def _above(s: Float[np.ndarray, "*batch r"], m: int, n: int, roundoff: float) -> np.ndarray:
    """Say which singular values count towards the rank."""
    decomposition = 2 * max(m, n) * ROUNDOFF * s.max(axis=-1, keepdims=True, initial=0.0)
    spread = (math.sqrt(m) + math.sqrt(n)) / math.sqrt(max(m * n, 1))
    data = ROUNDINGS * roundoff * spread * np.linalg.norm(s, axis=-1, keepdims=True)
    return s > np.maximum(decomposition, data)


def _svd(caller: str, G: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return P, s, Q^T of G / 2^e with the exponents e (*batch, 1, 1) that put the largest entry into [1/2, 1)."""
    A = _matrix(caller, G)
    exponent = np.frexp(np.abs(A).max(axis=(-2, -1), keepdims=True, initial=0.0))[1]
    P, s, Qt = np.linalg.svd(np.ldexp(A, -exponent), full_matrices=False)
    return P, s, Qt, exponent


def _assemble(caller: str, U: np.ndarray, s: np.ndarray, Qt: np.ndarray, exponent: np.ndarray) -> Polar:
    """Put the scale back."""
    H = (Qt.mT * s[..., None, :]) @ Qt
    with np.errstate(over="ignore"):
        scaled = np.ldexp(s, exponent[..., 0])
    if not np.isfinite(scaled).all():
        raise ValueError(
            f"{caller}: G has a singular value above {np.finfo(np.float64).max:.2g}, needed ones in float64"
        )
    return Polar(U, np.ldexp((H + H.mT) / 2, exponent), scaled)


def _matrix(caller: str, G: ArrayLike) -> Float[np.ndarray, "*batch m n"]:
    """Return G in float64, or say what is wrong with it."""
    try:
        A = np.asarray(G)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{caller}: G of type {type(G).__name__} cannot be read as a real NumPy array ({error})"
        ) from error
    if A.dtype.kind not in "fiu":
        raise ValueError(f"{caller}: G has dtype {A.dtype}, needed real floating-point or integer numbers")
    if A.ndim < 2:
        raise ValueError(f"{caller}: G has shape {A.shape}, needed at least two axes (..., m, n)")
    with np.errstate(over="ignore"):
        A = A.astype(np.float64)
    bad = A.size - np.count_nonzero(np.isfinite(A))
    if bad:
        raise ValueError(f"{caller}: {bad} of the {A.size} entries of G are not finite in float64, needed all finite")
    return A
