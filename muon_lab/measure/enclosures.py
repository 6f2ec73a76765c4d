r"""Symmetric m × m matrices in float64: what is certain of them, and solutions whose residual says how good they are.

A factorization is not believed, its result is multiplied back. Every function takes a batch; rounding is covered by
:math:`\gamma_k` (`bounds.gemm`) times norms of what was multiplied.

References
----------
Rump, *Verification of positive definiteness*, BIT 46 (2006); Higham, *Functions of Matrices* (2008), section 6.7 and
theorem 6.12 for the coupled form; Hestenes & Stiefel, *Methods of conjugate gradients*, J. Res. NBS 49 (1952).
"""

import math
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from muon_lab.measure.bounds import UNCOUNTED, gemm, unit_roundoff

#: Unit roundoff of everything here.
U64: Final = unit_roundoff("fp64")

#: The spectral norm of a symmetric S is bounded by ‖S^8‖_F^(1/8), too large by the 16th root of m at most.
SQUARINGS: Final = 3

#: A lower and an upper bound.
Interval = tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]


class Inverse(NamedTuple):
    """About the inverse of a symmetric matrix A, and what is certain.

    Attributes
    ----------
    matrix : tensor of shape (*batch, m, m)
        The approximate inverse V, symmetric; 0 where A is not certain to be positive definite.
    residual : tensor
        At least ‖I - A V‖_F.
    least : tensor
        At most the smallest eigenvalue of A, and 0 where A is not certain to be positive definite.
    """

    matrix: Float[Tensor, "*batch m m"]
    residual: Float[Tensor, "*batch"]
    least: Float[Tensor, "*batch"]


def positive(A: Float[Tensor, "*batch m m"]) -> Bool[Tensor, "*batch"]:
    r"""Say whether symmetric matrices are certain to be positive definite.

    A Cholesky factorization that runs through says so up to :math:`\gamma_{m+1} \operatorname{tr}(A)` (Rump), which is
    subtracted before.

    Examples
    --------
    >>> A = torch.diag_embed(torch.tensor([[1.0, 1e-12], [1.0, 1e-17], [1.0, -1e-12]], dtype=torch.float64))
    >>> positive(A).tolist()
    [True, False, False]
    """
    _, failed = torch.linalg.cholesky_ex(A - of(_blur(A)) * eye(A))
    return failed == 0


def inverse(A: Float[Tensor, "*batch m m"]) -> Inverse:
    r"""Invert symmetric matrices by Cholesky factors, and certify the smallest eigenvalue.

    If :math:`\|I - A V\|_F \le \rho < 1`, no eigenvalue is within :math:`(1 - \rho) / \|V\|_2` of zero; and a Cholesky
    factorization that runs through leaves none below zero by more than :math:`\gamma_{m+1} \operatorname{tr}(A)`.

    Examples
    --------
    >>> found = inverse(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))  # eigenvalues 1 and 3
    >>> bool(0.999 < found.least <= 1), bool(found.residual < 1e-14)
    (True, True)
    """
    m = A.shape[-1]
    factor, failed = torch.linalg.cholesky_ex(A)
    V = torch.cholesky_inverse(torch.where(of(failed == 0), factor, eye(A)))
    V = (V + V.mT) / 2
    residual = norm(eye(A) - A @ V) + gemm(m + 1, U64) * (norm(A) * norm(V) + math.sqrt(m))
    least = (1 - residual) / spectral(V)[1]
    certain = (failed == 0) & (residual < 1) & (least > _blur(A))
    return Inverse(torch.where(of(certain), V, 0.0), residual, torch.where(certain, least, 0.0))


def spectral(S: Float[Tensor, "*batch m m"]) -> Interval:
    r"""Return :math:`\|S\|_2` of symmetric matrices between bounds, above by :math:`\|S^8\|_F^{1/8}`.

    From below by :math:`\|S v\| / \|v\|`, v the longest column of that power.

    Examples
    --------
    >>> low, high = spectral(torch.diag(torch.tensor([-3.0, 2.0, 1.0], dtype=torch.float64)))
    >>> round(float(low), 4), round(float(high), 4)
    (3.0, 3.0003)
    """
    m, length = S.shape[-1], size(S)
    S = torch.where(of(length > 0), S / of(length), 0.0)
    power, above, below = S, length, length
    for squaring in range(1, SQUARINGS + 1):
        power = power @ power
        squared = norm(power)
        above = above * squared ** (0.5**squaring)
        power = torch.where(of(squared > 0), power / of(squared), 0.0)
    longest = torch.linalg.vector_norm(power, dim=-2).argmax(dim=-1)[..., None, None].expand(*power.shape[:-1], 1)
    v = power.take_along_dim(longest, dim=-1)
    below = below * torch.nan_to_num(norm(S @ v) / norm(v))
    slack = UNCOUNTED * m**1.5 * U64  # a square has norm 1 / sqrt(m) at least, and is rounded by m u
    return below * (1 - slack), above * (1 + slack)


