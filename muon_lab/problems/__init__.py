"""Where matrices come from: planted spectra, recorded training runs, the user's own files."""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.problems import loaded, models, planted, spectra, streams, text

__all__ = ["loaded", "models", "planted", "spectra", "streams", "text"]
__getattr__, __dir__ = lazy.attach(__name__, {name: name for name in __all__})
