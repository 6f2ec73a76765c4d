"""What a study is: a question, its axes as data, its columns, and a function from one case to one row.

Nothing here imports torch, so that a command line can list, expand and check cases at once.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

Case = dict[str, Any]
Row = dict[str, Any]

#: The ways in which a case can end.
OUTCOMES = ("ok", "nonfinite", "diverged", "not_converged", "error")


@dataclass(frozen=True)
class Column:
    """One metric of a row: its name, unit ("1" for a ratio) and one-line meaning."""

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Study:
    """One question.

    Attributes
    ----------
    name : str
        The name on the command line.
    question : str
        One sentence, printed by ``--list``.
    version : int
        Raised when a formula changes: rows of an older version are then computed again.
    axes : type
        A frozen dataclass whose fields are tuples: the default value of every axis.
    columns : tuple of Column
        The metrics, in the order of the table.
    headline : str
        The metric that the summary shows.
    group : tuple of str
        The axes by which the summary groups rows.
    settle : callable
        ``settle(point, file)`` turns one point of the grid into the cases it stands for: checks the values, replaces
        those that cannot matter by None, and expands a source into its matrices. Raises ``ValueError``.
    measure : callable
        ``measure(case)`` computes the metrics.
    facts : tuple of str
        Fields of a case beyond the axes: what the source says of its matrix.
    timed : bool
        True if the metrics are times: such cases run one at a time, and their table is not reproducible in bits.
    """

    name: str
    question: str
    version: int
    axes: type
    columns: tuple[Column, ...]
    headline: str
    group: tuple[str, ...]
    settle: Callable[..., Iterator[Case]]
    measure: Callable[[Case], dict[str, Any]]
    facts: tuple[str, ...] = ()
    timed: bool = False
    choices: Mapping[str, Callable[[], tuple[str, ...]]] = field(default_factory=dict)

    def axis_names(self) -> tuple[str, ...]:
        """Return the names of the axes, in grid order (the last one runs fastest)."""
        return tuple(f.name for f in fields(self.axes))


def key(study: Study, case: Case) -> str:
    """Return the identity of a case: 12 hex digits of SHA-256 over its canonical JSON and the study's version.

    Fields that start with an underscore say where to find things, not what they are, and do not count.
    """
    content = {name: value for name, value in case.items() if not name.startswith("_")}
    text = json.dumps([study.name, study.version, content], sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
