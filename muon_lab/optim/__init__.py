"""Optimizers of matrices for torch, composed: momentum, direction, scale, decay."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.optim import directions, matrices, optimizer, routing, second_moments, step
    from muon_lab.optim.clipping import qk_clip
    from muon_lab.optim.matrices import View, fused
    from muon_lab.optim.mop import MOP
    from muon_lab.optim.muon import Muon
    from muon_lab.optim.optimizer import MatrixOptimizer, StepReport
    from muon_lab.optim.rekls import REKLS
    from muon_lab.optim.second_moments import NAMO, AdaMuon, NorMuon
    from muon_lab.optim.soap import SOAP

__all__ = [
    "MOP",
    "NAMO",
    "REKLS",
    "SOAP",
    "AdaMuon",
    "MatrixOptimizer",
    "Muon",
    "NorMuon",
    "StepReport",
    "View",
    "directions",
    "fused",
    "matrices",
    "optimizer",
    "qk_clip",
    "routing",
    "second_moments",
    "step",
]
__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        **{name: name for name in ("directions", "matrices", "optimizer", "routing", "second_moments", "step")},
        **dict.fromkeys(("AdaMuon", "NAMO", "NorMuon"), "second_moments"),
        **dict.fromkeys(("MatrixOptimizer", "StepReport"), "optimizer"),
        **dict.fromkeys(("View", "fused"), "matrices"),
        "MOP": "mop",
        "Muon": "muon",
        "REKLS": "rekls",
        "SOAP": "soap",
        "qk_clip": "clipping",
    },
)
