r"""SOAP and REKLS on a matrix that is cut over ranks: state in parts, one gather a step, the bits of one rank.

A rule with Kronecker factors needs the whole gradient: every entry of :math:`G G^T` and :math:`G^T G` is made of all of
it, and so is the basis. What each rank can do is keep a part. Of an m×n matrix a rank keeps, of p,

====================  ==========================================  =====================================
entry                 part                                        numbers
====================  ==========================================  =====================================
M, V                  that of the weight                          mn/p each
L, Q_L                rows, as evenly as it goes                  m²/p each
R, Q_R                rows, as evenly as it goes                  n²/p each
values, counts        the whole, on every rank                    m + n + 4
====================  ==========================================  =====================================

A step gathers the gradient and whatever is kept in parts, in one call; every rank then takes the step of the whole
matrix, and keeps its parts of the result. The bits are those of one rank, whose flops every rank has. Which entries are
kept in parts trades memory for bytes:

=========================  =============================================  ===========================================
kept in parts              bytes sent a step, rings, b an entry           numbers kept on a rank
=========================  =============================================  ===========================================
all                        :math:`(p-1)/p\,(3mn + 2m^2 + 2n^2)\,b`        :math:`(2mn + 2m^2 + 2n^2)/p`
L, R                       :math:`(p-1)/p\,(mn + m^2 + n^2)\,b`           :math:`2mn + m^2 + n^2 + (m^2 + n^2)/p`
none                       :math:`(p-1)/p\,mn\,b`                         :math:`2mn + 2m^2 + 2n^2`
=========================  =============================================  ===========================================

Decay of the form "l2" gathers the weight too, :math:`(p-1)/p\,mn\,b` more. An optimizer of shards that leaves out a
step for what its own rank alone has seen would leave the others waiting: `agreed` has all ranks leave it out.

References
----------
NVIDIA-NeMo/Emerging-Optimizers, commit fd77292 (August 2026), ``TpRekls``: L and R in parts, moments whole, and no
bases kept, so that it decomposes each factor twice a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.grid import Placement, even
from muon_lab.parallel.layouts import resharding
from muon_lab.parallel.volume import SHARDED

#: Entries of the state that have the shape of the weight.
LIKE_WEIGHT = ("M", "V")


@runtime_checkable
class Rule(Protocol):
    """What one gradient does to a stack of whole matrices: `optim.soap.Rule`.

    Its state is a named tuple, of tensors and of integers that all matrices share. Weights enter it entry by entry,
    unless decay of the form "l2" adds them to the gradient.
    """

    @property
    def weight_decay(self) -> float:
        """How much weights decay."""
        ...

    @property
    def decay(self) -> str:
        """In which of the forms `optim.step.DECAYS`."""
        ...

    def begin(self, W: Float[Tensor, "count m n"]) -> Any:
        """Return the state before the first gradient."""

    def advance(
        self, W: Float[Tensor, "count m n"], G: Float[Tensor, "count m n"], state: Any
    ) -> tuple[Float[Tensor, "count m n"], Any]:
        """Return the weights and the state after one gradient."""
        ...


@dataclass(frozen=True)
class Gathered:
    """The rule that `gathered` returns."""

    rule: Rule
    collectives: Collectives
    placement: Placement
    sharded: tuple[str, ...]

    def begin(self, W: Float[Tensor, "count m n"]) -> Any:
        """Return this rank's part of the state before the first gradient, given its shard of the weights."""
        return self.parts(self.rule.begin(W.new_zeros(self.placement.whole(W.shape, self.collectives.rank))))

    def advance(
        self, W: Float[Tensor, "count m n"], G: Float[Tensor, "count m n"], state: Any
    ) -> tuple[Float[Tensor, "count m n"], Any]:
        """Return this rank's weights and part of the state after one gradient, given its shards.

        Raises
        ------
        ValueError
            On every rank, if the gradient is not finite on one, or as the rule does.
        """
        shape = self.placement.whole(G.shape, self.collectives.rank)
        kept = {name: getattr(state, name) for name in self.sharded}
        mixed = {"W": W} if self.rule.decay == "l2" and self.rule.weight_decay else {}
        whole = self._gathered({"G": G, **mixed, **kept}, shape)
        if not whole["G"].isfinite().all():
            raise ValueError("the gradient must be finite on every rank, but is not")
        weights = whole["W"] if mixed else self._among_zeros(W, shape)
        W, after = self.rule.advance(weights, whole["G"], state._replace(**{name: whole[name] for name in kept}))
        return self.placement.shard(W, self.collectives.rank).contiguous(), self.parts(after)

    def parts(self, state: Any) -> Any:
        """Return this rank's part of a whole state."""
        rank = self.collectives.rank
        return state._replace(
            **{
                name: self._placement(name, getattr(state, name).shape).shard(getattr(state, name), rank).clone()
                for name in self.sharded
            }
        )

    def whole(self, state: Any, shape: Sequence[int]) -> Any:
        """Return the whole state, for a checkpoint say, on every rank that asks with all others; one call.

        Parameters
        ----------
        state : named tuple
            This rank's part.
        shape : sequence of int
            That of the whole matrices, (count, m, n).
        """
        return state._replace(**self._gathered({name: getattr(state, name) for name in self.sharded}, shape))

    def _placement(self, name: str, whole: Sequence[int]) -> Placement:
        """Return how an entry of a shape is cut."""
        return self.placement if name in ("W", "G", *LIKE_WEIGHT) else even(whole[-2], self.placement.tp, 0)

    def _gathered(self, parts: dict[str, Tensor], shape: Sequence[int]) -> dict[str, Tensor]:
        """Return whole tensors of parts that all ranks have, in one call; `shape` is that of the matrices."""
        if not parts:
            return {}
        m, n = shape[-2:]
        sides = {"L": (m, m), "Q_L": (m, m), "R": (n, n), "Q_R": (n, n)}
        wholes = {name: (*shape[:-2], *sides.get(name, (m, n))) for name in parts}
        cuts = {name: self._placement(name, wholes[name]) for name in parts}
        ranks = range(self.placement.tp)
        shapes = [{name: cuts[name].shape(wholes[name], rank) for name in parts} for rank in ranks]
        lengths = [sum(torch.Size(one).numel() for one in held.values()) for held in shapes]
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        group = self.collectives.tagged(phase="gather")
        if len(set(lengths)) == 1:
            joined = group.all_gather(flat).wait().flatten()
        else:
            joined = group.all_gather_v(flat, lengths).wait()
        found = [dict(zip(parts, _split(joined, shapes, rank, lengths), strict=True)) for rank in ranks]
        return {name: torch.cat([found[rank][name] for rank in ranks], cuts[name].axis) for name in parts}

    def _among_zeros(self, W: Float[Tensor, "*shard"], shape: Sequence[int]) -> Float[Tensor, "*whole"]:
        """Return whole weights of which only those of this rank are there."""
        whole = W.new_zeros(shape)
        self.placement.shard(whole, self.collectives.rank).copy_(W)
        return whole


