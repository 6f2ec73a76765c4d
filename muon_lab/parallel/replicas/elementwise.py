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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.replicas import agreement, buckets, checkpoints, packing
from muon_lab.parallel.replicas.agreement import Report
from muon_lab.parallel.replicas.buckets import Piece
from muon_lab.parallel.replicas.wrapping import Wrapper, dense

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


class ElementwiseOptimizer(Wrapper):
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

    def __init__(self, optimizer: torch.optim.Optimizer, group: Collectives, *, clip: float | None = None) -> None:
        if not isinstance(optimizer, Wrapper) and not is_elementwise(optimizer):
            raise ValueError(
                f"ElementwiseOptimizer cuts parameters into slices and was given {type(optimizer).__name__}, needed an "
                "optimizer that treats every entry by itself: LayerwiseOptimizer takes those of whole matrices"
            )
        super().__init__(optimizer, group, clip)
        self._require_same()
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

    def _take(self) -> None:
        means = self._means()
        report, present = self._agreed(means)
        if report.taken:
            factor = agreement.clipping(report.norm, self.clip)
            for number, p in self._slices.items():
                p.copy_(self._cut(self.parameters[number], self._places[number]))
                G = means[number] if number in present else None
                p.grad = None if G is None else G if factor == 1 else G * factor
            with self._slices_in_groups():
                agreement.all_or_none(
                    self._tagged("agreement"), self.optimizer.step, list(self._slices.values()), [self.state]
                )
            self._gather()
            for p in self._slices.values():
                p.grad = None
        self.report = report

    def _means(self) -> dict[int, Tensor]:
        """Return the mean gradients of the own slices, by parameter."""
        pending = []
        for flat in self.flats:
            gradients = [dense(self.parameters[number].grad) for number in flat.members]
            zeros = [self.parameters[number] for number in flat.members]
            given = [torch.zeros_like(p) if G is None else G for p, G in zip(zeros, gradients, strict=True)]
            buffer = packing.flattened(given, flat.dtype, self.device, flat.shard * flat.ranks)
            pending.append(self._tagged("gradients").reduce_scatter(buffer, "mean"))
        found: dict[int, Tensor] = {}
        for flat, call in zip(self.flats, pending, strict=True):
            pieces = flat.pieces(self.group.rank)
            lengths = [piece.end - piece.begin for piece in pieces]
            own = call.wait()[: sum(lengths)]
            split = own.split(lengths) if pieces else ()
            found |= dict(zip((piece.member for piece in pieces), split, strict=True))
        return found

    def _agreed(self, means: Mapping[int, Tensor]) -> tuple[Report, set[int]]:
        """Return what all ranks are about to do, and the parameters that any rank has a gradient of.

        The norm is put together from those of the ranks, in their order: the same on all, and the same as in one
        process up to rounding in float64.
        """
        count, bad, slots = len(self.parameters), [0.0] * len(self.parameters), [0.0] * self.group.size
        norms = dict(zip(means, agreement.norms(list(means.values())), strict=True))
        for number, norm in norms.items():
            bad[number] = float(math.isnan(norm))
        slots[self.group.rank] = math.hypot(*(norm for norm in norms.values() if not math.isnan(norm)))
        here = [float(p.grad is not None) for p in self.parameters]
        mine = self._settings()
        row = [*here, *bad, *slots, mine, mine**2]
        ((*summed, sets, squares),) = agreement.tally(self._tagged("agreement"), [row]).tolist()
        self._require_settings(sets, squares)
        present = {number for number, ranks in enumerate(summed[:count]) if ranks}
        nonfinite = self._named(number for number, flag in enumerate(summed[count : 2 * count]) if flag)
        norm = math.nan if nonfinite else math.hypot(*summed[2 * count :])
        return Report(() if nonfinite else self._named(sorted(present)), nonfinite, norm), present

    def _gather(self) -> None:
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
    def _slices_in_groups(self) -> Iterator[None]:
        """Show the wrapped optimizer slices where it has parameters."""
        before = [each["params"] for each in self.param_groups]
        try:
            for each in self.param_groups:
                numbers = [self._number[id(p)] for p in each["params"]]
                each["params"] = [self._slices[number] for number in numbers if number in self._slices]
            yield
        finally:
            for each, parameters in zip(self.param_groups, before, strict=True):
                each["params"] = parameters

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
