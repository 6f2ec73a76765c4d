r"""Who updates which matrix, so that nobody waits for long: from costs and ranks to owners, as pure functions.

With costs :math:`c_i` and p ranks, a rank's load is :math:`L_r = \sum_{i \text{ owned by } r} c_i`. All wait for the
makespan :math:`\max_r L_r`, which no assignment of whole jobs brings below :math:`\max(\sum_i c_i / p, \max_i c_i)`.

==============  ======================================================================================================
`round_robin`   in the order given, 0, 1 … p-1, 0, 1 …
`ping_pong`     from the fewest elements to the most, there and back: 0 … p-1, p-1 … 0 …
`lpt_elements`  the largest job left to the rank that has fewest elements
`lpt_flops`     the costliest job left to the rank that has least to do: at most :math:`4/3 - 1/(3p)` times the best
`hybrid`        giants divided among teams of neighbours, the rest whole
==============  ======================================================================================================

The longest job first (LPT) takes a cap on what a rank holds, and buckets: jobs that travel together are dealt out one
bucket after the other, so that each bucket's shares are even too.

An assignment is a sequence of owners: policies, or their names, serve as `owners` of `parallel.LayerwiseOptimizer`,
which has them weigh what steps cost, by default :math:`m n \min(m, n)`. `priced` makes costs of other prices, closed
forms or seconds measured. Nothing here imports torch.

References
----------
R. L. Graham (1969), *Bounds on multiprocessing timing anomalies*, for LPT; NVIDIA/Megatron-LM,
``megatron/core/optimizer/layer_wise_optimizer.py``, commit d98e8a6 (August 2026), for ping-pong and for LPT in buckets
with a cap of 1.3 times the mean.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

from muon_lab.parallel.grid import even

#: Of each job, in any unit.
Costs = Sequence[float | int]

#: What one matrix costs, by its rows and columns: a closed form such as those of `cost.flops`, or numbers by shape.
Price = Callable[[int, int], float | int] | Mapping[tuple[int, int], float | int]

#: What each member of a team of so many has to do of a job, by the job's number.
Divided = Callable[[int, int], float | int]

#: A policy as a function of costs, the number of ranks, and elements.
Policy = Callable[..., "Assignment"]

#: Limits above which `hybrid` tries to divide jobs: from the costliest job down by this factor, to this share of the
#: ideal load, since smaller pieces fill ranks evenly as they are.
FINER, FINEST = 2**-0.5, 1 / 4


class NoRoom(ValueError):
    """Under a cap no rank has room for a job.

    Attributes
    ----------
    job : int
        Its number.
    """

    def __init__(self, message: str, job: int) -> None:
        super().__init__(message)
        self.job = job


class Team(NamedTuple):
    """A job that several ranks do together.

    Attributes
    ----------
    job : int
        Its number.
    members : tuple of int
        The ranks, neighbours of each other; the first is the owner.
    cost : float
        What each of them has to do.
    """

    job: int
    members: tuple[int, ...]
    cost: float | int


@dataclass(frozen=True)
class Assignment(Sequence[int]):
    """Who owns which job, and what follows from it. As a sequence it is the owners.

    Attributes
    ----------
    owners : tuple of int
        The rank of each job; of a divided one the first of its team.
    sizes : tuple of int
        Elements of each job.
    loads : tuple of float
        What each rank has to do.
    work : float
        What there is to do if nothing is divided.
    teams : tuple of Team
        The divided jobs. Their elements lie on all members, as evenly as it goes.

    Examples
    --------
    >>> found = lpt_flops([4.0, 3.0, 3.0, 2.0], ranks=2)
    >>> found.owners, found.loads, found.makespan, found.ideal, found.ratio
    ((0, 1, 1, 0), (6.0, 6.0), 6.0, 6.0, 1.0)
    """

    owners: tuple[int, ...]
    sizes: tuple[int, ...]
    loads: tuple[float, ...]
    work: float
    teams: tuple[Team, ...] = ()

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: Any) -> Any:
        return self.owners[index]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.loads)

    @property
    def makespan(self) -> float:
        """The largest load: what all ranks wait for."""
        return max(self.loads)

    @property
    def ideal(self) -> float:
        """The load of each rank if work could be cut anywhere, at no cost."""
        return self.work / self.ranks

    @property
    def ratio(self) -> float:
        """Makespan over ideal; 1 if there is nothing to do."""
        return self.makespan / self.ideal if self.work else 1.0

    @property
    def elements(self) -> tuple[int, ...]:
        """What each rank holds."""
        return self.shares(range(len(self)))

    @property
    def imbalance(self) -> float:
        """The most that a rank holds over the mean; 1 if there is nothing to hold."""
        held = self.elements
        return max(held) * self.ranks / sum(held) if any(held) else 1.0

    def shares(self, jobs: Iterable[int]) -> tuple[int, ...]:
        """Return the elements that each rank has of some jobs.

        Examples
        --------
        >>> hybrid([8.0, 1.0], ranks=2, elements=[10, 3]).shares([0])
        (5, 5)
        """
        held, teams = [0] * self.ranks, {team.job: team.members for team in self.teams}
        for job in jobs:
            if job not in teams:
                held[self.owners[job]] += self.sizes[job]
                continue
            for rank, part in zip(teams[job], even(self.sizes[job], len(teams[job]), 0).sizes, strict=True):
                held[rank] += part
        return tuple(held)


# --- policies ---------------------------------------------------------------------------------------------------------


def round_robin(costs: Costs, ranks: int, elements: Sequence[int] | None = None) -> Assignment:
    """Deal jobs out in the order given.

    Parameters
    ----------
    costs : sequence of float
        Of each job, in any unit.
    ranks : int
        How many there are.
    elements : sequence of int, optional
        What each job takes of the memory. Without it, as many as it costs, rounded up.

    Raises
    ------
    ValueError
        For a cost that is negative or not finite, other numbers of costs and elements, or no rank.

    Examples
    --------
    >>> round_robin([3.0, 1.0, 2.0], ranks=2).owners
    (0, 1, 0)
    """
    return assigned([job % max(ranks, 1) for job in range(len(costs))], costs, ranks, elements)


def ping_pong(costs: Costs, ranks: int, elements: Sequence[int] | None = None) -> Assignment:
    """Deal jobs out from the fewest elements to the most, there and back again; equals stay in order.

    Parameters and errors are those of `round_robin`.

    Examples
    --------
    >>> ping_pong([1.0] * 10, ranks=4, elements=range(10)).owners
    (0, 1, 2, 3, 3, 2, 1, 0, 0, 1)
    """
    sizes = _checked(costs, ranks, elements)
    owners = [0] * len(costs)
    for place, job in enumerate(sorted(range(len(costs)), key=(costs if elements is None else elements).__getitem__)):
        turn, rank = divmod(place, ranks)
        owners[job] = ranks - 1 - rank if turn % 2 else rank
    return assigned(owners, costs, ranks, sizes)


def lpt_flops(
    costs: Costs,
    ranks: int,
    elements: Sequence[int] | None = None,
    *,
    cap: float | int | None = None,
    buckets: Iterable[Sequence[int]] | None = None,
) -> Assignment:
    """Give the costliest job left to the rank that has least to do; of equals, the first to the first.

    Parameters
    ----------
    costs, ranks, elements
        As for `round_robin`.
    cap : float, optional
        No rank holds more elements of a bucket than so many times the mean over ranks. A rank without room is passed
        over; jobs that were placed stay.
    buckets : iterable of sequence of int, optional
        The jobs of each bucket; they are dealt out one bucket after the other, on top of each other. One by default.

    Raises
    ------
    ValueError
        As `round_robin`; if no rank has room for a job, if the cap is below 1, or if the buckets do not hold each job
        once.

    Examples
    --------
    >>> lpt_flops([5, 3, 3], ranks=2, elements=[1, 4, 4]).elements
    (1, 8)
    >>> lpt_flops([5, 3, 3], ranks=2, elements=[1, 4, 4], cap=1.3).elements
    (5, 4)
    """
    return _longest_first(costs, costs, ranks, elements, cap, buckets)


def lpt_elements(
    costs: Costs,
    ranks: int,
    elements: Sequence[int] | None = None,
    *,
    cap: float | int | None = None,
    buckets: Iterable[Sequence[int]] | None = None,
) -> Assignment:
    """Give the largest job left to the rank that has fewest elements, whatever jobs cost.

    Parameters and errors are those of `lpt_flops`.

    Examples
    --------
    >>> lpt_elements([9.0, 1.0, 1.0], ranks=2, elements=[2, 3, 2]).owners
    (1, 0, 1)
    """
    return _longest_first(costs if elements is None else elements, costs, ranks, elements, cap, buckets)


def hybrid(
    costs: Costs,
    ranks: int,
    elements: Sequence[int] | None = None,
    *,
    divided: Divided | None = None,
    cap: float | int | None = None,
) -> Assignment:
    """Divide the giants among teams of ranks, give the rest whole to those that have least to do.

    A giant is a job that is more than a limit; its team is the smallest whose members have no more than that, a block
    of neighbours whose length divides the number of ranks. Limits from the costliest job down to a quarter of the ideal
    load are tried; the one with the least makespan is taken, and none if none is better than whole jobs. As `owners` of
    `parallel.LayerwiseOptimizer` teams orthogonalize their giants together; as a plain sequence of owners, or in a list
    made of it, giants are whole again. Elements are counted as if they lay on all of a team; that optimizer keeps them
    on its first rank.

    Parameters
    ----------
    costs, ranks, elements
        As for `round_robin`.
    divided : callable, optional
        What each member of a team has to do, at least 0, by job and size of the team. By default the cost is cut
        evenly; of a distributed Newton-Schulz, products of the short side are done by all.
    cap : float, optional
        No rank holds more elements than so many times the mean.

    Raises
    ------
    ValueError
        As `lpt_flops`, and for a share that is negative or no number.

    Examples
    --------
    >>> costs = [8.0, 1.0, 1.0, 1.0, 1.0]
    >>> lpt_flops(costs, ranks=4).ratio, hybrid(costs, ranks=4).ratio
    (2.6666666666666665, 1.0)
    >>> hybrid(costs, ranks=4).teams
    (Team(job=0, members=(0, 1, 2, 3), cost=2.0),)
    """
    sizes = _checked(costs, ranks, elements)
    room = _room(sizes, ranks, cap)
    share = _shares(divided) if divided else lambda job, members: costs[job] / members
    found = [_divided_above(limit, costs, sizes, ranks, share, room) for limit in _limits(costs, ranks)]
    complete = [assignment for assignment in found if isinstance(assignment, Assignment)]
    if not complete:
        raise _no_room(next(job for job in found if isinstance(job, int)), sizes, range(len(sizes)), ranks, cap)
    return min(complete, key=lambda assignment: assignment.makespan)


#: Policies by name.
POLICIES: Mapping[str, Policy] = {
    "round_robin": round_robin,
    "ping_pong": ping_pong,
    "lpt_elements": lpt_elements,
    "lpt_flops": lpt_flops,
    "hybrid": hybrid,
}


# --- costs in, facts out ----------------------------------------------------------------------------------------------


def priced(shapes: Iterable[Sequence[int]], price: Price) -> list[float | int]:
    """Return what each matrix costs; each shape is priced once.

    Parameters
    ----------
    shapes : iterable of (rows, columns)
        Of the matrices.
    price : callable or mapping
        From rows and columns to a cost, or costs by shape, such as seconds that were measured.

    Raises
    ------
    ValueError
        For what is no matrix, or a shape without a price.

    Examples
    --------
    >>> from muon_lab.cost import flops
    >>> priced([(2, 3), (3, 2)], lambda m, n: flops.newton_schulz(m, n, steps=5)), priced([(2, 3)], flops.svd)
    ([320.0, 320.0], [232.0])
    >>> priced([(2, 3), (4, 4), (2, 3)], {(2, 3): 1e-3, (4, 4): 2e-3})
    [0.001, 0.002, 0.001]
    """
    known: dict[tuple[int, ...], float | int] = {}
    found = []
    for shape in shapes:
        key = tuple(shape)
        if key not in known:
            known[key] = _price(key, price)
        found.append(known[key])
    return found


def expanded(kinds: Iterable[tuple[float | int, int, int]]) -> tuple[list[float | int], list[int]]:
    """Return costs and elements of single jobs, given cost, elements and number of each kind.

    Examples
    --------
    >>> expanded([(5.0, 8, 1), (1.0, 2, 3)])
    ([5.0, 1.0, 1.0, 1.0], [8, 2, 2, 2])
    """
    costs, elements = list[float | int](), list[int]()
    for cost, size, count in kinds:
        costs += [cost] * count
        elements += [size] * count
    return costs, elements


def assigned(owners: Sequence[int], costs: Costs, ranks: int, elements: Sequence[int] | None = None) -> Assignment:
    """Return what follows from owners that are given, whoever chose them and by whatever costs.

    Raises
    ------
    ValueError
        As `round_robin`, or if there is not one owner a job, or one that is no rank.

    Examples
    --------
    >>> assigned([1, 1], costs=[2.0, 1.0], ranks=2).loads
    (0.0, 3.0)
    """
    sizes = _checked(costs, ranks, elements)
    if len(owners) != len(costs):
        raise ValueError(f"owners are {len(owners)} ranks, needed one for each of {len(costs)} jobs")
    for job, owner in enumerate(owners):
        if not isinstance(owner, (int, Integral)):
            raise ValueError(f"owner of job {job} is {owner!r}, needed a rank of 0..{ranks - 1}")
    if len(owners) and not 0 <= min(owners) <= max(owners) < ranks:
        raise ValueError(f"owners lie in {min(owners)}..{max(owners)}, needed ranks of 0..{ranks - 1}")
    loads = [0.0] * ranks
    for rank, cost in zip(owners, costs, strict=True):
        loads[rank] += cost
    return Assignment(tuple(owners), sizes, tuple(loads), math.fsum(costs))


# --- the longest job first --------------------------------------------------------------------------------------------


def _longest_first(
    weights: Costs,
    costs: Costs,
    ranks: int,
    elements: Sequence[int] | None,
    cap: float | int | None,
    buckets: Iterable[Sequence[int]] | None,
) -> Assignment:
    """Deal out by weights; loads are those of costs."""
    sizes = _checked(costs, ranks, elements)
    groups = [range(len(costs))] if buckets is None else [*buckets]
    if sorted(job for group in groups for job in group) != list(range(len(costs))):
        raise ValueError(f"buckets hold {sum(map(len, groups))} jobs, needed each of {len(costs)} once")
    owners, loads = [0] * len(costs), [0.0] * ranks
    for group in groups:
        room = _room([sizes[job] for job in group], ranks, cap)
        homeless = _deal(group, weights, sizes, loads, room, owners)
        if homeless is not None:
            raise _no_room(homeless, sizes, group, ranks, cap)
    return assigned(owners, costs, ranks, sizes)


def _deal(
    jobs: Iterable[int],
    weights: Costs,
    sizes: Sequence[int],
    loads: list[float],
    room: list[float],
    owners: list[int],
) -> int | None:
    """Write owners, on top of loads and within room; return the job that no rank has room for, if there is one.

    Ranks without room for a job are set aside until a job of another size comes.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    aside: list[tuple[float, int]] = []
    size = -1
    for job in sorted(jobs, key=weights.__getitem__, reverse=True):
        if sizes[job] != size:
            size = sizes[job]
            while aside:
                heapq.heappush(heap, aside.pop())
        while heap and room[heap[0][1]] < size:
            aside.append(heapq.heappop(heap))
        if not heap:
            return job
        load, rank = heap[0]
        owners[job] = rank
        room[rank] -= size
        loads[rank] = load + weights[job]
        heapq.heapreplace(heap, (loads[rank], rank))
    return None


