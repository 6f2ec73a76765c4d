"""Who holds what, and who talks."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.parallel import (
        agreement,
        algorithms,
        balance,
        buckets,
        calls,
        checkpoints,
        collectives,
        elementwise,
        factors,
        gathering,
        grid,
        journal,
        kinds,
        layerwise,
        layouts,
        ledger,
        links,
        namespaces,
        orders,
        ownership,
        packing,
        process_groups,
        reducing,
        rendezvous,
        sharded,
        timeline,
        traffic,
        volume,
        worlds,
        wrapping,
    )
    from muon_lab.parallel.elementwise import ElementwiseOptimizer
    from muon_lab.parallel.kinds import distribute
    from muon_lab.parallel.layerwise import LayerwiseOptimizer
    from muon_lab.parallel.links import SimulatedLink

__all__ = [
    "ElementwiseOptimizer",
    "LayerwiseOptimizer",
    "SimulatedLink",
    "agreement",
    "algorithms",
    "balance",
    "buckets",
    "calls",
    "checkpoints",
    "collectives",
    "distribute",
    "elementwise",
    "factors",
    "gathering",
    "grid",
    "journal",
    "kinds",
    "layerwise",
    "layouts",
    "ledger",
    "links",
    "namespaces",
    "orders",
    "ownership",
    "packing",
    "process_groups",
    "reducing",
    "rendezvous",
    "sharded",
    "timeline",
    "traffic",
    "volume",
    "worlds",
    "wrapping",
]
_elsewhere = {
    "ElementwiseOptimizer": "elementwise",
    "LayerwiseOptimizer": "layerwise",
    "SimulatedLink": "links",
    "distribute": "kinds",
}
__getattr__, __dir__ = lazy.attach(__name__, {name: _elsewhere.get(name, name) for name in __all__})
