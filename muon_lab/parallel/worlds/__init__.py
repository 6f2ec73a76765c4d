"""Worlds of ranks: one function, run on every rank, and the results by rank.

>>> import torch
>>> from muon_lab.parallel import worlds
>>> worlds.run(lambda world: world.all_gather(torch.tensor(world.rank)).wait().tolist(), ranks=2)
[[0, 1], [0, 1]]
"""

from collections.abc import Callable
from numbers import Real
from typing import TypeVar

from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.orders import ORDERS
from muon_lab.parallel.worlds import forked, threads, torchrun
from muon_lab.parallel.worlds.failures import RankDied, RankRaised, RankStuck, WorldFailed
from muon_lab.parallel.worlds.forked import close

__all__ = ["BACKENDS", "RankDied", "RankRaised", "RankStuck", "WorldFailed", "close", "run"]

BACKENDS = ("threads", "gloo", "nccl")

#: Seconds that no clock outlasts, 31 years: as long as a world without a limit may take.
FOREVER = 1e9

T = TypeVar("T")


def run(
    fn: Callable[[Collectives], T],
    ranks: int,
    backend: str = "threads",
    *,
    timeout: float | int = 60.0,
    order: str = "ring",
    checked: bool = True,
) -> list[T]:
    """Run a function on every rank of a world and return what it returned, by rank.

    Each rank is handed its end of the world, on which it calls collectives. It computes with one thread, since ranks
    share the machine. Where processes run, the environment of `torchrun` is looked for first: then this process is one
    rank of a world that exists, and every rank gets all results.

    Parameters
    ----------
    fn : callable
        From the rank's `Collectives` to a result. For processes it must be importable by name, its result picklable;
        `functools.partial` gives it arguments.
    ranks : int
        Number of ranks.
    backend : {"threads", "gloo", "nccl"}
        Threads of this process; processes that talk over sockets; processes with one GPU each.
    timeout : float
        Seconds in which the function must return on every rank, starting up not counted; ``inf`` for no limit.
    order : str
        The order of sums between threads: "ring" gives the bits of gloo, see `orders`.
    checked : bool
        Whether processes compare what they ask for before each call: small ones take two to four times as long, and
        calls begin together. For measurements of time and of wire bytes, switch it off. Threads always compare.

    Returns
    -------
    list
        The results, by rank.

    Raises
    ------
    ValueError
        For an unknown backend or order, a number of ranks below 1, a timeout that is not positive, a function that
        cannot be handed over, or a backend that this machine cannot run.
    RankRaised
        If a rank raises an exception: it is the cause, with rank and traceback in the text.
    RankDied
        If the process of a rank ends.
    RankStuck
        If a rank does not return in time, or ranks wait for what can never come.

    Examples
    --------
    >>> import torch
    >>> run(lambda world: world.broadcast(torch.full((2,), float(world.rank)), root=1).wait().tolist(), ranks=2)
    [[1.0, 1.0], [1.0, 1.0]]
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend of a world must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if order not in ORDERS:
        raise ValueError(f"order of a reduction must be one of {', '.join(ORDERS)}, not {order!r}")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"a world needs a whole number of ranks, at least 1, not {ranks!r}")
    if not isinstance(timeout, Real) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    seconds = min(float(timeout), FOREVER)
    if backend == "threads":
        return threads.run(fn, ranks, seconds, order)
    if torchrun.detected():
        return torchrun.run(fn, ranks, backend, seconds, checked)
    return forked.run(fn, ranks, backend, seconds, checked)
