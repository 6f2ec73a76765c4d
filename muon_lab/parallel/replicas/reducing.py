"""Gradients on their way to their mean: bucket by bucket, in one order on all ranks, during backward or after it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel.collectives import Collectives, Pending
from muon_lab.parallel.replicas import packing
from muon_lab.parallel.replicas.buckets import Bucket
from muon_lab.parallel.replicas.wrapping import dense

#: To whom gradients go: all to all ranks, each to its owner, or nowhere since they are means already.
REDUCTIONS = ("all_reduce", "reduce_scatter", "none")


def check_sums(sums: torch.dtype | None) -> None:
    """Raise ``ValueError`` unless gradients can be summed in a dtype, or None for their own."""
    if sums not in (None, torch.float32, torch.float64):
        raise ValueError(f"sums is {sums!r}, needed torch.float32, torch.float64 or None")


def widened(flat: Shaped[Tensor, " elements"], sums: torch.dtype | None) -> Shaped[Tensor, " elements"]:
    """Return gradients in the dtype in which they are summed, if theirs is narrower."""
    return flat if sums is None else flat.to(torch.promote_types(flat.dtype, sums))


class Reduction:
    """The reduction of the gradients of one step after the other.

    Buckets are begun in reverse order, as backward fills them. A rank begins one when it has all gradients of it and
    has begun those before; whatever is left is begun by `means`, zeros standing for gradients that are not there. So
    all ranks make the same calls in the same order, whatever they have gradients of, and whenever.

    Parameters
    ----------
    group : Collectives
        The ranks.
    parameters, names : sequences
        All parameters, by number.
    buckets : sequence of Bucket
        What travels together.
    how : str
        One of `REDUCTIONS`.
    padded : bool
        Whether the shares of `reduce_scatter` are of one length.
    sums : torch.dtype, optional
        The dtype in which gradients travel and are summed, where theirs is narrower.
    """

    def __init__(
        self,
        group: Collectives,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        buckets: Sequence[Bucket],
        how: str,
        padded: bool,
        sums: torch.dtype | None = None,
    ) -> None:
        self._group = group.tagged(phase="gradients")
        self._parameters, self._names = parameters, names
        self._buckets, self._how = [*reversed(buckets)], how
        self._padded, self._sums = padded and how == "reduce_scatter", sums
        self._begun: list[Pending] = []
        self._arrived: set[int] = set()
        self._paused = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def during_backward(self) -> None:
        """Begin each bucket as soon as backward has filled it."""
        for number, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrive(number))
                self._hooks.append(hook)

    def close(self) -> None:
        """Leave backward alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up, and begin nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def means(self) -> dict[int, Tensor]:
        """Return the mean gradients that this rank has a use for, flat, by number: of all parameters, or of its own."""
        if self._how == "none":
            given = ((number, dense(p.grad)) for number, p in enumerate(self._parameters))
            return {number: G.detach() for number, G in given if G is not None}
        found: dict[int, Tensor] = {}
        while len(self._begun) < len(self._buckets):
            self._begin()
        place = self._group.rank if self._how == "reduce_scatter" else None
        for bucket, pending in zip(self._buckets, self._begun, strict=True):
            found |= packing.parts(bucket, pending.wait(), place)
        self._begun, self._arrived = [], set()
        return found

    def drop(self) -> None:
        """Forget the gradients of a backward, if it has filled any bucket: on every rank, or on none."""
        if self._arrived:
            while len(self._begun) < len(self._buckets):
                self._begin(empty=True)
            for pending in self._begun:
                pending.wait()
        self._begun, self._arrived = [], set()

    def _arrive(self, number: int) -> None:
        if self._paused:
            return
        if number in self._arrived:
            raise ValueError(
                f"{self._names[number]} has had its gradient reduced already: needed backward inside accumulate() for "
                "all micro-batches but the last, or step or zero_grad in between"
            )
        self._arrived.add(number)
        while len(self._begun) < len(self._buckets) and self._filled(self._next):
            self._begin()

    @property
    def _next(self) -> Bucket:
        return self._buckets[len(self._begun)]

    def _filled(self, bucket: Bucket) -> bool:
        """Say whether all gradients of a bucket are there; none come for parameters that are frozen."""
        return all(number in self._arrived or not self._parameters[number].requires_grad for number in bucket.members)

    @torch.no_grad()
    def _begin(self, empty: bool = False) -> None:
        """Hand a bucket over, or zeros in its place."""
        bucket = self._next
        flat = packing.whole(bucket, self._gradients(bucket, empty), self._parameters[0].device, self._padded)
        flat = widened(flat, self._sums)
        if self._how == "all_reduce":
            self._begun.append(self._group.all_reduce(flat, "mean"))
        else:
            sizes = (bucket.width,) * bucket.ranks if self._padded else bucket.shares
            self._begun.append(self._group.reduce_scatter(flat, "mean", sizes))

    def _gradients(self, bucket: Bucket, empty: bool) -> Mapping[int, Tensor]:
        found = {}
        for number in bucket.members:
            parameter = self._parameters[number]
            gradient = None if empty else dense(parameter.grad)
            found[number] = torch.zeros_like(parameter) if gradient is None else gradient
        return found
