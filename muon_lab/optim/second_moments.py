r"""Second moments of Muon: what divides the direction, as values that `Muon` takes as ``adapt``.

=========== ==================================================================================================
`AdaMuon`   :math:`V \leftarrow \beta_2 V + (1 - \beta_2)\, D \circ D`, :math:`\; U = D / (\sqrt V + \epsilon)`
`NorMuon`   V averages the means of :math:`D \circ D` over the columns if m >= n, else over the rows;
            :math:`U' = D / \sqrt{\max(V, \epsilon)}`, :math:`\; U = U' \|D\|_F / \max(\|U'\|_F, \epsilon)`
`NAMO`      V averages :math:`\|G\|_F^2`, :math:`\; U = D\, \|C\|_F / (\sqrt V + \epsilon)`
=========== ==================================================================================================

for the direction D of the candidate C and the gradient G, before the factor for the shape. V starts at zero and has no
bias correction. Where a layout sees a shard of a matrix, axes, lengths, means and norms are those of the whole: a norm,
and a mean over the cut axis, is a sum over ranks. V of `NorMuon` is then the same on every rank if it averages over the
cut axis, and a shard if not.

Sources: Si et al. (2025), *AdaMuon* (arXiv 2507.11005); Li et al. (2025), *NorMuon* (arXiv 2510.05491); *NAMO* (arXiv
2602.17080); NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), whose `NorMuon` keeps V itself at least at
:math:`\epsilon`, which shows only where a row or column of D all but vanishes.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.optim.step import check_fraction, check_name, check_positive
from muon_lab.parallel.layouts import ALONE, Whole


@runtime_checkable
class SecondMoment(Protocol):
    """What Muon asks of a second moment; pure."""

    @property
    def like_weight(self) -> bool:
        """Whether V has the shape of the weight."""
        ...

    @property
    def raw_gradient(self) -> bool:
        """Whether V is made from the gradient, so that a decay added to it would be counted."""
        ...

    def begin(self, W: Float[Tensor, "count m n"]) -> Float[Tensor, "count p q"]:
        """Return the first V."""
        ...

    def advance(
        self,
        V: Float[Tensor, "count p q"],
        D: Float[Tensor, "count m n"],
        G: Float[Tensor, "count m n"],
        C: Float[Tensor, "count m n"],
    ) -> tuple[Float[Tensor, "count p q"], Float[Tensor, "count m n"]]:
        """Return the new V and the update U."""
        ...


@dataclass(frozen=True)
class _Average:
    """The coefficient of the average, what keeps the quotient finite, and what matrices are shards of."""

    beta2: float = 0.95
    eps: float = 1e-8
    shards: Whole = field(default=ALONE, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fraction(f"{type(self).__name__}: beta2", self.beta2)
        check_positive(f"{type(self).__name__}: eps", self.eps)

    def averaged(self, V: Tensor, now: Tensor) -> Tensor:
        """Return the average with one more value in it."""
        return torch.add(self.beta2 * V, now, alpha=1 - self.beta2)

    def norm(self, X: Float[Tensor, "count m n"]) -> Float[Tensor, "count 1 1"]:
        """Return the Frobenius norm of each whole matrix."""
        own = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
        if self.shards.ranks is None:
            return own
        return self.shards.summed(own.to(torch.float64).square()).sqrt().to(X.dtype)


@dataclass(frozen=True)
class AdaMuon(_Average):
    """An entry of the direction is divided by the root mean square of its past.

    Attributes
    ----------
    beta2 : float
        Of the average, in [0, 1).
    eps : float
        Above 0, without unit.

    Raises
    ------
    ValueError
        If a value is out of its range.

    Examples
    --------
    >>> rule, D = AdaMuon(beta2=0.0), torch.tensor([[[0.5, -0.25]]])
    >>> rule.advance(rule.begin(D), D, D, D)[1]
    tensor([[[ 1., -1.]]])
    """

    @property
    def like_weight(self) -> bool:
        """V has the shape of the weight."""
        return True

    @property
    def raw_gradient(self) -> bool:
        """V is made from directions."""
        return False

    def begin(self, W: Float[Tensor, "count m n"]) -> Float[Tensor, "count m n"]:
        """Return zeros."""
        return torch.zeros_like(W)

    def advance(
        self,
        V: Float[Tensor, "count m n"],
        D: Float[Tensor, "count m n"],
        G: Float[Tensor, "count m n"],
        C: Float[Tensor, "count m n"],
    ) -> tuple[Float[Tensor, "count m n"], Float[Tensor, "count m n"]]:
        """Return the new V and the update U."""
        V = self.averaged(V, D * D)
        return V, D / (V.sqrt() + self.eps)


@dataclass(frozen=True)
class NorMuon(_Average):
    """A row (of a wide matrix: a column) of the direction is divided by its root mean square; the norm is kept.

    Attributes
    ----------
    beta2 : float
        Of the average, in [0, 1).
    eps : float
        Above 0, without unit.

    Raises
    ------
    ValueError
        If a value is out of its range.

    Examples
    --------
    >>> rule, D = NorMuon(beta2=0.0), torch.tensor([[[0.6], [0.8]]])
    >>> rule.advance(rule.begin(D), D, D, D)[1].flatten()
    tensor([0.7071, 0.7071])
    """

    @property
    def like_weight(self) -> bool:
        """V has one entry a row or column."""
        return False

    @property
    def raw_gradient(self) -> bool:
        """V is made from directions."""
        return False

    def begin(self, W: Float[Tensor, "count m n"]) -> Float[Tensor, "count p q"]:
        """Return zeros, a row or a column of them."""
        count, m, n = W.shape
        return W.new_zeros(count, m, 1) if self._axis(W) == -1 else W.new_zeros(count, 1, n)

    def _axis(self, W: Float[Tensor, "count m n"]) -> int:
        """Return the axis over which V averages."""
        m, n = self.shards.whole_shape(W.shape)[-2:]
        return -1 if m >= n else -2

    def advance(
        self,
        V: Float[Tensor, "count p q"],
        D: Float[Tensor, "count m n"],
        G: Float[Tensor, "count m n"],
        C: Float[Tensor, "count m n"],
    ) -> tuple[Float[Tensor, "count p q"], Float[Tensor, "count m n"]]:
        """Return the new V and the update U."""
        axis = self._axis(D)
        squares = self.shards.summed((D * D).sum(dim=axis, keepdim=True), axis)
        V = self.averaged(V, squares / max(self.shards.whole_shape(D.shape)[axis], 1))
        rows = D / V.clamp(min=self.eps).sqrt()
        return V, rows * (self.norm(D) / self.norm(rows).clamp(min=self.eps))


@dataclass(frozen=True)
class NAMO(_Average):
    """The direction is multiplied by the norm of the candidate over the root mean square norm of the gradients.

    Attributes
    ----------
    beta2 : float
        Of the average, in [0, 1).
    eps : float
        Above 0, in the unit of the gradient.

    Raises
    ------
    ValueError
        If a value is out of its range.

    Examples
    --------
    >>> rule, G = NAMO(beta2=0.0), torch.tensor([[[3.0, 4.0]]])
    >>> rule.advance(rule.begin(G), G / 5, G, G / 2)[1]
    tensor([[[0.3000, 0.4000]]])
    """

    @property
    def like_weight(self) -> bool:
        """V is one number a matrix."""
        return False

    @property
    def raw_gradient(self) -> bool:
        """V is made from gradients."""
        return True

    def begin(self, W: Float[Tensor, "count m n"]) -> Float[Tensor, "count 1 1"]:
        """Return zeros."""
        return W.new_zeros(len(W), 1, 1)

    def advance(
        self,
        V: Float[Tensor, "count 1 1"],
        D: Float[Tensor, "count m n"],
        G: Float[Tensor, "count m n"],
        C: Float[Tensor, "count m n"],
    ) -> tuple[Float[Tensor, "count 1 1"], Float[Tensor, "count m n"]]:
        """Return the new V and the update U."""
        V = self.averaged(V, self.norm(G).square())
        return V, D * (self.norm(C) / (V.sqrt() + self.eps))


BY_NAME: Final[dict[str, SecondMoment]] = {"adamuon": AdaMuon(), "normuon": NorMuon(), "namo": NAMO()}


def get(name: str) -> SecondMoment:
    """Return a second moment with its defaults by name.

    Raises
    ------
    ValueError
        For an unknown name.

    Examples
    --------
    >>> get("normuon")
    NorMuon(beta2=0.95, eps=1e-08)
    """
    check_name("second moment", name, tuple(BY_NAME))
    return BY_NAME[name]


def on_shards(adapt: SecondMoment, shards: Whole) -> SecondMoment:
    """Return a second moment that knows what matrices are shards of.

    Raises
    ------
    ValueError
        For one that has no place for it.

    Examples
    --------
    >>> on_shards(NorMuon(beta2=0.9), ALONE)
    NorMuon(beta2=0.9, eps=1e-08)
    """
    if not isinstance(adapt, _Average):
        raise ValueError(f"adapt is {adapt!r} for shards, needed AdaMuon, NorMuon or NAMO, which sum over ranks")
    return replace(adapt, shards=shards)
