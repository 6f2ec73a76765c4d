"""From a table to a figure: pure functions of the rows, which know nothing of torch or of how a number came about.

``figures.draw(study, table)`` gives a `matplotlib.figure.Figure`, ``figures.save.save(figure, stem)`` the same bytes
every time.
"""

from typing import TYPE_CHECKING

from muon_lab import lazy

if TYPE_CHECKING:
    from muon_lab.figures import panels, save, style
    from muon_lab.figures.panels import draw, names

__all__ = ["draw", "names", "panels", "save", "style"]
__getattr__, __dir__ = lazy.attach(
    __name__, {"draw": "panels", "names": "panels", "panels": "panels", "save": "save", "style": "style"}
)
