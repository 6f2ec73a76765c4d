r"""The least makespan of whole jobs on equal ranks, by integer programming: exact, and slow beyond small cases.

With :math:`n_k` jobs of cost :math:`c_k` and :math:`x_{kr}` of them on rank r,

.. math:: \min T \quad \text{subject to} \quad \sum_r x_{kr} = n_k, \qquad \sum_k c_k x_{kr} \le T, \qquad
          x_{kr} \in \{0, 1, 2, \ldots\}.

Jobs of one cost are a kind, so the program grows with kinds and ranks, not with jobs. That ranks are alike is left to
the solver: putting their loads in order makes it slower.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, sparse


class Optimum(NamedTuple):
    """The best assignment that was found.

    Attributes
    ----------
    makespan : float
        Its largest load.
    bound : float
        No assignment has a smaller one; equal to the makespan, to the solver's tolerance, if the search ended.
    owners : tuple of int
        The rank of each job.
    """

    makespan: float
    bound: float
    owners: tuple[int, ...]


def optimal(costs: Sequence[float | int], ranks: int, seconds: float | int = 60.0) -> Optimum:
    """Return an assignment with the least makespan.

    Parameters
    ----------
    costs : sequence of float
        Of each job, at least one of them above 0.
    ranks : int
        How many there are.
    seconds : float
        After which the search gives up, with what it has found and the bound that it has proved.

    Raises
    ------
    ValueError
        Without a rank or a cost above 0, or if nothing was found in time.

    Examples
    --------
    >>> optimal([3, 3, 2, 2, 2], ranks=2).makespan  # longest first ends at 7
    6.0
    """
    if ranks < 1 or not any(cost > 0 for cost in costs) or min(costs) < 0:
        raise ValueError(f"optimal needs a rank and costs of at least 0, not all of them 0, not {ranks} and {costs!r}")
    kinds = Counter(costs)
    values, counts = np.array([*kinds], dtype=float), np.array([*kinds.values()])
    scale = max(values.max(), float(values @ counts) / ranks)  # makespans are near 1 then
    found = optimize.milp(
        c=np.append(np.zeros(len(kinds) * ranks), 1.0),
        integrality=np.append(np.ones(len(kinds) * ranks), 0.0),
        bounds=optimize.Bounds(0, np.append(np.repeat(counts, ranks), np.inf)),
        constraints=_constraints(values / scale, counts, ranks),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise ValueError(f"optimal found nothing in {seconds} s for {len(costs)} jobs on {ranks} ranks")
    placed = np.rint(found.x[:-1]).astype(int).reshape(len(kinds), ranks)
    return Optimum(
        float((values @ placed).max()), scale * float(found.mip_dual_bound), _owners(costs, placed, [*kinds])
    )


def _constraints(values: np.ndarray, counts: np.ndarray, ranks: int) -> list[optimize.LinearConstraint]:
    """Return: all jobs placed, and no load above T."""
    kinds, one = len(values), np.ones((1, ranks))
    every = sparse.hstack([sparse.kron(sparse.eye_array(kinds), one), sparse.coo_array((kinds, 1))], "csr")
    loads = sparse.kron(values[None, :], sparse.eye_array(ranks))
    below = sparse.hstack([loads, sparse.coo_array(-np.ones((ranks, 1)))], "csr")
    return [optimize.LinearConstraint(every, counts, counts), optimize.LinearConstraint(below, -np.inf, 0.0)]


def _owners(costs: Sequence[float | int], placed: np.ndarray, kinds: Sequence[float | int]) -> tuple[int, ...]:
    """Return the rank of each job: those of a kind in order, as many to each rank as it has."""
    queues = {
        kind: iter(np.repeat(np.arange(placed.shape[1]), row).tolist()) for kind, row in zip(kinds, placed, strict=True)
    }
    return tuple(next(queues[cost]) for cost in costs)
