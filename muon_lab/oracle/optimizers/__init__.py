"""What optimizers do to one matrix, step by step, in float64: rules as data, states as values, no torch.

A rule holds hyperparameters; `trajectory` walks it along a list of gradients. `multiprecision.trajectory` walks the
same rule in as many digits as asked for, by formulas written a second time.
"""

from muon_lab.oracle.optimizers import multiprecision
from muon_lab.oracle.optimizers.adam import AdamState, AdamW
from muon_lab.oracle.optimizers.muon import AdaptiveMuon, AdaptiveState, Muon, MuonState, mop
from muon_lab.oracle.optimizers.soap import SOAP, SOAPState, rekls
from muon_lab.oracle.optimizers.step import Rule, advance, trajectory

__all__ = [
    "SOAP",
    "AdamState",
    "AdamW",
    "AdaptiveMuon",
    "AdaptiveState",
    "Muon",
    "MuonState",
    "Rule",
    "SOAPState",
    "advance",
    "mop",
    "multiprecision",
    "rekls",
    "trajectory",
]
