r"""Kronecker factors of the second moment of a gradient: two small matrices in place of one of mn by mn.

.. math::

    L \leftarrow \beta_t L + (1 - \beta_t)\, G G^T, \qquad R \leftarrow \beta_t R + (1 - \beta_t)\, G^T G

or, with the Kullback-Leibler correction, each seen through the other's basis and values as they were at the last
refresh (Jacobi's order),

.. math::

    L \leftarrow \beta_t L + \tfrac{1 - \beta_t}{n}\, B B^T, \quad B = G\, Q_R \max(\Lambda_R, \epsilon)^{-1/2}, \qquad
    R \leftarrow \beta_t R + \tfrac{1 - \beta_t}{m}\, C^T C, \quad C = \max(\Lambda_L, \epsilon)^{-1/2} Q_L^T G.

With :math:`\beta_t = 1 - (1 - \beta) / (1 - \beta^t)` the first gradient has all the weight, and every later average is
that of the gradients so far. Uncorrected, :math:`\beta_t = \beta`.

The correction divides by values before there are any: by :math:`\max(0, \epsilon)` if they start at zero, so that the
first factors are :math:`1 / \epsilon` too large, and stay too large for tens of steps. Where a value is known to start
with, give it.

References
----------
Gupta, Koren and Singer (2018), *Shampoo*; Lin et al. (2025), *KL-Shampoo* (arXiv 2509.03378), for the correction;
NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), for the form of :math:`\beta_t` and the floor.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic.policy import Arithmetic, Exact
from muon_lab.eigen.track import Eigenbasis

#: Products in the dtype of the data.
EXACT = Exact()


class Factors(NamedTuple):
    """The factors of a gradient (*batch, m, n), in its unit squared, or without a unit under the correction."""

    L: Float[Tensor, "*batch m m"]
    R: Float[Tensor, "*batch n n"]


def dtype_of_state(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which factors, bases and moments of a parameter are kept: its own, but at least float32.

    Examples
    --------
    >>> import torch
    >>> dtype_of_state(torch.bfloat16), dtype_of_state(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def coefficient(beta: float, t: int) -> float:
    r"""Return :math:`\beta_t`, the weight of the past in an average of t gradients, the new one included.

    Parameters
    ----------
    beta : float
        In [0, 1).
    t : int
        At least 1.

    Examples
    --------
    >>> import torch
    >>> coefficient(0.9, 1), round(coefficient(0.9, 2), 6), round(coefficient(0.9, 200), 6)
    (0.0, 0.473684, 0.9)
    """
    return 1 - (1 - beta) / (1 - beta**t)


def squares(G: Float[Tensor, "*batch m n"], arithmetic: Arithmetic = EXACT) -> Factors:
    r"""Return :math:`G G^T` and :math:`G^T G`.

    Parameters
    ----------
    G : tensor of shape (*batch, m, n)
        The gradients, in the dtype of the factors.
    arithmetic : Arithmetic
        Of the two products.

    Examples
    --------
    >>> import torch
    >>> squares(torch.tensor([[3.0, 4.0]]))
    Factors(L=tensor([[25.]]), R=tensor([[ 9., 12.],
            [12., 16.]]))
    """
    return Factors(arithmetic.gram(G), arithmetic.gram(G.mT))


def corrected(
    G: Float[Tensor, "*batch m n"],
    left: Eigenbasis,
    right: Eigenbasis,
    floor: float,
    arithmetic: Arithmetic = EXACT,
) -> Factors:
    r"""Return :math:`G R^{-1} G^T / n` and :math:`G^T L^{-1} G / m`, the inverses in the bases given.

    Both are symmetric and positive semidefinite but for the rounding of one product.

    Parameters
    ----------
    G : tensor of shape (*batch, m, n)
        The gradients, in the dtype of the bases.
    left, right : Eigenbasis
        Of L and R, from the last refresh.
    floor : float
        :math:`\epsilon > 0`; smaller values, negative ones too, count as this.
    arithmetic : Arithmetic
        Of the four products.

    Examples
    --------
    >>> import torch
    >>> unit = Eigenbasis(torch.tensor([0.0]), torch.tensor([[1.0]]))
    >>> corrected(torch.tensor([[3.0]]), unit, unit, floor=0.25).L
    tensor([[36.]])
    """
    m, n = G.shape[-2:]
    B = arithmetic.matmul(G, right.Q) / right.values.clamp_min(floor).sqrt().unsqueeze(-2)
    C = arithmetic.matmul(G.mT, left.Q) / left.values.clamp_min(floor).sqrt().unsqueeze(-2)
    return Factors(arithmetic.gram(B) / max(n, 1), arithmetic.gram(C) / max(m, 1))


def averaged(old: Factors, new: Factors, beta: float) -> Factors:
    r"""Return :math:`\beta\, old + (1 - \beta)\, new`.

    Examples
    --------
    >>> import torch
    >>> one, two = torch.tensor([[1.0]]), torch.tensor([[2.0]])
    >>> averaged(Factors(one, one), Factors(two, two), 0.75).L
    tensor([[1.2500]])
    """
    return Factors(*(beta * past + (1 - beta) * fresh for past, fresh in zip(old, new, strict=True)))
