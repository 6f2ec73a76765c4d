"""REKLS: SOAP with the Kullback-Leibler correction and eigenbases by a decomposition at every step.

References
----------
NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026): real-time eigen Kullback-Leibler SOAP.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.optim.optimizer import ParamsT

from muon_lab.optim.soap import SOAP

#: What makes it REKLS.
FIXED: Final[Mapping[str, Any]] = {"eigenbasis": "eigh", "kl": True, "frequency": 1}


class REKLS(SOAP):
    """SOAP with ``eigenbasis="eigh"``, ``kl=True`` and ``frequency=1``, bit for bit.

    With a small eps a rectangular matrix is not determined by float32, nor at first by float64: the first factors are
    1 / eps too large, so that the zero values of the singular one are rounding far above eps, and what later gradients
    add there stays below its rounding for tens of steps. After 30 steps of 64 by 32 with eps = 1e-8, one step in
    float32 is 15 % off the same step in float64; with ``start=1`` it is 1e-5 off. Starting
    there, skip the first step (``first_step="skip"``): see `soap`.

    Parameters
    ----------
    params, lr, betas, shampoo_beta, eps, weight_decay, decay
        As for `SOAP`.
    options
        Everything else that `SOAP` has, but for these three.

    Raises
    ------
    ValueError
        As for `SOAP`, and for a group or a loaded state in which one of the three is another.
    TypeError
        If one of the three is given.

    Examples
    --------
    >>> import torch
    >>> group = REKLS([torch.nn.Parameter(torch.ones(2, 3))], lr=0.1).param_groups[0]
    >>> group["eigenbasis"], group["kl"], group["frequency"]
    ('eigh', True, 1)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: Sequence[float] = (0.9, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay: str = "decoupled",
        **options: Any,
    ) -> None:
        base = (lr, betas, shampoo_beta, eps, weight_decay, decay)
        super().__init__(params, *base, eigenbasis="eigh", kl=True, frequency=1, **options)

    def check(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a group as plain numbers, or raise ``ValueError``."""
        for name, needed in FIXED.items():
            if settings[name] != needed:
                raise ValueError(f"REKLS: {name} is {settings[name]!r}, needed {needed!r}")
        return super().check(settings)
