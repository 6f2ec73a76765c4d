"""The verbs by which ranks talk, the same over threads, gloo and NCCL.

A `Collectives` is one rank's end of a group. Its verbs take tensors and return at once with something to wait for; the
tensors handed over must stay as they are until then. Results are new, contiguous and detached. What is only moved
travels as bytes, so every dtype can be; what is reduced must be of a dtype that every backend reduces.

Every verb is one `Call` and one tensor, handed to `start`: a backend is a `start`, and so is a ledger.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel import calls
from muon_lab.parallel.calls import Call, Mismatch

__all__ = ["Call", "Collectives", "Lost", "Mismatch", "Pending"]


class Lost(ConnectionError):
    """A group broke off because of what happened on another rank."""


@runtime_checkable
class Pending(Protocol):
    """A call under way."""

    def wait(self) -> Tensor:
        """Return the result once it is there; a second time, the same."""
        ...


@dataclass
class _Then:
    """A call under way whose result is still to be worked on."""

    pending: Pending
    finish: Callable[[Tensor], Tensor]
    result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            self.result = self.finish(self.pending.wait())
        return self.result


class Collectives(ABC):
    """One rank's end of a group of ranks.

    All ranks of a group make the same calls in the same order. A rank that asks for something else than the others is
    found out, and every rank of the group raises `Mismatch`; only an unchecked world of processes leaves that to the
    backend, which aborts, hangs or computes nonsense.

    Attributes
    ----------
    ranks : tuple of int
        The world ranks of the group, in group order.
    rank : int
        The own place in the group.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> worlds.run(lambda world: world.all_reduce(torch.tensor([world.rank + 1.0])).wait().item(), ranks=3)
    [6.0, 6.0, 6.0]
    """

    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        """Where tensors of this rank live."""
        return torch.device("cpu")

    @abstractmethod
    def start(self, call: Call, x: Shaped[Tensor, "..."]) -> Pending:
        """Begin a call with a detached tensor."""

    @abstractmethod
    def subgroup(self, call: Call, places: tuple[int, ...]) -> "Collectives":
        """Form the group of some places, while the other places form theirs."""

    def tagged(self, **tags: object) -> "Collectives":
        """Return these collectives with tags (layer, iteration, phase …) on what is recorded of their calls."""
        return self

    def split(self, groups: Sequence[Sequence[int]]) -> "Collectives":
        """Return the own group of a partition into groups of places; every rank gives the same partition.

        Raises
        ------
        ValueError
            If the groups are no partition of all places, each in ascending order.

        Examples
        --------
        >>> from muon_lab.parallel import worlds
        >>> from muon_lab.parallel.grid import Grid
        >>> worlds.run(lambda world: world.split(Grid(dp=2, tp=2).groups("tp")).ranks, ranks=4)
        [(0, 1), (0, 1), (2, 3), (2, 3)]
        """
        call = calls.split(groups, self.size)
        return self.subgroup(call, next(group for group in call.groups if self.rank in group))

    def all_reduce(self, x: Shaped[Tensor, "..."], op: str = "sum") -> Pending:
        """Combine equal tensors of all ranks: "sum", "mean", "max" or "min", the latter two undefined for NaN.

        Raises
        ------
        ValueError
            For an unknown op, or a dtype that it is not defined on.
        """
        pending = self.start(calls.all_reduce(x.shape, _dtype(x), self.size, op), x.detach())
        return self._mean(pending) if op == "mean" else pending

    def all_gather(self, x: Shaped[Tensor, "..."]) -> Pending:
        """Stack equal tensors of all ranks along a new first axis."""
        return self.start(calls.all_gather(x.shape, _dtype(x), self.size), x.detach())

    def all_gather_v(self, x: Shaped[Tensor, "..."], sizes: Sequence[int]) -> Pending:
        """Join the rows of all ranks; `sizes` says how many each has, and is the same on every rank.

        Raises
        ------
        ValueError
            If there is not one size a rank, or this rank has another number of rows.
        """
        self._one_a_rank("all_gather_v", x, sizes)
        return self.start(calls.all_gather_v(x.shape[1:], _dtype(x), sizes, self.rank, x.shape[0]), x.detach())

    def reduce_scatter(self, x: Shaped[Tensor, "..."], op: str = "sum", sizes: Sequence[int] | None = None) -> Pending:
        """Combine equal tensors of all ranks and return this rank's rows, equally many a rank unless `sizes` says else.

        Raises
        ------
        ValueError
            For an unknown op, a dtype that it is not defined on, or a number of rows that is not that of the sizes.
        """
        if sizes is None:
            rows = x.shape[0] if x.ndim else 0
            if rows % self.size:
                raise ValueError(f"reduce_scatter of {rows} rows over {self.size} ranks needs sizes, one a rank")
            sizes = (rows // self.size,) * self.size
        self._one_a_rank("reduce_scatter", x, sizes)
        pending = self.start(calls.reduce_scatter(x.shape[1:], _dtype(x), sizes, x.shape[0], op), x.detach())
        return self._mean(pending) if op == "mean" else pending

    def all_to_all(self, x: Shaped[Tensor, "..."], sent: Sequence[int], received: Sequence[int]) -> Pending:
        """Send each rank its rows, which lie in rank order, and join the rows that come from each rank.

        Raises
        ------
        ValueError
            If there is not one count a rank, or this rank has another number of rows than it sends.
        """
        self._one_a_rank("all_to_all", x, sent)
        return self.start(calls.all_to_all(x.shape[1:], _dtype(x), sent, received, x.shape[0]), x.detach())

    def broadcast(self, x: Shaped[Tensor, "..."], root: int = 0) -> Pending:
        """Return the tensor of one place of the group; the others hand over one of the same shape and dtype.

        Raises
        ------
        ValueError
            If there is no such place.
        """
        return self.start(calls.broadcast(x.shape, _dtype(x), self.size, root), x.detach())

    def barrier(self) -> Pending:
        """Wait for each other."""
        return self.start(calls.barrier(self.size), torch.empty(0, device=self.device))

    def _mean(self, pending: Pending) -> Pending:
        return _Then(pending, lambda total: total.div_(self.size))

    def _one_a_rank(self, verb: str, x: Tensor, counts: Sequence[int]) -> None:
        if x.ndim == 0:
            raise ValueError(f"{verb} needs a tensor with at least 1 axis, whose rows it moves, not a scalar")
        if len(counts) != self.size:
            raise ValueError(f"{verb} among {self.size} ranks needs one number of rows a rank, not {tuple(counts)}")


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
