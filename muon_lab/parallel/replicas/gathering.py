"""New weights on their way from their owners: bucket by bucket, waited for at once or where they are first read."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from muon_lab.parallel.collectives import Collectives, Pending
from muon_lab.parallel.replicas import packing
from muon_lab.parallel.replicas.buckets import Bucket


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
    parameters, names : sequences
        All parameters, by number.
    buckets : sequence of Bucket
        What travels together, begun in this order.
    padded : bool
        Whether shares are of one length.
    """

    def __init__(
        self,
        group: Collectives,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        buckets: Sequence[Bucket],
        padded: bool,
    ) -> None:
        self._group, self._parameters, self._names = group.tagged(phase="parameters"), parameters, names
        self._buckets, self._padded = buckets, padded
        self._coming: dict[int, _Coming] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._at_once: Collection[int] = range(len(parameters))

    def begin(self, updated: Collection[int]) -> None:
        """Send what has been updated, and wait for what no forward is known to read."""
        for bucket in (whole.only(updated) for whole in self._buckets):
            if bucket.members:
                coming = _Coming(bucket, self._sent(bucket))
                self._coming |= dict.fromkeys(bucket.members, coming)
        self.wait(self._at_once)

    @torch.no_grad()
    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Write the new weights of some parameters, and of those in a bucket with them, or of all."""
        for number in list(self._coming) if numbers is None else numbers:
            if (coming := self._coming.get(number)) is not None:
                self._write(coming)

    def defer_to(self, model: nn.Module) -> None:
        """Wait for weights where the forward of a model first reads them.

        A module that has parameters of its own waits for them and for those of the modules inside it, which it may read
        without calling them, as `torch.nn.MultiheadAttention` does. Modules that have none wait for those inside them
        where no gradients are taken: in evaluation and under `torch.no_grad`. Whoever saves the state of a module, or
        loads one, gets or replaces new weights. Parameters that are not the model's are waited for at once.

        What is left is a module without parameters that reads those of another one before that is called, in training.
        Its backward is refused, on all ranks alike: the weights that it read were old.
        """
        place = {id(p): number for number, p in enumerate(self._parameters)}
        for module in model.modules():
            numbers = [place[id(p)] for p in module.parameters() if id(p) in place]
            own = any(True for _ in module.parameters(recurse=False))
            self._hooks += [
                module.register_forward_pre_hook(_Waiter(self, numbers, own)),
                module.register_state_dict_pre_hook(lambda *_: self.wait()),
                module.register_load_state_dict_pre_hook(lambda *_: self.wait()),
            ]
        read = {place[id(p)] for p in model.parameters() if id(p) in place}
        self._at_once = [number for number in range(len(self._parameters)) if number not in read]
        self._hooks += [
            p.register_post_accumulate_grad_hook(lambda _, number=number: self._refuse_old(number))
            for number, p in enumerate(self._parameters)
            if number in read and p.requires_grad
        ]

    def close(self) -> None:
        """Wait for everything, and leave the model alone from now on."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._at_once = range(len(self._parameters))

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(
            "a model whose weights are gathered in its forward was copied or pickled, needed close() before"
        )

    def _refuse_old(self, number: int) -> None:
        if number in self._coming:
            raise ValueError(
                f"{self._names[number]} was read before its new weights were there, needed wait() before it is read "
                "outside of the forward of a module that has it"
            )

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
    own: bool

    def __call__(self, module: nn.Module, arguments: object) -> None:
        if self.own or not (module.training and torch.is_grad_enabled()):
            self.gather.wait(self.numbers)
