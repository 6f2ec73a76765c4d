"""Polar factors without an iteration."""

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import largest
from muon_lab.polar.engine import Orthogonalizer, check, not_finite


def svd() -> Orthogonalizer:
    r"""Return the orthogonalizer that takes the polar factor from a singular value decomposition.

    :math:`G = U \Sigma V^T \mapsto U_r V_r^T` over the r singular values above
    :math:`\max(m, n)\, \varepsilon\, \sigma_1`: the partial isometry of the range. The null space stays empty, so a
    zero matrix gives zero; it is not filled with rounding noise at full size.

    Returns
    -------
    callable
        From ``(*batch, m, n)`` to the same shape and dtype. Half precisions are computed in float32.

    Raises
    ------
    ValueError
        As for `newton_schulz`.

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
        if not torch.isfinite(largest(G)).all():
            raise not_finite(G)
        X = G if G.dtype in (torch.float32, torch.float64) else G.float()
        U, s, Vh = torch.linalg.svd(X, full_matrices=False)
        kept = s > max(G.shape[-2:]) * torch.finfo(X.dtype).eps * s[..., :1]
        return ((U * kept.unsqueeze(-2)) @ Vh).to(G.dtype)

    return orthogonalize
