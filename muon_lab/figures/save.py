"""Write a figure as PDF and PNG: the same figure, the same bytes, on any day and in any time zone."""

import io
import os
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure, SubFigure

from muon_lab.figures import style

#: Dots per inch of the PNG.
RESOLUTION = 200

#: What would name the day and the program in each format; None leaves it out.
METADATA: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


def save(figure: Figure, stem: str | Path) -> tuple[Path, Path]:
    """Write ``stem.pdf`` and ``stem.png``, each whole or not at all, and return their paths.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     [path.name for path in save(Figure(), Path(folder) / "empty")]
    ['empty.pdf', 'empty.png']
    """
    with style.house():
        _settle(figure)
        content = {suffix: _rendered(figure, suffix) for suffix in METADATA}
    pdf, png = (Path(f"{stem}.{suffix}") for suffix in METADATA)
    for path in (pdf, png):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, content[path.suffix[1:]])
    return pdf, png


def _settle(figure: Figure) -> None:
    """Lay a figure out once: a second pass would move it by a fraction of a dot, and so change its bytes.

    Parts of a figure lie on its background and need none of their own: an edge at 0 that the layout leaves at ±1e-15 is
    written as 0 or as -0.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for part in figure.findobj(SubFigure):
        part.patch.set_visible(False)


def _rendered(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    options: dict[str, Any] = {"format": suffix, "dpi": RESOLUTION, "metadata": METADATA[suffix]}
    figure.savefig(buffer, **options)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)  # mkstemp's own mode would hide the file from others
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
