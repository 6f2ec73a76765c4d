"""Who holds what, and who talks."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.parallel import (
        algorithms,
        balance,
        calls,
        collectives,
        factors,
        grid,
        journal,
        layouts,
        ledger,
        links,
        namespaces,
        orders,
        process_groups,
        rendezvous,
        replicas,
        sharded,
        timeline,
        traffic,
        volume,
        worlds,
    )
    from muon_lab.parallel.links import SimulatedLink
    from muon_lab.parallel.replicas.elementwise import ElementwiseOptimizer
    from muon_lab.parallel.replicas.joint import JointOptimizer
    from muon_lab.parallel.replicas.kinds import distribute
    from muon_lab.parallel.replicas.layerwise import LayerwiseOptimizer

__all__ = [
    "ElementwiseOptimizer",
    "JointOptimizer",
    "LayerwiseOptimizer",
    "SimulatedLink",
    "algorithms",
    "balance",
    "calls",
    "collectives",
    "distribute",
    "factors",
    "grid",
    "journal",
    "layouts",
    "ledger",
    "links",
    "namespaces",
    "orders",
    "process_groups",
    "rendezvous",
    "replicas",
    "sharded",
    "timeline",
    "traffic",
    "volume",
    "worlds",
]
_elsewhere = {
    "ElementwiseOptimizer": "replicas.elementwise",
    "JointOptimizer": "replicas.joint",
    "LayerwiseOptimizer": "replicas.layerwise",
    "SimulatedLink": "links",
    "distribute": "replicas.kinds",
}
__getattr__, __dir__ = lazy.attach(__name__, {name: _elsewhere.get(name, name) for name in __all__})
