"""Which rank owns which parameter, as plain data: a policy is a function of costs, its result a rank for each.

>>> assigned(None, ["a", "b", "c"], [4, 2, 2], ranks=2)
(0, 1, 1)
>>> assigned({"a": 1, "b": 0, "c": 1}, ["a", "b", "c"], [4, 2, 2], ranks=2)
(1, 0, 1)
"""

from collections.abc import Callable, Mapping, Sequence

from muon_lab.nearest import unknown
from muon_lab.parallel import balance

#: From one cost a parameter and the number of ranks to one rank a parameter, as in `balance`.
Policy = Callable[[Sequence[int], int], Sequence[int]]

#: A policy, the rank of each parameter in order, or the rank by name.
Owners = Policy | Sequence[int] | Mapping[str, int]


def assigned(owners: Owners | None, names: Sequence[str], costs: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the owner of each parameter.

    Parameters
    ----------
    owners : policy, sequence of int or mapping of name to int, optional
        `balance.lpt_elements` without it.
    names : sequence of str
        Of the parameters, in order.
    costs : sequence of int
        Elements of each, or whatever the policy is to balance.
    ranks : int
        How many there are.

    Raises
    ------
    ValueError
        If a parameter has no owner, a name is unknown, there is not one owner a parameter, or an owner is no rank.

    Examples
    --------
    >>> assigned(lambda costs, ranks: [i % ranks for i in range(len(costs))], ["a", "b", "c"], [4, 2, 2], ranks=2)
    (0, 1, 0)
    """
    made = chosen(owners, costs, ranks)
    found = _ordered(made, names) if isinstance(made, Mapping) else tuple(made)
    if len(found) != len(names):
        raise ValueError(f"owners are {len(found)} ranks, needed one for each of {len(names)} parameters")
    for name, owner in zip(names, found, strict=True):
        if isinstance(owner, bool) or not isinstance(owner, int) or not 0 <= owner < ranks:
            raise ValueError(f"owner of {name} is {owner!r}, needed a rank of 0..{ranks - 1}")
    return found


def chosen(owners: Owners | None, costs: Sequence[int], ranks: int) -> Sequence[int] | Mapping[str, int]:
    """Return owners as they are given, or as a policy chooses them.

    Examples
    --------
    >>> chosen(balance.hybrid, [8, 1, 1], ranks=2).teams
    (Team(job=0, members=(0, 1), cost=4.0),)
    """
    if owners is None:
        return balance.lpt_elements(costs, ranks)
    return owners(costs, ranks) if callable(owners) else owners


def _ordered(owners: Mapping[str, int], names: Sequence[str]) -> tuple[int, ...]:
    for name in owners:
        if name not in names:
            raise unknown("parameter in owners", name, names)
    if missing := [name for name in names if name not in owners]:
        raise ValueError(f"owners name no rank for {', '.join(missing)}, needed one for each parameter")
    return tuple(owners[name] for name in names)
