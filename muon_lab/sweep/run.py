"""Run an experiment: what is missing is measured, what is there is kept, a table comes out."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from muon_lab import studies
from muon_lab.studies import sources
from muon_lab.studies.study import Row, Study
from muon_lab.sweep import executors, provenance, tables
from muon_lab.sweep.grid import Experiment, Plan, checked, plan
from muon_lab.sweep.store import Log


class Result(NamedTuple):
    """What a run left behind."""

    study: Study
    table: pl.DataFrame
    path: Path
    measured: int
    errors: int
    #: What the cases measured now took, summed over workers.
    seconds: float
    #: What the run took.
    wall: float


class Stopped(Exception):
    """A strict run met a case that errored; the message is its row's note."""


class SweepWarning(UserWarning):
    """Something that a user should know of a grid: what was left out of it, and why."""


def table(study: str, *, matrices: str | Path | None = None, **axes: Any) -> pl.DataFrame:
    """Measure a small grid here and now, and return its table; nothing is written.

    Parameters
    ----------
    study : str
        Its name.
    matrices : path, optional
        The user's own file, for sources ``file`` and ``file:PATTERN``.
    **axes
        Values of its axes: one, or many in a tuple, list, range or array; the others have the study's defaults.

    Raises
    ------
    ValueError
        For anything that the study does not have.

    Warns
    -----
    SweepWarning
        If points of the grid were left out, or are a bad choice.

    Examples
    --------
    >>> rows = table("blockwise", source="gaussian", rows=8, cols=16, dim=0, tp=(1, 2))
    >>> rows.select("tp", "bound").rows()
    [(1, 1.0), (2, 1.4142135623730951)]
    """
    found = studies.get(study)
    file = None if matrices is None else sources.File(str(matrices))
    planned = plan(Experiment(study, study, checked(found, f"sweep.table({study!r})", axes)), file)
    for note in planned.notes:
        warnings.warn(note, SweepWarning, stacklevel=2)
    return tables.frame(found, [executors.run_case(study, case) for case in planned.cases.values()])


def run(
    experiment: Experiment,
    planned: Plan,
    out: Path,
    executor: Executor,
    *,
    jobs: int = 1,
    fresh: bool = False,
    strict: bool = False,
    progress: Callable[[int, int, str], contextlib.AbstractContextManager[Callable[[], object]]] | None = None,
) -> Result:
    """Measure the cases that the log in `out` lacks, and write the table of all of them.

    Parameters
    ----------
    experiment : Experiment
        What is asked.
    planned : Plan
        Its cases, from `grid.plan`.
    out : Path
        A folder: ``cases.jsonl`` grows, ``table.parquet`` is written anew.
    executor : Executor
        From `executors`.
    jobs : int
        How many cases the executor runs at once; timed studies always run one at a time.
    fresh : bool
        Measure everything again; the log keeps the old rows, the newer one counts.
    strict : bool
        Stop at the first case that errors.
    progress : callable, optional
        Called with (cases done, cases in all, name); a context whose value is called after each case.

    Raises
    ------
    Stopped
        In a strict run.
    """
    study, started = studies.get(experiment.study), time.perf_counter()
    with Log(out / "cases.jsonl") as log:
        missing = [key for key in planned.cases if fresh or not _counts(log.rows.get(key))]
        show = (progress or _silent)(len(planned.cases) - len(missing), len(planned.cases), experiment.name)
        with show as advance:
            _measure(study, planned, missing, log, executor, 1 if study.timed else jobs, strict, advance)
        rows = [log.rows[key] for key in planned.cases]
        grid = tables.frame(study, rows)
        tables.write(grid, out / "table.parquet", _account(experiment, study, planned, log))
    errors = sum(row["outcome"] == "error" for row in rows)
    spent = sum(log.rows[key]["seconds"] for key in missing)
    wall = time.perf_counter() - started
    return Result(study, grid, out / "table.parquet", len(missing), errors, spent, wall)


def _counts(row: Row | None) -> bool:
    """Return whether a logged row answers its case; one that errored is tried again."""
    return row is not None and row["outcome"] != "error"


def _measure(
    study: Study,
    planned: Plan,
    missing: list[str],
    log: Log,
    executor: Executor,
    jobs: int,
    strict: bool,
    advance: Callable[[], object],
) -> None:
    if not missing:
        return
    here = executor.submit(executors.provenance_here).result()
    calls = ((study.name, planned.cases[key]) for key in missing)
    for row in executors.stream(executor, executors.run_case, calls, window=jobs if jobs == 1 else 2 * jobs):
        log.append(row, here)
        advance()
        if strict and row["outcome"] == "error":
            raise Stopped(row["note"])


def _account(experiment: Experiment, study: Study, planned: Plan, log: Log) -> dict[str, Any]:
    """Return the provenance of a table: the question, and under what each of its rows was measured."""
    measured: list[dict[str, Any]] = []
    for key in planned.cases:
        if log.provenance(key) not in measured:
            measured.append(log.provenance(key))
    asked = {name: value for name, value in asdict(experiment).items() if name != "name"}
    return {
        "experiment": {**asked, "axes": study.defaults | dict(experiment.axes)},
        "version": study.version,
        "measured": measured,
        "polars": provenance.installed("polars"),
    }


@contextlib.contextmanager
def _silent(done: int, total: int, name: str) -> Iterator[Callable[[], object]]:
    yield lambda: None
