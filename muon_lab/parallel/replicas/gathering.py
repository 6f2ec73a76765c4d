"""New weights on their way from their owners: bucket by bucket, waited for at once or where they are first read."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from muon_lab.parallel.collectives import Collectives, Pending
from muon_lab.parallel.replicas import packing
from muon_lab.parallel.replicas.buckets import Bucket

#: How owners' shares come together: as long as they are, or padded to the longest.
GATHERS = ("exact", "padded")


@dataclass(frozen=True)
class _Coming:
    """A bucket whose new weights are under way."""

    bucket: Bucket
    pending: Pending


class Gather:
    """The gather of the new weights of one step after the other.

    Parameters
    ----------
    group : Collectives
        The ranks.
    parameters : sequence of tensor
        All parameters, by number.
    buckets : sequence of Bucket
        What travels together, begun in this order.
    padded : bool
        Whether shares are of one length.
    """

    def __init__(
        self, group: Collectives, parameters: Sequence[Tensor], buckets: Sequence[Bucket], padded: bool
    ) -> None:
        self._group, self._parameters = group.tagged(phase="parameters"), parameters
        self._buckets, self._padded = buckets, padded
        self._coming: dict[int, _Coming] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, updated: Collection[int]) -> None:
        """Send what has been updated, to be waited for."""
        for bucket in (whole.only(updated) for whole in self._buckets):
            if bucket.members:
                coming = _Coming(bucket, self._sent(bucket))
                self._coming |= dict.fromkeys(bucket.members, coming)

    @torch.no_grad()
    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Write the new weights of some parameters, and of those in a bucket with them, or of all."""
        for number in list(self._coming) if numbers is None else numbers:
            if (coming := self._coming.get(number)) is not None:
                self._write(coming)

    def defer_to(self, model: nn.Module) -> None:
        """Wait for weights where the forward of a model first reads them.

        A module that has parameters of its own waits for them and for those of the modules inside it, which it may read
        without calling them, as `torch.nn.MultiheadAttention` does. The whole model waits for all of them when it is
        evaluated, or asked for its `state_dict`.
        """
        place = {id(p): number for number, p in enumerate(self._parameters)}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                numbers = [place[id(p)] for p in module.parameters() if id(p) in place]
                self._hooks.append(module.register_forward_pre_hook(self._waiter(numbers)))
        self._hooks.append(model.register_forward_pre_hook(self._when_evaluated))
        self._hooks.append(model.register_state_dict_pre_hook(lambda *_: self.wait()))

    def close(self) -> None:
        """Wait for everything, and leave the model alone from now on."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _waiter(self, numbers: Sequence[int]) -> "_Waiter":
        return _Waiter(self, numbers)

    def _when_evaluated(self, module: nn.Module, _: object) -> None:
        if not module.training:
            self.wait()

    def _sent(self, bucket: Bucket) -> Pending:
        share = packing.share(bucket, self._group.rank, self._parameters, self._parameters[0].device, self._padded)
        return self._group.all_gather(share) if self._padded else self._group.all_gather_v(share, bucket.shares)

    def _write(self, coming: _Coming) -> None:
        own = set(coming.bucket.of(self._group.rank))
        for number, flat in packing.parts(coming.bucket, coming.pending.wait()).items():
            if number not in own:
                self._parameters[number].copy_(flat.view(self._parameters[number].shape))
        for number in coming.bucket.members:
            self._coming.pop(number, None)


@dataclass(frozen=True)
class _Waiter:
    """A forward pre-hook: it returns nothing, since what it returned would stand for the input."""

    gather: Gather
    numbers: Sequence[int]

    def __call__(self, module: nn.Module, arguments: object) -> None:
        self.gather.wait(self.numbers)