def inverse_root(
    C: Float[Tensor, "*batch m m"], noise: Float[Tensor, "*batch"], steps: int | None = None
) -> Float[Tensor, "*batch m m"]:
    r"""Return about :math:`C^{-1/2}` for positive semidefinite C, symmetric.

    By eigenvectors (`steps` None; eigenvalues up to the noise are taken as 1), or by so many steps of Halley's
    iteration :math:`s \mapsto s (s^2 + 3) / (3 s^2 + 1)` in its coupled form, which is stable: with :math:`A = Z Y`
    near I, :math:`(A + 3 I) (3 A + I)^{-1} = (I + 8 (3 A + I)^{-1}) / 3`. A small root s grows threefold in a step.

    Examples
    --------
    >>> C = torch.diag(torch.tensor([4.0, 0.25], dtype=torch.float64))
    >>> bool((inverse_root(C, C.new_zeros(()), steps=5) - torch.diag(C.new_tensor([0.5, 2.0]))).abs().max() < 1e-14)
    True
    """
    if steps is None:
        values, Q = torch.linalg.eigh(C)
        roots = torch.where(values > noise[..., None], values, 1.0).rsqrt()
        root = (Q * roots[..., None, :]) @ Q.mT
        return (root + root.mT) / 2
    Y, Z = C, eye(C).expand_as(C)
    for _ in range(steps):
        A = Z @ Y
        factor, _ = torch.linalg.cholesky_ex(3 * (A + A.mT) / 2 + eye(C))
        R = (eye(C) + 8 * torch.cholesky_inverse(factor)) / 3
        Y, Z = Y @ R, R @ Z
    return (Z + Z.mT) / 2


def conjugate_gradients(
    M: Float[Tensor, "*batch m m"], N: Float[Tensor, "*batch m m"], steps: int
) -> Float[Tensor, "*batch m m"]:
    """Return a skew K with M K + K M near N, for positive definite M and skew N, after so many steps from zero.

    One m × m product a step; the error shrinks as for a linear system of the condition number of M.

    Examples
    --------
    >>> M, N = torch.diag(torch.tensor([1.0, 3.0])), torch.tensor([[0.0, 8.0], [-8.0, 0.0]])
    >>> conjugate_gradients(M, N, steps=1)  # divided by 1 + 3
    tensor([[ 0.,  2.],
            [-2.,  0.]])
    """
    K, R, P = torch.zeros_like(N), N, N
    rho = inner(R, R)
    for _ in range(steps):
        A = M @ P
        A = A - A.mT  # P M = -(M P)ᵀ
        alpha = of(torch.where(rho > 0, rho / inner(P, A), 0.0))
        K, R = K + alpha * P, R - alpha * A
        rho, before = inner(R, R), rho
        P = R + of(torch.where(before > 0, rho / before, 0.0)) * P
    return K


def norm(A: Float[Tensor, "*batch p q"]) -> Float[Tensor, "*batch"]:
    """Return the Frobenius norm, summed in float64, of entries between 1e-150 and 1e150."""
    return torch.linalg.vector_norm(A, dim=(-2, -1), dtype=torch.float64)


def size(A: Float[Tensor, "*batch p q"]) -> Float[Tensor, "*batch"]:
    """Return the Frobenius norm of matrices of any scale, whose squares may be no numbers."""
    A = A.double()
    largest = A.abs().amax(dim=(-2, -1))
    return norm(A / of(torch.where(largest > 0, largest, 1.0))) * largest


def inner(A: Float[Tensor, "*batch p q"], B: Float[Tensor, "*batch p q"]) -> Float[Tensor, "*batch"]:
    """Return the inner product of two matrices, tr(Aᵀ B)."""
    return (A * B).sum(dim=(-2, -1))


def diagonal(A: Float[Tensor, "*batch m m"], U: Float[Tensor, "*#batch m m"]) -> Float[Tensor, "*batch m"]:
    """Return the diagonal of Uᵀ A U."""
    return (U * (A @ U)).sum(dim=-2)


def eye(A: Float[Tensor, "*batch m m"]) -> Float[Tensor, "m m"]:
    """Return the identity of the size of A."""
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


def of(numbers: Tensor) -> Tensor:
    """Return one number a matrix, shaped to multiply it."""
    return numbers[..., None, None]


def root(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return the square root, 0 of what is negative."""
    return x.clamp(min=0).sqrt()


def _blur(A: Float[Tensor, "*batch m m"]) -> Float[Tensor, "*batch"]:
    """Return how far a Cholesky factorization may be from A, in the spectral norm."""
    return 2 * gemm(A.shape[-1] + 1, U64) * A.diagonal(dim1=-2, dim2=-1).abs().sum(dim=-1)
