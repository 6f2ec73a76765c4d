r"""How the largest singular value is brought below 1 before the first step.

Division by the Frobenius norm is safe and slow: a flat spectrum of m values starts at :math:`1/\sqrt m`. The others
need the Gram matrix :math:`A = X X^T`, which the first step forms anyway, and give a scale, or a scale a row:

.. math:: \text{schatten4: } \|A\|_F^{-1/2}, \qquad
          \text{aol: } \Big(\sum_j |A_{ij}|\Big)^{-1/2}, \qquad
          \text{spectral: } \lambda_{\max}(A)^{-1/2}.

`aol` scales rows by different factors, so it changes the polar factor that the iteration converges to. `spectral` takes
an eigendecomposition: it is there to tell how much a start can gain, not to save time.

Sources: Schatten-4 (Gelfand) in Grishina et al., CANS (arXiv 2506.10935); AOL in Prach and Lampert, *Almost-orthogonal
layers* (ECCV 2022), for Newton-Schulz in Turbo-Muon (flash-newton-schulz); all in google-deepmind/optax 0.2.8.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.nearest import unknown

#: From the Gram matrix of the Frobenius-normalised input to the scale of its rows.
Start = Callable[[Float[Tensor, "*batch m m"]], Float[Tensor, "*batch k 1"]]


def schatten4(A: Float[Tensor, "*batch m m"]) -> Float[Tensor, "*batch 1 1"]:
    """Return the scale that brings the Schatten-4 norm to 1.

    Examples
    --------
    >>> import torch
    >>> schatten4(torch.eye(16) / 16)  # 16 equal singular values of 1/4 become 1/2
    tensor([[2.]])
    """
    return _inverse_root(torch.linalg.matrix_norm(A, keepdim=True))


def aol(A: Float[Tensor, "*batch m m"]) -> Float[Tensor, "*batch m 1"]:
    """Return a scale a row, after which no singular value exceeds 1 by Gershgorin's theorem.

    Examples
    --------
    >>> import torch
    >>> aol(torch.tensor([[4.0, 0.0], [0.0, 0.25]])).T
    tensor([[0.5000, 2.0000]])
    """
    return _inverse_root(A.abs().sum(dim=-1, keepdim=True))


def spectral(A: Float[Tensor, "*batch m m"]) -> Float[Tensor, "*batch 1 1"]:
    """Return the scale that brings the largest singular value to 1, to rounding.

    Examples
    --------
    >>> import torch
    >>> spectral(torch.tensor([[4.0, 0.0], [0.0, 0.25]]))
    tensor([[0.5000]])
    """
    wide = A.double() if A.dtype == torch.float64 else A.float()
    return _inverse_root(torch.linalg.eigvalsh(wide)[..., -1:, None].clamp(min=0.0)).to(A.dtype)


def _inverse_root(size: Float[Tensor, "*batch k 1"]) -> Float[Tensor, "*batch k 1"]:
    """Return 1/√size; 1 where it is 0: a row of zeros stays."""
    return torch.where(size > 0, size, 1.0).rsqrt()


_BY_NAME: Mapping[str, Start | None] = {"frobenius": None, "schatten4": schatten4, "aol": aol, "spectral": spectral}


def known() -> tuple[str, ...]:
    """Return the names that `get` accepts.

    Examples
    --------
    >>> known()
    ('frobenius', 'schatten4', 'aol', 'spectral')
    """
    return tuple(_BY_NAME)


def get(name: str) -> Start | None:
    """Return a start by name; None for `frobenius`, with which every iteration begins.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name not in _BY_NAME:
        raise unknown("start", name, _BY_NAME)
    return _BY_NAME[name]
