"""The verbs over a process group of `torch.distributed`: gloo on CPUs, NCCL on GPUs.

What a backend cannot do natively is put together from what it can: gloo gathers unequal rows by one broadcast an owner,
into views of the result. Names that changed between versions of torch are looked up once.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel import calls
from muon_lab.parallel.calls import Call, Mismatch
from muon_lab.parallel.collectives import Collectives, Lost
from muon_lab.parallel.journal import Group, Journal

#: Process groups wait so long for each other; who runs a world decides earlier.
PATIENCE = timedelta(days=1)

#: Bytes of a call's text when ranks tell each other what they asked for.
_TEXT = 1024

Works = list[Any]


def renamed(module: object, *names: str) -> Callable[..., Any]:
    """Return the first of several names that a module has: what torch 2.13 calls `*_single` had other names before.

    Raises
    ------
    ValueError
        If it has none of them.

    Examples
    --------
    >>> import math
    >>> renamed(math, "square_root", "sqrt")(9.0)
    3.0
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ValueError(f"this version of {getattr(module, '__name__', module)} has none of {', '.join(names)}")


_gather_into = renamed(dist, "all_gather_single", "all_gather_into_tensor")
_reduce_scatter_into = renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass
class _Under:
    """A call under way."""

    works: Works
    result: Tensor
    journal: Journal
    group: Group
    number: int
    verb: str

    def wait(self) -> Tensor:
        if self.works:
            with self.journal.waiting(self.group, self.number, self.verb), _lost(self.verb, self.group):
                for work in self.works:
                    work.wait()
            self.works = []
        self.journal.arrived(self.group, self.number)
        return self.result


