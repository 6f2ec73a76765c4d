"""How a world ends that does not end well."""

from collections.abc import Mapping, Sequence

from muon_lab.parallel.calls import named
from muon_lab.parallel.journal import Standing, waiting


class WorldFailed(RuntimeError):
    """A world of ranks ended without results.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that it failed for.
    """

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    @property
    def rank(self) -> int:
        """The first of them."""
        return self.ranks[0]


class RankRaised(WorldFailed):
    """A rank raised an exception, which is the cause of this one where it can be handed over.

    Attributes
    ----------
    traceback : str
        Where the exception came from, on that rank.
    """

    def __init__(self, ranks: Sequence[int], traceback: str) -> None:
        also = f" (so did {named(ranks[1:])})" if len(ranks) > 1 else ""
        super().__init__(ranks, f"rank {ranks[0]} raised an exception{also}:\n\n{traceback}")
        self.traceback = traceback


class RankDied(WorldFailed):
    """The process of a rank ended before its function had returned."""


class RankStuck(WorldFailed):
    """A rank did not come to an end, or can never do so."""


def overdue(standings: Mapping[int, Standing], timeout: float, stacks: Mapping[int, str]) -> RankStuck:
    """Return the error for ranks that did not return in time: it names those that keep the others waiting.

    Examples
    --------
    >>> from muon_lab.parallel.journal import Group, Standing, Wait
    >>> waits = Standing({}, Wait(Group((0, 1), 0), 1, "barrier"))
    >>> print(overdue({0: waits, 1: Standing({})}, 2.0, {1: "in sleep"}))
    rank 1 did not return within 2 s; rank 0 waits in barrier (call 1 of ranks 0, 1)
    <BLANKLINE>
    rank 1 was here:
    in sleep
    """
    computing = [rank for rank, standing in standings.items() if standing.wait is None]
    waits = [waiting(rank, standing) for rank, standing in standings.items() if standing.wait is not None]
    blamed = computing or list(standings)
    message = "; ".join([f"{named(blamed)} did not return within {timeout:g} s", *waits])
    where = [f"rank {rank} was here:\n{stacks[rank]}" for rank in blamed if stacks.get(rank)]
    return RankStuck(blamed, "\n\n".join([message, *where]))
