r"""A link of any speed, without root: collectives whose results come no sooner than the link would bring them.

A call of b bytes, begun at :math:`t_0`, is there at

.. math:: t = \max(t_0, t_{free}) + \alpha + \beta b, \qquad t_{free} \leftarrow t,

since a rank has one link and its calls queue. b is the most that any rank sends in the call, by a named algorithm.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Shaped
from torch import Tensor

from muon_lab.parallel import algorithms
from muon_lab.parallel.calls import Call
from muon_lab.parallel.collectives import Collectives, Pending


@dataclass
class Link:
    """One rank's link: when it is free, and what it has done.

    Attributes
    ----------
    free : float
        When it has brought all that it has been given, in seconds of the clock.
    busy : float
        Seconds of transfer.
    waited : float
        Seconds that the rank has waited for results: transfer that nothing hid, and the other ranks.
    """

    free: float = -math.inf
    busy: float = 0.0
    waited: float = 0.0

    def carry(self, now: float, seconds: float) -> float:
        """Queue a transfer and return when it will be done."""
        self.free = max(now, self.free) + seconds
        self.busy += seconds
        return self.free


@dataclass
class _OnTheWay:
    """A call under way."""

    inner: Pending
    until: float
    link: Link
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def wait(self) -> Tensor:
        begun = self.clock()
        result = self.inner.wait()
        while (left := self.until - self.clock()) > 0:
            self.sleep(left)
        self.link.waited += self.clock() - begun
        return result


class SimulatedLink(Collectives):
    r"""Collectives over a link of a given latency and rate.

    Handles are those of the collectives within, which do the work; `wait` returns when that is done and the link would
    have brought it. Works over threads, gloo and NCCL alike. A rank that comes late is waited for, but its transfer is
    not: each rank reckons from when it made the call itself.

    Parameters
    ----------
    inner : Collectives
        What does the work.
    alpha : float
        Seconds a call takes, however small.
    beta : float
        Seconds a byte takes: 8e-8 is 100 Mbit/s.
    algorithm : str
        The family of algorithms that bytes are counted for, see `algorithms`.
    clock, sleep : callable
        What time it is, in seconds, and to let so many pass: real ones, or those of a test.

    Raises
    ------
    ValueError
        For an unknown algorithm, or a time that is negative or not finite.

    Examples
    --------
    A clock that only sleeping moves on, two seconds a call and one an entry:

    >>> from muon_lab.parallel import worlds
    >>> def program(world):
    ...     now = [0.0]
    ...     sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)
    ...     link = SimulatedLink(world, alpha=2.0, beta=0.25, clock=lambda: now[0], sleep=sleep)
    ...     first, second = link.all_reduce(torch.ones(6)), link.all_reduce(torch.ones(2))
    ...     sleep(7.0)
    ...     first.wait(), second.wait()
    ...     return now[0], link.link.busy, link.link.waited
    >>> worlds.run(program, ranks=2)[0]
    (12.0, 12.0, 5.0)
    """

    def __init__(
        self,
        inner: Collectives,
        alpha: float,
        beta: float,
        *,
        algorithm: str = "ring",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        link: Link | None = None,
    ) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not isinstance(value, Real) or not 0 <= value < math.inf:
                raise ValueError(f"{name} of a link is {value!r}, needed a finite time of at least 0")
        if algorithm not in algorithms.FAMILIES:
            raise ValueError(f"algorithm must be one of {', '.join(algorithms.FAMILIES)}, not {algorithm!r}")
        self.inner, self.ranks, self.rank = inner, inner.ranks, inner.rank
        self.alpha, self.beta, self.algorithm = alpha, beta, algorithm
        self.clock, self.sleep = clock, sleep
        self.link = link or Link()

    @property
    def device(self) -> torch.device:
        """Where tensors of this rank live."""
        return self.inner.device

    def seconds(self, call: Call) -> float:
        """Return how long the link is busy with a call; a group of one rank sends nothing and takes no time."""
        return duration(call, self.rank, self.alpha, self.beta, self.algorithm)

    def start(self, call: Call, x: Shaped[Tensor, "..."]) -> Pending:
        """Begin a call, and queue its bytes."""
        pending = self.inner.start(call, x)
        until = self.link.carry(self.clock(), self.seconds(call))
        return _OnTheWay(pending, until, self.link, self.clock, self.sleep)

    def subgroup(self, call: Call, places: tuple[int, ...]) -> "SimulatedLink":
        """Form a group that uses the same link."""
        return self._over(self.inner.subgroup(call, places))

    def tagged(self, **tags: object) -> "SimulatedLink":
        """Return these collectives with tags on what is recorded of their calls."""
        return self._over(self.inner.tagged(**tags))

    def _over(self, inner: Collectives) -> "SimulatedLink":
        return SimulatedLink(
            inner,
            self.alpha,
            self.beta,
            algorithm=self.algorithm,
            clock=self.clock,
            sleep=self.sleep,
            link=self.link,
        )


def duration(call: Call, rank: int, alpha: float, beta: float, algorithm: str = "ring") -> float:
    """Return the seconds of a call by the most that any rank sends; by what this one sends, in an all_to_all.

    Examples
    --------
    >>> from muon_lab.parallel import calls
    >>> duration(calls.all_reduce((10**6,), "float32", 2), rank=0, alpha=1e-3, beta=8e-8)
    0.321
    """
    if call.size == 1:
        return 0.0
    places = [rank] if call.verb == "all_to_all" else range(call.size)
    return alpha + beta * max(algorithms.sent(call, place, algorithm) for place in places)
