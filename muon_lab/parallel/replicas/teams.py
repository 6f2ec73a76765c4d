r"""Giants: the first rank of a team owns one and steps it, and all of the team orthogonalize it together.

Where one matrix is more than a rank's share of the work, no assignment of whole matrices helps. The owner of a giant
keeps its state and takes its step, but when the optimizer asks for the direction of the candidate C (m, n), it hands
each member of the team a part of C, cut evenly along the long axis. The members run the distributed layout
(`layouts.distributed`) on their parts, and the owner puts the direction together. The step is that of one rank but for
the order of sums in Gram matrices.

Beside what the layout sends, the owner of a team of p sends :math:`\frac{p - 1}{p} m n` entries of C, in the dtype in
which the optimizer computes, and gets as many back.

Which parameters are giants is said by the `owners` of `LayerwiseOptimizer`:

>>> from muon_lab.optim import Muon
>>> from muon_lab.parallel import LayerwiseOptimizer, balance, worlds
>>> def program(world):
...     layers = [torch.nn.Parameter(torch.eye(8, 4)), torch.nn.Parameter(torch.eye(4))]
...     owners = balance.hybrid([9.0, 1.0], world.size)
...     optimizer = LayerwiseOptimizer(Muon(layers, lr=0.5, direction=("deepseekv4", 10)), world, owners)
...     for layer in layers:
...         layer.grad = layer.detach() * (1.0 + world.rank)
...     optimizer.step()
...     return owners.teams, round(layers[0][0, 0].item(), 3)
>>> worlds.run(program, ranks=2)[1]
((Team(job=0, members=(0, 1), cost=4.5),), -0.414)

Teams take their turns in one order on all ranks, and the members of one wait for it: so teams that share no rank work
at the same time, and no two wait for each other, whoever is in which.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from muon_lab.arithmetic import Arithmetic, Exact
from muon_lab.parallel import layouts
from muon_lab.parallel.balance import Team
from muon_lab.parallel.calls import FLOATS
from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.grid import Placement, even
from muon_lab.parallel.layouts import resharding
from muon_lab.parallel.replicas import checkpoints
from muon_lab.polar import Orthogonalizer, Schedule

#: What an owner says when it needs no more directions; otherwise shape and dtype of the next candidate.
OVER = (0, 0, 0, 0)


@dataclass(frozen=True)
class Giant:
    """A parameter that a team orthogonalizes together.

    Attributes
    ----------
    number : int
        Of the parameter.
    members : tuple of int
        The ranks of the team; the first is the owner.
    rule : Optimizer
        The one that steps it, whose direction is that of a schedule.
    """

    number: int
    members: tuple[int, ...]
    rule: Any


class Teams:
    """The teams of an optimizer's giants, as one rank sees them.

    Parameters
    ----------
    group : Collectives
        All ranks, which form the groups of the teams together.
    optimizer : Optimizer
        What steps parameters.
    parameters, names : sequences
        All parameters, by number.
    teams : sequence of Team
        Jobs are numbers of parameters.

    Raises
    ------
    ValueError
        For a giant of an optimizer whose direction is not that of a schedule, or a team with a rank that is none.
    """

    def __init__(
        self,
        group: Collectives,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        teams: Sequence[Team],
    ) -> None:
        for team in teams:
            if max(team.members) >= group.size:
                raise ValueError(
                    f"owners divide {names[team.job]} among ranks {', '.join(map(str, team.members))}, needed ranks of "
                    f"0..{group.size - 1}"
                )
        rules = {id(p): leaf for leaf in checkpoints.leaves(optimizer) for g in leaf.param_groups for p in g["params"]}
        self._parameters, self._rank = parameters, group.rank
        wanted = sorted((team for team in teams if len(team.members) > 1), key=lambda team: team.job)
        self.giants = [Giant(t.job, t.members, _sharing(rules[id(parameters[t.job])], names[t.job], t)) for t in wanted]
        self._groups: dict[tuple[int, ...], Collectives] = {}
        for parts in partitions([giant.members for giant in self.giants], group.size):
            own = group.split(parts)
            self._groups |= {part: own for part in parts if self._rank in part}

    def step(self, take: Callable[[], object], present: Collection[int]) -> None:
        """Take the step of this rank: giants that have a gradient one by one, with their teams, then the rest.

        Raises
        ------
        Exception
            The first of those that any step raised on this rank, once it has done its part for all teams.
        """
        if not self.giants:
            take()
            return
        errors: list[Exception] = []
        with self._held() as held:
            for giant in self.giants:
                if giant.number in present and self._rank in giant.members:
                    part = self._lead if self._rank == giant.members[0] else self._follow
                    try:
                        part(giant, take, held)
                    except Exception as error:
                        errors.append(error)
            if errors:
                raise errors[0]
            giants = {giant.number for giant in self.giants}
            self._show({number: gradient for number, gradient in held.items() if number not in giants})
            take()

    def _lead(self, giant: Giant, take: Callable[[], object], held: Mapping[int, Tensor]) -> None:
        """Step a giant, whose direction the team works out."""
        ranks = self._groups[giant.members].tagged(phase="team", layer=giant.number)
        alone = giant.rule.direction

        def together(C: Float[Tensor, "count m n"]) -> Float[Tensor, "count m n"]:
            return _led(alone, ranks, C) if C.numel() else alone(C)

        giant.rule.direction = together
        try:
            self._show({giant.number: held[giant.number]})
            take()
        finally:
            self._parameters[giant.number].grad = None
            giant.rule.direction = alone
            _told(ranks, OVER)

    def _follow(self, giant: Giant, *_: object) -> None:
        """Work out parts of directions until the owner has no more of them."""
        ranks = self._groups[giant.members].tagged(phase="team", layer=giant.number)
        error: Exception | None = None
        while any(outline := _told(ranks, OVER)):
            try:
                _followed(giant.rule.direction, ranks, outline)
            except ValueError as caught:  # which the owner meets too: what it says next is still to be heard
                error = caught
        if error is not None:
            raise error

    @contextmanager
    def _held(self) -> Iterator[dict[int, Tensor]]:
        """Take all gradients away for a while."""
        held = {number: p.grad for number, p in enumerate(self._parameters) if p.grad is not None}
        try:
            for number in held:
                self._parameters[number].grad = None
            yield held
        finally:
            self._show(held)

    def _show(self, gradients: Mapping[int, Tensor]) -> None:
        for number, gradient in gradients.items():
            self._parameters[number].grad = gradient


def partitions(members: Sequence[tuple[int, ...]], ranks: int) -> list[list[tuple[int, ...]]]:
    """Return partitions of all ranks, as few as come by taking each team into the first where it fits.

    Examples
    --------
    >>> partitions([(0, 1), (0, 1, 2, 3), (2, 3), (0, 1)], ranks=5)
    [[(0, 1), (2, 3), (4,)], [(0, 1, 2, 3), (4,)]]
    """
    found: list[list[tuple[int, ...]]] = []
    for team in dict.fromkeys(members):
        place = next((parts for parts in found if not any(set(part) & set(team) for part in parts)), None)
        if place is None:
            found.append(place := [])
        place.append(team)
    for parts in found:
        taken = {rank for part in parts for rank in part}
        parts += [(rank,) for rank in range(ranks) if rank not in taken]
        parts.sort()
    return found


def _led(direction: Any, ranks: Collectives, C: Float[Tensor, "count m n"]) -> Float[Tensor, "count m n"]:
    """Return the direction of a candidate, of which each of the team works out a part."""
    dtype, places = str(C.dtype).removeprefix("torch."), range(ranks.size)
    _told(ranks, (*C.shape, FLOATS.index(dtype)))
    cut, nothing = _cut(C.shape, ranks.size), [list[Any]() for _ in places[1:]]
    own = [[cut.shape(C.shape, 0)], *nothing]
    ((shard,), *_) = resharding.exchanged([[cut.shard(C, place)] for place in places], own, ranks, C.dtype)
    update = _layout(direction, ranks, cut)(shard)
    back = [[cut.shape(C.shape, place)] for place in places]
    parts = resharding.exchanged([[update], *nothing], back, ranks, C.dtype)
    return torch.cat([part for (part,) in parts], dim=cut.axis)


def _followed(direction: Any, ranks: Collectives, outline: Sequence[int]) -> None:
    """Work out one's part of the direction of a candidate that the owner has."""
    *shape, kind = outline
    dtype, cut = getattr(torch, FLOATS[kind]), _cut(shape, ranks.size)
    nothing = [list[Any]() for _ in range(ranks.size)]
    own = [[cut.shape(shape, ranks.rank)], *nothing[1:]]
    ((shard,), *_) = resharding.exchanged(nothing, own, ranks, dtype)
    update = _layout(direction, ranks, cut)(shard)
    resharding.exchanged([[update], *nothing[1:]], nothing, ranks, dtype)


