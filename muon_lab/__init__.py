"""muon_lab: orthogonalized optimizers measured against exact oracles.

Data flows one way: a *problem* gives a matrix, an *orthogonalizer* (schedule × arithmetic) turns it into an update, a
*layout* says which rank holds what, a *measure* compares with an *oracle*, a *study* makes one row of that, and a
*sweep* a table, from which *figures* are drawn.
"""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab import (
        arithmetic,
        cost,
        eigen,
        figures,
        measure,
        optim,
        oracle,
        parallel,
        plan,
        polar,
        problems,
        studies,
        sweep,
    )

__version__ = "0.1.0"
__all__ = [
    "arithmetic",
    "cost",
    "eigen",
    "figures",
    "measure",
    "optim",
    "oracle",
    "parallel",
    "plan",
    "polar",
    "problems",
    "studies",
    "sweep",
]
__getattr__, __dir__ = lazy.attach(__name__, {name: name for name in __all__})
