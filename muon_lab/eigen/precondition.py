r"""Moments that live in a pair of eigenbases, and what becomes of them when the bases change.

.. math:: G' = Q_L^T G\, Q_R, \qquad U = Q_L U' Q_R^T

In the bases the step is that of Adam: with t = 1 at the first,

.. math::

    M \leftarrow \beta_1 M + (1 - \beta_1) G', \qquad V \leftarrow \beta_2 V + (1 - \beta_2) G' \circ G', \qquad
    U' = \frac{M / (1 - \beta_1^t)}{\sqrt{V / (1 - \beta_2^t)} + \epsilon}.

New bases :math:`Q_L', Q_R'`. The first moment is a matrix and goes along, :math:`M \leftarrow S^T M\, T` with
:math:`S = Q_L^T Q_L'` and :math:`T = Q_R^T Q_R'`. The second is no matrix of any basis, and its fate is a choice:

=========== ==========================================================================================================
`unchanged` V keeps its entries, whatever directions they now stand for
`permuted`  before the refresh the old columns, and V with them, are sorted by :math:`\mathrm{diag}(Q^T K Q)`, K the new
            factor; V is right as far as directions only changed places
`rotated`   :math:`V \leftarrow (S \circ S)^T V (T \circ T)`: right if the entries of G' are uncorrelated, for then
            those of :math:`S^T G' T` have these variances
=========== ==========================================================================================================

References
----------
Vyas et al. (2025), *SOAP* (arXiv 2409.11321); Kingma and Ba (2015); Dozat (2016) for the look-ahead of Nesterov;
NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026) for `unchanged`, release 0.3.0 for `permuted`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from muon_lab.arithmetic.policy import Arithmetic, Exact

SECOND_MOMENTS = ("unchanged", "permuted", "rotated")

#: Added to the RMS of an update before the limit is divided by it (Emerging-Optimizers).
RMS_EPS = 1e-7

#: Products in the dtype of the data.
EXACT = Exact()


class Bases(NamedTuple):
    """The eigenbases of the two factors."""

    Q_L: Float[Tensor, "*batch m m"]
    Q_R: Float[Tensor, "*batch n n"]


class Moments(NamedTuple):
    """The averages of the gradient and of its square, in the bases."""

    M: Float[Tensor, "*batch m n"]
    V: Float[Tensor, "*batch m n"]


@dataclass(frozen=True)
class Adam:
    r"""The step in the bases.

    Attributes
    ----------
    betas : (float, float)
        In [0, 1).
    eps : float
        Above 0, in the unit of the gradient.
    nesterov : bool
        :math:`\beta_1 M / (1 - \beta_1^{t+1}) + (1 - \beta_1) G' / (1 - \beta_1^t)` for :math:`M / (1 - \beta_1^t)`.
    correct_bias : bool
        Without it, all the denominators :math:`1 - \beta^t` are 1.

    Examples
    --------
    >>> import torch
    >>> adam, zero = Adam((0.9, 0.95), eps=1e-12), torch.zeros(1, 2)
    >>> G = torch.tensor([[-3.0, 7.0]])
    >>> adam.quotient(adam.averaged(Moments(zero, zero), G), G, t=1).round(decimals=6)
    tensor([[-1.,  1.]])
    """

    betas: tuple[float, float]
    eps: float
    nesterov: bool = False
    correct_bias: bool = True

    def averaged(self, old: Moments, G: Float[Tensor, "*batch m n"]) -> Moments:
        """Return the averages with one more gradient in them."""
        first, second = self.betas
        return Moments(first * old.M + (1 - first) * G, second * old.V + (1 - second) * G * G)

    def quotient(self, moments: Moments, G: Float[Tensor, "*batch m n"], t: int) -> Float[Tensor, "*batch m n"]:
        """Return the update of step t from the averages that hold its gradient already."""
        beta = self.betas[0]
        M = moments.M / self._weight(beta, t)
        if self.nesterov:
            M = beta * moments.M / self._weight(beta, t + 1) + (1 - beta) * G / self._weight(beta, t)
        return M / ((moments.V / self._weight(self.betas[1], t)).sqrt() + self.eps)

    def _weight(self, beta: float, t: int) -> float:
        """Return the sum of the weights of t gradients in an average that began at zero."""
        return 1 - beta**t if self.correct_bias else 1.0


def project(
    G: Float[Tensor, "*batch m n"], bases: Bases, arithmetic: Arithmetic = EXACT
) -> Float[Tensor, "*batch m n"]:
    r"""Return :math:`Q_L^T G\, Q_R`.

    Examples
    --------
    >>> import torch
    >>> swap, one = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0]])
    >>> project(torch.tensor([[3.0], [4.0]]), Bases(swap, one))
    tensor([[4.],
            [3.]])
    """
    return arithmetic.matmul(arithmetic.matmul(bases.Q_L.mT, G), bases.Q_R)


def back(U: Float[Tensor, "*batch m n"], bases: Bases, arithmetic: Arithmetic = EXACT) -> Float[Tensor, "*batch m n"]:
    r"""Return :math:`Q_L U Q_R^T`.

    Examples
    --------
    >>> import torch
    >>> turn, one = torch.tensor([[0.0, -1.0], [1.0, 0.0]]), torch.tensor([[1.0]])
    >>> back(torch.tensor([[3.0], [4.0]]), Bases(turn, one))
    tensor([[-4.],
            [ 3.]])
    """
    return arithmetic.matmul(arithmetic.matmul(bases.Q_L, U), bases.Q_R.mT)


def turned(
    M: Float[Tensor, "*batch m n"], old: Bases, new: Bases, arithmetic: Arithmetic = EXACT
) -> Float[Tensor, "*batch m n"]:
    """Return the first moment in the new bases: what it is as a matrix stays.

    Examples
    --------
    >>> import torch
    >>> one, swap = torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> turned(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), Bases(one, one), Bases(swap, one))
    tensor([[3., 4.],
            [1., 2.]])
    """
    return project(back(M, old, arithmetic), new, arithmetic)


def permuted(
    X: Float[Tensor, "*batch m n"], rows: Int[Tensor, "*batch m"], columns: Int[Tensor, "*batch n"]
) -> Float[Tensor, "*batch m n"]:
    """Return a moment with its rows and columns in the order in which the columns of the bases were put.

    Examples
    --------
    >>> import torch
    >>> permuted(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]), torch.tensor([0, 1]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    across = X.gather(-2, rows.unsqueeze(-1).expand(X.shape))
    return across.gather(-1, columns.unsqueeze(-2).expand(X.shape))


def rotated(V: Float[Tensor, "*batch m n"], old: Bases, new: Bases) -> Float[Tensor, "*batch m n"]:
    r"""Return :math:`(S \circ S)^T V (T \circ T)`, never negative and with the sum of V.

    A permutation and changes of sign are followed exactly.

    Examples
    --------
    >>> import torch
    >>> one, turn = torch.eye(2), torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    >>> rotated(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), Bases(one, one), Bases(turn, one))
    tensor([[0.3600, 0.0000],
            [0.6400, 0.0000]])
    """
    S, T = (before.mT @ after for before, after in zip(old, new, strict=True))
    return S.square().mT @ V @ T.square()


def limited(U: Float[Tensor, "*batch m n"], max_rms: float) -> Float[Tensor, "*batch m n"]:
    r"""Return :math:`U \min(1, r / (\mathrm{rms}(U) + 10^{-7}))`, r the limit.

    Examples
    --------
    >>> import torch
    >>> limited(torch.tensor([[3.0, -3.0]]), max_rms=1.5)
    tensor([[ 1.5000, -1.5000]])
    """
    if U.numel() == 0:
        return U
    rms = U.square().mean(dim=(-2, -1), keepdim=True).sqrt()
    return U * (max_rms / (rms + RMS_EPS)).clamp_max(1.0)
