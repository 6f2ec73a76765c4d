"""Ranks as threads of one process: each brings its tensor, the last to arrive does the work of all."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel import calls
from muon_lab.parallel.calls import Call, Mismatch
from muon_lab.parallel.collectives import Collectives, Lost
from muon_lab.parallel.journal import Group, Journal, standstill
from muon_lab.parallel.orders import reduce

__all__ = ["Rendezvous", "Threaded", "alone"]


@dataclass
class _Round:
    """One call of a group: what its members brought, and what came of it."""

    brought: dict[int, tuple[Call, Tensor]] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    results: Sequence[Tensor] = ()
    error: Exception | None = None

    def settle(self, order: str, ranks: Sequence[int]) -> None:
        """Compute the results of all, or the error of all."""
        try:
            self.results = exchange([self.brought[place] for place in range(len(ranks))], order, ranks)
        except Exception as error:
            self.error = error
        self.brought.clear()
        self.done.set()


class Rendezvous:
    """Where the threads of a world meet.

    Parameters
    ----------
    ranks : int
        Number of threads.
    order : str
        The order of sums (`orders.ORDERS`).
    """

    def __init__(self, ranks: int, order: str = "ring") -> None:
        self.order = order
        self.journals = [Journal(rank) for rank in range(ranks)]
        self.stuck: dict[int, str] = {}
        self._broken: BaseException | None = None
        self._returned = [False] * ranks
        self._lock = threading.Lock()
        self._rounds: dict[tuple[Group, int], _Round] = {}

    def world(self, rank: int) -> "Threaded":
        """Return the end of the whole world that belongs to a rank."""
        return Threaded(self, self.journals[rank], tuple(range(len(self.journals))))

    def arrive(self, group: Group, number: int, place: int, call: Call, x: Tensor) -> _Round:
        """Bring a tensor to a call; the last to come does the work."""
        with self._lock:
            if self._broken is not None:
                raise Lost("the world has broken off") from self._broken
            round_ = self._rounds.setdefault((group, number), _Round())
            round_.brought[place] = (call, x)
            complete = len(round_.brought) == len(group.ranks)
            if complete:
                del self._rounds[group, number]
        if complete:
            round_.settle(self.order, group.ranks)
        return round_

    def look(self) -> None:
        """Break off if every rank has returned or waits, and some can never go on."""
        if all(journal.wait or gone for journal, gone in zip(self.journals, self._returned, strict=True)):
            with self._lock:
                pairs = zip(self.journals, self._returned, strict=True)
                stuck = standstill([journal.standing(gone) for journal, gone in pairs])
            if stuck:
                self.stuck = self.stuck or stuck
                self.break_off(RuntimeError("; ".join(stuck.values())))

    def returned(self, rank: int) -> None:
        """Note that a rank makes no more calls."""
        self._returned[rank] = True
        self.look()

    def break_off(self, error: BaseException) -> None:
        """End all waiting, now and from now on."""
        with self._lock:
            self._broken = self._broken or error
            for round_ in self._rounds.values():
                round_.error = Lost("the world has broken off")
                round_.done.set()
            self._rounds.clear()


@dataclass
class _Awaited:
    """One rank's share in a round."""

    rendezvous: Rendezvous
    journal: Journal
    group: Group
    number: int
    verb: str
    place: int
    round_: _Round

    def wait(self) -> Tensor:
        if not self.round_.done.is_set():
            with self.journal.waiting(self.group, self.number, self.verb):
                self.rendezvous.look()
                self.round_.done.wait()
        self.journal.arrived(self.group, self.number)
        if self.round_.error is not None:
            raise type(self.round_.error)(str(self.round_.error)) from self.round_.error
        return self.round_.results[self.place]


class Threaded(Collectives):
    """One thread's end of a group of threads."""

    def __init__(self, rendezvous: Rendezvous, journal: Journal, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.rank = ranks.index(journal.rank)
        self._rendezvous = rendezvous
        self._journal = journal
        self._group = journal.opened(ranks)

    def start(self, call: Call, x: Shaped[Tensor, "..."]) -> _Awaited:
        """Begin a call: the last rank to make it does the work of all."""
        number = self._journal.issued(self._group, call.verb)
        round_ = self._rendezvous.arrive(self._group, number, self.rank, call, x)
        return _Awaited(self._rendezvous, self._journal, self._group, number, call.verb, self.rank, round_)

    def subgroup(self, call: Call, places: tuple[int, ...]) -> "Threaded":
        """Form the group of some places, once all ranks have named the same partition."""
        self.start(call, torch.empty(0)).wait()
        return Threaded(self._rendezvous, self._journal, tuple(self.ranks[place] for place in places))


def alone() -> Threaded:
    """Return the collectives of a world of one rank, where nobody else has to come.

    Examples
    --------
    >>> alone().all_gather(torch.ones(2)).wait()
    tensor([[1., 1.]])
    """
    return Rendezvous(1).world(0)


def exchange(brought: Sequence[tuple[Call, Tensor]], order: str, ranks: Sequence[int]) -> list[Tensor]:
    """Return what each rank gets for what all have brought: the meaning of every verb.

    Raises
    ------
    Mismatch
        If they have not made the same call.
    """
    made, tensors = [call for call, _ in brought], [x for _, x in brought]
    if len({call.agreed for call in made}) > 1:
        raise Mismatch(calls.disagreement({rank: str(call) for rank, call in zip(ranks, made, strict=True)}))
    match made[0]:
        case Call("all_reduce", op=op):
            return _copies(reduce(tensors, op, order), len(ranks))
        case Call("reduce_scatter", op=op, rows=rows):
            return [part.clone() for part in reduce(tensors, op, order).split(rows)]
        case Call("all_gather"):
            return _copies(torch.stack(tensors), len(ranks))
        case Call("all_gather_v"):
            return _copies(torch.cat(tensors), len(ranks))
        case Call("broadcast", root=root):
            return _copies(tensors[root].clone(memory_format=torch.contiguous_format), len(ranks))
        case Call("all_to_all"):
            calls.exchanged([call.rows for call in made], [call.received for call in made], ranks)
            pieces = [x.split(call.rows) for x, call in zip(tensors, made, strict=True)]
            return [torch.cat([piece[place] for piece in pieces]) for place in range(len(ranks))]
        case _:
            return tensors


def _copies(result: Tensor, count: int) -> list[Tensor]:
    return [result, *(result.clone() for _ in range(count - 1))]
