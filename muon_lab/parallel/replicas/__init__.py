"""Optimizers of replicated weights: whole parameters owned by ranks, or slices of all of them.

========== ============================================================================================
layerwise  the optimizer that owns whole parameters; `elementwise` its counterpart that owns slices
joint      several optimizers, each by its kind; `kinds` which of the three an optimizer takes
ownership  policies as owners by parameter; `buckets` what travels together, `packing` how it lies there
reducing   gradients on their way to owners; `gathering` weights on their way back; both may be hidden
teams      giants that several ranks orthogonalize together
agreement  what ranks must agree on before anything changes; `checkpoints` states for any number of ranks
wrapping   what both optimizers share with the one that they wrap
========== ============================================================================================
"""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.parallel.replicas import (
        agreement,
        buckets,
        checkpoints,
        elementwise,
        gathering,
        joint,
        kinds,
        layerwise,
        ownership,
        packing,
        reducing,
        teams,
        wrapping,
    )

__all__ = [
    "agreement",
    "buckets",
    "checkpoints",
    "elementwise",
    "gathering",
    "joint",
    "kinds",
    "layerwise",
    "ownership",
    "packing",
    "reducing",
    "teams",
    "wrapping",
]
__getattr__, __dir__ = lazy.attach(__name__, {name: name for name in __all__})
