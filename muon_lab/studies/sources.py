"""Where a case takes its matrix from: one grammar for the axes `source` and `spectrum`.

``gaussian``, ``geometric(1e3)`` … : planted, with the shape and the seed of the case (`problems.spectra`).
``recorded`` or ``recorded:PATTERN`` : the gradients and momenta of the recorded training run (`problems.streams`).
``file`` or ``file:PATTERN`` : the matrices of the user's file (`problems.loaded`).

The last two stand for several matrices, each of which has its own shape and no seed.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from muon_lab.nearest import unknown
from muon_lab.problems import loaded, spectra, streams
from muon_lab.studies.study import Case

if TYPE_CHECKING:
    from muon_lab.oracle.polar import Polar

#: What a row says of its matrix: its name in its source, and the first digits of the SHA-256 of that source.
FACTS = ("matrix", "content")


#: How many notes on skipped arrays are shown one by one.
NOTES = 3


@dataclass(frozen=True, eq=False)
class File:
    """The user's file as it is now. What a source selects from it is listed and checked once."""

    path: str

    @lru_cache  # noqa: B019 (files are few)
    def catalogue(self, pattern: str) -> loaded.Catalogue:
        """List what a pattern selects, and check that it is usable; raises ``ValueError``."""
        return loaded.catalogue(self.path, pattern)


def settle(value: str, rows: int, cols: int, seed: int, file: File | None) -> Iterator[Case]:
    """Yield, for every matrix that a source stands for, the fields of a case that say which matrix it is.

    Raises
    ------
    ValueError
        For an unknown source, a pattern that selects nothing, ``file`` without a file, or a shape below 1×1.
    """
    kind, _, pattern = value.partition(":")
    if kind == "recorded":
        stream = _stream()
        names = loaded.selected([entry.name for entry in stream.entries], pattern or "*", "the recorded stream")
        yield from _listed(kind, [entry for entry in stream.entries if entry.name in names], stream.sha256)
    elif kind == "file":
        if file is None:
            raise ValueError(f"source {value!r} needs a file: give one with --matrices FILE")
        found = file.catalogue(pattern or "*")
        for note in _condensed(found.notes):
            warnings.warn(note, stacklevel=2)
        yield from _listed(kind, found.entries, found.sha256, _path=file.path)
    else:
        if kind.partition("(")[0] not in spectra.PROFILES:
            raise unknown("source", value, (*spectra.PROFILES, "recorded", "file"))
        spectrum = spectra.parse(value)
        if min(rows, cols) < 1:
            raise ValueError(f"a matrix needs at least 1 row and 1 column, but {rows}×{cols} was asked for")
        yield {"source": str(spectrum), "matrix": None, "rows": rows, "cols": cols, "seed": seed, "content": None}


@lru_cache(maxsize=1)
def _stream() -> streams.Stream:
    """Return the recorded stream, read once a process."""
    return streams.committed()


def _condensed(notes: tuple[str, ...]) -> Iterator[str]:
    """Yield notes, all but the first two of many as a number."""
    yield from notes if len(notes) <= NOTES else notes[: NOTES - 1]
    if len(notes) > NOTES:
        yield f"{len(notes) - NOTES + 1} more arrays are no matrices and were left out"


def _listed(kind: str, entries: Any, sha256: str, **where: str) -> Iterator[Case]:
    for entry in entries:
        where["_stored"] = getattr(entry, "dtype", "float32")  # the recorded stream is float32 throughout
        facts = {"matrix": entry.name, "rows": entry.rows, "cols": entry.cols, "seed": None, "content": sha256[:12]}
        yield {"source": kind, **facts, **where}


def matrix(case: Case) -> Float[np.ndarray, "m n"]:
    """Return the matrix of a settled case, in float64."""
    return _problem(*_identity(case))[0]


def truth(case: Case) -> "Polar":
    """Return the exact polar factor of the matrix of a settled case."""
    return _problem(*_identity(case))[1]


def roundoff(case: Case) -> float:
    """Return the unit roundoff of the numbers in which the matrix of a case was stored."""
    return _roundoff(case.get("_stored"))


def _roundoff(dtype: str | None) -> float:
    from muon_lab.measure import bounds

    return bounds.unit_roundoff(dtype or "float64")


def _identity(case: Case) -> tuple[Any, ...]:
    return tuple(case.get(name) for name in ("source", "matrix", "rows", "cols", "seed", "content", "_path", "_stored"))


@lru_cache(maxsize=2)  # neighbouring cases of a grid share their matrix
def _problem(
    source: str,
    name: str | None,
    rows: int,
    cols: int,
    seed: int | None,
    content: str | None,  # a changed file is another problem
    path: str | None,
    stored: str | None,
) -> Any:
    from muon_lab.oracle import polar

    if name is None:
        from muon_lab.problems import planted

        G = planted.draw(spectra.parse(source), rows, cols, _generator(source, rows, cols, seed)).matrix
    elif path is None:
        G = _stream()[name].double().numpy()
    else:
        G = loaded.matrix(path, name).double().numpy()
    return G, polar.polar(G, roundoff=_roundoff(stored))


def _generator(*identity: Any) -> np.random.Generator:
    """Return a generator that depends on nothing but the matrix it draws: more axis values change no other case."""
    digest = hashlib.sha256(json.dumps(identity).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32))
