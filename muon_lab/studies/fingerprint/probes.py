r"""Gradients made to be told apart: rank one, planted singular values, and plain random ones.

Planted gradients are :math:`\operatorname{diag}(s)\, Q` with Q the first rows of a Hadamard matrix over
:math:`\sqrt n`, or the transpose. Their rows are orthogonal and each has entries of one magnitude. So a Newton-Schulz
iteration works on every singular value by itself, whatever the number format: products of different rows cancel
exactly, and a small row is rounded to its own size. And all columns have the same norm: an optimizer that divides
columns by their norms gives itself away elsewhere, but not here.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.linalg import hadamard
from torch import Tensor

#: The Frobenius norm of a probing gradient: far above the eps of any division, far below the overflow of float16.
NORM = 64.0

#: The shape of planted gradients.
SHORT, LONG = 16, 32

#: How often a matrix of rank one is repeated along the diagonal.
BLOCKS = 4

#: Exponents of two in the factors of rank-one gradients, and the signs of the factors.
_EXPONENTS = (0, 2, -1, 1, 0, -2, 1, 2, -1, 0, 3, 1, -2, 0, 2, -1)
_SIGNS = (1, 1, -1, 1, -1, -1, 1, -1, 1, 1, -1, -1, 1, -1, 1, 1)


def gaussian(m: int, n: int, seed: int) -> Float[Tensor, "{m} {n}"]:
    """Return a Gaussian matrix of expected norm `NORM`, the same for the same arguments.

    Examples
    --------
    >>> bool((gaussian(8, 12, 0).norm() / NORM - 1).abs() < 0.3)
    True
    """
    drawn = np.random.default_rng([seed, m, n]).standard_normal((m, n))
    return torch.tensor(drawn * (NORM / np.sqrt(m * n)), dtype=torch.float32)


def factor(count: int, shift: int = 0) -> Float[Tensor, " {count}"]:
    """Return powers of two with signs: what is made of rank one with them stays so exactly.

    Examples
    --------
    >>> factor(4)
    tensor([ 1.0000,  4.0000, -0.5000,  2.0000])
    """
    places = [(i + shift) % len(_EXPONENTS) for i in range(count)]
    return torch.tensor([_SIGNS[i] * 2.0 ** _EXPONENTS[i] for i in places])


def blocks(x: Float[Tensor, " m"], y: Float[Tensor, " n"]) -> Float[Tensor, "mm nn"]:
    """Return `BLOCKS` copies of a matrix of rank one along the diagonal, of a norm near `NORM`.

    Its singular values are equal, far enough below 1 after normalisation that no schedule blows up on rounding.

    Examples
    --------
    >>> blocks(torch.ones(2), torch.ones(3)).shape
    torch.Size([8, 12])
    """
    G = torch.kron(torch.eye(BLOCKS), torch.outer(x, y))
    return G * 2.0 ** round(float((NORM / G.norm()).log2()))


def planted(s: Sequence[float] | NDArray[np.float64], m: int, n: int) -> Float[Tensor, "{m} {n}"]:
    """Return a matrix with singular values s and flat singular vectors on its long side; see `read`.

    Parameters
    ----------
    s : sequence of float
        At most min(m, n) values; the others are zero.
    m, n : int
        The shape; its long side is a power of two.

    Examples
    --------
    >>> planted([2.0, 1.0], 2, 2)
    tensor([[ 1.4142,  1.4142],
            [ 0.7071, -0.7071]])
    """
    short, long = sorted((m, n))
    values = np.zeros(short)
    values[: len(s)] = s
    wide = torch.tensor(values[:, None] * hadamard(long)[:short] / np.sqrt(long), dtype=torch.float64)
    return (wide if m <= n else wide.T.contiguous()).to(torch.float32)


def read(U: Float[Tensor, "m n"], count: int) -> NDArray[np.float64]:
    """Return the first singular values of an update, in the basis of `planted`; signs included.

    Examples
    --------
    >>> read(planted([3.0, -1.0], 4, 2), 2).round(6).tolist()
    [3.0, -1.0]
    """
    wide = U if U.shape[0] <= U.shape[1] else U.T
    basis = torch.tensor(hadamard(wide.shape[1])[: wide.shape[0]] / np.sqrt(wide.shape[1]), dtype=torch.float64)
    return (wide.double() * basis).sum(dim=1).numpy()[:count]


def spectra() -> list[NDArray[np.float64]]:
    """Return the singular values of the planted probes, each of norm 1: steep and flat, one large and many.

    Examples
    --------
    >>> len(spectra()), float(min(map(min, spectra()))) < 1e-4
    (8, True)
    """
    u = (np.arange(SHORT) + 0.5) / SHORT
    steep = [10.0 ** (-low * (u + shift / SHORT)) for low, shift in ((4.5, 0.1), (3.5, 0.3), (2.5, 0.2), (1.5, 0.4))]
    flat = [0.2 + u**power for power in (1.0, 2.0)]
    led = [np.append(1.0, ratio * 10.0 ** (-3 * u[1:])) for ratio in (0.6, 0.4)]
    return [s / np.linalg.norm(s) for s in (*steep, *flat, *led)]