def gathered(rule: Rule, collectives: Collectives, placement: Placement, sharded: Iterable[str] = SHARDED) -> Gathered:
    """Return a rule for the shards of matrices, whose weights and state are those of one rank, bit for bit.

    Parameters
    ----------
    rule : Rule
        For whole matrices.
    collectives : Collectives
        The ranks that hold the matrices.
    placement : Placement
        What each rank holds, uneven and empty parts too.
    sharded : iterable of str
        Entries of the state of which a rank keeps a part; the others are whole on every rank.

    Raises
    ------
    ValueError
        If there is not one size a rank, or for an entry that there is not.

    Examples
    --------
    >>> import torch
    >>> from muon_lab.optim.soap import Rule
    >>> from muon_lab.parallel import worlds
    >>> rows, G = even(4, 2, dim=0), torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
    >>> def step(world):
    ...     rule = gathered(Rule(lr=1.0, first_step="skip"), world, rows)
    ...     W = torch.zeros(1, 2, 3)
    ...     state = rule.begin(W)
    ...     for _ in range(2):
    ...         W, state = rule.advance(W, rows.shard(G, world.rank), state)
    ...     return W, tuple(state.L.shape)
    >>> (upper, shape), (lower, _) = worlds.run(step, ranks=2)
    >>> single = Rule(lr=1.0, first_step="skip")
    >>> W = torch.zeros(1, 4, 3)
    >>> W, state = single.advance(W, G, single.begin(W))
    >>> W, state = single.advance(W, G, state)
    >>> torch.equal(torch.cat([upper, lower], dim=1), W), shape
    (True, (1, 2, 4))
    """
    resharding.check(placement, collectives)
    names = tuple(sharded)
    for name in names:
        if name not in SHARDED:
            raise ValueError(f"sharded state must be some of {', '.join(SHARDED)}, not {name!r}")
    return Gathered(rule, collectives, placement, names)


