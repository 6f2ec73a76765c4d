"""What a study is: a question, its axes as data, its columns, and a function from one case to one row.

Nothing here imports torch, so that a command line can list, expand and check cases at once.
"""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

Case = dict[str, Any]
Row = dict[str, Any]
Metrics = Mapping[str, float | int | None]

#: The ways in which a case can end.
OUTCOMES = ("ok", "nonfinite", "diverged", "not_converged", "error")


class LeftOut(Exception):
    """A point of the grid that cannot be measured here; the message says why."""


class Ended(Exception):
    """A measurement that ended in another outcome than ok."""

    def __init__(self, outcome: str, note: str, metrics: Metrics | None = None) -> None:
        super().__init__(note)
        self.outcome, self.note, self.metrics = outcome, note, metrics or {}


@dataclass(frozen=True)
class Column:
    """One metric of a row: its name, its unit ("1" for a ratio) and its meaning in one line."""

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Study:
    """One question, and how one case of it is answered.

    Attributes
    ----------
    name : str
        The name on the command line.
    question : str
        One sentence.
    version : int
        Raised when a formula changes: rows of an older version are then computed again.
    axes : type
        A frozen dataclass whose fields are tuples: the default values of every axis, and its help text.
    columns : tuple of Column
        The metrics, in the order of the table.
    headline : str
        The metric that a summary shows, the smaller the better.
    group : tuple of str
        Axes by which a summary may group rows: the first two that vary.
    settle : callable
        ``settle(point, file)`` turns one point of the grid into the cases that it stands for: it checks the values,
        replaces those that cannot matter by None, and expands a source into its matrices. Raises ``ValueError`` for
        what is wrong and `LeftOut` for what cannot be measured here.
    measure : callable
        ``measure(case)`` returns the metrics, or raises `Ended`.
    work : callable
        ``work(case)`` estimates the flops of a case, its oracle included.
    facts : tuple of str
        What a row says of its case beyond the axes.
    timed : bool
        True if the metrics are times: such cases run one at a time, and a new measurement gives other digits.
    """

    name: str
    question: str
    version: int
    axes: type
    columns: tuple[Column, ...]
    headline: str
    group: tuple[str, ...]
    settle: Callable[[Mapping[str, Any], Any], Iterator[Case]]
    measure: Callable[[Case], Metrics]
    work: Callable[[Case], float]
    facts: tuple[str, ...] = ()
    timed: bool = False

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes in grid order: the last one runs fastest."""
        return tuple(field.name for field in fields(self.axes))

    @property
    def defaults(self) -> dict[str, tuple[Any, ...]]:
        """The default values of every axis."""
        return {field.name: field.default for field in fields(self.axes)}  # type: ignore[misc]

    @property
    def row_names(self) -> tuple[str, ...]:
        """The columns of the table, in order."""
        metrics = tuple(column.name for column in self.columns)
        return ("study", "key", *self.axis_names, *self.facts, "outcome", "note", *metrics)

    def key(self, case: Case) -> str:
        """Return the identity of a case: 12 hex digits of SHA-256 over its canonical JSON and the study's version.

        Fields that start with an underscore say where to find things, not what they are, and do not count.
        """
        content = {name: value for name, value in case.items() if not name.startswith("_")}
        text = json.dumps([self.name, self.version, content], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def row(self, case: Case) -> Row:
        """Measure a case and return its row, whatever happens: an exception is an outcome, a warning is a note."""
        started = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outcome, notes, metrics = "ok", [], dict(self.measure(case))
            except Ended as ended:
                outcome, notes, metrics = ended.outcome, [ended.note], dict(ended.metrics)
            except Exception as error:
                outcome, notes, metrics = "error", [f"{type(error).__name__}: {error}"], {}
        notes += [str(warning.message) for warning in caught]
        row: Row = {"study": self.name, "key": self.key(case)}
        row |= {name: case.get(name) for name in (*self.axis_names, *self.facts)}
        row |= {"outcome": outcome, "note": "; ".join(dict.fromkeys(notes)) or None}
        row |= {column.name: _strict(metrics.get(column.name)) for column in self.columns}
        return row | {"seconds": time.perf_counter() - started}


def svd_flops(rows: int, cols: int) -> float:
    """Return the flops of a thin SVD, 6mn² + 20n³ with n the short side (Golub & Van Loan 2013, figure 8.6.1)."""
    n, m = sorted((rows, cols))
    return 6.0 * m * n * n + 20.0 * n**3


def _strict(value: Any) -> float | int | str | None:
    """Return a metric as strict JSON has it: None for what is not finite."""
    if value is None or isinstance(value, str | int):
        return value
    return float(value) if math.isfinite(value) else None
