r"""Who owns which matrix of a plan: whole matrices, and giants that a team of replicas shares.

Owners are dealt by `parallel.balance` on seconds. A matrix that takes longer than the mean replica works stops the
balance; a team of neighbours then cuts it along its long side, sums its Gram matrices and keeps a part each
(distributed Newton-Schulz). Teams are formed where that makes the busiest replica quicker, and nowhere else.

With more replicas than matrices to choose from, replicas are dealt out in blocks of several: each block works as a
team, and the search stays short.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import floor
from typing import Any, NamedTuple

from muon_lab.parallel import balance
from muon_lab.parallel.grid import even

POLICIES = ("hybrid", "whole")

#: The most pairs of a giant and a replica that are tried one by one; beyond, replicas are dealt out in blocks.
SEARCHED = 2**17


class Kind(NamedTuple):
    """Equal matrices that are dealt.

    Attributes
    ----------
    name : str
        Of their class.
    number, entries : int
        How many there are, and what one adds to what its owner holds.
    seconds : callable
        From the size of a team to what each of its members takes for one; the same for all sizes if it is not divided.
    """

    name: str
    number: int
    entries: int
    seconds: Callable[[int], float]


@dataclass(frozen=True)
class Owners:
    """The owner of every matrix, or its team.

    Attributes
    ----------
    kinds : tuple of str
        The classes.
    matrices : tuple of int
        The place in `kinds` of each matrix.
    first : tuple of int
        The replica that owns each, or the first of its team.
    teams : tuple of int
        How many replicas share a matrix of each class.
    owned : tuple of tuple of int
        Of each class, how many matrices each replica has, or has a part of.
    entries : tuple of int
        What each replica holds.
    makespan : float
        Seconds of the busiest replica.
    whole : float, optional
        The same if no matrix were divided; None if a cap on what a replica holds then leaves no room.
    policy : str
        One of `POLICIES`, as asked for.
    """

    kinds: tuple[str, ...]
    matrices: tuple[int, ...] = field(repr=False)
    first: tuple[int, ...] = field(repr=False)
    teams: tuple[int, ...]
    owned: tuple[tuple[int, ...], ...] = field(repr=False)
    entries: tuple[int, ...] = field(repr=False)
    makespan: float
    whole: float | None
    policy: str = "hybrid"

    @property
    def replicas(self) -> int:
        """How many there are."""
        return len(self.entries)

    @property
    def shared(self) -> dict[str, int]:
        """The size of the teams of each class whose matrices are divided."""
        return {name: team for name, team in zip(self.kinds, self.teams, strict=True) if team > 1}

    def row(self) -> dict[str, Any]:
        """Return it for JSON: replicas that have alike stand together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for replica, column in enumerate(zip(*self.owned, strict=True)):
            alike.setdefault(column, []).append(replica)
        return {
            "replicas": self.replicas,
            "policy": "hybrid" if self.shared else "lpt_flops",
            "makespan_seconds": self.makespan,
            "whole_makespan_seconds": self.whole,
            "entries_max_over_mean": spread(self.entries),
            "owned": [
                {
                    "replicas": replicas,
                    "matrices": {name: count for name, count in zip(self.kinds, column, strict=True) if count},
                }
                for column, replicas in alike.items()
            ],
            "teams": [
                {"matrix": self.kinds[kind], "replicas": list(range(first, first + self.teams[kind]))}
                for kind, first in zip(self.matrices, self.first, strict=True)
                if self.teams[kind] > 1
            ],
        }


def dealt(kinds: Sequence[Kind], replicas: int, *, policy: str = "hybrid", cap: float | None = None) -> Owners:
    """Deal matrices out, the dearest first.

    Parameters
    ----------
    kinds : sequence of Kind
        What there is.
    replicas : int
        Among how many.
    policy : {"hybrid", "whole"}
        Whether giants may be divided.
    cap : float, optional
        No replica holds more entries than so many times the mean.

    Raises
    ------
    ValueError
        If no replica has room for a matrix; names its class, and a cap that will do.

    Examples
    --------
    >>> giant, small = Kind("giant", 1, 80, lambda team: 8.0 / team), Kind("small", 4, 10, lambda team: 1.0 / team)
    >>> found = dealt([giant, small], replicas=4)
    >>> found.shared, found.makespan, found.whole, found.owned
    ({'giant': 4}, 3.0, 8.0, ((1, 1, 1, 1), (1, 1, 1, 1)))
    >>> dealt([giant, small], replicas=4, policy="whole").makespan
    8.0
    """
    try:
        return _dealt(kinds, replicas, policy, cap)
    except balance.NoRoom as refused:
        assert cap is not None
        raise _full(kinds, replicas, policy, cap, refused.job) from refused


