"""Polar factors without an iteration."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic.policy import EXACT_EXPONENT, largest, power_of_two
from muon_lab.polar.engine import Orthogonalizer, check, not_finite

#: How far above the mean spectral norm of the input's own rounding a direction must stand to count: a matrix that was
#: computed, by a product of inner length up to 64 say, carries about √64 roundings an entry, not one.
ROUNDINGS = 8


def svd(roundoff: float | None = None) -> Orthogonalizer:
    r"""Return the orthogonalizer that takes the polar factor from a singular value decomposition in float64.

    :math:`G = U \Sigma V^T \mapsto U_r V_r^T`, the partial isometry of the range: a zero matrix gives zero, and the
    null space is not filled with rounding noise at full size. A direction belongs to the range if its singular value
    exceeds

    .. math:: \max(8 u \|G\|_F (\sqrt m + \sqrt n) / \sqrt{mn},\; \max(m, n)\, \varepsilon_{64}\, \sigma_1),

    with u the unit roundoff of the data: the first is eight times the expected spectral norm of its rounding
    errors, taken as independent, the second the error of the decomposition. The usual cutoff
    :math:`\max(m, n)\, \varepsilon\, \sigma_1` is hundreds of times larger in float32 for the layers of a small model,
    more for larger ones, and drops directions that a real gradient determines to two or three digits.

    Parameters
    ----------
    roundoff : float, optional
        The unit roundoff u of the numbers from which G comes; that of its dtype by default.

    Returns
    -------
    callable
        From ``(*batch, m, n)`` to the same shape and dtype.

    Raises
    ------
    ValueError
        As for `newton_schulz`.

    References
    ----------
    Davidson and Szarek, *Local operator theory, random matrices and Banach spaces* (2001), theorem II.13, for the
    spectral norm :math:`\tau (\sqrt m + \sqrt n)` of noise with standard deviation τ.

    Examples
    --------
    >>> import torch
    >>> svd()(torch.ones(4, 4))[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def orthogonalize(G: Tensor) -> Float[Tensor, "*batch m n"]:
        check(G)
        if G.numel() == 0:
            return torch.zeros_like(G)
        X = G.double()
        size = largest(X)
        if not torch.isfinite(size).all():
            raise not_finite(G)
        U, s, Vh = torch.linalg.svd(X * power_of_two(size, EXACT_EXPONENT[X.dtype]), full_matrices=False)
        m, n = G.shape[-2:]
        kept = s > _cutoff(s, m, n, torch.finfo(G.dtype).eps / 2 if roundoff is None else roundoff)
        return ((U * kept.unsqueeze(-2)) @ Vh).to(G.dtype)

    return orthogonalize


def _cutoff(s: Float[Tensor, "*batch r"], m: int, n: int, roundoff: float) -> Float[Tensor, "*batch 1"]:
    """Return the size below which a singular value can be an error of the input or of its decomposition."""
    norm = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    rounding = ROUNDINGS * roundoff * norm * (math.sqrt(m) + math.sqrt(n)) / math.sqrt(m * n)
    return torch.maximum(rounding, max(m, n) * torch.finfo(s.dtype).eps * s[..., :1])
