"""Optimizers whose state is kept in a number format between steps, and the products of the network besides.

Whatever an optimizer computes, it computes as ever; what it will read at its next step has been rounded to the format
when this one ends, as if it had been stored there. A Kronecker factor stays symmetric: its lower triangle is stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Entries of an optimizer's state by what they are, and by optimizer.
ENTRIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "momentum": {
        "adamw": ("exp_avg",),
        "muon": ("momentum_buffer",),
        "mop": ("momentum_buffer",),
        "soap": ("M",),
        "rekls": ("M",),
    },
    "second_moment": {"adamw": ("exp_avg_sq",), "soap": ("V",), "rekls": ("V",)},
    "factors": {"soap": ("L", "R"), "rekls": ("L", "R")},
}

#: Entries of which one triangle is stored.
SYMMETRIC = ("L", "R")


@dataclass(frozen=True, eq=False)
class Storage:
    """Which entries of an optimizer's state are kept in which format.

    Attributes
    ----------
    entries : tuple of str
        Their names in the state of a parameter.
    format, scale_mode, rounding : str
        As for `arithmetic.quantize`; blocks lie along the last axis.
    generator : Generator, optional
        Draws what stochastic rounding needs.

    Examples
    --------
    >>> import torch
    >>> from muon_lab import optim
    >>> W = torch.nn.Parameter(torch.zeros(1, 2))
    >>> optimizer = optim.Muon([W], lr=0.1, momentum=0.5)
    >>> W.grad = torch.tensor([[2.0, 2.125]])
    >>> optimizer.step()
    >>> Storage(("momentum_buffer",), "fp8_e4m3").keep(optimizer)
    >>> optimizer.state[W]["momentum_buffer"]
    tensor([[1., 1.]])
    """

    entries: tuple[str, ...]
    format: str
    scale_mode: str = "rceil"
    rounding: str = "nearest"
    generator: "torch.Generator | None" = field(default=None, repr=False)

    def keep(self, optimizer: "torch.optim.Optimizer") -> None:
        """Round the entries of all parameters of an optimizer, in place."""
        for state in optimizer.state.values():
            for key, value in state.items():
                name = key.partition(".")[0]  # parts of one parameter are numbered
                if name in self.entries:
                    value.copy_(self.stored(value, symmetric=name in SYMMETRIC))

    def stored(self, X: "Tensor", symmetric: bool = False) -> "Tensor":
        """Return what is read of a tensor that was stored."""
        from muon_lab.arithmetic import roundtrip

        Q = roundtrip(X, self.format, scale_mode=self.scale_mode, rounding=self.rounding, generator=self.generator)
        return Q.tril() + Q.tril(-1).mT if symmetric else Q
