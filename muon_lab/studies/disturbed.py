r"""Directions with a planted error, of a kind and a size: what an optimizer loses by it is loss alone.

The exact direction U (m, n) of a candidate C is multiplied on its short side k by a matrix A of known distance to 1,

.. math:: X = A U \;(m \le n), \qquad X = U A \;(m > n), \qquad \|X - U\|_F = \delta \|U\|_F

where U has rank k. What A does to the three numbers that can be told apart:

======== ============================================= ============== ================== =========================
kind     A                                             polar error    orthogonality      share of U, <X, U>/<U, U>
======== ============================================= ============== ================== =========================
radial   :math:`1 + \delta P \mathrm{diag}(e) P^T`     δ              2 δ to first order 1
turn     a rotation by one angle in k/2 planes         δ              0                  :math:`1 - \delta^2 / 2`
scale    :math:`1 + \delta`                            absolute δ     2 δ to first order 1 + δ
======== ============================================= ============== ================== =========================

P has the singular vectors of C, so that a radial error moves singular values alone: half of them, drawn at random, up
by δ and half down (signs e; for odd k one stays, and the others move by :math:`\delta \sqrt{k / (k - 1)}`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.polar import Orthogonalizer

#: From a candidate, a size and a generator to the matrices A, in float64.
Multiplier: TypeAlias = Callable[[Float[Tensor, "count m n"], float, torch.Generator], Float[Tensor, "count k k"]]


@dataclass(frozen=True)
class Disturbed:
    """An orthogonalizer with a planted error.

    Parameters
    ----------
    direction : Orthogonalizer
        What is disturbed.
    kind : str
        One of `MULTIPLIERS`.
    size : float
        The relative size of the error.
    seed : int
        Seeds the errors of a run.
    fixed : bool
        True if every step has the same error, relative to its singular vectors where it is radial; False if every step
        draws its own, so that errors of different steps cancel in part.

    Raises
    ------
    ValueError
        For an unknown kind.

    Examples
    --------
    >>> from muon_lab import polar
    >>> direction = Disturbed(polar.svd(), "turn", 0.5, seed=0)
    >>> X = direction(torch.diag(torch.tensor([3.0, 2.0]))[None])
    >>> (X - torch.eye(2)).norm() / 2**0.5, (X @ X.mT).round(decimals=5)
    (tensor(0.5000), tensor([[[1., 0.],
             [0., 1.]]]))
    """

    direction: Orthogonalizer
    kind: str
    size: float
    seed: int
    fixed: bool = False
    generator: torch.Generator = field(default_factory=torch.Generator, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in MULTIPLIERS:
            raise ValueError(f"Disturbed: kind is {self.kind!r}, needed one of {', '.join(MULTIPLIERS)}")
        self.generator.manual_seed(self.seed)

    def __call__(self, C: Float[Tensor, "count m n"]) -> Float[Tensor, "count m n"]:
        """Return the disturbed direction of each candidate."""
        if self.fixed:
            self.generator.manual_seed(self.seed)
        U = self.direction(C)
        A = MULTIPLIERS[self.kind](C, self.size, self.generator)
        X = A @ U.double() if _wide(C) else U.double() @ A
        return X.to(U.dtype)


def radial(C: Float[Tensor, "count m n"], size: float, generator: torch.Generator) -> Float[Tensor, "count k k"]:
    """Return matrices that move the singular values of a direction up or down by a share, and nothing else.

    Examples
    --------
    >>> radial(torch.eye(2)[None], 0.25, torch.Generator().manual_seed(0)).diagonal(dim1=1, dim2=2).sort().values
    tensor([[0.7500, 1.2500]], dtype=torch.float64)
    """
    left, _, right = torch.linalg.svd(C.double(), full_matrices=False)
    P = left if _wide(C) else right.mT
    count, k = C.shape[0], _short(C)
    half = k // 2
    moves = torch.zeros(k, dtype=torch.float64)
    moves[:half], moves[half : 2 * half] = 1.0, -1.0
    drawn = torch.rand(count, k, generator=generator).argsort(dim=-1)
    e = moves[drawn] * math.sqrt(k / max(1, 2 * half))
    return _identity(C) + size * (P * e.unsqueeze(-2)) @ P.mT


def turn(C: Float[Tensor, "count m n"], size: float, generator: torch.Generator) -> Float[Tensor, "count k k"]:
    r"""Return rotations R with :math:`\|R - 1\|_F = \delta \sqrt k`: one angle in as many random planes as fit.

    Raises
    ------
    ValueError
        If no rotation is so far from the identity: above 2, and a little below it for odd k.

    Examples
    --------
    >>> R = turn(torch.eye(4)[None], 1.0, torch.Generator().manual_seed(0))
    >>> (R - torch.eye(4)).norm(), (R @ R.mT - torch.eye(4)).norm() < 1e-14
    (tensor(2.0000, dtype=torch.float64), tensor(True))
    """
    count, k = C.shape[0], _short(C)
    half = k // 2
    cosine = 1 - size**2 * k / (4 * half) if half else math.nan
    if not -1 <= cosine <= 1:
        raise ValueError(f"turn: size is {size} for a short side of {k}, needed a distance that a rotation can have")
    drawn = torch.randn(count, k, k, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(drawn).Q
    left, right = Q[..., :half], Q[..., half : 2 * half]
    planes, swaps = left @ left.mT + right @ right.mT, right @ left.mT - left @ right.mT
    return _identity(C) + (cosine - 1) * planes + math.sqrt(1 - cosine**2) * swaps


def scale(C: Float[Tensor, "count m n"], size: float, generator: torch.Generator) -> Float[Tensor, "count k k"]:
    """Return multiples of the identity: a direction that is a share too long, or too short if the size is negative.

    Examples
    --------
    >>> scale(torch.eye(2)[None], 0.5, torch.Generator()).tolist()
    [[[1.5, 0.0], [0.0, 1.5]]]
    """
    return (1 + size) * _identity(C)


#: The kinds of error.
MULTIPLIERS: Mapping[str, Multiplier] = {"radial": radial, "turn": turn, "scale": scale}


def _wide(C: Float[Tensor, "count m n"]) -> bool:
    return C.shape[-2] <= C.shape[-1]


def _short(C: Float[Tensor, "count m n"]) -> int:
    return min(C.shape[-2:])


def _identity(C: Float[Tensor, "count m n"]) -> Float[Tensor, "count k k"]:
    return torch.eye(_short(C), dtype=torch.float64).repeat(C.shape[0], 1, 1)
