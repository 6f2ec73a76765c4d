"""Counting what really runs: an arithmetic that passes every product on and keeps a record of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic.policy import Arithmetic, Exact
from muon_lab.arithmetic.symmetric import Symmetric


class Product(NamedTuple):
    """One product of an m×k and a k×n matrix: which method asked for it, and how much of it was multiplied."""

    kind: str
    batch: int
    m: int
    k: int
    n: int
    share: float

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.k * self.n * self.share


@dataclass(frozen=True)
class Counted:
    """An arithmetic whose products are recorded, in order.

    Examples
    --------
    >>> import torch
    >>> from muon_lab import polar
    >>> arithmetic = Counted()
    >>> X = polar.newton_schulz(polar.schedules.get("quintic", 1), arithmetic)(torch.ones(2, 3))
    >>> [product.kind for product in arithmetic.products], arithmetic.flops
    (['gram', 'square', 'matmul'], 64.0)
    """

    inner: Arithmetic = field(default_factory=Exact)
    products: list[Product] = field(default_factory=list, repr=False, compare=False)

    @property
    def flops(self) -> float:
        """Multiplications and additions of all products."""
        return sum((product.flops for product in self.products), 0.0)

    @property
    def norm(self) -> Callable[[Tensor], Tensor]:
        """The norm of the inner arithmetic: no product."""
        return self.inner.norm

    @property
    def roundoff(self) -> Callable[[torch.dtype], float]:
        """The roundoff of the inner arithmetic."""
        return self.inner.roundoff

    @property
    def store(self) -> Callable[[Tensor, torch.dtype], Tensor]:
        """The store of the inner arithmetic: no product."""
        return self.inner.store

    def gram(self, X: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m m"]:
        """Return X Xᵀ."""
        self._record("gram", X, X.mT, symmetric=True)
        return self.inner.gram(X)

    def square(
        self, A: Float[Tensor, "*batch m m"], *, alpha: float = 1.0, beta: float = 0.0
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A² + beta·A for a symmetric A."""
        self._record("square", A, A, symmetric=True)
        return self.inner.square(A, alpha=alpha, beta=beta)

    def commuting(
        self,
        A: Float[Tensor, "*batch m m"],
        B: Float[Tensor, "*batch m m"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m m"] | None = None,
    ) -> Float[Tensor, "*batch m m"]:
        """Return alpha·A B + beta·C for symmetric A, B, C where A B = B A."""
        self._record("commuting", A, B, symmetric=True)
        return self.inner.commuting(A, B, alpha=alpha, beta=beta, C=C)

    def matmul(
        self,
        A: Float[Tensor, "*batch m k"],
        B: Float[Tensor, "*batch k n"],
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        C: Float[Tensor, "*batch m n"] | None = None,
    ) -> Float[Tensor, "*batch m n"]:
        """Return alpha·A B + beta·C."""
        self._record("matmul", A, B, symmetric=False)
        return self.inner.matmul(A, B, alpha=alpha, beta=beta, C=C)

    def _record(self, kind: str, A: Tensor, B: Tensor, *, symmetric: bool) -> None:
        m, k = A.shape[-2:]
        halved = symmetric and isinstance(self.inner, Symmetric)
        share = self.inner.share(m) if halved else 1.0  # type: ignore[attr-defined]
        self.products.append(Product(kind, A.shape[:-2].numel(), m, k, B.shape[-1], share))