@contextmanager
def _lost(verb: str, group: Group) -> Iterator[None]:
    """Say of errors of the backend that the group is lost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, Lost):
            raise
        raise Lost(f"{verb} of {calls.named(group.ranks)} broke off: {error}") from error


class Grouped(Collectives):
    """One process's end of a process group.

    Parameters
    ----------
    group : ProcessGroup
        Of `torch.distributed`; the caller makes it and ends it.
    journal : Journal, optional
        Where calls are noted.
    checked : bool
        Whether ranks compare what they ask for before they do it: one more exchange of a few bytes a call, after which
        a mismatch is an exception on every rank. Calls then begin together: a rank that makes one waits, before it goes
        on, until the others make it too.
    device : torch.device, optional
        Where tensors live: a GPU with NCCL.
    cache : dict, optional
        Subgroups made by earlier runs of the same world, to be used again.
    """

    def __init__(
        self,
        group: Any,
        journal: Journal | None = None,
        *,
        checked: bool = True,
        device: torch.device | None = None,
        cache: dict[Group, Any] | None = None,
    ) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self.checked = checked
        self._process_group = group
        self._journal = journal or Journal(dist.get_rank())
        self._group = self._journal.opened(self.ranks)
        self._device = device or torch.device("cpu")
        self._cache = {} if cache is None else cache
        self._uneven = dist.get_backend(group) != "gloo"  # what takes lists of unequal tensors

    @property
    def device(self) -> torch.device:
        """Where tensors of this rank live."""
        return self._device

    def start(self, call: Call, x: Shaped[Tensor, "..."]) -> _Under:
        """Begin a call."""
        number = self._journal.issued(self._group, call.verb)
        if self.checked and self.size > 1:
            with self._journal.waiting(self._group, number, call.verb), _lost(call.verb, self._group):
                self._agree(call)
        with _lost(call.verb, self._group):
            works, result = _NATIVE[call.verb](self, call, x.contiguous())
        return _Under(works, result, self._journal, self._group, number, call.verb)

    def subgroup(self, call: Call, places: tuple[int, ...]) -> "Grouped":
        """Form the group of some places, among themselves: the others need not take part."""
        number = self._journal.issued(self._group, "split")
        ranks = tuple(self.ranks[place] for place in places)
        with self._journal.waiting(self._group, number, "split"), _lost("split", self._group):
            if self.size > 1:
                self._agree(call)
            name = Group(ranks, sum(other.ranks == ranks for other in self._journal.counts))
            if name not in self._cache:
                self._cache[name] = dist.new_group(list(ranks), timeout=PATIENCE, use_local_synchronization=True)
        self._journal.arrived(self._group, number)
        return Grouped(self._cache[name], self._journal, checked=self.checked, device=self._device, cache=self._cache)

    def _all_reduce(self, call: Call, x: Tensor) -> tuple[Works, Tensor]:
        result = x.clone()
        return self._unless_empty(result, lambda: dist.all_reduce(result, _OPS[call.op], **self._here)), result

    def _all_gather(self, call: Call, x: Tensor) -> tuple[Works, Tensor]:
        result = x.new_empty((self.size, *call.shape))
        return self._unless_empty(x, lambda: _gather_into(_bytes(result), _bytes(x), **self._here)), result

    def _all_gather_v(self, call: Call, x: Tensor) -> tuple[Works, Tensor]:
        result = x.new_empty((sum(call.rows), *call.shape))
        parts = [_bytes(part) for part in result.split(call.rows)]
        if self._uneven:
            return [dist.all_gather(parts, _bytes(x), **self._here)], result
        parts[self.rank].copy_(_bytes(x))
        owners = [(rank, part) for rank, part in zip(self.ranks, parts, strict=True) if part.numel()]
        return [dist.broadcast(part, rank, **self._here) for rank, part in owners], result

    def _reduce_scatter(self, call: Call, x: Tensor) -> tuple[Works, Tensor]:
        if len(set(call.rows)) == 1:
            result = x.new_empty((call.rows[0], *call.shape))
            run = lambda: _reduce_scatter_into(result, x, _OPS[call.op], **self._here)  # noqa: E731
            return self._unless_empty(x, run), result
        if self._uneven:
            result = x.new_empty((call.rows[self.rank], *call.shape))
            return [dist.reduce_scatter(result, list(x.split(call.rows)), _OPS[call.op], **self._here)], result
        works, whole = self._all_reduce(call, x)  # gloo does no less for equal rows
        return works, whole.split(call.rows)[self.rank]

    def _all_to_all(self, call: Call, x: Tensor) -> tuple[Works, Tensor]:
        row = call.elements * call.itemsize
        result = x.new_empty((sum(call.received), *call.shape))
        splits = [rows * row for rows in call.received], [rows * row for rows in call.rows]
        return [dist.all_to_all_single(_bytes(result), _bytes(x), *splits, **self._here)], result

    def _broadcast(self, call: Call, x: Tensor) -> tuple[Works, Tensor]:
        result = x.clone() if self.rank == call.root else torch.empty_like(x)
        run = lambda: dist.broadcast(_bytes(result), self.ranks[call.root], **self._here)  # noqa: E731
        return self._unless_empty(x, run), result

    def _barrier(self, call: Call, x: Tensor) -> tuple[Works, Tensor]:
        return [dist.barrier(**self._here)], x

    @property
    def _here(self) -> dict[str, Any]:
        return {"group": self._process_group, "async_op": True}

    def _unless_empty(self, x: Tensor, run: Callable[[], Any]) -> Works:
        return [run()] if x.numel() else []

    def _agree(self, call: Call) -> None:
        """Compare what all ranks ask for.

        Raises
        ------
        Mismatch
            On every rank, if they ask for different things.
        """
        digest = hashlib.blake2b(repr(call.agreed).encode(), digest_size=8).digest()
        mine = int.from_bytes(digest, "little", signed=True)
        if len(set(self._told([mine]))) > 1:
            text = str(call).encode()[:_TEXT].ljust(_TEXT)
            told = torch.tensor(self._told(list(text)), dtype=torch.uint8).reshape(self.size, _TEXT)
            words = {rank: bytes(row.tolist()).decode().strip() for rank, row in zip(self.ranks, told, strict=True)}
            raise Mismatch(calls.disagreement(words))
        if call.verb == "all_to_all":
            told = torch.tensor(self._told([*call.rows, *call.received])).reshape(self.size, 2, self.size)
            calls.exchanged(told[:, 0].tolist(), told[:, 1].tolist(), self.ranks)

    def _told(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of all ranks, equally many a rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyones = mine.new_empty(self.size * len(numbers))
        _gather_into(everyones, mine, group=self._process_group)
        return everyones.tolist()


def _bytes(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "bytes"]:
    """Return the memory of a contiguous tensor, as bytes."""
    flat = torch.view_as_real(x) if x.is_complex() else x
    return flat.reshape(-1).view(torch.uint8)


#: How each verb is carried out. A table of the class: one of bound methods would keep a group alive, and its threads.
_NATIVE: Mapping[str, Callable[[Grouped, Call, Tensor], tuple[Works, Tensor]]] = {
    "all_reduce": Grouped._all_reduce,
    "all_gather": Grouped._all_gather,
    "all_gather_v": Grouped._all_gather_v,
    "reduce_scatter": Grouped._reduce_scatter,
    "all_to_all": Grouped._all_to_all,
    "broadcast": Grouped._broadcast,
    "barrier": Grouped._barrier,
}
