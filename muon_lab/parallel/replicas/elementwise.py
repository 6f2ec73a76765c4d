r"""Data parallelism for optimizers that treat every entry by itself: each rank steps a slice of one flat buffer.

All parameters of a dtype lie end to end in a buffer of N entries, cut into p equal shards wherever that falls (ZeRO,
stage 1). Gradients come by `reduce_scatter`, each rank steps its shard, weights go by `all_gather`: with g and w bytes
an entry a rank sends

.. math:: \frac{p - 1}{p} N (g + w)

by ring algorithms, and holds 1/p of the state, however large single parameters are. What this cannot do is step a
matrix: the shard of a rank begins and ends inside one. To serve Muon, momentum would have to be made whole before it is
orthogonalized; `traffic.elementwise` with `momentum` says what that sends.

A parameter without gradient on any rank is left alone, counters included; the state of a parameter lies in pieces on
the ranks that its entries lie on, each of which counts its steps.

References
----------
S. Rajbhandari et al., *ZeRO: Memory optimizations toward training trillion parameter models* (2020), section 5.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas import agreement, buckets, checkpoints, packing
from muon_lab.parallel.replicas.agreement import Report
from muon_lab.parallel.replicas.buckets import Piece
from muon_lab.parallel.replicas.reducing import check_sums, widened
from muon_lab.parallel.replicas.wrapping import Part, Wrapper, dense

#: Optimizers of torch that treat every entry by itself, given those of its state and numbers that all entries share.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer treats every entry by itself: it is one of `ELEMENTWISE`, or says so.

    An optimizer of yours says so by an attribute ``elementwise = True``. A subclass of one in the table has to say it
    too: who knows what it does.

    Examples
    --------
    >>> W = torch.nn.Parameter(torch.ones(2, 2))
    >>> is_elementwise(torch.optim.AdamW([W])), is_elementwise(torch.optim.Muon([W]))
    (True, False)
    """
    said = getattr(optimizer, "elementwise", None)
    return said if isinstance(said, bool) else type(optimizer) in ELEMENTWISE