def agreed(optimizer: torch.optim.Optimizer, collectives: Collectives) -> RemovableHandle:
    """Have all ranks see, at every step of an optimizer, that a gradient is not finite on one of them.

    Such a gradient becomes NaN on every rank, so that all leave out the step, or refuse it, alike. One all_reduce a
    step, of three numbers a parameter.

    Parameters
    ----------
    optimizer : Optimizer
        Of the shards, with the same parameters in the same order on every rank.
    collectives : Collectives
        The ranks that hold the matrices.

    Returns
    -------
    RemovableHandle
        Ends it when its ``remove`` is called.

    Raises
    ------
    ValueError
        At a step, on every rank, for a parameter that has a gradient on some ranks and none on others; for a step with
        a closure, whose gradients come too late.

    Examples
    --------
    >>> from muon_lab.parallel import worlds
    >>> def step(world):
    ...     W = torch.nn.Parameter(torch.zeros(1))
    ...     optimizer = torch.optim.SGD([W], lr=1.0)
    ...     agreed(optimizer, world)
    ...     W.grad = torch.tensor([torch.inf if world.rank else 1.0])
    ...     optimizer.step()
    ...     return W.item()
    >>> worlds.run(step, ranks=2)
    [nan, nan]
    """
    group = collectives.tagged(phase="agree")

    def before(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(argument is not None for argument in (*arguments[1:], options.get("closure"))):
            raise ValueError("a step that ranks agree on takes no closure: call it before")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        own = [(G is None, G is not None, G is not None and not bool(torch.isfinite(G).all())) for G in gradients]
        flags = torch.tensor(own, dtype=torch.float32, device=collectives.device).reshape(-1, 3)
        missing, there, bad = group.all_reduce(flags, "max").wait().bool().unbind(1)
        if (missing & there).any():
            raise ValueError(
                f"{int((missing & there).sum())} of the {len(parameters)} parameters have a gradient on some ranks "
                "only, needed on all or none"
            )
        for G, spoilt in zip(gradients, bad.tolist(), strict=True):
            if G is not None and spoilt:
                G.fill_(torch.nan)

    return optimizer.register_step_pre_hook(before)


def _split(
    joined: Tensor, shapes: Sequence[dict[str, tuple[int, ...]]], rank: int, lengths: Sequence[int]
) -> list[Tensor]:
    """Return the tensors that one rank has put in."""
    start = sum(lengths[:rank])
    held = shapes[rank].values()
    pieces = joined[start : start + lengths[rank]].split([torch.Size(shape).numel() for shape in held])
    return [piece.reshape(shape) for piece, shape in zip(pieces, held, strict=True)]