# --- giants -----------------------------------------------------------------------------------------------------------


def _limits(costs: Costs, ranks: int) -> list[float]:
    """Return the limits to try, that of no division first."""
    limit, least = max(costs, default=0.0) * FINER, FINEST * math.fsum(costs) / ranks
    found = [math.inf]
    while ranks > 1 and limit > least:
        found.append(limit)
        limit *= FINER
    return found


def _divided_above(
    limit: float, costs: Costs, sizes: tuple[int, ...], ranks: int, share: Divided, room: Costs
) -> Assignment | int:
    """Return the assignment in which jobs above a limit are divided, or a job that no rank has room for."""
    loads, left, owners, teams = [0.0] * ranks, list(room), [0] * len(costs), list[Team]()
    giants = [job for job, cost in enumerate(costs) if cost > limit]
    for job in sorted(giants, key=costs.__getitem__, reverse=True):
        team = _team(job, limit, sizes[job], loads, left, share)
        if team is None:
            return job
        teams.append(team)
        owners[job] = team.members[0]
    divided = set(giants)
    homeless = _deal((job for job in range(len(costs)) if job not in divided), costs, sizes, loads, left, owners)
    if homeless is not None:
        return homeless
    return Assignment(tuple(owners), sizes, tuple(loads), math.fsum(costs), tuple(teams))


