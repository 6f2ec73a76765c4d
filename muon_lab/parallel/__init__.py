"""Who holds what, and who talks."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.parallel import grid, layouts

__all__ = ["grid", "layouts"]
__getattr__, __dir__ = lazy.attach(__name__, {name: name for name in __all__})
