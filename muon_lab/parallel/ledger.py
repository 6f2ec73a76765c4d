"""The same verbs, counted: what was called, with how many bytes, by which group, for which layer and iteration.

Three numbers of bytes are never mixed. *Logical* are those of the tensor that a rank hands over; *sent* are those that
a named algorithm makes the rank send (`algorithms`), a pure function of the call; *wire* are those that sockets carry,
which only a measurement knows. A ledger knows the first two. It keeps the calls, and prices them when asked.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel import algorithms
from muon_lab.parallel.calls import Call
from muon_lab.parallel.collectives import Collectives, Pending


class Record(NamedTuple):
    """One call of one rank: what it asked for, in which group and place, under which tags."""

    call: Call
    group: tuple[int, ...]
    place: int
    tags: tuple[tuple[str, object], ...] = ()

    @property
    def logical(self) -> int:
        """Bytes of the tensor handed over."""
        return self.call.logical(self.place)

    def sent(self, algorithm: str) -> int:
        """Return the bytes that the rank sends by an algorithm."""
        return algorithms.sent(self.call, self.place, algorithm)

    def column(self, name: str) -> object:
        """Return the verb, dtype, op, group, or the value of a tag; None for a tag that the record does not have."""
        known = {"verb": self.call.verb, "dtype": self.call.dtype, "op": self.call.op, "group": self.group}
        return known[name] if name in known else dict(self.tags).get(name)


class Ledger(Collectives):
    """Collectives whose calls are recorded, in order, and passed on.

    Parameters
    ----------
    inner : Collectives
        What does the work.
    algorithm : str
        The family of algorithms that sent bytes are counted for, see `algorithms`.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> def program(world):
    ...     ledger = Ledger(world)
    ...     for step in range(5):
    ...         ledger.tagged(iteration=step).all_reduce(torch.ones(1024, 1024)).wait()
    ...     return ledger
    >>> ledger = worlds.run(program, ranks=8)[0]
    >>> ledger.calls, ledger.logical_bytes / 2**20, ledger.sent_bytes / 2**20
    (5, 20.0, 35.0)
    >>> ledger.summary("iteration")[4]
    {'iteration': 4, 'calls': 1, 'logical_bytes': 4194304, 'sent_bytes': 7340032}
    """

    def __init__(
        self,
        inner: Collectives,
        algorithm: str = "ring",
        *,
        tags: tuple[tuple[str, object], ...] = (),
        records: list[Record] | None = None,
    ) -> None:
        if algorithm not in algorithms.FAMILIES:
            raise ValueError(f"algorithm must be one of {', '.join(algorithms.FAMILIES)}, not {algorithm!r}")
        self.inner = inner
        self.ranks, self.rank = inner.ranks, inner.rank
        self.algorithm = algorithm
        self.tags = tags
        self.records: list[Record] = [] if records is None else records

    @property
    def device(self) -> torch.device:
        """Where tensors of this rank live."""
        return self.inner.device

    def start(self, call: Call, x: Shaped[Tensor, "..."]) -> Pending:
        """Record a call and pass it on."""
        self.records.append(Record(call, self.ranks, self.rank, self.tags))
        return self.inner.start(call, x)

    def subgroup(self, call: Call, places: tuple[int, ...]) -> "Ledger":
        """Form a group whose calls are recorded here too."""
        return Ledger(self.inner.subgroup(call, places), self.algorithm, tags=self.tags, records=self.records)

    def tagged(self, **tags: object) -> "Ledger":
        """Return a ledger with the same records, whose further calls carry these tags beside its own."""
        merged = tuple((dict(self.tags) | tags).items())
        return Ledger(self.inner, self.algorithm, tags=merged, records=self.records)

    @property
    def calls(self) -> int:
        """Number of calls."""
        return len(self.records)

    @property
    def logical_bytes(self) -> int:
        """Bytes of all tensors handed over."""
        return sum(record.logical for record in self.records)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by this rank, by the algorithm of the ledger."""
        return sum(record.sent(self.algorithm) for record in self.records)

    def summary(self, *by: str) -> list[dict[str, object]]:
        """Return calls and bytes by verb, dtype and group, or by other columns; see `summary`."""
        return summary(self.records, *by, algorithm=self.algorithm)


def summary(records: Iterable[Record], *by: str, algorithm: str = "ring") -> list[dict[str, object]]:
    """Return calls and bytes of records, of one rank or of many, by columns, in order of first appearance.

    Parameters
    ----------
    records : iterable of Record
        What ledgers have kept.
    by : str
        "verb", "dtype", "op", "group" or names of tags; verb, dtype and group if none is named.
    algorithm : str
        The family that sent bytes are counted for.

    Returns
    -------
    list of dict
        The columns, and `calls`, `logical_bytes`, `sent_bytes`.

    Raises
    ------
    ValueError
        For a column that no record has.
    """
    columns, records = by or ("verb", "dtype", "group"), list(records)
    _known(columns, records)
    rows: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        rows.setdefault(tuple(record.column(name) for name in columns), []).append(record)
    return [dict(zip(columns, key, strict=True)) | _totals(row, algorithm) for key, row in rows.items()]


def _totals(records: Sequence[Record], algorithm: str) -> dict[str, object]:
    return {
        "calls": len(records),
        "logical_bytes": sum(record.logical for record in records),
        "sent_bytes": sum(record.sent(algorithm) for record in records),
    }


def _known(columns: Sequence[str], records: Sequence[Record]) -> None:
    known = ["verb", "dtype", "op", "group", *{name: None for record in records for name, _ in record.tags}]
    for column in columns:
        if column not in known and records:
            raise ValueError(f"column of a summary must be one of {', '.join(known)}, not {column!r}")
