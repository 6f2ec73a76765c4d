"""What each rank has asked for and what it waits for: enough to say who keeps whom waiting, and that nobody will come.

A world that stands still looks the same from outside whether a rank computes, sleeps, has left early or waits for a
call that the others never make. The journals of all ranks tell them apart.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from muon_lab.parallel.calls import named

#: Verbs that a board can name; the rest is "a call".
VERBS = (
    "a call",
    "all_reduce",
    "all_gather",
    "all_gather_v",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "barrier",
    "split",
)


class Group(NamedTuple):
    """A group as its members know it: its world ranks, and how many groups of the same ranks came before."""

    ranks: tuple[int, ...]
    occurrence: int


class Wait(NamedTuple):
    """What a rank waits for: the call of a number, counted from 1, in a group."""

    group: Group
    number: int
    verb: str


@dataclass(frozen=True)
class Standing:
    """Where a rank stands.

    Parameters
    ----------
    issued : mapping from group to int
        How many calls it has made in each of its groups.
    wait : Wait, optional
        What it waits for; nothing while it computes.
    returned : bool
        Whether its function has returned.
    """

    issued: Mapping[Group, int]
    wait: Wait | None = None
    returned: bool = False

    def missing(self, standings: Sequence["Standing"]) -> tuple[int, ...]:
        """Return the ranks that have not made the call which this one waits for."""
        if self.wait is None:
            return ()
        group, number, _ = self.wait
        return tuple(rank for rank in group.ranks if standings[rank].issued.get(group, 0) < number)


def standstill(standings: Sequence[Standing]) -> dict[int, str]:
    """Return the ranks that can never go on, each with the reason; none if everyone may.

    A rank is stuck for good if it waits for one that has returned, or that is stuck for good itself. The largest set of
    ranks that keep each other so is found by crossing out whoever waits only for ranks that may still come. Standings
    may be read one after the other while ranks run, the wait of each before its counts: the first rank of the set to go
    on would need a call of another that had gone on before it.

    Examples
    --------
    >>> pair = Group((0, 1), 0)
    >>> waiting = Standing({pair: 3}, Wait(pair, 3, "all_reduce"))
    >>> standstill([waiting, Standing({pair: 2}, returned=True)])
    {0: 'rank 0 waits in all_reduce (call 3 of ranks 0, 1) for rank 1, which has returned'}
    >>> standstill([waiting, Standing({pair: 2})])
    {}
    """
    missing = {rank: standing.missing(standings) for rank, standing in enumerate(standings)}
    gone = {rank for rank, standing in enumerate(standings) if standing.returned}
    stuck = {rank for rank, absent in missing.items() if absent}
    while going := {rank for rank in stuck if not any(absent in stuck | gone for absent in missing[rank])}:
        stuck -= going
    return {rank: _reason(rank, standings, missing[rank], gone) for rank in sorted(stuck)}


def _reason(rank: int, standings: Sequence[Standing], missing: Sequence[int], gone: set[int]) -> str:
    absent = [other for other in missing if other in gone] or list(missing)
    end = "" if absent[0] not in gone else ", which has returned" if len(absent) == 1 else ", which have returned"
    return f"{waiting(rank, standings[rank])} for {named(absent)}{end}"


def waiting(rank: int, standing: Standing) -> str:
    """Say what a rank waits for."""
    if standing.wait is None:
        return f"rank {rank} computes"
    group, number, verb = standing.wait
    return f"rank {rank} waits in {verb} (call {number} of {named(group.ranks)})"


def uneven(standings: Sequence[Standing]) -> str:
    """Return which ranks, all having returned, made unequal numbers of calls in a group, or "" if none did.

    Examples
    --------
    >>> pair = Group((0, 1), 0)
    >>> uneven([Standing({pair: 3}, returned=True), Standing({pair: 2}, returned=True)])
    'rank 0 made 3 calls in the group of ranks 0, 1, but rank 1 made 2'
    """
    for group in {group: None for standing in standings for group in standing.issued}:
        made = [standings[rank].issued.get(group, 0) for rank in group.ranks]
        if len(set(made)) > 1:
            most, least = made.index(max(made)), made.index(min(made))
            return (
                f"rank {group.ranks[most]} made {max(made)} calls in the group of {named(group.ranks)}, but "
                f"rank {group.ranks[least]} made {min(made)}"
            )
    return ""


class Board:
    """A file that the ranks of a world write their standing to, and the caller reads it from.

    Writing costs a copy of a few bytes: a call over sockets takes hundreds of times as long.
    """

    _HEAD = struct.Struct("=qqq")
    _COUNT = struct.Struct("=q")
    _GROUPS, _TEXT, _SPAN = 128, 4096, 65536

    def __init__(self, path: Path, ranks: int) -> None:
        with path.open("r+b" if path.exists() else "w+b") as file:
            if path.stat().st_size < ranks * self._SPAN:
                file.truncate(ranks * self._SPAN)
            self._memory = mmap.mmap(file.fileno(), ranks * self._SPAN)

    def clear(self, rank: int) -> None:
        """Begin anew."""
        at = rank * self._SPAN
        self._memory[at : at + self._TEXT + self._COUNT.size] = bytes(self._TEXT + self._COUNT.size)

    def opened(self, rank: int, groups: Sequence[Group]) -> None:
        """Write down the groups that a rank belongs to, as many as fit."""
        text = b""
        for group in groups[: self._GROUPS]:
            line = f"{group.occurrence} {' '.join(map(str, group.ranks))}\n".encode()
            if len(text) + len(line) > self._SPAN - self._TEXT - self._COUNT.size:
                break
            text += line
        at = rank * self._SPAN + self._TEXT
        self._memory[at + self._COUNT.size : at + self._COUNT.size + len(text)] = text
        self._COUNT.pack_into(self._memory, at, len(text))

    def issued(self, rank: int, index: int, number: int) -> None:
        """Write down how many calls a rank has made in its group of an index."""
        if index < self._GROUPS:
            at = rank * self._SPAN + self._HEAD.size + index * self._COUNT.size
            self._COUNT.pack_into(self._memory, at, number)

    def waits(self, rank: int, index: int, number: int, verb: int) -> None:
        """Write down what a rank waits for: number 0 for nothing."""
        self._HEAD.pack_into(self._memory, rank * self._SPAN, index, number, verb)

    def standing(self, rank: int, returned: bool) -> Standing:
        """Read where a rank stands."""
        at = rank * self._SPAN
        index, number, verb = self._HEAD.unpack_from(self._memory, at)
        (length,) = self._COUNT.unpack_from(self._memory, at + self._TEXT)
        start = at + self._TEXT + self._COUNT.size
        text = self._memory[start : start + length]
        lines = [[int(word) for word in line.split()] for line in text.decode().splitlines()]
        groups = [Group(tuple(ranks), occurrence) for occurrence, *ranks in lines]
        counts = [
            self._COUNT.unpack_from(self._memory, at + self._HEAD.size + place * self._COUNT.size)[0]
            for place in range(len(groups))
        ]
        wait = Wait(groups[index], number, VERBS[verb]) if number and index < len(groups) else None
        return Standing(dict(zip(groups, counts, strict=True)), wait, returned)


@dataclass
class Journal:
    """What one rank has asked for, in each of its groups; on a board too, if others are to see it.

    Examples
    --------
    >>> journal = Journal(rank=0)
    >>> world = journal.opened((0, 1))
    >>> journal.issued(world, "barrier"), journal.standing().issued
    (1, {Group(ranks=(0, 1), occurrence=0): 1})
    >>> journal.unwaited()
    'barrier (call 1 of ranks 0, 1)'
    """

    rank: int
    board: Board | None = None
    counts: dict[Group, int] = field(default_factory=dict)
    pending: dict[tuple[Group, int], str] = field(default_factory=dict)
    wait: Wait | None = None

    def __post_init__(self) -> None:
        self._index: dict[Group, int] = {}
        if self.board is not None:
            self.board.clear(self.rank)

    def opened(self, ranks: tuple[int, ...]) -> Group:
        """Note a new group and return its name."""
        group = Group(ranks, sum(other.ranks == ranks for other in self.counts))
        self._index[group] = len(self._index)
        self.counts[group] = 0
        if self.board is not None:
            self.board.opened(self.rank, list(self.counts))
        return group

    def issued(self, group: Group, verb: str) -> int:
        """Note a call and return its number."""
        number = self.counts[group] = self.counts[group] + 1
        self.pending[group, number] = verb
        if self.board is not None:
            self.board.issued(self.rank, self._index[group], number)
        return number

    @contextmanager
    def waiting(self, group: Group, number: int, verb: str) -> Iterator[None]:
        """Note that the rank waits."""
        self.wait = Wait(group, number, verb)
        if self.board is not None:
            self.board.waits(self.rank, self._index[group], number, VERBS.index(verb) if verb in VERBS else 0)
        try:
            yield
        finally:
            self.wait = None
            if self.board is not None:
                self.board.waits(self.rank, 0, 0, 0)

    def arrived(self, group: Group, number: int) -> None:
        """Note that the result of a call was waited for."""
        self.pending.pop((group, number), None)

    def unwaited(self) -> str:
        """Return the first call whose result nobody waited for, or "" if there is none."""
        for (group, number), verb in self.pending.items():
            return f"{verb} (call {number} of {named(group.ranks)})"
        return ""

    def standing(self, returned: bool = False) -> Standing:
        """Return where the rank stands."""
        wait = self.wait  # before the counts, see `standstill`
        return Standing(dict(self.counts), wait, returned)
