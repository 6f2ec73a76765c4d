"""The log of a sweep: append-only JSON lines, one writer, whole lines only.

A line is a row, or the provenance of the rows below it. A line counts once its newline is there: what a killed process
left half-written is cut off when the log is opened again.
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from muon_lab.studies.study import Row

Provenance = dict[str, Any]


class Log:
    """The rows that a folder already has, and the only way to add one.

    Parameters
    ----------
    path : Path
        ``cases.jsonl``; made with its folder if it is not there.

    Raises
    ------
    ValueError
        If another process writes to it, or a line in its middle is damaged.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "cases.jsonl"
    ...     with Log(path) as log:
    ...         log.append({"key": "a", "outcome": "ok", "seconds": 0.1}, {"numpy": "2"})
    ...     _ = path.write_text(path.read_text() + '{"key": "b", "rel')  # killed while writing
    ...     with Log(path) as log:
    ...         print(log.rows, log.provenance("a"))
    {'a': {'key': 'a', 'outcome': 'ok', 'seconds': 0.1}} {'numpy': '2'}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self._provenances: dict[str, Provenance] = {}
        self._last: Provenance = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ValueError(f"cannot write to {path}: {error.strerror}") from error
        self._lock()
        self._read()

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, row: Row, provenance: Provenance) -> None:
        """Write a row; its provenance too, if it is another than that of the row before."""
        if provenance != self._last:
            self._write({"provenance": provenance})
            self._last = provenance
        self._write(row)
        self.rows[row["key"]], self._provenances[row["key"]] = row, provenance

    def provenance(self, key: str) -> Provenance:
        """Return under what a row was measured."""
        return self._provenances[key]

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: two sweeps into one folder are the user's affair
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ValueError(
                f"another sweep is writing to {self.path}: wait for it, or choose another --out"
            ) from error

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
            self._file.seek(0, os.SEEK_END)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                if "provenance" in record:
                    self._last = record["provenance"]
                else:
                    record["outcome"], record["seconds"]  # a row without these cannot be one of ours
                    self.rows[record["key"]], self._provenances[record["key"]] = record, self._last
            except (ValueError, KeyError, TypeError) as error:
                self._file.close()
                raise ValueError(
                    f"line {number} of {self.path} is damaged: delete the line, or choose another --out"
                ) from error