def _layout(direction: Any, ranks: Collectives, cut: Placement) -> Orthogonalizer:
    """Return the distributed layout of a direction that has a schedule, and maybe an arithmetic and a start."""
    start = getattr(direction, "start", "frobenius")
    return layouts.distributed(direction.schedule, ranks, cut, _arithmetic(direction), start)


def _arithmetic(direction: Any) -> Any:
    return getattr(direction, "arithmetic", Exact())


def _cut(shape: Sequence[int], ranks: int) -> Placement:
    """Cut matrices along the long axis."""
    m, n = shape[-2:]
    return even(max(m, n), ranks, dim=0 if m >= n else 1)


def _told(ranks: Collectives, outline: Sequence[int]) -> list[int]:
    """Return what the owner of a team says."""
    said: list[int] = ranks.broadcast(torch.tensor(outline, device=ranks.device)).wait().tolist()
    return said


def _sharing(rule: Any, name: str, team: Team) -> Any:
    """Return the optimizer of a giant if ranks can share its work."""
    direction = getattr(rule, "direction", None)
    if isinstance(getattr(direction, "schedule", None), Schedule) and isinstance(_arithmetic(direction), Arithmetic):
        return rule
    raise ValueError(
        f"owners divide {name} among ranks {', '.join(map(str, team.members))}, but {type(rule).__name__} steps it "
        "whole: needed Muon with a schedule (in one arithmetic) as direction, or owners alone"
    )
