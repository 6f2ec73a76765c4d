"""Who holds what, and who talks."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.parallel import (
        algorithms,
        calls,
        collectives,
        factors,
        grid,
        journal,
        layouts,
        ledger,
        orders,
        process_groups,
        rendezvous,
        sharded,
        volume,
        worlds,
    )

__all__ = [
    "algorithms",
    "calls",
    "collectives",
    "factors",
    "grid",
    "journal",
    "layouts",
    "ledger",
    "orders",
    "process_groups",
    "rendezvous",
    "sharded",
    "volume",
    "worlds",
]
__getattr__, __dir__ = lazy.attach(__name__, {name: name for name in __all__})
