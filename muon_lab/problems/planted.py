r"""Matrices built from their singular value decomposition, so that the polar factor is known without computing one.

.. math:: G = U \Sigma V^T, \qquad \text{polar}(G) = U_r V_r^T, \qquad (G^T G)^{1/2} = V \Sigma V^T

with Haar distributed U and V and r non-zero singular values.

References
----------
Stewart, *The efficient generation of random orthogonal matrices*, SIAM J. Numer. Anal. 17 (1980);
Mezzadri, *How to generate random matrices from the classical compact groups*, Notices AMS 54 (2007).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from muon_lab.problems.spectra import Spectrum, parse


class Planted(NamedTuple):
    """A matrix and the decomposition that it was built from, in float64.

    Attributes
    ----------
    G : array of shape (m, n)
        The matrix, U diag(s) V^T rounded once.
    U : array of shape (m, r)
        Left singular vectors, r = min(m, n).
    s : array of shape (r,)
        Singular values, descending.
    V : array of shape (n, r)
        Right singular vectors.
    """

    G: Float[np.ndarray, "m n"]
    U: Float[np.ndarray, "m r"]
    s: Float[np.ndarray, " r"]
    V: Float[np.ndarray, "n r"]

    @property
    def matrix(self) -> Float[np.ndarray, "m n"]:
        """The matrix G."""
        return self.G

    @property
    def polar(self) -> Float[np.ndarray, "m n"]:
        """The polar factor: the partial isometry U V^T over the non-zero singular values."""
        return (self.U * (self.s > 0)) @ self.V.T

    @property
    def hermitian(self) -> Float[np.ndarray, "n n"]:
        """The right Hermitian factor V diag(s) V^T."""
        return (self.V * self.s) @ self.V.T


def haar(n: int, k: int, generator: np.random.Generator) -> Float[np.ndarray, "n k"]:
    """Draw n × k orthonormal columns from the uniform (Haar) distribution.

    The Q of a Gaussian matrix, with the signs that make the diagonal of R positive: without them the distribution would
    depend on how LAPACK chooses its reflections.

    Parameters
    ----------
    n, k : int
        Rows and columns, n >= k >= 0.
    generator : numpy.random.Generator
        Gives n k normal numbers.

    Raises
    ------
    ValueError
        If k is negative or above n.

    Examples
    --------
    >>> Q = haar(5, 3, np.random.default_rng(0))
    >>> bool(abs(Q.T @ Q - np.eye(3)).max() < 1e-14)
    True
    """
    if not 0 <= k <= n:
        raise ValueError(f"haar: n = {n} and k = {k} given, needed 0 <= k <= n")
    Q, R = np.linalg.qr(generator.standard_normal((n, k)))
    return Q * np.where(np.diagonal(R) < 0, -1.0, 1.0)


def planted(s: Float[np.ndarray, " r"], m: int, n: int, generator: np.random.Generator) -> Planted:
    """Build an m × n matrix with the given singular values and Haar distributed singular vectors.

    Parameters
    ----------
    s : array of shape (min(m, n),)
        Finite, descending, not negative.
    m, n : int
        The shape.
    generator : numpy.random.Generator
        Draws U first, then V.

    Raises
    ------
    ValueError
        If s has another length, or is not finite, descending and non-negative.

    Examples
    --------
    >>> problem = planted(np.array([2.0, 0.0]), 2, 3, np.random.default_rng(0))
    >>> round(float(np.linalg.norm(problem.G)), 12), round(float(np.linalg.norm(problem.polar)), 12)
    (2.0, 1.0)
    """
    values = np.asarray(s, dtype=np.float64)
    r = min(m, n)
    if values.shape != (r,):
        raise ValueError(f"planted: s has shape {values.shape}, needed ({r},) for a matrix of shape ({m}, {n})")
    if not (np.isfinite(values).all() and (values >= 0).all() and (np.diff(values) <= 0).all()):
        raise ValueError(
            "planted: s has values that are negative, not finite or out of order, needed s1 >= ... >= sr >= 0"
        )
    U, V = haar(m, r, generator), haar(n, r, generator)
    return Planted((U * values) @ V.T, U, values, V)


def draw(spectrum: Spectrum | str, m: int, n: int, generator: np.random.Generator) -> Planted:
    """Build a matrix from a named spectrum: `planted` with ``spectrum.values``, drawn first.

    Raises
    ------
    ValueError
        As for `muon_lab.problems.spectra.parse` and `planted`.

    Examples
    --------
    >>> draw("geometric(100)", 3, 5, np.random.default_rng(0)).s
    array([1.  , 0.1 , 0.01])
    """
    profile = parse(spectrum) if isinstance(spectrum, str) else spectrum
    return planted(profile.values(m, n, generator), m, n, generator)
