"""Ranks as threads of this process: nothing to start, nothing to copy, and a debugger sees them all."""

import ctypes
import queue
import sys
import threading
import traceback
from time import monotonic
from typing import Any

import torch

from muon_lab.parallel.rendezvous import Rendezvous
from muon_lab.parallel.worlds.failures import RankStuck, overdue
from muon_lab.parallel.worlds.running import Function, Outcome, as_before, outcome, single_threaded, values


class _Abandoned(BaseException):
    """Raised in a thread that is no longer waited for."""


def run(fn: Function, ranks: int, timeout: float, order: str) -> list[Any]:
    """Run a function on so many threads and return the results by rank.

    A thread that computes or sleeps past the timeout is told to end, which it does at its next line of Python; one that
    never comes back from compiled code ends with the process.

    Raises
    ------
    WorldFailed
        If a rank raises, or does not come to an end.
    """
    rendezvous = Rendezvous(ranks, order)
    finished: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()

    def rank(number: int) -> None:
        single_threaded()
        result = outcome(fn, rendezvous.world(number), rendezvous.journals[number])
        finished.put((number, result))
        if result.failed:
            rendezvous.break_off(result.error or RuntimeError())
        rendezvous.returned(number)

    threads = [
        threading.Thread(target=rank, args=(number,), daemon=True, name=f"rank {number}") for number in range(ranks)
    ]
    before = torch.get_num_threads()
    try:
        for thread in threads:
            thread.start()
        outcomes = _collect(rendezvous, finished, threads, timeout)
    except BaseException as error:
        rendezvous.break_off(error)
        _abandon(threads)
        raise
    finally:
        as_before(before)
    if rendezvous.stuck and not any(result.failed and not result.lost for result in outcomes.values()):
        raise RankStuck(tuple(rendezvous.stuck), "; ".join(rendezvous.stuck.values()))
    return values(outcomes)


def _collect(
    rendezvous: Rendezvous,
    finished: "queue.SimpleQueue[tuple[int, Outcome]]",
    threads: list[threading.Thread],
    timeout: float,
) -> dict[int, Outcome]:
    """Wait for all ranks, or for those that end soon after one has failed."""
    outcomes: dict[int, Outcome] = {}
    deadline = monotonic() + timeout
    while len(outcomes) < len(threads):
        try:
            rank, outcomes[rank] = finished.get(timeout=max(0.0, deadline - monotonic()))
        except queue.Empty:
            late = {rank: thread for rank, thread in enumerate(threads) if rank not in outcomes}
            if outcomes and any(result.failed for result in outcomes.values()):
                rendezvous.break_off(RuntimeError("abandoned"))
                _abandon(list(late.values()))
                return outcomes
            standings = {rank: rendezvous.journals[rank].standing() for rank in late}
            raise overdue(standings, timeout, {rank: _stack(thread) for rank, thread in late.items()}) from None
        deadline = min(deadline, monotonic() + outcomes[rank].grace)
    return outcomes


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame else ""


def _abandon(threads: list[threading.Thread]) -> None:
    """Raise in each thread, at its next line of Python."""
    for thread in threads:
        if thread.ident is not None and thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Abandoned))
