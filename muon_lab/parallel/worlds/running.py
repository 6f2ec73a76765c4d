"""What every rank does, wherever it runs: one thread for its products, the function, an account of what came of it."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from muon_lab.parallel.collectives import Collectives, Lost
from muon_lab.parallel.journal import Journal, Standing
from muon_lab.parallel.worlds.failures import RankRaised

Function = Callable[[Collectives], Any]

#: Seconds in which other ranks may fail too, once one has failed of its own accord.
GRACE = 0.2

#: Seconds in which the rank that it was may fail, once one has lost another.
LONG_GRACE = 2.0


@dataclass
class Outcome:
    """What came of one rank.

    Parameters
    ----------
    value : Any
        What the function returned.
    error : BaseException, optional
        What it raised instead.
    traceback : str
        Where, as text; "" if nothing was raised.
    lost : bool
        Whether it was raised because of another rank.
    standing : Standing, optional
        The calls that the rank has made.
    """

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    lost: bool = False
    standing: Standing | None = None

    @property
    def failed(self) -> bool:
        """Whether something was raised."""
        return bool(self.traceback)

    @property
    def grace(self) -> float:
        """Seconds that the other ranks are still waited for after this one."""
        return float("inf") if not self.failed else LONG_GRACE if self.lost else GRACE


def outcome(fn: Function, world: Collectives, journal: Journal) -> Outcome:
    """Run a function and say what came of it, whatever that is."""
    try:
        value = fn(world)
        if journal.unwaited():
            raise RuntimeError(f"rank {journal.rank} returned without waiting for its {journal.unwaited()}")
    except BaseException as error:
        return failure(error, journal)
    return Outcome(value, standing=journal.standing(returned=True))


def failure(error: BaseException, journal: Journal) -> Outcome:
    """Return the account of an exception."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return Outcome(None, error, text, isinstance(error, Lost), journal.standing())


def single_threaded() -> None:
    """Let products of this rank use one thread: ranks share the machine, and bits depend on the number of threads."""
    torch.set_num_threads(1)


def as_before(threads: int) -> None:
    """Let threads that start later use as many threads again."""
    torch.set_num_threads(threads)


def values(outcomes: Mapping[int, Outcome]) -> list[Any]:
    """Return what all ranks returned, by rank.

    Raises
    ------
    RankRaised
        If one raised something: the first that did so of its own accord, before those that lost the others.
    """
    raised = sorted(rank for rank, result in outcomes.items() if result.failed and not result.lost)
    blamed = raised or sorted(rank for rank, result in outcomes.items() if result.failed)
    if blamed:
        raise RankRaised(blamed, outcomes[blamed[0]].traceback) from outcomes[blamed[0]].error
    return [outcomes[rank].value for rank in sorted(outcomes)]
