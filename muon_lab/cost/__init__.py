"""Closed forms: which matrices a real model has, what their update costs in flops, bytes and seconds, and a plan."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.cost import architecture, flops, inventory, network, own, ownership, plan, throughput, volume

__all__ = ["architecture", "flops", "inventory", "network", "own", "ownership", "plan", "throughput", "volume"]
__getattr__, __dir__ = lazy.attach(__name__, {name: name for name in __all__})