class ElementwiseOptimizer(Part):
    """An optimizer of which each rank has the state of an equal slice of all parameters.

    Parameters
    ----------
    optimizer : Optimizer
        Of all parameters, the same on every rank, which treats every entry by itself. Its groups are those of this
        optimizer, so schedulers reach them.
    group : Collectives
        The ranks, each with equal weights and gradients of its own batch.
    clip : float, optional
        The largest norm of the whole gradient.
    also, whole
        As for `LayerwiseOptimizer`: ranks that hold other parts of the same parameters, and what they have whole.
    sums : torch.dtype, optional
        The dtype in which gradients travel and are summed where theirs is narrower; their own by default.

    Attributes
    ----------
    report : Report
        What the last step did, the same on every rank.

    Raises
    ------
    ValueError
        For an optimizer that needs whole parameters or is wrapped already; and on all ranks, if their options,
        parameters or weights differ.

    Notes
    -----
    The entries of a shard are computed as those of a whole parameter are, but may meet another path of the same vector
    loop, where products are fused with sums or are not: weights are those of one process up to a rounding.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> def program(world):
    ...     W = torch.nn.Parameter(torch.zeros(5))
    ...     optimizer = ElementwiseOptimizer(torch.optim.SGD([W], lr=1.0), world)
    ...     W.grad = torch.full((5,), float(world.rank))
    ...     optimizer.step()
    ...     return W.tolist()
    >>> worlds.run(program, ranks=2)[1]
    [-0.5, -0.5, -0.5, -0.5, -0.5]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Collectives,
        *,
        clip: float | None = None,
        also: Collectives | None = None,
        whole: Collection[str] = (),
        sums: torch.dtype | None = None,
    ) -> None:
        if not isinstance(optimizer, Wrapper) and not is_elementwise(optimizer):
            raise ValueError(
                f"ElementwiseOptimizer cuts parameters into slices and was given {type(optimizer).__name__}, needed an "
                "optimizer that treats every entry by itself: LayerwiseOptimizer takes those of whole matrices"
            )
        check_sums(sums)
        super().__init__(optimizer, group, clip, also, whole)
        self._sums = sums
        self._require_same(sums=sums)
        self.flats = buckets.flats([p.numel() for p in self.parameters], self.dtypes, group.size)
        self._places = {piece.member: piece for flat in self.flats for piece in flat.pieces(group.rank)}
        self._slices = {number: self._slice(piece) for number, piece in self._places.items()}
        self._cut_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on every rank, as the wrapped optimizer alone would have it; all ranks take part."""
        held = {number: self.state[p] for number, p in self._slices.items() if p in self.state}
        parts = checkpoints.everyones(self._tagged("checkpoint"), held)
        with self._without_state():
            packed: dict[str, Any] = self.optimizer.state_dict()
        numbers = sorted({number for part in parts for number in part})
        state = {n: _joined([part[n] for part in parts if n in part], self.parameters[n]) for n in numbers}
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, saved on any number of ranks or by the wrapped optimizer alone."""
        held = dict(self.state)
        self.state.clear()
        try:
            self.optimizer.load_state_dict(dict(state_dict))
        except Exception:
            self.state.update(held)
            raise
        self._cut_state()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _means(self) -> dict[int, Tensor]:
        pending = []
        for flat in self.flats:
            gradients = [dense(self.parameters[number].grad) for number in flat.members]
            zeros = [self.parameters[number] for number in flat.members]
            given = [torch.zeros_like(p) if G is None else G for p, G in zip(zeros, gradients, strict=True)]
            buffer = packing.flattened(given, flat.dtype, self.device, flat.shard * flat.ranks)
            pending.append(self._tagged("gradients").reduce_scatter(widened(buffer, self._sums), "mean"))
        found: dict[int, Tensor] = {}
        for flat, call in zip(self.flats, pending, strict=True):
            pieces = flat.pieces(self.group.rank)
            lengths = [piece.end - piece.begin for piece in pieces]
            own = call.wait()[: sum(lengths)]
            split = own.split(lengths) if pieces else ()
            found |= dict(zip((piece.member for piece in pieces), split, strict=True))
        return found

    def _agreed(self, means: Mapping[int, Tensor]) -> tuple[Report, set[int]]:
        """Return what is agreed on.

        The norm is put together from those of the ranks, in their order: the same on all, and the same as in one
        process up to rounding in float64.
        """
        count, bad, slots = len(self.parameters), [0.0] * len(self.parameters), [0.0] * self.group.size
        norms = dict(zip(means, agreement.norms(list(means.values())), strict=True))
        for number, norm in norms.items():
            bad[number] = float(math.isnan(norm))
        counted = [norm for number, norm in norms.items() if self._counts(number) and not math.isnan(norm)]
        slots[self.group.rank] = math.hypot(*counted)
        here = [float(p.grad is not None) for p in self.parameters]
        mine = self._settings()
        row = [*here, *bad, *slots, mine, mine**2]
        ((*summed, sets, squares),) = agreement.tally(self._tagged("agreement"), [row]).tolist()
        norm = math.hypot(*summed[2 * count :])
        report, present, _ = self._decided(summed[:count], summed[count : 2 * count], norm, (sets, squares))
        return report, present

    @contextmanager
    def _shown(self, means: Mapping[int, Tensor], present: set[int], factor: float) -> Iterator[None]:
        """Show the wrapped optimizer slices where it has parameters, with mean gradients of what is stepped."""
        for number, p in self._slices.items():
            p.copy_(self._cut(self.parameters[number], self._places[number]))
            G = means[number] if number in present else None
            p.grad = None if G is None else (G if factor == 1 else G * factor).to(p.dtype)
        before = [(each, each["params"]) for each in self.param_groups]
        try:
            for each, parameters in before:
                numbers = [self._number[id(p)] for p in parameters]
                each["params"] = [self._slices[number] for number in numbers if number in self._slices]
            yield
        finally:
            for each, parameters in before:
                each["params"] = parameters
            for p in self._slices.values():
                p.grad = None

    def _advance(self, present: set[int]) -> None:
        self.optimizer.step()

    def _changing(self, present: set[int]) -> list[Tensor]:
        return list(self._slices.values())

    def _states(self) -> list[dict[Any, Any]]:
        return [self.state]

    def _send(self, present: set[int]) -> None:
        """Send the new weights of the own shards to all."""
        pending = []
        for flat in self.flats:
            own = [self._slices[piece.member] for piece in flat.pieces(self.group.rank)]
            shard = packing.flattened(own, flat.dtype, self.device, flat.shard)
            pending.append(self._tagged("parameters").all_gather(shard))
        for flat, call in zip(self.flats, pending, strict=True):
            new = call.wait().flatten()[: sum(flat.sizes)].split(flat.sizes)
            for number, weights in zip(flat.members, new, strict=True):
                self.parameters[number].copy_(weights.view(self.parameters[number].shape))

    # --- slices -------------------------------------------------------------------------------------------------------

    def _slice(self, piece: Piece) -> torch.nn.Parameter:
        return torch.nn.Parameter(self._cut(self.parameters[piece.member].detach(), piece).clone())

    @staticmethod
    def _cut(x: Tensor, piece: Piece) -> Tensor:
        return x.reshape(-1)[piece.begin : piece.end]

    @contextmanager
    def _without_state(self) -> Iterator[None]:
        """Have the wrapped optimizer know of no state: it does not know what slices are."""
        held = dict(self.state)
        self.state.clear()
        try:
            yield
        finally:
            self.state.update(held)

    def _cut_state(self) -> None:
        """Keep the own part of a state that the wrapped optimizer has of whole parameters."""
        for number, p in enumerate(self.parameters):
            entries = self.state.pop(p, None)
            if entries and number in self._slices:
                piece = self._places[number]
                self.state[self._slices[number]] = {
                    name: self._cut(value, piece).clone() if _has_shape(value, p) else deepcopy(value)
                    for name, value in entries.items()
                }


def _has_shape(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _joined(pieces: Sequence[Mapping[str, Any]], parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter from those of its slices, in order: what is no number a slice is one for all."""
    return {
        name: torch.cat([piece[name] for piece in pieces]).view(parameter.shape)
        if isinstance(value, Tensor) and value.ndim == 1
        else value
        for name, value in pieces[0].items()
    }
