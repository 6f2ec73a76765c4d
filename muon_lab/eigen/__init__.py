"""Eigenbases of Kronecker factors: how factors are averaged, bases are followed, and moments live in them."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.eigen import factors, precondition, track

__all__ = ["factors", "precondition", "track"]
__getattr__, __dir__ = lazy.attach(__name__, {name: name for name in __all__})