def _team(job: int, limit: float, size: int, loads: list[float], left: list[float], share: Divided) -> Team | None:
    """Form a team for a job on the least loaded block of ranks, and add what its members do and hold."""
    ranks = len(loads)
    lengths = [length for length in range(1, ranks + 1) if ranks % length == 0]
    length = next((some for some in lengths if share(job, some) <= limit), None)
    if length is None:
        length = min(lengths, key=lambda some: share(job, some))
    cost, parts = share(job, length), even(size, length, 0).sizes
    blocks = [range(start, start + length) for start in range(0, ranks, length)]
    free = [block for block in blocks if all(part <= left[rank] for rank, part in zip(block, parts, strict=True))]
    if not free:
        return None
    block = min(free, key=lambda block: max(loads[rank] for rank in block))
    for rank, part in zip(block, parts, strict=True):
        loads[rank] += cost
        left[rank] -= part
    return Team(job, tuple(block), cost)


# --- what is refused --------------------------------------------------------------------------------------------------


def _checked(costs: Costs, ranks: int, elements: Sequence[int] | None) -> tuple[int, ...]:
    """Return the elements of each job."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}, needed a whole number of at least 1")
    for job, cost in enumerate(costs):
        if not isinstance(cost, (float, int, Real)) or not 0 <= cost < math.inf:
            raise ValueError(f"the cost of job {job} is {cost!r}, needed a finite one of at least 0")
    sizes = tuple(map(math.ceil, costs) if elements is None else elements)
    if len(sizes) != len(costs):
        raise ValueError(f"elements are those of {len(sizes)} jobs, needed one number for each of {len(costs)} costs")
    for job, size in enumerate(sizes):
        if not isinstance(size, (int, Integral)):
            raise ValueError(f"elements of job {job} are {size!r}, needed a whole number")
    if sizes and min(sizes) < 0:
        raise ValueError(f"elements of a job are {min(sizes)}, needed at least 0")
    return sizes


def _shares(divided: Divided) -> Divided:
    """Return what members of teams have to do, refusing what nobody can have."""

    def share(job: int, members: int) -> float | int:
        found = divided(job, members)
        if not isinstance(found, Real) or not found >= 0:
            raise ValueError(
                f"divided gives {found!r} for job {job} and a team of {members}, needed a cost of at least 0"
            )
        return found

    return share


def _room(sizes: Sequence[int], ranks: int, cap: float | int | None) -> list[float]:
    """Return what each rank may hold."""
    if cap is not None and not cap >= 1:
        raise ValueError(f"cap is {cap!r}, needed at least 1 times the mean, or None")
    return [math.inf if cap is None else cap * sum(sizes) / ranks] * ranks


def _no_room(job: int, sizes: Sequence[int], bucket: Iterable[int], ranks: int, cap: float | int | None) -> NoRoom:
    mean = sum(sizes[other] for other in bucket) / ranks
    message = (
        f"cap is {cap} times a mean of {mean:.6g} elements, and no rank has room for the {sizes[job]} of job {job}: "
        "needed a larger cap, or none"
    )
    return NoRoom(message, job)


def _price(shape: tuple[int, ...], price: Price) -> float | int:
    if len(shape) != 2:
        raise ValueError(f"shape {shape} is that of no matrix, needed rows and columns")
    if callable(price):
        return price(*shape)
    if shape not in price:
        raise ValueError(f"price has nothing for shape {shape}, needed a cost for every shape")
    return price[shape]
