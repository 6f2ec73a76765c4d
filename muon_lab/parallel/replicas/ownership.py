"""Which rank owns which parameter, as plain data: a policy is a function of costs, its result a rank for each.

>>> assigned(None, ["a", "b", "c"], [4, 2, 2], ranks=2)
(0, 1, 1)
>>> assigned({"a": 1, "b": 0, "c": 1}, ["a", "b", "c"], [4, 2, 2], ranks=2)
(1, 0, 1)
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from muon_lab.nearest import unknown
from muon_lab.parallel import balance
from muon_lab.parallel.balance import Costs, Price

#: From one cost a parameter and the number of ranks to one rank a parameter, as in `balance`; elements come too where a
#: parameter has that name.
Policy = Callable[..., Sequence[int]]

#: A policy or its name in `balance.POLICIES`, the rank of each parameter in order, or the rank by name.
Owners = Policy | str | Sequence[int] | Mapping[str, int]


def priced(
    matrices: Sequence[Sequence[tuple[int, int, int]]], elements: Sequence[int], price: Price | None = None
) -> list[float | int]:
    r"""Return what it costs to step each parameter, given the matrices that its optimizer finds in it.

    An m×n matrix costs :math:`m n \min(m, n)`, as an orthogonalization does but for a factor, and what is stepped entry
    by entry its elements. If matrices have a price of their own, entries cost in its unit: what an element of the above
    costs in the mean over all matrices.

    Parameters
    ----------
    matrices : sequence of sequence of (count, m, n)
        Of each parameter; none if it is stepped entry by entry.
    elements : sequence of int
        Of each parameter.
    price : callable or mapping, optional
        As in `balance.priced`.

    Raises
    ------
    ValueError
        For a shape without a price.

    Examples
    --------
    >>> priced([[(2, 3, 2)], []], [12, 7]), priced([[(2, 3, 2)], []], [12, 7], {(3, 2): 6.0})
    ([24, 7], [12.0, 3.5])
    """
    stacks = [stack for own in matrices for stack in own]
    cubes = [count * m * n * min(m, n) for count, m, n in stacks]
    if price is None:
        costs: Sequence[float | int] = cubes
    else:
        found = balance.priced([(m, n) for _, m, n in stacks], price)
        costs = [count * cost for (count, _, _), cost in zip(stacks, found, strict=True)]
    total = sum(cubes)
    unit = math.fsum(costs) / total if price is not None and total else 1
    ends = list(accumulate(map(len, matrices)))
    return [
        sum(costs[end - len(own) : end]) if own else unit * size
        for end, own, size in zip(ends, matrices, elements, strict=True)
    ]


def assigned(
    owners: Owners | None, names: Sequence[str], costs: Costs, ranks: int, elements: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the owner of each parameter.

    Parameters
    ----------
    owners : policy or its name, sequence of int or mapping of name to int, optional
        `balance.lpt_flops` without it.
    names : sequence of str
        Of the parameters, in order.
    costs : sequence of float
        What it costs to step each.
    ranks : int
        How many there are.
    elements : sequence of int, optional
        Of each.

    Raises
    ------
    ValueError
        If a parameter has no owner, a name of a parameter or a policy is unknown, there is not one owner a parameter,
        or an owner is no rank.

    Examples
    --------
    >>> assigned(lambda costs, ranks: [i % ranks for i in range(len(costs))], ["a", "b", "c"], [4, 2, 2], ranks=2)
    (0, 1, 0)
    """
    made = chosen(owners, costs, ranks, elements)
    if not isinstance(made, Iterable):
        raise ValueError(f"owners is {made!r}, needed a policy, its name, or one rank for each parameter")
    found = _ordered(made, names) if isinstance(made, Mapping) else tuple(made)
    if len(found) != len(names):
        raise ValueError(f"owners are {len(found)} ranks, needed one for each of {len(names)} parameters")
    for name, owner in zip(names, found, strict=True):
        if isinstance(owner, bool) or not isinstance(owner, int) or not 0 <= owner < ranks:
            raise ValueError(f"owner of {name} is {owner!r}, needed a rank of 0..{ranks - 1}")
    return found


def chosen(
    owners: Owners | None, costs: Costs, ranks: int, elements: Sequence[int] | None = None
) -> Sequence[int] | Mapping[str, int]:
    """Return owners as they are given, or as a policy chooses them.

    Examples
    --------
    >>> chosen(balance.hybrid, [8, 1, 1], ranks=2).teams
    (Team(job=0, members=(0, 1), cost=4.0),)
    >>> [chosen(name, [5.0, 3.0, 3.0], 2, elements=[1, 4, 4]).owners for name in ("lpt_flops", "lpt_elements")]
    [(0, 1, 1), (0, 0, 1)]
    """
    if owners is None:
        owners = balance.lpt_flops
    if isinstance(owners, str):
        if owners not in balance.POLICIES:
            raise unknown("policy of owners", owners, balance.POLICIES)
        owners = balance.POLICIES[owners]
    if not callable(owners):
        return owners
    return owners(costs, ranks, elements=elements) if _takes_elements(owners) else owners(costs, ranks)


def _takes_elements(policy: Callable[..., Any]) -> bool:
    return "elements" in inspect.signature(policy).parameters


def _ordered(owners: Mapping[str, int], names: Sequence[str]) -> tuple[int, ...]:
    for name in owners:
        if name not in names:
            raise unknown("parameter in owners", name, names)
    if missing := [name for name in names if name not in owners]:
        raise ValueError(f"owners name no rank for {', '.join(missing)}, needed one for each parameter")
    return tuple(owners[name] for name in names)
