"""Under `torchrun`, where the ranks are there already: this process is one of them."""

import atexit
import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from muon_lab.parallel.calls import Mismatch
from muon_lab.parallel.collectives import Collectives
from muon_lab.parallel.journal import Journal, Standing, uneven
from muon_lab.parallel.process_groups import Grouped
from muon_lab.parallel.worlds import by_value, worker
from muon_lab.parallel.worlds.failures import WorldFailed, overdue
from muon_lab.parallel.worlds.forked import START
from muon_lab.parallel.worlds.running import LONG_GRACE, Function, as_before, outcome, single_threaded, values


def detected() -> bool:
    """Whether the environment names a rank, the number of ranks and where they meet."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def number(name: str) -> int:
    """Return a number that the environment has.

    Raises
    ------
    ValueError
        If it is no whole number of at least 0.
    """
    text = os.environ[name]
    if not text.isdecimal():
        raise ValueError(f"the environment (torchrun) has {name}={text!r}, needed a whole number of at least 0")
    return int(text)


def run(fn: Function, ranks: int, backend: str, timeout: float, checked: bool) -> list[Any]:
    """Run a function as the rank that this process is, and return the results of all ranks, on every rank.

    A rank that raises or takes too long ends with an error, upon which `torchrun` ends the others. One that takes too
    long says what it waits for, and where it is, before it exits with status 1.

    Raises
    ------
    ValueError
        If other than the number of ranks that there are is asked for.
    RankRaised
        On the rank that raised.
    Mismatch
        On every rank, if one has made a call that others have not, having returned.
    """
    rank, present = number("RANK"), number("WORLD_SIZE")
    if ranks != present:
        raise ValueError(f"{ranks} ranks were asked for, but the environment (torchrun) has WORLD_SIZE={present}")
    local = number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    threads = torch.get_num_threads()
    single_threaded()
    try:
        if not dist.is_initialized():
            with _watched(START, lambda: f"rank {rank} did not find {ranks - 1} others within {START:g} s"):
                worker.join(backend, None, rank, ranks, local)
            atexit.register(_leave)
        journal = Journal(rank)
        world = Grouped(dist.group.WORLD, journal, checked=checked, device=worker.device(backend))
        with _watched(timeout, lambda: str(overdue({rank: journal.standing()}, timeout, {}))):
            (mine,) = values({rank: outcome(fn, world, journal)})
            return _everyones(mine, journal, world)
    finally:
        as_before(threads)


def _everyones(mine: Any, journal: Journal, world: Collectives) -> list[Any]:
    """Return the results of all ranks: the last call that ranks make, so that one call too many meets it.

    Raises
    ------
    ValueError
        If the result of this rank cannot be pickled.
    Mismatch, WorldFailed
        On every rank, if one has made more calls than another.
    """
    try:
        message = by_value.dumps((mine, journal.standing(returned=True)))
    except Exception as error:
        raise ValueError(f"what the function returned, a {type(mine).__name__}, cannot be pickled: {error}") from error
    try:
        length = torch.tensor([len(message)], dtype=torch.int64, device=world.device)
        lengths = world.all_gather(length).wait().flatten().tolist()
    except Mismatch as error:
        raise Mismatch(f"rank {journal.rank} has returned and gathers results, but {error}") from error
    flat = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(world.device)
    parts = world.all_gather_v(flat, lengths).wait().cpu().split(lengths)
    results: list[tuple[Any, Standing]] = [by_value.loads(part.numpy().tobytes()) for part in parts]
    if counts := uneven([standing for _, standing in results]):
        raise WorldFailed(range(world.size), counts)
    return [value for value, _ in results]


@contextmanager
def _watched(seconds: float, reason: Callable[[], str]) -> Iterator[None]:
    """End this process with a sentence and the stacks of its threads, unless the block is through in time.

    Compiled code that never lets Python run is ended too, a little later, with the stacks alone.
    """

    def end() -> None:
        try:
            print(reason(), file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + LONG_GRACE, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _leave() -> None:
    """Free the process groups and so end their threads: one that frees a tensor while Python ends aborts it."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
