r"""MOP: momentum times nothing but its own size, :math:`W \leftarrow W - \eta\, x\, \|C\|_*\, U` with C = U H exactly.

References
----------
Lau et al. (2025), *PolarGrad*; NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), which fills the null
space of C with whatever basis its decomposition returns, and so moves weights that have no momentum at all under any
other factor.
"""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from muon_lab.optim import directions
from muon_lab.optim.muon import Muon
from muon_lab.optim.optimizer import refuse_foreign
from muon_lab.polar import direct


class MOP(Muon):
    r"""Muon with the exact polar factor of the momentum, scaled by its nuclear norm.

    The step grows with the gradients: it is the step of steepest descent in the spectral norm. The null space of C
    stays empty: a zero momentum moves nothing.

    Parameters
    ----------
    params, lr, momentum, nesterov, weight_decay, scale, decay, extra, options
        As for `Muon`.
    direction : orthogonalizer, optional
        An exact one: `polar.svd` by default, or `polar.qdwh`.

    Raises
    ------
    ValueError
        As for `Muon`.

    Examples
    --------
    >>> import torch
    >>> W = torch.nn.Parameter(torch.zeros(1, 2))
    >>> optimizer = MOP([W], lr=0.5, momentum=0.0)
    >>> W.grad = torch.tensor([[3.0, 4.0]])
    >>> optimizer.step()
    >>> W.data
    tensor([[-1.5000, -2.0000]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        scale: str = "nuclear_norm",
        decay: str = "decoupled",
        extra: float = 1.0,
        direction: directions.Direction | None = None,
        **options: object,
    ) -> None:
        refuse_foreign(type(self).__name__, options, strict=True)
        exact = direct.svd() if direction is None else direction
        super().__init__(
            params, lr, momentum, nesterov, weight_decay, exact, scale, decay, "average", extra, None, **options
        )