def _full(kinds: Sequence[Kind], replicas: int, policy: str, cap: float, job: int) -> ValueError:
    """Say which matrix has no room under a cap, and what cap would do, in hundredths."""

    def fits(hundredths: int) -> bool:
        try:
            _dealt(kinds, replicas, policy, hundredths / 100)
        except balance.NoRoom:
            return False
        return True

    low = floor(100 * cap)
    high = 2 * low
    while not fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    kind = [kind for kind in kinds for _ in range(kind.number)][job]
    mean = sum(each.number * each.entries for each in kinds) / replicas
    return ValueError(
        f"cap is {cap:g} times the mean of {mean:.6g} entries, and no replica has room for another {kind.name!r} of "
        f"{kind.entries}, but a cap of {high / 100:g} leaves room for all"
    )


def _dealt(kinds: Sequence[Kind], replicas: int, policy: str, cap: float | None) -> Owners:
    """Deal matrices out; raises what `balance` does."""
    costs, entries = balance.expanded((kind.seconds(1), kind.entries, kind.number) for kind in kinds)
    matrices = tuple(place for place, kind in enumerate(kinds) for _ in range(kind.number))
    whole = refused = None
    try:
        whole = balance.lpt_flops(costs, replicas, entries, cap=cap)
    except ValueError as error:
        refused = error
    found, block = whole, 1
    if policy == "hybrid" and replicas > 1 and (whole is None or _uneven(costs, replicas)):
        size = _block(costs, replicas)
        shared = balance.hybrid(
            [kinds[kind].seconds(size) for kind in matrices],
            replicas // size,
            entries,
            divided=lambda job, team: kinds[matrices[job]].seconds(team * size),
            cap=cap,
        )
        if whole is None or shared.makespan < whole.makespan:
            found, block = shared, size
    if found is None:
        assert refused is not None
        raise refused
    return replace(_owners(kinds, matrices, found, block, whole.makespan if whole else None), policy=policy)


def _uneven(costs: Sequence[float], replicas: int) -> bool:
    """Tell whether matrices are long enough to stop the balance."""
    return max(costs, default=0.0) > balance.FINEST * sum(costs) / replicas


def _block(costs: Sequence[float], replicas: int) -> int:
    """Return how many replicas are dealt out together: 1 unless the search would be long."""
    limit = balance.FINEST * sum(costs) / replicas
    giants = sum(1 for cost in costs if cost > limit)
    fitting = (size for size in range(1, replicas) if replicas % size == 0 and giants * replicas <= SEARCHED * size)
    return next(fitting, replicas)


def _owners(
    kinds: Sequence[Kind], matrices: tuple[int, ...], found: balance.Assignment, block: int, whole: float | None
) -> Owners:
    """Write blocks out as replicas; all matrices of a class are divided alike, since they cost the same."""
    teams, replicas = [block] * len(kinds), found.ranks * block
    for team in found.teams:
        teams[matrices[team.job]] = len(team.members) * block
    owned, held = [[0] * replicas for _ in kinds], [0] * replicas
    for kind, owner in zip(matrices, found.owners, strict=True):
        for replica, part in enumerate(even(kinds[kind].entries, teams[kind], 0).sizes, owner * block):
            owned[kind][replica] += 1
            held[replica] += part
    return Owners(
        tuple(kind.name for kind in kinds),
        matrices,
        tuple(owner * block for owner in found.owners),
        tuple(teams),
        tuple(map(tuple, owned)),
        tuple(held),
        found.makespan,
        whole,
    )


def spread(values: Sequence[int] | Sequence[float]) -> float:
    """Return the most over the mean; 1 if there is nothing.

    Examples
    --------
    >>> spread([3, 1]), spread([0, 0])
    (1.5, 1.0)
    """
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0
